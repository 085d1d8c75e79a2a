# SPDX-License-Identifier: Apache-2.0
"""Stage 2: from per-token divergences to a verdict per sequence.

One policy for values that are not finite, whichever criterion reads them, at tokens that count:

* NaN is missing evidence and rejects its sequence: NON_FINITE in a divergence, UNSCORED in a
  sampled log-ratio (an engine that reported no log-prob).
* An infinity is evidence of policies that cannot agree and rejects its sequence: SUPPORT.
* Nothing at a token that does not count is ever used.
"""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from trm_ext import _checks, _sequences, estimators
from trm_ext.divergence import TokenDivergence, token_divergence
from trm_ext.layout import SequenceLayout

__all__ = [
    "Criterion",
    "GeoRatioBand",
    "LengthNormalized",
    "MaxDivergence",
    "MeanDivergence",
    "QuantileDivergence",
    "Reason",
    "SequenceRatioBand",
    "SequenceVerdict",
    "SumDivergence",
    "TokenDivergenceLimit",
    "TokenRatioBand",
    "as_floats",
    "criteria_from_json",
    "criteria_to_json",
    "max_kl_verdict",
    "parse_criteria",
    "trust_region_mask",
    "verdict",
]


class Reason(IntEnum):
    """Why a sequence was kept or masked.

    KEPT and EMPTY sequences (no token counts) stay. NON_FINITE, UNSCORED and SUPPORT are the
    policy for values that are not finite. Every other name is the kind of the first criterion that
    failed; MAX_KL is the max criterion on the exact KL, MAX on another quantity. TOKENS: criteria
    that mask tokens left none.
    """

    KEPT = 0
    MAX_KL = 1
    NON_FINITE = 2
    EMPTY = 3
    SUPPORT = 4
    UNSCORED = 5
    MAX = 6
    MEAN = 7
    SUM = 8
    QUANTILE = 9
    GEO_RATIO = 10
    SEQ_RATIO = 11
    LN_TRM = 12
    TOKENS = 13


class Evidence(NamedTuple):
    """Per-token values that criteria look up by name."""

    divergence: dict[str, Tensor]
    log_ratio: Tensor | None
    layout: SequenceLayout
    reduced: dict[str, _sequences.Reduced]
    infinity_cap: float | None = None

    def reduce(self, name: str, values: Tensor) -> _sequences.Reduced:
        """Statistics of the sequences, computed once per name of the values."""
        if name not in self.reduced:
            self.reduced[name] = _sequences.reduce_tokens(values, self.layout)
        return self.reduced[name]

    def capped(self, values: Tensor) -> Tensor:
        """Infinite values capped, if that was asked for."""
        if self.infinity_cap is None:
            return values
        return estimators.cap_infinite(values, self.infinity_cap)

    def values(self, quantity: str) -> Tensor:
        """The per-token values of a quantity, shaped like the tokens."""
        if quantity in self.divergence:
            return self.capped(self.divergence[quantity])
        if quantity in estimators.FROM_LOG_RATIO:
            return estimators.FROM_LOG_RATIO[quantity](self.ratio(quantity))
        if quantity in estimators.FROM_LOGPS:
            if {"logp_train", "logp_rollout"} <= self.divergence.keys():
                return self.capped(
                    estimators.FROM_LOGPS[quantity](
                        self.divergence["logp_train"], self.divergence["logp_rollout"]
                    )
                )
            raise ValueError(f"{quantity} needs logp_train and logp_rollout in divergence")
        known = ", ".join([*self.divergence, *estimators.FROM_LOG_RATIO, *estimators.FROM_LOGPS])
        raise ValueError(f"no per-token values of {quantity!r}; there are {known}")

    def ratio(self, wanted_by: str) -> Tensor:
        """The log-ratio of the sampled tokens."""
        if self.log_ratio is None:
            raise ValueError(f"{wanted_by} needs log_ratio")
        return self.capped(self.log_ratio)


class Finding(NamedTuple):
    """What one criterion found: statistic ``[B]`` float64, failed ``[B]``, position ``[B]``.

    Criteria that mask tokens also say which tokens pass.
    """

    statistic: Tensor
    failed: Tensor
    position: Tensor
    tokens: Tensor | None = None


@dataclass(frozen=True)
class Criterion:
    """Base of the criteria. A criterion is its string: ``parse_criteria(str(c)) == (c,)``."""

    reason: ClassVar[Reason]

    def judge(self, evidence: Evidence) -> Finding:
        """The statistic of each sequence, and whether it is beyond the limit."""
        raise NotImplementedError

    @property
    def code(self) -> Reason:
        """What a verdict says about a sequence that fails this criterion."""
        return self.reason

    def sampled(self, evidence: Evidence) -> bool:
        """Whether it reads the log-ratio of the sampled token."""
        quantity = getattr(self, "quantity", None)
        return quantity is None or quantity not in evidence.divergence

    def read(self, evidence: Evidence) -> Tensor:
        """The per-token values that must be finite."""
        if self.sampled(evidence):
            return evidence.ratio(str(self))
        return evidence.values(getattr(self, "quantity", ""))

    def reduce_read(self, evidence: Evidence) -> _sequences.Reduced:
        """Where the values that must be finite are not."""
        name = "log_ratio" if self.sampled(evidence) else getattr(self, "quantity", "")
        return evidence.reduce(name, self.read(evidence))


