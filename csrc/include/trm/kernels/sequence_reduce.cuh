// SPDX-License-Identifier: Apache-2.0
// One block per sequence: lanes stride over its tokens, a fixed tree joins them; no atomics.
// Reads 13 bytes per token (value, position, mask), 8 more where an order is given.
#pragma once

#include "trm/launch_plan.h"
#include "trm/sequence_reduce.h"

namespace trm::kernels {

constexpr int kSequenceThreads = 128;

template <int Threads>
__global__ void __launch_bounds__(Threads)
    sequence_reduce_kernel(SequenceArgs args, SequenceOutputs out) {
  TRM_SHARED(storage, SequenceStatistics[Threads]);
  const int64_t sequence = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  SequenceStatistics lane;
  for (int64_t index = args.offsets[sequence] + thread; index < args.offsets[sequence + 1];
       index += Threads) {
    add_indexed(args, index, lane);
  }
  storage[thread] = lane;
  for (int half = Threads / 2; half > 0; half /= 2) {
    __syncthreads();  // the partner's statistics of the previous level must land before this reads
    if (thread < half) merge_statistics(storage[thread], storage[thread + half]);
  }
  if (thread == 0) write_statistics(args, out, sequence, storage[0]);
}

inline cudaError_t launch_sequence_reduce(const SequenceArgs& args, const SequenceOutputs& out,
                                          cudaStream_t stream) {
  if (args.sequences == 0) return cudaSuccess;
  const LaunchConfig config = {dim3(grid_blocks(args.sequences)), dim3(kSequenceThreads), 0,
                               stream};
  return launch(config, &sequence_reduce_kernel<kSequenceThreads>, args, out);
}

}  // namespace trm::kernels
