# SPDX-License-Identifier: Apache-2.0
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory import exact
from theory.bounds import every_bound
from theory.mdp.markov import MarkovPair, random_markov


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 3), st.integers(1, 5), st.floats(0.01, 1.5))
def test_dynamic_programme_equals_enumeration(seed, states, length, mismatch):
    pair = random_markov(seed, states, mismatch)
    tree = pair.tree(length)
    final = np.random.default_rng(seed).random(states)
    step = np.random.default_rng(seed + 1).random(states) / length
    tokens = tree.tokens()
    reward = (final[tokens[:, -1]] + step[tokens].sum(axis=1)) / 2
    v = exact.values(tree, reward)
    w = pair.evaluate(length, final / 2, step / 2)
    assert w.j_rollout == pytest.approx(v.j_rollout, abs=1e-13)
    assert w.j_train == pytest.approx(v.j_train, abs=1e-13)
    assert w.surrogate == pytest.approx(v.surrogate, abs=1e-13)
    assert w.error == pytest.approx(v.error, abs=1e-13)
    found, whole, ours = exact.summary(tree), exact.sequence_divergences(tree), pair.summary(length)
    assert ours.seq_kl == pytest.approx(found.seq_kl, abs=1e-13)
    assert ours.seq_chi2 == pytest.approx(found.seq_chi2, rel=1e-11)
    assert ours.second_moment == pytest.approx(found.second_moment, rel=1e-8, abs=1e-13)
    assert ours.path_chi2 == pytest.approx(float(whole.chi2), rel=1e-9, abs=1e-12)
    assert ours.affinity == pytest.approx(float(whole.bc), abs=1e-13)
    assert ours.seq_tv_low - 1e-12 <= found.seq_tv <= ours.seq_tv_high + 1e-12
    np.testing.assert_allclose(ours.mean_tv, found.mean_tv, atol=1e-14)
    np.testing.assert_allclose(ours.mean_kl, found.mean_kl, atol=1e-14)
    for name, value in ours.token.items():
        assert value == pytest.approx(found.known()[name], rel=1e-12), name


def flip_chain(a, b):
    """Two states; train leaves state 0 more often. Ratios take three values, one of them 1."""
    return MarkovPair([0.6, 0.4], [[1 - a, a], [0.5, 0.5]], [[1 - b, b], [0.5, 0.5]])


def test_counting_equals_enumeration_and_lies_in_the_affinity_bracket():
    pair = flip_chain(0.1, 0.2)
    tree = pair.tree(7)
    law = pair.counting_law(7)
    assert law.p.sum() == pytest.approx(1, abs=1e-13)
    assert law.seq_tv == pytest.approx(exact.summary(tree).seq_tv, abs=1e-13)
    assert law.sup_error == pytest.approx(exact.sup_error(tree), abs=1e-13)
    longer, bracket = pair.counting_law(80), pair.summary(80)
    assert bracket.seq_tv_low < longer.seq_tv < bracket.seq_tv_high
    for b in every_bound(80, **bracket.known()):
        assert b.value >= longer.sup_error, b.name


def test_counting_handles_dropped_transitions():
    pair = MarkovPair([1.0, 0.0], [[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]])
    tree = pair.tree(5)
    assert pair.counting_law(5).seq_tv == pytest.approx(exact.summary(tree).seq_tv, abs=1e-13)


def test_monte_carlo_covers_the_exact_total_variation():
    """Two-sided Hoeffding at alpha = 1e-6: this test fails with probability below 1e-6."""
    pair = MarkovPair([0.6, 0.4], [[0.9, 0.1], [0.1, 0.9]], [[0.8, 0.2], [0.1, 0.9]])
    truth = pair.counting_law(40).seq_tv
    estimate, radius = pair.seq_tv_monte_carlo(40, 20_000, alpha=1e-6, seed=3)
    assert abs(estimate - truth) <= radius
    assert radius == pytest.approx(np.sqrt(np.log(2e6) / 40_000))


def test_state_marginals_are_not_path_total_variation():
    pair = flip_chain(0.1, 0.2)
    d = e = pair.start
    for _ in range(30):
        d, e = d @ pair.rollout, e @ pair.train
    marginal = np.abs(d - e).sum() / 2
    assert marginal < 0.6 * pair.counting_law(30).seq_tv


def test_ergodic_chain_has_exponent_zero():
    pair = random_markov(1, 16, 0.01)
    final = np.eye(16)[3]
    errors = np.array([pair.evaluate(t, final).error for t in (64, 256, 1024, 4096)])
    assert abs(errors[0]) > 1e-8
    # Differences of returns carry about T * 1e-16 of rounding.
    np.testing.assert_allclose(errors, errors[0], atol=1e-12)
    slope = np.polyfit(np.log([64, 256, 1024, 4096]), np.log(np.abs(errors)), 1)[0]
    assert abs(slope) < 1e-3


def test_additive_reward_has_no_error_when_both_chains_are_products():
    pair = MarkovPair([1.0, 0.0], [[0.7, 0.3]] * 2, [[0.6, 0.4]] * 2)
    v = pair.evaluate(100, step=[0.0, 0.01])
    assert abs(v.error) < 1e-13
    assert v.surrogate == pytest.approx(0.1, abs=1e-12)


def test_long_horizon_is_fast():
    pair = random_markov(0, 16, 0.05)
    start = time.perf_counter()
    pair.evaluate(4096, np.eye(16)[0])
    pair.summary(4096)
    assert time.perf_counter() - start < 1.0 * 3  # three times the promise: shared machines


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: MarkovPair([1.0], [[0.5, 0.5]], [[0.5, 0.5]]), "must have shape"),
        (lambda: MarkovPair([0.5, 0.4], np.eye(2), np.eye(2)), "start .* sums to 0.9"),
        (
            lambda: MarkovPair([1.0, 0.0], np.eye(2), [[0.9, 0.1], [0.0, 1.0]]),
            "needs no outside mass, got 0.1",
        ),
        (lambda: random_markov(0, 3).evaluate(0, [1, 0, 0]), "got 0"),
        (lambda: random_markov(0, 6, 0.3).counting_law(30), "more than the limit"),
        (lambda: random_markov(0).seq_tv_monte_carlo(3, 10, alpha=2.0), "got 2.0"),
    ],
)
def test_bad_input_is_one_sentence_with_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
