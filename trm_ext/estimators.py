# SPDX-License-Identifier: Apache-2.0
"""Stage 1 where only sampled log-probs exist: per-token estimators of the divergence.

Every estimator takes ``log_ratio = logp_train - logp_rollout`` of the sampled token, or the two
log-probs, and returns one value per token. NaN in, NaN out: no evidence. An infinite log-ratio is
evidence (one policy cannot produce the token) and stays infinite; a finite one never overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trm_ext import _checks

__all__ = [
    "LOG_RATIO_LIMIT",
    "abs_log_ratio",
    "binary_kl",
    "binary_tv",
    "cap_infinite",
    "k1",
    "k2",
    "k3",
    "log_ratio",
    "ratio_gap",
]

#: exp saturates beyond this log-ratio: e^80 = 5.5e34, so that float32 sums stay finite.
LOG_RATIO_LIMIT = 80.0


def log_ratio(logp_train: Tensor, logp_rollout: Tensor) -> Tensor:
    """Log-ratio of the sampled token, subtracted in float32 or better.

    ``log_ratio = logp_train - logp_rollout``; -inf where train cannot produce the token, +inf
    where rollout could not, NaN where a log-prob is NaN or both are -inf.

    Args:
        logp_train: log-probs of the sampled tokens under the train policy, nats, any shape.
        logp_rollout: the same under the rollout policy, same shape.

    Returns:
        The same shape, float32 (float64 where an input is), differentiable.

    Raises:
        TypeError: log-probs that are not floating point.
        ValueError: shapes that differ.

    Numerics:
        Low-precision inputs are widened before the subtraction; what they lost is lost.

    Source:
        Trust Region Masking, arXiv 2512.23075: rho_t = exp(log_ratio_t).

    >>> log_ratio(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.5000])
    """
    train, rollout = (
        _checks.floating("logp_train", logp_train),
        _checks.floating("logp_rollout", logp_rollout),
    )
    if train.shape != rollout.shape:
        raise ValueError(
            "logp_train and logp_rollout differ in shape: "
            f"{_checks.shape_text(train)} and {_checks.shape_text(rollout)}"
        )
    return train - rollout


def k1(log_ratio: Tensor) -> Tensor:
    """The estimator k1 of KL(rollout||train): unbiased, of either sign.

    ``k1 = -log_ratio``. Its mean over tokens that rollout sampled is KL(rollout||train) where
    train covers rollout's support.

    Args:
        log_ratio: logp_train - logp_rollout, nats, any shape.

    Returns:
        The same shape, nats, float32 or float64, differentiable. As a loss term its gradient has
        mean zero: use the exact KL.

    Raises:
        TypeError: not a floating-point tensor.

    Numerics:
        Exact.

    Source:
        J. Schulman, "Approximating KL Divergence" (2020), with r = rho.

    >>> k1(torch.tensor([0.5]))
    tensor([-0.5000])
    """
    return -_checks.floating("log_ratio", log_ratio)


def k2(log_ratio: Tensor) -> Tensor:
    """The estimator k2 of KL(rollout||train): biased, the same for rho and 1/rho.

    ``k2 = log_ratio² / 2``. Best with max: it sees probabilities that fell as well as that rose.

    Args:
        log_ratio: logp_train - logp_rollout, nats, any shape.

    Returns:
        The same shape, >= 0, float32 or float64, differentiable.

    Raises:
        TypeError: not a floating-point tensor.

    Numerics:
        Correctly rounded twice.

    Source:
        J. Schulman, "Approximating KL Divergence" (2020).

    >>> k2(torch.tensor([2.0]))
    tensor([2.])
    """
    return _checks.floating("log_ratio", log_ratio).square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """The estimator k3 of KL(rollout||train): unbiased and never negative, but one-sided.

    ``k3 = rho - 1 - log rho``. It punishes rho = 100 26.1 times as much as rho = 1/100. The mirror
    image ``1/rho - 1 + log rho`` estimates another divergence from these samples.

    Args:
        log_ratio: logp_train - logp_rollout, nats, any shape.

    Returns:
        The same shape, >= 0, float32 or float64, differentiable. +inf for an infinite log_ratio;
        a finite one saturates at :data:`LOG_RATIO_LIMIT`, where its gradient is 0.

    Raises:
        TypeError: not a floating-point tensor.

    Numerics:
        Relative error <= 32 eps of the dtype: a series below abs(log_ratio) = 0.1, expm1 above.

    Source:
        J. Schulman, "Approximating KL Divergence" (2020), with r = rho.

    >>> k3(torch.tensor([100.0, 0.01]).log())
    tensor([94.3948,  3.6152])
    """
    x = _checks.floating("log_ratio", log_ratio)
    infinite = torch.isinf(x)
    finite = torch.where(infinite, 0.0, x).clamp(max=LOG_RATIO_LIMIT)
    return torch.where(infinite, float("inf"), _exp_minus_line(finite))


def abs_log_ratio(log_ratio: Tensor) -> Tensor:
    """Absolute log-ratio of the sampled token.

    ``|log_ratio|``: orders tokens as k2 does.

    Args:
        log_ratio: logp_train - logp_rollout, nats, any shape.

    Returns:
        The same shape, >= 0, nats, float32 or float64, differentiable.

    Raises:
        TypeError: not a floating-point tensor.

    Numerics:
        Exact.

    Source:
        Trust Region Masking, arXiv 2512.23075v1, as a filter for the max criterion.

    >>> abs_log_ratio(torch.tensor([-0.5]))
    tensor([0.5000])
    """
    return _checks.floating("log_ratio", log_ratio).abs()


def ratio_gap(log_ratio: Tensor) -> Tensor:
    """Distance of the sampled token's ratio from 1.

    ``|rho - 1|``; half its mean over tokens that rollout sampled is the total variation where
    rollout covers train's support. Its mean over a sequence is SER.

    Args:
        log_ratio: logp_train - logp_rollout, nats, any shape.

    Returns:
        The same shape, >= 0, float32 or float64, differentiable. +inf for log_ratio = +inf; a
        finite one saturates at :data:`LOG_RATIO_LIMIT`.

    Raises:
        TypeError: not a floating-point tensor.

    Numerics:
        expm1: no cancellation near rho = 1.

    Source:
        Trust Region Masking, arXiv 2512.23075v2, SER and LN-TRM.

    >>> ratio_gap(torch.tensor([0.5]).log())
    tensor([0.5000])
    """
    x = _checks.floating("log_ratio", log_ratio)
    unbounded = x == float("inf")
    finite = torch.where(unbounded, 0.0, x).clamp(max=LOG_RATIO_LIMIT)
    return torch.where(unbounded, float("inf"), torch.expm1(finite).abs())


def binary_kl(logp_train: Tensor, logp_rollout: Tensor) -> Tensor:
    """KL of the two-way split "the sampled token or another": at most KL(rollout||train).

    ``p log(p/q) + (1 - p) log((1 - p)/(1 - q))`` with p, q the sampled token's probabilities under
    rollout and train; 0 log 0 = 0. A lower bound: it cannot support a certificate.

    Args:
        logp_train: log q, nats, any shape. A log-prob within eps/2 of 0, or above it, counts as
            -eps/2 (2^-24 in float32): rounding cannot tell these from certainty.
        logp_rollout: log p, same shape, likewise.

    Returns:
        The same shape, >= 0, nats, float32 or float64, differentiable; +inf for logp_train = -inf.

    Raises:
        TypeError: log-probs that are not floating point.
        ValueError: shapes that differ.

    Numerics:
        Sum of two terms, each >= 0 and free of cancellation to first order, so never negative.

    Source:
        DPPO, arXiv 2602.04879: binary divergences and their being lower bounds.

    >>> binary_kl(torch.tensor([0.25]).log(), torch.tensor([0.5]).log())
    tensor([0.1438])
    """
    log_ratio(logp_train, logp_rollout)  # its checks
    log_q, log_p = (
        _checks.floating("logp_train", logp_train),
        _checks.floating("logp_rollout", logp_rollout),
    )
    log_q = log_q.clamp(max=-torch.finfo(log_q.dtype).eps / 2)
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps / 2)
    return _kl_term(log_p, log_q) + _kl_term(_log1mexp(log_p), _log1mexp(log_q))


def binary_tv(logp_train: Tensor, logp_rollout: Tensor) -> Tensor:
    """Total variation of the two-way split "the sampled token or another".

    ``|p - q|`` with p, q the sampled token's probabilities; at most the total variation.

    Args:
        logp_train: log q, nats, any shape. Above 0 (rounding) counts as 0.
        logp_rollout: log p, same shape.

    Returns:
        The same shape, in [0, 1], float32 or float64, differentiable.

    Raises:
        TypeError: log-probs that are not floating point.
        ValueError: shapes that differ.

    Numerics:
        ``max(p, q) (1 - exp(-|log_ratio|))`` by expm1: no cancellation.

    Source:
        DPPO, arXiv 2602.04879.

    >>> binary_tv(torch.tensor([0.25]).log(), torch.tensor([0.75]).log())
    tensor([0.5000])
    """
    log_ratio(logp_train, logp_rollout)  # its checks
    log_q = _checks.floating("logp_train", logp_train).clamp(max=0)
    log_p = _checks.floating("logp_rollout", logp_rollout).clamp(max=0)
    larger = torch.maximum(log_p, log_q)
    nowhere = larger == float("-inf")
    gap = torch.where(nowhere, 0.0, larger - torch.minimum(log_p, log_q))
    return -torch.expm1(-gap) * larger.exp()


def cap_infinite(values: Tensor, cap: float) -> Tensor:
    """Finite stand-ins for infinite log-ratios or divergences, for who wants to go on with them.

    ``±cap`` where a value is infinite, the value elsewhere; NaN stays. Nothing here does this by
    itself: see ``infinity_cap`` of :func:`trm_ext.verdict` and :func:`trm_ext.policy_loss`.

    Args:
        values: nats, any shape.
        cap: finite, > 0, nats.

    Returns:
        The same shape, float32 or float64, differentiable; a capped value has gradient 0.

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: a cap that is not finite and > 0.

    Numerics:
        Exact.

    Source:
        docs/conventions.md, on values that are not finite.

    >>> cap_infinite(torch.tensor([-float("inf"), 30.0]), 20.0)
    tensor([-20.,  30.])
    """
    if not isinstance(cap, (int, float)) or not 0 < cap < math.inf:
        raise ValueError(f"a cap of infinite values must be a finite number > 0, got {cap!r}")
    x = _checks.floating("values", values)
    return torch.where(torch.isinf(x), torch.sign(x.detach()) * cap, x)


#: Per-token estimators of a log-ratio, by the name that criteria use.
FROM_LOG_RATIO: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs_log_ratio": abs_log_ratio,
    "ratio_gap": ratio_gap,
}
#: Per-token estimators of (logp_train, logp_rollout), by the name that criteria use.
FROM_LOGPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary_kl": binary_kl,
    "binary_tv": binary_tv,
}


def _exp_minus_line(x: Tensor) -> Tensor:
    """exp(x) - 1 - x >= 0 for finite x."""
    small = x.abs() < 0.1
    inner = torch.where(small, x, 0.0)
    # x²/2 (1 + x/3 (1 + x/4 (... (1 + x/11)))): what is cut off is below 1e-16 of it.
    series = 1 + inner / 11
    for n in range(10, 2, -1):
        series = 1 + inner / n * series
    return torch.where(small, inner.square() / 2 * series, torch.expm1(x) - x)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0; -inf at 0."""
    near = x > -0.6931471805599453
    close = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, close, far)


def _kl_term(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Term q - p + p log(p/q) >= 0 of a KL; q at p = 0, +inf at q = 0 < p."""
    absent, excluded = log_p == float("-inf"), log_q == float("-inf")
    plain = ~(absent | excluded)
    lp, lq = torch.where(plain, log_p, 0.0), torch.where(plain, log_q, 0.0)
    d = lq - lp
    close = d.abs() < 1
    near = lp.exp() * _exp_minus_line(torch.where(close, d, 0.0))
    far = lq.exp() - lp.exp() - lp.exp() * d
    term = torch.where(close, near, far)
    return torch.where(absent, log_q.exp(), torch.where(excluded, float("inf"), term))
