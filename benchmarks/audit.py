# SPDX-License-Identifier: Apache-2.0
"""``trm audit`` of a large file: time against reading it plus the kernel, and peak memory.

The three are measured one after another in each round: a plain sequential read of the whole file
into a buffer that stays in cache, the kernel with the audit's outputs over as many rows from
memory, and the audit. Peak memory is that of the command in a process of its own, beside the same
command on a file of a few rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import trm_ext as trm
from benchmarks import record
from trm_ext.audit import AUDIT_OUTPUTS, audit_file
from trm_ext.io import RolloutPairReader, RolloutPairWriter, default_chunk_rows

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_TIME = 1.3  # of read + kernel
LENGTH = 512  # tokens of a sequence
_BUFFER = 1 << 20  # larger ones leave the cache, and the read is slower


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the file (default: 4)")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", action="store_true", help="drop the file's cache before reading")
    parser.add_argument("--folder", type=Path, help="where to make the file (default: temporary)")
    parser.add_argument("--out", type=Path, help="also write the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    environment = record.environment()
    print(" | ".join(f"{key} {value}" for key, value in environment.items()))
    dtype, vocabulary = DTYPES[arguments.dtype], arguments.vocabulary
    rows = max(2, round(arguments.gigabytes * 1e9 / (2 * vocabulary * dtype.itemsize)))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        large, small = Path(folder) / "large.safetensors", Path(folder) / "small.safetensors"
        make(large, rows, vocabulary, dtype)
        make(small, 2, vocabulary, dtype)
        size = large.stat().st_size
        seconds = measure(large, arguments.rounds, arguments.cold)
        peaks = {"large": peak_bytes(large), "small": peak_bytes(small)}
    ratios = [
        audit / (read + kernel)
        for audit, read, kernel in zip(
            seconds["audit"], seconds["read"], seconds["kernel"], strict=True
        )
    ]
    ratio = statistics.median(ratios)
    growth = peaks["large"] - peaks["small"]
    table = [
        [name, f"{statistics.median(t):.2f}", f"{size / statistics.median(t) / 1e9:.2f}"]
        for name, t in seconds.items()
    ]
    print(f"\n{size / 1e9:.2f} GB, {rows} tokens, V = {vocabulary} {arguments.dtype}")
    record.table(["", "seconds", "GB/s"], table, sys.stdout)
    verdict = "met" if ratio <= MOST_TIME else "MISSED"
    print(
        f"\naudit / (read + kernel) {ratio:.2f} (median of {len(ratios)} rounds, "
        f"{min(ratios):.2f} to {max(ratios):.2f}), wanted <= {MOST_TIME}: {verdict}"
    )
    print(
        f"peak memory of the command {peaks['large'] / 2**20:.0f} MiB, on a file of 2 tokens "
        f"{peaks['small'] / 2**20:.0f} MiB: {growth / 2**20:.0f} MiB for the size"
    )
    if arguments.out:
        result: dict[str, Any] = {
            "environment": environment,
            "bytes": size,
            "tokens": rows,
            "vocabulary": vocabulary,
            "dtype": arguments.dtype,
            "cold": arguments.cold,
            "seconds": seconds,
            "ratio": ratio,
            "peak_bytes": peaks,
        }
        arguments.out.write_text(json.dumps(result, indent=1))
    return 0


def make(path: Path, rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """A file of near rows; the same block again and again, which no reader can tell."""
    block = min(rows, 64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(block, vocabulary, generator=generator) * 3
    y = x + 0.05 * torch.randn(block, vocabulary, generator=generator)
    x, y = x.to(dtype), y.to(dtype)
    tokens = torch.randint(0, vocabulary, (block,), generator=generator)
    with RolloutPairWriter(path) as writer:
        length = 0
        for start in range(0, rows, block):
            count = min(block, rows - start)
            writer.append_rows(x[:count], y[:count], tokens[:count])
            length += count
            if length >= LENGTH or start + count == rows:
                writer.end_sequence()
                length = 0


def measure(path: Path, rounds: int, cold: bool) -> record.Measured:
    """Seconds of each part, one after another in each round."""
    with RolloutPairReader(path) as pair:
        chunk = default_chunk_rows(pair.num_columns)
        tokens, total = pair.tokens, pair.num_tokens
        # Several chunks, so that the kernel reads memory and not a cache.
        held = [pair.rows(i, min(i + chunk, total)) for i in range(0, min(total, 8 * chunk), chunk)]

    def read() -> None:
        buffer = memoryview(bytearray(_BUFFER))
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def kernel() -> None:
        done, i = 0, 0
        while done < total:
            x, y = held[i % len(held)]
            count = min(len(x), total - done)
            trm.token_divergence(
                x[:count],
                y[:count],
                tokens=tokens[done : done + count],
                outputs=AUDIT_OUTPUTS,
            )
            done, i = done + count, i + 1

    def audit() -> None:
        audit_file(path, 0.02)

    seconds: record.Measured = {"read": [], "kernel": [], "audit": []}
    for turn in range(rounds + 1):  # the first warms up
        for name, call in (("read", read), ("kernel", kernel), ("audit", audit)):
            if cold and name != "kernel":
                drop_cache(path)
            start = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def drop_cache(path: Path) -> None:
    """Ask the system to forget the file's pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


_CHILD = """
import sys
from pathlib import Path
from trm_ext.cli import main
code = main(sys.argv[1:])
status = Path("/proc/self/status").read_text()
print(next(line for line in status.splitlines() if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(code)
"""


def peak_bytes(path: Path) -> int:
    """Peak resident memory of ``trm audit`` in a process of its own."""
    # Asked of the process itself: what wait4 tells starts at the memory of the parent.
    command = [sys.executable, "-c", _CHILD, "audit", str(path), "--max-kl", "0.02"]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True
    )
    return int(done.stderr.split()[-2]) * 1024
