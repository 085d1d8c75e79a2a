# SPDX-License-Identifier: Apache-2.0
"""From rollouts to a lower bound on J(train) - J(rollout), and what does not qualify as one.

Inputs are arrays over fresh rollouts (drawn after the train policy was fixed). A certificate
holds with probability >= 1 - alpha over those rollouts; its record says whether that is a
finite-sample statement or the normal approximation, and it is labelled when it is no guarantee
at all.

The reward lies in [a, b]; every statistic uses R - a >= 0, because the certificates drop
non-negative terms. KL is ``kl_rollout_train`` in nats, exact per context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp, xlog1py, xlogy
from scipy.stats import beta
from scipy.stats import t as student

from theory import checks
from theory.bounds import sharp
from theory.records import AVERAGE, Bound

__all__ = [
    "Certificate",
    "GateStatistics",
    "Interval",
    "NotAGuarantee",
    "Vacuity",
    "bernstein_radius",
    "binary_kl_inverse",
    "clopper_pearson",
    "clt",
    "empirical_bernstein",
    "frozen_certificate",
    "from_products_of_averages",
    "from_sampled_maximum",
    "gate",
    "log_certificate",
    "log_statistic",
    "mask_statistic",
    "nonnegative_lower",
    "rejection_quantile",
    "rollouts_needed",
    "seq_kl_certificate",
    "sequence_mask_certificate",
    "truncated_weight_certificate",
    "vacuity",
]

Array = NDArray[np.float64]
Mode = Literal["token", "prefix", "budget", "drift"]


class NotAGuarantee(ValueError):
    """Raised for a quantity that looks like a bound and is not one."""


@dataclass(frozen=True)
class Interval:
    """Two one-sided confidence bounds on a mean.

    Attributes:
        estimate: sample mean.
        lower: below the mean with probability >= 1 - alpha.
        upper: above the mean with probability >= 1 - alpha (both together: 1 - 2 alpha).
        radius: of the inequality, before the limits are cut to the range; NaN where it has none.
        alpha: failure probability of each side.
        method: name of the inequality.
        finite_sample: False for the normal approximation.
    """

    estimate: float
    lower: float
    upper: float
    alpha: float
    method: str
    finite_sample: bool
    radius: float = math.nan


def _sample(values: ArrayLike, least: int = 2) -> Array:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size < least:
        raise ValueError(f"At least {least} rollouts in one dimension are needed, got {x.shape}.")
    return x


def _alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha}.")


def bernstein_radius(variance: float, span: float, n: int, alpha: float) -> float:
    """Radius of :func:`empirical_bernstein` for a given sample variance.

    sqrt(2 Var log(2/alpha) / n) + 7 span log(2/alpha) / (3 (n - 1))

    Assumes n >= 2 independent draws in a range of that span. Unit of the values. Raises
    ZeroDivisionError on n = 1. Range [0, inf).
    Source: Maurer and Pontil 2009, theorem 4.

    Example:
        >>> round(bernstein_radius(0.0, 1.0, 1000, 0.05), 4)
        0.0086
    """
    log_term = math.log(2 / alpha)
    return math.sqrt(2 * variance * log_term / n) + 7 * span * log_term / (3 * (n - 1))


def empirical_bernstein(values: ArrayLike, low: float, high: float, alpha: float) -> Interval:
    """Confidence bounds on the mean of a bounded variable that adapt to its variance.

    radius = sqrt(2 Var log(2/alpha) / n) + 7 (high - low) log(2/alpha) / (3 (n - 1))

    Assumes independent draws in a range that was fixed before looking at them. Unit of the values.

    Args:
        values: n >= 2 draws.
        low: smallest possible value.
        high: largest possible value.
        alpha: failure probability of each side.

    Returns:
        The interval, cut to [low, high].

    Raises:
        ValueError: on a value outside the range, n < 2 or alpha outside (0, 1).

    Source: Maurer and Pontil 2009, theorem 4.

    Example:
        >>> i = empirical_bernstein([0.5] * 1000, 0, 1, 0.05)
        >>> round(i.upper - i.estimate, 4)
        0.0086
    """
    _alpha(alpha)
    x = _sample(values)
    slack = 1e-12 * max(1.0, abs(low), abs(high))
    if not np.all((x >= low - slack) & (x <= high + slack)):
        offender = x[~((x >= low - slack) & (x <= high + slack))][0]
        raise ValueError(
            f"A value {offender:g} lies outside the range [{low:g}, {high:g}] that was announced."
        )
    mean = float(x.mean())
    radius = bernstein_radius(float(x.var(ddof=1)), high - low, x.size, alpha)
    lower, upper = max(mean - radius, low), min(mean + radius, high)
    return Interval(mean, lower, upper, alpha, "empirical Bernstein", True, radius)


def rollouts_needed(variance: float, span: float, radius: float, alpha: float) -> int:
    """Number of rollouts for an empirical-Bernstein radius.

    smallest n with sqrt(2 Var log(2/alpha)/n) + 7 span log(2/alpha)/(3(n-1)) <= radius

    Assumes the variance stays what it was estimated to be. Dimensionless count.

    Args:
        variance: of one rollout's statistic.
        span: of its range.
        radius: wanted, > 0.
        alpha: failure probability of each side.

    Returns:
        n >= 2.

    Raises:
        ValueError: on a radius <= 0 or alpha outside (0, 1).

    Source: inversion of :func:`empirical_bernstein`.

    Example:
        >>> rollouts_needed(0.0, 1.0, 0.0086, 0.05) in range(990, 1010)
        True
    """
    _alpha(alpha)
    if not radius > 0:
        raise ValueError(f"radius must be > 0, got {radius}.")
    low, high = 1, 2
    while bernstein_radius(variance, span, high, alpha) > radius:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = bernstein_radius(variance, span, middle, alpha) <= radius
        low, high = (low, middle) if fits else (middle, high)
    return high


def clopper_pearson(hits: int, n: int, alpha: float) -> Interval:
    """Exact confidence bounds on a probability.

    lower, upper = quantiles of Beta(k, n-k+1) at alpha and of Beta(k+1, n-k) at 1 - alpha

    Assumes independent draws. Dimensionless, range [0, 1].

    Args:
        hits: k, number of successes.
        n: number of draws.
        alpha: failure probability of each side.

    Returns:
        The interval.

    Raises:
        ValueError: on k outside 0..n, n < 1 or alpha outside (0, 1).

    Source: Clopper and Pearson 1934.

    Example:
        >>> round(clopper_pearson(0, 256, 0.05).upper, 4)
        0.0116
    """
    _alpha(alpha)
    checks.horizon(n)
    checks.scalar("hits", hits, 0, n)
    lower = 0.0 if hits == 0 else float(beta.ppf(alpha, hits, n - hits + 1))
    upper = 1.0 if hits == n else float(beta.ppf(1 - alpha, hits + 1, n - hits))
    return Interval(hits / n, lower, upper, alpha, "Clopper-Pearson", True)


def clt(values: ArrayLike, alpha: float) -> Interval:
    """Normal-approximation bounds on a mean: asymptotic, no finite-sample guarantee.

    radius = t_{1-alpha, n-1} sd / sqrt(n),  Student's quantile

    Assumes a finite variance and n large (exact for normal values at every n); log-weights are
    heavy-tailed, so treat it as an estimate. Unit of the values.

    Args:
        values: n >= 2 independent draws.
        alpha: failure probability of each side, asymptotically.

    Returns:
        The interval, with ``finite_sample=False``.

    Raises:
        ValueError: on n < 2 or alpha outside (0, 1).

    Range (-inf, inf).
    Source: central limit theorem.

    Example:
        >>> clt([0.0, 1.0] * 50, 0.05).finite_sample
        False
    """
    _alpha(alpha)
    x = _sample(values)
    mean = float(x.mean())
    radius = float(student.ppf(1 - alpha, x.size - 1)) * float(x.std(ddof=1)) / math.sqrt(x.size)
    lower, upper = mean - radius, mean + radius
    return Interval(mean, lower, upper, alpha, "Student t (asymptotic)", False, radius)


_BETS = 2.0 ** -np.arange(8.0)
_PRIOR = _BETS / _BETS.sum()  # bold bets first: they are what a handful of draws can win with
_LARGEST = 1e9  # a lower limit of min(X, largest) is one of X


def nonnegative_lower(values: ArrayLike, alpha: float) -> Interval:
    """Lower confidence limit on the mean of a non-negative variable without an upper range.

    lower = max { m : sum_l w_l prod_i (1 + l (x_i / m - 1)) >= 1 / alpha },  w_l ~ l = 1, 1/2, ...

    Assumes independent draws, X >= 0 and nothing else. For m >= E[X] each factor has mean at most
    1, so the weighted sum reaches 1/alpha with probability at most alpha (Markov).
    There is no upper limit without a range: ``upper`` is infinite. Unit of the values.

    Args:
        values: n >= 2 draws, +inf allowed.
        alpha: failure probability of the lower limit.

    Returns:
        The interval.

    Raises:
        ValueError: on a negative or NaN value, n < 2 or alpha outside (0, 1).

    Source: betting confidence bounds, Waudby-Smith and Ramdas 2024.

    Example:
        >>> i = nonnegative_lower([3.1, 3.6, 3.0, 3.5], 0.05)
        >>> i.finite_sample, 1.0 < i.lower < i.estimate
        (True, True)
    """
    _alpha(alpha)
    x = _sample(values)
    checks.divergence("values", x)
    capped = np.minimum(x, _LARGEST)

    def evidence(m: float) -> float:
        with np.errstate(divide="ignore"):  # a bet of everything on a draw of 0 loses everything
            wealth = np.log1p(_BETS[:, None] * (capped / m - 1)).sum(axis=1)
        return float(logsumexp(wealth, b=_PRIOR)) + math.log(alpha)

    top = float(capped.mean())
    bottom = top * 1e-12
    if top == 0 or evidence(bottom) < 0:
        lower = 0.0
    elif evidence(top) >= 0:
        lower = top
    else:
        for _ in range(200):  # evidence decreases in m; keep the side where it still suffices
            middle = math.sqrt(bottom * top)
            bottom, top = (middle, top) if evidence(middle) >= 0 else (bottom, middle)
        lower = bottom
    return Interval(float(x.mean()), lower, math.inf, alpha, "betting", True)


def binary_kl_inverse(p: float, kl: float) -> float:
    """Largest probability within a KL of a given one.

    max { b >= p : p log(p/b) + (1-p) log((1-p)/(1-b)) <= kl }

    Assumes 0 <= p <= 1, kl >= 0 nats; direction KL(Bernoulli(p) || Bernoulli(b)), p being the
    rollout's probability of an event and b the largest one under a policy within that KL
    (data processing). Range [p, 1].

    Args:
        p: probability under the rollout policy.
        kl: KL(P_rollout || P_other) of whole sequences, nats.

    Returns:
        b.

    Raises:
        ValueError: on p outside [0, 1] or a negative or NaN kl.

    Source: data processing inequality; docs/theory.md#frozen-policy.

    Example:
        >>> [round(binary_kl_inverse(p, 0.01), 4) for p in (0.01, 0.001, 0.0)]
        [0.0311, 0.0135, 0.01]
    """
    checks.scalar("p", p, 0, 1)
    bound = float(checks.divergence("kl", kl))
    if p == 1 or math.isinf(bound):
        return 1.0
    if p == 0:
        return -math.expm1(-bound)

    def excess(b: float) -> float:
        entropy = xlogy(p, p / b) + xlogy(1 - p, 1 - p) - xlog1py(1 - p, -b)
        return float(entropy) - bound

    top = math.nextafter(1.0, 0.0)
    if excess(p) >= 0:  # kl is below the rounding of the entropy
        return p
    return top if excess(top) <= 0 else max(p, float(brentq(excess, p, top, xtol=1e-15)))


@dataclass(frozen=True)
class Certificate:
    """A lower bound on J(train) - J(rollout), with its conditions.

    Attributes:
        name: stable name.
        lower_bound: in reward units, at least minus the reward's span; improvement is certified
            when it is > 0.
        confidence: probability over the rollouts with which it holds.
        finite_sample: False when the normal approximation was used.
        rigorous: False when the inputs void the theorem.
        label: "guarantee", "asymptotic", or "not a guarantee: <why>".
        parts: the terms, radii and counts that entered.
        source: theorem and proof.
    """

    name: str
    lower_bound: float
    confidence: float
    finite_sample: bool
    rigorous: bool
    label: str
    source: str
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def certifies_improvement(self) -> bool:
        """True when the bound is positive, holds at finite samples and is a guarantee."""
        return self.rigorous and self.finite_sample and self.lower_bound > 0


def _certificate(
    name: str,
    lower: float,
    alpha: float,
    finite: bool,
    held_out: bool,
    anchor: str,
    span: float,
    parts: dict[str, float],
) -> Certificate:
    """Make the record; a gain is never below minus the reward's span, whatever the data say."""
    label = "guarantee" if finite else "asymptotic"
    if not held_out:
        label = "not a guarantee: the rollouts are the batch that the policy was trained on"
    return Certificate(
        name,
        max(lower, -span),
        1 - alpha,
        finite,
        held_out,
        label,
        f"ours, docs/theory.md#{anchor}",
        parts,
    )


