# SPDX-License-Identifier: Apache-2.0
"""The charts of the reports, each from plain arrays; the size of each is bounded for any input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trm_ext.report.page import Html, element, figure, join
from trm_ext.report.svg import Chart, Scale, log_range

if TYPE_CHECKING:
    from trm_ext.calibration import ThresholdRow

__all__ = [
    "acceptance_by_length",
    "acceptance_curves",
    "decile_bars",
    "estimator_map",
    "kl_histogram",
    "position_profile",
    "sequence_dots",
    "share_bars",
    "strip",
]

Array = NDArray[np.float64]

_BINS_PER_DECADE = 8
_CELLS = 44
_STRIP_BARS = 160
_STEPS = 200
_PROFILE = 16
_MOST_DOTS = 600
_LOWEST = 1e-16  # of a KL axis: what lies below is rounding, and is drawn at the edge


def number(value: float) -> str:
    """Three significant digits, as in the tables of the terminal."""
    return f"{value:.3g}"


def count(value: int, noun: str) -> str:
    """``1 token``, ``2 tokens``.

    >>> count(1, "token"), count(12000, "token")
    ('1 token', '12,000 tokens')
    """
    return f"{value:,} {noun}" + ("" if value == 1 else "s")


def kl_scale(*values: Array) -> Scale:
    """Whole decades that hold every finite positive value, from 1e-16 on."""
    found = np.concatenate([np.asarray(v, dtype=np.float64).reshape(-1) for v in values])
    found = found[np.isfinite(found) & (found > 0)]
    ends = (
        [max(float(found.min()), _LOWEST), max(float(found.max()), _LOWEST)] if len(found) else []
    )
    return log_range(ends)


def kl_histogram(
    kl: Array, marks: Sequence[tuple[float, str]], *, floor: Array | None = None
) -> Html:
    """Tokens by KL on a logarithmic axis, thresholds marked.

    Args:
        kl: of the counted tokens, nats.
        marks: (KL, label) of vertical lines.
        floor: a second distribution, drawn as a line.
    """
    shown = [np.asarray([m for m, _ in marks], dtype=np.float64), kl]
    scale = kl_scale(*shown, *([] if floor is None else [floor]))
    decades = round(math.log10(scale.high / scale.low))
    edges = np.geomspace(scale.low, scale.high, decades * _BINS_PER_DECADE + 1)
    share = _shares(kl, edges)
    second = None if floor is None else _shares(floor, edges)
    tallest = max(float(share.max(initial=0)), 0 if second is None else float(second.max()), 1e-9)
    chart = Chart(
        scale,
        Scale(0, 100 * tallest * 1.25),
        "Distribution of the exact KL over tokens",
        x_label="KL(rollout‖train), nats",
        y_label="% of tokens",
    )
    for left, right, part in zip(edges[:-1], edges[1:], share, strict=True):
        if part > 0:
            chart.bar(left, right, 100 * part, title=f"{left:.2g} to {right:.2g}: {part:.2%}")
    if second is not None:
        middles = np.sqrt(edges[:-1] * edges[1:])
        chart.line([(m, 100 * s) for m, s in zip(middles, second, strict=True)], style="b")
    for row, (value, label) in enumerate(marks):
        if value > 0:
            chart.vertical(value, label, row=row % 3)
    zeros, lost = int((kl == 0).sum()), int((~np.isfinite(kl)).sum())
    caption = [
        f"{count(len(kl), 'token')}.",
        f" {count(zeros, 'token')} with KL exactly 0 not drawn." if zeros else "",
        f" {count(lost, 'token')} with a KL that is not finite not drawn." if lost else "",
    ]
    if floor is not None:
        caption += [" ", element("span", "Dotted line", style="key b"), ": the noise floor."]
    return figure(chart.svg(), join(caption))


def acceptance_curves(
    largest: Array, lengths: NDArray[np.int64], marks: Sequence[tuple[float, str]]
) -> Html:
    """Share of sequences kept, for every threshold on their largest KL, by length.

    Args:
        largest: the largest KL of each sequence with counted tokens, NaN or inf where it is not
            finite: such a sequence is never kept.
        lengths: its counted tokens.
        marks: (threshold, label) of vertical lines.
    """
    scale = kl_scale(largest, np.asarray([m for m, _ in marks], dtype=np.float64))
    chart = Chart(
        scale,
        Scale(0, 100),
        "Share of sequences kept, by threshold",
        x_label="threshold on the largest KL, nats",
        y_label="% of sequences kept",
    )
    groups: list[tuple[str, str, NDArray[np.bool_]]] = [
        ("a", "all sequences", np.ones(len(largest), bool))
    ]
    middle = int(np.median(lengths)) if len(lengths) else 0
    if len(lengths) >= 8 and 2 <= (lengths > middle).sum():
        groups += [
            ("b", f"up to {middle} tokens", lengths <= middle),
            ("c", f"longer than {middle}", lengths > middle),
        ]
    keys: list[object] = []
    for style, label, where in groups:
        if not where.any():
            continue
        chart.line(_staircase(largest[where], scale), style=style)
        keys += [element("span", label, style=f"key {style}"), f" ({int(where.sum())})  "]
    for row, (value, label) in enumerate(marks):
        if value > 0:
            chart.vertical(value, label, row=row % 3)
    return figure(chart.svg(), join(keys))


def acceptance_by_length(
    largest: Array,
    rows: Sequence[ThresholdRow],
    lengths: Sequence[int],
    marks: Sequence[tuple[float, str]],
) -> Html:
    """Share of sequences kept, whole and by their first tokens, for every threshold.

    Args:
        largest: the largest KL of each sequence.
        rows: of a calibration, thresholds ascending.
        lengths: what ``acceptance_by_length`` of the rows belongs to.
        marks: (threshold, label) of vertical lines.
    """
    scale = log_range([row.max_kl for row in rows])
    chart = Chart(
        scale,
        Scale(0, 100),
        "Share of sequences kept, by threshold and length",
        x_label="threshold on the largest KL, nats",
        y_label="% of sequences kept",
    )
    chart.line(_staircase(largest, scale), style="a")
    keys: list[object] = [element("span", "whole sequences", style="key a"), "  "]
    chosen = sorted({0, (len(lengths) - 1) // 2}) if len(lengths) > 1 else []
    for style, i in zip("bc", chosen, strict=False):
        points = [
            (row.max_kl, 100 * row.acceptance_by_length[i])
            for row in rows
            if row.max_kl > 0 and not math.isnan(row.acceptance_by_length[i])
        ]
        chart.line(points, style=style)
        keys += [element("span", f"first {lengths[i]:,} tokens", style=f"key {style}"), "  "]
    for row, (value, label) in enumerate(marks):
        if value > 0:
            chart.vertical(value, label, row=row % 3)
    return figure(chart.svg(), join(keys))


def share_bars(values: Array, x_label: str, y_label: str) -> Html:
    """Values side by side as bars from 0; many are put together by their mean.

    Args:
        values: in order, >= 0.
        x_label: what their order is.
        y_label: what they are.
    """
    finite = np.where(np.isfinite(values), values, 0.0)
    parts = _groups(len(values))
    means = [float(finite[part].mean()) for part in parts]
    chart = Chart(
        Scale(0, max(len(values), 1)),
        Scale(0, max(means, default=0.0) * 1.1 or 1.0),
        f"{y_label} by {x_label}",
        x_label=x_label,
        y_label=y_label,
    )
    for part, mean in zip(parts, means, strict=True):
        title = f"{part[0]} to {part[-1]}: {number(mean)}"
        chart.bar(float(part[0]), float(part[-1] + 1), mean, title=title)
    group = len(parts[0]) if parts else 1
    return figure(chart.svg(), f"A bar is the mean of {group}." if group > 1 else "")


def position_profile(position: NDArray[np.int64], kl: Array, limit: float) -> Html:
    """Median, 90 % quantile and maximum of the KL along the sequence, and the spikes.

    Args:
        position: of each token with a finite KL, on its sequence's own axis.
        kl: nats.
        limit: tokens above it are spikes; inf for none.
    """
    order = np.argsort(position, kind="stable")
    parts = np.array_split(order, min(_PROFILE, len(order)))
    parts = [part for part in parts if len(part)]
    curves = [
        (
            style,
            [(float(position[part].mean()), float(np.quantile(kl[part], level))) for part in parts],
        )
        for style, level in (("c", 1.0), ("b", 0.9), ("a", 0.5))
    ]
    drawn = [y for _, points in curves for _, y in points]
    scale = kl_scale(np.asarray(drawn), *([kl[kl > limit]] if math.isfinite(limit) else []))
    chart = Chart(
        Scale(0, max(1, int(position.max(initial=0)) + 1)),
        scale,
        "KL along the sequence",
        x_label="position in the sequence",
        y_label="KL, nats",
    )
    for style, points in curves:
        chart.line(points, style=style)
    if math.isfinite(limit):
        spikes = np.flatnonzero(kl > limit)
        for i in spikes[np.argsort(-kl[spikes], kind="stable")][:_MOST_DOTS]:
            chart.dot(float(position[i]), float(kl[i]), style="hot", title=f"KL {number(kl[i])}")
        if limit <= scale.high:
            chart.horizontal(limit, "spikes")
    caption = join(
        [
            element("span", "median", style="key a"),
            ", ",
            element("span", "90 % quantile", style="key b"),
            " and ",
            element("span", "maximum", style="key c"),
            f" of {count(len(parts), 'bucket')} with equally many tokens.",
        ]
    )
    return figure(chart.svg(), caption)


def estimator_map(exact: Array, sampled: Array, name: str) -> Html:
    """Tokens by exact KL (across) and a sampled-token estimate of it (up), on log axes.

    Args:
        exact: KL of the counted tokens.
        sampled: the estimate, same shape.
        name: of the estimate.
    """
    drawn = np.isfinite(exact) & np.isfinite(sampled) & (exact > 0) & (sampled > 0)
    x, y = exact[drawn], sampled[drawn]
    low = float(np.quantile(x, 0.001)) if len(x) else 1e-3
    high = max(float(x.max()), float(y.max())) if len(x) else 1.0
    scale = log_range([max(low, _LOWEST), max(high, 10 * low, _LOWEST)])
    chart = Chart(
        scale,
        scale,
        f"{name} of the sampled token against the exact KL",
        x_label="exact KL, nats",
        y_label=f"{name} of the sampled token, nats",
    )
    edges = np.geomspace(scale.low, scale.high, _CELLS + 1)
    if len(x):
        cells, _, _ = np.histogram2d(
            np.clip(x, scale.low, scale.high), np.clip(y, scale.low, scale.high), (edges, edges)
        )
        for i, j in np.argwhere(cells > 0):
            weight = math.log1p(cells[i, j]) / math.log1p(cells.max())
            chart.cell(
                edges[i], edges[i + 1], edges[j], edges[j + 1], weight, f"{cells[i, j]:.0f} tokens"
            )
    chart.diagonal()
    below = int(((y < scale.low) | (x < scale.low)).sum())
    hidden = len(exact) - int(drawn.sum())
    caption = [
        "On the dashed line the one token that was sampled would tell the KL. ",
        f"{count(below, 'token')} below the axes drawn at their edge. " if below else "",
        f"{count(hidden, 'token')} with a value of 0 or not finite not drawn." if hidden else "",
    ]
    return figure(chart.svg(), join(caption))


def sequence_dots(exact: Array, sampled: Array, max_kl: float, name: str) -> Html:
    """Sequences by their largest exact KL and their largest sampled estimate.

    Args:
        exact: largest KL of each sequence.
        sampled: largest estimate of each sequence.
        max_kl: threshold, drawn on both axes.
        name: of the estimate.
    """
    drawn = np.flatnonzero(np.isfinite(exact) & np.isfinite(sampled) & (exact > 0) & (sampled > 0))
    x, y = exact[drawn], sampled[drawn]
    scale = kl_scale(x, y, np.asarray([max_kl]))
    chart = Chart(
        scale,
        scale,
        f"Largest {name} of each sequence against its largest exact KL",
        x_label="largest exact KL of the sequence, nats",
        y_label=f"largest {name} of the sequence, nats",
    )
    if max_kl > 0:
        chart.vertical(max_kl)
        chart.horizontal(max_kl)
    worst = np.argsort(-x, kind="stable")
    few = worst if len(worst) <= _MOST_DOTS else worst[:: -(-len(worst) // _MOST_DOTS)]
    for i in few:
        chart.dot(float(x[i]), float(y[i]), title=f"sequence {drawn[i]}")
    missed = int(((x > max_kl) & (y <= max_kl)).sum())
    extra = int(((x <= max_kl) & (y > max_kl)).sum())
    caption = (
        f"At the threshold (dashed) {name} would keep {missed} of the "
        f"{count(int((x > max_kl).sum()), 'sequence')} that the exact KL masks (lower right), and "
        f"mask {extra} of the {int((x <= max_kl).sum())} that it keeps (upper left)."
        + ("" if len(few) == len(x) else f" {len(few)} of {len(x)} drawn.")
    )
    return figure(chart.svg(), caption)


def decile_bars(
    edges: Sequence[tuple[float, float]], values: Mapping[str, Sequence[float]]
) -> Html:
    """One group of bars per decile of the sampled token's probability.

    Args:
        edges: (lowest, highest) probability of each decile.
        values: by name, one value per decile; at most two names.
    """
    tallest = max((v for series in values.values() for v in series if math.isfinite(v)), default=0)
    chart = Chart(
        Scale(0.5, len(edges) + 0.5),
        Scale(0, tallest * 1.1 or 1.0),
        "Mismatch by the rollout probability of the sampled token",
        x_label="decile of the sampled token's probability (1: least likely)",
        y_label="nats",
    )
    width = 0.8 / len(values)
    keys: list[object] = []
    for n, (style, (name, series)) in enumerate(zip("ab", values.items(), strict=False)):
        keys += [element("span", name, style=f"key {style}"), "  "]
        for i, (value, (low, high)) in enumerate(zip(series, edges, strict=True)):
            left = i + 0.6 + n * width
            title = f"p {low:.2g} to {high:.2g}: {number(value)}"
            chart.bar(left, left + width, value, style=style, title=title)
    return figure(chart.svg(), join(keys))


def strip(
    kl: Array, counted: NDArray[np.bool_], max_kl: float, scale: Scale, label: str, caption: Html
) -> Html:
    """One sequence: KL along its positions, the largest of each bar kept.

    Args:
        kl: of every token of the sequence.
        counted: which tokens count.
        max_kl: threshold; bars above it, or not finite, are drawn in red.
        scale: of the KL, shared by all strips.
        label: for a screen reader.
        caption: below it.
    """
    length = len(kl)
    chart = Chart(Scale(0, max(length, 1)), scale, label, height=92)
    for part in _groups(length):
        inside = part[counted[part]]
        left, right = float(part[0]), float(part[-1] + 1)
        if len(inside) == 0:
            chart.bar(left, right, scale.low * (scale.high / scale.low) ** 0.12, style="hole")
            continue
        worst = inside[np.argmax(np.where(np.isfinite(kl[inside]), kl[inside], math.inf))]
        value = float(kl[worst])
        top = value if math.isfinite(value) else scale.high
        style = "a" if value <= max_kl else "hot"
        chart.bar(left, right, top, style=style, title=f"position {worst}: {number(value)}")
    if scale.low < max_kl < scale.high:
        chart.horizontal(max_kl)
    return figure(chart.svg(), caption)


def _groups(length: int) -> list[NDArray[np.int64]]:
    """Neighbours that share a bar: as many in each, the last one apart."""
    size = -(-length // _STRIP_BARS) or 1
    return [np.arange(start, min(start + size, length)) for start in range(0, length, size)]


def _shares(kl: Array, edges: Array) -> Array:
    """Share of all tokens in each bin; what lies beyond the ends is in the end bins."""
    positive = kl[np.isfinite(kl) & (kl > 0)]
    inside = np.clip(positive, edges[0], np.nextafter(edges[-1], 0))
    return np.histogram(inside, edges)[0] / max(len(kl), 1)


def _staircase(largest: Array, scale: Scale) -> list[tuple[float, float]]:
    """(threshold, % kept) where the share of kept sequences steps, thinned out."""
    ranked = np.sort(np.where(np.isfinite(largest), largest, math.inf))
    if len(ranked) <= _STEPS:
        thresholds = np.unique(ranked[np.isfinite(ranked)])
    else:
        thresholds = np.geomspace(scale.low, scale.high, _STEPS)
    kept = 100 * np.searchsorted(ranked, thresholds, side="right") / len(ranked)
    points = [(scale.low, 100 * float(np.mean(ranked <= scale.low)))]
    for threshold, share in zip(thresholds, kept, strict=True):
        points += [(float(threshold), points[-1][1]), (float(threshold), float(share))]
    return [*points, (scale.high, points[-1][1])]
