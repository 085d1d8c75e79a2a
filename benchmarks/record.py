# SPDX-License-Identifier: Apache-2.0
"""Timings side by side, the environment they were taken in, and comparing two results."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

Measured = dict[str, list[float]]


WARM_UP = 4  # rounds; a virtual machine hands out the memory of large results only gradually


def interleaved(providers: dict[str, Callable[[], object]], rounds: int) -> Measured:
    """Seconds per call of each provider, one call of each per round, after the warm-up rounds."""
    for _ in range(WARM_UP):
        for call in providers.values():
            call()
    seconds: Measured = {name: [] for name in providers}
    for _ in range(rounds):
        for name, call in providers.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def paired_ratio(seconds: Measured, slow: str, fast: str) -> float:
    """Median over rounds of slow's time over fast's time in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def spread(samples: list[float]) -> float:
    """(max - min) / median."""
    return (max(samples) - min(samples)) / statistics.median(samples)


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Growth of this process's peak memory over one call, where the kernel lets us reset it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        call()
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(key)


def environment() -> dict[str, Any]:
    """What a reader needs to place the figures; load is that of the machine just before."""
    commit = "unknown"
    if shutil.which("git"):
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "processor": model,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "load": os.getloadavg()[0],
    }


def table(header: list[str], rows: list[list[str]], stream: TextIO) -> None:
    """Right-aligned columns, the first left-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        stream.write("  ".join(cells).rstrip() + "\n")


def compare(before: dict[str, Any], after: dict[str, Any], stream: TextIO) -> None:
    """Medians of two results; a difference counts where it exceeds both spreads."""
    old = {
        (case["case"], name): t for case in before["cases"] for name, t in case["seconds"].items()
    }
    rows = []
    for case in after["cases"]:
        for name, samples in case["seconds"].items():
            if (base := old.get((case["case"], name))) is None:
                continue
            ratio = statistics.median(samples) / statistics.median(base)
            noise = max(spread(samples), spread(base)) / 2
            verdict = "same" if abs(ratio - 1) <= noise else "faster" if ratio < 1 else "slower"
            rows.append([case["case"], name, f"{ratio:.3f}", f"{noise:.3f}", verdict])
    table(["case", "provider", "after/before", "noise", "verdict"], rows, stream)
