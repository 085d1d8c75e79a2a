# SPDX-License-Identifier: Apache-2.0
"""Does this update improve the expected reward? A certificate from rollouts, or why there is none.

The mathematics is in :mod:`theory.certify`; here per-token statistics of a batch become its inputs,
and its answers become one verdict with the reason for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from trm_ext import _sequences
from trm_ext.audit import json_number, policy_dict
from trm_ext.divergence import TokenDivergence
from trm_ext.io import PolicyRecord
from trm_ext.layout import SequenceLayout
from trm_ext.outputs import OUTPUTS
from trm_ext.token_statistics import TokenStatistics, read_statistics

if TYPE_CHECKING:  # scipy takes half a second: imported when a certificate is asked for
    from theory.certify import Certificate, GateStatistics, Interval

Array = NDArray[np.float64]
Primary = Literal["truncated_weight", "sequence_mask", "frozen_budget", "frozen_drift"]

SCHEMA_VERSION = 1
SEQ_KL_NEEDED = 1 / math.pi  # SeqKL < sup L' in the Gaussian regime: docs/theory.md#vacuity
SHARE = 0.8
SMALL_SAMPLE = 30  # below it a normal approximation is rough
_GATES = ("frozen_budget", "frozen_drift")
_BOUNDS = (
    "classical_kl",
    "coupling",
    "pinsker_marginal_kl",
    "pinsker_marginal_tv",
    "mixed_kl",
    "adaptive",
    "split",
    "seq_kl",
)
_OURS = ("split", "seq_kl")


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
        max_kl: delta, nats: the KL above which a context closes both gates, and above which a
            token masks its sequence (C2).
        max_ratio: C = e^M >= 1: in both gates ratios count as min(rho, C).
        shift_budget: b: the budget gate closes when the sum of abs(rho - 1) so far exceeds it.
        kl_budget: k, nats: both gates close when the sum of kl so far exceeds it.
        max_abs_log_weight: K, nats: C0 counts W as min(W, 1 + K), and C2 also masks a sequence
            with abs(log W) above it.
        drift_budget: the drift gate closes when abs of the sum of (rho - 1) so far exceeds it.
    """

    max_kl: float = 0.05
    max_ratio: float = 2.0
    shift_budget: float = 4.0
    kl_budget: float = 0.5
    max_abs_log_weight: float = 1.0
    drift_budget: float = 1.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            least = 1.0 if entry.name == "max_ratio" else 0.0
            strict = entry.name == "max_abs_log_weight"
            if not least <= value < math.inf or (strict and value == 0):
                sign = ">" if strict else ">="
                raise ValueError(
                    f"{entry.name} must be a finite number {sign} {least:g}, got {value}"
                )


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

    None says that no number is enough: the estimate itself is not positive.

    Attributes:
        truncated_weight: for C0 at finite samples.
        sequence_mask: for C2 at finite samples.
        frozen_budget: for C3' with the budget gate at finite samples.
        frozen_drift: for C3' with the drift gate at finite samples.
        seq_kl: for SeqKL with the normal approximation.
        halve_gate_radius: rollouts that would halve the radius of the budget gate's surrogate.
    """

    truncated_weight: int | None
    sequence_mask: int | None
    frozen_budget: int | None
    frozen_drift: int | None
    seq_kl: int | None
    halve_gate_radius: int | None


@dataclass(frozen=True)
class Judgement:
    """The verdict that one finite-sample certificate would give by itself.

    Attributes:
        certificate: its name.
        verdict: as in :class:`Certification`, with probability 1 - alpha on its own.
        reason: one sentence, with the radius and the rollouts needed where it is NOT_CERTIFIED.
    """

    certificate: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, eq=False)
class Certification:
    """The result of :func:`certify`. Rewards in their own units, divergences in nats.

    Attributes:
        verdict: of the primary certificate, from finite-sample statements only.
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
        constants: of the finite-sample statements.
        constants_origin: ``fixed beforehand`` or ``chosen on a split``.
        num_split: sequences that went into choosing the constants, 0 when they were fixed.
        surrogate: L' = E[(R - a) sum (rho - 1)], normal approximation, with the mean reward as
            baseline where the outside mass is known.
        seq_kl: D_seq = E[sum kl], normal approximation; ``upper`` is the one-sided upper limit.
        seq_kl_lower: finite-sample lower limit of D_seq.
        min_certifiable_gain: (b - a) times the upper limit of D_seq: a smaller L' cannot be
            certified by SeqKL however many rollouts there are. Normal approximation.
        min_certifiable_gain_finite: the estimate that the primary certificate would have needed
            at this number of rollouts: its radius and error terms. Finite-sample guarantee.
        attainable: largest L' that any reward in the range could have here.
        certificates: every lower limit of J(train) - J(rollout); each holds on its own with
            probability 1 - alpha. A name can occur twice, with and without ``finite_sample``.
        primary_name: which of the finite-sample ones decides the verdict.
        judgements: what each finite-sample certificate would have said in its place.
        missing: (certificate, why it cannot be given).
        bounds: published and own error bounds, with whether each is vacuous here.
        bottleneck: where D_seq comes from; None when it is 0 or not finite.
        rollouts_needed: see there.
        accepted: share of sequences with every kl <= constants.max_kl.
        notes: what a reader of the numbers should know, one sentence each.
        sequence_index: int64 ``[B]``, number of each sequence in the source; without the split's.
        rewards: float64 ``[B]``.
        sequence_tokens: int64 ``[B]``, tokens that count.
        sequence_kl: float64 ``[B]``, sum of kl.
        sequence_max_kl: float64 ``[B]``, NaN first.
        sequence_shift: float64 ``[B]``, sum of (rho - 1).
        sequence_log_weight: float64 ``[B]``, log W.
        keep: bool ``[B]``, every kl <= constants.max_kl.
        hit: bool ``[B]``, the budget gate closed.
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
    primary_name: str
    judgements: tuple[Judgement, ...]
    missing: tuple[tuple[str, str], ...]
    bounds: tuple[PublishedBound, ...]
    bottleneck: Bottleneck | None
    rollouts_needed: RolloutsNeeded
    accepted: float
    notes: tuple[str, ...]
    sequence_index: torch.Tensor
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
        """The finite-sample certificate that decides the verdict."""
        return next(c for c in self.certificates if c.name == self.primary_name and c.finite_sample)

    def judgement(self, certificate: str) -> Judgement:
        """What one finite-sample certificate says, by its name."""
        return next(j for j in self.judgements if j.certificate == certificate)

    @property
    def joint_confidence(self) -> float:
        """Probability with which all finite-sample lower limits hold together: 1 - m alpha."""
        return max(0.0, 1 - self.alpha * len(self.judgements))

    @property
    def span(self) -> float:
        """Reward span b - a."""
        return self.reward_range[1] - self.reward_range[0]

    @property
    def label(self) -> str:
        """``held-out rollouts``, or the warning that they are not."""
        return "held-out rollouts" if self.held_out else "optimistic: same data"


