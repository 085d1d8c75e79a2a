// SPDX-License-Identifier: Apache-2.0
// Library _C: the schemas and the CPU implementations.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>

#include "cpu/sequence_reduce.h"
#include "cpu/token_divergence.h"
#include "torch/ops.h"
#include "torch/schema.h"
#include "trm/build_facts.h"

#if defined(TRM_HAS_X86_RUNS)
TRM_BUILD_FACT(cpu_instruction_sets, "avx512 avx2 scalar");
#else
TRM_BUILD_FACT(cpu_instruction_sets, "scalar");
#endif

namespace {

using torch::stable::parallel_for;
using torch::stable::Tensor;

constexpr int64_t kRecordGrain = 1024;

// Calls body(begin, end) over disjoint ranges of [0, items). Threads take ranges as they come free,
// long ones first: rows differ in cost (a masked one has none), and threads in speed.
template <typename Body>
void share_out(int64_t items, const Body& body) {
  const int64_t threads = std::min<int64_t>(items, torch::stable::get_num_threads());
  std::atomic<int64_t> next{0};
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    int64_t begin = next.load();
    while (begin < items) {
      const int64_t end = begin + std::max<int64_t>(1, (items - begin) / (16 * threads));
      if (!next.compare_exchange_weak(begin, end)) continue;
      body(begin, end);
      begin = next.load();
    }
  });
}

// A fresh gradient is hundreds of megabytes of pages that do not exist yet; without this hint the
// page faults cost several times the arithmetic. Memory that is there already is not affected.
void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) & ~(kHuge - 1);
  if (data != nullptr && begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
}

int64_t bytes_of(const trm::DivergenceBackwardArgs& args, trm::StorageType type) {
  return args.forward.rows * args.columns * trm::element_size(type);
}

struct CpuBackend {
  static int64_t workspace_bytes(const Tensor&, const trm::DivergenceArgs&) { return 0; }

  static void forward(const Tensor&, const trm::DivergenceArgs& args,
                      const trm::DivergenceOutputs& out) {
    trm::cpu::ForwardJob(args, out).run(
        torch::stable::get_num_threads(),
        [](int64_t items, const auto& body) { share_out(items, body); });
  }

  static void backward(const Tensor&, const trm::DivergenceBackwardArgs& args) {
    prefer_huge_pages(args.grad_rollout, bytes_of(args, args.forward.rollout.type));
    prefer_huge_pages(args.grad_train, bytes_of(args, args.forward.train.type));
    share_out(trm::cpu::backward_items(args), [&](int64_t begin, int64_t end) {
      trm::cpu::token_divergence_backward(args, begin, end);
    });
  }

  static void merge(const Tensor&, const void* states, void* merged, bool wide, int64_t parts,
                    int64_t rows) {
    parallel_for(0, rows, kRecordGrain, [&](int64_t begin, int64_t end) {
      trm::cpu::divergence_state_merge(states, merged, wide, parts, rows, begin, end);
    });
  }

  static void finish(const Tensor&, const void* states, bool wide, uint32_t outputs, void* values,
                     double* statistics, int64_t rows) {
    parallel_for(0, rows, kRecordGrain, [&](int64_t begin, int64_t end) {
      trm::cpu::divergence_finish(states, wide, outputs, values, statistics, rows, begin, end);
    });
  }

  static void reduce(const Tensor&, const trm::SequenceArgs& args,
                     const trm::SequenceOutputs& out) {
    parallel_for(0, args.sequences, 8, [&](int64_t begin, int64_t end) {
      trm::cpu::sequence_reduce(args, out, begin, end);
    });
  }

  static void judge(const Tensor&, const trm::SequenceArgs& args, const trm::VerdictRule& rule,
                    const trm::VerdictOutputs& out) {
    parallel_for(0, args.sequences, 8, [&](int64_t begin, int64_t end) {
      trm::cpu::sequence_verdict(args, rule, out, begin, end);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY(trm, library) {
  for (const char* schema : trm::kSchemas) library.def(schema);
}

STABLE_TORCH_LIBRARY_IMPL(trm, CPU, library) { trm::binding::register_ops<CpuBackend>(library); }
