// SPDX-License-Identifier: Apache-2.0
// Each of the emulator's collectives against its specification, written down a second time here.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "harness.h"
#include "trm/portability.h"

namespace {

using harness::expect;
using harness::Heap;

constexpr unsigned kFull = 0xffffffffu;

// One warp, or the lanes of a mask, runs `Body(lane) -> uint64_t`; the answers are compared.
template <typename Body>
__global__ void warp_kernel(unsigned mask, Body body, uint64_t* out) {
  const unsigned lane = threadIdx.x;
  if (mask >> lane & 1u) out[lane] = static_cast<uint64_t>(body(lane));
}

template <typename Body, typename Specification>
void warp_case(const char* name, unsigned mask, Body body, Specification specification) {
  Heap<uint64_t> out(32, 0x5555);
  trm::emu::Buffers buffers;
  buffers.updates("out", out.data(), out.bytes());
  // A parameter of closure type is what a kernel argument is: copied, and read by every lane.
  trm::launch({dim3(1), dim3(32)}, &warp_kernel<Body>, mask, body, out.data());
  for (unsigned lane = 0; lane < 32; ++lane) {
    const uint64_t want =
        mask >> lane & 1u ? static_cast<uint64_t>(specification(lane)) : uint64_t{0x5555};
    expect(out[lane] == want, std::string(name) + ", lane " + std::to_string(lane) + ": " +
                                  std::to_string(out[lane]) + ", not " + std::to_string(want));
  }
}

int value_of(unsigned lane) { return static_cast<int>(lane * 7 % 11) - 4; }

void shuffles() {
  for (const int width : {32, 16, 8, 2}) {
    const unsigned w = static_cast<unsigned>(width);
    for (const unsigned by : {0u, 1u, 3u, 5u, 31u}) {
      warp_case(
          "__shfl_sync", kFull,
          [=](unsigned lane) {
            return __shfl_sync(kFull, value_of(lane), static_cast<int>(by), width);
          },
          [=](unsigned lane) { return value_of(lane / w * w + by % w); });
      warp_case(
          "__shfl_up_sync", kFull,
          [=](unsigned lane) { return __shfl_up_sync(kFull, value_of(lane), by, width); },
          [=](unsigned lane) { return value_of(lane % w >= by ? lane - by : lane); });
      warp_case(
          "__shfl_down_sync", kFull,
          [=](unsigned lane) { return __shfl_down_sync(kFull, value_of(lane), by, width); },
          [=](unsigned lane) { return value_of(lane % w + by < w ? lane + by : lane); });
      warp_case(
          "__shfl_xor_sync", kFull,
          [=](unsigned lane) {
            return __shfl_xor_sync(kFull, value_of(lane), static_cast<int>(by), width);
          },
          [=](unsigned lane) { return value_of((lane ^ by) / w > lane / w ? lane : lane ^ by); });
    }
  }
  warp_case(
      "__shfl_sync by lane", kFull,
      [](unsigned lane) { return __shfl_sync(kFull, value_of(lane), static_cast<int>(31 - lane)); },
      [](unsigned lane) { return value_of(31 - lane); });
  warp_case(
      "__shfl_xor_sync of double", kFull,
      [](unsigned lane) { return 1e300 * __shfl_xor_sync(kFull, lane * 1e-300, 16) + 0.25; },
      [](unsigned lane) { return lane ^ 16u; });
}

void half_warps() {
  // The two halves work apart and in opposite order; then the warp meets.
  warp_case(
      "halves", kFull,
      [](unsigned lane) {
        const unsigned mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
        const unsigned sum = __reduce_add_sync(mask, lane);
        return __shfl_xor_sync(kFull, sum, 16);
      },
      [](unsigned lane) { return lane < 16 ? 376u : 120u; });
  warp_case(
      "even lanes", 0x55555555u,
      [](unsigned lane) { return __shfl_down_sync(0x55555555u, lane, 2); },
      [](unsigned lane) { return lane + 2 < 32 ? lane + 2 : lane; });
}

void votes() {
  const unsigned mask = 0x0ff0ff0fu;
  for (const int threshold : {-1, 0, 5, 31, 40}) {
    const auto predicate = [=](unsigned lane) { return static_cast<int>(lane) <= threshold; };
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1u) && predicate(lane)) ballot |= 1u << lane;
    }
    warp_case(
        "__all_sync", mask, [=](unsigned lane) { return __all_sync(mask, predicate(lane)); },
        [=](unsigned) { return ballot == mask; });
    warp_case(
        "__any_sync", mask, [=](unsigned lane) { return __any_sync(mask, predicate(lane)); },
        [=](unsigned) { return ballot != 0; });
    warp_case(
        "__ballot_sync", mask, [=](unsigned lane) { return __ballot_sync(mask, predicate(lane)); },
        [=](unsigned) { return ballot; });
  }
}

