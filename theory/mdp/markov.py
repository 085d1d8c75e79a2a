# SPDX-License-Identifier: Apache-2.0
"""Policies whose next token depends on the last one only: dynamic programming to any horizon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from theory import checks
from theory.divergences import RowDivergences, row_divergences
from theory.mdp.product import CountLaw
from theory.mdp.tree import Tree

__all__ = ["MarkovPair", "MarkovSummary", "MarkovValues", "random_markov"]

Array = NDArray[np.float64]
#: Largest number of (state, count vector) atoms that path counting keeps.
MAX_ATOMS = 500_000


@dataclass(frozen=True)
class MarkovValues:
    """Returns, surrogate and error of a Markov pair for one reward.

    Attributes:
        j_rollout: J(rollout).
        j_train: J(train).
        surrogate: L'.
        error: j_train - j_rollout - surrogate.
    """

    j_rollout: float
    j_train: float
    surrogate: float
    error: float


@dataclass(frozen=True)
class MarkovSummary:
    """Divergences of a Markov pair at one horizon; KLs in nats.

    Attributes:
        token: maxima over states, with the keys of ``every_bound``.
        seq_kl: D_seq, exact.
        seq_chi2: X_seq, exact.
        mean_tv: Dbar_t, exact, shape (T,).
        mean_kl: average ``kl_rollout_train`` per position, shape (T,).
        second_moment: E_rollout[Z^2], exact (inf on overflow).
        path_chi2: chi-square of whole sequences, E_rollout[W^2] - 1.
        affinity: Bhattacharyya affinity of whole sequences, exact.
        seq_tv_low: 1 - affinity, a lower bound of TV_seq.
        seq_tv_high: sqrt(1 - affinity^2), an upper bound of TV_seq.
    """

    token: dict[str, float]
    seq_kl: float
    seq_chi2: float
    mean_tv: Array
    mean_kl: Array
    second_moment: float
    path_chi2: float
    affinity: float
    seq_tv_low: float
    seq_tv_high: float

    def known(self) -> dict[str, Any]:
        """Quantities in the form of ``every_bound``, TV_seq replaced by its upper bracket.

        Example:
            >>> pair = random_markov(0, 3)
            >>> found = pair.summary(10)
            >>> found.known()["seq_tv"] == found.seq_tv_high
            True
        """
        return {
            **self.token,
            "seq_kl": self.seq_kl,
            "seq_chi2": self.seq_chi2,
            "seq_tv": self.seq_tv_high,
            "mean_tv": self.mean_tv,
            "second_moment": self.second_moment,
        }


@dataclass(frozen=True)
class MarkovPair:
    """Two chains on the same S tokens; the prompt is the first state.

    P(s_0, .., s_T) = start(s_0) prod_t kernel(s_{t-1}, s_t)

    Assumes that train stays inside the rollout's support. Prefix total variation is over PATHS, not
    over state marginals: only when the reward is a function of the final state may the marginals
    replace it in the forward identity.

    Attributes:
        start: law of the prompt, the same for both policies, shape (S,).
        rollout: transition matrix, shape (S, S).
        train: transition matrix, shape (S, S).

    Raises:
        ValueError: on rows that do not sum to 1, shapes that do not fit, or outside mass.

    Source: docs/theory.md#families.

    Example:
        >>> pair = MarkovPair([1.0, 0.0], [[0.9, 0.1], [0.5, 0.5]], [[0.8, 0.2], [0.5, 0.5]])
        >>> round(pair.evaluate(1, [0.0, 1.0]).surrogate, 12)
        0.1
    """

    start: Array
    rollout: Array
    train: Array

    def __post_init__(self) -> None:
        for name in ("start", "rollout", "train"):
            object.__setattr__(self, name, checks.probabilities(name, getattr(self, name)))
        states = self.start.size
        if self.rollout.shape != (states, states) or self.train.shape != (states, states):
            raise ValueError(
                f"Transition matrices must have shape {(states, states)}, got "
                f"{self.rollout.shape} and {self.train.shape}."
            )
        outside = float(np.where(self.rollout > 0, 0.0, self.train).sum(1).max())
        if outside > 0:
            raise ValueError(f"MarkovPair needs no outside mass, got {outside:g} in one state.")

    @property
    def rows(self) -> RowDivergences:
        """Divergences of every state's next-token distributions."""
        return row_divergences(self.rollout, self.train)

    def _visits(self, length: int, kernel: Array) -> Iterator[Array]:
        d = self.start
        for _ in range(length):
            yield d
            d = d @ kernel

    def evaluate(
        self, length: int, final: ArrayLike | None = None, step: ArrayLike | None = None
    ) -> MarkovValues:
        """Exact J, L' and Error for a reward on the final state and/or on every state entered.

        V_t(s) = sum_s' P(s, s') (step(s') + V_{t+1}(s')),  V_T = final
        L' = sum_t E_{d_t^rollout} sum_s' (train - rollout)(s, s') (step(s') + V_{t+1}(s'))

        Assumes no discount. A reward that depends on more of the past needs an augmented state.
        O(T S^2). Reward units.

        Args:
            length: T >= 1.
            final: reward of the last state, shape (S,).
            step: reward paid on entering a state, shape (S,).

        Returns:
            The values.

        Raises:
            ValueError: on T < 1.

        Source: Bellman recursion; docs/theory.md#identities.

        Example:
            >>> pair = random_markov(0, 3)
            >>> v = pair.evaluate(50, final=[0, 0, 1])
            >>> bool(abs(v.error) < v.j_train)
            True
        """
        t = int(checks.horizon(length))
        zero = np.zeros(self.start.size)
        v_roll = v_train = zero if final is None else np.asarray(final, dtype=np.float64)
        pay = zero if step is None else np.asarray(step, dtype=np.float64)
        visits = list(self._visits(t, self.rollout))
        change = self.train - self.rollout
        surrogate = 0.0
        for d in reversed(visits):
            worth = pay + v_roll
            surrogate += float(d @ (change @ worth))
            v_roll = self.rollout @ worth
            v_train = self.train @ (pay + v_train)
        j_rollout, j_train = float(self.start @ v_roll), float(self.start @ v_train)
        return MarkovValues(j_rollout, j_train, surrogate, j_train - j_rollout - surrogate)

    def summary(self, length: int) -> MarkovSummary:
        """Every divergence at a horizon, by forward recursions.

        D_seq = sum_t d_t . kl,  affinity = start (sqrt(P o Q))^T 1,
        E[Z^2] = sum_t sum_s chi2(s) E_rollout[(W_{t-1} - 1)^2; s_{t-1} = s]

        Assumes no outside mass. Maxima run over the states that are visited. KL:
        ``kl_rollout_train`` in nats unless named otherwise. O(T S^2).

        Args:
            length: T >= 1.

        Returns:
            The summary.

        Raises:
            ValueError: on T < 1.

        Source: chain rules; docs/theory.md#chi2 for the second moment.

        Example:
            >>> found = random_markov(0, 3).summary(100)
            >>> found.seq_tv_low <= found.seq_tv_high
            True
        """
        t = int(checks.horizon(length))
        rows = self.rows
        safe = np.where(self.rollout > 0, self.rollout, 1.0)
        root = np.sqrt(self.rollout * self.train)
        square = np.where(self.rollout > 0, self.train**2 / safe, 0.0)
        d = e = r = m = self.start  # E[1], E[W], E[sqrt W], E[W^2], each split by the state
        mean_tv, mean_kl = np.empty(t), np.empty(t)
        seq_chi2 = second = 0.0
        seen = np.zeros(self.start.size, dtype=bool)
        with np.errstate(over="ignore", invalid="ignore"):
            for i in range(t):
                seen |= d > 0
                mean_tv[i] = d @ rows.tv
                mean_kl[i] = np.where(d > 0, d * np.where(d > 0, rows.kl_rollout_train, 0), 0).sum()
                seq_chi2 += float(d @ rows.chi2)
                second += float(rows.chi2 @ (m - 2 * e + d))
                d, e, r, m = d @ self.rollout, e @ self.train, r @ root, m @ square
            path_chi2 = float(m.sum() - 1)
        affinity = min(float(r.sum()), 1.0)
        return MarkovSummary(
            token={
                "max_tv": float(rows.tv[seen].max()),
                "max_kl": float(rows.kl_rollout_train[seen].max()),
                "max_kl_train_rollout": float(rows.kl_train_rollout[seen].max()),
                "min_bc": float(rows.bc[seen].min()),
                "max_chi2": float(rows.chi2[seen].max()),
                "max_log_ratio": float(rows.max_log_ratio[seen].max()),
            },
            seq_kl=float(mean_kl.sum()),
            seq_chi2=seq_chi2,
            mean_tv=mean_tv,
            mean_kl=mean_kl,
            second_moment=max(second, 0.0) if np.isfinite(second) else float("inf"),
            path_chi2=path_chi2,
            affinity=affinity,
            seq_tv_low=1 - affinity,
            seq_tv_high=float(np.sqrt(max(0.0, 1 - affinity**2))),
        )

    def counting_law(self, length: int) -> CountLaw:
        """Exact law of (W, S) by a dynamic programme over (state, count vector).

        W = prod_r r^{n_r},  S = sum_r n_r (r - 1),  n_r = number of transitions whose ratio is r

        Assumes that the ratios train/rollout take few distinct values (ratio 1 is free). Gives
        TV_seq and the supremum of the error exactly.

        Args:
            length: T >= 1.

        Returns:
            The law; its ``seq_tv`` and ``sup_error`` are exact.

        Raises:
            ValueError: on T < 1, or when more than MAX_ATOMS atoms would be kept.

        Source: docs/theory.md#families.

        Example:
            >>> pair = MarkovPair([1.0, 0.0], [[0.9, 0.1], [0.5, 0.5]], [[0.8, 0.2], [0.5, 0.5]])
            >>> law, found = pair.counting_law(20), pair.summary(20)
            >>> found.seq_tv_low <= law.seq_tv <= found.seq_tv_high
            True
        """
        t = int(checks.horizon(length))
        used = self.rollout > 0
        ratio = np.where(used, self.train / np.where(used, self.rollout, 1.0), 1.0)
        values = [r for r in np.unique(ratio[used]) if r != 1.0]
        place = {r: i for i, r in enumerate(values)}
        states = self.start.size
        moves = [
            (a, b, float(self.rollout[a, b]), place.get(ratio[a, b], -1))
            for a in range(states)
            for b in range(states)
            if used[a, b]
        ]
        atoms: dict[tuple[int, ...], Array] = {(0,) * len(values): self.start.copy()}
        for _ in range(t):
            following: dict[tuple[int, ...], Array] = {}
            for counts, mass in atoms.items():
                for a, b, chance, index in moves:
                    if mass[a] == 0:
                        continue
                    key = counts
                    if index >= 0:
                        key = (*counts[:index], counts[index] + 1, *counts[index + 1 :])
                    slot = following.get(key)
                    if slot is None:
                        slot = following[key] = np.zeros(states)
                    slot[b] += mass[a] * chance
            atoms = following
            if len(atoms) * states > MAX_ATOMS:
                raise ValueError(
                    f"Path counting needs {len(atoms) * states} atoms, more than the limit "
                    f"{MAX_ATOMS}; the ratio takes {len(values)} values."
                )
        n = np.array(list(atoms), dtype=np.float64).reshape(len(atoms), len(values))
        p = np.array([mass.sum() for mass in atoms.values()])
        r = np.array(values)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_w = np.where(n > 0, n * np.log(r), 0.0).sum(1)
        s = n @ (r - 1)
        return CountLaw(p, p * np.exp(log_w), np.expm1(log_w) - s, s)

    def seq_tv_monte_carlo(
        self, length: int, samples: int, alpha: float = 1e-6, seed: int = 0
    ) -> tuple[float, float]:
        """Total variation of whole sequences by sampling rollouts, with its confidence.

        TV_seq = E_rollout[(1 - W)_+],  radius = sqrt(log(2/alpha) / (2 n))

        Assumes independent rollouts; (1 - W)_+ lies in [0, 1], so Hoeffding applies whatever the
        tails of W are. Dimensionless.

        Args:
            length: T >= 1.
            samples: n >= 1.
            alpha: probability that the interval misses, in (0, 1).
            seed: seed of the generator.

        Returns:
            The estimate and the radius; |estimate - TV_seq| <= radius with probability >= 1 -
            alpha.

        Raises:
            ValueError: on T < 1, n < 1 or alpha outside (0, 1).

        Source: docs/theory.md#identities (I7); Hoeffding 1963.

        Example:
            >>> estimate, radius = random_markov(0, 3).seq_tv_monte_carlo(20, 1000)
            >>> 0 <= estimate <= 1 and radius < 0.1
            True
        """
        t, n = int(checks.horizon(length)), int(checks.horizon(samples))
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha}.")
        paths = self.sample(t, n, np.random.default_rng(seed))
        with np.errstate(divide="ignore"):
            log_ratio = np.log(self.train) - np.log(np.where(self.rollout > 0, self.rollout, 1))
        log_w = log_ratio[paths[:, :-1], paths[:, 1:]].sum(1)
        estimate = float(np.maximum(-np.expm1(log_w), 0).mean())
        return estimate, float(np.sqrt(np.log(2 / alpha) / (2 * n)))

    def sample(self, length: int, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw paths of the rollout chain: s_0 ~ start, s_t ~ rollout(s_{t-1}, .).

        Assumes independent paths. Returns states, shape (n, T + 1), values 0..S-1; token t is the
        state entered at t. Source: none needed.

        Raises:
            ValueError: on T < 1 or n < 1.

        Example:
            >>> pair = MarkovPair([1, 0], [[0, 1], [1, 0]], [[0, 1], [1, 0]])
            >>> pair.sample(3, 1, np.random.default_rng(0)).tolist()
            [[0, 1, 0, 1]]
        """
        t, count = int(checks.horizon(length)), int(checks.horizon(n))
        ladder = np.cumsum(self.rollout, axis=1)
        paths = np.empty((count, t + 1), dtype=np.int64)
        paths[:, 0] = rng.choice(self.start.size, size=count, p=self.start)
        for i in range(t):
            here = ladder[paths[:, i]]
            # Scaled to the last rung: a transition of probability 0 never happens.
            paths[:, i + 1] = (rng.random(count)[:, None] * here[:, -1:] >= here).sum(1)
        return paths

    def tree(self, length: int) -> Tree:
        """Unroll to a token tree, for cross-checks at small horizons.

        Row of depth t belongs to its last token; the prompt is the first state.

        Raises:
            ValueError: when S^(T+1) exceeds the enumeration limit.

        Source: none needed.

        Example:
            >>> random_markov(0, 2).tree(3).sequences
            16
        """
        states = self.start.size
        checks.enumeration(states, length, states)
        last = [np.arange(states * states**t) % states for t in range(length)]
        return Tree(
            tuple(self.rollout[i] for i in last), tuple(self.train[i] for i in last), self.start
        )


def random_markov(seed: int, states: int = 4, mismatch: float = 0.1) -> MarkovPair:
    """Draw an ergodic pair with Gaussian logits.

    rollout = softmax(a),  train = softmax(a + mismatch * b),  a, b standard normal

    Assumes states >= 2; all transitions are positive, so the chain mixes. The same seed gives the
    same pair. Range: probabilities in (0, 1).
    Source: docs/theory.md#families.

    Example:
        >>> random_markov(0, 5).rollout.shape
        (5, 5)
    """
    rng = np.random.default_rng(seed)
    base = rng.normal(size=(states, states))
    other = base + mismatch * rng.normal(size=(states, states))
    p, q = np.exp(base), np.exp(other)
    return MarkovPair(
        rng.dirichlet(np.ones(states)), p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    )
