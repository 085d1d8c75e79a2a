# SPDX-License-Identifier: Apache-2.0
"""The pages in a real browser: nothing sticks out at phone width, and text can be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trm_ext.report import browser
from tests.trm_ext.report.test_audit_page import HOSTILE, make
from trm_ext.audit import audit_file
from trm_ext.io import PairMetadata, PolicyRecord
from trm_ext.report.audit_page import audit_page

image = pytest.importorskip("matplotlib.image", reason="matplotlib reads the screenshots")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section, long words and a hostile name."""
    browser.browser()
    folder = tmp_path_factory.mktemp("page")
    side = PolicyRecord("an-engine-with-a-long-name" * 4, "1.0", HOSTILE)

    def flip(b: int, x: torch.Tensor, y: torch.Tensor) -> None:
        y[5] = -x[5]

    metadata = PairMetadata(side, side, None, "x" * 120, {"model": HOSTILE})
    pair = make(folder / ("p" * 80), (40, 25, 60, 33) * 3, metadata=metadata, holes=True, edit=flip)
    target = folder / "page.html"
    target.write_text(
        audit_page(audit_file(pair.path, 0.02), text=lambda i: f" word{i}", command="trm " * 60),
        encoding="utf-8",
    )
    return target


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_and_charts_can_be_read(page: Path, width: int) -> None:
    found = browser.layout(page, width)
    assert found["width"] <= width and found["outside"] == []
    assert found["clipped"] == []
    assert found["smallest"] >= 9.5  # CSS pixels of the smallest text in a chart
    assert found["requests"] == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_a_screenshot_shows_the_page(page: Path, width: int) -> None:
    target = page.with_name(f"shot-{width}.png")
    browser.screenshot(page, width, 3000, target)
    pixels = image.imread(target)[:, :width, :3]
    assert pixels.shape[0] == 3000
    ink = (np.abs(pixels - pixels[2, 2]).max(axis=-1) > 0.2).mean(axis=1)
    assert (ink > 0).mean() > 0.3  # most lines of pixels hold something: no blank page
    blue = (pixels[..., 2] > pixels[..., 0] + 0.2).mean()
    assert blue > 0.002  # the bars of the charts


def test_it_prints(page: Path) -> None:
    target = page.with_suffix(".pdf")
    browser.run(f"--print-to-pdf={target}", page.as_uri())
    data = target.read_bytes()
    assert data.startswith(b"%PDF") and 2 <= data.count(b"/Type /Page\n") <= 20
