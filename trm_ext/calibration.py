# SPDX-License-Identifier: Apache-2.0
"""Which threshold? The noise floor of an engine pair, and what each threshold keeps and can say."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trm_ext import io
from trm_ext.audit import json_number, policy_dict
from trm_ext.certification import SEQ_KL_NEEDED
from trm_ext.divergence import token_divergence
from trm_ext.io import PolicyRecord, RolloutPairReader
from trm_ext.layout import SequenceLayout
from trm_ext.metrics import threshold_for_acceptance
from trm_ext.token_statistics import TokenStatistics, read_statistics, tempered

Array = NDArray[np.float64]

SCHEMA_VERSION = 1
LENGTHS = (16, 64, 256, 1024, 4096, 16384)
GRID = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)


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


def calibrate(
    paths: Sequence[str | os.PathLike[str]],
    *,
    thresholds: Sequence[float] = (),
    target_acceptance: float = 0.9,
    horizon: int | None = None,
    alpha: float = 0.05,
    chunk_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Tabulate what thresholds on the largest KL keep, against the noise floor, and what they say.

    acceptance(x, n) = share of sequences of at least n tokens whose first n have kl <= x.

    Files recorded as a noise floor (``trm record --pair noise-floor``: the same engine and the same
    weights twice) give the floor; the others give the acceptance. With noise-floor files alone,
    their own acceptance is tabulated. Two files with the same tokens, both of them floors or
    neither, are compared row by row instead, each side with the same side; the first file's
    rollout logits against the second's are then the floor.

    Args:
        paths: one or more rollout-pair files or files of statistics.
        thresholds: nats, in addition to a grid and to the target's threshold.
        target_acceptance: share of sequences to keep, in (0, 1].
        horizon: T of the error bound; None takes what the files declare, or the longest sequence.
        alpha: failure probability of the upper limit on the rejection probability.
        chunk_rows: rows of logits in memory at a time.
        progress: called with (rows done, rows in all) for each file.

    Returns:
        :class:`Calibration`.

    Raises:
        RolloutPairError: a file is wrong.
        ValueError: no file, no token that counts, a threshold that is negative or NaN, a target
            outside (0, 1], a horizon below the longest sequence.

    Source:
        docs/certificates.md; docs/theory.md#not-a-guarantee for what acceptance does not say.
    """
    if not paths:
        raise ValueError("calibrate needs at least one file, got none")
    for threshold in thresholds:
        if not 0 <= threshold < math.inf:
            raise ValueError(f"a threshold must be a finite number >= 0, got {threshold}")
    if not 0 < target_acceptance <= 1:
        raise ValueError(f"target_acceptance must be in (0, 1], got {target_acceptance}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha}")
    notes: list[str] = []
    differences: tuple[Difference, ...] = ()
    found = [
        read_statistics(path, ("kl", "log_ratio"), chunk_rows=chunk_rows, progress=progress)
        for path in paths
    ]
    floors = [_tokens(s) for s in found if _is_floor(s)]
    pairs = [_tokens(s) for s in found if not _is_floor(s)]
    if len(paths) == 2 and _recorded_twice(*found):
        kind = "recorded twice"
        differences, floor = _compare(*paths, chunk_rows=chunk_rows, progress=progress)
        pairs, floors = [_tokens(found[0])], [floor]
    elif pairs:
        kind = "engine pair"
        if len(paths) == 2 and not floors:
            notes.append("the two files hold different tokens: their sequences are pooled")
        made_by = {(s.rollout.engine, s.rollout.precision) for s in found}
        if len(made_by) > 1:
            several = ", ".join(sorted(" ".join(engine) for engine in made_by))
            notes.append(f"recordings of different rollout engines are put together: {several}")
    else:
        kind = "noise floor"
        pairs = floors
    if not floors:
        notes.append(
            "no file says what the floor is: record one with trm record --pair noise-floor, or "
            "record the same tokens twice"
        )
    notes += [note for s in found for note in s.notes]
    for tokens in (*pairs, *floors):
        if not tokens.length.any():
            raise ValueError(f"{tokens.path}: no token counts, so there is nothing to calibrate")
    maxima = np.concatenate([t.largest for t in pairs])
    longest = max(int(t.length.max()) for t in pairs)
    declared = [s.extra.get("max_new_tokens") for s in found]
    if horizon is None:
        horizon = max([longest, *(d for d in declared if isinstance(d, int))])
    elif horizon < longest:
        raise ValueError(f"horizon {horizon} is below the longest sequence, {longest}")
    lengths = (*(n for n in LENGTHS if n < longest), longest)
    target = float(threshold_for_acceptance(torch.from_numpy(maxima), target_acceptance))
    floor_maxima = np.concatenate([t.largest for t in floors]) if floors else np.zeros(0)
    floor_threshold = math.nan
    if floors:
        floor_threshold = float(
            threshold_for_acceptance(torch.from_numpy(floor_maxima), target_acceptance)
        )
    asked = sorted({*GRID, *thresholds, *([target] if math.isfinite(target) else [])})
    rows = tuple(_row(x, maxima, pairs, lengths, floor_threshold, horizon, alpha) for x in asked)
    first = next((s for s in found if not _is_floor(s)), found[0])
    return Calibration(
        paths=tuple(Path(path) for path in paths),
        kind=kind,
        rollout=first.rollout,
        train=first.train,
        pair=_summary(pairs),
        floor=_summary(floors) if floors else None,
        floor_threshold=floor_threshold,
        lengths=lengths,
        thresholds=rows,
        target_acceptance=target_acceptance,
        target_threshold=target,
        target_by_length=tuple(_target_at(pairs, n, target_acceptance) for n in lengths),
        horizon=horizon,
        alpha=alpha,
        differences=differences,
        warnings=_warnings(rows, thresholds, floor_threshold, target, target_acceptance),
        notes=tuple(notes),
        kl=torch.from_numpy(np.concatenate([t.kl for t in pairs])),
        floor_kl=torch.from_numpy(np.concatenate([t.kl for t in floors]) if floors else maxima[:0]),
        sequence_max_kl=torch.from_numpy(maxima),
    )


