// SPDX-License-Identifier: Apache-2.0
// CPU kernels over a range of rows; the caller supplies the threads.
#pragma once

#include "trm/divergence_args.h"

namespace trm::cpu {

void token_divergence(const DivergenceArgs& args, const DivergenceOutputs& out, int64_t begin,
                      int64_t end);
void token_divergence_backward(const DivergenceBackwardArgs& args, int64_t begin, int64_t end);

// states [parts, rows, kStateColumns] -> [rows, kStateColumns], merged in order of the parts.
void divergence_state_merge(const void* states, void* merged, bool wide, int64_t parts,
                            int64_t rows, int64_t begin, int64_t end);

// states [rows, kStateColumns] -> values [outputs set, rows], statistics [rows, kStatistics].
void divergence_finish(const void* states, bool wide, uint32_t outputs, void* values,
                       double* statistics, int64_t rows, int64_t begin, int64_t end);

}  // namespace trm::cpu
