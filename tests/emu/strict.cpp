// SPDX-License-Identifier: Apache-2.0
// Kernels that break one rule each. Every case must end in a fault whose text the tests know.
#include <sys/mman.h>

#include "harness.h"
#include "trm/portability.h"

namespace {

using harness::Heap;

constexpr unsigned kFull = 0xffffffffu;
constexpr int kFloats = 64;

struct alignas(16) Float4 {
  float x, y, z, w;
};

using Kernel = void (*)(const float*, float*);

// `in` and `out` hold 64 floats each; every kernel of this file takes them.
void run(Kernel kernel, dim3 grid = dim3(1), dim3 block = dim3(64), size_t dynamic_shared = 0,
         unsigned cluster = 1) {
  Heap<float> in(kFloats, 1.0f), out(kFloats, 0.0f);
  trm::emu::Buffers buffers;
  buffers.reads("in", in.data(), in.bytes());
  buffers.writes("out", out.data(), out.bytes());
  trm::launch({grid, block, dynamic_shared, nullptr, cluster}, kernel,
              static_cast<const float*>(in.data()), out.data());
  buffers.finish();
}

__global__ void lane_outside_mask(const float* in, float* out) {
  out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, in[threadIdx.x], 1);
}

__global__ void exited_lane_in_mask(const float* in, float* out) {
  if (threadIdx.x % 32 == 5) return;
  out[threadIdx.x] = __shfl_xor_sync(kFull, in[threadIdx.x], 1);
}

__global__ void absent_lane_in_mask(const float* in, float* out) {
  out[threadIdx.x] = __shfl_xor_sync(kFull, in[threadIdx.x], 1);
}

__global__ void different_call_sites(const float* in, float* out) {
  if (threadIdx.x % 2 == 0) {
    out[threadIdx.x] = __shfl_xor_sync(kFull, in[threadIdx.x], 1);
  } else {
    out[threadIdx.x] = __shfl_xor_sync(kFull, in[threadIdx.x], 1);
  }
}

__global__ void different_masks(const float* in, float* out) {
  const unsigned mask = threadIdx.x % 32 < 16 ? kFull : 0xffff8000u;
  out[threadIdx.x] = __shfl_sync(mask, in[threadIdx.x], 20);
}

__global__ void shuffle_from_outside_mask(const float* in, float* out) {
  if (threadIdx.x % 32 < 16) {
    out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, in[threadIdx.x], 16);
  }
}

__global__ void shuffle_width(const float* in, float* out) {
  out[threadIdx.x] = __shfl_sync(kFull, in[threadIdx.x], 0, 24);
}

__global__ void barrier_after_exit(const float* in, float* out) {
  if (threadIdx.x == 40) return;
  out[threadIdx.x] = in[threadIdx.x];
  __syncthreads();  // thread 40 never comes
}

__global__ void barriers_at_two_sites(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x < 32) {
    __syncthreads();  // half the block here
  } else {
    __syncthreads();  // the other half there
  }
}

__global__ void barrier_against_collective(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x == 0) {
    __syncwarp();  // waits for its warp
  } else {
    __syncthreads();  // which waits for it
  }
}

__global__ void uninitialised_shared(const float* in, float* out) {
  TRM_SHARED(tile, float[64]);
  if (threadIdx.x != 17) tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();  // stores before loads
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

__global__ void uninitialised_atomic(const float* in, float* out) {
  TRM_SHARED(sum, float);
  atomicAdd(&sum, in[threadIdx.x]);
  __syncthreads();  // additions before the result
  out[threadIdx.x] = sum;
}

__global__ void shared_overrun(const float* in, float* out) {
  TRM_SHARED(tile, float[64]);
  tile[threadIdx.x + 1] = in[threadIdx.x];
  __syncthreads();  // stores before loads
  out[threadIdx.x] = tile[threadIdx.x + 1];
}

__global__ void shared_underrun(const float* in, float* out) {
  float* tile = trm::dynamic_shared<float>();
  tile[static_cast<int>(threadIdx.x) - 1] = in[threadIdx.x];
  out[threadIdx.x] = 0;
}

__global__ void misaligned_vector(const float* in, float* out) {
  if (threadIdx.x < 15) out[threadIdx.x] = trm::load_vector<Float4>(in + 4 * threadIdx.x + 1).x;
}

__global__ void misaligned_pointer(const float* in, float* out) {
  if (threadIdx.x < 15) {
    const Float4 four = *reinterpret_cast<const Float4*>(in + 4 * threadIdx.x + 1);
    out[threadIdx.x] = four.x + four.w;
  }
}

__global__ void misaligned_atomic(const float*, float* out) {
  atomicAdd(reinterpret_cast<unsigned long long*>(out + 1), 1ull);
}

__global__ void global_overrun(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x + 1];
}