@dataclass(frozen=True)
class _Limit(Criterion):
    """``statistic of quantity <= limit``."""

    quantity: str
    limit: float
    prefix: ClassVar[str]

    def __post_init__(self) -> None:
        _check_quantity(self.quantity)
        object.__setattr__(self, "limit", _checks.check_threshold(self.name, self.limit))

    def __str__(self) -> str:
        return f"{self.name}<={self.limit!r}"

    @property
    def name(self) -> str:
        """The statistic as criteria spell it, such as ``max_kl``."""
        return f"{self.prefix}_{self.quantity}"

    def reduce(self, evidence: Evidence) -> _sequences.Reduced:
        """Statistics of the quantity."""
        return evidence.reduce(self.quantity, evidence.values(self.quantity))


@dataclass(frozen=True)
class MaxDivergence(_Limit):
    """TRM: the largest value of a quantity over the sequence's tokens is at most ``limit``.

    Attributes:
        quantity: ``kl`` or another per-token quantity.
        limit: inclusive, >= 0, in the quantity's unit.

    >>> str(MaxDivergence("kl", 0.02))
    'max_kl<=0.02'
    """

    reason: ClassVar[Reason] = Reason.MAX
    prefix: ClassVar[str] = "max"

    @property
    def code(self) -> Reason:
        """MAX_KL for the exact KL."""
        return Reason.MAX_KL if self.quantity == "kl" else Reason.MAX

    def judge(self, evidence: Evidence) -> Finding:
        """Max over counted tokens, where it is."""
        found = self.reduce(evidence)
        return _upper(found.largest.double(), self.limit, found.position)


@dataclass(frozen=True)
class MeanDivergence(_Limit):
    """TRM-Avg: the mean of a quantity over the sequence's tokens is at most ``limit``.

    ``mean_ratio_gap`` is SER. The position is that of the largest value.

    Attributes:
        quantity: ``kl`` or another per-token quantity.
        limit: inclusive, >= 0, in the quantity's unit.

    >>> parse_criteria("ser<=0.05") == (MeanDivergence("ratio_gap", 0.05),)
    True
    """

    reason: ClassVar[Reason] = Reason.MEAN
    prefix: ClassVar[str] = "mean"

    def judge(self, evidence: Evidence) -> Finding:
        """Mean over counted tokens."""
        found = self.reduce(evidence)
        return _upper(found.total / found.tokens.clamp(min=1), self.limit, found.position)


@dataclass(frozen=True)
class SumDivergence(_Limit):
    """The sum of a quantity over the sequence's tokens is at most ``limit``: sequence KL for kl.

    Attributes:
        quantity: ``kl`` or another per-token quantity.
        limit: inclusive, >= 0, in the quantity's unit.

    >>> str(SumDivergence("k3", 1.5))
    'sum_k3<=1.5'
    """

    reason: ClassVar[Reason] = Reason.SUM
    prefix: ClassVar[str] = "sum"

    def judge(self, evidence: Evidence) -> Finding:
        """Sum over counted tokens."""
        found = self.reduce(evidence)
        return _upper(found.total, self.limit, found.position)


@dataclass(frozen=True)
class QuantileDivergence(_Limit):
    """A quantile of a quantity over the sequence's tokens is at most ``limit``.

    The quantile is the smallest value that at least a share ``level`` of the tokens do not exceed
    (nearest rank): isolated tokens, such as flipped expert routes, do not decide.

    Attributes:
        quantity: ``kl`` or another per-token quantity.
        limit: inclusive, >= 0, in the quantity's unit.
        level: in (0, 1].

    >>> str(QuantileDivergence("kl", 0.02, 0.99))
    'q0.99_kl<=0.02'
    """

    level: float
    reason: ClassVar[Reason] = Reason.QUANTILE

    def __post_init__(self) -> None:
        if not isinstance(self.level, (int, float)) or not 0 < self.level <= 1:
            raise ValueError(f"level must be a number in (0, 1], got {self.level!r}")
        object.__setattr__(self, "level", float(self.level))
        super().__post_init__()

    @property
    def name(self) -> str:
        """The statistic as criteria spell it, such as ``q0.99_kl``."""
        return f"q{self.level!r}_{self.quantity}"

    def judge(self, evidence: Evidence) -> Finding:
        """Nearest-rank quantile; the position is that of the largest value."""
        found = self.reduce(evidence)
        level = _sequences.quantile(evidence.values(self.quantity), evidence.layout, self.level)
        return _upper(level.double(), self.limit, found.position)


