# SPDX-License-Identifier: Apache-2.0
"""The check for a machine with a GPU, rehearsed on one without: nothing of it is left to typos."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import divergence_cuda, gpu_check
from trm_ext import _lib

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks/gpu_check.sh"


def run(*command, **environment):
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_gpu_tests_are_collected_without_a_gpu():
    done = run(sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "--collect-only", "-q")
    names = [line for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(names) > 100
    for question, pattern in gpu_check.QUESTIONS.items():
        found = [{"test": name, "outcome": "passed", "reason": ""} for name in names]
        assert gpu_check.answer(found, pattern).startswith("passed"), question


@pytest.mark.skipif(_lib.describe()["cuda"]["available"], reason="there is a CUDA device")
class TestWithoutADevice:
    def test_the_benchmark_says_so_in_one_sentence(self):
        done = run(sys.executable, "-m", "benchmarks", "divergence", "--device", "cuda")
        assert done.returncode == 2 and done.stdout == ""
        assert "there is no CUDA device here" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1

    def test_a_skipped_gpu_test_is_a_failure_where_a_gpu_is_required(self):
        test = "tests/gpu/test_values.py::test_without_a_gradient"
        done = run(sys.executable, "-m", "pytest", "-q", "-m", "gpu", test, TRM_REQUIRE_CUDA="1")
        assert done.returncode == 1 and "TRM_REQUIRE_CUDA=1, but" in done.stdout

    @pytest.mark.slow
    def test_the_check_stops_early_and_says_why(self, tmp_path):
        done = run("bash", SCRIPT, tmp_path, PATH=os.environ["PATH"])
        assert done.returncode == 1
        steps = {step["step"]: step["verdict"] for step in gpu_check.read_steps(tmp_path)}
        assert steps["prebuilt"] == steps["usable"] == "failed (1)"
        assert set(steps) == {"prebuilt", "build", "usable"}


@pytest.mark.slow
def test_dry_mode_rehearses_every_step(tmp_path):
    done = run("bash", SCRIPT, "--dry", tmp_path)
    logs = "\n".join(f"{log}:\n{log.read_text()[-1500:]}" for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + logs
    result = json.loads((tmp_path / "result.json").read_text())
    steps = {step["step"]: step["verdict"] for step in result["steps"]}
    expected = ("ceilings", "tests", "grid", "benchmark", "each-kernel")
    assert all(steps[name] == "rehearsed" for name in expected), steps
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        assert steps[tool] == "rehearsed"
        assert f"--tool {tool} --error-exitcode 9" in (tmp_path / f"{tool}.log").read_text()
    assert result["tests_passed"] > 200
    unanswered = {q for q, words in result["answers"].items() if not words.startswith("passed")}
    assert unanswered == {"device guard"}
    assert {target["verdict"] for target in result["targets"]} == {"rehearsal"}
    names = {case["case"] for case in result["cases"]}
    assert {"forward bf16", "forward+backward bf16", "sequence mask bf16", "N=1 bf16"} <= names
    assert "rehearsal on the CPU" in (tmp_path / "table.txt").read_text()


@pytest.mark.parametrize(
    "architectures,capability,serves",
    [
        (["9.0"], (9, 0), True),
        (["9.0"], (8, 0), False),
        (["9.0"], (10, 0), False),
        (["8.0"], (8, 9), True),
        (["8.9"], (8, 0), False),
        (["8.0", "9.0", "10.0", "12.0+PTX"], (12, 1), True),
        (["8.0+PTX"], (12, 0), True),
        (["12.0+PTX"], (10, 3), False),
        ([], (9, 0), False),
    ],
)
def test_which_code_runs_where(architectures, capability, serves):
    assert gpu_check.serves(architectures, capability) is serves


class FakeCuda:
    """Stands where torch.cuda does: calls run on the CPU, replays do nothing, time passes."""

    def __init__(self, monkeypatch, free=2**33):
        facts = SimpleNamespace(
            name="Fake GPU",
            major=9,
            minor=0,
            multi_processor_count=2,
            total_memory=free,
            L2_cache_size=2**12,
        )
        stream = SimpleNamespace(wait_stream=lambda other: None, cuda_stream=0)
        graph = SimpleNamespace(replay=self.replay)
        event = SimpleNamespace(
            record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 1.5
        )
        self.replays = self.sweeps = 0
        for name, value in {
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda given: contextlib.nullcontext(),
            "CUDAGraph": lambda: graph,
            "graph": lambda given, pool: contextlib.nullcontext(),
            "graph_pool_handle": lambda: 0,
            "Event": lambda enable_timing: event,
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "memory_allocated": lambda: 5,
            "max_memory_allocated": lambda: 2**20 + 5,
            "mem_get_info": lambda: (free, free),
            "get_device_properties": lambda index: facts,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "compile", lambda form, dynamic: form)
        monkeypatch.setattr(divergence_cuda, "Machine", lambda dry: self.machine())
        library = SimpleNamespace(read_pair_cuda=self.sweep, read_pair_write_cuda=self.sweep)
        monkeypatch.setattr(divergence_cuda, "_sweeps", lambda: library)
        monkeypatch.setattr(_lib, "describe", self.describe)

    @staticmethod
    def describe():
        return {"cuda": {"reason": None, "available": True, "architectures": ["9.0"]}}

    def replay(self):
        self.replays += 1

    def sweep(self, *arguments):
        assert len(arguments) == 6
        self.sweeps += 1
        return 0

    @staticmethod
    def machine():
        machine = RealMachine(dry=False)
        machine.device = "cpu"
        machine.size = lambda rows, vocab: (min(rows, 8), min(vocab, 300))
        return machine


RealMachine = divergence_cuda.Machine


def test_the_benchmark_runs_to_its_end_on_a_stand_in_for_cuda(monkeypatch, tmp_path, capsys):
    fake = FakeCuda(monkeypatch)
    out = tmp_path / "benchmark.json"
    arguments = SimpleNamespace(dry=False, rounds=3, only=None, out=out)
    assert divergence_cuda.run(arguments) == 0
    result = json.loads(out.read_text())
    assert result["environment"]["device"] == "Fake GPU"
    assert fake.replays > 100 and fake.sweeps > 100
    forward = next(case for case in result["cases"] if case["case"] == "forward bf16")
    assert set(forward["seconds"]) >= {"read", "read+write", "copy", "ours", "eager"}
    assert all(forward["graph"].values())
    assert forward["peak_bytes"]["ours"] == 2**20
    assert all(seconds == [1.5e-3] * 3 for seconds in forward["seconds"].values())
    assert forward["relative_error"]["ours"] < 1e-5
    verdicts = {target["target"]: target["verdict"] for target in result["targets"]}
    assert verdicts["forward vs read"] == "met"  # the same time for the same bytes
    assert verdicts["forward vs eager"] == "MISSED"
    assert "targets" in capsys.readouterr().out


def test_a_peer_that_fails_is_reported_and_our_failure_is_not_hidden(monkeypatch, tmp_path):
    FakeCuda(monkeypatch)

    def broken(x, y):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(divergence_cuda.divergence, "eager", broken)
    arguments = SimpleNamespace(dry=False, rounds=2, only=["gates"], out=tmp_path / "out.json")
    assert divergence_cuda.run(arguments) == 0
    result = json.loads(arguments.out.read_text())
    forward = next(case for case in result["cases"] if case["case"] == "forward bf16")
    assert forward["failed"]["eager"].startswith("CUDA out of memory")
    verdicts = {target["target"]: target["verdict"] for target in result["targets"]}
    assert verdicts["forward vs eager"] == "not measured"
    monkeypatch.setattr(divergence_cuda.divergence, "ours", broken)
    with pytest.raises(torch.OutOfMemoryError):
        divergence_cuda.run(arguments)


class TestReport:
    def write(self, folder, steps, cases=""):
        text = "".join(f"{name}\t{verdict}\t1\n" for name, verdict in steps.items())
        (folder / "steps.tsv").write_text(text)
        (folder / "tests.xml").write_text(
            f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
        )

    def test_a_failed_step_fails_the_check(self, tmp_path, capsys):
        for verdict, status in {
            "ok": 0,
            "skipped: why": 0,
            "failed (9)": 1,
            "out of time": 1,
            "no time left": 1,
        }.items():
            self.write(tmp_path, {"tests": "ok", "memcheck": verdict})
            assert gpu_check.report(tmp_path) == status, verdict
            assert verdict in capsys.readouterr().out

    def test_a_rebuilt_library_is_no_failure(self, tmp_path):
        self.write(tmp_path, {"prebuilt": "failed (1)", "build": "ok", "usable": "ok"})
        assert gpu_check.report(tmp_path) == 0
        self.write(tmp_path, {"prebuilt": "failed (1)", "build": "failed (1)"})
        assert gpu_check.report(tmp_path) == 1

    def test_failed_and_skipped_tests_are_named(self, tmp_path):
        name = "test_more_elements_than_an_integer_counts[cuda-2147483648]"
        case = f'<testcase classname="tests.gpu.test_sizes" name="{name}">'
        self.write(
            tmp_path, {"tests": "ok"}, f'{case}<failure message="values differ"/></testcase>'
        )
        gpu_check.report(tmp_path)
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["answers"]["N*V > 2^31"] == "FAILED (1 of 1)"
        assert result["answers"]["N*V > 2^32"] == "not run"
        assert result["tests"] == [
            {
                "test": f"tests/gpu/test_sizes.py::{name}",
                "outcome": "failed",
                "reason": "values differ",
            }
        ]
        self.write(tmp_path, {"tests": "ok"}, f'{case}<skipped message="20 GiB"/></testcase>')
        gpu_check.report(tmp_path)
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["answers"]["N*V > 2^31"] == "skipped: 20 GiB"
