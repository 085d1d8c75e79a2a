# SPDX-License-Identifier: Apache-2.0
"""The published bounds on the surrogate's error, with their caps, as printed.

Setting of every function here: reward in [0, 1] given at the end, sequences of at most T tokens,

    Error = J(train) - J(rollout) - L',   L' = E_rollout[R sum_t (rho_t - 1)],

``max_tv`` (eps) and ``max_kl`` (delta) are maxima over all contexts, ``seq_kl`` (D_seq) and
``mean_tv`` (Dbar_t) are rollout averages. Every KL is ``kl_rollout_train`` in nats. Values are in
units of reward, in [0, inf). ``form="finite"`` is the exact capped sum over positions,
``form="closed"`` the formula that the paper prints after bounding the sum by an integral.

All of them hold, and all of them are twice too large: the derivation bounds ``|A|`` where the
span of Q is enough. :func:`halved` is the repaired constant (docs/theory.md#half-constants).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from theory import checks
from theory.bounds.sums import capped_linear_sum, capped_sqrt_sum, weighted_rows
from theory.records import AVERAGE, MAXIMUM, Bound, Need, Number

__all__ = [
    "Form",
    "adaptive",
    "adaptive_linear",
    "adaptive_worst_case",
    "classical_kl",
    "classical_tv",
    "coupling",
    "cpo",
    "dppo",
    "halved",
    "length_weights",
    "mixed_kl",
    "mixed_tv",
    "pinsker_marginal_kl",
    "pinsker_marginal_tv",
    "trpo",
    "trpo_linear_as_printed",
    "unified",
]

Form = Literal["finite", "closed"]
_TRM = "Li et al., Trust Region Masking, arXiv:2512.23075v3"


def _number(value: ArrayLike) -> Number:
    array = np.asarray(value, dtype=np.float64)
    return float(array) if array.ndim == 0 else array


def _record(name: str, value: ArrayLike, source: str, **needs: Need) -> Bound:
    return Bound(name, _number(value), tuple(needs.items()), True, True, source)


def _times(a: ArrayLike, b: ArrayLike) -> NDArray[np.float64]:
    """Product with 0 * inf = 0: no position, or no mass, costs nothing."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where((x == 0) | (y == 0), 0.0, x * y))


def _finite(form: str) -> bool:
    if form not in ("finite", "closed"):
        raise ValueError(f"form must be 'finite' or 'closed', got {form!r}.")
    return form == "finite"


