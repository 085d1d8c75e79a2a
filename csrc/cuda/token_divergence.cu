// SPDX-License-Identifier: Apache-2.0
// Instantiations: float lanes for fp32, bf16 and fp16 logits, double lanes where an input is fp64.
#include "cuda/token_divergence.h"
#include "trm/kernels/token_divergence.cuh"

namespace trm::cuda {

cudaError_t token_divergence(const DivergenceArgs& args, const DivergenceOutputs& out,
                             cudaStream_t stream) {
  return out.wide ? kernels::launch_token_divergence<double>(args, out, stream)
                  : kernels::launch_token_divergence<float>(args, out, stream);
}

cudaError_t token_divergence_backward(const DivergenceBackwardArgs& args, cudaStream_t stream) {
  return args.wide ? kernels::launch_token_divergence_backward<double>(args, stream)
                   : kernels::launch_token_divergence_backward<float>(args, stream);
}

cudaError_t divergence_state_merge(const void* states, void* merged, bool wide, int64_t parts,
                                   int64_t rows, cudaStream_t stream) {
  if (wide) {
    return kernels::launch_state_merge(static_cast<const double*>(states),
                                       static_cast<double*>(merged), parts, rows, stream);
  }
  return kernels::launch_state_merge(static_cast<const float*>(states), static_cast<float*>(merged),
                                     parts, rows, stream);
}

cudaError_t divergence_finish(const void* states, bool wide, uint32_t outputs, void* values,
                              double* statistics, int64_t rows, cudaStream_t stream) {
  if (wide) {
    return kernels::launch_finish(static_cast<const double*>(states), outputs,
                                  static_cast<double*>(values), statistics, rows, stream);
  }
  return kernels::launch_finish(static_cast<const float*>(states), outputs,
                                static_cast<float*>(values), statistics, rows, stream);
}

}  // namespace trm::cuda
