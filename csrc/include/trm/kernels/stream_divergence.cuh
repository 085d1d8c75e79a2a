// SPDX-License-Identifier: Apache-2.0
// Forward over rows whose columns are contiguous, at the memory's speed: V x (rollout size + train
// size) bytes per row, read once.
//
// A row is cut into kRegions regions by V and the storage types alone. One warp sums one region:
// its lanes read runs of 16 bytes and share a frame that moves when a maximum outgrows it.
// One block does a row's regions, or a fourth of them where there are few rows (the partial states
// then meet in a workspace); either way the same 32 states are merged in the same order, so a row's
// bits depend neither on the number of rows nor on the split.
//
// Common columns (|u| <= 1/2) cost one exponential and a polynomial; a run that has others goes
// through add_mixed_run(), out of the loop's straight line.
#pragma once

#include "trm/kernels/stream.cuh"
#include "trm/launch_plan.h"
#include "trm/simt/warp_merge.h"

namespace trm::kernels {

// Logits beyond this are taken as differences from their maximum before they are scaled by log2(e):
// the product's rounding would no longer be small.
constexpr float kLargeLogit = 65536.0f;

// A lane's maximum may grow by this many nats before the frame moves.
constexpr float kStreamSlack = 2.0f;

// The frame of a warp, in the exponents that its sums are made of:
//   w = 2^((x - rollout_base) log2e - rollout_scale)
//   e = 2^((y - train_base) log2e - train_scale + train_offset)
// M = rollout_base + rollout_scale * kNats, and train_offset makes e = exp(y - M + c) in that M.
struct StreamFrame {
  uint32_t rollout_limit = 0;  // a larger stored logit moves the frame; see repeated()
  uint32_t train_limit = 0;
  float rollout_scale = 0;
  float shift = 0, shift_low = 0;  // c = shift + shift_low
  float near_bound = -1;           // near_limit, or < 0: no run goes straight
};

// The rest of the frame, which runs that go straight do not need: in shared memory, one per thread.
struct StreamFrameRest {
  float max_rollout, max_train;  // stored logits, before temperature
  float rollout_base, train_base, train_scale, train_offset;
  float shift_low;  // the frame's, where straight runs do without it
};

// Sums of earlier runs, in shared memory, one per thread. Equal columns all round the same way, so
// a chain of n additions is off by up to n 2^-25: a lane's own sums begin anew every kRunsPerChain,
// counted from the region's end, after an even number of runs from its beginning.
struct StreamSums {
  float near_mass, near_first, near_gap, far_mass, far_first, far_train;
  float train_gap, rollout_log, train_log;
};
constexpr int kRunsPerChain = 8;

// What a lane keeps out of its registers.
struct StreamAside {
  StreamFrameRest rest;
  StreamSums earlier;
};

template <typename Rollout, typename Train, bool TrainGap, bool Entropy, bool Scaled>
struct StreamLane {
  static constexpr int kColumns = kRunColumns<Rollout, Train>;
  // Of two 16-bit logits x - y is exact in float, to 2^-25 where one is tiny, in columns that are
  // near in a frame with |c| <= 1. Other frames send every run through add_mixed_run().
  static constexpr bool kExact = !Scaled && sizeof(Rollout) == 2 && sizeof(Train) == 2;
  using RolloutRun = Run<Rollout, kColumns>;
  using TrainRun = Run<Train, kColumns>;

  DivergenceState<float> sums;  // E and Y in units of 1 / log2e; its frame is not used
  StreamFrame frame;
  StreamFrameRest& rest;
  StreamSums& earlier;
  RowScale<float> scale;

