// SPDX-License-Identifier: Apache-2.0
// What one instruction set offers: runs over contiguous columns of one row, in one frame, in
// float32. Plain data in and out, so that nothing compiled for a wide instruction set is ever
// linked into code that runs without it; merging and finishing happen in token_divergence.cpp.
#pragma once

#include <cstdint>

#include "trm/storage_types.h"

namespace trm::cpu {

// Which sums beside the KL's own a run accumulates.
enum RunExtra : int32_t { kRunPlain = 0, kRunTrainGap = 1, kRunEntropy = 2, kRunExtras = 4 };

// How stored logits become logits. Scaled: both sides over one temperature. Mixed: each its own.
enum class RunScale : int32_t { kNone, kScaled, kMixed };

// The frame of a run, in units of the stored logits (tempered ones where the scale is mixed).
struct RunFrame {
  float max_rollout;  // M
  float origin;       // M times the rate; M is what this rounding makes it, except in mixed scale
  float shift, shift_low;                // an unevaluated sum
  float train_max, train_max_low;        // max_rollout - shift, likewise
  float train_origin, train_origin_low;  // that times the rate, likewise
  float train_factor;                    // 2^-train_origin_low
};

struct RunArgs {
  const void* rollout;  // first column of the run
  const void* train;
  int64_t count;
  bool infinite = false;      // the KL is: its gaps do not matter
  bool apart = false;         // the KL is large, sums of masses say all; not with extras
  bool gap_of_sums = false;   // the KL is large, G may be a difference of sums; not with extras
  bool short_groups = false;  // chains of float additions are half as long
  int32_t loop = 0;           // where the run before ended, see RunSums
  RunFrame frame;
  float rate;                       // log2(e) over the shared temperature; log2(e) if mixed
  float slack;                      // a rollout logit so many powers of 2 above its maximum, or
  float train_slack;                // a train logit above its own, ends the run
  float rollout_high, rollout_low;  // 1 / temperature as an unevaluated sum
  float train_high, train_low;
};

struct RunSums {
  double near_mass, near_first, near_gap, far_mass, far_first, far_train;  // as a state's
  double train_gap, rollout_log, train_log;
  double larger_mass;  // sum of each column's larger one, if apart
  bool violates;       // rollout > -inf where train = -inf
  bool outside;        // train > -inf where rollout = -inf
  bool non_finite;     // a NaN or +inf: the row is over
  bool too_far;        // a log-ratio beyond 1e30 counts: the row takes doubles
  bool gap_of_sums;    // G is a difference of sums
  int32_t loop;        // that took the last columns: those that follow are probably like them
};

struct RunMaxima {
  float rollout;
  float train;
};

// Second sweep: p, q and log(p/q) are known from the finished row.
struct MomentArgs {
  RunArgs run;
  float residual;            // of the frame's shift: log(p/q) = u - residual
  float inverse_mass;        // p = 2^power inverse_mass
  float inverse_train_mass;  // q = 2^train_power inverse_train_mass
  float root_mass;           // sqrt(inverse_mass inverse_train_mass)
  float log2_square_scale;   // log2(inverse_train_mass^2 / inverse_mass), rounded, and
  float square_factor;       // 2^ what that lost
};

struct MomentSums {
  double tv;             // sum |q - p|
  double chi2;           // sum over p > 0 of (q - p)^2 / p
  double bhattacharyya;  // sum (sqrt p - sqrt q)^2
  double outside_mass;   // sum of q where p = 0
  float max_log_ratio;   // max over p > 0 of log(q / p)
};

// One side's logits x, as w = 2^(rate (x - largest)), summed in doubles.
struct MassArgs {
  const void* logits;
  int64_t count;
  double largest, rate;
};

struct MassSums {
  double mass = 0;  // sum of w
  double log = 0;   // sum of w log2(w)
};

struct GradientArgs {
  RunArgs run;
  float residual;  // of the frame's shift: log(p/q) = u - residual
  float inverse_mass;
  float inverse_train_mass;
  float log_mass;
  float kl, kl_train_rollout, entropy_rollout, entropy_train;
  float g_kl, g_kl_train_rollout, g_entropy_rollout, g_entropy_train, g_logp_rollout, g_logp_train;
  void* grad_rollout;  // null: not wanted
  void* grad_train;
  bool only_kl_train;  // only dKL(rollout||train)/d train is asked for: the short form
};

// Index of a stored type in the tables below; float64 rows take the double path instead.
constexpr int kRunTypes = 3;
inline int run_type(StorageType type) {
  return type == StorageType::kFloat32 ? 0 : type == StorageType::kBFloat16 ? 1 : 2;
}

struct RowRuns {
  const char* name;
  // First column not consumed: count, or where the frame no longer covers the logits. sum_plain
  // leaves out the rounding of x - y: for 16-bit logits whose difference is exact; and without
  // extras, where it is known not to matter.
  using Sum = int64_t (*)(const RunArgs&, RunSums&);
  Sum sum[kRunTypes][kRunTypes][kRunExtras];
  Sum sum_plain[kRunTypes][kRunTypes][kRunExtras];
  Sum sum_scaled[2][2];  // [mixed][extras], float32 columns
  RunMaxima (*maxima[kRunTypes][kRunTypes])(const RunArgs&);
  void (*masses[kRunTypes])(const MassArgs&, MassSums&);  // adds to the sums
  void (*moments[kRunTypes][kRunTypes])(const MomentArgs&, MomentSums&);
  void (*moments_scaled[2])(const MomentArgs&, MomentSums&);
  void (*gradient[kRunTypes][kRunTypes])(const GradientArgs&);
  void (*gradient_scaled[2])(const GradientArgs&);  // gradients stored as float32
};

const RowRuns& scalar_runs();
const RowRuns& avx2_runs();
const RowRuns& avx512_runs();

}  // namespace trm::cpu
