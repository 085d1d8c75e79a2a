// SPDX-License-Identifier: Apache-2.0
// The CPU kernels under AddressSanitizer and UBSan: every instruction set this processor has, every
// stored pair, sizes around every lane, run and slice, strided and misaligned columns, on heap
// buffers of exactly the right size, so that one element too far ends the process. Values are held
// against the float64 path. Prints the number of cases; any mismatch aborts.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "cpu/capability.h"
#include "cpu/sequence_reduce.h"
#include "cpu/token_divergence.h"

namespace {

using namespace trm;

constexpr StorageType kTypes[] = {StorageType::kFloat32, StorageType::kBFloat16,
                                  StorageType::kFloat16, StorageType::kFloat64};

int64_t size_of(StorageType type) {
  return type == StorageType::kFloat64 ? 8 : type == StorageType::kFloat32 ? 4 : 2;
}

// Logits [rows, vocab] with a column stride, in a buffer that ends with the last element.
struct Buffer {
  std::unique_ptr<char[]> memory;
  LogitsView view;

  Buffer(StorageType type, int64_t rows, int64_t vocab, int64_t stride, int64_t lead,
         const std::vector<double>& values) {
    const int64_t row = vocab * stride;
    const int64_t last = rows > 0 && vocab > 0 ? (rows - 1) * row + (vocab - 1) * stride + 1 : 0;
    memory.reset(new char[static_cast<size_t>((lead + last) * size_of(type))]);
    view.data = memory.get() + lead * size_of(type);
    view.type = type;
    view.inner_stride = row;
    view.column_stride = stride;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t v = 0; v < vocab; ++v) {
        store_logit(const_cast<void*>(view.data), r * row + v * stride, type,
                    values[static_cast<size_t>(r * vocab + v)]);
      }
    }
  }
};

[[noreturn]] void fail(const char* what, const char* set, int64_t vocab, double got, double want) {
  std::fprintf(stderr, "%s differs: set %s, V %lld: %.9g against %.9g\n", what, set,
               static_cast<long long>(vocab), got, want);
  std::abort();
}

int run_case(StorageType rollout_type, StorageType train_type, int64_t vocab, int64_t stride,
             int64_t lead, double temperature, std::mt19937& random) {
  constexpr int64_t kRows = 3;
  std::normal_distribution<double> normal;
  std::vector<double> x(static_cast<size_t>(kRows * vocab)), y = x;
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = 3 * normal(random);
    y[i] = x[i] + (random() % 8 == 0 ? 1.0 : 0.05) * normal(random);
    if (random() % 16 == 0) x[i] = -infinity<double>();
  }
  for (int64_t r = 0; r < kRows; ++r) x[static_cast<size_t>(r * vocab)] = 1.0;
  const Buffer rollout(rollout_type, kRows, vocab, stride, lead, x);
  const Buffer train(train_type, kRows, vocab, stride, lead, y);
  const std::vector<double> temperatures(kRows, temperature);
  const std::vector<int64_t> tokens = {0, vocab - 1, vocab / 2};
  const std::unique_ptr<bool[]> mask(new bool[kRows]{true, false, true});

  DivergenceArgs args;
  args.rollout = rollout.view;
  args.train = train.view;
  args.rows = kRows;
  args.inner = kRows;
  args.vocab = vocab;
  args.outputs = (1u << kOutputs) - 1u;
  args.token_mask = {mask.get(), 0, 1};
  args.tokens = {tokens.data(), 0, 1};
  if (temperature != 1.0) args.rollout_temperature = {temperatures.data(), 0, 1};

  std::vector<double> reference(kOutputs * kRows), statistics(kStatistics * kRows);
  std::vector<float> values(kOutputs * kRows);
  const auto alone = [](int64_t items, const auto& body) { body(int64_t{0}, items); };
  DivergenceOutputs wide;
  wide.wide = true;
  wide.values = reference.data();
  wide.diagnostics = reference.data() + kValues * kRows;
  wide.statistics = statistics.data();
  cpu::ForwardJob(args, wide).run(1, alone);

  const bool any_wide =
      rollout_type == StorageType::kFloat64 || train_type == StorageType::kFloat64;
  DivergenceOutputs narrow = wide;
  if (!any_wide) {
    narrow.wide = false;
    narrow.values = values.data();
    narrow.diagnostics = values.data() + kValues * kRows;
    for (const int64_t threads : {int64_t{1}, int64_t{7}}) {  // whole rows, then slices
      cpu::ForwardJob(args, narrow).run(threads, alone);
      for (size_t i = 0; i < values.size(); ++i) {
        const double want = reference[i], got = values[i];
        const bool same = std::isfinite(want)
                              ? std::fabs(got - want) <= 1e-5 * std::fabs(want) + 4e-6
                              : (std::isnan(want) ? std::isnan(got) : got == want);
        if (!same) fail("a value", cpu::selected_runs().name, vocab, got, want);
      }
    }
  }
  const std::vector<double> wide_upstream(kValues * kRows, 0.5);
  const std::vector<float> upstream(kValues * kRows, 0.5f);
  const std::unique_ptr<char[]> grad_rollout(
      new char[static_cast<size_t>(kRows * vocab * size_of(rollout_type))]);
  const std::unique_ptr<char[]> grad_train(
      new char[static_cast<size_t>(kRows * vocab * size_of(train_type))]);
  DivergenceBackwardArgs backward;
  backward.forward = args;
  backward.upstream.inner_stride = 1;
  backward.upstream_output_stride = kRows;
  backward.statistics = statistics.data();
  backward.wide = any_wide;
  backward.upstream.data = any_wide ? static_cast<const void*>(wide_upstream.data())
                                    : static_cast<const void*>(upstream.data());
  backward.grad_rollout = grad_rollout.get();
  backward.grad_train = grad_train.get();
  backward.columns = vocab;
  cpu::token_divergence_backward(backward, 0, cpu::backward_items(backward));
  return 1;
}

