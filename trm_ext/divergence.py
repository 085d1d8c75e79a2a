# SPDX-License-Identifier: Apache-2.0
"""Stage 1: exact per-token divergences between two policies, from their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trm_ext import _checks, _ops
from trm_ext.outputs import OUTPUTS, TOKEN_OUTPUTS, decode, encode

__all__ = ["TokenDivergence", "token_divergence"]

_ = _ops  # registers the ops


class TokenDivergence(NamedTuple):
    """Per-token quantities in nats, each shaped like the tokens; None where not requested.

    Attributes:
        kl: KL(rollout||train), >= 0; +inf on a support violation, NaN without evidence.
        kl_train_rollout: KL(train||rollout), >= 0.
        entropy_rollout: entropy of the rollout policy, >= 0.
        entropy_train: entropy of the train policy, >= 0.
        logp_rollout: log-probability of the sampled token under the rollout policy, <= 0.
        logp_train: the same under the train policy.
        log_ratio: logp_train - logp_rollout, without the cancellation of that subtraction.
        tv: total variation, 1/2 Σ |p - q|, in [0, 1]. This and the following have no gradient.
        chi2: Σ_{p>0} q²/p - 1: taken on the rollout's support, so a truncated rollout can make it
            negative; see outside_mass.
        bhattacharyya: 1 - Σ sqrt(p q), in [0, 1] (the squared Hellinger distance).
        max_log_ratio: max over p > 0 of log(q/p).
        outside_mass: Σ q where p = 0: train probability outside the rollout's support.
    """

    kl: Tensor | None = None
    kl_train_rollout: Tensor | None = None
    entropy_rollout: Tensor | None = None
    entropy_train: Tensor | None = None
    logp_rollout: Tensor | None = None
    logp_train: Tensor | None = None
    log_ratio: Tensor | None = None
    tv: Tensor | None = None
    chi2: Tensor | None = None
    bhattacharyya: Tensor | None = None
    max_log_ratio: Tensor | None = None
    outside_mass: Tensor | None = None


def token_divergence(
    rollout_logits: Tensor,
    train_logits: Tensor,
    *,
    tokens: Tensor | None = None,
    token_mask: Tensor | None = None,
    outputs: Sequence[str] = ("kl",),
    rollout_temperature: float | Tensor = 1.0,
    train_temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
) -> TokenDivergence:
    """Exact vocabulary-level divergence of every token, in one sweep over both logits.

    ``kl = Σ_v p_v log(p_v / q_v)`` with p = softmax(rollout_logits / rollout_temperature) and
    q = softmax(train_logits / train_temperature).
    Conventions: 0 log 0 = 0; a column that is -inf on both sides does not exist; a column with
    rollout > -inf and train = -inf makes kl +inf, judged by the logits and not by a probability
    that underflowed; a NaN or +inf logit, or no finite logit on a side, makes the row NaN; rows
    outside ``token_mask`` are 0 and their logits are never read.

    Row t is the distribution that produced ``tokens[t]``: the caller shifts, or asks
    ``SequenceLayout.shift``.

    Args:
        rollout_logits: ``[..., V]`` float32, bfloat16, float16 or float64, any strides. Log-probs
            are logits too: a constant added to a row changes nothing.
        train_logits: ``[..., V]``, same shape and device; its dtype may differ.
        tokens: ``[...]`` int64 sampled token ids, for logp_rollout, logp_train and log_ratio. An id
            outside the vocabulary makes these NaN.
        token_mask: ``[...]`` bool, True at tokens that count; None counts all.
        outputs: names of the fields to compute; the others cost nothing. ``tv`` to
            ``outside_mass`` take a second sweep while the row is in cache.
        rollout_temperature: > 0, a number or ``[...]`` per row.
        train_temperature: > 0, likewise. A tensor's entry that is not finite
                and > 0 makes its row NaN.
        vocab_size: number of real columns where the logits are padded; the padding is never read.

    Returns:
        A :class:`TokenDivergence`; requested fields are ``[...]`` in nats, float32 (float64 when an
        input is float64); the first seven are differentiable with respect to both logits, asking
        for a gradient of the others raises. The gradient has the dtype of
        its logits and is 0 for rows whose upstream gradient is 0, whatever these hold. On a support
        violation the gradient of kl in train_logits is its finite form q - p.

    Raises:
        TypeError: logits that are not floating point, a mask that is not bool, tokens not int64.
        ValueError: shapes or devices that differ, unknown outputs, token outputs without tokens,
            a temperature that is not > 0.

    Numerics:
        Relative error of kl <= 1e-5 down to kl = 1e-9 for float32 logits; never negative; exactly 0
        for equal rows. Deterministic, and independent of the number of rows and threads. On CPUs
        log_ratio is within 1e-7, or 1e-6 of itself: for it, and for entropies, rows whose sides are
        far apart take another sweep, in float64. Finite masks are logits like others: where the
        train side alone has them, kl is their share of the rollout times their depth. In float32
        arithmetic the lowest number over a temperature below 1 stays the lowest number, and
        gradients bound log-ratios at 1e30.

    Source:
        Trust Region Masking, arXiv 2512.23075: KL(rollout||train) is its token divergence.

    >>> rollout = torch.tensor([[0.0, 0.0]])
    >>> train = torch.tensor([[0.0, 1.0]])
    >>> token_divergence(rollout, train).kl
    tensor([0.1201])
    """
    _checks.check_logits(rollout_logits, train_logits)
    _checks.check_rows("token_mask", token_mask, rollout_logits, torch.bool)
    _checks.check_rows("tokens", tokens, rollout_logits, torch.int64)
    vocab_size = _checks.check_vocab_size(vocab_size, rollout_logits.shape[-1])
    bits = encode(outputs)
    names = decode(bits)
    if tokens is None and (missing := [name for name in names if name in TOKEN_OUTPUTS]):
        raise ValueError(f"output {missing[0]!r} needs tokens")
    lead = rollout_logits.shape[:-1]
    temperatures = (
        _checks.row_temperature("rollout_temperature", rollout_temperature, rollout_logits),
        _checks.row_temperature("train_temperature", train_temperature, rollout_logits),
    )
    values, diagnostics, _statistics = torch.ops.trm.token_divergence(
        _rows(rollout_logits, 1),
        _rows(train_logits, 1),
        *(None if rows is None else _rows(rows, 0) for rows in (tokens, token_mask, *temperatures)),
        vocab_size,
        bits,
    )
    found = [
        row
        for part in (values, diagnostics)
        for row in part.reshape(part.shape[0], *lead).unbind(0)
    ]
    fields = dict(zip(names, found, strict=True))
    return TokenDivergence(**{name: fields.get(name) for name in OUTPUTS})


def _rows(tensor: Tensor, trailing: int) -> Tensor:
    """The tensor with one or two lead dimensions, as the ops take it: a view where one exists."""
    lead = tensor.dim() - trailing
    if lead == 0:
        return tensor.unsqueeze(0)
    return tensor.flatten(0, lead - 2) if lead > 2 else tensor
