// SPDX-License-Identifier: Apache-2.0
// The one file that knows which compiler is at work. Everything below csrc/include/trm compiles as
// plain C++20; kernels/*.cuh as CUDA by nvcc, or by g++ for the emulator (TRM_EMULATE).
//
// A kernel spells what the three do differently as follows, and is otherwise ordinary CUDA:
//   TRM_SHARED(name, T)         shared memory of the block; T may be an array, float[32]
//   trm::dynamic_shared<T>()    the launch's dynamic shared memory
//   trm::launch(config, kernel, arguments...)
//   trm::load_vector<V>(p)      one aligned load of sizeof(V) bytes
//   trm::exponential(x)         exp to 1 ulp; fast intrinsics and PTX get a name here, with a C++
//   twin
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

}  // namespace trm

#if defined(TRM_EMULATE)

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
