// SPDX-License-Identifier: Apache-2.0
// The project's own kernels, through the launchers that the CUDA library exports: forward, state,
// merge, finish and backward over awkward shapes, against sums written down here. Every schedule
// must agree to the last bit.
#include <cmath>
#include <cstring>
#include <vector>

#include "cuda/sequence_reduce.h"
#include "cuda/token_divergence.h"
#include "emulator/buffers.h"
#include "harness.h"
#include "trm/divergence_state.h"

namespace {

using harness::expect;
using harness::Heap;

constexpr uint32_t kEveryOutput = trm::kValueOutputs | trm::kDiagnosticOutputs;
constexpr int32_t kDiagnostics = trm::kOutputs - trm::kValues;
constexpr int64_t kRows = 3;
constexpr int64_t kMasked = 1;  // this row does not count

double noise(int64_t row, int64_t column, int64_t salt) {
  const auto mixed = static_cast<uint64_t>(row * 7919 + column * 104729 + salt * 1299709 + 17);
  const uint64_t scrambled = (mixed * 6364136223846793005ull) >> 40;
  return static_cast<double>(scrambled) / (1 << 24) - 0.5;
}

template <typename Storage>
struct Stored {
  using Real = Storage;  // of values and states
  static Storage from(double value) { return static_cast<Storage>(value); }
  static double to(Storage value) { return value; }
  static constexpr trm::StorageType kType =
      sizeof(Storage) == 8 ? trm::StorageType::kFloat64 : trm::StorageType::kFloat32;
  static constexpr const char* kName = sizeof(Storage) == 8 ? "fp64" : "fp32";
};

template <>
struct Stored<trm::BFloat16> {
  using Real = float;
  static trm::BFloat16 from(double value) { return trm::to_bfloat16(static_cast<float>(value)); }
  static double to(trm::BFloat16 value) { return trm::to_float(value); }
  static constexpr trm::StorageType kType = trm::StorageType::kBFloat16;
  static constexpr const char* kName = "bf16";
};

// Rows with padding: `aligned` ones start at multiples of 16 bytes, so that whole runs are read.
template <typename T>
struct Problem {
  int64_t vocab;
  int64_t columns;  // with padding that is never read
  Heap<T> x, y;
  Heap<bool> mask;
  Heap<int64_t> tokens;
  trm::DivergenceArgs args;

  explicit Problem(int64_t vocab, bool aligned)
      : vocab(vocab),
        columns(aligned ? (vocab + 9) / 8 * 8 : vocab + 2),
        x(static_cast<size_t>(kRows * columns), Stored<T>::from(1e30)),
        y(static_cast<size_t>(kRows * columns), Stored<T>::from(1e30)),
        mask(kRows, true),
        tokens(kRows) {
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t v = 0; v < vocab; ++v) {
        const auto at = static_cast<size_t>(row * columns + v);
        x[at] = Stored<T>::from(12 * noise(row, v, 1));
        const double step = v % 9 == 4 ? 3.0 : 0.5;  // some columns are far
        y[at] = Stored<T>::from(Stored<T>::to(x[at]) + step * noise(row, v, 2));
      }
      tokens[static_cast<size_t>(row)] = (row * 31) % vocab;
    }
    mask[kMasked] = false;
    constexpr auto type = Stored<T>::kType;
    args.rollout = {x.data(), type, 0, columns, 1};
    args.train = {y.data(), type, 0, columns, 1};
    args.token_mask = {mask.data(), 0, 1};
    args.tokens = {tokens.data(), 0, 1};
    args.rows = kRows;
    args.inner = kRows;
    args.vocab = vocab;
    args.outputs = kEveryOutput;
  }

  void reads(trm::emu::Buffers& buffers) {
    buffers.reads("token_mask", mask.data(), mask.bytes());
    buffers.reads("tokens", tokens.data(), tokens.bytes());
    for (int64_t row = 0; row < kRows; ++row) {
      if (row == kMasked) continue;
      const size_t bytes = static_cast<size_t>(vocab) * sizeof(T);
      buffers.reads("rollout", x.data() + row * columns, bytes);
      buffers.reads("train", y.data() + row * columns, bytes);
    }
  }

  // kl, the two log-probabilities of the token, and the total variation.
  std::vector<double> exact(int64_t row) {
    const T* a = x.data() + row * columns;
    const T* b = y.data() + row * columns;
    long double s = 0, t = 0, kl = 0, tv = 0;
    for (int64_t v = 0; v < vocab; ++v) {
      s += std::exp(static_cast<long double>(Stored<T>::to(a[v])));
      t += std::exp(static_cast<long double>(Stored<T>::to(b[v])));
    }
    const long double log_s = std::log(s), log_t = std::log(t);
    for (int64_t v = 0; v < vocab; ++v) {
      const long double p = std::exp(Stored<T>::to(a[v]) - log_s),
                        q = std::exp(Stored<T>::to(b[v]) - log_t);
      kl += p * ((Stored<T>::to(a[v]) - log_s) - (Stored<T>::to(b[v]) - log_t));
      tv += std::fabs(p - q) / 2;
    }
    const int64_t token = tokens[static_cast<size_t>(row)];
    return {static_cast<double>(kl), static_cast<double>(Stored<T>::to(a[token]) - log_s),
            static_cast<double>(Stored<T>::to(b[token]) - log_t), static_cast<double>(tv)};
  }
};

