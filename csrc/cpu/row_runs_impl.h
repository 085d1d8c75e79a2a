// SPDX-License-Identifier: Apache-2.0
// The runs of row_runs.h over the Simd that the including file chose. Formulas: divergence_state.h.
// Hot path per vector of near columns (|u| <= 1/2, inside the frame): one exponential, one
// polynomial, three sums, two compares. A vector with any other column (far, -inf) pays a second
// exponential; NaN, +inf or a frame that no longer covers ends the run.
#pragma once

#include "cpu/row_runs.h"
#include "trm/polynomials.h"

namespace trm::cpu {
namespace {

using Vector = Simd::Vector;
using Mask = Simd::Mask;

constexpr float kInf = __builtin_inff();

// psi(u) / u for |u| <= 1/2
inline Vector psi_over_u(Vector u) {
  Vector series = Simd::broadcast(-0.000198756241f);
  series = Simd::fma(series, u, Simd::broadcast(0.00139819975f));
  series = Simd::fma(series, u, Simd::broadcast(-0.00833345218f));
  series = Simd::fma(series, u, Simd::broadcast(0.0416657959f));
  series = Simd::fma(series, u, Simd::broadcast(-0.166666655f));
  series = Simd::fma(series, u, Simd::broadcast(0.500000012f));
  return Simd::mul(u, series);
}

inline Vector psi(Vector u) { return Simd::mul(u, psi_over_u(u)); }

inline Vector difference_error(Vector a, Vector b, Vector difference) {
  const Vector b_part = Simd::sub(a, difference);
  const Vector a_part = Simd::add(difference, b_part);
  return Simd::add(Simd::sub(a, a_part), Simd::sub(b_part, b));
}

// What a pair of columns is in the frame, before any exponential.
struct Pair {
  Vector rollout, train;  // as stored
  Vector log_weight;      // x - M
  Vector u;               // (x - y) - c
  Vector product_error_train;
  Vector scaled_train;
};

template <RunScale kScale>
struct Columns {
  Vector max_rollout, shift, shift_low, train_max, train_max_low;
  Vector rollout_high, rollout_low, train_high, train_low;

  explicit Columns(const RunArgs& args)
      : max_rollout(Simd::broadcast(args.frame.max_rollout)),
        shift(Simd::broadcast(args.frame.shift)),
        shift_low(Simd::broadcast(args.frame.shift_low)),
        train_max(Simd::broadcast(args.frame.train_max)),
        train_max_low(Simd::broadcast(args.frame.train_max_low)),
        rollout_high(Simd::broadcast(args.rollout_high)),
        rollout_low(Simd::broadcast(args.rollout_low)),
        train_high(Simd::broadcast(args.train_high)),
        train_low(Simd::broadcast(args.train_low)) {}

  Vector scaled(Vector value) const {
    // The low part of a product with -inf would be NaN.
    const Mask finite = Simd::less(Simd::broadcast(-kInf), value);
    const Vector product = Simd::fma(value, rollout_high, Simd::mul(value, rollout_low));
    return Simd::select(finite, product, value);
  }

  // kResidue restores the rounding of x - y: needed where a stored logit has 24 bits.
  template <bool kResidue>
  Pair pair(Vector x, Vector y) const {
    Pair out;
    out.rollout = x;
    out.train = y;
    if constexpr (kScale == RunScale::kMixed) {
      const Vector a = Simd::mul(x, rollout_high);
      const Vector b = Simd::mul(y, train_high);
      // A product with -inf has no error.
      const Vector nothing = Simd::broadcast(-kInf);
      const Vector a_error =
          Simd::zero_unless(Simd::less(nothing, x),
                            Simd::fma(x, rollout_low, Simd::product_error(x, rollout_high, a)));
      const Vector b_error = Simd::zero_unless(
          Simd::less(nothing, y), Simd::fma(y, train_low, Simd::product_error(y, train_high, b)));
      const Vector difference = Simd::sub(a, b);
      const Vector error = Simd::add(Simd::sub(difference_error(a, b, difference), shift_low),
                                     Simd::sub(a_error, b_error));
      out.u = Simd::add(Simd::sub(difference, shift), error);
      out.log_weight = Simd::add(Simd::sub(a, max_rollout), a_error);
      out.scaled_train = b;
      out.product_error_train = b_error;
    } else {
      const Vector difference = Simd::sub(x, y);
      out.u = Simd::sub(difference, shift);
      if constexpr (kResidue) {
        out.u = Simd::add(out.u, Simd::sub(difference_error(x, y, difference), shift_low));
      }
      out.log_weight = Simd::sub(x, max_rollout);
      if constexpr (kScale == RunScale::kScaled) {
        out.u = scaled(out.u);
        out.log_weight = scaled(out.log_weight);
      }
    }
    return out;
  }