@dataclass(frozen=True)
class TokenDivergenceLimit(_Limit):
    """Masks the tokens at which a quantity exceeds ``limit``; their sequence stays.

    Attributes:
        quantity: ``kl`` or another per-token quantity.
        limit: inclusive, >= 0, in the quantity's unit.

    >>> str(TokenDivergenceLimit("kl", 0.1))
    'token_kl<=0.1'
    """

    reason: ClassVar[Reason] = Reason.TOKENS
    prefix: ClassVar[str] = "token"

    def __post_init__(self) -> None:
        if self.quantity == "ratio":
            raise ValueError("token_ratio is the band of rho_t: TokenRatioBand, not a quantity")
        super().__post_init__()

    def judge(self, evidence: Evidence) -> Finding:
        """The statistic is the share of counted tokens that pass."""
        values = evidence.values(self.quantity)
        passes = values.double() <= self.limit
        return _per_token(passes, self.reduce(evidence).position, evidence.layout)


@dataclass(frozen=True)
class _Band(Criterion):
    """``low <= ratio <= high`` with both ends inclusive, judged on logarithms."""

    low: float = 0.0
    high: float = math.inf
    ratio: ClassVar[str]

    def __post_init__(self) -> None:
        low, high = check_band(self.ratio, (self.low, self.high))
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    def __str__(self) -> str:
        return f"{self.low!r}<={self.ratio}<={self.high!r}"

    def inside(self, log_values: Tensor) -> Tensor:
        """Whether the ratios with these logarithms are in the band."""
        return inside_band(log_values, (self.low, self.high))


@dataclass(frozen=True)
class GeoRatioBand(_Band):
    """Geo-Mask: ``low <= (Π rho_t)^(1/T) <= high``, T the number of counted tokens.

    The statistic in a verdict is its logarithm, the mean log-ratio. Opposite deviations cancel:
    ratios 100 and 0.01 have geometric mean 1.

    Attributes:
        low: >= 0; 0 for no lower end.
        high: >= low; inf for no upper end.

    >>> str(GeoRatioBand(0.999, 1.001))
    '0.999<=geo_ratio<=1.001'
    """

    reason: ClassVar[Reason] = Reason.GEO_RATIO
    ratio: ClassVar[str] = "geo_ratio"

    def judge(self, evidence: Evidence) -> Finding:
        """Mean log-ratio; the position is that of the largest |log_ratio|."""
        return _ratio_of_sequences(self, evidence, mean=True)


@dataclass(frozen=True)
class SequenceRatioBand(_Band):
    """Seq-MIS: ``low <= Π rho_t <= high``. The statistic in a verdict is its logarithm.

    At a constant drift per token the product leaves any band with length.

    Attributes:
        low: >= 0; 0 for no lower end.
        high: >= low; inf for no upper end.

    >>> parse_criteria("seq_ratio<=5") == (SequenceRatioBand(high=5.0),)
    True
    """

    reason: ClassVar[Reason] = Reason.SEQ_RATIO
    ratio: ClassVar[str] = "seq_ratio"

    def judge(self, evidence: Evidence) -> Finding:
        """Sum of log-ratios; the position is that of the largest |log_ratio|."""
        return _ratio_of_sequences(self, evidence, mean=False)


@dataclass(frozen=True)
class TokenRatioBand(_Band):
    """Token mask, IcePop: masks the tokens with rho_t outside ``low .. high``; the sequence stays.

    Attributes:
        low: >= 0; 0 for no lower end.
        high: >= low; inf for no upper end.

    >>> str(TokenRatioBand(0.5, 5.0))
    '0.5<=token_ratio<=5.0'
    """

    reason: ClassVar[Reason] = Reason.TOKENS
    ratio: ClassVar[str] = "token_ratio"

    def judge(self, evidence: Evidence) -> Finding:
        """The statistic is the share of counted tokens that pass."""
        values = evidence.ratio(str(self))
        largest = evidence.reduce("|log_ratio|", values.abs())
        return _per_token(self.inside(values), largest.position, evidence.layout)


@dataclass(frozen=True)
class LengthNormalized(Criterion):
    """LN-TRM: ``Σ_t |rho_t - 1| w_t / Σ_t w_t <= limit``, weights by how much is still to come.

    ``w_t = min(1, n_t max_tv, sqrt(n_t max_kl / 2))``, n_t the number of counted tokens after t:
    ``Σ_t |rho_t - 1| w_t`` bounds the error that the sequence contributes when every context keeps
    to max_kl and max_tv. The last token has weight 0, so a sequence of one token scores 0.

    Attributes:
        limit: inclusive, >= 0.
        max_kl: the KL(rollout||train) that contexts keep to, nats, > 0.
        max_tv: the total variation they keep to, > 0; None takes Pinsker's sqrt(max_kl / 2).

    >>> str(LengthNormalized(0.05, max_kl=0.01))
    'ln_trm(max_kl=0.01)<=0.05'
    """

    limit: float
    max_kl: float
    max_tv: float | None = None
    reason: ClassVar[Reason] = Reason.LN_TRM

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", _checks.check_threshold("ln_trm", self.limit))
        for name in ("max_kl", "max_tv"):
            value = getattr(self, name)
            if value is None and name == "max_tv":
                continue
            if not _checks.check_threshold(f"{name} of ln_trm", value) > 0:
                raise ValueError(f"{name} of ln_trm must be > 0, got {value}")
            object.__setattr__(self, name, float(value))

    def __str__(self) -> str:
        tv = "" if self.max_tv is None else f",max_tv={self.max_tv!r}"
        return f"ln_trm(max_kl={self.max_kl!r}{tv})<={self.limit!r}"

    def judge(self, evidence: Evidence) -> Finding:
        """The weighted mean; the position is that of the largest term."""
        layout = evidence.layout
        gap = estimators.ratio_gap(evidence.ratio(str(self))).double()
        after = _sequences.tokens_after(layout).double()
        max_tv = math.sqrt(self.max_kl / 2) if self.max_tv is None else self.max_tv
        weight = torch.minimum(after * max_tv, (after * (self.max_kl / 2)).sqrt()).clamp(max=1)
        score = _sequences.reduce_tokens(gap * weight, layout)
        total = _sequences.reduce_tokens(weight, layout).total
        mean = score.total / torch.where(total > 0, total, 1.0)
        return _upper(mean, self.limit, score.position)


