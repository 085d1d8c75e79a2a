# SPDX-License-Identifier: Apache-2.0
"""Estimators from sampled log-probs: closed forms, enumeration, mpmath, hostile values."""

import math

import mpmath
import pytest
import torch

import trm_ext as trm
from trm_ext import estimators

INF, NAN = float("inf"), float("nan")
mpmath.mp.dps = 50

# A rollout law and a train law with the same support, unevenly far apart.
P = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03], dtype=torch.float64)
Q = torch.tensor([0.3, 0.35, 0.05, 0.2, 0.1], dtype=torch.float64)
KL = float((P * (P / Q).log()).sum())


def test_values_of_the_documented_ratios():
    # rho: k1, k2, k3, |log rho|, |rho - 1|, to the printed digits
    table = {
        0.5: (0.693147, 0.240227, 0.193147, 0.693147, 0.5),
        1.0: (0.0, 0.0, 0.0, 0.0, 0.0),
        2.0: (-0.693147, 0.240227, 0.306853, 0.693147, 1.0),
        10.0: (-2.302585, 2.650949, 6.697415, 2.302585, 9.0),
        100.0: (-4.605170, 10.603796, 94.394830, 4.605170, 99.0),
    }
    for rho, expected in table.items():
        x = torch.tensor([math.log(rho)], dtype=torch.float64)
        found = [f(x).item() for f in estimators.FROM_LOG_RATIO.values()]
        assert found == pytest.approx(expected, abs=1e-6)
    k3 = trm.k3(torch.tensor([100.0, 0.01], dtype=torch.float64).log())
    assert float(k3[0] / k3[1]) == pytest.approx(26.11, abs=5e-3)


class TestBiasByEnumeration:
    """Means over the rollout law are sums over the vocabulary, so no sampling error."""

    x = (Q / P).log()

    def test_k1_and_k3_are_unbiased(self):
        assert float((P * trm.k1(self.x)).sum()) == pytest.approx(KL, rel=1e-14)
        assert float((P * trm.k3(self.x)).sum()) == pytest.approx(KL, rel=1e-14)

    def test_k2_is_biased_by_its_third_order(self):
        bias = float((P * trm.k2(self.x)).sum()) - KL
        # E[k2] - E[k3] = -E[x³/6 + x⁴/24 + ...], and E[k3] = KL
        series = -sum(float((P * self.x**n).sum()) / math.factorial(n) for n in range(3, 40))
        assert bias == pytest.approx(series, rel=1e-10) and abs(bias) > 1e-3

    def test_the_mirrored_k3_estimates_chi2_minus_kl(self):
        mirrored = float((P * trm.k3(-self.x)).sum())
        chi2 = float((P * P / Q).sum()) - 1
        assert mirrored == pytest.approx(chi2 - KL, rel=1e-12)
        assert abs(mirrored - KL) > 0.04

    def test_the_ratio_gap_is_twice_the_total_variation(self):
        tv = float((P - Q).abs().sum()) / 2
        assert float((P * trm.estimators.ratio_gap(self.x)).sum()) == pytest.approx(2 * tv)

    def test_binary_divergences_are_lower_bounds(self):
        assert (trm.binary_kl(Q.log(), P.log()) <= KL).all()
        assert (trm.binary_tv(Q.log(), P.log()) <= float((P - Q).abs().sum()) / 2 + 1e-15).all()

    def test_every_sampled_statistic_misses_what_it_did_not_sample(self):
        p = torch.tensor([0.5, 0.4, 0.05, 0.05], dtype=torch.float64).log()
        q = torch.tensor([0.5, 0.001, 0.2495, 0.2495], dtype=torch.float64).log()
        exact = trm.token_divergence(p[None], q[None]).kl
        assert exact is not None and exact.item() == pytest.approx(2.235842, abs=1e-6)
        for f in estimators.FROM_LOG_RATIO.values():
            assert f(q[:1] - p[:1]).item() == 0
        assert trm.binary_kl(q[:1], p[:1]).item() == 0 == trm.binary_tv(q[:1], p[:1]).item()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_k3_keeps_its_relative_accuracy(dtype):
    sizes = torch.logspace(-12, math.log10(79), 400, dtype=dtype)
    x = torch.cat([sizes, -sizes, torch.tensor([0.1, -0.1, 0.0999999], dtype=dtype)])
    exact = [mpmath.expm1(mpmath.mpf(v)) - mpmath.mpf(v) for v in x.tolist()]
    error = [
        abs(mpmath.mpf(found) - e) / e for found, e in zip(trm.k3(x).tolist(), exact, strict=True)
    ]
    # docstring; below the normal range of float32 spacing is absolute
    assert max(error) <= 32 * torch.finfo(dtype).eps


