# SPDX-License-Identifier: Apache-2.0
"""Product policies: the same two distributions at every position, closed forms to any length.

Everything depends on a count, so sums have O(T) terms. Weights are kept in logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln, xlog1py, xlogy

from theory import checks
from theory.divergences import k3, row_divergences

__all__ = ["BernoulliProduct", "CountLaw", "multinomial_law", "poisson_law"]

Array = NDArray[np.float64]
#: Largest number of count vectors that :func:`multinomial_law` enumerates.
MAX_COUNTS = 2_000_000


@dataclass(frozen=True)
class CountLaw:
    """Law of (W, S) on finitely many atoms, from which every worst case follows.

    Attributes:
        p: rollout probability of each atom.
        q: train probability of each atom.
        z: Z = W - 1 - S per atom (inf where W overflows; use ``q - p (1 + s)`` there).
        s: S = sum (rho_t - 1) per atom.
    """

    p: Array
    q: Array
    z: Array
    s: Array

    @property
    def seq_tv(self) -> float:
        """Total variation of whole sequences, (1/2) sum |q - p|, in [0, 1]."""
        return float(np.abs(self.q - self.p).sum() / 2)

    @property
    def sup_error(self) -> float:
        """Largest |Error| over rewards in [0, 1], (1/2) E_rollout |Z|."""
        small = np.abs(self.z) < 1e6
        safe = np.where(small, self.z, 0.0)
        return float(
            np.where(small, self.p * np.abs(safe), np.abs(self.q - self.p * (1 + self.s))).sum() / 2
        )

    @property
    def sup_surrogate(self) -> float:
        """Largest |L'| over rewards in [0, 1], (1/2) E_rollout |S|."""
        return float((self.p * np.abs(self.s)).sum() / 2)


@dataclass(frozen=True)
class BernoulliProduct:
    """Binary tokens: the rollout draws a 1 with probability p, train with probability q.

    W = (q/p)^K ((1-q)/(1-p))^{T-K},  S = K (q/p - 1) + (T-K) ((1-q)/(1-p) - 1),  K ~ Bin(T, p)

    Assumes 0 < p, q < 1, so the supports agree. A larger alphabet whose ratio takes only two values
    is the same object (p, q are then the masses of the two groups). KLs in nats.

    Attributes:
        p: rollout probability of a 1.
        q: train probability of a 1.
        length: T >= 1.

    Raises:
        ValueError: when p or q is not strictly between 0 and 1, or T < 1.

    Source: docs/theory.md#families.

    Example:
        >>> pair = BernoulliProduct(0.5, 0.6, 10)
        >>> round(pair.seq_kl, 6)
        0.20411
        >>> bool(pair.sup_error <= pair.seq_kl)
        True
    """

    p: float
    q: float
    length: int

    def __post_init__(self) -> None:
        for name, value in (("p", self.p), ("q", self.q)):
            if not 0 < value < 1:
                raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}.")
        checks.horizon(self.length)

    @cached_property
    def token(self) -> dict[str, float]:
        """Divergences of one token, with the keys that ``every_bound`` knows as maxima.

        Example:
            >>> BernoulliProduct(0.5, 0.75, 3).token["max_tv"]
            0.25
        """
        d = row_divergences([1 - self.p, self.p], [1 - self.q, self.q])
        return {
            "max_tv": float(d.tv),
            "max_kl": float(d.kl_rollout_train),
            "max_kl_train_rollout": float(d.kl_train_rollout),
            "min_bc": float(d.bc),
            "max_chi2": float(d.chi2),
            "max_log_ratio": float(d.max_log_ratio),
        }

    @property
    def seq_kl(self) -> float:
        """D_seq = T kl_rollout_train, nats."""
        return self.length * self.token["max_kl"]

    @property
    def second_moment_of_w(self) -> float:
        """E_rollout[W^2] = (1 + X)^T."""
        return float(np.exp(self.length * np.log1p(self.token["max_chi2"])))

    @property
    def affinity(self) -> float:
        """Affinity of whole sequences, bc^T."""
        return float(self.token["min_bc"] ** self.length)

    @cached_property
    def law(self) -> CountLaw:
        """Law of the count with W and S, T + 1 atoms, computed in logarithms.

        Example:
            >>> float(BernoulliProduct(0.5, 0.6, 8).law.q.sum().round(12))
            1.0
        """
        t = self.length
        k = np.arange(t + 1, dtype=np.float64)
        choose = gammaln(t + 1) - gammaln(k + 1) - gammaln(t - k + 1)
        log_p = choose + xlogy(k, self.p) + xlog1py(t - k, -self.p)
        change = self.q - self.p
        up, down = change / self.p, -change / (1 - self.p)
        log_w = k * np.log1p(up) + (t - k) * np.log1p(down)
        s = k * up + (t - k) * down
        with np.errstate(over="ignore"):
            z = _remainder(log_w, s)
        return CountLaw(np.exp(log_p), np.exp(log_p + log_w), z, s)

    @property
    def seq_tv(self) -> float:
        """Total variation of whole sequences, exact."""
        return self.law.seq_tv

    @property
    def sup_error(self) -> float:
        """Largest |Error| over rewards in [0, 1], exact."""
        return self.law.sup_error

    @property
    def sup_surrogate(self) -> float:
        """Largest |L'| over rewards in [0, 1], exact."""
        return self.law.sup_surrogate

    def known(self) -> dict[str, Any]:
        """Every quantity that ``theory.bounds.every_bound`` takes.

        Example:
            >>> BernoulliProduct(0.5, 0.75, 3).known()["mean_tv"].tolist()
            [0.25, 0.25, 0.25]
        """
        x = self.token["max_chi2"]
        return {
            **self.token,
            "seq_kl": self.seq_kl,
            "seq_tv": self.seq_tv,
            "seq_chi2": self.length * x,
            "mean_tv": np.full(self.length, self.token["max_tv"]),
        }


