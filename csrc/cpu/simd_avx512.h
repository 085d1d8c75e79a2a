// SPDX-License-Identifier: Apache-2.0
// Sixteen float lanes on AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include "trm/storage_types.h"

namespace trm::cpu {
namespace {

struct Simd {
  using Vector = __m512;
  using Mask = __mmask16;
  static constexpr int64_t kLanes = 16;
  using Doubles = __m512d;
  using Longs = __m512i;
  // A mask among the integers: combining masks there costs no vector operation.
  using Bits = unsigned;
  static constexpr Bits kEvery = 0xffff;

  static Mask first(int64_t count) {
    return count >= kLanes ? Mask(0xffff) : Mask((1u << count) - 1u);
  }
  static Vector broadcast(float value) { return _mm512_set1_ps(value); }
  // A broadcast that stays in a register or a spill slot: the compiler must not make it anew.
  static Vector constant(float value) {
    Vector vector = broadcast(value);
    asm("" : "+v"(vector));
    return vector;
  }
  static Vector load(const float* place) { return _mm512_loadu_ps(place); }
  static Vector load(const BFloat16* place) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static Vector load(const Float16* place) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(place)));
  }
  // The first lanes of the mask; -inf elsewhere. Masked-off memory is not touched.
  static Vector load(const float* place, Mask mask) {
    return _mm512_mask_loadu_ps(broadcast(-__builtin_inff()), mask, place);
  }
  static Vector load(const BFloat16* place, Mask mask) {
    const __m256i bits = _mm256_mask_loadu_epi16(_mm256_set1_epi16(int16_t(0xff80)), mask, place);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static Vector load(const Float16* place, Mask mask) {
    return _mm512_cvtph_ps(
        _mm256_mask_loadu_epi16(_mm256_set1_epi16(int16_t(0xfc00)), mask, place));
  }
  // The even columns of 32, and the odd.
  static void load_split(const BFloat16* place, Vector& even, Vector& odd) {
    split(_mm512_loadu_si512(place), even, odd);
  }
  static void store_split(BFloat16* place, Vector even, Vector odd) {
    const __m512i high = _mm512_set1_epi32(int32_t(0xffff0000));
    const __m512i low = _mm512_srli_epi32(rounded(even), 16);
    // low or (odd and high)
    _mm512_storeu_si512(place, _mm512_ternarylogic_epi32(low, high, rounded(odd), 0xf8));
  }
  static void store(float* place, Vector value) { _mm512_storeu_ps(place, value); }
  static void store(BFloat16* place, Vector value) {
    const __m512i bits = _mm512_srli_epi32(rounded(value), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), _mm512_cvtepi32_epi16(bits));
  }
  static void store(Float16* place, Vector value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(place),
                        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static Vector fms(Vector a, Vector b, Vector c) { return _mm512_fmsub_ps(a, b, c); }
  // c - a b
  static Vector fnma(Vector a, Vector b, Vector c) { return _mm512_fnmadd_ps(a, b, c); }
  // a b + c in one rounding, everywhere
  static Vector fused(Vector a, Vector b, Vector c) { return fma(a, b, c); }
  // a b - product, exactly where product = fl(a b)
  static Vector product_error(Vector a, Vector b, Vector product) { return fms(a, b, product); }
  static Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  static Vector min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
  static Vector abs(Vector a) { return _mm512_abs_ps(a); }
  static Vector select(Mask mask, Vector yes, Vector no) {
    return _mm512_mask_blend_ps(mask, no, yes);
  }
  static Vector zero_unless(Mask mask, Vector value) { return _mm512_maskz_mov_ps(mask, value); }
  // sum where the mask is off, sum + value (sum + a b) where it is on
  static Vector add_where(Mask mask, Vector sum, Vector value) {
    return _mm512_mask_add_ps(sum, mask, sum, value);
  }
  static Vector fma_where(Mask mask, Vector a, Vector b, Vector sum) {
    return _mm512_mask3_fmadd_ps(a, b, sum, mask);
  }

  // The larger of |a| and |b|, NaN above all. Integer maxima: the multiply and add pipes are busy.
  static Vector larger_magnitude(Vector a, Vector b) {
    return _mm512_castsi512_ps(
        _mm512_max_epu32(_mm512_castps_si512(abs(a)), _mm512_castps_si512(abs(b))));
  }
  // The larger of a and b where one is positive, else one of them.
  static Vector larger_above_zero(Vector a, Vector b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  // The larger of a and b, which is positive or 0. Where a is the NaN that a difference of two
  // infinities gives, b: it is a negative one.
  static Vector larger_number(Vector a, Vector b) { return larger_above_zero(a, b); }

  static Mask less_equal(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
  static Mask unequal(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
  // On where neither is NaN.
  static Mask are_numbers(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_ORD_Q); }
  static Mask less(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static Mask opposite(Mask a) { return Mask(~a); }
  static Mask both(Mask a, Mask b) { return a & b; }
  static Mask but_not(Mask a, Mask b) { return Mask(a & ~b); }
  static bool all(Mask mask) { return mask == 0xffff; }
  static Bits bits(Mask mask) {
    Bits out = mask;
    asm("" : "+r"(out));
    return out;
  }
  static bool any(Mask mask) { return mask != 0; }

  // z - floor(z), 0 at -inf
  static Vector fraction(Vector z) { return _mm512_reduce_ps(z, 0x01 | _MM_FROUND_NO_EXC); }
  // a 2^floor(z), 0 at z = -inf
  static Vector scale(Vector a, Vector z) { return _mm512_scalef_ps(a, z); }

  // a 2^k; k a whole number, and rounded = k + 1.5 2^23. 0 where k < -149.
  static Vector scale_whole(Vector a, Vector k, Vector) { return _mm512_scalef_ps(a, k); }

  static Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
  static Doubles max(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }

  static Doubles low_half(Vector value) { return _mm512_cvtps_pd(_mm512_castps512_ps256(value)); }
  static Doubles high_half(Vector value) {
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
  }
  static double sum(Doubles value) { return _mm512_reduce_add_pd(value); }
  static float largest(Vector value) { return _mm512_reduce_max_ps(value); }

 private:
  static void split(__m512i bits, Vector& even, Vector& odd) {
    even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int32_t(0xffff0000))));
  }
  // Nearest bfloat16 in the upper half of each lane, ties to even; NaN stays NaN.
  static __m512i rounded(Vector value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const Mask nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x00400000));
  }
};

}  // namespace
}  // namespace trm::cpu
