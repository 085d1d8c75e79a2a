// SPDX-License-Identifier: Apache-2.0
// Launchers of the CUDA kernels; nothing here needs torch.
#pragma once

#include "trm/divergence_args.h"

namespace trm::cuda {

// Bytes that DivergenceOutputs.workspace must have for this call on the current device.
cudaError_t forward_workspace(const DivergenceArgs& args, int64_t& bytes);
cudaError_t token_divergence(const DivergenceArgs& args, const DivergenceOutputs& out,
                             cudaStream_t stream);
cudaError_t token_divergence_backward(const DivergenceBackwardArgs& args, cudaStream_t stream);
cudaError_t divergence_state_merge(const void* states, void* merged, bool wide, int64_t parts,
                                   int64_t rows, cudaStream_t stream);
cudaError_t divergence_finish(const void* states, bool wide, uint32_t outputs, void* values,
                              double* statistics, int64_t rows, cudaStream_t stream);

}  // namespace trm::cuda
