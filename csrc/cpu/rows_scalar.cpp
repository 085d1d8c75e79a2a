// SPDX-License-Identifier: Apache-2.0
// The row runs compiled for one instruction set; chosen at run time by capability.cpp.
// clang-format off: the lanes come first, the runs are written over them
#include "cpu/simd_scalar.h"
#include "cpu/row_runs_impl.h"
// clang-format on

namespace trm::cpu {

const RowRuns& scalar_runs() {
  static const RowRuns runs = make_runs("scalar");
  return runs;
}

}  // namespace trm::cpu