def _standard_error(values: Array) -> float:
    return float(values.std(ddof=1)) / math.sqrt(values.size)


def _rewards(reward: ArrayLike, reward_range: tuple[float, float]) -> tuple[Array, float]:
    low, high = reward_range
    if not low < high:
        raise ValueError(f"The reward range must satisfy low < high, got [{low}, {high}].")
    return checks.rewards(reward, low, high) - low, high - low


def log_statistic(reward: ArrayLike, log_weight: ArrayLike) -> Array:
    """Per-rollout statistic of certificate C1.

    X = R log W,  E_rollout[X] <= J(train) - J(rollout)

    Assumes R >= 0 (pass R - min R) and log W = sum of the sampled log-ratios (nats). Range
    (-inf, inf). Source: ours, docs/theory.md#log-certificate.

    Example:
        >>> log_statistic([1.0, 0.0], [-0.5, -np.inf]).tolist()
        [-0.5, 0.0]
    """
    r = np.asarray(reward, dtype=np.float64)
    weight = np.asarray(log_weight, dtype=np.float64)
    return np.asarray(r * np.where(r == 0, 0.0, weight))


def mask_statistic(reward: ArrayLike, log_weight: ArrayLike, keep: ArrayLike) -> Array:
    """Per-rollout statistic of certificate C2.

    X = R M log W - R (1 - M),  E_rollout[X] <= J(train) - J(rollout)

    Assumes R >= 0 and M any function of the sequence, for instance max_t kl(c_t) <= delta. Nats
    inside the logarithm. Range [-R, inf) on rejected rollouts. Reward units.
    Source: ours,
    docs/theory.md#mask-certificate.

    Example:
        >>> mask_statistic([1.0, 1.0], [0.25, 9.0], [True, False]).tolist()
        [0.25, -1.0]
    """
    r = np.asarray(reward, dtype=np.float64)
    kept = np.asarray(keep, dtype=bool)
    return np.where(kept, log_statistic(r, np.where(kept, log_weight, 0.0)), -r)


