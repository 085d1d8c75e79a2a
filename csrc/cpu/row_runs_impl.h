// SPDX-License-Identifier: Apache-2.0
// The runs of row_runs.h over the Simd that the including file chose. Formulas: divergence_state.h.
// Hot path per block of near columns (|u| <= 1/2, inside the frame): one exponential, one
// polynomial and three sums per vector, two compares. Others take the exponential of one side, the
// base, and that of the log-ratio, which gives the other side's mass, or is 0 where that side lacks
// the column; blocks without one base take both sides' exponentials, and so do all where the KL is
// large, which need no more than sums of masses. NaN, +inf or a frame that no longer covers ends
// the run.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/row_runs.h"
#include "trm/polynomials.h"

namespace trm::cpu {
namespace {

using Vector = Simd::Vector;
using Mask = Simd::Mask;
using Bits = Simd::Bits;

constexpr float kInf = __builtin_inff();

constexpr float kLn2 = 0.693147181f;
// exp(-t) of t >= -kClose is formed by itself, and times a mass of the base side: beyond, the other
// side's mass would inherit that one's errors enlarged, and could lie beyond its frame.
constexpr float kClose = 16.0f;
constexpr float kFarthest = 1 << 20;  // a log-ratio above is bounded, unless both masses are formed
constexpr float kNothing = 150.0f;    // exp(-t) is 0 above
constexpr float kMost = 1e30f;        // bounds what may be infinite and meets a mass that is 0
constexpr float kLargestFloat = 0x1.fffffep127f;
// Where both sides' exponentials are formed, u up to which a column counts as near: G of others is
// their difference, which enlarges what they have lost. Without G, |u| where psi is of degree 4.
constexpr float kWide = 1.0f, kNarrow = 0.3466f;
// Equal columns round alike, so a chain of n float additions may be off by n 2^-25 of its sum: sums
// of so many additions each are added up (Totals).
constexpr int64_t kChain = 32;
// Blocks in a group, and how many of them may have a side's mass if such without it are to be
// looked for on.
constexpr int64_t kGroupBlocks = kChain / 2;
constexpr int64_t kFewBlocks = 2;
// A loop with one base that ends sooner, in blocks, was not worth its start: the loop that takes
// any block goes on, and until so many groups in a row might have had one base.
constexpr int64_t kWorthwhile = 64;
constexpr int64_t kFittingGroups = 4;

// Two vectors of columns. What is long is written over two at once, so that one's latency hides
// behind the other's.
struct Two {
  Vector a, b;
};

inline Vector fma(Vector a, Vector b, Vector c) { return Simd::fma(a, b, c); }
inline Two fma(const Two& a, const Two& b, const Two& c) {
  return {Simd::fma(a.a, b.a, c.a), Simd::fma(a.b, b.b, c.b)};
}
inline Two fma(const Two& a, const Two& b, Vector c) {
  return {Simd::fma(a.a, b.a, c), Simd::fma(a.b, b.b, c)};
}
inline Vector mul(Vector a, Vector b) { return Simd::mul(a, b); }
inline Two mul(const Two& a, const Two& b) { return {Simd::mul(a.a, b.a), Simd::mul(a.b, b.b)}; }
inline Vector fraction(Vector z) { return Simd::fraction(z); }
inline Two fraction(const Two& z) { return {Simd::fraction(z.a), Simd::fraction(z.b)}; }
inline Vector scale(Vector a, Vector z) { return Simd::scale(a, z); }
inline Two scale(const Two& a, const Two& z) {
  return {Simd::scale(a.a, z.a), Simd::scale(a.b, z.b)};
}
inline Vector repeat(const Vector&, Vector c) { return c; }
inline Two repeat(const Two&, Vector c) { return {c, c}; }

// The polynomial of u with these coefficients, that of the highest power first.
template <typename T, typename... Lower>
[[gnu::always_inline]] inline T series(const T& u, Vector highest, Vector next, Lower... lower) {
  T sum = fma(repeat(u, highest), u, next);
  ((sum = fma(sum, u, lower)), ...);
  return sum;
}

// The polynomials, their coefficients kept as whole vectors: a broadcast out of memory costs a turn
// of the multiply or add pipe, a load does not.
struct Polynomials {
  Vector e0, e1, e2, e3, e4, e5;
  Vector p0 = Simd::constant(0.5f), p1 = Simd::constant(-0.166666657f),
         p2 = Simd::constant(0.0416657962f), p3 = Simd::constant(-0.00833345205f),
         p4 = Simd::constant(0.0013981997f), p5 = Simd::constant(-0.000198756316f);

  Vector r0 = Simd::constant(0.5f), r1 = Simd::constant(-0.166665778f),
         r2 = Simd::constant(0.0416667946f), r3 = Simd::constant(-0.00836320408f),
         r4 = Simd::constant(0.00139011291f);

  Vector w0 = Simd::constant(0.5f), w1 = Simd::constant(-0.166666955f),
         w2 = Simd::constant(0.0416665189f), w3 = Simd::constant(-0.00833093561f),
         w4 = Simd::constant(0.0013891441f), w5 = Simd::constant(-0.000203254516f),
         w6 = Simd::constant(2.49608311e-5f);

  // `factor`, near 1, multiplies exp2().
  [[gnu::always_inline]] explicit Polynomials(float factor = 1.0f)
      : e0(Simd::constant(0.99999994f * factor)),
        e1(Simd::constant(0.693153083f * factor)),
        e2(Simd::constant(0.240153611f * factor)),
        e3(Simd::constant(0.0558263175f * factor)),
        e4(Simd::constant(0.00898933969f * factor)),
        e5(Simd::constant(0.00187757681f * factor)) {}

  // 2^z, z <= 126: 2^floor(z) times a degree-5 minimax of 2^f on 0 <= f < 1, relative error 9.0e-8;
  // 0 at -inf.
  template <typename T>
  T exp2(const T& z) const {
    const T f = fraction(z);
    return scale(series(f, e5, e4, e3, e2, e1, e0), z);
  }

  // psi(u) / u for |u| <= 1/2: degree-5 minimax of psi(u) / u^2, relative error 5.5e-8. (Degree 4
  // would do for KL, at 8e-7; but the log-ratio of a token inherits that times KL.)
  template <typename T>
  T psi_over_u(const T& u) const {
    return mul(u, series(u, p5, p4, p3, p2, p1, p0));
  }

  // The same for |u| <= kWide: degree 6, 1.03e-7.
  template <typename T>
  T wide_psi_over_u(const T& u) const {
    return mul(u, series(u, w6, w5, w4, w3, w2, w1, w0));
  }

  // For |u| <= kNarrow: degree 4, 1.3e-7.
  template <typename T>
  T narrow_psi_over_u(const T& u) const {
    return mul(u, series(u, r4, r3, r2, r1, r0));
  }
};

// chi(u) / u = u - (psi / u) (1 + u)
inline Vector chi_over_u(Vector u, Vector ratio) {
  return Simd::sub(u, Simd::fma(ratio, u, ratio));
}

inline Vector difference_error(Vector a, Vector b, Vector difference) {
  const Vector b_part = Simd::sub(a, difference);
  const Vector a_part = Simd::add(difference, b_part);
  return Simd::add(Simd::sub(a, a_part), Simd::sub(b_part, b));
}

// A power of 2 as one of e; bounded, so that its product with an exponential that is 0 is 0.
inline Vector natural(Vector power) {
  return Simd::max(Simd::mul(power, Simd::broadcast(kLn2)), Simd::broadcast(-kMost));
}

// What a pair of columns is in the frame, before any exponential.
struct Pair {
  Vector rollout, train;  // as stored
  Vector power;           // (x - M) log2(e)
  Vector u;               // (x - y) - c, infinite where one side lacks the column; -u if swapped
  Vector product_error_train;
  Vector scaled_train;
};

template <RunScale kScale>
struct Columns {
  Vector max_rollout, origin, rate, shift, shift_low, train_max, train_max_low;
  Vector train_origin, train_origin_low;
  Vector rollout_high, rollout_low, train_high, train_low;

  explicit Columns(const RunArgs& args)
      : max_rollout(Simd::broadcast(args.frame.max_rollout)),
        origin(Simd::broadcast(-args.frame.origin)),
        rate(Simd::broadcast(args.rate)),
        shift(Simd::broadcast(args.frame.shift)),
        shift_low(Simd::broadcast(args.frame.shift_low)),
        train_max(Simd::broadcast(args.frame.train_max)),
        train_max_low(Simd::broadcast(-args.frame.train_max_low * args.rate)),
        train_origin(Simd::broadcast(-args.frame.train_origin)),
        train_origin_low(Simd::broadcast(-args.frame.train_origin_low)),
        rollout_high(Simd::broadcast(args.rollout_high)),
        rollout_low(Simd::broadcast(args.rollout_low)),
        train_high(Simd::broadcast(args.train_high)),
        train_low(Simd::broadcast(args.train_low)) {}

