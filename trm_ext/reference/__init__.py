# SPDX-License-Identifier: Apache-2.0
"""Slow, obviously right float64 twins of every op: the tests' oracle and a readable definition."""

from __future__ import annotations

from trm_ext.reference.divergence_state import (
    divergence_finish,
    divergence_state,
    divergence_state_merge,
)
from trm_ext.reference.sequence_reduce import sequence_reduce
from trm_ext.reference.sequence_verdict import sequence_verdict
from trm_ext.reference.token_divergence import token_divergence, token_divergence_backward

# Op name -> its twin; a test fails when an op of torch.ops.trm is missing here.
TWINS = {
    "token_divergence": token_divergence,
    "token_divergence_backward": token_divergence_backward,
    "divergence_state": divergence_state,
    "divergence_state_merge": divergence_state_merge,
    "divergence_finish": divergence_finish,
    "sequence_reduce": sequence_reduce,
    "sequence_verdict": sequence_verdict,
}

__all__ = ["TWINS", *TWINS]
