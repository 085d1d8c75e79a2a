// SPDX-License-Identifier: Apache-2.0
// The pair state: everything one sweep over part of a vocabulary knows about two rows of logits.
//
// x = rollout logits, y = train logits, p = softmax(x), q = softmax(y). A state lives in a frame
// (M, c): M is close to the largest x seen, c to the difference of the largest x and the largest y.
// With w = exp(x - M), e = exp(y - M + c) and u = (x - y) - c (so e = w exp(-u)) it holds
//
//   near (|u| <= 1/2 when added)   Sn = sum w    An = sum w u    Gn = sum w psi(u)
//   far                            Sf = sum w    Af = sum w u    Qf = sum e
//   on request                     R = sum w chi(u),  E = sum w (x - M),  Y = sum e (y - M + c)
//
// and flags. Any split of a row, in any order, merges to the same state up to rounding: CPU slices,
// warps, blocks, vocabulary shards and GEMM tiles all call merge() below. c is part of the frame
// and is never recomputed from two maxima, so u and the moves c' - c stay exact where they matter.
//
// Decisions (support, missing evidence) are taken on the logits and kept in sticky flags, never on
// an exponential that may have underflowed, so they do not depend on how the row was split.
#pragma once

#include "trm/polynomials.h"
#include "trm/portability.h"

namespace trm {

enum StateFlag : uint32_t {
  kHasRollout = 1u << 0,        // a finite rollout logit was seen
  kHasTrain = 1u << 1,          // a finite train logit was seen
  kNonFinite = 1u << 2,         // a NaN or +inf logit was seen: the row has no value
  kSupportViolation = 1u << 3,  // rollout > -inf where train = -inf: KL(rollout||train) = +inf
  kOutsideSupport = 1u << 4,    // train > -inf where rollout = -inf: KL(train||rollout) = +inf
  kHasToken = 1u << 5,          // the sampled token's column is in this part
  kCarriesTrainGap = 1u << 6,   // R was accumulated
  kCarriesEntropy = 1u << 7,    // E and Y were accumulated
};
constexpr uint32_t kCarries = kCarriesTrainGap | kCarriesEntropy;

// Order of the public float columns; version 1 of the layout.
enum StateColumn : int32_t {
  kMaxRollout,
  kShift,
  kNearMass,
  kNearFirst,
  kNearGap,
  kFarMass,
  kFarFirst,
  kFarTrain,
  kFlags,
  kTrainGap,
  kRolloutLog,
  kTrainLog,
  kTokenRollout,
  kTokenTrain,
  kStateColumns,
};

template <typename Real>
struct DivergenceState {
  Real max_rollout = 0;  // M
  Real shift = 0;        // c
  Real near_mass = 0;    // Sn
  Real near_first = 0;   // An
  Real near_gap = 0;     // Gn
  Real far_mass = 0;     // Sf
  Real far_first = 0;    // Af
  Real far_train = 0;    // Qf
  Real train_gap = 0;    // R
  Real rollout_log = 0;  // E
  Real train_log = 0;    // Y
  Real token_rollout = 0;
  Real token_train = 0;
  uint32_t flags = 0;