void matches() {
  const unsigned mask = 0x7fffffffu;
  warp_case(
      "__match_any_sync", mask,
      [=](unsigned lane) { return __match_any_sync(mask, value_of(lane)); },
      [=](unsigned lane) {
        unsigned same = 0;
        for (unsigned other = 0; other < 31; ++other) {
          if (value_of(other) == value_of(lane)) same |= 1u << other;
        }
        return same;
      });
  for (const bool equal : {true, false}) {
    warp_case(
        "__match_all_sync", mask,
        [=](unsigned lane) {
          int predicate = 7;
          const unsigned found =
              __match_all_sync(mask, equal || lane != 9 ? 1.5f : 2.5f, &predicate);
          return uint64_t{found} * 2 + static_cast<unsigned>(predicate);
        },
        [=](unsigned) { return equal ? uint64_t{mask} * 2 + 1 : uint64_t{0}; });
  }
}

template <typename T, typename Operation>
T folded(unsigned mask, T (*value)(unsigned), Operation operation) {
  bool first = true;
  T result{};
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    result = first ? value(lane) : operation(result, value(lane));
    first = false;
  }
  return result;
}

unsigned word_of(unsigned lane) { return lane * 2654435761u; }

void reductions() {
  const unsigned mask = 0xfff0f0ffu;
#define REDUCTION(function, value, operation)                                      \
  warp_case(                                                                       \
      #function, mask, [=](unsigned lane) { return function(mask, value(lane)); }, \
      [=](unsigned) { return folded(mask, &value, operation); })
  REDUCTION(__reduce_add_sync, word_of, [](unsigned a, unsigned b) { return a + b; });
  REDUCTION(__reduce_min_sync, word_of, [](unsigned a, unsigned b) { return std::min(a, b); });
  REDUCTION(__reduce_max_sync, word_of, [](unsigned a, unsigned b) { return std::max(a, b); });
  REDUCTION(__reduce_and_sync, word_of, [](unsigned a, unsigned b) { return a & b; });
  REDUCTION(__reduce_or_sync, word_of, [](unsigned a, unsigned b) { return a | b; });
  REDUCTION(__reduce_xor_sync, word_of, [](unsigned a, unsigned b) { return a ^ b; });
  REDUCTION(__reduce_add_sync, value_of, [](int a, int b) { return a + b; });
  REDUCTION(__reduce_min_sync, value_of, [](int a, int b) { return std::min(a, b); });
  REDUCTION(__reduce_max_sync, value_of, [](int a, int b) { return std::max(a, b); });
#undef REDUCTION
}

__global__ void barrier_kernel(int* out) {
  TRM_SHARED(tile, int[96]);
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int round = 0; round < 5; ++round) {
    tile[thread] = thread * round;
    __syncthreads();  // every store of this round before any load of it
    const int neighbour = tile[(thread + round + 1) % threads];
    const int count = __syncthreads_count(neighbour % 2 == 0);
    const int all = __syncthreads_and(thread >= 0);
    const int any = __syncthreads_or(thread == 95 && round == 4);
    out[round * threads + thread] = neighbour * 8 + (count != 0) * 4 + all * 2 + any;
  }
}

void barriers() {
  Heap<int> out(5 * 96);
  trm::emu::Buffers buffers;
  buffers.writes("out", out.data(), out.bytes());
  trm::launch({dim3(1), dim3(96)}, &barrier_kernel, out.data());
  buffers.finish();
  for (int round = 0; round < 5; ++round) {
    for (int thread = 0; thread < 96; ++thread) {
      const int want = (thread + round + 1) % 96 * round * 8 + 4 + 2 + (round == 4);
      expect(out[static_cast<size_t>(round * 96 + thread)] == want, "barrier round");
    }
  }
}

