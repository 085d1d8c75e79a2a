# SPDX-License-Identifier: Apache-2.0
"""A calibration on the terminal: the floor, the table of thresholds, the warnings."""

from __future__ import annotations

import math
from typing import TextIO

from trm_ext.calibration import Calibration, KlSummary
from trm_ext.report.table import number, print_table


def print_calibration(result: Calibration, stream: TextIO) -> None:
    """Print KL of the pair and of its floor, acceptance by threshold and length, and warnings.

    KL in nats; acceptance as a share; ``n=`` columns count the first n tokens of the sequences
    that are so long.
    """
    names = [" ".join((side.engine, side.precision)) for side in (result.rollout, result.train)]
    stream.write(f"{result.kind}: {names[0]} -> {names[1]}\n\n")
    header = ["KL, nats", "tokens", "mean", "median", "p99", "max", "sequences", "median of max"]
    header += ["D_seq", "NaN", "inf"]
    rows = [_summary(result.kind, result.pair)]
    if result.floor is not None and result.kind != "noise floor":
        rows.append(_summary("noise floor", result.floor))
    rows += [_summary(f"{d.side}, 1st vs 2nd", d.kl) for d in result.differences]
    print_table(header, rows, stream, left=["KL, nats"])
    for d in result.differences:
        stream.write(
            f"{d.side}: {d.identical:.1%} of the rows are identical bit for bit; largest change of "
            f"a sampled log-probability {number(d.max_abs_log_ratio)}; worst at sequence "
            f"{d.worst[0]}, token {d.worst[1]}\n"
        )
    stream.write("\n")
    header = ["max KL", "kept", *(f"n={n}" for n in result.lengths), "floor", "what it says"]
    rows = [
        [
            number(row.max_kl),
            f"{row.acceptance:.0%}",
            *(f"{share:.0%}" for share in row.acceptance_by_length),
            "below" if row.below_floor else "-" if math.isnan(result.floor_threshold) else "above",
            row.says,
        ]
        for row in result.thresholds
    ]
    print_table(header, rows, stream, left=["floor", "what it says"])
    by_length = ", ".join(
        f"{number(x)} at n={n}"
        for n, x in zip(result.lengths, result.target_by_length, strict=True)
    )
    stream.write(
        f"\n{result.target_acceptance:.0%} are kept at max KL <= {number(result.target_threshold)} "
        f"({by_length})\n"
    )
    if not math.isnan(result.floor_threshold):
        stream.write(
            f"noise floor: max KL <= {number(result.floor_threshold)} keeps "
            f"{result.target_acceptance:.0%} of rollouts whose policies differ by rounding alone\n"
        )
    for warning in result.warnings:
        stream.write(f"warning: {warning}\n")
    for note in result.notes:
        stream.write(f"note: {note}\n")


def _summary(name: str, s: KlSummary) -> list[str]:
    return [
        name,
        str(s.tokens),
        *map(number, (s.mean, s.median, s.p99, s.maximum)),
        str(s.sequences),
        number(s.sequence_median),
        number(s.seq_kl),
        str(s.unscored),
        str(s.unsupported),
    ]
