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

TRM_INLINE double load_column(const LogitsView& view, int64_t row, int64_t inner, int64_t column) {
  return load_logit<double>(view.data, row_offset(view, row, inner) + column * view.column_stride,
                            view.type);
}

TRM_HOST_DEVICE inline void attach_token(const DivergenceArgs& args, int64_t row,
                                         DivergenceState<double>& state) {
  const int64_t column = token_column(args, row);
  if (column < 0) return;
  state.flags |= kHasToken;
  state.token_rollout = load_column(args.rollout, row, args.inner, column);
  state.token_train = load_column(args.train, row, args.inner, column);
}

template <typename Real>
TRM_HOST_DEVICE inline void write_values(const RowResult& result, uint32_t outputs, int64_t row,
                                         int64_t rows, Real* values, double* statistics) {
  int64_t slot = 0;
  for (int32_t output = 0; output < kOutputs; ++output) {
    if (!(outputs >> output & 1u)) continue;
    values[slot++ * rows + row] = static_cast<Real>(result.values[output]);
  }
  for (int32_t i = 0; i < kStatistics; ++i)
    statistics[row * kStatistics + i] = result.statistics[i];
}

TRM_HOST_DEVICE inline void write_row(const DivergenceArgs& args, const DivergenceOutputs& out,
                                      int64_t row, const DivergenceState<double>& state) {
  if (out.state != nullptr) {
    if (out.wide) {
      store_state(state, static_cast<double*>(out.state) + row * kStateColumns);
    } else {
      store_state(state, static_cast<float*>(out.state) + row * kStateColumns);
    }
    return;
  }
  const RowResult result = finish(state);
  if (out.wide) {
    write_values(result, args.outputs, row, args.rows, static_cast<double*>(out.values),
                 out.statistics);
  } else {
    write_values(result, args.outputs, row, args.rows, static_cast<float*>(out.values),
                 out.statistics);
  }
}

// A row outside the mask: zeros, and its logits are not touched.
TRM_HOST_DEVICE inline void write_masked_row(const DivergenceArgs& args,
                                             const DivergenceOutputs& out, int64_t row) {
  if (out.state != nullptr) {
    DivergenceState<double> empty;
    empty.flags = carried_by(args.outputs);
    write_row(args, out, row, empty);
    return;
  }
  RowResult zeros;
  for (double& value : zeros.values) value = 0.0;
  for (double& value : zeros.statistics) value = 0.0;
  if (out.wide) {
    write_values(zeros, args.outputs, row, args.rows, static_cast<double*>(out.values),
                 out.statistics);
  } else {
    write_values(zeros, args.outputs, row, args.rows, static_cast<float*>(out.values),
                 out.statistics);
  }
}

// Reads the upstream gradients of a row. Returns false where they are all exactly zero (or the row
// is masked): such a row has zero gradient whatever its logits hold, and they are not read.
template <typename Real>
TRM_HOST_DEVICE inline bool read_gradient(const DivergenceBackwardArgs& args, int64_t row,
                                          RowGradient<Real>& out) {
  if (!counts(args.forward, row)) return false;
  Real upstream[kOutputs];
  bool any = false;
  int64_t slot = 0;
  for (int32_t output = 0; output < kOutputs; ++output) {
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
  out.shift = static_cast<Real>(statistics[kStatShift]);
  out.residual = static_cast<Real>(statistics[kStatResidual]);
  out.log_mass = static_cast<Real>(statistics[kStatLogMass]);
  out.inverse_mass = static_cast<Real>(std::exp(-statistics[kStatLogMass]));
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
