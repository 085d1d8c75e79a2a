# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quoted import quoted
from theory import exact, gradients
from theory.gradients import ESTIMATORS, Settings
from theory.mdp.adversarial import bernoulli_at_kl
from theory.mdp.product import BernoulliProduct
from theory.mdp.tree import Tree, random_tree

ROUNDING = 1e-12

trees = st.builds(
    random_tree,
    st.integers(0, 10**6),
    st.integers(2, 3),
    st.integers(1, 4),
    prompts=st.integers(1, 2),
    mismatch=st.floats(0.05, 1.5),
)


def reward_of(tree, seed=0):
    return (np.random.default_rng(seed).random(tree.sequences) < 0.5).astype(float)


def shifted(tree, depth, row, token, step):
    """Move one logit of the train policy."""
    train = [q.copy() for q in tree.train]
    line = train[depth][row] * np.exp(step * (np.arange(tree.vocab) == token))
    train[depth][row] = line / line.sum()
    return tree.with_train(train)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_against_central_differences(seed):
    tree = random_tree(seed, 3, 3, prompts=2, mismatch=0.8)
    reward = np.random.default_rng(seed).random(tree.sequences)
    true_j, true_l = gradients.grad_j(tree, reward), gradients.grad_surrogate(tree, reward)
    h = 1e-5  # error h^2 times a third derivative of order one, plus rounding 1e-16 / h
    index = 0
    for depth in range(3):
        for row in range(tree.train[depth].shape[0]):
            for token in range(3):
                up = exact.values(shifted(tree, depth, row, token, h), reward)
                down = exact.values(shifted(tree, depth, row, token, -h), reward)
                assert true_j[index] == pytest.approx(
                    (up.j_train - down.j_train) / (2 * h), abs=1e-9
                )
                assert true_l[index] == pytest.approx(
                    (up.surrogate - down.surrogate) / (2 * h), abs=1e-9
                )
                index += 1
    assert index == true_j.size


def test_at_train_equal_rollout_both_gradients_agree():
    tree = random_tree(3, 3, 4)
    same = tree.with_train(tree.rollout)
    reward = reward_of(tree)
    np.testing.assert_allclose(
        gradients.grad_j(same, reward), gradients.grad_surrogate(same, reward), atol=1e-15
    )


def slow_moments(tree, reward, name, use, baseline=0.0):
    """Mean vector and total variance by building every rollout's gradient."""
    tokens = tree.tokens()
    sizes = [q.size for q in tree.train]
    start = np.concatenate([[0], np.cumsum(sizes)])
    mean, second = np.zeros(start[-1]), 0.0
    for i in range(tree.sequences):
        row = i // tree.vocab**tree.length
        p = tree.prompts[row]
        rho, kl, where = [], [], []
        for t in range(tree.length):
            y = tokens[i, t]
            a, b = tree.rollout[t][row], tree.train[t][row]
            p *= a[y]
            rho.append(b[y] / a[y])
            kl.append(float(np.sum(a * np.log(a / b))))
            score = -b.copy()
            score[y] += 1
            where.append((start[t] + row * tree.vocab, score))
            row = row * tree.vocab + y
        w, advantage = math.prod(rho), reward[i] - baseline
        geo = use.geo_low <= w ** (1 / tree.length) <= use.geo_high
        g = np.zeros(start[-1])
        for t in range(tree.length):
            r = rho[t]
            low, high = 1 - use.clip, 1 + use.clip
            active = min(r * advantage, min(max(r, low), high) * advantage) == r * advantage
            weight = {
                "token_is": r,
                "ppo_clip": r * active,
                "token_mask": r * (kl[t] <= use.max_kl),
                "seq_is": w,
                "seq_tis": min(w, use.ratio_cap),
                "seq_mis": w * (w <= use.ratio_cap),
                "geo_mask": float(geo),
                "geo_mask_token_tis": geo * min(r, use.token_cap),
                "trm": r * (max(kl) <= use.max_kl),
            }[name]
            offset, score = where[t]
            g[offset : offset + tree.vocab] += advantage * weight * score
        mean += p * g
        second += p * float(g @ g)
    return mean, second - float(mean @ mean)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("baseline", [0.0, 0.4])
