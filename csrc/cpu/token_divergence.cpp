// SPDX-License-Identifier: Apache-2.0
// CPU kernels of the pair state: a row is a sequence of fixed slices, each summed in the exact
// frame of its own maxima and merged in order, so a row's answer depends on nothing but the row.
// Reads each logit once from memory (the second look at a slice is in cache); 2 x V x size bytes.
#include "cpu/token_divergence.h"

#include <algorithm>

#include "trm/row.h"

namespace trm::cpu {
namespace {

constexpr int64_t kSlice = 2048;  // two slices of doubles stay in the first-level cache

struct Slice {
  double rollout[kSlice];
  double train[kSlice];
};

double load_slice(const LogitsView& view, int64_t offset, int64_t count, double* values) {
  double largest = -infinity<double>();
  for (int64_t i = 0; i < count; ++i) {
    values[i] = load_logit<double>(view.data, offset + i * view.column_stride, view.type);
    if (values[i] > largest && values[i] < infinity<double>()) largest = values[i];
  }
  return largest;
}

template <bool TrainGap, bool Entropy, typename FrameReal>
DivergenceState<double> sum_row(const DivergenceArgs& args, int64_t row) {
  Slice slice;
  DivergenceState<double> total;
  total.flags = carried_by(args.outputs);
  const int64_t rollout = row_offset(args.rollout, row, args.inner);
  const int64_t train = row_offset(args.train, row, args.inner);
  for (int64_t first = 0; first < args.vocab; first += kSlice) {
    const int64_t count = std::min(kSlice, args.vocab - first);
    const double max_rollout = load_slice(
        args.rollout, rollout + first * args.rollout.column_stride, count, slice.rollout);
    const double max_train =
        load_slice(args.train, train + first * args.train.column_stride, count, slice.train);
    DivergenceState<double> part;
    part.flags = carried_by(args.outputs) | (max_rollout > -infinity<double>() ? kHasRollout : 0u) |
                 (max_train > -infinity<double>() ? kHasTrain : 0u);
    if (part.has(kHasRollout | kHasTrain)) {
      const Frame<double> frame = frame_of(max_rollout, max_train);
      part.max_rollout = frame.max_rollout;
      part.shift = static_cast<FrameReal>(frame.shift);
    }
    for (int64_t i = 0; i < count; ++i) {
      add_in_frame<TrainGap, Entropy>(part, slice.rollout[i], slice.train[i]);
    }
    total = merge<FrameReal>(total, part);
  }
  attach_token(args, row, total);
  return total;
}

template <typename FrameReal>
DivergenceState<double> sum_row(const DivergenceArgs& args, int64_t row) {
  const uint32_t carried = carried_by(args.outputs);
  if (carried == kCarries) return sum_row<true, true, FrameReal>(args, row);
  if (carried == kCarriesTrainGap) return sum_row<true, false, FrameReal>(args, row);
  if (carried == kCarriesEntropy) return sum_row<false, true, FrameReal>(args, row);
  return sum_row<false, false, FrameReal>(args, row);
}

}  // namespace

void token_divergence(const DivergenceArgs& args, const DivergenceOutputs& out, int64_t begin,
                      int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (!counts(args, row)) {
      write_masked_row(args, out, row);
    } else {
      write_row(args, out, row, out.wide ? sum_row<double>(args, row) : sum_row<float>(args, row));
    }
  }
}

void token_divergence_backward(const DivergenceBackwardArgs& args, int64_t begin, int64_t end) {
  const DivergenceArgs& forward = args.forward;
  for (int64_t row = begin; row < end; ++row) {
    RowGradient<double> gradient;
    const bool live = read_gradient(args, row, gradient);
    const int64_t real_columns = live ? forward.vocab : 0;
    if (live && gradient.log_mass != gradient.log_mass) {
      for (int64_t v = 0; v < real_columns; ++v) {
        write_gradient(args, row, v, quiet_nan<double>(), quiet_nan<double>());
      }
    } else {
      const int64_t token = token_column(forward, row);
      for (int64_t v = 0; v < real_columns; ++v) {
        ColumnGradient<double> column =
            column_gradient(gradient, load_column(forward.rollout, row, forward.inner, v),
                            load_column(forward.train, row, forward.inner, v));
        if (v == token) {
          column.rollout += gradient.g_logp_rollout;
          column.train += gradient.g_logp_train;
        }
        write_gradient(args, row, v, column.rollout, column.train);
      }
    }
    for (int64_t v = real_columns; v < args.columns; ++v) write_gradient(args, row, v, 0.0, 0.0);
  }
}

namespace {

template <typename Real>
void merge_rows(const Real* states, Real* merged, int64_t parts, int64_t rows, int64_t begin,
                int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    DivergenceState<double> total = load_state(states + row * kStateColumns);
    for (int64_t part = 1; part < parts; ++part) {
      total = merge<Real>(total, load_state(states + (part * rows + row) * kStateColumns));
    }
    store_state(total, merged + row * kStateColumns);
  }
}

}  // namespace

void divergence_state_merge(const void* states, void* merged, bool wide, int64_t parts,
                            int64_t rows, int64_t begin, int64_t end) {
  if (wide) {
    merge_rows(static_cast<const double*>(states), static_cast<double*>(merged), parts, rows, begin,
               end);
  } else {
    merge_rows(static_cast<const float*>(states), static_cast<float*>(merged), parts, rows, begin,
               end);
  }
}

namespace {

template <typename Real>
void finish_rows(const Real* states, uint32_t outputs, Real* values, double* statistics,
                 int64_t rows, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    write_values(finish(load_state(states + row * kStateColumns)), outputs, row, rows, values,
                 statistics);
  }
}

}  // namespace

void divergence_finish(const void* states, bool wide, uint32_t outputs, void* values,
                       double* statistics, int64_t rows, int64_t begin, int64_t end) {
  if (wide) {
    finish_rows(static_cast<const double*>(states), outputs, static_cast<double*>(values),
                statistics, rows, begin, end);
  } else {
    finish_rows(static_cast<const float*>(states), outputs, static_cast<float*>(values), statistics,
                rows, begin, end);
  }
}

}  // namespace trm::cpu
