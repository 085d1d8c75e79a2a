// SPDX-License-Identifier: Apache-2.0
#include "cpu/capability.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace trm::cpu {
namespace {

struct Choice {
  const char* name;
  bool supported;
  const RowRuns& (*runs)();
};

#if defined(TRM_HAS_X86_RUNS)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const RowRuns* find(const char* name) {
  const Choice choices[] = {
#if defined(TRM_HAS_X86_RUNS)
      {"avx512", has_avx512(), &avx512_runs},
      {"avx2", has_avx2(), &avx2_runs},
#endif
      {"scalar", true, &scalar_runs},
  };
  for (const Choice& choice : choices) {
    if (choice.supported && (name == nullptr || std::strcmp(name, choice.name) == 0)) {
      return &choice.runs();
    }
  }
  return nullptr;
}

const RowRuns* initial() {
  const RowRuns* named = find(std::getenv("TRM_CPU_CAPABILITY"));
  return named != nullptr ? named : find(nullptr);  // Python has refused a name we cannot honour
}

std::atomic<const RowRuns*>& selection() {
  static std::atomic<const RowRuns*> selected{initial()};
  return selected;
}

}  // namespace

const RowRuns& selected_runs() { return *selection().load(std::memory_order_relaxed); }

const char* force(const char* name) {
  const RowRuns* runs = find(name);
  if (runs == nullptr) return nullptr;
  selection().store(runs, std::memory_order_relaxed);
  return runs->name;
}

}  // namespace trm::cpu

// For `trm info` and the tests; plain C, so that neither needs a torch op.
extern "C" __attribute__((visibility("default"))) const char* trm_cpu_capability() {
  return trm::cpu::selected_runs().name;
}

extern "C" __attribute__((visibility("default"))) const char* trm_force_cpu_capability(
    const char* name) {
  return trm::cpu::force(name);
}
