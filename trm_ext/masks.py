# SPDX-License-Identifier: Apache-2.0
"""Stage 2: from per-token divergences to a verdict per sequence."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from trm_ext import _checks
from trm_ext.divergence import token_divergence
from trm_ext.layout import SequenceLayout

__all__ = ["Reason", "SequenceVerdict", "max_kl_verdict", "trust_region_mask"]


class Reason(IntEnum):
    """Why a sequence was kept or masked.

    KEPT and EMPTY sequences stay; MAX_KL was beyond the threshold; NON_FINITE had a NaN (missing
    evidence) or +inf (support violation) at a token that counts.
    """

    KEPT = 0
    MAX_KL = 1
    NON_FINITE = 2
    EMPTY = 3


class SequenceVerdict(NamedTuple):
    """What was decided about each sequence, and from what.

    Attributes:
        keep: ``[B]`` bool, True for sequences that stay in the gradient.
        reason: ``[B]`` int64 codes of :class:`Reason`.
        position: ``[B]`` int64, the worst token as an index on its sequence's own token axis (the
            first one on ties; a non-finite token is worse than any finite one); -1 if none counts.
        max_kl: ``[B]`` nats; NaN if any counted token is NaN, 0 for an empty sequence.
        mean_kl: ``[B]`` nats over counted tokens; 0 for an empty sequence.
        sum_kl: ``[B]`` nats: the sequence's contribution to the total KL.
        token_keep: bool, shaped like the tokens: counted tokens of kept sequences.
    """

    keep: Tensor
    reason: Tensor
    position: Tensor
    max_kl: Tensor
    mean_kl: Tensor
    sum_kl: Tensor
    token_keep: Tensor


@torch.no_grad()
def max_kl_verdict(kl: Tensor, layout: SequenceLayout, *, max_kl: float) -> SequenceVerdict:
    """Verdict of the max criterion from per-token KLs that are already there.

    ``keep_b = [max_{t counted} kl_t <= max_kl]``, inclusive, with max over no token = 0 (EMPTY).
    Values at tokens that do not count are never used, whatever they are.

    Args:
        kl: per-token KL(rollout||train) in nats, shaped like the layout's tokens.
        layout: which tokens belong to which sequence, and which count.
        max_kl: threshold in nats, >= 0.

    Returns:
        A :class:`SequenceVerdict`; statistics have the dtype of ``kl``. No host synchronisation.

    Raises:
        ValueError: a negative or NaN threshold, or a shape other than the layout's.

    Numerics:
        Sums in float64, rounded once.

    Source:
        Trust Region Masking, arXiv 2512.23075, the max criterion.

    >>> layout = SequenceLayout.from_lengths([2, 1])
    >>> max_kl_verdict(torch.tensor([0.01, 0.03, 0.02]), layout, max_kl=0.02).keep
    tensor([False,  True])
    """
    threshold = _checks.check_threshold("max_kl", max_kl)
    layout.check("kl", kl)
    largest, position, total, count = torch.ops.trm.sequence_reduce(
        kl.detach().reshape(-1).contiguous(),
        layout.position.reshape(-1).contiguous(),
        layout.token_mask.reshape(-1).contiguous(),
        layout.offsets,
        layout.order,
    )
    unusable = ~torch.isfinite(largest)
    too_far = ~unusable & (largest.to(torch.float64) > threshold)
    reason = torch.full_like(count, int(Reason.KEPT))
    reason = reason.masked_fill(too_far, int(Reason.MAX_KL))
    reason = reason.masked_fill(unusable, int(Reason.NON_FINITE))
    reason = reason.masked_fill(count == 0, int(Reason.EMPTY))
    keep = ~(too_far | unusable)
    return SequenceVerdict(
        keep=keep,
        reason=reason,
        position=position,
        max_kl=largest,
        mean_kl=(total / count.clamp(min=1)).to(kl.dtype),
        sum_kl=total.to(kl.dtype),
        token_keep=layout.token_mask & keep[layout.sequence_id],
    )


def trust_region_mask(
    rollout_logits: Tensor,
    train_logits: Tensor,
    layout: SequenceLayout,
    *,
    max_kl: float,
    vocab_size: int | None = None,
) -> SequenceVerdict:
    """Masks every sequence in which the exact KL exceeds a threshold at any counted token.

    ``keep_b = [max_{t counted} KL(rollout_t || train_t) <= max_kl]``, inclusive; a NaN (missing
    evidence) or +inf (support violation) at a counted token masks its sequence.

    Row t of the logits is the distribution that produced token t: the caller shifts, or asks
    ``layout.shift``.

    Args:
        rollout_logits: ``[*tokens, V]`` of the policy that sampled.
        train_logits: ``[*tokens, V]`` of the policy that is trained; no gradient flows.
        layout: which tokens belong to which sequence, and which count; others are not even read.
        max_kl: threshold in nats, >= 0.
        vocab_size: number of real columns where the logits are padded.

    Returns:
        A :class:`SequenceVerdict`. No host synchronisation.

    Raises:
        TypeError: logits that are not floating point.
        ValueError: shapes or devices that differ, a negative or NaN threshold.

    Source:
        Trust Region Masking, arXiv 2512.23075, the max criterion with exact KL.

    >>> rollout = torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]]])
    >>> train = torch.tensor([[[0.0, 1.0]], [[0.0, 0.1]]])
    >>> layout = SequenceLayout.from_lengths([1, 1], padded_length=1)
    >>> trust_region_mask(rollout, train, layout, max_kl=0.02).keep
    tensor([False,  True])
    """
    _checks.check_threshold("max_kl", max_kl)
    _checks.check_logits(rollout_logits, train_logits)
    layout.check("logits without their vocabulary", rollout_logits[..., 0])
    with torch.no_grad():
        divergence = token_divergence(
            rollout_logits, train_logits, token_mask=layout.token_mask, vocab_size=vocab_size
        )
    assert divergence.kl is not None
    return max_kl_verdict(divergence.kl, layout, max_kl=max_kl)
