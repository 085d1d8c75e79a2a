# SPDX-License-Identifier: Apache-2.0
"""From a target back to the divergence, and on to the horizon that spoils a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from theory import checks
from theory.bounds.catalogue import CATALOGUE
from theory.records import Bound

__all__ = ["inverse", "vacuous_horizon"]

_AT_MOST_ONE = ("max_tv", "seq_tv")
_HUGE = 1e300
#: Largest horizon that :func:`vacuous_horizon` tries.
LONGEST = 2**20


def _function(bound: str | Callable[..., Bound]) -> Callable[..., Bound]:
    if callable(bound):
        return bound
    if bound not in CATALOGUE:
        raise ValueError(f"Unknown bound {bound!r}; known ones are {sorted(CATALOGUE)}.")
    return CATALOGUE[bound].compute


def inverse(
    bound: str | Callable[..., Bound], target: float, solve_for: str, horizon: int, **known: Any
) -> float:
    """Largest value of one divergence for which a bound stays within a target.

        sup { x : B(T, x) <= target }

    Assumes the bound is non-decreasing in the quantity, which holds for all of the catalogue.
    Found by bisection to a relative 1e-12. Unit of the quantity (nats for a KL, direction
    ``kl_rollout_train``). Range [0, inf], at most 1 for a total variation.

    Args:
        bound: name in the catalogue, or a function of (horizon, **quantities).
        target: largest acceptable value of the bound, > 0, reward units.
        solve_for: the quantity to solve for, for instance "max_kl", "seq_kl" or "max_tv".
        horizon: T >= 1.
        **known: the other quantities.

    Returns:
        The largest admissible value, within what the other quantities allow (Pinsker, D_seq <=
        T delta); inf when no value violates the target, 0 when every consistent one does.

    Raises:
        ValueError: on a target <= 0, an unknown name, or bad quantities.

    Source: monotonicity of each formula, docs/theory.md#inverse.

    Example:
        >>> inverse("seq_kl", 0.05, "seq_kl", horizon=4096)
        0.05
        >>> round(inverse("classical_kl", 0.1, "max_kl", horizon=4096) * 4096 * 4095, 9)
        0.1
    """
    if not target > 0:
        raise ValueError(f"The target must be > 0, got {target}.")
    compute = _function(bound)
    length = int(checks.horizon(horizon))

    def within(x: float) -> bool:
        return float(compute(length, **{solve_for: x}, **known).value) <= target

    low, ceiling = _consistent_range(solve_for, length, known)
    if not within(low):
        return 0.0
    high = min(max(2 * low, 1e-12), ceiling)
    while within(high):
        if high >= ceiling:
            return float("inf") if ceiling == _HUGE else ceiling
        low, high = high, min(high * 16, ceiling)
    for _ in range(200):
        middle = np.sqrt(low * high) if low > 0 else high / 2
        if not low < middle < high or high - low <= 1e-16 * high:
            break
        low, high = (float(middle), high) if within(float(middle)) else (low, float(middle))
    return float(low)


def _consistent_range(solve_for: str, length: int, known: dict[str, Any]) -> tuple[float, float]:
    """Values of ``solve_for`` that Pinsker and D_seq <= T delta leave open."""
    low, high = 0.0, 1.0 if solve_for in _AT_MOST_ONE else _HUGE
    max_kl, max_tv, seq_kl = (known.get(name) for name in ("max_kl", "max_tv", "seq_kl"))
    if solve_for == "max_tv" and max_kl is not None:
        high = min(high, float(np.sqrt(max_kl / 2)))
    if solve_for == "seq_kl" and max_kl is not None:
        high = min(high, length * float(max_kl))
    if solve_for == "max_kl":
        low = max(2 * float(max_tv or 0.0) ** 2, float(seq_kl or 0.0) / length)
    return low, high


def vacuous_horizon(
    bound: str | Callable[..., Bound], target: float = 1.0, **known: Any
) -> int | None:
    """Smallest horizon at which a bound reaches a target.

        min { T : B(T) >= target },  target = span of the reward by default

    Assumes the bound is non-decreasing in T at fixed quantities. Range 1..2^20, or None when
    the bound is still below the target there (SeqKL never gets there).

    Args:
        bound: name in the catalogue, or a function of (horizon, **quantities).
        target: reward units, > 0.
        **known: the quantities, KL in nats (``kl_rollout_train``).

    Returns:
        T, or None.

    Raises:
        ValueError: on a target <= 0, an unknown name, or bad quantities.

    Source: monotonicity of each formula, docs/theory.md#inverse.

    Example:
        >>> vacuous_horizon("classical_kl", max_kl=1e-4)
        101
        >>> vacuous_horizon("seq_kl", seq_kl=0.01) is None
        True
    """
    if not target > 0:
        raise ValueError(f"The target must be > 0, got {target}.")
    compute = _function(bound)

    def reached(length: int) -> bool:
        return float(compute(length, **known).value) >= target

    first = 1
    if known.get("seq_kl") is not None and known.get("max_kl"):
        first = max(1, int(np.ceil(known["seq_kl"] / known["max_kl"] * (1 - 1e-12))))
    high = first
    while not reached(high):
        if high >= LONGEST:
            return None
        high *= 2
    low = max(high // 2, first - 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
