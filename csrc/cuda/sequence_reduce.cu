// SPDX-License-Identifier: Apache-2.0
#include "cuda/sequence_reduce.h"
#include "trm/kernels/sequence_reduce.cuh"

namespace trm::cuda {

cudaError_t sequence_reduce(const SequenceArgs& args, const SequenceOutputs& out,
                            cudaStream_t stream) {
  return kernels::launch_sequence_reduce(args, out, stream);
}

cudaError_t sequence_verdict(const SequenceArgs& args, const VerdictRule& rule,
                             const VerdictOutputs& out, cudaStream_t stream) {
  return kernels::launch_sequence_verdict(args, rule, out, stream);
}

}  // namespace trm::cuda