def test_gradients_against_the_closed_forms():
    x = torch.tensor([-30.0, -1.0, -0.05, 1e-6, 0.05, 1.0, 20.0], dtype=torch.float64)
    x.requires_grad_()
    slopes = {
        "k1": -torch.ones_like(x),
        "k2": x,
        "k3": torch.expm1(x),
        "abs_log_ratio": x.sign(),
        "ratio_gap": x.sign() * x.exp(),
    }
    for name, expected in slopes.items():
        (found,) = torch.autograd.grad(estimators.FROM_LOG_RATIO[name](x).sum(), x)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-13)
    p = torch.tensor([0.01, 0.4, 0.9], dtype=torch.float64)
    q = torch.tensor([0.3, 0.41, 0.2], dtype=torch.float64).log().requires_grad_()
    (found,) = torch.autograd.grad(trm.binary_kl(q, p.log()).sum(), q)
    law = q.detach().exp()
    torch.testing.assert_close(found, (law - p) / (1 - law), rtol=1e-12, atol=0)


class TestHostileValues:
    def test_infinite_is_evidence_and_missing_is_missing(self):
        x = torch.tensor([INF, -INF, NAN])
        assert trm.k1(x).tolist()[:2] == [-INF, INF]
        assert trm.k2(x).tolist()[:2] == trm.k3(x).tolist()[:2] == [INF, INF]
        assert estimators.ratio_gap(x).tolist()[:2] == [INF, 1.0]
        assert all(math.isnan(f(x)[2]) for f in estimators.FROM_LOG_RATIO.values())

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
    def test_a_finite_ratio_never_overflows_forward_or_backward(self, dtype):
        x = torch.tensor([100.0, 1e30, -1e30, 79.0], dtype=dtype, requires_grad=True)
        for f in (trm.k3, estimators.ratio_gap):
            value = f(x)
            (gradient,) = torch.autograd.grad(value.sum(), x)
            assert torch.isfinite(value).all() and torch.isfinite(gradient).all()
            assert gradient[:2].tolist() == [0, 0]

    def test_a_cap_of_infinite_values(self):
        x = torch.tensor([INF, -INF, NAN, 1e30, -3.0], requires_grad=True)
        found = estimators.cap_infinite(x, 7.0)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert found[[0, 1, 3, 4]].tolist() == [7, -7, torch.tensor(1e30).item(), -3]
        assert found[2].isnan() and gradient.tolist() == [0, 0, 1, 1, 1]
        with pytest.raises(ValueError, match="must be a finite number > 0, got inf"):
            estimators.cap_infinite(x, INF)

    def test_low_precision_is_widened_before_the_subtraction(self):
        train = torch.tensor([-0.99609375], dtype=torch.bfloat16)
        rollout = torch.tensor([-1.0])
        assert trm.log_ratio(train, rollout).item() == 0.00390625  # not rounded to bfloat16
        coarse = torch.tensor([-256.0, -255.0], dtype=torch.bfloat16)
        assert trm.log_ratio(coarse, torch.full((2,), -255.5)).tolist() == [-0.5, 0.5]

    def test_log_ratios_of_impossible_tokens(self):
        found = trm.log_ratio(torch.tensor([-INF, -1.0, -INF]), torch.tensor([-1.0, -INF, -INF]))
        assert found.tolist()[:2] == [-INF, INF] and math.isnan(found[2])