def certify(
    divergence: TokenDivergence,
    rewards: torch.Tensor,
    layout: SequenceLayout,
    *,
    held_out: bool = False,
    reward_range: tuple[float, float] = (0.0, 1.0),
    alpha: float = 0.05,
    horizon: int | None = None,
    constants: GateConstants | Literal["split"] | None = None,
    primary: Primary = "truncated_weight",
) -> Certification:
    """Say whether this update improves the expected reward, or what stands in the way.

    Lower limits of J(train) - J(rollout), a = the lowest reward, W = prod rho:
    C0 E[(R-a)(min(W, 1 + K) - 1)]; C1 E[(R-a) log W]; C2 E[(R-a) M log W] - E[(R-a)(1-M)];
    C3' L~ - (b-a)(D~ + P~(hit)) of the policy that a gate freezes: the budget gate (sum of
    abs(rho - 1) <= b, sum of kl <= k, kl <= delta, latched), and the drift gate (abs of the sum of
    rho - 1 instead); SeqKL L' - (b-a) D_seq.
    C0, C2 and C3' at finite samples (empirical Bernstein, Clopper-Pearson), C1, C2, C3' and SeqKL
    with the normal approximation. Each limit holds with probability 1 - alpha on its own, the
    finite-sample ones together with ``joint_confidence``. The verdict looks at one of these,
    ``primary``: CERTIFIED if it is positive, HARMFUL if the same limit for the reward b + a - R is,
    VACUOUS if the finite-sample lower limit of D_seq is 1 nat or more, so that SeqKL's error bound
    is at least the span; NOT_CERTIFIED otherwise. ``judgements`` has the verdict that each of the
    others, the budget gate among them, would give.

    Args:
        divergence: what :func:`trm_ext.token_divergence` returned, with ``kl`` and ``log_ratio``
            at least; ``tv``, ``chi2`` and ``outside_mass`` sharpen what is reported.
        rewards: ``[B]``, one per sequence.
        layout: of the tokens.
        held_out: state that the rollouts were drawn after the train policy was fixed. Without it
            everything is labelled "optimistic: same data" and nothing is CERTIFIED.
        reward_range: [a, b], declared and not read off the data.
        alpha: failure probability of each one-sided statement.
        horizon: largest possible number of tokens of a sequence; None when unknown (a file that
            says ``max_new_tokens`` makes it known).
        constants: fixed before looking at the rollouts; None takes the defaults; ``"split"``
            chooses them on every fourth sequence, and certifies on the others.
        primary: which certificate decides; choose it before looking at the rollouts.

    Returns:
        A :class:`Certification`.

    Raises:
        ValueError: fewer than two sequences, no token that counts, a reward that is NaN or outside
            the range, shapes that differ, statistics that are missing, constants out of range.

    Numerics:
        float64. NaN is missing evidence: it counts as the worst case (rho = 0) in C0 and C3',
        rejects its sequence in C2, and leaves the other certificates ``missing``. A KL of +inf
        makes D_seq infinite.

    Source:
        docs/theory.md, sections 5.0 to 5.5; docs/certificates.md.

    >>> from trm_ext import token_divergence
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(400, 2, 5, generator=generator)
    >>> y = x + 0.2 * torch.randn(400, 2, 5, generator=generator)
    >>> tokens = torch.distributions.Categorical(logits=x).sample()
    >>> layout = SequenceLayout.from_lengths([2] * 400, padded_length=2)
    >>> found = token_divergence(x, y, tokens=tokens, outputs=("kl", "log_ratio"))
    >>> certify(found, (tokens[:, 1] == 3).double(), layout, held_out=True).verdict.value
    'NOT_CERTIFIED'
    """
    layout.check("kl", _needed(divergence, "kl"))
    return certify_statistics(
        _pack(divergence, rewards, layout),
        held_out=held_out,
        reward_range=reward_range,
        alpha=alpha,
        horizon=horizon,
        constants=constants,
        primary=primary,
    )


