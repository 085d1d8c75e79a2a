// SPDX-License-Identifier: Apache-2.0
// The runs of row_runs.h over the Simd that the including file chose. Formulas: divergence_state.h.
// Hot path per block of near columns (|u| <= 1/2, inside the frame): one exponential, one
// polynomial and three sums per vector, two compares. Log-ratios from -8 to 65536 cost a rounding
// and a scale more; where the rollout lacks columns, one exponential serves either side; anything
// else takes two. NaN, +inf or a frame that no longer covers ends the run.
#pragma once

#include <algorithm>

#include "cpu/row_runs.h"
#include "trm/polynomials.h"

namespace trm::cpu {
namespace {

using Vector = Simd::Vector;
using Mask = Simd::Mask;
using Bits = Simd::Bits;

constexpr float kInf = __builtin_inff();

constexpr float kLn2 = 0.693147181f;
// Log-ratios from -kClose to kFarthest have exp(-u) formed by itself, from the rollout's
// exponential. A train mass larger by more than exp(kClose) would inherit that one's errors.
constexpr float kClose = 8.0f;
constexpr float kFarthest = 65536.0f;
constexpr float kNoPower = -150.0f;  // 2^z is 0 below
// Equal columns round alike, so a chain of n float additions may be off by n 2^-25 of its sum: sums
// of so many additions each are added up, and those likewise (Chained).
constexpr int64_t kChain = 32;

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

// The polynomials, their coefficients kept as whole vectors: a broadcast out of memory costs a turn
// of the multiply or add pipe, a load does not.
struct Polynomials {
  Vector e0 = Simd::constant(0.99999994f), e1 = Simd::constant(0.693153083f),
         e2 = Simd::constant(0.240153611f), e3 = Simd::constant(0.0558263175f),
         e4 = Simd::constant(0.00898933969f), e5 = Simd::constant(0.00187757681f);
  Vector p0 = Simd::constant(0.5f), p1 = Simd::constant(-0.166666657f),
         p2 = Simd::constant(0.0416657962f), p3 = Simd::constant(-0.00833345205f),
         p4 = Simd::constant(0.0013981997f), p5 = Simd::constant(-0.000198756316f);

  // 2^z, z <= 126: 2^floor(z) times a degree-5 minimax of 2^f on 0 <= f < 1, relative error 9.0e-8;
  // 0 at -inf.
  template <typename T>
  T exp2(const T& z) const {
    const T f = fraction(z);
    T series = fma(repeat(z, e5), f, e4);
    series = fma(series, f, e3);
    series = fma(series, f, e2);
    series = fma(series, f, e1);
    series = fma(series, f, e0);
    return scale(series, z);
  }

  // psi(u) / u for |u| <= 1/2: degree-5 minimax of psi(u) / u^2, relative error 5.5e-8. (Degree 4
  // would do for KL, at 8e-7; but the log-ratio of a token inherits that times KL.)
  template <typename T>
  T psi_over_u(const T& u) const {
    T series = fma(repeat(u, p5), u, p4);
    series = fma(series, u, p3);
    series = fma(series, u, p2);
    series = fma(series, u, p1);
    series = fma(series, u, p0);
    return mul(u, series);
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
  return Simd::max(Simd::mul(power, Simd::broadcast(kLn2)), Simd::broadcast(-1e30f));
}

// What a pair of columns is in the frame, before any exponential.
struct Pair {
  Vector rollout, train;  // as stored
  Vector power;           // (x - M) log2(e)
  Vector difference;      // x - y, rounded; infinite where one side lacks the column
  Vector u;               // (x - y) - c
  Vector product_error_train;
  Vector scaled_train;

  Mask on_both_sides() const { return Simd::less(Simd::abs(difference), Simd::broadcast(kInf)); }
};

template <RunScale kScale>
struct Columns {
  Vector max_rollout, origin, rate, shift, shift_low, train_max, train_max_low;
  Vector rollout_high, rollout_low, train_high, train_low;

  explicit Columns(const RunArgs& args)
      : max_rollout(Simd::broadcast(args.frame.max_rollout)),
        origin(Simd::broadcast(-args.frame.origin)),
        rate(Simd::broadcast(args.rate)),
        shift(Simd::broadcast(args.frame.shift)),
        shift_low(Simd::broadcast(args.frame.shift_low)),
        train_max(Simd::broadcast(args.frame.train_max)),
        train_max_low(Simd::broadcast(-args.frame.train_max_low * args.rate)),
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
    const Vector largest = Simd::broadcast(0x1.fffffep127f);
    return Simd::min(Simd::max(value, Simd::sub(Simd::broadcast(0.0f), largest)), largest);
  }

