# SPDX-License-Identifier: Apache-2.0
import math

import pytest

sympy = pytest.importorskip("sympy")

from theory import symbolic  # noqa: E402
from theory.families import OneLogitShift  # noqa: E402


@pytest.mark.parametrize("name", list(symbolic.DERIVATIONS))
def test_derivation(name):
    residuals = symbolic.DERIVATIONS[name]()
    assert residuals
    for identity, residual in residuals.items():
        assert symbolic.is_zero(residual), f"{name}: {identity} leaves {residual}"


def test_verify_reports_every_identity():
    found = symbolic.verify()
    assert all(found.values())
    assert len(found) >= 30


def test_false_identities_are_not_accepted():
    p, q = sympy.symbols("p q", positive=True)
    x = sympy.Symbol("x", positive=True)
    assert not symbolic.is_zero(sympy.log(x) - x + 1)
    # The published k3 with the inverted ratio is not the KL.
    log_rho = [sympy.log(q) - sympy.log(p), sympy.log(1 - q) - sympy.log(1 - p)]
    rho, roll = [q / p, (1 - q) / (1 - p)], [p, 1 - p]
    kl = sum(-a * b for a, b in zip(roll, log_rho, strict=True))
    wrong = sum(a * (1 / r - 1 + v) for a, r, v in zip(roll, rho, log_rho, strict=True)) - kl
    assert not symbolic.is_zero(wrong)
    assert abs(float(wrong.subs({p: 0.3, q: 0.5}))) > 1e-3
    # T^2 delta instead of T (T - 1) delta.
    t, d = sympy.symbols("T delta", positive=True)
    assert not symbolic.is_zero(t * (t - 1) * d - t**2 * d)


@pytest.mark.parametrize("swap", ["A", "G", "move"])
def test_a_wrong_sign_in_the_kernel_state_is_noticed(swap):
    """The move identities with one sign flipped must leave a residual."""
    x, y, m, c, m_new, c_new = sympy.symbols("x y M c m_new c_new", real=True)
    d, k = c_new - c, sympy.exp(m - m_new)
    e = sympy.exp(d) - 1

    def state(top, shift):
        w, u = sympy.exp(x - top), x - y - shift
        return w, w * u, w * (u + sympy.exp(-u) - 1)

    (s, a, g), (_, a_new, g_new) = state(m, c), state(m_new, c_new)
    right = {
        "A": a_new - k * (a - d * s),
        "G": g_new - k * (g + e * (g - a) + (e - d) * s),
        "move": g_new - k * (g + e * (g - a) + (e - d) * s),
    }[swap]
    wrong = {
        "A": a_new - k * (a + d * s),
        "G": g_new - k * (g - e * (g - a) + (e - d) * s),
        "move": g_new - k * (g + e * (g - a) + (e + d) * s),
    }[swap]
    assert symbolic.is_zero(right)
    assert not symbolic.is_zero(wrong)


def test_one_logit_shift_numbers_follow_from_the_symbols():
    p, s = 0.3, 1.7
    total = 1 + p * (math.exp(s) - 1)
    q = p * math.exp(s) / total
    found = OneLogitShift(p, s).predicted()
    assert found["kl_rollout_train"] == pytest.approx(
        p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), rel=1e-13
    )
    assert found["bc"] == pytest.approx(math.sqrt(p * q) + math.sqrt((1 - p) * (1 - q)), rel=1e-13)


def test_the_constant_of_the_product_policy():
    assert float(sympy.sqrt(2 / sympy.pi) * sympy.exp(-sympy.Rational(1, 2))) == pytest.approx(
        0.4839, abs=5e-5
    )
