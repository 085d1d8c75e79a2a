# SPDX-License-Identifier: Apache-2.0
"""``trm audit --html``: what the audit found, as one page."""

from __future__ import annotations

import math

import numpy as np

import trm_ext
from theory.certify import clt, vacuity
from trm_ext.audit import Audit, SequenceAudit
from trm_ext.report import sections
from trm_ext.report.charts import count, number
from trm_ext.report.page import Html, element, facts, notes, page, paragraph, section, table
from trm_ext.report.table import verdict
from trm_ext.report.token_text import TokenText

__all__ = ["audit_page"]

_ALPHA = 0.05


def audit_page(audit: Audit, *, text: TokenText | None = None, command: str = "") -> str:
    """The audit as a self-contained HTML page; the same audit always gives the same page.

    Args:
        audit: what was found.
        text: from a token's id to its text; None shows ids.
        command: how to repeat the audit, shown at the end.

    Returns:
        The document. Its size is bounded whatever the number of tokens.
    """
    layout = trm_ext.SequenceLayout.from_cu_seqlens(audit.cu_seqlens, token_mask=audit.counted)
    ids = audit.tokens if bool((audit.tokens >= 0).all()) else None
    tokens = sections.Tokens(layout, audit.kl, audit.log_ratio, audit.logp_rollout, ids, text)
    marks = [(audit.max_kl, f"threshold {audit.max_kl:g}")]
    return page(
        f"Audit of {audit.path.name}",
        element("p", _headline(audit), style="lead"),
        notes(audit.notes),
        _summary(audit),
        sections.engines(
            audit.rollout,
            audit.train,
            audit.vocab_size or None,
            audit.host_processor,
            audit.extra,
        ),
        sections.distribution(tokens, marks),
        sections.drift(tokens),
        sections.strips(tokens, audit.max_kl, [verdict(entry) for entry in audit.sequences]),
        sections.worst_tokens(tokens),
        _sequences(audit),
        sections.estimators(tokens, audit.max_kl),
        sections.deciles(tokens),
        sections.turns(tokens),
        _bounds(audit),
        sections.reproduce(command, [audit.path], tokens),
    )


def _headline(audit: Audit) -> str:
    total = len(audit.sequences)
    return (
        f"{audit.kept} of {count(total, 'sequence')} kept, {total - audit.kept} masked at "
        f"max KL ≤ {audit.max_kl:g} nats."
    )


def _summary(audit: Audit) -> Html:
    worst = audit.worst
    values: list[tuple[object, object]] = [
        ("tokens that count", f"{int(audit.counted.sum()):,}"),
        ("mean KL", number(audit.mean_kl)),
        ("mean KL of a whole sequence", number(_mean_total(audit))),
    ]
    if worst is not None:
        values.append(
            (
                "largest KL",
                f"{number(worst.max_kl)} at sequence {worst.sequence}, token {worst.position}",
            )
        )
    values += [("mean k3", number(audit.mean_k3)), ("max |log rho|", number(audit.max_abs_log_rho))]
    return facts(values)


def _sequences(audit: Audit) -> Html:
    ordered = sorted(audit.sequences, key=lambda entry: (-_rank(entry), entry.sequence))
    rows = [
        [
            entry.sequence,
            _colour(entry),
            f"{entry.tokens:,}",
            number(entry.max_kl),
            entry.position,
            number(entry.mean_kl),
            number(entry.sum_kl),
            number(entry.max_k3),
            number(entry.max_abs_log_rho),
        ]
        for entry in ordered[: sections.MOST_ROWS]
    ]
    header = ["sequence", "verdict", "tokens", "max KL", "at", "mean KL", "total KL"]
    header += ["max k3", "max |log rho|"]
    shown = min(len(ordered), sections.MOST_ROWS)
    return section(
        "Sequence table",
        table(
            header,
            rows,
            left=["verdict"],
            caption=f"{shown} of {count(len(ordered), 'sequence')}, largest KL first.",
        ),
    )


def _bounds(audit: Audit) -> Html:
    """The one bound that needs rollout averages only, and whether it says anything here."""
    totals = np.asarray([entry.sum_kl for entry in audit.sequences if entry.tokens])
    longest = max((entry.tokens for entry in audit.sequences), default=0)
    if len(totals) < 2 or not np.isfinite(totals).all():
        return section(
            "What the surrogate's error can be",
            paragraph(
                "No statement: that takes at least two sequences, each with a finite total KL."
            ),
        )
    interval = clt(totals, _ALPHA)
    rows = []
    for name, value in (
        ("estimate", interval.estimate),
        (f"upper {1 - _ALPHA:.0%} limit (asymptotic)", interval.upper),
    ):
        tests = vacuity(value, longest, seq_kl=value)
        rows.append(
            [
                name,
                number(value),
                _yes(tests.below_range, "below 1", "vacuous"),
                _yes(tests.certifying, "possible", "never"),
                number(tests.attainable),
            ]
        )
    return section(
        "What the surrogate's error can be",
        paragraph(
            "SeqKL: for rewards in [0, 1] the error of the surrogate is at most D_seq, the "
            "expected total KL of a sequence. It needs no maximum over contexts."
        ),
        table(
            ["D_seq", "error ≤", "range", "certifying", "largest surrogate gain"],
            rows,
            left=["D_seq", "range", "certifying"],
            caption="Range: a bound of 1 or more says nothing. Certifying: possible while the "
            "bound is below the largest surrogate gain that the same KL allows. For a certificate "
            "of an update, with rewards, use trm certify. Bounds that need the maximum over all "
            "contexts do not follow from a sample: the largest sampled KL is only a lower bound "
            "of it.",
        ),
    )


def _mean_total(audit: Audit) -> float:
    totals = [entry.sum_kl for entry in audit.sequences if entry.tokens]
    return math.fsum(totals) / len(totals) if totals else math.nan


def _yes(passed: bool, words: str, otherwise: str) -> Html:
    return element("span", words if passed else otherwise, style="good" if passed else "bad")


def _colour(entry: SequenceAudit) -> Html:
    return element("span", verdict(entry), style="good" if entry.keep else "bad")


def _rank(entry: SequenceAudit) -> float:
    if entry.tokens == 0:
        return -1.0
    return math.inf if math.isnan(entry.max_kl) else entry.max_kl
