# SPDX-License-Identifier: Apache-2.0
"""trm::divergence_state, its merge and its finish: shapes, and their refusal of autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from trm_ext._ops._refusal import refuse_autograd
from trm_ext._ops.token_divergence import STATISTICS, value_dtype
from trm_ext.outputs import count_values

STATE_COLUMNS = 14


def _divergence_state_fake(
    rollout_shard: Tensor,
    train_shard: Tensor,
    tokens: Tensor | None,
    token_mask: Tensor | None,
    rollout_temperature: Tensor | None,
    train_temperature: Tensor | None,
    vocab_start: int,
    vocab_size: int,
    outputs: int,
) -> Tensor:
    return rollout_shard.new_empty(
        (*rollout_shard.shape[:-1], STATE_COLUMNS), dtype=value_dtype(rollout_shard, train_shard)
    )


def _divergence_state_merge_fake(states: Tensor) -> Tensor:
    return states.new_empty(states.shape[1:])


def _divergence_finish_fake(state: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    lead = state.shape[:-1]
    values = state.new_empty((count_values(outputs), *lead))
    statistics = state.new_empty((*lead, STATISTICS), dtype=torch.float64)
    return values, statistics


INSTEAD = "detach the logits and call trm_ext.shard_gradient with the finished row's statistics"

for _name, _fake in (
    ("divergence_state", _divergence_state_fake),
    ("divergence_state_merge", _divergence_state_merge_fake),
    ("divergence_finish", _divergence_finish_fake),
):
    torch.library.register_fake(f"trm::{_name}", _fake)
    refuse_autograd(_name, INSTEAD)
