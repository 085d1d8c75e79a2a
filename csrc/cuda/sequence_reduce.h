// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "trm/sequence_reduce.h"

namespace trm::cuda {

cudaError_t sequence_reduce(const SequenceArgs& args, const SequenceOutputs& out,
                            cudaStream_t stream);
cudaError_t sequence_verdict(const SequenceArgs& args, const VerdictRule& rule,
                             const VerdictOutputs& out, cudaStream_t stream);

}  // namespace trm::cuda
