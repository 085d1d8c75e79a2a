# SPDX-License-Identifier: Apache-2.0
"""Every barrier of our own kernels is there for a reason: without it, the race lane objects."""

import re
import shutil
from pathlib import Path

import pytest

from tests import emulator_build
from tests.emulator_build import ROOT, run

BARRIER = re.compile(r"^ *__syncthreads\(\);.*$", re.MULTILINE)
SOURCES = [
    *(ROOT / "csrc/include/trm/kernels").glob("*.cuh"),
    *(ROOT / "csrc/include/trm/simt").glob("*.h"),
]
MUTANTS = [
    (str(source.relative_to(ROOT)), index)
    for source in sorted(SOURCES)
    for index in range(len(BARRIER.findall(source.read_text())))
]


def without_barrier(text: str, index: int) -> str:
    found = list(BARRIER.finditer(text))[index]
    return text[: found.start()] + text[found.end() :]


def test_there_are_barriers_to_remove():
    assert MUTANTS


@pytest.mark.slow
@pytest.mark.skipif(emulator_build.why_not() is not None, reason=str(emulator_build.why_not()))
@pytest.mark.parametrize("source,index", MUTANTS)
def test_a_removed_barrier_is_a_race(source, index, tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copytree(ROOT / "tests/emu", tmp_path / "tests/emu")
    mutated = tmp_path / source
    mutated.write_text(without_barrier(mutated.read_text(), index))
    outcome = run("kernels", "tsan", "quick", "inorder", root=Path(tmp_path))
    assert outcome.caught.startswith("TSan: data race"), outcome.text
