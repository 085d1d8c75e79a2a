# SPDX-License-Identifier: Apache-2.0
"""Does this update improve the expected reward? A certificate from rollouts, or why there is none.

The mathematics is in :mod:`theory.certify`; here per-token statistics of a batch become its inputs,
and its answers become one verdict with the reason for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from trm_ext.token_statistics import TokenStatistics

if TYPE_CHECKING:
    from theory.certify import Certificate, Interval


class Verdict(str, Enum):
    """What the rollouts say about J(train) - J(rollout).

    ``CERTIFIED``: its lower limit is positive. ``HARMFUL``: its upper limit is negative.
    ``VACUOUS``: the policies are so far apart that no surrogate gain could outweigh the error
    bound. ``NOT_CERTIFIED``: none of these.
    """

    CERTIFIED = "CERTIFIED"
    HARMFUL = "HARMFUL"
    VACUOUS = "VACUOUS"
    NOT_CERTIFIED = "NOT_CERTIFIED"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class GateConstants:
    """Constants of the finite-sample statements; fix them before looking at the rollouts.

    Attributes:
        max_kl: delta, nats: the KL above which a context closes the gate, and above which a
            token masks its sequence (C2).
        max_ratio: C >= 1: ratios count as min(rho, C).
        shift_budget: b: the gate closes when abs of the running sum of (rho - 1) exceeds it.
        kl_budget: k, nats: the gate closes when the running sum of kl exceeds it.
        max_abs_log_weight: K, nats: C2 also masks a sequence with abs(log W) above it.
    """

    max_kl: float = 0.05
    max_ratio: float = 2.0
    shift_budget: float = 1.0
    kl_budget: float = 0.5
    max_abs_log_weight: float = 1.0


@dataclass(frozen=True)
class PublishedBound:
    """A bound on the surrogate's error beside the certificates, in reward units.

    Attributes:
        name: as in ``theory.bounds.catalogue``.
        value: the bound, with the *sampled* maximum in the place of the maximum over all contexts
            where it asks for one: a figure for comparison, not a guarantee.
        published: True for a bound from the literature, False for one of ours.
        needs: what it needs, in words.
        assumes_maximum: True when a maximum over all contexts enters.
        below_range: value < reward span. False: the bound is vacuous here.
        certifying: value < the largest attainable surrogate gain. False: it can never certify.
        instance: value < the measured surrogate gain.
    """

    name: str
    value: float
    published: bool
    needs: str
    assumes_maximum: bool
    below_range: bool
    certifying: bool
    instance: bool


@dataclass(frozen=True)
class Bottleneck:
    """Where D_seq comes from.

    Attributes:
        share: the share of D_seq that ``sequences`` and ``positions`` account for, 0.8.
        sequences: the fewest sequences with that share, largest first.
        positions: the fewest positions with that share, largest first (indices on the sequence's
            own token axis).
        first_token_share: share of the first counted token of each sequence.
        seq_kl_needed: D_seq below which SeqKL can certify at all, nats.
        sentences: the same in words.
    """

    share: float
    sequences: tuple[int, ...]
    positions: tuple[int, ...]
    first_token_share: float
    seq_kl_needed: float
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class RolloutsNeeded:
    """How many rollouts a positive lower limit would take, if means and variances stay.

    Attributes:
        finite_sample: for the budget gate at finite samples; None: no number is enough.
        asymptotic: for SeqKL with the normal approximation; None: no number is enough.
        radius: of the gated surrogate now, reward units.
        halve_radius: rollouts that would halve it.
    """

    finite_sample: int | None
    asymptotic: int | None
    radius: float
    halve_radius: int | None


@dataclass(frozen=True, eq=False)
class Certification:
    """The result of :func:`certify`. Rewards in their own units, divergences in nats.

    Attributes:
        verdict: from finite-sample statements only.
        asymptotic_verdict: the same rules with the normal approximation.
        reasons: why, one sentence each; the first belongs to ``verdict``.
        held_out: True when the caller states that the rollouts were drawn after the train policy
            was fixed. Otherwise every figure is "optimistic: same data" and nothing is CERTIFIED.
        alpha: failure probability of each one-sided statement.
        reward_range: [a, b] as declared.
        num_sequences: B.
        num_tokens: tokens that count.
        longest: most tokens that count in one sequence.
        horizon: largest possible length, or None when it was not declared.
        constants: of the gate and of C2.
        constants_origin: ``fixed beforehand`` or ``chosen on a split``.
        num_split: sequences that went into choosing the constants, 0 when they were fixed.
        surrogate: L' = E[(R - a) sum (rho - 1)], normal approximation.
        seq_kl: D_seq = E[sum kl], normal approximation; ``upper`` is the one-sided upper limit.
        seq_kl_lower: finite-sample lower limit of D_seq.
        min_certifiable_gain: (b - a) times the upper limit of D_seq: a smaller L' cannot be
            certified by SeqKL however many rollouts there are. Normal approximation.
        min_certifiable_gain_finite: the gated surrogate that the budget gate would have needed
            at this number of rollouts, with a finite-sample guarantee.
        attainable: largest L' that any reward in the range could have here.
        certificates: every lower limit of J(train) - J(rollout); each holds on its own with
            probability 1 - alpha. ``primary`` is the one the verdict looks at.
        missing: (certificate, why it cannot be given).
        bounds: published and own error bounds, with whether each is vacuous here.
        bottleneck: where D_seq comes from; None when it is 0 or not finite.
        rollouts_needed: see there.
        accepted: share of sequences with every kl <= constants.max_kl.
        notes: what a reader of the numbers should know, one sentence each.
        rewards: float64 ``[B]``.
        sequence_tokens: int64 ``[B]``, tokens that count.
        sequence_kl: float64 ``[B]``, sum of kl.
        sequence_max_kl: float64 ``[B]``, NaN first.
        sequence_shift: float64 ``[B]``, sum of (rho - 1).
        sequence_log_weight: float64 ``[B]``, log W.
        keep: bool ``[B]``, every kl <= constants.max_kl.
        hit: bool ``[B]``, the gate closed.
        position_kl: float64 ``[T]``, mean over sequences of kl at each position; sums to D_seq.
        statistics: the tokens.
    """

    verdict: Verdict
    asymptotic_verdict: Verdict
    reasons: tuple[str, ...]
    held_out: bool
    alpha: float
    reward_range: tuple[float, float]
    num_sequences: int
    num_tokens: int
    longest: int
    horizon: int | None
    constants: GateConstants
    constants_origin: str
    num_split: int
    surrogate: Interval
    seq_kl: Interval
    seq_kl_lower: Interval
    min_certifiable_gain: float
    min_certifiable_gain_finite: float
    attainable: float
    certificates: tuple[Certificate, ...]
    missing: tuple[tuple[str, str], ...]
    bounds: tuple[PublishedBound, ...]
    bottleneck: Bottleneck | None
    rollouts_needed: RolloutsNeeded
    accepted: float
    notes: tuple[str, ...]
    rewards: torch.Tensor
    sequence_tokens: torch.Tensor
    sequence_kl: torch.Tensor
    sequence_max_kl: torch.Tensor
    sequence_shift: torch.Tensor
    sequence_log_weight: torch.Tensor
    keep: torch.Tensor
    hit: torch.Tensor
    position_kl: torch.Tensor
    statistics: TokenStatistics

    @property
    def primary(self) -> Certificate:
        """The finite-sample certificate of the budget gate, which decides the verdict."""
        return next(c for c in self.certificates if c.name == PRIMARY)

    @property
    def span(self) -> float:
        """Reward span b - a."""
        return self.reward_range[1] - self.reward_range[0]


PRIMARY = "frozen_drift"
SEQ_KL_NEEDED = 1 / math.pi  # SeqKL < sup L' in the Gaussian regime: docs/theory.md#vacuity
