# SPDX-License-Identifier: Apache-2.0
"""C3' against what it is about: gates by plain loops, and trees on which every term is a sum."""

from __future__ import annotations

import math

import numpy as np
import pytest

from theory import certify, exact
from theory.mdp.tree import random_tree

MODES = ("budget", "drift")
TREES = 240
ROUNDING = 1e-11  # sums of at most 3^5 products of numbers below 1e3


def open_by_hand(rho, kl, *, mode, b, k, delta):
    """gate_t of one sequence from its definition: every prefix is summed anew."""
    gate = []
    for t in range(len(rho)):
        steps = [rho[s] - 1 for s in range(t)]
        spent = math.fsum(map(abs, steps)) if mode == "budget" else abs(math.fsum(steps))
        within = spent <= b and math.fsum(kl[:t]) <= k and kl[t] <= delta
        gate.append(within and all(gate))
    return gate


def open_by_package(log_ratio, kl, **options):
    """gate_t from the sums of truncated sequences alone: does token t still add its KL?"""
    rows, length = kl.shape
    totals = [np.zeros(rows)]
    for t in range(length):
        counted = np.broadcast_to(np.arange(length) <= t, kl.shape)
        totals.append(certify.gate(log_ratio, kl, counted, **options).kl)
    return np.diff(np.array(totals), axis=0).T > 0


def random_tokens(seed, rows=300, length=12):
    rng = np.random.default_rng(seed)
    log_ratio = rng.normal(0, 0.25, (rows, length))
    return log_ratio, rng.exponential(0.03, (rows, length)) + 1e-6


@pytest.mark.parametrize("cap", [None, 1.2])
@pytest.mark.parametrize("mode", MODES)
def test_the_gate_is_its_definition(mode, cap):
    log_ratio, kl = random_tokens(0)
    b, k, delta = (1.5 if mode == "budget" else 0.6), 0.3, 0.12
    options = {"mode": mode, "shift_budget": b, "kl_budget": k, "max_kl": delta, "ratio_cap": cap}
    rho = np.minimum(np.exp(log_ratio), math.inf if cap is None else cap)
    gate = np.array(
        [open_by_hand(r, d, mode=mode, b=b, k=k, delta=delta) for r, d in zip(rho, kl, strict=True)]
    )
    assert np.array_equal(open_by_package(log_ratio, kl, **options), gate)
    assert np.all(gate[:, 1:] <= gate[:, :-1])  # latched
    # Each of the three conditions closes some, and some stay open.
    assert gate.all(1).any() and (kl > delta).any() and (kl.sum(1) > k).any()
    found = certify.gate(log_ratio, kl, **options)
    np.testing.assert_allclose(found.shift, ((rho - 1) * gate).sum(1), atol=1e-13)
    np.testing.assert_allclose(found.kl, (kl * gate).sum(1), atol=1e-13)
    assert np.array_equal(found.hit, ~gate.all(1))


@pytest.mark.parametrize("mode", MODES)
def test_a_token_moves_no_gate_before_it_and_its_ratio_not_its_own(mode):
    log_ratio, kl = random_tokens(1, rows=200)
    options = {"mode": mode, "max_kl": 0.12, "shift_budget": 0.8, "kl_budget": 0.3}
    before = open_by_package(log_ratio, kl, **options)
    rng = np.random.default_rng(2)
    changed = 0
    for t in range(kl.shape[1]):
        moved, other = log_ratio.copy(), kl.copy()
        moved[:, t] = rng.normal(0, 2, len(moved))
        after = open_by_package(moved, kl, **options)
        assert np.array_equal(after[:, : t + 1], before[:, : t + 1])  # s <= t: the sampled token
        changed += (after != before).sum()
        other[:, t] = rng.exponential(1, len(other))
        after = open_by_package(log_ratio, other, **options)
        assert np.array_equal(after[:, :t], before[:, :t])  # s < t: the context
        changed += (after != before).sum()
    assert changed > 100


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_in_expectation_it_is_below_the_gain_of_every_tree(mode, capped):
    """All terms by enumeration; the frozen policy's hit exactly, and by its bound from rollouts."""
    rng = np.random.default_rng(3)
    tightest, hits = math.inf, 0
    for seed in range(TREES):
        tree = random_tree(
            seed,
            vocab=2 + seed % 2,
            length=1 + seed % 5,
            prompts=1 + seed % 3 // 2,
            mismatch=float(10 ** rng.uniform(-2, 0)),
            eos=seed % 2 == 0,
            zero=0.2 * (seed % 3 == 0),
            outside=0.2 * (seed % 4 == 1),
        )
        p = exact.law(tree).p
        seen = p > 0
        tokens = exact.token_statistics(tree)
        delta, b, k = rng.uniform(0.005, 0.4), rng.uniform(0.05, 1.5), rng.uniform(0.01, 0.3)
        cap = float(rng.uniform(1, 2)) if capped else math.inf
        rho = np.minimum(np.exp(tokens.log_ratio), cap)
        gate = np.array(
            [
                open_by_hand(r, d, mode=mode, b=b, k=k, delta=delta)
                for r, d in zip(rho.tolist(), tokens.kl.tolist(), strict=True)
            ]
        )
        found = certify.gate(
            tokens.log_ratio,
            tokens.kl,
            max_kl=delta,
            mode=mode,
            shift_budget=b,
            kl_budget=k,
            ratio_cap=cap if capped else None,
        )
        shift = np.where(gate, rho - 1, 0.0).sum(1)
        kl = np.where(gate, tokens.kl, 0.0).sum(1)
        closed = ~gate.all(1)
        np.testing.assert_allclose(found.shift[seen], shift[seen], atol=ROUNDING)
        np.testing.assert_allclose(found.kl[seen], kl[seen], atol=ROUNDING)
        assert np.array_equal(found.hit[seen], closed[seen])
        low, high = found.shift_range
        assert (low, found.kl_limit) == (-(b + 1), min(k + delta, tree.length * delta))
        assert np.all((shift[seen] >= low - ROUNDING) & (shift[seen] <= high + ROUNDING))

        # The frozen policy's own law: train's factor where the gate is open, rollout's elsewhere.
        frozen = p * np.prod(np.where(gate, np.exp(tokens.log_ratio), 1.0), axis=1)
        hit = min(float(p[closed & seen].sum()), 1.0)
        divergence = float(p[seen] @ kl[seen])
        worst = certify.binary_kl_inverse(hit, divergence)
        hit_frozen = 1 - float(frozen[~closed & seen].sum())
        assert hit_frozen <= worst + 1e-9
        hits += 0 < hit < 1
        for reward in (
            rng.random(tree.sequences),
            (rng.random(tree.sequences) < 0.5).astype(float),
        ):
            value = exact.values(tree, reward)
            gain = value.j_train - value.j_rollout
            surrogate = float(p[seen] @ (reward * shift)[seen])
            assert surrogate - divergence - hit_frozen <= gain + ROUNDING
            assert surrogate - divergence - worst <= gain + 1e-9
            tightest = min(tightest, gain - (surrogate - divergence - hit_frozen))
    assert hits > TREES / 6 and tightest < 0.01  # gates close, and the bound is not idle
