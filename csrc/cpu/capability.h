// SPDX-License-Identifier: Apache-2.0
// Which instruction set the CPU kernels run with.
#pragma once

#include "cpu/row_runs.h"

namespace trm::cpu {

// The widest set this processor has, or the one named by TRM_CPU_CAPABILITY or by force().
const RowRuns& selected_runs();

// Selects a set by name; nullptr selects the widest. Returns the name in force, or nullptr where
// the name is unknown or the processor lacks it (the selection then stays as it was).
const char* force(const char* name);

}  // namespace trm::cpu
