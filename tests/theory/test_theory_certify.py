# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory import certify, exact
from theory.bounds import sharp
from theory.mdp.adversarial import branch_then_binary
from theory.mdp.product import BernoulliProduct
from theory.mdp.tree import random_tree

ROUNDING = 1e-12

trees = st.one_of(
    st.builds(
        random_tree,
        st.integers(0, 10**6),
        st.integers(2, 3),
        st.integers(1, 5),
        mismatch=st.floats(0.05, 2),
        eos=st.booleans(),
        zero=st.sampled_from([0.0, 0.2]),
    ),
    st.builds(
        random_tree,
        st.integers(0, 10**6),
        st.just(3),
        st.integers(1, 4),
        mismatch=st.floats(0.05, 1),
        outside=st.just(0.3),
    ),
)


def token_arrays(tree):
    """Log rho, kl and row maximum of the log-ratio at every token of every sequence."""
    found = exact.token_statistics(tree)
    return found.log_ratio, found.kl, found.max_log_ratio


def mean(weights, values):
    return float(np.where(weights > 0, weights * np.where(weights > 0, values, 0), 0).sum())


@settings(max_examples=150, deadline=None)
@given(trees, st.integers(0, 10**6), st.floats(0.0, 0.5))
def test_c1_and_c2_hold_exactly_on_trees(tree, seed, delta):
    the = exact.law(tree)
    reward = np.random.default_rng(seed).random(tree.sequences)
    v = exact.values(tree, reward)
    gain = v.j_train - v.j_rollout
    with np.errstate(divide="ignore"):
        log_w = np.log(the.w)
    assert mean(the.p, certify.log_statistic(reward, log_w)) <= gain + ROUNDING
    # C1 is L' minus the rewarded k3 terms.
    other = v.surrogate - mean(the.p, reward * the.k3_sum)
    if np.isfinite(other):
        assert mean(the.p, certify.log_statistic(reward, log_w)) == pytest.approx(other, abs=1e-10)
    _, kl, _ = token_arrays(tree)
    keep = kl.max(axis=1) <= delta
    statistic = certify.mask_statistic(reward, log_w, keep)
    assert mean(the.p, statistic) <= gain + ROUNDING
    # Any function of the sequence may be the mask.
    keep = np.random.default_rng(seed + 1).random(tree.sequences) < 0.5
    assert mean(the.p, certify.mask_statistic(reward, log_w, keep)) <= gain + ROUNDING


def frozen_tree(tree, is_open):
    """Train where the gate is open: the gate per (sequence, t) is a function of the context."""
    train = []
    for t, (p, q) in enumerate(zip(tree.rollout, tree.train, strict=True)):
        flag = np.zeros(p.shape[0], bool)
        flag[tree.contexts(t)] = is_open[:, t]
        train.append(np.where(flag[:, None], q, p))
    return tree.with_train(train)


def slow_gate(log_ratio, kl, top, mode, delta, cap, b, k, ratio_cap=math.inf):
    """The gates once more, token by token."""
    out = np.zeros(kl.shape, bool)
    for i in range(kl.shape[0]):
        spent = drift = spent_kl = 0.0
        closed = False
        for t in range(kl.shape[1]):
            good = kl[i, t] <= delta and top[i, t] <= cap
            if mode in ("budget", "drift"):
                used = spent if mode == "budget" else abs(drift)
                good = good and used <= b and spent_kl <= k
            closed = closed or not good
            out[i, t] = good if mode == "token" else not closed
            if out[i, t]:
                step = min(math.exp(log_ratio[i, t]), ratio_cap) - 1
                spent += abs(step)
                drift += step
                spent_kl += kl[i, t]
    return out