// Bits of this answer against the first schedule's.
void same_bits(const std::string& key, const void* data, size_t bytes) {
  static std::map<std::string, std::string> seen;
  const std::string now(static_cast<const char*>(data), bytes);
  const auto [entry, fresh] = seen.emplace(key, now);
  expect(fresh || entry->second == now, key + ": bits differ between schedules");
}

// `processors`: of the device; with two or more a row is split over blocks.
template <typename T>
void forward_and_backward(int64_t vocab, bool aligned, int processors) {
  using Real = typename Stored<T>::Real;
  constexpr bool kWide = sizeof(Real) == 8;
  Problem<T> problem(vocab, aligned);
  trm::emu::set_device(90, processors);
  // The number of processors is not part of the key: it may not change a bit.
  const std::string key =
      std::to_string(vocab) + " " + Stored<T>::kName + (aligned ? " aligned" : "");
  trm::emu::set_shape("rows=3 vocab=" + key + " processors=" + std::to_string(processors));
  Heap<Real> values(kRows * trm::kValues), diagnostics(kRows * kDiagnostics);
  Heap<double> statistics(kRows * trm::kStatistics);
  int64_t scratch = 0;
  expect(trm::cuda::forward_workspace(problem.args, scratch) == cudaSuccess, "workspace");
  Heap<double> workspace(static_cast<size_t>(scratch / 8));
  {
    trm::emu::Buffers buffers;
    problem.reads(buffers);
    buffers.writes("values", values.data(), values.bytes());
    buffers.writes("diagnostics", diagnostics.data(), diagnostics.bytes());
    buffers.writes("statistics", statistics.data(), statistics.bytes());
    buffers.scratch("workspace", workspace.data(), workspace.bytes());
    trm::DivergenceOutputs out;
    out.workspace = workspace.data();
    out.values = values.data();
    out.diagnostics = diagnostics.data();
    out.statistics = statistics.data();
    out.wide = kWide;
    expect(trm::cuda::token_divergence(problem.args, out, nullptr) == cudaSuccess, "launch");
    buffers.finish();
  }
  const double relative = kWide ? 1e-12 : 1e-5;
  for (int64_t row = 0; row < kRows; ++row) {
    const auto value = [&](int32_t output) {
      return static_cast<double>(values[static_cast<size_t>(output * kRows + row)]);
    };
    if (row == kMasked) {
      expect(value(trm::kKl) == 0.0, "masked row");
      continue;
    }
    const std::vector<double> want = problem.exact(row);
    const std::string where = " of row " + std::to_string(row) + ", vocab " + key;
    expect(std::fabs(value(trm::kKl) - want[0]) <= relative * want[0] + 1e-15, "kl" + where);
    expect(std::fabs(value(trm::kLogpRollout) - want[1]) <= relative, "logp_rollout" + where);
    expect(std::fabs(value(trm::kLogpTrain) - want[2]) <= relative, "logp_train" + where);
    const double tv = static_cast<double>(diagnostics[static_cast<size_t>(row)]);  // the first
    expect(std::fabs(tv - want[3]) <= relative * want[3] + 1e-15, "tv" + where);
  }
  same_bits("values " + key, values.data(), values.bytes());
  same_bits("diagnostics " + key, diagnostics.data(), diagnostics.bytes());

  Heap<Real> upstream(kRows * trm::kValues, Real(0));
  for (size_t row = 0; row < kRows; ++row) upstream[trm::kKl * kRows + row] = Real(1);
  Heap<T> grad_rollout(static_cast<size_t>(kRows * problem.columns));
  Heap<T> grad_train(static_cast<size_t>(kRows * problem.columns));
  {
    trm::emu::Buffers buffers;
    problem.reads(buffers);
    buffers.reads("upstream", upstream.data(), upstream.bytes());
    buffers.reads("statistics", statistics.data(), statistics.bytes());
    buffers.writes("grad_rollout", grad_rollout.data(), grad_rollout.bytes());
    buffers.writes("grad_train", grad_train.data(), grad_train.bytes());
    trm::DivergenceBackwardArgs args;
    args.forward = problem.args;
    args.upstream = {upstream.data(), 0, 1};
    args.upstream_output_stride = kRows;
    args.statistics = statistics.data();
    args.wide = kWide;
    args.grad_rollout = grad_rollout.data();
    args.grad_train = grad_train.data();
    args.columns = problem.columns;
    expect(trm::cuda::token_divergence_backward(args, nullptr) == cudaSuccess, "launch");
    buffers.finish();
  }
  for (int64_t row = 0; row < kRows; ++row) {
    double sum = 0.0, absolute = 0.0;
    for (int64_t v = 0; v < problem.columns; ++v) {
      const double g = Stored<T>::to(grad_train[static_cast<size_t>(row * problem.columns + v)]);
      if (row == kMasked || v >= vocab) expect(g == 0.0, "gradient of what does not count");
      sum += g;
      absolute += std::fabs(g);
    }
    const double rounding = sizeof(T) == 2 ? 0x1p-8 : relative;
    expect(std::fabs(sum) <= rounding * (absolute + 1.0), "gradient rows add up to 0");
  }
  same_bits("grad_rollout " + key, grad_rollout.data(), grad_rollout.bytes());
  same_bits("grad_train " + key, grad_train.data(), grad_train.bytes());
}

