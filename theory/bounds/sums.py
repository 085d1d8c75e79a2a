# SPDX-License-Identifier: Apache-2.0
"""Exact finite sums used by the bounds, vectorised and O(1) in the horizon."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["capped_linear_sum", "capped_sqrt_sum", "sqrt_sum", "weighted_rows"]

_ZETA_MINUS_HALF = -0.2078862249773545
_TABLE = np.concatenate([[0.0], np.cumsum(np.sqrt(np.arange(1.0, 33.0)))])


def sqrt_sum(n: ArrayLike) -> NDArray[np.float64]:
    """Sum of the first n square roots, for every n at once.

        sum_{k=1}^{n} sqrt(k) = (2/3) n^{3/2} + n^{1/2}/2 + zeta(-1/2) + n^{-1/2}/24 -
        n^{-5/2}/1920 + ...

    Assumes n is a whole number >= 0. A table up to n = 32, then Euler-Maclaurin, whose first
    omitted term is below 1e-14 there; relative error below 1e-15. Dimensionless, range [0, inf).
    Source: Euler-Maclaurin; checked against direct summation in the tests.

    Example:
        >>> float(sqrt_sum(4)) == 1 + 2**0.5 + 3**0.5 + 2
        True
    """
    whole = np.asarray(n, dtype=np.int64)
    x = np.maximum(whole, 1).astype(np.float64)
    root = np.sqrt(x)
    series = (2 / 3) * x * root + root / 2 + _ZETA_MINUS_HALF
    series = series + (1 / 24 - (1 / 1920 - 1 / (9216 * x * x)) / (x * x)) / root
    return np.where(whole <= 32, _TABLE[np.clip(whole, 0, 32)], series)


def capped_sqrt_sum(n: ArrayLike, scale: ArrayLike) -> NDArray[np.float64]:
    """Sum of capped square roots, the context shift summed over positions.

        sum_{k=0}^{n} min(1, sqrt(k * scale))

    Assumes n >= 0 whole and scale >= 0 (nats when scale = delta/2). Range [0, n].
    Source: direct count of the capped terms; docs/theory.md#finite-sums.

    Example:
        >>> float(capped_sqrt_sum(3, 0.25)) == 0.5 + 0.5 * 2**0.5 + 0.5 * 3**0.5
        True
    """
    whole = np.asarray(n, dtype=np.int64)
    scale_ = np.asarray(scale, dtype=np.float64)
    with np.errstate(divide="ignore"):
        below_cap = np.minimum(np.floor(1 / scale_), whole).astype(np.int64)
    root = np.where(below_cap == 0, 0.0, np.sqrt(scale_))
    return np.asarray(root * sqrt_sum(below_cap) + (whole - below_cap))


def capped_linear_sum(n: ArrayLike, scale: ArrayLike) -> NDArray[np.float64]:
    """Sum of capped linear terms, the coupling route summed over positions.

        sum_{k=0}^{n} min(1, k * scale)

    Assumes n >= 0 whole and scale >= 0. Dimensionless, range [0, n].
    Source: direct count of the capped terms; docs/theory.md#finite-sums.

    Example:
        >>> float(capped_linear_sum(3, 0.5))
        2.5
    """
    whole = np.asarray(n, dtype=np.int64)
    scale_ = np.asarray(scale, dtype=np.float64)
    with np.errstate(divide="ignore"):
        below_cap = np.minimum(np.floor(1 / scale_), whole)
    slope = np.where(below_cap == 0, 0.0, scale_)
    return np.asarray(slope * below_cap * (below_cap + 1) / 2 + (whole - below_cap))


def weighted_rows(
    averages: NDArray[np.float64],
    weights: Callable[..., NDArray[np.float64]],
    **parameters: ArrayLike | None,
) -> NDArray[np.float64]:
    """Sum of averages times position weights, over broadcast rows and parameters.

    out[...] = sum_t averages[..., t] weights(T, **parameters[...])[t]

    Assumes averages of shape (..., T) and parameters that broadcast against (...); None is left
    out. Unit and range of averages times weights.
    Source: none needed.

    Example:
        >>> weighted_rows(np.ones((2, 3)), lambda n, a: a * np.ones(n), a=[1.0, 2.0]).tolist()
        [3.0, 6.0]
    """
    names = [name for name, value in parameters.items() if value is not None]
    arrays = [np.asarray(parameters[name], dtype=np.float64) for name in names]
    shape = np.broadcast_shapes(averages.shape[:-1], *(a.shape for a in arrays))
    length = averages.shape[-1]
    rows = np.broadcast_to(averages, (*shape, length)).reshape(-1, length)
    columns = [np.broadcast_to(a, shape).ravel() for a in arrays]
    out = np.array(
        [
            row @ weights(length, **{n: float(c[i]) for n, c in zip(names, columns, strict=True)})
            for i, row in enumerate(rows)
        ]
    )
    return out.reshape(shape)