@settings(max_examples=120, deadline=None)
@given(
    trees,
    st.integers(0, 10**6),
    st.sampled_from(["token", "prefix", "budget", "drift"]),
    st.floats(0.001, 0.5),
    st.floats(0.05, 1.5),
)
def test_c3_holds_exactly_on_trees(tree, seed, mode, delta, cap):
    b, k = 0.4, 0.08
    the = exact.law(tree)
    log_ratio, kl, top = token_arrays(tree)
    g = certify.gate(
        log_ratio,
        kl,
        max_kl=delta,
        row_max_log_ratio=top,
        max_log_ratio=cap,
        mode=mode,
        shift_budget=b,
        kl_budget=k,
    )
    frozen = frozen_tree(tree, slow_gate(log_ratio, kl, top, mode, delta, cap, b, k))
    law, found = exact.law(frozen), exact.summary(frozen)
    seen = the.p > 0
    # The statistics are those of the frozen policy.
    assert np.max(np.abs(law.s - g.shift)[seen]) < 1e-10
    assert found.seq_kl == pytest.approx(mean(the.p, g.kl), abs=1e-12)
    assert found.max_kl <= delta + ROUNDING
    assert found.outside_mass == 0
    # The announced ranges hold.
    assert np.all(g.shift[seen] >= g.shift_range[0] - ROUNDING)
    assert np.all(g.shift[seen] <= g.shift_range[1] + ROUNDING)
    assert np.all(g.kl[seen] <= g.kl_limit + ROUNDING)
    # Error and hit terms.
    reward = np.random.default_rng(seed).random(tree.sequences)
    v = exact.values(tree, reward)
    surrogate = mean(the.p, reward * g.shift)
    d = mean(the.p, g.kl)
    error = min(
        d,
        sharp.chi2_from_ratio(tree.length, delta, cap).value,
        sharp.dyadic(tree.length, max_kl=delta).value,
    )
    hit_frozen = float(law.q[g.hit].sum())
    hit_rollout = float(the.p[g.hit].sum())
    assert abs(exact.values(frozen, reward).error) <= error + ROUNDING
    assert v.j_train - v.j_rollout >= surrogate - error - hit_frozen - ROUNDING
    assert hit_frozen <= certify.binary_kl_inverse(min(hit_rollout, 1.0), d) + 1e-9


@settings(max_examples=120, deadline=None)
@given(
    trees,
    st.integers(0, 10**6),
    st.sampled_from(["token", "prefix", "budget", "drift"]),
    st.floats(0.001, 0.5),
    st.floats(1.0, 1.5),
)
def test_c3_with_truncated_ratios_holds_exactly_on_trees(tree, seed, mode, delta, ratio_cap):
    b, k = 0.3, 0.08
    the = exact.law(tree)
    log_ratio, kl, top = token_arrays(tree)
    g = certify.gate(
        log_ratio, kl, max_kl=delta, mode=mode, shift_budget=b, kl_budget=k, ratio_cap=ratio_cap
    )
    gate = slow_gate(log_ratio, kl, top, mode, delta, math.inf, b, k, ratio_cap)
    frozen = frozen_tree(tree, gate)
    seen = the.p > 0
    assert exact.summary(frozen).seq_kl == pytest.approx(mean(the.p, g.kl), abs=1e-12)
    assert np.all(g.shift[seen] <= exact.law(frozen).s[seen] + 1e-10)  # a lower bound of it
    low, high = g.shift_range
    assert np.all((g.shift[seen] >= low - ROUNDING) & (g.shift[seen] <= high + ROUNDING))
    assert math.isfinite(high)  # without any row maximum
    reward = np.random.default_rng(seed).random(tree.sequences)
    v = exact.values(tree, reward)
    hit_rollout = min(float(the.p[g.hit].sum()), 1.0)
    hit_frozen = certify.binary_kl_inverse(hit_rollout, mean(the.p, g.kl))
    lower = mean(the.p, reward * g.shift) - mean(the.p, g.kl) - hit_frozen
    assert v.j_train - v.j_rollout >= lower - 1e-9