def test_every_estimator_equals_a_plain_loop(name, baseline):
    tree = random_tree(7, 3, 3, prompts=2, mismatch=0.6)
    reward = np.random.default_rng(7).random(tree.sequences)
    use = Settings(0.15, 1.3, 0.93, 1.08, 1.2, 0.15)
    m = gradients.estimate(tree, reward, name, use, baseline)
    mean, variance = slow_moments(tree, reward, name, use, baseline)
    np.testing.assert_allclose(m.mean, mean, atol=1e-14)
    assert m.variance == pytest.approx(variance, abs=1e-13)
    assert m.bias_j == pytest.approx(np.linalg.norm(mean - gradients.grad_j(tree, reward)))
    if name not in ("token_is", "seq_is"):
        loose = gradients.estimate(
            tree, reward, name, Settings(9, 1e9, 1e-9, 1e9, 1e9, 1e9), baseline
        )
        assert not np.allclose(loose.mean, m.mean)  # the thresholds do something here


@settings(max_examples=40, deadline=None)
@given(trees, st.integers(0, 10**6))
def test_unbiased_ones_and_limits(tree, seed):
    reward = np.random.default_rng(seed).random(tree.sequences)
    use = Settings(ratio_cap=1.5)
    found = gradients.estimators(tree, reward, use)
    assert found["token_is"].bias_surrogate < ROUNDING
    assert found["seq_is"].bias_j < ROUNDING
    # Closed form of the Seq-MIS bias.
    np.testing.assert_allclose(
        found["seq_mis"].mean - gradients.grad_j(tree, reward),
        gradients.seq_mis_bias(tree, reward, 1.5),
        atol=ROUNDING,
    )
    # Variance limits.
    roll, train, top = gradients.score_moments(tree, reward)
    the = exact.law(tree)
    kept = (the.w <= 1.5).astype(float)
    tight = 1.5 * gradients.score_moments(tree, reward * kept)[1]
    assert found["seq_mis"].variance <= tight + ROUNDING
    assert tight <= 1.5 * train + ROUNDING and tight <= 1.5**2 * roll + ROUNDING
    assert found["geo_mask"].variance <= roll + ROUNDING
    whole = exact.sequence_divergences(tree)
    assert found["seq_is"].variance <= top**2 * (1 + float(whole.chi2)) + ROUNDING
    # No weights at all: bias at most 2 max|f| TV; truncation: max|f| E_train (1 - C/W)_+.
    everything = Settings(geo_low=1e-9, geo_high=1e9, ratio_cap=1.5)
    plain = gradients.estimate(tree, reward, "geo_mask", everything)
    assert plain.bias_j <= 2 * top * float(whole.tv) + ROUNDING
    lost = float(the.q @ np.maximum(1 - 1.5 / the.w, 0))
    assert found["seq_tis"].bias_j <= top * lost + ROUNDING
    assert gradients.geometric_log_ratio(tree) == pytest.approx(
        -exact.summary(tree).seq_kl / tree.length, abs=ROUNDING
    )


@settings(max_examples=40, deadline=None)
@given(trees, st.integers(0, 10**6), st.floats(0.3, 5))
def test_each_limit_holds(tree, seed, cap):
    reward = np.random.default_rng(seed).random(tree.sequences)
    for name, (value, limit) in gradients.limits(tree, reward, cap).items():
        assert value <= limit + ROUNDING, name


def test_limits_are_of_the_right_size():
    tree = random_tree(5, 3, 3, mismatch=0.4)
    found = gradients.limits(tree, reward_of(tree), 1.5)
    assert all(value > 0.02 * limit for value, limit in found.values())


