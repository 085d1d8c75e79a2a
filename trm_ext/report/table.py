# SPDX-License-Identifier: Apache-2.0
"""Terminal tables: rich on a terminal that has it, aligned plain text everywhere else."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from trm_ext.audit import Audit, SequenceAudit
from trm_ext.validate import OUTPUTS, Check, Validation

_UNLIMITED = 10_000  # columns: a narrow terminal wraps a row, it never cuts a number
_STYLES = {"kept": "green", "masked": "red", "yes": "green", "NO": "red"}


def number(value: float) -> str:
    """Format a divergence with three significant digits.

    Example:
        >>> number(0.0123456), number(1.5e-11), number(0.0), number(float("nan"))
        ('0.0123', '1.5e-11', '0', 'nan')
    """
    return f"{value:.3g}"


def verdict(entry: SequenceAudit) -> str:
    """Say whether a sequence is kept, and why not.

    Returns:
        ``kept``, ``kept (empty)``, ``masked`` or ``masked (non_finite)``.
    """
    word = "kept" if entry.keep else "masked"
    return word if entry.reason in ("kept", "max_kl") else f"{word} ({entry.reason})"


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    stream: TextIO,
    *,
    left: Sequence[str] = (),
) -> None:
    """Print one table.

    On a terminal where ``rich`` is installed it draws the table, in colour unless ``NO_COLOR``
    is set. Everywhere else the table is aligned text without any control character.

    Args:
        header: column titles.
        rows: cells, already formatted.
        stream: usually ``sys.stdout``.
        left: titles of the columns that are aligned to the left.

    Example:
        >>> import sys
        >>> print_table(["seq", "verdict"], [["0", "kept"]], sys.stdout, left=["verdict"])
        seq  verdict
        ---  -------
          0  kept
    """
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        _print_rich(header, rows, stream, left)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if title in left else cell.rjust(width)
            for cell, width, title in zip(cells, widths, header, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    for cells in (header, ["-" * width for width in widths], *rows):
        stream.write(line(cells) + "\n")


def print_audit(audit: Audit, stream: TextIO) -> None:
    """Print one row per sequence and a summary.

    KL, k3 and abs log rho are in nats; ``at`` is the position inside the sequence.
    """
    header = ["seq", "tokens", "max KL", "at", "token", "mean KL", "total KL"]
    header += ["max |log rho|", "mean k3", "max k3", "verdict"]
    rows = [
        [
            str(entry.sequence),
            str(entry.tokens),
            number(entry.max_kl),
            str(entry.position),
            str(entry.token_id),
            number(entry.mean_kl),
            number(entry.sum_kl),
            number(entry.max_abs_log_rho),
            number(entry.mean_k3),
            number(entry.max_k3),
            verdict(entry),
        ]
        for entry in audit.sequences
    ]
    print_table(header, rows, stream, left=["verdict"])
    total, worst = len(audit.sequences), audit.worst
    stream.write(
        f"\n{audit.kept} of {total} sequences kept at max KL <= {audit.max_kl:g} nats; "
        f"{int(audit.counted.sum())} tokens, mean KL {number(audit.mean_kl)}"
    )
    if worst is not None:
        stream.write(
            f", largest {number(worst.max_kl)} at sequence {worst.sequence}, token {worst.position}"
        )
    stream.write("\n")
    for note in audit.notes:
        stream.write(f"note: {note}\n")


def print_validation(found: Validation, rows: str, stream: TextIO) -> None:
    """Print checks, then the worst relative error per dtype, instruction set and output.

    Args:
        found: what :func:`trm_ext.validate.validate` returned.
        rows: ``worst`` (one check per law, dtype and instruction set), ``failed`` or ``all``.
        stream: usually ``sys.stdout``.
    """
    chosen: Sequence[Check] = found.checks if rows == "all" else found.failures
    if rows == "worst":
        chosen = list(found.worst("law", "dtype", "instruction_set").values())
    if chosen:
        header = ["law", "KL", "V", "dtype", "instructions", "output", "the law says"]
        header += ["held to", "predicted", "kernel", "error", "tolerance", "pass"]
        cells = [
            [
                check.law,
                f"{check.kl:.0e}",
                str(check.vocab),
                check.dtype,
                check.instruction_set,
                check.output,
                f"{check.law_value:.6e}",
                check.prediction,
                f"{check.predicted:.9e}",
                f"{check.kernel:.9e}",
                f"{check.error:.1e}",
                f"{check.tolerance:.1e}",
                "yes" if check.passed else "NO",
            ]
            for check in chosen
        ]
        left = ["law", "dtype", "instructions", "output", "held to", "pass"]
        print_table(header, cells, stream, left=left)
        stream.write("\n")
    stream.write("relative error of the check that uses most of its tolerance\n")
    header = ["dtype", "instructions", "held to", *OUTPUTS, "pass"]
    summary = [
        [
            *line,
            *(f"{worst[output].error:.1e}" for output in OUTPUTS),
            "yes" if all(check.passed for check in worst.values()) else "NO",
        ]
        for line, worst in found.summary().items()
    ]
    print_table(header, summary, stream, left=["dtype", "instructions", "held to", "pass"])
    passed = len(found.checks) - len(found.failures)
    stream.write(f"\n{passed} of {len(found.checks)} checks pass on backend {found.backend}\n")


def print_tree(values: Mapping[str, Any], stream: TextIO, indent: int = 0) -> None:
    """Print a nested dictionary, one ``key  value`` per line, sub-dictionaries indented.

    Example:
        >>> import sys
        >>> print_tree({"torch": "2.13", "cpu": {"avx2": True}}, sys.stdout)
        torch  2.13
        cpu
          avx2  yes
    """
    width = max((len(str(key)) for key, value in values.items() if not _is_tree(value)), default=0)
    for key, value in values.items():
        if _is_tree(value):
            stream.write(" " * indent + f"{key}\n")
            print_tree(value, stream, indent + 2)
        else:
            stream.write(" " * indent + f"{key!s:<{width}}  {_plain(value)}\n")


def _is_tree(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value in ({}, [], ()):
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return str(value)


def _print_rich(
    header: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO, left: Sequence[str]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for title in header:
        table.add_column(title, justify="left" if title in left else "right")
    for row in rows:
        cells = [Text(cell, style=_STYLES.get(cell.partition(" ")[0], "")) for cell in row]
        table.add_row(*cells)
    Console(file=stream, width=_UNLIMITED).print(table)
