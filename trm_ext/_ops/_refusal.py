# SPDX-License-Identifier: Apache-2.0
"""Explicit refusal of autograd: an op without a gradient says so instead of returning zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def refuse_autograd(name: str, instead: str) -> None:
    """Makes a backward through ``trm::name`` raise, naming what to do instead."""

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(f"trm::{name} has no autograd: {instead}")

    torch.library.register_autograd(f"trm::{name}", backward)
