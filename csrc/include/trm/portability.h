// SPDX-License-Identifier: Apache-2.0
// The one file that knows which compiler is at work. Everything below csrc/include/trm compiles as
// plain C++20; kernels/*.cuh as CUDA by nvcc, or by g++ for the emulator (TRM_EMULATE).
//
// A kernel spells what the three do differently as follows, and is otherwise ordinary CUDA:
//   TRM_SHARED(name, T)         shared memory of the block; T may be an array, float[32]
//   trm::dynamic_shared<T>()    the launch's dynamic shared memory
//   trm::launch(config, kernel, arguments...)
//   trm::current_device(facts)  what a launch is planned by
//   trm::load_vector<V>(p)      one aligned load of sizeof(V) bytes
//   trm::load_streaming<N>(p)   one aligned load of N words that are read once; store_streaming
//   trm::exponential(x)         exp to 1 ulp
//   trm::fast_exp2(x)           and other intrinsics and PTX: named here, each with a C++ twin
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(TRM_EMULATE)
#include "trm/emu/emulator.h"
#elif defined(__CUDACC__) || defined(USE_CUDA)
#include <cuda_runtime.h>
#endif

#if defined(__CUDACC__)
#define TRM_HOST_DEVICE __host__ __device__
#define TRM_INLINE __host__ __device__ __forceinline__
#else
#define TRM_HOST_DEVICE
#define TRM_INLINE inline __attribute__((always_inline))
#endif

namespace trm {

// What a launch is planned by.
struct DeviceFacts {
  int compute_capability = 0;  // 90 for 9.0
  int multiprocessors = 1;
};

template <typename Real>
TRM_INLINE constexpr Real infinity() {
  return static_cast<Real>(__builtin_huge_val());
}

template <typename Real>
TRM_INLINE constexpr Real quiet_nan() {
  return static_cast<Real>(__builtin_nan(""));
}

template <typename To, typename From>
TRM_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

TRM_INLINE float exponential(float x) { return std::exp(x); }
TRM_INLINE double exponential(double x) { return std::exp(x); }

// N consecutive 32-bit words as one register operand.
template <int N>
struct alignas(4 * N) Words {
  uint32_t word[N];
};

// 2^x to 2^-22 relative; results below 2^-126 are 0.
TRM_INLINE float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  // As inexact as the instruction may be: up to two units in the last place, by a hash of x.
  if (x < -126.0f) return 0.0f;
  const float exact = std::exp2(x);
  if (!(exact > 0.0f && exact < infinity<float>())) return exact;
  const uint32_t hash = bit_cast<uint32_t>(x) * 2654435761u;
  return bit_cast<float>(bit_cast<uint32_t>(exact) + (hash >> 16) % 5u - 2u);
#endif
}

// An IEEE half as a float; exact.
TRM_INLINE float half_to_float(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
#else
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  // Infinity and NaN keep an all-ones exponent; every finite value is rebased by an exact product.
  if (magnitude >= (0x7c00u << 13)) return bit_cast<float>(sign | 0x7f800000u | magnitude);
  const float rebased = bit_cast<float>(magnitude) * bit_cast<float>(0x77800000u);  // * 2^112
  return bit_cast<float>(sign | bit_cast<uint32_t>(rebased));
#endif
}

}  // namespace trm

#if defined(TRM_EMULATE)

namespace trm {

inline cudaError_t current_device(DeviceFacts& facts) {
  facts = {emu::compute_capability(), emu::multiprocessors()};
  return cudaSuccess;
}

}  // namespace trm

#define TRM_SHARED(name, ...) \
  auto& name = ::trm::emu::shared_object<__VA_ARGS__>(#name, ::std::source_location::current())

#elif defined(__CUDACC__)

#define TRM_SHARED(name, ...) __shared__ trm::Same<__VA_ARGS__> name

namespace trm {

template <typename T>
using Same = T;  // lets an array type stand before the name

template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char trm_dynamic_shared[];
  return reinterpret_cast<T*>(trm_dynamic_shared);
}

template <typename Vector>
__device__ __forceinline__ Vector load_vector(const void* place) {
  return *static_cast<const Vector*>(place);
}

template <int N>
__device__ __forceinline__ Words<N> load_streaming(const void* place) {
  static_assert(N == 2 || N == 4);
  if constexpr (N == 4) {
    const uint4 v = __ldcs(static_cast<const uint4*>(place));
    return {{v.x, v.y, v.z, v.w}};
  } else {
    const uint2 v = __ldcs(static_cast<const uint2*>(place));
    return {{v.x, v.y}};
  }
}

template <int N>
__device__ __forceinline__ void store_streaming(void* place, const Words<N>& words) {
  static_assert(N == 2 || N == 4);
  if constexpr (N == 4) {
    __stcs(static_cast<uint4*>(place),
           make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]));
  } else {
    __stcs(static_cast<uint2*>(place), make_uint2(words.word[0], words.word[1]));
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // clusters
__device__ __forceinline__ unsigned cluster_rank() { return __clusterRelativeBlockRank(); }
__device__ __forceinline__ unsigned cluster_size() { return __clusterSizeInBlocks(); }

// Every thread of the cluster; orders memory, distributed shared memory included.
__device__ __forceinline__ void cluster_sync() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

// The object of block `rank` of the cluster that corresponds to this block's `object`.
template <typename T>
__device__ __forceinline__ T* cluster_shared(T* object, unsigned rank) {
  return static_cast<T*>(__cluster_map_shared_rank(object, rank));
}
#endif

inline cudaError_t current_device(DeviceFacts& facts) {
  int device = 0;
  int major = 0;
  int minor = 0;
  cudaError_t status = cudaGetDevice(&device);
  const auto read = [&](int& value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, attribute, device);
  };
  read(major, cudaDevAttrComputeCapabilityMajor);
  read(minor, cudaDevAttrComputeCapabilityMinor);
  read(facts.multiprocessors, cudaDevAttrMultiProcessorCount);
  facts.compute_capability = 10 * major + minor;
  return status;
}

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  size_t dynamic_shared = 0;
  cudaStream_t stream = nullptr;
  unsigned cluster = 1;  // blocks per cluster, along x
};

template <typename... Parameters, typename... Arguments>
cudaError_t launch(const LaunchConfig& config, void (*kernel)(Parameters...),
                   const Arguments&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = config.cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t native = {};
  native.gridDim = config.grid;
  native.blockDim = config.block;
  native.dynamicSmemBytes = config.dynamic_shared;
  native.stream = config.stream;
  native.attrs = &attribute;
  native.numAttrs = config.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&native, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace trm

#endif