def test_geo_mask_is_biased_even_when_it_accepts_everything():
    tree = random_tree(5, 3, 4, mismatch=0.4)
    reward = reward_of(tree)
    m = gradients.estimate(tree, reward, "geo_mask", Settings(geo_low=1e-9, geo_high=1e9))
    assert m.accepted == pytest.approx(1)
    assert m.bias_j > 0.04
    # The bias is E_rollout f - E_train f.
    the = exact.law(tree)
    factor = np.tile(reward[:, None], tree.length)
    expected = gradients._mean(tree, the.p - the.q, factor)
    np.testing.assert_allclose(m.mean - gradients.grad_j(tree, reward), expected, atol=ROUNDING)


def test_truncation_trades_bias_for_variance():
    tree = random_tree(9, 3, 4, mismatch=0.5)
    reward = reward_of(tree)
    rows = gradients.truncation_sweep(tree, reward, [0.5, 1, 2, 4, 8, 1e6])
    the = exact.law(tree)
    top = gradients.score_moments(tree, reward)[2]
    for cap, bias, variance in rows:
        assert bias <= top * float(the.q @ np.maximum(1 - cap / the.w, 0)) + ROUNDING
        assert variance <= cap**2 * gradients.score_moments(tree, reward)[0] + ROUNDING
    assert rows[0][1] > 2 * rows[3][1] and rows[-1][1] < ROUNDING
    assert rows[-1][2] > 2 * rows[0][2]
    assert rows[-1][2] == pytest.approx(gradients.estimate(tree, reward, "seq_is").variance)


def test_planted_outliers_hurt_truncation_and_not_masking():
    tree = random_tree(2, 3, 4, mismatch=0.2)
    reward = reward_of(tree)
    bad = int(np.flatnonzero(reward)[0])
    biases = [gradients.outlier_bias(tree, reward, bad, share, 10.0) for share in (0, 0.01, 0.1)]
    assert biases[0]["seq_tis"] == biases[0]["seq_tis_clean"] < 1e-10  # W stays below 10 here
    assert biases[1]["seq_tis"] > 5 * biases[1]["seq_mis"] > 0
    # Seq-TIS: share * C * |f|; Seq-MIS: only the share itself is missing.
    size = np.linalg.norm(gradients.grad_j(tree, reward))
    assert biases[2]["seq_mis"] == pytest.approx(0.1 * size, rel=1e-6)


def test_ppo_leaks_and_the_leak_has_unbounded_weight():
    tree = random_tree(0, 3, 3, mismatch=1.5)
    reward = reward_of(tree)
    share, largest = gradients.ppo_leakage(tree, reward, baseline=0.5)
    assert 0.05 < share < 1 and largest > 2
    # Without negative advantages nothing leaks above the range.
    _, only_low = gradients.ppo_leakage(tree, reward)
    assert 0 < only_low < 0.8
    assert gradients.ppo_leakage(tree.with_train(tree.rollout), reward) == (0.0, 0.0)


def test_the_masked_gradient_can_point_the_other_way():
    tree = random_tree(52, 2, 3, mismatch=1.0)
    reward = (np.random.default_rng(52).random(8) < 0.5).astype(float)
    flip = gradients.masked_gradient(tree, reward, 0.3)
    assert flip.exact > 0.07 and flip.masked < -0.1
    assert flip.per_accepted == pytest.approx(flip.masked / flip.accepted)
    assert 0.2 < flip.accepted < 0.4


def test_with_a_mask_the_baseline_matters():
    tree = random_tree(52, 2, 3, mismatch=1.0)
    reward = (np.random.default_rng(52).random(8) < 0.5).astype(float)
    use = Settings(max_kl=0.3)
    masked = [gradients.estimate(tree, reward, "trm", use, b).mean for b in (0.0, 0.5)]
    full = [gradients.estimate(tree, reward, "token_is", use, b).mean for b in (0.0, 0.5)]
    assert np.linalg.norm(masked[0] - masked[1]) > 0.01
    np.testing.assert_allclose(full[0], full[1], atol=1e-15)


def product_tree(pair):
    p, q = [1 - pair.p, pair.p], [1 - pair.q, pair.q]
    t = range(pair.length)
    return Tree(
        tuple(np.tile(p, (2**i, 1)) for i in t), tuple(np.tile(q, (2**i, 1)) for i in t), [1.0]
    )


