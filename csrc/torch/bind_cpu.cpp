// SPDX-License-Identifier: Apache-2.0
// Library _C: the schemas and the CPU implementations.
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

struct CpuBackend {
  static void forward(const Tensor&, const trm::DivergenceArgs& args,
                      const trm::DivergenceOutputs& out) {
    trm::cpu::ForwardJob(args, out).run(
        torch::stable::get_num_threads(),
        [](int64_t items, const auto& body) { parallel_for(0, items, 1, body); });
  }

  static void backward(const Tensor&, const trm::DivergenceBackwardArgs& args) {
    parallel_for(0, trm::cpu::backward_items(args), 1, [&](int64_t begin, int64_t end) {
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
};

}  // namespace

STABLE_TORCH_LIBRARY(trm, library) {
  for (const char* schema : trm::kSchemas) library.def(schema);
}

STABLE_TORCH_LIBRARY_IMPL(trm, CPU, library) { trm::binding::register_ops<CpuBackend>(library); }
