// SPDX-License-Identifier: Apache-2.0
// float32 rows: runs over contiguous columns, each in one frame, flushed to double every
// kRunColumns. Strided and tempered columns pass through a small buffer on the stack.
//
// A frame's shift c decides how many digits a run keeps: its G/S is KL + (L - c)^2 / 2 with the
// mean log-ratio L = c - log1p(B/S). The difference of the maxima is exact where one token holds
// the mass, and worthless where the largest logit of a flat row is the one that moved. So a slice
// starts with it on a few columns, goes on with the L of what it has summed, and sums again what a
// shift turns out to have spoilt.
#include <cmath>

#include "cpu/capability.h"
#include "cpu/row.h"

namespace trm::cpu::float_row {
namespace {

constexpr int64_t kRunColumns = 32768;       // columns between flushes to double
constexpr int64_t kMomentColumns = 512;      // the same in the second sweep: one chain per lane
constexpr int64_t kGradientColumns = 16384;  // of tempered rows, in a buffer until they are rounded
constexpr int64_t kLookColumns = 1024;       // maxima of so many columns make a frame
constexpr int64_t kFirstColumns = 2048;  // a run whose shift is only that of the maxima is short
constexpr double kShiftKept = 0x1p-16;   // a shift closer than this to the mean log-ratio stays
// How many times the slice's KL the shift's doing, (L - c)^2 / 2, may be in all: beyond, a run is
// summed again, unless its own part is small. And in one part, before the next run gets a frame of
// its own.
constexpr double kMostExcess = 6.0;
constexpr double kSmallExcess = 0.125;
constexpr double kFrameExcess = 0.25;
// Rollout mass, that of the largest logit being 1, that is one token's.
constexpr double kOneToken = 1.2;
// What a run may leave out: the rounding of x - y, where that is at most so large a part of the
// slice's KL; and forming G column by column, where the KL is at least so large. By what is known
// before the run, and after it: beyond, it is summed again.
struct Limits {
  double rounding, kl;
};
constexpr Limits kExpected = {2e-7, 0.3}, kMost = {4e-7, 0.2};
// Where G is not formed column by column: by how much of its rollout mass a run's two sides must
// differ at least; and what b may be for that to show.
constexpr double kLeastApart = 0.1, kMostOffCentre = 0.1;
// The mean log-ratio inherits 2^-24 of the shift, and of what log-ratios train mass has: shifts up
// to which that may be, where the KL is infinite also, and shift and KL where a token's log-ratio
// is asked for.
constexpr float kLargestRoundedShift = 16.0f, kInfiniteRoundedShift = 8.0f;
constexpr double kTokenRoundedShift = 1.0, kTokenRoundedKl = 0.1;
// KL from which on entropies, and a token's log-ratio, need sums in doubles; and the log-ratio also
// from a smaller one on, where columns that are not near hold so much mass (over the rollout's).
constexpr double kEntropyKl = 1.0, kTokenKl = 0.2, kFarTokenKl = 0.01, kFarTokenMass = 0.1;
// Chains of 16 floats may leave 16 times 2^-24 of the spread sqrt(2 KL) of all log-ratios in one:
// from this spread on that is 1e-7, and more than 1e-6 of a log-ratio below it.
constexpr double kTokenSpread = 0.1;
constexpr double kLog2e = 1.4426950408889634;
// How far a logit may stand above its frame, in powers of 2, at least and at most. In between, as
// far as it is not one token with next to all mass (kOneToken): such a one needs a frame of its
// own.
constexpr double kLeastSlack = frame_slack<float>() * kLog2e;
constexpr double kMostSlack = 7.0;
// Rows with maxima beyond these take doubles: of a shift so large two words hold too little of a
// nat; the rollout's maximum times the rate must round to something within a small part of one.
constexpr float kLargest = 0x1p30f;
constexpr double kLargestOrigin = 1 << 20;
// As double_row's, for frames of floats.
constexpr double kHighestMask = -(1 << 19);

// A row's logits as the runs want them: contiguous, in their own type or widened to float32.
class RowColumns {
 public:
  RowColumns(const DivergenceArgs& args, int64_t row)
      : runs_(selected_runs()),
        rollout_(args.rollout),
        train_(args.train),
        rollout_temperature_(temperature(args.rollout_temperature, row, args.inner)),
        train_temperature_(temperature(args.train_temperature, row, args.inner)),
        rollout_offset_(row_offset(args.rollout, row, args.inner)),
        train_offset_(row_offset(args.train, row, args.inner)) {
    if (rollout_temperature_ != 1.0 || train_temperature_ != 1.0) {
      scale_ = rollout_temperature_ == train_temperature_ ? RunScale::kScaled : RunScale::kMixed;
      rollout_inverse_ = inverse_temperature<float>(rollout_temperature_);
      train_inverse_ = inverse_temperature<float>(train_temperature_);
      if (!mixed()) rate_ = static_cast<float>(kLog2e / rollout_temperature_);
    }
  }

