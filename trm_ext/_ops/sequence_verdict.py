# SPDX-License-Identifier: Apache-2.0
"""trm::sequence_verdict: shapes, its criteria, and its refusal of autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from trm_ext._ops._refusal import refuse_autograd

# Numbers of trm::Criterion: what is compared with the limit.
CRITERIA = ("max", "mean", "sum")


def _sequence_verdict_fake(
    values: Tensor,
    positions: Tensor,
    token_mask: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    criterion: int,
    limit: float,
    reason: int,
) -> tuple[Tensor, ...]:
    shape = (offsets.shape[0] - 1,)
    return (
        values.new_empty(shape, dtype=torch.bool),
        values.new_empty(shape, dtype=torch.int64),
        values.new_empty(shape, dtype=torch.int64),
        values.new_empty(shape),
        values.new_empty(shape),
        values.new_empty(shape),
        values.new_empty(shape, dtype=torch.float64),
        values.new_empty(shape, dtype=torch.bool),
        values.new_empty(values.shape, dtype=torch.bool),
    )


torch.library.register_fake("trm::sequence_verdict", _sequence_verdict_fake)
refuse_autograd(
    "sequence_verdict", "a verdict is a decision; put the per-token values into the loss"
)