def as_dict(result: Calibration) -> dict[str, Any]:
    """Return a calibration as a JSON-ready dictionary with stable keys, without per-token values.

    Numbers that are not finite become the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``.
    """
    out: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    for name in Calibration.__dataclass_fields__:
        value = getattr(result, name)
        if name in ("kl", "floor_kl"):
            continue
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        out[name] = policy_dict(value) if isinstance(value, PolicyRecord) else _plain(value)
    return out


class _Tokens:
    """The tokens of one file that count: kl, and each sequence's part of it."""

    def __init__(self, layout: SequenceLayout, kl: torch.Tensor, path: Path | None) -> None:
        counted = layout.token_mask.numpy()
        ids = layout.sequence_id.numpy()[counted]
        self.path = path
        self.kl: Array = kl.double().numpy()[counted]
        self.length = np.bincount(ids, minlength=layout.num_sequences)
        self.start = np.concatenate([[0], np.cumsum(self.length)])

    @property
    def largest(self) -> Array:
        """Largest kl of each sequence with a token; NaN wins."""
        return self.prefix_largest(1, whole=True)

    def prefix_largest(self, length: int, whole: bool = False) -> Array:
        """Largest kl of the first ``length`` tokens of each sequence that is so long."""
        found = [
            self.kl[a : b if whole else a + length].max()
            for a, b in zip(self.start[:-1], self.start[1:], strict=True)
            if b - a >= length
        ]
        return np.array(found, dtype=np.float64)

    @property
    def total(self) -> Array:
        """Total kl of each sequence."""
        steps = np.repeat(np.arange(len(self.length)), self.length)
        sums = np.bincount(steps, self.kl, minlength=len(self.length))
        return np.asarray(sums, dtype=np.float64)


def _tokens(statistics: TokenStatistics) -> _Tokens:
    kl = statistics.divergence.kl
    assert kl is not None
    return _Tokens(statistics.layout, kl, statistics.path)


def _is_floor(statistics: TokenStatistics) -> bool:
    return statistics.extra.get("pair") == "noise-floor"


def _recorded_twice(a: TokenStatistics, b: TokenStatistics) -> bool:
    """The same tokens, and not as a pair and its floor, which one seed makes of the same tokens."""
    return (
        _is_floor(a) == _is_floor(b)
        and a.tokens is not None
        and b.tokens is not None
        and torch.equal(a.tokens, b.tokens)
        and torch.equal(a.cu_seqlens, b.cu_seqlens)
    )


