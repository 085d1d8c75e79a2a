# SPDX-License-Identifier: Apache-2.0
"""Loads the two libraries and remembers why one is absent."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parent
CPU_CAPABILITIES = ("scalar", "avx2", "avx512")
MARKER = re.compile(rb"trm-build:([a-z_]+)=([^\0]*)\0")


def find_library(name: str) -> Path | None:
    """File of one of our shared libraries, or None if it was not built."""
    found = sorted(PACKAGE.glob(f"{name}.*so"))
    return found[0] if found else None


def build_facts(library: Path) -> dict[str, str]:
    """Facts that the build left in a library's bytes: readable even where it cannot be loaded."""
    return {key.decode(): value.decode() for key, value in MARKER.findall(library.read_bytes())}


def load(name: str) -> str | None:
    """Loads a library into torch; returns None, or the reason why it could not be."""
    library = find_library(name)
    if library is None:
        return "not built (see TRM_BUILD_CUDA)" if name == "_C_cuda" else "not built"
    try:
        # torch.ops.load_library hides the linker's reason, so ask the linker first.
        ctypes.CDLL(str(library))
    except OSError as error:
        if name == "_C_cuda" and torch.version.cuda is None:
            return f"this torch ({torch.__version__}) has no CUDA"
        return str(error)
    torch.ops.load_library(library)
    return None


@cache
def load_all() -> dict[str, str | None]:
    """Loads both libraries once; maps each to None or the reason why it is absent."""
    reasons = {"_C": load("_C")}
    if reasons["_C"] is not None:
        raise ImportError(
            f"trm_ext's library _C is missing ({reasons['_C']}): "
            "build it with `pip install --no-build-isolation .`"
        )
    if named := os.environ.get("TRM_CPU_CAPABILITY"):
        force_cpu_capability(named)
    reasons["_C_cuda"] = load("_C_cuda")
    return reasons


def describe() -> dict[str, Any]:
    """Versions, libraries, instruction sets and CUDA architectures, and what is absent and why.

    Returns:
        A JSON-ready dict with the keys ``versions``, ``cpu``, ``cuda``, ``libraries``.
    """
    reasons = load_all()
    files = {name: find_library(name) for name in reasons}
    facts = {name: build_facts(file) if file else {} for name, file in files.items()}
    cuda_reason = reasons["_C_cuda"]
    if cuda_reason is None and not torch.cuda.is_available():
        cuda_reason = "the library is loaded, but torch sees no CUDA device"
    return {
        "versions": {
            "trm_ext": metadata.version("trm-ext"),
            "torch": torch.__version__,
            "torch_abi_target": "2.11",
            "torch_cuda": torch.version.cuda,
            "python": platform.python_version(),
            "platform": f"{sys.platform}-{platform.machine()}",
        },
        "cpu": {
            "available": True,
            "instruction_sets": facts["_C"].get("cpu_instruction_sets", "").split(),
            "selected": cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "cuda": {
            "available": cuda_reason is None,
            "reason": cuda_reason,
            "architectures": facts["_C_cuda"].get("cuda_architectures", "").split(),
            "devices": [
                torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
            ]
            if cuda_reason is None
            else [],
        },
        "libraries": {
            name: {
                "file": file.name if file else None,
                "bytes": file.stat().st_size if file else None,
                "loaded": reasons[name] is None,
                "reason": reasons[name],
            }
            for name, file in files.items()
        },
    }


def cpu_capability() -> str:
    """Instruction set that the CPU kernels run with: scalar, avx2 or avx512."""
    name: bytes = _cpu_library().trm_cpu_capability()
    return name.decode()


def force_cpu_capability(name: str | None) -> str:
    """Selects an instruction set for this process (None: the widest) and returns its name.

    Raises:
        ValueError: the name is unknown or this processor lacks it.
    """
    chosen: bytes | None = _cpu_library().trm_force_cpu_capability(
        None if name is None else name.encode()
    )
    if chosen is None:
        raise ValueError(
            f"CPU capability {name!r} is not one of {', '.join(CPU_CAPABILITIES)}, "
            "or this processor lacks it"
        )
    return chosen.decode()


def available_cpu_capabilities() -> list[str]:
    """Instruction sets that this processor has, from the narrowest to the widest."""
    selected, names = cpu_capability(), []
    for name in CPU_CAPABILITIES:
        try:
            names.append(force_cpu_capability(name))
        except ValueError:
            continue
    force_cpu_capability(selected)
    return names


def _cpu_library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(find_library("_C")))
    for function in (library.trm_cpu_capability, library.trm_force_cpu_capability):
        function.restype = ctypes.c_char_p
    library.trm_force_cpu_capability.argtypes = [ctypes.c_char_p]
    return library
