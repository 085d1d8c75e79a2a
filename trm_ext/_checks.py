# SPDX-License-Identifier: Apache-2.0
"""Checks of a user's tensors, each failing with one sentence that names the offending value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def shape_text(tensor: Tensor) -> str:
    """Shape as a reader writes it, e.g. ``[2, 3]``."""
    return str(list(tensor.shape))


def check_logits(rollout_logits: Tensor, train_logits: Tensor) -> None:
    """Both are floating tensors of one shape [..., V] on one device."""
    for name, logits in (("rollout_logits", rollout_logits), ("train_logits", train_logits)):
        if not isinstance(logits, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(logits).__name__}")
        if logits.dim() == 0:
            raise ValueError(f"{name} has no vocabulary dimension: its shape is []")
        if logits.dtype not in LOGITS_DTYPES:
            raise TypeError(
                f"{name} must be float32, bfloat16, float16 or float64, got {logits.dtype}"
            )
    if rollout_logits.shape != train_logits.shape:
        raise ValueError(
            "rollout_logits and train_logits differ in shape: "
            f"{shape_text(rollout_logits)} and {shape_text(train_logits)}"
        )
    if rollout_logits.device != train_logits.device:
        raise ValueError(
            "rollout_logits and train_logits are on different devices: "
            f"{rollout_logits.device} and {train_logits.device}"
        )


def check_rows(name: str, rows: Tensor | None, logits: Tensor, dtype: torch.dtype) -> None:
    """An optional per-row tensor has the logits' lead shape, device and the expected dtype."""
    if rows is None:
        return
    if not isinstance(rows, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(rows).__name__}")
    if rows.dtype != dtype:
        raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}, got {rows.dtype}")
    if rows.shape != logits.shape[:-1]:
        raise ValueError(
            f"{name} must have the shape of the logits without the vocabulary, "
            f"{list(logits.shape[:-1])}, got {shape_text(rows)}"
        )
    if rows.device != logits.device:
        raise ValueError(f"{name} is on {rows.device}, the logits are on {logits.device}")


def row_temperature(name: str, value: float | Tensor, logits: Tensor) -> Tensor | None:
    """A temperature > 0 as a float64 tensor shaped like the rows; None where it is the number 1."""
    lead = logits.shape[:-1]
    if not isinstance(value, Tensor):
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number > 0 or a tensor, got {value!r}")
        if value == 1:
            return None
        # Filled on the device: torch.tensor would copy from the host, and wait for the copy.
        return torch.full((), value, dtype=torch.float64, device=logits.device).expand(lead)
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {value.dtype}")
    if value.shape not in (lead, torch.Size(())):
        raise ValueError(
            f"{name} must be a number or have the shape of the logits without the vocabulary, "
            f"{list(lead)}, got {shape_text(value)}"
        )
    if value.device != logits.device:
        raise ValueError(f"{name} is on {value.device}, the logits are on {logits.device}")
    return value.detach().to(torch.float64).expand(lead)


def check_vocab_size(vocab_size: int | None, columns: int) -> int:
    """The real vocabulary size, defaulting to every column."""
    if vocab_size is None:
        return columns
    if not 0 < vocab_size <= columns:
        raise ValueError(
            f"vocab_size must be in 1..{columns} (the logits' columns), got {vocab_size}"
        )
    return int(vocab_size)


def check_threshold(name: str, value: object) -> float:
    """A threshold is a number >= 0; +inf accepts everything finite."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not value >= 0:  # NaN too; math.isnan does not take a compiler's symbolic number
        raise ValueError(f"{name} must be >= 0, got {value}")
    return float(value)


def floating(name: str, values: object) -> Tensor:
    """A floating-point tensor, in float32 or better."""
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(values).__name__}")
    if not values.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {values.dtype}")
    return values if values.dtype == torch.float64 else values.float()