def log_certificate(
    reward: ArrayLike,
    log_weight: ArrayLike,
    *,
    alpha: float = 0.05,
    reward_range: tuple[float, float] = (0.0, 1.0),
    held_out: bool = True,
) -> Certificate:
    """Certificate C1: no premise at all, but no finite range either.

    J(train) - J(rollout) >= E[(R - a) log W] = L' - E[(R - a) sum k3(rho_t)]

    Assumes fresh rollouts. log W has no finite range, so the confidence is the normal
    approximation's; :func:`sequence_mask_certificate` is the finite-sample version. Nats.

    Args:
        reward: R per rollout.
        log_weight: log W per rollout, the sum of sampled log-ratios.
        alpha: failure probability (asymptotic).
        reward_range: [a, b].
        held_out: False when the rollouts were used to train the policy.

    Returns:
        The certificate.

    Raises:
        ValueError: on a reward outside the range, or bad shapes.

    Source: ours, docs/theory.md#log-certificate (C1).

    Example:
        >>> log_certificate([1.0] * 100, [0.1] * 100).label
        'asymptotic'
    """
    r, span = _rewards(reward, reward_range)
    interval = clt(log_statistic(r, log_weight), alpha)
    parts = {"estimate": interval.estimate, "radius": interval.radius}
    return _certificate(
        "log", interval.lower, alpha, False, held_out, "log-certificate", span, parts
    )


