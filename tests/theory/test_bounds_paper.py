# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from theory.bounds import paper
from theory.bounds.sums import capped_linear_sum, capped_sqrt_sum, sqrt_sum
from theory.records import Bound

T, DELTA = 4096, 1e-4
EPS = math.sqrt(DELTA / 2)
ROUNDING = 1e-12  # a few thousand additions of numbers of one sign, each with error 2^-53


def naive_sum(term):
    return math.fsum(term(t) for t in range(1, T + 1))


def test_headline_numbers_of_the_published_example():
    assert paper.classical_kl(T, DELTA).value == pytest.approx(1677.312, abs=5e-4)
    assert paper.classical_tv(T, EPS).value == pytest.approx(1677.312, abs=5e-4)
    assert paper.pinsker_marginal_kl(T, DELTA).value == pytest.approx(34.946, abs=5e-4)
    assert paper.pinsker_marginal_kl(T, DELTA, form="closed").value == pytest.approx(
        34.953, abs=5e-4
    )
    assert paper.mixed_kl(T, DELTA, 0.01).value == pytest.approx(8.192, abs=5e-5)
    assert paper.mixed_tv(T, EPS, math.sqrt(0.005)).value == pytest.approx(8.192, abs=5e-5)
    assert paper.coupling(T, EPS).value == pytest.approx(113.84, abs=5e-3)
    half = paper.halved(paper.pinsker_marginal_kl(T, DELTA))
    assert half.value == pytest.approx(17.473, abs=5e-4)
    assert half.value == pytest.approx(DELTA * math.fsum(map(math.sqrt, range(T))), rel=ROUNDING)


def test_second_column_of_the_published_table():
    assert paper.classical_tv(T, 5e-3).value == pytest.approx(838.66, abs=5e-3)
    assert paper.coupling(T, 5e-3).value == pytest.approx(79.91, abs=5e-3)
    assert paper.pinsker_marginal_tv(T, DELTA, 5e-3).value == pytest.approx(24.711, abs=5e-4)
    assert paper.mixed_tv(T, 5e-3, 0.05).value == pytest.approx(4.096, abs=5e-5)
    assert paper.adaptive_linear(np.full(T, 5e-3)).value == pytest.approx(81.92, abs=5e-3)
    assert paper.adaptive_linear(np.full(T, EPS)).value == pytest.approx(115.85, abs=5e-3)


@pytest.mark.parametrize("delta", [1e-9, 1e-4, 4e-4, 0.02, 1.0, 3.0])
def test_finite_sums_equal_a_plain_loop(delta):
    eps = min(1.0, math.sqrt(delta / 2)) * 0.7
    capped = naive_sum(lambda t: min(1.0, math.sqrt((t - 1) * delta / 2)))
    assert paper.pinsker_marginal_kl(T, delta).value == pytest.approx(
        4 * min(1.0, math.sqrt(delta / 2)) * capped, rel=ROUNDING
    )
    assert paper.pinsker_marginal_tv(T, delta, eps).value == pytest.approx(
        4 * eps * capped, rel=ROUNDING
    )
    assert paper.coupling(T, eps).value == pytest.approx(
        4 * eps * naive_sum(lambda t: min(1.0, (t - 1) * eps)), rel=ROUNDING
    )
    weights = [min(1.0, (T - t) * eps, math.sqrt((T - t) * delta / 2)) for t in range(1, T + 1)]
    averages = np.linspace(0, eps, T)
    expected = 4 * math.fsum(a * w for a, w in zip(averages, weights, strict=True))
    assert paper.adaptive(averages, delta, eps).value == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 34, 100, 1000, 12345])
def test_sqrt_sum_against_mpmath(n):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(30):
        exact = mpmath.fsum(mpmath.sqrt(k) for k in range(1, n + 1))
        assert abs(mpmath.mpf(float(sqrt_sum(n))) - exact) <= 4e-15 * exact


def test_capped_sums_at_the_exact_cap():
    assert float(capped_linear_sum(4, 0.25)) == 0.25 + 0.5 + 0.75 + 1.0
    assert float(capped_linear_sum(10, 0.0)) == 0.0
    assert float(capped_sqrt_sum(10, 0.0)) == 0.0


