# SPDX-License-Identifier: Apache-2.0
"""Twin of trm::sequence_reduce: one sequence at a time, on Python floats."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def sequence_reduce(
    values: Tensor, positions: Tensor, token_mask: Tensor, offsets: Tensor, order: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Max (NaN wins), its position, exact sum, count and first infinity of each sequence."""
    tokens = list(range(len(values))) if order is None else order.tolist()
    bounds = offsets.tolist()
    rows = []
    for start, stop in itertools.pairwise(bounds):
        here = [
            (int(positions[t]), float(values[t])) for t in tokens[start:stop] if bool(token_mask[t])
        ]
        infinite = min((position for position, value in here if math.isinf(value)), default=-1)
        missing = [position for position, value in here if math.isnan(value)]
        if missing:
            rows.append((math.nan, min(missing), math.nan, len(here), infinite))
        elif here:
            worst = max(value for _, value in here)
            first = min(position for position, value in here if value == worst)
            total = (sum if infinite >= 0 else math.fsum)(value for _, value in here)
            rows.append((worst, first, total, len(here), infinite))
        else:
            rows.append((0.0, -1, 0.0, 0, -1))
    columns = list(zip(*rows, strict=True)) or [()] * 5
    return (
        torch.tensor(columns[0], dtype=torch.float64),
        torch.tensor(columns[1], dtype=torch.int64),
        torch.tensor(columns[2], dtype=torch.float64),
        torch.tensor(columns[3], dtype=torch.int64),
        torch.tensor(columns[4], dtype=torch.int64),
    )
