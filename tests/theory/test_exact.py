# SPDX-License-Identifier: Apache-2.0
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory import exact
from theory.mdp.tree import Tree, random_tree

IDENTITY = 1e-12  # the promise; observed gaps are a few 1e-16

trees_inside = st.builds(
    random_tree,
    st.integers(0, 10**6),
    st.integers(2, 3),
    st.integers(1, 5),
    prompts=st.integers(1, 2),
    mismatch=st.floats(0.01, 2),
    eos=st.booleans(),
    zero=st.sampled_from([0.0, 0.2]),
)
trees_leaving = st.builds(
    random_tree,
    st.integers(0, 10**6),
    st.integers(2, 3),
    st.integers(1, 5),
    mismatch=st.floats(0.01, 2),
    outside=st.just(0.4),
)


def slow_values(tree, reward):
    """J and L' by a plain loop over sequences and tokens, in exact summation."""
    tokens = tree.tokens()
    j_roll, j_train, surrogate = [], [], []
    for i, r in enumerate(reward):
        row = i // tree.vocab**tree.length
        p = q = tree.prompts[row]
        s = 0.0
        for t in range(tree.length):
            a, b = tree.rollout[t][row, tokens[i, t]], tree.train[t][row, tokens[i, t]]
            p, q = p * a, q * b
            s += b / a - 1 if a > 0 else 0.0
            row = row * tree.vocab + tokens[i, t]
        j_roll.append(p * r)
        j_train.append(q * r)
        surrogate.append(p * r * s)
    return math.fsum(j_roll), math.fsum(j_train), math.fsum(surrogate)


@settings(max_examples=60, deadline=None)
@given(st.one_of(trees_inside, trees_leaving), st.integers(0, 10**6))
def test_all_identities_agree_with_a_plain_loop(tree, seed):
    reward = np.random.default_rng(seed).random(tree.sequences)
    v = exact.values(tree, reward)
    j_roll, j_train, surrogate = slow_values(tree, reward)
    assert abs(v.j_rollout - j_roll) < IDENTITY
    assert abs(v.j_train - j_train) < IDENTITY
    assert abs(v.surrogate - surrogate) < IDENTITY
    error = j_train - j_roll - surrogate
    for other in (v.error, v.error_forward, v.error_backward, v.error_measure):
        assert abs(other - error) < IDENTITY


def test_identities_without_the_outside_term_would_be_wrong():
    tree = random_tree(3, 3, 4, outside=0.4)
    v = exact.values(tree, np.ones(tree.sequences))
    assert v.outside_term > 0.1
    # With R = 1 nothing can change, yet the sampled surrogate misses the outside mass.
    assert v.error == pytest.approx(-v.surrogate, abs=IDENTITY)
    assert v.error == pytest.approx(exact.summary(tree).outside_mass, abs=IDENTITY)


@settings(max_examples=30, deadline=None)
@given(trees_inside, st.integers(0, 10**6))
def test_pair_terms_sum_to_the_error_by_rows_and_columns(tree, seed):
    reward = np.random.default_rng(seed).random(tree.sequences)
    pairs = exact.pair_terms(tree, reward)
    assert pairs.sum() == pytest.approx(exact.values(tree, reward).error, abs=IDENTITY)
    assert np.all(np.tril(pairs) == 0)


def test_every_dyadic_cut_bounds_its_block_of_pairs():
    tree = random_tree(8, 2, 6, mismatch=0.4)
    reward = (np.random.default_rng(0).random(64) < 0.5).astype(float)
    pairs = exact.pair_terms(tree, reward)
    found = exact.summary(tree)
    from theory.bounds.sharp import tau

    for h in range(1, 6):
        block = abs(pairs[:h, h:].sum())
        limit = 2 * tau(h, max_tv=found.max_tv) * tau(6 - h, max_tv=found.max_tv)
        assert block <= limit


@settings(max_examples=40, deadline=None)
@given(st.one_of(trees_inside, trees_leaving))
def test_supremum_is_attained_and_never_exceeded(tree):
    top = exact.sup_error(tree)
    the = exact.law(tree)
    signed = the.q - the.p * (1 + the.s)
    attained = max(
        abs(exact.values(tree, (signed > 0).astype(float)).error),
        abs(exact.values(tree, (signed < 0).astype(float)).error),
    )
    assert attained == pytest.approx(top, abs=IDENTITY)
    # The signed parts differ by the outside mass, so the positive one is the supremum.
    parts = signed[signed > 0].sum() + signed[signed < 0].sum()
    assert parts == pytest.approx(exact.summary(tree).outside_mass, abs=IDENTITY)
    for seed in range(5):
        reward = np.random.default_rng(seed).random(tree.sequences)
        assert abs(exact.values(tree, reward).error) <= top + IDENTITY


