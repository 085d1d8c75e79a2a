# SPDX-License-Identifier: Apache-2.0
"""A page in headless Chromium: what it looks like, and how its parts are laid out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Headless Chromium opens no window below 500 units: a narrow page is looked at through a frame.
_FRAME = """<!doctype html><body style="margin:0">
<iframe src="PAGE" style="width:WIDTHpx;height:HEIGHTpx;border:0;display:block"></iframe>
<pre id="found"></pre>
<script>
onload = () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument;
  const view = frame.contentWindow, box = e => e.getBoundingClientRect();
  const labels = [...page.querySelectorAll("svg text")];
  const size = t => parseFloat(view.getComputedStyle(t).fontSize) *
    box(t.ownerSVGElement).width / t.ownerSVGElement.viewBox.baseVal.width;
  const beyond = (a, b) => a.left < b.left - 2 || a.right > b.right + 2 ||
    a.top < b.top - 2 || a.bottom > b.bottom + 2;
  document.querySelector("#found").textContent = JSON.stringify({
    width: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    smallest: Math.min(...labels.map(size)),
    outside: [...page.querySelectorAll("main *")]
      .filter(e => !e.closest(".scroll") && box(e).right > WIDTH + 1)
      .map(e => e.tagName + ": " + e.textContent.slice(0, 60)),
    clipped: labels.filter(t => beyond(box(t), box(t.ownerSVGElement))).map(t => t.textContent),
    requests: view.performance.getEntriesByType("resource").length,
  });
};
</script></body>"""


def browser() -> str:
    """The browser's path; skips the test when there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser on PATH (looked for {', '.join(NAMES)})")
    return found


def run(*arguments: str) -> str:
    """Run headless Chromium; its standard output."""
    command = [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--allow-file-access-from-files", "--disable-dev-shm-usage", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def layout(page: Path, width: int, height: int = 4000) -> dict[str, Any]:
    """How a page lies in a window of that width."""
    dom = run("--dump-dom", f"--window-size=1400,{height}", _framed(page, width, height))
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    result: dict[str, Any] = json.loads(unescape(found))
    return result


def screenshot(page: Path, width: int, height: int, target: Path) -> None:
    """A PNG of the first ``height`` units of a page."""
    window = max(width, 500)
    run(f"--window-size={window},{height}", f"--screenshot={target}", _framed(page, width, height))


def _framed(page: Path, width: int, height: int) -> str:
    frame = page.with_name(f"frame-{width}.html")
    text = _FRAME.replace("PAGE", page.name).replace("HEIGHT", str(height))
    frame.write_text(text.replace("WIDTH", str(width)))
    return frame.as_uri()
