# SPDX-License-Identifier: Apache-2.0
import math
import time

import mpmath
import numpy as np
import pytest

from theory.bounds import every_bound, paper, sharp
from theory.records import AVERAGE, MAXIMUM

T, DELTA = 4096, 1e-4


def test_headline_numbers():
    assert sharp.seq_kl(0.01).value == 0.01
    assert sharp.chi2(T, 2 * DELTA).value == pytest.approx(0.335, abs=5e-4)
    assert sharp.chi2_from_ratio(T, DELTA, math.log(2)).value == pytest.approx(0.605, abs=5e-4)
    assert sharp.forward(T, max_kl=DELTA, seq_kl=0.01).value == pytest.approx(4.06, abs=5e-3)
    assert sharp.dyadic(T, max_kl=DELTA).value == pytest.approx(2.46, abs=5e-3)
    assert sharp.split(seq_kl=0.01, seq_chi2=0.02).value == pytest.approx(0.141, abs=5e-4)
    assert sharp.seq_kl_from_max(T, DELTA).value == pytest.approx(0.4096, rel=1e-14)


def test_seq_kl_dominates_pinsker_marginal_and_mixed_on_a_dense_grid():
    horizons = np.unique(np.geomspace(2, 10**6, 120).astype(int))[:, None]
    deltas = np.concatenate([np.geomspace(1e-12, 2, 200), [2.0]])[None, :]
    from_max = sharp.seq_kl_from_max(horizons, deltas).value
    rounding = 1 + 1e-15  # at T = 2 the two are equal
    assert np.all(from_max <= paper.pinsker_marginal_kl(horizons, deltas).value * rounding)
    for share in (1e-6, 1e-3, 0.1, 0.5, 1.0):
        total = share * from_max
        assert np.all(sharp.seq_kl(total).value <= paper.mixed_kl(horizons, deltas, total).value)


def test_seq_kl_would_lose_against_pinsker_marginal_beyond_the_stated_region():
    # T = 1 is excluded for a reason: there the error is zero and so is the paper's sum.
    assert sharp.seq_kl_from_max(1, 0.1).value > paper.pinsker_marginal_kl(1, 0.1).value


@pytest.mark.parametrize("length", [1, 2, 3, 7, 50, 4096, 10**6])
@pytest.mark.parametrize("x", [0.0, 1e-14, 1e-9, 1e-7, 2e-4, 0.01, 0.3])
def test_chi2_second_moment_against_mpmath(length, x):
    with mpmath.workdps(60):
        exact = (1 + mpmath.mpf(x)) ** length - 1 - length * mpmath.mpf(x)
        ours = float(sharp.chi2_second_moment(length, x))
        if exact > 1e308:
            assert ours == np.inf
        else:
            # expm1 and log1p are good to one ulp; the exponent T log(1+X) multiplies that error.
            exponent = length * math.log1p(x)
            assert abs(ours - exact) <= 4e-15 * (10 + exponent) * abs(exact)


@pytest.mark.parametrize("m", [0.0, 1e-12, 1e-6, 1e-3, 0.1, 0.499, 0.501, 2.0, 20.0])
def test_ratio_constant_against_mpmath(m):
    with mpmath.workdps(60):
        x = mpmath.mpf(m)
        exact = 2 if m == 0 else (mpmath.e**x - 1) ** 2 / (mpmath.e**x - 1 - x)
        assert float(sharp.ratio_constant(m)) == pytest.approx(float(exact), rel=1e-14)


def test_ratio_constant_is_the_best_one():
    """(x-1)^2 <= c k3(x) on (0, e^M], with equality at e^M."""
    m = 1.3
    c = float(sharp.ratio_constant(m))
    x = np.concatenate([np.geomspace(1e-6, math.exp(m), 4000)])
    k3 = x - 1 - np.log(x)
    assert np.all((x - 1) ** 2 <= c * k3 * (1 + 1e-12) + 1e-15)
    assert (x[-1] - 1) ** 2 == pytest.approx(c * k3[-1], rel=1e-12)


def test_split_from_the_sequence_total_alone():
    for length, total in ((1, 0.02), (9, 0.5), (100, 1e-4)):
        expected = math.sqrt(total / 2) + math.sqrt(length * total / 2)
        assert sharp.split_seq_kl(length, total).value == pytest.approx(expected, rel=1e-14)
        # It is what split gives when sum Dbar takes its largest value for that total.
        flat = np.full(length, min(1.0, math.sqrt(total / length / 2)))
        assert sharp.split(seq_kl=total, mean_tv=flat).value <= expected * (1 + 1e-12)