template <typename T>
void state_merge_finish(int64_t vocab) {
  Problem<T> problem(vocab, false);
  trm::emu::set_device(90, 1);
  const std::string key = std::to_string(vocab) + (sizeof(T) == 8 ? " wide" : "");
  trm::emu::set_shape("states rows=3 vocab=" + key);
  constexpr int64_t kParts = 3;
  constexpr size_t kState = kRows * trm::kStateColumns;
  Heap<T> states(kParts * kState), merged(kState);
  Heap<T> values(kRows * trm::kValues);
  Heap<double> statistics(kRows * trm::kStatistics);
  const bool wide = sizeof(T) == 8;
  int64_t first = 0;
  for (int64_t part = 0; part < kParts; ++part) {
    const int64_t end = part + 1 == kParts ? vocab : (part + 1) * (vocab / kParts);
    trm::emu::Buffers buffers;
    problem.reads(buffers);
    T* mine = states.data() + static_cast<size_t>(part) * kState;
    buffers.writes("state", mine, kState * sizeof(T));
    trm::DivergenceArgs args = problem.args;
    args.rollout.data = problem.x.data() + first;
    args.train.data = problem.y.data() + first;
    args.vocab = end - first;
    args.vocab_start = first;
    trm::DivergenceOutputs out;
    out.state = mine;
    out.wide = wide;
    expect(trm::cuda::token_divergence(args, out, nullptr) == cudaSuccess, "launch");
    buffers.finish();
    first = end;
  }
  trm::emu::Buffers buffers;
  buffers.reads("states", states.data(), states.bytes());
  buffers.writes("merged", merged.data(), merged.bytes());
  buffers.writes("values", values.data(), values.bytes());
  buffers.writes("statistics", statistics.data(), statistics.bytes());
  trm::cuda::divergence_state_merge(states.data(), merged.data(), wide, kParts, kRows, nullptr);
  trm::cuda::divergence_finish(merged.data(), wide, trm::kValueOutputs, values.data(),
                               statistics.data(), kRows, nullptr);
  buffers.finish();
  for (int64_t row = 0; row < kRows; ++row) {
    if (row == kMasked) continue;
    const double kl = static_cast<double>(values[static_cast<size_t>(row)]);
    const double want = problem.exact(row)[0];
    expect(std::fabs(kl - want) <= (wide ? 1e-12 : 1e-5) * want + 1e-15, "merged kl, " + key);
  }
  same_bits("merged " + key, merged.data(), merged.bytes());
}

// The same tokens judged: what the kernel writes is what one lane writes from the statistics.
void verdicts(const trm::SequenceArgs& args, const trm::VerdictRule& rule, size_t count,
              size_t tokens) {
  Heap<bool> keep(count), failed(count), token_keep(tokens);
  Heap<int64_t> reason(count), position(count);
  Heap<float> max(count), mean(count), sum(count);
  Heap<double> statistic(count);
  const trm::VerdictOutputs out = {keep.data(),      reason.data(), position.data(),
                                   max.data(),       mean.data(),   sum.data(),
                                   statistic.data(), failed.data(), token_keep.data()};
  trm::emu::Buffers buffers;
  trm::emu::verdict_buffers(buffers, args, out);
  expect(trm::cuda::sequence_verdict(args, rule, out, nullptr) == cudaSuccess, "launch");
  buffers.finish();
  for (size_t i = 0; i < count; ++i) {
    trm::SequenceStatistics want;
    for (int64_t t = args.offsets[i]; t < args.offsets[i + 1]; ++t) trm::add_indexed(args, t, want);
    const std::string where = " of sequence " + std::to_string(i);
    expect(reason[i] == trm::reason_of(want, rule), "reason" + where);
    expect(keep[i] == trm::is_kept(reason[i]), "keep" + where);
    for (int64_t t = args.offsets[i]; t < args.offsets[i + 1]; ++t) {
      expect(token_keep[static_cast<size_t>(t)] == (keep[i] && args.token_mask[t]),
             "token" + where);
    }
  }
}

