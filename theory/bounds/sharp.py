# SPDX-License-Identifier: Apache-2.0
"""Sharper bounds on the surrogate's error, with the proofs in docs/theory.md.

Same setting as :mod:`theory.bounds.paper`: reward in [0, 1] at the end, at most T tokens,

    Error = J(train) - J(rollout) - L',   L' = E_rollout[R sum_t (rho_t - 1)].

``max_*`` quantities are maxima over all contexts that the rollout policy reaches, ``seq_*`` and
``mean_*`` are rollout averages. KL is ``kl_rollout_train`` in nats unless a name says
``kl_train_rollout``; total variation, affinity and chi-square are dimensionless. Values are in
units of reward. Except for SeqKL, every statement assumes that the train policy stays inside
the rollout's support; otherwise use :meth:`theory.records.Bound.with_outside_mass`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from theory import checks
from theory.bounds.sums import weighted_rows
from theory.records import AVERAGE, LAW, MAXIMUM, MOMENT, Bound, Need, Number

__all__ = [
    "backward",
    "chi2",
    "chi2_from_ratio",
    "chi2_moment",
    "chi2_second_moment",
    "dyadic",
    "exact_supremum",
    "forward",
    "forward_moment",
    "per_step",
    "ratio_constant",
    "seq_kl",
    "seq_kl_discounted",
    "seq_kl_from_max",
    "split",
    "split_seq_kl",
    "tau",
]

#: Up to this length the dyadic recursion tries every cut; beyond it, only the middle one.
DYADIC_FULL_SEARCH = 1024


def _number(value: ArrayLike) -> Number:
    array = np.asarray(value, dtype=np.float64)
    return float(array) if array.ndim == 0 else array


def _ours(anchor: str) -> str:
    return f"ours, docs/theory.md#{anchor}"


def seq_kl(seq_kl: ArrayLike) -> Bound:
    """SeqKL: the error is at most the expected total KL of a rollout.

        |Error| <= D_seq = KL(P_rollout || P_train) = E_rollout sum_t KL(rollout || train)(c_t)

    Assumes reward in [0, 1] and nothing else: no maximum over contexts, no factor of T, no
    condition on the support (outside mass included). Direction ``kl_rollout_train`` only: with
    ``kl_train_rollout`` the statement is false (``theory.mdp.adversarial.reverse_branch``).
    Nats; range [0, inf]. The constant 1 is optimal.

    Args:
        seq_kl: D_seq in nats.

    Returns:
        The record ``seq_kl``.

    Raises:
        ValueError: on a negative or NaN divergence.

    Source: ours, docs/theory.md#seqkl.

    Example:
        >>> b = seq_kl(0.01)
        >>> b.value, b.assumes_support
        (0.01, False)
    """
    total = checks.divergence("seq_kl", seq_kl)
    return Bound("seq_kl", _number(total), (("seq_kl", AVERAGE),), False, True, _ours("seqkl"))


def seq_kl_from_max(horizon: ArrayLike, max_kl: ArrayLike) -> Bound:
    """SeqKL when only the largest KL is known.

        |Error| <= T delta

    Assumes reward in [0, 1]; corollary of :func:`seq_kl` with D_seq <= T delta. It dominates the
    Pinsker-marginal bound for T >= 2 and delta <= 2. KL: ``kl_rollout_train``, nats. Range
    [0, inf].

    Args:
        horizon: T, whole number(s) >= 1.
        max_kl: delta, maximum over all contexts.

    Returns:
        The record ``seq_kl_from_max``.

    Raises:
        ValueError: on T < 1 or a negative or NaN delta.

    Source: ours, docs/theory.md#seqkl.

    Example:
        >>> round(seq_kl_from_max(4096, 1e-4).value, 4)
        0.4096
    """
    length = checks.horizon(horizon)
    delta = checks.divergence("max_kl", max_kl)
    return Bound(
        "seq_kl_from_max",
        _number(length * delta),
        (("max_kl", MAXIMUM),),
        False,
        True,
        _ours("seqkl"),
    )


def seq_kl_discounted(max_kl: ArrayLike, gamma: float, reward_span: float = 1.0) -> Bound:
    """SeqKL for discounted per-step rewards on an infinite horizon.

        |Error| <= sum_k gamma^{k-1} w k delta = w delta / (1 - gamma)^2

    Assumes per-step rewards of span w and ``max_kl`` the largest KL over all states. TRPO's
    form for the same input is 4 gamma max|A| delta / (1 - gamma)^2 with max|A| up to w /
    (1 - gamma). KL: ``kl_rollout_train``, nats. Range [0, inf].

    Args:
        max_kl: delta, maximum over all states.
        gamma: discount in [0, 1).
        reward_span: w = max r - min r of a single step.

    Returns:
        The record ``seq_kl_discounted``.

    Raises:
        ValueError: on bad inputs.

    Source: ours, docs/theory.md#per-step.

    Example:
        >>> round(seq_kl_discounted(1e-4, 0.99).value, 6)
        1.0
    """
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma must lie in [0, 1), got {gamma}.")
    delta = checks.divergence("max_kl", max_kl)
    span = checks.divergence("reward_span", reward_span)
    return Bound(
        "seq_kl_discounted",
        _number(span * delta / (1 - gamma) ** 2),
        (("max_kl", MAXIMUM),),
        False,
        True,
        _ours("per-step"),
    )


def per_step(bound_by_length: Bound, spans: ArrayLike) -> Bound:
    """Turn a bound for terminal rewards into one for per-step (or discounted) rewards.

        |Error| <= sum_k w_k B(k)

    Assumes reward r_k of span w_k paid after token k and the surrogate
    ``E_rollout sum_k (r_k - min r_k) sum_{t<=k} (rho_t - 1)``; B(k) is the bound for sequences
    cut at length k. A discount enters as w_k = gamma^{k-1} w. Units of reward, range [0, inf].

    Args:
        bound_by_length: a record whose value is an array, entry k-1 for length k.
        spans: w_k for k = 1..T.

    Returns:
        The record ``per_step_<name>``.

    Raises:
        ValueError: when the shapes differ or a span is negative.

    Source: ours, docs/theory.md#per-step.

    Example:
        >>> import numpy as np
        >>> float(per_step(seq_kl_from_max(np.arange(1, 4), 0.1), np.ones(3)).value)
        0.6000000000000001
    """
    weights = checks.divergence("spans", spans)
    values = np.asarray(bound_by_length.value)
    if values.shape != weights.shape or values.ndim != 1:
        raise ValueError(
            f"per_step needs one bound per length and one span per step, got shapes "
            f"{values.shape} and {weights.shape}."
        )
    return Bound(
        f"per_step_{bound_by_length.name}",
        float(weights @ values),
        bound_by_length.needs,
        bound_by_length.assumes_support,
        bound_by_length.rigorous,
        f"{_ours('per-step')}; {bound_by_length.source}",
    )


def chi2_second_moment(horizon: ArrayLike, max_chi2: ArrayLike) -> NDArray[np.float64]:
    """Largest second moment of Z = W - 1 - sum (rho - 1) for a given largest chi-square.

        (1 + X)^T - 1 - T X = sum_{k=2}^{T} C(T, k) X^k

    Assumes no outside mass. Summed as the series for T X <= 1, where the closed form cancels;
    relative error below 1e-13. Dimensionless, range [0, inf]. Raises ValueError on T < 1 or a
    negative or NaN X. Source: ours, docs/theory.md#chi2.

    Example:
        >>> round(float(chi2_second_moment(2, 0.1)), 15)
        0.01
    """
    length, x = np.broadcast_arrays(
        checks.horizon(horizon).astype(np.float64), checks.divergence("max_chi2", max_chi2)
    )
    small = np.minimum(x, 1 / length)
    term = length * (length - 1) / 2 * small**2
    series = term.copy()
    for k in range(3, 24):
        term = term * np.maximum(length - k + 1, 0) * small / k
        series = series + term
    with np.errstate(over="ignore", invalid="ignore"):
        closed = np.expm1(length * np.log1p(x)) - length * x
    closed = np.where(np.isinf(x) & (length > 1), np.inf, np.where(length == 1, 0.0, closed))
    return np.where(length * x <= 1, series, closed)


def chi2(horizon: ArrayLike, max_chi2: ArrayLike) -> Bound:
    """Chi-square martingale bound.

        |Error| <= (1/2) sqrt((1 + X)^T - 1 - T X),  about T X / (2 sqrt 2) for small T X

    Assumes reward in [0, 1] and chi2(c) = sum_v train^2/rollout - 1 <= X at all contexts.
    Dimensionless; range [0, inf]. Attained at T = 2 by a fair coin.

    Args:
        horizon: T, whole number(s) >= 1.
        max_chi2: X, maximum over all contexts of chi-square(train || rollout).

    Returns:
        The record ``chi2``.

    Raises:
        ValueError: on T < 1 or a negative or NaN X.

    Source: ours, docs/theory.md#chi2 (B2).

    Example:
        >>> round(chi2(4096, 2e-4).value, 3)
        0.335
    """
    value = np.sqrt(chi2_second_moment(horizon, max_chi2)) / 2
    return Bound("chi2", _number(value), (("max_chi2", MAXIMUM),), True, True, _ours("chi2"))


def chi2_moment(second_moment: ArrayLike) -> Bound:
    """Chi-square bound from the rollout's own moment.

        |Error| <= (1/2) sqrt(E_rollout[Z^2]),  E[Z^2] = sum_t E[(W_{t-1} - 1)^2 chi2(c_t)]

    Assumes reward in [0, 1] and the exact moment; sampled values are heavy-tailed. Dimensionless;
    range [0, inf].

    Args:
        second_moment: E_rollout[Z^2].

    Returns:
        The record ``chi2_moment``.

    Raises:
        ValueError: on a negative or NaN moment.

    Source: ours, docs/theory.md#chi2 (B2').

    Example:
        >>> chi2_moment(0.04).value
        0.1
    """
    moment = checks.divergence("second_moment", second_moment)
    return Bound(
        "chi2_moment",
        _number(np.sqrt(moment) / 2),
        (("second_moment_z", MOMENT),),
        True,
        True,
        _ours("chi2"),
    )


def ratio_constant(max_log_ratio: ArrayLike) -> NDArray[np.float64]:
    """Factor that turns a KL into a chi-square when the ratio is capped from above.

        c(M) = (e^M - 1)^2 / (e^M - 1 - M),   chi2 <= c(M) * KL  whenever  train <= e^M rollout

    Assumes only the upper side of the ratio. c increases from c(0) = 2. M in nats, range [2, inf).
    Raises ValueError on a negative or NaN M.
    Source: ours, docs/theory.md#chi2.

    Example:
        >>> import numpy as np
        >>> round(float(ratio_constant(np.log(2))), 3)
        3.259
    """
    m = checks.divergence("max_log_ratio", max_log_ratio)
    # (e^M - 1 - M) / M^2 = 1/2 + M/6 + M^2/24 + ...; the series where the difference cancels.
    small = np.minimum(m, 0.5)
    series = np.zeros_like(small)
    for k in range(18, 1, -1):
        series = series * small / (k + 1) + 1.0
    series = series / 2
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        excess = np.where(m <= 0.5, series, (np.expm1(m) - m) / (m * m))
        slope = np.where(m == 0, 1.0, np.expm1(m) / m)
        return np.asarray(np.where(np.isinf(m), np.inf, slope**2 / excess))


def chi2_from_ratio(horizon: ArrayLike, max_kl: ArrayLike, max_log_ratio: ArrayLike) -> Bound:
    """Chi-square bound from the largest KL and the largest log-ratio.

        |Error| <= B2(T, X = c(M) delta),  c(M) = (e^M - 1)^2 / (e^M - 1 - M)

    Assumes reward in [0, 1] and log(train/rollout) <= M at every token of every context
    (upper side only). KL: ``kl_rollout_train``, nats; M in nats. Range [0, inf].

    Args:
        horizon: T, whole number(s) >= 1.
        max_kl: delta, maximum over all contexts.
        max_log_ratio: M >= 0, maximum over all contexts and tokens.

    Returns:
        The record ``chi2_from_ratio``.

    Raises:
        ValueError: on bad inputs.

    Source: ours, docs/theory.md#chi2 (B2'').

    Example:
        >>> import numpy as np
        >>> round(chi2_from_ratio(4096, 1e-4, np.log(2)).value, 3)
        0.605
    """
    delta = checks.divergence("max_kl", max_kl)
    constant = ratio_constant(max_log_ratio)
    with np.errstate(invalid="ignore"):
        x = np.where(delta == 0, 0.0, constant * delta)
    value = np.sqrt(chi2_second_moment(horizon, x)) / 2
    needs = (("max_kl", MAXIMUM), ("max_log_ratio", MAXIMUM))
    return Bound("chi2_from_ratio", _number(value), needs, True, True, _ours("chi2"))


def tau(
    n: ArrayLike,
    *,
    max_tv: float | None = None,
    max_kl: float | None = None,
    max_kl_train_rollout: float | None = None,
    min_bc: float | None = None,
    max_chi2: float | None = None,
) -> NDArray[np.float64]:
    """Largest total variation between the two laws of n further tokens, from any context.

        tau(n) = min{1, 1-(1-eps)^n, sqrt(n delta/2), sqrt(1-exp(-n delta)),
                     sqrt(1-beta^{2n}), (1/2) sqrt((1+X)^n - 1)}

    Assumes maxima (for beta: minimum) over all contexts. A route whose input is None is left out;
    ``max_kl_train_rollout`` may stand in for ``max_kl`` because total variation is symmetric,
    and the smaller one is used. KL in nats, the rest dimensionless. Range [0, 1], tau(0) = 0.

    Args:
        n: number of tokens, whole number(s) >= 0.
        max_tv: eps.
        max_kl: delta, ``kl_rollout_train``.
        max_kl_train_rollout: the other direction.
        min_bc: beta, smallest Bhattacharyya affinity sum_v sqrt(rollout * train).
        max_chi2: X.

    Returns:
        Array like n.

    Raises:
        ValueError: on a negative n or bad divergences.

    Source: maximal coupling; Pinsker; Bretagnolle-Huber; Hellinger and chi-square tensorisation.
    docs/theory.md#tau.

    Example:
        >>> tau([0, 1, 2], max_tv=0.5).tolist()
        [0.0, 0.5, 0.75]
    """
    steps = np.asarray(n, dtype=np.float64)
    if not np.all(steps >= 0):
        raise ValueError(
            f"The number of tokens n must be >= 0, got {steps[~(steps >= 0)].flat[0]}."
        )
    best = np.ones_like(steps)
    kls = [
        float(checks.divergence(name, value))
        for name, value in (("max_kl", max_kl), ("max_kl_train_rollout", max_kl_train_rollout))
        if value is not None
    ]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if max_tv is not None:
            eps = checks.divergence("max_tv", max_tv, at_most=1.0)
            best = np.fmin(best, -np.expm1(steps * np.log1p(-eps)))
        if kls:
            delta = min(kls)
            best = np.fmin(best, np.sqrt(steps * delta / 2))
            best = np.fmin(best, np.sqrt(-np.expm1(-steps * delta)))
        if min_bc is not None:
            beta = min(float(checks.divergence("min_bc", min_bc, at_most=1 + 1e-12)), 1.0)
            best = np.fmin(best, np.sqrt(-np.expm1(2 * steps * np.log(beta))))
        if max_chi2 is not None:
            x = checks.divergence("max_chi2", max_chi2)
            best = np.fmin(best, np.sqrt(np.expm1(steps * np.log1p(x))) / 2)
    return np.where(steps == 0, 0.0, best)


def _routes(**given: float | None) -> tuple[dict[str, float], dict[str, Need]]:
    kept = {name: float(value) for name, value in given.items() if value is not None}
    if not kept:
        raise ValueError(
            "At least one of max_tv, max_kl, max_kl_train_rollout, min_bc, max_chi2 "
            "is needed, got none."
        )
    if "max_kl" in kept and "max_tv" in kept:
        checks.pinsker(kept["max_kl"], kept["max_tv"])
    return kept, dict.fromkeys(kept, MAXIMUM)


def _sweep(
    table: Callable[..., NDArray[np.float64]], horizon: ArrayLike, **given: ArrayLike | None
) -> tuple[Number, dict[str, Need]]:
    """Evaluate ``table(longest, **scalars)[T]`` over broadcast horizons and parameters."""
    length = checks.horizon(horizon)
    names = [name for name, value in given.items() if value is not None]
    arrays = np.broadcast_arrays(length, *(np.asarray(given[n], dtype=np.float64) for n in names))
    out = np.empty(arrays[0].shape)
    flat = [np.ravel(a) for a in arrays]
    combinations: dict[tuple[float, ...], list[int]] = {}
    for i in range(flat[0].size):
        combinations.setdefault(tuple(float(a[i]) for a in flat[1:]), []).append(i)
    for key, where in combinations.items():
        wanted = flat[0][where]
        out.flat[where] = table(wanted, **dict(zip(names, key, strict=True)))
    return _number(out), {name: AVERAGE if name.startswith("seq_") else MAXIMUM for name in names}


def forward(
    horizon: ArrayLike,
    *,
    max_tv: ArrayLike | None = None,
    max_kl: ArrayLike | None = None,
    max_kl_train_rollout: ArrayLike | None = None,
    min_bc: ArrayLike | None = None,
    max_chi2: ArrayLike | None = None,
    seq_kl: ArrayLike | None = None,
    seq_tv: ArrayLike | None = None,
) -> Bound:
    """Forward bound: the paper's bounds at half the constant, the best route at every position.

        |Error| <= 2 eps sum_t min{tau(t-1), TV_seq, sqrt(D_seq/2), sqrt(1 - exp(-D_seq))}

    Assumes reward in [0, 1]; eps is ``max_tv`` or, when that is not given, tau(1) from the other
    maxima. KL: ``kl_rollout_train`` (nats) unless the name says otherwise. Range [0, 2 (T - 1)].
    O(T) per set of parameters; T = 10^6 takes well under a second.

    Args:
        horizon: T, whole number(s) >= 1.
        max_tv: eps, maximum over all contexts.
        max_kl: delta, maximum over all contexts.
        max_kl_train_rollout: maximum over all contexts of the other direction.
        min_bc: smallest affinity over all contexts.
        max_chi2: largest chi-square over all contexts.
        seq_kl: D_seq, rollout average of the total; caps every prefix.
        seq_tv: TV of whole sequences; caps every prefix.

    Returns:
        The record ``forward``.

    Raises:
        ValueError: on bad or inconsistent inputs, or when no maximum is given.

    Source: ours, docs/theory.md#forward (B3).

    Example:
        >>> round(forward(4096, max_kl=1e-4, seq_kl=0.01).value, 2)
        4.06
    """

    def table(wanted: NDArray[np.int64], **p: float) -> NDArray[np.float64]:
        total_kl, total_tv = p.pop("seq_kl", None), p.pop("seq_tv", None)
        routes, _ = _routes(**p)
        cap = 1.0
        if total_tv is not None:
            cap = min(cap, float(checks.divergence("seq_tv", total_tv, at_most=1.0)))
        if total_kl is not None:
            d = float(checks.divergence("seq_kl", total_kl))
            cap = min(cap, np.sqrt(d / 2), np.sqrt(-np.expm1(-d)))
        shift = np.minimum(tau(np.arange(int(wanted.max())), **routes), cap)
        eps = float(tau(1, **routes))
        return np.asarray(2 * eps * np.cumsum(shift)[wanted - 1])

    value, needs = _sweep(
        table,
        horizon,
        max_tv=max_tv,
        max_kl=max_kl,
        max_kl_train_rollout=max_kl_train_rollout,
        min_bc=min_bc,
        max_chi2=max_chi2,
        seq_kl=seq_kl,
        seq_tv=seq_tv,
    )
    return Bound("forward", value, tuple(needs.items()), True, True, _ours("forward"))


def forward_moment(moment: ArrayLike) -> Bound:
    """Forward bound from the rollout's own moments.

        |Error| <= sum_t E_rollout[|W_{t-1} - 1| tv(c_t)]

    Assumes reward in [0, 1] and the exact expectation. Attained at T = 2. This, and not a
    product of averages, is the averaged form of :func:`forward`. Dimensionless; range [0, 2 T].

    Args:
        moment: the sum of expectations.

    Returns:
        The record ``forward_moment``.

    Raises:
        ValueError: on a negative or NaN moment.

    Source: ours, docs/theory.md#forward (B3').

    Example:
        >>> forward_moment(0.02).value
        0.02
    """
    value = checks.divergence("moment", moment)
    return Bound(
        "forward_moment",
        _number(value),
        (("sum_t E|W-1|tv", MOMENT),),
        True,
        True,
        _ours("forward"),
    )


def backward(
    mean_tv: ArrayLike,
    *,
    max_tv: ArrayLike | None = None,
    max_kl: ArrayLike | None = None,
    max_kl_train_rollout: ArrayLike | None = None,
    min_bc: ArrayLike | None = None,
    max_chi2: ArrayLike | None = None,
) -> Bound:
    """Backward bound: average total variation per position times the worst suffix.

        |Error| <= 2 sum_t Dbar_t tau(T - t)

    Assumes reward in [0, 1]. The adaptive bound at half its constant with every route of
    :func:`tau`. KL in nats. Range [0, 2 (T - 1)].

    Args:
        mean_tv: Dbar_t for t = 1..T, rollout averages, shape (..., T).
        max_tv: eps, maximum over all contexts; the maxima broadcast against the leading axes.
        max_kl: delta (``kl_rollout_train``), maximum over all contexts.
        max_kl_train_rollout: maximum of the other direction.
        min_bc: smallest affinity.
        max_chi2: largest chi-square.

    Returns:
        The record ``backward``.

    Raises:
        ValueError: on bad or inconsistent inputs, or when no maximum is given.

    Source: ours, docs/theory.md#backward (B4).

    Example:
        >>> import numpy as np
        >>> round(backward(np.full(4096, 5e-3), max_tv=5e-3).value, 2)
        38.96
    """
    averages = np.atleast_1d(checks.divergence("mean_tv", mean_tv, at_most=1.0))

    def suffix(length: int, **given: float) -> NDArray[np.float64]:
        routes, _ = _routes(**given)
        return tau(np.arange(length - 1, -1, -1), **routes)

    maxima = {
        "max_tv": max_tv,
        "max_kl": max_kl,
        "max_kl_train_rollout": max_kl_train_rollout,
        "min_bc": min_bc,
        "max_chi2": max_chi2,
    }
    value = 2 * weighted_rows(averages, suffix, **maxima)
    needs = {"mean_tv": AVERAGE, **{n: MAXIMUM for n, v in maxima.items() if v is not None}}
    return Bound("backward", _number(value), tuple(needs.items()), True, True, _ours("backward"))


@lru_cache(maxsize=64)
def _dyadic_table(length: int, routes: tuple[tuple[str, float], ...], capped: bool) -> Number:
    """B(0..length) of the dyadic recursion, minimised over every cut."""
    given = dict(routes)
    n = np.arange(length + 1)
    shift = tau(n, **given)
    cap = _block_caps(n, shift, given) if capped else np.full(length + 1, np.inf)
    table = np.zeros(length + 1)
    for size in range(2, length + 1):
        h = np.arange(1, size // 2 + 1)
        candidates = table[h] + table[size - h] + 2 * shift[h] * shift[size - h]
        table[size] = min(float(candidates.min()), cap[size])
    table.flags.writeable = False
    return table


def _block_caps(
    n: NDArray[np.int64], shift: NDArray[np.float64], given: dict[str, float]
) -> NDArray[np.float64]:
    """Best of forward, chi-square and T delta for blocks of every size in n = 0, 1, ..."""
    cap = 2 * float(tau(1, **given)) * np.concatenate([[0.0], np.cumsum(shift)[:-1]])
    size = np.maximum(n, 1)
    if "max_kl" in given:
        cap = np.minimum(cap, size * given["max_kl"])
    if "max_chi2" in given:
        cap = np.minimum(cap, np.sqrt(chi2_second_moment(size, given["max_chi2"])) / 2)
    return np.where(n <= 1, 0.0, cap)


def dyadic(
    horizon: ArrayLike,
    *,
    max_tv: ArrayLike | None = None,
    max_kl: ArrayLike | None = None,
    max_kl_train_rollout: ArrayLike | None = None,
    min_bc: ArrayLike | None = None,
    max_chi2: ArrayLike | None = None,
    capped: bool = False,
) -> Bound:
    """Dyadic bound: cut the sequence, bound the interaction of the parts, recurse.

        B(n) = min_h B(h) + B(n-h) + 2 tau(h) tau(n-h),  B(1) = 0

    Assumes reward in [0, 1] and maxima over all contexts. (T delta / 2) log2 T for small delta.
    Every cut is valid, so beyond T = 1024 only the middle cut is tried. KL in nats. Range [0, inf).

    Args:
        horizon: T, whole number(s) >= 1.
        max_tv: eps.
        max_kl: delta (``kl_rollout_train``).
        max_kl_train_rollout: maximum of the other direction.
        min_bc: smallest affinity.
        max_chi2: largest chi-square.
        capped: also cap every block by the forward, chi-square and T delta bounds of its length.

    Returns:
        The record ``dyadic``.

    Raises:
        ValueError: on bad or inconsistent inputs, or when no maximum is given.

    Source: ours, docs/theory.md#dyadic (B5).

    Example:
        >>> round(dyadic(4096, max_kl=1e-4).value, 2)
        2.46
    """

    def table(wanted: NDArray[np.int64], **p: float) -> NDArray[np.float64]:
        routes, _ = _routes(**p)
        longest = int(wanted.max())
        if longest <= DYADIC_FULL_SEARCH:
            return np.asarray(_dyadic_table(longest, tuple(routes.items()), capped))[wanted]
        return np.array([_middle_cut(int(n), routes, capped) for n in wanted])

    value, needs = _sweep(
        table,
        horizon,
        max_tv=max_tv,
        max_kl=max_kl,
        max_kl_train_rollout=max_kl_train_rollout,
        min_bc=min_bc,
        max_chi2=max_chi2,
    )
    name = "dyadic_capped" if capped else "dyadic"
    return Bound(name, value, tuple(needs.items()), True, True, _ours("dyadic"))


def _middle_cut(length: int, routes: dict[str, float], capped: bool) -> float:
    known: dict[int, float] = {0: 0.0, 1: 0.0}
    caps: NDArray[np.float64] | None = None
    if capped:
        n = np.arange(length + 1)
        caps = _block_caps(n, tau(n, **routes), routes)

    def block(size: int) -> float:
        if size not in known:
            h = size // 2
            shift = tau([h, size - h], **routes)
            value = block(h) + block(size - h) + 2 * float(shift[0] * shift[1])
            known[size] = value if caps is None else min(value, float(caps[size]))
        return known[size]

    return block(length)


def split(
    *,
    seq_kl: ArrayLike | None = None,
    seq_tv: ArrayLike | None = None,
    mean_tv: ArrayLike | None = None,
    seq_chi2: ArrayLike | None = None,
) -> Bound:
    """Split bound: the two halves of the error bounded one by one, from averages only.

        |Error| <= min{1, TV_seq, sqrt(D_seq/2), sqrt(1 - exp(-D_seq))}
                   + min{sum_t Dbar_t, (1/2) sqrt(X_seq)}

    Assumes reward in [0, 1]. First order in the mismatch and larger than any L' it could be
    compared with, so it never certifies improvement. KL: ``kl_rollout_train``, nats. Range
    [0, 1 + T].

    Args:
        seq_kl: D_seq, rollout average of the total KL.
        seq_tv: total variation of whole sequences.
        mean_tv: Dbar_t for t = 1..T, shape (..., T).
        seq_chi2: X_seq, rollout average of the total chi-square.

    Returns:
        The record ``split``.

    Raises:
        ValueError: on bad inputs, or when neither mean_tv nor seq_chi2 is given.

    Source: ours, docs/theory.md#split (B6).

    Example:
        >>> import numpy as np
        >>> round(split(seq_kl=0.01, seq_chi2=0.02).value, 3)
        0.141
    """
    needs: dict[str, Need] = {}
    first, second = np.asarray(1.0), np.asarray(np.inf)
    if seq_tv is not None:
        needs["seq_tv"] = AVERAGE
        first = np.minimum(first, checks.divergence("seq_tv", seq_tv, at_most=1.0))
    if seq_kl is not None:
        needs["seq_kl"] = AVERAGE
        d = checks.divergence("seq_kl", seq_kl)
        first = np.minimum(first, np.minimum(np.sqrt(d / 2), np.sqrt(-np.expm1(-d))))
    if mean_tv is not None:
        needs["mean_tv"] = AVERAGE
        second = checks.divergence("mean_tv", mean_tv, at_most=1.0).sum(axis=-1)
    if seq_chi2 is not None:
        needs["seq_chi2"] = AVERAGE
        second = np.minimum(second, np.sqrt(checks.divergence("seq_chi2", seq_chi2)) / 2)
    if mean_tv is None and seq_chi2 is None:
        raise ValueError("split needs mean_tv or seq_chi2, got neither.")
    return Bound("split", _number(first + second), tuple(needs.items()), True, True, _ours("split"))


def split_seq_kl(horizon: ArrayLike, seq_kl: ArrayLike) -> Bound:
    """Split bound from D_seq alone.

        |Error| <= sqrt(D_seq/2) (1 + sqrt(T))

    Assumes reward in [0, 1]. Weaker than :func:`seq_kl` whenever D_seq <= (1 + sqrt T)^2 / 2;
    kept for comparison. KL: ``kl_rollout_train``, nats. Range [0, inf].

    Args:
        horizon: T, whole number(s) >= 1.
        seq_kl: D_seq, rollout average of the total.

    Returns:
        The record ``split_seq_kl``.

    Raises:
        ValueError: on bad inputs.

    Source: ours, docs/theory.md#split (B6').

    Example:
        >>> round(split_seq_kl(4, 0.02).value, 12)
        0.3
    """
    length = checks.horizon(horizon).astype(np.float64)
    total = checks.divergence("seq_kl", seq_kl)
    value = np.sqrt(total / 2) * (1 + np.sqrt(length))
    return Bound("split_seq_kl", _number(value), (("seq_kl", AVERAGE),), True, True, _ours("split"))


def exact_supremum(mean_abs_z: ArrayLike) -> Bound:
    """The yardstick: the largest |Error| over all rewards in [0, 1].

        sup_R |Error| = (1/2) E_rollout |W - 1 - S|,  S = sum_t (rho_t - 1)

    Assumes no outside mass and the whole law. A bound that does not look at the reward is valid
    exactly when it is never below this number. Range [0, inf).

    Args:
        mean_abs_z: E_rollout |W - 1 - S|.

    Returns:
        The record ``exact_supremum``.

    Raises:
        ValueError: on a negative or NaN value.

    Source: ours, docs/theory.md#measure-identity (B0).

    Example:
        >>> exact_supremum(0.5).value
        0.25
    """
    value = checks.divergence("mean_abs_z", mean_abs_z)
    return Bound(
        "exact_supremum",
        _number(value / 2),
        (("law of (W, S)", LAW),),
        True,
        True,
        _ours("measure-identity"),
    )