def _root_half(kl: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sqrt(kl / 2)


def classical_tv(horizon: ArrayLike, max_tv: ArrayLike) -> Bound:
    """Classical bound from the largest total variation.

        |Error| <= 4 eps^2 sum_t (t - 1) = 2 T (T - 1) eps^2

    Assumes reward in [0, 1]; total variation is symmetric, so there is no direction. Dimensionless
    input in [0, 1]; range [0, inf), no cap.

    Args:
        horizon: T, whole number(s) >= 1.
        max_tv: eps, maximum over all contexts of the total variation.

    Returns:
        The record ``classical_tv``.

    Raises:
        ValueError: on T < 1 or eps outside [0, 1].

    Source: TRM eq. (classical); Kakade and Langford 2002. Sharp after halving: the rare token of
    ``theory.mdp.adversarial`` reaches it.

    Example:
        >>> round(classical_tv(4096, 5e-3).value, 2)
        838.66
    """
    length = checks.horizon(horizon).astype(np.float64)
    eps = checks.divergence("max_tv", max_tv, at_most=1.0)
    return _record(
        "classical_tv",
        2 * length * (length - 1) * eps**2,
        f"{_TRM}, classical bound",
        max_tv=MAXIMUM,
    )


def classical_kl(horizon: ArrayLike, max_kl: ArrayLike) -> Bound:
    """Classical bound from the largest KL.

        |Error| <= T (T - 1) delta

    Assumes reward in [0, 1]; from :func:`classical_tv` by Pinsker, eps^2 <= delta/2
    (so the factor is T (T - 1), not T^2). KL: ``kl_rollout_train``, nats. Range [0, inf), no cap.

    Args:
        horizon: T, whole number(s) >= 1.
        max_kl: delta, maximum over all contexts.

    Returns:
        The record ``classical_kl``.

    Raises:
        ValueError: on T < 1 or a negative or NaN delta.

    Source: TRM, classical bound.

    Example:
        >>> round(classical_kl(4096, 1e-4).value, 2)
        1677.31
    """
    length = checks.horizon(horizon).astype(np.float64)
    delta = checks.divergence("max_kl", max_kl)
    return _record(
        "classical_kl",
        _times(length * (length - 1), delta),
        f"{_TRM}, classical bound",
        max_kl=MAXIMUM,
    )


def pinsker_marginal_kl(horizon: ArrayLike, max_kl: ArrayLike, *, form: Form = "finite") -> Bound:
    """Pinsker-marginal bound, KL variant.

        finite: 4 min(1, sqrt(delta/2)) sum_t min(1, sqrt((t-1) delta/2))
        closed: (4/3) T^{3/2} delta

    Assumes reward in [0, 1]. The closed form is never below the finite one. KL:
    ``kl_rollout_train``, nats. Range [0, 4 (T - 1)] for the finite form.

    Args:
        horizon: T, whole number(s) >= 1.
        max_kl: delta, maximum over all contexts.
        form: "finite" or "closed".

    Returns:
        The record ``pinsker_marginal_kl``.

    Raises:
        ValueError: on T < 1, a negative or NaN delta, or an unknown form.

    Source: TRM, theorem Pinsker-Marginal.

    Example:
        >>> round(pinsker_marginal_kl(4096, 1e-4).value, 3)
        34.946
        >>> round(pinsker_marginal_kl(4096, 1e-4, form="closed").value, 3)
        34.953
    """
    length = checks.horizon(horizon)
    delta = checks.divergence("max_kl", max_kl)
    if _finite(form):
        value = 4 * np.minimum(1, _root_half(delta)) * capped_sqrt_sum(length - 1, delta / 2)
    else:
        value = (4 / 3) * length.astype(np.float64) ** 1.5 * delta
    return _record(
        "pinsker_marginal_kl", value, f"{_TRM}, theorem Pinsker-Marginal ({form})", max_kl=MAXIMUM
    )


def pinsker_marginal_tv(
    horizon: ArrayLike, max_kl: ArrayLike, max_tv: ArrayLike, *, form: Form = "finite"
) -> Bound:
    """Pinsker-marginal bound, TV variant.

        finite: 4 min(1, eps) sum_t min(1, sqrt((t-1) delta/2))
        closed: (8/3) T^{3/2} eps sqrt(delta/2)

    Assumes reward in [0, 1]. KL: ``kl_rollout_train``, nats; eps dimensionless. Range [0, 4
    (T - 1)] for the finite form.

    Args:
        horizon: T, whole number(s) >= 1.
        max_kl: delta, maximum over all contexts.
        max_tv: eps, maximum over the same contexts.
        form: "finite" or "closed".

    Returns:
        The record ``pinsker_marginal_tv``.

    Raises:
        ValueError: on bad inputs, or when eps exceeds sqrt(delta/2).

    Source: TRM, theorem Pinsker-Marginal.

    Example:
        >>> round(pinsker_marginal_tv(4096, 1e-4, 5e-3).value, 3)
        24.711
    """
    length = checks.horizon(horizon)
    delta = checks.divergence("max_kl", max_kl)
    eps = checks.divergence("max_tv", max_tv, at_most=1.0)
    checks.pinsker(delta, eps)
    if _finite(form):
        value = 4 * eps * capped_sqrt_sum(length - 1, delta / 2)
    else:
        value = (8 / 3) * length.astype(np.float64) ** 1.5 * _times(eps, _root_half(delta))
    return _record(
        "pinsker_marginal_tv",
        value,
        f"{_TRM}, theorem Pinsker-Marginal ({form})",
        max_kl=MAXIMUM,
        max_tv=MAXIMUM,
    )


def mixed_kl(
    horizon: ArrayLike, max_kl: ArrayLike, seq_kl: ArrayLike, *, form: Form = "finite"
) -> Bound:
    """Mixed bound, KL variant: maximum times sequence total.

        finite: 4 T min(1, sqrt(delta/2)) min(1, sqrt(D_seq/2))
        closed: 2 T sqrt(delta D_seq)

    Assumes reward in [0, 1]. "O(T)" hides a T inside D_seq: with D_seq = T delta it is 1.5
    times the Pinsker-marginal bound. KL: ``kl_rollout_train``, nats. Range [0, 4 T] for the
    finite form.

    Args:
        horizon: T, whole number(s) >= 1.
        max_kl: delta, maximum over all contexts.
        seq_kl: D_seq, rollout average of the summed KL, at most T delta.
        form: "finite" (with caps) or "closed" (without).

    Returns:
        The record ``mixed_kl``.

    Raises:
        ValueError: on bad inputs, or when D_seq exceeds T delta.

    Source: TRM, theorem Mixed.

    Example:
        >>> round(mixed_kl(4096, 1e-4, 0.01).value, 3)
        8.192
    """
    length = checks.horizon(horizon)
    delta = checks.divergence("max_kl", max_kl)
    total = checks.divergence("seq_kl", seq_kl)
    _sequence_total(length, delta, total)
    if _finite(form):
        value = 4 * length * np.minimum(1, _root_half(delta)) * np.minimum(1, _root_half(total))
    else:
        value = 2 * length * np.sqrt(_times(delta, total))
    return _record(
        "mixed_kl", value, f"{_TRM}, theorem Mixed ({form})", max_kl=MAXIMUM, seq_kl=AVERAGE
    )


def mixed_tv(horizon: ArrayLike, max_tv: ArrayLike, seq_tv: ArrayLike) -> Bound:
    """Mixed bound, TV variant.

        |Error| <= 4 T min(1, eps) min(1, TV_seq)

    Assumes reward in [0, 1], and TV_seq = TV(P_rollout, P_train) on whole sequences, averaged over
    prompts (the paper defines it given a prompt, where the bound needs the average). Dimensionless
    inputs in [0, 1]; finite sum and closed form coincide. Range [0, 4 T].

    Args:
        horizon: T, whole number(s) >= 1.
        max_tv: eps, maximum over all contexts.
        seq_tv: TV_seq.

    Returns:
        The record ``mixed_tv``.

    Raises:
        ValueError: on T < 1 or a total variation outside [0, 1].

    Source: TRM, theorem Mixed.

    Example:
        >>> round(mixed_tv(4096, 5e-3, 0.05).value, 3)
        4.096
    """
    length = checks.horizon(horizon)
    eps = checks.divergence("max_tv", max_tv, at_most=1.0)
    seq = checks.divergence("seq_tv", seq_tv, at_most=1.0)
    return _record(
        "mixed_tv", 4 * length * eps * seq, f"{_TRM}, theorem Mixed", max_tv=MAXIMUM, seq_tv=AVERAGE
    )


def coupling(horizon: ArrayLike, max_tv: ArrayLike, *, form: Form = "finite") -> Bound:
    """Coupling bound: the classical bound with its context shift capped at 1.

        finite: 4 min(1, eps) sum_t min(1, (t-1) eps)
        closed: 2 T (T-1) eps^2 when T eps <= 1, else 4 T eps

    Assumes reward in [0, 1]. Dimensionless input in [0, 1]. Range [0, 4 (T - 1)] for the finite
    form.

    Args:
        horizon: T, whole number(s) >= 1.
        max_tv: eps, maximum over all contexts.
        form: "finite" or "closed".

    Returns:
        The record ``coupling``.

    Raises:
        ValueError: on T < 1, eps outside [0, 1], or an unknown form.

    Source: TRM, theorem Coupling.

    Example:
        >>> round(coupling(4096, (1e-4 / 2) ** 0.5).value, 2)
        113.84
    """
    length = checks.horizon(horizon)
    eps = checks.divergence("max_tv", max_tv, at_most=1.0)
    if _finite(form):
        value = 4 * eps * capped_linear_sum(length - 1, eps)
    else:
        value = np.where(length * eps <= 1, 2 * length * (length - 1.0) * eps**2, 4 * length * eps)
    return _record("coupling", value, f"{_TRM}, theorem Coupling ({form})", max_tv=MAXIMUM)


def length_weights(
    horizon: int, max_kl: float | None = None, max_tv: float | None = None
) -> NDArray[np.float64]:
    """Weight of each position in the adaptive bound and in length-normalised masking.

        w_t = min(1, (T-t) eps, sqrt((T-t) delta/2)),  t = 1..T

    Assumes maxima over all contexts; a route whose input is None is left out. Both inputs are
    needed by the length-normalised score, although its proposition names only delta.
    KL: ``kl_rollout_train``, nats. Range [0, 1] per entry; the last weight is 0.

    Raises:
        ValueError: on bad inputs, or when eps exceeds sqrt(delta/2).

    Source: TRM, theorem Adaptive, and its proposition on LN-TRM
    (where E_rollout[sum |rho-1| w] already bounds |Error|: half of what is printed).

    Example:
        >>> length_weights(3, max_tv=0.4).tolist()
        [0.8, 0.4, 0.0]
    """
    length = int(checks.horizon(horizon))
    remaining = np.arange(length - 1, -1, -1, dtype=np.float64)
    weights = np.ones(length)
    if max_tv is not None:
        weights = np.minimum(weights, remaining * checks.divergence("max_tv", max_tv, at_most=1.0))
    if max_kl is not None:
        delta = checks.divergence("max_kl", max_kl)
        with np.errstate(invalid="ignore"):
            weights = np.fmin(weights, np.sqrt(remaining * delta / 2))
        if max_tv is not None:
            checks.pinsker(delta, max_tv)
    return weights * (remaining > 0)


def adaptive(
    mean_tv: ArrayLike, max_kl: ArrayLike | None = None, max_tv: ArrayLike | None = None
) -> Bound:
    """Adaptive bound: average total variation per position times the worst suffix shift.

        |Error| <= 4 sum_t Dbar_t min(1, (T-t) eps, sqrt((T-t) delta/2))

    Assumes reward in [0, 1]. With ``max_tv`` alone it is the paper's TV variant, with ``max_kl``
    alone the KL variant, with both the hybrid; with Dbar_t at its maximum it returns the coupling
    and Pinsker-marginal values. A sum by nature: there is no closed form beside
    :func:`adaptive_linear`. KL: ``kl_rollout_train``, nats. Range [0, 4 (T - 1)].

    Args:
        mean_tv: Dbar_t for t = 1..T, rollout averages, shape (..., T).
        max_kl: delta, maximum over all contexts; broadcasts against the leading axes.
        max_tv: eps, maximum over all contexts; likewise.

    Returns:
        The record ``adaptive``.

    Raises:
        ValueError: on bad inputs, inconsistent maxima, or when neither maximum is given.

    Source: TRM, theorem Adaptive.

    Example:
        >>> import numpy as np
        >>> round(adaptive(np.full(4096, 5e-3), max_kl=1e-4, max_tv=5e-3).value, 3)
        24.711
    """
    averages = checks.divergence("mean_tv", mean_tv, at_most=1.0)
    if averages.ndim == 0 or averages.shape[-1] == 0:
        raise ValueError(f"mean_tv must have shape (..., T), got {averages.shape}.")
    if max_kl is None and max_tv is None:
        raise ValueError("adaptive needs max_kl or max_tv, got neither.")
    needs: dict[str, Need] = {"mean_tv": AVERAGE}
    if max_kl is not None:
        needs["max_kl"] = MAXIMUM
    if max_tv is not None:
        needs["max_tv"] = MAXIMUM
    value = 4 * weighted_rows(averages, length_weights, max_kl=max_kl, max_tv=max_tv)
    return _record("adaptive", value, f"{_TRM}, theorem Adaptive", **needs)


def adaptive_linear(mean_tv: ArrayLike) -> Bound:
    """Linear bound: averages only, no maximum.

        |Error| <= 4 sum_t Dbar_t

    Assumes reward in [0, 1]; it is the adaptive bound with every weight at its cap. First order in
    the mismatch, so it can never certify improvement. Dimensionless. Range [0, 4 T].

    Args:
        mean_tv: Dbar_t for t = 1..T, rollout averages, shape (..., T).

    Returns:
        The record ``adaptive_linear``.

    Raises:
        ValueError: on values outside [0, 1].

    Source: TRM, theorem Adaptive (all caps active); DPPO, arXiv:2602.04879, linear variant.

    Example:
        >>> import numpy as np
        >>> round(adaptive_linear(np.full(4096, 5e-3)).value, 2)
        81.92
    """
    averages = checks.divergence("mean_tv", mean_tv, at_most=1.0)
    return _record(
        "adaptive_linear",
        4 * averages.sum(axis=-1),
        f"{_TRM}, theorem Adaptive, caps active",
        mean_tv=AVERAGE,
    )


def adaptive_worst_case(horizon: ArrayLike, max_kl: ArrayLike) -> Bound:
    """Adaptive (and Pinsker-marginal) bound in closed form with its caps.

        4 min(1, sqrt(delta/2)) * { (2/3) sqrt(delta/2) T^{3/2}      if delta <= 2/T
                                  { T - 2/delta + 4/(3 delta)        otherwise

    Assumes reward in [0, 1]; the integral of the capped sum, so never below the finite forms. For
    delta <= 2/T it is the closed Pinsker-marginal form. KL: ``kl_rollout_train``, nats. Range
    [0, 4 T].

    Args:
        horizon: T, whole number(s) >= 1.
        max_kl: delta, maximum over all contexts.

    Returns:
        The record ``adaptive_worst_case``.

    Raises:
        ValueError: on T < 1 or a negative or NaN delta.

    Source: TRM v2, worst-case evaluation of theorem Adaptive.

    Example:
        >>> round(adaptive_worst_case(4096, 0.01).value, 1)
        1139.7
    """
    length = checks.horizon(horizon).astype(np.float64)
    delta = checks.divergence("max_kl", max_kl)
    root = _root_half(delta)
    with np.errstate(divide="ignore", invalid="ignore"):
        below = (2 / 3) * root * length**1.5
        beyond = length - 2 / delta + 4 / (3 * delta)
        total = np.where(delta * length <= 2, below, beyond)
    return _record(
        "adaptive_worst_case",
        4 * np.minimum(1, root) * total,
        f"{_TRM}, theorem Adaptive, worst case in closed form",
        max_kl=MAXIMUM,
    )


def unified(bounds: list[Bound]) -> Bound:
    """Smallest of several bounds on the same quantity.

        B* = min_i B_i

    Assumes every record bounds the same |Error|; records that are not rigorous are left out. The
    paper's B* is this minimum over its own bounds; an improvement is certified when L' > B*.
    Units of reward, range [0, inf).

    Args:
        bounds: records with scalar values, at least one of them rigorous.

    Returns:
        The smallest record, renamed ``unified`` with the winner in its source.

    Raises:
        ValueError: when no rigorous record is given.

    Source: TRM, theorem Unified; the minimum of valid bounds is valid.

    Example:
        >>> unified([classical_kl(10, 1e-4), pinsker_marginal_kl(10, 1e-4)]).source.split(":")[0]
        'minimum, reached by pinsker_marginal_kl'
    """
    usable = [b for b in bounds if b.rigorous]
    if not usable:
        raise ValueError(f"unified needs at least one rigorous bound, got {len(bounds)} record(s).")
    best = min(usable, key=lambda b: float(b.value))
    return replace(best, name="unified", source=f"minimum, reached by {best.name}: {best.source}")


def halved(bound: Bound) -> Bound:
    """Repair the constant of a bound of this module.

        |Error| <= B / 2

    Assumes the record is one of the paper's (not trpo, cpo or dppo): they bound the expected
    advantage by 2 eps max|A| = 2 eps, where the span of Q gives osc(g_t) <= 2 eps and hence half.
    Units of reward. Range [0, inf).

    Returns:
        The record named ``half_<name>``.

    Raises:
        ValueError: when the record has no factor 2 to give.

    Source: ours, docs/theory.md#half-constants.

    Example:
        >>> round(halved(pinsker_marginal_kl(4096, 1e-4)).value, 3)
        17.473
    """
    if not bound.source.startswith(_TRM):
        raise ValueError(f"halved applies to the paper's bounds, got {bound.name!r}.")
    return replace(
        bound,
        name=f"half_{bound.name}",
        value=bound.value / 2,
        source=f"ours, docs/theory.md#half-constants, from {bound.source}",
    )


def trpo(max_advantage: float, gamma: float, max_tv: ArrayLike) -> Bound:
    """TRPO's penalty, for comparison; quadratic in the total variation.

        |Error| <= 4 max|A| gamma / (1 - gamma)^2 * eps^2

    Assumes the discounted infinite horizon and the surrogate with normalised discounted visits;
    ``max_advantage`` is max over states and actions of |A|. With KL, replace eps^2 by the largest
    ``kl_rollout_train``: valid since eps^2 <= delta/2. Dimensionless eps. Range [0, inf).

    Args:
        max_advantage: max |A_rollout|, reward units.
        gamma: discount in [0, 1).
        max_tv: eps, maximum over all states.

    Returns:
        The record ``trpo``.

    Raises:
        ValueError: on gamma outside [0, 1), a negative advantage or eps outside [0, 1].

    Source: Schulman et al. 2015, arXiv:1502.05477, theorem 1.

    Example:
        >>> round(trpo(1.0, 0.9, 0.01).value, 6)
        0.036
    """
    _discount(gamma)
    eps = checks.divergence("max_tv", max_tv, at_most=1.0)
    advantage = checks.divergence("max_advantage", max_advantage)
    return _record(
        "trpo",
        4 * advantage * gamma / (1 - gamma) ** 2 * eps**2,
        "Schulman et al. 2015, arXiv:1502.05477, theorem 1",
        max_tv=MAXIMUM,
        max_advantage=MAXIMUM,
    )


def cpo(max_mean_advantage: float, gamma: float, mean_tv: ArrayLike) -> Bound:
    """CPO's penalty, for comparison: the average form.

        |Error| <= 2 gamma / (1 - gamma)^2 * max_s |E_{a~train} A(s, a)| * E_{s~d_rollout}[TV(s)]

    Assumes the discounted setting with the normalisation of the objective 1/(1 - gamma). The factor
    ``max_mean_advantage`` is itself at most 2 eps max|A|, so the form is quadratic as well.
    Dimensionless total variation. Range [0, inf).

    Args:
        max_mean_advantage: max over states of |E_{a~train} A_rollout(s, a)|, reward units.
        gamma: discount in [0, 1).
        mean_tv: average total variation under the rollout's discounted visits.

    Returns:
        The record ``cpo``.

    Raises:
        ValueError: on gamma outside [0, 1), a negative advantage or an average outside [0, 1].

    Source: Achiam et al. 2017, arXiv:1705.10528, theorem 1 / corollary 1.

    Example:
        >>> round(cpo(0.02, 0.9, 0.01).value, 6)
        0.036
    """
    _discount(gamma)
    average = checks.divergence("mean_tv", mean_tv, at_most=1.0)
    advantage = checks.divergence("max_mean_advantage", max_mean_advantage)
    return _record(
        "cpo",
        2 * gamma * advantage * average / (1 - gamma) ** 2,
        "Achiam et al. 2017, arXiv:1705.10528, theorem 1",
        mean_tv=AVERAGE,
        max_mean_advantage=MAXIMUM,
    )


def dppo(horizon: ArrayLike, max_tv: ArrayLike, max_abs_reward: float = 1.0) -> Bound:
    """DPPO's penalty, the undiscounted classical form.

        |Error| <= 2 xi T (T - 1) eps^2,  xi = max |R|

    Assumes a terminal reward. For a reward in [0, 1] this is :func:`classical_tv`; for a signed
    reward the span, not max|R|, is what counts. Dimensionless eps. Range [0, inf).

    Args:
        horizon: T, whole number(s) >= 1.
        max_tv: eps, maximum over all contexts of the FULL total variation. A binary or top-K
            partition gives a lower bound of it and supports no guarantee.
        max_abs_reward: xi.

    Returns:
        The record ``dppo``.

    Raises:
        ValueError: on bad inputs.

    Source: Qi et al., arXiv:2602.04879, policy-improvement theorem.

    Example:
        >>> dppo(4096, 5e-3).value == classical_tv(4096, 5e-3).value
        True
    """
    value = np.asarray(classical_tv(horizon, max_tv).value)
    xi = checks.divergence("max_abs_reward", max_abs_reward)
    return _record("dppo", xi * value, "Qi et al., arXiv:2602.04879", max_tv=MAXIMUM)


def trpo_linear_as_printed(horizon: ArrayLike, max_tv: ArrayLike, constant: float = 2.0) -> Bound:
    """The linear form that a blog post prints for TRPO: true, but weaker than the real one.

        |Error| <= C T^2 eps

    Assumes reward in [0, 1] and C >= 2 (C carries the reward's span); it follows from the quadratic
    form by eps^2 <= eps and T (T - 1) <= T^2. It suggests eps ~ 1/T^2 where the quadratic form only
    asks for eps ~ 1/T. Dimensionless eps. Range [0, inf).

    Args:
        horizon: T, whole number(s) >= 1.
        max_tv: eps, maximum over all contexts.
        constant: C; below 2 the record is not rigorous.

    Returns:
        The record ``trpo_linear_as_printed``.

    Raises:
        ValueError: on bad inputs.

    Source: Li and Liu, "RL collapse, part 3" (blog); the true statements are TRPO theorem 1 and
    :func:`classical_tv`. See docs/theory.md#corrections, item 10.

    Example:
        >>> trpo_linear_as_printed(2000, 1e-3).value / classical_tv(2000, 1e-3).value > 1000
        True
    """
    length = checks.horizon(horizon).astype(np.float64)
    eps = checks.divergence("max_tv", max_tv, at_most=1.0)
    record = _record(
        "trpo_linear_as_printed",
        constant * length**2 * eps,
        "Li and Liu, RL collapse part 3 (blog): true but weaker than TRPO, which is quadratic",
        max_tv=MAXIMUM,
    )
    return replace(record, rigorous=constant >= 2)


def _discount(gamma: float) -> None:
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma must lie in [0, 1), got {gamma}.")


def _sequence_total(
    length: NDArray[np.int64], delta: NDArray[np.float64], total: NDArray[np.float64]
) -> None:
    n, d, s = np.broadcast_arrays(length, delta, total)
    wrong = s > n * d * (1 + 1e-9)
    if np.any(wrong):
        i = int(np.argmax(np.ravel(wrong)))
        raise ValueError(
            f"seq_kl = {np.ravel(s)[i]:g} exceeds T * max_kl = {np.ravel(n * d)[i]:g}: "
            "an average cannot exceed the maximum."
        )
