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

  static Mask first(int64_t count) {
    return count >= kLanes ? Mask(0xffff) : Mask((1u << count) - 1u);
  }
  static Vector broadcast(float value) { return _mm512_set1_ps(value); }
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
  static void store(float* place, Vector value, Mask mask) {
    _mm512_mask_storeu_ps(place, mask, value);
  }
  static void store(BFloat16* place, Vector value, Mask mask) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const Mask nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
    _mm256_mask_storeu_epi16(place, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  static void store(Float16* place, Vector value, Mask mask) {
    _mm256_mask_storeu_epi16(place, mask,
                             _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static Vector fms(Vector a, Vector b, Vector c) { return _mm512_fmsub_ps(a, b, c); }
  // a b - product, exactly where product = fl(a b)
  static Vector product_error(Vector a, Vector b, Vector product) { return fms(a, b, product); }
  static Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
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

  static Mask less_equal(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
  static Mask less(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static Mask both(Mask a, Mask b) { return a & b; }
  static Mask either(Mask a, Mask b) { return a | b; }
  static Mask but_not(Mask a, Mask b) { return Mask(a & ~b); }
  static Mask none() { return 0; }
  static bool all(Mask mask) { return mask == 0xffff; }
  static bool any(Mask mask) { return mask != 0; }

  // exp(t), t <= 88, in 2^n times a degree-5 minimax of 2^f on |f| <= 1/2: relative error 7.5e-8 of
  // the polynomial plus |t| 1.3e-8 of log2(e); 0, and not alive, below -150 (exp underflows at
  // -104).
  static Vector exp(Vector t, Mask& alive) {
    alive = _mm512_cmp_ps_mask(t, broadcast(-150.0f), _CMP_GT_OQ);
    const Vector log2e = broadcast(1.44269504f);
    const Vector n = _mm512_roundscale_ps(_mm512_mul_ps(t, log2e),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vector f = _mm512_fmsub_ps(t, log2e, n);
    Vector series = broadcast(0.0013276487f);
    series = fma(series, f, broadcast(0.00967554040f));
    series = fma(series, f, broadcast(0.0555071323f));
    series = fma(series, f, broadcast(0.240221198f));
    series = fma(series, f, broadcast(0.693146967f));
    series = fma(series, f, broadcast(1.00000007f));
    return _mm512_maskz_scalef_ps(alive, series, n);
  }
  static Vector exp(Vector t) {
    Mask alive;
    return exp(t, alive);
  }

  static double sum(Vector value) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
  }
  static float largest(Vector value) { return _mm512_reduce_max_ps(value); }
};

}  // namespace
}  // namespace trm::cpu
