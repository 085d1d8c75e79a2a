// SPDX-License-Identifier: Apache-2.0
#include "cuda/stream.h"
#include "trm/kernels/stream_divergence.cuh"
#include "trm/kernels/stream_gradient.cuh"

namespace trm::cuda {

TRM_STREAM_DEFINE(bf16_fp32, BFloat16, float)

}  // namespace trm::cuda
