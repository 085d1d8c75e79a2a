# SPDX-License-Identifier: Apache-2.0
"""Python half of every op: fake implementation and autograd, one file per op."""

from __future__ import annotations

from trm_ext import _lib

_lib.load_all()

from trm_ext._ops import divergence_state, sequence_reduce, token_divergence  # noqa: E402

__all__ = ["divergence_state", "sequence_reduce", "token_divergence"]
