# SPDX-License-Identifier: Apache-2.0
"""``trm certify --html``: the verdict and what it rests on, as one page."""

from __future__ import annotations

import math

import numpy as np

from trm_ext.certification import Certification, PublishedBound
from trm_ext.report import charts, sections
from trm_ext.report.certificate import (
    TITLES,
    certificate_row,
    constants_sentence,
    count,
    gate_sentence,
    levels,
)
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
from trm_ext.report.token_text import TokenText

__all__ = ["certify_page"]

_GOOD = ("CERTIFIED",)
_BAD = ("HARMFUL", "VACUOUS")


def certify_page(result: Certification, *, text: TokenText | None = None, command: str = "") -> str:
    """The certification as a self-contained HTML page; the same result gives the same page.

    Args:
        result: what :func:`trm_ext.certify` returned.
        text: from a token's id to its text; None shows ids.
        command: how to repeat it, shown at the end.

    Returns:
        The document. Its size is bounded whatever the number of tokens.
    """
    statistics = result.statistics
    found = statistics.divergence
    assert found.kl is not None
    tokens = sections.Tokens(
        statistics.layout, found.kl, found.log_ratio, found.logp_rollout, statistics.tokens, text
    )
    limit = result.constants.max_kl
    largest = tokens.largest(tokens.values)
    verdicts = ["below the mask's limit" if value <= limit else "masked" for value in largest]
    name = "rollouts" if statistics.path is None else statistics.path.name
    return page(
        f"Certificate of {name}",
        element("p", _verdict(str(result.verdict)), ": ", result.reasons[0], style="lead"),
        paragraph(_verdict(str(result.asymptotic_verdict)), " by ", result.reasons[1]),
        paragraph(gate_sentence(result)),
        notes(result.notes),
        _summary(result),
        sections.engines(
            statistics.rollout,
            statistics.train,
            statistics.vocab_size,
            statistics.host_processor,
            statistics.extra,
        ),
        _quantities(result),
        _certificates(result),
        _bounds(result),
        _bottleneck(result),
        sections.distribution(tokens, [(limit, f"mask's limit {limit:g}")]),
        sections.drift(tokens),
        sections.strips(tokens, limit, verdicts),
        sections.worst_tokens(tokens),
        sections.estimators(tokens, limit),
        sections.deciles(tokens),
        sections.turns(tokens),
        sections.reproduce(command, [] if statistics.path is None else [statistics.path], tokens),
    )


def _verdict(word: str) -> Html:
    style = "good" if word in _GOOD else "bad" if word in _BAD else ""
    return element("span", word.replace("_", " "), style=style)


def _summary(result: Certification) -> Html:
    low, high = result.reward_range
    return facts(
        [
            ("rollouts", f"{result.num_sequences:,}"),
            ("tokens that count", f"{result.num_tokens:,}"),
            ("longest", f"{result.longest:,}"),
            ("declared reward range", f"[{low:g}, {high:g}]"),
            ("each limit holds on its own with probability", f"{1 - result.alpha:g}"),
            ("all finite-sample limits together", f"{result.joint_confidence:g}"),
            ("smallest gain SeqKL can certify", _plain(result.min_certifiable_gain)),
            (
                "smallest gain these rollouts could certify",
                _plain(result.min_certifiable_gain_finite),
            ),
            ("largest attainable L'", _plain(result.attainable)),
            ("below the mask's limit", f"{result.accepted:.0%}"),
        ]
    )


def _quantities(result: Certification) -> Html:
    rows = [
        [name, number(q.estimate), number(q.lower), _plain(q.upper), q.method]
        for name, q in (
            ("surrogate gain L'", result.surrogate),
            ("D_seq", result.seq_kl),
            ("D_seq", result.seq_kl_lower),
        )
    ]
    return section(
        "What was estimated",
        table(
            ["quantity", "estimate", "lower", "upper", "method"],
            rows,
            left=["quantity", "method"],
            caption="D_seq: expected total KL of a rollout, nats. L': surrogate gain, reward "
            "units. Limits are one-sided, each on its own.",
        ),
    )


def _certificates(result: Certification) -> Html:
    rows: list[list[object]] = []
    for c in result.certificates:
        row: list[object] = [*certificate_row(result, c)]
        row[2] = element("span", number(c.lower_bound), style="good" if c.lower_bound > 0 else "")
        rows.append(row)
    rows += [[TITLES[name], "missing", "–", "–", "", "", why] for name, why in result.missing]
    return section(
        "Certificates",
        table(
            [
                "certificate",
                "kind",
                "J(train) - J(rollout) ≥",
                "radius",
                "rollouts needed",
                "verdict",
                "note",
            ],
            rows,
            left=["certificate", "kind", "verdict", "note"],
            caption="An improvement is certified where a limit is positive. Levels: "
            f"{levels(result)}. Only the deciding one was chosen beforehand.",
        ),
        facts(
            [("to halve the budget gate's radius", count(result.rollouts_needed.halve_gate_radius))]
        ),
        element("p", constants_sentence(result), style="caption"),
    )


def _bounds(result: Certification) -> Html:
    if not result.bounds:
        return Html("")
    rows: list[list[object]] = []
    for b in result.bounds:
        words, style = _vacuity(b)
        rows.append(
            [
                b.name,
                "published" if b.published else "ours",
                number(b.value),
                "sampled maximum: no guarantee" if b.assumes_maximum else "averages",
                element("span", words, style=style),
            ]
        )
    return section(
        "Bounds on the surrogate's error",
        table(
            ["bound", "source", "|error| ≤", "from", "here"],
            rows,
            left=["bound", "source", "from", "here"],
            caption="Vacuous: at least the reward span, or above any surrogate gain that is "
            "attainable, so that it can never certify. A bound that takes the maximum over all "
            "contexts is shown with the largest sampled value in its place, which only makes it "
            "too small.",
        ),
    )


def _vacuity(bound: PublishedBound) -> tuple[str, str]:
    if not bound.below_range:
        return "vacuous: above the reward span", "bad"
    if not bound.certifying:
        return "vacuous: above any attainable gain", "bad"
    return (
        ("below the measured gain", "good") if bound.instance else ("above the measured gain", "")
    )


def _bottleneck(result: Certification) -> Html:
    if result.bottleneck is None:
        return Html("")
    by_position = np.nan_to_num(result.position_kl.numpy(), nan=0.0)
    total = np.nan_to_num(result.sequence_kl.numpy(), nan=0.0)
    ranked = np.sort(total)[::-1]
    return section(
        "Where D_seq comes from",
        *(paragraph(sentence) for sentence in result.bottleneck.sentences),
        figures(
            charts.share_bars(by_position, "position in the sequence", "mean KL, nats"),
            charts.share_bars(ranked, "sequences, largest total KL first", "total KL, nats"),
        ),
    )


def _plain(value: float) -> str:
    return number(value) if math.isfinite(value) else "–"
