# SPDX-License-Identifier: Apache-2.0
"""Plain numbers for any logger: ``dict[str, 0-d tensor]``, or floats where you ask for them.

Everything comes from raw per-token values, before caps and masks. Ratios of counts come with their
counts, so that ranks can add numerators and denominators instead of averaging averages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trm_ext import _sequences, estimators
from trm_ext.divergence import TokenDivergence
from trm_ext.layout import SequenceLayout
from trm_ext.masks import SequenceVerdict, _evidence, as_floats

__all__ = ["batch_metrics", "effective_sample_size", "threshold_for_acceptance"]

LENGTH_EDGES = (256, 1024, 4096, 16384)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


@torch.no_grad()
def batch_metrics(
    layout: SequenceLayout,
    *,
    verdict: SequenceVerdict | None = None,
    divergence: TokenDivergence | Mapping[str, Tensor] | None = None,
    log_ratio: Tensor | None = None,
    weights: Tensor | None = None,
    other: SequenceVerdict | None = None,
    length_edges: Sequence[int] = LENGTH_EDGES,
    sync: bool = False,
) -> dict[str, Tensor | float]:
    """Metrics of a batch from whatever is there, over tokens that count.

    ==========================  ===================================================================
    ``trm/accepted...``         share of the sequences that are not empty (``trm/sequences``) that
                                the verdict keeps, also by length: ``trm/accepted/len_257_1024``
    ``trm/rejected/REASON``     share of them rejected for a reason
    ``trm/kl/...``              mean, max and quantiles p50, p90, p99, p99.9 over tokens with a
                                finite exact KL; ``not_finite`` counts the others; ``seq_max``,
                                ``seq_mean``, ``seq_sum``: mean and ``_max`` over finite sequences
                                (``trm/kl/sequences``)
    ``trm/k1``, ``trm/k3`` ...  means over tokens with a finite log-ratio (``trm/ratio/tokens``);
                                abs_log_ratio also max
    ``trm/ratio/identical``     1 if every log-ratio is exactly 0: the same numbers twice?
    ``trm/estimate/...``        k1 and k3 minus the exact KL, mean over tokens that have both
                                (``trm/estimate/tokens``)
    ``trm/weights/ess``         (Σw)²/Σw² over the number of weights that are not 0
    ``trm/agreement...``        share of sequences on which ``verdict`` and ``other`` agree, and
                                that only one rejects: ``.../missed`` (verdict does, other keeps)
                                and ``.../extra``
    ==========================  ===================================================================

    A share or mean of nothing is NaN.

    Args:
        layout: which tokens belong to which sequence, and which count.
        verdict: for acceptance.
        divergence: per-token values with ``kl``: a TokenDivergence or a dict.
        log_ratio: logp_train - logp_rollout, shaped like the tokens.
        weights: importance weights shaped like the tokens.
        other: a second verdict on the same layout, for example from an estimator.
        length_edges: increasing upper ends of the length buckets, in counted tokens; the last
            bucket is open.
        sync: True returns Python floats, which waits for the device once.

    Returns:
        A dict with ``trm/...`` keys; the keys depend on what was given, not on values.

    Warns:
        UserWarning: with ``sync``, once per process, where ``trm/ratio/identical`` is 1.

    Raises:
        TypeError: values that are not floating-point tensors.
        ValueError: a shape other than the layout's, length_edges that do not increase.

    Numerics:
        Sums in float64.

    Source:
        docs/conventions.md, on metrics.

    >>> layout = SequenceLayout.from_lengths([2, 1])
    >>> found = batch_metrics(layout, log_ratio=torch.tensor([0.5, -0.5, 0.0]), sync=True)
    >>> found["trm/k1"], round(found["trm/k3"], 4)
    (0.0, 0.0851)
    """
    evidence = _evidence(layout, divergence, log_ratio)
    length = _sequences.counts(layout)
    found: dict[str, Tensor | float] = {
        "trm/sequences": (length > 0).sum().double(),
        "trm/tokens": layout.token_mask.sum().double(),
    }
    if verdict is not None:
        found.update(verdict.metrics())
        found.update(_by_length(verdict, length, length_edges))
        if other is not None:
            found.update(_agreement(verdict, other, length))
    kl, ratio = evidence.divergence.get("kl"), evidence.log_ratio
    if kl is not None:
        found.update(_kl(kl, layout))
    if ratio is not None:
        found.update(_ratio(ratio, layout))
    if kl is not None and ratio is not None:
        both = layout.token_mask & torch.isfinite(kl) & torch.isfinite(ratio)
        found["trm/estimate/tokens"] = both.sum().double()
        for name in ("k1", "k3"):
            gap = estimators.FROM_LOG_RATIO[name](ratio).double() - kl
            found[f"trm/estimate/{name}_minus_kl"] = _mean(gap, both)
    if weights is not None:
        layout.check("weights", weights)
        used = torch.where(layout.token_mask, weights.detach().double(), 0.0)
        found["trm/weights/ess"] = effective_sample_size(used) / (used != 0).sum()
        found["trm/weights/mean"] = _mean(used, layout.token_mask)
    return as_floats(found) if sync else found


def effective_sample_size(weights: Tensor) -> Tensor:
    """Kish's effective sample size ``(Σw)² / Σw²``.

    Args:
        weights: any shape, >= 0; zeros do not matter.

    Returns:
        0-d float64 tensor between 1 and the number of weights that are not 0; NaN if all are.

    Source:
        L. Kish, Survey Sampling (1965).

    >>> effective_sample_size(torch.tensor([1.0, 1.0, 0.0]))
    tensor(2., dtype=torch.float64)
    """
    wide = weights.double()
    return wide.sum().square() / wide.square().sum()


def threshold_for_acceptance(statistic: Tensor, acceptance: float) -> Tensor:
    """The smallest limit at which a share ``acceptance`` of the sequences would be kept.

    Acceptance is a consequence, not evidence: a threshold chosen this way certifies nothing.

    Args:
        statistic: ``[B]``, such as ``verdict.max_kl``; values that are not finite are sequences
            that no limit keeps.
        acceptance: in (0, 1].

    Returns:
        0-d tensor; inf where so many sequences cannot be kept. No host synchronisation.

    Raises:
        ValueError: an acceptance outside (0, 1], or no sequence.

    Source:
        Nearest-rank quantile.

    >>> threshold_for_acceptance(torch.tensor([0.1, 0.4, 0.2, 0.3]), 0.75)
    tensor(0.3000)
    """
    if not 0 < acceptance <= 1:
        raise ValueError(f"acceptance must be in (0, 1], got {acceptance}")
    if statistic.dim() != 1 or statistic.shape[0] == 0:
        raise ValueError(f"statistic must be [B] with B > 0, got {list(statistic.shape)}")
    ranked = torch.where(torch.isfinite(statistic), statistic, math.inf).sort().values
    rank = math.ceil(acceptance * statistic.shape[0] - 1e-9)
    return ranked[rank - 1]


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Float64 mean over ``where``; NaN over nothing."""
    return torch.where(where, values.double(), 0.0).sum() / where.sum()