int sequence_cases() {
  const std::vector<float> values = {1.0f, 3.0f, 3.0f, __builtin_nanf(""), 2.0f};
  const std::vector<int64_t> positions = {4, 3, 2, 1, 0}, offsets = {0, 3, 3, 5};
  const std::unique_ptr<bool[]> mask(new bool[5]{true, true, true, false, true});
  float max[3];
  int64_t position[3], count[3], infinite[3], reason[3];
  double sum[3], statistic[3];
  SequenceArgs args;
  args.values = values.data();
  args.positions = positions.data();
  args.token_mask = mask.get();
  args.offsets = offsets.data();
  args.sequences = 3;
  args.tokens = 5;
  cpu::sequence_reduce(args, {max, position, sum, count, infinite}, 0, 3);
  if (max[0] != 3.0f || position[0] != 2 || count[1] != 0 || position[1] != -1 || sum[2] != 2.0) {
    fail("a sequence", "-", 5, max[0], 3.0);
  }
  float mean[3], total[3];
  bool keep[3], failed[3], token_keep[5];
  cpu::sequence_verdict(args, {kCriterionMax, 2.5, 1},
                        {keep, reason, position, max, mean, total, statistic, failed, token_keep},
                        0, 3);
  if (keep[0] || reason[0] != 1 || reason[1] != kReasonEmpty || reason[2] != kReasonKept ||
      !failed[0] || failed[1] || token_keep[0] || token_keep[3] || !token_keep[4]) {
    fail("a verdict", "-", 5, static_cast<double>(reason[0]), 1.0);
  }
  return 2;
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int cases = sequence_cases();
  for (const char* set : {"scalar", "avx2", "avx512"}) {
    if (cpu::force(set) == nullptr) continue;
    for (const StorageType rollout : kTypes) {
      for (const StorageType train : kTypes) {
        for (const int64_t vocab : {1, 7, 8, 15, 16, 17, 31, 33, 257, 2049}) {
          for (const int64_t stride : {1, 2}) {
            cases += run_case(rollout, train, vocab, stride, vocab % 4, 1.0, random);
          }
          cases += run_case(rollout, train, vocab, 1, 1, 0.7, random);
        }
      }
    }
    for (const int64_t vocab : {8191, 8193, 32768, 32769, 40000}) {
      cases += run_case(StorageType::kFloat32, StorageType::kFloat32, vocab, 1, 1, 1.0, random);
      cases += run_case(StorageType::kBFloat16, StorageType::kBFloat16, vocab, 1, 3, 1.0, random);
      cases += run_case(StorageType::kFloat16, StorageType::kFloat32, vocab, 3, 0, 1.3, random);
    }
  }
  std::printf("%d cases\n", cases);
  return 0;
}