  const RowRuns& runs() const { return runs_; }
  bool scaled() const { return scale_ != RunScale::kNone; }
  bool mixed() const { return scale_ == RunScale::kMixed; }
  int rollout_type() const { return scaled() ? 0 : run_type(rollout_.type); }
  int train_type() const { return scaled() ? 0 : run_type(train_.type); }
  double rollout_temperature() const { return rollout_temperature_; }
  double train_temperature() const { return train_temperature_; }

  // A frame in the run's units: those of the stored logits, tempered where the scale is mixed. The
  // rollout's maximum becomes what the rounding of its product with the rate makes it. `rounds`:
  // the shift may become a float, too.
  RunFrame run_frame(Frame<double> frame, bool rounds = false) const {
    RunFrame out;
    out.origin = static_cast<float>(frame.max_rollout * rate_);
    out.max_rollout = static_cast<float>(frame.max_rollout);
    out.shift = static_cast<float>(frame.shift);
    rounds = rounds || differences_are_exact(out);
    out.shift_low = rounds ? 0.0f : static_cast<float>(frame.shift - out.shift);
    const double train_max = max_rollout(out) - (static_cast<double>(out.shift) + out.shift_low);
    out.train_max = static_cast<float>(train_max);
    out.train_max_low = static_cast<float>(train_max - out.train_max);
    out.train_origin = static_cast<float>(train_max * rate_);
    out.train_origin_low = static_cast<float>(train_max * rate_ - out.train_origin);
    out.train_factor = std::exp2(-out.train_origin_low);
    return out;
  }

  // Whether x - y needs no second word: 16-bit logits that a small shift leaves close together.
  bool differences_are_exact(const RunFrame& frame) const {
    return !scaled() && run_type(rollout_.type) && run_type(train_.type) &&
           std::fabs(frame.shift) <= 1.0f;
  }

  RunFrame frame(RunMaxima maxima) const {
    return run_frame(frame_of(in_units(maxima.rollout, rollout_temperature_),
                              in_units(maxima.train, train_temperature_)));
  }

  // As frame(), with about another shift.
  RunFrame frame(RunMaxima maxima, double shift) const {
    const double unit = mixed() ? 1.0 : rollout_temperature_;
    return run_frame({in_units(maxima.rollout, rollout_temperature_), shift * unit},
                     std::fabs(shift * unit) <= kLargestRoundedShift);
  }

  bool have_plain_runs() const {
    return !scaled() && (run_type(rollout_.type) == 0) == (run_type(train_.type) == 0);
  }

  // The train side's slack beyond the rollout's: a frame whose shift is not that of the maxima lies
  // elsewhere.
  float train_slack(const RunFrame& frame, RunMaxima maxima) const {
    const double above = in_units(maxima.train, train_temperature_) - frame.train_max;
    return static_cast<float>(std::max(0.0, above * rate_));
  }

  // The frame of the tempered logits that a run's frame stands for.
  Frame<double> state_frame(const RunFrame& frame) const {
    const double unit = mixed() ? 1.0 : rollout_temperature_;
    return {max_rollout(frame) / unit, (static_cast<double>(frame.shift) + frame.shift_low) / unit};
  }

  // The highest logits that are masks.
  RunMaxima highest_masks() const {
    return {static_cast<float>(kHighestMask * rollout_temperature_),
            static_cast<float>(kHighestMask * train_temperature_)};
  }

  // Whether rows with these maxima (a side without one has -inf) are more than float32 runs take.
  bool are_too_large(RunMaxima maxima) const {
    const auto finite = [](float value) { return value > -infinity<float>(); };
    const float x = finite(maxima.rollout) ? std::fabs(maxima.rollout) : 0.0f;
    const float y = finite(maxima.train) ? std::fabs(maxima.train) : 0.0f;
    // Without a rollout logit the train maximum stands in for it.
    const float origin = finite(maxima.rollout) ? x : y;
    return x > kLargest || y > kLargest || (!mixed() && origin * rate_ > kLargestOrigin);
  }

  // Points a run at columns [begin, begin + count), count <= kRunColumns.
  RunArgs at(int64_t begin, int64_t count) {
    RunArgs run;
    run.rollout = columns(rollout_, rollout_offset_, begin, count, rollout_buffer_);
    run.train = columns(train_, train_offset_, begin, count, train_buffer_);
    run.count = count;
    run.rollout_high = rollout_inverse_.high;
    run.rollout_low = rollout_inverse_.low;
    run.train_high = train_inverse_.high;
    run.train_low = train_inverse_.low;
    run.rate = rate_;
    return run;
  }

  // A finished row's frame in the run's units. Its shift is the state's own where that is as good
  // as the mean log-ratio L (it may be one heavy token's, exactly), else L. What rounding moves,
  // log S and the residual absorb, so that p and log(p/q) stay exact.
  struct Finished {
    RunFrame frame;
    double log_mass, residual;
    bool too_large;

