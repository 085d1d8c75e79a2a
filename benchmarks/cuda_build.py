# SPDX-License-Identifier: Apache-2.0
"""Compiles csrc/cuda/*.cu without torch and reads what ptxas says about every kernel.

Cubins and the compiler's log are kept in build/cuda/ by what they were made from, so nothing is
compiled twice. `python -m benchmarks cuda-build` times the whole build, uncached.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "cuda"
RELEASE = "8.0;9.0;10.0;12.0+PTX"
# What setup.py compiles with, plus every complaint of the front end and of ptxas as an error.
FLAGS = [
    *("-std=c++20", "-O3", "-lineinfo", "-DUSE_CUDA", *cpp_extension.COMMON_NVCC_FLAGS),
    *("-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror", "-Xptxas=-v"),
]
BUDGETS = {"9.0": 4 * 60, RELEASE: 15 * 60}  # seconds on two cores
LIBRARY_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Resources:
    """What one kernel, or a device function that was not inlined, takes."""

    name: str
    registers: int | None  # per thread; None for a function that is not an entry
    shared: int  # static, bytes per block
    stack: int  # bytes per thread
    spills: int  # bytes stored and loaded


@cache
def why_not() -> str | None:
    """The reason why CUDA code cannot be compiled here, or None."""
    return None if shutil.which("nvcc") else "no nvcc on this machine"


@cache
def tool(name: str) -> Path | None:
    """A program of the CUDA toolkit, from the package index's packages, CUDA_HOME or PATH."""
    for package in (f"nvidia-cuda-{name}", "nvidia-cuda-sanitizer-api"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == name and (found := Path(str(file.locate()))).is_file():
                return found
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home and (found := Path(home) / "bin" / name).is_file():
            return found
    found_in_path = shutil.which(name)
    return Path(found_in_path) if found_in_path else None


def demangle(names: list[str]) -> list[str]:
    """C++ names as written, without the parameters of functions."""
    if not names or shutil.which("c++filt") is None:
        return names
    text = "\n".join(names)
    done = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True)
    return [short(name) for name in done.stdout.splitlines()]


def short(name: str) -> str:
    """`void trm::kernels::f<trm::BFloat16>(int)` -> `f<BFloat16>`."""
    name = name.removeprefix("void ").replace("(bool)1", "true").replace("(bool)0", "false")
    depth = 0
    for index, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and not name.startswith("(anonymous", index):
            name = name[:index]
            break
    return re.sub(r"(?:\w+::|\(anonymous namespace\)::)+", "", name).strip()


def sources() -> list[Path]:
    return sorted((ROOT / "csrc/cuda").glob("*.cu"))


def _fingerprint(architecture: str) -> str:
    version = subprocess.run(["nvcc", "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(version + repr((architecture, FLAGS)).encode())
    for folder in ("csrc/cuda", "csrc/include"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file():
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def compile_cubins(architecture: str) -> tuple[list[Path], str]:
    """Cubins of every CUDA source for one architecture such as 9.0, and the compiler's output.

    Raises:
        RuntimeError: it does not compile without a warning.
    """
    number = architecture.replace(".", "")
    folder = OUT / f"sm_{number}-{_fingerprint(architecture)}"
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / f"lock-{number}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "log").exists():
            for stale in OUT.glob(f"sm_{number}-*"):
                shutil.rmtree(stale)
            folder.mkdir()
            with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
                logs = list(pool.map(lambda source: _compile(source, number, folder), sources()))
            (folder / "log").write_text("".join(logs))
    return sorted(folder.glob("*.cubin")), (folder / "log").read_text()


def _compile(source: Path, number: str, folder: Path) -> str:
    target = folder / f"{source.stem}.cubin"
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}"]
    command = ["nvcc", *FLAGS, *includes, f"-arch=sm_{number}", "-cubin", "-o", str(target)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"{source.name} for {number}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def check_ptx(architecture: str) -> None:
    """Compiles to PTX of one architecture, and the host side with it, warnings being errors."""
    number = architecture.replace(".", "")
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}"]
    target = f"-gencode=arch=compute_{number},code=compute_{number}"
    with tempfile.TemporaryDirectory() as folder:
        for source in sources():
            command = ["nvcc", *FLAGS, *includes, target, "-c", "-o", f"{folder}/{source.stem}.o"]
            done = subprocess.run([*command, str(source)], capture_output=True, text=True, cwd=ROOT)
            if done.returncode != 0:
                raise RuntimeError(f"{source.name} as PTX:\n{done.stdout}{done.stderr}")


def parse_ptxas(log: str) -> list[Resources]:
    """Every function that `ptxas -v` reports on."""
    names, found = [], []
    for part in re.split(r"Function properties for ", log)[1:]:
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) ", part)
        if frame is None:
            continue
        used = re.search(r"Used (\d+) registers(.*)", part)
        shared = re.search(r"(\d+) bytes smem", used[2]) if used else None
        names.append(part.split(None, 1)[0])
        found.append(
            (
                int(used[1]) if used else None,
                int(shared[1]) if shared else 0,
                int(frame[1]),
                int(frame[2]) + int(frame[3]),
            )
        )
    return [Resources(n, *rest) for n, rest in zip(demangle(names), found, strict=True)]


def library_resources(library: Path, architecture: str) -> list[Resources]:
    """The same of a built library, as cuobjdump reads it; what it calls local counts as spilled."""
    number = architecture.replace(".", "")
    cuobjdump = tool("cuobjdump")
    assert cuobjdump is not None
    text = subprocess.run(
        [cuobjdump, "-res-usage", "-arch", f"sm_{number}", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pattern = r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    entries = re.findall(pattern, text)
    names = demangle([entry[0] for entry in entries])
    return [
        Resources(name, int(registers), int(shared), int(stack), int(local))
        for name, (_, registers, stack, shared, local) in zip(names, entries, strict=True)
    ]


def run(arguments: argparse.Namespace) -> int:
    """Times of the whole build from nothing, and the size of its CUDA library."""
    if (reason := why_not()) is not None:
        print(f"cuda-build: {reason}", file=sys.stderr)
        return 2
    print(f"the whole build, CPU library included, MAX_JOBS={arguments.jobs}")
    for targets in arguments.targets or list(BUDGETS):
        with tempfile.TemporaryDirectory() as folder:
            environment = {"TRM_BUILD_CUDA": "1", "TORCH_CUDA_ARCH_LIST": targets}
            environment |= {"MAX_JOBS": str(arguments.jobs), "TORCH_NO_COMPILER_WRAPPER": "1"}
            start = time.perf_counter()
            done = subprocess.run(
                [
                    *(sys.executable, "setup.py", "-q", "build_ext"),
                    *("--build-lib", f"{folder}/lib", "--build-temp", f"{folder}/temp"),
                ],
                env={**os.environ, **environment},
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            seconds = time.perf_counter() - start
            if done.returncode != 0:
                print(done.stdout[-3000:] + done.stderr[-3000:], file=sys.stderr)
                return 1
            (library,) = Path(folder).glob("lib/trm_ext/_C_cuda*.so")
            size = library.stat().st_size
        allowed = BUDGETS.get(targets)
        print(
            f"{targets:24} {seconds:6.0f} s (budget {allowed or '-'} s)   "
            f"_C_cuda {size / 1e6:.1f} MB (budget {LIBRARY_BYTES / 2**20:.0f} MiB)"
        )
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("targets", nargs="*", help=f"such as 9.0 or '{RELEASE}' (default: both)")
    parser.add_argument("--jobs", type=int, default=2)
