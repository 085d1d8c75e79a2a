// SPDX-License-Identifier: Apache-2.0
// CPU kernels over numbered pieces of work; the caller supplies the threads. A job knows how many
// independent items its current phase has and runs any range of them on any thread.
#pragma once

#include <vector>

#include "cpu/row.h"

namespace trm::cpu {

// Forward. Many rows: one phase, an item is a row. Few rows: an item is a slice of a row, and the
// slices' results wait in a workspace until finish_row() joins them in order.
class ForwardJob {
 public:
  ForwardJob(const DivergenceArgs& args, const DivergenceOutputs& out) : args_(args), out_(out) {}

  // Runs everything; parallel(count, body) must call body(begin, end) over disjoint ranges.
  template <typename Parallel>
  void run(int64_t threads, const Parallel& parallel) {
    const int64_t slices = slices_of(args_.vocab);
    if (args_.rows >= 4 * threads || threads <= 1 || slices == 1) {
      parallel(args_.rows, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) whole_row(row);
      });
      return;
    }
    // Rows in groups, so that the workspace stays below half a MiB.
    const int64_t group = std::max<int64_t>(1, kWorkspaceStates / slices);
    std::vector<DivergenceState<double>> states;
    std::vector<DivergenceMoments> moments;
    for (int64_t first = 0; first < args_.rows; first += group) {
      const int64_t rows = std::min(group, args_.rows - first);
      states.assign(static_cast<size_t>(rows * slices), {});
      parallel(rows * slices, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
          states[static_cast<size_t>(item)] = slice_state(first + item / slices, item % slices);
        }
      });
      for (int64_t row = 0; row < rows; ++row) {
        write_sums(first + row, joined(&states[static_cast<size_t>(row * slices)], slices));
      }
      if (out_.state != nullptr || !(args_.outputs & kDiagnosticOutputs)) continue;
      moments.assign(static_cast<size_t>(rows * slices), {});
      parallel(rows * slices, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
          moments[static_cast<size_t>(item)] = slice_moments(first + item / slices, item % slices);
        }
      });
      for (int64_t row = 0; row < rows; ++row) {
        write_moments(first + row, &moments[static_cast<size_t>(row * slices)], slices);
      }
    }
  }

 private:
  static constexpr int64_t kWorkspaceStates = 4096;

  void whole_row(int64_t row) const;
  DivergenceState<double> slice_state(int64_t row, int64_t slice) const;
  DivergenceMoments slice_moments(int64_t row, int64_t slice) const;
  DivergenceState<double> joined(const DivergenceState<double>* slices, int64_t count) const;
  void write_sums(int64_t row, DivergenceState<double> state) const;
  void write_moments(int64_t row, const DivergenceMoments* slices, int64_t count) const;

  const DivergenceArgs& args_;
  const DivergenceOutputs& out_;
};

// Backward: an item is a slice of a row.
int64_t backward_items(const DivergenceBackwardArgs& args);
void token_divergence_backward(const DivergenceBackwardArgs& args, int64_t begin, int64_t end);

// states [parts, rows, kStateColumns] -> [rows, kStateColumns], merged in order of the parts.
void divergence_state_merge(const void* states, void* merged, bool wide, int64_t parts,
                            int64_t rows, int64_t begin, int64_t end);

// states [rows, kStateColumns] -> values [outputs set, rows], statistics [rows, kStatistics].
void divergence_finish(const void* states, bool wide, uint32_t outputs, void* values,
                       double* statistics, int64_t rows, int64_t begin, int64_t end);

}  // namespace trm::cpu
