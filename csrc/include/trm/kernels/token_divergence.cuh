// SPDX-License-Identifier: Apache-2.0
// One block per row: every lane streams its columns into a pair state, the block merges the lanes.
// KL(p||q) = G/S - (b - log1p(b)), b = B/S; see divergence_state.h.
// Forward reads V x (rollout size + train size) bytes per row; backward reads the same and writes
// V x size per gradient.
#pragma once

#include <cuda_runtime.h>

#include "trm/row.h"
#include "trm/simt/block_merge.h"

namespace trm::kernels {

constexpr int kRowThreads = 256;     // one block per row of logits
constexpr int kRecordThreads = 128;  // one thread per row of states

template <typename Real, bool TrainGap, bool Entropy>
__global__ void __launch_bounds__(kRowThreads)
    token_divergence_kernel(DivergenceArgs args, DivergenceOutputs out) {
  __shared__ simt::MergeStorage<Real, kRowThreads> storage;
  const int64_t row = blockIdx.x;
  if (!counts(args, row)) {  // the whole block agrees
    if (threadIdx.x == 0) write_masked_row(args, out, row);
    return;
  }
  const int64_t rollout = row_offset(args.rollout, row, args.inner);
  const int64_t train = row_offset(args.train, row, args.inner);
  DivergenceState<Real> lane;
  lane.flags = carried_by(args.outputs);
  for (int64_t v = threadIdx.x; v < args.vocab; v += kRowThreads) {
    const Real x = load_logit<Real>(args.rollout.data, rollout + v * args.rollout.column_stride,
                                    args.rollout.type);
    const Real y =
        load_logit<Real>(args.train.data, train + v * args.train.column_stride, args.train.type);
    add_streaming<TrainGap, Entropy>(lane, x, y);
  }
  DivergenceState<double> total = simt::block_merge<Real, kRowThreads>(lane, storage);
  if (threadIdx.x == 0) {
    attach_token(args, row, total);
    write_row(args, out, row, total);
  }
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
  const int64_t rollout = row_offset(forward.rollout, row, forward.inner);
  const int64_t train = row_offset(forward.train, row, forward.inner);
  for (int64_t v = threadIdx.x; v < args.columns; v += kRowThreads) {
    ColumnGradient<Real> column = {Real(0), Real(0)};
    if (undefined && v < forward.vocab) {
      column = {quiet_nan<Real>(), quiet_nan<Real>()};
    } else if (live && v < forward.vocab) {
      const Real x = load_logit<Real>(
          forward.rollout.data, rollout + v * forward.rollout.column_stride, forward.rollout.type);
      const Real y = load_logit<Real>(forward.train.data, train + v * forward.train.column_stride,
                                      forward.train.type);
      column = column_gradient(gradient, x, y);
      if (v == token) {
        column.rollout += gradient.g_logp_rollout;
        column.train += gradient.g_logp_train;
      }
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
    total = merge<Real>(total, load_state(states + (part * rows + row) * kStateColumns));
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

template <typename Real>
cudaError_t launch_token_divergence(const DivergenceArgs& args, const DivergenceOutputs& out,
                                    cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const uint32_t carried = carried_by(args.outputs);
  auto* kernel = &token_divergence_kernel<Real, false, false>;
  if (carried == kCarries) kernel = &token_divergence_kernel<Real, true, true>;
  if (carried == kCarriesTrainGap) kernel = &token_divergence_kernel<Real, true, false>;
  if (carried == kCarriesEntropy) kernel = &token_divergence_kernel<Real, false, true>;
  kernel<<<dim3(static_cast<unsigned>(args.rows)), kRowThreads, 0, stream>>>(args, out);
  return cudaGetLastError();
}

template <typename Real>
cudaError_t launch_token_divergence_backward(const DivergenceBackwardArgs& args,
                                             cudaStream_t stream) {
  if (args.forward.rows == 0 || args.columns == 0) return cudaSuccess;
  token_divergence_backward_kernel<Real>
      <<<dim3(static_cast<unsigned>(args.forward.rows)), kRowThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

inline unsigned record_blocks(int64_t rows) {
  return static_cast<unsigned>((rows + kRecordThreads - 1) / kRecordThreads);
}

template <typename Real>
cudaError_t launch_state_merge(const Real* states, Real* merged, int64_t parts, int64_t rows,
                               cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  state_merge_kernel<Real>
      <<<record_blocks(rows), kRecordThreads, 0, stream>>>(states, merged, parts, rows);
  return cudaGetLastError();
}

template <typename Real>
cudaError_t launch_finish(const Real* states, uint32_t outputs, Real* values, double* statistics,
                          int64_t rows, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  finish_kernel<Real><<<record_blocks(rows), kRecordThreads, 0, stream>>>(states, outputs, values,
                                                                          statistics, rows);
  return cudaGetLastError();
}

}  // namespace trm::kernels
