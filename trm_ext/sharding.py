# SPDX-License-Identifier: Apache-2.0
"""The pair state in public: rows whose vocabulary is split over ranks or tiles.

A state is ``[N, 14]`` (float32, or float64 when an input is), layout version 1; its columns are
described in ``docs/divergence_state.md``. Per token a tensor-parallel rank sends these few numbers,
once, instead of reducing over the vocabulary three times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trm_ext import _checks, _ops
from trm_ext._ops.divergence_state import STATE_COLUMNS
from trm_ext._ops.token_divergence import STATISTICS, value_dtype
from trm_ext.divergence import TokenDivergence
from trm_ext.outputs import DIAGNOSTICS, VALUES, decode, encode

__all__ = [
    "STATE_COLUMNS",
    "STATE_VERSION",
    "divergence_finish",
    "divergence_state",
    "divergence_state_merge",
    "shard_gradient",
]

STATE_VERSION = 1
_ = _ops  # registers the ops


def _encode_values(outputs: Sequence[str]) -> int:
    names = (outputs,) if isinstance(outputs, str) else outputs
    if second := [name for name in names if name in DIAGNOSTICS]:
        raise ValueError(
            f"output {second[0]!r} needs a second sweep over the finished row, not a state; "
            f"choose from {', '.join(VALUES)}"
        )
    return encode(names)


def divergence_state(
    rollout_shard: Tensor,
    train_shard: Tensor,
    *,
    tokens: Tensor | None = None,
    token_mask: Tensor | None = None,
    rollout_temperature: float | Tensor = 1.0,
    train_temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    outputs: Sequence[str] = ("kl",),
) -> Tensor:
    """State of a shard of the vocabulary: everything a divergence needs to know about it.

    The frame is (M, c) = (largest rollout logit, that minus the largest train logit); the sums are
    those of ``csrc/include/trm/divergence_state.h``. An empty or all-padding shard is legal.

    Args:
        rollout_shard: ``[N, V_shard]``, columns vocab_start .. vocab_start + V_shard - 1.
        train_shard: ``[N, V_shard]``.
        tokens: ``[N]`` int64 ids in the whole vocabulary; kept where they fall into this shard.
        token_mask: ``[N]`` bool; rows outside are empty states and are not read.
        rollout_temperature: > 0, a number or ``[N]``.
        train_temperature: > 0, a number or ``[N]``.
        vocab_start: id of the shard's first column, >= 0.
        vocab_size: number of real columns of this shard, 0 for padding only; None means all.
        outputs: what the state must be able to yield when it is finished.

    Returns:
        ``[N, 14]`` float32, or float64 when an input is float64. Not differentiable: see
        :func:`shard_gradient`.

    Raises:
        TypeError: logits that are not floating point, a mask that is not bool, tokens not int64.
        ValueError: shapes or devices that differ, vocab_start < 0, vocab_size beyond the shard.

    Source:
        Merge rule: chain rule of KL; ours, ``docs/divergence_state.md``.

    >>> left = divergence_state(torch.zeros(1, 2), torch.zeros(1, 2))
    >>> right = divergence_state(torch.zeros(1, 1), torch.ones(1, 1), vocab_start=2)
    >>> whole = divergence_state_merge(torch.stack([left, right]))
    >>> divergence_finish(whole)[0].kl
    tensor([0.1195])
    """
    _checks.check_logits(rollout_shard, train_shard)
    if rollout_shard.dim() != 2:
        raise ValueError(f"shards must be [N, V_shard], got {_checks.shape_text(rollout_shard)}")
    _checks.check_rows("token_mask", token_mask, rollout_shard, torch.bool)
    _checks.check_rows("tokens", tokens, rollout_shard, torch.int64)
    columns = rollout_shard.shape[-1]
    if vocab_start < 0:
        raise ValueError(f"vocab_start must be >= 0, got {vocab_start}")
    if vocab_size is not None and not 0 <= vocab_size <= columns:
        raise ValueError(f"vocab_size must be in 0..{columns} for this shard, got {vocab_size}")
    state: Tensor = torch.ops.trm.divergence_state(
        rollout_shard.detach(),
        train_shard.detach(),
        tokens,
        token_mask,
        _checks.row_temperature("rollout_temperature", rollout_temperature, rollout_shard),
        _checks.row_temperature("train_temperature", train_temperature, rollout_shard),
        vocab_start,
        columns if vocab_size is None else vocab_size,
        _encode_values(outputs),
    )
    return state


def divergence_state_merge(states: Tensor) -> Tensor:
    """Merges the states of disjoint shards, in order of the first dimension.

    Both states move to the frame of the larger maxima and add; in exact arithmetic the result does
    not depend on the split. float64 inside, a fixed order, so every rank gets the same bits.

    Args:
        states: ``[R, N, 14]`` float32 or float64, R >= 1.

    Returns:
        ``[N, 14]``, same dtype.

    Raises:
        ValueError: a shape other than ``[R >= 1, N, 14]``.

    Numerics:
        Relative error of the finished kl <= 2e-6 against the unsplit row.

    >>> state = divergence_state(torch.zeros(1, 2), torch.zeros(1, 2))
    >>> divergence_state_merge(state[None]).shape
    torch.Size([1, 14])
    """
    if states.dim() != 3 or states.shape[0] == 0 or states.shape[-1] != STATE_COLUMNS:
        raise ValueError(
            f"states must be [R >= 1, N, {STATE_COLUMNS}], got {_checks.shape_text(states)}"
        )
    merged: Tensor = torch.ops.trm.divergence_state_merge(states.contiguous())
    return merged


def divergence_finish(
    state: Tensor, *, outputs: Sequence[str] = ("kl",)
) -> tuple[TokenDivergence, Tensor]:
    """What a whole row's state says, and the row statistics that its gradient needs.

    ``kl = G/S - (b - log1p(b))`` with b = (sum of train mass - S)/S in the state's frame.

    Args:
        state: ``[N, 14]`` of whole rows (merged over all shards).
        outputs: fields to compute; one that the state does not carry is NaN.

    Returns:
        A :class:`TokenDivergence` with fields ``[N]``, and statistics ``[N, 8]`` float64: M, log S,
        c, residual (log p = x - M - log S, log(p/q) = (x - y) - c - residual), then kl,
        kl_train_rollout and both entropies in full precision.

    Raises:
        ValueError: a shape other than ``[N, 14]``, unknown outputs.

    >>> state = divergence_state(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
    >>> divergence_finish(state)[0].kl
    tensor([0.1201])
    """
    if state.dim() != 2 or state.shape[-1] != STATE_COLUMNS:
        raise ValueError(f"state must be [N, {STATE_COLUMNS}], got {_checks.shape_text(state)}")
    bits = _encode_values(outputs)
    values, statistics = torch.ops.trm.divergence_finish(state.contiguous(), bits)
    fields = dict(zip(decode(bits), values.unbind(0), strict=True))
    return TokenDivergence(**{name: fields.get(name) for name in VALUES}), statistics


def shard_gradient(
    gradient: TokenDivergence,
    statistics: Tensor,
    rollout_shard: Tensor,
    train_shard: Tensor,
    *,
    tokens: Tensor | None = None,
    token_mask: Tensor | None = None,
    rollout_temperature: float | Tensor = 1.0,
    train_temperature: float | Tensor = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    want_rollout: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """Gradient of a shard's logits from the finished row: the backward of a split vocabulary.

    ``dKL/dy = q - p``, formed as p expm1(-log(p/q)) where p and q are close; no communication.

    Args:
        gradient: upstream gradients ``[N]`` of the fields in use, None elsewhere.
        statistics: ``[N, 8]`` float64 of the *whole* row, from :func:`divergence_finish`.
        rollout_shard: ``[N, V_shard]``, as given to :func:`divergence_state`.
        train_shard: ``[N, V_shard]``.
        tokens: as given to :func:`divergence_state`.
        token_mask: as given to :func:`divergence_state`.
        rollout_temperature: as given to :func:`divergence_state`.
        train_temperature: as given to :func:`divergence_state`.
        vocab_start: as given to :func:`divergence_state`.
        vocab_size: as given to :func:`divergence_state`.
        want_rollout: also return the gradient of rollout_shard.

    Returns:
        The gradients of rollout_shard (None unless wanted) and of train_shard, in their dtypes.

    Raises:
        ValueError: no field has a gradient, or statistics of another shape.

    >>> x, y = torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])
    >>> _, statistics = divergence_finish(divergence_state(x, y))
    >>> shard_gradient(TokenDivergence(kl=torch.ones(1)), statistics, x, y)[1]
    tensor([[-0.2311,  0.2311]])
    """
    _checks.check_logits(rollout_shard, train_shard)
    names = [name for name in VALUES if getattr(gradient, name) is not None]
    if not names:
        raise ValueError("gradient holds no upstream gradient: every field is None")
    if statistics.shape != (rollout_shard.shape[0], STATISTICS):
        raise ValueError(
            f"statistics must be [{rollout_shard.shape[0]}, {STATISTICS}], "
            f"got {_checks.shape_text(statistics)}"
        )
    upstream = torch.stack([getattr(gradient, name) for name in names])
    grad_rollout, grad_train = torch.ops.trm.token_divergence_backward(
        upstream.to(value_dtype(rollout_shard, train_shard)),
        rollout_shard.detach(),
        train_shard.detach(),
        statistics.contiguous(),
        tokens,
        token_mask,
        _checks.row_temperature("rollout_temperature", rollout_temperature, rollout_shard),
        _checks.row_temperature("train_temperature", train_temperature, rollout_shard),
        vocab_start,
        rollout_shard.shape[-1] if vocab_size is None else vocab_size,
        encode(names),
        want_rollout,
        True,
    )
    return (grad_rollout if want_rollout else None), grad_train
