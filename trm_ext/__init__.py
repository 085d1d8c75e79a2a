# SPDX-License-Identifier: Apache-2.0
"""Exact vocabulary-level KL and trust-region masks for RL training of language models.

Logits in, per-token divergences out; divergences in, a verdict per sequence out.
"""

from trm_ext import estimators, weights
from trm_ext.calibration import Calibration, calibrate
from trm_ext.certification import Certification, GateConstants, Verdict, certify
from trm_ext.divergence import TokenDivergence, token_divergence
from trm_ext.estimators import abs_log_ratio, binary_kl, binary_tv, k1, k2, k3, log_ratio
from trm_ext.layout import SequenceLayout
from trm_ext.losses import DENOMINATORS, ESTIMATORS, group_advantages, loss_denominator, policy_loss
from trm_ext.masks import (
    Criterion,
    GeoRatioBand,
    LengthNormalized,
    MaxDivergence,
    MeanDivergence,
    QuantileDivergence,
    Reason,
    SequenceRatioBand,
    SequenceVerdict,
    SumDivergence,
    TokenDivergenceLimit,
    TokenRatioBand,
    as_floats,
    criteria_from_json,
    criteria_to_json,
    max_kl_verdict,
    parse_criteria,
    trust_region_mask,
    verdict,
)
from trm_ext.metrics import batch_metrics, effective_sample_size, threshold_for_acceptance
from trm_ext.monitor import Monitor
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
    "estimators",
    "log_ratio",
    "k1",
    "k2",
    "k3",
    "abs_log_ratio",
    "binary_kl",
    "binary_tv",
    "Criterion",
    "MaxDivergence",
    "MeanDivergence",
    "SumDivergence",
    "QuantileDivergence",
    "GeoRatioBand",
    "SequenceRatioBand",
    "LengthNormalized",
    "TokenDivergenceLimit",
    "TokenRatioBand",
    "parse_criteria",
    "criteria_to_json",
    "criteria_from_json",
    "Reason",
    "SequenceVerdict",
    "verdict",
    "max_kl_verdict",
    "trust_region_mask",
    "weights",
    "ESTIMATORS",
    "DENOMINATORS",
    "policy_loss",
    "loss_denominator",
    "group_advantages",
    "batch_metrics",
    "as_floats",
    "effective_sample_size",
    "threshold_for_acceptance",
    "calibrate",
    "Calibration",
    "Monitor",
    "certify",
    "Certification",
    "GateConstants",
    "Verdict",
    "__version__",
]
