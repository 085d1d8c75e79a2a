// SPDX-License-Identifier: Apache-2.0
// Eight float lanes for every processor: the compiler's own vectors, lowered to whatever the
// baseline has. Lanes, not one running sum, so that 8192 additions stay as accurate as elsewhere.
#pragma once

#include "trm/storage_types.h"

namespace trm::cpu {
namespace {

struct Simd {
  static constexpr int64_t kLanes = 8;
  using Bits = int;
  static constexpr Bits kEvery = (1 << kLanes) - 1;
  typedef float Vector __attribute__((vector_size(32)));
  typedef int32_t Mask __attribute__((vector_size(32)));
  typedef uint32_t Words __attribute__((vector_size(32)));
  typedef double Wide __attribute__((vector_size(64)));
  typedef double Doubles __attribute__((vector_size(32)));
  typedef int64_t Longs __attribute__((vector_size(32)));

  static Mask first(int64_t count) {
    Mask mask;
    for (int i = 0; i < kLanes; ++i) mask[i] = i < count ? -1 : 0;
    return mask;
  }
  static Vector broadcast(float value) { return value - Vector{}; }
  static Vector constant(float value) { return broadcast(value); }
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
  // The even columns of 16, and the odd.
  static void load_split(const BFloat16* place, Vector& even, Vector& odd) {
    for (int i = 0; i < kLanes; ++i) {
      even[i] = number(place[2 * i]);
      odd[i] = number(place[2 * i + 1]);
    }
  }
  static void store_split(BFloat16* place, Vector even, Vector odd) {
    for (int i = 0; i < kLanes; ++i) {
      place[2 * i] = to_bfloat16(even[i]);
      place[2 * i + 1] = to_bfloat16(odd[i]);
    }
  }
  template <typename T>
  static void store(T* place, Vector value) {
    for (int i = 0; i < kLanes; ++i) place[i] = stored(value[i], T{});
  }

  static Vector add(Vector a, Vector b) { return a + b; }
  static Vector sub(Vector a, Vector b) { return a - b; }
  static Vector mul(Vector a, Vector b) { return a * b; }
  static Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
  static Vector fms(Vector a, Vector b, Vector c) { return a * b - c; }
  // c - a b
  static Vector fnma(Vector a, Vector b, Vector c) { return c - a * b; }
  // a b + c in one rounding, everywhere (but for a double's)
  static Vector fused(Vector a, Vector b, Vector c) {
    const Wide product = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide);
    return __builtin_convertvector(product + __builtin_convertvector(c, Wide), Vector);
  }
  // a b - product, exactly where product = fl(a b): 24-bit factors fit a double's product.
  static Vector product_error(Vector a, Vector b, Vector product) {
    const Wide exact = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide);
    return __builtin_convertvector(exact - __builtin_convertvector(product, Wide), Vector);
  }
  static Vector max(Vector a, Vector b) { return a > b ? a : b; }
  static Vector min(Vector a, Vector b) { return a < b ? a : b; }
  static Vector abs(Vector a) { return Vector(Mask(a) & 0x7fffffff); }
  static Vector select(Mask mask, Vector yes, Vector no) { return mask ? yes : no; }
  static Vector zero_unless(Mask mask, Vector value) { return Vector(mask & Mask(value)); }
  static Vector add_where(Mask mask, Vector sum, Vector value) {
    return sum + zero_unless(mask, value);
  }
  static Vector fma_where(Mask mask, Vector a, Vector b, Vector sum) {
    return sum + zero_unless(mask, a * b);
  }

  // The larger of |a| and |b|, NaN above all.
  static Vector larger_magnitude(Vector a, Vector b) {
    const Mask first = Mask(abs(a)), second = Mask(abs(b));
    return Vector(first > second ? first : second);
  }
  // The larger of a and b where one is positive, else one of them.
  static Vector larger_above_zero(Vector a, Vector b) {
    return Vector(Mask(a) > Mask(b) ? Mask(a) : Mask(b));
  }
  // The larger of a and b, which is positive or 0. Where a is the NaN that a difference of two
  // infinities gives, b.
  static Vector larger_number(Vector a, Vector b) { return a > b ? a : b; }

  static Mask less_equal(Vector a, Vector b) { return a <= b; }
  static Mask unequal(Vector a, Vector b) { return a != b; }
  // On where neither is NaN.
  static Mask are_numbers(Vector a, Vector b) { return (a == a) & (b == b); }
  static Mask less(Vector a, Vector b) { return a < b; }
  static Mask both(Mask a, Mask b) { return a & b; }
  static Mask but_not(Mask a, Mask b) { return a & ~b; }
  static Mask opposite(Mask a) { return ~a; }
  static bool all(Mask mask) { return !any(~mask); }
  static Bits bits(Mask mask) {
    Bits out = 0;
    for (int i = 0; i < kLanes; ++i) out |= (mask[i] & 1) << i;
    return out;
  }
  static bool any(Mask mask) {
    uint64_t words[4];
    memcpy(words, &mask, sizeof(words));
    return (words[0] | words[1] | words[2] | words[3]) != 0;
  }

  // z - floor(z); 0 below z = -126
  static Vector fraction(Vector z) {
    z = clamped(z);
    return z - floor(z);
  }
  // a 2^floor(z) for z <= 126 and 1 - 2^-24 <= a <= 2 (1/2 <= a where z >= -125); 0 below -126
  static Vector scale(Vector a, Vector z) {
    const Mask alive = z >= broadcast(-126.0f);
    const Mask power = __builtin_convertvector(floor(clamped(z)), Mask) << 23;
    return Vector(alive & (Mask(a) + power));
  }
  // a 2^k for 1/2 <= a <= 2; k a whole number, and rounded = k + 1.5 2^23. 0 where k < -126.
  static Vector scale_whole(Vector a, Vector k, Vector rounded) {
    const Mask alive = k >= broadcast(-126.0f);
    return Vector(alive & Mask(Words(a) + (Words(rounded) << 23)));  // modulo 2^32
  }

  static Doubles fma(Doubles a, Doubles b, Doubles c) { return a * b + c; }
  static Doubles max(Doubles a, Doubles b) { return a > b ? a : b; }

  static Doubles low_half(Vector value) { return Doubles{value[0], value[1], value[2], value[3]}; }
  static Doubles high_half(Vector value) { return Doubles{value[4], value[5], value[6], value[7]}; }
  static double sum(Doubles value) { return (value[0] + value[2]) + (value[1] + value[3]); }
  static float largest(Vector value) {
    float found = value[0];
    for (int i = 1; i < kLanes; ++i) found = value[i] > found ? value[i] : found;
    return found;
  }

 private:
  static Vector clamped(Vector z) {
    const Vector least = broadcast(-126.0f);
    return z > least ? z : least;
  }
  // |z| < 2^22
  static Vector floor(Vector z) {
    const Vector rounder = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vector nearest = (z + rounder) - rounder;
    return nearest > z ? nearest - 1.0f : nearest;
  }
  static float number(float value) { return value; }
  static float number(BFloat16 value) { return to_float(value); }
  static float number(Float16 value) { return to_float(value); }
  static float stored(float value, float) { return value; }
  static BFloat16 stored(float value, BFloat16) { return to_bfloat16(value); }
  static Float16 stored(float value, Float16) { return to_float16(value); }
};

}  // namespace
}  // namespace trm::cpu