    float inverse_mass() const { return static_cast<float>(std::exp(-log_mass)); }
    float inverse_train_mass() const { return static_cast<float>(std::exp(residual - log_mass)); }
  };

  Finished finished(const double* statistics) const {
    const double unit = mixed() ? 1.0 : rollout_temperature_;
    const double log_ratio = statistics[kStatShift] + statistics[kStatResidual];
    const bool kept = std::fabs(statistics[kStatResidual]) <= kShiftKept;
    Finished out;
    out.frame = run_frame(
        {statistics[kStatMaxRollout] * unit, (kept ? statistics[kStatShift] : log_ratio) * unit});
    const Frame<double> rounded = state_frame(out.frame);
    out.log_mass = statistics[kStatLogMass] + (statistics[kStatMaxRollout] - rounded.max_rollout);
    out.residual = kept ? statistics[kStatResidual] + (statistics[kStatShift] - rounded.shift)
                        : log_ratio - rounded.shift;
    out.too_large = !(std::fabs(out.frame.shift) < kLargest) ||
                    are_too_large({out.frame.max_rollout, out.frame.train_max});
    return out;
  }

 private:
  double in_units(float logit, double temperature) const {
    return mixed() ? logit / temperature : static_cast<double>(logit);
  }

  double max_rollout(const RunFrame& frame) const {
    return mixed() ? static_cast<double>(frame.max_rollout)
                   : static_cast<double>(frame.origin) / static_cast<double>(rate_);
  }

  const void* columns(const LogitsView& view, int64_t row, int64_t begin, int64_t count,
                      float* buffer) const {
    const int64_t offset = row + begin * view.column_stride;
    if (view.column_stride == 1 && (!scaled() || view.type == StorageType::kFloat32)) {
      return static_cast<const char*>(view.data) + offset * element_size(view.type);
    }
    if (scaled() || view.type == StorageType::kFloat32) {
      for (int64_t i = 0; i < count; ++i) {
        buffer[i] = load_logit<float>(view.data, offset + i * view.column_stride, view.type);
      }
    } else {
      uint16_t* const bits = reinterpret_cast<uint16_t*>(buffer);
      const uint16_t* const stored = static_cast<const uint16_t*>(view.data);
      for (int64_t i = 0; i < count; ++i) bits[i] = stored[offset + i * view.column_stride];
    }
    return buffer;
  }

  const RowRuns& runs_;
  const LogitsView& rollout_;
  const LogitsView& train_;
  double rollout_temperature_, train_temperature_;
  int64_t rollout_offset_, train_offset_;
  RunScale scale_ = RunScale::kNone;
  InverseTemperature<float> rollout_inverse_, train_inverse_;
  float rate_ = static_cast<float>(kLog2e);  // over the shared temperature, if there is one
  float rollout_buffer_[kRunColumns];
  float train_buffer_[kRunColumns];
};

// Maxima of [begin, ...) far enough that each side shows a logit, if it has one, that is no mask;
// of a side that has masks alone, the highest mask.
RunMaxima look_ahead(RowColumns& columns, int64_t begin, int64_t end) {
  RunMaxima found = {-infinity<float>(), -infinity<float>()};
  const RunMaxima masks = columns.highest_masks();
  auto* const maxima = columns.runs().maxima[columns.rollout_type()][columns.train_type()];
  for (int64_t first = begin; first < end; first += kLookColumns) {
    const RunMaxima here = maxima(columns.at(first, std::min(kLookColumns, end - first)));
    found.rollout = std::max(found.rollout, here.rollout);
    found.train = std::max(found.train, here.train);
    if (found.rollout > masks.rollout && found.train > masks.train) return found;
  }
  if (found.rollout > -infinity<float>()) found.rollout = std::max(found.rollout, masks.rollout);
  if (found.train > -infinity<float>()) found.train = std::max(found.train, masks.train);
  return found;
}

void add(DivergenceState<double>& state, const RunSums& sums) {
  state.near_mass += sums.near_mass;
  state.near_first += sums.near_first;
  state.near_gap += sums.near_gap;
  state.far_mass += sums.far_mass;
  state.far_first += sums.far_first;
  state.far_train += sums.far_train;
  state.train_gap += sums.train_gap;
  state.rollout_log += sums.rollout_log;
  state.train_log += sums.train_log;
  state.flags |= (sums.violates ? kSupportViolation : 0u) | (sums.outside ? kOutsideSupport : 0u);
}

// B/S = Q/S - 1, to its own precision where it is small.
double relative_excess(const DivergenceState<double>& state) {
  const double excess = (state.near_gap - state.near_first) + (state.far_train - state.far_mass);
  return excess / rollout_mass(state);
}

// A state without one of the sides, as add_in_frame() makes it: nothing in what compares them.
void keep_only_masses(DivergenceState<double>& state) {
  state.far_train = train_mass(state);
  state.far_mass = rollout_mass(state);
  state.near_mass = state.near_first = state.near_gap = state.far_first = 0.0;
}

// log(Q/S), given b = Q/S - 1.
double log_gain(const DivergenceState<double>& state, double b) {
  return std::fabs(b) > 0.5 ? std::log(train_mass(state) / rollout_mass(state)) : std::log1p(b);
}

// The shift for what a state has summed: the mean log-ratio L = c - log(Q/S); c where there is
// none.
double mean_log_ratio(const DivergenceState<double>& state) {
  const double log_ratio = state.shift - log_gain(state, relative_excess(state));
  return std::fabs(log_ratio) < infinity<double>() ? log_ratio : state.shift;
}

// What a state's gaps G and R are made of: the two divergences, and what comes of a shift that is
// not the mean log-ratio; each times the mass of its policy, in the units of the state's frame.
// Where most of the train side's mass cancels (b near -1), rounding of b enters log1p(b) enlarged;
// the excess is that much larger.
struct ShiftEffect {
  double kl = 0, kl_train = 0;
  double excess = 0, excess_train = 0;
  bool blurs = false;  // one token holds the mass, and L - c dwarfs its log-ratio to L, ~ KL

