# SPDX-License-Identifier: Apache-2.0
"""Stage 3: importance weights per token from the log-ratios of the sampled tokens.

``rho_t = exp(log_ratio_t)`` is train over rollout. "Sequence" here always means the product of the
ratios and "geometric" their mean in log space; other libraries mix the two (docs/conventions.md).

Every function takes the log-ratios shaped like the layout's tokens and returns weights of that
shape, 0 at tokens that do not count, whatever these hold. It works in log space: exp comes last,
after masks and caps, and saturates at :data:`trm_ext.estimators.LOG_RATIO_LIMIT`. NaN at a counted
token gives NaN (in sequence weights: for its whole sequence); ``policy_loss`` rejects such
sequences first. ``detach=True``, the default, makes the weight a constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trm_ext import _checks
from trm_ext._sequences import counts, sum_tokens, to_tokens
from trm_ext.estimators import LOG_RATIO_LIMIT
from trm_ext.layout import SequenceLayout
from trm_ext.masks import check_band, inside_band

__all__ = [
    "critical_length",
    "geo_mask",
    "geo_mask_token_tis",
    "geometric_log_ratio",
    "gspo",
    "ppo_clip",
    "product_ratio",
    "seq_is",
    "seq_mis",
    "seq_tis",
    "sequence_log_ratio",
    "token_is",
    "token_mask",
    "token_tis",
    "trm",
]


def token_is(log_ratio: Tensor, layout: SequenceLayout, *, detach: bool = True) -> Tensor:
    """Token-IS: ``rho_t``.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens count.
        detach: whether the weight is a constant.

    Returns:
        Weights shaped like the tokens, >= 0, float32 or float64.

    Raises:
        TypeError: not floating point.
        ValueError: a shape other than the layout's.

    Source:
        Trust Region Masking, arXiv 2512.23075: the surrogate's weight.

    >>> token_is(torch.tensor([0.0, 0.5]).log1p(), SequenceLayout.from_lengths([2]))
    tensor([1.0000, 1.5000])
    """
    return _per_token(layout.token_mask, _counted(log_ratio, layout, detach), layout)


def token_tis(
    log_ratio: Tensor, layout: SequenceLayout, *, cap: float = 2.0, detach: bool = True
) -> Tensor:
    """Token-TIS: ``min(rho_t, C)``.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens count.
        cap: C > 0.
        detach: whether the weight is a constant; otherwise a capped weight has gradient 0.

    Returns:
        Weights shaped like the tokens, in [0, C].

    Raises:
        ValueError: C <= 0, or a shape other than the layout's.

    Source:
        Truncated importance sampling; the blog's summary calls it "Token-IS (PPO)".

    >>> token_tis(torch.tensor([100.0, -100.0, 0.0]), SequenceLayout.from_lengths([3]))
    tensor([2.0000e+00, 3.7835e-44, 1.0000e+00])
    """
    x = _counted(log_ratio, layout, detach)
    return _per_token(layout.token_mask, x, layout, check_cap(cap))


def token_mask(
    log_ratio: Tensor,
    layout: SequenceLayout,
    *,
    band: tuple[float, float] = (0.5, 5.0),
    detach: bool = True,
) -> Tensor:
    """Token mask, IcePop: ``1{low <= rho_t <= high} rho_t``.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens count.
        band: (low, high), inclusive, 0 <= low <= high.
        detach: whether the weight is a constant.

    Returns:
        Weights shaped like the tokens, 0 outside the band.

    Raises:
        ValueError: a band that is none, or a shape other than the layout's.

    Source:
        IcePop, arXiv 2510.18855, with its 0.5 .. 5.

    >>> token_mask(torch.tensor([6.0, 1.0]).log(), SequenceLayout.from_lengths([2]))
    tensor([0., 1.])
    """
    x = _counted(log_ratio, layout, detach)
    return _per_token(inside_band(x.detach(), check_band("band", band)), x, layout)


def ppo_clip(
    log_ratio: Tensor,
    advantages: Tensor,
    layout: SequenceLayout,
    *,
    clip: float | Sequence[float] = 0.2,
    detach: bool = True,
) -> Tensor:
    """PPO clip as a weight: ``rho_t``, or 0 where the clipped branch is active.

    Active is rho > 1 + high for A > 0, rho < 1 - low for A < 0, and, with a dual clip, rho > dual
    for A < 0. The boundary is not clipped, nor is A = 0.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        advantages: shaped like the tokens; only the sign matters.
        layout: which tokens count.
        clip: eps, (low, high) or (low, high, dual) with dual > 1 + high.
        detach: whether the weight is a constant.

    Returns:
        Weights shaped like the tokens, >= 0.

    Raises:
        ValueError: an epsilon < 0, a dual clip that is too small, a shape other than the layout's.

    Source:
        PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729.

    >>> lr, advantages = torch.tensor([1.5, 1.5]).log(), torch.tensor([1.0, -1.0])
    >>> ppo_clip(lr, advantages, SequenceLayout.from_lengths([2]))
    tensor([0.0000, 1.5000])
    """
    x = _counted(log_ratio, layout, detach)
    layout.check("advantages", advantages)
    passes = layout.token_mask
    for branch, _ in ppo_branches(x.detach(), advantages, clip):
        passes = passes & ~branch
    return _per_token(passes, x, layout)


def seq_is(log_ratio: Tensor, layout: SequenceLayout, *, detach: bool = True) -> Tensor:
    """Seq-IS: ``rho = Π_t rho_t`` at every token of the sequence.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens belong to which sequence, and which count.
        detach: whether the weight is a constant.

    Returns:
        Weights shaped like the tokens, >= 0.

    Raises:
        ValueError: a shape other than the layout's.

    Numerics:
        The logarithms are summed in float64.

    Source:
        Importance sampling on sequences; see :func:`product_ratio` for what length does to it.

    >>> seq_is(torch.tensor([2.0, 3.0]).log(), SequenceLayout.from_lengths([2]))
    tensor([6., 6.])
    """
    total = sequence_log_ratio(log_ratio, layout, detach=detach)
    return _per_sequence(None, total, log_ratio, layout)


def seq_tis(
    log_ratio: Tensor, layout: SequenceLayout, *, cap: float = 5.0, detach: bool = True
) -> Tensor:
    """Seq-TIS: ``min(rho, C)`` with ``rho = Π_t rho_t``.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens belong to which sequence, and which count.
        cap: C > 0.
        detach: whether the weight is a constant; otherwise a capped weight has gradient 0.

    Returns:
        Weights shaped like the tokens, in [0, C].

    Raises:
        ValueError: C <= 0, or a shape other than the layout's.

    Source:
        Truncated importance sampling on sequences.

    >>> seq_tis(torch.tensor([2.0, 3.0]).log(), SequenceLayout.from_lengths([2]))
    tensor([5., 5.])
    """
    total = sequence_log_ratio(log_ratio, layout, detach=detach)
    return _per_sequence(None, total, log_ratio, layout, check_cap(cap))


def seq_mis(
    log_ratio: Tensor, layout: SequenceLayout, *, cap: float = 5.0, detach: bool = True
) -> Tensor:
    """Seq-MIS: ``1{rho <= C} rho`` with ``rho = Π_t rho_t``.

    What it loses is E_rollout[rho 1{rho > C}] = P_train(rho > C): by Markov few sequences, but
    with length almost all of the gradient.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens belong to which sequence, and which count.
        cap: C > 0.
        detach: whether the weight is a constant.

    Returns:
        Weights shaped like the tokens, in [0, C].

    Raises:
        ValueError: C <= 0, or a shape other than the layout's.

    Source:
        Masked importance sampling on sequences.

    >>> seq_mis(torch.tensor([2.0, 3.0, 4.0]).log(), SequenceLayout.from_lengths([2, 1]))
    tensor([0., 0., 4.])
    """
    total = sequence_log_ratio(log_ratio, layout, detach=detach)
    passes = inside_band(_as_given(total.detach(), log_ratio), (0.0, check_cap(cap)))
    return _per_sequence(passes, total, log_ratio, layout)


def geo_mask(
    log_ratio: Tensor, layout: SequenceLayout, *, band: tuple[float, float] = (0.999, 1.001)
) -> Tensor:
    """Geo-Mask: ``1{C_low <= rho_geo <= C_high}``, ``rho_geo = (Π_t rho_t)^(1/T)``; no weight.

    Opposite deviations cancel in rho_geo, and even an all-ones mask is not unbiased for the train
    policy.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens belong to which sequence, and which count.
        band: (C_low, C_high), inclusive.

    Returns:
        0 or 1 per token; constant.

    Raises:
        ValueError: C_low > C_high or C_high <= 0, or a shape other than the layout's.

    Source:
        Geometric sequence masking of RL frameworks.

    >>> geo_mask(torch.tensor([0.2, -0.2, 0.2]), SequenceLayout.from_lengths([2, 1]))
    tensor([1., 1., 0.])
    """
    mean = _as_given(geometric_log_ratio(log_ratio, layout), log_ratio)
    inside = to_tokens(inside_band(mean, check_band("band", band)), layout)
    nothing = torch.zeros_like(_checks.floating("log_ratio", log_ratio))
    return torch.where(layout.token_mask & inside, 1.0, nothing)


def geo_mask_token_tis(
    log_ratio: Tensor,
    layout: SequenceLayout,
    *,
    band: tuple[float, float] = (0.999, 1.001),
    cap: float = 2.0,
    detach: bool = True,
) -> Tensor:
    """Geo-Mask with Token-TIS: ``1{C_low <= rho_geo <= C_high} min(rho_t, C)``.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens belong to which sequence, and which count.
        band: (C_low, C_high) of the geometric mean, inclusive.
        cap: C > 0 of the token ratios.
        detach: whether the weight is a constant; otherwise a capped weight has gradient 0.

    Returns:
        Weights shaped like the tokens, in [0, C].

    Raises:
        ValueError: a band or cap out of range, or a shape other than the layout's.

    Source:
        Presets of RL frameworks.

    >>> geo_mask_token_tis(torch.tensor([100.0, -100.0, 0.0]), SequenceLayout.from_lengths([3]))
    tensor([2.0000e+00, 3.7835e-44, 1.0000e+00])
    """
    accepted = geo_mask(log_ratio, layout, band=band) > 0
    x = _counted(log_ratio, layout, detach)
    return _per_token(accepted, x, layout, check_cap(cap))


def trm(log_ratio: Tensor, layout: SequenceLayout, keep: Tensor, *, detach: bool = True) -> Tensor:
    """TRM with per-token IS: ``M rho_t``, M = 1 for sequences that the verdict keeps.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens belong to which sequence, and which count.
        keep: ``[B]`` bool, a verdict's ``keep``.
        detach: whether the weight is a constant.

    Returns:
        Weights shaped like the tokens, >= 0; exactly 0 in rejected sequences, whatever they hold.

    Raises:
        ValueError: ``keep`` is not bool ``[B]``, or a shape other than the layout's.

    Source:
        Trust Region Masking, arXiv 2512.23075.

    >>> layout = SequenceLayout.from_lengths([1, 1])
    >>> trm(torch.tensor([0.0, 1e30]), layout, torch.tensor([True, False]))
    tensor([1., 0.])
    """
    if keep.dtype != torch.bool or keep.shape != (layout.num_sequences,):
        raise ValueError(
            f"keep must be bool [{layout.num_sequences}], got {keep.dtype} "
            f"{_checks.shape_text(keep)}"
        )
    return _per_token(to_tokens(keep, layout), _counted(log_ratio, layout, detach), layout)


def gspo(log_ratio: Tensor, layout: SequenceLayout, *, detach: bool = True) -> Tensor:
    """GSPO ratio: ``s = (Π_t rho_t)^(1/T)`` at every token of the sequence.

    GSPO calls it a sequence ratio; it is a geometric mean. T is the number of counted tokens.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens belong to which sequence, and which count.
        detach: whether the weight is a constant.

    Returns:
        Weights shaped like the tokens, >= 0.

    Raises:
        ValueError: a shape other than the layout's.

    Numerics:
        The logarithms are summed in float64.

    Source:
        GSPO, arXiv 2507.18071, equation of s_i.

    >>> gspo(torch.tensor([2.0, 8.0]).log(), SequenceLayout.from_lengths([2]))
    tensor([4., 4.])
    """
    mean = geometric_log_ratio(log_ratio, layout, detach=detach)
    return _per_sequence(None, mean, log_ratio, layout)


def sequence_log_ratio(log_ratio: Tensor, layout: SequenceLayout, *, detach: bool = True) -> Tensor:
    """``log Π_t rho_t`` per sequence.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens belong to which sequence, and which count.
        detach: whether the result is a constant.

    Returns:
        float64 ``[B]`` nats; 0 for an empty sequence.

    Raises:
        ValueError: a shape other than the layout's.

    Source:
        Definition.

    >>> sequence_log_ratio(torch.tensor([0.5, 0.25]), SequenceLayout.from_lengths([2, 0]))
    tensor([0.7500, 0.0000], dtype=torch.float64)
    """
    return sum_tokens(_counted(log_ratio, layout, detach), layout)


def geometric_log_ratio(
    log_ratio: Tensor, layout: SequenceLayout, *, detach: bool = True
) -> Tensor:
    """``(1/T) log Π_t rho_t`` per sequence, T the number of counted tokens.

    Args:
        log_ratio: logp_train - logp_rollout, nats, shaped like the tokens.
        layout: which tokens belong to which sequence, and which count.
        detach: whether the result is a constant.

    Returns:
        float64 ``[B]`` nats; 0 for an empty sequence.

    Raises:
        ValueError: a shape other than the layout's.

    Source:
        Definition.

    >>> geometric_log_ratio(torch.tensor([0.5, 0.25]), SequenceLayout.from_lengths([2, 0]))
    tensor([0.3750, 0.0000], dtype=torch.float64)
    """
    total = sequence_log_ratio(log_ratio, layout, detach=detach)
    return total / counts(layout).clamp(min=1)


def product_ratio(rho: float, T: int) -> float:
    """The sequence ratio when every token's ratio is ``rho``: ``rho^T``.

    It says how fast a *constant* drift compounds. It does not say that ratios grow under rollout:
    E_rollout[rho_t | context] = 1 and E_rollout[log rho_t | context] = -KL <= 0, so the typical
    product decays with length; only under the train policy does it grow.

    Args:
        rho: > 0.
        T: number of tokens, >= 0.

    Returns:
        ``rho^T``; inf where it overflows.

    Raises:
        ValueError: rho <= 0 or T < 0.

    Source:
        docs/theory.md, on lengths and ratios.

    >>> round(product_ratio(1.001, 5000), 2)
    148.04
    """
    if not 0 < rho < math.inf or not T >= 0:
        raise ValueError(f"rho must be finite and > 0 and T >= 0, got {rho} and {T}")
    exponent = T * math.log(rho)
    return math.exp(exponent) if exponent < 709 else math.inf


def critical_length(C: float, log_ratio_drift: float) -> float:
    """Length at which a constant drift per token takes the product past C: ``log C / drift``.

    It does not say that longer sequences are mostly rejected: by Markov P_rollout(rho > C) <= 1/C
    at every length. What fails is the mass that stays, E_rollout[rho 1{rho <= C}] =
    P_train(rho <= C), so Seq-MIS silently shrinks the gradient.

    Args:
        C: limit of the sequence ratio, > 1.
        log_ratio_drift: mean log-ratio per token, nats, > 0.

    Returns:
        Tokens; not rounded.

    Raises:
        ValueError: C <= 1 or a drift <= 0.

    Source:
        docs/theory.md, on lengths and ratios.

    >>> round(critical_length(5, math.log(1.001)), 2)
    1610.24
    """
    if not 1 < C < math.inf or not log_ratio_drift > 0:
        raise ValueError(
            f"C must be finite and > 1 and log_ratio_drift > 0, got {C} and {log_ratio_drift}"
        )
    return math.log(C) / log_ratio_drift


def check_cap(cap: object) -> float:
    """A cap is a number > 0; inf for none."""
    value = _checks.check_threshold("cap", cap)
    if value <= 0:
        raise ValueError(f"cap must be > 0, got {value}")
    return value


def ppo_branches(
    log_rho: Tensor, advantages: Tensor, clip: float | Sequence[float]
) -> tuple[tuple[Tensor, float], ...]:
    """PPO's clipped branches high, low and dual: where each is active, and its ratio."""
    parts = tuple(clip) if isinstance(clip, Sequence) else (clip, clip)
    if len(parts) not in (2, 3):
        raise ValueError(f"clip is eps, (low, high) or (low, high, dual), got {clip}")
    low, high = (_checks.check_threshold("clip epsilon", part) for part in parts[:2])
    dual = _checks.check_threshold("dual clip", parts[2]) if len(parts) == 3 else math.inf
    if not dual > 1 + high:
        raise ValueError(f"dual clip must exceed 1 + {high}, got {dual}")
    floor = math.log1p(-low) if low < 1 else -math.inf
    return (
        ((advantages > 0) & (log_rho > math.log1p(high)), 1 + high),
        ((advantages < 0) & (log_rho < floor), 1 - low),
        ((advantages < 0) & (log_rho > math.log(dual)), dual),
    )


