// SPDX-License-Identifier: Apache-2.0
// One block per sequence: lanes stride over its tokens, a fixed tree joins them; no atomics.
// Reads 13 bytes per token (value, position, mask), 8 more where an order is given; a verdict reads
// the mask and the order again, from cache, and writes a byte.
#pragma once

#include "trm/launch_plan.h"
#include "trm/sequence_reduce.h"

namespace trm::kernels {

constexpr int kSequenceThreads = 256;

// The statistics of this block's sequence, for every thread. `storage` has one place per thread.
template <int Threads>
__device__ __forceinline__ const SequenceStatistics& reduce_block(const SequenceArgs& args,
                                                                  SequenceStatistics* storage) {
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
  __syncthreads();  // every thread reads the result
  return storage[0];
}

template <int Threads>
__global__ void __launch_bounds__(Threads)
    sequence_reduce_kernel(SequenceArgs args, SequenceOutputs out) {
  TRM_SHARED(storage, SequenceStatistics[Threads]);
  const SequenceStatistics& statistics = reduce_block<Threads>(args, storage);
  if (threadIdx.x == 0) write_statistics(args, out, blockIdx.x, statistics);
}

template <int Threads>
__global__ void __launch_bounds__(Threads)
    sequence_verdict_kernel(SequenceArgs args, VerdictRule rule, VerdictOutputs out) {
  TRM_SHARED(storage, SequenceStatistics[Threads]);
  const SequenceStatistics& statistics = reduce_block<Threads>(args, storage);
  const int64_t sequence = blockIdx.x;
  if (threadIdx.x == 0) write_verdict(args, rule, out, sequence, statistics);
  const bool keep = is_kept(reason_of(statistics, rule));
  for (int64_t index = args.offsets[sequence] + threadIdx.x; index < args.offsets[sequence + 1];
       index += Threads) {
    write_token(args, out, index, keep);
  }
}

inline LaunchConfig sequence_config(const SequenceArgs& args, cudaStream_t stream) {
  return {dim3(grid_blocks(args.sequences)), dim3(kSequenceThreads), 0, stream};
}

inline cudaError_t launch_sequence_reduce(const SequenceArgs& args, const SequenceOutputs& out,
                                          cudaStream_t stream) {
  if (args.sequences == 0) return cudaSuccess;
  const LaunchConfig config = sequence_config(args, stream);
  return launch(config, &sequence_reduce_kernel<kSequenceThreads>, args, out);
}

inline cudaError_t launch_sequence_verdict(const SequenceArgs& args, const VerdictRule& rule,
                                           const VerdictOutputs& out, cudaStream_t stream) {
  if (args.sequences == 0) return cudaSuccess;
  const LaunchConfig config = sequence_config(args, stream);
  return launch(config, &sequence_verdict_kernel<kSequenceThreads>, args, rule, out);
}

}  // namespace trm::kernels
