# SPDX-License-Identifier: Apache-2.0
"""Builds the emulator's test programs and its Python module on demand, with ninja, in build/.

Three lanes compile the same sources: ``plain`` (every access checked by the emulator itself),
``asan`` (ASan + UBSan) and ``tsan`` (the race detector). Nothing of this is in the wheel.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pybind11
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("build") / "emulator"
COMPILER = os.environ.get("CXX", "g++")
COMMON = "-std=c++20 -Wall -Wextra -Wno-maybe-uninitialized -fPIC -DTRM_EMULATE"
COMMON += " -fmacro-prefix-map=$root/= -I$root/csrc -I$root/csrc/include"
# Uninitialised locals hold a pattern instead of whatever makes the kernel look right.
DEVICE = "-O1 -g1 -ftrivial-auto-var-init=pattern"
ASAN = "-fsanitize=address,undefined,bounds-strict -fno-sanitize-recover=all"
LANES = {
    # name: (defines, device code, link)
    "plain": ("-DTRM_EMU_HOOKS", f"{DEVICE} -fsanitize=thread", ""),
    "asan": ("-DTRM_EMU_ASAN", f"{DEVICE} {ASAN} -fno-omit-frame-pointer", ASAN),
    "tsan": ("-DTRM_EMU_TSAN", f"{DEVICE} -fsanitize=thread", "-fsanitize=thread"),
}
# Every CUDA translation unit of the library: a new kernel comes along by itself.
KERNELS = [str(file.relative_to(ROOT)) for file in sorted((ROOT / "csrc/cuda").glob("*.cu"))]
PROGRAMS = {
    "collectives": ["tests/emu/collectives.cpp"],
    "strict": ["tests/emu/strict.cpp"],
    "planted": ["tests/emu/planted/planted.cpp"],
    "kernels": ["tests/emu/kernels.cpp", *KERNELS],
    "races": ["tests/emu/races.cpp"],
    "switch_cost": ["tests/emu/switch_cost.cpp"],
}
DEVICE_CODE = {source for sources in PROGRAMS.values() for source in sources}
# In whose words a program says what is wrong, and how a table names it.
MARKS = {
    "emulator: ": "strict check: ",
    "runtime error: ": "UBSan: ",
    "SUMMARY: AddressSanitizer: ": "ASan: ",
    "SUMMARY: ThreadSanitizer: ": "TSan: ",
    "wrong answer: ": "wrong answer: ",
}
SCHEDULES = ("inorder", "reverse", "shuffled", "greedy-one-warp", "lane-serial")
MODULE = "trm_emulator" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def _rules(root: Path) -> str:
    includes = [*cpp_extension.include_paths(), pybind11.get_include()]
    includes.append(sysconfig.get_paths()["include"])
    target = "0x020b000000000000"  # setup.py: TORCH_TARGET_VERSION
    module = " ".join(f"-isystem {path}" for path in includes)
    libraries = " ".join(f"-L{path} -Wl,-rpath,{path}" for path in cpp_extension.library_paths())
    lines = [
        f"root = {root}",
        "rule compile",
        f"  command = {COMPILER} {COMMON} $flags -MMD -MF $out.d -x c++ -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {COMPILER} $in $flags -o $out",
    ]
    for lane, (defines, device, link) in LANES.items():
        objects = {}
        for source in ["csrc/emulator/machine.cpp", *sorted(DEVICE_CODE)]:
            objects[source] = f"{lane}/{source.replace('/', '_')}.o"
            flags = f"{device} {defines}" if source in DEVICE_CODE else f"-O2 -g1 {defines}"
            if source.startswith("tests"):
                flags += " -I$root/tests/emu"
            lines += [f"build {objects[source]}: compile $root/{source}", f"  flags = {flags}"]
        machine = objects["csrc/emulator/machine.cpp"]
        for name, sources in PROGRAMS.items():
            parts = " ".join([machine, *(objects[source] for source in sources)])
            lines += [f"build {lane}/{name}: link {parts}", f"  flags = {link}"]
    kernels = " ".join(f"plain/{source.replace('/', '_')}.o" for source in KERNELS)
    lines += [
        "build plain/module.o: compile $root/csrc/emulator/module.cpp",
        f"  flags = -O0 -g0 -fvisibility=hidden {module} -DTORCH_TARGET_VERSION={target}",
        f"build {MODULE}: link plain/csrc_emulator_machine.cpp.o plain/module.o {kernels}",
        f"  flags = -shared -Wl,--no-as-needed {libraries} -ltorch -ltorch_cpu -lc10",
    ]
    return "\n".join(lines) + "\n"


@cache
def why_not() -> str | None:
    """The reason why the emulator cannot be built here, or None."""
    if shutil.which(COMPILER) is None:
        return f"no C++ compiler: {COMPILER} is not found"
    version = subprocess.run([COMPILER, "-dumpversion"], capture_output=True, text=True).stdout
    if int(version.split(".")[0] or 0) < 12:
        return f"{COMPILER} is older than 12, which first fills unset locals with a pattern"
    if importlib.util.find_spec("ninja") is None:
        return "ninja is not installed"
    return None


def build(*targets: str, root: Path = ROOT) -> Path:
    """Brings targets such as ``plain/strict`` up to date, one build at a time; returns where.

    ``root`` is a tree with csrc/ and tests/emu/: the repository, or a copy with a bug in it.
    """
    out = root / OUT
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = out / "build.ninja"
        rules = _rules(root)
        if not file.exists() or file.read_text() != rules:
            file.write_text(rules)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        done = subprocess.run(
            [sys.executable, "-m", "ninja", "-C", str(out), "-j", jobs, *targets],
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise RuntimeError(f"the emulator does not build:\n{done.stdout}{done.stderr}")
    return out


@cache
def program(name: str, lane: str = "plain", root: Path = ROOT) -> Path:
    """Path of an up-to-date test program."""
    return build(f"{lane}/{name}", root=root) / lane / name


@dataclass(frozen=True)
class Outcome:
    """What one run of a test program ended in; ``caught`` is empty if nothing was wrong."""

    caught: str
    text: str


@cache
def _fixed_addresses() -> tuple[str, ...]:
    # The race detector's shadow does not fit where the kernel randomises too many address bits.
    prefix = ("setarch", os.uname().machine, "-R")
    if shutil.which("setarch") is None:
        return ()
    return prefix if subprocess.run([*prefix, "true"]).returncode == 0 else ()


def run(
    name: str,
    lane: str,
    case: str,
    schedule: str = "all",
    first_seed: int = 0,
    seeds: int = 1,
    root: Path = ROOT,
) -> Outcome:
    """Runs one case of a test program under a schedule (or all) and seeds."""
    prefix = () if lane == "plain" else _fixed_addresses()
    done = subprocess.run(
        [*prefix, str(program(name, lane, root)), case, schedule, str(first_seed), str(seeds)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=root,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"},
    )
    text = done.stdout + done.stderr
    if done.returncode == 0:
        return Outcome("", text)
    for mark, what in MARKS.items():
        for line in text.splitlines():
            if mark in line:
                return Outcome(what + line.split(mark, 1)[1].strip(), text)
    return Outcome(f"exit status {done.returncode}", text)


@cache
def module() -> ModuleType:
    """The emulator as a Python module."""
    file = build(MODULE) / MODULE
    spec = importlib.util.spec_from_file_location("trm_emulator", file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