  __device__ __forceinline__ StreamLane(StreamAside& aside, const RowScale<float>& row_scale)
      : rest(aside.rest), earlier(aside.earlier), scale(row_scale) {
    sums.flags = (TrainGap ? kCarriesTrainGap : 0u) | (Entropy ? kCarriesEntropy : 0u);
    rest = {-infinity<float>(), -infinity<float>(), 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    earlier = {};
    frame.rollout_limit = repeated<Rollout>(-infinity<float>());
    frame.train_limit = repeated<Train>(-infinity<float>());
  }

  __device__ __forceinline__ Logit<float> rollout(float x) const {
    return Scaled ? over_temperature(x, scale.rollout) : Logit<float>{x};
  }
  __device__ __forceinline__ Logit<float> train(float y) const {
    return Scaled ? over_temperature(y, scale.train) : Logit<float>{y};
  }

  __device__ __forceinline__ float log_ratio(Logit<float> x, Logit<float> y) const {
    const float difference = x.value - y.value;
    const float error = difference_error(x.value, y.value, difference) + (x.error - y.error);
    return (difference - frame.shift) + (error - shift_low());
  }

  __device__ __forceinline__ float shift_low() const {
    return kExact ? rest.shift_low : frame.shift_low;
  }

  // The same in a run that may go straight.
  __device__ __forceinline__ float straight_log_ratio(Logit<float> x, Logit<float> y) const {
    return kExact ? (x.value - y.value) - frame.shift : log_ratio(x, y);
  }

  __device__ __forceinline__ float rollout_exponent(Logit<float> x) const {
    const float exponent = std::fma(x.value - rest.rollout_base, kLog2e, -frame.rollout_scale);
    return Scaled ? std::fma(x.error, kLog2e, exponent) : exponent;
  }

  __device__ __forceinline__ float train_exponent(Logit<float> y) const {
    const float exponent = std::fma(y.value - rest.train_base, kLog2e, -rest.train_scale);
    return (Scaled ? std::fma(y.error, kLog2e, exponent) : exponent) + rest.train_offset;
  }

  // Ends a chain of additions.
  __device__ __forceinline__ void set_aside() {
    each_sum([](float& sum, float& before) {
      before += sum;
      sum = 0.0f;
    });
  }

  // Makes the lane's sums those of all its columns; what follows must set them aside again.
  __device__ __forceinline__ void take_up() {
    each_sum([](float& sum, float& before) {
      sum += before;
      before = 0.0f;
    });
  }

  template <typename Change>
  __device__ __forceinline__ void each_sum(const Change& change) {
    change(sums.near_mass, earlier.near_mass);
    change(sums.near_first, earlier.near_first);
    change(sums.near_gap, earlier.near_gap);
    change(sums.far_mass, earlier.far_mass);
    change(sums.far_first, earlier.far_first);
    change(sums.far_train, earlier.far_train);
    if constexpr (TrainGap) change(sums.train_gap, earlier.train_gap);
    if constexpr (Entropy) {
      change(sums.rollout_log, earlier.rollout_log);
      change(sums.train_log, earlier.train_log);
    }
  }

  __device__ __forceinline__ void add_near(float weight, float u, float exponent) {
    const float gap = psi_near(u);
    sums.near_mass += weight;
    sums.near_first = std::fma(weight, u, sums.near_first);
    sums.near_gap = std::fma(weight, gap, sums.near_gap);
    if constexpr (TrainGap) sums.train_gap = std::fma(weight, chi_near(u, gap), sums.train_gap);
    if constexpr (Entropy) {
      // An exponent of -inf (a finite x far below the frame) has no weight, and 0 * -inf no value.
      const float log_weight = std::fmax(exponent, -256.0f);
      const float train = std::fma(weight, gap - u, weight);
      sums.rollout_log = std::fma(weight, log_weight, sums.rollout_log);
      sums.train_log = std::fma(train, std::fma(-u, kLog2e, log_weight), sums.train_log);
    }
  }

  // One column that is not near, or exists on one side or none.
  __device__ __forceinline__ void add_far(float x, float y, Logit<float> train_logit, float u,
                                          float weight, float exponent) {
    const bool in_rollout = x > -infinity<float>();
    const bool in_train = y > -infinity<float>();
    const float log_train = train_exponent(train_logit);
    const float train = in_train ? fast_exp2(log_train) : 0.0f;
    if (in_rollout && !in_train) sums.flags |= kSupportViolation;
    if (in_train && !in_rollout) sums.flags |= kOutsideSupport;
    if (!in_rollout) weight = 0.0f;
    sums.far_mass += weight;
    sums.far_train += train;
    // A product with a weight of 0 is 0, whatever overflowed beside it.
    if (in_train && weight > 0.0f) sums.far_first += weight * u;
    if constexpr (TrainGap) {
      if (in_rollout) sums.train_gap += weight - (train > 0.0f ? train * (1.0f + u) : 0.0f);
    }
    if constexpr (Entropy) {
      if (weight > 0.0f) sums.rollout_log += weight * exponent;
      if (train > 0.0f) sums.train_log += train * log_train;
    }
  }

  __device__ __forceinline__ void add_mixed_run(const RolloutRun& rollout_run,
                                                const TrainRun& train_run) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float x = rollout_run[i];
      const float y = train_run[i];
      const Logit<float> x_logit = rollout(x);
      const Logit<float> y_logit = train(y);
      const float u = log_ratio(x_logit, y_logit);
      const float exponent = rollout_exponent(x_logit);
      const float weight = fast_exp2(exponent);
      const bool near = std::fabs(u) <= near_limit<float>();
      add_near(near ? weight : 0.0f, near ? u : 0.0f, near ? exponent : 0.0f);
      if (near) continue;
      if (x < infinity<float>() && y < infinity<float>()) {
        add_far(x, y, y_logit, u, weight, exponent);
      } else {
        sums.flags |= kNonFinite;
      }
    }
  }