def exact_binary_kl(log_q, log_p):
    lp, lq = mpmath.mpf(log_p), mpmath.mpf(log_q)
    p, q = mpmath.exp(lp), mpmath.exp(lq)
    return p * (lp - lq) + (1 - p) * mpmath.log((1 - p) / (1 - q))


class TestBinary:
    @pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
    def test_against_mpmath_from_certain_to_impossible(self, dtype):
        logs = [-1e-7, -1e-6, -1e-4, -0.01, -0.3, -0.69, -0.7, -1.0, -5.0, -20.0, -60.0]
        rows = [(a, b) for a in logs for b in logs if a != b]
        rows += [(a * (1 + d), a) for a in logs for d in (1e-5, -1e-3, 0.05)]
        q, p = (torch.tensor(column, dtype=dtype) for column in zip(*rows, strict=True))
        kl, tv = trm.binary_kl(q, p), trm.binary_tv(q, p)
        for i in range(len(rows)):
            a, b = q[i].item(), p[i].item()
            # An error of a few eps in log(1 - p) and log(1 - q) moves a term by p - q times it.
            eps = torch.finfo(dtype).eps
            exact = exact_binary_kl(a, b)
            logs_of_rest = sum(abs(mpmath.log(1 - mpmath.exp(v))) for v in (a, b))
            slack = abs(mpmath.exp(a) - mpmath.exp(b)) * (1 + logs_of_rest)
            assert abs(mpmath.mpf(kl[i].item()) - exact) <= 8 * eps * (exact + slack)
            gap = abs(mpmath.exp(a) - mpmath.exp(b))
            assert abs(mpmath.mpf(tv[i].item()) - gap) <= 8 * eps * (gap + 1e-30)

    def test_never_negative(self):
        p = -torch.rand(20000).mul(12).exp() * 1e-5
        q = p + torch.randn(20000) * 1e-6 * p.abs()
        assert (trm.binary_kl(q, p) >= 0).all() and (trm.binary_tv(q, p) >= 0).all()

    def test_ends(self):
        half = math.log(0.5)
        train = torch.tensor([-INF, half, NAN, -INF, half])
        rollout = torch.tensor([half, -INF, half, -INF, NAN])
        found = trm.binary_kl(train, rollout)
        assert found[0] == INF and found[1].item() == pytest.approx(math.log(2))
        assert found[3] == 0 and math.isnan(found[2]) and math.isnan(found[4])
        tv = trm.binary_tv(train, rollout).tolist()
        assert tv[:2] == pytest.approx([0.5, 0.5]) and tv[3] == 0 and math.isnan(tv[2])

    def test_certainty_by_rounding_is_not_a_support_violation(self):
        # x - logsumexp rounds to 0 or just above for a confident token; that is not probability 1.
        found = trm.binary_kl(torch.tensor([0.0, 1e-7, 0.0]), torch.tensor([-1e-4, 0.0, 0.0]))
        p = math.exp(-1e-4)
        floor = 2.0**-24
        assert found[0].item() == pytest.approx(
            p * (-1e-4 + floor) + (1 - p) * math.log((1 - p) / floor), rel=1e-3
        )
        assert found[1:].tolist() == [0, 0]


class TestBadInput:
    def test_not_floating_point(self):
        with pytest.raises(TypeError, match=r"log_ratio must be floating point, got torch\.int64"):
            trm.k3(torch.tensor([1]))
        with pytest.raises(TypeError, match="log_ratio must be a tensor, got float"):
            trm.k1(0.5)

    def test_shapes_that_differ(self):
        with pytest.raises(ValueError, match=r"differ in shape: \[2\] and \[3\]"):
            trm.binary_kl(torch.zeros(2), torch.zeros(3))