  // y - (M - c), for columns that are not near; the train maximum M - c is kept to twice a float's
  // precision, so that this is as accurate as x - M.
  Vector log_train(const Pair& pair) const {
    if constexpr (kScale == RunScale::kMixed) {
      const Vector value = Simd::sub(Simd::sub(pair.scaled_train, train_max), train_max_low);
      return Simd::add(value, pair.product_error_train);
    } else {
      const Vector value = Simd::sub(Simd::sub(pair.train, train_max), train_max_low);
      if constexpr (kScale == RunScale::kScaled) return scaled(value);
      return value;
    }
  }
};

// Where a pair's columns stand; from the logits alone.
struct Standing {
  Mask in_rollout, in_train, both, near;

  Standing(const Pair& pair, Vector distance) {
    const Vector nothing = Simd::broadcast(-kInf);
    in_rollout = Simd::less(nothing, pair.rollout);
    in_train = Simd::less(nothing, pair.train);
    both = Simd::both(in_rollout, in_train);
    near = Simd::both(both,
                      Simd::less_equal(Simd::abs(distance), Simd::broadcast(near_limit<float>())));
  }
};

template <typename Rollout, typename Train>
inline constexpr bool kNeedsResidue = sizeof(Rollout) == 4 || sizeof(Train) == 4;

template <int kExtra, typename Rollout, typename Train, RunScale kScale>
int64_t sum_run(const RunArgs& args, RunSums& out) {
  constexpr bool kTrainGap = (kExtra & kRunTrainGap) != 0;
  constexpr bool kEntropy = (kExtra & kRunEntropy) != 0;
  const Rollout* const rollout = static_cast<const Rollout*>(args.rollout);
  const Train* const train = static_cast<const Train*>(args.train);
  const Columns<kScale> columns(args);
  const Vector limit = Simd::broadcast(near_limit<float>());
  const Vector slack = Simd::broadcast(args.slack);
  const Vector one = Simd::broadcast(1.0f);
  const Vector zero = Simd::broadcast(0.0f);
  Vector near_mass = zero, near_first = zero, near_gap = zero;
  Vector far_mass = zero, far_first = zero, far_train = zero;
  Vector train_gap = zero, rollout_log = zero, train_log = zero;
  Mask violates = Simd::none(), outside = Simd::none();
  out.non_finite = false;

  int64_t column = 0;
  for (; column < args.count; column += Simd::kLanes) {
    Vector x, y;
    if (column + Simd::kLanes <= args.count) {
      x = Simd::load(rollout + column);
      y = Simd::load(train + column);
    } else {
      const Mask tail = Simd::first(args.count - column);
      x = Simd::load(rollout + column, tail);
      y = Simd::load(train + column, tail);
    }
    const Pair pair = columns.template pair<kNeedsResidue<Rollout, Train>>(x, y);
    const Mask covered = Simd::less_equal(pair.log_weight, slack);
    const Vector distance = Simd::abs(pair.u);
    const Mask near = Simd::both(covered, Simd::less_equal(distance, limit));
    Mask weighs;
    const Vector weight = Simd::exp(pair.log_weight, weighs);
    const Vector moment = Simd::mul(weight, pair.u);
    const Vector ratio = psi_over_u(pair.u);
    if (Simd::all(near)) {
      near_mass = Simd::add(near_mass, weight);
      near_first = Simd::add(near_first, moment);
      near_gap = Simd::fma(moment, ratio, near_gap);
      if constexpr (kTrainGap) {
        // chi = u^2 - psi (1 + u) = u (u - (psi/u) (1 + u))
        const Vector bent = Simd::sub(pair.u, Simd::fma(ratio, pair.u, ratio));
        train_gap = Simd::fma(moment, bent, train_gap);
      }
      if constexpr (kEntropy) {
        rollout_log = Simd::fma(weight, pair.log_weight, rollout_log);
        const Vector mass = Simd::fma(moment, Simd::sub(ratio, one), weight);
        train_log = Simd::fma(mass, Simd::sub(pair.log_weight, pair.u), train_log);
      }
      continue;
    }
    const Vector log_train = columns.log_train(pair);
    const Vector infinite = Simd::broadcast(kInf);
    if (!Simd::all(Simd::both(covered, Simd::less_equal(log_train, slack)))) {
      out.non_finite = !Simd::all(Simd::both(Simd::less(x, infinite), Simd::less(y, infinite)));
      if (out.non_finite) return args.count;
      break;  // the frame does not cover this vector
    }
    // From here every logit is finite or -inf. Where an exponential is 0 its product is 0, whatever
    // the other factor is.
    Mask carries;
    const Vector mass = Simd::exp(log_train, carries);
    const Mask far = Simd::but_not(covered, near);
    Mask moves = Simd::both(far, Simd::less(distance, infinite));
    if (!Simd::all(Simd::either(moves, near))) {
      const Mask in_rollout = Simd::less(Simd::broadcast(-kInf), x);
      const Mask in_train = Simd::less(Simd::broadcast(-kInf), y);
      violates = Simd::either(violates, Simd::but_not(in_rollout, in_train));
      outside = Simd::either(outside, Simd::but_not(in_train, in_rollout));
      // A difference of two finite logits that overflowed does count.
      moves = Simd::both(far, Simd::both(in_rollout, in_train));
    }
    near_mass = Simd::add_where(near, near_mass, weight);
    near_first = Simd::add_where(near, near_first, moment);
    near_gap = Simd::fma_where(near, moment, ratio, near_gap);
    far_mass = Simd::add_where(far, far_mass, weight);
    far_first = Simd::add_where(Simd::both(moves, weighs), far_first, moment);
    far_train = Simd::add_where(far, far_train, mass);
    if constexpr (kTrainGap) {
      const Vector bent = Simd::sub(pair.u, Simd::fma(ratio, pair.u, ratio));
      train_gap = Simd::fma_where(near, moment, bent, train_gap);
      const Vector bend =
          Simd::zero_unless(Simd::both(moves, carries), Simd::fma(mass, pair.u, mass));
      train_gap = Simd::add_where(far, train_gap, Simd::sub(weight, bend));
    }
    if constexpr (kEntropy) {
      rollout_log = Simd::fma_where(weighs, weight, pair.log_weight, rollout_log);
      train_log = Simd::fma_where(carries, mass, log_train, train_log);
    }
  }
  out.violates = Simd::any(violates);
  out.outside = Simd::any(outside);
  out.near_mass = Simd::sum(near_mass);
  out.near_first = Simd::sum(near_first);
  out.near_gap = Simd::sum(near_gap);
  out.far_mass = Simd::sum(far_mass);
  out.far_first = Simd::sum(far_first);
  out.far_train = Simd::sum(far_train);
  out.train_gap = Simd::sum(train_gap);
  out.rollout_log = Simd::sum(rollout_log);
  out.train_log = Simd::sum(train_log);
  return column < args.count ? column : args.count;
}

// Largest logits below +inf; -inf where there is none.
template <typename Rollout, typename Train>
RunMaxima maxima_run(const RunArgs& args) {
  const Rollout* const rollout = static_cast<const Rollout*>(args.rollout);
  const Train* const train = static_cast<const Train*>(args.train);
  const Vector nothing = Simd::broadcast(-kInf);
  const Vector infinite = Simd::broadcast(kInf);
  Vector largest_x = nothing, largest_y = nothing;
  for (int64_t column = 0; column < args.count; column += Simd::kLanes) {
    const Mask tail = Simd::first(args.count - column);
    const Vector x = Simd::load(rollout + column, tail);
    const Vector y = Simd::load(train + column, tail);
    largest_x = Simd::max(largest_x, Simd::select(Simd::less(x, infinite), x, nothing));
    largest_y = Simd::max(largest_y, Simd::select(Simd::less(y, infinite), y, nothing));
  }
  return {Simd::largest(largest_x), Simd::largest(largest_y)};
}

template <typename Rollout, typename Train, RunScale kScale>
void moment_run(const MomentArgs& args, MomentSums& out) {
  const Rollout* const rollout = static_cast<const Rollout*>(args.run.rollout);
  const Train* const train = static_cast<const Train*>(args.run.train);
  const Columns<kScale> columns(args.run);
  const Vector residual = Simd::broadcast(args.residual);
  const Vector residual_low = Simd::broadcast(args.residual_low);
  const Vector inverse_mass = Simd::broadcast(args.inverse_mass);
  const Vector log_mass = Simd::broadcast(args.log_mass);
  const Vector zero = Simd::broadcast(0.0f);
  const Vector half = Simd::broadcast(0.5f);
  Vector tv = zero, chi2 = zero, bhattacharyya = zero, outside = zero;
  Vector largest = Simd::broadcast(-kInf);
  for (int64_t column = 0; column < args.run.count; column += Simd::kLanes) {
    const Mask tail = Simd::first(args.run.count - column);
    const Pair pair = columns.template pair<kNeedsResidue<Rollout, Train>>(
        Simd::load(rollout + column, tail), Simd::load(train + column, tail));
    const Vector t = Simd::sub(Simd::sub(pair.u, residual), residual_low);
    const Standing at(pair, t);
    const Vector p =
        Simd::zero_unless(at.in_rollout, Simd::mul(Simd::exp(pair.log_weight), inverse_mass));
    const Vector step = Simd::sub(psi(t), t);  // expm1(-t)
    const Vector half_t = Simd::mul(half, t);
    const Vector half_step = Simd::sub(psi(half_t), half_t);
    const Vector moved = Simd::mul(p, step);
    tv = Simd::add_where(at.near, tv, Simd::abs(moved));
    chi2 = Simd::add_where(at.near, chi2, Simd::mul(moved, step));
    bhattacharyya =
        Simd::add_where(at.near, bhattacharyya, Simd::mul(p, Simd::mul(half_step, half_step)));
    largest = Simd::select(at.both, Simd::max(largest, Simd::sub(zero, t)), largest);
    if (Simd::all(at.near)) continue;
    const Mask far = Simd::but_not(at.both, at.near);
    const Mask only_rollout = Simd::but_not(at.in_rollout, at.in_train);
    const Mask only_train = Simd::but_not(at.in_train, at.in_rollout);
    const Vector log_train = Simd::add(columns.log_train(pair), residual);
    const Vector q = Simd::zero_unless(at.in_train, Simd::mul(Simd::exp(log_train), inverse_mass));
    // q^2 / p in log space: neither factor need be representable.
    const Vector log_square =
        Simd::sub(Simd::sub(Simd::add(log_train, log_train), pair.log_weight), log_mass);
    const Mask overflows = Simd::both(far, Simd::less(Simd::broadcast(88.0f), log_square));
    const Vector square = Simd::select(overflows, Simd::broadcast(kInf),
                                       Simd::exp(Simd::zero_unless(far, log_square)));
    const Vector excess = Simd::add(Simd::sub(square, Simd::add(q, q)), p);
    // sqrt(p q) in log space
    const Vector root = Simd::mul(
        Simd::exp(Simd::zero_unless(far, Simd::mul(half, Simd::add(log_train, pair.log_weight)))),
        inverse_mass);
    const Vector apart = Simd::sub(Simd::add(p, q), Simd::add(root, root));
    const Vector difference = Simd::abs(Simd::sub(q, p));
    tv = Simd::add_where(Simd::but_not(at.both, at.near), tv, difference);
    tv = Simd::add_where(only_rollout, tv, p);
    tv = Simd::add_where(only_train, tv, q);
    chi2 = Simd::add_where(far, chi2, excess);
    chi2 = Simd::add_where(only_rollout, chi2, p);
    bhattacharyya = Simd::add_where(far, bhattacharyya, apart);
    bhattacharyya = Simd::add_where(only_rollout, bhattacharyya, p);
    bhattacharyya = Simd::add_where(only_train, bhattacharyya, q);
    outside = Simd::add_where(only_train, outside, q);
  }
  out.tv = Simd::sum(tv);
  out.chi2 = Simd::sum(chi2);
  out.bhattacharyya = Simd::sum(bhattacharyya);
  out.outside_mass = Simd::sum(outside);
  out.max_log_ratio = Simd::largest(largest);
}

template <bool kOnlyKlTrain, typename Rollout, typename Train, RunScale kScale>
void gradient_columns(const GradientArgs& args) {
  const Rollout* const rollout = static_cast<const Rollout*>(args.run.rollout);
  const Train* const train = static_cast<const Train*>(args.run.train);
  const Columns<kScale> columns(args.run);
  const Vector residual = Simd::broadcast(args.residual);
  const Vector residual_low = Simd::broadcast(args.residual_low);
  const Vector inverse_mass = Simd::broadcast(args.inverse_mass);
  const Vector log_mass = Simd::broadcast(args.log_mass);
  const Vector g_kl = Simd::broadcast(args.g_kl);
  const Vector zero = Simd::broadcast(0.0f);
  const Vector near = Simd::broadcast(near_limit<float>());
  for (int64_t column = 0; column < args.run.count; column += Simd::kLanes) {
    const Mask tail = Simd::first(args.run.count - column);
    const Pair pair = columns.template pair<kNeedsResidue<Rollout, Train>>(
        Simd::load(rollout + column, tail), Simd::load(train + column, tail));
    Vector t = Simd::sub(Simd::sub(pair.u, residual), residual_low);
    const Vector p = Simd::mul(Simd::exp(pair.log_weight), inverse_mass);
    Vector q_minus_p = Simd::mul(p, Simd::sub(psi(t), t));
    Vector q = Simd::add(p, q_minus_p);
    Vector log_train = Simd::sub(pair.log_weight, t);
    Mask in_rollout = tail, in_train = tail;
    if (!Simd::all(Simd::less_equal(Simd::abs(t), near))) {
      const Standing at(pair, t);
      in_rollout = at.in_rollout;
      in_train = at.in_train;
      const Vector far_log = Simd::add(columns.log_train(pair), residual);
      const Vector far_q = Simd::mul(Simd::exp(far_log), inverse_mass);
      log_train = Simd::select(at.near, log_train, far_log);
      q = Simd::zero_unless(in_train, Simd::select(at.near, q, far_q));
      q_minus_p = Simd::select(at.near, q_minus_p, Simd::sub(q, Simd::zero_unless(in_rollout, p)));
      t = Simd::zero_unless(at.both, t);
    }
    Vector grad_train = Simd::mul(g_kl, q_minus_p);
    if constexpr (!kOnlyKlTrain) {
      const Vector log_p = Simd::sub(pair.log_weight, log_mass);
      const Vector log_q = Simd::sub(log_train, log_mass);
      const auto coefficient = [](float value) { return Simd::broadcast(value); };
      Vector inner = coefficient(args.g_logp_train);
      inner = Simd::fma(coefficient(args.g_kl_train_rollout),
                        Simd::add(t, coefficient(args.kl_train_rollout)), inner);
      inner = Simd::fma(coefficient(args.g_entropy_train),
                        Simd::add(log_q, coefficient(args.entropy_train)), inner);
      grad_train = Simd::sub(grad_train, Simd::zero_unless(in_train, Simd::mul(q, inner)));
      inner = Simd::sub(zero, coefficient(args.g_logp_rollout));
      inner = Simd::fma(g_kl, Simd::sub(t, coefficient(args.kl)), inner);
      inner = Simd::sub(inner, Simd::mul(coefficient(args.g_entropy_rollout),
                                         Simd::add(log_p, coefficient(args.entropy_rollout))));
      Vector grad_rollout = Simd::zero_unless(in_rollout, Simd::mul(p, inner));
      grad_rollout =
          Simd::sub(grad_rollout, Simd::mul(coefficient(args.g_kl_train_rollout), q_minus_p));
      if constexpr (kScale != RunScale::kNone) {
        grad_rollout = Simd::mul(grad_rollout, columns.rollout_high);
      }
      if (args.grad_rollout != nullptr) {
        Simd::store(static_cast<Rollout*>(args.grad_rollout) + column, grad_rollout, tail);
      }
    }
    if constexpr (kScale != RunScale::kNone) {
      grad_train = Simd::mul(grad_train, columns.train_high);
    }
    if (args.grad_train != nullptr) {
      Simd::store(static_cast<Train*>(args.grad_train) + column, grad_train, tail);
    }
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

template <typename Rollout, typename Train>
void fill(RowRuns& runs, int rollout, int train) {
  constexpr RunScale kNone = RunScale::kNone;
  runs.sum[rollout][train][0] = &sum_run<0, Rollout, Train, kNone>;
  runs.sum[rollout][train][1] = &sum_run<1, Rollout, Train, kNone>;
  runs.sum[rollout][train][2] = &sum_run<2, Rollout, Train, kNone>;
  runs.sum[rollout][train][3] = &sum_run<3, Rollout, Train, kNone>;
  runs.maxima[rollout][train] = &maxima_run<Rollout, Train>;
  runs.moments[rollout][train] = &moment_run<Rollout, Train, kNone>;
  runs.gradient[rollout][train] = &gradient_run<Rollout, Train, kNone>;
}

template <RunScale kScale>
void fill_scaled(RowRuns& runs, int mixed) {
  runs.sum_scaled[mixed][0] = &sum_run<0, float, float, kScale>;
  runs.sum_scaled[mixed][1] = &sum_run<3, float, float, kScale>;
  runs.moments_scaled[mixed] = &moment_run<float, float, kScale>;
  runs.gradient_scaled[mixed] = &gradient_run<float, float, kScale>;
}

RowRuns make_runs(const char* name) {
  RowRuns runs;
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