  ShiftEffect() = default;
  // `roughly`: what comes of the shift to half a percent, and the divergences to as much of it.
  explicit ShiftEffect(const DivergenceState<double>& state, bool roughly = true) {
    const double mass = rollout_mass(state);
    if (!state.has_both() || mass < kLeastMass) return;
    const double b = relative_excess(state);
    // Where b is small, the first Pade forms of b - log1p(b) and (1 + b) log1p(b) - b.
    const bool pade = roughly && std::fabs(b) < 0.25;
    const double gain = pade ? 0.0 : log_gain(state, b);
    const double from_shift = mass * (pade ? 0.5 * b * b / (1.0 + b * (2.0 / 3.0)) : b - gain);
    kl = (state.near_gap + ((state.far_train - state.far_mass) + state.far_first)) - from_shift;
    const bool matters = std::fabs(b) > kShiftKept;
    if (matters && !state.has(kSupportViolation)) {
      excess = b < 0.0 ? 0.5 * b * b * mass * (mass / train_mass(state)) : from_shift;
    }
    // A side with mass outside the other's support has an infinite divergence: no digits.
    if (state.has(kCarriesTrainGap) && !state.has(kOutsideSupport)) {
      const double from_shift_train =
          pade ? mass * (0.5 * b * b / (1.0 + b / 3.0)) : train_mass(state) * gain - mass * b;
      kl_train = state.train_gap - from_shift_train;
      excess_train = matters ? from_shift_train : 0.0;
    }
    blurs = matters && mass > 0.9 && mass < kOneToken && std::fabs(b) * mass > 4.0 * kl;
  }
};

// One slice of a row, part by part; a part is what one frame covers.
class Slice {
 public:
  Slice(const DivergenceArgs& args, int64_t row, SliceRange range)
      : columns_(args, row),
        begin_(range.begin),
        column_(range.begin),
        end_(range.end),
        carried_(carried_by(args.outputs)),
        extra_((carried_ & kCarriesTrainGap ? kRunTrainGap : 0) |
               (carried_ & kCarriesEntropy ? kRunEntropy : 0)),
        has_token_((args.outputs & kTokenOutputs) != 0) {
    total_.flags = carried_;
  }

  // False where the row takes doubles.
  bool sum() {
    bool looks = true;
    while (column_ < end_ && !total_.has(kNonFinite)) {
      if (looks) {
        const RunMaxima ahead = look_ahead(columns_, column_, end_);
        maxima_.rollout = std::max(maxima_.rollout, ahead.rollout);
        maxima_.train = std::max(maxima_.train, ahead.train);
        if (columns_.are_too_large(maxima_)) return false;
      }
      const int64_t begin = column_;
      const bool looked = looks;
      looks = add_part(looks);
      if (too_far_) return false;
      // A frame of the maxima covers at least its first column; if rounding denies it, go wide.
      if (column_ == begin && looked) return total_.has(kNonFinite);
    }
    return true;
  }

  const DivergenceState<double>& total() const { return total_; }

 private:
  // What is known of all columns, in the frame of a part: both sides' mass at least, and what of it
  // is in columns that are not near; KL times rollout mass, at least; whether the KL is infinite.
  struct Known {
    double mass, train, far, kl;
    bool infinite;