@pytest.mark.parametrize("q", [0.35, 0.47])
def test_product_estimators_equal_enumeration(q):
    pair = BernoulliProduct(0.4, q, 6)
    tree = product_tree(pair)
    ones = tree.tokens().sum(axis=1)
    pay = np.array([0.0, 0.2, 0.1, 0.9, 0.4, 1.0, 0.3])
    use = Settings(
        clip=0.1, ratio_cap=1.1, geo_low=0.97, geo_high=1.05, token_cap=1.05, max_kl=0.01
    )
    found = gradients.product_estimators(pair, pay, use)
    the = exact.law(tree)
    rho = gradients._rho(tree)
    for name in ESTIMATORS:
        weights = gradients._weights(tree, name, pay[ones], use)
        score = tree.tokens() - q  # derivative of log train(y_t) in the shared logit
        g = pay[ones] * (weights * score).sum(axis=1)
        mean, bias, variance = found[name]
        assert mean == pytest.approx(float(the.p @ g), abs=1e-12), name
        assert variance == pytest.approx(float(the.p @ g**2) - mean**2, abs=1e-11), name
        truth = float(the.q @ (pay[ones] * score.sum(axis=1)))
        assert bias == pytest.approx(mean - truth, abs=1e-12), name
    assert rho.shape == (64, 6)


def test_token_is_bias_grows_quadratically_then_linearly():
    lengths = [64, 256, 1024, 4096]
    _, exponent = gradients.token_is_bias_growth(lengths, 1e-8)
    # T (T - 1) times a constant, but for terms of the order of T eps.
    leading = np.polyfit(np.log(lengths), [math.log(t * (t - 1)) for t in lengths], 1)[0]
    assert exponent == pytest.approx(leading, rel=0, abs=lengths[-1] * 1e-8)
    _, late = gradients.token_is_bias_growth([10**6, 10**7], 1e-4)
    assert late == pytest.approx(1, abs=1e-6)
    # Against the estimator itself on a policy that almost never emits the token.
    pair = BernoulliProduct(1e-9, 0.01, 30)
    found = gradients.product_estimators(pair, (np.arange(31) > 0).astype(float))
    expected, _ = gradients.token_is_bias_growth([29, 30], 0.01)
    assert found["token_is"][1] == pytest.approx(expected[1], rel=1e-5)


def test_lost_importance_mass_grows_with_length_while_acceptance_does_too():
    q = bernoulli_at_kl(0.5, 1e-3)
    expected = {
        1000: ("0.031", "0.67"),
        2000: ("0.035", "0.43"),
        5000: ("0.019", "0.14"),
        20000: ("0.0003", "0.002"),
    }
    for length, (rejected, kept) in expected.items():
        accepted, mass = gradients.importance_mass(BernoulliProduct(0.5, q, length), 5.0)
        assert 1 - accepted == quoted(rejected)
        assert mass == quoted(kept)
        assert 1 - accepted <= 1 / 5  # Markov


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: gradients.estimate(random_tree(0, 2, 2), [0, 1, 0, 1], "ppo"),
            "Unknown estimator 'ppo'",
        ),
        (lambda: gradients.grad_j(random_tree(0, 2, 2), [0, 1]), r"shape \(4,\), got \(2,\)"),
        (
            lambda: gradients.product_estimators(BernoulliProduct(0.5, 0.5, 3), [0, 1]),
            r"shape \(4,\), got \(2,\)",
        ),
        (
            lambda: gradients.importance_mass(BernoulliProduct(0.5, 0.5, 3), 0),
            "ratio_cap must be > 0, got 0",
        ),
        (
            lambda: gradients.outlier_bias(random_tree(0, 2, 2), [0, 1, 0, 1], 0, 2.0, 2.0),
            r"share must lie in \[0, 1\], got 2",
        ),
    ],
)
def test_bad_input_is_one_sentence_with_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_settings_are_frozen_and_replaceable():
    assert replace(Settings(), clip=0.1).clip == 0.1