def sequence_mask_certificate(
    reward: ArrayLike,
    log_weight: ArrayLike,
    keep: ArrayLike,
    *,
    max_abs_log_weight: float | None = None,
    alpha: float = 0.05,
    reward_range: tuple[float, float] = (0.0, 1.0),
    held_out: bool = True,
) -> Certificate:
    """Certificate C2: sequence masking, with no premise about unseen contexts.

    J(train) - J(rollout) >= E[(R - a) M log W] - E[(R - a) (1 - M)]

    Assumes fresh rollouts and a mask that looks at its own sequence only. With
    ``max_abs_log_weight`` = K the mask becomes M and |log W| <= K, the statistic lies in
    [-max(K, 1), K] (b - a) and empirical Bernstein gives a finite-sample statement; without it the
    normal approximation is used. K must be fixed before looking at the rollouts. Nats.

    Args:
        reward: R per rollout.
        log_weight: log W per rollout.
        keep: M per rollout.
        max_abs_log_weight: K > 0.
        alpha: failure probability.
        reward_range: [a, b].
        held_out: False when the rollouts were used to train the policy.

    Returns:
        The certificate; ``parts["accepted"]`` is the acceptance rate.

    Raises:
        ValueError: on a reward outside the range, K <= 0, or bad shapes.

    Source: ours, docs/theory.md#mask-certificate (C2).

    Example:
        >>> c = sequence_mask_certificate([1.0] * 5000, [0.1] * 5000, [True] * 5000,
        ...                               max_abs_log_weight=0.5)
        >>> c.certifies_improvement
        True
    """
    r, span = _rewards(reward, reward_range)
    weight = np.asarray(log_weight, dtype=np.float64)
    kept = np.asarray(keep, dtype=bool)
    if max_abs_log_weight is None:
        statistic = mask_statistic(r, weight, kept)
        interval = clt(statistic, alpha)
    else:
        if not max_abs_log_weight > 0:
            raise ValueError(f"max_abs_log_weight must be > 0, got {max_abs_log_weight}.")
        k = float(max_abs_log_weight)
        kept = kept & (np.abs(weight) <= k)
        statistic = mask_statistic(r, weight, kept)
        interval = empirical_bernstein(statistic, -max(k, 1.0) * span, k * span, alpha)
    parts = {
        "estimate": interval.estimate,
        "radius": interval.radius,
        "standard_error": _standard_error(statistic),
        "accepted": float(kept.mean()),
        "rejected_reward": float((r * ~kept).mean()),
    }
    return _certificate(
        "sequence_mask",
        interval.lower,
        alpha,
        interval.finite_sample,
        held_out,
        "mask-certificate",
        span,
        parts,
    )


def truncated_weight_certificate(
    reward: ArrayLike,
    log_weight: ArrayLike,
    *,
    max_weight: float,
    alpha: float = 0.05,
    reward_range: tuple[float, float] = (0.0, 1.0),
    held_out: bool = True,
) -> Certificate:
    """Certificate C0: the sequence weight itself, truncated from above.

    J(train) - J(rollout) >= E[(R - a) (min(W, C) - 1)]

    Assumes fresh rollouts. The statistic lies in [-1, C - 1] (b - a), so empirical Bernstein gives
    a finite-sample statement; C must be fixed before looking at the rollouts. With C = 1 + K it is,
    path by path, at least the statistic of :func:`sequence_mask_certificate`, in a range that is
    not wider. A NaN log-weight, missing evidence, counts as its worst case W = 0. Nats.

    Args:
        reward: R per rollout.
        log_weight: log W per rollout, the sum of sampled log-ratios.
        max_weight: C > 1.
        alpha: failure probability.
        reward_range: [a, b].
        held_out: False when the rollouts were used to train the policy.

    Returns:
        The certificate; ``parts["truncated"]`` is the share of rollouts with W > C.

    Raises:
        ValueError: on a reward outside the range, C <= 1, or bad shapes.

    Source: truncated importance sampling, Thomas et al. 2015; docs/theory.md#weight-certificate.

    Example:
        >>> c = truncated_weight_certificate([1.0] * 5000, [0.1] * 5000, max_weight=1.5)
        >>> c.certifies_improvement
        True
    """
    r, span = _rewards(reward, reward_range)
    weight = np.asarray(log_weight, dtype=np.float64)
    if not 1 < max_weight < math.inf:
        raise ValueError(f"max_weight must be a finite number > 1, got {max_weight}.")
    known = np.where(np.isnan(weight), -np.inf, weight)
    step = np.expm1(np.minimum(known, math.log(max_weight)))
    interval = empirical_bernstein(r * step, -span, (max_weight - 1) * span, alpha)
    parts = {
        "estimate": interval.estimate,
        "radius": interval.radius,
        "standard_error": _standard_error(r * step),
        "truncated": float((known > math.log(max_weight)).mean()),
        "rollouts": float(r.size),
    }
    return _certificate(
        "truncated_weight", interval.lower, alpha, True, held_out, "weight-certificate", span, parts
    )