    Known with(const DivergenceState<double>& piece, const ShiftEffect& effect) const {
      return {mass + rollout_mass(piece), train + train_mass(piece),
              far + piece.far_mass + piece.far_train, kl + effect.kl,
              infinite || piece.has(kSupportViolation)};
    }
  };
  Known known_with(const DivergenceState<double>& part, const ShiftEffect& effect) const {
    Known total = {0.0, 0.0, 0.0, 0.0, total_.has(kSupportViolation)};
    if (total_.has_both()) {
      const FrameScales scales = scales_to({part.max_rollout, part.shift});
      total.mass = scales.rollout * rollout_mass(total_);
      total.train = scales.train * train_mass(total_);
      total.far = scales.rollout * total_.far_mass + scales.train * total_.far_train;
      total.kl = in_frame(settled_, total_, part).kl;
    }
    return total.with(part, effect);
  }

  DivergenceState<double> fresh(const RunFrame& frame) const {
    const Frame<double> state_frame = columns_.state_frame(frame);
    DivergenceState<double> state;
    state.max_rollout = state_frame.max_rollout;
    state.shift = state_frame.shift;
    state.flags = carried_ | seen();
    return state;
  }

  uint32_t seen() const {
    return (maxima_.rollout > -infinity<float>() ? kHasRollout : 0u) |
           (maxima_.train > -infinity<float>() ? kHasTrain : 0u);
  }

  // What a run leaves out: the rounding of x - y; B and G column by column; G alone, where both
  // sides' exponentials are formed.
  struct Shortcuts {
    bool plain, apart, gap_of_sums;
  };

  // Sums at most `count` columns; how many it consumed.
  int64_t run(const RunFrame& frame, Shortcuts takes, const Known& known, int64_t count,
              RunSums& sums) {
    RunArgs args = columns_.at(column_, count);
    args.frame = frame;
    const double slack = std::log2(known.mass / (kOneToken - 1.0));
    args.slack = static_cast<float>(std::clamp(slack, kLeastSlack, kMostSlack));
    args.train_slack = args.slack + columns_.train_slack(frame, maxima_);
    args.infinite = known.infinite;
    args.apart = takes.apart;
    args.gap_of_sums = takes.gap_of_sums;
    args.loop = loop_;
    args.short_groups = has_token_;
    const RowRuns& runs = columns_.runs();
    const int x = columns_.rollout_type(), y = columns_.train_type();
    const auto sum = columns_.scaled() ? runs.sum_scaled[columns_.mixed()][extra_ != 0]
                     : takes.plain     ? runs.sum_plain[x][y][extra_]
                                       : runs.sum[x][y][extra_];
    const int64_t consumed = sum(args, sums);
    too_far_ = too_far_ || sums.too_far;
    loop_ = sums.loop;
    return consumed;
  }

  DivergenceState<double> state_of(const RunFrame& frame, const RunSums& sums) const {
    DivergenceState<double> state = fresh(frame);
    add(state, sums);
    if (!state.has_both()) keep_only_masses(state);
    return state;
  }

  // Whether more than `most` times what the slice's divergences are known to be comes of shifts.
  // Those are at least the sum of its parts': columns that join others only add to KL times mass.
  bool spoils(const DivergenceState<double>& state, const ShiftEffect& effect,
              const ShiftEffect& beside, double small, double most) const {
    if (effect.excess == 0.0 && effect.excess_train == 0.0) return false;
    const ShiftEffect before = in_frame(settled_, total_, state);
    const auto beyond = [&](double kl, double own, double others) {
      return !(own <= small * kl || own + others <= most * kl);
    };
    return beyond(before.kl + beside.kl + effect.kl, effect.excess,
                  before.excess + beside.excess) ||
           beyond(before.kl_train + beside.kl_train + effect.kl_train, effect.excess_train,
                  before.excess_train + beside.excess_train);
  }

  // What the total's masses become in another frame.
  struct FrameScales {
    double rollout, train;
  };
  FrameScales scales_to(Frame<double> frame) const {
    const double unit = total_.max_rollout - frame.max_rollout;
    return {std::exp(unit), std::exp(unit - (total_.shift - frame.shift))};
  }

  // The effects of one state in the units of another's frame.
  static ShiftEffect in_frame(ShiftEffect effect, const DivergenceState<double>& from,
                              const DivergenceState<double>& to) {
    if (!from.has_both()) return {};
    const double unit = from.max_rollout - to.max_rollout;
    const double scale = unit == 0.0 ? 1.0 : std::exp(unit);
    effect.kl *= scale;
    effect.excess *= scale;
    if (from.has(kCarriesTrainGap)) {
      const double train_scale = std::exp(unit - (from.shift - to.shift));
      effect.kl_train *= train_scale;
      effect.excess_train *= train_scale;
    }
    return effect;
  }

  // In the frame of the maxima: the mean log-ratio of a part without the heavy tokens is no frame
  // for those, once a state is stored in floats.
  void join(DivergenceState<double> part, const ShiftEffect& effect) {
    const DivergenceState<double> before = total_, added = part;
    if (part.has_both()) move_to(part, columns_.state_frame(columns_.frame(maxima_)));
    total_ = merge(total_, part);
    const ShiftEffect old = in_frame(settled_, before, total_);
    const ShiftEffect fresh = in_frame(effect, added, total_);
    settled_ = ShiftEffect(total_, false);
    settled_.excess = old.excess + fresh.excess;
    settled_.excess_train = old.excess_train + fresh.excess_train;
  }