__global__ void syncwarp_kernel(int* out) {
  TRM_SHARED(tile, int[64]);
  const int thread = static_cast<int>(threadIdx.x);
  for (int round = 0; round < 6; ++round) {
    tile[thread] = thread + 100 * round;
    __syncwarp();  // the warp's stores before its loads
    out[round * 64 + thread] = tile[thread ^ (round + 1)];
    __syncwarp();  // its loads before the next round's stores
  }
}

void syncwarp() {
  Heap<int> out(6 * 64);
  trm::emu::Buffers buffers;
  buffers.writes("out", out.data(), out.bytes());
  trm::launch({dim3(1), dim3(64)}, &syncwarp_kernel, out.data());
  buffers.finish();
  for (int i = 0; i < 6 * 64; ++i) {
    const int round = i / 64;
    expect(out[static_cast<size_t>(i)] == ((i % 64) ^ (round + 1)) + 100 * round, "syncwarp");
  }
}

__global__ void atomic_kernel(unsigned* out, float* sum) {
  TRM_SHARED(local, unsigned[2]);
  if (threadIdx.x == 0) local[0] = local[1] = 0;
  __syncthreads();  // zeros before the additions
  atomicAdd(&local[0], threadIdx.x);
  atomicMax(&local[1], threadIdx.x);
  __syncthreads();  // additions before the result is read
  if (threadIdx.x == 0) {
    atomicAdd(&out[0], local[0]);
    atomicMax(&out[1], local[1] + blockIdx.x);
    atomicAnd(&out[2], ~(1u << blockIdx.x));
    atomicOr(&out[3], 1u << blockIdx.x);
    atomicXor(&out[4], 1u << blockIdx.x);
    atomicInc(&out[5], 2u);
    atomicDec(&out[6], 2u);
    atomicMin(&out[7], blockIdx.x);
    atomicSub(&out[8], 1u);
    atomicAdd(sum, 0.5f);
    if (atomicCAS(&out[9], 0u, blockIdx.x + 1) == 0u) atomicExch(&out[10], 77u);
  }
}

void atomics() {
  Heap<unsigned> out(11);
  Heap<float> sum(1);
  for (const size_t i : {2, 7, 8}) out[i] = kFull;
  trm::emu::Buffers buffers;
  buffers.updates("out", out.data(), out.bytes());
  buffers.updates("sum", sum.data(), sum.bytes());
  trm::launch({dim3(4), dim3(64)}, &atomic_kernel, out.data(), sum.data());
  expect(out[0] == 4 * 64 * 63 / 2 && out[1] == 63 + 3, "atomicAdd, atomicMax");
  expect(out[2] == (kFull & ~15u) && out[3] == 15u && out[4] == 15u, "atomicAnd, Or, Xor");
  expect(out[5] == 1u && out[6] == 2u, "atomicInc, atomicDec");
  expect(out[7] == 0u && out[8] == kFull - 4, "atomicMin, atomicSub");
  expect(out[9] >= 1 && out[9] <= 4 && out[10] == 77u && sum[0] == 2.0f, "atomicCAS, atomicExch");
}