_LIMITS = (MaxDivergence, MeanDivergence, SumDivergence, TokenDivergenceLimit)
_BANDS = (GeoRatioBand, SequenceRatioBand, TokenRatioBand)
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|inf|nan)"
_QUANTILE = r"q\d*\.?\d+(?:e[-+]?\d+)?_\w+"
_FORM = re.compile(
    rf"(?:(?P<low>{_NUMBER})<=)?(?P<name>{_QUANTILE}|[A-Za-z][\w.]*)(?:\((?P<options>[^)]*)\))?"
    rf"(?:(?P<sign><=|>=)(?P<high>{_NUMBER}))?"
)
_EXAMPLES = (
    "max_kl<=0.02, mean_k3<=0.001, sum_kl<=1, q0.99_kl<=0.02, token_kl<=0.1, "
    "0.999<=geo_ratio<=1.001, seq_ratio<=5, 0.5<=token_ratio<=5, ser<=0.05, "
    "ln_trm(max_kl=0.01)<=0.05"
)


def parse_criteria(text: str) -> tuple[Criterion, ...]:
    """Criteria from a string, joined by ``&``: a sequence must pass all of them.

    Forms: ``max_Q<=x``, ``mean_Q<=x``, ``sum_Q<=x``, ``q0.99_Q<=x`` and ``token_Q<=x`` of a
    per-token quantity Q (a field of TokenDivergence, a key of your dict, or one of k1, k2, k3,
    abs_log_ratio, ratio_gap, binary_kl, binary_tv); ``a<=R<=b``, ``R<=b``, ``R>=a`` of a ratio R in
    geo_ratio, seq_ratio, token_ratio; ``ser<=x``; ``ln_trm(max_kl=d,max_tv=e)<=x``.

    Args:
        text: the criteria; spaces are ignored.

    Returns:
        A tuple of criteria. ``" & ".join(map(str, result))`` gives them back exactly.

    Raises:
        ValueError: a form that is none of these, or a threshold out of range.

    Source:
        Trust Region Masking, arXiv 2512.23075, and the masks of RL frameworks.

    >>> parse_criteria("max_kl<=0.05 & 0.999<=geo_ratio<=1.001")
    (MaxDivergence(quantity='kl', limit=0.05), GeoRatioBand(low=0.999, high=1.001))
    """
    return tuple(_parse_one(part) for part in text.split("&"))


def _parse_one(text: str) -> Criterion:
    compact = re.sub(r"\s", "", text)
    form = _FORM.fullmatch(compact)
    if form is None or (form["low"] is None and form["high"] is None):
        raise ValueError(f"cannot read criterion {text.strip()!r}; examples: {_EXAMPLES}")
    name, sign = form["name"], form["sign"]
    low = None if form["low"] is None else float(form["low"])
    high = None if form["high"] is None else float(form["high"])
    for band in _BANDS:
        if (
            name == band.ratio
            and form["options"] is None
            and not (sign == ">=" and low is not None)
        ):
            if sign == ">=":
                low, high = high, None
            return band(0.0 if low is None else low, math.inf if high is None else high)
    if low is None and high is not None and sign == "<=":
        if name == "ln_trm":
            return LengthNormalized(high, **_options(text, form["options"]))
        if form["options"] is None:
            if name == "ser":
                return MeanDivergence("ratio_gap", high)
            for limit in _LIMITS:
                if name.startswith(limit.prefix + "_"):
                    return limit(name[len(limit.prefix) + 1 :], high)
            if re.fullmatch(_QUANTILE, name):
                level, quantity = name[1:].split("_", 1)
                return QuantileDivergence(quantity, high, float(level))
    raise ValueError(f"cannot read criterion {text.strip()!r}; examples: {_EXAMPLES}")


