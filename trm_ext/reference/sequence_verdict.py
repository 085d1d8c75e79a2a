# SPDX-License-Identifier: Apache-2.0
"""Twin of trm::sequence_verdict: one sequence at a time, on Python floats."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from trm_ext.masks import Reason
from trm_ext.reference.sequence_reduce import sequence_reduce


def sequence_verdict(
    values: Tensor,
    positions: Tensor,
    token_mask: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    criterion: int,
    limit: float,
    reason: int,
) -> tuple[Tensor, ...]:
    """Empty, NaN, infinite or beyond the limit, in this order; else kept."""
    statistics = sequence_reduce(values, positions, token_mask, offsets, order)
    tokens = list(range(len(values))) if order is None else order.tolist()
    rows = []
    token_keep = torch.zeros(len(values), dtype=torch.bool)
    for (start, stop), (largest, position, total, count, infinite) in zip(
        itertools.pairwise(offsets.tolist()),
        zip(*(column.tolist() for column in statistics), strict=True),
        strict=True,
    ):
        mean = total / max(count, 1)
        statistic = (largest, mean, total)[criterion]
        failed = count > 0 and not statistic <= limit
        if count == 0:
            code = int(Reason.EMPTY)
        elif math.isnan(largest):
            code = int(Reason.NON_FINITE)
        elif infinite >= 0:
            code, position = int(Reason.SUPPORT), infinite
        else:
            code = reason if failed else int(Reason.KEPT)
        keep = code in (Reason.KEPT, Reason.EMPTY)
        rows.append((keep, code, position, largest, mean, total, statistic, failed))
        for token in tokens[start:stop]:
            token_keep[token] = keep and bool(token_mask[token])
    columns = list(zip(*rows, strict=True)) or [()] * 8
    kinds = [torch.bool, torch.int64, torch.int64, *[torch.float64] * 4, torch.bool]
    found = [torch.tensor(c, dtype=kind) for c, kind in zip(columns, kinds, strict=True)]
    return (*found, token_keep)
