# SPDX-License-Identifier: Apache-2.0
"""Token laws over a whole vocabulary whose divergences have closed forms.

``law.logits(vocab, dtype)`` returns the rollout's and the train policy's logits of one row, and
``law.predicted(vocab)`` the divergences they must show: what a kernel that computes exact
vocabulary-level divergences is checked against. Keys of the predictions: ``kl_rollout_train`` and
``kl_train_rollout`` (nats), ``tv``, ``chi2`` (train against rollout), ``bc`` (affinity),
``squared_hellinger`` (1 - bc) and ``max_log_ratio`` (largest log(train/rollout), nats). The printed
formulas are evaluated in an equal form that does not cancel: a KL of 1e-9 keeps its digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray
from scipy.special import logsumexp, ndtri

from theory import checks
from theory.divergences import expm1_gap, log1p_gap

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


def _tilted(log_base: Array, statistic: Array, shift: float) -> dict[str, float]:
    """Divergences of p proportional to e^base against q proportional to p e^{shift statistic}.

    kl_rollout_train = log E_p[e^t] with t = shift (statistic - E_p statistic) is log(1 + M),
    M = E_p[e^t - 1 - t] >= 0, and the other direction is the same seen from q.
    """
    log_p, log_q = (z - logsumexp(z) for z in (log_base, log_base + shift * statistic))
    p, q = np.exp(log_p), np.exp(log_q)

    def divergence(log_weight: Array, h: float) -> tuple[float, Array]:
        weight = np.exp(log_weight)
        t = h * (statistic - weight @ statistic / weight.sum())
        if t.max() < 1:
            kl = math.log1p(float((weight * expm1_gap(t)).sum()))
        else:  # nothing cancels, and e^t may overflow where its weight vanishes
            kl = float(logsumexp(log_weight + t))
        return kl, t - kl

    kl, ratio = divergence(log_p, shift)
    reverse, _ = divergence(log_q, -shift)
    near = np.abs(ratio) <= 0.5
    c = np.where(near, ratio, 0.0)
    change = np.where(near, p * np.expm1(c), q - p)
    hellinger = np.where(near, p * np.expm1(c / 2) ** 2, (np.sqrt(q) - np.sqrt(p)) ** 2)
    with np.errstate(over="ignore"):
        square = np.where(near, p * np.expm1(c) ** 2, q * np.exp(ratio) - 2 * q + p)
    squared_hellinger = float(hellinger.sum()) / 2
    return {
        "kl_rollout_train": kl,
        "kl_train_rollout": reverse,
        "tv": float(np.abs(change).sum()) / 2,
        "chi2": float(square.sum()),
        "bc": 1 - squared_hellinger,
        "squared_hellinger": squared_hellinger,
        "max_log_ratio": float(ratio.max()),
    }


def _two_groups(p: tuple[float, float], q: tuple[float, float], change: float) -> dict[str, float]:
    """Divergences of two laws on two groups, q_0 - p_0 = change; every mass to full precision."""
    moves = (change, -change)

    def kl(a: tuple[float, float], b: tuple[float, float], sign: float) -> float:
        total = 0.0
        for u, v, move in zip(a, b, moves, strict=True):
            step = sign * move / u
            total += u * (float(log1p_gap(step)) if abs(step) < 0.1 else step - math.log(v / u))
        return total

    def log_ratio(u: float, v: float, move: float) -> float:
        return math.log1p(move / u) if abs(move / u) < 0.1 else math.log(v / u)

    squared_hellinger = (
        sum(
            (move / (math.sqrt(u) + math.sqrt(v))) ** 2
            for u, v, move in zip(p, q, moves, strict=True)
        )
        / 2
    )
    return {
        "kl_rollout_train": kl(p, q, 1.0),
        "kl_train_rollout": kl(q, p, -1.0),
        "tv": abs(change),
        "chi2": change * change / (p[0] * p[1]),
        "bc": 1 - squared_hellinger,
        "squared_hellinger": squared_hellinger,
        "max_log_ratio": max(log_ratio(*group) for group in zip(p, q, moves, strict=True)),
    }


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
        p, growth = self.p, math.expm1(self.shift)
        total = 1 + p * growth  # e^G
        q = (p * math.exp(self.shift) / total, (1 - p) / total)
        return _two_groups((p, 1 - p), q, p * (1 - p) * growth / total)


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
        return _two_groups((m, 1 - m), (n, 1 - n), n - m)


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
        # log(q_i/p_i) = start + i slope, from the relative changes of 1 - r and of r.
        change_rest, change_ratio = (r - s) / (1 - r), (s - r) / r
        start, slope = math.log1p(change_rest), math.log1p(change_ratio)
        # q - p changes sign where start + i slope does.
        flip = 0 if slope == 0 else math.floor(-start / slope) + 1
        # 1 - bc = 1 - A/B with A^2 = (1-r)(1-s), B = 1 - sqrt(rs); B^2 - A^2 = (sqrt r - sqrt s)^2
        overlap = math.sqrt((1 - r) * (1 - s))
        rest = 1 - math.sqrt(r * s)
        root = (r - s) / (math.sqrt(r) + math.sqrt(s))
        squared_hellinger = root * root / (rest * (rest + overlap))
        # 1 + chi2 = (1-s)^2 / ((1-r)(1-s^2/r)), and the numerators' difference is (r-s)^2/r
        return {
            "kl_rollout_train": float(
                log1p_gap(change_rest) + r / (1 - r) * log1p_gap(change_ratio)
            ),
            "kl_train_rollout": float(
                log1p_gap((s - r) / (1 - s)) + s / (1 - s) * log1p_gap((r - s) / s)
            ),
            "tv": abs(r**flip * math.expm1(flip * slope)),
            "chi2": (r - s) ** 2 / (r * (1 - r) * (1 - square)) if square < 1 else math.inf,
            "bc": overlap / rest,
            "squared_hellinger": squared_hellinger,
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
        log_i = np.log(np.arange(1, vocab + 1, dtype=np.float64))
        a, b = self.rollout_exponent, self.train_exponent
        return _tilted(-a * log_i, log_i, a - b)


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
        return _tilted(z, z, (1 - self.temperature) / self.temperature)


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
            "squared_hellinger": -math.expm1(-s * s / 8),
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
        out["squared_hellinger"] = out["bc"]
        out["max_log_ratio"] = s * math.pi / math.sqrt(6) / float(ndtri(1 - 1 / vocab))
        return out
