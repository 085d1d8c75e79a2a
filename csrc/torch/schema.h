// SPDX-License-Identifier: Apache-2.0
// Schemas of every op. Logits are [N, V] or [A, B, V] of any strides ("lead" below is [N] or
// [A, B]); `outputs` has one bit per trm::Output. Python holds the fakes and the autograd half.
#pragma once

namespace trm {

constexpr const char* kSchemas[] = {
    // -> values [value outputs set, *lead], diagnostics [diagnostic outputs set, *lead], statistics
    // [*lead, 8] in float64: M, log S, c, residual, then kl, kl_train_rollout, entropy_rollout,
    // entropy_train (NaN where not carried)
    "token_divergence(Tensor rollout_logits, Tensor train_logits, Tensor? tokens, "
    "Tensor? token_mask, Tensor? rollout_temperature, Tensor? train_temperature, int vocab_size, "
    "int outputs) -> (Tensor, Tensor, Tensor)",

    // -> gradients of the logits; an empty tensor where one is not wanted
    "token_divergence_backward(Tensor grad_values, Tensor rollout_logits, Tensor train_logits, "
    "Tensor statistics, Tensor? tokens, Tensor? token_mask, Tensor? rollout_temperature, "
    "Tensor? train_temperature, int vocab_start, int vocab_size, int outputs, bool want_rollout, "
    "bool want_train) -> (Tensor, Tensor)",

    // -> state [*lead, kStateColumns] of a shard of the vocabulary
    "divergence_state(Tensor rollout_shard, Tensor train_shard, Tensor? tokens, "
    "Tensor? token_mask, Tensor? rollout_temperature, Tensor? train_temperature, "
    "int vocab_start, int vocab_size, int outputs) -> Tensor",

    // [parts, *lead, kStateColumns] -> [*lead, kStateColumns]
    "divergence_state_merge(Tensor states) -> Tensor",

    // state of a whole row -> values and statistics, as token_divergence returns them
    "divergence_finish(Tensor state, int outputs) -> (Tensor, Tensor)",

    // per-token values [N] -> per sequence [B]: max (NaN wins), its position (-1 where no token
    // counts), sum in float64, count, position of the first infinity (-1 where there is none).
    // Tokens of sequence b are order[offsets[b]:offsets[b + 1]].
    "sequence_reduce(Tensor values, Tensor positions, Tensor token_mask, Tensor offsets, "
    "Tensor? order) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",

    // the same, every token in one sequence -> what criterion (trm::Criterion) <= limit says of
    // sequences [B]: keep, reason (a code of trm::Reason, or the given one where it fails),
    // position, max, mean, sum, statistic in float64, failed; and token_keep [N]
    "sequence_verdict(Tensor values, Tensor positions, Tensor token_mask, Tensor offsets, "
    "Tensor? order, int criterion, float limit, int reason) -> (Tensor, Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor, Tensor)",
};

}  // namespace trm