def _largest(values: Tensor, where: Tensor) -> Tensor:
    """Float64 max over ``where``; NaN over nothing."""
    low = values.new_full((1,), -math.inf)
    found = torch.cat([torch.where(where, values, -math.inf).flatten(), low]).max()
    return torch.where(where.any(), found.double(), math.nan)


def _kl(kl: Tensor, layout: SequenceLayout) -> dict[str, Tensor | float]:
    finite = layout.token_mask & torch.isfinite(kl)
    number = finite.sum()
    found: dict[str, Tensor | float] = {
        "trm/kl/tokens": number.double(),
        "trm/kl/not_finite": (layout.token_mask & ~finite).sum().double(),
        "trm/kl/mean": _mean(kl, finite),
        "trm/kl/max": _largest(kl, finite),
    }
    everything = [torch.where(finite, kl, math.inf).flatten(), kl.new_full((1,), math.inf)]
    ranked = torch.cat(everything).sort().values
    for name, level in QUANTILES.items():
        # gather, not indexing: a 0-d index is read by the host
        value = ranked.gather(0, _sequences.nearest_rank(number, level).reshape(1) - 1).squeeze(0)
        found[f"trm/kl/{name}"] = torch.where(number > 0, value.double(), math.nan)
    reduced = _sequences.reduce_tokens(kl, layout)
    usable = (reduced.tokens > 0) & torch.isfinite(reduced.total)
    found["trm/kl/sequences"] = usable.sum().double()
    for name, value in (
        ("seq_max", reduced.largest.double()),
        ("seq_mean", reduced.total / reduced.tokens.clamp(min=1)),
        ("seq_sum", reduced.total),
    ):
        found[f"trm/kl/{name}"] = _mean(value, usable)
        found[f"trm/kl/{name}_max"] = _largest(value, usable)
    return found


def _ratio(ratio: Tensor, layout: SequenceLayout) -> dict[str, Tensor | float]:
    finite = layout.token_mask & torch.isfinite(ratio)
    found: dict[str, Tensor | float] = {
        f"trm/{name}": _mean(estimator(ratio), finite)
        for name, estimator in estimators.FROM_LOG_RATIO.items()
    }
    found["trm/ratio/tokens"] = finite.sum().double()
    found["trm/abs_log_ratio_max"] = _largest(ratio.abs(), finite)
    found["trm/unscored_tokens"] = (layout.token_mask & torch.isnan(ratio)).sum().double()
    nonzero = (layout.token_mask & (ratio != 0)).any()
    found["trm/ratio/identical"] = (finite.any() & ~nonzero).double()
    return found


def _by_length(
    verdict: SequenceVerdict, length: Tensor, edges: Sequence[int]
) -> dict[str, Tensor | float]:
    if any(low >= high for low, high in itertools.pairwise([0, *edges])):
        raise ValueError(f"length_edges must increase from above 0, got {list(edges)}")
    found: dict[str, Tensor | float] = {}
    for low, high in itertools.pairwise([0, *edges, None]):
        assert low is not None
        here = (length > low) & ((length <= high) if high is not None else True)
        name = f"len_{low + 1}_{'up' if high is None else high}"
        found[f"trm/sequences/{name}"] = here.sum().double()
        found[f"trm/accepted/{name}"] = _mean(verdict.keep, here)
    return found


def _agreement(
    verdict: SequenceVerdict, other: SequenceVerdict, length: Tensor
) -> dict[str, Tensor | float]:
    some = length > 0
    return {
        "trm/agreement": _mean(verdict.keep == other.keep, some),
        "trm/agreement/missed": _mean(~verdict.keep & other.keep, some),
        "trm/agreement/extra": _mean(verdict.keep & ~other.keep, some),
    }
