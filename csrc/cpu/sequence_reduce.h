// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "trm/sequence_reduce.h"

namespace trm::cpu {

inline SequenceStatistics statistics_of(const SequenceArgs& args, int64_t sequence) {
  SequenceStatistics statistics;
  for (int64_t i = args.offsets[sequence]; i < args.offsets[sequence + 1]; ++i) {
    add_indexed(args, i, statistics);
  }
  return statistics;
}

// Sequences [begin, end), each in order of its tokens: the caller supplies the threads.
inline void sequence_reduce(const SequenceArgs& args, const SequenceOutputs& out, int64_t begin,
                            int64_t end) {
  for (int64_t sequence = begin; sequence < end; ++sequence) {
    write_statistics(args, out, sequence, statistics_of(args, sequence));
  }
}

inline void sequence_verdict(const SequenceArgs& args, const VerdictRule& rule,
                             const VerdictOutputs& out, int64_t begin, int64_t end) {
  for (int64_t sequence = begin; sequence < end; ++sequence) {
    const SequenceStatistics statistics = statistics_of(args, sequence);
    write_verdict(args, rule, out, sequence, statistics);
    const bool keep = is_kept(reason_of(statistics, rule));
    for (int64_t i = args.offsets[sequence]; i < args.offsets[sequence + 1]; ++i) {
      write_token(args, out, i, keep);
    }
  }
}

}  // namespace trm::cpu
