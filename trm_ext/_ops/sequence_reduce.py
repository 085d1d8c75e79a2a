# SPDX-License-Identifier: Apache-2.0
"""trm::sequence_reduce: shapes, and its refusal of autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from trm_ext._ops._refusal import refuse_autograd


def _sequence_reduce_fake(
    values: Tensor, positions: Tensor, token_mask: Tensor, offsets: Tensor, order: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = (offsets.shape[0] - 1,)
    return (
        values.new_empty(shape),
        values.new_empty(shape, dtype=torch.int64),
        values.new_empty(shape, dtype=torch.float64),
        values.new_empty(shape, dtype=torch.int64),
        values.new_empty(shape, dtype=torch.int64),
    )


torch.library.register_fake("trm::sequence_reduce", _sequence_reduce_fake)
refuse_autograd(
    "sequence_reduce", "a verdict is a decision; put the per-token values into the loss"
)
