// SPDX-License-Identifier: Apache-2.0
// The kernels for what has no streaming kernel: fp64, rare pairs of types, strided columns. One
// block per row; every lane streams its columns into a pair state in double, the block merges the
// lanes. KL(p||q) = G/S - (b - log1p(b)), b = B/S; see divergence_state.h. And what works on
// finished rows: second-sweep diagnostics, merging and finishing of states.
#pragma once

#include "trm/launch_plan.h"
#include "trm/row.h"
#include "trm/simt/block_merge.h"

namespace trm::kernels {

constexpr int kRowThreads = 256;     // one block per row of logits
constexpr int kRecordThreads = 128;  // one thread per row of states

template <bool TrainGap, bool Entropy>
__global__ void __launch_bounds__(kRowThreads)
    token_divergence_kernel(DivergenceArgs args, DivergenceOutputs out) {
  TRM_SHARED(storage, simt::MergeStorage<kRowThreads>);
  const int64_t row = blockIdx.x;
  if (!counts(args, row)) {  // the whole block agrees
    if (threadIdx.x == 0) write_masked_row(args, out, row);
    return;
  }
  const RowScale<double> scale = row_scale<double>(args, row);
  DivergenceState<double> lane;
  lane.flags = carried_by(args.outputs) | (has_temperatures(args, row) ? 0u : kNonFinite);
  for (int64_t v = threadIdx.x; v < args.vocab; v += kRowThreads) {
    add_streaming<TrainGap, Entropy>(
        lane, scale.of_rollout(load_column<double>(args.rollout, row, args.inner, v)),
        scale.of_train(load_column<double>(args.train, row, args.inner, v)));
  }
  DivergenceState<double> total = simt::block_merge<kRowThreads>(lane, storage);
  if (threadIdx.x != 0) return;
  attach_token(args, row, total);
  if (out.state != nullptr) {
    write_state(out, row, total);
  } else {
    write_result(args, out, row, finish(total));
  }
}

// Second sweep, for the outputs that need the finished row. Its statistics are in out. The last
// rows of the first sweep come first: they may still be in the cache.
template <typename Real>
__global__ void __launch_bounds__(kRowThreads)
    diagnostics_kernel(DivergenceArgs args, DivergenceOutputs out) {
  TRM_SHARED(storage, DivergenceMoments[kRowThreads]);
  const int64_t row = args.rows - 1 - static_cast<int64_t>(blockIdx.x);
  if (!counts(args, row)) return;  // the whole block agrees; zeros are written already
  const double* const statistics = out.statistics + row * kStatistics;
  if (statistics[kStatLogMass] != statistics[kStatLogMass]) {
    if (threadIdx.x == 0) write_equal_diagnostics(args, out, row, quiet_nan<double>());
    return;
  }
  const RowScale<Real> scale = row_scale<Real>(args, row);
  DivergenceMoments lane;
  for (int64_t v = threadIdx.x; v < args.vocab; v += kRowThreads) {
    add_moments(lane, statistics,
                scale.of_rollout(load_column<Real>(args.rollout, row, args.inner, v)),
                scale.of_train(load_column<Real>(args.train, row, args.inner, v)));
  }
  const int thread = static_cast<int>(threadIdx.x);
  storage[thread] = lane;
  for (int half = kRowThreads / 2; half > 0; half /= 2) {
    __syncthreads();  // the partner's sums of the previous level must land before this level reads
    if (thread < half) merge_moments(storage[thread], storage[thread + half]);
  }
  if (thread != 0) return;
  double diagnostics[kOutputs - kValues];
  finish_moments(storage[0], diagnostics);
  write_diagnostics(args, out, row, diagnostics);
}

template <typename Real>
__global__ void __launch_bounds__(kRowThreads)
    token_divergence_backward_kernel(DivergenceBackwardArgs args) {
  const DivergenceArgs& forward = args.forward;
  const int64_t row = blockIdx.x;
  RowGradient<Real> gradient;
  const bool live = read_gradient(args, row, gradient);
  const bool undefined = live && gradient.log_mass != gradient.log_mass;
  const int64_t token = live ? token_column(forward, row) : -1;
  const RowScale<Real> scale = row_scale<Real>(forward, row);
  for (int64_t v = threadIdx.x; v < args.columns; v += kRowThreads) {
    ColumnGradient<Real> column = {Real(0), Real(0)};
    if (undefined && v < forward.vocab) {
      column = {quiet_nan<Real>(), quiet_nan<Real>()};
    } else if (live && v < forward.vocab) {
      column = column_gradient(
          gradient, scale.of_rollout(load_column<Real>(forward.rollout, row, forward.inner, v)),
          scale.of_train(load_column<Real>(forward.train, row, forward.inner, v)));
      if (v == token) {
        column.rollout += gradient.g_logp_rollout;
        column.train += gradient.g_logp_train;
      }
      column.rollout *= scale.rollout.high;
      column.train *= scale.train.high;
    }
    write_gradient(args, row, v, column.rollout, column.train);
  }
}

// states [parts, rows, kStateColumns] -> [rows, kStateColumns], merged in order of the parts.
template <typename Real>
__global__ void __launch_bounds__(kRecordThreads)
    state_merge_kernel(const Real* states, Real* merged, int64_t parts, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRecordThreads + threadIdx.x;
  if (row >= rows) return;
  DivergenceState<double> total = load_state(states + row * kStateColumns);
  for (int64_t part = 1; part < parts; ++part) {
    total = merge(total, load_state(states + (part * rows + row) * kStateColumns));
  }
  store_state(total, merged + row * kStateColumns);
}

template <typename Real>
__global__ void __launch_bounds__(kRecordThreads)
    finish_kernel(const Real* states, uint32_t outputs, Real* values, double* statistics,
                  int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRecordThreads + threadIdx.x;
  if (row >= rows) return;
  write_values(finish(load_state(states + row * kStateColumns)), outputs, row, rows, values,
               statistics);
}

inline LaunchConfig row_blocks(int64_t rows, cudaStream_t stream) {
  return {dim3(grid_blocks(rows)), dim3(kRowThreads), 0, stream};
}

inline LaunchConfig record_blocks(int64_t rows, cudaStream_t stream) {
  const int64_t blocks = (rows + kRecordThreads - 1) / kRecordThreads;
  return {dim3(grid_blocks(blocks)), dim3(kRecordThreads), 0, stream};
}

inline cudaError_t launch_token_divergence(const DivergenceArgs& args, const DivergenceOutputs& out,
                                           cudaStream_t stream) {
  const uint32_t carried = carried_by(args.outputs);
  auto* kernel = &token_divergence_kernel<false, false>;
  if (carried == kCarries) kernel = &token_divergence_kernel<true, true>;
  if (carried == kCarriesTrainGap) kernel = &token_divergence_kernel<true, false>;
  if (carried == kCarriesEntropy) kernel = &token_divergence_kernel<false, true>;
  return launch(row_blocks(args.rows, stream), kernel, args, out);
}

template <typename Real>
cudaError_t launch_diagnostics(const DivergenceArgs& args, const DivergenceOutputs& out,
                               cudaStream_t stream) {
  return launch(row_blocks(args.rows, stream), &diagnostics_kernel<Real>, args, out);
}

template <typename Real>
cudaError_t launch_token_divergence_backward(const DivergenceBackwardArgs& args,
                                             cudaStream_t stream) {
  return launch(row_blocks(args.forward.rows, stream), &token_divergence_backward_kernel<Real>,
                args);
}

template <typename Real>
cudaError_t launch_state_merge(const Real* states, Real* merged, int64_t parts, int64_t rows,
                               cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  return launch(record_blocks(rows, stream), &state_merge_kernel<Real>, states, merged, parts,
                rows);
}

template <typename Real>
cudaError_t launch_finish(const Real* states, uint32_t outputs, Real* values, double* statistics,
                          int64_t rows, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  return launch(record_blocks(rows, stream), &finish_kernel<Real>, states, outputs, values,
                statistics, rows);
}

}  // namespace trm::kernels
