// SPDX-License-Identifier: Apache-2.0
// Block-wide merge of pair states.
//
//   function      called by              result valid on   shared memory
//   block_merge   every thread, once     thread 0          Threads x kStateColumns doubles
#pragma once

#include "trm/divergence_state.h"

namespace trm::simt {

template <int Threads>
struct MergeStorage {
  double columns[Threads * kStateColumns];
};

// Merges the lanes' states in a fixed binary tree over thread indices, so reruns are bitwise equal.
// The storage may be reused after a barrier of the caller's.
template <int Threads>
__device__ DivergenceState<double> block_merge(DivergenceState<double> state,
                                               MergeStorage<Threads>& storage) {
  static_assert((Threads & (Threads - 1)) == 0, "a binary tree needs a power of two");
  const int thread = static_cast<int>(threadIdx.x);
  double* const mine = storage.columns + thread * kStateColumns;
  store_state(state, mine);
  for (int half = Threads / 2; half > 0; half /= 2) {
    __syncthreads();  // the partner's store of the previous level must land before this level loads
    if (thread < half) {
      state = merge(load_state(mine), load_state(mine + half * kStateColumns));
      store_state(state, mine);
    }
  }
  return state;
}

}  // namespace trm::simt
