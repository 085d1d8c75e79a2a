// SPDX-License-Identifier: Apache-2.0
// How logits are stored (fp32, bf16, fp16, fp64) and how a stored value becomes a number and back.
// Widening is exact; narrowing rounds once, to nearest even.
#pragma once

#include "trm/portability.h"

namespace trm {

enum class StorageType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat64 };

// In bytes.
inline int64_t element_size(StorageType type) {
  if (type == StorageType::kFloat64) return 8;
  return type == StorageType::kFloat32 ? 4 : 2;
}

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

TRM_INLINE float to_float(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

TRM_INLINE float to_float(Float16 value) { return half_to_float(value.bits); }

TRM_INLINE BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x0040u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

TRM_INLINE Float16 to_float16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to inf
  if (magnitude < 0x38800000u) {
    // Subnormal result: adding 0.5 puts the rounding position at 2^-24, fp16's smallest step.
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rebased = magnitude - 0x38000000u;  // exponent bias 127 -> 15
  return {static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13))};
}

template <typename Real>
TRM_INLINE Real load_logit(const void* row, int64_t offset, StorageType type) {
  switch (type) {
    case StorageType::kBFloat16:
      return static_cast<Real>(to_float(static_cast<const BFloat16*>(row)[offset]));
    case StorageType::kFloat16:
      return static_cast<Real>(to_float(static_cast<const Float16*>(row)[offset]));
    case StorageType::kFloat64:
      return static_cast<Real>(static_cast<const double*>(row)[offset]);
    default:
      return static_cast<Real>(static_cast<const float*>(row)[offset]);
  }
}

template <typename Real>
TRM_INLINE void store_logit(void* row, int64_t offset, StorageType type, Real value) {
  switch (type) {
    case StorageType::kBFloat16:
      static_cast<BFloat16*>(row)[offset] = to_bfloat16(static_cast<float>(value));
      break;
    case StorageType::kFloat16:
      static_cast<Float16*>(row)[offset] = to_float16(static_cast<float>(value));
      break;
    case StorageType::kFloat64:
      static_cast<double*>(row)[offset] = static_cast<double>(value);
      break;
    default:
      static_cast<float*>(row)[offset] = static_cast<float>(value);
  }
}

}  // namespace trm
