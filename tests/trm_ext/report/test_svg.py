# SPDX-License-Identifier: Apache-2.0
"""Charts put marks where the numbers are."""

from __future__ import annotations

import math
import re

import pytest

from trm_ext.report.svg import HEIGHT, WIDTH, Chart, Scale, log_range

# A coordinate is written to a tenth of a unit; the rest is float64's own rounding.
COORDINATE = 0.05 + 1e-9


def test_a_logarithmic_scale_is_linear_in_the_logarithm() -> None:
    scale = Scale(1e-8, 1e2, log=True)
    for value in (1e-8, 3e-7, 0.02, 1.0, 100.0):
        assert scale.share(value) == pytest.approx((math.log10(value) + 8) / 10)
    assert (scale.share(0.0), scale.share(1e9), scale.share(math.nan)) == (0.0, 1.0, 0.0)
    assert (scale.share(math.inf), scale.share(-1.0)) == (1.0, 0.0)


@pytest.mark.parametrize(
    "scale, labels",
    [
        (Scale(1e-4, 1e2, log=True), ["1e-4", "1e-3", "0.01", "0.1", "1", "10", "100"]),
        (Scale(1e-16, 1e2, log=True), ["1e-16", "1e-13", "1e-10", "1e-7", "1e-4", "0.1", "100"]),
        (Scale(0, 100), ["0", "20", "40", "60", "80", "100"]),
        (Scale(0, 0.37), ["0", "0.1", "0.2", "0.3"]),
        (Scale(-1, 1), ["-1", "-0.5", "0", "0.5", "1"]),
    ],
)
def test_ticks_are_round_and_few(scale: Scale, labels: list[str]) -> None:
    ticks = scale.ticks()
    assert [label for _, label in ticks] == labels
    assert all(float(label) == pytest.approx(value, abs=1e-12) for value, label in ticks)


@pytest.mark.parametrize(
    "values, ends",
    [([], (1e-3, 1.0)), ([0.0, math.inf, math.nan], (1e-3, 1.0)), ([0.1], (0.1, 1.0))],
)
def test_a_range_of_nothing_is_still_a_range(
    values: list[float], ends: tuple[float, float]
) -> None:
    scale = log_range(values)
    assert (scale.low, scale.high) == pytest.approx(ends)


def test_marks_are_where_the_values_are() -> None:
    chart = Chart(Scale(0, 10), Scale(0, 1), "label", x_label="x", y_label="y")
    chart.bar(0, 5, 0.5)
    chart.dot(10, 1)
    svg = chart.svg()
    left, right, top, bottom = 44, WIDTH - 16, 18, HEIGHT - 36
    (bar,) = re.findall(r'<rect class="a" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" hei', svg)
    assert [float(v) for v in bar] == pytest.approx(
        [left, (top + bottom) / 2, (right - left) / 2 - 0.5], abs=COORDINATE
    )
    (dot,) = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert [float(v) for v in dot] == pytest.approx([right, top], abs=COORDINATE)


def test_labels_are_escaped() -> None:
    chart = Chart(Scale(0, 1), Scale(0, 1), "<a>", x_label="<b>", y_label="<i>")
    chart.dot(0, 0, title="<u>")
    chart.vertical(0.5, "<s>")
    svg = chart.svg()
    for tag in "abius":
        assert f"<{tag}>" not in svg and f"&lt;{tag}&gt;" in svg
