# SPDX-License-Identifier: Apache-2.0
"""Metrics into Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trm_ext.masks import as_floats


def log(run: Any, metrics: Mapping[str, Tensor | float], step: int | None = None) -> None:
    """Log metrics in one call; waits for the device once.

    Args:
        run: what ``wandb.init()`` returned.
        metrics: from :meth:`trm_ext.Monitor.metrics` or :func:`trm_ext.batch_metrics`.
        step: number of the training step; None lets the run count.
    """
    run.log(as_floats(metrics), step=step)
