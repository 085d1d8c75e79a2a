# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from theory.bounds import CATALOGUE, inverse, vacuous_horizon


def test_closed_form_inverses():
    assert inverse("classical_kl", 1.0, "max_kl", 4096) == pytest.approx(
        1 / (4096 * 4095), rel=1e-12
    )
    assert inverse("classical_tv", 0.5, "max_tv", 100) == pytest.approx(
        math.sqrt(0.5 / (2 * 100 * 99)), rel=1e-12
    )
    assert inverse("mixed_kl", 1.0, "seq_kl", 100, max_kl=0.01) == pytest.approx(
        1 / (4 * 100**2 * 0.01), rel=1e-12
    )
    assert inverse("seq_kl_from_max", 0.3, "max_kl", 1000) == pytest.approx(3e-4, rel=1e-12)


@pytest.mark.parametrize("name", ["pinsker_marginal_kl", "forward", "dyadic", "chi2_from_ratio"])
def test_the_inverse_is_the_last_value_within_the_target(name):
    known = {"max_log_ratio": 0.5} if name == "chi2_from_ratio" else {}
    found = inverse(name, 0.2, "max_kl", 500, **known)
    compute = CATALOGUE[name].compute
    assert compute(500, max_kl=found, **known).value <= 0.2
    assert compute(500, max_kl=found * (1 + 1e-9), **known).value > 0.2


def test_limits_of_the_inverse():
    assert inverse("coupling", 1e9, "max_tv", 10) == 1.0
    assert inverse("pinsker_marginal_kl", 1e9, "max_kl", 10) == math.inf
    # Consistency with the other quantities caps the answer.
    assert inverse("mixed_kl", 1e9, "seq_kl", 10, max_kl=0.01) == pytest.approx(0.1)
    assert inverse("pinsker_marginal_tv", 1e-9, "max_kl", 10, max_tv=0.5) == 0.0
    with pytest.raises(ValueError, match="target must be > 0, got 0"):
        inverse("seq_kl", 0, "seq_kl", 10)
    with pytest.raises(ValueError, match="Unknown bound 'nonsense'"):
        inverse("nonsense", 1, "max_kl", 10)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("classical_kl", {"max_kl": 1e-4}),
        ("pinsker_marginal_kl", {"max_kl": 1e-4}),
        ("dyadic", {"max_kl": 1e-3}),
        ("chi2", {"max_chi2": 2e-4}),
        ("seq_kl_from_max", {"max_kl": 1e-4}),
    ],
)
def test_vacuous_horizon_is_the_first_one(name, known):
    found = vacuous_horizon(name, **known)
    compute = CATALOGUE[name].compute
    assert found is not None
    assert compute(found, **known).value >= 1
    assert compute(found - 1, **known).value < 1


def test_vacuous_horizons_of_the_published_example():
    # T(T-1) >= 10^4 first at 101; T delta >= 1 at 10^4; the average-based bound never.
    assert vacuous_horizon("classical_kl", max_kl=1e-4) == 101
    assert vacuous_horizon("seq_kl_from_max", max_kl=1e-4) == 10_000
    assert vacuous_horizon("seq_kl", seq_kl=0.01) is None


def test_vacuous_horizon_starts_where_the_quantities_are_consistent():
    # D_seq = 0.01 needs T >= 100 at delta = 1e-4; 2 T sqrt(1e-6) >= 1 first at T = 500.
    assert vacuous_horizon("mixed_kl", max_kl=1e-4, seq_kl=0.01) == 500
    # Already vacuous at the first consistent horizon.
    assert vacuous_horizon("mixed_kl", max_kl=1.0, seq_kl=50.0) == 50