  // kResidue restores the rounding of x - y.
  template <bool kResidue>
  Pair pair(Vector x, Vector y) const {
    Pair out;
    out.rollout = x;
    out.train = y;
    if constexpr (kScale == RunScale::kMixed) {
      Vector a_error, b_error;
      const Vector a = tempered(x, rollout_high, rollout_low, a_error);
      const Vector b = tempered(y, train_high, train_low, b_error);
      const Vector difference = out.difference = Simd::sub(a, b);
      const Vector error = Simd::add(Simd::sub(difference_error(a, b, difference), shift_low),
                                     Simd::sub(a_error, b_error));
      out.u = Simd::add(Simd::sub(difference, shift), error);
      out.u = Simd::select(Simd::less(Simd::abs(difference), Simd::broadcast(kInf)), bounded(out.u),
                           difference);
      out.power = Simd::mul(Simd::add(Simd::sub(a, max_rollout), a_error), rate);
      out.scaled_train = b;
      out.product_error_train = b_error;
    } else {
      const Vector difference = out.difference = Simd::sub(x, y);
      out.u = Simd::sub(difference, shift);
      if constexpr (kResidue) {
        out.u = Simd::add(out.u, Simd::sub(difference_error(x, y, difference), shift_low));
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

  // (y - (M - c)) log2(e), for columns that are not near; the train maximum M - c is kept to twice
  // a float's precision, so that this is as accurate as the rollout's.
  Vector train_power(const Pair& pair) const {
    if constexpr (kScale == RunScale::kMixed) {
      const Vector value = Simd::sub(pair.scaled_train, train_max);
      return Simd::fma(Simd::add(value, pair.product_error_train), rate, train_max_low);
    } else {
      return Simd::fma(Simd::sub(pair.train, train_max), rate, train_max_low);
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

// exp(-u) of a vector of columns, and psi(u) = exp(-u) - 1 + u to its own precision.
struct Decay {
  Vector psi, value;
  Vector excess;  // value - 1 of a near column, value of another
  Mask near;

  // 1 - (1 + u) exp(-u)
  Vector chi(Vector u) const {
    const Vector near_part = Simd::sub(Simd::mul(u, u), Simd::fma(u, psi, psi));
    const Vector far_part = Simd::sub(Simd::broadcast(1.0f), Simd::fma(u, value, value));
    return Simd::select(near, near_part, far_part);
  }
};

// What a run has accumulated.
template <int kExtra>
struct Sums {
  static constexpr bool kTrainGap = (kExtra & kRunTrainGap) != 0;
  static constexpr bool kEntropy = (kExtra & kRunEntropy) != 0;
  Vector near_mass, near_first, near_gap;
  // In loops that take others than near columns: w psi(u), and the excess of the train side's mass,
  // of which that of columns that are not near lacks their w, summed by itself.
  Vector bent_gap, bent_excess, bent_mass;
  Vector far_mass, far_train;  // columns of one side alone
  Vector train_gap, rollout_log, train_log;
  // Of x - y, where a block had -inf: infinite where one side lacks a column.
  Vector least = Simd::broadcast(0.0f), largest = Simd::broadcast(0.0f);

  Sums() {
    near_mass = near_first = near_gap = Simd::broadcast(0.0f);
    bent_gap = bent_excess = bent_mass = far_mass = far_train = near_mass;
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

  // Columns of log-ratios from -kClose to kFarthest. With gaps: where the mask is off, u is 0 and
  // the weight another's. B of near columns is gap less moment; of others, exp(-u) less 1: either
  // way the other difference would be a small one of large numbers.
  template <bool kNear, bool kGaps>
  void add_decay(const Pair& pair, Mask here, Vector weight, const Decay& decay) {
    near_mass = kGaps ? Simd::add_where(here, near_mass, weight) : Simd::add(near_mass, weight);
    if constexpr (kNear && kGaps) {
      near_first = Simd::fma(weight, pair.u, near_first);
      near_gap = Simd::fma(weight, decay.psi, near_gap);
    } else {
      bent_gap = Simd::fma(weight, decay.psi, bent_gap);
      bent_excess = Simd::fma(weight, decay.excess, bent_excess);
      if constexpr (!kNear)
        bent_mass = Simd::add_where(Simd::opposite(decay.near), bent_mass, weight);
    }
    if constexpr (kTrainGap) train_gap = Simd::fma(weight, decay.chi(pair.u), train_gap);
    if constexpr (kEntropy) {
      const Vector inside = kGaps ? Simd::zero_unless(here, weight) : weight;
      const Vector log_weight = natural(pair.power);
      rollout_log = Simd::fma(inside, log_weight, rollout_log);
      train_log =
          Simd::fma(Simd::mul(inside, decay.value), Simd::sub(log_weight, pair.u), train_log);
    }
  }

  // Columns that the rollout gives no mass.
  void add_train_only(const Pair& pair, Mask here, Vector train_power, Vector mass) {
    far_train = Simd::add_where(here, far_train, mass);
    see(pair.difference);
    if constexpr (kTrainGap) {
      const Mask both = pair.on_both_sides();
      train_gap = Simd::sub(
          train_gap, Simd::zero_unless(Simd::both(here, both), Simd::fma(mass, pair.u, mass)));
    }
    if constexpr (kEntropy) {
      train_log = Simd::fma_where(here, mass, natural(train_power), train_log);
    }
  }

  // Any columns that the frame covers; mass is the train side's.
  void add_any(const Pair& pair, Mask near, Vector weight, Vector ratio, Vector train_power,
               Vector mass) {
    const Mask both = pair.on_both_sides();
    const Mask alone = Simd::opposite(both);
    const Vector moment = Simd::zero_unless(both, Simd::mul(weight, pair.u));
    const Vector near_gap = Simd::mul(moment, ratio);
    const Vector far_gap = Simd::add(Simd::sub(mass, weight), moment);
    const Vector excess = Simd::select(near, Simd::sub(near_gap, moment), mass);
    near_mass = Simd::add_where(both, near_mass, weight);
    bent_gap = Simd::add_where(both, bent_gap, Simd::select(near, near_gap, far_gap));
    bent_excess = Simd::add_where(both, bent_excess, excess);
    bent_mass = Simd::add_where(Simd::but_not(both, near), bent_mass, weight);
    far_mass = Simd::add_where(alone, far_mass, weight);
    far_train = Simd::add_where(alone, far_train, mass);
    see(pair.difference);
    if constexpr (kTrainGap) {
      const Vector near_part = Simd::mul(moment, chi_over_u(pair.u, ratio));
      const Vector far_part = Simd::sub(weight, Simd::fma(mass, pair.u, mass));
      train_gap = Simd::add_where(both, train_gap, Simd::select(near, near_part, far_part));
    }
    if constexpr (kEntropy) {
      rollout_log = Simd::fma(weight, natural(pair.power), rollout_log);
      train_log = Simd::fma(mass, natural(train_power), train_log);
    }
  }

  // NaN, where both sides lack a column, is passed over.
  void see(Vector difference) {
    least = Simd::min(difference, least);
    largest = Simd::max(difference, largest);
  }

  void join_near(const Sums& other) {
    near_mass = Simd::add(near_mass, other.near_mass);
    near_first = Simd::add(near_first, other.near_first);
    near_gap = Simd::add(near_gap, other.near_gap);
    join_extras(other);
  }

  void join_bent(const Sums& other) {
    near_mass = Simd::add(near_mass, other.near_mass);
    add_bent(other);
    join_extras(other);
  }

  void join(const Sums& other) {
    join_near(other);
    add_bent(other);
    far_mass = Simd::add(far_mass, other.far_mass);
    far_train = Simd::add(far_train, other.far_train);
    least = Simd::min(least, other.least);
    largest = Simd::max(largest, other.largest);
  }

  void add_bent(const Sums& other) {
    bent_gap = Simd::add(bent_gap, other.bent_gap);
    bent_excess = Simd::add(bent_excess, other.bent_excess);
    bent_mass = Simd::add(bent_mass, other.bent_mass);
  }

  void join_extras(const Sums& other) {
    if constexpr (kTrainGap) train_gap = Simd::add(train_gap, other.train_gap);
    if constexpr (kEntropy) {
      rollout_log = Simd::add(rollout_log, other.rollout_log);
      train_log = Simd::add(train_log, other.train_log);
    }
  }

  // `others`: any but near columns were added.
  void write(bool others, RunSums& out) const {
    out = {};
    out.near_mass = Simd::sum(near_mass);
    out.near_first = Simd::sum(near_first);
    out.near_gap = Simd::sum(near_gap);
    if (others) {
      // B, of any columns, is near_gap - near_first.
      const double gap = Simd::sum(bent_gap);
      out.near_first += gap - (Simd::sum(bent_excess) - Simd::sum(bent_mass));
      out.near_gap += gap;
      out.far_mass = Simd::sum(far_mass);
      out.far_train = Simd::sum(far_train);
      out.violates = Simd::largest(largest) == kInf;
      out.outside = Simd::largest(Simd::sub(Simd::broadcast(0.0f), least)) == kInf;
    }
    // What only the rollout has, as exact as in S.
    if constexpr (kTrainGap) out.train_gap = Simd::sum(train_gap) + out.far_mass;
    if constexpr (kEntropy) {
      out.rollout_log = Simd::sum(rollout_log);
      out.train_log = Simd::sum(train_log);
    }
  }
};

// Sums of sums: no chain of additions is longer than kChain, however long the run.
template <int kExtra>
class Chained {
 public:
  void join_near(const Sums<kExtra>& stretch) {
    recent_.join_near(stretch);
    count();
  }
  void join_bent(const Sums<kExtra>& stretch) {
    recent_.join_bent(stretch);
    others_ = true;
    count();
  }
  void join(const Sums<kExtra>& stretch) {
    recent_.join(stretch);
    others_ = true;
    count();
  }
  bool has_others() const { return others_; }
  Sums<kExtra> total() const {
    Sums<kExtra> out = earlier_;
    out.join(recent_);
    return out;
  }

 private:
  void count() {
    if (++joined_ < kChain) return;
    earlier_.join(recent_);
    recent_ = {};
    joined_ = 0;
  }

  Sums<kExtra> earlier_, recent_;
  int64_t joined_ = 0;
  bool others_ = false;
};

// Which loop a run's next block belongs to.
enum class Loop { kNear, kClose, kNearGapped, kCloseGapped, kAny };

// The run's inputs and constants.
template <typename Rollout, typename Train, RunScale kScale, bool kResidue>
struct Run {
  static constexpr bool kSplit = kSplits<Rollout, Train>;
  static constexpr int64_t kBlock = 2 * Simd::kLanes;

  const Rollout* const rollout;
  const Train* const train;
  const int64_t count;
  const Columns<kScale> columns;
  const Polynomials poly;
  const Vector limit = Simd::constant(near_limit<float>());
  const Vector slack, train_slack;
  const Vector infinite = Simd::constant(kInf);
  const Vector bound = Simd::constant(kClose), minus_bound = Simd::constant(-kClose);
  const Vector farthest = Simd::constant(kFarthest), no_power = Simd::constant(kNoPower);
  const Vector minus_log2e = Simd::constant(-1.44269504f);
  const Vector one = Simd::constant(1.0f);
  const Vector ln2 = Simd::constant(kLn2);
  const Vector to_integer = Simd::constant(0x1.8p23f);  // added and subtracted, it rounds
  const Vector zero = Simd::constant(0.0f);

  [[gnu::always_inline]] explicit Run(const RunArgs& args)
      : rollout(static_cast<const Rollout*>(args.rollout)),
        train(static_cast<const Train*>(args.train)),
        count(args.count),
        columns(args),
        slack(Simd::constant(args.slack)),
        train_slack(Simd::constant(args.train_slack)) {}

  Two rollout_block(int64_t column) const { return load_block<kSplit>(rollout + column); }
  Two train_block(int64_t column) const { return load_block<kSplit>(train + column); }
  void prefetch(int64_t column) const {
    prefetch_block(rollout + column);
    prefetch_block(train + column);
  }
  Pair pair(Vector x, Vector y) const { return columns.template pair<kResidue>(x, y); }

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

  Mask are_near(Vector u) const { return Simd::less_equal(Simd::abs(u), limit); }
  // On for log-ratios from -kClose to kFarthest.
  Mask are_close(Vector u) const { return Simd::between(u, minus_bound, farthest); }
  // On where the rollout has no column, or gives it no mass.
  Mask are_gaps(Vector power) const { return Simd::less(power, no_power); }

  bool are_near(const Pair& a, const Pair& b) const {
    return Simd::all(Simd::less_equal(Simd::larger_magnitude(a.u, b.u), limit));
  }
  bool are_near_or_gaps(const Pair& a, const Pair& b) const {
    return Simd::all(Simd::both(Simd::either(are_near(a.u), are_gaps(a.power)),
                                Simd::either(are_near(b.u), are_gaps(b.power))));
  }
  bool are_close(const Pair& a, const Pair& b) const {
    return Simd::all(Simd::both_between(a.u, b.u, minus_bound, farthest));
  }
  bool are_close_or_gaps(const Pair& a, const Pair& b) const {
    return Simd::all(Simd::both(Simd::either(are_close(a.u), are_gaps(a.power)),
                                Simd::either(are_close(b.u), are_gaps(b.power))));
  }

  // With u = v - k ln 2 and |v| <= ln 2 / 2, exp(-u) = 2^k (1 - v + psi(v)). Where k = 0 psi(u) is
  // psi(v); elsewhere it is no small part of exp(-u) - 1 + u.
  [[gnu::always_inline]] void decays(const Two& u, Decay& a, Decay& b) const {
    const Two k = {Simd::sub(Simd::fma(u.a, minus_log2e, to_integer), to_integer),
                   Simd::sub(Simd::fma(u.b, minus_log2e, to_integer), to_integer)};
    const Two v = fma(k, Two{ln2, ln2}, u);
    const Two psi = mul(v, poly.psi_over_u(v));
    const Two power = scale(Two{one, one}, k);
    const Two step = {Simd::sub(psi.a, v.a), Simd::sub(psi.b, v.b)};
    const Two value = fma(power, step, power);
    a.near = Simd::equal(k.a, zero);
    b.near = Simd::equal(k.b, zero);
    a.value = value.a;
    b.value = value.b;
    a.excess = Simd::select(a.near, step.a, value.a);
    b.excess = Simd::select(b.near, step.b, value.b);
    a.psi = Simd::select(a.near, psi.a, Simd::add(value.a, Simd::sub(u.a, one)));
    b.psi = Simd::select(b.near, psi.b, Simd::add(value.b, Simd::sub(u.b, one)));
  }

  // Where every log-ratio is near.
  [[gnu::always_inline]] void near_decays(const Two& u, Decay& a, Decay& b) const {
    const Two psi = mul(u, poly.psi_over_u(u));
    const Two step = {Simd::sub(psi.a, u.a), Simd::sub(psi.b, u.b)};
    const Mask near = Simd::first(Simd::kLanes);
    a = {psi.a, Simd::add(one, step.a), step.a, near};
    b = {psi.b, Simd::add(one, step.b), step.b, near};
  }

  // Adds a block of log-ratios from -kClose to kFarthest, all near or not.
  template <bool kNear, int kExtra>
  [[gnu::always_inline]] void add_close(Sums<kExtra>& sums, const Pair& a, const Pair& b) const {
    const Two weight = poly.exp2(Two{a.power, b.power});
    Decay decay_a, decay_b;
    if constexpr (kNear) {
      near_decays(Two{a.u, b.u}, decay_a, decay_b);
    } else {
      decays(Two{a.u, b.u}, decay_a, decay_b);
    }
    sums.template add_decay<kNear, false>(a, Simd::none(), weight.a, decay_a);
    sums.template add_decay<kNear, false>(b, Simd::none(), weight.b, decay_b);
  }

  // Adds a block where the rollout lacks columns, or gives them no mass, and the others are near
  // (or have log-ratios from -kClose to kFarthest): one exponential a column does. False, and
  // nothing added, for another, or where the frame does not cover.
  template <bool kNear, int kExtra>
  [[gnu::always_inline]] bool add_gapped(Sums<kExtra>& sums, const Pair& a, const Pair& b,
                                         bool& gapless, bool& near) const {
    const Two train_power = {columns.train_power(a), columns.train_power(b)};
    const Mask here_a = kNear ? are_near(a.u) : are_close(a.u);
    const Mask here_b = kNear ? are_near(b.u) : are_close(b.u);
    const Mask gap_a = are_gaps(a.power), gap_b = are_gaps(b.power);
    const Two power = {Simd::select(gap_a, train_power.a, a.power),
                       Simd::select(gap_b, train_power.b, b.power)};
    const Mask holds = Simd::both(
        covered(a, b),
        Simd::both(Simd::less_equal(power.a, train_slack), Simd::less_equal(power.b, train_slack)));
    const Bits known = (Simd::bits(here_a) | Simd::bits(gap_a)) &
                       (Simd::bits(here_b) | Simd::bits(gap_b)) & Simd::bits(holds);
    if (known != Simd::kEvery) return false;
    gapless &= (Simd::bits(here_a) & Simd::bits(here_b)) == Simd::kEvery;
    const Two weight = poly.exp2(power);
    sums.add_train_only(a, gap_a, train_power.a, weight.a);
    sums.add_train_only(b, gap_b, train_power.b, weight.b);
    if ((Simd::bits(gap_a) & Simd::bits(gap_b)) == Simd::kEvery) return true;
    Pair in_a = a, in_b = b;
    in_a.u = Simd::zero_unless(here_a, a.u);
    in_b.u = Simd::zero_unless(here_b, b.u);
    Decay decay_a, decay_b;
    if constexpr (kNear) {
      near_decays(Two{in_a.u, in_b.u}, decay_a, decay_b);
    } else {
      decays(Two{in_a.u, in_b.u}, decay_a, decay_b);
    }
    sums.template add_decay<kNear, true>(in_a, here_a, weight.a, decay_a);
    sums.template add_decay<kNear, true>(in_b, here_b, weight.b, decay_b);
    near &= (Simd::bits(decay_a.near) & Simd::bits(decay_b.near)) == Simd::kEvery;
    return true;
  }

  // Adds any block; false, and nothing added, where the frame does not cover or there is a NaN or
  // +inf. Up to |u| = kClose the train side's mass is w exp(-u): B and G subtract it from w, and
  // two rounded exponentials would differ by more than they are worth.
  template <int kExtra>
  [[gnu::always_inline]] bool add_any(Sums<kExtra>& sums, const Pair& a, const Pair& b) const {
    const Two train_power = {columns.train_power(a), columns.train_power(b)};
    const Mask holds =
        Simd::both(Simd::both(Simd::less_equal(a.power, slack), Simd::less_equal(b.power, slack)),
                   Simd::both(Simd::less_equal(train_power.a, train_slack),
                              Simd::less_equal(train_power.b, train_slack)));
    if (!Simd::all(holds)) return false;
    const Mask near_a = are_near(a.u), near_b = are_near(b.u);
    const Mask close_a = Simd::less_equal(Simd::abs(a.u), bound);
    const Mask close_b = Simd::less_equal(Simd::abs(b.u), bound);
    const Two weight = poly.exp2(Two{a.power, b.power});
    const Two power = {Simd::mul_where(close_a, a.u, minus_log2e, train_power.a),
                       Simd::mul_where(close_b, b.u, minus_log2e, train_power.b)};
    const Two unit = {Simd::select(close_a, weight.a, one), Simd::select(close_b, weight.b, one)};
    const Two mass = mul(poly.exp2(power), unit);
    const Two ratio = poly.psi_over_u(Two{a.u, b.u});
    sums.add_any(a, near_a, weight.a, ratio.a, train_power.a, mass.a);
    sums.add_any(b, near_b, weight.b, ratio.b, train_power.b, mass.b);
    return true;
  }
};

// The loop for the block at a column, which another could not take; out of line, so that the loops
// need none of it.
template <typename Rollout, typename Train, RunScale kScale, bool kResidue>
[[gnu::noinline]] Loop loop_at(const RunArgs& args, int64_t column, Loop from) {
  const Run<Rollout, Train, kScale, kResidue> run(args);
  const Two x = run.rollout_block(column), y = run.train_block(column);
  const Pair a = run.pair(x.a, y.a), b = run.pair(x.b, y.b);
  Loop found = Loop::kAny;
  if (!Simd::all(run.covered(a, b))) return found;
  if (run.are_near(a, b)) {
    found = Loop::kNear;
  } else if (run.are_close(a, b)) {
    found = Loop::kClose;
  } else if (run.are_near_or_gaps(a, b)) {
    found = Loop::kNearGapped;
  } else if (run.are_close_or_gaps(a, b)) {
    found = Loop::kCloseGapped;
  }
  return found == from ? Loop::kAny : found;  // the train side leaves the frame
}

// Blocks of log-ratios from -kClose to kFarthest; ends at another, or after a group of near columns
// alone. The first column not consumed.
template <int kExtra, typename Rollout, typename Train, RunScale kScale, bool kResidue>
[[gnu::noinline]] int64_t close_run(const RunArgs& args, int64_t column, Chained<kExtra>& sums,
                                    Loop& next) {
  constexpr int64_t kBlock = 2 * Simd::kLanes;
  constexpr int64_t kGroup = kChain / 4 * kBlock;
  const Run<Rollout, Train, kScale, kResidue> run(args);
  const int64_t whole = run.count / kBlock * kBlock;
  next = Loop::kClose;
  while (next == Loop::kClose && column < whole) {
    bool near = true;
    Sums<kExtra> here;
    for (const int64_t end = std::min(column + kGroup, whole); column < end; column += kBlock) {
      run.prefetch(column);
      const Two x = run.rollout_block(column), y = run.train_block(column);
      const Pair a = run.pair(x.a, y.a), b = run.pair(x.b, y.b);
      const Mask covered = run.covered(a, b);
      if (Simd::all(
              Simd::both(Simd::less_equal(Simd::larger_magnitude(a.u, b.u), run.limit), covered))) {
        run.template add_close<true>(here, a, b);
        continue;
      }
      if (!Simd::all(
              Simd::both(Simd::both_between(a.u, b.u, run.minus_bound, run.farthest), covered))) {
        next = loop_at<Rollout, Train, kScale, kResidue>(args, column, Loop::kClose);
        break;
      }
      near = false;
      run.template add_close<false>(here, a, b);
    }
    sums.join_bent(here);
    if (next == Loop::kClose && near) next = Loop::kNear;
  }
  return column;
}

// Blocks for add_gapped(); ends at another, or after a group without gaps or whose other columns
// are near. The first column not consumed.
template <bool kNear, int kExtra, typename Rollout, typename Train, RunScale kScale, bool kResidue>
[[gnu::noinline]] int64_t gapped_run(const RunArgs& args, int64_t column, Chained<kExtra>& sums,
                                     Loop& next) {
  constexpr int64_t kBlock = 2 * Simd::kLanes;
  constexpr int64_t kGroup = kChain / 4 * kBlock;
  constexpr Loop kThis = kNear ? Loop::kNearGapped : Loop::kCloseGapped;
  const Run<Rollout, Train, kScale, kResidue> run(args);
  const int64_t whole = run.count / kBlock * kBlock;
  next = kThis;
  while (next == kThis && column < whole) {
    bool gapless = true, near = true;
    Sums<kExtra> here;
    for (const int64_t end = std::min(column + kGroup, whole); column < end; column += kBlock) {
      run.prefetch(column);
      const Two x = run.rollout_block(column), y = run.train_block(column);
      const Pair a = run.pair(x.a, y.a), b = run.pair(x.b, y.b);
      if (!run.template add_gapped<kNear>(here, a, b, gapless, near)) {
        gapless = near = false;
        next = loop_at<Rollout, Train, kScale, kResidue>(args, column, kThis);
        break;
      }
    }
    sums.join(here);
    if (gapless) {
      next = kNear ? Loop::kNear : Loop::kClose;
    } else if (!kNear && near) {
      next = Loop::kNearGapped;
    }
  }
  return column;
}

// Any blocks; ends at one that the frame does not cover or that is not all numbers (`covered` is
// false then), or after a group of near columns alone. The first column not consumed.
template <int kExtra, typename Rollout, typename Train, RunScale kScale, bool kResidue>
[[gnu::noinline]] int64_t any_run(const RunArgs& args, int64_t column, Chained<kExtra>& sums,
                                  Loop& next, bool& covered) {
  constexpr int64_t kBlock = 2 * Simd::kLanes;
  constexpr int64_t kGroup = kChain / 4 * kBlock;
  const Run<Rollout, Train, kScale, kResidue> run(args);
  const int64_t whole = run.count / kBlock * kBlock;
  next = Loop::kAny;
  while (next == Loop::kAny && covered && column < whole) {
    bool near = true;
    Sums<kExtra> here;
    for (const int64_t end = std::min(column + kGroup, whole); column < end; column += kBlock) {
      run.prefetch(column);
      const Two x = run.rollout_block(column), y = run.train_block(column);
      const Pair a = run.pair(x.a, y.a), b = run.pair(x.b, y.b);
      if (run.are_near(a, b) && Simd::all(run.covered(a, b))) {
        run.add_near(here, a, b);
        continue;
      }
      near = false;
      covered = run.add_any(here, a, b);
      if (!covered) break;
    }
    sums.join(here);
    if (near) next = Loop::kNear;
  }
  return column;
}

// Five loops, each with the registers for its own work; the rarer four out of line.
template <int kExtra, typename Rollout, typename Train, RunScale kScale, bool kResidue>
int64_t sum_run(const RunArgs& args, RunSums& out) {
  constexpr int64_t kBlock = 2 * Simd::kLanes;
  constexpr int64_t kStretch = kChain / 2 * kBlock;
  const Run<Rollout, Train, kScale, kResidue> run(args);
  const int64_t whole = args.count / kBlock * kBlock;
  Chained<kExtra> sums;
  int64_t column = 0;
  bool covered = true;
  for (Loop loop = Loop::kNear; covered && column < whole;) {
    while (loop == Loop::kNear && column < whole) {
      Sums<kExtra> here;
      for (const int64_t end = std::min(column + kStretch, whole); column < end; column += kBlock) {
        run.prefetch(column);
        const Two x = run.rollout_block(column), y = run.train_block(column);
        const Pair a = run.pair(x.a, y.a), b = run.pair(x.b, y.b);
        const Mask near = Simd::less_equal(Simd::larger_magnitude(a.u, b.u), run.limit);
        if (!Simd::all(Simd::both(near, run.covered(a, b)))) {
          loop = loop_at<Rollout, Train, kScale, kResidue>(args, column, Loop::kNear);
          break;
        }
        run.add_near(here, a, b);
      }
      sums.join_near(here);
    }
    if (loop == Loop::kClose) {
      column = close_run<kExtra, Rollout, Train, kScale, kResidue>(args, column, sums, loop);
    }
    if (loop == Loop::kNearGapped) {
      column = gapped_run<true, kExtra, Rollout, Train, kScale, kResidue>(args, column, sums, loop);
    }
    if (loop == Loop::kCloseGapped) {
      column =
          gapped_run<false, kExtra, Rollout, Train, kScale, kResidue>(args, column, sums, loop);
    }
    if (loop == Loop::kAny) {
      column = any_run<kExtra, Rollout, Train, kScale, kResidue>(args, column, sums, loop, covered);
    }
  }
  if (covered && column < args.count) {
    const Padded<Rollout> last_rollout(run.rollout + whole, args.count - whole);
    const Padded<Train> last_train(run.train + whole, args.count - whole);
    const Two x = load_block<run.kSplit>(last_rollout.columns);
    const Two y = load_block<run.kSplit>(last_train.columns);
    Sums<kExtra> here;
    covered = run.add_any(here, run.pair(x.a, y.a), run.pair(x.b, y.b));
    sums.join(here);
    if (covered) column = args.count;
  }
  sums.total().write(sums.has_others(), out);
  out.non_finite = !covered && !run.are_numbers(column);
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

template <typename Rollout, typename Train, RunScale kScale>
void moment_run(const MomentArgs& args, MomentSums& out) {
  const Rollout* const rollout = static_cast<const Rollout*>(args.run.rollout);
  const Train* const train = static_cast<const Train*>(args.run.train);
  const Columns<kScale> columns(args.run);
  const Polynomials poly;
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
    const Pair pair = columns.template pair<true>(load_vector(rollout + column, left),
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
    const Vector lowest = Simd::broadcast(-1e30f);
    const Vector power = Simd::max(pair.power, lowest);
    const Vector train_power = Simd::max(columns.train_power(pair), lowest);
    const Vector q = Simd::zero_unless(at.in_train, Simd::mul(poly.exp2(train_power), train_mass));
    // q^2 / p in log space: neither factor need be representable.
    const Vector log_square =
        Simd::add(Simd::sub(Simd::add(train_power, train_power), power), log2_square_scale);
    const Mask overflows = Simd::both(far, Simd::less(Simd::broadcast(127.0f), log_square));
    const Vector square = Simd::select(overflows, Simd::broadcast(kInf),
                                       poly.exp2(Simd::zero_unless(far, log_square)));
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
  out.tv = Simd::sum(tv);
  out.chi2 = Simd::sum(chi2);
  out.bhattacharyya = Simd::sum(bhattacharyya);
  out.outside_mass = Simd::sum(outside);
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
    const Pair pair = columns.template pair<true>(x, y);
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
        const Vector bound = Simd::broadcast(1e30f);
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
  fill_scaled<RunScale::kScaled>(runs, 0);
  fill_scaled<RunScale::kMixed>(runs, 1);
  return runs;
}

}  // namespace
}  // namespace trm::cpu