@settings(max_examples=30, deadline=None)
@given(trees_inside)
def test_supremum_is_half_the_mean_absolute_z_inside_the_support(tree):
    the = exact.law(tree)
    assert exact.sup_error(tree) == pytest.approx(float(the.p @ np.abs(the.z)) / 2, abs=IDENTITY)
    assert float(the.p @ the.z) == pytest.approx(0, abs=IDENTITY)
    assert exact.sup_surrogate(tree) == pytest.approx(
        float(the.p @ np.abs(the.s)) / 2, abs=IDENTITY
    )


@settings(max_examples=40, deadline=None)
@given(trees_inside)
def test_pathwise_k3_identity_and_both_means(tree):
    the = exact.law(tree)
    seen = the.p > 0
    gap = the.z - (exact.k3(the.w) - the.k3_sum)
    assert np.max(np.abs(gap[seen])) < 1e-10 * (1 + np.max(the.w[seen]))
    total = exact.summary(tree).seq_kl
    assert float(the.p @ exact.k3(the.w)) == pytest.approx(total, abs=IDENTITY)
    assert float(the.p @ the.k3_sum) == pytest.approx(total, abs=IDENTITY)


@settings(max_examples=40, deadline=None)
@given(trees_inside)
def test_second_moment_is_the_martingale_sum(tree):
    the = exact.law(tree)
    expected = 0.0
    w = np.ones(tree.prompts.size)
    for t, (p, q) in enumerate(zip(tree.rollout, tree.train, strict=True)):
        expected += float(the.visits_rollout[t] @ ((w - 1) ** 2 * the.rows[t].chi2))
        w = (w[:, None] * np.where(p > 0, q / np.where(p > 0, p, 1), 1.0)).ravel()
    assert exact.summary(tree).second_moment == pytest.approx(expected, rel=1e-9, abs=1e-13)


@settings(max_examples=40, deadline=None)
@given(trees_inside)
def test_chain_rules_and_prefix_total_variation(tree):
    found, whole = exact.summary(tree), exact.sequence_divergences(tree)
    the = exact.law(tree)
    assert found.seq_kl == pytest.approx(float(whole.kl_rollout_train), abs=1e-11)
    assert found.seq_tv == pytest.approx(float(whole.tv), abs=IDENTITY)
    # I7: TV_seq = E_rollout (1 - W)_+.
    assert found.seq_tv == pytest.approx(float(the.p @ np.maximum(1 - the.w, 0)), abs=IDENTITY)
    assert found.prefix_tv[0] == 0
    assert np.all(np.diff(found.prefix_tv) >= -IDENTITY)  # data processing
    assert found.seq_tv >= found.prefix_tv[-1] - IDENTITY
    assert float(whole.bc) >= found.min_bc**tree.length - IDENTITY
    moment, w = 0.0, np.ones(tree.prompts.size)
    for t, (p, q) in enumerate(zip(tree.rollout, tree.train, strict=True)):
        moment += float(the.visits_rollout[t] @ (np.abs(w - 1) * the.rows[t].tv))
        w = (w[:, None] * np.where(p > 0, q / np.where(p > 0, p, 1), 1.0)).ravel()
    assert found.moment == pytest.approx(moment, abs=IDENTITY)


def test_averages_of_every_divergence_against_a_plain_sum():
    tree = random_tree(3, 3, 3, prompts=2)
    found, the = exact.summary(tree), exact.law(tree)
    for name, values in {
        "tv": found.mean_tv,
        "kl_rollout_train": found.mean_kl,
        "kl_train_rollout": found.mean_kl_train_rollout,
        "chi2": found.mean_chi2,
        "bc": found.mean_bc,
    }.items():
        for t in range(3):
            expected = 0.0
            for i in range(tree.sequences):
                expected += the.p[i] * float(getattr(the.rows[t], name)[tree.contexts(t)[i]])
            assert values[t] == pytest.approx(expected, abs=1e-13), name
    # The other direction's chain rule runs over train's contexts, not the rollout's.
    other = float(exact.sequence_divergences(tree).kl_train_rollout)
    assert abs(found.mean_kl_train_rollout.sum() - other) > 1e-3


def test_row_divergences_against_mpmath():
    rng = np.random.default_rng(0)
    for scale in (1e-6, 1e-3, 0.1, 3.0):
        p = rng.dirichlet(np.ones(7))
        q = p * np.exp(scale * rng.normal(size=7))
        q /= q.sum()
        d = exact.row_divergences(p, q)
        with mpmath.workdps(40):
            a, b = [mpmath.mpf(float(x)) for x in p], [mpmath.mpf(float(x)) for x in q]
            kl = mpmath.fsum(x * mpmath.log(x / y) - x + y for x, y in zip(a, b, strict=True))
            rkl = mpmath.fsum(y * mpmath.log(y / x) - y + x for x, y in zip(a, b, strict=True))
            chi2 = mpmath.fsum((y - x) ** 2 / x for x, y in zip(a, b, strict=True))
            bc = mpmath.fsum(mpmath.sqrt(x * y) for x, y in zip(a, b, strict=True))
        # rho = q/p carries one rounding error, which k3 near 1 amplifies by 1/|rho - 1|.
        assert float(d.kl_rollout_train) == pytest.approx(float(kl), rel=1e-14 + 1e-15 / scale)
        assert float(d.kl_train_rollout) == pytest.approx(float(rkl), rel=1e-14 + 1e-15 / scale)
        assert float(d.chi2) == pytest.approx(float(chi2), rel=1e-13)
        assert float(d.bc) == pytest.approx(float(bc), rel=1e-14)
        assert float(d.max_log_ratio) == pytest.approx(float(np.max(np.log(q / p))), rel=1e-9)


