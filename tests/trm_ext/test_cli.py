# SPDX-License-Identifier: Apache-2.0
"""The command ``trm``: exit codes, messages, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trm_ext import GateConstants, calibrate, cli
from trm_ext.audit import audit_file
from trm_ext.calibration import as_dict as as_calibration
from trm_ext.certification import as_dict as as_certificate
from trm_ext.certification import certify_file
from trm_ext.io import RolloutPairWriter


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two sequences: one identical on both sides, one far apart."""
    rng = torch.Generator().manual_seed(3)
    path = tmp_path / "pair.safetensors"
    with RolloutPairWriter(path) as writer:
        x = torch.randn(3, 50, generator=rng)
        writer.append_sequence(x, x, torch.tensor([1, 2, 3]))
        writer.append_sequence(x, -x, torch.tensor([4, 5, 6]))
    return path


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trm_ext", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As from a terminal: a shell's background job would hand down that it is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(*arguments: str | Path) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_audit_table_through_a_process(pair: Path, tmp_path: Path) -> None:
    code, out, err = run("audit", pair, "--max-kl", "0.02", "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == (
        "seq tokens max KL at token mean KL total KL max |log rho| mean k3 max k3 verdict".split()
    )
    assert lines[2].split() == ["0", "3", "0", "0", "1", "0", "0", "0", "0", "0", "kept"]
    assert lines[3].split()[0] == "1" and lines[3].split()[-1] == "masked"
    assert "1 of 2 sequences kept at max KL <= 0.02 nats; 6 tokens" in out
    assert str(tmp_path / "out") in out
    assert sorted(os.listdir(tmp_path / "out")) == ["audit.json", "tokens.csv"]
    assert "\x1b" not in out


def test_audit_json(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(pair), "--max-kl", "0.02", "--format", "json"]) == cli.OK
    document = json.loads(capsys.readouterr().out)
    audit = audit_file(pair, 0.02)
    assert set(document) == {
        "schema_version",
        "file",
        "max_kl",
        "vocab_size",
        "rollout",
        "train",
        "notes",
        "summary",
        "sequences",
    }
    assert [entry["max_kl"] for entry in document["sequences"]] == [
        entry.max_kl for entry in audit.sequences
    ]
    assert [entry["keep"] for entry in document["sequences"]] == [True, False]
    assert document["summary"]["masked"] == 1


@pytest.fixture
def rewarded(tmp_path: Path) -> Path:
    """Forty rollouts whose last token earns the reward, and a train policy that favours it."""
    rng = torch.Generator().manual_seed(4)
    path = tmp_path / "rewarded.safetensors"
    with RolloutPairWriter(path) as writer:
        for _ in range(40):
            x = torch.randn(5, 8, generator=rng)
            y = x.clone()
            y[-1, :4] += 0.3
            tokens = torch.multinomial(x.softmax(-1), 1, generator=rng)[:, 0]
            writer.append_sequence(x, y, tokens, reward=float(tokens[-1] < 4))
    return path


