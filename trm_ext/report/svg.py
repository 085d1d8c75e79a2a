# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG: scales with ticks, and marks drawn on them. Nothing is fetched or run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trm_ext.report.page import Html, text

__all__ = ["Chart", "Scale", "log_range"]

WIDTH, HEIGHT = 380, 232  # at phone width one unit is about one pixel, so 11 units can be read
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 16, 18, 36
_MOST_TICKS = 6


@dataclass(frozen=True)
class Scale:
    """Maps values to SVG units.

    Attributes:
        low: value at the axis' start.
        high: value at its end, > low.
        log: logarithmic; low > 0.
    """

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, 0 at low and 1 at high; values outside end up at the ends.

        >>> Scale(1e-4, 1.0, log=True).share(1e-2)
        0.5
        """
        if math.isnan(value):
            return 0.0
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Values to mark, with their labels: decades, or multiples of 1, 2 or 5.

        >>> Scale(0.0, 1.0).ticks()[1]
        (0.2, '0.2')
        """
        if self.log:
            first = math.ceil(math.log10(self.low) - 1e-9)
            last = math.floor(math.log10(self.high) + 1e-9)
            every = max(1, -(-(last - first) // _MOST_TICKS))
            return [(10.0**n, _power(n)) for n in range(first, last + 1, every)]
        span = self.high - self.low
        unit = 10.0 ** math.floor(math.log10(span / _MOST_TICKS))
        step = next(m * unit for m in (1, 2, 5, 10) if span / (m * unit) <= _MOST_TICKS)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [(n * step, f"{n * step:.6g}") for n in range(first, last + 1)]


def log_range(values: Iterable[float]) -> Scale:
    """A logarithmic scale over whole decades that holds all finite positive values.

    >>> log_range([0.0, 0.02, 3.0])
    Scale(low=0.01, high=10.0, log=True)
    """
    positive = [value for value in values if 0 < value < math.inf]
    low = math.floor(math.log10(min(positive))) if positive else -3
    high = math.ceil(math.log10(max(positive))) if positive else 0
    return Scale(10.0**low, 10.0 ** max(high, low + 1), log=True)


class Chart:
    """One SVG picture with two axes; marks are drawn in the order in which they are added.

    Args:
        x: horizontal scale.
        y: vertical scale.
        label: what a screen reader says.
        x_label: below the axis.
        y_label: above the axis.
        height: in SVG units; the width is always the same and scales with the page.
    """

    def __init__(
        self,
        x: Scale,
        y: Scale,
        label: str,
        *,
        x_label: str = "",
        y_label: str = "",
        height: int = HEIGHT,
    ) -> None:
        self._x, self._y, self._label, self._height = x, y, label, height
        self._top = _TOP if y_label else 6
        self._bottom = height - (_BOTTOM if x_label else 18)
        self._marks: list[str] = []
        self._axes(x_label, y_label)

    def bar(
        self, left: float, right: float, top: float, *, style: str = "a", title: str = ""
    ) -> None:
        """A bar from the axis up to ``top`` between two values of x."""
        x, x2, y = self._px(left), self._px(right), self._py(top)
        gap = 0.5 if x2 - x > 3 else 0.0
        self._rectangle(x, y, x2 - x - gap, self._bottom - y, style, title)

    def cell(
        self, left: float, right: float, low: float, high: float, weight: float, title: str = ""
    ) -> None:
        """A rectangle, the darker the larger ``weight`` in (0, 1]."""
        x, y = self._px(left), self._py(high)
        self._rectangle(
            x, y, self._px(right) - x, self._py(low) - y, "a", title, f"{0.15 + 0.85 * weight:.2f}"
        )

    def dot(self, x: float, y: float, *, style: str = "a", title: str = "") -> None:
        """A point."""
        self._marks.append(
            f'<circle class="{style}" cx="{self._px(x):.1f}" cy="{self._py(y):.1f}" r="2.6">'
            f"{_title(title)}</circle>"
        )

    def line(self, points: Sequence[tuple[float, float]], *, style: str = "a") -> None:
        """A polyline."""
        path = " ".join(f"{self._px(x):.1f},{self._py(y):.1f}" for x, y in points)
        self._marks.append(f'<polyline class="line {style}" points="{path}"/>')

    def vertical(self, x: float, label: str = "", *, style: str = "limit", row: int = 0) -> None:
        """A line across the plot at one x, labelled at the top; ``row`` keeps labels apart."""
        at = self._px(x)
        self._marks.append(
            f'<line class="{style}" x1="{at:.1f}" x2="{at:.1f}" y1="{self._top}" '
            f'y2="{self._bottom}"/>'
        )
        if label:
            right = at > 0.6 * WIDTH
            self._write(
                at + (-3 if right else 3),
                self._top + 10 + 12 * row,
                label,
                "end" if right else "start",
                "mark",
            )

    def horizontal(self, y: float, label: str = "", *, style: str = "limit") -> None:
        """A line across the plot at one y, labelled at its right end."""
        at = self._py(y)
        self._marks.append(
            f'<line class="{style}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" '
            f'y2="{at:.1f}"/>'
        )
        if label:
            self._write(WIDTH - _RIGHT - 2, at - 3, label, "end", "mark")

    def diagonal(self) -> None:
        """The line y = x."""
        low, high = max(self._x.low, self._y.low), min(self._x.high, self._y.high)
        if low < high:
            self._marks.append(
                f'<line class="limit" x1="{self._px(low):.1f}" y1="{self._py(low):.1f}" '
                f'x2="{self._px(high):.1f}" y2="{self._py(high):.1f}"/>'
            )

    def svg(self) -> Html:
        """The picture."""
        return Html(
            f'<svg viewBox="0 0 {WIDTH} {self._height}" role="img">'
            f"<title>{text(self._label)}</title>{''.join(self._marks)}</svg>"
        )

    def _axes(self, x_label: str, y_label: str) -> None:
        right = WIDTH - _RIGHT
        for value, label in self._y.ticks():
            y = self._py(value)
            self._marks.append(
                f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            self._write(_LEFT - 4, y + 4, label, "end")
        for value, label in self._x.ticks():
            x = self._px(value)
            self._marks.append(
                f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{self._bottom}" '
                f'y2="{self._bottom + 3}"/>'
            )
            self._write(x, self._bottom + 14, label, "middle")
        self._marks.append(
            f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{self._bottom}" '
            f'y2="{self._bottom}"/>'
        )
        if x_label:
            self._write((_LEFT + right) / 2, self._height - 6, x_label, "middle")
        if y_label:
            self._write(2, 11, y_label, "start")

    def _write(self, x: float, y: float, label: str, anchor: str, style: str = "") -> None:
        attribute = f' class="{style}"' if style else ""
        self._marks.append(
            f'<text{attribute} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(label)}</text>'
        )

    def _rectangle(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        style: str,
        title: str,
        opacity: str = "",
    ) -> None:
        shade = f' fill-opacity="{opacity}"' if opacity else ""
        self._marks.append(
            f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{max(height, 0):.1f}"{shade}>{_title(title)}</rect>'
        )

    def _px(self, value: float) -> float:
        return _LEFT + self._x.share(value) * (WIDTH - _LEFT - _RIGHT)

    def _py(self, value: float) -> float:
        return self._bottom - self._y.share(value) * (self._bottom - self._top)


def _title(title: str) -> str:
    return f"<title>{text(title)}</title>" if title else ""


def _power(n: int) -> str:
    return f"{10.0**n:g}" if -3 < n < 4 else f"1e{n}"
