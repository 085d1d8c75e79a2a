// SPDX-License-Identifier: Apache-2.0
// The streaming kernels by pair of storage types, one translation unit each.
#pragma once

#include "trm/launch_plan.h"

#define TRM_STREAM_PAIRS(pair)                                                         \
  pair(bf16, BFloat16, BFloat16) pair(fp16, Float16, Float16) pair(fp32, float, float) \
      pair(bf16_fp32, BFloat16, float) pair(fp32_bf16, float, BFloat16)

#define TRM_STREAM_DECLARE(name, Rollout, Train)                                                   \
  cudaError_t stream_divergence_##name(const DivergenceArgs& args, const DivergenceOutputs& out,   \
                                       const StreamPlan& plan, cudaStream_t stream);               \
  cudaError_t stream_gradient_##name(const DivergenceBackwardArgs& args, const GradientPlan& plan, \
                                     cudaStream_t stream);

#define TRM_STREAM_DEFINE(name, Rollout, Train)                                                    \
  cudaError_t stream_divergence_##name(const DivergenceArgs& args, const DivergenceOutputs& out,   \
                                       const StreamPlan& plan, cudaStream_t stream) {              \
    return kernels::launch_stream_divergence<Rollout, Train>(args, out, plan, stream);             \
  }                                                                                                \
  cudaError_t stream_gradient_##name(const DivergenceBackwardArgs& args, const GradientPlan& plan, \
                                     cudaStream_t stream) {                                        \
    return kernels::launch_stream_gradient<Rollout, Train>(args, plan, stream);                    \
  }

namespace trm::cuda {

TRM_STREAM_PAIRS(TRM_STREAM_DECLARE)

}  // namespace trm::cuda
