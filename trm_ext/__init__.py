# SPDX-License-Identifier: Apache-2.0
"""Exact vocabulary-level KL and trust-region masks for RL training of language models.

Logits in, per-token divergences out; divergences in, a verdict per sequence out.
"""

from trm_ext.divergence import TokenDivergence, token_divergence
from trm_ext.layout import SequenceLayout
from trm_ext.masks import Reason, SequenceVerdict, max_kl_verdict, trust_region_mask
from trm_ext.sharding import (
    STATE_COLUMNS,
    STATE_VERSION,
    divergence_finish,
    divergence_state,
    divergence_state_merge,
    shard_gradient,
)

__version__ = "0.1.0"

__all__ = [
    "TokenDivergence",
    "token_divergence",
    "STATE_COLUMNS",
    "STATE_VERSION",
    "divergence_state",
    "divergence_state_merge",
    "divergence_finish",
    "shard_gradient",
    "SequenceLayout",
    "Reason",
    "SequenceVerdict",
    "max_kl_verdict",
    "trust_region_mask",
    "__version__",
]