@dataclass(frozen=True)
class GateStatistics:
    """Per-rollout statistics of a frozen policy, and the ranges that its gate guarantees.

    The frozen policy follows train where the gate is open and the rollout policy elsewhere; every
    quantity it needs is an average of these.

    Attributes:
        shift: sum_t gate_t (rho_t - 1) per rollout, or a lower bound of it with a ``ratio_cap``.
        kl: sum_t gate_t kl(c_t) per rollout, nats.
        hit: True where the gate closed on the rollout.
        shift_range: range of ``shift``; infinite without a cap on the ratio.
        kl_limit: largest possible ``kl``, nats.
        horizon: T, inf when unknown.
        max_kl: delta, KL of the frozen policy in every context, by construction.
        max_log_ratio: M, or None when the gate does not look at row maxima.
        mode: token, prefix, budget or drift.
    """

    shift: Array
    kl: Array
    hit: NDArray[np.bool_]
    shift_range: tuple[float, float]
    kl_limit: float
    horizon: float
    max_kl: float
    max_log_ratio: float | None
    mode: Mode


def gate(
    log_ratio: ArrayLike,
    kl: ArrayLike,
    token_mask: ArrayLike | None = None,
    *,
    max_kl: float,
    row_max_log_ratio: ArrayLike | None = None,
    max_log_ratio: float | None = None,
    mode: Mode = "budget",
    shift_budget: float = 1.0,
    kl_budget: float = 0.1,
    ratio_cap: float | None = None,
    horizon: float | None = None,
) -> GateStatistics:
    """Apply a gate to token arrays and sum up per rollout.

    good_t = kl(c_t) <= delta [and max_v log(train/rollout)(v|c_t) <= M]
    token:  gate_t = good_t
    prefix: gate_t = prod_{s<=t} good_s
    budget: gate_t = [sum_{s<t} |rho_s - 1| <= b, sum_{s<t} kl(c_s) <= k, good_t], closed for ever
    after its first 0
    drift:  the same with |sum_{s<t} (rho_s - 1)| <= b, a martingale whose size does not grow
    with T at a fixed total KL, where the sum of absolute values does

    Assumes exact per-context KL (``kl_rollout_train``, nats) and, for M, the exact row maximum
    of the log-ratio. The gate at t looks at tokens before t and at the context only, so the frozen
    policy is a policy. delta, M, b, k must be fixed before looking at the rollouts. NaN closes.

    Args:
        log_ratio: log rho_t at the sampled token, shape (N, T).
        kl: kl(c_t), shape (N, T).
        token_mask: True at tokens that count; default all.
        max_kl: delta.
        row_max_log_ratio: max over the vocabulary of log(train/rollout), shape (N, T).
        max_log_ratio: M; needs ``row_max_log_ratio``.
        mode: which gate.
        shift_budget: b, for the modes "budget" and "drift".
        kl_budget: k in nats, for the modes "budget" and "drift".
        ratio_cap: C >= 1: rho counts as min(rho, C), so that the range is finite without row
            maxima. Rewards R - a >= 0 then give a lower bound of the frozen policy's surrogate,
            which is the side a certificate needs.
        horizon: T, the largest possible number of tokens; default the width of the arrays, inf
            when nothing is known (nothing then uses it).

    Returns:
        The statistics; with top = e^M - 1 or C - 1, shift lies in [-(b + 1), b + top] for the modes
        with a budget and in [-T, T top] otherwise, and kl in [0, min(k + delta, T delta)] or
        [0, T delta].

    Raises:
        ValueError: on shapes that differ, a cap without row maxima, C < 1, or a horizon below
            the width.

    Dimensionless shifts, KL in nats; ranges as returned.
    Source: ours, docs/theory.md#frozen-policy (C3, C3').

    Example:
        >>> g = gate([[0.1, 0.2]], [[0.01, 0.5]], max_kl=0.1, mode="prefix")
        >>> g.kl.tolist(), g.hit.tolist()
        ([0.01], [True])
    """
    ratio = np.asarray(log_ratio, dtype=np.float64)
    divergence = np.asarray(kl, dtype=np.float64)
    if ratio.shape != divergence.shape or ratio.ndim != 2:
        raise ValueError(
            f"log_ratio and kl must share one shape (N, T), got {ratio.shape} and "
            f"{divergence.shape}."
        )
    if mode not in ("token", "prefix", "budget", "drift"):
        raise ValueError(f"mode must be 'token', 'prefix', 'budget' or 'drift', got {mode!r}.")
    if ratio_cap is not None and not ratio_cap >= 1:
        raise ValueError(f"ratio_cap must be a number >= 1, got {ratio_cap}.")
    length = float(ratio.shape[1]) if horizon is None else float(horizon)
    if not length >= ratio.shape[1]:
        raise ValueError(f"horizon {length:g} is below the {ratio.shape[1]} tokens of the arrays.")
    delta = float(checks.divergence("max_kl", max_kl))
    counts = np.ones(ratio.shape, bool) if token_mask is None else np.asarray(token_mask, bool)
    good = divergence <= delta
    if max_log_ratio is not None:
        if row_max_log_ratio is None:
            raise ValueError(
                f"A cap max_log_ratio = {max_log_ratio:g} needs row_max_log_ratio, got none: the "
                "ratio of the sampled token does not bound the row."
            )
        good &= np.asarray(row_max_log_ratio, dtype=np.float64) <= max_log_ratio
    closed = counts & ~good
    with np.errstate(over="ignore"):
        step = np.expm1(ratio if ratio_cap is None else np.minimum(ratio, math.log(ratio_cap)))
    step = np.where(counts & good, step, 0.0)
    used = np.where(counts & good, divergence, 0.0)
    top = math.inf if max_log_ratio is None else max(0.0, math.expm1(max_log_ratio))
    if ratio_cap is not None:
        top = min(top, ratio_cap - 1)
    if mode in ("budget", "drift"):
        b = float(checks.divergence("shift_budget", shift_budget))
        k = float(checks.divergence("kl_budget", kl_budget))
        spent = _before(np.abs(step)) if mode == "budget" else np.abs(_before(step))
        # a NaN step closes the gate behind it: the comparison fails
        closed |= counts & ~((spent <= b) & (_before(used) <= k))
        shift_range, kl_limit = (-(b + 1), b + top), min(k + delta, length * delta)
    else:
        shift_range, kl_limit = (-length, length * top), length * delta
    is_open = ~closed if mode == "token" else ~np.logical_or.accumulate(closed, axis=1)
    return GateStatistics(
        shift=np.where(is_open, step, 0.0).sum(1),
        kl=np.where(is_open, used, 0.0).sum(1),
        hit=np.asarray(closed.any(axis=1), dtype=np.bool_),
        shift_range=shift_range,
        kl_limit=kl_limit,
        horizon=length,
        max_kl=delta,
        max_log_ratio=max_log_ratio,
        mode=mode,
    )


