// SPDX-License-Identifier: Apache-2.0
// Which kernel serves a call, and with what grid: pure functions of the device's figures and of the
// call's sizes, types and addresses.
#pragma once

#include "trm/divergence_args.h"
#include "trm/divergence_state.h"

namespace trm {

constexpr int kRegions = 32;  // of a row, one warp at a time each
constexpr int kStreamWarps = 8;
constexpr int kStreamThreads = 32 * kStreamWarps;
constexpr int kSplit = kRegions / kStreamWarps;  // blocks per row where there are few rows
constexpr int kLeastCapability = 80;             // packed maxima of 16-bit types
constexpr int64_t kMostBlocks = 0x7fffffff;      // on grid x

// Of a launch with one block per row. 0 where a grid has too few: such a launch fails, where the
// lowest 32 bits would leave rows out.
inline unsigned grid_blocks(int64_t blocks) {
  return blocks <= kMostBlocks ? static_cast<unsigned>(blocks) : 0;
}

struct StreamPlan {
  bool streamed = false;  // else the generic kernel: other types, strided columns, old devices
  int load_bytes = 2;  // 16: rows start at multiples of a run's bytes; 4: of a word's; 2: neither
  int blocks_per_row = 1;
  int64_t region_columns = 0;
  int64_t blocks = 0;
  int64_t workspace_bytes = 0;  // states of the regions, where several blocks share a row
};

struct GradientPlan {
  bool streamed = false;
  bool kl_only = false;  // d KL(rollout||train) / d train and nothing else
  int blocks_per_row = 1;
  int64_t block_columns = 0;
  int64_t blocks = 0;
};

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The pairs that have a streaming kernel.
inline bool has_stream(StorageType rollout, StorageType train) {
  if (rollout == StorageType::kFloat64 || train == StorageType::kFloat64) return false;
  if (rollout == train) return true;
  return rollout != StorageType::kFloat16 && train != StorageType::kFloat16;
}

// Columns of the run that a lane reads at a time: 16 bytes of the wider type.
inline int64_t run_columns(const DivergenceArgs& args) {
  const int64_t rollout = element_size(args.rollout.type);
  const int64_t train = element_size(args.train.type);
  return 16 / (rollout > train ? rollout : train);
}

// Whether every row of [outer, inner] starts at a multiple of `bytes`.
inline bool rows_aligned(const LogitsView& view, const DivergenceArgs& args, int64_t bytes) {
  const int64_t size = element_size(view.type);
  return reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0 &&
         (args.inner <= 1 || view.inner_stride * size % bytes == 0) &&
         (args.rows <= args.inner || view.outer_stride * size % bytes == 0);
}

inline bool can_stream(const DeviceFacts& device, const DivergenceArgs& args) {
  const bool contiguous =
      args.vocab <= 1 || (args.rollout.column_stride == 1 && args.train.column_stride == 1);
  return device.compute_capability >= kLeastCapability && contiguous &&
         has_stream(args.rollout.type, args.train.type) && args.rows <= kMostBlocks / kSplit;
}

inline StreamPlan plan_stream(const DeviceFacts& device, const DivergenceArgs& args) {
  StreamPlan plan;
  plan.blocks = args.rows;
  plan.streamed = can_stream(device, args);
  if (!plan.streamed) return plan;
  const int64_t run = run_columns(args);
  const auto aligned = [&](const LogitsView& view, int64_t bytes) {
    return rows_aligned(view, args, bytes);
  };
  if (aligned(args.rollout, run * element_size(args.rollout.type)) &&
      aligned(args.train, run * element_size(args.train.type))) {
    plan.load_bytes = 16;
  } else if (aligned(args.rollout, 4) && aligned(args.train, 4)) {
    plan.load_bytes = 4;
  }
  // Of V and the types alone: where a region ends must not depend on the number of rows.
  plan.region_columns = round_up((args.vocab + kRegions - 1) / kRegions, 32 * run);
  const bool few_rows = args.rows < 2 * device.multiprocessors;
  if (few_rows && args.vocab > plan.region_columns * kStreamWarps) {
    plan.blocks_per_row = kSplit;
    plan.blocks = args.rows * kSplit;
    plan.workspace_bytes =
        args.rows * kRegions * kStateColumns * static_cast<int64_t>(sizeof(double));
  }
  return plan;
}

// Columns of a region that the row has.
TRM_INLINE int region_size(const StreamPlan& plan, int64_t vocab, int region) {
  const int64_t left = vocab - plan.region_columns * region;
  return static_cast<int>(left < plan.region_columns ? left : plan.region_columns);
}

inline GradientPlan plan_gradient(const DeviceFacts& device, const DivergenceBackwardArgs& args) {
  GradientPlan plan;
  const DivergenceArgs& forward = args.forward;
  plan.blocks = forward.rows;
  plan.block_columns = args.columns;
  const int64_t run = run_columns(forward);
  const auto aligned = [&](const LogitsView& view, const void* gradient) {
    const int64_t bytes = run * element_size(view.type);
    return rows_aligned(view, forward, bytes) &&
           (gradient == nullptr ||
            (reinterpret_cast<uintptr_t>(gradient) % static_cast<uintptr_t>(bytes) == 0 &&
             args.columns * element_size(view.type) % bytes == 0));
  };
  plan.streamed = can_stream(device, forward) && !args.wide &&
                  aligned(forward.rollout, args.grad_rollout) &&
                  aligned(forward.train, args.grad_train);
  if (!plan.streamed) return plan;
  plan.kl_only = forward.outputs == 1u << kKl && args.grad_rollout == nullptr &&
                 forward.rollout_temperature.data == nullptr &&
                 forward.train_temperature.data == nullptr;
  const int64_t step = kStreamThreads * run;
  if (forward.rows < 2 * device.multiprocessors) {
    const int64_t wanted = (4 * device.multiprocessors + forward.rows - 1) / forward.rows;
    const int64_t steps = (args.columns + step - 1) / step;
    const int64_t parts = wanted < steps ? wanted : steps;
    plan.block_columns = round_up((args.columns + parts - 1) / parts, step);
    plan.blocks_per_row =
        static_cast<int>((args.columns + plan.block_columns - 1) / plan.block_columns);
    plan.blocks = forward.rows * plan.blocks_per_row;
  }
  return plan;
}

}  // namespace trm
