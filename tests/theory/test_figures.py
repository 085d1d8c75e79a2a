# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")

from theory import figures  # noqa: E402
from theory.gradients import fit_exponent  # noqa: E402


def test_every_figure_is_drawn_and_has_labels(tmp_path):
    paths = figures.draw(tmp_path / "deep" / "folder")
    assert [p.name for p in paths] == [f"{name}.png" for name in figures.FIGURES]
    for path in paths:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 10_000


@pytest.mark.parametrize("name", list(figures.FIGURES))
def test_axes_carry_units_and_finite_curves(name):
    for axis in figures.FIGURES[name]().axes:
        assert axis.get_xlabel() and axis.get_title()
        for line in axis.get_lines():
            assert np.isfinite(np.asarray(line.get_ydata(), float)).any()


def test_fitted_exponents_of_the_families():
    t = np.array([64, 256, 1024, 4096])
    slopes = {k: fit_exponent(t, v) for k, v in figures.worst_case_curves(t).items()}
    expected = {"rare": 2, "product": 1, "hazard": 0, "ergodic": 0}
    for name, slope in slopes.items():
        assert slope == pytest.approx(expected[name.replace(",", "").split()[0]], abs=0.02), name


def test_unknown_figure_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Unknown figure 'pie'"):
        figures.draw(tmp_path, ["pie"])