def test_the_drift_budget_does_not_shrink_with_length():
    """At a fixed total KL the sum of |rho - 1| grows like sqrt(T), the running sum does not."""
    rng = np.random.default_rng(0)
    hits = {}
    for length in (16, 1024):
        pair = BernoulliProduct(0.5, 0.5 + 0.2 / math.sqrt(length), length)
        _, log_ratio = sample_rollouts(pair, 400, rng)
        kl = np.full(log_ratio.shape, pair.token["max_kl"])
        for mode in ("budget", "drift"):
            g = certify.gate(
                log_ratio, kl, max_kl=0.1, mode=mode, shift_budget=1.5, kl_budget=1.0, ratio_cap=2.0
            )
            hits[mode, length] = int(g.hit.sum())
    assert hits["budget", 16] > 200 and hits["budget", 1024] == 400  # 16 * 0.1 = 1.6, 1024 -> 12.8
    assert hits["drift", 16] < 10 and hits["drift", 1024] < 10  # 1.5 is 3.75 standard deviations


def test_an_unknown_horizon_enters_nothing():
    rng = np.random.default_rng(2)
    ratio, kl = rng.normal(0, 0.01, (500, 4)), np.full((500, 4), 1e-6)
    made = {}
    for horizon in (None, 9, math.inf):
        g = certify.gate(
            ratio,
            kl,
            max_kl=1e-6,
            row_max_log_ratio=np.full((500, 4), 0.05),
            max_log_ratio=0.1,
            mode="drift",
            kl_budget=1.0,
            horizon=horizon,
        )
        made[horizon] = g.kl_limit, certify.frozen_certificate(np.ones(500), g)
    assert made[None][0] == pytest.approx(4e-6) and made[9][0] == pytest.approx(9e-6)
    assert made[math.inf][0] == pytest.approx(1 + 1e-6)
    errors = [c.parts["error_bound"] for _, c in made.values()]
    assert errors[0] < errors[1] < errors[2]
    with pytest.raises(ValueError, match=r"horizon 3 is below the 4 tokens"):
        certify.gate(ratio, kl, max_kl=1.0, horizon=3)
    with pytest.raises(ValueError, match=r"ratio_cap must be a number >= 1, got 0\.5"):
        certify.gate(ratio, kl, max_kl=1.0, ratio_cap=0.5)


@settings(max_examples=150, deadline=None)
@given(trees, st.integers(0, 10**6), st.floats(0.01, 2.0), st.floats(0.0, 0.5))
def test_c0_holds_exactly_on_trees_and_dominates_c2(tree, seed, k, delta):
    the = exact.law(tree)
    reward = np.random.default_rng(seed).random(tree.sequences)
    v = exact.values(tree, reward)
    step = np.minimum(the.w, 1 + k) - 1
    assert mean(the.p, reward * step) <= v.j_train - v.j_rollout + ROUNDING
    with np.errstate(divide="ignore"):
        log_w = np.log(the.w)
    keep = (token_arrays(tree)[1].max(axis=1) <= delta) & (np.abs(log_w) <= k)
    assert np.all(reward * step >= certify.mask_statistic(reward, log_w, keep) - ROUNDING)


def test_truncated_weight_certificate_is_its_formula():
    log_w = np.array([0.0, -np.inf, 0.2, 3.0, np.nan] * 40)
    reward = np.tile([2.0, 3.0, 1.5, 3.0, 2.0], 40)
    c = certify.truncated_weight_certificate(
        reward, log_w, max_weight=2.5, reward_range=(1.0, 3.0), alpha=0.1
    )
    step = np.tile([0.0, -1.0, math.expm1(0.2), 1.5, -1.0], 40)
    x = (reward - 1) * step
    expected = certify.empirical_bernstein(x, -2.0, 3.0, 0.1)
    assert c.lower_bound == pytest.approx(expected.lower, rel=1e-12)
    assert c.parts["truncated"] == 0.2
    with pytest.raises(ValueError, match=r"max_weight must be a finite number > 1, got 1"):
        certify.truncated_weight_certificate(reward / 3, log_w, max_weight=1)


