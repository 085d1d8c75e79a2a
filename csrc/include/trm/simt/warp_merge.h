// SPDX-License-Identifier: Apache-2.0
// Warp-wide merge of pair states.
//
//   function      called by            result in         shared memory
//   warp_merge    every lane, once     state 0, lane 0   32 x kStateColumns doubles, the caller's
#pragma once

#include "trm/divergence_state.h"

namespace trm::simt {

// merge() of 32 states, lane i's at states + i * kStateColumns: one common frame, one move each,
// then sums over a fixed butterfly, so reruns are bitwise equal. The states live in shared memory
// and are summed column by column, which keeps few registers busy. Token columns are not merged.
__device__ inline void warp_merge(double* states) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double* const mine = states + lane * kStateColumns;
  DivergenceState<double> s = load_state(mine);
  double max_rollout = rollout_maximum(s);
  double max_train = train_maximum(s);
  for (int step = 16; step > 0; step /= 2) {
    max_rollout = greater(max_rollout, __shfl_xor_sync(kAll, max_rollout, step));
    max_train = greater(max_train, __shfl_xor_sync(kAll, max_train, step));
  }
  join_frame(s, max_rollout, max_train);
  const uint32_t any = __reduce_or_sync(kAll, s.flags);
  const uint32_t every = __reduce_and_sync(kAll, s.flags);
  s.flags = (any & ~kCarries) | (every & kCarries);
  if (s.has(kHasRollout) || s.has(kHasTrain)) {
    const Frame<double> frame = frame_of(max_rollout, max_train);
    s.max_rollout = frame.max_rollout;
    s.shift = frame.shift;
  }
  store_state(s, mine);
#pragma unroll 1
  for (int column = kNearMass; column <= kTrainLog; ++column) {
    if (column == kFlags) continue;
    double sum = mine[column];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
    mine[column] = sum;
  }
}

}  // namespace trm::simt
