// SPDX-License-Identifier: Apache-2.0
// What the race lane must report whatever the schedule (race_*), and what it must not (fine_*).
#include "harness.h"
#include "trm/portability.h"

namespace {

using harness::Heap;

constexpr unsigned kFull = 0xffffffffu;

// A shuffle exchanges registers; it does not make a store visible to the other lanes.
template <bool kOrdered>
__global__ void exchange_kernel(float* out) {
  TRM_SHARED(tile, float[32]);
  tile[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (kOrdered) {
    __syncwarp();  // the warp's stores before its loads
  } else {
    __shfl_xor_sync(kFull, 1, 1);
  }
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

// Lanes ordered among themselves, but not with the other warp.
__global__ void warps_kernel(float* out) {
  TRM_SHARED(tile, float[64]);
  tile[threadIdx.x] = 1.0f;
  __syncwarp();  // orders the warp, and the block it does not
  out[threadIdx.x] = tile[threadIdx.x ^ 32];
}

// Blocks are not ordered with each other by anything but the end of the launch.
template <bool kAtomic>
__global__ void blocks_kernel(unsigned* total) {
  if (threadIdx.x != 0) return;
  if (kAtomic) {
    atomicAdd(total, 1u);
  } else {
    *total += 1u;
  }
}

__global__ void mixed_kernel(unsigned* total) {
  if (threadIdx.x == 0) atomicAdd(total, 1u);
  if (threadIdx.x == 1) *total += 1u;
}

// Publishing through a counter needs a fence on each side of it.
template <bool kBefore, bool kAfter>
__global__ void publish_kernel(float* parts, unsigned* count, float* total) {
  if (threadIdx.x != 0) return;
  parts[blockIdx.x] = 1.0f;
  if (kBefore) __threadfence();
  const bool last = atomicAdd(count, 1u) == gridDim.x - 1;
  if (kAfter) __threadfence();
  if (!last) return;
  float sum = 0.0f;
  for (unsigned block = 0; block < gridDim.x; ++block) sum += parts[block];
  *total = sum;
}

template <bool kOrdered>
void exchange() {
  Heap<float> out(32);
  trm::launch({dim3(1), dim3(32)}, &exchange_kernel<kOrdered>, out.data());
}

void warps() {
  Heap<float> out(64);
  trm::launch({dim3(1), dim3(64)}, &warps_kernel, out.data());
}

template <bool kAtomic>
void blocks() {
  Heap<unsigned> total(1);
  trm::launch({dim3(4), dim3(32)}, &blocks_kernel<kAtomic>, total.data());
  harness::expect(total[0] == 4, "total");
}

void mixed() {
  Heap<unsigned> total(1);
  trm::launch({dim3(1), dim3(32)}, &mixed_kernel, total.data());
}

template <bool kBefore, bool kAfter>
void publish() {
  Heap<float> parts(4), total(1);
  Heap<unsigned> count(1);
  trm::launch({dim3(4), dim3(32)}, &publish_kernel<kBefore, kAfter>, parts.data(), count.data(),
              total.data());
  harness::expect(total[0] == 4.0f, "total");
}

// Two launches in a row are ordered.
void launches() {
  Heap<unsigned> total(1);
  trm::launch({dim3(1), dim3(32)}, &blocks_kernel<false>, total.data());
  trm::launch({dim3(1), dim3(32)}, &blocks_kernel<false>, total.data());
  harness::expect(total[0] == 2, "total");
}

}  // namespace

int main(int count, char** arguments) {
  return harness::run({{"race_shuffle_is_no_fence", exchange<false>},
                       {"race_other_warp", warps},
                       {"race_between_blocks", blocks<false>},
                       {"race_plain_next_to_atomic", mixed},
                       {"race_publish_without_fence", publish<false, true>},
                       {"race_consume_without_fence", publish<true, false>},
                       {"fine_syncwarp", exchange<true>},
                       {"fine_atomics", blocks<true>},
                       {"fine_publish", publish<true, true>},
                       {"fine_launches", launches}},
                      count, arguments);
}
