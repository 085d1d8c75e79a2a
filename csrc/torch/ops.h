// SPDX-License-Identifier: Apache-2.0
// Every op, written once over a Backend: checks, sizes, allocation, then raw pointers. Python has
// already said what is wrong with a user's input in a sentence of its own; the checks here only
// keep a direct caller of torch.ops.trm from reading out of bounds.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "torch/stable_abi.h"
#include "trm/divergence_args.h"
#include "trm/divergence_state.h"
#include "trm/sequence_reduce.h"

namespace trm::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline StorageType storage_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return StorageType::kFloat32;
    case ScalarType::BFloat16:
      return StorageType::kBFloat16;
    case ScalarType::Half:
      return StorageType::kFloat16;
    case ScalarType::Double:
      return StorageType::kFloat64;
    default:
      STD_TORCH_CHECK(false, "trm: logits must be float32, bfloat16, float16 or float64");
  }
}

inline std::vector<int64_t> lead_sizes(const Tensor& logits) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d + 1 < logits.dim(); ++d) sizes.push_back(logits.size(d));
  return sizes;
}

inline Tensor empty_on(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  return torch::stable::new_empty(like, sizes, type);
}

// Strides of the lead dimensions, seen as [outer, inner].
template <typename T>
RowView<T> row_view(const Tensor& tensor, T* data, int64_t first, int64_t lead) {
  RowView<T> view;
  view.data = data;
  if (lead == 2) view.outer_stride = tensor.stride(first);
  if (lead >= 1) view.inner_stride = tensor.stride(first + lead - 1);
  return view;
}

inline LogitsView logits_view(const Tensor& logits) {
  LogitsView view;
  view.data = logits.const_data_ptr();
  view.type = storage_type(logits);
  if (logits.dim() == 3) view.outer_stride = logits.stride(0);
  view.inner_stride = logits.stride(logits.dim() - 2);
  view.column_stride = logits.stride(logits.dim() - 1);
  return view;
}