def _before(steps: Array) -> Array:
    """Sum of the earlier entries of each row, 0 for the first."""
    return np.cumsum(np.pad(steps, ((0, 0), (1, 0)))[:, :-1], axis=1)


def frozen_certificate(
    reward: ArrayLike,
    statistics: GateStatistics,
    *,
    asymptotic: bool = False,
    alpha: float = 0.05,
    reward_range: tuple[float, float] = (0.0, 1.0),
    held_out: bool = True,
) -> Certificate:
    """Certificate C3: the frozen policy stays inside the trust region by construction.

    J(train) - J(rollout) >= L~ - (b - a) [B~ + P~(hit)],
    L~ = E[(R - a) sum gate (rho - 1)],  B~ = min(D~, bounds from delta and M),
    P~(hit) <= max { x : kl_bin(P_rollout(hit) || x) <= D~ },  D~ = E[sum gate kl]

    Assumes fresh rollouts and gate constants fixed beforehand; no assumption on contexts that
    were not sampled. With a ratio cap, L~ is bounded and everything is a finite-sample statement
    (empirical Bernstein for L~ and D~, Clopper-Pearson for the hits, alpha/3 each); without it
    L~ uses the normal approximation. Nats.

    Args:
        reward: R per rollout.
        statistics: from :func:`gate`.
        asymptotic: use the normal approximation for L~ and D~ even where the range is finite.
        alpha: total failure probability.
        reward_range: [a, b].
        held_out: False when the rollouts were used to train the policy.

    Returns:
        The certificate; ``parts`` holds every term, every radius and the number of rollouts that
        would halve the radius of L~.

    Raises:
        ValueError: on a reward outside the range, or shapes that differ.

    Source: ours, docs/theory.md#frozen-policy (C3, C3').

    Example:
        >>> n = 4000
        >>> g = gate(np.full((n, 2), 0.05), np.full((n, 2), 1e-3), max_kl=0.01,
        ...          row_max_log_ratio=np.full((n, 2), 0.05), max_log_ratio=0.1,
        ...          shift_budget=0.2, kl_budget=0.01)
        >>> c = frozen_certificate(np.ones(n), g)
        >>> c.label, c.certifies_improvement
        ('guarantee', True)
    """
    r, span = _rewards(reward, reward_range)
    if r.shape != statistics.shift.shape:
        raise ValueError(
            f"One reward per rollout is needed, got {r.shape} for {statistics.shift.shape}."
        )
    part = alpha / 3
    _alpha(alpha)
    low, high = statistics.shift_range
    gain = r * statistics.shift
    if asymptotic or math.isinf(high):
        surrogate = clt(gain, part)
    else:
        surrogate = empirical_bernstein(gain, low * span, high * span, part)
    if asymptotic:
        divergence = clt(statistics.kl, part)
    else:
        divergence = empirical_bernstein(statistics.kl, 0.0, statistics.kl_limit, part)
    hits = clopper_pearson(int(statistics.hit.sum()), statistics.hit.size, part)
    worst_hit = binary_kl_inverse(hits.upper, divergence.upper)
    error = divergence.upper
    if statistics.max_log_ratio is not None and math.isfinite(statistics.horizon):
        # Inside the support by construction (an outside token has an infinite row maximum).
        t, delta, m = int(statistics.horizon), statistics.max_kl, statistics.max_log_ratio
        error = min(
            error,
            float(sharp.chi2_from_ratio(t, delta, max(m, 0.0)).value),
            float(sharp.dyadic(t, max_kl=delta, capped=True).value),
        )
    lower = surrogate.lower - span * (error + worst_hit)
    radius = surrogate.radius
    parts = {
        "surrogate": surrogate.estimate,
        "surrogate_radius": radius,
        "standard_error": _standard_error(gain),
        "seq_kl": divergence.estimate,
        "seq_kl_radius": divergence.radius,
        "error_bound": error,
        "hit_rate": hits.estimate,
        "hit_bound": worst_hit,
        "rollouts": float(r.size),
    }
    if surrogate.finite_sample and radius > 0:
        parts["rollouts_to_halve_radius"] = float(
            rollouts_needed(float(gain.var(ddof=1)), (high - low) * span, radius / 2, part)
        )
    return _certificate(
        f"frozen_{statistics.mode}",
        lower,
        alpha,
        surrogate.finite_sample and divergence.finite_sample,
        held_out,
        "frozen-policy",
        span,
        parts,
    )


