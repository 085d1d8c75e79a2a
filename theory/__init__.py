# SPDX-License-Identifier: Apache-2.0
"""Error bounds for the surrogate of LLM reinforcement learning, and MDPs to test them on.

``theory.bounds`` holds the bounds, ``theory.mdp`` decision processes where the truth is exact,
``theory.exact`` that truth, ``theory.certify`` certificates from rollouts, ``theory.families``
token laws with closed-form divergences, ``theory.gradients`` exact moments of gradient estimators.
``python -m theory --help`` lists the commands; docs/theory.md holds the proofs.
"""

from theory import bounds, certify, divergences, exact, families, gradients, mdp
from theory.bounds import every_bound, inverse, vacuous_horizon
from theory.records import AVERAGE, LAW, MAXIMUM, MOMENT, Bound, Need

__all__ = [
    "AVERAGE",
    "LAW",
    "MAXIMUM",
    "MOMENT",
    "Bound",
    "Need",
    "bounds",
    "certify",
    "divergences",
    "every_bound",
    "exact",
    "families",
    "gradients",
    "inverse",
    "mdp",
    "vacuous_horizon",
]
