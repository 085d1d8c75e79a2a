// SPDX-License-Identifier: Apache-2.0
// Statistics of one sequence's tokens: maximum (NaN wins), its position, sum, count, and where the
// first infinity is. They combine over pieces of a sequence in any order; only the sum depends on
// it, in its last bit. A verdict is judged from them.
#pragma once

#include "trm/divergence_args.h"

namespace trm {

struct SequenceStatistics {
  double max = 0;
  int64_t position = -1;  // of the maximum, or of the first NaN; -1 where no token counts
  double sum = 0;
  int64_t count = 0;
  int64_t infinite = -1;  // position of the first value that is +inf or -inf; -1 where none is
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

TRM_INLINE void note_infinite(SequenceStatistics& s, int64_t position) {
  if (s.infinite < 0 || position < s.infinite) s.infinite = position;
}

TRM_INLINE void add_token(SequenceStatistics& s, double value, int64_t position) {
  if (is_worse(value, position, s)) {
    s.max = value;
    s.position = position;
  }
  if (value == infinity<double>() || value == -infinity<double>()) note_infinite(s, position);
  s.sum += value;
  ++s.count;
}

TRM_INLINE void merge_statistics(SequenceStatistics& s, const SequenceStatistics& other) {
  if (other.count == 0) return;
  if (is_worse(other.max, other.position, s)) {
    s.max = other.max;
    s.position = other.position;
  }
  if (other.infinite >= 0) note_infinite(s, other.infinite);
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
  int64_t* infinite = nullptr;
};

TRM_INLINE int64_t token_at(const SequenceArgs& args, int64_t index) {
  return args.order == nullptr ? index : args.order[index];
}

// Adds token number `index` of the order, if it counts.
TRM_INLINE void add_indexed(const SequenceArgs& args, int64_t index, SequenceStatistics& s) {
  const int64_t token = token_at(args, index);
  // Loaded before the mask is known, so that a lane waits for both at once; used only if it counts.
  const double value = args.wide
                           ? static_cast<const double*>(args.values)[token]
                           : static_cast<double>(static_cast<const float*>(args.values)[token]);
  if (args.token_mask[token]) add_token(s, value, args.positions[token]);
}

// out[sequence] in the dtype of the values.
TRM_INLINE void write_value(const SequenceArgs& args, void* out, int64_t sequence, double value) {
  if (args.wide) {
    static_cast<double*>(out)[sequence] = value;
  } else {
    static_cast<float*>(out)[sequence] = static_cast<float>(value);
  }
}

TRM_INLINE void write_statistics(const SequenceArgs& args, const SequenceOutputs& out,
                                 int64_t sequence, const SequenceStatistics& s) {
  write_value(args, out.max, sequence, s.max);
  out.position[sequence] = s.position;
  out.sum[sequence] = s.sum;
  out.count[sequence] = s.count;
  out.infinite[sequence] = s.infinite;
}

// Codes of trm_ext.Reason that hold whatever the criterion.
enum Reason : int64_t {
  kReasonKept = 0,
  kReasonNonFinite = 2,
  kReasonEmpty = 3,
  kReasonSupport = 4
};

// What a criterion compares with its limit.
enum Criterion : int64_t { kCriterionMax, kCriterionMean, kCriterionSum, kCriteria };

// criterion(values) <= limit, and the code of a sequence for which it does not hold.
struct VerdictRule {
  int64_t criterion = kCriterionMax;
  double limit = 0;
  int64_t reason = 0;
};

struct VerdictOutputs {
  bool* keep = nullptr;
  int64_t* reason = nullptr;
  int64_t* position = nullptr;
  void* max = nullptr;  // dtype of the values, like mean and sum
  void* mean = nullptr;
  void* sum = nullptr;
  double* statistic = nullptr;
  bool* failed = nullptr;
  bool* token_keep = nullptr;
};

TRM_INLINE double mean_of(const SequenceStatistics& s) {
  return s.sum / static_cast<double>(s.count > 0 ? s.count : 1);
}

TRM_INLINE double statistic_of(const SequenceStatistics& s, int64_t criterion) {
  return criterion == kCriterionMax ? s.max : criterion == kCriterionMean ? mean_of(s) : s.sum;
}

// No token, then missing evidence, then a support violation, then the limit.
TRM_INLINE int64_t reason_of(const SequenceStatistics& s, const VerdictRule& rule) {
  if (s.count == 0) return kReasonEmpty;
  if (s.max != s.max) return kReasonNonFinite;
  if (s.infinite >= 0) return kReasonSupport;
  return statistic_of(s, rule.criterion) <= rule.limit ? int64_t{kReasonKept} : rule.reason;
}

TRM_INLINE bool is_kept(int64_t reason) { return reason == kReasonKept || reason == kReasonEmpty; }

TRM_INLINE void write_verdict(const SequenceArgs& args, const VerdictRule& rule,
                              const VerdictOutputs& out, int64_t sequence,
                              const SequenceStatistics& s) {
  const int64_t reason = reason_of(s, rule);
  const double statistic = statistic_of(s, rule.criterion);
  out.keep[sequence] = is_kept(reason);
  out.reason[sequence] = reason;
  out.position[sequence] = reason == kReasonSupport ? s.infinite : s.position;
  write_value(args, out.max, sequence, s.max);
  write_value(args, out.mean, sequence, mean_of(s));
  write_value(args, out.sum, sequence, s.sum);
  out.statistic[sequence] = statistic;
  out.failed[sequence] = s.count > 0 && !(statistic <= rule.limit);
}

// Token number `index` of the order, in a sequence that is kept or not.
TRM_INLINE void write_token(const SequenceArgs& args, const VerdictOutputs& out, int64_t index,
                            bool keep) {
  const int64_t token = token_at(args, index);
  out.token_keep[token] = keep && args.token_mask[token];
}

}  // namespace trm
