# SPDX-License-Identifier: Apache-2.0
"""Python half of every op: fake implementation and autograd, one file per op."""

from __future__ import annotations

from trm_ext import _lib

_lib.load_all()

from trm_ext._ops import (  # noqa: E402
    divergence_state,
    sequence_reduce,
    sequence_verdict,
    token_divergence,
)

__all__ = ["divergence_state", "sequence_reduce", "sequence_verdict", "token_divergence"]
