# SPDX-License-Identifier: Apache-2.0
"""trm::token_divergence and trm::token_divergence_backward: shapes and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trm_ext.outputs import count_diagnostics, count_values

STATISTICS = 8  # M, log S, c, residual, and four values in full precision


def value_dtype(rollout_logits: Tensor, train_logits: Tensor) -> torch.dtype:
    """float64 when an input is, float32 otherwise."""
    wide = torch.float64 in (rollout_logits.dtype, train_logits.dtype)
    return torch.float64 if wide else torch.float32


def _token_divergence_fake(
    rollout_logits: Tensor,
    train_logits: Tensor,
    tokens: Tensor | None,
    token_mask: Tensor | None,
    rollout_temperature: Tensor | None,
    train_temperature: Tensor | None,
    vocab_size: int,
    outputs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    lead = rollout_logits.shape[:-1]
    dtype = value_dtype(rollout_logits, train_logits)
    return (
        rollout_logits.new_empty((count_values(outputs), *lead), dtype=dtype),
        rollout_logits.new_empty((count_diagnostics(outputs), *lead), dtype=dtype),
        rollout_logits.new_empty((*lead, STATISTICS), dtype=torch.float64),
    )


def _token_divergence_backward_fake(
    grad_values: Tensor,
    rollout_logits: Tensor,
    train_logits: Tensor,
    statistics: Tensor,
    tokens: Tensor | None,
    token_mask: Tensor | None,
    rollout_temperature: Tensor | None,
    train_temperature: Tensor | None,
    vocab_start: int,
    vocab_size: int,
    outputs: int,
    want_rollout: bool,
    want_train: bool,
) -> tuple[Tensor, Tensor]:
    shape = rollout_logits.shape
    return (
        rollout_logits.new_empty(shape if want_rollout else (0,)),
        train_logits.new_empty(shape if want_train else (0,)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.vocab_size, ctx.outputs = inputs
    statistics = output[2]
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(statistics, *tensors)


def _backward(
    ctx: Any,
    grad_values: Tensor | None,
    grad_diagnostics: Tensor | None,
    grad_statistics: Tensor | None,
) -> tuple[Any, ...]:
    if grad_diagnostics is not None and count_diagnostics(ctx.outputs):
        raise RuntimeError(
            "tv, chi2, bhattacharyya, max_log_ratio and outside_mass are diagnostics without a "
            "gradient: detach them, or compute them in a call of their own under torch.no_grad()"
        )
    nothing = (None,) * 8
    if grad_values is None:
        return nothing
    statistics, rollout_logits, train_logits, *rows = ctx.saved_tensors
    want_rollout, want_train = ctx.needs_input_grad[:2]
    grad_rollout, grad_train = torch.ops.trm.token_divergence_backward(
        grad_values,
        rollout_logits,
        train_logits,
        statistics,
        *rows,
        0,
        ctx.vocab_size,
        ctx.outputs,
        want_rollout,
        want_train,
    )
    return (
        grad_rollout if want_rollout else None,
        grad_train if want_train else None,
        *nothing[2:],
    )


torch.library.register_fake("trm::token_divergence", _token_divergence_fake)
torch.library.register_fake("trm::token_divergence_backward", _token_divergence_backward_fake)
torch.library.register_autograd("trm::token_divergence", _backward, setup_context=_save)


def _no_second_derivative(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise RuntimeError(
        "trm::token_divergence has no second derivative: "
        "do not differentiate through its gradient (create_graph=True)"
    )


torch.library.register_autograd("trm::token_divergence_backward", _no_second_derivative)
