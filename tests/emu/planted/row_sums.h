// SPDX-License-Identifier: Apache-2.0
// A row kernel with everything kernels here are made of (wide rows, vector loads with a head and a
// tail, warp shuffles, shared memory used twice) and one planted bug, chosen at compile time.
//   sums[row] = (sum over v of exp(x_v), sum over v of x_v exp(x_v))
#pragma once

#include "trm/portability.h"

namespace planted {

enum class Bug {
  kNone,
  kMissingBarrierAfterWrite,
  kMissingBarrierBeforeReuse,
  kWrongMask,
  kSharedIndexOffByOne,
  kRowOffset32Bit,
  kMisalignedVectorLoad,
  kLostTail,
  kPhantomColumn,
  kMergeOrder,
  kUninitialisedAccumulator,
  kEarlyReturn,
  kWrongShuffleLane,
};

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kFull = 0xffffffffu;

struct alignas(16) Float4 {
  float values[4];
};

// Called by every thread; valid in all of them. The storage may be used again on return.
template <Bug bug>
__device__ float block_sum(float value) {
  TRM_SHARED(parts, float[kWarps]);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  constexpr unsigned kMask = bug == Bug::kWrongMask ? 0x7fffffffu : kFull;
  for (int offset = 16; offset > 0; offset /= 2) {
    if constexpr (bug == Bug::kWrongShuffleLane) {
      value += __shfl_down_sync(kMask, value, static_cast<unsigned>(offset + 1) / 2);
    } else {
      value += __shfl_down_sync(kMask, value, static_cast<unsigned>(offset));
    }
  }
  if constexpr (bug == Bug::kMergeOrder) {
    TRM_SHARED(total, float);
    if (threadIdx.x == 0) total = 0.0f;
    __syncthreads();  // zero before the additions
    if (lane == 0) atomicAdd(&total, value);
    __syncthreads();  // additions before the result is read
    const float sum = total;
    __syncthreads();  // loads before the next call's zero
    return sum;
  }
  if (lane == 0) parts[bug == Bug::kSharedIndexOffByOne ? warp + 1 : warp] = value;
  if constexpr (bug != Bug::kMissingBarrierAfterWrite) {
    __syncthreads();  // the warps' parts before anybody adds them up
  }
  float sum = 0.0f;
  for (int i = 0; i < kWarps; ++i) sum += parts[bug == Bug::kSharedIndexOffByOne ? i + 1 : i];
  if constexpr (bug != Bug::kMissingBarrierBeforeReuse) {
    __syncthreads();  // every load of this call before the next call's stores
  }
  return sum;
}

__device__ inline void add(float x, float& mass, float& first) {
  const float weight = trm::exponential(x);
  mass += weight;
  first += x * weight;
}

template <Bug bug>
__global__ void row_sums_kernel(const float* data, int64_t row_stride, int64_t vocab, float* sums) {
  const int64_t thread = threadIdx.x;
  const int64_t row = blockIdx.x;
  if constexpr (bug == Bug::kEarlyReturn) {
    if (thread / 32 * 32 >= vocab) return;  // a warp without columns goes home
  }
  const float* x = data + row * row_stride;
  if constexpr (bug == Bug::kRowOffset32Bit) {
    x = data + static_cast<int>(row) * static_cast<int>(row_stride);
  }
  float mass, first = 0.0f;
  if constexpr (bug != Bug::kUninitialisedAccumulator) mass = 0.0f;
  const auto address = reinterpret_cast<uintptr_t>(x);
  int64_t head = static_cast<int64_t>((16 - address % 16) % 16 / 4);
  if (bug == Bug::kMisalignedVectorLoad) head = 0;
  if (head > vocab) head = vocab;
  const int64_t vectors = (vocab - head) / 4;
  for (int64_t i = thread; i < vectors; i += kThreads) {
    const Float4 four = trm::load_vector<Float4>(x + head + 4 * i);
    for (const float value : four.values) add(value, mass, first);
  }
  if (thread < head) add(x[thread], mass, first);
  const int64_t tail = head + 4 * vectors;
  if constexpr (bug == Bug::kPhantomColumn) {
    if (thread < 4 && tail < vocab) {
      add(tail + thread < vocab ? x[tail + thread] : 0.0f, mass, first);
    }
  } else if constexpr (bug != Bug::kLostTail) {
    if (tail + thread < vocab) add(x[tail + thread], mass, first);
  }
  mass = block_sum<bug>(mass);
  first = block_sum<bug>(first);
  if (thread == 0) {
    sums[2 * row] = mass;
    sums[2 * row + 1] = first;
  }
}

}  // namespace planted