def test_tau_takes_the_smallest_route_and_each_route_can_win():
    n = np.arange(0, 200)
    given = dict(max_tv=0.02, max_kl=0.01, max_kl_train_rollout=0.02, min_bc=0.9995, max_chi2=0.003)
    routes = {
        "max_tv": 1 - (1 - 0.02) ** n,
        "max_kl": np.minimum(np.sqrt(n * 0.01 / 2), np.sqrt(1 - np.exp(-n * 0.01))),
        "min_bc": np.sqrt(1 - 0.9995 ** (2 * n)),
        "max_chi2": np.sqrt(1.003**n - 1) / 2,
    }
    for name, expected in routes.items():
        np.testing.assert_allclose(
            sharp.tau(n, **{name: given[name]}), np.minimum(1, expected), rtol=1e-10, atol=1e-15
        )
    best = np.minimum.reduce([*routes.values(), np.ones(200)])
    np.testing.assert_allclose(sharp.tau(n, **given), best, rtol=1e-10, atol=1e-15)
    # The other direction replaces delta only when it is smaller.
    assert np.all(
        sharp.tau(n, max_kl=0.01, max_kl_train_rollout=0.002) == sharp.tau(n, max_kl=0.002)
    )


def test_forward_equals_a_plain_loop():
    eps, delta, total = 0.01, 4e-4, 0.05
    expected = 0.0
    for t in range(1, 301):
        n = t - 1
        shift = min(1, 1 - (1 - eps) ** n, math.sqrt(n * delta / 2), math.sqrt(total / 2))
        expected += 2 * eps * min(shift, math.sqrt(1 - math.exp(-n * delta)))
    value = sharp.forward(300, max_tv=eps, max_kl=delta, seq_kl=total).value
    assert value == pytest.approx(expected, rel=1e-12)


def test_halved_paper_bounds_are_never_below_forward():
    for delta, share in [(1e-4, 0.1), (1e-3, 0.5), (0.05, 1.0)]:
        total = share * 200 * delta
        ours = sharp.forward(200, max_kl=delta, seq_kl=total).value
        for bound in (
            paper.pinsker_marginal_kl(200, delta),
            paper.mixed_kl(200, delta, total),
            paper.coupling(200, math.sqrt(delta / 2)),
        ):
            assert ours <= paper.halved(bound).value * (1 + 1e-12)


def naive_dyadic(length, shift):
    table = [0.0, 0.0]
    for n in range(2, length + 1):
        table.append(
            min(table[h] + table[n - h] + 2 * shift[h] * shift[n - h] for h in range(1, n))
        )
    return table[length]


def test_dyadic_equals_a_plain_recursion_and_middle_cut_is_an_upper_bound(monkeypatch):
    shift = sharp.tau(np.arange(61), max_kl=0.02, max_tv=0.03)
    for length in (1, 2, 3, 17, 60):
        assert sharp.dyadic(length, max_kl=0.02, max_tv=0.03).value == pytest.approx(
            naive_dyadic(length, shift), rel=1e-13
        )
    full = sharp.dyadic(60, max_kl=0.02, max_tv=0.03).value
    monkeypatch.setattr(sharp, "DYADIC_FULL_SEARCH", 1)
    middle = sharp.dyadic(60, max_kl=0.02, max_tv=0.03).value
    assert full <= middle <= 1.2 * full


def test_capped_dyadic_is_below_all_of_its_caps():
    for length in (2, 9, 100):
        capped = sharp.dyadic(length, max_kl=0.01, max_chi2=0.03, capped=True).value
        assert capped <= sharp.dyadic(length, max_kl=0.01, max_chi2=0.03).value
        assert capped <= sharp.seq_kl_from_max(length, 0.01).value * (1 + 1e-12)
        assert capped <= sharp.chi2(length, 0.03).value * (1 + 1e-12)
        assert capped <= sharp.forward(length, max_kl=0.01, max_chi2=0.03).value * (1 + 1e-12)


def test_dyadic_grows_like_t_log_t_for_small_delta():
    delta = 1e-9
    for length in (2**6, 2**10):
        expected = length * delta / 2 * math.log2(length)
        assert sharp.dyadic(length, max_kl=delta).value == pytest.approx(expected, rel=1e-9)


