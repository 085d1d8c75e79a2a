// SPDX-License-Identifier: Apache-2.0
// Tells the emulator which bytes a launch may touch, from the arguments that the kernel is handed:
// the real columns of the rows that count, and nothing of any other row or of the padding.
#pragma once

#include <algorithm>

#include "trm/divergence_args.h"
#include "trm/divergence_state.h"
#include "trm/emu/host.h"
#include "trm/sequence_reduce.h"

namespace trm::emu {

inline int64_t count_bits(uint32_t bits) { return __builtin_popcount(bits); }

// From the lowest to the highest element of a strided [outer, inner] quantity.
inline void reads_rows(Buffers& buffers, const char* name, const void* data, int64_t outer_stride,
                       int64_t inner_stride, const DivergenceArgs& args, int64_t bytes) {
  if (data == nullptr || args.rows == 0) return;
  const int64_t outer = (args.rows / args.inner - 1) * outer_stride;
  const int64_t inner = (args.inner - 1) * inner_stride;
  const int64_t low = std::min<int64_t>(outer, 0) + std::min<int64_t>(inner, 0);
  const int64_t high = std::max<int64_t>(outer, 0) + std::max<int64_t>(inner, 0);
  buffers.reads(name, static_cast<const char*>(data) + low * bytes,
                static_cast<size_t>((high - low + 1) * bytes));
}

inline void reads_logits(Buffers& buffers, const char* name, const LogitsView& view,
                         const DivergenceArgs& args) {
  const int64_t bytes = element_size(view.type);
  const int64_t span = (args.vocab - 1) * view.column_stride;
  if (args.vocab == 0) return;
  for (int64_t row = 0; row < args.rows; ++row) {
    if (!counts(args, row)) continue;
    const int64_t first = row_offset(view, row, args.inner) + std::min<int64_t>(span, 0);
    buffers.reads(name, static_cast<const char*>(view.data) + first * bytes,
                  static_cast<size_t>((std::abs(span) + 1) * bytes));
  }
}

inline void reads_arguments(Buffers& buffers, const DivergenceArgs& args) {
  const auto rows = [&](const char* name, const auto& view) {
    reads_rows(buffers, name, view.data, view.outer_stride, view.inner_stride, args,
               sizeof(*view.data));
  };
  rows("token_mask", args.token_mask);
  rows("tokens", args.tokens);
  rows("rollout_temperature", args.rollout_temperature);
  rows("train_temperature", args.train_temperature);
  reads_logits(buffers, "rollout_logits", args.rollout, args);
  reads_logits(buffers, "train_logits", args.train, args);
}

inline void writes_outputs(Buffers& buffers, const DivergenceArgs& args,
                           const DivergenceOutputs& out) {
  const int64_t bytes = out.wide ? 8 : 4;
  const auto writes = [&](const char* name, void* data, int64_t count, int64_t size) {
    if (data != nullptr) buffers.writes(name, data, static_cast<size_t>(args.rows * count * size));
  };
  writes("values", out.values, count_bits(args.outputs & kValueOutputs), bytes);
  writes("diagnostics", out.diagnostics, count_bits(args.outputs & kDiagnosticOutputs), bytes);
  writes("statistics", out.statistics, kStatistics, 8);
  writes("state", out.state, kStateColumns, bytes);
}

inline void backward_buffers(Buffers& buffers, const DivergenceBackwardArgs& args) {
  const DivergenceArgs& forward = args.forward;
  reads_arguments(buffers, forward);
  const int64_t bytes = args.wide ? 8 : 4;
  for (int64_t slot = 0; slot < count_bits(forward.outputs & kValueOutputs); ++slot) {
    reads_rows(
        buffers, "grad_values",
        static_cast<const char*>(args.upstream.data) + slot * args.upstream_output_stride * bytes,
        args.upstream.outer_stride, args.upstream.inner_stride, forward, bytes);
  }
  buffers.reads("statistics", args.statistics, static_cast<size_t>(forward.rows * kStatistics * 8));
  const int64_t elements = forward.rows * args.columns;
  buffers.writes("grad_rollout", args.grad_rollout,
                 static_cast<size_t>(elements * element_size(forward.rollout.type)));
  buffers.writes("grad_train", args.grad_train,
                 static_cast<size_t>(elements * element_size(forward.train.type)));
}

inline void reads_sequences(Buffers& buffers, const SequenceArgs& args) {
  const auto tokens = static_cast<size_t>(args.tokens);
  const auto sequences = static_cast<size_t>(args.sequences);
  buffers.reads("values", args.values, tokens * (args.wide ? 8 : 4));
  buffers.reads("positions", args.positions, tokens * 8);
  buffers.reads("token_mask", args.token_mask, tokens);
  buffers.reads("offsets", args.offsets, (sequences + 1) * 8);
  buffers.reads("order", args.order, tokens * 8);
}

inline void sequence_buffers(Buffers& buffers, const SequenceArgs& args,
                             const SequenceOutputs& out) {
  const auto sequences = static_cast<size_t>(args.sequences);
  reads_sequences(buffers, args);
  buffers.writes("max", out.max, sequences * (args.wide ? 8 : 4));
  buffers.writes("position", out.position, sequences * 8);
  buffers.writes("sum", out.sum, sequences * 8);
  buffers.writes("count", out.count, sequences * 8);
  buffers.writes("infinite", out.infinite, sequences * 8);
}

inline void verdict_buffers(Buffers& buffers, const SequenceArgs& args, const VerdictOutputs& out) {
  const auto sequences = static_cast<size_t>(args.sequences);
  const size_t bytes = args.wide ? 8 : 4;
  reads_sequences(buffers, args);
  buffers.writes("keep", out.keep, sequences);
  buffers.writes("reason", out.reason, sequences * 8);
  buffers.writes("position", out.position, sequences * 8);
  buffers.writes("max", out.max, sequences * bytes);
  buffers.writes("mean", out.mean, sequences * bytes);
  buffers.writes("sum", out.sum, sequences * bytes);
  buffers.writes("statistic", out.statistic, sequences * 8);
  buffers.writes("failed", out.failed, sequences);
  buffers.writes("token_keep", out.token_keep, static_cast<size_t>(args.tokens));
}

}  // namespace trm::emu
