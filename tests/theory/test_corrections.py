# SPDX-License-Identifier: Apache-2.0
"""Numbers behind docs/theory.md#corrections that no other file checks, and three adjustments."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quoted import quoted
from theory import exact
from theory.bounds import every_bound, paper, sharp
from theory.gradients import _rho
from theory.mdp.tree import Tree, random_tree

ROUNDING = 1e-12

any_tree = st.builds(
    random_tree,
    st.integers(0, 10**6),
    st.integers(2, 3),
    st.integers(1, 5),
    prompts=st.integers(1, 2),
    mismatch=st.floats(0.01, 3),
    eos=st.booleans(),
    zero=st.sampled_from([0.0, 0.2]),
    outside=st.sampled_from([0.0, 0.0, 0.3]),
    dropped=st.sampled_from([0.0, 0.0, 0.2]),
)


@settings(max_examples=150, deadline=None)
@given(any_tree)
def test_every_bound_is_at_least_the_exact_supremum(tree):
    truth = exact.sup_error(tree)
    for bound in exact.bounds(tree):
        assert bound.value >= truth * (1 - 1e-11) - 1e-13, bound.name


@settings(max_examples=60, deadline=None)
@given(any_tree, st.integers(0, 10**6), st.floats(-5, 5), st.floats(0.1, 7))
def test_reward_range_with_the_shifted_surrogate(tree, seed, low, span):
    """R in [low, low + span]: form L' with R - low, multiply the bound by the span."""
    reward = low + span * np.random.default_rng(seed).random(tree.sequences)
    error = abs(exact.values(tree, reward - low, 0.0, span).error)
    for bound in exact.bounds(tree):
        scaled = bound.for_reward_range(low, low + span)
        assert scaled.value >= error * (1 - 1e-11) - 1e-12, bound.name


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 3), st.integers(1, 4), st.floats(0.05, 2))
def test_per_step_rewards(seed, vocab, length, mismatch):
    """r_k depends on the first k tokens and has span w_k: |Error| <= sum w_k D_{<=k}."""
    tree = random_tree(seed, vocab, length, mismatch=mismatch)
    rng = np.random.default_rng(seed)
    spans = rng.uniform(0.1, 2, length)
    the, rho = exact.law(tree), _rho(tree)
    change = surrogate = 0.0
    for k in range(1, length + 1):
        pay = spans[k - 1] * rng.random(vocab**k)
        r = pay[np.arange(tree.sequences) // vocab ** (length - k)]
        change += float((the.q - the.p) @ r)
        surrogate += float(the.p @ (r * (rho[:, :k] - 1).sum(axis=1)))
    by_length = sharp.seq_kl(np.cumsum(exact.summary(tree).mean_kl))
    limit = float(sharp.per_step(by_length, spans).value)
    assert abs(change - surrogate) <= limit * (1 + 1e-11) + 1e-13


@settings(max_examples=60, deadline=None)
@given(any_tree, st.integers(0, 10**6))
def test_length_normalised_score_needs_no_factor_two(tree, seed):
    """Item 24: E[sum |rho_t - 1| w_t] is enough, with weights from both maxima."""
    found = exact.summary(tree)
    if found.outside_mass > 0 or not np.isfinite(found.max_kl):
        return
    weights = paper.length_weights(tree.length, found.max_kl, found.max_tv)
    the = exact.law(tree)
    score = float(the.p @ (np.abs(_rho(tree) - 1) @ weights))
    assert exact.sup_error(tree) <= score + ROUNDING


def test_surrogate_without_the_minus_one_depends_on_the_baseline():
    """Item 21: E[A sum rho_t] = L' + T (J(rollout) - b) for A = R - b."""
    tree = random_tree(5, 2, 6)
    reward = np.random.default_rng(0).random(64)
    v, the, rho = exact.values(tree, reward), exact.law(tree), _rho(tree)
    for b in (0.0, 0.3, v.j_rollout):
        form = float(the.p @ ((reward - b) * rho.sum(axis=1)))
        assert form == pytest.approx(v.surrogate + 6 * (v.j_rollout - b), abs=ROUNDING)
    assert abs(6 * v.j_rollout) > 10 * abs(v.surrogate)


def test_signs_and_means_of_the_sampled_estimators():
    """Items 1, 2, 3, 6 and 22 on one pair of token laws."""
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.3, 0.3, 0.4])
    rho = q / p
    kl = float(p @ np.log(p / q))
    chi2 = float((p**2 / q).sum() - 1)
    assert float(p @ np.log(rho)) == pytest.approx(-kl)
    assert float(p @ (1 / rho - 1 + np.log(rho))) == pytest.approx(chi2 - kl)
    assert abs(chi2 - 2 * kl) > 0.02  # so its mean is not the KL
    assert float(p @ rho) == pytest.approx(1)
    for lam in (-1.0, 0.5, 2.0):
        assert float(p @ (-np.log(rho) + lam * (rho - 1))) == pytest.approx(kl)