def test_the_betting_limit_covers_and_is_the_largest_such_mean():
    x = [3.1, 3.6, 3.0, 3.5]
    i = certify.nonnegative_lower(x, 0.05)
    bets = 2.0 ** -np.arange(8)

    def wealth(values, m):
        """What the bets against a mean m have made of 1; the more, the smaller m is."""
        return np.prod(1 + bets * (np.array(values)[:, None] / m - 1), axis=0) @ bets / bets.sum()

    assert wealth(x, i.lower) == pytest.approx(20, rel=1e-9)
    assert certify.nonnegative_lower([0.0, 0.0], 0.05).lower == 0
    assert certify.nonnegative_lower([1.0, math.inf], 0.05).upper == math.inf
    with pytest.raises(ValueError, match="must be a number >= 0, got -1"):
        certify.nonnegative_lower([1.0, -1.0], 0.05)
    # 2000 batches from a heavy tail at alpha = 0.1; above 260 failures: Chernoff, below 1e-3. The
    # limit fails exactly where the bets against the true mean have won.
    rng = np.random.default_rng(3)
    draws, true = rng.lognormal(0, 1.5, (2000, 30)), math.exp(1.5**2 / 2)
    won = np.array([wealth(d, true) > 1 / 0.1 for d in draws])
    assert 0 < won.sum() <= 260
    for d in draws[won][:20]:
        assert certify.nonnegative_lower(d, 0.1).lower > true
    for d in draws[~won][:40]:
        assert certify.nonnegative_lower(d, 0.1).lower <= true
    lower = [certify.nonnegative_lower(d, 0.1).lower for d in rng.exponential(1, (50, 400))]
    assert np.median(lower) > 0.75  # and it is not the trivial limit


def test_a_baseline_changes_the_noise_and_not_the_mean():
    rng = np.random.default_rng(6)
    reward, shift = 0.9 + 0.05 * rng.random(4000), rng.normal(0, 0.3, 4000)
    kl = np.full(4000, 0.01)
    plain = certify.seq_kl_certificate(reward, shift, kl)
    based = certify.seq_kl_certificate(reward, shift, kl, baseline=0.925)
    expected = certify.clt((reward - 0.925) * shift - kl, 0.05)
    assert based.lower_bound == pytest.approx(expected.lower, rel=1e-12)
    assert based.parts["radius"] < 0.05 * plain.parts["radius"]


@settings(max_examples=60, deadline=None)
@given(trees, st.integers(0, 10**6), st.floats(-1, 1))
def test_the_baseline_has_mean_zero_with_the_outside_mass(tree, seed, baseline):
    the = exact.law(tree)
    outside = np.zeros(the.p.shape)
    for t in range(tree.length):
        outside += the.rows[t].outside[tree.contexts(t)]
    assert mean(the.p, baseline * (the.s + outside)) == pytest.approx(0, abs=1e-12)


def test_gate_ignores_padding_and_closes_on_nan():
    log_ratio, kl = np.full((2, 3), 0.1), np.full((2, 3), 0.01)
    mask = np.array([[True, True, False], [True, True, True]])
    kl[0, 2] = np.nan
    g = certify.gate(log_ratio, kl, mask, max_kl=0.05, mode="prefix")
    assert g.hit.tolist() == [False, False]
    np.testing.assert_allclose(g.shift, [2 * math.expm1(0.1), 3 * math.expm1(0.1)])
    kl[1, 1] = np.nan
    g = certify.gate(log_ratio, kl, mask, max_kl=0.05, mode="prefix")
    assert g.hit.tolist() == [False, True]
    assert g.kl.tolist() == [0.02, 0.01]


def sample_rollouts(pair, n, rng):
    ones = rng.random((n, pair.length)) < pair.p
    up, down = math.log(pair.q / pair.p), math.log((1 - pair.q) / (1 - pair.p))
    return ones, np.where(ones, up, down)


