# SPDX-License-Identifier: Apache-2.0
"""Per-token statistics of a batch: from a rollout-pair file's logits, or from a file that has them.

Logits are streamed through the kernel in bounded memory; what stays are a few numbers per token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trm_ext import io
from trm_ext.divergence import TokenDivergence, token_divergence
from trm_ext.io import PairMetadata, PolicyRecord, RolloutPairError, RolloutPairReader
from trm_ext.layout import SequenceLayout
from trm_ext.outputs import OUTPUTS


@dataclass(frozen=True)
class TokenStatistics:
    """What is known about every token of a batch, packed: sequences end to end, no padding.

    Attributes:
        path: the file it was read from, or None.
        rollout: how the rollout side was produced.
        train: how the train side was produced.
        vocab_size: real vocabulary size, or None when unknown.
        tokens: int64 ``[N]``, or None.
        cu_seqlens: int64 ``[B + 1]``; sequence b is tokens ``cu_seqlens[b]:cu_seqlens[b + 1]``.
        counted: bool ``[N]``, tokens that count.
        divergence: a :class:`TokenDivergence` of ``[N]`` fields, 0 where not counted; None where
            the source did not have, or the caller did not ask for, that statistic.
        rewards: float64 ``[B]``, or None.
        group_ids: int64 ``[B]``, or None.
        prompt_tokens: int64 ``[P]``, or None.
        prompt_cu_seqlens: int64 ``[B + 1]``, or None.
        notes: what a reader of the numbers should know, one sentence each.
        extra: further metadata of the file (model, seed, prompts, ...).
        host_processor: where the logits were computed, as far as the file says.
    """

    path: Path | None
    rollout: PolicyRecord
    train: PolicyRecord
    vocab_size: int | None
    tokens: Tensor | None
    cu_seqlens: Tensor
    counted: Tensor
    divergence: TokenDivergence
    rewards: Tensor | None = None
    group_ids: Tensor | None = None
    prompt_tokens: Tensor | None = None
    prompt_cu_seqlens: Tensor | None = None
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    host_processor: str = ""

    @property
    def layout(self) -> SequenceLayout:
        """The layout of the tokens."""
        return SequenceLayout.from_cu_seqlens(self.cu_seqlens, token_mask=self.counted)


def read_statistics(
    path: str | os.PathLike[str],
    outputs: Sequence[str] = OUTPUTS,
    *,
    chunk_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokenStatistics:
    """Read a rollout-pair file's logits into per-token statistics, or a file that holds these.

    Logits that the file calls raw are divided by each side's temperature in float64, and the
    statistics are then float64. A file of statistics (:func:`write_statistics`) has no logits; the
    statistics that it lacks are None.

    Args:
        path: a rollout-pair file or a statistics file.
        outputs: which statistics to compute from logits; see :class:`TokenDivergence`.
        chunk_rows: rows of logits in memory at a time; None takes about 32 MiB per side.
        progress: called with (rows done, rows in all) after each chunk.

    Returns:
        :class:`TokenStatistics`.

    Raises:
        RolloutPairError: the file is wrong, or ``chunk_rows`` is below 1.
    """
    names = io.tensor_names(path)
    if "kl" in names and "rollout_logits" not in names:
        return _read_precomputed(Path(path))
    with RolloutPairReader(path) as pair:
        counted = pair.token_mask
        if counted is None:
            counted = torch.ones(pair.num_tokens, dtype=torch.bool)
        step = io.default_chunk_rows(pair.num_columns) if chunk_rows is None else chunk_rows
        parts: list[TokenDivergence] = []
        for start, rollout, train in pair.chunks(step):
            span = slice(start, start + len(rollout))
            parts.append(
                token_divergence(
                    tempered(rollout, pair.metadata.rollout),
                    tempered(train, pair.metadata.train),
                    tokens=pair.tokens[span],
                    token_mask=counted[span],
                    outputs=outputs,
                )
            )
            if progress is not None:
                progress(span.stop, pair.num_tokens)
        found = {
            name: torch.cat([getattr(part, name) for part in parts]) if parts else torch.zeros(0)
            for name in outputs
        }
        divergence = TokenDivergence(**found)
        return TokenStatistics(
            path=pair.path,
            rollout=pair.metadata.rollout,
            train=pair.metadata.train,
            vocab_size=pair.vocab_size,
            tokens=pair.tokens,
            cu_seqlens=pair.cu_seqlens,
            counted=counted,
            divergence=divergence,
            rewards=None if pair.rewards is None else pair.rewards.double(),
            group_ids=pair.group_ids,
            prompt_tokens=pair.prompt_tokens,
            prompt_cu_seqlens=pair.prompt_cu_seqlens,
            notes=_notes(pair, counted, divergence.logp_rollout),
            extra=pair.metadata.extra,
            host_processor=pair.metadata.host_processor,
        )


def write_statistics(path: str | os.PathLike[str], statistics: TokenStatistics) -> None:
    """Write per-token statistics to a safetensors file that :func:`read_statistics` reads.

    The file is a few dozen bytes per token where the logits are hundreds of kilobytes; a trainer
    that computes :func:`token_divergence` itself can write it instead of logits.
    ``docs/rollout_pair_format.md`` describes it.

    Args:
        path: the file; replaced if it exists, complete or not at all.
        statistics: ``divergence.kl`` and ``divergence.log_ratio`` must be there.

    Raises:
        RolloutPairError: the folder does not exist, or a required statistic is None.
    """
    fields = {n: v for n, v in statistics.divergence._asdict().items() if v is not None}
    for name in ("kl", "log_ratio"):
        if name not in fields:
            raise RolloutPairError(f"{path}: a file of statistics needs {name}, got none")
    plain = {
        "tokens": statistics.tokens,
        "token_mask": statistics.counted,
        "rewards": statistics.rewards,
        "group_ids": statistics.group_ids,
        "prompt_tokens": statistics.prompt_tokens,
        "prompt_cu_seqlens": statistics.prompt_cu_seqlens,
    }
    tensors = {
        "cu_seqlens": statistics.cu_seqlens,
        **fields,
        **{name: value for name, value in plain.items() if value is not None},
    }
    metadata = PairMetadata(
        rollout=statistics.rollout,
        train=statistics.train,
        vocab_size=statistics.vocab_size,
        host_processor=statistics.host_processor,
        extra={**statistics.extra, "notes": list(statistics.notes)},
    )
    io.write_tensors(path, {n: t.detach().cpu() for n, t in tensors.items()}, metadata)


def tempered(logits: Tensor, policy: PolicyRecord) -> Tensor:
    """Return logits whose softmax is the policy; in float64 when a division is needed."""
    return logits if policy.divisor == 1.0 else logits.double() / policy.divisor


def _read_precomputed(path: Path) -> TokenStatistics:
    tensors, metadata = io.read_tensors(path)
    for name in ("kl", "log_ratio", "cu_seqlens"):
        if name not in tensors:
            have = ", ".join(sorted(tensors))
            raise RolloutPairError(f"{path}: missing tensor {name} (the file has: {have})")
    shape, bounds = tensors["kl"].shape, tensors["cu_seqlens"].shape
    if len(shape) != 1 or len(bounds) != 1 or bounds[0] < 1:
        raise RolloutPairError(
            f"{path}: kl has shape {list(shape)} and cu_seqlens {list(bounds)}, expected [N] and "
            "[B + 1]"
        )
    n, b = shape[0], bounds[0] - 1
    prompt = tensors.get("prompt_tokens", torch.zeros(0))
    io.check_fields(
        path,
        tensors,
        {
            **{name: ((n,), io.FLOATS) for name in OUTPUTS},
            "tokens": ((n,), ("I64",)),
            "token_mask": ((n,), ("BOOL",)),
            "cu_seqlens": ((b + 1,), ("I64",)),
            "rewards": ((b,), io.FLOATS),
            "group_ids": ((b,), ("I64",)),
            "prompt_tokens": ((prompt.numel(),), ("I64",)),
            "prompt_cu_seqlens": ((b + 1,), ("I64",)),
        },
    )
    io.check_boundaries(path, "cu_seqlens", tensors["cu_seqlens"], n)
    counted = tensors.get("token_mask", torch.ones(n, dtype=torch.bool))
    fields = {name: torch.where(counted, tensors[name], 0.0) for name in OUTPUTS if name in tensors}
    rewards = tensors.get("rewards")
    notes = metadata.extra.get("notes", [])
    return TokenStatistics(
        path=path,
        rollout=metadata.rollout,
        train=metadata.train,
        vocab_size=metadata.vocab_size,
        tokens=tensors.get("tokens"),
        cu_seqlens=tensors["cu_seqlens"],
        counted=counted,
        divergence=TokenDivergence(**fields),
        rewards=None if rewards is None else rewards.double(),
        group_ids=tensors.get("group_ids"),
        prompt_tokens=tensors.get("prompt_tokens"),
        prompt_cu_seqlens=tensors.get("prompt_cu_seqlens"),
        notes=tuple(map(str, notes)) if isinstance(notes, list) else (),
        extra={key: value for key, value in metadata.extra.items() if key != "notes"},
        host_processor=metadata.host_processor,
    )


def _notes(
    pair: RolloutPairReader, counted: Tensor, rollout_logp: Tensor | None
) -> tuple[str, ...]:
    """What the numbers do not say by themselves."""
    notes = []
    for side in ("rollout", "train"):
        policy: PolicyRecord = getattr(pair.metadata, side)
        if policy.truncated:
            notes.append(
                f"the {side} logits are raw but sampling was truncated (top_k {policy.top_k}, "
                f"top_p {policy.top_p}, min_p {policy.min_p}): the KL is that of the whole laws"
            )
    if pair.metadata.rollout.divisor != pair.metadata.train.divisor:
        notes.append(
            f"the two sides are compared at different temperatures "
            f"({pair.metadata.rollout.temperature} and {pair.metadata.train.temperature})"
        )
    if pair.rollout_logps is not None and rollout_logp is not None:
        error = (pair.rollout_logps.double() - rollout_logp.double())[counted].abs()
        if len(error) and not float(error.max()) <= 0.05:
            notes.append(
                f"rollout_logps differ from the rollout logits by up to {float(error.max()):.3g} "
                "nats: shifted by one row, or another temperature?"
            )
    return tuple(notes)
