// SPDX-License-Identifier: Apache-2.0
// float32 rows: runs over contiguous columns, each in one frame, flushed to double every
// kRunColumns. Strided and tempered columns pass through a small buffer on the stack.
#include <cmath>

#include "cpu/capability.h"
#include "cpu/row.h"

namespace trm::cpu::float_row {
namespace {

constexpr int64_t kRunColumns = 8192;   // 512 additions per AVX-512 lane between flushes
constexpr int64_t kLookColumns = 1024;  // maxima of so many columns make a frame
constexpr float kSlack = 1.0f;  // how far a logit may stand above its frame, see frame_slack()
// Beyond this a difference of two logits may not be representable: such rows take doubles.
constexpr float kLargest = 1.6e38f;

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
    }
  }

  const RowRuns& runs() const { return runs_; }
  bool scaled() const { return scale_ != RunScale::kNone; }
  bool mixed() const { return scale_ == RunScale::kMixed; }
  int rollout_type() const { return scaled() ? 0 : run_type(rollout_.type); }
  int train_type() const { return scaled() ? 0 : run_type(train_.type); }
  double rollout_temperature() const { return rollout_temperature_; }
  double train_temperature() const { return train_temperature_; }

  // A frame in the run's units: those of the stored logits, tempered where the scale is mixed.
  RunFrame run_frame(Frame<double> frame) const {
    RunFrame out;
    out.max_rollout = static_cast<float>(frame.max_rollout);
    out.shift = static_cast<float>(frame.shift);
    const bool short_columns = !scaled() && run_type(rollout_.type) && run_type(train_.type);
    out.shift_low = short_columns ? 0.0f : static_cast<float>(frame.shift - out.shift);
    const double train_max =
        static_cast<double>(out.max_rollout) - (static_cast<double>(out.shift) + out.shift_low);
    out.train_max = static_cast<float>(train_max);
    out.train_max_low = static_cast<float>(train_max - out.train_max);
    return out;
  }

  RunFrame frame(RunMaxima maxima) const {
    const double x = maxima.rollout, y = maxima.train;
    if (!mixed()) return run_frame(frame_of(x, y));
    return run_frame(frame_of(x / rollout_temperature_, y / train_temperature_));
  }

  // The frame of the tempered logits that a run's frame stands for.
  Frame<double> state_frame(const RunFrame& frame) const {
    const double unit = mixed() ? 1.0 : rollout_temperature_;
    return {frame.max_rollout / unit, (static_cast<double>(frame.shift) + frame.shift_low) / unit};
  }

  // Points a run at columns [begin, begin + count), count <= kRunColumns.
  RunArgs at(int64_t begin, int64_t count) {
    RunArgs run;
    run.rollout = columns(rollout_, rollout_offset_, begin, count, rollout_buffer_);
    run.train = columns(train_, train_offset_, begin, count, train_buffer_);
    run.count = count;
    const auto rollout = inverse_temperature<float>(rollout_temperature_);
    const auto train = inverse_temperature<float>(train_temperature_);
    run.rollout_high = rollout.high;
    run.rollout_low = rollout.low;
    run.train_high = train.high;
    run.train_low = train.low;
    run.slack = kSlack;
    return run;
  }

  // A finished row's frame in the run's units; what its rounding moves, log S and the residual
  // absorb, so that p and log(p/q) stay exact.
  struct Finished {
    RunFrame frame;
    double log_mass, residual;
  };

  Finished finished(const double* statistics) const {
    const double unit = mixed() ? 1.0 : rollout_temperature_;
    Finished out;
    out.frame = run_frame({statistics[kStatMaxRollout] * unit, statistics[kStatShift] * unit});
    const Frame<double> rounded = state_frame(out.frame);
    out.log_mass = statistics[kStatLogMass] + (statistics[kStatMaxRollout] - rounded.max_rollout);
    out.residual = statistics[kStatResidual] + (statistics[kStatShift] - rounded.shift);
    return out;
  }

 private:
  const void* columns(const LogitsView& view, int64_t row, int64_t begin, int64_t count,
                      float* buffer) const {
    const int64_t offset = row + begin * view.column_stride;
    if (view.column_stride == 1 && (!scaled() || view.type == StorageType::kFloat32)) {
      const int64_t size = view.type == StorageType::kFloat32 ? 4 : 2;
      return static_cast<const char*>(view.data) + offset * size;
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
  float rollout_buffer_[kRunColumns];
  float train_buffer_[kRunColumns];
};

// Maxima of [begin, ...) far enough that each side that has a finite logit shows one.
RunMaxima look_ahead(RowColumns& columns, int64_t begin, int64_t end) {
  RunMaxima found = {-infinity<float>(), -infinity<float>()};
  auto* const maxima = columns.runs().maxima[columns.rollout_type()][columns.train_type()];
  for (int64_t first = begin; first < end; first += kLookColumns) {
    const RunMaxima here = maxima(columns.at(first, std::min(kLookColumns, end - first)));
    found.rollout = std::max(found.rollout, here.rollout);
    found.train = std::max(found.train, here.train);
    if (found.rollout > -infinity<float>() && found.train > -infinity<float>()) break;
  }
  return found;
}

bool overflows(RunMaxima maxima) {
  const auto large = [](float value) { return value < infinity<float>() && value > kLargest; };
  const auto deep = [](float value) { return value > -infinity<float>() && value < -kLargest; };
  return large(maxima.rollout) || large(maxima.train) || deep(maxima.rollout) || deep(maxima.train);
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

}  // namespace

DivergenceState<double> slice_state(const DivergenceArgs& args, int64_t row, SliceRange range) {
  RowColumns columns(args, row);
  const uint32_t carried = carried_by(args.outputs);
  const int extra = (carried & kCarriesTrainGap ? kRunTrainGap : 0) |
                    (carried & kCarriesEntropy ? kRunEntropy : 0);
  auto* const sum = columns.scaled()
                        ? columns.runs().sum_scaled[columns.mixed()][extra != 0]
                        : columns.runs().sum[columns.rollout_type()][columns.train_type()][extra];
  DivergenceState<double> total;
  total.flags = carried;
  RunMaxima maxima = {-infinity<float>(), -infinity<float>()};
  for (int64_t column = range.begin; column < range.end;) {
    // A part: columns that one frame covers.
    const RunMaxima ahead = look_ahead(columns, column, range.end);
    maxima.rollout = std::max(maxima.rollout, ahead.rollout);
    maxima.train = std::max(maxima.train, ahead.train);
    if (overflows(maxima)) return double_row::slice_state(args, row, range);
    DivergenceState<double> part;
    part.flags = carried | (maxima.rollout > -infinity<float>() ? kHasRollout : 0u) |
                 (maxima.train > -infinity<float>() ? kHasTrain : 0u);
    const RunFrame frame = part.has(kHasRollout | kHasTrain) ? columns.frame(maxima) : RunFrame{};
    const Frame<double> state_frame = columns.state_frame(frame);
    part.max_rollout = state_frame.max_rollout;
    part.shift = state_frame.shift;
    const int64_t part_begin = column;
    bool covered = true;
    while (covered && column < range.end) {
      RunArgs run = columns.at(column, std::min(kRunColumns, range.end - column));
      run.frame = frame;
      RunSums sums;
      const int64_t consumed = sum(run, sums);
      if (sums.non_finite) {
        total.flags |= kNonFinite;
        return total;
      }
      add(part, sums);
      covered = consumed == run.count;
      column += consumed;
    }
    // A frame of the maxima covers at least its first column; if rounding denies it, go wide.
    if (column == part_begin) return double_row::slice_state(args, row, range);
    total = merge(total, part);
  }
  return total;
}

DivergenceMoments slice_moments(const DivergenceArgs& args, int64_t row, const double* statistics,
                                SliceRange range) {
  RowColumns columns(args, row);
  auto* const moments = columns.scaled()
                            ? columns.runs().moments_scaled[columns.mixed()]
                            : columns.runs().moments[columns.rollout_type()][columns.train_type()];
  const auto finished = columns.finished(statistics);
  DivergenceMoments total;
  for (int64_t column = range.begin; column < range.end; column += kRunColumns) {
    MomentArgs run;
    run.run = columns.at(column, std::min(kRunColumns, range.end - column));
    run.run.frame = finished.frame;
    run.residual = static_cast<float>(finished.residual);
    run.residual_low = static_cast<float>(finished.residual - static_cast<double>(run.residual));
    run.log_mass = static_cast<float>(finished.log_mass);
    run.inverse_mass = static_cast<float>(std::exp(-finished.log_mass));
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
  return static_cast<char*>(gradient) + place * (type == StorageType::kFloat32 ? 4 : 2);
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
  run.residual = static_cast<float>(finished.residual);
  run.residual_low = static_cast<float>(finished.residual - static_cast<double>(run.residual));
  run.inverse_mass = static_cast<float>(std::exp(-finished.log_mass));
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
  float rollout_buffer[kRunColumns], train_buffer[kRunColumns];
  for (int64_t column = range.begin; column < range.end; column += kRunColumns) {
    const int64_t count = std::min(kRunColumns, range.end - column);
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