def test_cancelling_ratios_fool_the_geometric_mean():
    """Item 4: ratios 100 and 0.01 in turn have W = 1 and a largest k2 of 10.6."""
    log_rho = np.log(np.tile([100.0, 0.01], 50))
    assert abs(log_rho.sum()) < 1e-12
    assert (log_rho**2 / 2).max() == quoted("10.6")


def test_caps_act_on_early_positions():
    """Item 23: sqrt((T - t) delta / 2) reaches 1 far from the end."""
    weights = paper.length_weights(500, max_kl=0.01)
    assert np.all(weights[:299] == 1) and weights[301] < 1 and weights[-2] < 0.1
    assert round(0.999**1024, 3) == 0.359
    assert round(0.9999**4096, 3) == 0.664
    assert round(0.9999**8192, 3) == 0.441


def test_sampled_detectors_raise_false_alarms_and_miss():
    """A token of probability 1e-6 with ratio 10: k2 = 2.65, contribution to the KL 6.7e-6."""
    assert math.log(10) ** 2 / 2 == quoted("2.65")
    p, q = 1e-6, 1e-5
    term = q - p + p * math.log(p / q)
    assert term == quoted("6.7e-6")


def test_acceptance_of_seventy_percent_is_a_violation_rate():
    assert 1 - 0.7 ** (1 / 4096) == quoted("8.7e-5")


def test_masking_bias_is_bounded_by_rejection_and_chi_square():
    for seed in range(30):
        tree = random_tree(seed, 3, 4, mismatch=0.6)
        reward = np.random.default_rng(seed).random(81)
        the, found = exact.law(tree), exact.summary(tree)
        for delta in (0.05, 0.15, 0.3):
            kl = np.stack([the.rows[t].kl_rollout_train[tree.contexts(t)] for t in range(4)], 1)
            rejected = kl.max(axis=1) > delta
            gap = abs(float(the.p @ (reward * the.s * rejected)))
            limit = math.sqrt(float(the.p[rejected].sum()) * found.seq_chi2) * reward.max()
            assert gap <= limit + ROUNDING


def test_the_average_does_bound_the_error_where_the_maximum_is_useless():
    """Item 15: the published example of a useless average has a small error."""
    p, q = np.array([0.5, 0.5]), np.array([0.5, 0.5])
    far = np.array([0.035063, 0.964937])  # KL 1 from the fair coin, to half a unit of 0.035063
    rounding = 0.5e-6 / (2 * far[0])
    assert float(exact.row_divergences(p, far).kl_rollout_train) == pytest.approx(1, abs=rounding)
    for mass in (0.1, 1e-3, 1e-6):
        tree = Tree(
            (np.array([[1 - mass, mass]]), np.array([p, p])),
            (np.array([[1 - mass, mass]]), np.array([q, far])),
            [1.0],
        )
        found = exact.summary(tree)
        assert found.max_kl == pytest.approx(1, abs=rounding)
        assert found.seq_kl == pytest.approx(mass, rel=rounding)
        assert exact.sup_error(tree) <= found.seq_kl


def test_bounds_grow_with_every_divergence_and_with_the_horizon():
    """What the inversion relies on (docs/theory.md#inverse)."""
    base = dict(
        max_kl=0.01,
        max_tv=0.02,
        max_chi2=0.02,
        max_log_ratio=0.5,
        seq_kl=0.03,
        seq_tv=0.05,
        max_kl_train_rollout=0.01,
    )
    low = {b.name: float(b.value) for b in every_bound(30, **base)}
    for name in base:
        more = {**base, name: base[name] * 1.3}
        if name == "max_tv":
            more["max_kl"] = 0.02
        for b in every_bound(30, **more):
            assert b.value >= low[b.name] * (1 - 1e-12), (name, b.name)
    for b in every_bound(31, **base):
        assert b.value >= low[b.name] * (1 - 1e-12), b.name
