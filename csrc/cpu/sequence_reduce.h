// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "trm/sequence_reduce.h"

namespace trm::cpu {

// Sequences [begin, end), each in order of its tokens: the caller supplies the threads.
inline void sequence_reduce(const SequenceArgs& args, const SequenceOutputs& out, int64_t begin,
                            int64_t end) {
  for (int64_t sequence = begin; sequence < end; ++sequence) {
    SequenceStatistics statistics;
    for (int64_t i = args.offsets[sequence]; i < args.offsets[sequence + 1]; ++i) {
      add_indexed(args, i, statistics);
    }
    write_statistics(args, out, sequence, statistics);
  }
}

}  // namespace trm::cpu