inline int64_t product(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

inline void check_outputs(int64_t outputs) {
  STD_TORCH_CHECK(outputs >= 0 && outputs < (int64_t{1} << kOutputs), "trm: unknown output bits ",
                  outputs);
}

inline int64_t count_outputs(int64_t outputs, uint32_t kind) {
  return __builtin_popcount(static_cast<uint32_t>(outputs) & kind);
}

template <typename T>
RowView<const T> optional_rows(const std::optional<Tensor>& tensor,
                               const std::vector<int64_t>& lead, ScalarType type,
                               const char* name) {
  if (!tensor.has_value()) return {};
  STD_TORCH_CHECK(tensor->scalar_type() == type, "trm: wrong dtype of ", name);
  STD_TORCH_CHECK(tensor->dim() == static_cast<int64_t>(lead.size()), "trm: wrong shape of ", name);
  for (size_t d = 0; d < lead.size(); ++d) {
    STD_TORCH_CHECK(tensor->size(static_cast<int64_t>(d)) == lead[d], "trm: wrong shape of ", name);
  }
  return row_view(*tensor, static_cast<const T*>(tensor->const_data_ptr()), 0,
                  static_cast<int64_t>(lead.size()));
}

// The optional per-row inputs that every op over logits takes, in schema order.
struct RowInputs {
  const std::optional<Tensor>& tokens;
  const std::optional<Tensor>& token_mask;
  const std::optional<Tensor>& rollout_temperature;
  const std::optional<Tensor>& train_temperature;
};

struct Call {
  DivergenceArgs args;
  std::vector<int64_t> lead;
  bool wide;
  ScalarType value_type;
};

inline Call describe(const Tensor& rollout, const Tensor& train, const RowInputs& rows,
                     int64_t vocab_start, int64_t vocab_size, int64_t outputs) {
  STD_TORCH_CHECK(rollout.dim() == 2 || rollout.dim() == 3,
                  "trm: logits must be [N, V] or [A, B, V]");
  STD_TORCH_CHECK(train.dim() == rollout.dim(), "trm: logits differ in shape");
  for (int64_t d = 0; d < rollout.dim(); ++d) {
    STD_TORCH_CHECK(train.size(d) == rollout.size(d), "trm: logits differ in shape");
  }
  const int64_t columns = rollout.size(rollout.dim() - 1);
  STD_TORCH_CHECK(vocab_size >= 0 && vocab_size <= columns, "trm: vocab_size ", vocab_size,
                  " exceeds the logits' ", columns, " columns");
  check_outputs(outputs);
  Call call;
  call.lead = lead_sizes(rollout);
  call.args.rollout = logits_view(rollout);
  call.args.train = logits_view(train);
  call.args.token_mask =
      optional_rows<bool>(rows.token_mask, call.lead, ScalarType::Bool, "token_mask");
  call.args.tokens = optional_rows<int64_t>(rows.tokens, call.lead, ScalarType::Long, "tokens");
  call.args.rollout_temperature = optional_rows<double>(rows.rollout_temperature, call.lead,
                                                        ScalarType::Double, "rollout_temperature");
  call.args.train_temperature = optional_rows<double>(rows.train_temperature, call.lead,
                                                      ScalarType::Double, "train_temperature");
  call.args.rows = product(call.lead);
  call.args.inner = call.lead.back() > 0 ? call.lead.back() : 1;
  call.args.vocab = vocab_size;
  call.args.vocab_start = vocab_start;
  call.args.outputs = static_cast<uint32_t>(outputs);
  call.wide = call.args.rollout.type == StorageType::kFloat64 ||
              call.args.train.type == StorageType::kFloat64;
  call.value_type = call.wide ? ScalarType::Double : ScalarType::Float;
  return call;
}

inline std::vector<int64_t> with_front(int64_t front, std::vector<int64_t> sizes) {
  sizes.insert(sizes.begin(), front);
  return sizes;
}

inline std::vector<int64_t> with_back(std::vector<int64_t> sizes, int64_t back) {
  sizes.push_back(back);
  return sizes;
}

// Memory that the backend's kernels need besides the outputs; from torch's allocator, so that it
// may be freed as soon as the call returns.
template <typename Backend>
Tensor workspace_for(const Tensor& logits, const DivergenceArgs& args, DivergenceOutputs& out) {
  const int64_t words = Backend::workspace_bytes(logits, args) / 8;
  Tensor workspace = empty_on(logits, {words}, ScalarType::Double);
  if (words > 0) out.workspace = static_cast<double*>(workspace.mutable_data_ptr());
  return workspace;
}

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> token_divergence(
    const Tensor& rollout_logits, const Tensor& train_logits, const std::optional<Tensor>& tokens,
    const std::optional<Tensor>& token_mask, const std::optional<Tensor>& rollout_temperature,
    const std::optional<Tensor>& train_temperature, int64_t vocab_size, int64_t outputs) {
  const Call call = describe(rollout_logits, train_logits,
                             {tokens, token_mask, rollout_temperature, train_temperature}, 0,
                             vocab_size, outputs);
  Tensor values =
      empty_on(rollout_logits, with_front(count_outputs(outputs, kValueOutputs), call.lead),
               call.value_type);
  Tensor diagnostics =
      empty_on(rollout_logits, with_front(count_outputs(outputs, kDiagnosticOutputs), call.lead),
               call.value_type);
  Tensor statistics =
      empty_on(rollout_logits, with_back(call.lead, kStatistics), ScalarType::Double);
  DivergenceOutputs out;
  out.values = values.mutable_data_ptr();
  out.diagnostics = diagnostics.mutable_data_ptr();
  out.statistics = static_cast<double*>(statistics.mutable_data_ptr());
  out.wide = call.wide;
  const Tensor workspace = workspace_for<Backend>(rollout_logits, call.args, out);
  Backend::forward(rollout_logits, call.args, out);
  return {values, diagnostics, statistics};
}

template <typename Backend>
Tensor divergence_state(const Tensor& rollout_shard, const Tensor& train_shard,
                        const std::optional<Tensor>& tokens,
                        const std::optional<Tensor>& token_mask,
                        const std::optional<Tensor>& rollout_temperature,
                        const std::optional<Tensor>& train_temperature, int64_t vocab_start,
                        int64_t vocab_size, int64_t outputs) {
  const Call call = describe(rollout_shard, train_shard,
                             {tokens, token_mask, rollout_temperature, train_temperature},
                             vocab_start, vocab_size, outputs);
  Tensor state = empty_on(rollout_shard, with_back(call.lead, kStateColumns), call.value_type);
  DivergenceOutputs out;
  out.state = state.mutable_data_ptr();
  out.wide = call.wide;
  const Tensor workspace = workspace_for<Backend>(rollout_shard, call.args, out);
  Backend::forward(rollout_shard, call.args, out);
  return state;
}

template <typename Backend>
std::tuple<Tensor, Tensor> token_divergence_backward(
    const Tensor& grad_values, const Tensor& rollout_logits, const Tensor& train_logits,
    const Tensor& statistics, const std::optional<Tensor>& tokens,
    const std::optional<Tensor>& token_mask, const std::optional<Tensor>& rollout_temperature,
    const std::optional<Tensor>& train_temperature, int64_t vocab_start, int64_t vocab_size,
    int64_t outputs, bool want_rollout, bool want_train) {
  const Call call = describe(rollout_logits, train_logits,
                             {tokens, token_mask, rollout_temperature, train_temperature},
                             vocab_start, vocab_size, outputs);
  const int64_t requested = count_outputs(outputs, kValueOutputs);
  const int64_t lead = static_cast<int64_t>(call.lead.size());
  const bool wide = grad_values.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(wide || grad_values.scalar_type() == ScalarType::Float,
                  "trm: wrong dtype of grad_values");
  STD_TORCH_CHECK(wide || !call.wide, "trm: fp64 logits need fp64 grad_values");
  STD_TORCH_CHECK(grad_values.dim() == lead + 1 && grad_values.size(0) == requested,
                  "trm: grad_values do not match the requested outputs");
  for (int64_t d = 0; d < lead; ++d) {
    STD_TORCH_CHECK(grad_values.size(d + 1) == call.lead[d],
                    "trm: grad_values do not match the logits");
  }
  STD_TORCH_CHECK(statistics.is_contiguous() && statistics.scalar_type() == ScalarType::Double &&
                      statistics.numel() == call.args.rows * kStatistics,
                  "trm: statistics must be contiguous float64 [*lead, 8]");
  const int64_t columns = rollout_logits.size(rollout_logits.dim() - 1);
  const std::vector<int64_t> full = with_back(call.lead, columns);
  const std::vector<int64_t> none = {0};
  Tensor grad_rollout =
      empty_on(rollout_logits, want_rollout ? full : none, rollout_logits.scalar_type());
  Tensor grad_train = empty_on(train_logits, want_train ? full : none, train_logits.scalar_type());
  DivergenceBackwardArgs args;
  args.forward = call.args;
  args.upstream = row_view<const void>(grad_values, grad_values.const_data_ptr(), 1, lead);
  args.upstream_output_stride = grad_values.stride(0);
  args.statistics = static_cast<const double*>(statistics.const_data_ptr());
  args.wide = wide;
  args.grad_rollout = want_rollout ? grad_rollout.mutable_data_ptr() : nullptr;
  args.grad_train = want_train ? grad_train.mutable_data_ptr() : nullptr;
  args.columns = columns;
  if (want_rollout || want_train) Backend::backward(rollout_logits, args);
  return {grad_rollout, grad_train};
}

inline bool is_wide_state(const Tensor& state) {
  STD_TORCH_CHECK(state.dim() >= 1 && state.size(state.dim() - 1) == kStateColumns,
                  "trm: a state has ", static_cast<int64_t>(kStateColumns), " columns");
  STD_TORCH_CHECK(state.is_contiguous(), "trm: states must be contiguous");
  const bool wide = state.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(wide || state.scalar_type() == ScalarType::Float, "trm: wrong dtype of a state");
  return wide;
}

template <typename Backend>
Tensor divergence_state_merge(const Tensor& states) {
  const bool wide = is_wide_state(states);
  STD_TORCH_CHECK(states.dim() >= 2 && states.size(0) >= 1,
                  "trm: states are [parts, ..., columns]");
  std::vector<int64_t> sizes;
  for (int64_t d = 1; d < states.dim(); ++d) sizes.push_back(states.size(d));
  Tensor merged = empty_on(states, sizes, states.scalar_type());
  Backend::merge(states, states.const_data_ptr(), merged.mutable_data_ptr(), wide, states.size(0),
                 product(sizes) / kStateColumns);
  return merged;
}

template <typename Backend>
std::tuple<Tensor, Tensor> divergence_finish(const Tensor& state, int64_t outputs) {
  const bool wide = is_wide_state(state);
  const std::vector<int64_t> lead = lead_sizes(state);
  check_outputs(outputs);
  Tensor values =
      empty_on(state, with_front(count_outputs(outputs, kValueOutputs), lead), state.scalar_type());
  Tensor statistics = empty_on(state, with_back(lead, kStatistics), ScalarType::Double);
  Backend::finish(state, state.const_data_ptr(), wide, static_cast<uint32_t>(outputs),
                  values.mutable_data_ptr(), static_cast<double*>(statistics.mutable_data_ptr()),
                  product(lead));
  return {values, statistics};
}

inline const void* contiguous_data(const Tensor& tensor, ScalarType type, int64_t count,
                                   const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == type && tensor.dim() == 1 && tensor.is_contiguous() &&
                      (count < 0 || tensor.size(0) == count),
                  "trm: wrong dtype, shape or strides of ", name);
  return tensor.const_data_ptr();
}