  // Whether a run in this frame may leave out the rounding of x - y, at most 2^-24 (|c| + |u|). It
  // enters G with p - q: as 2^-24 |c| S sum |p - q|, and the sum is at most sqrt(2 KL), by Pinsker,
  // and 2.
  bool may_be_plain(const RunFrame& frame, const Known& known, double most) const {
    if (columns_.differences_are_exact(frame)) return true;
    if (!columns_.have_plain_runs() || extra_ != kRunPlain || frame.shift_low != 0.0f) return false;
    const float shift = std::fabs(frame.shift);
    if (shift > (known.infinite ? kInfiniteRoundedShift : kLargestRoundedShift)) return false;
    if (has_token_) {
      const bool close = shift <= kTokenRoundedShift && known.kl <= kTokenRoundedKl * known.mass;
      if (known.infinite || !close) return false;
    }
    if (known.infinite) return true;
    const double apart = std::min(std::sqrt(2.0 * known.mass * known.kl), 2.0 * known.mass);
    return known.kl > 0.0 && 0x1p-24 * shift * apart <= most * known.kl;
  }

  // Whether G may be a difference of sums: masses are off by 1e-7 of themselves, so G by 2e-7 S.
  bool may_have_gap_of_sums(const Known& known, double least_kl) const {
    return extra_ == kRunPlain && !known.infinite && known.kl > 0.0 &&
           known.kl >= least_kl * known.mass;
  }
  // And B, by as much.
  bool may_be_apart(const Known& known, double least_kl) const {
    return tries_apart_ && may_have_gap_of_sums(known, least_kl) &&
           known.far >= kLeastApart * known.mass;
  }

  // Whether it may for the gradient, too, which is off by 2e-7 p beside q - p: a KL may be that of
  // one column far out. Of masses w and v, with k = S/Q of all columns so far, |w - k v| sums to at
  // least |S - k Q|; and for any k to at least what the larger of w and v have beyond S and Q.
  static bool are_apart(const DivergenceState<double>& piece, const RunSums& sums,
                        const Known& known) {
    const double rollout = rollout_mass(piece), train = train_mass(piece);
    const double net = std::fabs(rollout - train * (known.mass / known.train));
    const double apart = std::max(net, sums.larger_mass - std::max(rollout, train));
    return apart >= kLeastApart * rollout;
  }

  Shortcuts may_take(const RunFrame& frame, const Known& known, Limits limits) const {
    return {may_be_plain(frame, known, limits.rounding), may_be_apart(known, limits.kl),
            may_have_gap_of_sums(known, limits.kl)};
  }

  // A run is at most twice as long as what is summed already: its shift is that of those columns.
  int64_t longest() const { return std::clamp(2 * (column_ - begin_), kFirstColumns, kRunColumns); }

  // Whether on both sides what is summed already weighs more than a token at the maxima would.
  bool outweighs_the_maxima() const {
    if (!total_.has_both()) return false;
    const FrameScales scales = scales_to(columns_.state_frame(columns_.frame(maxima_)));
    return scales.rollout * rollout_mass(total_) > 1.0 && scales.train * train_mass(total_) > 1.0;
  }

  // Columns that one frame covers; whether the next frame needs maxima from further on. The shift
  // is the mean log-ratio of what is summed, or that of the maxima: where one is a token that holds
  // the mass, exactly.
  bool add_part(bool has_new_maxima) {
    const bool starts = has_new_maxima && !outweighs_the_maxima();
    const RunFrame frame = seen() == 0 ? RunFrame{}
                           : starts    ? columns_.frame(maxima_)
                                       : columns_.frame(maxima_, mean_log_ratio(total_));
    int64_t most = starts ? kFirstColumns : longest();
    DivergenceState<double> part = fresh(frame);
    ShiftEffect joined;  // of the part
    bool covered = true, moves = false, alone = true;
    while (covered && !moves && column_ < end_) {
      const int64_t count = std::min(most, end_ - column_);
      const Known known = known_with(part, joined);
      RunSums sums;
      int64_t consumed = count;
      DivergenceState<double> piece;
      ShiftEffect effect;
      Known now;
      Shortcuts takes = may_take(frame, known, kExpected);
      for (;;) {
        consumed = run(frame, takes, known, consumed, sums);
        piece = state_of(frame, sums);
        effect = ShiftEffect(piece);
        now = known.with(piece, effect);
        const Shortcuts may = may_take(frame, now, kMost);
        const bool apart = may.apart && are_apart(piece, sums, now);
        if (takes.plain <= may.plain && takes.apart <= apart && sums.gap_of_sums <= may.gap_of_sums)
          break;
        if (takes.apart) tries_apart_ = apart;
        takes = {takes.plain && may.plain, takes.apart && apart,
                 takes.gap_of_sums && may.gap_of_sums};
      }
      if (sums.non_finite) {
        total_.flags |= kNonFinite;
        return false;
      }
      if ((effect.blurs && now.mass < kOneToken) ||
          spoils(piece, effect, joined, kSmallExcess, kMostExcess)) {
        const RunFrame better = columns_.frame(maxima_, mean_log_ratio(piece));
        // No further: the shift is that of these columns.
        takes.plain = may_be_plain(better, now, kMost.rounding);
        consumed = run(better, takes, known, consumed, sums);
        join(state_of(better, sums), {});
        moves = true;
      } else {
        add(part, sums);
        if (!part.has_both()) keep_only_masses(part);
        joined = alone ? effect : ShiftEffect(part);
        alone = false;
        moves =
            spoils(part, joined, {}, kFrameExcess, 0.0) ||
            (may_be_apart(now, kExpected.kl) && std::fabs(relative_excess(part)) > kMostOffCentre);
      }
      covered = consumed == count;
      column_ += consumed;
      most = longest();
    }
    join(part, joined);
    return !covered;
  }