def certify_file(
    path: str | os.PathLike[str],
    *,
    chunk_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Certification:
    """:func:`certify` for a rollout-pair file with rewards, or a file of statistics.

    Args:
        path: the file.
        chunk_rows: rows of logits in memory at a time; None takes about 32 MiB per side.
        progress: called with (rows done, rows in all) after each chunk.
        **options: as :func:`certify`.

    Raises:
        RolloutPairError: the file is wrong.
        ValueError: as :func:`certify`; the file has no rewards, or its rollouts do not come from
            its rollout logits (truncated sampling, raw logits).
    """
    outputs = [
        name for name in OUTPUTS if name not in ("entropy_rollout", "entropy_train", "logp_train")
    ]
    statistics = read_statistics(path, outputs, chunk_rows=chunk_rows, progress=progress)
    return certify_statistics(statistics, **options)


def certify_statistics(
    statistics: TokenStatistics,
    *,
    held_out: bool = False,
    reward_range: tuple[float, float] = (0.0, 1.0),
    alpha: float = 0.05,
    horizon: int | None = None,
    constants: GateConstants | Literal["split"] | None = None,
    primary: Primary = "truncated_weight",
) -> Certification:
    """:func:`certify` for statistics that are packed already; arguments and result as there."""
    from theory import certify as math_

    low, high = map(float, reward_range)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"reward_range must be finite with low < high, got [{low:g}, {high:g}]")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha}")
    if primary not in get_args(Primary):
        raise ValueError(f"primary must be one of {', '.join(get_args(Primary))}, got {primary!r}")
    declared = statistics.extra.get("max_new_tokens")
    if horizon is None and isinstance(declared, int):
        horizon = declared
    whole = _batch(statistics, low, high, horizon)
    fixed = constants if isinstance(constants, GateConstants) else GateConstants()
    batch, origin, num_split = whole, "fixed beforehand", 0
    if constants == "split":
        fixed, batch, num_split = _split(whole, alpha)
        origin = "chosen on a split"
    elif not (constants is None or isinstance(constants, GateConstants)):
        raise ValueError(f'constants must be GateConstants, "split" or None, got {constants!r}')

    gates = {name: _gate(batch, fixed, name) for name in _GATES}
    finite = _finite(batch, gates, fixed, alpha, held_out)
    mirrored = _finite(batch.mirrored(), gates, fixed, alpha, held_out)
    asymptotic, missing = _asymptotic(batch, gates, fixed, alpha, held_out)
    decides = finite[primary]
    surrogate = _mean_interval(batch.gain, alpha)
    seq_kl = _mean_interval(batch.sequence_kl, alpha)
    seq_kl_lower = math_.nonnegative_lower(np.nan_to_num(batch.sequence_kl, posinf=np.inf), alpha)
    attainable = batch.attainable(seq_kl.estimate)
    needed = _rollouts_needed(batch, gates, fixed, alpha, finite)
    judged = {
        name: Judgement(
            name, *_judge_finite(batch, finite[name], mirrored[name], seq_kl_lower, needed)
        )
        for name in finite
    }
    asymptotic_verdict, asymptotic_reason = _judge_asymptotic(
        batch, asymptotic, seq_kl, attainable, alpha
    )
    degenerate = batch.same_policies
    return Certification(
        verdict=judged[primary].verdict,
        asymptotic_verdict=asymptotic_verdict,
        reasons=(judged[primary].reason, asymptotic_reason),
        held_out=held_out,
        alpha=alpha,
        reward_range=(low, high),
        num_sequences=len(batch.reward),
        num_tokens=int(batch.mask.sum()),
        longest=int(batch.mask.sum(1).max()),
        horizon=horizon,
        constants=fixed,
        constants_origin=origin,
        num_split=num_split,
        surrogate=surrogate,
        seq_kl=seq_kl,
        seq_kl_lower=seq_kl_lower,
        min_certifiable_gain=math.nan if degenerate else batch.span * seq_kl.upper,
        min_certifiable_gain_finite=_allowance(decides, batch.span),
        attainable=attainable,
        certificates=(*finite.values(), *asymptotic.values()),
        primary_name=primary,
        judgements=tuple(judged.values()),
        missing=missing,
        bounds=_bounds(batch, seq_kl.estimate, attainable, surrogate.estimate),
        bottleneck=_bottleneck(batch, seq_kl.estimate),
        rollouts_needed=needed,
        accepted=float(batch.keep(fixed.max_kl).mean()),
        notes=(*statistics.notes, *_notes(batch, statistics, held_out)),
        sequence_index=torch.from_numpy(batch.index),
        rewards=torch.from_numpy(batch.reward),
        sequence_tokens=torch.from_numpy(batch.mask.sum(1)),
        sequence_kl=torch.from_numpy(batch.sequence_kl),
        sequence_max_kl=torch.from_numpy(batch.largest_kl),
        sequence_shift=torch.from_numpy(batch.shift),
        sequence_log_weight=torch.from_numpy(batch.log_weight),
        keep=torch.from_numpy(batch.keep(fixed.max_kl)),
        hit=torch.from_numpy(gates["frozen_budget"].hit),
        position_kl=torch.from_numpy(batch.position_kl),
        statistics=statistics,
    )


