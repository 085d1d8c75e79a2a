// SPDX-License-Identifier: Apache-2.0
// The row runs compiled for one instruction set; chosen at run time by capability.cpp.
// clang-format off: the lanes come first, the runs are written over them
#include "cpu/simd_avx512.h"
#include "cpu/row_runs_impl.h"
// clang-format on

namespace trm::cpu {

const RowRuns& avx512_runs() {
  static const RowRuns runs = make_runs("avx512");
  return runs;
}

}  // namespace trm::cpu
