# SPDX-License-Identifier: Apache-2.0
"""``trm calibrate --html``: the noise floor and what thresholds keep, as one page."""

from __future__ import annotations

import math

from trm_ext.calibration import Calibration, KlSummary
from trm_ext.report import charts, sections
from trm_ext.report.charts import number
from trm_ext.report.page import (
    Html,
    element,
    facts,
    figures,
    notes,
    page,
    paragraph,
    section,
    table,
)

__all__ = ["calibrate_page"]


def calibrate_page(result: Calibration, *, command: str = "") -> str:
    """The calibration as a self-contained HTML page; the same result gives the same page.

    Args:
        result: what :func:`trm_ext.calibrate` returned.
        command: how to repeat it, shown at the end.

    Returns:
        The document. Its size is bounded whatever the number of tokens.
    """
    names = ", ".join(path.name for path in result.paths)
    return page(
        f"Calibration of {names}",
        element("p", _headline(result), style="lead"),
        notes(result.warnings),
        notes(result.notes),
        _summary(result),
        sections.engines(result.rollout, result.train, None, "", {}),
        _distribution(result),
        _thresholds(result),
        _differences(result),
        _reproduce(result, command),
    )


def _headline(result: Calibration) -> str:
    limit = result.target_threshold
    if math.isinf(limit):
        return f"No threshold keeps {result.target_acceptance:.0%} of the sequences."
    text = f"max KL ≤ {number(limit)} nats keeps {result.target_acceptance:.0%} of the sequences"
    if math.isnan(result.floor_threshold):
        return f"{text}; no file says what rounding alone does."
    where = "below" if limit < result.floor_threshold else "at or above"
    return (
        f"{text}; that is {where} the noise floor, where rounding alone needs "
        f"{number(result.floor_threshold)}."
    )


def _summary(result: Calibration) -> Html:
    return facts(
        [
            ("what was compared", result.kind),
            ("target acceptance", f"{result.target_acceptance:.0%}"),
            ("threshold for it", _known(result.target_threshold)),
            ("noise floor at it", _known(result.floor_threshold)),
            ("horizon", f"{result.horizon:,}"),
        ]
    )


def _distribution(result: Calibration) -> Html:
    marks = [(result.target_threshold, f"keeps {result.target_acceptance:.0%}")]
    if not math.isnan(result.floor_threshold):
        marks.append((result.floor_threshold, "noise floor"))
    marks = [(value, label) for value, label in marks if math.isfinite(value)]
    floor = result.floor_kl.double().numpy()
    rows = [_kl_row(result.kind, result.pair)]
    if result.floor is not None and result.kind != "noise floor":
        rows.append(_kl_row("noise floor", result.floor))
    header = ["KL, nats", "tokens", "mean", "median", "p99", "max", "sequences", "median of max"]
    header += ["D_seq", "NaN", "inf"]
    return section(
        "KL and its floor",
        table(header, rows, left=["KL, nats"]),
        figures(
            charts.kl_histogram(
                result.kl.double().numpy(),
                marks,
                floor=floor if len(floor) and result.kind != "noise floor" else None,
            ),
            charts.acceptance_by_length(
                result.sequence_max_kl.numpy(), result.thresholds, result.lengths, marks
            ),
        ),
    )


def _thresholds(result: Calibration) -> Html:
    floor = not math.isnan(result.floor_threshold)
    header = ["max KL", "kept", *(f"first {n}" for n in result.lengths)]
    header += ["noise floor"] if floor else []
    header += ["error if it held", "what it says"]
    rows: list[list[object]] = []
    for row in result.thresholds:
        cells: list[object] = [
            number(row.max_kl),
            f"{row.acceptance:.0%}",
            *(_share(share) for share in row.acceptance_by_length),
        ]
        if floor:
            words, style = ("below", "bad") if row.below_floor else ("above", "")
            cells.append(element("span", words, style=style))
        cells += [number(row.error_bound), row.says]
        rows.append(cells)
    by_length = ", ".join(
        f"{_known(limit)} for the first {n}"
        for n, limit in zip(result.lengths, result.target_by_length, strict=True)
    )
    return section(
        "Thresholds",
        table(
            header,
            rows,
            left=["noise floor", "what it says"],
            caption=f"Share of sequences kept, whole and by their first tokens; error: horizon × "
            f"threshold, the surrogate's error for rewards in [0, 1] if every context kept to the "
            f"threshold. For {result.target_acceptance:.0%}: {by_length}.",
        ),
    )


def _differences(result: Calibration) -> Html:
    if not result.differences:
        return Html("")
    rows: list[list[object]] = [
        [
            d.side,
            f"{d.identical:.1%}",
            number(d.kl.mean),
            number(d.kl.maximum),
            f"{d.worst[0]}:{d.worst[1]}",
            number(d.max_abs_log_ratio),
        ]
        for d in result.differences
    ]
    return section(
        "First recording against second",
        table(
            ["side", "identical rows", "mean KL", "max KL", "at seq:pos", "max |log ratio|"],
            rows,
            left=["side"],
        ),
    )


def _reproduce(result: Calibration, command: str) -> Html:
    sizes = ", ".join(
        f"{path.name} {path.stat().st_size:,} bytes" for path in result.paths if path.exists()
    )
    return section(
        "Reproduce",
        paragraph(element("code", command)) if command else "",
        paragraph(f"{sections.versions()}; {sizes}"),
    )


def _kl_row(name: str, s: KlSummary) -> list[object]:
    return [
        name,
        f"{s.tokens:,}",
        *map(number, (s.mean, s.median, s.p99, s.maximum)),
        f"{s.sequences:,}",
        number(s.sequence_median),
        number(s.seq_kl),
        s.unscored,
        s.unsupported,
    ]


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0%}"


def _known(value: float) -> str:
    return number(value) if math.isfinite(value) else "–"
