// SPDX-License-Identifier: Apache-2.0
// Rows from slices, and the small kernels over states.
#include "cpu/token_divergence.h"

namespace trm::cpu {

namespace {

// In nats. One frame holds both sides of a row up to here.
constexpr double kLargestShift = 0x1p30;

// Whether of a side that a state has it has masks alone.
bool has_only_masks(const DivergenceState<double>& state) {
  return (state.has(kHasRollout) && rollout_mass(state) < kLeastMass) ||
         (state.has(kHasTrain) && train_mass(state) < kLeastMass);
}

}  // namespace

DivergenceState<double> ForwardJob::slice_state(int64_t row, int64_t slice) const {
  DivergenceState<double> nothing;
  if (!has_temperatures(args_, row)) nothing.flags = kNonFinite;
  if (nothing.flags != 0 || !counts(args_, row)) return nothing;
  const SliceRange range = slice_range(args_.vocab, slice);
  return out_.wide ? double_row::slice_state(args_, row, range)
                   : float_row::slice_state(args_, row, range);
}

DivergenceMoments ForwardJob::slice_moments(int64_t row, int64_t slice) const {
  const double* const statistics = out_.statistics + row * kStatistics;
  if (!counts(args_, row) || statistics[kStatLogMass] != statistics[kStatLogMass]) return {};
  const SliceRange range = slice_range(args_.vocab, slice);
  return out_.wide ? double_row::slice_moments(args_, row, statistics, range)
                   : float_row::slice_moments(args_, row, statistics, range);
}

DivergenceState<double> ForwardJob::joined(const DivergenceState<double>* slices,
                                           int64_t count) const {
  DivergenceState<double> total = slices[0];
  for (int64_t slice = 1; slice < count; ++slice) {
    total = merge(total, slices[slice]);
  }
  return total;
}

void ForwardJob::write_sums(int64_t row, DivergenceState<double> state) const {
  if (!counts(args_, row)) return write_masked_row(args_, out_, row);
  const bool finite = !state.has(kNonFinite);
  const bool low = finite && has_only_masks(state);
  if (out_.state != nullptr) {
    // Other parts of the row may have masks alone, too.
    if (low) {
      const double lowest = -infinity<double>();
      state = double_row::slice_state(args_, row, {0, args_.vocab}, {}, lowest);
    }
    attach_token(args_, row, state);
    return write_state(out_, row, state);
  }
  if (finite && state.has_both() && (low || std::fabs(state.shift) > kLargestShift)) {
    return write_result(args_, out_, row, double_row::centred_result(args_, row));
  }
  attach_token(args_, row, state);
  RowResult result = finish(state);
  if (!out_.wide) float_row::refine(args_, row, state, result);
  write_result(args_, out_, row, result);
}

void ForwardJob::write_moments(int64_t row, const DivergenceMoments* slices, int64_t count) const {
  if (!counts(args_, row)) return;  // zeros are written already
  const double* const statistics = out_.statistics + row * kStatistics;
  if (statistics[kStatLogMass] != statistics[kStatLogMass]) {
    return write_equal_diagnostics(args_, out_, row, quiet_nan<double>());
  }
  DivergenceMoments total = slices[0];
  for (int64_t slice = 1; slice < count; ++slice) merge_moments(total, slices[slice]);
  double diagnostics[kOutputs - kValues];
  finish_moments(total, diagnostics);
  write_diagnostics(args_, out_, row, diagnostics);
}

void ForwardJob::whole_row(int64_t row) const {
  if (!counts(args_, row)) return write_masked_row(args_, out_, row);
  const int64_t slices = slices_of(args_.vocab);
  DivergenceState<double> total = slice_state(row, 0);
  for (int64_t slice = 1; slice < slices; ++slice) {
    const DivergenceState<double> pair[2] = {total, slice_state(row, slice)};
    total = joined(pair, 2);
  }
  write_sums(row, total);
  if (out_.state != nullptr || !(args_.outputs & kDiagnosticOutputs)) return;
  DivergenceMoments moments = slice_moments(row, 0);
  for (int64_t slice = 1; slice < slices; ++slice) {
    merge_moments(moments, slice_moments(row, slice));
  }
  write_moments(row, &moments, 1);
}

int64_t backward_items(const DivergenceBackwardArgs& args) {
  return args.forward.rows * slices_of(args.columns);
}

namespace {

void backward_slice(const DivergenceBackwardArgs& args, int64_t row, SliceRange range) {
  RowGradient<double> gradient;
  const bool live = read_gradient(args, row, gradient);
  const int64_t real_end =
      std::max(range.begin, std::min(range.end, live ? args.forward.vocab : int64_t{0}));
  const SliceRange real = {range.begin, real_end};
  if (live && gradient.log_mass != gradient.log_mass) {
    for (int64_t v = real.begin; v < real.end; ++v) {
      write_gradient(args, row, v, quiet_nan<double>(), quiet_nan<double>());
    }
  } else if (real.begin < real.end) {
    const bool wide = args.forward.rollout.type == StorageType::kFloat64 ||
                      args.forward.train.type == StorageType::kFloat64;
    if (wide) {
      double_row::slice_gradient(args, row, gradient, real);
    } else {
      float_row::slice_gradient(args, row, gradient, real);
    }
  }
  for (int64_t v = real.end; v < range.end; ++v) write_gradient(args, row, v, 0.0, 0.0);
}

}  // namespace

void token_divergence_backward(const DivergenceBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t slices = slices_of(args.columns);
  for (int64_t item = begin; item < end; ++item) {
    backward_slice(args, item / slices, slice_range(args.columns, item % slices));
  }
}

namespace {

template <typename Real>
void merge_rows(const Real* states, Real* merged, int64_t parts, int64_t rows, int64_t begin,
                int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    DivergenceState<double> total = load_state(states + row * kStateColumns);
    for (int64_t part = 1; part < parts; ++part) {
      total = merge(total, load_state(states + (part * rows + row) * kStateColumns));
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
