# SPDX-License-Identifier: Apache-2.0
"""Per-sequence numbers from per-token values, for every layout.

Tokens that do not count never enter, whatever they hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trm_ext._ops import sequence_verdict
from trm_ext.layout import SequenceLayout


class Reduced(NamedTuple):
    """Per sequence ``[B]``: max (NaN wins), its first position, float64 sum, counted tokens.

    ``infinite`` is the position of the first infinity, of either sign; -1 where there is none.
    """

    largest: Tensor
    position: Tensor
    total: Tensor
    tokens: Tensor
    infinite: Tensor


class Judged(NamedTuple):
    """Per sequence ``[B]``, what one limit says; ``statistic`` is float64, the tokens ``[N]``."""

    keep: Tensor
    reason: Tensor
    position: Tensor
    largest: Tensor
    mean: Tensor
    total: Tensor
    statistic: Tensor
    failed: Tensor
    token_keep: Tensor


def reduce_tokens(values: Tensor, layout: SequenceLayout) -> Reduced:
    """Statistics of float32 or float64 ``values``, without gradient."""
    return Reduced(*torch.ops.trm.sequence_reduce(*_arguments(values, layout)))


def judge(
    values: Tensor, layout: SequenceLayout, criterion: str, limit: float, reason: int
) -> Judged:
    """The max, mean or sum of ``values`` against its limit, in one launch."""
    number = sequence_verdict.CRITERIA.index(criterion)
    arguments = _arguments(values, layout)
    return Judged(*torch.ops.trm.sequence_verdict(*arguments, number, limit, reason))


def _arguments(values: Tensor, layout: SequenceLayout) -> tuple[Tensor | None, ...]:
    return (
        values.detach().reshape(-1).contiguous(),
        layout.position.reshape(-1).contiguous(),
        layout.token_mask.reshape(-1).contiguous(),
        layout.offsets,
        layout.order,
    )


def any_token(flags: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Per sequence ``[B]``: whether a counted token has its flag, and the first one's position."""
    found = reduce_tokens(flags.to(torch.float32), layout)
    return found.largest > 0, found.position


def to_tokens(per_sequence: Tensor, layout: SequenceLayout) -> Tensor:
    """``[B]`` spread over the tokens of each sequence."""
    return per_sequence[layout.sequence_id]


class _Sum(torch.autograd.Function):
    """Sum in float64 of each sequence's counted tokens, differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        position: Tensor,
        token_mask: Tensor,
        sequence_id: Tensor,
        offsets: Tensor,
        order: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(token_mask, sequence_id)
        ctx.dtype = values.dtype
        return reduce_tokens(
            values, SequenceLayout(sequence_id, position, token_mask, offsets, order)
        ).total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        token_mask, sequence_id = ctx.saved_tensors
        gradient = torch.where(token_mask, gradients[0][sequence_id], 0.0).to(ctx.dtype)
        return gradient, None, None, None, None, None


def sum_tokens(values: Tensor, layout: SequenceLayout) -> Tensor:
    """Float64 ``[B]`` sums over counted tokens, differentiable."""
    result: Tensor = _Sum.apply(  # type: ignore[no-untyped-call]
        values,
        layout.position,
        layout.token_mask,
        layout.sequence_id,
        layout.offsets,
        layout.order,
    )
    return result


def counts(layout: SequenceLayout) -> Tensor:
    """int64 ``[B]``: number of tokens that count."""
    return reduce_tokens(torch.zeros_like(layout.position, dtype=torch.float32), layout).tokens


def by_position(layout: SequenceLayout) -> Tensor:
    """int64 ``[N]``: the order of the flattened tokens by sequence, then by position."""
    ids, position = layout.sequence_id.reshape(-1), layout.position.reshape(-1)
    order = torch.argsort(position, stable=True)
    return order[torch.argsort(ids[order], stable=True)]


def in_order(layout: SequenceLayout) -> tuple[SequenceLayout, Tensor | None]:
    """The layout with each sequence's tokens side by side by position, and the order that does it.

    The order is None where they are so already: all layouts but those of segments.
    """
    if layout.order is None:
        return layout, None
    order = by_position(layout)
    ids, position, mask = (
        x.reshape(-1)[order] for x in (layout.sequence_id, layout.position, layout.token_mask)
    )
    return SequenceLayout(ids, position, mask, layout.offsets), order


def tokens_after(layout: SequenceLayout) -> Tensor:
    """int64, shaped like the tokens: number of counted tokens that follow in the same sequence.

    A piece of a sequence sees only what is in the layout.
    """
    ids, order = layout.sequence_id.reshape(-1), by_position(layout)
    passed = layout.token_mask.reshape(-1)[order].cumsum(0)
    through = counts(layout).cumsum(0)
    remaining = torch.zeros_like(passed)
    remaining[order] = through[ids[order]] - passed
    return remaining.reshape(layout.shape)


def quantile(values: Tensor, layout: SequenceLayout, level: float) -> Tensor:
    """Nearest-rank quantile ``[B]``, no interpolation; 0 for an empty sequence.

    It is the smallest value that at least a share ``level`` of the counted tokens do not exceed.
    """
    count = counts(layout)
    mask = layout.token_mask.reshape(-1)
    ids = torch.where(mask, layout.sequence_id.reshape(-1), layout.num_sequences)
    flat = torch.where(mask, values.detach().reshape(-1), 0.0)
    by_value = torch.argsort(flat, stable=True)
    order = by_value[torch.argsort(ids[by_value], stable=True)]
    ranked = torch.cat([flat[order], flat.new_zeros(1)])
    rank = nearest_rank(count, level)
    index = torch.where(count > 0, count.cumsum(0) - count + rank - 1, ranked.shape[0] - 1)
    return torch.where(count > 0, ranked[index], 0.0)


def nearest_rank(count: Tensor, level: float) -> Tensor:
    """ceil(level * count), at least 1; forgives the rounding of the product."""
    return (level * count.double() - 1e-9).ceil().to(torch.int64).clamp(min=1)