  // Finite where the value is, so that a product with 0 is 0.
  Vector scaled(Vector value) const {
    // The low part of a product with -inf would be NaN.
    const Mask finite = Simd::less(Simd::abs(value), Simd::broadcast(kInf));
    const Vector product = Simd::fma(value, rollout_high, Simd::mul(value, rollout_low));
    return Simd::select(finite, bounded(product), value);
  }
  static Vector bounded(Vector value) {
    const Vector largest = Simd::broadcast(kLargestFloat);
    return Simd::min(Simd::max(value, Simd::sub(Simd::broadcast(0.0f), largest)), largest);
  }

  // kResidue restores the rounding of x - y; u is then NaN where a side lacks the column, unless
  // kGaps.
  template <bool kResidue, bool kGaps, bool kSwapped = false>
  Pair pair(Vector x, Vector y) const {
    Pair out;
    out.rollout = x;
    out.train = y;
    if constexpr (kScale == RunScale::kMixed) {
      Vector a_error, b_error;
      const Vector a = tempered(x, rollout_high, rollout_low, a_error);
      const Vector b = tempered(y, train_high, train_low, b_error);
      const Vector difference = Simd::sub(a, b);
      const Vector error = Simd::add(Simd::sub(difference_error(a, b, difference), shift_low),
                                     Simd::sub(a_error, b_error));
      out.u = Simd::add(Simd::sub(difference, shift), error);
      out.u = Simd::select(Simd::less(Simd::abs(difference), Simd::broadcast(kInf)), bounded(out.u),
                           difference);
      if constexpr (kSwapped) {
        out.u = Simd::sub(Simd::broadcast(0.0f), out.u);  // keeps a NaN's sign
      }
      out.power = Simd::mul(Simd::add(Simd::sub(a, max_rollout), a_error), rate);
      out.scaled_train = b;
      out.product_error_train = b_error;
    } else {
      const Vector a = kSwapped ? y : x, b = kSwapped ? x : y;
      const Vector difference = Simd::sub(a, b);
      out.u = kSwapped ? Simd::add(difference, shift) : Simd::sub(difference, shift);
      if constexpr (kResidue) {
        const Vector lost = difference_error(a, b, difference);
        const Vector error = kSwapped ? Simd::add(lost, shift_low) : Simd::sub(lost, shift_low);
        out.u = kGaps ? Simd::add_where(Simd::are_numbers(error, error), out.u, error)
                      : Simd::add(out.u, error);
      }
      if constexpr (kScale == RunScale::kScaled) out.u = scaled(out.u);
      out.power = Simd::fused(x, rate, origin);
    }
    return out;
  }

  // A logit over its temperature, and what its rounding lost. Finite where the logit is.
  static Vector tempered(Vector logit, Vector high, Vector low, Vector& error) {
    const Vector product = Simd::mul(logit, high);
    const Mask exact = Simd::less(Simd::abs(product), Simd::broadcast(kInf));
    error =
        Simd::zero_unless(exact, Simd::fma(logit, low, Simd::product_error(logit, high, product)));
    return Simd::select(Simd::less(Simd::abs(logit), Simd::broadcast(kInf)), bounded(product),
                        logit);
  }

  // (y - (M - c)) log2(e). The train side's origin is kept to twice a float's precision, so that
  // this is as accurate as the rollout's. Roughly: without what the second word adds to all.
  template <bool kRoughly = false>
  Vector train_power(const Pair& pair) const {
    if constexpr (kScale == RunScale::kMixed) {
      const Vector value = Simd::sub(pair.scaled_train, train_max);
      return Simd::fma(Simd::add(value, pair.product_error_train), rate, train_max_low);
    } else {
      const Vector power = Simd::fused(pair.train, rate, train_origin);
      return kRoughly ? power : Simd::add(power, train_origin_low);
    }
  }
};

// Which sides have a column at all; from the logits alone.
struct Sides {
  Mask in_rollout, in_train, both, only_rollout, only_train;

  explicit Sides(const Pair& pair) {
    const Vector nothing = Simd::broadcast(-kInf);
    in_rollout = Simd::less(nothing, pair.rollout);
    in_train = Simd::less(nothing, pair.train);
    both = Simd::both(in_rollout, in_train);
    only_rollout = Simd::but_not(in_rollout, in_train);
    only_train = Simd::but_not(in_train, in_rollout);
  }
};

// And which columns of both are near, by their distance.
struct Standing : Sides {
  Mask near;