  // Every lane of the warp.
  __device__ __forceinline__ void add_run(const RolloutRun& rollout_run,
                                          const TrainRun& train_run) {
    const bool moves =
        rollout_run.exceeds(frame.rollout_limit) | train_run.exceeds(frame.train_limit);
    if (__any_sync(kWholeWarp, moves)) follow(rollout_run, train_run);
    float u[kColumns];
    bool near = true;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      u[i] = straight_log_ratio(rollout(rollout_run[i]), train(train_run[i]));
      near = near & (std::fabs(u[i]) <= frame.near_bound);  // false for NaN too
    }
    if (__all_sync(kWholeWarp, near)) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const Logit<float> x = rollout(rollout_run[i]);
        // Runs that go straight have no base: x - 0 is x.
        float exponent = std::fma(x.value, kLog2e, -frame.rollout_scale);
        if (Scaled) exponent = std::fma(x.error, kLog2e, exponent);
        add_near(fast_exp2(exponent), u[i], exponent);
      }
    } else {
      add_mixed_run(rollout_run, train_run);
    }
  }

  // Moves the warp's frame to the larger of its maxima and the lanes' new ones, and c to where the
  // log-ratio of the masses so far is small: at most 2^-16 from the difference of the maxima, which
  // is exact, or the log-ratio itself. Were c the difference of maxima on a row whose heaviest
  // token moved alone, every other column would add its square, up to 1 / p_max times the KL.
  __device__ __forceinline__ void follow(const RolloutRun& rollout_run, const TrainRun& train_run) {
    float max_rollout = rollout_run.largest();
    float max_train = train_run.largest();
    for (int step = kWarpLanes / 2; step > 0; step /= 2) {
      max_rollout = std::fmax(max_rollout, __shfl_xor_sync(kWholeWarp, max_rollout, step));
      max_train = std::fmax(max_train, __shfl_xor_sync(kWholeWarp, max_train, step));
    }
    take_up();
    StreamFrame next;
    StreamFrameRest far = rest;
    // +inf is no maximum: its column marks the row when it is added.
    if (max_rollout < infinity<float>()) far.max_rollout = std::fmax(far.max_rollout, max_rollout);
    if (max_train < infinity<float>()) far.max_train = std::fmax(far.max_train, max_train);
    const bool has_rollout = far.max_rollout > -infinity<float>();
    const bool has_train = far.max_train > -infinity<float>();
    const Logit<float> x = rollout(far.max_rollout);
    const Logit<float> y = train(far.max_train);
    const bool large = (has_rollout && !(std::fabs(x.value) <= kLargeLogit)) ||
                       (has_train && !(std::fabs(y.value) <= kLargeLogit));
    // A side without a finite logit takes the other's frame.
    const float x_value = has_rollout ? x.value : y.value;
    const float y_value = has_train ? y.value : x.value;
    far.rollout_base = large ? x_value : 0.0f;
    far.train_base = large ? y_value : 0.0f;
    next.rollout_scale = large ? 0.0f : x_value * kLog2e;
    far.train_scale = large ? 0.0f : y_value * kLog2e;
    next.rollout_limit = limit<Rollout>(far.max_rollout, Scaled ? scale.rollout.high : 1.0f);
    next.train_limit = limit<Train>(far.max_train, Scaled ? scale.train.high : 1.0f);
    if (has_rollout && has_train) {
      next.shift = x.value - y.value;
      next.shift_low = difference_error(x.value, y.value, next.shift) + (x.error - y.error);
      // Two maxima whose difference overflows float leave the row without a value.
      if (!(std::fabs(next.shift) < infinity<float>())) sums.flags |= kNonFinite;
      const float residual = residual_so_far(rollout_run, train_run, next, far);
      if (std::fabs(residual) > 0x1p-16f && std::fabs(residual) < infinity<float>()) {
        next.shift = (next.shift + next.shift_low) + residual;
        next.shift_low = 0.0f;
      }
    }
    far.train_offset = train_offset(next, far);
    far.shift_low = next.shift_low;
    next.near_bound =
        large || (kExact && !(std::fabs(next.shift) <= 1.0f && next.shift_low == 0.0f))
            ? -1.0f
            : near_limit<float>();

    const Move move = move_to(next, far);
    if constexpr (Entropy) {
      sums.rollout_log *= static_cast<float>(kNats);
      sums.train_log *= static_cast<float>(kNats);
    }
    move_by(sums, move.drop, move.turn, move.train_drop);
    if constexpr (Entropy) {
      sums.rollout_log *= kLog2e;
      sums.train_log *= kLog2e;
    }
    sums.flags |= (has_rollout ? kHasRollout : 0u) | (has_train ? kHasTrain : 0u);
    frame = next;
    rest = far;
    set_aside();
  }

  // How far M falls and c turns to another frame; and how far the train side's maximum falls, which
  // the drop and turn of a side that had masks alone do not tell.
  struct Move {
    float drop, turn, train_drop;
  };
  __device__ __forceinline__ Move move_to(const StreamFrame& next,
                                          const StreamFrameRest& far) const {
    const double drop = (static_cast<double>(rest.rollout_base) - far.rollout_base) +
                        (static_cast<double>(frame.rollout_scale) - next.rollout_scale) * kNats;
    const float turn = (next.shift - frame.shift) + (next.shift_low - shift_low());
    const double train_drop =
        (static_cast<double>(rest.train_base) - far.train_base) +
        (static_cast<double>(rest.train_scale) - far.train_scale) * kNats -
        (train_nats(frame, shift_low(), rest) - train_nats(next, next.shift_low, far));
    return {static_cast<float>(drop), turn, static_cast<float>(train_drop)};
  }

  // What makes e = exp(y - M + c) of a power of e with the frame's train side.
  __device__ __forceinline__ static double train_nats(const StreamFrame& frame, float shift_low,
                                                      const StreamFrameRest& rest) {
    return ((static_cast<double>(frame.shift) - rest.rollout_base) + shift_low) + rest.train_base +
           (static_cast<double>(rest.train_scale) - frame.rollout_scale) * kNats;
  }
  // And of a power of 2.
  __device__ __forceinline__ static float train_offset(const StreamFrame& frame,
                                                       const StreamFrameRest& rest) {
    return static_cast<float>(train_nats(frame, frame.shift_low, rest)) * kLog2e;
  }

  // log(S/Q) - c of the warp's columns so far and of a run that is not added yet. The run is taken
  // in frame `next`; of what is summed already the masses alone are moved there.
  __device__ __forceinline__ float residual_so_far(const RolloutRun& rollout_run,
                                                   const TrainRun& train_run,
                                                   const StreamFrame& next,
                                                   const StreamFrameRest& far) {
    const float offset = train_offset(next, far);
    const auto [drop, turn, train_drop] = move_to(next, far);
    const float k = sums.has(kHasRollout) ? exponential(drop) : 0.0f;
    const float k_train = sums.has(kHasTrain) ? exponential(train_drop) : 0.0f;
    const float old_mass = sums.near_mass + sums.far_mass;
    const float old_excess = (sums.near_gap - sums.near_first) + (sums.far_train - sums.far_mass);
    // k_train (S + B) - k S, without its cancellation where the turn is small
    const float bend = std::fabs(turn) <= near_limit<float>()
                           ? k * (turn + psi_near(-turn)) * old_mass
                           : (k_train - k) * old_mass;
    float mass = k * old_mass;
    float excess = k_train * old_excess + bend;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const Logit<float> x = rollout(rollout_run[i]);
      const Logit<float> y = train(train_run[i]);
      float log_weight = std::fma(x.value - far.rollout_base, kLog2e, -next.rollout_scale);
      float log_train = std::fma(y.value - far.train_base, kLog2e, -far.train_scale) + offset;
      if (Scaled) {
        log_weight = std::fma(x.error, kLog2e, log_weight);
        log_train = std::fma(y.error, kLog2e, log_train);
      }
      const float weight = fast_exp2(log_weight);
      const float difference = x.value - y.value;
      const float error = difference_error(x.value, y.value, difference) + (x.error - y.error);
      const float u = (difference - next.shift) + (error - next.shift_low);
      mass += weight;
      excess += std::fabs(u) <= near_limit<float>() ? weight * (psi_near(u) - u)
                                                    : fast_exp2(log_train) - weight;
    }
    for (int step = kWarpLanes / 2; step > 0; step /= 2) {
      mass += __shfl_xor_sync(kWholeWarp, mass, step);
      excess += __shfl_xor_sync(kWholeWarp, excess, step);
    }
    return -std::log1p(excess / mass);
  }

  // The stored logit that is kStreamSlack above `maximum` once it is over its temperature.
  template <typename Storage>
  __device__ __forceinline__ static uint32_t limit(float maximum, float inverse_temperature) {
    return repeated<Storage>(maximum + kStreamSlack / inverse_temperature);
  }

  __device__ __forceinline__ static double warp_sum(float value) {
#pragma unroll
    for (int step = kWarpLanes / 2; step > 0; step /= 2) {
      value += __shfl_xor_sync(kWholeWarp, value, step);
    }
    return value;
  }

  // The warp's region as one state of kStateColumns, written by lane 0.
  __device__ __forceinline__ void store(double* columns) {
    take_up();
    const bool writes = threadIdx.x % kWarpLanes == 0;
    const auto put = [&](StateColumn column, double value) {
      if (writes) columns[column] = value;
    };
    put(kMaxRollout, rest.rollout_base + static_cast<double>(frame.rollout_scale) * kNats);
    const double shift = static_cast<double>(frame.shift) + shift_low();
    put(kShift, shift);
    put(kNearMass, warp_sum(sums.near_mass));
    put(kNearFirst, warp_sum(sums.near_first));
    put(kNearGap, warp_sum(sums.near_gap));
    put(kFarMass, warp_sum(sums.far_mass));
    put(kFarFirst, warp_sum(sums.far_first));
    put(kFarTrain, warp_sum(sums.far_train));
    put(kFlags, __reduce_or_sync(kWholeWarp, sums.flags));
    put(kTrainGap, TrainGap ? warp_sum(sums.train_gap) : 0.0);
    put(kRolloutLog, Entropy ? warp_sum(sums.rollout_log) * kNats : 0.0);
    put(kTrainLog, Entropy ? warp_sum(sums.train_log) * kNats : 0.0);
    put(kTokenRollout, 0.0);
    put(kTokenTrain, 0.0);
    // A double, too, rounds the shift of a side that has masks alone.
    const double turn = (shift - frame.shift) - shift_low();
    if (writes && turn != 0.0) {
      DivergenceState<double> state = load_state(columns);
      move_by(state, 0.0, turn, turn);
      store_state(state, columns);
    }
  }
};

