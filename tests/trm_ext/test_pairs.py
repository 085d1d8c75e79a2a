# SPDX-License-Identifier: Apache-2.0
"""The table of pairs: who is trained on what, and what is printed; a stand-in for the model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trm_ext import Verdict, pairs
from trm_ext.engines import Rollout
from trm_ext.io import PairMetadata, RolloutPairWriter
from trm_ext.pairs import THRESHOLDS, print_pairs, run_pairs

NOISE = {"ctranslate2-float32": 1e-6, "torch-bf16": 0.03, "ctranslate2-int8": 1.5}


class FakePolicy:
    name = "torch"

    def __init__(self) -> None:
        self.steps: list[tuple[Any, torch.Tensor, float]] = []
        self.closed = False

    def generate(self, prompt: list[int], **rest: Any) -> Rollout:
        return Rollout(torch.tensor(prompt), torch.zeros(len(prompt), 4))

    version, precision = "1", "float32"

    def logits(self, prompt: list[int], tokens: torch.Tensor) -> torch.Tensor:
        return torch.randn(6, 9, generator=torch.Generator().manual_seed(2))

    def policy_gradient_step(self, samples: Any, advantages: torch.Tensor, rate: float) -> None:
        self.steps.append((samples, advantages, rate))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> list[FakePolicy]:
    from trm_ext.engines import smollm2, torch_lm

    made: list[FakePolicy] = []

    def load(**rest: Any) -> FakePolicy:
        assert rest["seed"] == 1  # not the seed of the rollouts that certify
        made.append(FakePolicy())
        return made[-1]

    def record(engine: str, path: Path, *, train: FakePolicy | None, **rest: Any) -> None:
        assert rest["seed"] == 0
        noise = NOISE.get(engine, 0.0 if train is None else 1e3 * train.steps[0][2])
        rng = torch.Generator().manual_seed(1)
        with RolloutPairWriter(path, PairMetadata(extra={"max_new_tokens": 6})) as writer:
            for b in range(len(rest["prompts"]) * rest["samples"]):
                x = torch.randn(6, 9, generator=rng)
                y = x + noise * torch.randn(6, 9, generator=rng)
                prompt = torch.tensor([b % 9])
                reward = 0.5 + b / 100
                writer.append_sequence(x, y, torch.arange(6), reward=reward, prompt_tokens=prompt)

    monkeypatch.setattr(torch_lm, "load", load)
    monkeypatch.setattr(pairs, "record", record)
    monkeypatch.setattr(smollm2, "load_tokenizer", lambda: None)
    monkeypatch.setattr(smollm2, "chat_tokens", lambda tokenizer, text: [1, 2, len(text)])
    monkeypatch.setattr(smollm2, "text", lambda tokenizer, tokens: "a " * int(tokens[-1]))
    return made


def test_the_table(tmp_path: Path, policies: list[FakePolicy]) -> None:
    found = run_pairs(tmp_path / "pairs", prompts=8, samples=2)
    assert list(found.results) == [
        "ctranslate2-float32 -> torch-float32",
        "torch-bf16 -> torch-float32",
        "ctranslate2-int8 -> torch-float32",
        "torch-float32 -> AdamW 1e-06",
        "torch-float32 -> AdamW 1e-05",
    ]
    assert [policy.steps[0][2] for policy in policies] == [1e-6, 1e-5]
    samples, advantages, _ = policies[0].steps[0]
    assert len(samples) == 8 and float(advantages.sum()) == pytest.approx(0, abs=1e-12)
    assert policies[1].steps[0][0] is samples and all(policy.closed for policy in policies)
    assert all(result.held_out and result.horizon == 6 for result in found.results.values())
    exact, _, int8, *_ = found.results.values()
    assert exact.min_certifiable_gain < 1e-6
    assert int8.verdict is int8.asymptotic_verdict is Verdict.VACUOUS
    assert sorted(path.name for path in (tmp_path / "pairs").iterdir()) == [
        "ctranslate2-float32", "ctranslate2-int8", "stale-1e-05", "stale-1e-06", "torch-bf16",
    ]  # fmt: skip
    written = tmp_path / "pairs" / "ctranslate2-int8" / "certificate.json"
    assert json.loads(written.read_text())["verdict"] == "VACUOUS"

    stream = io.StringIO()
    print_pairs(found, stream)
    text = stream.getvalue()
    lines = {line.partition("  ")[0]: line.split() for line in text.splitlines()}
    for name, result in found.results.items():
        cells = lines[name]
        assert f"{result.seq_kl.estimate:.3g}" in cells
        assert f"{result.min_certifiable_gain:.3g}" in cells
        masked = [int((result.sequence_max_kl > x).sum()) for x in THRESHOLDS]
        start = cells.index(f"{result.min_certifiable_gain:.3g}") + 1
        assert list(map(int, cells[start : start + 3])) == masked
        assert cells[-2:] == [str(result.verdict), str(result.asymptotic_verdict)]
        assert f"{name}: {result.reasons[0]}; {result.reasons[1]}." in text


def test_a_batch_without_a_gradient_is_one_sentence(
    tmp_path: Path, policies: list[FakePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trm_ext.engines.smollm2.text", lambda tokenizer, tokens: "once")
    with pytest.raises(ValueError, match="all 2 training rollouts have reward 1, so there is no"):
        run_pairs(tmp_path / "pairs", prompts=2)