// The block that finishes last adds up what the others published: fence, count, fence.
__global__ void last_block_kernel(float* parts, unsigned* count, float* total) {
  TRM_SHARED(last, bool);
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = static_cast<float>(blockIdx.x + 1);
    __threadfence();
    last = atomicAdd(count, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();  // `last` before it is read
  if (last && threadIdx.x == 0) {
    float sum = 0;
    for (unsigned block = 0; block < gridDim.x; ++block) sum += parts[block];
    *total = sum;
  }
}

void fences() {
  Heap<float> parts(7), total(1);
  Heap<unsigned> count(1);
  trm::emu::Buffers buffers;
  buffers.writes("parts", parts.data(), parts.bytes());
  buffers.updates("count", count.data(), count.bytes());
  buffers.writes("total", total.data(), total.bytes());
  trm::launch({dim3(7), dim3(32)}, &last_block_kernel, parts.data(), count.data(), total.data());
  buffers.finish();
  expect(total[0] == 28.0f, "last block");
}

__global__ void indices_kernel(uint64_t* out) {
  const uint64_t block = blockIdx.x + uint64_t{gridDim.x} * (blockIdx.y + gridDim.y * blockIdx.z);
  const uint64_t thread =
      threadIdx.x + uint64_t{blockDim.x} * (threadIdx.y + blockDim.y * threadIdx.z);
  const uint64_t threads = uint64_t{blockDim.x} * blockDim.y * blockDim.z;
  out[block * threads + thread] = block * 1000 + thread;
}

void indices() {
  Heap<uint64_t> out(2 * 3 * 2 * 5 * 3 * 2);
  trm::emu::Buffers buffers;
  buffers.writes("out", out.data(), out.bytes());
  trm::launch({dim3(2, 3, 2), dim3(5, 3, 2)}, &indices_kernel, out.data());
  buffers.finish();
  for (size_t i = 0; i < out.size(); ++i) expect(out[i] == i / 30 * 1000 + i % 30, "indices");
}

__global__ void cluster_kernel(int* out) {
  TRM_SHARED(tile, int[32]);
  int* extra = trm::dynamic_shared<int>();
  const unsigned rank = trm::cluster_rank();
  tile[threadIdx.x] = static_cast<int>(1000 * blockIdx.x + threadIdx.x);
  extra[threadIdx.x] = static_cast<int>(rank);
  trm::cluster_sync();  // every block's stores before any block's loads
  const unsigned other = (rank + 1) % trm::cluster_size();
  out[blockIdx.x * 32 + threadIdx.x] = trm::cluster_shared(&tile[0], other)[31 - threadIdx.x] +
                                       100 * *trm::cluster_shared(&extra[threadIdx.x], other);
  trm::cluster_sync();  // nobody leaves while its shared memory is read
}

void clusters() {
  Heap<int> out(8 * 32);
  trm::emu::Buffers buffers;
  buffers.writes("out", out.data(), out.bytes());
  trm::launch({dim3(8), dim3(32), 128, nullptr, 4}, &cluster_kernel, out.data());
  buffers.finish();
  for (int i = 0; i < 8 * 32; ++i) {
    const int block = i / 32;
    const int other = block / 4 * 4 + (block + 1) % 4;
    expect(out[static_cast<size_t>(i)] == 1000 * other + 31 - i % 32 + 100 * (other % 4),
           "cluster");
  }
}

// Shared memory of a function template called with two types: two objects, as on the device.
template <typename T>
__device__ T doubled(T value) {
  TRM_SHARED(slot, T[64]);
  slot[threadIdx.x] = value;
  __syncthreads();  // the neighbour's store before it is loaded
  const T sum = slot[threadIdx.x] + slot[threadIdx.x ^ 1];
  __syncthreads();  // loads before the next call's stores
  return sum;
}

__global__ void templates_kernel(double* out) {
  const float a = doubled(static_cast<float>(threadIdx.x));
  const double b = doubled(1e-12 * threadIdx.x);
  const float c = doubled(a);
  out[threadIdx.x] = a + b + c;
}

void templates() {
  Heap<double> out(64);
  trm::emu::Buffers buffers;
  buffers.writes("out", out.data(), out.bytes());
  trm::launch({dim3(1), dim3(64)}, &templates_kernel, out.data());
  for (unsigned i = 0; i < 64; ++i) {
    const double pair = i + (i ^ 1u);
    expect(std::fabs(out[i] - (pair + 1e-12 * pair + 2 * pair)) < 1e-13, "templates");
  }
}

}  // namespace

int main(int count, char** arguments) {
  return harness::run({{"shuffles", shuffles},
                       {"half_warps", half_warps},
                       {"votes", votes},
                       {"matches", matches},
                       {"reductions", reductions},
                       {"barriers", barriers},
                       {"syncwarp", syncwarp},
                       {"atomics", atomics},
                       {"fences", fences},
                       {"indices", indices},
                       {"clusters", clusters},
                       {"templates", templates}},
                      count, arguments);
}
