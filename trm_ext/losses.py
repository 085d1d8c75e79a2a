# SPDX-License-Identifier: Apache-2.0
"""Stage 4: the surrogate losses of the estimator table, on one convention.

Every estimator is a value v_t and a gradient weight w_t per token, both constants, and

    loss = -(1/D) Σ_t (A_t v_t + u_t s_t) + (kl_coef/D) Σ_t kl_t,    s_t = logp_train_t - const = 0

over the tokens that stay. With ``u_t = A_t w_t`` the gradient is exactly ``-(1/D) Σ A_t w_t ∇
logp_train_t``; without detach u_t is the derivative of ``Σ A w`` with respect to logp_train_t. No
exp takes part in the backward pass and nothing outside those tokens enters at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trm_ext import _checks, _sequences, estimators, weights
from trm_ext.layout import SequenceLayout
from trm_ext.masks import SequenceVerdict, check_band, inside_band, warn_identical

__all__ = ["DENOMINATORS", "ESTIMATORS", "group_advantages", "loss_denominator", "policy_loss"]

DENOMINATORS = ("sequences", "kept_sequences", "tokens", "kept_tokens")
#: Estimators, with what ``clip`` and ``band`` are by default; None: the estimator takes none.
ESTIMATORS: dict[str, tuple[tuple[float, ...] | float | None, tuple[float, float] | None]] = {
    "token_is": (None, None),
    "ppo_clip": ((0.2, 0.2), None),
    "token_tis": (2.0, None),
    "token_mask": (None, (0.0, math.inf)),
    "icepop": (None, (0.5, 5.0)),
    "seq_is": (None, None),
    "seq_tis": (5.0, None),
    "seq_mis": (5.0, None),
    "geo_mask": (None, (0.999, 1.001)),
    "geo_mask_token_tis": (2.0, (0.999, 1.001)),
    "gspo": ((3e-4, 4e-4), None),
    "trm": (None, None),
}
#: Estimators whose weight is one number per sequence: each token's log-ratio moves it everywhere.
_SEQUENCE_WEIGHTS = ("seq_is", "seq_tis", "seq_mis", "gspo")


class _Terms(NamedTuple):
    """Per-token constants of an estimator, and which tokens it keeps and clips."""

    value: Tensor
    weight: Tensor
    kept: Tensor
    clipped_high: Tensor
    clipped_low: Tensor
    clipped_dual: Tensor


def policy_loss(
    logp_train: Tensor,
    logp_rollout: Tensor,
    advantages: Tensor,
    layout: SequenceLayout,
    *,
    estimator: str = "trm",
    verdict: SequenceVerdict | None = None,
    clip: float | Sequence[float] | None = None,
    band: Sequence[float] | None = None,
    denominator: str | float | Tensor = "sequences",
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    detach: bool = True,
    infinity_cap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor | float]]:
    """Surrogate loss of one estimator, and its metrics.

    ``gradient = -(1/D) Σ_t A_t w_t ∇ logp_train_t`` with rho_t = exp(logp_train - logp_rollout):

    | estimator | w_t | takes (default) |
    | --- | --- | --- |
    | token_is | rho_t | |
    | ppo_clip | rho_t; 0 in the clipped branch | clip = eps, (low, high[, dual]) (0.2) |
    | token_tis | min(rho_t, C) | clip = C (2) |
    | token_mask | rho_t on the verdict's tokens and in the band | band, or a verdict |
    | icepop | 1{low <= rho_t <= high} rho_t | band (0.5, 5) |
    | seq_is | Π rho | |
    | seq_tis | min(Π rho, C) | clip = C (5) |
    | seq_mis | 1{Π rho <= C} Π rho | clip = C (5) |
    | geo_mask | 1{low <= rho_geo <= high} | band (0.999, 1.001) |
    | geo_mask_token_tis | the same times min(rho_t, C) | band, clip = C (2) |
    | gspo | rho_geo / T with PPO's clip on rho_geo | clip as ppo_clip (3e-4, 4e-4) |
    | trm | M rho_t, M = 1 for kept sequences | verdict (required) |

    With ``detach=False`` the same loss is differentiated as it stands, through its weights:
    ``gradient = -(1/D) Σ_t A_t ∇w_t``. Nothing changes for weights that are rho_t or 0, as
    ``∇rho_t = rho_t ∇logp_train_t``. A capped weight has gradient 0: token_tis and
    geo_mask_token_tis stop moving capped tokens. A sequence's weight stands at each of its tokens:
    the gradient of seq_is, seq_tis and seq_mis is ``Σ_t A_t`` times that of the ratio, and gspo
    takes the mean advantage. geo_mask has no weight to differentiate and refuses. Tokens that do
    not stay get no gradient either way.

    A verdict masks any estimator. Sequence statistics are over all counted tokens, whatever the
    verdict masks; in a layout of pieces over those that it holds, so there take an estimator whose
    weight is the token's. A sequence with a log-ratio (or ``kl``) that is not finite at a counted
    token is rejected, an infinite one unless ``infinity_cap`` says what it counts as. With nothing
    left the loss is 0 with a live graph and zero gradients, and ``trm/loss/all_rejected`` is 1.
    PPO's clipped branch: rho > 1 + high for A > 0, rho < 1 - low for A < 0, and, with dual, rho >
    dual for A < 0; the boundary is not clipped.

    Args:
        logp_train: log-probs of the sampled tokens, nats, shaped like the tokens; with gradient.
        logp_rollout: the same under the policy that sampled; no gradient flows.
        advantages: ``[B]`` per sequence, or shaped like the tokens; floating point, no gradient
            flows. In a packed batch with as many tokens as sequences ``[B]`` is meant.
        layout: which tokens belong to which sequence, and which count.
        estimator: a row of the table.
        verdict: what :func:`trm_ext.verdict` returned for this layout.
        clip: see the table.
        band: (low, high), see the table.
        denominator: D. ``sequences`` (default, the paper's N) counts all of the layout, rejected
            and empty ones included; ``kept_sequences``; ``tokens`` that count; ``kept_tokens``; or
            a number > 0, as gradient accumulation needs it (:func:`loss_denominator`). A count of
            0 acts as 1; a 0-d tensor that is NaN or negative makes the loss NaN.
        kl: exact KL(rollout||train) per token with its gradient, for a penalty over the tokens
            that stay.
        kl_coef: weight of the penalty, >= 0.
        detach: whether the weight is a constant, as in :mod:`trm_ext.weights`.
        infinity_cap: what an infinite log-ratio or ``kl`` counts as, nats, finite, > 0; its sign
            stays. A capped value is a constant: its token gets no gradient from it.
            ``trm/loss/capped_tokens`` counts such tokens. None rejects the sequence. The verdict
            has its own ``infinity_cap``.

    Returns:
        The scalar loss (float32, or float64 for float64 log-probs), and ``trm/...`` metrics: 0-d
        tensors without gradient (:func:`trm_ext.as_floats` moves all of them at once). No host
        synchronisation: values are looked at only on a CPU outside ``torch.compile``.

    Raises:
        TypeError: inputs that are not floating point.
        ValueError: an unknown estimator or denominator, options that it does not take or that are
            out of range, shapes other than the layout's, an advantage that is not finite at a token
            that stays. On a GPU and under ``torch.compile`` such an advantage makes the loss NaN,
            ``trm/loss/bad_advantages`` counts them and ``trm/loss/first_bad_advantage`` is the
            first one's index among the flattened tokens (-1: none).

    Warns:
        UserWarning: once per process, where every log-ratio is exactly 0: the same log-probs were
            given twice. Where values are not looked at, ``trm/ratio/identical`` is 1.

    Numerics:
        exp saturates at :data:`trm_ext.estimators.LOG_RATIO_LIMIT`; sums in float64.

    Source:
        Trust Region Masking, arXiv 2512.23075, and docs/conventions.md.

    >>> layout = SequenceLayout.from_lengths([1, 1])
    >>> logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    >>> rollout = torch.tensor([-1.0, -2.0 - math.log(2)])
    >>> loss, _ = policy_loss(
    ...     logp, rollout, torch.tensor([1.0, 3.0]), layout, estimator="token_is"
    ... )
    >>> loss.backward()
    >>> loss.item(), logp.grad
    (-3.5, tensor([-0.5000, -3.0000]))
    """
    raw = estimators.log_ratio(logp_train.detach(), logp_rollout.detach())
    layout.check("logp_train", raw)
    advantages = _per_token_advantages(advantages, layout)
    if kl is not None:
        layout.check("kl", kl)
        kl = _checks.floating("kl", kl)
    elif kl_coef:
        raise ValueError(f"kl_coef is {kl_coef} but kl is missing")
    if not 0 <= kl_coef < math.inf:
        raise ValueError(f"kl_coef must be a finite number >= 0, got {kl_coef}")
    if not detach and estimator == "geo_mask":
        raise ValueError("estimator 'geo_mask' has no weight to differentiate, got detach=False")
    ratio, kl, infinite = _capped(raw, kl, infinity_cap)

    usable = _usable(ratio, kl, layout)
    stays = _staying(usable, verdict, layout)
    terms = _terms(estimator, ratio, advantages, layout, verdict, clip, band)
    stays = stays & terms.kept
    _check_advantages(advantages, stays)
    advantages = torch.where(stays, advantages, 0.0).to(ratio.dtype)

    trained = _checks.floating("logp_train", logp_train)
    score = torch.where(stays & ~torch.isinf(raw), trained - trained.detach(), 0.0)
    value, weight = (torch.where(stays, x, 0.0) for x in (terms.value, terms.weight))
    slope = advantages * weight
    if not detach:
        slope = _through_weights(slope, estimator, terms, ratio, layout)
    policy = -(advantages * value + slope * score).sum(dtype=torch.float64)
    penalty = policy.new_zeros(())
    if kl is not None:
        penalty = kl_coef * torch.where(stays, kl, 0.0).sum(dtype=torch.float64)

    counted = _counts(stays, layout)
    divisor = _divisor(denominator, counted, layout)
    loss = ((policy + penalty) / divisor).to(ratio.dtype)
    metrics = _metrics(terms, stays, usable, raw, advantages, counted, layout)
    metrics["trm/loss/capped_tokens"] = (layout.token_mask & infinite).sum().double()
    metrics["trm/loss/policy"] = (policy / divisor).detach()
    metrics["trm/loss/kl"] = (penalty / divisor).detach()
    metrics["trm/loss/denominator"] = divisor
    if _free_to_look(raw) and metrics["trm/ratio/identical"] == 1:
        warn_identical()
    return loss, metrics


@torch.no_grad()
def loss_denominator(
    denominator: str,
    logp_train: Tensor,
    logp_rollout: Tensor,
    layout: SequenceLayout,
    *,
    estimator: str = "trm",
    verdict: SequenceVerdict | None = None,
    clip: float | Sequence[float] | None = None,
    band: Sequence[float] | None = None,
    kl: Tensor | None = None,
    infinity_cap: float | None = None,
) -> Tensor:
    """The count that ``policy_loss`` would divide by: to sum over micro-batches and ranks first.

    With the sum given to each micro-batch as ``denominator``, the losses and gradients of the
    micro-batches add up to those of the whole batch.

    Args:
        denominator: one of :data:`DENOMINATORS`.
        logp_train: as for :func:`policy_loss`, as are all others.
        logp_rollout: likewise.
        layout: likewise.
        estimator: likewise; its own mask counts as rejection in ``kept_...``, clipping does not.
        verdict: likewise.
        clip: likewise.
        band: likewise.
        kl: likewise.
        infinity_cap: likewise.

    Returns:
        0-d float64 tensor, >= 0. No host synchronisation.

    Raises:
        ValueError: as :func:`policy_loss`.

    Source:
        docs/conventions.md, on denominators.

    >>> layout = SequenceLayout.from_lengths([2, 1])
    >>> zero = torch.zeros(3)
    >>> loss_denominator("tokens", zero, zero, layout, estimator="token_is").item()
    3.0
    """
    if denominator not in DENOMINATORS:
        raise ValueError(_unknown("denominator", denominator, DENOMINATORS))
    raw = estimators.log_ratio(logp_train.detach(), logp_rollout.detach())
    layout.check("logp_train", raw)
    kl = None if kl is None else _checks.floating("kl", kl)
    ratio, kl, _ = _capped(raw, kl, infinity_cap)
    usable = _usable(ratio, kl, layout)
    stays = _staying(usable, verdict, layout)
    # No estimator's mask depends on the advantage; clipping is not a mask.
    terms = _terms(estimator, ratio, torch.zeros_like(ratio), layout, verdict, clip, band)
    return _counts(stays & terms.kept, layout)[denominator]


@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    keep: Tensor | None = None,
    *,
    num_groups: int | None = None,
    normalize: bool = False,
    lone: str = "reward",
    eps: float = 1e-6,
) -> Tensor:
    """GRPO advantages whose baseline is the mean reward of the kept siblings only.

    ``A_i = keep_i (R_i - mean{R_j : j in group, keep_j})``, divided by their sample standard
    deviation + eps with ``normalize``.

    Args:
        rewards: ``[B]`` floating point. Rewards of sequences that are not kept are never used.
        groups: ``[B]`` int64 group ids in 0 .. num_groups - 1.
        keep: ``[B]`` bool, a verdict's ``keep``; None keeps all.
        num_groups: None takes B.
        normalize: whether to divide by the standard deviation; it widens the reward's span.
        lone: the advantage of a sequence without kept siblings: ``reward`` (no baseline, unbiased)
            or ``zero`` (its own reward as baseline: no signal).
        eps: added to the standard deviation.

    Returns:
        ``[B]``, dtype of the rewards (float32 or better). No host synchronisation.

    Raises:
        TypeError: rewards that are not floating point, groups not int64, keep not bool.
        ValueError: shapes that differ, an unknown ``lone``; on a CPU a group id out of range.

    Numerics:
        Sums in float64.

    Source:
        GRPO, arXiv 2402.03300, with the baseline restricted to what stays in the gradient.

    >>> rewards, groups = torch.tensor([100.0, 1.0, 3.0]), torch.zeros(3, dtype=torch.int64)
    >>> group_advantages(rewards, groups, torch.tensor([False, True, True]))
    tensor([ 0., -1.,  1.])
    """
    values = _checks.floating("rewards", rewards)
    if groups.dtype != torch.int64:
        raise TypeError(f"groups must be int64, got {groups.dtype}")
    if keep is None:
        keep = torch.ones_like(groups, dtype=torch.bool)
    if keep.dtype != torch.bool:
        raise TypeError(f"keep must be bool, got {keep.dtype}")
    if values.dim() != 1 or not values.shape == groups.shape == keep.shape:
        shapes = ", ".join(_checks.shape_text(x) for x in (values, groups, keep))
        raise ValueError(f"rewards, groups and keep must all be [B], got {shapes}")
    if lone not in ("reward", "zero"):
        raise ValueError(_unknown("lone", lone, ("reward", "zero")))
    number = values.shape[0] if num_groups is None else num_groups
    if _free_to_look(groups) and groups.numel():
        low, high = (int(end) for end in groups.aminmax())
        if low < 0 or high >= number:
            wrong = low if low < 0 else high
            raise ValueError(f"groups must be in 0..{number - 1} (num_groups), got {wrong}")
    kept = torch.where(keep, values, 0.0).double()

    def total(entries: Tensor) -> Tensor:
        """Sum over each sequence's group."""
        return entries.new_zeros(number).index_add(0, groups, entries)[groups]

    count = total(keep.double())
    centred = torch.where(keep, kept - total(kept) / count.clamp(min=1), 0.0)
    if normalize:
        spread = (total(centred.square()) / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (spread + eps)
    if lone == "reward":
        centred = torch.where(keep & (count == 1), kept, centred)
    return centred.to(values.dtype)


def _terms(
    estimator: str,
    ratio: Tensor,
    advantages: Tensor,
    layout: SequenceLayout,
    verdict: SequenceVerdict | None,
    clip: float | Sequence[float] | None,
    band: Sequence[float] | None,
) -> _Terms:
    """Value, gradient weight and mask of each token: the table's right-hand side.

    Tokens that do not stay may hold anything, NaN too; the caller selects.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(_unknown("estimator", estimator, tuple(ESTIMATORS)))
    default_clip, default_band = ESTIMATORS[estimator]
    for name, given, default in (("clip", clip, default_clip), ("band", band, default_band)):
        if given is not None and default is None:
            raise ValueError(f"estimator {estimator!r} takes no {name}, got {given}")
    if estimator == "trm" and verdict is None:
        raise ValueError("estimator 'trm' needs verdict: compute it with verdict(...)")
    if estimator == "token_mask" and verdict is None and band is None:
        raise ValueError("estimator 'token_mask' needs a verdict or a band")
    limits = None if default_band is None else check_band("band", band or default_band)

    kept = layout.token_mask
    never = torch.zeros_like(kept)

    if estimator in ("ppo_clip", "gspo"):
        assert isinstance(default_clip, tuple)
        clip_range = default_clip if clip is None else clip
        if estimator == "gspo":
            log_rho = weights.geometric_log_ratio(ratio, layout).to(ratio.dtype)
            log_rho = _sequences.to_tokens(log_rho, layout)
            rho = weights.gspo(ratio, layout)
            length = _sequences.to_tokens(_sequences.counts(layout).clamp(min=1), layout)
            share = (1 / length).to(ratio.dtype)
        else:
            log_rho, rho = ratio, weights.token_is(ratio, layout)
            share = torch.ones_like(ratio)
        branches = weights.ppo_branches(log_rho, advantages, clip_range)
        value, weight = rho, rho
        for branch, bound in branches:
            value = torch.where(branch, bound, value)
            weight = torch.where(branch, 0.0, weight)
        high, low, dual = (branch for branch, _ in branches)
        return _Terms(value * share, weight * share, kept, high, low, dual)

    cap = math.inf
    if default_clip is not None:
        if isinstance(clip, Sequence):
            raise ValueError(f"clip of {estimator!r} is one number C, got {clip}")
        cap = weights.check_cap(default_clip if clip is None else clip)
    log_cap = math.log(cap)
    rejected = never
    if estimator in ("token_is", "trm"):
        weight = weights.token_is(ratio, layout)
    elif estimator == "token_tis":
        weight = weights.token_tis(ratio, layout, cap=cap)
    elif estimator in ("token_mask", "icepop"):
        assert limits is not None
        weight = weights.token_mask(ratio, layout, band=limits)
        rejected = ~inside_band(ratio, limits)
    elif estimator == "seq_is":
        weight = weights.seq_is(ratio, layout)
    elif estimator == "seq_tis":
        weight = weights.seq_tis(ratio, layout, cap=cap)
    elif estimator == "seq_mis":
        weight = weights.seq_mis(ratio, layout, cap=cap)
        total = weights.sequence_log_ratio(ratio, layout).to(ratio.dtype)
        rejected = _sequences.to_tokens(total > log_cap, layout)
    else:
        assert limits is not None
        accepted = weights.geo_mask(ratio, layout, band=limits)
        rejected = accepted == 0
        weight = accepted
        if estimator == "geo_mask_token_tis":
            weight = accepted * weights.token_tis(ratio, layout, cap=cap)
    capped = never
    if estimator in ("token_tis", "geo_mask_token_tis"):
        capped = ratio > log_cap
    elif estimator == "seq_tis":
        total = weights.sequence_log_ratio(ratio, layout).to(ratio.dtype)
        capped = _sequences.to_tokens(total > log_cap, layout)
    return _Terms(weight, weight, kept & ~rejected, capped, never, never)


def _through_weights(
    slope: Tensor, estimator: str, terms: _Terms, ratio: Tensor, layout: SequenceLayout
) -> Tensor:
    """Derivative of ``Σ_t A_t w_t`` with respect to each token's log-ratio.

    ``slope`` is ``A_t w_t``; a weight at its cap, or where exp saturates, does not move.
    """
    statistic = ratio
    if estimator in _SEQUENCE_WEIGHTS:
        of_sequence = (
            weights.geometric_log_ratio if estimator == "gspo" else weights.sequence_log_ratio
        )
        statistic = _sequences.to_tokens(of_sequence(ratio, layout), layout)
    still = terms.clipped_high | (statistic > estimators.LOG_RATIO_LIMIT)
    slope = torch.where(still, 0.0, slope)
    if estimator not in _SEQUENCE_WEIGHTS:
        return slope
    total = _sequences.sum_tokens(slope, layout)
    if estimator == "gspo":
        total = total / _sequences.counts(layout).clamp(min=1)
    return _sequences.to_tokens(total.to(slope.dtype), layout)


def _capped(
    ratio: Tensor, kl: Tensor | None, cap: float | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The log-ratio and the KL with infinities capped, and where that was."""
    if cap is None:
        return ratio, kl, torch.zeros_like(ratio, dtype=torch.bool)
    infinite = torch.isinf(ratio)
    if kl is not None:
        infinite = infinite | torch.isinf(kl.detach())
        kl = estimators.cap_infinite(kl, cap)
    return estimators.cap_infinite(ratio, cap), kl, infinite


def _usable(ratio: Tensor, kl: Tensor | None, layout: SequenceLayout) -> Tensor:
    """Sequences ``[B]`` whose evidence is finite at every counted token."""
    bad = ~torch.isfinite(ratio)
    if kl is not None:
        bad = bad | ~torch.isfinite(kl.detach())
    return ~_sequences.any_token(bad, layout)[0]


def _staying(usable: Tensor, verdict: SequenceVerdict | None, layout: SequenceLayout) -> Tensor:
    """Tokens that neither the verdict nor missing evidence masks."""
    stays = layout.token_mask & _sequences.to_tokens(usable, layout)
    if verdict is None:
        return stays
    layout.check("the verdict", verdict.token_keep)
    if verdict.keep.shape[0] != layout.num_sequences:
        raise ValueError(
            f"the verdict is about {verdict.keep.shape[0]} sequences, "
            f"the layout has {layout.num_sequences}"
        )
    return stays & verdict.token_keep


def _counts(stays: Tensor, layout: SequenceLayout) -> dict[str, Tensor]:
    """Every denominator, as 0-d float64 tensors without a minimum."""
    kept, _ = _sequences.any_token(stays, layout)
    some = stays.new_zeros((), dtype=torch.float64)
    return {
        "sequences": some + layout.num_sequences,
        "kept_sequences": kept.sum().double(),
        "tokens": layout.token_mask.sum().double(),
        "kept_tokens": stays.sum().double(),
    }


def _divisor(
    denominator: str | float | Tensor, counted: dict[str, Tensor], layout: SequenceLayout
) -> Tensor:
    if isinstance(denominator, str):
        if denominator not in DENOMINATORS:
            raise ValueError(_unknown("denominator", denominator, (*DENOMINATORS, "a number > 0")))
        return counted[denominator].clamp(min=1)
    if isinstance(denominator, Tensor):
        if denominator.dim() != 0:
            raise ValueError(
                f"denominator must be a 0-d tensor, got {_checks.shape_text(denominator)}"
            )
        number = denominator.detach().double()
        return torch.where(number == 0, 1.0, torch.where(number > 0, number, math.nan))
    if not isinstance(denominator, (int, float)) or not 0 < denominator < math.inf:
        raise ValueError(f"denominator must be a name or a finite number > 0, got {denominator!r}")
    return counted["tokens"].new_zeros(()) + denominator


def _per_token_advantages(advantages: Tensor, layout: SequenceLayout) -> Tensor:
    if not isinstance(advantages, Tensor) or not advantages.is_floating_point():
        kind = advantages.dtype if isinstance(advantages, Tensor) else type(advantages).__name__
        raise TypeError(f"advantages must be a floating-point tensor, got {kind}")
    advantages = advantages.detach()
    if advantages.shape == (layout.num_sequences,):
        return _sequences.to_tokens(advantages, layout)
    if advantages.shape != layout.shape:
        raise ValueError(
            f"advantages must be [{layout.num_sequences}] or have the layout's token shape "
            f"{list(layout.shape)}, got {_checks.shape_text(advantages)}"
        )
    return advantages


def _free_to_look(values: Tensor) -> bool:
    """Whether reading a value waits for no device and breaks no graph."""
    return (
        not torch.compiler.is_compiling() and type(values) is Tensor and values.device.type == "cpu"
    )


def _check_advantages(advantages: Tensor, stays: Tensor) -> None:
    """Names an advantage that is not finite, where looking is free."""
    if not _free_to_look(advantages):
        return
    bad = stays & ~torch.isfinite(advantages)
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        where = index if len(index) > 1 else index[0]
        raise ValueError(f"advantages is {advantages[tuple(index)]} at kept token {where}")


@torch.no_grad()
def _metrics(
    terms: _Terms,
    stays: Tensor,
    usable: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    counted: dict[str, Tensor],
    layout: SequenceLayout,
) -> dict[str, Tensor | float]:
    """What the loss did: shares of counted tokens and of sequences with any."""
    some = (_sequences.counts(layout) > 0).sum().double()
    tokens = counted["tokens"]
    weight = torch.where(stays, terms.weight, 0.0).double()
    square = weight.square().sum()
    effective = torch.where(square > 0, weight.sum().square() / square, 0.0)
    # Raw, before caps and masks; sequences without evidence have no ratio.
    seen = layout.token_mask & _sequences.to_tokens(usable, layout)
    inf = ratio.new_full((1,), math.inf)
    highest = torch.cat([torch.where(seen, ratio, -math.inf).flatten(), -inf]).max().double()
    lowest = torch.cat([torch.where(seen, ratio, math.inf).flatten(), inf]).min().double()
    any_seen = seen.sum() > 0
    bad = stays & ~torch.isfinite(advantages)
    index = torch.arange(bad.numel(), device=bad.device).reshape(bad.shape)
    none = index.new_full((1,), bad.numel())
    first_bad = torch.cat([torch.where(bad, index, bad.numel()).flatten(), none]).min()

    def share(of: Tensor) -> Tensor:
        return (of & stays).sum().double() / tokens.clamp(min=1)

    return {
        "trm/loss/sequences": some,
        "trm/loss/sequences_kept": counted["kept_sequences"],
        "trm/loss/tokens": tokens,
        "trm/loss/tokens_kept": counted["kept_tokens"],
        "trm/loss/kept_ratio": counted["kept_sequences"] / some.clamp(min=1),
        "trm/loss/kept_token_ratio": counted["kept_tokens"] / tokens.clamp(min=1),
        "trm/loss/all_rejected": (counted["kept_tokens"] == 0).double(),
        "trm/loss/unusable_sequences": (~usable).sum().double(),
        "trm/loss/bad_advantages": bad.sum().double(),
        "trm/loss/first_bad_advantage": torch.where(bad.any(), first_bad, -1).double(),
        "trm/clip/high": share(terms.clipped_high),
        "trm/clip/low": share(terms.clipped_low),
        "trm/clip/dual": share(terms.clipped_dual),
        "trm/weights/ess": effective / counted["kept_tokens"].clamp(min=1),
        "trm/weights/max": torch.cat([weight.flatten(), weight.new_zeros(1)]).max(),
        "trm/ratio/log_max": torch.where(any_seen, highest, 0.0),
        "trm/ratio/log_min": torch.where(any_seen, lowest, 0.0),
        "trm/ratio/identical": (any_seen & (highest == 0) & (lowest == 0)).double(),
    }


def _unknown(what: str, given: object, known: Sequence[str]) -> str:
    return f"unknown {what} {given!r}; choose from {', '.join(known)}"