  Standing(const Pair& pair, Vector distance) : Sides(pair) {
    near = Simd::both(both,
                      Simd::less_equal(Simd::abs(distance), Simd::broadcast(near_limit<float>())));
  }
};

// The first `left` columns of a vector; -inf elsewhere.
template <typename T>
inline Vector load_vector(const T* place, int64_t left) {
  return left >= Simd::kLanes ? Simd::load(place) : Simd::load(place, Simd::first(left));
}

// A block of columns is in memory order, except that where both sides are bfloat16 one vector holds
// the even and the other the odd columns: a load and two cheap operations in place of two loads,
// two conversions and two shifts.
template <typename Rollout, typename Train>
inline constexpr bool kSplits = false;
template <>
inline constexpr bool kSplits<BFloat16, BFloat16> = true;

template <bool kSplit, typename T>
inline Two load_block(const T* place) {
  Two out;
  if constexpr (kSplit) {
    Simd::load_split(place, out.a, out.b);
  } else {
    out.a = Simd::load(place);
    out.b = Simd::load(place + Simd::kLanes);
  }
  return out;
}

// Asks the second cache for a block that the loop reaches three quarters of a page later: the
// processor's own prefetch stops at the end of a page, and the first cache waits for fewer lines
// at a time.
template <typename T>
inline void prefetch_block(const T* place) {
  constexpr int64_t kAhead = 3072;  // bytes
  constexpr int64_t kBytes = 2 * Simd::kLanes * sizeof(T);
  const char* const from = reinterpret_cast<const char*>(place) + kAhead;
  for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

template <bool kSplit, typename T>
inline void store_block(T* place, const Two& value) {
  if constexpr (kSplit) {
    Simd::store_split(place, value.a, value.b);
  } else {
    Simd::store(place, value.a);
    Simd::store(place + Simd::kLanes, value.b);
  }
}

inline float minus_infinity(float) { return -kInf; }
inline BFloat16 minus_infinity(BFloat16) { return {0xff80}; }
inline Float16 minus_infinity(Float16) { return {0xfc00}; }

// Where a run's last columns do not fill a block: a copy that does, with -inf.
template <typename T>
struct Padded {
  static constexpr int64_t kBlock = 2 * Simd::kLanes;
  T columns[kBlock];

  Padded(const T* from, int64_t count) {
    if (count == 0) return;
    for (int64_t i = 0; i < kBlock; ++i) columns[i] = i < count ? from[i] : minus_infinity(T{});
  }
};

// Of one vector of columns: w, the mass of the side that is its base, and exp(-t), which is that of
// the other side relative to it. psi = psi(t) and step = exp(-t) - 1 where near.
struct Decay {
  Vector weight, value, psi, step;
  Vector t;  // bounded, so that the products below are numbers
  Mask far;  // not near
};

// The side whose mass is taken from its logit: the other's is that times exp(-t). t is the
// log-ratio of the base to the other, at least -kClose; a side without the column is never the base
// unless both are without.
enum class Base { kRollout, kTrain };

// How G is formed of columns whose both masses are: one by one where they are near, as a difference
// of sums, or not at all.
enum class Gap { kOfColumns, kOfSums, kNone };

// What a run has accumulated.
template <int kExtra>
struct Sums {
  static constexpr bool kTrainGap = (kExtra & kRunTrainGap) != 0;
  static constexpr bool kEntropy = (kExtra & kRunEntropy) != 0;
  Vector near_mass, near_first, near_gap;
  // In loops that take others than near columns. Near or not, w times what each has in G; and what
  // the side that is not the base adds to its mass: w (exp(-t) - 1) of near columns, whose w is in
  // near_mass, w exp(-t) of others, whose w is the base's alone.
  Vector bent_gap;
  Vector train_gain, rollout_alone;  // base: the rollout
  Vector rollout_gain, train_alone;  // base: the train side
  Vector train_gap, rollout_log, train_log;
  // Of u and -u, where it is positive: infinite where one side lacks a column. And the least u,
  // where it is negative.
  Vector largest, largest_train, least;
  Vector larger_mass;  // of the two, where the KL is large

  Sums() {
    near_mass = near_first = near_gap = Simd::broadcast(0.0f);
    bent_gap = train_gain = rollout_alone = rollout_gain = train_alone = near_mass;
    largest = largest_train = least = larger_mass = near_mass;
    train_gap = rollout_log = train_log = near_mass;
  }

  // Every column near; ratio = psi(u) / u.
  void add_near(const Pair& a, const Pair& b, const Two& weight, const Two& ratio) {
    const Two moment = mul(weight, Two{a.u, b.u});
    near_mass = Simd::add(near_mass, Simd::add(weight.a, weight.b));
    near_first = Simd::add(near_first, Simd::add(moment.a, moment.b));
    near_gap = Simd::fma(moment.b, ratio.b, Simd::fma(moment.a, ratio.a, near_gap));
    if constexpr (kTrainGap) {
      train_gap = Simd::fma(moment.a, chi_over_u(a.u, ratio.a), train_gap);
      train_gap = Simd::fma(moment.b, chi_over_u(b.u, ratio.b), train_gap);
    }
    if constexpr (kEntropy) {
      add_near_logs(a, weight.a, moment.a, ratio.a);
      add_near_logs(b, weight.b, moment.b, ratio.b);
    }
  }

  void add_near_logs(const Pair& pair, Vector weight, Vector moment, Vector ratio) {
    const Vector log_weight = natural(pair.power);
    rollout_log = Simd::fma(weight, log_weight, rollout_log);
    const Vector mass = Simd::fma(moment, Simd::sub(ratio, Simd::broadcast(1.0f)), weight);
    train_log = Simd::fma(mass, Simd::sub(log_weight, pair.u), train_log);
  }

  // Any columns. With t = |u|, or u itself where it is near, and e = exp(-t) - 1: G and R of a
  // column whose base is the rollout are w (e + t) and -w (e + t exp(-t)); where it is the train
  // side they change places.
  template <Base kBase>
  void add_decay(Vector z, const Decay& decay) {
    const Vector one = Simd::broadcast(1.0f);
    const Vector weight = decay.weight, value = decay.value;
    const Vector expm1 = Simd::sub(value, one);
    const Vector gain = Simd::select(decay.far, value, decay.step);
    // e + t, and -(e + t exp(-t)), to their own precision where they are small
    const auto psi = [&] { return Simd::select(decay.far, Simd::add(expm1, decay.t), decay.psi); };
    const auto minus_chi = [&] {
      return Simd::fma(decay.t, gain, Simd::select(decay.far, expm1, decay.psi));
    };
    const Mask near = Simd::opposite(decay.far);
    near_mass = Simd::add_where(near, near_mass, weight);
    if constexpr (kBase == Base::kRollout) {
      train_gain = Simd::fma(weight, gain, train_gain);
      rollout_alone = Simd::add_where(decay.far, rollout_alone, weight);
      bent_gap = Simd::fma(weight, psi(), bent_gap);
      if constexpr (kTrainGap) train_gap = Simd::fnma(weight, minus_chi(), train_gap);
    } else {
      rollout_gain = Simd::fma(weight, gain, rollout_gain);
      train_alone = Simd::add_where(decay.far, train_alone, weight);
      bent_gap = Simd::fnma(weight, minus_chi(), bent_gap);
      if constexpr (kTrainGap) train_gap = Simd::fma(weight, psi(), train_gap);
    }
    if constexpr (kEntropy) {
      const Vector log_base = natural(z), log_other = Simd::sub(log_base, decay.t);
      const Vector base = Simd::mul(weight, log_base);
      const Vector other = Simd::mul(Simd::mul(weight, value), log_other);
      if constexpr (kBase == Base::kRollout) {
        rollout_log = Simd::add(rollout_log, base);
        train_log = Simd::add(train_log, other);
      } else {
        rollout_log = Simd::add(rollout_log, other);
        train_log = Simd::add(train_log, base);
      }
    }
  }

  // A log-ratio bounded where its product is with a mass that may be 0; of NaN, the bound.
  static Vector bounded_below(Vector u) { return Simd::max(u, Simd::broadcast(-kLargestFloat)); }

  // Any columns, from both masses; ratio = psi(u) / u where near. close_both() follows, when a
  // group is done.
  template <Gap kGap>
  void add_both(const Pair& pair, Vector train_power, Vector rollout, Vector train, Vector ratio) {
    constexpr bool kOfColumns = kGap == Gap::kOfColumns;
    const Vector u = pair.u;
    const Mask near = Simd::less_equal(Simd::abs(u), Simd::broadcast(kOfColumns ? kWide : kNarrow));
    const Mask far = Simd::opposite(near);
    near_mass = Simd::add_where(near, near_mass, rollout);
    rollout_alone = Simd::add_where(far, rollout_alone, rollout);
    train_alone = Simd::add_where(far, train_alone, train);
    largest = Simd::larger_number(u, largest);
    // Of NaN, which u is where neither side has the column, the second operand.
    least = Simd::min(u, least);
    if constexpr (kOfColumns) {
      Vector t = bounded_below(u);
      if constexpr (kTrainGap) t = Simd::min(t, Simd::broadcast(kLargestFloat));
      const Vector moment = Simd::mul(rollout, t);
      near_first = Simd::add_where(near, near_first, moment);
      near_gap = Simd::fma_where(near, moment, ratio, near_gap);
      bent_gap = Simd::add_where(far, bent_gap, moment);
      if constexpr (kTrainGap) {
        train_gap = Simd::fma_where(near, moment, chi_over_u(u, ratio), train_gap);
        train_gap = Simd::add_where(far, train_gap, Simd::sub(rollout, train));
        train_gap = Simd::fma_where(far, train, Simd::sub(Simd::broadcast(0.0f), t), train_gap);
      }
    } else {
      train_gain = Simd::fma_where(near, rollout, Simd::fms(u, ratio, u), train_gain);
      if constexpr (kGap == Gap::kOfSums) bent_gap = Simd::fma(rollout, bounded_below(u), bent_gap);
    }
    if constexpr (kEntropy) {
      rollout_log = Simd::fma(rollout, natural(pair.power), rollout_log);
      train_log = Simd::fma(train, natural(train_power), train_log);
    }
  }

  // Any columns, G a difference of sums. close_both() follows, when a group is done.
  void add_apart(Vector u, Vector rollout, Vector train) {
    rollout_alone = Simd::add(rollout_alone, rollout);
    train_alone = Simd::add(train_alone, train);
    largest = Simd::larger_number(u, largest);
    least = Simd::min(u, least);
    larger_mass = Simd::add(larger_mass, Simd::max(rollout, train));
    bent_gap = Simd::fma(rollout, bounded_below(u), bent_gap);
  }

  // After a group of add_both() or add_apart() alone: what G has beside first moments, and -u at
  // its largest.
  void close_both() {
    bent_gap = Simd::add(bent_gap, Simd::add(train_gain, Simd::sub(train_alone, rollout_alone)));
    largest_train = Simd::sub(Simd::broadcast(0.0f), least);
  }

  // The log-ratios of columns, whose base is the first side, before any bound.
  template <Base kBase>
  void note(const Pair& a, const Pair& b) {
    Vector& most = kBase == Base::kRollout ? largest : largest_train;
    most = Simd::larger_number(b.u, Simd::larger_number(a.u, most));
  }

  // Columns where exp(-t) is 0.
  template <Base kBase>
  void add_alone(const Two& z, const Two& t, const Two& weight) {
    const Vector one = Simd::broadcast(1.0f);
    const Vector mass = Simd::add(weight.a, weight.b);
    const auto first = [&](Vector sum) {
      sum = Simd::fma(weight.a, Simd::sub(t.a, one), sum);
      return Simd::fma(weight.b, Simd::sub(t.b, one), sum);
    };
    const auto log = [&](Vector sum) {
      return Simd::fma(weight.b, natural(z.b), Simd::fma(weight.a, natural(z.a), sum));
    };
    if constexpr (kBase == Base::kRollout) {
      rollout_alone = Simd::add(rollout_alone, mass);
      bent_gap = first(bent_gap);
      if constexpr (kTrainGap) train_gap = Simd::add(train_gap, mass);
      if constexpr (kEntropy) rollout_log = log(rollout_log);
    } else {
      train_alone = Simd::add(train_alone, mass);
      bent_gap = Simd::add(bent_gap, mass);
      if constexpr (kTrainGap) train_gap = first(train_gap);
      if constexpr (kEntropy) train_log = log(train_log);
    }
  }

  // Whether the side that is not the base has added nothing.
  template <Base kBase>
  bool is_alone() const {
    const Vector gain = kBase == Base::kRollout ? train_gain : rollout_gain;
    const Vector most = Simd::larger_magnitude(near_mass, gain);
    return Simd::all(Simd::less_equal(most, Simd::broadcast(0.0f)));
  }

  static bool any_finite_from(float least, Vector value) {
    return Simd::any(Simd::both(Simd::less_equal(Simd::broadcast(least), value),
                                Simd::less(value, Simd::broadcast(kInf))));
  }

  // Whether there is a log-ratio that counts and that loops with one base bound.
  bool has_remote() const {
    return any_finite_from(kFarthest / 2, largest) ||
           (kTrainGap && any_finite_from(kFarthest / 2, largest_train));
  }

  void join_near(const Sums& other) {
    near_mass = Simd::add(near_mass, other.near_mass);
    near_first = Simd::add(near_first, other.near_first);
    near_gap = Simd::add(near_gap, other.near_gap);
    if constexpr (kTrainGap) train_gap = Simd::add(train_gap, other.train_gap);
    if constexpr (kEntropy) {
      rollout_log = Simd::add(rollout_log, other.rollout_log);
      train_log = Simd::add(train_log, other.train_log);
    }
  }

  void join(const Sums& other) {
    join_near(other);
    bent_gap = Simd::add(bent_gap, other.bent_gap);
    train_gain = Simd::add(train_gain, other.train_gain);
    rollout_alone = Simd::add(rollout_alone, other.rollout_alone);
    rollout_gain = Simd::add(rollout_gain, other.rollout_gain);
    train_alone = Simd::add(train_alone, other.train_alone);
    larger_mass = Simd::add(larger_mass, other.larger_mass);
    largest = Simd::max(largest, other.largest);
    largest_train = Simd::max(largest_train, other.largest_train);
  }
};

// Sums of groups. Of a few in floats, then in doubles: beside a token that holds the mass, a float
// would lose what the others add.
template <int kExtra>
class Totals {
 public:
  void join_near(const Sums<kExtra>& group) {
    recent_.join_near(group);
    count();
  }
  void join(const Sums<kExtra>& group) {
    recent_.join(group);
    others_ = true;
    count();
  }

  // `infinite`: as if the KL of what was joined were.
  void write(bool infinite, RunSums& out) {
    widen();
    out = {};
    out.violates = infinite;
    out.near_mass = near_mass_.sum();
    out.near_first = near_first_.sum();
    out.near_gap = near_gap_.sum();
    if (others_) {
      out.violates = infinite || Simd::largest(largest_) == kInf;
      out.outside = Simd::largest(largest_train_) == kInf;
      // A state's B is near_gap - near_first, of what is near; its G has far_train - far_mass +
      // far_first of what is far: all that these loops add to G goes there, so that it does not
      // drown B, nor does what bounded log-ratios leave of an infinite G.
      const double gain = rollout_gain_.sum();
      out.near_mass += gain;
      out.near_first += gain - train_gain_.sum();
      out.far_mass = rollout_alone_.sum();
      out.far_train = train_alone_.sum();
      out.larger_mass = larger_mass_.sum();
      const double gap = out.violates ? 0.0 : bent_gap_.sum();
      out.too_far = !std::isfinite(gap);
      out.far_first = gap - (out.far_train - out.far_mass);
    }
    if constexpr (kTrainGap) {
      out.train_gap = out.outside ? 0.0 : train_gap_.sum();
      out.too_far = out.too_far || !std::isfinite(out.train_gap);
    }
    if constexpr (kEntropy) {
      out.rollout_log = rollout_log_.sum();
      out.train_log = train_log_.sum();
    }
  }

 private:
  static constexpr bool kTrainGap = Sums<kExtra>::kTrainGap, kEntropy = Sums<kExtra>::kEntropy;
  static constexpr int kGroups = 4;

  struct Sum {
    Simd::Doubles low = {}, high = {};

    void add(Vector value) {
      low += Simd::low_half(value);
      high += Simd::high_half(value);
    }
    double sum() const { return Simd::sum(low + high); }
  };

  void count() {
    if (++joined_ == kGroups) widen();
  }

  void widen() {
    near_mass_.add(recent_.near_mass);
    near_first_.add(recent_.near_first);
    near_gap_.add(recent_.near_gap);
    if (others_) {
      bent_gap_.add(recent_.bent_gap);
      train_gain_.add(recent_.train_gain);
      rollout_alone_.add(recent_.rollout_alone);
      rollout_gain_.add(recent_.rollout_gain);
      train_alone_.add(recent_.train_alone);
      larger_mass_.add(recent_.larger_mass);
      largest_ = Simd::max(largest_, recent_.largest);
      largest_train_ = Simd::max(largest_train_, recent_.largest_train);
    }
    if constexpr (kTrainGap) train_gap_.add(recent_.train_gap);
    if constexpr (kEntropy) {
      rollout_log_.add(recent_.rollout_log);
      train_log_.add(recent_.train_log);
    }
    recent_ = {};
    joined_ = 0;
  }

  Sums<kExtra> recent_;
  int joined_ = 0;
  bool others_ = false;  // any but near columns were joined
  Sum near_mass_, near_first_, near_gap_, bent_gap_;
  Sum train_gain_, rollout_alone_, rollout_gain_, train_alone_, larger_mass_;
  Sum train_gap_, rollout_log_, train_log_;
  Vector largest_ = Simd::broadcast(0.0f), largest_train_ = largest_;
};

// Which loop a run's next block belongs to: near columns; one base, and the same where the other
// side lacks most blocks; both exponentials, and the same where the KL is infinite.
enum class Loop { kNear, kRollout, kTrain, kRolloutAlone, kTrainAlone, kBoth, kInfinite };

template <Base kBase, bool kLooks>
constexpr Loop based_loop() {
  if (kBase == Base::kRollout) return kLooks ? Loop::kRolloutAlone : Loop::kRollout;
  return kLooks ? Loop::kTrainAlone : Loop::kTrain;
}

// The run's inputs and constants.
template <typename Rollout, typename Train, RunScale kScale, bool kResidue>
struct Run {
  static constexpr bool kSplit = kSplits<Rollout, Train>;
  static constexpr int64_t kBlock = 2 * Simd::kLanes;

  const Rollout* const rollout;
  const Train* const train;
  const int64_t count;
  const int64_t group;  // columns in one
  const Columns<kScale> columns;
  const Polynomials poly;
  const Polynomials train_poly;  // of train powers taken roughly
  const Vector limit = Simd::constant(near_limit<float>());
  const Vector slack, train_slack;
  const Vector infinite = Simd::constant(kInf);
  const Vector minus_bound = Simd::constant(-kClose);
  const Vector nothing = Simd::constant(kNothing), farthest = Simd::constant(kFarthest);
  const Vector minus_log2e = Simd::constant(-1.44269504f);
  const Vector one = Simd::constant(1.0f);
  const Vector ln2 = Simd::constant(kLn2);
  const Vector to_integer = Simd::constant(0x1.8p23f);  // added and subtracted, it rounds

  [[gnu::always_inline]] explicit Run(const RunArgs& args)
      : rollout(static_cast<const Rollout*>(args.rollout)),
        train(static_cast<const Train*>(args.train)),
        count(args.count),
        group(kGroupBlocks * kBlock / (args.short_groups ? 2 : 1)),
        columns(args),
        train_poly(args.frame.train_factor),
        slack(Simd::constant(args.slack)),
        train_slack(Simd::constant(args.train_slack)) {}

  Two rollout_block(int64_t column) const { return load_block<kSplit>(rollout + column); }
  Two train_block(int64_t column) const { return load_block<kSplit>(train + column); }
  void prefetch(int64_t column) const {
    prefetch_block(rollout + column);
    prefetch_block(train + column);
  }
  template <bool kGaps = true, bool kSwapped = false, bool kRestores = kResidue>
  Pair pair(Vector x, Vector y) const {
    return columns.template pair<kRestores, kGaps, kSwapped>(x, y);
  }

  // On where the frame covers both.
  Mask covered(const Pair& a, const Pair& b) const {
    return Simd::less_equal(Simd::larger_above_zero(a.power, b.power), slack);
  }

  // Whether the block at `column`, which may be the run's last and not full, is without NaN and
  // +inf.
  bool are_numbers(int64_t column) const {
    bool found = true;
    for (int64_t i = column; i < std::min(column + kBlock, count); i += Simd::kLanes) {
      const Vector x = load_vector(rollout + i, count - i), y = load_vector(train + i, count - i);
      found &= Simd::all(Simd::both(Simd::less(x, infinite), Simd::less(y, infinite)));
    }
    return found;
  }

  template <int kExtra>
  void add_near(Sums<kExtra>& sums, const Pair& a, const Pair& b) const {
    const Two weight = poly.exp2(Two{a.power, b.power});
    sums.add_near(a, b, weight, poly.psi_over_u(Two{a.u, b.u}));
  }

  bool are_near(const Pair& a, const Pair& b) const {
    return Simd::all(
        Simd::both(Simd::less_equal(Simd::larger_magnitude(a.u, b.u), limit), covered(a, b)));
  }

  // Whether what the second word of the train side's origin adds to all exponents is in the
  // polynomial instead.
  template <int kExtra>
  static constexpr bool kRough = kScale != RunScale::kMixed && !(kExtra & kRunEntropy);

  template <bool kRoughly>
  const Polynomials& train_polynomials() const {
    if constexpr (kRoughly) return train_poly;
    return poly;
  }
  template <Base kBase, int kExtra>
  const Polynomials& polynomials() const {
    return train_polynomials<kBase == Base::kTrain && kRough<kExtra>>();
  }

  // With t = v - k ln 2 and |v| <= ln 2 / 2, exp(-t) = 2^k (1 - v + psi(v)): one exponential of the
  // base, and this one, step by step beside it. Where k = 0 psi(t) is psi(v).
  [[gnu::always_inline]] void decays(const Polynomials& of_base, const Two& z, const Two& t,
                                     Decay& a, Decay& b) const {
    const Two rounded = fma(t, Two{minus_log2e, minus_log2e}, to_integer);
    const Two f = fraction(z);
    const Two k = {Simd::sub(rounded.a, to_integer), Simd::sub(rounded.b, to_integer)};
    Two series = fma(Two{of_base.e5, of_base.e5}, f, of_base.e4);
    const Two v = fma(k, Two{ln2, ln2}, t);
    series = fma(series, f, of_base.e3);
    Two ratio = fma(Two{poly.r4, poly.r4}, v, poly.r3);
    series = fma(series, f, of_base.e2);
    ratio = fma(ratio, v, poly.r2);
    series = fma(series, f, of_base.e1);
    ratio = fma(ratio, v, poly.r1);
    series = fma(series, f, of_base.e0);
    ratio = fma(ratio, v, poly.r0);
    const Two weight = scale(series, z);
    const Two psi = mul(v, mul(v, ratio));
    const Two step = {Simd::sub(psi.a, v.a), Simd::sub(psi.b, v.b)};
    a = {weight.a, Simd::scale_whole(Simd::add(one, step.a), k.a, rounded.a),
         psi.a,    step.a,
         t.a,      Simd::unequal(rounded.a, to_integer)};
    b = {weight.b, Simd::scale_whole(Simd::add(one, step.b), k.b, rounded.b),
         psi.b,    step.b,
         t.b,      Simd::unequal(rounded.b, to_integer)};
  }

  // A block as columns of one base.
  struct Based {
    Two z, t;  // the base's power of 2, and log-ratios to the other
  };
  template <Base kBase, bool kRoughly = false>
  [[gnu::always_inline]] Based based(const Pair& a, const Pair& b) const {
    Based out = {{a.power, b.power}, {a.u, b.u}};
    if constexpr (kBase == Base::kTrain) {
      out.z = {columns.template train_power<kRoughly>(a),
               columns.template train_power<kRoughly>(b)};
    }
    out.t = {Simd::min(out.t.a, farthest), Simd::min(out.t.b, farthest)};  // of NaN, the bound
    return out;
  }
  // Whether it may have this base, with log-ratios of at least `least`. Not where the frame does
  // not cover, nor with +inf or a NaN (but one on the base's side may pass, and makes sums NaN).
  template <Base kBase>
  [[gnu::always_inline]] bool may_have(const Pair& a, const Pair& b, const Based& block,
                                       Vector least) const {
    constexpr bool kTrain = kBase == Base::kTrain;
    const Mask holds =
        Simd::both(Simd::less_equal(Simd::larger_above_zero(block.z.a, block.z.b),
                                    kTrain ? train_slack : slack),
                   Simd::are_numbers(kTrain ? a.rollout : a.train, kTrain ? b.rollout : b.train));
    return Simd::all(Simd::both(holds, Simd::less_equal(least, Simd::min(block.t.a, block.t.b))));
  }

  // What a block needs before its exponentials.
  struct Head {
    Pair a, b;
    Based block;
    bool may;
  };
  template <Base kBase, int kExtra, bool kRestores = kResidue>
  [[gnu::always_inline]] Head head(const Two& x, const Two& y, Vector least) const {
    constexpr bool kSwapped = kBase == Base::kTrain;
    Head out;
    out.a = pair<true, kSwapped, kRestores>(x.a, y.a);
    out.b = pair<true, kSwapped, kRestores>(x.b, y.b);
    out.block = based<kBase, kRough<kExtra>>(out.a, out.b);
    out.may = may_have<kBase>(out.a, out.b, out.block, least);
    return out;
  }
  template <Base kBase, int kExtra>
  [[gnu::always_inline]] Head head_at(int64_t column) const {
    return head<kBase, kExtra>(rollout_block(column), train_block(column), minus_bound);
  }
  // May it, the other side has no mass in the block.
  template <Base kBase, int kExtra>
  [[gnu::always_inline]] Head lone_head_at(int64_t column) const {
    return head<kBase, kExtra, false>(rollout_block(column), train_block(column), nothing);
  }

  // Adds such a block. `near`: stays true if every column is.
  template <Base kBase, int kExtra>
  [[gnu::always_inline]] void add_based(Sums<kExtra>& sums, const Head& head, bool& near) const {
    Decay decay_a, decay_b;
    decays(polynomials<kBase, kExtra>(), head.block.z, head.block.t, decay_a, decay_b);
    near &= (Simd::bits(decay_a.far) | Simd::bits(decay_b.far)) == 0;
    sums.template add_decay<kBase>(head.block.z.a, decay_a);
    sums.template add_decay<kBase>(head.block.z.b, decay_b);
  }

  // Adds blocks, from the one at `column` on, while the other side has no mass in them; the first
  // column not consumed.
  template <Base kBase, int kExtra>
  [[gnu::always_inline]] int64_t add_alone(Sums<kExtra>& sums, int64_t column, int64_t end) const {
    for (; column < end; column += kBlock) {
      prefetch(column);
      const Head now = lone_head_at<kBase, kExtra>(column);
      if (!now.may) break;
      sums.template note<kBase>(now.a, now.b);
      sums.template add_alone<kBase>(now.block.z, now.block.t,
                                     polynomials<kBase, kExtra>().exp2(now.block.z));
    }
    return column;
  }

  // What any block needs before both exponentials.
  struct BothHead {
    Pair a, b;
    Two train_power;
    bool may;
  };
  template <int kExtra>
  [[gnu::always_inline]] BothHead both_head(const Two& x, const Two& y) const {
    BothHead out;
    out.a = pair(x.a, y.a);
    out.b = pair(x.b, y.b);
    out.train_power = {columns.template train_power<kRough<kExtra>>(out.a),
                       columns.template train_power<kRough<kExtra>>(out.b)};
    const Vector highest = Simd::larger_above_zero(out.train_power.a, out.train_power.b);
    out.may = Simd::all(Simd::both(covered(out.a, out.b), Simd::less_equal(highest, train_slack)));
    return out;
  }
  struct Masses {
    Two rollout, train;
  };
  template <int kExtra>
  [[gnu::always_inline]] Masses masses(const BothHead& head) const {
    return {poly.exp2(Two{head.a.power, head.b.power}),
            train_polynomials<kRough<kExtra>>().exp2(head.train_power)};
  }
  template <Gap kGap, int kExtra>
  [[gnu::always_inline]] void add_both(Sums<kExtra>& sums, const BothHead& head) const {
    const Two u = {head.a.u, head.b.u};
    const auto [rollout, train] = masses<kExtra>(head);
    const Two ratio = kGap == Gap::kOfColumns ? poly.wide_psi_over_u(u) : poly.narrow_psi_over_u(u);
    sums.template add_both<kGap>(head.a, head.train_power.a, rollout.a, train.a, ratio.a);
    sums.template add_both<kGap>(head.b, head.train_power.b, rollout.b, train.b, ratio.b);
  }
  [[gnu::always_inline]] void add_apart(Sums<kRunPlain>& sums, const BothHead& head) const {
    const auto [rollout, train] = masses<kRunPlain>(head);
    sums.add_apart(head.a.u, rollout.a, train.a);
    sums.add_apart(head.b.u, rollout.b, train.b);
  }
};

// The loop for the block at a column, which another could not take; out of line, so that the loops
// need none of it.
template <typename Rollout, typename Train, RunScale kScale, bool kResidue>
[[gnu::noinline]] Loop loop_at(const RunArgs& args, int64_t column) {
  const Run<Rollout, Train, kScale, kResidue> run(args);
  const Two x = run.rollout_block(column), y = run.train_block(column);
  const Pair a = run.pair(x.a, y.a), b = run.pair(x.b, y.b);
  if (run.are_near(a, b)) return Loop::kNear;
  if (run.template head_at<Base::kRollout, kRunEntropy>(column).may) return Loop::kRollout;
  if (run.template head_at<Base::kTrain, kRunEntropy>(column).may) return Loop::kTrain;
  return Loop::kBoth;
}

// Blocks from `column` to `end`, while their heads allow; the first column not consumed. The next
// block's head comes before a block's exponentials, so that they overlap; `note` takes what would
// wait for them in a register.
template <typename HeadAt, typename Note, typename Add>
[[gnu::always_inline]] inline int64_t add_blocks(int64_t column, int64_t end, HeadAt head_at,
                                                 Note note, Add add) {
  constexpr int64_t kBlock = 2 * Simd::kLanes;
  auto now = head_at(column);
  while (now.may) {
    const bool more = column + kBlock < end;
    note(now);
    const auto following = head_at(more ? column + kBlock : column);
    add(now);
    column += kBlock;
    if (!more) break;
    now = following;
  }
  return column;
}

// Blocks that may have this base; ends at another, or after a group of near columns alone. The
// first column not consumed. After a group that lacks the other side, blocks that do are looked for
// (kLooks), until a group has few: at random, they would cost what they save.
template <Base kBase, bool kLooks, int kExtra, typename Rollout, typename Train, RunScale kScale,
          bool kResidue>
[[gnu::noinline]] int64_t based_run(const RunArgs& args, int64_t column, Totals<kExtra>& sums,
                                    Loop& next) {
  const Run<Rollout, Train, kScale, kResidue> run(args);
  constexpr int64_t kBlock = run.kBlock;
  const int64_t whole = run.count / kBlock * kBlock, start = column;
  const Loop from = next;
  while (next == from && column < whole) {
    bool near = true, fits = true;
    Sums<kExtra> here;
    const int64_t begin = column;
    const int64_t end = std::min(column + run.group, whole);
    int64_t alone = 0;
    while (fits && column < end) {
      if constexpr (kLooks) {
        const int64_t first = column;
        column = run.template add_alone<kBase>(here, column, end);
        alone += column - first;
        if (column == end) break;
      }
      const int64_t stop = kLooks ? column + kBlock : end;
      column = add_blocks(
          column, stop,
          [&](int64_t at) {
            run.prefetch(at);
            return run.template head_at<kBase, kExtra>(at);
          },
          [&](const auto& head) { here.template note<kBase>(head.a, head.b); },
          [&](const auto& head) { run.template add_based<kBase>(here, head, near); });
      fits = column == stop;
    }
    if (here.has_remote()) {
      next = Loop::kBoth;
      return begin;
    }
    sums.join(here);
    if (!fits) {
      next = loop_at<Rollout, Train, kScale, kResidue>(args, column);
      const bool again = next == based_loop<kBase, false>();  // by a rounding
      const bool based = next == Loop::kRollout || next == Loop::kTrain;
      if (again || (based && column - start < kWorthwhile * kBlock)) next = Loop::kBoth;
    } else if (near && alone == 0) {
      next = Loop::kNear;
    } else if constexpr (kLooks) {
      if (alone < run.group - kFewBlocks * kBlock) next = based_loop<kBase, false>();
    } else if (kExtra == kRunPlain && here.template is_alone<kBase>()) {
      next = based_loop<kBase, true>();
    }
  }
  return column;
}

// A group of any blocks, up to where the frame does not cover; the first column not consumed.
template <int kExtra, typename AnyRun, typename Add>
[[gnu::always_inline]] inline int64_t add_group(const AnyRun& run, int64_t column,
                                                Sums<kExtra>& group, bool& covered, Add add) {
  constexpr int64_t kBlock = AnyRun::kBlock;
  const int64_t whole = run.count / kBlock * kBlock;
  const int64_t end = std::min(column + run.group, whole);
  column = add_blocks(
      column, end,
      [&](int64_t at) {
        run.prefetch(at);
        return run.template both_head<kExtra>(run.rollout_block(at), run.train_block(at));
      },
      [](const auto&) {}, add);
  covered = column == end;
  group.close_both();
  return column;
}

// Any blocks; ends where the frame does not cover, or after a group of near columns alone. If there
// is a G, also where the KL proves to be infinite, or after groups that might have had one base.
template <Gap kGap, int kExtra, typename Rollout, typename Train, RunScale kScale, bool kResidue>
[[gnu::noinline]] int64_t both_run(const RunArgs& args, int64_t column, Totals<kExtra>& sums,
                                   Loop& next, bool& covered) {
  constexpr bool kFinite = kGap != Gap::kNone;
  const Run<Rollout, Train, kScale, kResidue> run(args);
  constexpr int64_t kBlock = run.kBlock;
  const int64_t whole = run.count / kBlock * kBlock;
  const Loop from = next;
  int64_t rollout_groups = 0, train_groups = 0;
  while (next == from && covered && column < whole) {
    Sums<kExtra> here;
    column = add_group(run, column, here, covered,
                       [&](const auto& head) { run.template add_both<kGap>(here, head); });
    sums.join(here);
    const float most = Simd::largest(here.largest), most_train = Simd::largest(here.largest_train);
    if (std::max(most, most_train) <= near_limit<float>()) {
      next = Loop::kNear;
    } else if (kFinite && kExtra == kRunPlain && most == kInf) {
      next = Loop::kInfinite;
    } else if (kFinite) {
      const bool remote = here.has_remote();
      rollout_groups = !remote && most_train <= kClose ? rollout_groups + 1 : 0;
      train_groups = !remote && most <= kClose ? train_groups + 1 : 0;
      if (rollout_groups >= kFittingGroups) next = Loop::kRollout;
      if (train_groups >= kFittingGroups) next = Loop::kTrain;
    }
  }
  return column;
}

// Any blocks, by what is known of the KL; ends as both_run() does. `gap_of_sums` becomes true where
// G is a difference of sums.
template <int kExtra, typename Rollout, typename Train, RunScale kScale, bool kResidue>
[[gnu::noinline]] int64_t any_run(const RunArgs& args, int64_t column, Totals<kExtra>& sums,
                                  Loop& next, bool& covered, bool& gap_of_sums) {
  const auto both = [&]<Gap kGap>() {
    column =
        both_run<kGap, kExtra, Rollout, Train, kScale, kResidue>(args, column, sums, next, covered);
  };
  if constexpr (kExtra == kRunPlain) {
    if (next == Loop::kBoth && args.infinite) next = Loop::kInfinite;
    if (next == Loop::kBoth && args.gap_of_sums) {
      gap_of_sums = true;
      both.template operator()<Gap::kOfSums>();
    } else if (next == Loop::kBoth) {
      both.template operator()<Gap::kOfColumns>();
    }
    if (next == Loop::kInfinite) both.template operator()<Gap::kNone>();
  } else {
    both.template operator()<Gap::kOfColumns>();  // other sums need the gaps, too
  }
  return column;
}

// All whole blocks that the frame covers; the first column not consumed.
template <typename Rollout, typename Train, RunScale kScale, bool kResidue>
[[gnu::noinline]] int64_t apart_run(const RunArgs& args, Totals<kRunPlain>& sums, bool& covered) {
  const Run<Rollout, Train, kScale, kResidue> run(args);
  constexpr int64_t kBlock = run.kBlock;
  const int64_t whole = run.count / kBlock * kBlock;
  int64_t column = 0;
  while (covered && column < whole) {
    Sums<kRunPlain> here;
    column =
        add_group(run, column, here, covered, [&](const auto& head) { run.add_apart(here, head); });
    sums.join(here);
  }
  return column;
}

// Loops with the registers each for its own work; the rarer ones out of line.
template <int kExtra, typename Rollout, typename Train, RunScale kScale, bool kResidue>
int64_t sum_run(const RunArgs& args, RunSums& out) {
  const Run<Rollout, Train, kScale, kResidue> run(args);
  constexpr int64_t kBlock = run.kBlock;
  const int64_t whole = args.count / kBlock * kBlock;
  Totals<kExtra> sums;
  int64_t column = 0;
  bool covered = true, gap_of_sums = false;
  Loop loop = static_cast<Loop>(args.loop);
  if constexpr (kExtra == kRunPlain) {
    if (args.apart) {
      column = apart_run<Rollout, Train, kScale, kResidue>(args, sums, covered);
    }
  }
  while (covered && column < whole) {
    while (loop == Loop::kNear && column < whole) {
      Sums<kExtra> here;
      const int64_t end = std::min(column + run.group, whole);
      for (; column < end; column += kBlock) {
        run.prefetch(column);
        const Two x = run.rollout_block(column), y = run.train_block(column);
        const Pair a = run.template pair<false>(x.a, y.a), b = run.template pair<false>(x.b, y.b);
        if (!run.are_near(a, b)) {
          loop = loop_at<Rollout, Train, kScale, kResidue>(args, column);
          break;
        }
        run.add_near(here, a, b);
      }
      sums.join_near(here);
    }
    const auto based = [&]<Base kBase, bool kLooks>() {
      if (loop != based_loop<kBase, kLooks>()) return;
      column = based_run<kBase, kLooks, kExtra, Rollout, Train, kScale, kResidue>(args, column,
                                                                                  sums, loop);
    };
    based.template operator()<Base::kRollout, false>();
    based.template operator()<Base::kTrain, false>();
    if constexpr (kExtra == kRunPlain) {
      based.template operator()<Base::kRollout, true>();
      based.template operator()<Base::kTrain, true>();
    }
    if (loop == Loop::kBoth || loop == Loop::kInfinite) {
      column = any_run<kExtra, Rollout, Train, kScale, kResidue>(args, column, sums, loop, covered,
                                                                 gap_of_sums);
    }
  }
  if (covered && column < args.count) {
    const Padded<Rollout> last_rollout(run.rollout + whole, args.count - whole);
    const Padded<Train> last_train(run.train + whole, args.count - whole);
    const auto last = run.template both_head<kExtra>(load_block<run.kSplit>(last_rollout.columns),
                                                     load_block<run.kSplit>(last_train.columns));
    Sums<kExtra> here;
    covered = last.may;
    if (covered) {
      run.template add_both<Gap::kOfColumns>(here, last);
      here.close_both();
      sums.join(here);
      column = args.count;
    }
  }
  sums.write(args.infinite, out);
  out.gap_of_sums = gap_of_sums;
  out.loop = static_cast<int32_t>(loop);
  out.non_finite = std::isnan(out.near_mass + out.far_mass + out.far_train) ||
                   (!covered && !run.are_numbers(column));
  return column;
}

// kBelow: of the logits below +inf; -inf where there is none. NaN is passed over.
template <bool kBelow, typename Rollout, typename Train>
RunMaxima largest_logits(const RunArgs& args) {
  constexpr bool kSplit = kSplits<Rollout, Train>;
  constexpr int64_t kBlock = 2 * Simd::kLanes;
  const Rollout* const rollout = static_cast<const Rollout*>(args.rollout);
  const Train* const train = static_cast<const Train*>(args.train);
  const Vector nothing = Simd::broadcast(-kInf), infinite = Simd::broadcast(kInf);
  // Simd::max gives its second operand where the first is NaN.
  const auto larger = [&](Vector value, Vector largest) {
    if constexpr (kBelow) value = Simd::select(Simd::less(value, infinite), value, nothing);
    return Simd::max(value, largest);
  };
  Two largest_x = {nothing, nothing}, largest_y = largest_x;
  const auto take = [&](const Two& x, const Two& y) {
    largest_x = {larger(x.a, largest_x.a), larger(x.b, largest_x.b)};
    largest_y = {larger(y.a, largest_y.a), larger(y.b, largest_y.b)};
  };
  const int64_t whole = args.count / kBlock * kBlock, rest = args.count - whole;
  for (int64_t column = 0; column < whole; column += kBlock) {
    prefetch_block(rollout + column);
    prefetch_block(train + column);
    take(load_block<kSplit>(rollout + column), load_block<kSplit>(train + column));
  }
  if (rest > 0) {
    const Padded<Rollout> last_rollout(rollout + whole, rest);
    const Padded<Train> last_train(train + whole, rest);
    take(load_block<kSplit>(last_rollout.columns), load_block<kSplit>(last_train.columns));
  }
  return {Simd::largest(Simd::max(largest_x.a, largest_x.b)),
          Simd::largest(Simd::max(largest_y.a, largest_y.b))};
}

template <typename Rollout, typename Train>
RunMaxima maxima_run(const RunArgs& args) {
  const RunMaxima found = largest_logits<false, Rollout, Train>(args);
  const bool finite = found.rollout < kInf && found.train < kInf;
  return finite ? found : largest_logits<true, Rollout, Train>(args);
}

// 2^f on |f| <= 1/2, the highest power first: relative error 6e-11.
constexpr double kExp2[] = {1.53036994561262e-05, 0.0001546972924870715, 0.0013333478480177519,
                            0.009618025613177043, 0.05550410906316028,   0.2402265121349969,
                            0.6931471805568363,   0.9999999999595617};

template <typename T>
void mass_run(const MassArgs& args, MassSums& out) {
  using Doubles = Simd::Doubles;
  using Longs = Simd::Longs;
  constexpr int kBatch = 4;  // step by step beside each other
  constexpr int64_t kWidth = Simd::kLanes / 2, kColumns = kBatch * kWidth;
  constexpr double kToInteger = 0x1.8p52;  // added and subtracted, it rounds
  const T* const logits = static_cast<const T*>(args.logits);
  const Vector nothing = Simd::broadcast(-kInf);
  Doubles mass = {}, log = {};
  for (int64_t column = 0; column < args.count; column += kColumns) {
    Doubles z[kBatch], rounded[kBatch], f[kBatch], weight[kBatch];
    for (int i = 0; i < kBatch; i += 2) {
      const int64_t first = column + i * kWidth, left = args.count - first;
      const Vector x = left > 0 ? load_vector(logits + first, left) : nothing;
      z[i] = Simd::low_half(x);
      z[i + 1] = Simd::high_half(x);
    }
    for (int i = 0; i < kBatch; ++i) {
      z[i] = Simd::max((z[i] - args.largest) * args.rate, Doubles{} - 1000.0);
      rounded[i] = z[i] + kToInteger;
    }
    for (int i = 0; i < kBatch; ++i) {
      f[i] = z[i] - (rounded[i] - kToInteger);
      weight[i] = Simd::fma(f[i], Doubles{} + kExp2[0], Doubles{} + kExp2[1]);
    }
    for (int term = 2; term < 8; ++term) {
      for (int i = 0; i < kBatch; ++i) {
        weight[i] = Simd::fma(weight[i], f[i], Doubles{} + kExp2[term]);
      }
    }
    for (int i = 0; i < kBatch; ++i) {
      const Longs power = reinterpret_cast<Longs>(rounded[i]) << 52;
      weight[i] = reinterpret_cast<Doubles>(reinterpret_cast<Longs>(weight[i]) + power);
      mass += weight[i];
      log = Simd::fma(weight[i], z[i], log);
    }
  }
  out.mass += Simd::sum(mass);
  out.log += Simd::sum(log);
}

template <typename Rollout, typename Train, RunScale kScale>
void moment_run(const MomentArgs& args, MomentSums& out) {
  const Rollout* const rollout = static_cast<const Rollout*>(args.run.rollout);
  const Train* const train = static_cast<const Train*>(args.run.train);
  const Columns<kScale> columns(args.run);
  const Polynomials poly;
  const Polynomials squares(args.square_factor);
  const Vector residual = Simd::broadcast(args.residual);
  const Vector inverse_mass = Simd::broadcast(args.inverse_mass);
  const Vector train_mass = Simd::broadcast(args.inverse_train_mass);
  const Vector log2_square_scale = Simd::broadcast(args.log2_square_scale);
  const Vector root_mass = Simd::broadcast(args.root_mass);
  const Vector zero = Simd::broadcast(0.0f);
  const Vector half = Simd::broadcast(0.5f);
  Vector tv = zero, chi2 = zero, bhattacharyya = zero, outside = zero;
  Vector largest = Simd::broadcast(-kInf);
  for (int64_t column = 0; column < args.run.count; column += Simd::kLanes) {
    const int64_t left = args.run.count - column;
    const Pair pair = columns.template pair<true, false>(load_vector(rollout + column, left),
                                                         load_vector(train + column, left));
    const Vector t = Simd::sub(pair.u, residual);
    const Standing at(pair, t);
    const Vector p =
        Simd::zero_unless(at.in_rollout, Simd::mul(poly.exp2(pair.power), inverse_mass));
    const Vector step = Simd::fms(t, poly.psi_over_u(t), t);  // expm1(-t)
    const Vector half_t = Simd::mul(half, t);
    const Vector half_step = Simd::fms(half_t, poly.psi_over_u(half_t), half_t);
    const Vector moved = Simd::mul(p, step);
    tv = Simd::add_where(at.near, tv, Simd::abs(moved));
    chi2 = Simd::add_where(at.near, chi2, Simd::mul(moved, step));
    bhattacharyya =
        Simd::add_where(at.near, bhattacharyya, Simd::mul(p, Simd::mul(half_step, half_step)));
    largest = Simd::select(at.both, Simd::max(largest, Simd::sub(zero, t)), largest);
    if (Simd::all(at.near)) continue;
    const Mask far = Simd::but_not(at.both, at.near);
    // Bounded: a difference of two infinities would be NaN.
    const Vector lowest = Simd::broadcast(-kMost);
    const Vector power = Simd::max(pair.power, lowest);
    const Vector train_power = Simd::max(columns.train_power(pair), lowest);
    const Vector q = Simd::zero_unless(at.in_train, Simd::mul(poly.exp2(train_power), train_mass));
    // q^2 / p in log space: neither factor need be representable.
    const Vector log_square =
        Simd::add(Simd::sub(Simd::add(train_power, train_power), power), log2_square_scale);
    const Mask overflows = Simd::both(far, Simd::less(Simd::broadcast(127.0f), log_square));
    const Vector square = Simd::select(overflows, Simd::broadcast(kInf),
                                       squares.exp2(Simd::zero_unless(far, log_square)));
    const Vector excess = Simd::add(Simd::sub(square, Simd::add(q, q)), p);
    // sqrt(p q) in log space
    const Vector log_root = Simd::mul(half, Simd::add(train_power, power));
    const Vector root = Simd::mul(poly.exp2(Simd::zero_unless(far, log_root)), root_mass);
    const Vector apart = Simd::sub(Simd::add(p, q), Simd::add(root, root));
    const Vector difference = Simd::abs(Simd::sub(q, p));
    tv = Simd::add_where(Simd::but_not(at.both, at.near), tv, difference);
    tv = Simd::add_where(at.only_rollout, tv, p);
    tv = Simd::add_where(at.only_train, tv, q);
    chi2 = Simd::add_where(far, chi2, excess);
    chi2 = Simd::add_where(at.only_rollout, chi2, p);
    bhattacharyya = Simd::add_where(far, bhattacharyya, apart);
    bhattacharyya = Simd::add_where(at.only_rollout, bhattacharyya, p);
    bhattacharyya = Simd::add_where(at.only_train, bhattacharyya, q);
    outside = Simd::add_where(at.only_train, outside, q);
  }
  const auto sum = [](Vector value) {
    return Simd::sum(Simd::low_half(value) + Simd::high_half(value));
  };
  out.tv = sum(tv);
  out.chi2 = sum(chi2);
  out.bhattacharyya = sum(bhattacharyya);
  out.outside_mass = sum(outside);
  out.max_log_ratio = Simd::largest(largest);
}

template <bool kOnlyKlTrain, RunScale kScale>
struct Gradient {
  const GradientArgs& args;
  const Columns<kScale> columns;
  const Polynomials poly;
  const Vector residual, inverse_mass, g_kl;

  explicit Gradient(const GradientArgs& gradient)
      : args(gradient),
        columns(gradient.run),
        residual(Simd::broadcast(gradient.residual)),
        inverse_mass(Simd::broadcast(gradient.inverse_mass)),
        g_kl(Simd::broadcast(gradient.g_kl)) {}

  // q of columns that are not near. Up to |t| = kClose it is p exp(-t), so that q - p is as
  // accurate as p; the difference of two rounded exponentials would not be.
  Vector far_train(const Pair& pair, Vector p, Vector t) const {
    const Mask close = Simd::less_equal(Simd::abs(t), Simd::broadcast(kClose));
    const Vector power =
        Simd::select(close, Simd::mul(t, Simd::broadcast(-1.44269504f)), columns.train_power(pair));
    const Vector factor = Simd::select(close, p, Simd::broadcast(args.inverse_train_mass));
    return Simd::mul(poly.exp2(power), factor);
  }

  void at(Vector x, Vector y, Vector& grad_rollout, Vector& grad_train) const {
    const Vector zero = Simd::broadcast(0.0f);
    const Pair pair = columns.template pair<true, false>(x, y);
    Vector t = Simd::sub(pair.u, residual);
    const Vector p = Simd::mul(poly.exp2(pair.power), inverse_mass);
    // expm1(-t) = psi(t) - t
    Vector q_minus_p = Simd::mul(p, Simd::fms(t, poly.psi_over_u(t), t));
    const bool near =
        Simd::all(Simd::less_equal(Simd::abs(t), Simd::broadcast(near_limit<float>())));
    if constexpr (kOnlyKlTrain) {
      if (!near) {
        const Standing at(pair, t);
        const Vector far_q = far_train(pair, p, t);
        q_minus_p = Simd::select(
            at.near, q_minus_p,
            Simd::sub(Simd::zero_unless(at.in_train, far_q), Simd::zero_unless(at.in_rollout, p)));
      }
      grad_train = Simd::mul(g_kl, q_minus_p);
    } else {
      const Vector log_weight = natural(pair.power);
      Vector q = Simd::add(p, q_minus_p);
      Vector log_train = Simd::sub(log_weight, t);
      Mask in_rollout = Simd::first(Simd::kLanes), in_train = in_rollout;
      if (!near) {
        const Standing at(pair, t);
        in_rollout = at.in_rollout;
        in_train = at.in_train;
        const Vector far_log = Simd::add(natural(columns.train_power(pair)), residual);
        const Vector far_q = far_train(pair, p, t);
        log_train = Simd::select(at.near, log_train, far_log);
        q = Simd::zero_unless(in_train, Simd::select(at.near, q, far_q));
        q_minus_p =
            Simd::select(at.near, q_minus_p, Simd::sub(q, Simd::zero_unless(in_rollout, p)));
        const Vector bound = Simd::broadcast(kMost);
        t = Simd::min(Simd::max(Simd::zero_unless(at.both, t), Simd::sub(zero, bound)), bound);
      }
      const auto coefficient = [](float value) { return Simd::broadcast(value); };
      const Vector log_mass = Simd::broadcast(args.log_mass);
      const Vector log_p = Simd::sub(log_weight, log_mass);
      const Vector log_q = Simd::sub(log_train, log_mass);
      Vector inner = coefficient(args.g_logp_train);
      inner = Simd::fma(coefficient(args.g_kl_train_rollout),
                        Simd::add(t, coefficient(args.kl_train_rollout)), inner);
      inner = Simd::fma(coefficient(args.g_entropy_train),
                        Simd::add(log_q, coefficient(args.entropy_train)), inner);
      grad_train = Simd::mul(g_kl, q_minus_p);
      grad_train = Simd::sub(grad_train, Simd::zero_unless(in_train, Simd::mul(q, inner)));
      inner = Simd::sub(zero, coefficient(args.g_logp_rollout));
      inner = Simd::fma(g_kl, Simd::sub(t, coefficient(args.kl)), inner);
      inner = Simd::sub(inner, Simd::mul(coefficient(args.g_entropy_rollout),
                                         Simd::add(log_p, coefficient(args.entropy_rollout))));
      grad_rollout = Simd::zero_unless(in_rollout, Simd::mul(p, inner));
      grad_rollout =
          Simd::sub(grad_rollout, Simd::mul(coefficient(args.g_kl_train_rollout), q_minus_p));
      if constexpr (kScale != RunScale::kNone) {
        grad_rollout = Simd::mul(grad_rollout, columns.rollout_high);
      }
    }
    if constexpr (kScale != RunScale::kNone) {
      grad_train = Simd::mul(grad_train, columns.train_high);
    }
  }
};

template <bool kOnlyKlTrain, typename Rollout, typename Train, RunScale kScale>
void gradient_columns(const GradientArgs& args) {
  constexpr bool kSplit = kSplits<Rollout, Train>;
  constexpr int64_t kBlock = 2 * Simd::kLanes;
  const Rollout* const rollout = static_cast<const Rollout*>(args.run.rollout);
  const Train* const train = static_cast<const Train*>(args.run.train);
  Rollout* const to_rollout = kOnlyKlTrain ? nullptr : static_cast<Rollout*>(args.grad_rollout);
  Train* const to_train = static_cast<Train*>(args.grad_train);
  const Gradient<kOnlyKlTrain, kScale> gradient(args);
  const int64_t whole = args.run.count / kBlock * kBlock;
  Two grad_rollout, grad_train;
  for (int64_t column = 0; column < whole; column += kBlock) {
    prefetch_block(rollout + column);
    prefetch_block(train + column);
    const Two x = load_block<kSplit>(rollout + column), y = load_block<kSplit>(train + column);
    gradient.at(x.a, y.a, grad_rollout.a, grad_train.a);
    gradient.at(x.b, y.b, grad_rollout.b, grad_train.b);
    if (to_rollout != nullptr) store_block<kSplit>(to_rollout + column, grad_rollout);
    if (to_train != nullptr) store_block<kSplit>(to_train + column, grad_train);
  }
  const int64_t rest = args.run.count - whole;
  if (rest == 0) return;
  Padded<Rollout> last_rollout(rollout + whole, rest);
  Padded<Train> last_train(train + whole, rest);
  const Two x = load_block<kSplit>(last_rollout.columns);
  const Two y = load_block<kSplit>(last_train.columns);
  gradient.at(x.a, y.a, grad_rollout.a, grad_train.a);
  gradient.at(x.b, y.b, grad_rollout.b, grad_train.b);
  if (to_rollout != nullptr) {
    store_block<kSplit>(last_rollout.columns, grad_rollout);
    std::copy_n(last_rollout.columns, rest, to_rollout + whole);
  }
  if (to_train != nullptr) {
    store_block<kSplit>(last_train.columns, grad_train);
    std::copy_n(last_train.columns, rest, to_train + whole);
  }
}

template <typename Rollout, typename Train, RunScale kScale>
void gradient_run(const GradientArgs& args) {
  if (args.only_kl_train) {
    gradient_columns<true, Rollout, Train, kScale>(args);
  } else {
    gradient_columns<false, Rollout, Train, kScale>(args);
  }
}

template <typename Rollout, typename Train, int kExtra>
void fill_sum(RowRuns& runs, int rollout, int train) {
  constexpr RunScale kNone = RunScale::kNone;
  runs.sum[rollout][train][kExtra] = &sum_run<kExtra, Rollout, Train, kNone, true>;
  constexpr bool kFloats = sizeof(Rollout) == 4 && sizeof(Train) == 4 && kExtra == kRunPlain;
  if constexpr (kFloats || (sizeof(Rollout) == 2 && sizeof(Train) == 2)) {
    runs.sum_plain[rollout][train][kExtra] = &sum_run<kExtra, Rollout, Train, kNone, false>;
  }
}

template <typename Rollout, typename Train>
void fill(RowRuns& runs, int rollout, int train) {
  constexpr RunScale kNone = RunScale::kNone;
  fill_sum<Rollout, Train, 0>(runs, rollout, train);
  fill_sum<Rollout, Train, 1>(runs, rollout, train);
  fill_sum<Rollout, Train, 2>(runs, rollout, train);
  fill_sum<Rollout, Train, 3>(runs, rollout, train);
  runs.maxima[rollout][train] = &maxima_run<Rollout, Train>;
  runs.moments[rollout][train] = &moment_run<Rollout, Train, kNone>;
  runs.gradient[rollout][train] = &gradient_run<Rollout, Train, kNone>;
}

template <RunScale kScale>
void fill_scaled(RowRuns& runs, int mixed) {
  runs.sum_scaled[mixed][0] = &sum_run<0, float, float, kScale, true>;
  runs.sum_scaled[mixed][1] = &sum_run<3, float, float, kScale, true>;
  runs.moments_scaled[mixed] = &moment_run<float, float, kScale>;
  runs.gradient_scaled[mixed] = &gradient_run<float, float, kScale>;
}

RowRuns make_runs(const char* name) {
  RowRuns runs = {};
  runs.name = name;
  fill<float, float>(runs, 0, 0);
  fill<float, BFloat16>(runs, 0, 1);
  fill<float, Float16>(runs, 0, 2);
  fill<BFloat16, float>(runs, 1, 0);
  fill<BFloat16, BFloat16>(runs, 1, 1);
  fill<BFloat16, Float16>(runs, 1, 2);
  fill<Float16, float>(runs, 2, 0);
  fill<Float16, BFloat16>(runs, 2, 1);
  fill<Float16, Float16>(runs, 2, 2);
  runs.masses[0] = &mass_run<float>;
  runs.masses[1] = &mass_run<BFloat16>;
  runs.masses[2] = &mass_run<Float16>;
  fill_scaled<RunScale::kScaled>(runs, 0);
  fill_scaled<RunScale::kMixed>(runs, 1);
  return runs;
}

}  // namespace
}  // namespace trm::cpu
