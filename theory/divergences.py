# SPDX-License-Identifier: Apache-2.0
"""Divergences between two token distributions, termwise non-negative and exact at the edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from theory import checks

__all__ = ["RowDivergences", "k3", "row_divergences"]

Array = NDArray[np.float64]


def k3(rho: ArrayLike) -> Array:
    """Convex remainder of the logarithm.

    k3(x) = x - 1 - log x >= 0,  E_{y~rollout}[k3(rho)] = kl_rollout_train

    Assumes x >= 0; the second statement needs rho = train/rollout without outside mass. Nats. Range
    [0, inf], +inf at 0. Near 1, a series replaces the cancelling difference.
    Source: Schulman, "Approximating KL divergence" (2020); docs/theory.md#k3.

    Example:
        >>> round(float(k3(100.0)), 3), round(float(k3(0.01)), 3)
        (94.395, 3.615)
    """
    x = np.asarray(rho, dtype=np.float64)
    u = x - 1
    series = u * u * (1 / 2 - u * (1 / 3 - u * (1 / 4 - u * (1 / 5 - u * (1 / 6 - u / 7)))))
    near = np.abs(u) < 0.5
    with np.errstate(divide="ignore"):
        plain = u - np.where(near, np.log1p(np.where(near, u, 0.0)), np.log(x))
    return np.where(np.abs(u) < 1e-3, series, plain)


@dataclass(frozen=True)
class RowDivergences:
    """Divergences between corresponding rows of two arrays of probabilities.

    Attributes:
        tv: total variation, [0, 1].
        kl_rollout_train: sum p log(p/q), nats, [0, inf].
        kl_train_rollout: sum q log(q/p), nats, [0, inf].
        chi2: sum q^2/p - 1 (train against rollout), [0, inf].
        bc: Bhattacharyya affinity sum sqrt(p q), [0, 1].
        max_log_ratio: max over tokens with q > 0 of log(q/p), nats, [0, inf].
        outside: train mass where the rollout has none, [0, 1].
    """

    tv: Array
    kl_rollout_train: Array
    kl_train_rollout: Array
    chi2: Array
    bc: Array
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
        max_log_ratio=np.maximum(ratio.max(-1), 0.0),
        outside=np.where(p > 0, 0.0, q).sum(-1),
    )