  RowColumns columns_;
  const int64_t begin_;
  int64_t column_;
  const int64_t end_;
  const uint32_t carried_;
  const int extra_;
  const bool has_token_;  // asked for
  RunMaxima maxima_ = {-infinity<float>(), -infinity<float>()};
  DivergenceState<double> total_;
  ShiftEffect settled_;  // of the total
  bool too_far_ = false;
  int32_t loop_ = 0;         // the runs'
  bool tries_apart_ = true;  // G as a difference of sums, where the KL allows it
};

}  // namespace

DivergenceState<double> slice_state(const DivergenceArgs& args, int64_t row, SliceRange range) {
  Slice slice(args, row, range);
  return slice.sum() ? slice.total() : double_row::slice_state(args, row, range);
}

void refine(const DivergenceArgs& args, int64_t row, const DivergenceState<double>& state,
            RowResult& result) {
  const double kl = result.values[kKl];
  const double far = (state.far_mass + state.far_train) / rollout_mass(state);
  const double spread = std::sqrt(2.0 * kl);
  const bool small = spread > kTokenSpread && spread > std::fabs(result.values[kLogRatio]);
  const bool tokens = (args.outputs & kTokenOutputs) &&
                      (kl > kTokenKl || small || (kl > kFarTokenKl && far > kFarTokenMass));
  const bool entropies = (args.outputs & kEntropyOutputs) && kl > kEntropyKl;
  if (!tokens && !entropies) return;
  RowColumns columns(args, row);
  MassArgs rollout, train;
  rollout.largest = state.max_rollout * columns.rollout_temperature();
  rollout.rate = kLog2e / columns.rollout_temperature();
  train.largest = (state.max_rollout - state.shift) * columns.train_temperature();
  train.rate = kLog2e / columns.train_temperature();
  const RunMaxima maxima = {static_cast<float>(rollout.largest), static_cast<float>(train.largest)};
  if (columns.are_too_large(maxima)) return;  // such rows took doubles
  MassSums of_rollout, of_train;
  for (int64_t first = 0; first < args.vocab; first += kRunColumns) {
    const RunArgs run = columns.at(first, std::min(kRunColumns, args.vocab - first));
    rollout.logits = run.rollout;
    train.logits = run.train;
    rollout.count = train.count = run.count;
    columns.runs().masses[columns.rollout_type()](rollout, of_rollout);
    columns.runs().masses[columns.train_type()](train, of_train);
  }
  DivergenceState<double> exact = state;
  exact.far_mass += of_rollout.mass - rollout_mass(state);
  exact.far_train += of_train.mass - train_mass(state);
  exact.rollout_log = of_rollout.log / kLog2e;
  exact.train_log = of_train.log / kLog2e;
  const RowResult refined = finish(exact);
  // The divergences stay: they are made of other sums, too, whose errors the old masses share.
  for (const Output output :
       {kEntropyRollout, kEntropyTrain, kLogpRollout, kLogpTrain, kLogRatio}) {
    result.values[output] = refined.values[output];
  }
  for (const Statistic statistic :
       {kStatLogMass, kStatResidual, kStatEntropyRollout, kStatEntropyTrain}) {
    result.statistics[statistic] = refined.statistics[statistic];
  }
}

DivergenceMoments slice_moments(const DivergenceArgs& args, int64_t row, const double* statistics,
                                SliceRange range) {
  RowColumns columns(args, row);
  auto* const moments = columns.scaled()
                            ? columns.runs().moments_scaled[columns.mixed()]
                            : columns.runs().moments[columns.rollout_type()][columns.train_type()];
  const auto finished = columns.finished(statistics);
  if (finished.too_large) return double_row::slice_moments(args, row, statistics, range);
  MomentArgs run;
  run.residual = static_cast<float>(finished.residual);
  run.inverse_mass = finished.inverse_mass();
  run.inverse_train_mass = finished.inverse_train_mass();
  run.root_mass = static_cast<float>(std::exp(0.5 * finished.residual - finished.log_mass));
  const double log2_square_scale = (2.0 * finished.residual - finished.log_mass) * kLog2e;
  run.log2_square_scale = static_cast<float>(log2_square_scale);
  run.square_factor = static_cast<float>(std::exp2(log2_square_scale - run.log2_square_scale));
  DivergenceMoments total;
  for (int64_t column = range.begin; column < range.end; column += kMomentColumns) {
    run.run = columns.at(column, std::min(kMomentColumns, range.end - column));
    run.run.frame = finished.frame;
    MomentSums sums;
    moments(run, sums);
    merge_moments(total, {sums.tv, sums.chi2, sums.bhattacharyya, sums.outside_mass,
                          static_cast<double>(sums.max_log_ratio)});
  }
  return total;
}

namespace {

float used(double gradient, double value) {
  return gradient == 0.0 ? 0.0f : static_cast<float>(value);
}

void* advance(void* gradient, StorageType type, int64_t place) {
  if (gradient == nullptr) return nullptr;
  return static_cast<char*>(gradient) + place * element_size(type);
}

void narrow(const float* from, void* gradient, StorageType type, int64_t place, int64_t count) {
  if (gradient == nullptr) return;
  for (int64_t i = 0; i < count; ++i) store_logit(gradient, place + i, type, from[i]);
}

}  // namespace

void slice_gradient(const DivergenceBackwardArgs& args, int64_t row,
                    const RowGradient<double>& gradient, SliceRange range) {
  const DivergenceArgs& forward = args.forward;
  RowColumns columns(forward, row);
  auto* const run_gradient =
      columns.scaled() ? columns.runs().gradient_scaled[columns.mixed()]
                       : columns.runs().gradient[columns.rollout_type()][columns.train_type()];
  GradientArgs run;
  const auto finished = columns.finished(args.statistics + row * kStatistics);
  if (finished.too_large) return double_row::slice_gradient(args, row, gradient, range);
  run.residual = static_cast<float>(finished.residual);
  run.inverse_mass = finished.inverse_mass();
  run.inverse_train_mass = finished.inverse_train_mass();
  run.log_mass = static_cast<float>(finished.log_mass);
  // A value whose gradient is 0 may be NaN (it was not asked for); it must not enter a product.
  run.kl = used(gradient.g_kl, gradient.kl);
  run.kl_train_rollout = used(gradient.g_kl_train_rollout, gradient.kl_train_rollout);
  run.entropy_rollout = used(gradient.g_entropy_rollout, gradient.entropy_rollout);
  run.entropy_train = used(gradient.g_entropy_train, gradient.entropy_train);
  run.g_kl = static_cast<float>(gradient.g_kl);
  run.g_kl_train_rollout = static_cast<float>(gradient.g_kl_train_rollout);
  run.g_entropy_rollout = static_cast<float>(gradient.g_entropy_rollout);
  run.g_entropy_train = static_cast<float>(gradient.g_entropy_train);
  run.g_logp_rollout = static_cast<float>(gradient.g_logp_rollout);
  run.g_logp_train = static_cast<float>(gradient.g_logp_train);
  run.only_kl_train = args.grad_rollout == nullptr && gradient.g_kl_train_rollout == 0.0 &&
                      gradient.g_entropy_train == 0.0 && gradient.g_logp_train == 0.0;
  float rollout_buffer[kGradientColumns], train_buffer[kGradientColumns];
  for (int64_t column = range.begin; column < range.end; column += kGradientColumns) {
    const int64_t count = std::min(kGradientColumns, range.end - column);
    const int64_t place = row * args.columns + column;
    run.run = columns.at(column, count);
    run.run.frame = finished.frame;
    if (columns.scaled()) {
      run.grad_rollout = args.grad_rollout != nullptr ? rollout_buffer : nullptr;
      run.grad_train = args.grad_train != nullptr ? train_buffer : nullptr;
      run_gradient(run);
      narrow(rollout_buffer, args.grad_rollout, forward.rollout.type, place, count);
      narrow(train_buffer, args.grad_train, forward.train.type, place, count);
    } else {
      run.grad_rollout = advance(args.grad_rollout, forward.rollout.type, place);
      run.grad_train = advance(args.grad_train, forward.train.type, place);
      run_gradient(run);
    }
  }
  // The sampled token's column once more, whole, so that it too is rounded only once.
  const int64_t token = token_column(forward, row);
  const bool token_counts = gradient.g_logp_rollout != 0.0 || gradient.g_logp_train != 0.0;
  if (token_counts && token >= range.begin && token < range.end) {
    double_row::slice_gradient(args, row, gradient, {token, token + 1});
  }
}

}  // namespace trm::cpu::float_row