// Sequences of every length around a warp and a block; NaN wins, ties go to the earlier token.
void sequences() {
  const std::vector<int64_t> lengths = {0, 1, 31, 33, 256, 257, 600};
  std::vector<int64_t> ends = {0};
  for (const int64_t length : lengths) ends.push_back(ends.back() + length);
  const auto count = lengths.size();
  const auto tokens = static_cast<size_t>(ends.back());
  trm::emu::set_shape("sequences=7 tokens=" + std::to_string(tokens));
  Heap<float> values(tokens), max(count);
  Heap<bool> mask(tokens, true);
  Heap<int64_t> positions(tokens), offsets(count + 1), position(count), number(count),
      infinite(count);
  Heap<double> sum(count);
  for (size_t t = 0; t < tokens; ++t) {
    values[t] = static_cast<float>(std::floor(8 * noise(0, static_cast<int64_t>(t), 3)));
    mask[t] = t % 5 != 0;
    positions[t] = static_cast<int64_t>(t);
  }
  values[tokens - 100] = std::nanf("");
  mask[tokens - 100] = true;
  values[tokens - 700] = -trm::infinity<float>();
  mask[tokens - 700] = true;
  for (size_t i = 0; i <= count; ++i) offsets[i] = ends[i];
  trm::SequenceArgs args;
  args.values = values.data();
  args.positions = positions.data();
  args.token_mask = mask.data();
  args.offsets = offsets.data();
  args.sequences = static_cast<int64_t>(count);
  args.tokens = static_cast<int64_t>(tokens);
  const trm::SequenceOutputs out = {max.data(), position.data(), sum.data(), number.data(),
                                    infinite.data()};
  {
    trm::emu::Buffers buffers;
    trm::emu::sequence_buffers(buffers, args, out);
    expect(trm::cuda::sequence_reduce(args, out, nullptr) == cudaSuccess, "launch");
    buffers.finish();
  }
  for (size_t i = 0; i < count; ++i) {
    trm::SequenceStatistics want;
    for (int64_t t = ends[i]; t < ends[i + 1]; ++t) {
      if (mask[static_cast<size_t>(t)]) trm::add_token(want, values[static_cast<size_t>(t)], t);
    }
    const std::string where = " of sequence " + std::to_string(i);
    expect(number[i] == want.count && position[i] == want.position, "count, position" + where);
    expect(infinite[i] == want.infinite, "infinity" + where);
    const bool nan = want.max != want.max;
    expect(nan ? max[i] != max[i] : max[i] == want.max, "maximum" + where);
    expect(nan ? sum[i] != sum[i] : sum[i] == want.sum, "sum" + where);  // of small integers
  }
  for (int64_t criterion = 0; criterion < trm::kCriteria; ++criterion) {
    verdicts(args, {criterion, 3.0, 1}, count, tokens);
  }
}

template <typename T>
void forward_all() {
  for (const int64_t vocab : {1, 7, 33, 257, 1024}) forward_and_backward<T>(vocab, false, 1);
}

template <typename T>
void forward_runs() {
  for (const int64_t vocab : {31, 257, 1024, 4099}) {
    for (const int processors : {1, 4}) forward_and_backward<T>(vocab, true, processors);
  }
}

template <typename T>
void states_all() {
  for (const int64_t vocab : {1, 7, 257}) state_merge_finish<T>(vocab);
}

}  // namespace

int main(int count, char** arguments) {
  return harness::run({{"forward_backward", forward_all<float>},
                       {"forward_backward_wide", forward_all<double>},
                       {"forward_backward_runs", forward_runs<float>},
                       {"forward_backward_runs_bf16", forward_runs<trm::BFloat16>},
                       {"state_merge_finish", states_all<float>},
                       {"state_merge_finish_wide", states_all<double>},
                       {"sequences", sequences},
                       {"quick",
                        [] {
                          forward_and_backward<float>(33, false, 1);
                          forward_and_backward<double>(33, false, 1);
                          forward_and_backward<trm::BFloat16>(4099, true, 4);
                          sequences();
                        }}},
                      count, arguments);
}