__global__ void writes_an_input(const float* in, float* out) {
  out[threadIdx.x] = 0;
  const_cast<float*>(in)[threadIdx.x] = 2;
}

__global__ void reads_an_unwritten_output(const float* in, float* out) {
  out[threadIdx.x] += in[threadIdx.x];
}

__global__ void leaves_an_output_unwritten(const float* in, float* out) {
  if (threadIdx.x != 63) out[threadIdx.x] = in[threadIdx.x];
}

__global__ void reads_anothers_stack(const float* in, float* out) {
  TRM_SHARED(where, const float*);
  volatile float own = in[threadIdx.x];
  if (threadIdx.x == 0) where = const_cast<const float*>(&own);
  __syncthreads();  // the pointer before it is used
  out[threadIdx.x] = threadIdx.x == 1 ? *where : own;
  __syncthreads();  // thread 0 stays
}

__global__ void plain_copy(const float* in, float* out) {
  out[threadIdx.x % kFloats] = in[threadIdx.x % kFloats];
}

__global__ void much_static_shared(const float* in, float* out) {
  TRM_SHARED(tile, float[32][256]);
  TRM_SHARED(more, float[20][256]);
  tile[0][threadIdx.x] = in[threadIdx.x];
  more[0][threadIdx.x] = 0;
  out[threadIdx.x] = tile[0][threadIdx.x] + more[0][threadIdx.x];
}

__global__ void no_dynamic_shared(const float* in, float* out) {
  float* tile = trm::dynamic_shared<float>();
  tile[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = tile[threadIdx.x];
}

__global__ void leaves_a_cluster(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
  if (blockIdx.x == 0) trm::cluster_sync();
}

__global__ void spins_forever(const float* in, float* out) {
  TRM_SHARED(flag, unsigned);
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();  // the flag before it is watched
  while (atomicAdd(&flag, 0u) == 0) continue;
  out[threadIdx.x] = in[threadIdx.x];
}

}  // namespace

int main(int count, char** arguments) {
  return harness::run(
      {
          {"lane_outside_mask", [] { run(lane_outside_mask); }},
          {"exited_lane_in_mask", [] { run(exited_lane_in_mask); }},
          {"absent_lane_in_mask", [] { run(absent_lane_in_mask, dim3(1), dim3(40)); }},
          {"different_call_sites", [] { run(different_call_sites); }},
          {"different_masks", [] { run(different_masks); }},
          {"shuffle_from_outside_mask", [] { run(shuffle_from_outside_mask); }},
          {"shuffle_width", [] { run(shuffle_width); }},
          {"barrier_after_exit", [] { run(barrier_after_exit); }},
          {"barriers_at_two_sites", [] { run(barriers_at_two_sites); }},
          {"barrier_against_collective", [] { run(barrier_against_collective); }},
          {"uninitialised_shared", [] { run(uninitialised_shared); }},
          {"uninitialised_atomic", [] { run(uninitialised_atomic); }},
          {"shared_overrun", [] { run(shared_overrun); }},
          {"shared_underrun", [] { run(shared_underrun, dim3(1), dim3(64), 256); }},
          {"misaligned_vector", [] { run(misaligned_vector); }},
          {"misaligned_pointer", [] { run(misaligned_pointer); }},
          {"misaligned_atomic", [] { run(misaligned_atomic); }},
          {"global_overrun", [] { run(global_overrun); }},
          {"writes_an_input", [] { run(writes_an_input); }},
          {"reads_an_unwritten_output", [] { run(reads_an_unwritten_output); }},
          {"leaves_an_output_unwritten", [] { run(leaves_an_output_unwritten); }},
          {"reads_anothers_stack", [] { run(reads_anothers_stack); }},
          {"too_many_threads", [] { run(plain_copy, dim3(1), dim3(1025)); }},
          {"empty_grid", [] { run(plain_copy, dim3(0)); }},
          {"rows_on_grid_y", [] { run(plain_copy, dim3(1, 65536)); }},
          {"cluster_does_not_divide", [] { run(plain_copy, dim3(3), dim3(32), 0, 2); }},
          {"too_much_dynamic_shared", [] { run(plain_copy, dim3(1), dim3(64), 300 * 1024); }},
          {"too_much_static_shared", [] { run(much_static_shared); }},
          {"no_dynamic_shared", [] { run(no_dynamic_shared); }},
          {"leaves_a_cluster", [] { run(leaves_a_cluster, dim3(2), dim3(32), 0, 2); }},
          {"spins_forever", [] { run(spins_forever); }},
      },
      count, arguments);
}
