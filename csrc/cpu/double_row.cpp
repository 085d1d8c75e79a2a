// SPDX-License-Identifier: Apache-2.0
// float64 rows: the shared scalar formulas, each sub-slice in the exact frame of its own maxima.
#include "cpu/row.h"

namespace trm::cpu::double_row {
namespace {

constexpr int64_t kSubslice = 2048;  // two of them, in double, stay in the first-level cache

struct Columns {
  Logit<double> rollout[kSubslice];
  Logit<double> train[kSubslice];
  double max_rollout = -infinity<double>();
  double max_train = -infinity<double>();

  Columns(const DivergenceArgs& args, int64_t row, int64_t first, int64_t count, SideZeros zeros) {
    const RowScale<double> scale = row_scale<double>(args, row);
    for (int64_t i = 0; i < count; ++i) {
      rollout[i] = scale.of_rollout(load_column<double>(args.rollout, row, args.inner, first + i));
      train[i] = scale.of_train(load_column<double>(args.train, row, args.inner, first + i));
      rollout[i].value -= zeros.rollout;
      train[i].value -= zeros.train;
      raise(max_rollout, rollout[i].value);
      raise(max_train, train[i].value);
    }
  }

 private:
  static void raise(double& largest, double value) {
    if (value > largest && value < infinity<double>()) largest = value;
  }
};

template <bool kTrainGap, bool kEntropy>
DivergenceState<double> sum(const DivergenceArgs& args, int64_t row, SliceRange range,
                            SideZeros zeros, double highest_mask) {
  DivergenceState<double> total;
  total.flags = carried_by(args.outputs);
  for (int64_t first = range.begin; first < range.end; first += kSubslice) {
    const int64_t count = std::min(kSubslice, range.end - first);
    const Columns columns(args, row, first, count, zeros);
    const auto raised = [&](double maximum) {
      return maximum > -infinity<double>() ? std::max(maximum, highest_mask) : maximum;
    };
    const Frame<double> frame = frame_of(raised(columns.max_rollout), raised(columns.max_train));
    DivergenceState<double> part;
    part.flags = carried_by(args.outputs) |
                 (columns.max_rollout > -infinity<double>() ? kHasRollout : 0u) |
                 (columns.max_train > -infinity<double>() ? kHasTrain : 0u);
    if (part.has(kHasRollout | kHasTrain)) {
      part.max_rollout = frame.max_rollout;
      part.shift = frame.shift;
    }
    for (int64_t i = 0; i < count; ++i) {
      add_in_frame<kTrainGap, kEntropy>(part, columns.rollout[i], columns.train[i]);
    }
    total = merge(total, part);
  }
  return total;
}

}  // namespace

DivergenceState<double> slice_state(const DivergenceArgs& args, int64_t row, SliceRange range,
                                    SideZeros zeros, double highest_mask) {
  switch (carried_by(args.outputs)) {
    case kCarries:
      return sum<true, true>(args, row, range, zeros, highest_mask);
    case kCarriesTrainGap:
      return sum<true, false>(args, row, range, zeros, highest_mask);
    case kCarriesEntropy:
      return sum<false, true>(args, row, range, zeros, highest_mask);
    default:
      return sum<false, false>(args, row, range, zeros, highest_mask);
  }
}

RowResult centred_result(const DivergenceArgs& args, int64_t row) {
  SideZeros maxima = {-infinity<double>(), -infinity<double>()};
  for (int64_t first = 0; first < args.vocab; first += kSubslice) {
    const int64_t count = std::min(kSubslice, args.vocab - first);
    const Columns columns(args, row, first, count, {});
    maxima.rollout = std::max(maxima.rollout, columns.max_rollout);
    maxima.train = std::max(maxima.train, columns.max_train);
  }
  DivergenceState<double> state = slice_state(args, row, {0, args.vocab}, maxima);
  attach_token(args, row, state);
  state.token_rollout -= maxima.rollout;
  state.token_train -= maxima.train;
  RowResult result = finish(state);
  // The frame of the two maxima, and what a double loses of its shift.
  const double shift = maxima.rollout - maxima.train;
  result.statistics[kStatMaxRollout] = maxima.rollout;
  result.statistics[kStatShift] = shift;
  result.statistics[kStatResidual] += difference_error(maxima.rollout, maxima.train, shift);
  return result;
}

DivergenceMoments slice_moments(const DivergenceArgs& args, int64_t row, const double* statistics,
                                SliceRange range) {
  const RowScale<double> scale = row_scale<double>(args, row);
  DivergenceMoments sums;
  for (int64_t v = range.begin; v < range.end; ++v) {
    add_moments(sums, statistics,
                scale.of_rollout(load_column<double>(args.rollout, row, args.inner, v)),
                scale.of_train(load_column<double>(args.train, row, args.inner, v)));
  }
  return sums;
}

void slice_gradient(const DivergenceBackwardArgs& args, int64_t row,
                    const RowGradient<double>& gradient, SliceRange range) {
  const DivergenceArgs& forward = args.forward;
  const RowScale<double> scale = row_scale<double>(forward, row);
  const int64_t token = token_column(forward, row);
  for (int64_t v = range.begin; v < range.end; ++v) {
    ColumnGradient<double> column = column_gradient(
        gradient, scale.of_rollout(load_column<double>(forward.rollout, row, forward.inner, v)),
        scale.of_train(load_column<double>(forward.train, row, forward.inner, v)));
    if (v == token) {
      column.rollout += gradient.g_logp_rollout;
      column.train += gradient.g_logp_train;
    }
    write_gradient(args, row, v, column.rollout * scale.rollout.high,
                   column.train * scale.train.high);
  }
}

}  // namespace trm::cpu::double_row
