// SPDX-License-Identifier: Apache-2.0
// The one file that knows which compiler is at work. Everything below csrc/include/trm compiles as
// plain C++20 and, where __CUDACC__ is defined, as CUDA.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

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
  return std::numeric_limits<Real>::infinity();
}

template <typename Real>
TRM_INLINE constexpr Real quiet_nan() {
  return std::numeric_limits<Real>::quiet_NaN();
}

template <typename To, typename From>
TRM_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace trm