def _remainder(log_w: Array, s: Array) -> Array:
    """Z = W - 1 - S without cancellation: expm1(l) - S, with the parts below one taken together."""
    return np.asarray(np.expm1(log_w) - s)


def multinomial_law(rollout: ArrayLike, train: ArrayLike, length: int) -> CountLaw:
    """Law of (W, S) for a product policy on any small alphabet.

    atoms = count vectors (n_1..n_V) with sum T,  W = prod (q_v/p_v)^{n_v},  S = sum n_v
    (q_v/p_v - 1)

    Assumes p > 0 everywhere q > 0 (no outside mass). Number of atoms C(T+V-1, V-1). Dimensionless.

    Args:
        rollout: p, shape (V,).
        train: q, shape (V,).
        length: T >= 1.

    Returns:
        The law of the counts.

    Raises:
        ValueError: on bad probabilities, outside mass, or too many count vectors.

    Range of probabilities [0, 1].
    Source: docs/theory.md#families.

    Example:
        >>> a = multinomial_law([0.5, 0.5], [0.4, 0.6], 9).sup_error
        >>> bool(np.isclose(a, BernoulliProduct(0.5, 0.6, 9).sup_error))
        True
    """
    t = int(checks.horizon(length))
    p = checks.probabilities("rollout", rollout)
    q = checks.probabilities("train", train)
    if np.any((p == 0) & (q > 0)):
        raise ValueError(f"multinomial_law needs no outside mass, got {q[p == 0].sum():g}.")
    p, q = p[p > 0], q[p > 0]
    atoms = np.exp(gammaln(t + p.size) - gammaln(p.size) - gammaln(t + 1))
    if atoms > MAX_COUNTS:
        raise ValueError(f"{atoms:.3g} count vectors are more than the limit {MAX_COUNTS}.")
    bars = np.array(list(combinations(range(t + p.size - 1), p.size - 1)), dtype=np.int64)
    bars = bars.reshape(-1, p.size - 1)
    edges = np.concatenate(
        [np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), t + p.size - 1)], axis=1
    )
    counts = np.diff(edges, axis=1) - 1.0
    log_p = gammaln(t + 1) - gammaln(counts + 1).sum(1) + counts @ np.log(p)
    with np.errstate(divide="ignore"):
        log_w = xlogy(counts, q / p).sum(1)
    s = counts @ (q / p - 1)
    return CountLaw(np.exp(log_p), np.exp(log_p + log_w), _remainder(log_w, s), s)


def poisson_law(rollout_rate: float, train_rate: float) -> CountLaw:
    """Limit of rare tokens: p = lam/T, q = mu/T, T to infinity.

    K ~ Poisson(lam),  W = (mu/lam)^K e^{lam - mu},  S = K (mu/lam - 1) + lam - mu

    Assumes rates > 0. D_seq tends to mu - lam - lam log(mu/lam) = lam k3(mu/lam) nats
    (``kl_rollout_train``). Atoms beyond 40 standard deviations are dropped (mass below 1e-100).

    Args:
        rollout_rate: lam, expected number of rare tokens under the rollout policy.
        train_rate: mu, the same under train.

    Returns:
        The law of the count.

    Raises:
        ValueError: on a rate that is not > 0.

    Range of probabilities [0, 1].
    Source: docs/theory.md#families.

    Example:
        >>> law = poisson_law(1.0, 1.5)
        >>> pair = BernoulliProduct(1e-5, 1.5e-5, 100_000)
        >>> bool(abs(law.sup_error - pair.sup_error) < 1e-5)
        True
    """
    for name, rate in (("rollout_rate", rollout_rate), ("train_rate", train_rate)):
        if not rate > 0:
            raise ValueError(f"{name} must be > 0, got {rate}.")
    top = max(rollout_rate, train_rate)
    k = np.arange(int(top + 40 * np.sqrt(top) + 200), dtype=np.float64)
    log_p = xlogy(k, rollout_rate) - rollout_rate - gammaln(k + 1)
    log_w = k * np.log(train_rate / rollout_rate) + rollout_rate - train_rate
    s = k * (train_rate / rollout_rate - 1) + rollout_rate - train_rate
    with np.errstate(over="ignore"):
        return CountLaw(np.exp(log_p), np.exp(log_p + log_w), _remainder(log_w, s), s)


def poisson_seq_kl(rollout_rate: float, train_rate: float) -> float:
    """D_seq of :func:`poisson_law`.

    D_seq = lam k3(mu / lam), nats, ``kl_rollout_train``, range [0, inf)

    Assumes rates > 0. Source: limit of T KL(Bernoulli(lam/T) || Bernoulli(mu/T)).

    Example:
        >>> round(poisson_seq_kl(1.0, 1.5), 6)
        0.094535
    """
    return float(rollout_rate * k3(train_rate / rollout_rate))