def test_finite_sample_certificates_cover():
    """400 batches at alpha = 0.05 each.

    A valid certificate fails at most 20 times in expectation; more than 40 failures has probability
    below exp(-400 KL(0.1 || 0.05)) = 1.3e-3 by Chernoff, and the seed is fixed.
    """
    pair = BernoulliProduct(0.5, 0.53, 6)
    row_top = np.full((500, 6), max(math.log(0.53 / 0.5), math.log(0.47 / 0.5)))
    kl = np.full((500, 6), pair.token["max_kl"])
    gain = sum(math.comb(6, k) * (0.53**k * 0.47 ** (6 - k) - 0.5**6) for k in range(4, 7))
    rng = np.random.default_rng(0)
    failures = {"sequence_mask": 0, "frozen_budget": 0}
    for _ in range(400):
        ones, log_ratio = sample_rollouts(pair, 500, rng)
        reward = (ones.sum(1) >= 4).astype(float)
        weight = log_ratio.sum(1)
        made = [
            certify.sequence_mask_certificate(
                reward, weight, np.ones(500, bool), max_abs_log_weight=0.3
            ),
            certify.frozen_certificate(
                reward,
                certify.gate(
                    log_ratio,
                    kl,
                    max_kl=0.01,
                    row_max_log_ratio=row_top,
                    max_log_ratio=0.1,
                    shift_budget=0.5,
                    kl_budget=0.05,
                ),
            ),
        ]
        for c in made:
            assert c.label == "guarantee" and c.finite_sample
            failures[c.name] += c.lower_bound > gain
    assert all(count <= 40 for count in failures.values())


def test_a_certificate_can_certify_and_tells_what_it_spent():
    pair = BernoulliProduct(0.5, 0.53, 6)
    rng = np.random.default_rng(1)
    n = 400_000
    ones, log_ratio = sample_rollouts(pair, n, rng)
    reward = (ones.sum(1) >= 4).astype(float)
    top = np.full((n, 6), 0.0583)
    g = certify.gate(
        log_ratio,
        np.full((n, 6), pair.token["max_kl"]),
        max_kl=0.002,
        row_max_log_ratio=top,
        max_log_ratio=0.0619,
        shift_budget=0.4,
        kl_budget=0.02,
    )
    c = certify.frozen_certificate(reward, g)
    assert c.certifies_improvement and c.confidence == 0.95
    terms = c.parts
    assert c.lower_bound == pytest.approx(
        terms["surrogate"] - terms["surrogate_radius"] - terms["error_bound"] - terms["hit_bound"]
    )
    n_half = int(terms["rollouts_to_halve_radius"])
    assert n < n_half < 5 * n
    used = certify.frozen_certificate(reward, g, held_out=False)
    assert not used.rigorous and not used.certifies_improvement
    assert used.label.startswith("not a guarantee: the rollouts are the batch")


def test_frozen_certificate_spends_a_third_of_alpha_on_each_term():
    rng = np.random.default_rng(4)
    kl = np.where(rng.random((900, 3)) < 0.02, 0.5, 0.004)
    ratio = rng.normal(0, 0.05, (900, 3))
    g = certify.gate(
        ratio,
        kl,
        max_kl=0.01,
        row_max_log_ratio=np.full((900, 3), 0.2),
        max_log_ratio=0.3,
        mode="prefix",
    )
    assert 0 < g.hit.sum() < 100
    reward = rng.random(900) * 2 + 1
    c = certify.frozen_certificate(reward, g, alpha=0.06, reward_range=(1.0, 3.0))
    hits = certify.clopper_pearson(int(g.hit.sum()), 900, 0.02)
    divergence = certify.empirical_bernstein(g.kl, 0, 3 * 0.01, 0.02)
    high = 3 * math.expm1(0.3) * 2
    gain = certify.empirical_bernstein((reward - 1) * g.shift, -6.0, high, 0.02)
    worst = certify.binary_kl_inverse(hits.upper, divergence.upper)
    assert c.parts["hit_bound"] == worst > hits.upper
    assert c.parts["seq_kl_radius"] == pytest.approx(divergence.upper - divergence.estimate)
    error = min(
        divergence.upper,
        sharp.chi2_from_ratio(3, 0.01, 0.3).value,
        sharp.dyadic(3, max_kl=0.01).value,
    )
    assert c.lower_bound == pytest.approx(gain.lower - 2 * (error + worst), rel=1e-12)