def _counted(log_ratio: Tensor, layout: SequenceLayout, detach: bool) -> Tensor:
    """Log-ratios with 0 at tokens that do not count."""
    x = _checks.floating("log_ratio", log_ratio)
    layout.check("log_ratio", x)
    return torch.where(layout.token_mask, x.detach() if detach else x, 0.0)


def _per_token(passes: Tensor, x: Tensor, layout: SequenceLayout, cap: float = math.inf) -> Tensor:
    """``min(exp(x), cap)`` where ``passes`` and the token counts, 0 elsewhere."""
    passes = passes & layout.token_mask
    return torch.where(passes, _capped_exp(torch.where(passes, x, 0.0), cap), 0.0)


def _per_sequence(
    passes: Tensor | None,
    total: Tensor,
    log_ratio: Tensor,
    layout: SequenceLayout,
    cap: float = math.inf,
) -> Tensor:
    """``min(exp(total), cap)`` of each sequence at its counted tokens, 0 where it does not pass."""
    if passes is None:
        weight = _capped_exp(total, cap)
    else:
        weight = torch.where(passes, _capped_exp(torch.where(passes, total, 0.0), cap), 0.0)
    weight = _as_given(weight, log_ratio)
    return torch.where(layout.token_mask, to_tokens(weight, layout), 0.0)


def _capped_exp(x: Tensor, cap: float) -> Tensor:
    return x.clamp(max=LOG_RATIO_LIMIT).exp().clamp(max=cap)


def _as_given(per_sequence: Tensor, log_ratio: Tensor) -> Tensor:
    """Rounded to the log-ratio's precision, float32 or float64."""
    return per_sequence.to(_checks.floating("log_ratio", log_ratio).dtype)
