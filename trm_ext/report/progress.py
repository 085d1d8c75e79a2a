# SPDX-License-Identifier: Apache-2.0
"""A progress bar on one terminal line."""

from __future__ import annotations

from typing import TextIO

_WIDTH = 30


class ProgressBar:
    """Draws ``label [####----] 40% (2/5 unit)`` and redraws it in place.

    Call it with (done, total). Use it as a context manager, so that the line ends even after an
    error.

    Args:
        label: what is being done.
        unit: what is being counted.
        stream: where to draw, usually ``sys.stderr``.
        enabled: False draws nothing.
    """

    def __init__(self, label: str, unit: str, stream: TextIO, enabled: bool) -> None:
        self._label, self._unit, self._stream, self._enabled = label, unit, stream, enabled
        self._drawn = False

    def __call__(self, done: int, total: int) -> None:
        """Draw the state ``done`` of ``total``."""
        if not self._enabled:
            return
        share = done / total if total else 1.0
        bar = "#" * round(_WIDTH * share)
        self._stream.write(
            f"\r{self._label} [{bar:-<{_WIDTH}}] {share:4.0%} ({done}/{total} {self._unit})"
        )
        self._stream.flush()
        self._drawn = True

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
