# SPDX-License-Identifier: Apache-2.0
"""The pages in a real browser: nothing sticks out at phone width, and text can be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trm_ext.report import browser, test_certify_page
from tests.trm_ext.report.test_audit_page import HOSTILE, make
from trm_ext.audit import audit_file
from trm_ext.calibration import calibrate
from trm_ext.certification import certify_file
from trm_ext.io import PairMetadata, PolicyRecord
from trm_ext.report.audit_page import audit_page
from trm_ext.report.calibrate_page import calibrate_page
from trm_ext.report.certify_page import certify_page

image = pytest.importorskip("matplotlib.image", reason="matplotlib reads the screenshots")


def page_of_certificate(folder: Path) -> str:
    pair = test_certify_page.make(folder / "pair", sequences=12)
    return certify_page(certify_file(pair), command="trm certify pair")


def page_of_calibration(folder: Path) -> str:
    pair = test_certify_page.make(folder / "pair", sequences=12)
    floor = PairMetadata(extra={"pair": "noise-floor"})
    noise = test_certify_page.make(folder / "floor", noise=0.01, metadata=floor)
    return calibrate_page(calibrate([pair, noise]), command="trm calibrate pair floor")


def page_of_audit(folder: Path) -> str:
    """Every section, long words and a hostile name."""
    side = PolicyRecord("an-engine-with-a-long-name" * 4, "1.0", HOSTILE)

    def flip(b: int, x: torch.Tensor, y: torch.Tensor) -> None:
        y[5] = -x[5]

    metadata = PairMetadata(side, side, None, "x" * 120, {"model": HOSTILE})
    pair = make(folder / ("p" * 80), (40, 25, 60, 33) * 3, metadata=metadata, holes=True, edit=flip)
    audit = audit_file(pair.path, 0.02)
    return audit_page(audit, text=lambda i: f" word{i}", command="trm " * 60)


PAGES = [
    page_of_audit,
    pytest.param(page_of_certificate, marks=pytest.mark.slow),
    pytest.param(page_of_calibration, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    browser.browser()
    folder = tmp_path_factory.mktemp("page")
    target = folder / "page.html"
    target.write_text(request.param(folder), encoding="utf-8")
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
    height = 4500 if width < 500 else 2600
    browser.screenshot(page, width, height, target)
    pixels = image.imread(target)[:, :width, :3]
    assert pixels.shape[:2] == (height, width)
    ink = (np.abs(pixels - pixels[2, 2]).max(axis=-1) > 0.2).mean(axis=1)
    assert (ink > 0).mean() > 0.15  # no blank page
    blue = (pixels[..., 2] > pixels[..., 0] + 0.2).mean()
    assert blue > 0.002  # the bars of the charts


def test_it_prints(page: Path) -> None:
    target = page.with_suffix(".pdf")
    browser.run(f"--print-to-pdf={target}", page.as_uri())
    data = target.read_bytes()
    assert data.startswith(b"%PDF") and 1 <= data.count(b"/Type /Page\n") <= 20
