// SPDX-License-Identifier: Apache-2.0
// Library _C: the schemas and the CPU implementations.
#include "cpu/token_divergence.h"
#include "torch/ops.h"
#include "torch/schema.h"
#include "trm/build_facts.h"

TRM_BUILD_FACT(cpu_instruction_sets, "scalar");

namespace {

using torch::stable::parallel_for;
using torch::stable::Tensor;

constexpr int64_t kRecordGrain = 1024;

struct CpuBackend {
  static void forward(const Tensor&, const trm::DivergenceArgs& args,
                      const trm::DivergenceOutputs& out) {
    parallel_for(0, args.rows, 1, [&](int64_t begin, int64_t end) {
      trm::cpu::token_divergence(args, out, begin, end);
    });
  }

  static void backward(const Tensor&, const trm::DivergenceBackwardArgs& args) {
    parallel_for(0, args.forward.rows, 1, [&](int64_t begin, int64_t end) {
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
};

}  // namespace

STABLE_TORCH_LIBRARY(trm, library) {
  for (const char* schema : trm::kSchemas) library.def(schema);
}

STABLE_TORCH_LIBRARY_IMPL(trm, CPU, library) { trm::binding::register_ops<CpuBackend>(library); }