def test_row_divergences_at_the_edges_of_the_support():
    d = exact.row_divergences(
        [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], [[1.0, 0.0, 0.0], [0.4, 0.4, 0.2]]
    )
    assert d.kl_rollout_train[0] == np.inf
    assert d.kl_rollout_train[1] == pytest.approx(math.log(0.5 / 0.4))
    assert d.kl_train_rollout[0] == pytest.approx(math.log(2))
    assert d.kl_train_rollout[1] == np.inf
    assert d.chi2.tolist() == [1.0, np.inf]
    assert d.outside.tolist() == [0.0, 0.2]
    assert d.max_log_ratio[1] == np.inf


@pytest.mark.parametrize(
    "x", [1e-300, 0.3, 1 - 1e-3, 1 - 1e-9, 1.0, 1 + 1e-12, 1.0009, 1.0011, 2, 1e9]
)
def test_k3_against_mpmath(x):
    with mpmath.workdps(50):
        exact_value = mpmath.mpf(x) - 1 - mpmath.log(mpmath.mpf(x))
    assert float(exact.k3(x)) == pytest.approx(float(exact_value), rel=1e-12)
    assert exact.k3(0.0) == np.inf


def test_published_counterexample_to_ignoring_the_outside_mass():
    tree = Tree(([[1.0, 0.0]],), ([[0.9, 0.1]],), [1.0])
    v = exact.values(tree, [0.0, 1.0])
    assert v.error == pytest.approx(0.1, abs=IDENTITY)
    raw = {b.name: b.value for b in exact.every_bound(1, **exact.summary(tree).known())}
    for name in ("forward", "backward", "dyadic"):
        assert raw[name] == 0.0
    repaired = {b.name: b.value for b in exact.bounds(tree)}
    for name in ("forward", "backward", "dyadic", "seq_kl"):
        assert repaired[name] >= 0.1 - 1e-15


def test_maxima_run_over_the_contexts_that_the_rollout_reaches():
    near, far = [0.5, 0.5], [0.01, 0.99]
    for q, expected in (([1.0, 0.0], 0.0), ([0.9, 0.1], 0.1)):
        tree = Tree(([[1.0, 0.0]], [near, near]), ([q], [near, far]), [1.0])
        found = exact.summary(tree)
        assert found.max_tv == pytest.approx(expected, abs=1e-15)
        assert found.outside_mass == pytest.approx(expected, abs=1e-15)
        assert found.moment == 0
        # What happens beyond the support is paid by the outside mass alone.
        assert exact.sup_error(tree) == pytest.approx(expected, abs=1e-15)
        assert all(b.value >= exact.sup_error(tree) - 1e-15 for b in exact.bounds(tree))


def test_reward_shift_matters_when_mass_lies_outside():
    """R in [5, 6] must enter as R - 5; used raw, the error exceeds every bound for span 1."""
    tree = random_tree(11, 3, 3, outside=0.5)
    reward = 5 + np.random.default_rng(0).random(tree.sequences)
    total = exact.summary(tree).seq_kl
    raw = exact.values(tree, reward, 5, 6)
    shifted = exact.values(tree, reward - 5)
    assert abs(raw.error) > total
    assert abs(shifted.error) <= total


def test_additive_reward_on_product_policies_has_no_error():
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.4, 0.4, 0.2])
    tree = Tree(
        tuple(np.tile(p, (3**t, 1)) for t in range(4)),
        tuple(np.tile(q, (3**t, 1)) for t in range(4)),
        [1.0],
    )
    pay = np.array([0.0, 0.1, 0.25])
    v = exact.values(tree, pay[tree.tokens()].sum(axis=1))
    assert abs(v.error) < 1e-15
    assert abs(v.surrogate) > 0.01


def test_at_train_equal_rollout_everything_vanishes():
    tree = random_tree(4, 3, 4)
    same = tree.with_train(tree.rollout)
    v = exact.values(same, np.random.default_rng(0).random(same.sequences))
    # L(rollout) = J(rollout), with L = J(rollout) + L'.
    assert v.surrogate == 0.0 and v.error == 0.0
    assert v.j_train == v.j_rollout
    assert exact.sup_error(same) == 0.0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: exact.values(random_tree(0, 2, 2), [0, 1, 2, 0]), r"range \[0, 1\], got 2"),
        (lambda: exact.values(random_tree(0, 2, 2), [0, 1]), r"shape \(4,\), got \(2,\)"),
        (lambda: exact.row_divergences([0.5, 0.2], [0.5, 0.5]), "sums to 0.7"),
    ],
)
def test_bad_input_is_one_sentence_with_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
