// SPDX-License-Identifier: Apache-2.0
// Backward over rows whose columns are contiguous and aligned: reads V x (rollout size + train
// size) bytes per row once and writes V x size per gradient. Columns do not depend on each other,
// and a row is split where a block's step ends, so the split does not change a bit.
//
//   d KL(rollout||train) / d train = p expm1(-t),  t = log(p/q) = (x - y) - c - residual
//
// with p = exp(x - M - log S) as one power of two: its constant is rounded once per row, and what
// that rounding left multiplies the row's upstream gradient.
#pragma once

#include "trm/kernels/stream.cuh"
#include "trm/launch_plan.h"

namespace trm::kernels {

// exp(v) * 2^-scale of a row, whose constant exp(-v0) is 2^-scale * correction.
struct LogScale {
  float scale;
  float correction;
};

TRM_INLINE LogScale log_scale(double log_normaliser) {
  LogScale out;
  out.scale = static_cast<float>(log_normaliser / kNats);
  out.correction =
      static_cast<float>(exponential(static_cast<double>(out.scale) * kNats - log_normaliser));
  return out;
}

// What every thread of a block needs of its row.
struct GradientRow {
  RowGradient<float> gradient;
  LogScale rollout;
  LogScale train;
  bool live;
  bool undefined;
  bool straight;  // powers of two hold p and q: no logit is too large for it
};

__device__ inline GradientRow gradient_row(const DivergenceBackwardArgs& args, int64_t row) {
  constexpr double kLargest = 65536.0;
  GradientRow out = {};
  out.live = read_gradient(args, row, out.gradient);
  out.undefined = out.live && out.gradient.log_mass != out.gradient.log_mass;
  out.straight = false;
  if (!out.live || out.undefined) return out;
  const double* const statistics = args.statistics + row * kStatistics;
  const double rollout = statistics[kStatMaxRollout] + statistics[kStatLogMass];
  const double train = rollout - (statistics[kStatShift] + statistics[kStatResidual]);
  out.rollout = log_scale(rollout);
  out.train = log_scale(train);
  out.straight = std::fabs(rollout) <= kLargest && std::fabs(train) <= kLargest;
  return out;
}

// The gradients of one column, token and temperature included.
__device__ __forceinline__ ColumnGradient<float> whole_column(const GradientRow& row, bool is_token,
                                                              const RowScale<float>& scale, float x,
                                                              float y) {
  ColumnGradient<float> out = column_gradient(row.gradient, scale.of_rollout(x), scale.of_train(y));
  if (is_token) {
    out.rollout += row.gradient.g_logp_rollout;
    out.train += row.gradient.g_logp_train;
  }
  out.rollout *= scale.rollout.high;
  out.train *= scale.train.high;
  return out;
}

// q - p of a column that is not near, or exists on one side or none.
__device__ __forceinline__ float far_difference(const GradientRow& row, float x, float y) {
  const float p = fast_exp2(std::fma(x, kLog2e, -row.rollout.scale)) * row.rollout.correction;
  const float q = fast_exp2(std::fma(y, kLog2e, -row.train.scale)) * row.train.correction;
  return q - p;  // a logit of -inf gives 0
}

template <typename Rollout, typename Train, int Columns>
__device__ __forceinline__ void kl_gradient(const GradientRow& row,
                                            const Run<Rollout, Columns>& rollout,
                                            const Run<Train, Columns>& train, float* out) {
  const float factor = row.gradient.g_kl * row.rollout.correction;
  float t[Columns];
  bool near = true;
#pragma unroll
  for (int i = 0; i < Columns; ++i) {
    t[i] = log_ratio_in_frame(rollout[i], train[i], row.gradient.shift) - row.gradient.residual;
    t[i] -= row.gradient.residual_low;
    near = near & (std::fabs(t[i]) <= near_limit<float>());
  }
#pragma unroll
  for (int i = 0; i < Columns; ++i) {
    const float p = fast_exp2(std::fma(rollout[i], kLog2e, -row.rollout.scale));
    out[i] = (factor * p) * (psi_near(t[i]) - t[i]);
  }
  if (__all_sync(kWholeWarp, near)) return;
#pragma unroll
  for (int i = 0; i < Columns; ++i) {
    if (std::fabs(t[i]) <= near_limit<float>()) continue;
    out[i] = row.gradient.g_kl * far_difference(row, rollout[i], train[i]);
  }
}

template <typename Rollout, typename Train, bool KlOnly>
__global__ void __launch_bounds__(kStreamThreads, 3)
    stream_gradient_kernel(DivergenceBackwardArgs args, GradientPlan plan) {
  constexpr int kColumns = kRunColumns<Rollout, Train>;
  constexpr int kStep = kStreamThreads * kColumns;
  TRM_SHARED(shared_row, GradientRow);
  const DivergenceArgs& forward = args.forward;
  const int64_t row_index = blockIdx.x / plan.blocks_per_row;
  const int64_t part = blockIdx.x % plan.blocks_per_row;
  if (threadIdx.x == 0) shared_row = gradient_row(args, row_index);
  __syncthreads();  // one thread has done the row's double precision
  const GradientRow row = shared_row;
  const RowScale<float> scale = row_scale<float>(forward, row_index);
  const int64_t token = KlOnly || !row.live ? -1 : token_column(forward, row_index);
  const int64_t begin = part * plan.block_columns;
  const int64_t end =
      begin + plan.block_columns < args.columns ? begin + plan.block_columns : args.columns;
  const int64_t readable = row.live && !row.undefined ? forward.vocab : 0;
  const Rollout* const rollout = static_cast<const Rollout*>(forward.rollout.data) +
                                 row_offset(forward.rollout, row_index, forward.inner);
  const Train* const train = static_cast<const Train*>(forward.train.data) +
                             row_offset(forward.train, row_index, forward.inner);
  Rollout* const grad_rollout =
      KlOnly || args.grad_rollout == nullptr
          ? nullptr
          : static_cast<Rollout*>(args.grad_rollout) + row_index * args.columns;
  Train* const grad_train = args.grad_train == nullptr
                                ? nullptr
                                : static_cast<Train*>(args.grad_train) + row_index * args.columns;

  // Runs that a whole block can take at once; the rest of the row goes column by column.
  const auto write_run = [&](int64_t place, const Run<Rollout, kColumns>& x,
                             const Run<Train, kColumns>& y) {
    float by_train[kColumns];
    if constexpr (KlOnly) {
      kl_gradient<Rollout, Train, kColumns>(row, x, y, by_train);
    } else {
      float by_rollout[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const ColumnGradient<float> both = whole_column(row, place + i == token, scale, x[i], y[i]);
        by_rollout[i] = both.rollout;
        by_train[i] = both.train;
      }
      if (grad_rollout != nullptr) store_run<Rollout, kColumns>(grad_rollout + place, by_rollout);
    }
    if (grad_train != nullptr) store_run<Train, kColumns>(grad_train + place, by_train);
  };
  const int64_t offset = static_cast<int64_t>(threadIdx.x) * kColumns;
  int64_t column = begin;  // of the block
  if (!row.live) {
    const float zeros[kColumns] = {};
    for (; column + kStep <= end; column += kStep) {
      if (grad_rollout != nullptr) {
        store_run<Rollout, kColumns>(grad_rollout + column + offset, zeros);
      }
      if (grad_train != nullptr) store_run<Train, kColumns>(grad_train + column + offset, zeros);
    }
  } else if (!KlOnly || row.straight) {
    const int64_t stop = end < readable ? end : readable;
    for (; column + 2 * kStep <= stop; column += 2 * kStep) {
      const int64_t first = column + offset;
      const int64_t second = first + kStep;
      const auto x0 = load_run<Rollout, kColumns>(rollout + first);
      const auto y0 = load_run<Train, kColumns>(train + first);
      const auto x1 = load_run<Rollout, kColumns>(rollout + second);
      const auto y1 = load_run<Train, kColumns>(train + second);
      write_run(first, x0, y0);
      write_run(second, x1, y1);
    }
    if (column + kStep <= stop) {
      write_run(column + offset, load_run<Rollout, kColumns>(rollout + column + offset),
                load_run<Train, kColumns>(train + column + offset));
      column += kStep;
    }
  }
  for (column += threadIdx.x; column < end; column += kStreamThreads) {
    ColumnGradient<float> both = {0.0f, 0.0f};
    if (column < readable) {
      both = whole_column(row, column == token, scale,
                          load_logit<float>(rollout, column, Packing<Rollout>::kType),
                          load_logit<float>(train, column, Packing<Train>::kType));
    } else if (row.undefined && column < forward.vocab) {
      both = {quiet_nan<float>(), quiet_nan<float>()};
    }
    if (grad_rollout != nullptr) {
      store_logit(grad_rollout, column, Packing<Rollout>::kType, both.rollout);
    }
    if (grad_train != nullptr) store_logit(grad_train, column, Packing<Train>::kType, both.train);
  }
}

template <typename Rollout, typename Train>
cudaError_t launch_stream_gradient(const DivergenceBackwardArgs& args, const GradientPlan& plan,
                                   cudaStream_t stream) {
  auto* kernel = plan.kl_only ? &stream_gradient_kernel<Rollout, Train, true>
                              : &stream_gradient_kernel<Rollout, Train, false>;
  return launch({dim3(grid_blocks(plan.blocks)), dim3(kStreamThreads), 0, stream}, kernel, args,
                plan);
}

}  // namespace trm::kernels
