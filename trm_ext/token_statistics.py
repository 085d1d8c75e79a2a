# SPDX-License-Identifier: Apache-2.0
"""Per-token statistics of a batch: from a rollout-pair file's logits, or from a file that has them.

Logits are streamed through the kernel in bounded memory; what stays are a few numbers per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trm_ext.divergence import TokenDivergence
from trm_ext.io import PolicyRecord
from trm_ext.layout import SequenceLayout


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
    """

    path: Path | None
    rollout: PolicyRecord
    train: PolicyRecord
    vocab_size: int | None
    tokens: torch.Tensor | None
    cu_seqlens: torch.Tensor
    counted: torch.Tensor
    divergence: TokenDivergence
    rewards: torch.Tensor | None = None
    group_ids: torch.Tensor | None = None
    prompt_tokens: torch.Tensor | None = None
    prompt_cu_seqlens: torch.Tensor | None = None
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> SequenceLayout:
        """The layout of the tokens."""
        return SequenceLayout.from_cu_seqlens(self.cu_seqlens, token_mask=self.counted)
