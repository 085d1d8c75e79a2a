# SPDX-License-Identifier: Apache-2.0
"""One model, five pairs of policies: what each can certify, from rounding to staleness."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from trm_ext.audit import write_json
from trm_ext.certification import Certification, as_dict, certify_file
from trm_ext.record import PROMPTS, distinct_words, record, rescore
from trm_ext.report.table import number, print_table

THRESHOLDS = (1e-3, 1e-2, 1e-1)
LEARNING_RATES = (1e-6, 1e-5)
TRAINING_TOKENS = 32  # of each rollout that the stale policies are trained on
PAIRS = (
    ("ctranslate2-float32", None),
    ("torch-bf16", None),
    ("ctranslate2-int8", None),
    *(("torch-float32", rate) for rate in LEARNING_RATES),
)


@dataclass(frozen=True)
class Pairs:
    """What :func:`run_pairs` found.

    Attributes:
        folder: where the files are.
        results: by name of the pair.
    """

    folder: Path
    results: dict[str, Certification]


def run_pairs(
    folder: str | os.PathLike[str],
    *,
    prompts: int = 8,
    samples: int = 1,
    max_new_tokens: int = 64,
    seed: int = 0,
    announce: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pairs:
    """Record and certify SmolLM2-135M: three engines against torch float32, two stale policies.

    The stale policies are torch float32 after one AdamW step on the policy gradient of rollouts of
    their own (another seed), so the rollouts that certify them are held out; the engines were never
    trained. The reward is :func:`trm_ext.record.distinct_words`.

    Args:
        folder: gets one folder per pair with ``pair.safetensors`` and ``certificate.json``.
        prompts: how many of the built-in prompts, 1 to 8.
        samples: rollouts per prompt; two rollouts in all are the least.
        max_new_tokens: at most this many tokens per sequence.
        seed: of every sampler.
        announce: receives sentences about slow steps.
        progress: called with (sequences done, sequences in all).

    Returns:
        :class:`Pairs`.

    Raises:
        EngineError: an engine is not installed.
        ValueError: a single rollout.
    """
    from trm_ext.engines import torch_lm

    say = announce or (lambda message: None)
    base = Path(folder)
    batch, sampled = None, None
    results: dict[str, Certification] = {}
    for index, (engine, rate) in enumerate(PAIRS):

        def advance(done: int, total: int, before: int = index) -> None:
            if progress is not None:
                progress(before * total + done, len(PAIRS) * total)

        name = f"{engine} -> " + ("torch-float32" if rate is None else f"AdamW {rate:g}")
        target = base / (engine if rate is None else f"stale-{rate:g}")
        target.mkdir(parents=True, exist_ok=True)
        train = None
        if rate is not None:
            train = torch_lm.load(precision="float32", seed=seed + 1, announce=say)
            if batch is None:
                say("sampling the batch that the stale policies are trained on")
                batch = _training_batch(train, prompts)
            train.policy_gradient_step(*batch, rate)
            train.name = f"torch after one AdamW step, lr {rate:g}"
        try:
            if train is not None and sampled is not None:  # one engine, one seed: the same rollouts
                rescore(sampled, target / "pair.safetensors", train, advance)
            else:
                record(
                    engine,
                    target / "pair.safetensors",
                    train=train,
                    prompts=PROMPTS[:prompts],
                    samples=samples,
                    max_new_tokens=max_new_tokens,
                    seed=seed,
                    announce=say,
                    progress=advance,
                )
            if train is not None:
                sampled = target / "pair.safetensors"
        finally:
            if train is not None:
                train.close()
        results[name] = certify_file(target / "pair.safetensors", held_out=True)
        write_json(target / "certificate.json", as_dict(results[name]))
    return Pairs(base, results)


def print_pairs(pairs: Pairs, stream: TextIO) -> None:
    """Print the table of pairs, one row each, and why each verdict is what it is."""
    shown = [f"{threshold:g}" for threshold in THRESHOLDS]
    header = ["rollout -> train", "tokens", "mean KL", "D_seq", "<=", *(f">{t}" for t in shown)]
    header += ["L'", "+-", "SeqKL", "C0", "needs", "verdict", "asymptotic"]
    rows = []
    for name, found in pairs.results.items():
        limits = {(c.name, c.finite_sample): number(c.lower_bound) for c in found.certificates}
        masked = [int((~(found.sequence_max_kl <= threshold)).sum()) for threshold in THRESHOLDS]
        rows.append(
            [
                name,
                str(found.num_tokens),
                number(float(found.sequence_kl.sum()) / found.num_tokens),
                number(found.seq_kl.estimate),
                number(found.min_certifiable_gain),
                *map(str, masked),
                number(found.surrogate.estimate),
                number(found.surrogate.upper - found.surrogate.estimate),
                limits.get(("seq_kl", False), "-"),
                limits["truncated_weight", True],
                str(found.rollouts_needed.truncated_weight or "-"),
                str(found.verdict),
                str(found.asymptotic_verdict),
            ]
        )
    first = next(iter(pairs.results.values()))
    stream.write(
        f"{first.num_sequences} rollouts per pair; reward: share of distinct words. D_seq in nats, "
        "<= its upper limit (the smallest certifiable gain); >x: rollouts that a threshold x on "
        "the largest KL masks; SeqKL (asymptotic) and C0 (finite-sample): lower limits of the gain "
        f"at {1 - first.alpha:g}; needs: rollouts for a positive C0, if mean and variance stay.\n\n"
    )
    print_table(header, rows, stream, left=["rollout -> train", "verdict", "asymptotic"])
    stream.write("\n")
    for name, found in pairs.results.items():
        stream.write(f"{name}: {found.reasons[0]}; {found.reasons[1]}.\n")
    stream.write(f"\nWritten to {pairs.folder.resolve()} (one folder per pair).\n")


def _training_batch(
    policy: Any, prompts: int
) -> tuple[list[tuple[list[int], torch.Tensor]], torch.Tensor]:
    """Rollouts of a policy, and their advantages: reward minus the mean reward."""
    from trm_ext.engines import smollm2

    tokenizer = smollm2.load_tokenizer()
    samples, rewards = [], []
    for text in PROMPTS[:prompts]:
        prompt = smollm2.chat_tokens(tokenizer, text)
        tokens = policy.generate(prompt, max_new_tokens=TRAINING_TOKENS, temperature=1.0).tokens
        samples.append((prompt, tokens.clone()))
        rewards.append(distinct_words(smollm2.text(tokenizer, tokens)))
    reward = torch.tensor(rewards, dtype=torch.float64)
    if float(reward.max()) == float(reward.min()):
        raise ValueError(
            f"all {len(rewards)} training rollouts have reward {rewards[0]:g}, so there is no "
            "policy gradient; take more prompts or tokens"
        )
    return samples, reward - reward.mean()