// The sampled token's logits, fetched long before they are needed.
struct TokenColumn {
  uint32_t flags;
  double rollout;
  double train;
};

// A row and where its logits begin, in elements.
struct RowStarts {
  int64_t row;
  int64_t rollout;
  int64_t train;
};

__device__ inline TokenColumn token_of_row(const DivergenceArgs& args, int64_t row) {
  DivergenceState<double> state;
  attach_token(args, row, state);
  return {state.flags, state.token_rollout, state.token_train};
}

// A row's regions, in shared memory, to the row's results; one warp, of which lane 0 writes.
__device__ inline void finish_regions(const DivergenceArgs& args, const DivergenceOutputs& out,
                                      int64_t row, double* regions, const TokenColumn& token) {
  simt::warp_merge(regions);
  if (threadIdx.x % kWarpLanes != 0) return;
  DivergenceState<double> total = load_state(regions);
  total.flags |= token.flags | (has_temperatures(args, row) ? 0u : kNonFinite);
  total.token_rollout = token.rollout;
  total.token_train = token.train;
  if (out.state != nullptr) {
    write_state(out, row, total);
  } else {
    write_result(args, out, row, finish(total));
  }
}

// Blocks per multiprocessor: 768 threads with up to 64 bytes each on the way have 80 registers.
// Runs of eight columns with more sums than KL's, or with temperatures to twice the precision, need
// more.
template <int Columns, bool MoreSums, bool Scaled>
constexpr int kStreamBlocks = Scaled || (MoreSums && Columns == 8) ? 2 : 3;

