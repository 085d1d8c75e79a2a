# SPDX-License-Identifier: Apache-2.0
"""A certification on the terminal: the verdict first, then what it rests on."""

from __future__ import annotations

from typing import TextIO

from trm_ext.certification import Certification
from trm_ext.report.table import number, print_table

TITLES = {
    "truncated_weight": "C0 truncated weight",
    "log": "C1 log weight",
    "sequence_mask": "C2 sequence mask",
    "frozen_drift": "C3' budget gate",
    "seq_kl": "SeqKL",
}


def print_certification(result: Certification, stream: TextIO) -> None:
    """Print verdict, quantities, certificates, bounds, and what more rollouts would do.

    Rewards in their own units, divergences in nats. Every limit is one-sided and holds with
    probability 1 - alpha on its own.
    """
    stream.write(f"{result.verdict}: {result.reasons[0]}\n")
    stream.write(f"{result.asymptotic_verdict} by {result.reasons[1]}\n")
    stream.write(
        f"{result.label}; {result.num_sequences} rollouts, {result.num_tokens} tokens, longest "
        f"{result.longest}; reward in [{result.reward_range[0]:g}, {result.reward_range[1]:g}]; "
        f"one-sided limits at {1 - result.alpha:g}\n\n"
    )
    _print_quantities(result, stream)
    stream.write("\n")
    _print_certificates(result, stream)
    if result.bounds:
        stream.write("\n")
        _print_bounds(result, stream)
    stream.write("\n")
    _print_prose(result, stream)


def _print_quantities(result: Certification, stream: TextIO) -> None:
    rows = [
        [name, number(q.estimate), number(q.lower), number(q.upper), q.method]
        for name, q in (
            ("surrogate gain L'", result.surrogate),
            ("D_seq", result.seq_kl),
            ("D_seq", result.seq_kl_lower),
        )
    ]
    header = ["quantity", "estimate", "lower", "upper", "method"]
    print_table(header, rows, stream, left=["quantity", "method"])


def _print_certificates(result: Certification, stream: TextIO) -> None:
    rows = []
    for c in result.certificates:
        decides = c.name == result.primary_name and c.finite_sample
        rows.append(
            [
                TITLES[c.name],
                "finite sample" if c.finite_sample else "asymptotic",
                number(c.lower_bound),
                number(c.parts.get("radius", c.parts.get("surrogate_radius", 0.0))),
                ("decides; " if decides else "") + c.label,
            ]
        )
    rows += [[TITLES[name], "", "-", "-", f"missing: {why}"] for name, why in result.missing]
    header = ["J(train) - J(rollout) >=", "kind", "limit", "radius", "note"]
    print_table(header, rows, stream, left=[header[0], "kind", "note"])


def _print_bounds(result: Certification, stream: TextIO) -> None:
    rows = []
    for b in result.bounds:
        verdict = (
            "vacuous: above the reward span"
            if not b.below_range
            else "cannot certify: above any attainable gain"
            if not b.certifying
            else "below the measured gain"
            if b.instance
            else "above the measured gain"
        )
        premise = "sampled maximum: no guarantee" if b.assumes_maximum else "averages"
        source = "published" if b.published else "ours"
        rows.append([b.name, source, number(b.value), premise, verdict])
    header = ["bound on |error|", "source", "value", "from", "here"]
    print_table(header, rows, stream, left=[header[0], "source", "from", "here"])


def _print_prose(result: Certification, stream: TextIO) -> None:
    c, needed = result.constants, result.rollouts_needed
    lines = [
        f"smallest certifiable gain: {number(result.min_certifiable_gain)} by SeqKL (upper limit "
        f"of D_seq, asymptotic); {number(result.min_certifiable_gain_finite)} for the deciding "
        f"limit at {result.num_sequences} rollouts",
        f"largest attainable L': {number(result.attainable)}",
        f"rollouts needed: {_count(needed.truncated_weight)} for C0, "
        f"{_count(needed.sequence_mask)} for C2, {_count(needed.gate)} for C3', "
        f"{_count(needed.seq_kl)} for SeqKL (asymptotic); half the gate's radius: "
        f"{_count(needed.halve_gate_radius)}",
        f"constants {result.constants_origin}"
        + (f" of {result.num_split} rollouts" if result.num_split else "")
        + f": max KL {c.max_kl:.3g}, max ratio {c.max_ratio:.3g}, shift budget "
        f"{c.shift_budget:.3g}, KL budget {c.kl_budget:.3g}, |log W| {c.max_abs_log_weight:.3g}; "
        f"{result.accepted:.0%} of the rollouts stay below max KL",
    ]
    if result.bottleneck is not None:
        lines += result.bottleneck.sentences
    stream.write("\n".join(lines) + "\n")
    for note in result.notes:
        stream.write(f"note: {note}\n")


def _count(value: int | None) -> str:
    return "no number" if value is None else str(value)