def _options(text: str, options: str | None) -> dict[str, float]:
    found = dict(part.split("=", 1) for part in (options or "").split(",") if "=" in part)
    if not {"max_kl"} <= found.keys() <= {"max_kl", "max_tv"}:
        raise ValueError(f"ln_trm takes max_kl and optionally max_tv, got {text.strip()!r}")
    try:
        return {name: float(value) for name, value in found.items()}
    except ValueError:
        raise ValueError(f"ln_trm takes numbers, got {text.strip()!r}") from None


def criteria_to_json(criteria: str | Criterion | Iterable[str | Criterion]) -> str:
    """Criteria as a JSON list of their strings.

    Args:
        criteria: as :func:`verdict` takes them.

    Returns:
        JSON that :func:`criteria_from_json` gives back exactly.

    Raises:
        ValueError: no criterion, or one that cannot be read.

    >>> criteria_to_json("max_kl<=0.02&ser<=0.1")
    '["max_kl<=0.02", "mean_ratio_gap<=0.1"]'
    """
    return json.dumps([str(criterion) for criterion in as_criteria(criteria)])


def criteria_from_json(text: str) -> tuple[Criterion, ...]:
    """Criteria from a JSON list of strings.

    Args:
        text: what :func:`criteria_to_json` returned.

    Returns:
        The criteria, equal to those that were written.

    Raises:
        ValueError: not a JSON list of criteria, or an empty one.

    >>> criteria_from_json('["max_kl<=0.02"]')
    (MaxDivergence(quantity='kl', limit=0.02),)
    """
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise ValueError(f"criteria in JSON are a list of strings, got {text}")
    return as_criteria(found)


def as_criteria(criteria: str | Criterion | Iterable[str | Criterion]) -> tuple[Criterion, ...]:
    """A tuple of criteria from whatever a caller wrote."""
    if isinstance(criteria, (str, Criterion)):
        criteria = (criteria,)
    found: list[Criterion] = []
    for entry in criteria:
        if isinstance(entry, Criterion):
            found.append(entry)
        elif isinstance(entry, str):
            found.extend(parse_criteria(entry))
        else:
            raise TypeError(f"a criterion is a Criterion or a string, got {type(entry).__name__}")
    if not found:
        raise ValueError("criteria is empty: name at least one, such as max_kl<=0.02")
    return tuple(found)


def check_band(name: str, band: Sequence[float]) -> tuple[float, float]:
    """A band is ``0 <= low <= high`` with high > 0."""
    if not isinstance(band, Sequence) or len(band) != 2:
        raise ValueError(f"{name} must be (low, high), got {band!r}")
    low, high = (_checks.check_threshold(f"{name} bound", bound) for bound in band)
    if high <= 0:
        raise ValueError(f"{name} upper bound must be > 0, got {high}")
    if low > high:
        raise ValueError(f"{name} lower bound {low} exceeds its upper bound {high}")
    return low, high


def inside_band(log_values: Tensor, band: tuple[float, float]) -> Tensor:
    """Whether exp(log_values) is in a band, inclusive.

    Compared in the dtype of the logarithms: a ratio that is the bound has its logarithm rounded
    like the bound's.
    """
    log_low = -math.inf if band[0] == 0 else math.log(band[0])
    return (log_values >= log_low) & (log_values <= math.log(band[1]))


def _check_quantity(quantity: str) -> None:
    if not isinstance(quantity, str) or not re.fullmatch(r"[A-Za-z]\w*", quantity):
        raise ValueError(f"a quantity is a name such as kl or k3, got {quantity!r}")


def _upper(statistic: Tensor, limit: float, position: Tensor) -> Finding:
    return Finding(statistic, ~(statistic <= limit), position)


def _ratio_of_sequences(band: _Band, evidence: Evidence, *, mean: bool) -> Finding:
    values = evidence.ratio(str(band))
    found = evidence.reduce("log_ratio", values)
    largest = evidence.reduce("|log_ratio|", values.abs())
    statistic = found.total / found.tokens.clamp(min=1) if mean else found.total
    inside = band.inside(statistic.to(values.dtype))
    return Finding(statistic, ~inside, largest.position)


def _per_token(passes: Tensor, position: Tensor, layout: SequenceLayout) -> Finding:
    passed = _sequences.reduce_tokens(passes.float(), layout)
    share = passed.total / passed.tokens.clamp(min=1)
    return Finding(share, torch.zeros_like(share, dtype=torch.bool), position, passes)


