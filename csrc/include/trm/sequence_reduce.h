// SPDX-License-Identifier: Apache-2.0
// Statistics of one sequence's tokens: maximum (NaN wins), its position, sum, count. They combine
// over pieces of a sequence in any order; only the sum depends on it, in its last bit.
#pragma once

#include "trm/divergence_args.h"

namespace trm {

struct SequenceStatistics {
  double max = 0;
  int64_t position = -1;  // of the maximum, or of the first NaN; -1 where no token counts
  double sum = 0;
  int64_t count = 0;
};

// True where (value, position) is worse than what the statistics hold: NaN before numbers, larger
// before smaller, and on ties the earlier token.
TRM_INLINE bool is_worse(double value, int64_t position, const SequenceStatistics& than) {
  if (than.count == 0) return true;
  const bool nan = value != value;
  const bool than_nan = than.max != than.max;
  if (nan != than_nan) return nan;
  if (!nan && value != than.max) return value > than.max;
  return position < than.position;
}

TRM_INLINE void add_token(SequenceStatistics& s, double value, int64_t position) {
  if (is_worse(value, position, s)) {
    s.max = value;
    s.position = position;
  }
  s.sum += value;
  ++s.count;
}

TRM_INLINE void merge_statistics(SequenceStatistics& s, const SequenceStatistics& other) {
  if (other.count == 0) return;
  if (is_worse(other.max, other.position, s)) {
    s.max = other.max;
    s.position = other.position;
  }
  s.sum += other.sum;
  s.count += other.count;
}

// Tokens of sequence b are order[offsets[b]] .. order[offsets[b + 1] - 1]; no order: themselves.
struct SequenceArgs {
  const void* values = nullptr;  // float, or double where wide
  bool wide = false;
  const int64_t* positions = nullptr;
  const bool* token_mask = nullptr;
  const int64_t* offsets = nullptr;
  const int64_t* order = nullptr;
  int64_t sequences = 0;
  int64_t tokens = 0;
};

struct SequenceOutputs {
  void* max = nullptr;  // dtype of the values
  int64_t* position = nullptr;
  double* sum = nullptr;
  int64_t* count = nullptr;
};

// Adds token number `index` of the order, if it counts.
TRM_INLINE void add_indexed(const SequenceArgs& args, int64_t index, SequenceStatistics& s) {
  const int64_t token = args.order == nullptr ? index : args.order[index];
  if (!args.token_mask[token]) return;
  const double value = args.wide
                           ? static_cast<const double*>(args.values)[token]
                           : static_cast<double>(static_cast<const float*>(args.values)[token]);
  add_token(s, value, args.positions[token]);
}

TRM_INLINE void write_statistics(const SequenceArgs& args, const SequenceOutputs& out,
                                 int64_t sequence, const SequenceStatistics& s) {
  if (args.wide) {
    static_cast<double*>(out.max)[sequence] = s.max;
  } else {
    static_cast<float*>(out.max)[sequence] = static_cast<float>(s.max);
  }
  out.position[sequence] = s.position;
  out.sum[sequence] = s.sum;
  out.count[sequence] = s.count;
}

}  // namespace trm
