# SPDX-License-Identifier: Apache-2.0
"""Divergences between two token distributions, termwise non-negative and exact at the edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from theory import checks

__all__ = [
    "RowDivergences",
    "expm1_gap",
    "k3",
    "log1p_gap",
    "logit_divergences",
    "row_divergences",
]

Array = NDArray[np.float64]


def log1p_gap(u: ArrayLike) -> Array:
    """Distance of the logarithm from its tangent, without cancellation.

    u - log(1 + u) >= 0

    Assumes u >= -1. Nats. Range [0, inf], +inf at -1. For |u| < 0.1 the series, whose first term
    left out is below 2^-53 of the sum. Source: Taylor.

    Example:
        >>> float(log1p_gap(1e-9)) / 5e-19
        0.9999999993333334
    """
    x = np.asarray(u, dtype=np.float64)
    near = np.abs(x) < 0.1
    small = np.where(near, x, 0.0)
    series = np.full_like(small, 1 / 18)
    for k in range(17, 1, -1):
        series = 1 / k - small * series
    with np.errstate(divide="ignore"):
        return np.where(near, small * small * series, x - np.log1p(x))


def expm1_gap(t: ArrayLike) -> Array:
    """Distance of the exponential from its tangent, without cancellation.

    e^t - 1 - t >= 0

    Assumes nothing. Range [0, inf]. For |t| <= 1/2 the series, whose first term left out is below
    2^-53 of the sum. Source: Taylor.

    Example:
        >>> float(expm1_gap(1e-9)) / 5e-19
        1.0000000003333334
    """
    x = np.asarray(t, dtype=np.float64)
    near = np.abs(x) <= 0.5
    small = np.where(near, x, 0.0)
    series = np.ones_like(small)
    for k in range(16, 2, -1):
        series = 1 + small * series / k
    with np.errstate(over="ignore"):
        return np.where(near, small * small * series / 2, np.expm1(x) - x)


def k3(rho: ArrayLike) -> Array:
    """Convex remainder of the logarithm.

    k3(x) = x - 1 - log x >= 0,  E_{y~rollout}[k3(rho)] = kl_rollout_train

    Assumes x >= 0; the second statement needs rho = train/rollout without outside mass. Nats. Range
    [0, inf], +inf at 0. Near 1, :func:`log1p_gap` replaces the cancelling difference.
    Source: Schulman, "Approximating KL divergence" (2020); docs/theory.md#k3.

    Example:
        >>> round(float(k3(100.0)), 3), round(float(k3(0.01)), 3)
        (94.395, 3.615)
    """
    x = np.asarray(rho, dtype=np.float64)
    near = np.abs(x - 1) < 0.5
    with np.errstate(divide="ignore"):
        return np.where(near, log1p_gap(np.where(near, x - 1, 0.0)), (x - 1) - np.log(x))


@dataclass(frozen=True)
class RowDivergences:
    """Divergences between corresponding rows of two arrays of probabilities.

    Attributes:
        tv: total variation, [0, 1].
        kl_rollout_train: sum p log(p/q), nats, [0, inf].
        kl_train_rollout: sum q log(q/p), nats, [0, inf].
        chi2: sum q^2/p - 1 (train against rollout), [0, inf].
        bc: Bhattacharyya affinity sum sqrt(p q), [0, 1].
        squared_hellinger: 1 - bc = (1/2) sum (sqrt p - sqrt q)^2, accurate where bc is near 1.
        max_log_ratio: max over tokens with q > 0 of log(q/p), nats, [0, inf].
        outside: train mass where the rollout has none, [0, 1].
    """

    tv: Array
    kl_rollout_train: Array
    kl_train_rollout: Array
    chi2: Array
    bc: Array
    squared_hellinger: Array
    max_log_ratio: Array
    outside: Array


def row_divergences(rollout: ArrayLike, train: ArrayLike) -> RowDivergences:
    """Compute every divergence of two conditional distributions.

    kl_rollout_train = sum_v [q - p + p log(p/q)], each term >= 0
    (term q when p = 0, inf when q = 0 < p)

    Assumes rows of probabilities on the last axis. Nats for the two KLs and the log-ratio. The
    termwise non-negative form loses no digits when the two rows are close.

    Args:
        rollout: p, shape (..., V).
        train: q, same shape.

    Returns:
        Arrays of shape (...).

    Raises:
        ValueError: when rows do not sum to 1.

    Ranges as listed in :class:`RowDivergences`.
    Source: definitions; docs/theory.md#setting.

    Example:
        >>> d = row_divergences([0.5, 0.5], [0.25, 0.75])
        >>> float(d.tv), round(float(d.kl_rollout_train), 6)
        (0.25, 0.143841)
    """
    p = checks.probabilities("rollout", rollout)
    q = checks.probabilities("train", train)
    safe_p, safe_q = np.where(p > 0, p, 1.0), np.where(q > 0, q, 1.0)
    both = (p > 0) & (q > 0)
    forward = np.where(both, p * k3(safe_q / safe_p), np.where(p > 0, np.inf, q))
    backward = np.where(both, q * k3(safe_p / safe_q), np.where(q > 0, np.inf, p))
    square = np.where(p > 0, (q - p) ** 2 / safe_p, np.where(q > 0, np.inf, 0.0))
    ratio = np.where(both, np.log(safe_q) - np.log(safe_p), np.where(q > 0, np.inf, -np.inf))
    return RowDivergences(
        tv=np.minimum(np.abs(q - p).sum(-1) / 2, 1.0),
        kl_rollout_train=forward.sum(-1),
        kl_train_rollout=backward.sum(-1),
        chi2=square.sum(-1),
        bc=np.minimum(np.sqrt(p * q).sum(-1), 1.0),
        squared_hellinger=np.minimum(((np.sqrt(p) - np.sqrt(q)) ** 2).sum(-1) / 2, 1.0),
        max_log_ratio=np.maximum(ratio.max(-1), 0.0),
        outside=np.where(p > 0, 0.0, q).sum(-1),
    )


def logit_divergences(rollout: ArrayLike, train: ArrayLike) -> RowDivergences:
    """Compute every divergence of two softmax distributions from their logits, as float64 sums.

    r_v = (y_v - x_v) - (lse y - lse x) = log(q_v/p_v):  kl_rollout_train = sum p (e^r - 1 - r),
    kl_train_rollout = sum q (e^-r - 1 + r),  tv = (1/2) sum p |e^r - 1|,
    chi2 = sum p (e^r - 1)^2,  squared_hellinger = (1/2) sum p (e^{r/2} - 1)^2

    Assumes finite logits, rows on the last axis, their dtype widened to float64. The ratio comes
    from the difference of the logits, so it is exact where both are stored in fewer bits; no sum
    cancels, and an error of the normalisers enters the KLs in second order only. Nats.

    Args:
        rollout: x, shape (..., V).
        train: y, same shape.

    Returns:
        Arrays of shape (...); relative error of the sums about 1e-14.

    Raises:
        ValueError: when the shapes differ or a logit is not finite.

    Ranges as listed in :class:`RowDivergences`.
    Source: definitions; docs/theory.md#setting.

    Example:
        >>> d = logit_divergences([0.0, 0.0], [0.0, 1.0])
        >>> round(float(d.kl_rollout_train), 6), round(float(d.tv), 6)
        (0.120115, 0.231059)
    """
    x, y = np.asarray(rollout, dtype=np.float64), np.asarray(train, dtype=np.float64)
    if x.shape != y.shape or x.ndim == 0:
        raise ValueError(f"Both policies need logits of one shape, got {x.shape} and {y.shape}.")
    for name, z in (("rollout", x), ("train", y)):
        if not np.all(np.isfinite(z)):
            raise ValueError(f"The {name} logits must be finite, got {z[~np.isfinite(z)][0]}.")

    def log_probabilities(z: Array) -> tuple[Array, Array]:
        top = z.max(-1, keepdims=True)
        normaliser = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
        return z - normaliser, normaliser

    (log_p, lse_x), (log_q, lse_y) = log_probabilities(x), log_probabilities(y)
    p, q = np.exp(log_p), np.exp(log_q)
    r = (y - x) - (lse_y - lse_x)
    near = np.abs(r) <= 0.5
    c = np.where(near, r, 0.0)  # far from 0 the plain differences do not cancel
    step, half = np.expm1(c), np.expm1(c / 2)
    with np.errstate(over="ignore"):
        square = np.where(near, p * step**2, np.exp(2 * log_q - log_p) - 2 * q + p)
    root = np.where(near, p * half**2, (np.sqrt(p) - np.sqrt(q)) ** 2)
    return RowDivergences(
        tv=np.where(near, p * np.abs(step), np.abs(q - p)).sum(-1) / 2,
        kl_rollout_train=np.where(near, p * expm1_gap(c), (q - p) - p * r).sum(-1),
        kl_train_rollout=np.where(near, q * expm1_gap(-c), (p - q) + q * r).sum(-1),
        chi2=square.sum(-1),
        bc=np.exp((log_p + log_q) / 2).sum(-1),
        squared_hellinger=root.sum(-1) / 2,
        max_log_ratio=np.maximum(r.max(-1), 0.0),
        outside=np.zeros(x.shape[:-1]),
    )
