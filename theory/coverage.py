# SPDX-License-Identifier: Apache-2.0
"""How often certificates hold: batches drawn from MDPs whose true improvement is known.

A certificate may fail in two ways: it exceeds what its own inequality states (its interval missed),
or it exceeds the true improvement. The first implies nothing about the second, because the
inequality has slack; both are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from theory import certify, checks, exact
from theory.bounds import sharp
from theory.mdp.markov import random_markov
from theory.mdp.tree import Tree, random_tree

__all__ = ["CASES", "CERTIFICATES", "Batch", "Case", "Coverage", "coverage"]

Array = NDArray[np.float64]

#: Certificates that are counted, and whether each is a finite-sample statement.
CERTIFICATES = {
    "truncated_weight": True,
    "sequence_mask": True,
    "frozen_token": True,
    "frozen_prefix": True,
    "frozen_budget": True,
    "frozen_budget (row maximum)": True,
    "frozen_drift": True,
    "log (asymptotic)": False,
    "seq_kl (asymptotic)": False,
    "sequence_mask (asymptotic)": False,
    "frozen_budget (asymptotic)": False,
}


@dataclass(frozen=True)
class Batch:
    """Rollouts, one row each.

    Attributes:
        reward: shape (n,).
        tokens: statistics of shape (n, T).
        weight: probability of each row, summing to 1; 1/n for a sample.
    """

    reward: Array
    tokens: exact.TokenStatistics
    weight: Array


@dataclass(frozen=True)
class Case:
    """One MDP and one reward in [0, 1], with the constants that were fixed beforehand.

    Attributes:
        gain: true improvement J(train) - J(rollout).
        draw: makes a batch of n rollouts from a generator.
        everything: all sequences with their probabilities, or None when they cannot be listed.
        max_kl: threshold of the gates and of the sequence mask, nats.
        max_log_ratio: cap M of the gates, nats: on the row maximum, or on the sampled ratio.
        max_abs_log_weight: cap K of the sequence mask, nats.
        shift_budget: b of the budget and of the drift gate.
        kl_budget: k of both, nats.
    """

    gain: float
    draw: Callable[[int, np.random.Generator], Batch]
    everything: Batch | None
    max_kl: float
    max_log_ratio: float
    max_abs_log_weight: float
    shift_budget: float
    kl_budget: float


def _take(tokens: exact.TokenStatistics, rows: NDArray[np.int64]) -> exact.TokenStatistics:
    return exact.TokenStatistics(
        tokens.log_ratio[rows], tokens.kl[rows], tokens.max_log_ratio[rows]
    )


def _tree_case(tree: Tree, reward: Array, constants: tuple[float, ...]) -> Case:
    tokens = exact.token_statistics(tree)
    found = exact.values(tree, reward)

    def draw(n: int, rng: np.random.Generator) -> Batch:
        rows = tree.sample(n, rng)
        return Batch(reward[rows], _take(tokens, rows), np.full(n, 1 / n))

    likely = np.flatnonzero(exact.law(tree).p > 0)
    everything = Batch(reward[likely], _take(tokens, likely), exact.law(tree).p[likely])
    return Case(found.j_train - found.j_rollout, draw, everything, *constants)


def _coins() -> Case:
    """Six tosses of a fair coin that train makes fall on heads more often; four heads win."""
    length, tilted = 6, 0.56
    rows = [np.full((2**t, 2), 0.5) for t in range(length)]
    train = [np.tile([1 - tilted, tilted], (2**t, 1)) for t in range(length)]
    tree = Tree(tuple(rows), tuple(train), np.ones(1))
    reward = (tree.tokens().sum(1) >= 4).astype(np.float64)
    return _tree_case(tree, reward, (0.02, 0.15, 1.0, 0.8, 0.1))


def _words() -> Case:
    """Two prompts, an EOS, zero-probability tokens; random rewards."""
    tree = random_tree(5, vocab=3, length=5, prompts=2, mismatch=0.2, eos=True, zero=0.1)
    reward = np.random.default_rng(6).random(tree.sequences)
    return _tree_case(tree, reward, (0.05, 0.5, 1.0, 1.0, 0.2))


def _rare() -> Case:
    """Train all but drops a token that one rollout in 200 shows; every reward is 1.

    Nothing improves, yet log W is slightly positive on the rollouts without the token: a batch
    that misses it looks like an improvement with no variance at all.
    """
    rollout, train = np.array([[0.995, 0.005]]), np.array([[0.9995, 0.0005]])
    return _tree_case(Tree((rollout,), (train,), np.ones(1)), np.ones(2), (0.02, 0.5, 3, 0.6, 0.05))


def _chain() -> Case:
    """A Markov chain over 64 tokens; the last state decides."""
    length, pair = 64, random_markov(3, 4, mismatch=0.05)
    rows = pair.rows
    log_ratio = np.log(pair.train) - np.log(pair.rollout)
    final = np.array([1.0, 0.8, 0.4, 0.0])
    value = pair.evaluate(length, final)

    def draw(n: int, rng: np.random.Generator) -> Batch:
        paths = pair.sample(length, n, rng)
        before, after = paths[:, :-1], paths[:, 1:]
        tokens = exact.TokenStatistics(
            log_ratio[before, after],
            rows.kl_rollout_train[before],
            rows.max_log_ratio[before],
        )
        return Batch(final[after[:, -1]], tokens, np.full(n, 1 / n))

    return Case(value.j_train - value.j_rollout, draw, None, 0.01, 0.2, 1.5, 6.0, 0.5)


#: MDPs by name.
CASES: dict[str, Callable[[], Case]] = {
    "coins": _coins,
    "words": _words,
    "rare": _rare,
    "chain": _chain,
}


def _gate(case: Case, batch: Batch, mode: certify.Mode, cap: _Cap) -> certify.GateStatistics:
    row = cap == "row"
    return certify.gate(
        batch.tokens.log_ratio,
        batch.tokens.kl,
        max_kl=case.max_kl,
        row_max_log_ratio=batch.tokens.max_log_ratio if row else None,
        max_log_ratio=case.max_log_ratio if row else None,
        mode=mode,
        shift_budget=case.shift_budget,
        kl_budget=case.kl_budget,
        ratio_cap=np.exp(case.max_log_ratio) if cap == "ratio" else None,
    )


_Cap = Literal["row", "ratio", "none"]
#: Where M enters: "row" closes the gate, "ratio" counts min(rho, e^M) as trm_ext.certify does.
_GATES: dict[str, tuple[certify.Mode, _Cap]] = {
    "frozen_token": ("token", "row"),
    "frozen_prefix": ("prefix", "row"),
    "frozen_budget": ("budget", "ratio"),
    "frozen_budget (row maximum)": ("budget", "row"),
    "frozen_drift": ("drift", "ratio"),
    "frozen_budget (asymptotic)": ("budget", "none"),
}


def _bounds(case: Case, batch: Batch, alpha: float) -> dict[str, certify.Certificate]:
    """Every certificate of a batch."""
    reward, weight = batch.reward, batch.tokens.log_ratio.sum(1)
    shift, kl = np.expm1(batch.tokens.log_ratio).sum(1), batch.tokens.kl.sum(1)
    keep = batch.tokens.kl.max(1) <= case.max_kl
    made = {
        "log (asymptotic)": certify.log_certificate(reward, weight, alpha=alpha),
        "seq_kl (asymptotic)": certify.seq_kl_certificate(reward, shift, kl, alpha=alpha),
        "sequence_mask (asymptotic)": certify.sequence_mask_certificate(
            reward, weight, keep, alpha=alpha
        ),
        "truncated_weight": certify.truncated_weight_certificate(
            reward, weight, max_weight=1 + case.max_abs_log_weight, alpha=alpha
        ),
        "sequence_mask": certify.sequence_mask_certificate(
            reward, weight, keep, max_abs_log_weight=case.max_abs_log_weight, alpha=alpha
        ),
    }
    for name, (mode, cap) in _GATES.items():
        made[name] = certify.frozen_certificate(reward, _gate(case, batch, mode, cap), alpha=alpha)
    return {name: made[name] for name in CERTIFICATES}


def _limits(case: Case, everything: Batch) -> dict[str, float]:
    """What each certificate tends to with infinitely many rollouts."""
    p, reward = everything.weight, everything.reward
    weight, kl = everything.tokens.log_ratio.sum(1), everything.tokens.kl.sum(1)
    shift = np.expm1(everything.tokens.log_ratio).sum(1)
    keep = everything.tokens.kl.max(1) <= case.max_kl
    short = keep & (np.abs(weight) <= case.max_abs_log_weight)
    out = {
        "log (asymptotic)": float(p @ certify.log_statistic(reward, weight)),
        "seq_kl (asymptotic)": float(p @ (reward * shift - kl)),
        "sequence_mask (asymptotic)": float(p @ certify.mask_statistic(reward, weight, keep)),
        "truncated_weight": float(
            p @ (reward * (np.minimum(np.exp(weight), 1 + case.max_abs_log_weight) - 1))
        ),
        "sequence_mask": float(p @ certify.mask_statistic(reward, weight, short)),
    }
    for name, (mode, cap) in _GATES.items():
        gate = _gate(case, everything, mode, cap)
        error = seq_kl = float(p @ gate.kl)
        if gate.max_log_ratio is not None:
            t, delta = gate.horizon, gate.max_kl
            error = min(
                error,
                float(sharp.chi2_from_ratio(t, delta, gate.max_log_ratio).value),
                float(sharp.dyadic(t, max_kl=delta, capped=True).value),
            )
        hit = certify.binary_kl_inverse(min(float(p @ gate.hit), 1.0), seq_kl)
        out[name] = float(p @ (reward * gate.shift)) - error - hit
    return {name: max(limit, -1.0) for name, limit in out.items()}  # as certificates are reported


@dataclass(frozen=True)
class Coverage:
    """How often one certificate held on one MDP.

    Attributes:
        case: name in :data:`CASES`.
        certificate: name in :data:`CERTIFICATES`.
        finite_sample: False for the normal approximation.
        confidence: the stated probability, 1 - alpha.
        batches: number of batches.
        rollouts: per batch.
        covered: batches whose lower bound is at most the true improvement.
        covered_limit: batches whose lower bound is at most the certificate's own limit, or None
            when that is not known.
        at_least: lower confidence limit (95 %, Clopper-Pearson) of the probability to cover the
            improvement.
        gain: the true improvement, reward units.
        limit: what the certificate tends to with infinitely many rollouts, or None.
        mean_lower_bound: average over the batches.
        certified: batches in which the bound was positive.
    """

    case: str
    certificate: str
    finite_sample: bool
    confidence: float
    batches: int
    rollouts: int
    covered: int
    covered_limit: int | None
    at_least: float
    gain: float
    limit: float | None
    mean_lower_bound: float
    certified: int


def coverage(
    batches: int = 1000,
    rollouts: int = 1000,
    alpha: float = 0.05,
    seed: int = 0,
    cases: tuple[str, ...] = tuple(CASES),
) -> list[Coverage]:
    """Draw batches from MDPs with known improvement and count how often each certificate holds.

    covered = #{batches : lower_bound <= J(train) - J(rollout)}, at least (1 - alpha) batches in
    expectation for a finite-sample certificate

    Assumes independent batches of fresh rollouts; every constant was fixed beforehand. Two words
    on reading: a certificate covers more often than stated where its inequality has slack, and
    ``covered_limit`` shows its interval alone, which is where the normal approximation falls short
    on skewed statistics. Counts and reward units.

    Args:
        batches: number of simulated batches.
        rollouts: per batch, at least 2.
        alpha: failure probability that the certificates are made for.
        seed: seed of the generator.
        cases: names in :data:`CASES`.

    Returns:
        One record per case and certificate.

    Raises:
        ValueError: on batches < 1, rollouts < 2, alpha outside (0, 1) or an unknown case.

    Range of the counts: 0..batches.
    Source: docs/validation.md.

    Example:
        >>> found = coverage(batches=20, rollouts=200, cases=("coins",))
        >>> all(c.covered == 20 for c in found if c.finite_sample)
        True
    """
    number = int(checks.horizon(batches))
    out = []
    for name in cases:
        if name not in CASES:
            raise ValueError(f"unknown case {name!r}; choose from {', '.join(CASES)}.")
        case = CASES[name]()
        limits = None if case.everything is None else _limits(case, case.everything)
        rng = np.random.default_rng([seed, list(CASES).index(name)])
        lower: dict[str, list[float]] = {certificate: [] for certificate in CERTIFICATES}
        for _ in range(number):
            for key, made in _bounds(case, case.draw(rollouts, rng), alpha).items():
                lower[key].append(made.lower_bound)
        for key, finite in CERTIFICATES.items():
            values = np.array(lower[key])
            covered = int((values <= case.gain).sum())
            limit = None if limits is None else limits[key]
            out.append(
                Coverage(
                    case=name,
                    certificate=key,
                    finite_sample=finite,
                    confidence=1 - alpha,
                    batches=number,
                    rollouts=rollouts,
                    covered=covered,
                    covered_limit=None if limit is None else int((values <= limit).sum()),
                    at_least=certify.clopper_pearson(covered, number, 0.05).lower,
                    gain=case.gain,
                    limit=limit,
                    mean_lower_bound=float(values.mean()),
                    certified=int((values > 0).sum()),
                )
            )
    return out
