# SPDX-License-Identifier: Apache-2.0
"""Record a rollout-pair file: let an engine sample, then let another policy read along."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from trm_ext import engines
from trm_ext.io import (
    PairMetadata,
    PolicyRecord,
    RolloutPairError,
    RolloutPairReader,
    RolloutPairWriter,
    host_processor,
)

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


PAIRS = ("train", "noise-floor")
REWARD = "distinct-words"


class Policy(Protocol):
    """What can read along: names itself, and scores given tokens in one pass."""

    name: str
    version: str
    precision: str

    def logits(self, prompt: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """Return ``[T, V]`` raw logits; row t is the distribution of ``tokens[t]``."""
        ...


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


def distinct_words(text: str) -> float:
    """The reward of every recording: distinct words / words, 0 without words, in [0, 1].

    Words are what white space separates, in lower case. It needs no judge, is defined for every
    text, and says something: a model that repeats itself scores low.

    Example:
        >>> distinct_words("The fox and the hound"), distinct_words("")
        (0.8, 0.0)
    """
    words = text.lower().split()
    return len(set(words)) / len(words) if words else 0.0


def record(
    engine_name: str,
    path: str | os.PathLike[str],
    *,
    pair: Literal["train", "noise-floor"] = "train",
    train: Policy | None = None,
    prompts: Sequence[str] = PROMPTS[:4],
    samples: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    announce: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Sample from an engine, score the same tokens with another policy, write both logits.

    Row t of both logits is the distribution that produced token t: the engine's own output when
    it sampled the token, and the training policy's output at the position before it. Sampling
    uses the full vocabulary. The same arguments on the same machine give the same file. Each
    sequence gets the reward :func:`distinct_words`; sequences of one prompt share a group id.

    Args:
        engine_name: one of :func:`trm_ext.engines.names`.
        path: the rollout-pair file to write; nothing is left there after an interrupt.
        pair: who reads along. ``"train"``: the training policy. ``"noise-floor"``: the same engine,
            in one pass over the tokens that it sampled one by one.
        train: the training policy; None takes torch float32.
        prompts: user messages.
        samples: sequences per prompt, >= 1.
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
    if pair not in PAIRS:
        raise ValueError(f"pair must be one of {', '.join(PAIRS)}, got {pair!r}")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
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
    engine = engines.load(engine_name, seed=seed, announce=say)
    loaded: torch_lm.TorchPolicy | None = None
    reader: Policy
    if pair == "noise-floor":
        reader = engine
    elif train is not None:
        reader = train
    else:
        reader = loaded = torch_lm.load(precision="float32", seed=seed, announce=say)
    side = " (prefill)" if pair == "noise-floor" else ""
    metadata = PairMetadata(
        rollout=PolicyRecord(engine.name, engine.version, engine.precision, temperature),
        train=PolicyRecord(reader.name + side, reader.version, reader.precision, temperature),
        vocab_size=smollm2.VOCAB_SIZE,
        host_processor=host_processor(),
        extra={
            "model": smollm2.NAME,
            "seed": seed,
            "prompts": list(prompts),
            "max_new_tokens": max_new_tokens,
            "reward": REWARD,
            "pair": pair,
        },
    )
    try:
        with RolloutPairWriter(path, metadata) as writer:
            count = len(prompts) * samples
            if progress is not None:
                progress(0, count)
            for done in range(count):
                prompt = smollm2.chat_tokens(tokenizer, prompts[done // samples])
                rollout = engine.generate(
                    prompt, max_new_tokens=max_new_tokens, temperature=temperature
                )
                writer.append_sequence(
                    rollout.logits,
                    reader.logits(prompt, rollout.tokens),
                    rollout.tokens,
                    reward=distinct_words(smollm2.text(tokenizer, rollout.tokens)),
                    group_id=done // samples,
                    prompt_tokens=torch.tensor(prompt, dtype=torch.int64),
                )
                if progress is not None:
                    progress(done + 1, count)
    finally:
        engine.close()
        if loaded is not None:
            loaded.close()
    return Recording(path=Path(path), sequences=count, tokens=writer.num_tokens)


def rescore(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    train: Policy,
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Write the same rollouts once more, with another policy reading along.

    Args:
        source: a rollout-pair file with prompts.
        path: the file to write; nothing is left there after an interrupt.
        train: the policy whose logits replace those of the source's train side.
        progress: called with (sequences done, sequences in all).

    Returns:
        A :class:`Recording`.

    Raises:
        RolloutPairError: the source is wrong or has no prompts.
    """
    with RolloutPairReader(source) as pair:
        if pair.prompt_tokens is None or pair.prompt_cu_seqlens is None:
            raise RolloutPairError(f"{source}: no prompt_tokens, so nobody can read along")
        side = replace(
            pair.metadata.train,
            engine=train.name,
            version=train.version,
            precision=train.precision,
        )
        bounds, prompts = pair.cu_seqlens.tolist(), pair.prompt_cu_seqlens.tolist()
        with RolloutPairWriter(path, replace(pair.metadata, train=side)) as writer:
            for b in range(pair.num_sequences):
                tokens = pair.tokens[bounds[b] : bounds[b + 1]]
                prompt = pair.prompt_tokens[prompts[b] : prompts[b + 1]]
                writer.append_sequence(
                    pair.padded_rows(bounds[b], bounds[b + 1])[0],
                    train.logits(prompt.tolist(), tokens),
                    tokens,
                    reward=None if pair.rewards is None else float(pair.rewards[b]),
                    group_id=None if pair.group_ids is None else int(pair.group_ids[b]),
                    prompt_tokens=prompt,
                )
                if progress is not None:
                    progress(b + 1, pair.num_sequences)
    return Recording(path=Path(path), sequences=len(bounds) - 1, tokens=writer.num_tokens)