def as_dict(result: Certification) -> dict[str, Any]:
    """Return a certification as a JSON-ready dictionary with stable keys.

    Numbers that are not finite become the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``.
    ``schema_version`` grows when a key changes its meaning or leaves. Per-token values are not in
    it: :func:`trm_ext.token_statistics.write_statistics` keeps those.
    """
    plain = {
        name: _plain(getattr(result, name))
        for name in Certification.__dataclass_fields__
        if name != "statistics" and not isinstance(getattr(result, name), torch.Tensor)
    }
    arrays = ("index", "tokens", "kl", "max_kl", "shift", "log_weight")
    columns = (*(f"sequence_{name}" for name in arrays), "rewards", "keep", "hit")
    statistics = result.statistics
    return {
        "schema_version": SCHEMA_VERSION,
        "file": None if statistics.path is None else str(statistics.path),
        "rollout": policy_dict(statistics.rollout),
        "train": policy_dict(statistics.train),
        "label": result.label,
        **plain,
        "sequences": [
            dict(zip((c.removeprefix("sequence_") for c in columns), map(_plain, row), strict=True))
            for row in zip(*(getattr(result, name).tolist() for name in columns), strict=True)
        ],
        "position_kl": _plain(result.position_kl.tolist()),
    }


@dataclass(frozen=True, eq=False)
class _Batch:
    """A batch as padded float64 arrays of the tokens that count; T is the longest sequence."""

    reward: Array  # [B]
    low: float
    high: float
    ratio: Array  # [B, T], log rho
    kl: Array  # [B, T]
    mask: NDArray[np.bool_]  # [B, T]
    position: NDArray[np.int64]  # [B, T], on the sequence's own axis
    tv: Array | None  # [B, T]
    chi2: Array | None
    outside: Array | None
    row_top: Array | None  # [B, T], max log-ratio of the row
    horizon: float
    index: NDArray[np.int64]  # [B], sequence numbers in the source

    @cached_property
    def span(self) -> float:
        return self.high - self.low

    @cached_property
    def shift(self) -> Array:
        with np.errstate(over="ignore"):
            return _total(np.where(self.mask, np.expm1(self.ratio), 0.0))

    @cached_property
    def log_weight(self) -> Array:
        return _total(self.ratio)

    @cached_property
    def sequence_kl(self) -> Array:
        return _total(self.kl)

    @cached_property
    def largest_kl(self) -> Array:
        return np.where(np.isnan(self.kl).any(1), np.nan, np.nan_to_num(self.kl).max(1, initial=0))

    @cached_property
    def outside_total(self) -> Array:
        return np.zeros(len(self.reward)) if self.outside is None else _total(self.outside)

    @cached_property
    def baseline(self) -> float:
        """Mean of R - a, or 0 where the outside mass is not known."""
        return 0.0 if self.outside is None else float((self.reward - self.low).mean())

    @cached_property
    def gain(self) -> Array:
        """One rollout's estimate of L'."""
        centred = self.shift + self.outside_total
        with np.errstate(invalid="ignore"):  # an infinite ratio leaves NaN
            return np.asarray((self.reward - self.low) * self.shift - self.baseline * centred)

    @cached_property
    def position_kl(self) -> Array:
        """Mean over sequences of kl at each position."""
        length = int(self.position[self.mask].max()) + 1
        sums = np.bincount(self.position[self.mask], self.kl[self.mask], minlength=length)
        return np.asarray(sums / len(self.reward), dtype=np.float64)

    @cached_property
    def same_policies(self) -> bool:
        """True when nothing distinguishes the policies on any token."""
        return bool((self.kl == 0).all() and (self.ratio == 0).all())

    def keep(self, max_kl: float) -> NDArray[np.bool_]:
        return np.asarray(self.largest_kl <= max_kl)

    def terms(self, alpha: float, held_out: bool) -> dict[str, Any]:
        """What every certificate takes."""
        return {"alpha": alpha, "reward_range": (self.low, self.high), "held_out": held_out}

    def mirrored(self) -> _Batch:
        """The same rollouts with the reward a + b - R: a gain there is a loss here."""
        return replace(self, reward=self.low + self.high - self.reward)

    def take(self, which: NDArray[np.bool_]) -> _Batch:
        rows: dict[str, Any] = {
            entry.name: value[which]
            for entry in fields(self)
            if isinstance(value := getattr(self, entry.name), np.ndarray)
        }
        return replace(self, **rows)

    def attainable(self, seq_kl: float) -> float:
        """Estimate of the largest L' of any reward in the range, from averages."""
        length = self.horizon if math.isfinite(self.horizon) else self.mask.sum(1).max()
        limits = [math.sqrt(length * seq_kl / 2)] if seq_kl >= 0 else []
        if self.tv is not None:
            limits.append(float(_total(self.tv).mean()))
        if self.chi2 is not None and self.outside is not None and not self.outside.any():
            limits.append(math.sqrt(max(float(_total(self.chi2).mean()), 0.0)) / 2)
        return self.span * min((x for x in limits if not math.isnan(x)), default=math.inf)


def _needed(divergence: TokenDivergence, name: str) -> torch.Tensor:
    value: torch.Tensor | None = getattr(divergence, name)
    if value is None:
        raise ValueError(
            f"a certificate needs {name}: ask token_divergence for outputs=('kl', 'log_ratio')"
        )
    return value


