# SPDX-License-Identifier: Apache-2.0
"""Token laws over a whole vocabulary whose divergences have closed forms.

``law.logits(vocab, dtype)`` returns the rollout's and the train policy's logits of one row, and
``law.predicted(vocab)`` the divergences they must show: what a kernel that computes exact
vocabulary-level divergences is checked against. Keys of the predictions: ``kl_rollout_train`` and
``kl_train_rollout`` (nats), ``tv``, ``chi2`` (train against rollout), ``bc`` (affinity) and
``max_log_ratio`` (largest log(train/rollout), nats).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray
from scipy.special import logsumexp, ndtri

from theory import checks
from theory.divergences import row_divergences

__all__ = [
    "GaussianNoise",
    "Geometric",
    "OneLogitShift",
    "Temperature",
    "TokenLaw",
    "TwoLevel",
    "VOCAB",
    "Zipf",
]

Array = NDArray[np.float64]
#: Vocabulary of a current model family; the size at which the predictions are checked.
VOCAB = 152_064


class TokenLaw(Protocol):
    """What every law of this module offers."""

    def logits(self, vocab: int = VOCAB, dtype: DTypeLike = np.float64) -> tuple[Any, Any]:
        """Return (rollout, train) logits, shape (vocab,) each."""

    def predicted(self, vocab: int = VOCAB) -> dict[str, float]:
        """Return every divergence by name."""


def _cast(rollout: Array, train: Array, dtype: DTypeLike) -> tuple[NDArray[Any], NDArray[Any]]:
    return rollout.astype(dtype), train.astype(dtype)


def _open_unit(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}.")


@dataclass(frozen=True)
class OneLogitShift:
    """One token's logit moves by s, everything else stays.

    G = log(1 + p (e^s - 1)),  q = p e^{s-G}:
    kl_rollout_train = G - p s,  kl_train_rollout = q s - G,  tv = |q - p|,
    chi2 = (1 + p (e^{2s} - 1)) e^{-2G} - 1,  bc = (1 + p (e^{s/2} - 1)) e^{-G/2},
    max_log_ratio = max(s - G, -G)

    Assumes 0 < p < 1; the other tokens share 1 - p evenly (any other way gives the same numbers).

    Attributes:
        p: rollout probability of the shifted token, which is token ``vocab // 3``.
        shift: s in nats.

    Raises:
        ValueError: when p is not strictly between 0 and 1.

    Source: ours, docs/theory.md#families; derived in ``theory.symbolic``.

    Example:
        >>> round(OneLogitShift(0.5, 1.0).predicted()["tv"], 6)
        0.231059
    """

    p: float
    shift: float

    def __post_init__(self) -> None:
        _open_unit("p", self.p)

    def logits(
        self, vocab: int = VOCAB, dtype: DTypeLike = np.float64
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Logits of one row.

        Example:
            >>> a, b = OneLogitShift(0.5, 1.0).logits(4)
            >>> (b - a).round(12).tolist()
            [0.0, 1.0, 0.0, 0.0]
        """
        rollout = np.zeros(vocab)
        rollout[vocab // 3] = math.log(self.p / (1 - self.p)) + math.log(vocab - 1)
        train = rollout.copy()
        train[vocab // 3] += self.shift
        return _cast(rollout, train, dtype)

    def predicted(self, vocab: int = VOCAB) -> dict[str, float]:
        """Divergences, the same for every vocabulary.

        Example:
            >>> sorted(OneLogitShift(0.5, 1.0).predicted())[:3]
            ['bc', 'chi2', 'kl_rollout_train']
        """
        p, s = self.p, self.shift
        g = math.log1p(p * math.expm1(s))
        q = p * math.exp(s - g)
        moved = p * (1 - p) * math.expm1(s) / (1 + p * math.expm1(s))
        return {
            "kl_rollout_train": g - p * s,
            "kl_train_rollout": q * s - g,
            "tv": abs(moved),
            "chi2": moved**2 / (p * (1 - p)),
            "bc": math.exp(math.log1p(p * math.expm1(s / 2)) - g / 2),
            "max_log_ratio": max(s - g, -g),
        }


@dataclass(frozen=True)
class TwoLevel:
    """k tokens share one mass, the others share the rest; train moves mass between the groups.

    every divergence equals that of Bernoulli(m_rollout) against Bernoulli(m_train), for every V
    and k

    Assumes 0 < masses < 1 and 1 <= k < V.

    Attributes:
        rollout_mass: mass of the group under the rollout policy.
        train_mass: the same under train.
        tokens: k.

    Raises:
        ValueError: on masses outside (0, 1) or k < 1.

    Source: ours, docs/theory.md#families.

    Example:
        >>> round(TwoLevel(0.5, 0.75).predicted()["tv"], 12)
        0.25
    """

    rollout_mass: float
    train_mass: float
    tokens: int = 100

    def __post_init__(self) -> None:
        _open_unit("rollout_mass", self.rollout_mass)
        _open_unit("train_mass", self.train_mass)
        checks.horizon(self.tokens)

    def logits(
        self, vocab: int = VOCAB, dtype: DTypeLike = np.float64
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Logits of one row; the group is the first k tokens.

        Raises:
            ValueError: when the group fills the vocabulary.

        Example:
            >>> a, b = TwoLevel(0.5, 0.75, tokens=2).logits(4)
            >>> bool(np.isclose(b[0] - a[0], np.log(3)))
            True
        """
        if self.tokens >= vocab:
            raise ValueError(
                f"The group needs fewer tokens than the vocabulary, got {self.tokens}."
            )
        rows = []
        for mass in (self.rollout_mass, self.train_mass):
            row = np.zeros(vocab)
            row[: self.tokens] = math.log(mass / (1 - mass)) + math.log(vocab / self.tokens - 1)
            rows.append(row)
        return _cast(rows[0], rows[1], dtype)

    def predicted(self, vocab: int = VOCAB) -> dict[str, float]:
        """Divergences, the same for every vocabulary.

        Example:
            >>> round(TwoLevel(0.5, 0.75).predicted()["kl_rollout_train"], 6)
            0.143841
        """
        m, n = self.rollout_mass, self.train_mass
        d = row_divergences([m, 1 - m], [n, 1 - n])
        return {
            "kl_rollout_train": float(d.kl_rollout_train),
            "kl_train_rollout": float(d.kl_train_rollout),
            "tv": abs(n - m),
            "chi2": (n - m) ** 2 / (m * (1 - m)),
            "bc": math.sqrt(m * n) + math.sqrt((1 - m) * (1 - n)),
            "max_log_ratio": max(math.log(n / m), math.log((1 - n) / (1 - m))),
        }


@dataclass(frozen=True)
class Geometric:
    """Geometric tails: probability of token i proportional to r^i (rollout) and s^i (train).

    kl_rollout_train = log((1-r)/(1-s)) + r/(1-r) log(r/s)
    tv = |s^n - r^n|, n the first token where the order flips,
    chi2 = (1-s)^2 / ((1-r)(1 - s^2/r)) - 1,  bc = sqrt((1-r)(1-s)) / (1 - sqrt(r s))

    Assumes 0 < r, s < 1, s^2 < r (else chi2 grows with V and is reported as inf), and tails
    beyond V below rounding: max(r, s^2/r)^V < 1e-18. Note s > r makes the largest ratio grow
    with V.

    Attributes:
        rollout_ratio: r.
        train_ratio: s.

    Raises:
        ValueError: on ratios outside (0, 1), or a tail that the vocabulary would cut.

    Source: geometric series; docs/theory.md#families.

    Example:
        >>> round(Geometric(0.5, 0.4).predicted()["kl_rollout_train"], 6)
        0.040822
    """

    rollout_ratio: float
    train_ratio: float

    def __post_init__(self) -> None:
        _open_unit("rollout_ratio", self.rollout_ratio)
        _open_unit("train_ratio", self.train_ratio)

    def logits(
        self, vocab: int = VOCAB, dtype: DTypeLike = np.float64
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Logits of one row: i log r and i log s.

        Example:
            >>> Geometric(0.5, 0.4).logits(3)[0][1:].round(3).tolist()
            [-0.693, -1.386]
        """
        i = np.arange(vocab, dtype=np.float64)
        return _cast(i * math.log(self.rollout_ratio), i * math.log(self.train_ratio), dtype)

    def predicted(self, vocab: int = VOCAB) -> dict[str, float]:
        """Divergences; only max_log_ratio depends on the vocabulary.

        Example:
            >>> Geometric(0.5, 0.8).predicted()["chi2"]
            inf
        """
        r, s = self.rollout_ratio, self.train_ratio
        square = s * s / r
        slowest = max(r, s, square if square < 1 else 0.0)
        if vocab * math.log(slowest) > math.log(1e-18):
            raise ValueError(
                f"The vocabulary {vocab} cuts a tail of {slowest**vocab:.3g}, more than 1e-18."
            )
        start = math.log1p(-s) - math.log1p(-r)
        slope = math.log(s / r)
        # q - p changes sign where start + i slope does.
        flip = 0 if slope == 0 else math.floor(-start / slope) + 1
        return {
            "kl_rollout_train": -start - r / (1 - r) * slope,
            "kl_train_rollout": start + s / (1 - s) * slope,
            "tv": abs(s**flip - r**flip),
            "chi2": math.expm1(2 * math.log1p(-s) - math.log1p(-r) - math.log1p(-square))
            if square < 1
            else math.inf,
            "bc": math.sqrt((1 - r) * (1 - s)) / (1 - math.sqrt(r * s)),
            "max_log_ratio": max(start, start + (vocab - 1) * slope),
        }


@dataclass(frozen=True)
class Zipf:
    """Power laws: probability of token i = 1..V proportional to i^-a (rollout) and i^-b (train).

    H_c = sum_{i<=V} i^-c:
    kl_rollout_train = log(H_b/H_a) + (b - a) E_a[log i],  chi2 = H_a H_{2b-a} / H_b^2 - 1,
    bc = H_{(a+b)/2} / sqrt(H_a H_b),  tv = |sum_{i<n} (p_i - q_i)| with n where the order flips

    Assumes a, b >= 0.

    Attributes:
        rollout_exponent: a.
        train_exponent: b.

    Raises:
        ValueError: on a negative exponent.

    Source: definitions; docs/theory.md#families.

    Example:
        >>> round(Zipf(1.0, 1.1).predicted(1000)["tv"], 3)
        0.092
    """

    rollout_exponent: float
    train_exponent: float

    def __post_init__(self) -> None:
        checks.divergence("rollout_exponent", self.rollout_exponent)
        checks.divergence("train_exponent", self.train_exponent)

    def logits(
        self, vocab: int = VOCAB, dtype: DTypeLike = np.float64
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Logits of one row: -a log i and -b log i.

        Example:
            >>> Zipf(1.0, 2.0).logits(2)[1].round(3).tolist()
            [-0.0, -1.386]
        """
        log_i = np.log(np.arange(1, vocab + 1, dtype=np.float64))
        return _cast(-self.rollout_exponent * log_i, -self.train_exponent * log_i, dtype)

    def predicted(self, vocab: int = VOCAB) -> dict[str, float]:
        """Divergences at a vocabulary size.

        Example:
            >>> Zipf(1.0, 1.0).predicted(50)["kl_rollout_train"]
            0.0
        """
        a, b = self.rollout_exponent, self.train_exponent
        log_i = np.log(np.arange(1, vocab + 1, dtype=np.float64))

        def harmonic(c: float, weight: Array | None = None) -> float:
            terms = np.exp(-c * log_i)
            return math.fsum(terms if weight is None else terms * weight)

        h_a, h_b = harmonic(a), harmonic(b)
        start = math.log(h_a / h_b)
        below = log_i * (a - b) + start > 0
        moved = (
            math.fsum(np.exp(-b * log_i[below])) / h_b - math.fsum(np.exp(-a * log_i[below])) / h_a
        )
        return {
            "kl_rollout_train": -start + (b - a) * harmonic(a, log_i) / h_a,
            "kl_train_rollout": start + (a - b) * harmonic(b, log_i) / h_b,
            "tv": abs(moved),
            "chi2": h_a * harmonic(2 * b - a) / h_b**2 - 1,
            "bc": harmonic((a + b) / 2) / math.sqrt(h_a * h_b),
            "max_log_ratio": max(start, start + (a - b) * float(log_i[-1])),
        }


@dataclass(frozen=True)
class Temperature:
    """The train policy reads the same logits at another temperature.

    F(c) = log sum_i e^{c z_i}, g = 1/temperature:
    kl_rollout_train = F(g) - F(1) + (1 - g) E_p[z],  chi2 = e^{F(2g-1) + F(1) - 2 F(g)} - 1,
    bc = e^{F((1+g)/2) - (F(1) + F(g))/2}

    Assumes a temperature > 0 and seeded Gaussian base logits z of a given spread.

    Attributes:
        temperature: of the train policy; the rollout policy's is 1.
        spread: standard deviation of the base logits.
        seed: seed of the base logits.

    Raises:
        ValueError: on a temperature or spread that is not > 0.

    Source: exponential-family identities; docs/theory.md#families.

    Example:
        >>> Temperature(1.0).predicted(100)["tv"]
        0.0
    """

    temperature: float
    spread: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "spread"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}.")

    def _base(self, vocab: int) -> Array:
        return self.spread * np.random.default_rng(self.seed).normal(size=vocab)

    def logits(
        self, vocab: int = VOCAB, dtype: DTypeLike = np.float64
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Logits of one row: z and z / temperature.

        Example:
            >>> a, b = Temperature(2.0).logits(5)
            >>> bool(np.allclose(a, 2 * b))
            True
        """
        z = self._base(vocab)
        return _cast(z, z / self.temperature, dtype)

    def predicted(self, vocab: int = VOCAB) -> dict[str, float]:
        """Divergences at a vocabulary size.

        Example:
            >>> bool(0 < Temperature(1.1).predicted(100)["kl_rollout_train"] < 0.1)
            True
        """
        z = self._base(vocab)
        g = 1 / self.temperature

        def free(c: float) -> float:
            return float(logsumexp(c * z))

        f_1, f_g = free(1.0), free(g)
        p, q = np.exp(z - f_1), np.exp(g * z - f_g)
        ratio = (g - 1) * z - (f_g - f_1)
        return {
            "kl_rollout_train": f_g - f_1 + (1 - g) * math.fsum(p * z),
            "kl_train_rollout": f_1 - f_g + (g - 1) * math.fsum(q * z),
            "tv": math.fsum((q - p)[ratio > 0]),
            "chi2": math.expm1(free(2 * g - 1) + f_1 - 2 * f_g),
            "bc": math.exp(free((1 + g) / 2) - (f_1 + f_g) / 2),
            "max_log_ratio": float(ratio.max()),
        }


@dataclass(frozen=True)
class GaussianNoise:
    """Independent Gaussian noise on flat logits: kernel noise, quantisation noise.

    V -> inf:  kl_rollout_train = kl_train_rollout = sigma^2/2,  tv = 2 Phi(sigma/2) - 1,
    chi2 = e^{sigma^2} - 1,  bc = e^{-sigma^2/8}  (the divergences of N(0,1) against N(sigma,1))

    Assumes flat rollout logits, where one draw fluctuates least (relative sd sqrt(2/V) for small
    sigma); :meth:`sampling_sd` gives the standard deviation of each number over draws.

    Attributes:
        sigma: standard deviation of the noise, nats.
        seed: seed of the noise.

    Raises:
        ValueError: when sigma is not > 0.

    Source: ours, docs/theory.md#families.

    Example:
        >>> GaussianNoise(1.0).predicted()["kl_rollout_train"]
        0.5
    """

    sigma: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sigma > 0:
            raise ValueError(f"sigma must be > 0, got {self.sigma}.")

    def logits(
        self, vocab: int = VOCAB, dtype: DTypeLike = np.float64
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Logits of one row: zeros and one draw of the noise.

        Example:
            >>> GaussianNoise(1.0).logits(3)[0].tolist()
            [0.0, 0.0, 0.0]
        """
        noise = self.sigma * np.random.default_rng(self.seed).normal(size=vocab)
        return _cast(np.zeros(vocab), noise, dtype)

    def predicted(self, vocab: int = VOCAB) -> dict[str, float]:
        """Divergences in the limit V to infinity (extreme-value mean for max_log_ratio).

        Example:
            >>> round(GaussianNoise(1.0).predicted()["tv"], 5)
            0.38292
        """
        s = self.sigma
        top = float(ndtri(1 - 1 / vocab))
        return {
            "kl_rollout_train": s * s / 2,
            "kl_train_rollout": s * s / 2,
            "tv": math.erf(s / (2 * math.sqrt(2))),
            "chi2": math.expm1(s * s),
            "bc": math.exp(-s * s / 8),
            "max_log_ratio": s * (top + np.euler_gamma / top) - s * s / 2,
        }

    def sampling_sd(self, vocab: int = VOCAB) -> dict[str, float]:
        """Standard deviation of each divergence over draws of the noise.

        sd = sqrt(Var(influence function) / V); for kl_rollout_train, sqrt((e^{s^2} - 1 - s^2) / V)

        Assumes V large (delta method); the expectation is a quadrature over the normal law. For
        max_log_ratio, the Gumbel scale. The bias of each number is of order 1/V.
        Units as in :meth:`predicted`. Source: delta method, docs/theory.md#families.

        Example:
            >>> sd = GaussianNoise(0.01).sampling_sd()["kl_rollout_train"]
            >>> round(sd / GaussianNoise(0.01).predicted()["kl_rollout_train"], 4)
            0.0036
        """
        s = self.sigma
        x = np.linspace(-14, 14, 56_001)
        density = np.exp(-x * x / 2)
        density /= density.sum()
        u = np.exp(s * x - s * s / 2)
        want = self.predicted(vocab)
        half = math.exp(-s * s / 8)
        sign = np.sign(u - 1)
        influence = {
            "kl_rollout_train": u - s * x,
            "kl_train_rollout": u * (s * x - s * s - 1),
            "tv": np.abs(u - 1) / 2 - (u - 1) * (want["tv"] + float(density @ sign) / 2),
            "chi2": u * u - 2 * math.exp(s * s) * u,
            "bc": np.sqrt(u) - half / 2 * u,
        }
        out = {}
        for name, f in influence.items():
            mean = float(density @ f)
            out[name] = math.sqrt(float(density @ (f - mean) ** 2) / vocab)
        out["max_log_ratio"] = s * math.pi / math.sqrt(6) / float(ndtri(1 - 1 / vocab))
        return out
