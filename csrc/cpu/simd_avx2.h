// SPDX-License-Identifier: Apache-2.0
// Eight float lanes on AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "trm/storage_types.h"

namespace trm::cpu {
namespace {

struct Simd {
  using Vector = __m256;
  using Mask = __m256;  // all ones or all zeros per lane
  static constexpr int64_t kLanes = 8;
  using Doubles = __m256d;
  using Longs = __m256i;
  using Bits = int;
  static constexpr Bits kEvery = 0xff;

  static Mask first(int64_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const int limit = count >= kLanes ? int(kLanes) : int(count);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(limit), lane));
  }
  static Vector broadcast(float value) { return _mm256_set1_ps(value); }
  static Vector constant(float value) { return broadcast(value); }
  static Vector load(const float* place) { return _mm256_loadu_ps(place); }
  static Vector load(const BFloat16* place) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(place));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Vector load(const Float16* place) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(place)));
  }
  // Partial vectors go through a padded copy: masked-off memory is not touched.
  template <typename T>
  static Vector load(const T* place, Mask mask) {
    const int count = __builtin_popcount(unsigned(_mm256_movemask_ps(mask)));
    T lanes[kLanes];
    for (int i = 0; i < int(kLanes); ++i) lanes[i] = i < count ? place[i] : minus_infinity(T{});
    return load(lanes);
  }
  // The even columns of 16, and the odd.
  static void load_split(const BFloat16* place, Vector& even, Vector& odd) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(bits, high_half()));
  }
  static void store_split(BFloat16* place, Vector even, Vector odd) {
    const __m256i low = _mm256_srli_epi32(rounded(even), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(place),
                        _mm256_or_si256(low, _mm256_and_si256(rounded(odd), high_half())));
  }
  static void store(float* place, Vector value) { _mm256_storeu_ps(place, value); }
  static void store(BFloat16* place, Vector value) {
    const __m256i bits = _mm256_srli_epi32(rounded(value), 16);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(place), packed);
  }
  static void store(Float16* place, Vector value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(place),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static Vector fms(Vector a, Vector b, Vector c) { return _mm256_fmsub_ps(a, b, c); }
  // c - a b
  static Vector fnma(Vector a, Vector b, Vector c) { return _mm256_fnmadd_ps(a, b, c); }
  // a b + c in one rounding, everywhere
  static Vector fused(Vector a, Vector b, Vector c) { return fma(a, b, c); }
  // a b - product, exactly where product = fl(a b)
  static Vector product_error(Vector a, Vector b, Vector product) { return fms(a, b, product); }
  static Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  static Vector min(Vector a, Vector b) { return _mm256_min_ps(a, b); }
  static Vector abs(Vector a) { return _mm256_andnot_ps(broadcast(-0.0f), a); }
  static Vector select(Mask mask, Vector yes, Vector no) { return _mm256_blendv_ps(no, yes, mask); }
  static Vector zero_unless(Mask mask, Vector value) { return _mm256_and_ps(mask, value); }
  static Vector add_where(Mask mask, Vector sum, Vector value) {
    return _mm256_add_ps(sum, _mm256_and_ps(mask, value));
  }
  static Vector fma_where(Mask mask, Vector a, Vector b, Vector sum) {
    return _mm256_add_ps(sum, _mm256_and_ps(mask, _mm256_mul_ps(a, b)));
  }

  // The larger of |a| and |b|, NaN above all.
  static Vector larger_magnitude(Vector a, Vector b) {
    return _mm256_castsi256_ps(
        _mm256_max_epu32(_mm256_castps_si256(abs(a)), _mm256_castps_si256(abs(b))));
  }
  // The larger of a and b where one is positive, else one of them.
  static Vector larger_above_zero(Vector a, Vector b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  // The larger of a and b, which is positive or 0. Where a is the NaN that a difference of two
  // infinities gives, b: it is a negative one.
  static Vector larger_number(Vector a, Vector b) { return larger_above_zero(a, b); }

  static Mask less_equal(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
  static Mask unequal(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_NEQ_UQ); }
  // On where neither is NaN.
  static Mask are_numbers(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_ORD_Q); }
  static Mask less(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
  static Mask but_not(Mask a, Mask b) { return _mm256_andnot_ps(b, a); }
  static Mask opposite(Mask a) {
    return _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-1)));
  }
  static bool all(Mask mask) { return _mm256_movemask_ps(mask) == 0xff; }
  static Bits bits(Mask mask) { return _mm256_movemask_ps(mask); }
  static bool any(Mask mask) { return _mm256_movemask_ps(mask) != 0; }

  // z - floor(z); anything at -inf
  static Vector fraction(Vector z) { return sub(z, _mm256_floor_ps(z)); }
  // a 2^floor(z) for z <= 126 and 1 - 2^-24 <= a <= 2 (1/2 <= a where z >= -125); 0 below -126
  static Vector scale(Vector a, Vector z) {
    const Mask alive = _mm256_cmp_ps(z, broadcast(-126.0f), _CMP_GE_OQ);
    const Vector n = _mm256_floor_ps(_mm256_max_ps(z, broadcast(-126.0f)));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const __m256i scaled = _mm256_add_epi32(_mm256_castps_si256(a), power);
    return _mm256_and_ps(alive, _mm256_castsi256_ps(scaled));
  }
  // a 2^k for 1/2 <= a <= 2; k a whole number, and rounded = k + 1.5 2^23. 0 where k < -126.
  static Vector scale_whole(Vector a, Vector k, Vector rounded) {
    const Mask alive = _mm256_cmp_ps(k, broadcast(-126.0f), _CMP_GE_OQ);
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(rounded), 23);
    const __m256i scaled = _mm256_add_epi32(_mm256_castps_si256(a), power);
    return _mm256_and_ps(alive, _mm256_castsi256_ps(scaled));
  }

  static Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
  static Doubles max(Doubles a, Doubles b) { return _mm256_max_pd(a, b); }

  static Doubles low_half(Vector value) { return _mm256_cvtps_pd(_mm256_castps256_ps128(value)); }
  static Doubles high_half(Vector value) {
    return _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
  }
  static double sum(Doubles value) { return (value[0] + value[2]) + (value[1] + value[3]); }
  static float largest(Vector value) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, value);
    float found = lanes[0];
    for (int i = 1; i < 8; ++i) found = lanes[i] > found ? lanes[i] : found;
    return found;
  }

 private:
  static float minus_infinity(float) { return -__builtin_inff(); }
  static BFloat16 minus_infinity(BFloat16) { return {0xff80}; }
  static Float16 minus_infinity(Float16) { return {0xfc00}; }

  static __m256i high_half() { return _mm256_set1_epi32(int32_t(0xffff0000)); }
  // Nearest bfloat16 in the upper half of each lane, ties to even; NaN stays NaN.
  static __m256i rounded(Vector value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    return _mm256_blendv_epi8(up, quiet,
                              _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q)));
  }
};

}  // namespace
}  // namespace trm::cpu