def seq_kl_certificate(
    reward: ArrayLike,
    shift: ArrayLike,
    kl: ArrayLike,
    *,
    baseline: float = 0.0,
    outside_mass: ArrayLike = 0.0,
    alpha: float = 0.05,
    reward_range: tuple[float, float] = (0.0, 1.0),
    held_out: bool = True,
) -> Certificate:
    """SeqKL as a certificate: the surrogate minus the expected total KL.

    J(train) - J(rollout) >= L' - (b - a) D_seq = E[(R - a) sum (rho - 1) - (b - a) sum kl(c_t)]

    Assumes fresh rollouts; raw sums have no finite range, so the confidence is the normal
    approximation's (the budget gate of :func:`gate` gives the finite-sample version).
    KL: ``kl_rollout_train``, nats.

    Args:
        reward: R per rollout.
        shift: sum_t (rho_t - 1) per rollout.
        kl: sum_t kl(c_t) per rollout, exact per context.
        baseline: c; c (sum (rho - 1) + outside mass), whose mean is 0, is subtracted: it changes
            the noise and not the mean.
        outside_mass: sum_t s(c_t) per rollout, the train mass outside the rollout's support.
        alpha: failure probability (asymptotic).
        reward_range: [a, b].
        held_out: False when the rollouts were used to train the policy.

    Returns:
        The certificate.

    Raises:
        ValueError: on a negative or NaN KL, a reward outside the range, or bad shapes.

    Source: ours, docs/theory.md#seqkl.

    Example:
        >>> seq_kl_certificate([1.0] * 50, [0.2] * 50, [0.05] * 50).lower_bound > 0.1
        True
    """
    r, span = _rewards(reward, reward_range)
    total = checks.divergence("kl", kl)
    moved = np.asarray(shift, dtype=np.float64)
    gain = r * moved - baseline * (moved + np.asarray(outside_mass, dtype=np.float64))
    interval = clt(gain - span * total, alpha)
    parts = {
        "surrogate": float(gain.mean()),
        "seq_kl": float(total.mean()),
        "radius": interval.radius,
    }
    return _certificate("seq_kl", interval.lower, alpha, False, held_out, "seqkl", span, parts)


def rejection_quantile(accepted: int, n: int, alpha: float = 0.05) -> Interval:
    """What acceptance by a maximum criterion does say: a quantile, not a maximum.

    P_rollout(some kl(c_t) > delta) <= upper;  all N accepted: 1 - alpha^{1/N}

    Assumes independent rollouts. One rejected rollout already disproves max kl <= delta over all
    contexts, whatever the acceptance rate. Dimensionless, range [0, 1].

    Args:
        accepted: rollouts with max_t kl(c_t) <= delta.
        n: rollouts.
        alpha: failure probability of each side.

    Returns:
        Interval for the probability that a fresh rollout is rejected.

    Raises:
        ValueError: on accepted outside 0..n.

    Source: Clopper and Pearson 1934; docs/theory.md#not-a-guarantee.

    Example:
        >>> [round(rejection_quantile(n, n).upper, 4) for n in (256, 1024, 4096)]
        [0.0116, 0.0029, 0.0007]
    """
    checks.scalar("accepted", accepted, 0, n)
    return clopper_pearson(n - accepted, n, alpha)


