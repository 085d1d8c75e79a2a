# SPDX-License-Identifier: Apache-2.0
"""Random trees against every rigorous bound; prints how close the truth comes to each of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theory import exact
from theory.mdp.tree import Tree, random_tree

__all__ = ["Report", "random_case", "selfcheck"]

#: Rounding of the exact values: a few hundred operations on numbers of order one.
ROUNDING = 1e-11


@dataclass(frozen=True)
class Report:
    """Outcome of a self-check.

    Attributes:
        trees: number of trees per group.
        largest_ratio: per group ("inside", "outside"), per bound: max over trees of truth / bound.
        violations: sentences, one per tree and bound that failed; empty when all is well.
        largest_identity_gap: largest disagreement of the error's identities.
    """

    trees: int
    largest_ratio: dict[str, dict[str, float]]
    violations: list[str]
    largest_identity_gap: float


def random_case(seed: int, leaves_support: bool) -> Tree:
    """Draw one tree of the self-check.

    V in 2..4, T in 2..6 with V^T <= 1024, mismatch log-uniform in [0.03, 3]; a third of the
    trees has several prompts, a third an EOS, a third zero-probability tokens; one in eight lets
    the train policy drop tokens (infinite KL).

    Assumes a seed; deterministic. Source: docs/theory.md#selfcheck.

    Example:
        >>> exact.summary(random_case(0, leaves_support=True)).outside_mass > 0
        True
    """
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 5))
    longest = int(np.log(1024) / np.log(vocab))
    return random_tree(
        int(rng.integers(2**31)),
        vocab,
        int(rng.integers(2, min(6, longest) + 1)),
        prompts=int(rng.integers(2, 4)) if rng.random() < 1 / 3 else 1,
        mismatch=float(np.exp(rng.uniform(np.log(0.03), np.log(3)))),
        eos=bool(rng.random() < 1 / 3),
        zero=0.2 if rng.random() < 1 / 3 else 0.0,
        outside=0.3 if leaves_support else 0.0,
        dropped=0.1 if rng.random() < 1 / 8 else 0.0,
    )


def selfcheck(trees: int = 200, seed: int = 0) -> Report:
    """Compare every rigorous bound with the exact supremum of the error.

    violation: sup_R |Error| > bound (1 + 1e-11) + 1e-13

    Assumes nothing; half of the trees leave the rollout's support and get S_out added. Each tree
    also checks that the error's three identities agree with its definition for a random reward.

    Args:
        trees: number of trees in each of the two groups.
        seed: first seed.

    Returns:
        The report.

    Range of each ratio [0, 1].
    Source: ours, docs/theory.md#selfcheck.

    Example:
        >>> report = selfcheck(trees=5)
        >>> report.violations
        []
    """
    largest: dict[str, dict[str, float]] = {"inside": {}, "outside": {}}
    violations: list[str] = []
    gap = 0.0
    for group, leaves in (("inside", False), ("outside", True)):
        for i in range(trees):
            case = seed + i
            tree = random_case(case, leaves)
            truth = exact.sup_error(tree)
            for bound in exact.bounds(tree):
                if not bound.rigorous:
                    continue
                value = float(bound.value)
                if truth > value * (1 + ROUNDING) + 1e-13 or np.isnan(value):
                    violations.append(
                        f"{group} tree {case}: {bound.name} = {value:g} is below the exact "
                        f"supremum {truth:g}."
                    )
                if value > 1e-13:
                    ratios = largest[group]
                    ratios[bound.name] = max(ratios.get(bound.name, 0.0), truth / value)
            reward = np.random.default_rng(case).random(tree.sequences)
            v = exact.values(tree, reward)
            gap = max(
                gap,
                abs(v.error - v.error_forward),
                abs(v.error - v.error_backward),
                abs(v.error - v.error_measure),
            )
    if gap > 1e-12:
        violations.append(f"The error's identities disagree by {gap:g}, more than 1e-12.")
    return Report(trees, largest, violations, gap)
