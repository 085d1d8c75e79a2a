// SPDX-License-Identifier: Apache-2.0
// One row of logits on the CPU, in slices. A slice's bounds depend on nothing but the row's length,
// each slice starts from a fresh state, and slices merge in order: a row's answer is the same bit
// for bit whoever computed which slice.
#pragma once

#include <algorithm>

#include "trm/row.h"

namespace trm::cpu {

// As long as they can be: each begins without a frame, and costs what 1500 of its columns do. Rows
// of 128 thousand columns still have two.
constexpr int64_t kSliceColumns = 81920;
constexpr int64_t kSliceStep = 64;  // slices begin at multiples

inline int64_t slices_of(int64_t columns) {
  return columns == 0 ? 1 : (columns + kSliceColumns - 1) / kSliceColumns;
}

struct SliceRange {
  int64_t begin, end;
};

// Slices of one row are equally long, but for the rounding of their bounds.
inline SliceRange slice_range(int64_t columns, int64_t slice) {
  const int64_t slices = slices_of(columns);
  const auto bound = [&](int64_t index) {
    return index == slices ? columns : columns * index / slices / kSliceStep * kSliceStep;
  };
  return {bound(slice), bound(slice + 1)};
}

// S and Q of a state: the masses of the two policies in its frame.
inline double rollout_mass(const DivergenceState<double>& state) {
  return state.near_mass + state.far_mass;
}
inline double train_mass(const DivergenceState<double>& state) {
  return state.near_mass + (state.near_gap - state.near_first) + state.far_train;
}
// Less of one, that of its side's largest logit being 1, is none: such columns say nothing of a
// shift (in the frame of their mean log-ratio the other side's masses would underflow with theirs),
// and a side with no more has masks alone.
constexpr double kLeastMass = 0x1p-60;

// float32 arithmetic through the runs of the selected instruction set.
namespace float_row {
DivergenceState<double> slice_state(const DivergenceArgs& args, int64_t row, SliceRange range);
DivergenceMoments slice_moments(const DivergenceArgs& args, int64_t row, const double* statistics,
                                SliceRange range);
void slice_gradient(const DivergenceBackwardArgs& args, int64_t row,
                    const RowGradient<double>& gradient, SliceRange range);

// A second sweep, in doubles, over a row whose float sums do not give the token's log-ratio or the
// entropies that are asked for: the KL is too large for them, or beside it the log-ratio too small.
void refine(const DivergenceArgs& args, int64_t row, const DivergenceState<double>& state,
            RowResult& result);
}  // namespace float_row

// float64 arithmetic, where an input is float64 or float32 would overflow.
namespace double_row {
// What to take from the logits of each side.
struct SideZeros {
  double rollout = 0, train = 0;
};
// Logits below this are masks: part of a row without others on a side gets its frame as if this
// were its largest, and has no mass there.
constexpr double kHighestMask = -0x1p30;
DivergenceState<double> slice_state(const DivergenceArgs& args, int64_t row, SliceRange range,
                                    SideZeros zeros = {}, double highest_mask = kHighestMask);
// A row with a side of masks alone, or whose sides lie so far from each other that no double is a
// shift to a small part of a nat: each side relative to its maximum.
RowResult centred_result(const DivergenceArgs& args, int64_t row);
DivergenceMoments slice_moments(const DivergenceArgs& args, int64_t row, const double* statistics,
                                SliceRange range);
void slice_gradient(const DivergenceBackwardArgs& args, int64_t row,
                    const RowGradient<double>& gradient, SliceRange range);
}  // namespace double_row

}  // namespace trm::cpu
