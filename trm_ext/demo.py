# SPDX-License-Identifier: Apache-2.0
"""The demo: one model, two engines, one table."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from trm_ext.audit import Audit, audit_file, write_results
from trm_ext.record import PROMPTS, record
from trm_ext.report.table import number, print_table, verdict

ENGINES = ("ctranslate2-int8", "ctranslate2-float32")

# Twice the largest KL (about 1e-2 nats in sequences of this length) that rounding to bfloat16
# alone causes: what a sound engine does by rounding passes, a distorted law does not.
MAX_KL = 0.02


@dataclass(frozen=True)
class Demo:
    """What :func:`run_demo` found.

    Attributes:
        folder: where the files are.
        audits: by engine name.
        worst_text: by engine name, the text of its token with the largest KL.
    """

    folder: Path
    audits: dict[str, Audit]
    worst_text: dict[str, str]


def run_demo(
    folder: str | os.PathLike[str],
    *,
    prompts: int = 4,
    max_new_tokens: int = 64,
    max_kl: float = MAX_KL,
    seed: int = 0,
    announce: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Demo:
    """Record and audit SmolLM2-135M on both engines against torch float32.

    Args:
        folder: gets one folder per engine with ``pair.safetensors``, ``audit.json`` and
            ``tokens.csv``.
        prompts: how many of the built-in prompts, 1 to 8.
        max_new_tokens: at most this many tokens per sequence.
        max_kl: threshold in nats.
        seed: of both samplers.
        announce: receives sentences about slow steps.
        progress: called with (sequences done, sequences in all).

    Raises:
        EngineError: an engine is not installed.
    """
    from trm_ext.engines import smollm2

    say = announce or (lambda message: None)
    base = Path(folder)
    audits, worst_text = {}, {}
    for index, engine in enumerate(ENGINES):
        target = base / engine
        target.mkdir(parents=True, exist_ok=True)

        def advance(done: int, total: int, before: int = index) -> None:
            if progress is not None:
                progress(before * total + done, len(ENGINES) * total)

        record(
            engine,
            target / "pair.safetensors",
            prompts=PROMPTS[:prompts],
            max_new_tokens=max_new_tokens,
            seed=seed,
            announce=say,
            progress=advance,
        )
        audits[engine] = audit_file(target / "pair.safetensors", max_kl)
        write_results(audits[engine], target)
        worst = audits[engine].worst
        token = [worst.token_id] if worst else []
        worst_text[engine] = smollm2.load_tokenizer().decode(token)
    return Demo(base, audits, worst_text)


def print_demo(demo: Demo, stream: TextIO) -> None:
    """Print the table of both engines, a two-line reading, and where the files are."""
    header = ["engine", "seq", "tokens", "mean KL", "max KL", "at", "verdict"]
    header += ["mean k3", "max k3", "max |log rho|", "at"]
    rows = [
        [
            engine,
            str(entry.sequence),
            str(entry.tokens),
            number(entry.mean_kl),
            number(entry.max_kl),
            str(entry.position),
            verdict(entry),
            number(entry.mean_k3),
            number(entry.max_k3),
            number(entry.max_abs_log_rho),
            str(entry.log_rho_position),
        ]
        for engine, audit in demo.audits.items()
        for entry in audit.sequences
    ]
    stream.write(
        "Exact KL(rollout || train) over the whole vocabulary, in nats; after the verdict: what "
        "the sampled token alone says.\n\n"
    )
    print_table(header, rows, stream, left=["engine", "verdict"])
    stream.write("\n" + "\n".join(_reading(demo)) + "\n\n")
    stream.write(f"Written to {demo.folder.resolve()} (one folder per engine).\n")


def _reading(demo: Demo) -> list[str]:
    """Say in two lines what the table shows."""
    verdicts = [
        f"{engine} keeps {audit.kept} of {len(audit.sequences)} sequences "
        f"(largest KL {number(audit.worst.max_kl if audit.worst else 0.0)})"
        for engine, audit in demo.audits.items()
    ]
    engine = ENGINES[0]
    audit = demo.audits[engine]
    threshold = f"At max KL <= {audit.max_kl:g}: " + "; ".join(verdicts) + "."
    worst = audit.worst
    if worst is None:
        return [threshold]
    row = int(audit.cu_seqlens[worst.sequence]) + worst.position
    k3, log_rho = float(audit.k3[row]), abs(float(audit.log_ratio[row]))
    elsewhere = sum(entry.position != entry.log_rho_position for entry in audit.sequences)
    return [
        threshold,
        f"Worst token of {engine} (sequence {worst.sequence}, position {worst.position}, "
        f"{demo.worst_text[engine]!r}): exact KL {number(worst.max_kl)}, but the sampled token "
        f"says k3 {number(k3)} and |log rho| {number(log_rho)}; |log rho| peaks at another token "
        f"in {elsewhere} of {len(audit.sequences)} sequences.",
    ]