template <typename Rollout, typename Train, bool TrainGap, bool Entropy, bool Scaled>
__global__ void __launch_bounds__(
    kStreamThreads, (kStreamBlocks<kRunColumns<Rollout, Train>, TrainGap || Entropy, Scaled>))
    stream_divergence_kernel(DivergenceArgs args, DivergenceOutputs out, StreamPlan plan) {
  using Lane = StreamLane<Rollout, Train, TrainGap, Entropy, Scaled>;
  constexpr int kColumns = Lane::kColumns;
  constexpr int kStep = kWarpLanes * kColumns;
  TRM_SHARED(regions, double[kRegions * kStateColumns]);
  TRM_SHARED(aside, StreamAside[kStreamThreads]);
  TRM_SHARED(token, TokenColumn);
  TRM_SHARED(starts, RowStarts);
  const int64_t row = blockIdx.x / static_cast<unsigned>(plan.blocks_per_row);
  const int part = static_cast<int>(blockIdx.x % static_cast<unsigned>(plan.blocks_per_row));
  const bool whole = plan.blocks_per_row == 1;
  if (!counts(args, row)) {  // the whole block agrees
    if (whole && threadIdx.x == 0) write_masked_row(args, out, row);
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane_index = static_cast<int>(threadIdx.x) % kWarpLanes;
  if (threadIdx.x == 0) {
    starts = {row, row_offset(args.rollout, row, args.inner),
              row_offset(args.train, row, args.inner)};
  }
  __syncthreads();                                                 // one thread has found the row
  if (whole && threadIdx.x == 0) token = token_of_row(args, row);  // for itself, later
  RowScale<float> scale;
  if constexpr (Scaled) scale = row_scale<float>(args, row);

#pragma unroll 1
  for (int region = warp + part * kStreamWarps; region < kRegions;
       region += kStreamWarps * plan.blocks_per_row) {
    Lane lane(aside[threadIdx.x], scale);
    const int64_t begin = plan.region_columns * region + lane_index * kColumns;
    const Rollout* rollout =
        static_cast<const Rollout*>(args.rollout.data) + (starts.rollout + begin);
    const Train* train = static_cast<const Train*>(args.train.data) + (starts.train + begin);
    const auto chain_ends = [](int left) {
      return static_cast<unsigned>(left) % (kRunsPerChain * kStep) < 2 * kStep;
    };
    // Columns that the warp has not summed; the same in every lane.
    int left = region_size(plan, args.vocab, region);
    typename Lane::RolloutRun x0;
    typename Lane::TrainRun y0;
    if (plan.load_bytes == 16 && left >= kStep) {
      // Two runs per side at a time: while one is summed the other is on its way. The pointers are
      // two runs ahead of what is summed.
      x0 = load_run<Rollout, kColumns>(rollout);
      y0 = load_run<Train, kColumns>(train);
      auto x1 = x0;
      auto y1 = y0;
      if (left >= 2 * kStep) {
        x1 = load_run<Rollout, kColumns>(rollout + kStep);
        y1 = load_run<Train, kColumns>(train + kStep);
      }
      rollout += 2 * kStep;
      train += 2 * kStep;
      while (left >= 2 * kStep) {
        lane.add_run(x0, y0);
        if (left >= 3 * kStep) {
          x0 = load_run<Rollout, kColumns>(rollout);
          y0 = load_run<Train, kColumns>(train);
        }
        lane.add_run(x1, y1);
        if (chain_ends(left - 2 * kStep)) lane.set_aside();
        if (left >= 4 * kStep) {
          x1 = load_run<Rollout, kColumns>(rollout + kStep);
          y1 = load_run<Train, kColumns>(train + kStep);
        }
        rollout += 2 * kStep;
        train += 2 * kStep;
        left -= 2 * kStep;
      }
      rollout -= 2 * kStep;
      train -= 2 * kStep;
    }
    while (left > 0) {
      if (plan.load_bytes != 16 || left < kStep) {  // else loaded ahead, above
        const int mine = left - lane_index * kColumns;
        x0 = load_part<Rollout, kColumns>(rollout, mine, plan.load_bytes);
        y0 = load_part<Train, kColumns>(train, mine, plan.load_bytes);
      }
      lane.add_run(x0, y0);
      rollout += kStep;
      train += kStep;
      left -= kStep;
      const int seen = region_size(plan, args.vocab, region) - left;
      if (seen % (2 * kStep) == 0 && chain_ends(left)) lane.set_aside();
    }
    double* const place = whole ? regions : out.workspace + starts.row * (kRegions * kStateColumns);
    lane.store(place + region * kStateColumns);
  }
  if (!whole) return;
  __syncthreads();  // every region's state must land before the first warp reads them
  if (warp == 0) finish_regions(args, out, starts.row, regions, token);
}

// The rows whose regions several blocks have summed: one warp each.
template <int Lanes>
__global__ void __launch_bounds__(Lanes)
    merge_regions_kernel(DivergenceArgs args, DivergenceOutputs out, const double* workspace) {
  const int64_t row = blockIdx.x;
  if (!counts(args, row)) {
    if (threadIdx.x == 0) write_masked_row(args, out, row);
    return;
  }
  TokenColumn token = {};
  if (threadIdx.x == 0) token = token_of_row(args, row);
  TRM_SHARED(regions, double[kRegions * kStateColumns]);
  const int64_t mine = static_cast<int64_t>(threadIdx.x) * kStateColumns;
  for (int column = 0; column < kStateColumns; ++column) {
    regions[mine + column] = workspace[row * (kRegions * kStateColumns) + mine + column];
  }
  finish_regions(args, out, row, regions, token);
}

inline cudaError_t launch_merge_regions(const DivergenceArgs& args, const DivergenceOutputs& out,
                                        cudaStream_t stream) {
  return launch({dim3(grid_blocks(args.rows)), dim3(kWarpLanes), 0, stream},
                &merge_regions_kernel<kWarpLanes>, args, out,
                static_cast<const double*>(out.workspace));
}

template <typename Rollout, typename Train, bool TrainGap, bool Entropy>
cudaError_t launch_stream(const DivergenceArgs& args, const DivergenceOutputs& out,
                          const StreamPlan& plan, cudaStream_t stream) {
  const bool scaled =
      args.rollout_temperature.data != nullptr || args.train_temperature.data != nullptr;
  auto* kernel = scaled ? &stream_divergence_kernel<Rollout, Train, TrainGap, Entropy, true>
                        : &stream_divergence_kernel<Rollout, Train, TrainGap, Entropy, false>;
  return launch({dim3(grid_blocks(plan.blocks)), dim3(kStreamThreads), 0, stream}, kernel, args,
                out, plan);
}

template <typename Rollout, typename Train>
cudaError_t launch_stream_divergence(const DivergenceArgs& args, const DivergenceOutputs& out,
                                     const StreamPlan& plan, cudaStream_t stream) {
  switch (carried_by(args.outputs)) {
    case kCarries:
      return launch_stream<Rollout, Train, true, true>(args, out, plan, stream);
    case kCarriesTrainGap:
      return launch_stream<Rollout, Train, true, false>(args, out, plan, stream);
    case kCarriesEntropy:
      return launch_stream<Rollout, Train, false, true>(args, out, plan, stream);
    default:
      return launch_stream<Rollout, Train, false, false>(args, out, plan, stream);
  }
}

}  // namespace trm::kernels
