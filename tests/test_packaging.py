# SPDX-License-Identifier: Apache-2.0
"""What is shipped: the libraries' ABI, the wheel's tag and contents, a clean CPU-only build."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trm_ext import _lib

ROOT = Path(__file__).resolve().parents[1]


def libraries():
    found = [_lib.find_library("_C")]
    if _lib.find_library("_C_cuda"):
        found.append(_lib.find_library("_C_cuda"))
    return found


def test_cuda_is_built_where_nvcc_is():
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on this machine")
    assert _lib.find_library("_C_cuda") is not None
    assert "9.0" in _lib.build_facts(_lib.find_library("_C_cuda"))["cuda_architectures"]


@pytest.mark.parametrize("library", libraries(), ids=lambda path: path.name.split(".")[0])
class TestAbi:
    def test_audit_says_stable(self, library):
        audit = Path(sys.executable).with_name("torch-abi-audit")
        if sys.version_info < (3, 11):
            pytest.skip("torch-abi-audit needs Python >= 3.11")
        result = subprocess.run([audit, str(library)], capture_output=True, text=True, check=False)
        report = result.stdout + result.stderr
        assert result.returncode == 0, report
        assert "STABLE" in report and "UNSTABLE" not in report, report
        assert "2.11" in report, report

    def test_no_cpython_and_no_cxx_libtorch_symbol(self, library):
        symbols = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        names = [line.split()[-1] for line in symbols.splitlines()]
        assert names
        assert not [n for n in names if n.startswith(("Py", "_Py"))]
        assert not [n for n in names if n.startswith(("_ZN2at", "_ZNK2at", "_ZN3c10", "_ZNK3c10"))]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A CPU-only wheel built from a copy of the sources, as `pip wheel` builds it.

    Without optimisation, which no test here looks at and which takes six times as long; the
    installation that these tests run in was built with it.
    """
    source = tmp_path_factory.mktemp("source")
    for name in ("csrc", "trm_ext", "theory"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-v"]
    result = subprocess.run(
        [*command, "-w", str(out), str(source)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRM_BUILD_CUDA": "0", "TRM_DEBUG": "1"},
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (built,) = out.glob("*.whl")
    return built, result.stdout + result.stderr


def test_one_wheel_for_every_python(wheel):
    assert wheel[0].name.startswith("trm_ext-0.1.0-cp310-abi3-linux_")


def test_wheel_holds_both_packages_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel[0]).namelist()
    for expected in ("trm_ext/__init__.py", "trm_ext/py.typed", "trm_ext/_C.abi3.so"):
        assert expected in names
    assert any(name.startswith("theory/") for name in names)
    assert not any(name.startswith(("tests/", "csrc/", "benchmarks/")) for name in names)


def test_a_build_without_cuda_says_so_in_one_line(wheel):
    lines = {line.strip() for line in wheel[1].splitlines() if "trm-ext: CUDA" in line}
    assert lines == {"trm-ext: CUDA off (TRM_BUILD_CUDA=0), building the CPU library only"}


def setup(**environment):
    return subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_asking_for_cuda_without_a_toolkit_fails_loudly(tmp_path):
    # A PATH without nvcc and a CUDA_HOME that holds nothing.
    result = setup(
        TRM_BUILD_CUDA="1",
        CUDA_HOME=str(tmp_path),
        CUDA_PATH="",
        PATH=str(tmp_path),
        TRM_CUDA_DEFAULT=str(tmp_path),
    )
    assert result.returncode != 0 and "no CUDA toolkit was found" in result.stderr


def test_a_misspelt_switch_is_refused():
    result = setup(TRM_BUILD_CUDA="yes")
    assert result.returncode != 0 and "must be auto, 0 or 1, not 'yes'" in result.stderr