def _total(values: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return np.asarray(values.sum(axis=1), dtype=np.float64)


def _pack(
    divergence: TokenDivergence, rewards: torch.Tensor, layout: SequenceLayout
) -> TokenStatistics:
    """Put tokens of any layout one sequence after another."""
    order = _sequences.by_position(layout).cpu()
    packed = {
        name: value.detach().cpu().reshape(-1)[order]
        for name, value in divergence._asdict().items()
        if value is not None
    }
    return TokenStatistics(
        path=None,
        rollout=PolicyRecord(),
        train=PolicyRecord(),
        vocab_size=None,
        tokens=None,
        cu_seqlens=layout.offsets.cpu(),
        counted=layout.token_mask.cpu().reshape(-1)[order],
        divergence=TokenDivergence(**packed),
        rewards=torch.as_tensor(rewards).detach().cpu().double(),
    )


def _batch(statistics: TokenStatistics, low: float, high: float, horizon: int | None) -> _Batch:
    """Check everything, and pad."""
    where = "" if statistics.path is None else f"{statistics.path}: "
    num_sequences = len(statistics.cu_seqlens) - 1
    if statistics.rollout.truncated:
        r = statistics.rollout
        raise ValueError(
            f"{where}sampling was truncated (top_k {r.top_k}, top_p {r.top_p}, min_p {r.min_p}) "
            "but the rollout logits are raw: the rollouts do not come from their softmax, so no "
            "certificate follows; record processed logits"
        )
    if statistics.rewards is None:
        raise ValueError(f"{where}no rewards: a certificate is about the expected reward")
    reward = statistics.rewards.numpy()
    if reward.shape != (num_sequences,):
        raise ValueError(
            f"{where}rewards must be [B] with B = {num_sequences}, got {list(reward.shape)}"
        )
    if num_sequences < 2:
        raise ValueError(f"{where}a certificate needs at least 2 sequences, got {num_sequences}")
    wrong = ~((reward >= low) & (reward <= high))
    if wrong.any():
        b = int(wrong.argmax())
        what = "NaN" if math.isnan(reward[b]) else f"{reward[b]:g}, outside [{low:g}, {high:g}]"
        raise ValueError(f"{where}the reward of sequence {b} is {what}")
    counted = statistics.counted.numpy()
    if not counted.any():
        raise ValueError(f"{where}no token counts, so there is nothing to compare")
    layout = statistics.layout
    ids, places = layout.sequence_id.numpy()[counted], layout.position.numpy()[counted]
    starts = np.searchsorted(ids, np.arange(num_sequences))
    rank = np.arange(len(ids)) - starts[ids]
    lengths = np.bincount(ids, minlength=num_sequences)
    longest = int(lengths.max())
    if horizon is not None and horizon < longest:
        raise ValueError(f"{where}horizon {horizon} is below the longest sequence, {longest}")

    def padded(values: torch.Tensor | None) -> Array | None:
        if values is None:
            return None
        if values.shape != statistics.counted.shape:
            raise ValueError(
                f"{where}every statistic must be {list(counted.shape)}, got {list(values.shape)}"
            )
        out = np.zeros((num_sequences, longest))
        out[ids, rank] = values.double().numpy()[counted]
        return out

    found = statistics.divergence
    kl, ratio = padded(_needed(found, "kl")), padded(_needed(found, "log_ratio"))
    assert kl is not None and ratio is not None
    if (kl < 0).any():
        raise ValueError(f"{where}kl must be >= 0, got {kl.min():g}")
    position = np.zeros((num_sequences, longest), dtype=np.int64)
    position[ids, rank] = places
    return _Batch(
        reward=reward,
        low=low,
        high=high,
        ratio=ratio,
        kl=kl,
        mask=np.arange(longest) < lengths[:, None],
        position=position,
        tv=padded(found.tv),
        chi2=padded(found.chi2),
        outside=padded(found.outside_mass),
        row_top=padded(found.max_log_ratio),
        horizon=math.inf if horizon is None else float(horizon),
        index=np.arange(num_sequences),
    )


def _gate(batch: _Batch, constants: GateConstants, name: str) -> GateStatistics:
    from theory import certify as math_

    budget = name == "frozen_budget"
    return math_.gate(
        np.where(np.isnan(batch.ratio), -np.inf, batch.ratio),  # no evidence: the worst ratio
        batch.kl,
        batch.mask,
        max_kl=constants.max_kl,
        mode="budget" if budget else "drift",
        shift_budget=constants.shift_budget if budget else constants.drift_budget,
        kl_budget=constants.kl_budget,
        ratio_cap=constants.max_ratio,
        horizon=batch.horizon,
    )


def _finite(
    batch: _Batch,
    gates: dict[str, GateStatistics],
    constants: GateConstants,
    alpha: float,
    held_out: bool,
) -> dict[str, Certificate]:
    """The finite-sample lower limits, by name."""
    from theory import certify as math_

    shared = batch.terms(alpha, held_out)
    k = constants.max_abs_log_weight
    made = (
        math_.truncated_weight_certificate(
            batch.reward, batch.log_weight, max_weight=1 + k, **shared
        ),
        math_.sequence_mask_certificate(
            batch.reward,
            batch.log_weight,
            batch.keep(constants.max_kl),
            max_abs_log_weight=k,
            **shared,
        ),
        *(math_.frozen_certificate(batch.reward, gate, **shared) for gate in gates.values()),
    )
    return {c.name: c for c in made}


def _asymptotic(
    batch: _Batch,
    gates: dict[str, GateStatistics],
    constants: GateConstants,
    alpha: float,
    held_out: bool,
) -> tuple[dict[str, Certificate], tuple[tuple[str, str], ...]]:
    """The lower limits by normal approximation, by name, and those that cannot be given."""
    from theory import certify as math_

    shared = batch.terms(alpha, held_out)
    made, missing = [], []
    unscored = int((np.isnan(batch.kl) | np.isnan(batch.ratio)).any(1).sum())
    why = ""
    if unscored:
        why = f"KL or log-ratio is NaN in {unscored} of {len(batch.reward)} sequences"
    elif np.isinf(batch.kl).any():
        why = f"D_seq is infinite: {_violation(batch)}"
    elif not np.isfinite(batch.shift).all() or not np.isfinite(batch.log_weight).all():
        why = "the ratio of a sampled token is 0 or too large to sum"
    if why:
        missing += [("seq_kl", why), ("log", why)]
    else:
        made.append(
            math_.seq_kl_certificate(
                batch.reward,
                batch.shift,
                batch.sequence_kl,
                baseline=batch.baseline,
                outside_mass=batch.outside_total,
                **shared,
            )
        )
        made.append(math_.log_certificate(batch.reward, batch.log_weight, **shared))
    keep = batch.keep(constants.max_kl) & np.isfinite(batch.log_weight)
    if keep.any():
        made.append(math_.sequence_mask_certificate(batch.reward, batch.log_weight, keep, **shared))
    else:
        missing.append(("sequence_mask", f"no sequence has every KL <= {constants.max_kl:g}"))
    made += [
        math_.frozen_certificate(batch.reward, gate, asymptotic=True, **shared)
        for gate in gates.values()
    ]
    return {c.name: c for c in made}, tuple(missing)


def _violation(batch: _Batch) -> str:
    """Say where the train policy first excludes a token that the rollout policy can produce."""
    b, t = np.unravel_index(int(np.isinf(batch.kl).argmax()), batch.kl.shape)
    return (
        f"the train policy excludes what the rollout policy can sample (sequence "
        f"{batch.index[b]}, position {batch.position[b, t]})"
    )


def _estimate(certificate: Certificate) -> float:
    parts = certificate.parts
    return parts["estimate"] if "estimate" in parts else parts["surrogate"]


def radius(certificate: Certificate) -> float:
    """Confidence radius of a certificate's estimate, reward units."""
    parts = certificate.parts
    return parts["radius"] if "radius" in parts else parts["surrogate_radius"]


def _allowance(certificate: Certificate, span: float) -> float:
    """What the estimate of a certificate must exceed: its radius and error terms."""
    parts = certificate.parts
    error = parts.get("error_bound", 0.0) + parts.get("hit_bound", 0.0)
    return radius(certificate) + span * error


def _mean_interval(values: Array, alpha: float) -> Interval:
    """The normal approximation, with infinite and missing values kept as they are."""
    from theory import certify as math_

    if np.isfinite(values).all():
        return math_.clt(values, alpha)
    mean = float("nan") if np.isnan(values).any() else float(values.mean())
    return math_.Interval(mean, mean, mean, alpha, "Student t (asymptotic)", False, 0.0)


def _judge_finite(
    batch: _Batch,
    decides: Certificate,
    mirrored: Certificate,
    seq_kl_lower: Interval,
    needed: RolloutsNeeded,
) -> tuple[Verdict, str]:
    confidence = f"with probability {1 - seq_kl_lower.alpha:g}"
    if batch.same_policies:
        return Verdict.NOT_CERTIFIED, (
            "the train policy equals the rollout policy on every token: there is no update to "
            "certify"
        )
    if decides.certifies_improvement:
        return Verdict.CERTIFIED, (
            f"J(train) - J(rollout) >= {decides.lower_bound:.3g} {confidence} ({decides.name}, "
            "finite samples)"
        )
    if mirrored.lower_bound > 0:
        return Verdict.HARMFUL, (
            f"J(train) - J(rollout) <= {-mirrored.lower_bound:.3g} {confidence} ({decides.name}, "
            "finite samples)"
        )
    if np.isinf(batch.sequence_kl).any():
        return Verdict.VACUOUS, f"D_seq is infinite: {_violation(batch)}"
    if seq_kl_lower.lower >= 1:
        return Verdict.VACUOUS, (
            f"D_seq >= {seq_kl_lower.lower:.3g} nats {confidence} (finite samples): the error "
            "bound is above the reward span, so no surrogate gain outweighs it"
        )
    if decides.lower_bound > 0:
        return Verdict.NOT_CERTIFIED, (
            f"the lower limit {decides.lower_bound:.3g} is positive, but on the data that the "
            "policy was trained on: certify on fresh rollouts (held_out)"
        )
    estimate = _estimate(decides)
    more = getattr(needed, decides.name)
    if estimate <= 0:
        outlook = "the estimate itself is not positive"
    elif more is None:
        outlook = "the estimate does not exceed its error bound"
    elif estimate <= 2 * decides.parts["standard_error"]:
        outlook = (
            f"about {more} rollouts if the estimate, within two standard errors of 0, is right"
        )
    else:
        outlook = f"about {more} rollouts would do if mean and variance stay"
    parts = decides.parts
    spent = f"estimate {estimate:.3g}, radius {radius(decides):.3g}"
    if "hit_bound" in parts:
        spent += f", error {parts['error_bound']:.3g}, closed gate {parts['hit_bound']:.3g}"
    return Verdict.NOT_CERTIFIED, (
        f"the lower limit is {decides.lower_bound:.3g} ({decides.name}: {spent}); {outlook}"
    )


def _judge_asymptotic(
    batch: _Batch,
    made: dict[str, Certificate],
    seq_kl: Interval,
    attainable: float,
    alpha: float,
) -> tuple[Verdict, str]:
    if batch.same_policies:
        return Verdict.NOT_CERTIFIED, "normal approximation: nothing varies"
    limit = made.get("seq_kl")
    upper = _mean_interval(batch.gain + batch.span * batch.sequence_kl, alpha).upper
    if limit is not None and limit.rigorous and limit.lower_bound > 0:
        return Verdict.CERTIFIED, (
            f"normal approximation: L' - (b - a) D_seq >= {limit.lower_bound:.3g}"
        )
    if upper < 0:
        return Verdict.HARMFUL, f"normal approximation: L' + (b - a) D_seq <= {upper:.3g}"
    if seq_kl.lower >= 1 or batch.span * seq_kl.lower >= attainable:
        than = "1" if seq_kl.lower >= 1 else f"the attainable L', {attainable:.3g}"
        return Verdict.VACUOUS, (
            f"normal approximation: (b - a) D_seq >= {batch.span * seq_kl.lower:.3g}, above {than}"
        )
    shown = "missing" if limit is None else f"{limit.lower_bound:.3g}"
    return Verdict.NOT_CERTIFIED, (
        f"normal approximation: the lower limit of L' - (b - a) D_seq is {shown}, the upper limit "
        f"of L' + (b - a) D_seq is {upper:.3g}"
    )


def _rollouts_needed(
    batch: _Batch,
    gates: dict[str, GateStatistics],
    constants: GateConstants,
    alpha: float,
    finite: dict[str, Certificate],
) -> RolloutsNeeded:
    from scipy.stats import norm

    from theory import certify as math_

    r, k = batch.reward - batch.low, constants.max_abs_log_weight
    known = np.where(np.isnan(batch.log_weight), -np.inf, batch.log_weight)
    keep = batch.keep(constants.max_kl) & (np.abs(known) <= k)

    def count(statistic: Array, reach: float) -> int | None:
        if not statistic.mean() > 0:
            return None
        variance, mean = float(statistic.var(ddof=1)), float(statistic.mean())
        return math_.rollouts_needed(variance, batch.span * reach, mean, alpha)

    by_seq_kl = None
    x = batch.gain - batch.span * batch.sequence_kl
    if np.isfinite(x).all() and x.mean() > 0:
        z = float(norm.ppf(1 - alpha))
        by_seq_kl = max(2, math.ceil((z * x.std(ddof=1) / x.mean()) ** 2))
    half = finite["frozen_budget"].parts.get("rollouts_to_halve_radius")
    return RolloutsNeeded(
        truncated_weight=count(r * np.expm1(np.minimum(known, math.log1p(k))), 1 + k),
        sequence_mask=count(math_.mask_statistic(r, known, keep), k + max(k, 1.0)),
        frozen_budget=_gate_rollouts(r, gates["frozen_budget"], batch.span, alpha),
        frozen_drift=_gate_rollouts(r, gates["frozen_drift"], batch.span, alpha),
        seq_kl=by_seq_kl,
        halve_gate_radius=None if half is None else int(half),
    )


def _expected_gate_limit(
    r: Array, gate: GateStatistics, span: float, alpha: float, n: int
) -> float:
    """C3' with n rollouts, if means, variances and the hit rate stay."""
    from theory import certify as math_

    part = alpha / 3
    gain = r * gate.shift
    low, high = gate.shift_range
    radius = math_.bernstein_radius(float(gain.var(ddof=1)), (high - low) * span, n, part)
    noise = math_.bernstein_radius(float(gate.kl.var(ddof=1)), gate.kl_limit, n, part)
    divergence = min(float(gate.kl.mean()) + noise, gate.kl_limit)
    hits = math_.clopper_pearson(round(float(gate.hit.mean()) * n), n, part).upper
    worst = math_.binary_kl_inverse(hits, divergence)
    return float(gain.mean()) - radius - span * (divergence + worst)


def _gate_rollouts(r: Array, gate: GateStatistics, span: float, alpha: float) -> int | None:
    """Smallest power-of-two bracket, then bisection; None when a billion are not enough."""
    low, high = 1, 2
    while _expected_gate_limit(r, gate, span, alpha, high) <= 0:
        low, high = high, 2 * high
        if high > 2**30:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        fits = _expected_gate_limit(r, gate, span, alpha, middle) > 0
        low, high = (low, middle) if fits else (middle, high)
    return high


def _split(batch: _Batch, alpha: float) -> tuple[GateConstants, _Batch, int]:
    """Choose constants on every fourth sequence; return them, the others, and how many went."""
    from theory import certify as math_

    first = np.arange(len(batch.reward)) % 4 == 0
    chosen, rest = batch.take(first), batch.take(~first)
    if len(chosen.reward) < 2 or not (chosen.mask.any() and rest.mask.any()):
        raise ValueError(f'constants="split" needs at least 5 sequences, got {len(batch.reward)}')
    r, n = chosen.reward - chosen.low, len(rest.reward)
    known = np.where(np.isnan(chosen.log_weight), -np.inf, chosen.log_weight)

    def weight_limit(k: float) -> float:
        x = r * np.expm1(np.minimum(known, math.log1p(k)))
        span = chosen.span * (1 + k)
        return float(x.mean()) - math_.bernstein_radius(float(x.var(ddof=1)), span, n, alpha)

    cap = max((0.05, 0.1, 0.2, 0.5, 1.0, 2.0), key=weight_limit)
    step = np.where(chosen.mask, np.nan_to_num(np.expm1(np.minimum(chosen.ratio, 1.0))), 0.0)

    def quantiles(values: Array) -> list[float]:
        finite = np.nan_to_num(values, nan=0.0, posinf=0.0)
        return [1.25 * float(x) for x in np.quantile(finite, (0.5, 0.75, 0.9, 1.0))]

    def gate_limit(constants: GateConstants, name: str) -> float:
        return _expected_gate_limit(r, _gate(chosen, constants, name), chosen.span, alpha, n)

    # delta, C, b and k for the budget gate; then the drift gate's budget with the same others.
    limits = zip(quantiles(chosen.largest_kl), quantiles(chosen.sequence_kl), strict=True)
    budget = max(
        (
            GateConstants(delta, ratio, b, k, cap)
            for delta, k in limits
            for ratio in (1.25, 2.0, 4.0)
            for b in quantiles(np.abs(step).sum(1))
        ),
        key=lambda constants: gate_limit(constants, "frozen_budget"),
    )
    drifts = quantiles(np.abs(np.cumsum(step, axis=1)).max(1))
    both = max(
        (replace(budget, drift_budget=b) for b in drifts),
        key=lambda constants: gate_limit(constants, "frozen_drift"),
    )
    return both, rest, len(r)


def _bounds(
    batch: _Batch, seq_kl: float, attainable: float, surrogate: float
) -> tuple[PublishedBound, ...]:
    """Published and own error bounds at the sampled maxima."""
    from theory.bounds.catalogue import CATALOGUE
    from theory.records import MAXIMUM

    top = float(np.max(batch.kl))
    if not math.isfinite(top) or not math.isfinite(seq_kl):
        return ()
    length = int(batch.horizon) if math.isfinite(batch.horizon) else int(batch.mask.sum(1).max())
    pinsker = math.sqrt(top / 2)
    known: dict[str, Any] = {"max_kl": top, "max_tv": min(1.0, pinsker), "seq_kl": seq_kl}
    if batch.tv is not None:
        known["max_tv"] = min(float(batch.tv.max()), pinsker, 1.0)
        mean_tv = np.zeros(length)
        mean_tv[: batch.tv.shape[1]] = batch.tv.mean(axis=0)
        known["mean_tv"] = np.minimum(mean_tv, known["max_tv"])
    outside = float(batch.outside_total.mean())
    rows = []
    for name in _BOUNDS:
        chosen = CATALOGUE[name].select(known)
        if chosen is None:
            continue
        bound = CATALOGUE[name].compute(length, **chosen).with_outside_mass(outside)
        value = batch.span * float(bound.value)
        rows.append(
            PublishedBound(
                name=name,
                value=value,
                published=name not in _OURS,
                needs=", ".join(f"{what}: {how}" for what, how in bound.needs),
                assumes_maximum=any(how is MAXIMUM for _, how in bound.needs),
                below_range=value < batch.span,
                certifying=value < attainable,
                instance=value < surrogate,
            )
        )
    return tuple(rows)


def _bottleneck(batch: _Batch, seq_kl: float) -> Bottleneck | None:
    if not (math.isfinite(seq_kl) and seq_kl > 0):
        return None
    per_sequence, per_position = batch.sequence_kl, batch.position_kl
    sequences = [int(batch.index[i]) for i in _fewest(per_sequence)]
    positions = _fewest(per_position)
    first = float(batch.kl[:, 0].sum() / per_sequence.sum())
    verb = "is enough" if seq_kl < SEQ_KL_NEEDED else "is too much"
    sentences = (
        f"D_seq is {seq_kl:.3g} nats, which {verb} for SeqKL: it can certify below "
        f"{SEQ_KL_NEEDED:.3g}",
        f"{SHARE:.0%} of it comes from {_listed(sequences)} of {len(per_sequence)} sequences",
        f"{SHARE:.0%} of it comes from {_listed(positions)} of {len(per_position)} positions; "
        f"{first:.0%} from the first token",
    )
    return Bottleneck(SHARE, tuple(sequences), tuple(positions), first, SEQ_KL_NEEDED, sentences)


def _fewest(values: Array) -> list[int]:
    """The fewest entries that hold the share of the sum, largest first."""
    order = np.argsort(-values, kind="stable")
    running = np.cumsum(values[order])
    count = int(np.searchsorted(running, SHARE * running[-1] * (1 - 1e-12))) + 1
    return [int(i) for i in order[:count]]


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{len(numbers)} ({shown}{', ...' if len(numbers) > 8 else ''})"


def _notes(batch: _Batch, statistics: TokenStatistics, held_out: bool) -> list[str]:
    n = len(batch.reward)
    notes = []
    if not held_out:
        notes.append(
            "optimistic: same data; state that the rollouts were drawn after the train policy was "
            "fixed (held_out) to get a guarantee"
        )
    if n < SMALL_SAMPLE:
        notes.append(f"{n} rollouts: the normal approximation is rough")
    if statistics.group_ids is not None:
        groups = int(statistics.group_ids.unique().numel())
        if groups < n:
            notes.append(
                f"rollouts of {groups} prompts: every statement is about these prompts, each "
                "weighted by its rollouts"
            )
    if len(np.unique(batch.reward)) == 1:
        notes.append(f"every reward is {batch.reward[0]:g}: no policy can be told from another")
    unscored = int((np.isnan(batch.kl) | np.isnan(batch.ratio)).sum())
    if unscored:
        notes.append(f"{unscored} tokens without evidence (NaN) count as the worst case")
    outside = float(batch.outside_total.mean())
    if outside > 0:
        notes.append(
            f"train has {outside:.3g} mass per sequence outside the rollout's support: added to "
            "the bounds that assume support"
        )
    return notes


def _plain(value: Any) -> Any:
    """A value that strict JSON can hold."""
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return json_number(value)
