// SPDX-License-Identifier: Apache-2.0
// Picks the kernel of a call: streaming ones for the common pairs of types, generic ones else.
#include "cuda/stream.h"
#include "cuda/token_divergence.h"
#include "trm/kernels/stream_divergence.cuh"
#include "trm/kernels/token_divergence.cuh"

namespace trm::cuda {

namespace {

// The streaming launcher of a pair of types; called only where the plan says that there is one.
template <typename Pick>
cudaError_t by_types(StorageType rollout, StorageType train, const Pick& pick) {
  const auto is = [&](StorageType a, StorageType b) { return rollout == a && train == b; };
#define TRM_STREAM_PICK(name, Rollout, Train)                                 \
  if (is(kernels::Packing<Rollout>::kType, kernels::Packing<Train>::kType)) { \
    return pick(&stream_divergence_##name, &stream_gradient_##name);          \
  }
  TRM_STREAM_PAIRS(TRM_STREAM_PICK)
#undef TRM_STREAM_PICK
  return cudaErrorNotSupported;
}

cudaError_t forward_sweep(const StreamPlan& plan, const DivergenceArgs& args,
                          const DivergenceOutputs& out, cudaStream_t stream) {
  if (!plan.streamed) return kernels::launch_token_divergence(args, out, stream);
  const cudaError_t status = by_types(args.rollout.type, args.train.type, [&](auto forward, auto) {
    return forward(args, out, plan, stream);
  });
  if (status != cudaSuccess || plan.blocks_per_row == 1) return status;
  return kernels::launch_merge_regions(args, out, stream);
}

}  // namespace

cudaError_t forward_workspace(const DivergenceArgs& args, int64_t& bytes) {
  DeviceFacts device;
  const cudaError_t status = current_device(device);
  bytes = status == cudaSuccess ? plan_stream(device, args).workspace_bytes : 0;
  return status;
}

cudaError_t token_divergence(const DivergenceArgs& args, const DivergenceOutputs& out,
                             cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  DeviceFacts device;
  cudaError_t status = current_device(device);
  if (status != cudaSuccess) return status;
  status = forward_sweep(plan_stream(device, args), args, out, stream);
  const bool wants_diagnostics = out.state == nullptr && (args.outputs & kDiagnosticOutputs) != 0;
  if (status != cudaSuccess || !wants_diagnostics) return status;
  return out.wide ? kernels::launch_diagnostics<double>(args, out, stream)
                  : kernels::launch_diagnostics<float>(args, out, stream);
}

cudaError_t token_divergence_backward(const DivergenceBackwardArgs& args, cudaStream_t stream) {
  if (args.forward.rows == 0 || args.columns == 0) return cudaSuccess;
  DeviceFacts device;
  const cudaError_t status = current_device(device);
  if (status != cudaSuccess) return status;
  const GradientPlan plan = plan_gradient(device, args);
  if (plan.streamed) {
    return by_types(args.forward.rollout.type, args.forward.train.type,
                    [&](auto, auto backward) { return backward(args, plan, stream); });
  }
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
