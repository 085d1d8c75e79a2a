# SPDX-License-Identifier: Apache-2.0
"""Builds the host side of _C_cuda against a runtime that records instead of running.

Every source of the library is compiled by nvcc as it stands. Device code is made without
optimisation and only as PTX, since nothing here runs it: seconds instead of minutes. Objects are
kept in build/recorder/ by ninja.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

from benchmarks import cuda_build

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "recorder"
RUNTIME = "tests/csrc/recording_runtime.cpp"
TENSORS = "tests/csrc/pretended_tensor.cpp"
STABLE = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # setup.py: TORCH_TARGET_VERSION
COMPILER = os.environ.get("CXX", "g++")
LIBRARY = "libtrm_recorded.so"
FLAGS = (
    "-std=c++20 -O0 -Xcicc=-O0 -gencode=arch=compute_90,code=compute_90 -DUSE_CUDA "
    '-DTRM_CUDA_ARCHITECTURES=\\"9.0\\" -Xcompiler=-fPIC,-fvisibility=hidden'
)


def sources() -> list[str]:
    """The sources of _C_cuda, as setup.py has them."""
    kernels = [str(file.relative_to(ROOT)) for file in cuda_build.sources()]
    return ["csrc/torch/bind_cuda.cpp", *kernels]


def everything() -> list[str]:
    return [RUNTIME, TENSORS, *sources()]


def object_of(source: str) -> Path:
    return OUT / f"{Path(source).stem}.o"


@cache
def why_not() -> str | None:
    """The reason why it cannot be built or loaded here, or None."""
    if (reason := cuda_build.why_not()) is not None:
        return reason
    if importlib.util.find_spec("ninja") is None:
        return "ninja is not installed"
    if torch.version.cuda is not None:
        return f"this torch ({torch.__version__}) has a CUDA of its own: see tests/gpu"
    return None


def _includes(first: str = "") -> str:
    torch_headers = " ".join(f"-isystem {path}" for path in cpp_extension.include_paths())
    return f"{first} -I{ROOT}/csrc -I{ROOT}/csrc/include {torch_headers}".strip()


def _link(objects: list[str], target: str) -> str:
    torch_libraries = " ".join(f"-L{path}" for path in cpp_extension.library_paths())
    # -z defs: a CUDA or torch function that neither the recorder nor torch has is an error.
    return (
        f"{COMPILER} -shared -Wl,-Bsymbolic -Wl,-z,defs {' '.join(objects)} {torch_libraries} "
        f"-ltorch -ltorch_cpu -lc10 -o {target}"
    )


def _rules() -> str:
    objects = [object_of(source).name for source in everything()]
    lines = [
        "rule compile",
        f"  command = nvcc {FLAGS} $flags {_includes()} -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {_link(['$in'], '$out')}",
    ]
    for source in everything():
        lines.append(f"build {object_of(source).name}: compile {ROOT / source}")
        if source != TENSORS:
            lines.append(f"  flags = {STABLE}")
    lines.append(f"build {LIBRARY}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


@cache
def library() -> Path:
    """The library, up to date; registers the real ops for CUDA tensors when torch loads it."""
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (OUT / "build.ninja").write_text(_rules())
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        command = [sys.executable, "-m", "ninja", "-C", str(OUT), "-j", jobs, LIBRARY]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the recorder does not build:\n{done.stdout}{done.stderr}")
    return OUT / LIBRARY


def mutant(source: str, header: str | None, old: str, new: str, folder: Path) -> Path:
    """The library with one text replaced, in a source or in a header that only it includes."""
    library()
    changed = header or source
    text = (ROOT / changed).read_text()
    assert old in text, f"{changed} no longer contains {old!r}"
    includes = "csrc/include" if changed.startswith("csrc/include") else "csrc"
    mutated = folder / Path(changed).relative_to(includes)
    mutated.parent.mkdir(parents=True, exist_ok=True)
    mutated.write_text(text.replace(old, new))
    compiled = folder / object_of(source).name
    origin = ROOT / source if header else mutated
    flags = f"{FLAGS} {STABLE} {_includes(f'-I{folder}')}"
    objects = [object_of(s) if s != source else compiled for s in everything()]
    target = folder / LIBRARY
    for command in (
        f"nvcc {flags} -c {origin} -o {compiled}",
        _link([str(path) for path in objects], str(target)),
    ):
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return target
