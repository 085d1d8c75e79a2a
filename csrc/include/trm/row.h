// SPDX-License-Identifier: Apache-2.0
// The parts of a row's work that every backend shares: attaching the sampled token, writing what a
// finished row yields, and reading back what its backward needs.
#pragma once

#include "trm/divergence_args.h"
#include "trm/divergence_state.h"

namespace trm {

TRM_INLINE uint32_t carried_by(uint32_t outputs) {
  return ((outputs & (1u << kKlTrainRollout)) ? kCarriesTrainGap : 0u) |
         ((outputs & kEntropyOutputs) ? kCarriesEntropy : 0u);
}

// Column of the row's sampled token in this shard, or -1.
TRM_INLINE int64_t token_column(const DivergenceArgs& args, int64_t row) {
  if (args.tokens.data == nullptr) return -1;
  const int64_t column = *at_row(args.tokens, row, args.inner) - args.vocab_start;
  return column >= 0 && column < args.vocab ? column : -1;
}

// Both sides' 1 / temperature; `scaled` is false where both are 1.
template <typename Real>
struct RowScale {
  InverseTemperature<Real> rollout;
  InverseTemperature<Real> train;
  bool scaled = false;

  TRM_INLINE Logit<Real> of_rollout(Real x) const {
    return scaled ? over_temperature(x, rollout) : Logit<Real>{x};
  }
  TRM_INLINE Logit<Real> of_train(Real y) const {
    return scaled ? over_temperature(y, train) : Logit<Real>{y};
  }
};

TRM_INLINE double temperature(const RowView<const double>& view, int64_t row, int64_t inner) {
  return view.data == nullptr ? 1.0 : *at_row(view, row, inner);
}

// A temperature that is not a finite number > 0 leaves its row without a value.
TRM_INLINE bool has_temperatures(const DivergenceArgs& args, int64_t row) {
  const double rollout = temperature(args.rollout_temperature, row, args.inner);
  const double train = temperature(args.train_temperature, row, args.inner);
  return rollout > 0.0 && rollout < infinity<double>() && train > 0.0 && train < infinity<double>();
}

template <typename Real>
TRM_INLINE RowScale<Real> row_scale(const DivergenceArgs& args, int64_t row) {
  RowScale<Real> out;
  const double rollout = temperature(args.rollout_temperature, row, args.inner);
  const double train = temperature(args.train_temperature, row, args.inner);
  out.scaled = rollout != 1.0 || train != 1.0;
  if (out.scaled) {
    out.rollout = inverse_temperature<Real>(rollout);
    out.train = inverse_temperature<Real>(train);
  }
  return out;
}

template <typename Real>
TRM_INLINE Real load_column(const LogitsView& view, int64_t row, int64_t inner, int64_t column) {
  return load_logit<Real>(view.data, row_offset(view, row, inner) + column * view.column_stride,
                          view.type);
}

TRM_HOST_DEVICE inline void attach_token(const DivergenceArgs& args, int64_t row,
                                         DivergenceState<double>& state) {
  const int64_t column = token_column(args, row);
  if (column < 0) return;
  state.flags |= kHasToken;
  const RowScale<double> scale = row_scale<double>(args, row);
  const Logit<double> x =
      scale.of_rollout(load_column<double>(args.rollout, row, args.inner, column));
  const Logit<double> y = scale.of_train(load_column<double>(args.train, row, args.inner, column));
  state.token_rollout = x.value + x.error;
  state.token_train = y.value + y.error;
}

template <typename Real>
TRM_HOST_DEVICE inline void write_values(const RowResult& result, uint32_t outputs, int64_t row,
                                         int64_t rows, Real* values, double* statistics) {
  int64_t slot = 0;
  for (int32_t output = 0; output < kValues; ++output) {
    if (!(outputs >> output & 1u)) continue;
    values[slot++ * rows + row] = static_cast<Real>(result.values[output]);
  }
  for (int32_t i = 0; i < kStatistics; ++i)
    statistics[row * kStatistics + i] = result.statistics[i];
}

TRM_HOST_DEVICE inline void write_result(const DivergenceArgs& args, const DivergenceOutputs& out,
                                         int64_t row, const RowResult& result) {
  if (out.wide) {
    write_values(result, args.outputs, row, args.rows, static_cast<double*>(out.values),
                 out.statistics);
  } else {
    write_values(result, args.outputs, row, args.rows, static_cast<float*>(out.values),
                 out.statistics);
  }
}

TRM_HOST_DEVICE inline void write_state(const DivergenceOutputs& out, int64_t row,
                                        const DivergenceState<double>& state) {
  if (out.wide) {
    store_state(state, static_cast<double*>(out.state) + row * kStateColumns);
  } else {
    store_state(state, static_cast<float*>(out.state) + row * kStateColumns);
  }
}

// diagnostics: one double per diagnostic output, in order.
TRM_HOST_DEVICE inline void write_diagnostics(const DivergenceArgs& args,
                                              const DivergenceOutputs& out, int64_t row,
                                              const double* diagnostics) {
  int64_t slot = 0;
  for (int32_t output = kValues; output < kOutputs; ++output) {
    if (!(args.outputs >> output & 1u)) continue;
    const int64_t place = slot++ * args.rows + row;
    const double value = diagnostics[output - kValues];
    if (out.wide) {
      static_cast<double*>(out.diagnostics)[place] = value;
    } else {
      static_cast<float*>(out.diagnostics)[place] = static_cast<float>(value);
    }
  }
}

TRM_HOST_DEVICE inline void write_equal_diagnostics(const DivergenceArgs& args,
                                                    const DivergenceOutputs& out, int64_t row,
                                                    double value) {
  double diagnostics[kOutputs - kValues];
  for (double& entry : diagnostics) entry = value;
  write_diagnostics(args, out, row, diagnostics);
}

// A row outside the mask: zeros, and its logits are not touched.
TRM_HOST_DEVICE inline void write_masked_row(const DivergenceArgs& args,
                                             const DivergenceOutputs& out, int64_t row) {
  if (out.state != nullptr) {
    DivergenceState<double> empty;
    empty.flags = carried_by(args.outputs);
    write_state(out, row, empty);
    return;
  }
  RowResult zeros;
  for (double& value : zeros.values) value = 0.0;
  for (double& value : zeros.statistics) value = 0.0;
  write_result(args, out, row, zeros);
  write_equal_diagnostics(args, out, row, 0.0);
}

// Reads the upstream gradients of a row. Returns false where they are all exactly zero (or the row
// is masked): such a row has zero gradient whatever its logits hold, and they are not read.
template <typename Real>
TRM_HOST_DEVICE inline bool read_gradient(const DivergenceBackwardArgs& args, int64_t row,
                                          RowGradient<Real>& out) {
  if (!counts(args.forward, row)) return false;
  Real upstream[kValues];
  bool any = false;
  int64_t slot = 0;
  for (int32_t output = 0; output < kValues; ++output) {
    upstream[output] = Real(0);
    if (!(args.forward.outputs >> output & 1u)) continue;
    const int64_t inner = args.forward.inner;
    const int64_t offset = slot * args.upstream_output_stride +
                           (row / inner) * args.upstream.outer_stride +
                           (row % inner) * args.upstream.inner_stride;
    ++slot;
    if (args.wide) {
      upstream[output] = static_cast<Real>(static_cast<const double*>(args.upstream.data)[offset]);
    } else {
      upstream[output] = static_cast<Real>(static_cast<const float*>(args.upstream.data)[offset]);
    }
    any |= upstream[output] != Real(0);
  }
  if (!any) return false;
  const double* statistics = args.statistics + row * kStatistics;
  out.max_rollout = static_cast<Real>(statistics[kStatMaxRollout]);
  // log(p/q) = (x - y) - log_ratio, in three numbers: t may be small where the first has cancelled,
  // and on a sharp row where the second has.
  const double log_ratio = statistics[kStatShift] + statistics[kStatResidual];
  out.shift = static_cast<Real>(log_ratio);
  const double left =
      (statistics[kStatShift] - static_cast<double>(out.shift)) + statistics[kStatResidual];
  out.residual = static_cast<Real>(left);
  out.residual_low = static_cast<Real>(left - static_cast<double>(out.residual));
  // What rounding M leaves, log S absorbs: only their sum enters p.
  const double log_mass = statistics[kStatLogMass] +
                          (statistics[kStatMaxRollout] - static_cast<double>(out.max_rollout));
  out.log_mass = static_cast<Real>(log_mass);
  out.inverse_mass = static_cast<Real>(exponential(-log_mass));
  out.kl = static_cast<Real>(statistics[kStatKl]);
  out.kl_train_rollout = static_cast<Real>(statistics[kStatKlTrainRollout]);
  out.entropy_rollout = static_cast<Real>(statistics[kStatEntropyRollout]);
  out.entropy_train = static_cast<Real>(statistics[kStatEntropyTrain]);
  out.g_kl = upstream[kKl];
  out.g_kl_train_rollout = upstream[kKlTrainRollout];
  out.g_entropy_rollout = upstream[kEntropyRollout];
  out.g_entropy_train = upstream[kEntropyTrain];
  out.g_logp_rollout = upstream[kLogpRollout] - upstream[kLogRatio];
  out.g_logp_train = upstream[kLogpTrain] + upstream[kLogRatio];
  return true;
}

// Gradient of one column of row `row`, stored in the dtype of its logits.
template <typename Real>
TRM_INLINE void write_gradient(const DivergenceBackwardArgs& args, int64_t row, int64_t column,
                               Real rollout, Real train) {
  const int64_t place = row * args.columns + column;
  if (args.grad_rollout != nullptr) {
    store_logit(args.grad_rollout, place, args.forward.rollout.type, rollout);
  }
  if (args.grad_train != nullptr) {
    store_logit(args.grad_train, place, args.forward.train.type, train);
  }
}

}  // namespace trm
