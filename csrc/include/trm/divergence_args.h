// SPDX-License-Identifier: Apache-2.0
// What a kernel is handed: raw pointers, sizes and strides in elements (64-bit throughout). Logits
// are [outer, inner, vocab] with any strides, so a shifted or transposed view is read where it is.
#pragma once

#include "trm/storage_types.h"

namespace trm {

// A per-row quantity [outer, inner]; data may be null where it is optional.
template <typename T>
struct RowView {
  T* data = nullptr;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
};

struct LogitsView {
  const void* data = nullptr;
  StorageType type = StorageType::kFloat32;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
  int64_t column_stride = 0;
};

struct DivergenceArgs {
  LogitsView rollout;
  LogitsView train;
  RowView<const bool> token_mask;  // null: every row counts; rows that do not are never read
  RowView<const int64_t> tokens;   // null: no sampled token
  RowView<const double> rollout_temperature;  // null: 1
  RowView<const double> train_temperature;
  int64_t rows = 0;  // outer * inner
  int64_t inner = 1;
  int64_t vocab = 0;        // columns that are real; padding beyond is never read
  int64_t vocab_start = 0;  // token id of column 0 (a vocabulary shard)
  uint32_t outputs = 0;     // bit per Output
};

// Forward: values [value outputs set, rows], diagnostics [diagnostic outputs set, rows] and
// statistics [rows, kStatistics]; or the bare state.
struct DivergenceOutputs {
  void* values = nullptr;       // float, or double where an input is double
  void* diagnostics = nullptr;  // same
  double* statistics = nullptr;
  void* state = nullptr;        // [rows, kStateColumns], instead of the three above
  double* workspace = nullptr;  // what the backend's plan asks for
  bool wide = false;            // values and state are double
};

struct DivergenceBackwardArgs {
  DivergenceArgs forward;
  RowView<const void> upstream;  // [value outputs set, outer, inner], any strides
  int64_t upstream_output_stride = 0;
  const double* statistics = nullptr;
  bool wide = false;  // upstream gradients are double
  void* grad_rollout =
      nullptr;  // contiguous [rows, columns], dtype of its logits; null: not wanted
  void* grad_train = nullptr;
  int64_t columns = 0;  // vocabulary with its padding, whose gradient is 0
};

template <typename T>
TRM_INLINE T* at_row(const RowView<T>& view, int64_t row, int64_t inner) {
  return view.data + (row / inner) * view.outer_stride + (row % inner) * view.inner_stride;
}

TRM_INLINE int64_t row_offset(const LogitsView& view, int64_t row, int64_t inner) {
  return (row / inner) * view.outer_stride + (row % inner) * view.inner_stride;
}

TRM_INLINE bool counts(const DivergenceArgs& args, int64_t row) {
  return args.token_mask.data == nullptr || *at_row(args.token_mask, row, args.inner);
}

}  // namespace trm
