# SPDX-License-Identifier: Apache-2.0
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quoted import quoted
from theory import exact
from theory.bounds import every_bound
from theory.mdp.adversarial import bernoulli_at_kl
from theory.mdp.product import BernoulliProduct, multinomial_law, poisson_law, poisson_seq_kl
from theory.mdp.tree import Tree

probability = st.floats(0.02, 0.98)


def product_tree(p, q, length):
    v = len(p)
    return Tree(
        tuple(np.tile(p, (v**t, 1)) for t in range(length)),
        tuple(np.tile(q, (v**t, 1)) for t in range(length)),
        [1.0],
    )


@settings(max_examples=40, deadline=None)
@given(probability, probability, st.integers(1, 8))
def test_bernoulli_equals_enumeration(p, q, length):
    pair = BernoulliProduct(p, q, length)
    tree = product_tree([1 - p, p], [1 - q, q], length)
    found, whole = exact.summary(tree), exact.sequence_divergences(tree)
    assert pair.sup_error == pytest.approx(exact.sup_error(tree), abs=1e-12)
    assert pair.sup_surrogate == pytest.approx(exact.sup_surrogate(tree), abs=1e-12)
    assert pair.seq_tv == pytest.approx(found.seq_tv, abs=1e-12)
    assert pair.seq_kl == pytest.approx(found.seq_kl, abs=1e-12)
    assert pair.affinity == pytest.approx(float(whole.bc), abs=1e-12)
    assert pair.second_moment_of_w - 1 == pytest.approx(float(whole.chi2), rel=1e-9, abs=1e-12)
    known = found.known()
    for name, value in pair.known().items():
        np.testing.assert_allclose(value, known[name], rtol=1e-9, atol=1e-12)


def test_multinomial_equals_enumeration():
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.25, 0.35, 0.4])
    law = multinomial_law(p, q, 6)
    tree = product_tree(p, q, 6)
    assert law.p.size == 28
    assert law.sup_error == pytest.approx(exact.sup_error(tree), abs=1e-13)
    assert law.seq_tv == pytest.approx(exact.summary(tree).seq_tv, abs=1e-13)


def test_count_law_against_mpmath_at_a_length_where_w_overflows():
    t, p, q = 3000, 0.2, 0.6
    with mpmath.workdps(40):
        total = mpmath.mpf(0)
        a, b = mpmath.mpf(p), mpmath.mpf(q)
        for k in range(t + 1):
            c = mpmath.binomial(t, k)
            pk, qk = c * a**k * (1 - a) ** (t - k), c * b**k * (1 - b) ** (t - k)
            s = k * (b / a - 1) + (t - k) * ((1 - b) / (1 - a) - 1)
            total += abs(qk - pk * (1 + s))
    # gammaln(3001) is about 2e4, so a pmf carries a relative error of about 2e4 * 2^-52.
    assert BernoulliProduct(p, q, t).sup_error == pytest.approx(float(total / 2), rel=1e-10)


def test_worst_error_is_0_4839_t_delta_with_exponent_one():
    delta = 1e-8
    constant = math.sqrt(2 / math.pi) * math.exp(-0.5)  # (1/2) E|N^2 - 1|
    assert constant == pytest.approx(0.4839, abs=5e-5)
    lengths = np.array([64, 256, 1024, 8192, 30000])
    q = bernoulli_at_kl(0.5, delta)
    worst = np.array([BernoulliProduct(0.5, q, int(t)).sup_error for t in lengths])
    slopes = np.diff(np.log(worst)) / np.diff(np.log(lengths))
    assert np.all(np.abs(slopes - 1) < 0.01)
    # The Gaussian limit is reached like 1/T (lattice) and T delta (curvature).
    assert worst[-1] / (lengths[-1] * delta) == pytest.approx(constant, rel=2e-3)


def test_second_headline_column():
    q = bernoulli_at_kl(0.5, 1e-4)
    pair = BernoulliProduct(0.5, q, 4096)
    assert pair.seq_kl == pytest.approx(0.4096, rel=1e-9)
    assert pair.sup_error == pytest.approx(0.1895, abs=5e-5)
    assert pair.sup_surrogate == pytest.approx(0.361, abs=5e-4)
    assert pair.seq_tv == pytest.approx(0.349, abs=5e-4)
    value = {b.name: float(b.value) for b in every_bound(4096, **pair.known())}
    expected = {
        "classical_tv": "1677.1",
        "half_classical_tv": "838.6",
        "mixed_kl": "52.4",
        "half_mixed_kl": "26.2",
        "forward": "16.05",
        "dyadic": "2.44",
        "chi2": "0.335",
        "split": "0.802",
        "seq_kl": "0.410",
    }
    for name, figure in expected.items():
        assert value[name] == quoted(figure), name
    assert all(v >= pair.sup_error for v in value.values())


def test_chi2_certifies_where_seq_kl_does_not():
    """At T delta = 0.41 the largest L' is 0.361: only chi-square is below it; at 0.3 both are."""
    for total, seq_kl_certifies in ((0.4096, False), (0.3, True)):
        q = bernoulli_at_kl(0.5, total / 4096)
        pair = BernoulliProduct(0.5, q, 4096)
        value = {b.name: float(b.value) for b in every_bound(4096, **pair.known())}
        assert value["chi2"] < pair.sup_surrogate
        assert (value["seq_kl"] < pair.sup_surrogate) is seq_kl_certifies


def test_poisson_limit_and_its_worst_ratios():
    pair = BernoulliProduct(2e-5, 3e-5, 100_000)
    law = poisson_law(2.0, 3.0)
    # Total variation between Bin(T, p) and its Poisson limit is at most T p^2, below 1e-4 here.
    assert law.sup_error == pytest.approx(pair.sup_error, abs=1e-4)
    assert poisson_seq_kl(2.0, 3.0) == pytest.approx(pair.seq_kl, rel=1e-4)
    from scipy.optimize import brentq

    for total, expected in ((0.01, "0.58"), (0.41, "0.72"), (1.0, "0.81"), (3.0, "0.95")):
        ratios = []
        for lam in np.geomspace(1e-3, 50, 60):
            mu = brentq(
                lambda m, lam=lam, total=total: poisson_seq_kl(lam, m) - total, lam, lam + 1e4
            )
            ratios.append(poisson_law(lam, mu).sup_error / total)
        assert max(ratios) == quoted(expected)
        assert max(ratios) <= 1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: BernoulliProduct(0.0, 0.5, 3), "p must lie strictly between 0 and 1, got 0"),
        (lambda: BernoulliProduct(0.5, 0.5, 0), "got 0"),
        (lambda: multinomial_law([1.0, 0.0], [0.5, 0.5], 3), "no outside mass, got 0.5"),
        (lambda: multinomial_law(np.ones(20) / 20, np.ones(20) / 20, 50), "count vectors are more"),
        (lambda: poisson_law(0.0, 1.0), "rollout_rate must be > 0, got 0"),
    ],
)
def test_bad_input_is_one_sentence_with_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
