// SPDX-License-Identifier: Apache-2.0
#include "cuda/stream.h"
#include "trm/kernels/stream_divergence.cuh"
#include "trm/kernels/stream_gradient.cuh"

namespace trm::cuda {

TRM_STREAM_DEFINE(fp32, float, float)

}  // namespace trm::cuda