def test_certify_table_through_a_process(rewarded: Path, tmp_path: Path) -> None:
    code, out, err = run("certify", rewarded, "--held-out", "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    result = certify_file(rewarded, held_out=True)
    assert out.splitlines()[0] == f"{result.verdict}: {result.reasons[0]}"
    assert out.splitlines()[1] == f"{result.asymptotic_verdict} by {result.reasons[1]}"
    assert "held-out rollouts; 40 rollouts, 200 tokens, longest 5; reward in [0, 1]" in out
    for c in result.certificates:
        assert f" {c.lower_bound:.3g}  " in out
    for bound in result.bounds:
        assert any(
            line.startswith(bound.name) and f" {bound.value:.3g} " in line
            for line in out.splitlines()
        )
    assert result.bottleneck is not None
    for sentence in (*result.bottleneck.sentences, *result.notes):
        assert sentence in out
    needed = result.rollouts_needed
    for title, count in (
        ("C0 truncated weight", needed.truncated_weight),
        ("C3' budget gate", needed.frozen_budget),
        ("C3' drift gate", needed.frozen_drift),
    ):
        (row,) = [x for x in out.splitlines() if x.startswith(title) and "finite sample" in x]
        assert re.search(rf" {count if count else 'no number'} +NOT_CERTIFIED ", row)
    budget = next(c for c in result.certificates if c.name == "frozen_budget")
    assert out.splitlines()[2] == (
        f"C3' budget gate alone: NOT_CERTIFIED; radius {budget.parts['surrogate_radius']:.3g}, "
        f"rollouts needed: {needed.frozen_budget or 'no number'}"
    )
    assert "0.95 on its own; the 4 finite-sample ones together 0.8" in out
    assert "constants fixed beforehand: max KL 0.05, max ratio 2, shift budget 4, drift bud" in out
    # what was written certifies again, without logits
    assert sorted(os.listdir(tmp_path / "out")) == ["certificate.json", "statistics.safetensors"]
    document = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert document == as_certificate(result)
    again = certify_file(tmp_path / "out" / "statistics.safetensors", held_out=True)
    assert {**as_certificate(again), "file": ""} == {**document, "file": ""}


def test_certify_takes_its_options(rewarded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["certify", str(rewarded), "--format", "json", "--reward-range", "-1", "2"]
    arguments += ["--alpha", "0.1", "--horizon", "9", "--primary", "frozen_budget"]
    constants = GateConstants(0.5, 3.0, 2.0, 1.5, 0.25, 0.75)
    for name in GateConstants.__dataclass_fields__:
        arguments += [f"--{name.replace('_', '-')}", str(getattr(constants, name))]
    assert cli.main(arguments) == cli.OK
    found = json.loads(capsys.readouterr().out)
    expected = certify_file(
        rewarded,
        reward_range=(-1.0, 2.0),
        alpha=0.1,
        horizon=9,
        primary="frozen_budget",
        constants=constants,
    )
    assert found == as_certificate(expected)
    assert found["label"] == "optimistic: same data" and found["verdict"] == "NOT_CERTIFIED"
    assert cli.main(["certify", str(rewarded), "--format", "json", "--split"]) == cli.OK
    assert json.loads(capsys.readouterr().out)["num_split"] == 10


def test_calibrate_in_both_formats(
    rewarded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["calibrate", str(rewarded), "--max-kl", "0.02", "--max-kl", "0.5"]
    arguments += ["--acceptance", "0.75", "--horizon", "9", "--out", str(tmp_path / "out")]
    assert cli.main([*arguments, "--format", "json"]) == cli.OK
    expected = calibrate([rewarded], thresholds=[0.02, 0.5], target_acceptance=0.75, horizon=9)
    document = json.loads(capsys.readouterr().out)
    assert document == as_calibration(expected)
    assert json.loads((tmp_path / "out" / "calibration.json").read_text()) == document
    assert cli.main(arguments) == cli.OK
    out = capsys.readouterr().out
    assert "75% are kept at max KL <=" in out and "\x1b" not in out


def test_progress_is_on_stderr_only_when_asked(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["audit", str(pair), "--max-kl", "0.02", "--chunk-rows", "2"]
    cli.main(arguments)
    assert capsys.readouterr().err == ""
    cli.main([*arguments, "--progress"])
    captured = capsys.readouterr()
    assert "100% (6/6 tokens)" in captured.err
    assert "%" not in captured.out


BAD = {
    "no verb": ([], "the following arguments are required: VERB"),
    "unknown verb": (["judge"], "invalid choice: 'judge'"),
    "no threshold": (["audit", "FILE"], "the following arguments are required: --max-kl"),
    "negative": (["audit", "FILE", "--max-kl", "-1"], "expected a number >= 0, got '-1'"),
    "nan": (["audit", "FILE", "--max-kl", "nan"], "expected a number >= 0, got 'nan'"),
    "words": (["audit", "FILE", "--max-kl", "small"], "expected a number >= 0, got 'small'"),
    "format": (["audit", "FILE", "--max-kl", "1", "--format", "xml"], "invalid choice: 'xml'"),
    "chunk": (["audit", "FILE", "--max-kl", "1", "--chunk-rows", "0"], ">= 1, got '0'"),
    "no rewards": (["certify", "FILE"], "no rewards: a certificate is about the expected reward"),
    "certify alpha": (["certify", "FILE", "--alpha", "2"], "alpha must lie strictly between 0 and"),
    "certify range": (
        ["certify", "FILE", "--reward-range", "1", "0"],
        "reward_range must be finite with low < high, got [1, 0]",
    ),
    "split and constants": (
        ["certify", "FILE", "--split", "--max-kl", "0.1"],
        "--split chooses the constants: give it or them, not both",
    ),
    "primary": (["certify", "FILE", "--primary", "best"], "invalid choice: 'best'"),
    "constant": (
        ["certify", "FILE", "--max-ratio", "0.5"],
        "max_ratio must be a finite number >= 1, got 0.5",
    ),
    "acceptance": (["calibrate", "FILE", "--acceptance", "0"], "target_acceptance must be in (0"),
    "calibrate nothing": (["calibrate"], "the following arguments are required: FILE"),
    "calibrate horizon": (["calibrate", "FILE", "--horizon", "2"], "below the longest sequence, 3"),
    "pair": (
        ["record", "--engine", "torch-bf16", "--out", "OUT", "--pair", "self"],
        "invalid choice: 'self'",
    ),
    "absent": (["audit", "/absent/pair", "--max-kl", "1"], "/absent/pair: no such file"),
    "out is a file": (["audit", "FILE", "--max-kl", "1", "--out", "FILE"], "not a folder"),
    "engine": (
        ["record", "--engine", "vllm", "--out", "OUT"],
        "unknown engine 'vllm'; the engines are ctranslate2-int8, ctranslate2-float32, "
        "torch-bf16, torch-float32, llama-cpp",
    ),
    "prompts": (["demo", "--prompts", "9"], "expected a whole number from 1 to 8, got '9'"),
    "temperature": (
        ["record", "--engine", "torch-bf16", "--out", "OUT", "--temperature", "0"],
        "temperature must be a finite number > 0, got 0.0",
    ),
    "seed": (
        ["record", "--engine", "torch-bf16", "--out", "OUT", "--seed", "-1"],
        "seed must be in [0, 2**31), got -1",
    ),
    "prompt file": (
        ["record", "--engine", "torch-bf16", "--out", "OUT", "--prompt-file", "/absent/p.txt"],
        "No such file or directory: '/absent/p.txt'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_code_2(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, message = BAD[case]
    names = {"FILE": str(pair), "OUT": str(tmp_path / "recorded")}
    assert cli.main([names.get(word, word) for word in arguments]) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1 and captured.err.startswith("trm")
    assert not (tmp_path / "recorded").exists()


def test_bad_file_through_a_process(pair: Path) -> None:
    os.truncate(pair, pair.stat().st_size - 100)
    code, out, err = run("audit", pair, "--max-kl", "0.02")
    assert (code, out) == (2, "")
    assert err.startswith(f"trm: error: {pair}: truncated (") and err.count("\n") == 1


def test_traceback_only_with_verbose(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair.write_bytes(b"no")
    arguments = ["audit", str(pair), "--max-kl", "1"]
    assert cli.main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert cli.main([*arguments, "--verbose"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_unexpected_errors_have_code_1(
    pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise RuntimeError("the disk has melted")

    monkeypatch.setattr("trm_ext.audit.audit_file", fail)
    assert cli.main(["audit", str(pair), "--max-kl", "1"]) == cli.FAILED
    assert capsys.readouterr().err == "trm: error: RuntimeError: the disk has melted\n"


@pytest.mark.parametrize(
    ("sign", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_interrupted_audit_leaves_nothing(
    tmp_path: Path, sign: signal.Signals, code: int, word: str
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    row = torch.zeros(1, 50_000)
    with RolloutPairWriter(tmp_path / "pair") as writer:
        for _ in range(400):
            writer.append_sequence(row, row, torch.tensor([0]))
    process = start(
        "audit", tmp_path / "pair", "--max-kl", "1", "--chunk-rows", "1",
        "--progress", "--out", work / "out",
    )  # fmt: skip
    assert process.stderr is not None
    while "/400 tokens" not in (seen := process.stderr.read(60)):
        assert seen, "the audit ended before it drew its progress bar"
    process.send_signal(sign)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == ""
    assert err.endswith(f"trm: {word}\n") and "Traceback" not in err
    assert os.listdir(work) == []


def test_reader_of_stdout_may_leave(pair: Path) -> None:
    process = start("audit", pair, "--max-kl", "1")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == cli.BROKEN_PIPE
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize(
    "verb",
    [[], ["info"], ["audit"], ["certify"], ["calibrate"], ["record"], ["demo"], ["validate"]],
)
def test_help(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert "exit codes:" in text and "bad input or usage" in text
    assert max(map(len, text.splitlines())) <= 100


def test_info_in_both_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert facts and all(str(key) in text for key in facts)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("trm ")