def from_sampled_maximum(horizon: int, sampled_kl: ArrayLike) -> Bound:
    """Refuse to turn the largest KL among sampled contexts into a bound.

    max over samples <= max over all contexts, so T max_i kl(c_i) bounds nothing

    Assumes nothing; always raises. An unseen context can be arbitrarily bad; the test suite
    holds an MDP where every context that gets sampled has KL 0 and another one a KL above 10.
    KL: ``kl_rollout_train``, nats.

    Raises:
        NotAGuarantee: always, with the sampled maximum.

    Range: none, there is no number.
    Source: docs/theory.md#not-a-guarantee.

    Example:
        >>> try:
        ...     from_sampled_maximum(10, [0.1])
        ... except NotAGuarantee as reason:
        ...     print(str(reason)[:60])
        The largest sampled KL, 0.1 over 1 contexts, is not the maxi
    """
    values = np.ravel(checks.divergence("sampled_kl", sampled_kl))
    checks.horizon(horizon)
    raise NotAGuarantee(
        f"The largest sampled KL, {values.max():g} over {values.size} contexts, is not the maximum "
        "over all contexts, so no bound follows; use frozen_certificate or rejection_quantile."
    )


def from_products_of_averages(mean_tv: ArrayLike, mean_kl: ArrayLike) -> Bound:
    """Label, as no guarantee, the tempting product of two averages.

    4 sum_t Dbar_t sqrt(D_{<t}/2) is NOT a bound on |Error|

    Assumes rollout averages per position. Correlation between the weight and the divergence is
    lost: a rare branch with a large shift breaks it by any factor. The valid average is
    ``theory.bounds.sharp.forward_moment``. KL: ``kl_rollout_train``, nats. Range [0, inf).

    Args:
        mean_tv: Dbar_t, shape (T,).
        mean_kl: average KL per position, shape (T,).

    Returns:
        A record with ``rigorous=False``.

    Raises:
        ValueError: on bad divergences or shapes that differ.

    Source: docs/theory.md#not-a-guarantee.

    Example:
        >>> from_products_of_averages([0.1, 0.1], [0.02, 0.02]).rigorous
        False
    """
    tv = checks.divergence("mean_tv", mean_tv, at_most=1.0)
    kl = checks.divergence("mean_kl", mean_kl)
    if tv.shape != kl.shape or tv.ndim != 1:
        raise ValueError(f"mean_tv and mean_kl must share one shape, got {tv.shape}, {kl.shape}.")
    before = np.cumsum(kl) - kl
    return Bound(
        "product_of_averages",
        float(4 * tv @ np.sqrt(np.maximum(before, 0) / 2)),
        (("mean_tv", AVERAGE), ("mean_kl", AVERAGE)),
        True,
        False,
        "not a guarantee, docs/theory.md#not-a-guarantee",
    )


@dataclass(frozen=True)
class Vacuity:
    """Three tests of whether a bound says anything.

    Attributes:
        bound: B.
        span: of the reward.
        attainable: upper bound on sup_R L' for the same information (inf when nothing was given).
        below_range: B < span.
        certifying: B < attainable; otherwise L' > B can never happen.
        instance: B < measured L', or None when nothing was measured.
    """

    bound: float
    span: float
    attainable: float
    below_range: bool
    certifying: bool
    instance: bool | None


def vacuity(
    bound: Bound | float,
    horizon: int,
    *,
    max_kl: float | None = None,
    seq_kl: float | None = None,
    seq_chi2: float | None = None,
    mean_tv: ArrayLike | None = None,
    surrogate: float | None = None,
    span: float = 1.0,
) -> Vacuity:
    """Apply the range test, the certifying test and the instance test.

    sup_R L' = (1/2) E|S| <= span min{sum Dbar_t, T sqrt(delta/2), sqrt(T D_seq/2), sqrt(X_seq)/2}

    Assumes the information given to the test is what the bound was computed from. A bound above the
    attainable surrogate cannot certify improvement even when it is below the reward's range.
    KL: ``kl_rollout_train``, nats.

    Args:
        bound: the record or number, already scaled to the reward's span.
        horizon: T.
        max_kl: delta, maximum over all contexts.
        seq_kl: D_seq, rollout average.
        seq_chi2: X_seq, rollout average.
        mean_tv: Dbar_t.
        surrogate: the measured L'.
        span: of the reward.

    Returns:
        The three verdicts.

    Raises:
        ValueError: on bad divergences.

    Source: ours, docs/theory.md#vacuity.

    Example:
        >>> v = vacuity(8.192, 4096, max_kl=1e-4, seq_kl=0.01)
        >>> v.below_range, v.certifying, round(v.attainable, 2)
        (False, False, 4.53)
    """
    length = int(checks.horizon(horizon))
    value = float(bound.value) if isinstance(bound, Bound) else float(bound)
    limits = [math.inf]
    if max_kl is not None:
        limits.append(length * math.sqrt(checks.divergence("max_kl", max_kl) / 2))
    if seq_kl is not None:
        limits.append(math.sqrt(length * checks.divergence("seq_kl", seq_kl) / 2))
    if seq_chi2 is not None:
        limits.append(math.sqrt(checks.divergence("seq_chi2", seq_chi2)) / 2)
    if mean_tv is not None:
        limits.append(float(checks.divergence("mean_tv", mean_tv, at_most=1.0).sum()))
    attainable = span * min(limits)
    return Vacuity(
        value,
        span,
        attainable,
        value < span,
        value < attainable,
        None if surrogate is None else value < surrogate,
    )