class SequenceVerdict(NamedTuple):
    """What was decided about each sequence, and from what.

    Attributes:
        keep: ``[B]`` bool, True for sequences that stay in the gradient.
        reason: ``[B]`` int64 codes of :class:`Reason`.
        position: ``[B]`` int64, the deciding token as an index on its sequence's own token axis:
            the first value that is not finite, else the worst token (the first on ties) of the
            first criterion that failed, or of the first criterion; -1 if no token counts.
        max_kl: ``[B]`` nats; NaN if any counted token is NaN or no exact KL was given, 0 for an
            empty sequence.
        mean_kl: ``[B]`` nats over counted tokens; likewise.
        sum_kl: ``[B]`` nats: the sequence's contribution to the total KL.
        token_keep: bool, shaped like the tokens: tokens that stay in the gradient.
        statistics: ``[C, B]`` float64, one row per criterion; logarithms for ratio bands.
        failed: ``[C, B]`` bool, one row per criterion.
        capped: ``[B]`` int64, counted tokens with an infinite value that ``infinity_cap`` replaced
            for a criterion; 0 without it.
    """

    keep: Tensor
    reason: Tensor
    position: Tensor
    max_kl: Tensor
    mean_kl: Tensor
    sum_kl: Tensor
    token_keep: Tensor
    statistics: Tensor
    failed: Tensor
    capped: Tensor

    def metrics(self, *, sync: bool = False) -> dict[str, Tensor | float]:
        """Acceptance overall and by reason, as ``trm/...`` keys, and ``trm/capped_tokens``.

        Shares are of the sequences that are not empty; NaN where there is none.

        Args:
            sync: True returns Python floats, which waits for the device once.

        Returns:
            A dict of 0-d float64 tensors, or of floats.

        >>> layout = SequenceLayout.from_lengths([1, 1])
        >>> found = max_kl_verdict(torch.tensor([0.0, 1.0]), layout, max_kl=0.1)
        >>> found.metrics(sync=True)["trm/rejected/max_kl"]
        0.5
        """
        some = (self.reason != int(Reason.EMPTY)).sum().double()
        found: dict[str, Tensor] = {
            "trm/sequences": some,
            "trm/sequences_kept": (self.reason == int(Reason.KEPT)).sum().double(),
        }
        found["trm/accepted"] = found["trm/sequences_kept"] / some
        found["trm/all_rejected"] = ((some > 0) & (found["trm/sequences_kept"] == 0)).double()
        for reason in Reason:
            if reason not in (Reason.KEPT, Reason.EMPTY):
                share = (self.reason == int(reason)).sum().double() / some
                found[f"trm/rejected/{reason.name.lower()}"] = share
        found["trm/capped_tokens"] = self.capped.sum().double()
        return as_floats(found) if sync else dict(found)