def test_asymptotic_certificates_use_the_one_sided_student_quantile_and_the_span():
    rng = np.random.default_rng(5)
    reward, shift, kl = 1 + 2 * rng.random(400), rng.normal(0, 0.2, 400), rng.random(400) * 0.02
    c = certify.seq_kl_certificate(reward, shift, kl, alpha=0.05, reward_range=(1.0, 3.0))
    x = (reward - 1) * shift - 2 * kl
    expected = x.mean() - 1.648681533555426 * x.std(ddof=1) / 20  # Student, 399 degrees of freedom
    assert c.lower_bound == pytest.approx(expected, rel=1e-12)
    interval = certify.clt(x, 0.05)
    assert interval.upper - interval.estimate == pytest.approx(interval.estimate - interval.lower)
    two = certify.clt([0.0, 2.0], 0.05)
    assert two.upper == pytest.approx(1 + math.tan(0.45 * math.pi), rel=1e-12)  # Cauchy quantile
    hopeless = certify.seq_kl_certificate(reward, shift, kl + 50, reward_range=(1.0, 3.0))
    assert hopeless.lower_bound == -2  # the span: no more can be lost


def test_budget_gate_makes_the_range_useful_and_raw_sums_do_not():
    """N = 1000, T = 4096, alpha = 0.05: the second Bernstein term of D at delta = 0.05 is 1.76."""
    length, delta, n = 4096, 0.05, 1000
    second = 7 * length * delta * math.log(2 / 0.05) / (3 * (n - 1))
    assert second == pytest.approx(1.76, abs=0.01)
    shift = np.zeros((2, length))
    kl = np.zeros((2, length))
    raw = certify.gate(shift, kl, max_kl=delta, mode="token")
    budget = certify.gate(shift, kl, max_kl=delta, mode="budget", kl_budget=0.1)
    assert raw.kl_limit == pytest.approx(length * delta)
    assert budget.kl_limit == pytest.approx(0.15)
    capped = certify.gate(
        shift,
        kl,
        max_kl=delta,
        row_max_log_ratio=shift,
        max_log_ratio=math.log(2),
        shift_budget=1.0,
    )
    assert capped.shift_range == (-2.0, 2.0)


def test_without_a_ratio_cap_the_frozen_certificate_is_asymptotic():
    g = certify.gate(np.full((50, 2), 0.1), np.full((50, 2), 1e-3), max_kl=0.01, mode="prefix")
    c = certify.frozen_certificate(np.ones(50), g)
    assert c.label == "asymptotic" and not c.certifies_improvement


def test_empirical_bernstein_against_its_formula_and_coverage():
    x = np.random.default_rng(0).random(200)
    i = certify.empirical_bernstein(x, 0, 1, 0.1)
    radius = math.sqrt(2 * x.var(ddof=1) * math.log(20) / 200) + 7 * math.log(20) / (3 * 199)
    assert i.upper - i.estimate == pytest.approx(radius, rel=1e-12)
    assert i.estimate - i.lower == pytest.approx(radius, rel=1e-12)
    # 2000 batches at alpha = 0.1: above 260 failures has Chernoff probability below 1e-3.
    rng = np.random.default_rng(1)
    failures = 0
    for _ in range(2000):
        batch = (rng.random(60) < 0.3).astype(float)
        failures += certify.empirical_bernstein(batch, 0, 1, 0.1).lower > 0.3
    assert failures <= 260


def test_clopper_pearson_inverts_the_binomial_tail():
    from scipy.stats import binom

    i = certify.clopper_pearson(3, 50, 0.05)
    assert binom.cdf(3, 50, i.upper) == pytest.approx(0.05, rel=1e-9)
    assert binom.sf(2, 50, i.lower) == pytest.approx(0.05, rel=1e-9)
    assert certify.clopper_pearson(50, 50, 0.05).upper == 1.0
    for n in (256, 1024, 4096):
        upper = certify.rejection_quantile(n, n).upper
        assert upper == pytest.approx(1 - 0.05 ** (1 / n), rel=1e-9)


