# SPDX-License-Identifier: Apache-2.0
"""Near-worst cases: where bounds are tight, and where plausible statements fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from theory import checks, exact
from theory.divergences import row_divergences
from theory.mdp.tree import Tree

__all__ = [
    "Search",
    "bernoulli_at_kl",
    "branch_then_binary",
    "coordinate_search",
    "hazard_error",
    "rare_token_sup",
    "reverse_branch",
    "two_step_branch",
]

Array = NDArray[np.float64]


def rare_token_sup(horizon: ArrayLike, eps: ArrayLike) -> Array:
    """Worst error when train emits, at every step, a token that the rollout almost never emits.

    sup_R |Error| = T eps (1 - (1 - eps)^{T-1}),  in the limit of rollout probability 0+

    Assumes product policies with total variation eps per token. About T (T-1) eps^2 while T eps
    << 1 (so the halved classical bound is sharp) and T eps afterwards. Reward units, range [0, T].

    Args:
        horizon: T, whole number(s) >= 1.
        eps: probability of the rare token under train, in [0, 1].

    Returns:
        Array broadcast from the inputs.

    Raises:
        ValueError: on T < 1 or eps outside [0, 1].

    Source: ours, docs/theory.md#tightness.

    Example:
        >>> round(float(rare_token_sup(1000, 1e-6) / (1000 * 999 * 1e-12)), 4)
        0.9995
    """
    t = checks.horizon(horizon).astype(np.float64)
    e = checks.divergence("eps", eps, at_most=1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        hit = np.where(t == 1, 0.0, -np.expm1((t - 1) * np.log1p(-e)))
    return np.asarray(t * e * hit)


def hazard_error(horizon: ArrayLike, rollout_rate: float, train_rate: float) -> Array:
    """Error of the reward "no fatal token", when the total hazard is fixed.

    h = a/T, h' = a'/T:  Error = (1-h')^T - (1-h)^T + T (h'-h) (1-h)^{T-1}
    tends to e^{-a'} - e^{-a} + (a'-a) e^{-a}

    Assumes 0 <= a, a' <= T. Its exponent in T is 0: long horizons alone do not make the error grow.
    Reward units, range [0, T].

    Args:
        horizon: T, whole number(s) >= 1.
        rollout_rate: a, expected number of fatal tokens under the rollout policy.
        train_rate: a', the same under train.

    Returns:
        Array like the horizon.

    Raises:
        ValueError: on T < 1 or rates outside [0, T].

    Source: ours, docs/theory.md#scaling.

    Example:
        >>> hazard_error([64, 1024, 4096], 1.0, 1.5).round(5).tolist()
        [0.03958, 0.03921, 0.0392]
    """
    t = checks.horizon(horizon).astype(np.float64)
    for name, rate in (("rollout_rate", rollout_rate), ("train_rate", train_rate)):
        checks.scalar(name, rate, 0, float(t.min()))
    h, h_train = rollout_rate / t, train_rate / t
    return np.asarray((1 - h_train) ** t - (1 - h) ** t + t * (h_train - h) * (1 - h) ** (t - 1))


def branch_then_binary(
    length: int, rollout_branch: float, train_branch: float, rollout_one: float, train_one: float
) -> Tree:
    """A first token that opens a branch, then binary tokens that differ inside the branch only.

    depth 0: P(1) = rollout_branch, train_branch;  inside: P(1) = rollout_one, train_one at each
    step

    Assumes probabilities in [0, 1]; outside the branch both policies toss a fair coin. KLs follow
    from the four numbers. Source: docs/theory.md#tightness.

    Args:
        length: T >= 1, the branching token included.
        rollout_branch: rollout mass of the branch.
        train_branch: train mass of the branch.
        rollout_one: probability of a 1 inside the branch, rollout.
        train_one: the same, train.

    Returns:
        The tree.

    Raises:
        ValueError: on numbers outside [0, 1] or a horizon too long to enumerate.

    Example:
        >>> branch_then_binary(3, 0.1, 0.2, 0.5, 0.6).length
        3
    """
    t = int(checks.horizon(length))
    checks.enumeration(2, t)
    for name, value in (
        ("rollout_branch", rollout_branch),
        ("train_branch", train_branch),
        ("rollout_one", rollout_one),
        ("train_one", train_one),
    ):
        checks.scalar(name, value, 0, 1)
    rollout = [np.array([[1 - rollout_branch, rollout_branch]])]
    train = [np.array([[1 - train_branch, train_branch]])]
    for depth in range(1, t):
        inside = (np.arange(2**depth) >= 2 ** (depth - 1))[:, None]
        rollout.append(np.where(inside, [1 - rollout_one, rollout_one], 0.5))
        train.append(np.where(inside, [1 - train_one, train_one], 0.5))
    return Tree(tuple(rollout), tuple(train), np.ones(1))


def two_step_branch(
    branch: float = 1e-10, gain: float = 1e6, kl: float = 20.0, rare: float = 1e-12
) -> Tree:
    """SeqKL is sharp: a branch that train visits ``gain`` times more often, then a large shift.

    sup |Error| / D_seq = (w - 1) (1 - e^{-k}) / (w - 1 - log w + k) + small terms  ->  1

    Assumes T = 2, branch * gain << 1 and a rare token of rollout probability ``rare``, so there
    is no outside mass. KL: ``kl_rollout_train``, nats.

    Args:
        branch: rollout mass p of the branch.
        gain: w, train mass of the branch over p.
        kl: k, the KL paid inside the branch; train keeps e^{-k} of the usual token.
        rare: rollout probability of the other token inside the branch.

    Returns:
        The tree.

    Raises:
        ValueError: when branch * gain exceeds 1.

    Range of the ratio [0, 1].
    Source: ours, docs/theory.md#tightness.

    Example:
        >>> tree = two_step_branch()
        >>> exact.sup_error(tree) / exact.summary(tree).seq_kl > 0.999
        True
    """
    checks.scalar("branch * gain", branch * gain, 0, 1)
    return branch_then_binary(2, branch, branch * gain, rare, -np.expm1(-kl))


def reverse_branch(length: int, p: float = 1e-3, h: float = 1e-3, eta: float = 1e-5) -> Tree:
    """Counterexample: SeqKL with KL(train || rollout) instead of KL(rollout || train) is false.

    rollout visits the branch with mass p, train with p eta; inside, tokens (1-h, h) against
    (h, 1-h) sup |Error| / sum_t E_train[KL(train || rollout)]  ->  T - 1

    Assumes T >= 2. Train has left the branch, so its KL does not see the disagreement inside, while
    L' accumulates -1 per token there. ``kl_train_rollout``, nats.

    Args:
        length: T, the branching token included.
        p: rollout mass of the branch.
        h: probability of the unusual token inside.
        eta: train mass of the branch over p.

    Returns:
        The tree.

    Raises:
        ValueError: on numbers outside [0, 1] or a horizon too long to enumerate.

    Source: ours, docs/theory.md#direction.

    Example:
        >>> tree = reverse_branch(3)
        >>> exact.sup_error(tree) / float(exact.sequence_divergences(tree).kl_train_rollout) > 1.98
        True
    """
    return branch_then_binary(length, p, p * eta, h, 1 - h)


@dataclass(frozen=True)
class Search:
    """Result of a coordinate search.

    Attributes:
        tree: the best tree found.
        objective: its objective.
        evaluations: number of trees evaluated.
    """

    tree: Tree
    objective: float
    evaluations: int


def bernoulli_at_kl(p: float, delta: float, up: bool = True) -> float:
    """Train probability at a given KL from a rollout probability.

    solve KL(Bernoulli(p) || Bernoulli(q)) = delta for q above p (``up``) or below it

    Assumes 0 < p < 1 and delta >= 0 nats, direction ``kl_rollout_train``. Cut at 1e-15 from the
    ends. Range [0, 1]. Source: bisection (Brent).

    Raises:
        ValueError: on p outside (0, 1) or a negative or NaN delta.

    Example:
        >>> round(bernoulli_at_kl(0.5, 0.143841036), 6)
        0.75
    """
    checks.divergence("delta", delta)
    if not 0 < p < 1:
        raise ValueError(f"p must lie strictly between 0 and 1, got {p}.")
    end = 1 - 1e-15 if up else 1e-15

    def gap(q: float) -> float:
        return float(row_divergences([1 - p, p], [1 - q, q]).kl_rollout_train) - delta

    if delta == 0:
        return p
    return end if gap(end) <= 0 else float(brentq(gap, p, end, xtol=1e-15))


Objective = Literal["max_kl", "seq_kl", "kl_train_rollout"]


def coordinate_search(
    length: int,
    objective: Objective = "max_kl",
    *,
    delta: float = 0.01,
    sweeps: int = 6,
    seed: int = 0,
) -> Search:
    """Look for a bad binary tree, one context at a time.

    "max_kl": sup |Error| / (T delta) with KL = delta in every context (train solved from
    rollout, sign) "seq_kl": sup |Error| / D_seq, KL free;  "kl_train_rollout": sup |Error| /
    KL(train || rollout)

    Assumes V = 2 and T <= 8 or so. The objective is exact for each tree, so no search over
    rewards is needed; the optimum found is only a lower bound of the true worst case.
    Deterministic in the seed.

    Args:
        length: T.
        objective: which ratio to maximise.
        delta: KL of every context in nats (``kl_rollout_train``), for "max_kl".
        sweeps: passes over all contexts.
        seed: seed of the generator.

    Returns:
        The best tree with its objective.

    Raises:
        ValueError: on an unknown objective or a horizon too long to enumerate.

    Range of the objective [0, T].
    Source: docs/theory.md#tightness.

    Example:
        >>> coordinate_search(2, delta=1e-3, sweeps=2).objective > 0.4
        True
    """
    t = int(checks.horizon(length))
    checks.enumeration(2, t)
    if objective not in ("max_kl", "seq_kl", "kl_train_rollout"):
        raise ValueError(f"Unknown objective {objective!r}.")
    rng = np.random.default_rng(seed)
    contexts = 2**t - 1
    fixed = objective == "max_kl"

    def draw(p: float, up: bool) -> tuple[float, float]:
        if fixed:
            return p, bernoulli_at_kl(p, delta, up)
        return p, float(1 / (1 + np.exp(-rng.normal(scale=3.0))))

    def build(pairs: Array) -> Tree:
        rollout, train = [], []
        for depth in range(t):
            rows = pairs[2**depth - 1 : 2 ** (depth + 1) - 1]
            rollout.append(np.stack([1 - rows[:, 0], rows[:, 0]], axis=1))
            train.append(np.stack([1 - rows[:, 1], rows[:, 1]], axis=1))
        return Tree(tuple(rollout), tuple(train), np.ones(1))

    denominators: dict[str, Callable[[Tree], float]] = {
        "max_kl": lambda tree: t * delta,
        "seq_kl": lambda tree: exact.summary(tree).seq_kl,
        "kl_train_rollout": lambda tree: float(exact.sequence_divergences(tree).kl_train_rollout),
    }

    def score(pairs: Array) -> float:
        tree = build(pairs)
        return exact.sup_error(tree) / max(denominators[objective](tree), 1e-300)

    def propose_p() -> float:
        return float(1 / (1 + np.exp(-rng.normal(scale=0.5 if fixed else 3.0))))

    best_pairs = np.array([draw(propose_p(), bool(rng.integers(2))) for _ in range(contexts)])
    best, evaluations = score(best_pairs), 1
    for sweep in range(sweeps):
        for i in rng.permutation(contexts):
            around = best_pairs[i, 0]
            for up in (True, False):
                local = around + (1 - around) * around * rng.normal(scale=0.5 / (1 + sweep))
                for p in (propose_p(), float(np.clip(local, 1e-9, 1 - 1e-9))):
                    trial = best_pairs.copy()
                    trial[i] = draw(p, up)
                    value = score(trial)
                    evaluations += 1
                    if value > best:
                        best, best_pairs = value, trial
    return Search(build(best_pairs), best, evaluations)