def as_floats(metrics: Mapping[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Metrics as Python floats, with one transfer from the device however many there are.

    Args:
        metrics: 0-d tensors on one device, or numbers.

    Returns:
        The same keys with floats.

    Warns:
        UserWarning: once per process, where ``trm/ratio/identical`` is 1: the same log-probs were
            given twice.

    >>> as_floats({"trm/a": torch.tensor(0.5), "trm/b": 2.0})
    {'trm/a': 0.5, 'trm/b': 2.0}
    """
    tensors = {name: v for name, v in metrics.items() if isinstance(v, Tensor)}
    found = dict(metrics)
    if tensors:
        moved = torch.stack([value.double() for value in tensors.values()]).tolist()
        found.update(zip(tensors, moved, strict=True))
    if found.get("trm/ratio/identical") == 1:
        warn_identical()
    return found


@functools.cache
def warn_identical() -> None:
    """Says, once per process, that train and rollout log-probs are the same numbers."""
    warnings.warn(
        "every log-ratio of this batch is exactly 0: logp_train and logp_rollout are the same "
        "numbers, so no mask, clip or divergence can act; pass the log-probs that the rollout "
        "engine sampled with (said once; the metric trm/ratio/identical says it every time)",
        UserWarning,
        stacklevel=3,
    )


@torch.no_grad()
def verdict(
    criteria: str | Criterion | Iterable[str | Criterion],
    layout: SequenceLayout,
    *,
    divergence: TokenDivergence | Mapping[str, Tensor] | None = None,
    log_ratio: Tensor | None = None,
    infinity_cap: float | None = None,
) -> SequenceVerdict:
    """Judges every sequence by criteria that it must all pass, from values that are already there.

    ``keep_b = [all criteria hold on the counted tokens of b]``; limits are inclusive. NaN at a
    counted token that a criterion reads rejects its sequence (NON_FINITE in a divergence, UNSCORED
    in a log-ratio), an infinity does too (SUPPORT); a sequence without counted tokens stays
    (EMPTY). A criterion always sees all counted tokens, also those that another one masks; in a
    layout of pieces it sees what the layout holds. Values at tokens that do not count are never
    used, whatever they are.

    Args:
        criteria: a string as :func:`parse_criteria` reads it, a criterion, or several of either.
        layout: which tokens belong to which sequence, and which count.
        divergence: per-token values shaped like the layout's tokens: a TokenDivergence, or a dict
            by quantity, floating point. ``logp_train`` and ``logp_rollout`` serve binary_kl and
            binary_tv, and the log-ratio where it is not given.
        log_ratio: logp_train - logp_rollout of the sampled tokens, nats, shaped like the tokens.
        infinity_cap: what an infinite log-ratio or divergence counts as for the criteria, nats,
            finite, > 0; its sign stays. None rejects its sequence with SUPPORT. ``capped`` and
            ``trm/capped_tokens`` count what was capped; max_kl, mean_kl and sum_kl stay infinite.

    Returns:
        A :class:`SequenceVerdict`; max_kl, mean_kl and sum_kl have the dtype of the given ``kl``,
        at least float32 (NaN without one). No host synchronisation.

    Raises:
        TypeError: values that are not floating-point tensors.
        ValueError: no criterion, a criterion whose values were not given, a shape other than the
            layout's, a cap that is not finite and > 0.

    Numerics:
        Sums in float64; ratios are judged as logarithms. Deterministic.

    Source:
        Trust Region Masking, arXiv 2512.23075: max and mean criteria; frameworks' masks.

    >>> layout = SequenceLayout.from_lengths([2, 1])
    >>> lr = torch.tensor([0.01, -0.02, 0.7])
    >>> verdict("0.9<=geo_ratio<=1.1", layout, log_ratio=lr).keep
    tensor([ True, False])
    """
    chosen = as_criteria(criteria)
    raw = _evidence(layout, divergence, log_ratio)
    if len(chosen) == 1 and infinity_cap is None:
        (only,) = chosen
        if type(only) in _ONE_LAUNCH and not only.sampled(raw):
            return _verdict_of_limit(only, raw)
    evidence = raw
    if infinity_cap is not None:
        evidence = raw._replace(infinity_cap=infinity_cap, reduced={})
    findings = [criterion.judge(evidence) for criterion in chosen]
    exact, max_kl, mean_kl, sum_kl = _exact_kl(raw)
    count = exact.tokens

    # Later writes win: KEPT < criteria, the first one last < SUPPORT < UNSCORED < NON_FINITE.
    reason = torch.full_like(count, int(Reason.KEPT))
    position = findings[0].position
    token_keep = layout.token_mask
    for finding in findings:
        if finding.tokens is not None:
            token_keep = token_keep & finding.tokens
    limited = any(finding.tokens is not None for finding in findings)
    if limited:
        survives, _ = _sequences.any_token(token_keep, layout)
        reason = reason.masked_fill(~survives, int(Reason.TOKENS))
    for criterion, finding in reversed(list(zip(chosen, findings, strict=True))):
        reason = reason.masked_fill(finding.failed, int(criterion.code))
        position = torch.where(finding.failed, finding.position, position)
    for code in (Reason.SUPPORT, Reason.UNSCORED, Reason.NON_FINITE):
        for criterion in chosen:
            missing = Reason.UNSCORED if criterion.sampled(evidence) else Reason.NON_FINITE
            if code not in (Reason.SUPPORT, missing):
                continue
            found = criterion.reduce_read(evidence)
            if code == Reason.SUPPORT:
                bad, where = found.infinite >= 0, found.infinite
            else:
                bad, where = torch.isnan(found.largest), found.position
            reason = reason.masked_fill(bad, int(code))
            position = torch.where(bad, where, position)
    reason = reason.masked_fill(count == 0, int(Reason.EMPTY))
    position = position.masked_fill(count == 0, -1)
    keep = (reason == int(Reason.KEPT)) | (reason == int(Reason.EMPTY))

    capped = torch.zeros_like(count)
    if evidence.infinity_cap is not None:
        infinite = [torch.isinf(criterion.read(raw)) for criterion in chosen]
        flags = functools.reduce(torch.logical_or, infinite)
        capped = _sequences.reduce_tokens(flags.float(), layout).total.to(torch.int64)
    return SequenceVerdict(
        keep=keep,
        reason=reason,
        position=position,
        max_kl=max_kl,
        mean_kl=mean_kl,
        sum_kl=sum_kl,
        token_keep=token_keep & keep[layout.sequence_id],
        statistics=torch.stack([finding.statistic for finding in findings]),
        failed=torch.stack([finding.failed & (count > 0) for finding in findings]),
        capped=capped,
    )


# Criteria that one launch judges where their values are given, and what it compares with the limit.
_ONE_LAUNCH = {MaxDivergence: "max", MeanDivergence: "mean", SumDivergence: "sum"}


def _verdict_of_limit(criterion: Criterion, evidence: Evidence) -> SequenceVerdict:
    """The verdict of one limit on given values, with nothing but one op over the tokens."""
    assert isinstance(criterion, _Limit)
    found = _sequences.judge(
        evidence.values(criterion.quantity),
        evidence.layout,
        _ONE_LAUNCH[type(criterion)],
        criterion.limit,
        int(criterion.code),
    )
    max_kl, mean_kl, sum_kl = found.largest, found.mean, found.total
    if criterion.quantity != "kl":
        _, max_kl, mean_kl, sum_kl = _exact_kl(evidence)
    return SequenceVerdict(
        keep=found.keep,
        reason=found.reason,
        position=found.position,
        max_kl=max_kl,
        mean_kl=mean_kl,
        sum_kl=sum_kl,
        token_keep=found.token_keep.reshape(evidence.layout.shape),
        statistics=found.statistic[None],
        failed=found.failed[None],
        capped=torch.zeros_like(found.reason),
    )


def _exact_kl(evidence: Evidence) -> tuple[_sequences.Reduced, Tensor, Tensor, Tensor]:
    """Statistics of the exact KL, NaN where it was not given; its max, mean and sum."""
    kl = evidence.divergence.get("kl")
    if kl is None:
        kl = torch.full(evidence.layout.shape, math.nan, device=evidence.layout.token_mask.device)
    exact = evidence.reduce("kl", kl)
    mean = exact.total / exact.tokens.clamp(min=1)
    return exact, exact.largest, mean.to(kl.dtype), exact.total.to(kl.dtype)


def _evidence(
    layout: SequenceLayout,
    divergence: TokenDivergence | Mapping[str, Tensor] | None,
    log_ratio: Tensor | None,
) -> Evidence:
    """Checks what a caller gave, and drops what is absent."""
    given: dict[str, Tensor] = {}
    if isinstance(divergence, TokenDivergence):
        pairs = [(entry, getattr(divergence, entry)) for entry in TokenDivergence._fields]
    else:
        pairs = list((divergence or {}).items())
    for name, values in [*pairs, ("log_ratio", log_ratio)]:
        if values is None:
            continue
        if not isinstance(values, Tensor) or not values.is_floating_point():
            kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {kind}")
        layout.check(name, values)
        given[name] = values.detach() if values.dtype == torch.float64 else values.detach().float()
    ratio = given.pop("log_ratio", None)
    if ratio is None and {"logp_train", "logp_rollout"} <= given.keys():
        ratio = estimators.log_ratio(given["logp_train"], given["logp_rollout"])
    return Evidence(given, ratio, layout, {})


def max_kl_verdict(kl: Tensor, layout: SequenceLayout, *, max_kl: float) -> SequenceVerdict:
    """Verdict of the max criterion from per-token KLs that are already there.

    ``keep_b = [max_{t counted} kl_t <= max_kl]``, inclusive, with max over no token = 0 (EMPTY).
    Values at tokens that do not count are never used, whatever they are.

    Args:
        kl: per-token KL(rollout||train) in nats, shaped like the layout's tokens.
        layout: which tokens belong to which sequence, and which count.
        max_kl: threshold in nats, >= 0.

    Returns:
        A :class:`SequenceVerdict`. No host synchronisation.

    Raises:
        ValueError: a negative or NaN threshold, or a shape other than the layout's.

    Numerics:
        Sums in float64, rounded once.

    Source:
        Trust Region Masking, arXiv 2512.23075, the max criterion.

    >>> layout = SequenceLayout.from_lengths([2, 1])
    >>> max_kl_verdict(torch.tensor([0.01, 0.03, 0.02]), layout, max_kl=0.02).keep
    tensor([False,  True])
    """
    return verdict(MaxDivergence("kl", max_kl), layout, divergence={"kl": kl})


def trust_region_mask(
    rollout_logits: Tensor,
    train_logits: Tensor,
    layout: SequenceLayout,
    *,
    max_kl: float,
    rollout_temperature: float | Tensor = 1.0,
    train_temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
) -> SequenceVerdict:
    """Masks every sequence in which the exact KL exceeds a threshold at any counted token.

    ``keep_b = [max_{t counted} KL(rollout_t || train_t) <= max_kl]``, inclusive; a NaN (missing
    evidence) or +inf (support violation) at a counted token masks its sequence.

    Row t of the logits is the distribution that produced token t: the caller shifts, or asks
    ``layout.shift``.

    Args:
        rollout_logits: ``[*tokens, V]`` of the policy that sampled.
        train_logits: ``[*tokens, V]`` of the policy that is trained; no gradient flows.
        layout: which tokens belong to which sequence, and which count; others are not even read.
        max_kl: threshold in nats, >= 0.
        rollout_temperature: what the rollout logits are divided by, > 0, a number or per token.
        train_temperature: likewise.
        vocab_size: number of real columns where the logits are padded.

    Returns:
        A :class:`SequenceVerdict`. No host synchronisation.

    Raises:
        TypeError: logits that are not floating point.
        ValueError: shapes or devices that differ, a negative or NaN threshold, a temperature that
            is not > 0.

    Source:
        Trust Region Masking, arXiv 2512.23075, the max criterion with exact KL.

    >>> rollout = torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]]])
    >>> train = torch.tensor([[[0.0, 1.0]], [[0.0, 0.1]]])
    >>> layout = SequenceLayout.from_lengths([1, 1], padded_length=1)
    >>> trust_region_mask(rollout, train, layout, max_kl=0.02).keep
    tensor([False,  True])
    """
    _checks.check_threshold("max_kl", max_kl)
    _checks.check_logits(rollout_logits, train_logits)
    layout.check("logits without their vocabulary", rollout_logits[..., 0])
    with torch.no_grad():
        divergence = token_divergence(
            rollout_logits,
            train_logits,
            token_mask=layout.token_mask,
            rollout_temperature=rollout_temperature,
            train_temperature=train_temperature,
            vocab_size=vocab_size,
        )
    assert divergence.kl is not None
    return max_kl_verdict(divergence.kl, layout, max_kl=max_kl)
