# SPDX-License-Identifier: Apache-2.0
"""The parts of gpu_check.sh that are better written in Python; `report` makes its one result."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import cuda_build, divergence_cuda, record
from trm_ext import _lib

# What a reader asks first, and the tests that answer it: a pattern in their names.
QUESTIONS = {
    "accuracy and edge rules": r"test_values\.py::",
    "N*V > 2^31": r"test_more_elements_than_an_integer_counts\[\w+-2147483648\]",
    "N*V > 2^32": r"test_more_elements_than_an_integer_counts\[\w+-4294967296\]",
    "row strides > 2^31": "test_rows_further_apart",
    "65536 rows and more": "test_number_of_rows",
    "views and alignments": "test_views_are_read",
    "masked rows and padding unread": "_are_not_read",
    "equal bits on reruns": "test_reruns_are_equal",
    "rows independent of N": "test_a_row_does_not_depend",
    "CUDA graph capture and replay": "test_a_graph_replays",
    "two streams": "test_two_streams",
    "no host synchronisation": "test_nothing_waits",
    "peak memory": "test_memory_is",
    "device guard": "test_the_current_device",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("usable", help="whether the built libraries serve this GPU")
    steps.add_parser("build", help="build them for this GPU, in place")
    steps.add_parser("prepare", help="build the kernels that measure the memory")
    steps.add_parser("tool", help="path of a toolkit's program").add_argument("name")
    steps.add_parser("report", help="one JSON and one table").add_argument("out", type=Path)


def run(arguments: argparse.Namespace) -> int:
    if arguments.step == "usable":
        reason = why_unusable()
        print(reason or "the built libraries serve this GPU")
        return int(reason is not None)
    if arguments.step == "build":
        return build()
    if arguments.step == "prepare":
        return divergence_cuda.prepare()
    if arguments.step == "tool":
        print(cuda_build.tool(arguments.name) or "")
        return 0
    return report(arguments.out)


def why_unusable() -> str | None:
    """Why the built libraries cannot run here, or None."""
    try:
        cuda = _lib.describe()["cuda"]
    except ImportError as error:
        return str(error)
    if cuda["reason"] is not None:
        return str(cuda["reason"])
    capability = torch.cuda.get_device_capability()
    if not serves(cuda["architectures"], capability):
        held = " ".join(cuda["architectures"])
        return f"_C_cuda holds code for {held}, this GPU is {capability[0]}.{capability[1]}"
    return None


def serves(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Machine code runs on its major generation from its minor up, PTX on everything newer.

    >>> serves(["9.0"], (9, 0)), serves(["9.0"], (8, 0)), serves(["8.0+PTX"], (12, 0))
    (True, False, True)
    """
    for name in architectures:
        major, minor = (int(part) for part in name.removesuffix("+PTX").split("."))
        if major == capability[0] and minor <= capability[1]:
            return True
        if name.endswith("+PTX") and (major, minor) <= capability:
            return True
    return False


def build() -> int:
    """Both libraries, for this GPU alone."""
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device")
        return 1
    target = ".".join(map(str, torch.cuda.get_device_capability()))
    environment = {"TRM_BUILD_CUDA": "1", "TORCH_CUDA_ARCH_LIST": target}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    return subprocess.run(
        command, cwd=cuda_build.ROOT, env={**os.environ, **environment}, check=False
    ).returncode


def read_steps(out: Path) -> list[dict[str, Any]]:
    found = []
    for line in (out / "steps.tsv").read_text().splitlines():
        name, verdict, seconds = line.split("\t")
        found.append({"step": name, "verdict": verdict, "seconds": int(seconds)})
    return found


def read_tests(file: Path) -> list[dict[str, str]]:
    """Name, outcome and reason of every test in a junit file."""
    if not file.exists():
        return []
    found = []
    for case in ElementTree.parse(file).iter("testcase"):
        path = (case.get("classname") or "").replace(".", "/") + ".py"
        entry = {"test": f"{path}::{case.get('name')}", "outcome": "passed", "reason": ""}
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                entry["outcome"] = "failed" if child.tag != "skipped" else "skipped"
                entry["reason"] = (child.get("message") or "").splitlines()[0][:200]
        found.append(entry)
    return found


def answer(tests: list[dict[str, str]], pattern: str) -> str:
    """How the tests of one question ended, in a few words."""
    chosen = [test for test in tests if re.search(pattern, test["test"])]
    failed = sum(test["outcome"] == "failed" for test in chosen)
    passed = sum(test["outcome"] == "passed" for test in chosen)
    if failed:
        return f"FAILED ({failed} of {len(chosen)})"
    if passed:
        return f"passed ({passed})"
    return f"skipped: {chosen[0]['reason']}" if chosen else "not run"


def report(out: Path) -> int:
    """Writes result.json and table.txt, prints the table; 1 if a step failed."""
    steps = read_steps(out)
    tests = [*read_tests(out / "tests.xml"), *read_tests(out / "grid.xml")]
    answers = {question: answer(tests, pattern) for question, pattern in QUESTIONS.items()}
    benchmark = {}
    if (out / "benchmark.json").exists():
        benchmark = json.loads((out / "benchmark.json").read_text())
    result = {
        "environment": benchmark.get("environment") or record.environment(),
        "steps": steps,
        "answers": answers,
        "targets": benchmark.get("targets", []),
        "tests": [test for test in tests if test["outcome"] != "passed"],
        "tests_passed": sum(test["outcome"] == "passed" for test in tests),
        "cases": benchmark.get("cases", []),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    with (out / "table.txt").open("w") as stream:
        for key, value in result["environment"].items():
            stream.write(f"{key}: {value}\n")
        stream.write("\n")
        lines = [[step["step"], str(step["seconds"]), step["verdict"]] for step in steps]
        record.table(["step", "s", "verdict"], lines, stream)
        stream.write("\n")
        record.table(["question", "answer"], [[q, a] for q, a in answers.items()], stream)
        if result["targets"]:
            stream.write("\n")
            record.table(["target", "ratio", "wanted", ""], target_lines(result), stream)
        log = out / "benchmark.log"
        if log.exists():
            stream.write("\n" + log.read_text())
    print((out / "table.txt").read_text())
    fine = ("ok", "rehearsed", "skipped")
    bad = [step for step in steps if not step["verdict"].startswith(fine)]
    # A prebuilt library that does not serve this GPU is replaced, not a failure.
    rebuilt = any(step["step"] == "build" and step["verdict"] == "ok" for step in steps)
    return int(any(not (rebuilt and step["step"] == "prebuilt") for step in bad))


def target_lines(result: dict[str, Any]) -> list[list[str]]:
    lines = []
    for entry in result["targets"]:
        ratio = "-" if entry["ratio"] is None else f"{entry['ratio']:.3f}"
        wanted = f">= {entry['wanted']}" if "wanted" in entry else f"< {entry['most']}"
        lines.append([entry["target"], ratio, wanted, entry["verdict"]])
    return lines