def test_closed_forms_are_never_below_the_finite_sums():
    horizons = np.arange(1, 3000, 7)
    for delta in (1e-8, 1e-5, 1e-4):
        finite = paper.pinsker_marginal_kl(horizons, delta).value
        closed = paper.pinsker_marginal_kl(horizons, delta, form="closed").value
        assert np.all(closed >= finite)
        eps = math.sqrt(delta / 2) / 3
        assert np.all(
            paper.pinsker_marginal_tv(horizons, delta, eps, form="closed").value
            >= paper.pinsker_marginal_tv(horizons, delta, eps).value
        )
        assert np.all(
            paper.coupling(horizons, eps, form="closed").value
            >= paper.coupling(horizons, eps).value * (1 - ROUNDING)
        )


def test_adaptive_at_its_maximum_recovers_coupling_and_pinsker_marginal():
    worst = np.full(T, EPS)
    assert paper.adaptive(worst, max_tv=EPS).value == pytest.approx(
        paper.coupling(T, EPS).value, rel=ROUNDING
    )
    assert paper.adaptive(worst, max_kl=DELTA).value == pytest.approx(
        paper.pinsker_marginal_kl(T, DELTA).value, rel=ROUNDING
    )


def test_routes_of_the_adaptive_weights_cross_at_delta_over_two_eps_squared():
    delta, eps = 1e-4, 5e-4
    crossing = delta / (2 * eps**2)  # 200 tokens before the end
    weights = paper.length_weights(1000, delta, eps)
    remaining = np.arange(999, -1, -1)
    tv_route = remaining * eps
    assert np.all(weights[remaining < crossing] == tv_route[remaining < crossing])
    beyond = remaining > crossing + 1
    assert np.all(weights[beyond] < tv_route[beyond])


def test_infinite_kl_costs_nothing_where_there_is_no_position_to_pay_for_it():
    assert paper.classical_kl(1, np.inf).value == 0
    assert paper.pinsker_marginal_kl(1, np.inf).value == 0
    assert paper.pinsker_marginal_kl(5, np.inf).value == 16  # all caps at 1
    assert paper.mixed_kl(3, np.inf, 0.0, form="closed").value == 0
    assert paper.adaptive([0.1, 0.2], max_kl=np.inf).value == pytest.approx(0.4)


def test_adaptive_worst_case_is_the_integral_of_the_capped_sum():
    from scipy.integrate import quad

    for length, delta in ((50, 1e-3), (50, 0.04), (50, 0.3), (400, 3.0)):
        edge = min(length, 2 / delta)
        area = quad(lambda x, d=delta: math.sqrt(x * d / 2), 0, edge)[0] + length - edge
        value = paper.adaptive_worst_case(length, delta).value
        # quad is asked for 1.5e-8; the square root at 0 is its only difficulty.
        assert value == pytest.approx(4 * min(1, math.sqrt(delta / 2)) * area, rel=1e-7)
        assert value >= paper.pinsker_marginal_kl(length, delta).value
    assert paper.adaptive_worst_case(9, np.inf).value == 36
    assert paper.adaptive_worst_case(9, 0.0).value == 0


def test_second_version_of_the_paper():
    assert paper.classical_kl(T, 1.0).value == pytest.approx(1.677e7, rel=3e-4)
    assert 4 * T * math.sqrt(0.5) == pytest.approx(11585, abs=0.5)
    assert paper.pinsker_marginal_kl(T, 1.0).value == pytest.approx(11581.6, abs=0.05)
    assert paper.pinsker_marginal_kl(T, 1.0, form="closed").value == pytest.approx(
        3.495e5, rel=3e-4
    )
    assert paper.mixed_kl(T, 1.0, 1.0, form="closed").value == pytest.approx(8192, rel=ROUNDING)
    assert paper.pinsker_marginal_kl(T, 0.01).value == pytest.approx(1139.5, abs=0.05)


def test_vectorised_over_horizon_and_parameters_in_constant_time():
    horizons = np.arange(1, 10**6 + 1)
    many = paper.pinsker_marginal_kl(horizons, 1e-4).value
    assert many.shape == horizons.shape
    assert many[T - 1] == paper.pinsker_marginal_kl(T, 1e-4).value
    grid = paper.mixed_kl(np.array([[10], [20]]), np.array([1e-3, 1e-4]), 1e-4).value
    assert grid.shape == (2, 2)
    assert grid[1, 1] == paper.mixed_kl(20, 1e-4, 1e-4).value


