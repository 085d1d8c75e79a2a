# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels built under AddressSanitizer and UBSan, run over a grid of sizes and layouts."""

import os
import platform
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZE = [
    "-fsanitize=address,undefined,bounds-strict",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
]
SETS = {  # what takes longest first
    "scalar": [],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}


def compile_unit(source, target, *flags):
    command = [
        os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-g", "-w", *SANITIZE, *flags,
        f"-I{ROOT}/csrc", f"-I{ROOT}/csrc/include", "-c", str(source), "-o", str(target),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return str(target)


@pytest.mark.slow
def test_grid_under_address_and_undefined_behaviour_sanitizers(tmp_path):
    x86 = platform.machine() == "x86_64"
    common = ["-DTRM_HAS_X86_RUNS"] if x86 else []
    units = [
        (ROOT / f"csrc/cpu/rows_{name}.cpp", flags)
        for name, flags in SETS.items()
        if x86 or name == "scalar"
    ]
    sources = [
        *(ROOT / f"csrc/cpu/{name}.cpp" for name in
          ("capability", "double_row", "float_row", "token_divergence")),
        ROOT / "tests/csrc/cpu_kernels_grid.cpp",
    ]  # fmt: skip
    units += [(source, common) for source in sources]
    with ThreadPoolExecutor(2) as pool:  # the three sets take minutes each
        objects = list(
            pool.map(lambda u: compile_unit(u[0], tmp_path / f"{u[0].stem}.o", *u[1]), units)
        )
    program = tmp_path / "grid"
    subprocess.run(
        [os.environ.get("CXX", "c++"), *SANITIZE, *objects, "-o", str(program)], check=True
    )
    result = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert int(re.fullmatch(r"(\d+) cases\n", result.stdout).group(1)) >= 16 * 30