  TRM_INLINE bool has(uint32_t flag) const { return (flags & flag) != 0; }
  TRM_INLINE bool has_both() const {
    return (flags & (kHasRollout | kHasTrain)) == (kHasRollout | kHasTrain);
  }
};

template <typename Real>
struct Frame {
  Real max_rollout;
  Real shift;
};

// The frame of two maxima, either of which may be -inf (nothing finite on that side).
template <typename Real>
TRM_INLINE Frame<Real> frame_of(Real max_rollout, Real max_train) {
  if (!(max_rollout > -infinity<Real>())) return {max_train, Real(0)};
  if (!(max_train > -infinity<Real>())) return {max_rollout, Real(0)};
  return {max_rollout, max_rollout - max_train};
}

// Rounding error of fl(a - b): a - b = difference + error, exactly.
template <typename Real>
TRM_INLINE Real difference_error(Real a, Real b, Real difference) {
  const Real b_part = a - difference;
  const Real a_part = difference + b_part;
  return (a - a_part) + (b_part - b);
}

// u = (x - y) - c with the rounding of x - y restored.
template <typename Real>
TRM_INLINE Real log_ratio_in_frame(Real x, Real y, Real shift) {
  const Real difference = x - y;
  return (difference - shift) + difference_error(x, y, difference);
}

// y - M + c, summed so that a large common offset of y and c cancels before rounding can hurt.
template <typename Real>
TRM_INLINE Real train_exponent(Real y, Real max_rollout, Real shift) {
  const Real sum = y + shift;
  return (sum - max_rollout) + difference_error(y, -shift, sum);
}

// A logit over its temperature: value + error is the quotient to twice the working precision, so
// that rounding a temperature's product does not show in u. Not of quotients beyond 2^30: a row's
// largest has no error in its frame, and e to the power of one so large may overflow.
template <typename Real>
struct Logit {
  Real value;
  Real error = 0;
};

// 1 / temperature as an unevaluated sum.
template <typename Real>
struct InverseTemperature {
  Real high = 1;
  Real low = 0;
};

template <typename Real>
TRM_INLINE InverseTemperature<Real> inverse_temperature(double temperature) {
  const double inverse = 1.0 / temperature;
  InverseTemperature<Real> out;
  out.high = static_cast<Real>(inverse);
  // The remainder of 1/temperature after `high`, itself formed without cancellation.
  out.low = static_cast<Real>(std::fma(-static_cast<double>(out.high), temperature, 1.0) * inverse);
  return out;
}

template <typename Real>
TRM_INLINE Logit<Real> over_temperature(Real x, const InverseTemperature<Real>& inverse) {
  Logit<Real> out;
  out.value = x * inverse.high;
  if (std::fabs(out.value) <= Real(0x1p30)) {
    out.error = std::fma(x, inverse.low, std::fma(x, inverse.high, -out.value));
  }
  return out;
}

// Adds column (x, y) to a state whose frame covers it.
template <bool TrainGap, bool Entropy, typename Real>
TRM_INLINE void add_in_frame(DivergenceState<Real>& s, Logit<Real> rollout,
                             Logit<Real> train_logit) {
  constexpr Real kNegative = -infinity<Real>();
  const Real x = rollout.value;
  const Real y = train_logit.value;
  if (!(x < infinity<Real>()) || !(y < infinity<Real>())) {
    s.flags |= kNonFinite;
    return;
  }
  if (x > kNegative && y > kNegative) {
    const Real u = log_ratio_in_frame(x, y, s.shift) + (rollout.error - train_logit.error);
    const Real log_weight = (x - s.max_rollout) + rollout.error;
    const Real weight = exponential(log_weight);
    if (std::fabs(u) <= near_limit<Real>()) {
      const Real gap = psi_near(u);
      s.near_mass += weight;
      s.near_first += weight * u;
      s.near_gap += weight * gap;
      if (TrainGap) s.train_gap += weight * chi_near(u, gap);
      if (Entropy) {
        s.rollout_log += weight * log_weight;
        s.train_log += weight * (Real(1) - u + gap) * (log_weight - u);
      }
    } else {
      const Real log_train = train_exponent(y, s.max_rollout, s.shift) + train_logit.error;
      const Real train = exponential(log_train);
      s.far_mass += weight;
      s.far_first += weight * u;
      s.far_train += train;
      if (TrainGap) s.train_gap += weight - train * (Real(1) + u);
      if (Entropy) {
        s.rollout_log += weight * log_weight;
        s.train_log += train * log_train;
      }
    }
  } else if (x > kNegative) {
    const Real log_weight = (x - s.max_rollout) + rollout.error;
    const Real weight = exponential(log_weight);
    s.flags |= kSupportViolation;
    s.far_mass += weight;
    if (TrainGap) s.train_gap += weight;
    if (Entropy) s.rollout_log += weight * log_weight;
  } else if (y > kNegative) {
    const Real log_train = train_exponent(y, s.max_rollout, s.shift) + train_logit.error;
    const Real train = exponential(log_train);
    s.flags |= kOutsideSupport;
    s.far_train += train;
    if (Entropy) s.train_log += train * log_train;
  }
}

// Re-expresses the sums of a state in the frame (M - drop, c + turn); the caller sets the frame.
// The train side's maximum falls by train_drop = drop + turn, which a huge drop and turn, of a side
// that had masks alone, do not tell.
// Exact in exact arithmetic. The exponentials it forms are those of maxima that fall, so neither
// exceeds 1 by more than the slack of a lazy frame.
template <typename Real>
TRM_INLINE void move_by(DivergenceState<Real>& s, Real drop, Real turn, Real train_drop) {
  if (drop == Real(0) && turn == Real(0)) return;
  const Real k = s.has(kHasRollout) ? exponential(drop) : Real(0);
  const Real k_train = s.has(kHasTrain) ? exponential(train_drop) : Real(0);
  const Real mass = s.near_mass + s.far_mass;
  const Real near_excess = s.near_gap - s.near_first;
  const Real near_train = s.near_mass + near_excess;
  const Real train = near_train + s.far_train;
  const Real excess = near_excess + (s.far_train - s.far_mass);
  if (s.has_both()) {
    s.near_first = k > Real(0) ? k * (s.near_first - turn * s.near_mass) : Real(0);
    s.far_first = k > Real(0) ? k * (s.far_first - turn * s.far_mass) : Real(0);
    if (std::fabs(turn) <= near_limit<Real>()) {
      const Real gap = psi_near(-turn);
      s.near_gap = k * (s.near_gap + (turn + gap) * near_excess + gap * s.near_mass);
      s.train_gap = k_train * (s.train_gap + turn * excess) + k * mass * chi_near(-turn, gap);
    } else {
      s.near_gap = k_train * near_train - k * s.near_mass + s.near_first;
      const Real bend = k_train > Real(0) ? k_train * turn : Real(0);
      s.train_gap = k_train * s.train_gap + bend * train + mass * (k - k_train);
    }
    if (std::fabs(turn) > 2 * near_limit<Real>()) {
      // What was near is far. Beside a near_first of a huge turn, B would be lost.
      s.far_first += s.near_first;
      s.far_mass = mass;
      s.far_train = train;
      s.near_mass = s.near_first = s.near_gap = Real(0);
    }
  } else {
    s.train_gap *= k;
  }
  s.rollout_log = k > Real(0) ? k * (s.rollout_log + drop * mass) : Real(0);
  s.train_log = k_train > Real(0) ? k_train * (s.train_log + train_drop * train) : Real(0);
  s.near_mass *= k;
  s.far_mass *= k;
  s.far_train *= k_train;
}

template <typename Real>
TRM_INLINE void move_to(DivergenceState<Real>& s, Frame<Real> frame) {
  const Real drop = s.max_rollout - frame.max_rollout, turn = frame.shift - s.shift;
  const Real error = difference_error(s.max_rollout, frame.max_rollout, drop) +
                     difference_error(frame.shift, s.shift, turn);
  move_by(s, drop, turn, (drop + turn) + error);
  s.max_rollout = frame.max_rollout;
  s.shift = frame.shift;
}

// How far a logit may exceed its lane's frame before the lane moves. Not a matter of overflow: c
// must stay the difference of the heaviest tokens' logits. A frame that lags by s nats makes
// G/S up to e^s / p_max times the KL it is part of, and that many times the rounding.
template <typename Real>
TRM_INLINE constexpr Real frame_slack() {
  return Real(1);
}

// Adds a column to a state that follows its own running maxima: the streaming form of a lane.
template <bool TrainGap, bool Entropy, typename Real>
TRM_INLINE void add_streaming(DivergenceState<Real>& s, Logit<Real> rollout, Logit<Real> train) {
  const Real x = rollout.value;
  const Real y = train.value;
  const bool new_x = x > -infinity<Real>() && x < infinity<Real>() &&
                     !(s.has(kHasRollout) && x <= s.max_rollout + frame_slack<Real>());
  const bool new_y = y > -infinity<Real>() && y < infinity<Real>() &&
                     !(s.has(kHasTrain) && y <= s.max_rollout - s.shift + frame_slack<Real>());
  if (new_x || new_y) {
    Real max_rollout = s.has(kHasRollout) ? s.max_rollout : -infinity<Real>();
    Real max_train = s.has(kHasTrain) ? s.max_rollout - s.shift : -infinity<Real>();
    // Both maxima move when one does: moved alone it would put the shift up to the slack off, and
    // every later column in the far sums.
    if (x < infinity<Real>() && x > max_rollout) max_rollout = x;
    if (y < infinity<Real>() && y > max_train) max_train = y;
    move_to(s, frame_of(max_rollout, max_train));
    s.flags |= (new_x ? kHasRollout : 0u) | (new_y ? kHasTrain : 0u);
  }
  add_in_frame<TrainGap, Entropy>(s, rollout, train);
}

TRM_INLINE double greater(double a, double b) { return a > b ? a : b; }

// A state's two maxima, as frame_of() wants them.
TRM_INLINE double rollout_maximum(const DivergenceState<double>& s) {
  return s.has(kHasRollout) ? s.max_rollout : -infinity<double>();
}
TRM_INLINE double train_maximum(const DivergenceState<double>& s) {
  return s.has(kHasTrain) ? s.max_rollout - s.shift : -infinity<double>();
}

// Moves a state that holds something to the frame of the two maxima.
TRM_INLINE void join_frame(DivergenceState<double>& s, double max_rollout, double max_train) {
  if (s.has(kHasRollout) || s.has(kHasTrain)) move_to(s, frame_of(max_rollout, max_train));
}

// The one merge, in double. Commutative; associative up to rounding.
TRM_HOST_DEVICE inline DivergenceState<double> merge(DivergenceState<double> a,
                                                     DivergenceState<double> b) {
  const double max_rollout = greater(rollout_maximum(a), rollout_maximum(b));
  const double max_train = greater(train_maximum(a), train_maximum(b));
  join_frame(a, max_rollout, max_train);
  join_frame(b, max_rollout, max_train);
  const bool b_framed = b.has(kHasRollout) || b.has(kHasTrain);
  DivergenceState<double> sum;
  sum.max_rollout = b_framed ? b.max_rollout : a.max_rollout;
  sum.shift = b_framed ? b.shift : a.shift;
  sum.near_mass = a.near_mass + b.near_mass;
  sum.near_first = a.near_first + b.near_first;
  sum.near_gap = a.near_gap + b.near_gap;
  sum.far_mass = a.far_mass + b.far_mass;
  sum.far_first = a.far_first + b.far_first;
  sum.far_train = a.far_train + b.far_train;
  sum.train_gap = a.train_gap + b.train_gap;
  sum.rollout_log = a.rollout_log + b.rollout_log;
  sum.train_log = a.train_log + b.train_log;
  sum.token_rollout = a.has(kHasToken) ? a.token_rollout : b.token_rollout;
  sum.token_train = a.has(kHasToken) ? a.token_train : b.token_train;
  sum.flags = ((a.flags | b.flags) & ~kCarries) | (a.flags & b.flags & kCarries);
  return sum;
}

template <typename To, typename From>
TRM_INLINE DivergenceState<To> convert_state(const DivergenceState<From>& s) {
  DivergenceState<To> out;
  out.max_rollout = static_cast<To>(s.max_rollout);
  out.shift = static_cast<To>(s.shift);
  out.near_mass = static_cast<To>(s.near_mass);
  out.near_first = static_cast<To>(s.near_first);
  out.near_gap = static_cast<To>(s.near_gap);
  out.far_mass = static_cast<To>(s.far_mass);
  out.far_first = static_cast<To>(s.far_first);
  out.far_train = static_cast<To>(s.far_train);
  out.train_gap = static_cast<To>(s.train_gap);
  out.rollout_log = static_cast<To>(s.rollout_log);
  out.train_log = static_cast<To>(s.train_log);
  out.token_rollout = static_cast<To>(s.token_rollout);
  out.token_train = static_cast<To>(s.token_train);
  out.flags = s.flags;
  return out;
}

// c, or log(S/Q) where c is further than 2^-16 from it. Sums in a frame with c = log(S/Q) are as
// small as the KL; with c = M - max y they are up to 1 / p_max larger, and so is their rounding.
TRM_HOST_DEVICE inline double centred_shift(const DivergenceState<double>& s) {
  if (!s.has_both()) return s.shift;
  const double excess = (s.near_gap - s.near_first) + (s.far_train - s.far_mass);
  const double residual = -std::log1p(excess / (s.near_mass + s.far_mass));
  const bool centred =
      std::fabs(residual) <= 0x1p-16 || !(std::fabs(residual) < infinity<double>());
  return centred ? s.shift : s.shift + residual;
}

// Stores a state in columns of Real. The frame is rounded by moving the state to the rounded frame,
// never by changing c under sums that were taken with another one.
template <typename Real>
TRM_INLINE void store_state(DivergenceState<double> s, Real* columns) {
  if constexpr (sizeof(Real) < sizeof(double)) {
    move_to(s, {static_cast<double>(static_cast<Real>(s.max_rollout)),
                static_cast<double>(static_cast<Real>(centred_shift(s)))});
  }
  columns[kMaxRollout] = static_cast<Real>(s.max_rollout);
  columns[kShift] = static_cast<Real>(s.shift);
  columns[kNearMass] = static_cast<Real>(s.near_mass);
  columns[kNearFirst] = static_cast<Real>(s.near_first);
  columns[kNearGap] = static_cast<Real>(s.near_gap);
  columns[kFarMass] = static_cast<Real>(s.far_mass);
  columns[kFarFirst] = static_cast<Real>(s.far_first);
  columns[kFarTrain] = static_cast<Real>(s.far_train);
  columns[kFlags] = static_cast<Real>(s.flags);
  columns[kTrainGap] = static_cast<Real>(s.train_gap);
  columns[kRolloutLog] = static_cast<Real>(s.rollout_log);
  columns[kTrainLog] = static_cast<Real>(s.train_log);
  columns[kTokenRollout] = static_cast<Real>(s.token_rollout);
  columns[kTokenTrain] = static_cast<Real>(s.token_train);
}

template <typename Real>
TRM_INLINE DivergenceState<double> load_state(const Real* columns) {
  DivergenceState<double> s;
  s.max_rollout = columns[kMaxRollout];
  s.shift = columns[kShift];
  s.near_mass = columns[kNearMass];
  s.near_first = columns[kNearFirst];
  s.near_gap = columns[kNearGap];
  s.far_mass = columns[kFarMass];
  s.far_first = columns[kFarFirst];
  s.far_train = columns[kFarTrain];
  s.flags = static_cast<uint32_t>(columns[kFlags]);
  s.train_gap = columns[kTrainGap];
  s.rollout_log = columns[kRolloutLog];
  s.train_log = columns[kTrainLog];
  s.token_rollout = columns[kTokenRollout];
  s.token_train = columns[kTokenTrain];
  return s;
}

// What finish() makes of a whole row's state, in nats. Order of the `outputs` bits of every op.
enum Output : int32_t {
  kKl,              // KL(rollout||train)
  kKlTrainRollout,  // KL(train||rollout)
  kEntropyRollout,
  kEntropyTrain,
  kLogpRollout,  // of the sampled token
  kLogpTrain,
  kLogRatio,  // log q(token) - log p(token)
  kValues,    // up to here: from one sweep, differentiable
  kTv = kValues,
  kChi2,           // sum over p > 0 of q^2/p, minus 1
  kBhattacharyya,  // 1 - sum sqrt(p q)
  kMaxLogRatio,    // max over p > 0 of log(q/p)
  kOutsideMass,    // sum of q where p = 0
  kOutputs,
};
constexpr uint32_t kValueOutputs = (1u << kValues) - 1u;
constexpr uint32_t kDiagnosticOutputs = ((1u << kOutputs) - 1u) & ~kValueOutputs;
constexpr uint32_t kTokenOutputs = 1u << kLogpRollout | 1u << kLogpTrain | 1u << kLogRatio;
constexpr uint32_t kEntropyOutputs = 1u << kEntropyRollout | 1u << kEntropyTrain;

// Row statistics that backward needs: p = exp(x - M - log_mass), log(p/q) = (x - y) - c - residual,
// and the values that gradients subtract, in full precision (t - KL cancels on a sharp row).
enum Statistic : int32_t {
  kStatMaxRollout,
  kStatLogMass,
  kStatShift,
  kStatResidual,
  kStatKl,
  kStatKlTrainRollout,
  kStatEntropyRollout,
  kStatEntropyTrain,
  kStatistics,
};

struct RowResult {
  double values[kValues];
  double statistics[kStatistics];
};

// b - log1p(b) >= 0
TRM_HOST_DEVICE inline double log1p_gap(double b) {
  if (!(std::fabs(b) < 0.1)) return b - std::log1p(b);
  double series = 0.0;  // the first term left out is below 1e-17 of the sum
  for (int k = 18; k >= 2; --k) series = 1.0 / k - b * series;
  return b * b * series;
}

// (1 + b) log1p(b) - b >= 0
TRM_HOST_DEVICE inline double xlogx_gap(double b) {
  if (!(std::fabs(b) < 0.1)) return (1.0 + b) * std::log1p(b) - b;
  double series = 0.0;
  for (int k = 18; k >= 2; --k) series = 1.0 / (k * (k - 1)) - b * series;
  return b * b * series;
}

TRM_INLINE double at_least_zero(double value) { return value < 0.0 ? 0.0 : value; }
TRM_INLINE double at_most_zero(double value) { return value > 0.0 ? 0.0 : value; }

TRM_HOST_DEVICE inline RowResult finish(const DivergenceState<double>& s) {
  constexpr double kNan = quiet_nan<double>();
  constexpr double kInf = infinity<double>();
  RowResult out;
  for (double& value : out.values) value = kNan;
  for (double& value : out.statistics) value = kNan;
  if (s.has(kNonFinite) || !s.has_both()) return out;

  const double mass = s.near_mass + s.far_mass;
  const double train = s.near_mass + (s.near_gap - s.near_first) + s.far_train;
  const double excess = (s.near_gap - s.near_first) + (s.far_train - s.far_mass);
  const double b = excess / mass;
  const bool far_frame = std::fabs(b) > 0.5;
  const double log_mass = std::log(mass);
  const double log_gain = far_frame ? std::log(train / mass) : std::log1p(b);

  if (s.has(kSupportViolation)) {
    out.values[kKl] = kInf;
  } else if (far_frame) {
    out.values[kKl] = at_least_zero((s.near_first + s.far_first) / mass + log_gain);
  } else {
    const double gap = s.near_gap + (s.far_train - s.far_mass + s.far_first);
    out.values[kKl] = at_least_zero(gap / mass - log1p_gap(b));
  }
  if (s.has(kCarriesTrainGap)) {
    out.values[kKlTrainRollout] =
        s.has(kOutsideSupport)
            ? kInf
            : at_least_zero(far_frame ? (s.train_gap + excess) / train - log_gain
                                      : (s.train_gap / mass - xlogx_gap(b)) / (1.0 + b));
  }
  if (s.has(kCarriesEntropy)) {
    out.values[kEntropyRollout] = at_least_zero(log_mass - s.rollout_log / mass);
    out.values[kEntropyTrain] = at_least_zero(std::log(train) - s.train_log / train);
  }
  if (s.has(kHasToken)) {
    const double x = s.token_rollout, y = s.token_train;
    const double u = x > -kInf && y > -kInf ? log_ratio_in_frame(x, y, s.shift) : x - y;
    const double log_train = y > -kInf ? train_exponent(y, s.max_rollout, s.shift) : y;
    out.values[kLogpRollout] = at_most_zero(x - s.max_rollout - log_mass);
    out.values[kLogpTrain] = at_most_zero(log_train - log_mass - log_gain);
    out.values[kLogRatio] = -(u + log_gain);
  }
  out.statistics[kStatMaxRollout] = s.max_rollout;
  out.statistics[kStatLogMass] = log_mass;
  out.statistics[kStatShift] = s.shift;
  out.statistics[kStatResidual] = -log_gain;
  out.statistics[kStatKl] = out.values[kKl];
  out.statistics[kStatKlTrainRollout] = out.values[kKlTrainRollout];
  out.statistics[kStatEntropyRollout] = out.values[kEntropyRollout];
  out.statistics[kStatEntropyTrain] = out.values[kEntropyTrain];
  return out;
}

// Everything backward needs for one row: the frame, and the upstream gradient of each output.
template <typename Real>
struct RowGradient {
  Real max_rollout;
  Real shift;         // log S - log Q, the mean of (x - y) that makes t = log(p/q), rounded
  Real residual;      // and what the rounding left,
  Real residual_low;  // twice
  Real log_mass;
  Real inverse_mass;
  Real kl;
  Real kl_train_rollout;
  Real entropy_rollout;
  Real entropy_train;
  Real g_kl;
  Real g_kl_train_rollout;
  Real g_entropy_rollout;
  Real g_entropy_train;
  Real g_logp_rollout;
  Real g_logp_train;
};

template <typename Real>
struct ColumnGradient {
  Real rollout;
  Real train;
};

// d(loss)/dx and d(loss)/dy of one column, without the indicator of the sampled token. Near tokens
// (|log(p/q)| <= 1/2) never form q by its own exponential; far ones never multiply by an infinity.
//   dKL(p||q):  dx = p (t - KL),  dy = q - p           with t = log(p/q)
//   dKL(q||p):  dx = p - q,       dy = q (-t - KL(q||p))
//   dH(p):      dx = -p (log p + H(p));  dH(q) likewise in y
//   dlog p_tok: dx = [token] - p;        dlog q_tok likewise in y
template <typename Real>
TRM_INLINE ColumnGradient<Real> column_gradient(const RowGradient<Real>& row, Logit<Real> rollout,
                                                Logit<Real> train) {
  const Real x = rollout.value;
  const Real y = train.value;
  constexpr Real kNegative = -infinity<Real>();
  const bool in_rollout = x > kNegative;
  const bool in_train = y > kNegative;
  if (!in_rollout && !in_train) return {Real(0), Real(0)};
  Real p = 0, q = 0, q_minus_p, t = 0, log_p = 0, log_q = 0;
  if (in_rollout) {
    log_p = (x - row.max_rollout) + rollout.error;
    p = exponential(log_p) * row.inverse_mass;
    log_p -= row.log_mass;
  }
  if (in_rollout && in_train) {
    t = (log_ratio_in_frame(x, y, row.shift) + (rollout.error - train.error)) - row.residual;
    t -= row.residual_low;
  }
  if (in_rollout && in_train && std::fabs(t) <= near_limit<Real>()) {
    q_minus_p = p * (psi_near(t) - t);
    q = p + q_minus_p;
    log_q = log_p - t;
  } else {
    if (in_train) {
      log_q = (train_exponent(y, row.max_rollout, row.shift) + train.error) + row.residual;
      q = exponential(log_q) * row.inverse_mass;
      log_q -= row.log_mass;
    }
    q_minus_p = q - p;
  }
  ColumnGradient<Real> out;
  out.rollout = -row.g_kl_train_rollout * q_minus_p - row.g_logp_rollout * p;
  out.train = row.g_kl * q_minus_p - row.g_logp_train * q;
  if (in_rollout) {
    if (row.g_kl != Real(0)) out.rollout += row.g_kl * p * (t - row.kl);
    if (row.g_entropy_rollout != Real(0)) {
      out.rollout -= row.g_entropy_rollout * p * (log_p + row.entropy_rollout);
    }
  }
  if (in_train) {
    if (row.g_kl_train_rollout != Real(0)) {
      out.train -= row.g_kl_train_rollout * q * (t + row.kl_train_rollout);
    }
    if (row.g_entropy_train != Real(0)) {
      out.train -= row.g_entropy_train * q * (log_q + row.entropy_train);
    }
  }
  return out;
}

// Second sweep: sums over columns of a finished row, in its statistics' frame.
struct DivergenceMoments {
  double tv = 0;             // sum |q - p|
  double chi2 = 0;           // sum over p > 0 of (q - p)^2 / p
  double bhattacharyya = 0;  // sum (sqrt p - sqrt q)^2
  double outside_mass = 0;   // sum of q where p = 0
  double max_log_ratio = -infinity<double>();
};

template <typename Real>
TRM_INLINE void add_moments(DivergenceMoments& sums, const double* statistics, Logit<Real> rollout,
                            Logit<Real> train) {
  const Real x = rollout.value;
  const Real y = train.value;
  const bool in_rollout = x > -infinity<Real>();
  const bool in_train = y > -infinity<Real>();
  const Real max_rollout = static_cast<Real>(statistics[kStatMaxRollout]);
  // As in read_gradient.
  const double log_ratio = statistics[kStatShift] + statistics[kStatResidual];
  const Real shift = static_cast<Real>(log_ratio);
  const double left =
      (statistics[kStatShift] - static_cast<double>(shift)) + statistics[kStatResidual];
  const Real residual = static_cast<Real>(left);
  const Real residual_low = static_cast<Real>(left - static_cast<double>(residual));
  const Real log_mass = static_cast<Real>(
      statistics[kStatLogMass] + (statistics[kStatMaxRollout] - static_cast<double>(max_rollout)));
  Real p = 0, q = 0, log_p = 0, log_q = 0;
  if (in_rollout) {
    log_p = ((x - max_rollout) + rollout.error) - log_mass;
    p = exponential(log_p);
  }
  if (in_train) {
    log_q = (train_exponent(y, max_rollout, shift) + train.error) + residual - log_mass;
    q = exponential(log_q);
  }
  if (in_rollout && in_train) {
    const Real u = log_ratio_in_frame(x, y, shift) + (rollout.error - train.error);
    const Real t = (u - residual) - residual_low;
    if (-t > sums.max_log_ratio) sums.max_log_ratio = -t;
    if (std::fabs(t) <= near_limit<Real>()) {
      const Real step = psi_near(t) - t;  // expm1(-t)
      const Real half_step = psi_near(t / 2) - t / 2;
      sums.tv += p * std::fabs(step);
      sums.chi2 += p * step * step;
      sums.bhattacharyya += p * half_step * half_step;
    } else {
      // q^2 / p and sqrt(p q) in log space: neither factor need be representable.
      sums.tv += std::fabs(q - p);
      sums.chi2 += exponential(2 * log_q - log_p) - 2 * q + p;
      sums.bhattacharyya += p + q - 2 * exponential((log_p + log_q) / 2);
    }
  } else {
    sums.tv += p + q;
    sums.bhattacharyya += p + q;
    if (in_rollout) sums.chi2 += p;
    if (in_train) sums.outside_mass += q;
  }
}

TRM_INLINE void merge_moments(DivergenceMoments& sums, const DivergenceMoments& other) {
  sums.tv += other.tv;
  sums.chi2 += other.chi2;
  sums.bhattacharyya += other.bhattacharyya;
  sums.outside_mass += other.outside_mass;
  if (other.max_log_ratio > sums.max_log_ratio) sums.max_log_ratio = other.max_log_ratio;
}

// sum over p > 0 of q^2/p - 1 = sum (q - p)^2/p - 2 (q outside); in order of the outputs from kTv.
TRM_INLINE void finish_moments(const DivergenceMoments& sums, double* out) {
  out[kTv - kValues] = sums.tv / 2;
  out[kChi2 - kValues] = sums.chi2 - 2 * sums.outside_mass;
  out[kBhattacharyya - kValues] = sums.bhattacharyya / 2;
  out[kMaxLogRatio - kValues] = sums.max_log_ratio;
  out[kOutsideMass - kValues] = sums.outside_mass;
}

}  // namespace trm