def test_per_step_and_discounted_forms():
    horizons = np.arange(1, 2001)
    weights = 0.99 ** (horizons - 1)
    summed = sharp.per_step(sharp.seq_kl_from_max(horizons, 1e-4), 2 * weights)
    closed = sharp.seq_kl_discounted(1e-4, 0.99, 2.0)
    # The tail is w delta gamma^T (T/(1-gamma) + 1/(1-gamma)^2).
    tail = 2e-4 * 0.99**2000 * (2000 / 0.01 + 1 / 0.01**2)
    assert closed.value - summed.value == pytest.approx(tail, rel=1e-6)
    assert summed.name == "per_step_seq_kl_from_max"
    assert not summed.assumes_support
    # Against TRPO for the same information: smaller whenever 4 gamma / (1 - gamma) > 1.
    assert closed.value < paper.trpo(2 / 0.01, 0.99, math.sqrt(1e-4 / 2)).value * 2


def test_reward_range_and_outside_mass():
    b = sharp.chi2(10, 0.1)
    assert b.for_reward_range(-1, 1).value == 2 * b.value
    repaired = b.with_outside_mass(0.3)
    assert repaired.value == b.value + 0.3
    assert not repaired.assumes_support
    assert sharp.seq_kl(0.2).with_outside_mass(0.3).value == 0.2
    with pytest.raises(ValueError, match=r"low < high, got \[1, 1\]"):
        b.for_reward_range(1, 1)


def test_records_say_what_they_need():
    assert sharp.seq_kl(0.1).needs == (("seq_kl", AVERAGE),)
    assert dict(sharp.forward(5, max_kl=0.1, seq_kl=0.1).needs) == {
        "max_kl": MAXIMUM,
        "seq_kl": AVERAGE,
    }
    derived = {b.name: b for b in every_bound(10, max_kl=0.1)}["coupling"]
    assert derived.needs == (("max_kl", MAXIMUM),)
    assert "Pinsker" in derived.source
    assert all(b.rigorous for b in every_bound(10, max_kl=0.1, seq_kl=0.01, max_chi2=0.2))


def test_a_million_tokens_in_under_a_second():
    start = time.perf_counter()
    values = [b.value for b in every_bound(10**6, max_kl=1e-8, seq_kl=1e-3, max_chi2=2e-8)]
    assert all(np.isfinite(values))
    assert time.perf_counter() - start < 1.0 * 5  # five times the promise: shared machines


def test_every_bound_vectorises():
    horizons = np.array([1, 2, 30, 400])
    together = {b.name: b.value for b in every_bound(horizons, max_kl=1e-3, seq_kl=1e-3)}
    for i, length in enumerate(horizons):
        for b in every_bound(int(length), max_kl=1e-3, seq_kl=1e-3):
            value = np.broadcast_to(together[b.name], horizons.shape)[i]
            assert value == pytest.approx(b.value, rel=1e-13), b.name


def test_rows_and_maxima_broadcast():
    averages = np.random.default_rng(0).random((3, 20)) * 0.05
    kls = np.array([0.006, 0.02, 0.1])
    together = [
        sharp.backward(averages, max_kl=kls).value,
        paper.adaptive(averages, max_kl=kls).value,
        sharp.split(seq_kl=kls, mean_tv=averages, seq_chi2=[0.1, 0.2, 0.3]).value,
        paper.adaptive_linear(averages).value,
    ]
    for i in range(3):
        alone = [
            sharp.backward(averages[i], max_kl=kls[i]).value,
            paper.adaptive(averages[i], max_kl=kls[i]).value,
            sharp.split(seq_kl=kls[i], mean_tv=averages[i], seq_chi2=[0.1, 0.2, 0.3][i]).value,
            paper.adaptive_linear(averages[i]).value,
        ]
        np.testing.assert_allclose([t[i] for t in together], alone, rtol=1e-14)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: sharp.seq_kl(-1), "seq_kl must be a number >= 0, got -1"),
        (lambda: sharp.forward(5), "At least one of max_tv"),
        (lambda: sharp.forward(5, max_kl=1e-4, max_tv=0.5), "max_tv = 0.5 exceeds"),
        (lambda: sharp.tau(-1, max_tv=0.1), "must be >= 0, got -1"),
        (lambda: sharp.split(seq_kl=0.1), "needs mean_tv or seq_chi2"),
        (lambda: every_bound(5, delta=1), "Unknown quantity 'delta'"),
        (lambda: sharp.chi2(-3, 0.1), "got -3"),
    ],
)
def test_bad_input_is_one_sentence_with_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
