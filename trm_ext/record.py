# SPDX-License-Identifier: Apache-2.0
"""Record a rollout-pair file: let an engine sample, then let the training policy read along."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trm_ext import engines
from trm_ext.io import PairMetadata, PolicyRecord, RolloutPairWriter, host_processor

PROMPTS = (
    "Write three sentences about the sea at night.",
    "Explain to a child why the sky is blue.",
    "A train leaves at 9:40 and arrives at 12:15. How long is the ride? Think step by step.",
    "Give me a short recipe for a soup with potatoes and leeks.",
    "Tell a story about a fox who learns to read.",
    "What are the advantages of small language models?",
    "List five Italian cities and one thing to see in each.",
    "Write a polite e-mail that moves a meeting from Monday to Wednesday.",
)


@dataclass(frozen=True)
class Recording:
    """What :func:`record` wrote.

    Attributes:
        path: the file.
        sequences: number of sequences.
        tokens: number of tokens in all.
    """

    path: Path
    sequences: int
    tokens: int


def record(
    engine_name: str,
    path: str | os.PathLike[str],
    *,
    prompts: Sequence[str] = PROMPTS[:4],
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    announce: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Sample from an engine, score the same tokens in torch float32, write both logits.

    Row t of both logits is the distribution that produced token t: the engine's own output when
    it sampled the token, and the training policy's output at the position before it. Sampling
    uses the full vocabulary. The same arguments on the same machine give the same file.

    Args:
        engine_name: one of :func:`trm_ext.engines.names`.
        path: the rollout-pair file to write; nothing is left there after an interrupt.
        prompts: user messages; each becomes one sequence.
        max_new_tokens: at most this many tokens per sequence, >= 1.
        temperature: of the sampler, > 0; both sides are recorded with it.
        seed: of the sampler, >= 0.
        announce: receives sentences about slow steps.
        progress: called with (sequences done, sequences in all).

    Returns:
        A :class:`Recording`.

    Raises:
        EngineError: the engine is unknown or not installed.
        ValueError: a number is out of range.
    """
    if not prompts:
        raise ValueError("record needs at least one prompt, got none")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be a finite number > 0, got {temperature}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed must be in [0, 2**31), got {seed}")
    engines.check(engine_name)
    from trm_ext.engines import smollm2, torch_lm

    say = announce or (lambda message: None)
    tokenizer = smollm2.load_tokenizer(say)
    policy = torch_lm.load(precision="float32", seed=seed, announce=say)
    engine = engines.load(engine_name, seed=seed, announce=say)
    metadata = PairMetadata(
        rollout=PolicyRecord(engine.name, engine.version, engine.precision, temperature),
        train=PolicyRecord(policy.name, policy.version, policy.precision, temperature),
        vocab_size=smollm2.VOCAB_SIZE,
        host_processor=host_processor(),
        extra={"model": smollm2.NAME, "seed": seed, "prompts": list(prompts)},
    )
    try:
        with RolloutPairWriter(path, metadata) as writer:
            if progress is not None:
                progress(0, len(prompts))
            for done, text in enumerate(prompts, start=1):
                prompt = smollm2.chat_tokens(tokenizer, text)
                rollout = engine.generate(
                    prompt, max_new_tokens=max_new_tokens, temperature=temperature
                )
                writer.append_sequence(
                    rollout.logits,
                    policy.logits(prompt, rollout.tokens),
                    rollout.tokens,
                    prompt_tokens=torch.tensor(prompt, dtype=torch.int64),
                )
                if progress is not None:
                    progress(done, len(prompts))
    finally:
        engine.close()
        policy.close()
    return Recording(path=Path(path), sequences=len(prompts), tokens=writer.num_tokens)
