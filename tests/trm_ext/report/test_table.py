# SPDX-License-Identifier: Apache-2.0
"""Tables: plain text in a pipe, rich on a terminal."""

from __future__ import annotations

import io

import pytest

from trm_ext.report.table import print_table, print_tree


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_on_a_terminal_unless_no_color(
    monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    print_table(["seq", "verdict"], [["0", "masked (non_finite)"]], stream, left=["verdict"])
    text = stream.getvalue()
    assert "masked (non_finite)" in text
    assert ("\x1b[31m" in text) == (not no_color)


def test_narrow_terminal_cuts_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    print_table(["max KL", "mean KL"], [["0.0123456789", "0.00123456789"]], stream)
    assert "0.0123456789" in stream.getvalue() and "0.00123456789" in stream.getvalue()


def test_tree_shows_nested_facts() -> None:
    stream = io.StringIO()
    print_tree({"a": {"b": [1, 2], "long name": None}, "c": False, "d": {}}, stream)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines == ["a", "  b          1, 2", "  long name  none", "c  no", "d  none"]


def test_no_control_characters_in_a_pipe() -> None:
    stream = io.StringIO()
    print_table(["seq", "verdict"], [["0", "kept"], ["10", "masked"]], stream, left=["verdict"])
    assert stream.getvalue() == "seq  verdict\n---  -------\n  0  kept\n 10  masked\n"
