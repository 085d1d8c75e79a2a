# SPDX-License-Identifier: Apache-2.0
"""The progress bar."""

from __future__ import annotations

import io

import pytest

from trm_ext.report.progress import ProgressBar


def test_progress_bar_ends_its_line_after_an_error() -> None:
    stream = io.StringIO()
    with pytest.raises(ZeroDivisionError), ProgressBar("work", "rows", stream, True) as bar:
        bar(1, 2)
        raise ZeroDivisionError
    assert stream.getvalue() == f"\rwork [{'#' * 15}{'-' * 15}]  50% (1/2 rows)\n"


def test_progress_bar_can_be_switched_off() -> None:
    stream = io.StringIO()
    with ProgressBar("work", "rows", stream, False) as bar:
        bar(1, 2)
    assert stream.getvalue() == ""
