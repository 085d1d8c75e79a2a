# SPDX-License-Identifier: Apache-2.0
"""Which threshold? The noise floor of an engine pair, and what each threshold keeps and can say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trm_ext.io import PolicyRecord


@dataclass(frozen=True)
class KlSummary:
    """Distribution of the exact KL over tokens and over sequences, nats.

    Attributes:
        tokens: tokens that count.
        sequences: sequences with at least one of them.
        mean, median, p99, maximum: over tokens.
        sequence_median, sequence_maximum: of the largest KL of each sequence.
        seq_kl: mean over sequences of the total KL (D_seq).
        unscored: tokens whose KL is NaN.
        unsupported: tokens whose KL is +inf.
    """

    tokens: int
    sequences: int
    mean: float
    median: float
    p99: float
    maximum: float
    sequence_median: float
    sequence_maximum: float
    seq_kl: float
    unscored: int
    unsupported: int


@dataclass(frozen=True)
class ThresholdRow:
    """What one threshold on the largest KL keeps, and what it can and cannot certify.

    Attributes:
        max_kl: the threshold, nats.
        kept: sequences that it keeps.
        acceptance: kept / sequences.
        acceptance_by_length: share whose first ``lengths[i]`` tokens stay at or below it, among
            the sequences that are that long; NaN where none is.
        below_floor: True when the noise floor alone exceeds it.
        rejection_upper: upper confidence limit of the probability that a fresh rollout is rejected.
        premise_refuted: True when a sequence exceeds it: max KL <= threshold over all contexts is
            then false, whatever the acceptance.
        error_bound: T * threshold, the error bound (reward in [0, 1]) if the premise held.
        can_certify: error_bound < 1/pi: a certificate is possible under the premise.
        says: the same in one sentence.
    """

    max_kl: float
    kept: int
    acceptance: float
    acceptance_by_length: tuple[float, ...]
    below_floor: bool
    rejection_upper: float
    premise_refuted: bool
    error_bound: float
    can_certify: bool
    says: str


@dataclass(frozen=True)
class Difference:
    """Two recordings of the same tokens, one side of them.

    Attributes:
        side: ``rollout`` or ``train``.
        kl: of the first recording against the second, over tokens.
        identical: share of rows whose logits are the same bit for bit.
        max_abs_log_ratio: largest change of a sampled token's log-probability, nats.
        worst: (sequence, position) of the largest KL.
    """

    side: str
    kl: KlSummary
    identical: float
    max_abs_log_ratio: float
    worst: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Calibration:
    """The result of :func:`calibrate`.

    Attributes:
        paths: the files.
        kind: ``engine pair``, ``noise floor`` or ``recorded twice``.
        rollout: how the rollout side was produced.
        train: how the train side was produced.
        pair: KL of the tokens whose acceptance is tabulated.
        floor: KL of the noise floor: of the files recorded as one, or of the recording against
            its repetition; None when no file says what the floor is.
        floor_threshold: threshold at which the floor alone keeps the target acceptance, nats;
            NaN without a floor.
        lengths: of ``acceptance_by_length``.
        thresholds: one row per threshold, ascending.
        target_acceptance: asked for.
        target_threshold: smallest threshold with that acceptance, nats; inf where none keeps so
            many.
        target_by_length: the same for each of ``lengths``; NaN where no sequence is that long.
        horizon: T in ``error_bound``: declared, or the longest sequence.
        alpha: failure probability of ``rejection_upper``.
        differences: for two recordings of the same tokens, one entry per side.
        warnings: what should be changed, one sentence each.
        notes: what a reader of the numbers should know, one sentence each.
        kl: ``[N]`` nats, KL of the tabulated tokens that count.
        floor_kl: ``[M]`` nats, KL of the floor's tokens that count; empty without a floor.
        sequence_max_kl: float64 ``[B]``.
    """

    paths: tuple[Path, ...]
    kind: str
    rollout: PolicyRecord
    train: PolicyRecord
    pair: KlSummary
    floor: KlSummary | None
    floor_threshold: float
    lengths: tuple[int, ...]
    thresholds: tuple[ThresholdRow, ...]
    target_acceptance: float
    target_threshold: float
    target_by_length: tuple[float, ...]
    horizon: int
    alpha: float
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    kl: torch.Tensor
    floor_kl: torch.Tensor
    sequence_max_kl: torch.Tensor
