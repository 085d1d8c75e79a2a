# SPDX-License-Identifier: Apache-2.0
"""Metrics into TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trm_ext.masks import as_floats


def log(writer: Any, metrics: Mapping[str, Tensor | float], step: int) -> None:
    """Write metrics as scalars; waits for the device once.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``.
        metrics: from :meth:`trm_ext.Monitor.metrics` or :func:`trm_ext.batch_metrics`.
        step: number of the training step.
    """
    for name, value in as_floats(metrics).items():
        writer.add_scalar(name, value, step)
