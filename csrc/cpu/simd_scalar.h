// SPDX-License-Identifier: Apache-2.0
// Eight float lanes for every processor: the compiler's own vectors, lowered to whatever the
// baseline has. Lanes, not one running sum, so that 8192 additions stay as accurate as elsewhere.
#pragma once

#include "trm/storage_types.h"

namespace trm::cpu {
namespace {

struct Simd {
  static constexpr int64_t kLanes = 8;
  typedef float Vector __attribute__((vector_size(32)));
  typedef int32_t Mask __attribute__((vector_size(32)));
  typedef double Wide __attribute__((vector_size(64)));

  static Mask first(int64_t count) {
    Mask mask;
    for (int i = 0; i < kLanes; ++i) mask[i] = i < count ? -1 : 0;
    return mask;
  }
  static Vector broadcast(float value) { return value - Vector{}; }
  template <typename T>
  static Vector load(const T* place) {
    Vector value;
    for (int i = 0; i < kLanes; ++i) value[i] = number(place[i]);
    return value;
  }
  template <typename T>
  static Vector load(const T* place, Mask mask) {
    Vector value;
    for (int i = 0; i < kLanes; ++i) value[i] = mask[i] ? number(place[i]) : -__builtin_inff();
    return value;
  }
  template <typename T>
  static void store(T* place, Vector value, Mask mask) {
    for (int i = 0; i < kLanes; ++i) {
      if (mask[i]) place[i] = stored(value[i], T{});
    }
  }

  static Vector add(Vector a, Vector b) { return a + b; }
  static Vector sub(Vector a, Vector b) { return a - b; }
  static Vector mul(Vector a, Vector b) { return a * b; }
  static Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
  static Vector fms(Vector a, Vector b, Vector c) { return a * b - c; }
  // a b - product, exactly where product = fl(a b): 24-bit factors fit a double's product.
  static Vector product_error(Vector a, Vector b, Vector product) {
    const Wide exact = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide);
    return __builtin_convertvector(exact - __builtin_convertvector(product, Wide), Vector);
  }
  static Vector max(Vector a, Vector b) { return a > b ? a : b; }
  static Vector abs(Vector a) { return Vector(Mask(a) & 0x7fffffff); }
  static Vector select(Mask mask, Vector yes, Vector no) { return mask ? yes : no; }
  static Vector zero_unless(Mask mask, Vector value) { return Vector(mask & Mask(value)); }
  static Vector add_where(Mask mask, Vector sum, Vector value) {
    return sum + zero_unless(mask, value);
  }
  static Vector fma_where(Mask mask, Vector a, Vector b, Vector sum) {
    return sum + zero_unless(mask, a * b);
  }

  static Mask less_equal(Vector a, Vector b) { return a <= b; }
  static Mask less(Vector a, Vector b) { return a < b; }
  static Mask both(Mask a, Mask b) { return a & b; }
  static Mask either(Mask a, Mask b) { return a | b; }
  static Mask but_not(Mask a, Mask b) { return a & ~b; }
  static Mask none() { return Mask{}; }
  static bool all(Mask mask) { return !any(~mask); }
  static bool any(Mask mask) {
    uint64_t words[4];
    memcpy(words, &mask, sizeof(words));
    return (words[0] | words[1] | words[2] | words[3]) != 0;
  }

  // exp(t), t <= 88: the polynomial of the other sets; log2(e) in two parts, the first short enough
  // for an exact product with an exponent, in place of a fused multiply. 0, and not alive, below
  // -87.3.
  static Vector exp(Vector t, Mask& alive) {
    alive = t > broadcast(-87.3f);
    t = alive ? t : broadcast(-87.3f);
    const Vector rounder = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vector n = (t * 1.44269504f + rounder) - rounder;
    const Vector r = (t - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    const Vector f = r * 1.44269504f;
    Vector series = broadcast(0.0013276487f);
    series = series * f + 0.00967554040f;
    series = series * f + 0.0555071323f;
    series = series * f + 0.240221198f;
    series = series * f + 0.693146967f;
    series = series * f + 1.00000007f;
    const Mask scale = __builtin_convertvector(n, Mask) << 23;
    return Vector(alive & (Mask(series) + scale));
  }
  static Vector exp(Vector t) {
    Mask alive;
    return exp(t, alive);
  }

  static double sum(Vector value) {
    double total = 0.0;
    for (int i = 0; i < kLanes; ++i) total += value[i];
    return total;
  }
  static float largest(Vector value) {
    float found = value[0];
    for (int i = 1; i < kLanes; ++i) found = value[i] > found ? value[i] : found;
    return found;
  }

 private:
  static float number(float value) { return value; }
  static float number(BFloat16 value) { return to_float(value); }
  static float number(Float16 value) { return to_float(value); }
  static float stored(float value, float) { return value; }
  static BFloat16 stored(float value, BFloat16) { return to_bfloat16(value); }
  static Float16 stored(float value, Float16) { return to_float16(value); }
};

}  // namespace
}  // namespace trm::cpu
