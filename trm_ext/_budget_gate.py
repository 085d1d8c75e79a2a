# SPDX-License-Identifier: Apache-2.0
"""The budget gate of C3' on tensors of any layout, without waiting for the device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trm_ext import _sequences
from trm_ext.certification import GateConstants
from trm_ext.layout import SequenceLayout

_UNIT = 2.0**-40  # what was spent is counted in these, rounded up


class Gated(NamedTuple):
    """Per sequence ``[B]``: sum gate (min(rho, C) - 1), sum gate kl (float64), and gate closed."""

    shift: Tensor
    kl: Tensor
    hit: Tensor


def budget_gate(
    kl: Tensor, log_ratio: Tensor, layout: SequenceLayout, constants: GateConstants
) -> Gated:
    """Apply the gate and sum up, as ``theory.certify.gate(mode="budget")`` does on arrays.

    gate_t = [sum_{s<t} |rho_s - 1| <= b, sum_{s<t} kl_s <= k, kl_t <= delta], closed for ever after
    its first 0, with rho counted as min(rho, C) and a NaN ratio as 0; a NaN KL closes.

    What was spent is counted in integers of 2^-40, rounded up: sums of integers are exact, so a
    gate depends on its own sequence's prefix alone, bit by bit, in every layout; rounding up keeps
    the ranges |sum gate (rho - 1)| <= b + max(1, C - 1) and sum gate kl <= k + delta.
    """
    ordered, order = _sequences.in_order(layout)
    ids, counts = ordered.sequence_id.reshape(-1), ordered.token_mask.reshape(-1)
    divergence, ratio = (
        x.detach().reshape(-1).double() if order is None else x.detach().reshape(-1)[order].double()
        for x in (kl, log_ratio)
    )
    starts = layout.offsets[:-1]

    def before(steps: Tensor) -> Tensor:
        """Sum of the earlier integers of the same sequence."""
        through = torch.nn.functional.pad(steps.cumsum(0), (1, 0))
        return through[:-1] - through[starts][ids]

    def spent(steps: Tensor) -> Tensor:
        return before((steps / _UNIT).ceil().to(torch.int64)).double() * _UNIT

    good = counts & (divergence <= constants.max_kl)
    known = torch.where(torch.isnan(ratio), -math.inf, ratio)
    step = torch.expm1(known.clamp(max=math.log(constants.max_ratio)))
    step = torch.where(good, step, 0.0)
    used = torch.where(good, divergence, 0.0)
    within = (spent(step.abs()) <= constants.shift_budget) & (spent(used) <= constants.kl_budget)
    closed = counts & ~(good & within)
    is_open = counts & ~closed & (before(closed.to(torch.int64)) == 0)
    return Gated(
        _sequences.reduce_tokens(torch.where(is_open, step, 0.0), ordered).total,
        _sequences.reduce_tokens(torch.where(is_open, used, 0.0), ordered).total,
        _sequences.any_token(closed, ordered)[0],
    )