def test_unified_takes_the_smallest_rigorous_record():
    small_but_wrong = Bound("wrong", 0.0, (), True, False, "nobody")
    best = paper.unified([small_but_wrong, paper.classical_kl(9, 0.1), paper.mixed_kl(9, 0.1, 0.1)])
    assert best.value == paper.mixed_kl(9, 0.1, 0.1).value
    assert "mixed_kl" in best.source
    with pytest.raises(ValueError, match="at least one rigorous"):
        paper.unified([small_but_wrong])


def discounted_error(p, q, pay, start, gamma):
    """Exact error of TRPO's surrogate on a tabular MDP whose action is the next state."""
    states = len(start)

    def value(policy):
        return np.linalg.solve(np.eye(states) - gamma * policy, (policy * pay).sum(1))

    v = value(p)
    advantage = pay + gamma * v[None, :] - v[:, None]
    visits = np.linalg.solve(np.eye(states) - gamma * p.T, start)
    surrogate = visits @ ((q * advantage).sum(1))
    error = start @ (value(q) - v) - surrogate
    return abs(error), advantage, visits * (1 - gamma), np.abs((q * advantage).sum(1)).max()


def test_trpo_and_cpo_hold_on_discounted_mdps_and_have_their_printed_constants():
    assert paper.trpo(3.0, 0.5, 0.1).value == pytest.approx(4 * 3 * 0.5 / 0.25 * 0.01)
    assert paper.cpo(3.0, 0.5, 0.1).value == pytest.approx(2 * 0.5 * 3 / 0.25 * 0.1)
    closest = 0.0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        gamma = float(rng.uniform(0.1, 0.95))
        p = rng.dirichlet(np.ones(3), size=3)
        q = 0.7 * p + 0.3 * rng.dirichlet(np.ones(3) * 0.3, size=3)
        error, advantage, visits, drift = discounted_error(
            p, q, rng.random((3, 3)), rng.dirichlet(np.ones(3)), gamma
        )
        tv = np.abs(p - q).sum(1) / 2
        by_average = paper.cpo(drift, gamma, float(visits @ tv)).value
        assert error <= by_average
        assert error <= paper.trpo(float(np.abs(advantage).max()), gamma, float(tv.max())).value
        closest = max(closest, error / by_average)
    assert closest > 0.1  # not vacuously true


def test_comparison_forms_are_quadratic_and_the_printed_linear_form_is_weaker():
    assert paper.trpo(1, 0.9, 0.02).value == pytest.approx(4 * paper.trpo(1, 0.9, 0.01).value)
    eps = np.geomspace(1e-6, 1, 50)
    assert np.all(paper.trpo_linear_as_printed(50, eps).value >= paper.classical_tv(50, eps).value)
    assert not paper.trpo_linear_as_printed(50, 0.1, constant=1.0).rigorous
    assert paper.dppo(50, 0.1, 3.0).value == pytest.approx(3 * paper.classical_tv(50, 0.1).value)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: paper.classical_kl(0, 0.1), "T must be a whole number >= 1, got 0"),
        (lambda: paper.classical_kl(2.5, 0.1), "got 2.5"),
        (lambda: paper.classical_kl(4, -0.1), "max_kl must be a number >= 0, got -0.1"),
        (lambda: paper.classical_kl(4, float("nan")), "max_kl must be a number >= 0, got nan"),
        (lambda: paper.classical_tv(4, 1.5), "at most 1, got 1.5"),
        (
            lambda: paper.pinsker_marginal_tv(4, 1e-4, 0.1),
            r"max_tv = 0\.1 exceeds sqrt\(max_kl/2\) = 0\.00707107 for max_kl = 0\.0001",
        ),
        (lambda: paper.mixed_kl(4, 0.1, 0.5), r"seq_kl = 0\.5 exceeds T \* max_kl = 0\.4"),
        (lambda: paper.coupling(4, 0.1, form="open"), "'finite' or 'closed', got 'open'"),
        (lambda: paper.trpo(1, 1.0, 0.1), r"gamma must lie in \[0, 1\), got 1.0"),
        (
            lambda: paper.halved(paper.trpo(1, 0.5, 0.1)),
            "applies to the paper's bounds, got 'trpo'",
        ),
    ],
)
def test_bad_input_is_one_sentence_with_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