def test_rollouts_needed_is_the_smallest_number():
    n = certify.rollouts_needed(0.2, 3.0, 0.05, 0.05)
    assert certify.bernstein_radius(0.2, 3.0, n, 0.05) <= 0.05
    assert certify.bernstein_radius(0.2, 3.0, n - 1, 0.05) > 0.05


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.01, 0.4, 0.999, 1.0])
@pytest.mark.parametrize("d", [0.0, 1e-6, 0.01, 1.0, 30.0, math.inf])
def test_binary_kl_inverse(p, d):
    b = certify.binary_kl_inverse(p, d)
    assert p <= b <= 1
    if 0 < p < 1 and 0 < d < 10:
        kl = p * math.log(p / b) + (1 - p) * (math.log1p(-p) - math.log1p(-b))
        # Conditioning: d kl / d b = (b - p) / (b (1 - b)), times the solver's 1e-15.
        assert kl == pytest.approx(d, abs=1e-12 + 4e-15 / (b * (1 - b)))
    if p == 0 and d < 30:
        assert b == pytest.approx(1 - math.exp(-d), rel=1e-15 / max(d, 1e-9) + 1e-12)


def test_same_batch_label_everywhere():
    n = 20
    r, z = np.ones(n), np.zeros(n)
    for c in (
        certify.log_certificate(r, z, held_out=False),
        certify.sequence_mask_certificate(r, z, np.ones(n, bool), held_out=False),
        certify.seq_kl_certificate(r, z, z, held_out=False),
    ):
        assert c.label.startswith("not a guarantee") and not c.rigorous


def test_why_the_same_batch_is_no_guarantee():
    """A policy fitted to the batch shows a gain on the batch when the true gain is zero.

    Reward is a coin that no token influences; train raises the probability of the rewarded tokens
    by 5 percent. On the batch the seq-kl certificate is positive, on fresh rollouts it is not.
    """
    rng = np.random.default_rng(0)
    vocab, n = 4000, 800
    tokens = rng.permutation(vocab)[:n]
    reward = (rng.random(n) < 0.5).astype(float)
    tilt = np.ones(vocab)
    tilt[tokens[reward == 1]] = 1.3
    tilt /= tilt.mean()
    kl = float(-np.log(tilt).mean())
    shift = tilt[tokens] - 1
    same = certify.seq_kl_certificate(reward, shift, np.full(n, kl), held_out=False)
    assert same.lower_bound > 0 and not same.certifies_improvement
    fresh = rng.integers(vocab, size=n)
    coin = (rng.random(n) < 0.5).astype(float)
    honest = certify.seq_kl_certificate(coin, tilt[fresh] - 1, np.full(n, kl))
    assert honest.lower_bound <= 0


def test_sampled_maximum_is_refused_for_a_reason():
    """Every context with a realistic chance of being sampled has KL 0; one unseen does not."""
    tree = branch_then_binary(6, 1e-7, 1e-7, 1e-9, 1 - 1e-9)
    with pytest.raises(certify.NotAGuarantee, match=r"0\.25 over 2 contexts"):
        certify.from_sampled_maximum(6, [0.1, 0.25])
    # One thousand rollouts stay outside the branch with probability 1 - 1e-4; there KL is zero.
    found = exact.summary(tree)
    assert found.max_kl > 10
    outside_branch = [rows.kl_rollout_train[0] for rows in exact.law(tree).rows[1:]]
    assert max(outside_branch) == 0
    assert exact.sup_error(tree) > 0
    # With the branch's mass at one half, the same construction costs an error above 1.
    assert exact.sup_error(branch_then_binary(6, 0.5, 0.5, 1e-9, 1 - 1e-9)) > 1


def test_product_of_averages_is_labelled_and_really_fails():
    tree = branch_then_binary(11, 0.001, 0.001, 0.5, 0.8)
    found = exact.summary(tree)
    wrong = certify.from_products_of_averages(found.mean_tv, found.mean_kl)
    assert not wrong.rigorous
    assert wrong.value == pytest.approx(2.4e-4, rel=2e-2)
    assert wrong.value < exact.sup_error(tree)


