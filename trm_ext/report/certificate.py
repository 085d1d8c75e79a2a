# SPDX-License-Identifier: Apache-2.0
"""A certification on the terminal: the verdict first, then what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from trm_ext.certification import Certification, radius
from trm_ext.report.table import number, print_table

if TYPE_CHECKING:
    from theory.certify import Certificate

TITLES = {
    "truncated_weight": "C0 truncated weight",
    "log": "C1 log weight",
    "sequence_mask": "C2 sequence mask",
    "frozen_budget": "C3' budget gate",
    "frozen_drift": "C3' drift gate",
    "seq_kl": "SeqKL",
}


def print_certification(result: Certification, stream: TextIO) -> None:
    """Print verdict, quantities, certificates, bounds, and what more rollouts would do.

    Rewards in their own units, divergences in nats. Every limit is one-sided and holds with
    probability 1 - alpha on its own.
    """
    stream.write(f"{result.verdict}: {result.reasons[0]}\n")
    stream.write(f"{result.asymptotic_verdict} by {result.reasons[1]}\n")
    stream.write(gate_sentence(result) + "\n")
    stream.write(
        f"{result.label}; {result.num_sequences} rollouts, {result.num_tokens} tokens, longest "
        f"{result.longest}; reward in [{result.reward_range[0]:g}, {result.reward_range[1]:g}]; "
        f"{levels(result)}\n\n"
    )
    _print_quantities(result, stream)
    stream.write("\n")
    _print_certificates(result, stream)
    if result.bounds:
        stream.write("\n")
        _print_bounds(result, stream)
    stream.write("\n")
    _print_prose(result, stream)


def gate_sentence(result: Certification) -> str:
    """The budget gate's verdict, or what it stands on where it decides."""
    found = result.judgement("frozen_budget")
    budget = next(c for c in result.certificates if c.name == found.certificate and c.finite_sample)
    decides = "decides" if result.primary_name == found.certificate else f"alone: {found.verdict}"
    return (
        f"{TITLES[found.certificate]} {decides}; radius {number(radius(budget))}, rollouts needed: "
        f"{count(result.rollouts_needed.frozen_budget)}"
    )


def levels(result: Certification) -> str:
    """With which probability the limits hold, in words."""
    return (
        f"each limit one-sided, {1 - result.alpha:g} on its own; the {len(result.judgements)} "
        f"finite-sample ones together {result.joint_confidence:g}"
    )


def certificate_row(result: Certification, certificate: Certificate) -> list[str]:
    """Title, kind, limit, radius, rollouts needed, the verdict it would give, and its label."""
    name, finite = certificate.name, certificate.finite_sample
    needed = getattr(result.rollouts_needed, name, None)
    return [
        TITLES[name],
        "finite sample" if finite else "asymptotic",
        number(certificate.lower_bound),
        number(radius(certificate)),
        count(needed) if finite or name == "seq_kl" else "",
        str(result.judgement(name).verdict) if finite else "",
        ("decides; " if finite and name == result.primary_name else "") + certificate.label,
    ]


def constants_sentence(result: Certification) -> str:
    """The constants, and where they come from."""
    c, split = result.constants, result.num_split
    return (
        f"constants {result.constants_origin}"
        + (f" of {split} rollouts, the limits are from the others" if split else "")
        + f": max KL {c.max_kl:.3g}, max ratio {c.max_ratio:.3g}, shift budget "
        f"{c.shift_budget:.3g}, drift budget {c.drift_budget:.3g}, KL budget {c.kl_budget:.3g}, "
        f"|log W| {c.max_abs_log_weight:.3g}"
    )


def count(value: int | None) -> str:
    """A number of rollouts, or that none is enough."""
    return "no number" if value is None else str(value)


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
    rows = [certificate_row(result, c) for c in result.certificates]
    rows += [
        [TITLES[name], "", "-", "-", "", "", f"missing: {why}"] for name, why in result.missing
    ]
    header = ["J(train) - J(rollout) >=", "kind", "limit", "radius", "needs", "verdict", "note"]
    print_table(header, rows, stream, left=[header[0], "kind", "verdict", "note"])


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
    lines = [
        f"smallest certifiable gain: {number(result.min_certifiable_gain)} by SeqKL (upper limit "
        f"of D_seq, asymptotic); {number(result.min_certifiable_gain_finite)} for the deciding "
        f"limit at {result.num_sequences} rollouts",
        f"largest attainable L': {number(result.attainable)}",
        "rollouts to halve the budget gate's radius: "
        + count(result.rollouts_needed.halve_gate_radius),
        f"{constants_sentence(result)}; {result.accepted:.0%} of the rollouts stay below max KL",
    ]
    if result.bottleneck is not None:
        lines += result.bottleneck.sentences
    stream.write("\n".join(lines) + "\n")
    for note in result.notes:
        stream.write(f"note: {note}\n")