inline ScalarType value_type(const SequenceArgs& args) {
  return args.wide ? ScalarType::Double : ScalarType::Float;
}

inline SequenceArgs describe_sequences(const Tensor& values, const Tensor& positions,
                                       const Tensor& token_mask, const Tensor& offsets,
                                       const std::optional<Tensor>& order) {
  SequenceArgs args;
  args.wide = values.scalar_type() == ScalarType::Double;
  args.values = contiguous_data(values, value_type(args), -1, "values");
  args.tokens = values.size(0);
  args.positions = static_cast<const int64_t*>(
      contiguous_data(positions, ScalarType::Long, args.tokens, "positions"));
  args.token_mask = static_cast<const bool*>(
      contiguous_data(token_mask, ScalarType::Bool, args.tokens, "token_mask"));
  args.offsets =
      static_cast<const int64_t*>(contiguous_data(offsets, ScalarType::Long, -1, "offsets"));
  STD_TORCH_CHECK(offsets.size(0) >= 1, "trm: offsets is [B + 1]");
  args.sequences = offsets.size(0) - 1;
  if (order.has_value()) {
    args.order = static_cast<const int64_t*>(
        contiguous_data(*order, ScalarType::Long, args.tokens, "order"));
  }
  return args;
}

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sequence_reduce(
    const Tensor& values, const Tensor& positions, const Tensor& token_mask, const Tensor& offsets,
    const std::optional<Tensor>& order) {
  const SequenceArgs args = describe_sequences(values, positions, token_mask, offsets, order);
  const std::vector<int64_t> sizes = {args.sequences};
  Tensor max = empty_on(values, sizes, value_type(args));
  Tensor position = empty_on(values, sizes, ScalarType::Long);
  Tensor sum = empty_on(values, sizes, ScalarType::Double);
  Tensor count = empty_on(values, sizes, ScalarType::Long);
  Tensor infinite = empty_on(values, sizes, ScalarType::Long);
  SequenceOutputs out;
  out.max = max.mutable_data_ptr();
  out.position = static_cast<int64_t*>(position.mutable_data_ptr());
  out.sum = static_cast<double*>(sum.mutable_data_ptr());
  out.count = static_cast<int64_t*>(count.mutable_data_ptr());
  out.infinite = static_cast<int64_t*>(infinite.mutable_data_ptr());
  Backend::reduce(values, args, out);
  return {max, position, sum, count, infinite};
}

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> sequence_verdict(
    const Tensor& values, const Tensor& positions, const Tensor& token_mask, const Tensor& offsets,
    const std::optional<Tensor>& order, int64_t criterion, double limit, int64_t reason) {
  const SequenceArgs args = describe_sequences(values, positions, token_mask, offsets, order);
  STD_TORCH_CHECK(criterion >= 0 && criterion < kCriteria, "trm: unknown criterion ", criterion);
  const std::vector<int64_t> sizes = {args.sequences};
  Tensor keep = empty_on(values, sizes, ScalarType::Bool);
  Tensor code = empty_on(values, sizes, ScalarType::Long);
  Tensor position = empty_on(values, sizes, ScalarType::Long);
  Tensor max = empty_on(values, sizes, value_type(args));
  Tensor mean = empty_on(values, sizes, value_type(args));
  Tensor sum = empty_on(values, sizes, value_type(args));
  Tensor statistic = empty_on(values, sizes, ScalarType::Double);
  Tensor failed = empty_on(values, sizes, ScalarType::Bool);
  Tensor token_keep = empty_on(values, {args.tokens}, ScalarType::Bool);
  VerdictOutputs out;
  out.keep = static_cast<bool*>(keep.mutable_data_ptr());
  out.reason = static_cast<int64_t*>(code.mutable_data_ptr());
  out.position = static_cast<int64_t*>(position.mutable_data_ptr());
  out.max = max.mutable_data_ptr();
  out.mean = mean.mutable_data_ptr();
  out.sum = sum.mutable_data_ptr();
  out.statistic = static_cast<double*>(statistic.mutable_data_ptr());
  out.failed = static_cast<bool*>(failed.mutable_data_ptr());
  out.token_keep = static_cast<bool*>(token_keep.mutable_data_ptr());
  Backend::judge(values, args, {criterion, limit, reason}, out);
  return {keep, code, position, max, mean, sum, statistic, failed, token_keep};
}

template <typename Backend, typename Library>
void register_ops(Library& library) {
  library.impl("token_divergence", TORCH_BOX(&token_divergence<Backend>));
  library.impl("token_divergence_backward", TORCH_BOX(&token_divergence_backward<Backend>));
  library.impl("divergence_state", TORCH_BOX(&divergence_state<Backend>));
  library.impl("divergence_state_merge", TORCH_BOX(&divergence_state_merge<Backend>));
  library.impl("divergence_finish", TORCH_BOX(&divergence_finish<Backend>));
  library.impl("sequence_reduce", TORCH_BOX(&sequence_reduce<Backend>));
  library.impl("sequence_verdict", TORCH_BOX(&sequence_verdict<Backend>));
}

}  // namespace trm::binding
