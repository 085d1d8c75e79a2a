# SPDX-License-Identifier: Apache-2.0
"""The examples run from the command line and say what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_grpo_minimal_learns_and_reports(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib: pip install .[report]")
    script = ROOT / "examples" / "grpo_minimal.py"
    assert len(script.read_text().splitlines()) < 150
    out = tmp_path / "grpo.png"
    run = subprocess.run(
        [sys.executable, str(script), "--steps", "120", "--out", str(out)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    rows = re.findall(r"^step +\d+  reward ([\d.]+)  KL \S+ .*(TRM|off) .*%$", run.stdout, re.M)
    assert len(rows) == 240 and out.stat().st_size > 10_000
    for name in ("TRM", "off"):
        rewards = [float(reward) for reward, which in rows if which == name]
        assert rewards[0] < 0.2 and sum(rewards[-10:]) / 10 > 0.6