def _compare(
    path_a: str | os.PathLike[str],
    path_b: str | os.PathLike[str],
    *,
    chunk_rows: int | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[tuple[Difference, ...], _Tokens]:
    """Row by row: each side of one file against the same side of the other."""
    for path in (path_a, path_b):
        if "rollout_logits" not in io.tensor_names(path):
            raise ValueError(f"{path}: comparing two recordings needs logits, it has statistics")
    with RolloutPairReader(path_a) as a, RolloutPairReader(path_b) as b:
        if a.vocab_size != b.vocab_size:
            raise ValueError(
                f"the vocabularies differ: {a.vocab_size} in {path_a}, {b.vocab_size} in {path_b}"
            )
        counted = torch.ones(a.num_tokens, dtype=torch.bool)
        for mask in (a.token_mask, b.token_mask):
            counted &= counted if mask is None else mask
        step = io.default_chunk_rows(a.num_columns) if chunk_rows is None else chunk_rows
        kl = torch.zeros(2, a.num_tokens, dtype=torch.float64)
        log_ratio = torch.zeros(2, a.num_tokens, dtype=torch.float64)
        same = torch.zeros(2, a.num_tokens, dtype=torch.bool)
        for (start, *of_a), (_, *of_b) in zip(a.chunks(step), b.chunks(step), strict=True):
            span = slice(start, start + len(of_a[0]))
            for side, name in enumerate(("rollout", "train")):
                x = tempered(of_a[side], getattr(a.metadata, name))
                y = tempered(of_b[side], getattr(b.metadata, name))
                one = token_divergence(
                    x,
                    y,
                    tokens=a.tokens[span],
                    token_mask=counted[span],
                    outputs=("kl", "log_ratio"),
                )
                assert one.kl is not None and one.log_ratio is not None
                kl[side, span], log_ratio[side, span] = one.kl.double(), one.log_ratio.double()
                same[side, span] = (x == y).all(dim=1)
            if progress is not None:
                progress(span.stop, a.num_tokens)
        layout = SequenceLayout.from_cu_seqlens(a.cu_seqlens, token_mask=counted)
    differences = []
    for side, name in enumerate(("rollout", "train")):
        tokens = _Tokens(layout, kl[side], Path(path_a))
        rank = torch.where(counted, kl[side].nan_to_num(nan=math.inf), -1.0)
        row = int(rank.argmax()) if len(rank) else 0
        differences.append(
            Difference(
                side=name,
                kl=_summary([tokens]),
                identical=float(same[side][counted].double().mean()),
                max_abs_log_ratio=float(log_ratio[side][counted].abs().max()),
                worst=(int(layout.sequence_id[row]), int(layout.position[row])),
            )
        )
    return tuple(differences), _Tokens(layout, kl[0], Path(path_a))


def _summary(parts: Sequence[_Tokens]) -> KlSummary:
    kl = np.concatenate([part.kl for part in parts])
    largest = np.concatenate([part.largest for part in parts])
    total = np.concatenate([part.total for part in parts])
    some = len(largest) > 0
    return KlSummary(
        tokens=len(kl),
        sequences=len(largest),
        mean=float(kl.mean()),
        median=float(np.median(kl)),
        p99=float(np.quantile(kl, 0.99, method="inverted_cdf")),
        maximum=float(kl.max()),
        sequence_median=float(np.median(largest)) if some else math.nan,
        sequence_maximum=float(largest.max()) if some else math.nan,
        seq_kl=float(total.mean()),
        unscored=int(np.isnan(kl).sum()),
        unsupported=int(np.isinf(kl).sum()),
    )


def _row(
    threshold: float,
    maxima: Array,
    pairs: Sequence[_Tokens],
    lengths: Sequence[int],
    floor_threshold: float,
    horizon: int,
    alpha: float,
) -> ThresholdRow:
    from theory.certify import rejection_quantile

    kept = int((maxima <= threshold).sum())
    by_length = []
    for n in lengths:
        prefix = np.concatenate([part.prefix_largest(n) for part in pairs])
        by_length.append(float((prefix <= threshold).mean()) if len(prefix) else math.nan)
    upper = rejection_quantile(kept, len(maxima), alpha).upper
    refuted = kept < len(maxima)
    bound = horizon * threshold
    can = bound < SEQ_KL_NEEDED
    if refuted:
        says = f"premise false: {len(maxima) - kept} of {len(maxima)} exceed it"
    else:
        says = f"P(a rollout exceeds it) <= {upper:.2g}"
    says += (
        f"; error <= {bound:.2g} if it held everywhere"
        if can
        else f"; certifies nothing at T = {horizon}: T * threshold = {bound:.2g} >= 1/pi"
    )
    return ThresholdRow(
        max_kl=threshold,
        kept=kept,
        acceptance=kept / len(maxima),
        acceptance_by_length=tuple(by_length),
        below_floor=threshold < floor_threshold,
        rejection_upper=upper,
        premise_refuted=refuted,
        error_bound=bound,
        can_certify=can,
        says=says,
    )


def _target_at(pairs: Sequence[_Tokens], length: int, acceptance: float) -> float:
    prefix = np.concatenate([part.prefix_largest(length) for part in pairs])
    if not len(prefix):
        return math.nan
    return float(threshold_for_acceptance(torch.from_numpy(prefix), acceptance))


def _warnings(
    rows: Sequence[ThresholdRow],
    asked: Sequence[float],
    floor_threshold: float,
    target: float,
    acceptance: float,
) -> tuple[str, ...]:
    out = [
        f"threshold {row.max_kl:g} lies below the noise floor {floor_threshold:.3g}: the same "
        "weights would be masked for rounding"
        for row in rows
        if row.below_floor and row.max_kl in asked
    ]
    if target < floor_threshold:
        out.append(
            f"the threshold {target:.3g} that keeps {acceptance:.0%} lies below the noise floor "
            f"{floor_threshold:.3g}: the floor was recorded on other tokens or another engine"
        )
    if not math.isfinite(target):
        out.append(
            f"no threshold keeps {acceptance:.0%}: too many sequences have a KL that is NaN or inf"
        )
    return tuple(out)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return json_number(value)
