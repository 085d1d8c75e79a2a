# SPDX-License-Identifier: Apache-2.0
"""``trm validate``: the laws hold on every backend, and a kernel that is wrong is caught."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import trm_ext
from tests import emulator_build
from theory.divergences import logit_divergences
from trm_ext import _lib, cli, validate
from trm_ext.validate import DTYPES, KLS, LAWS, OUTPUTS, VOCABULARIES

SMALL = (1000, 4099)
# validate.solve stops where |log(KL / wanted)| <= 0.01, and both are the same numbers here.
SOLVED = 0.01
# What a law's float64 logits add to the tolerance below: 4 roundings of 2^-53 of logits below 15
# are 7e-15 on either side, and an output moves by at most 10 times that relative to a KL of 0.1.
OF_LOGITS = 1e-13
BACKENDS = ("cpu", "emulator")


def check_backend(backend: str, law: str, vocabularies: tuple[int, ...]) -> None:
    if backend == "emulator" and (reason := emulator_build.why_not()) is not None:
        pytest.skip(f"emulator: {reason}")
    found = validate.validate(backend, laws=[law], vocabularies=vocabularies)
    first = found.failures[:1]
    assert not first, f"{len(found.failures)} of {len(found.checks)} checks fail, first: {first}"


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_law_holds(backend: str, law: str) -> None:
    check_backend(backend, law, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_law_holds_at_the_vocabularies_of_real_models(backend: str, law: str) -> None:
    check_backend(backend, law, VOCABULARIES)


@pytest.mark.gpu
@pytest.mark.parametrize("law", LAWS)
def test_every_law_holds_on_cuda(law: str) -> None:
    check_backend("cuda", law, VOCABULARIES)


@pytest.mark.parametrize("law", LAWS)
def test_the_grid_spans_ten_decades(law: str) -> None:
    for kl in KLS:
        if law == "gaussian-noise" and kl >= 0.5:
            continue
        got = validate.solve(law, kl, 1000).predicted(1000)["kl_rollout_train"]
        assert abs(math.log(got / kl)) <= SOLVED
    assert min(KLS) == 1e-9 and max(KLS) == 10
    assert {"kl", "kl_train_rollout", "tv", "chi2", "bhattacharyya", "max_log_ratio"} == {*OUTPUTS}


@pytest.mark.parametrize("law", LAWS)
def test_every_law_reaches_the_ends_of_the_range(law: str) -> None:
    for vocab in (200, 50_000):
        for kl in (1e-12, 20.0) if law != "gaussian-noise" else (1e-12,):
            got = validate.solve(law, kl, vocab).predicted(vocab)["kl_rollout_train"]
            assert abs(math.log(got / kl)) <= SOLVED


class Planted:
    """The op with one of its outputs falsified."""

    def __init__(self, output: str, falsify) -> None:
        self.index, self.falsify = list(OUTPUTS).index(output), falsify
        self.op = torch.ops.trm.token_divergence

    def __call__(self, *arguments):
        values, diagnostics, statistics = self.op(*arguments)
        part, index = (values, self.index) if self.index < 2 else (diagnostics, self.index - 2)
        part[index] = self.falsify(part[index].double())
        return values, diagnostics, statistics


def with_planted(monkeypatch, output, falsify, dtype="float32", law="temperature"):
    original = validate._Runs._values
    planted = Planted(output, falsify)
    monkeypatch.setattr(
        validate._Runs, "_values", lambda self, op, x, y: original(self, planted, x, y)
    )
    return validate.validate(laws=[law], dtypes=[dtype], vocabularies=[1000], kls=[1e-9, 0.1])


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("dtype", "wrong"), (("float32", 2e-5), ("float64", 1e-9)))
def test_an_error_just_above_the_tolerance_is_caught(monkeypatch, output, dtype, wrong) -> None:
    found = with_planted(monkeypatch, output, lambda value: value * (1 + wrong), dtype)
    assert {check.output for check in found.failures} == {output}
    # at both KLs, on every instruction set
    assert len(found.failures) == 2 * len(_lib.available_cpu_capabilities())


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -1.0))
def test_a_value_that_is_none_is_caught(monkeypatch, value) -> None:
    found = with_planted(monkeypatch, "kl", lambda right: torch.full_like(right, value))
    assert {check.output for check in found.failures} == {"kl"}
    json.dumps(validate.as_dict(found), allow_nan=False)


def test_the_other_direction_of_kl_is_caught(monkeypatch) -> None:
    reverse = validate.solve("temperature", 0.1, 1000).predicted(1000)["kl_train_rollout"]
    found = with_planted(monkeypatch, "kl", lambda right: torch.full_like(right, reverse))
    assert found.failures


@pytest.mark.parametrize("law", ("one-logit", "geometric", "zipf", "temperature"))
def test_logit_rounding_bounds_what_roundings_do(law: str) -> None:
    vocab, scale = 300, 1e7  # magnified, so that the change stands above float64's own rounding
    rng = np.random.default_rng(0)
    for kl in (1e-3, 1.0):
        x, y = validate.solve(law, kl, vocab).logits(vocab)
        sums = logit_divergences(x, y)
        allowed = validate._logit_rounding(x, y, sums)
        for _ in range(20):
            eps = scale * validate._ROUNDINGS * 2.0**-53
            moved = [z + eps * np.abs(z) * rng.choice([-1.0, 1.0], vocab) for z in (x, y)]
            after = logit_divergences(*moved)
            for output, field in OUTPUTS.items():
                change = abs(float(getattr(after, field)) - float(getattr(sums, field)))
                assert change <= scale * allowed[output] * 1.001 + 1e-15, output


def test_the_selected_instruction_set_comes_back() -> None:
    try:
        _lib.force_cpu_capability("scalar")
        validate.validate(laws=["two-level"], dtypes=["float32"], vocabularies=[1000], kls=[0.1])
        assert _lib.cpu_capability() == "scalar"
    finally:
        _lib.force_cpu_capability(None)


ARGUMENTS = ["validate", "--laws", "temperature", "--vocab", "1000", "--kl", "0.1"]


def test_table_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ARGUMENTS, "--rows", "all"]) == cli.OK
    table = capsys.readouterr().out
    assert cli.main([*ARGUMENTS, "--format", "json"]) == cli.OK
    document = json.loads(capsys.readouterr().out)
    sets = _lib.available_cpu_capabilities()
    assert document["passed"] and document["failures"] == 0 and document["backend"] == "cpu"
    assert len(document["rows"]) == len(OUTPUTS) * len(DTYPES) * len(sets)
    for row in document["rows"]:
        assert f"{row['kernel']:.9e}" in table and f"{row['predicted']:.9e}" in table
        assert row["prediction"] == ("law" if row["dtype"] == "float64" else "sum")
        if row["dtype"] == "float64":
            assert 1e-10 < row["tolerance"] < 1e-10 + OF_LOGITS
        else:
            assert row["tolerance"] == 1e-5
    assert [(line["dtype"], line["instruction_set"]) for line in document["summary"]] == [
        (dtype, name) for dtype in DTYPES for name in sets
    ]
    assert f"{len(document['rows'])} of {len(document['rows'])} checks pass" in table
    assert "\x1b" not in table


def test_a_failing_check_is_exit_code_1(monkeypatch, capsys) -> None:
    monkeypatch.setitem(validate._PROMISE, False, 1e-12)
    assert cli.main([*ARGUMENTS, "--rows", "failed"]) == cli.FAILED
    out = capsys.readouterr().out
    assert " NO" in out and "float64" in out


BAD = {
    "law": (["--laws", "cauchy"], "invalid choice: 'cauchy'"),
    "dtype": (["--dtypes", "int8"], "invalid choice: 'int8'"),
    "vocabulary": (["--vocab", "100"], "a vocabulary must have at least 200 columns, got 100"),
    "kl": (["--kl", "0"], "a KL must be in [1e-12, 20] nats, got 0"),
    "nothing": (["--laws", "gaussian-noise", "--kl", "1"], "nothing to check: no law, KL"),
    "backend": (["--backend", "tpu"], "invalid choice: 'tpu'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, sentence = BAD[case]
    assert cli.main(["validate", *arguments]) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == "" and sentence in captured.err and captured.err.count("\n") == 1


def test_an_absent_device_says_why(monkeypatch, capsys) -> None:
    facts = {"cuda": {"reason": "torch sees no CUDA device"}}
    monkeypatch.setattr(_lib, "describe", lambda: facts)
    assert cli.main(["validate", "--backend", "cuda"]) == cli.BAD_INPUT
    assert capsys.readouterr().err == "trm: error: backend cuda: torch sees no CUDA device\n"


def test_an_installed_package_has_no_emulator(tmp_path: Path) -> None:
    for name in ("trm_ext", "theory"):
        shutil.copytree(
            Path(trm_ext.__file__).parents[1] / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    result = subprocess.run(
        [sys.executable, "-m", "trm_ext", "validate", "--backend", "emulator"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == cli.BAD_INPUT and result.stdout == ""
    assert "which are not part of an installed package; run it in a clone" in result.stderr