def test_vacuity_of_the_published_example():
    mixed = certify.vacuity(8.192, 4096, max_kl=1e-4, seq_kl=0.01)
    assert not mixed.below_range and not mixed.certifying
    assert mixed.attainable == pytest.approx(4.53, abs=5e-3)
    assert not certify.vacuity(4.096, 4096, max_kl=1e-4, seq_kl=0.01).below_range
    ours = certify.vacuity(sharp.seq_kl(0.01), 4096, max_kl=1e-4, seq_kl=0.01, surrogate=0.02)
    assert ours.below_range and ours.certifying and ours.instance
    assert certify.vacuity(0.1, 10, surrogate=0.05).instance is False


def test_thresholds_of_the_certifying_test():
    """Where each bound can certify, given KL information only."""
    from theory.bounds import paper

    delta = 1e-4
    for length, expected in ((71, True), (72, False)):
        v = certify.vacuity(paper.classical_kl(length, delta), length, max_kl=delta)
        assert v.certifying is expected
    # Pinsker-marginal: T delta below 9/32 = 0.28125 (closed form).
    for product, expected in ((0.281, True), (0.2815, False)):
        d = product / 10**6
        v = certify.vacuity(paper.pinsker_marginal_kl(10**6, d, form="closed"), 10**6, max_kl=d)
        assert v.certifying is expected
    # Mixed: T delta below 1/8 whatever D_seq is.
    for product, expected in ((0.1249, True), (0.1251, False)):
        d = product / 1000
        v = certify.vacuity(paper.mixed_kl(1000, d, product / 3), 1000, seq_kl=product / 3)
        assert v.certifying is expected


def test_seq_kl_can_certify_only_below_one_over_pi():
    """Gaussian regime: sup L' = sqrt(D/pi), which exceeds D exactly when D < 1/pi."""
    for total, expected in ((0.30, True), (0.33, False)):
        from theory.mdp.adversarial import bernoulli_at_kl

        q = bernoulli_at_kl(0.5, total / 20_000)
        pair = BernoulliProduct(0.5, q, 20_000)
        assert pair.sup_surrogate == pytest.approx(math.sqrt(total / math.pi), rel=2e-3)
        assert (pair.seq_kl < pair.sup_surrogate) is expected


def test_rewards_with_an_offset_use_the_distance_to_the_smallest_one():
    weight = np.random.default_rng(0).normal(0, 0.1, 300)
    base = np.random.default_rng(1).random(300)
    plain = certify.log_certificate(base, weight)
    moved = certify.log_certificate(base + 5, weight, reward_range=(5.0, 6.0))
    assert moved.lower_bound == pytest.approx(plain.lower_bound, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: certify.empirical_bernstein([0.1, 2.0], 0, 1, 0.1), "A value 2 lies outside"),
        (
            lambda: certify.empirical_bernstein([0.1], 0, 1, 0.1),
            r"At least 2 rollouts .* got \(1,\)",
        ),
        (lambda: certify.clt([0.1, 0.2], 0.0), "alpha must lie strictly between 0 and 1, got 0"),
        (lambda: certify.clopper_pearson(5, 4, 0.1), r"hits must lie in \[0, 4\], got 5"),
        (lambda: certify.log_certificate([1.5, 0], [0, 0]), r"range \[0, 1\], got 1.5"),
        (lambda: certify.log_certificate([0, 0], [0, 0], reward_range=(1, 1)), r"got \[1, 1\]"),
        (lambda: certify.seq_kl_certificate([0, 1], [0, 0], [0.1, -1]), "got -1"),
        (
            lambda: certify.gate([[0.1]], [[0.1]], max_kl=1, max_log_ratio=0.5),
            "needs row_max_log_ratio",
        ),
        (lambda: certify.gate([[0.1]], [[0.1]], max_kl=1, mode="open"), "got 'open'"),
        (lambda: certify.gate([0.1], [0.1], max_kl=1), r"shape \(N, T\), got \(1,\)"),
        (
            lambda: certify.sequence_mask_certificate(
                [0, 1], [0, 0], [True, True], max_abs_log_weight=-1
            ),
            "must be > 0, got -1",
        ),
        (lambda: certify.rollouts_needed(1, 1, 0, 0.1), "radius must be > 0, got 0"),
    ],
)
def test_bad_input_is_one_sentence_with_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
