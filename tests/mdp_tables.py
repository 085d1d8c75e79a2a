# SPDX-License-Identifier: Apache-2.0
"""Policies of enumerated MDPs as tables of logits, and rollouts as the batches that trm takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theory.divergences import RowDivergences
from theory.mdp.tree import Tree
from trm_ext import SequenceLayout, token_divergence
from trm_ext.outputs import DIAGNOSTICS

ALL = ("kl", "kl_train_rollout", *DIAGNOSTICS)


def log_table(policy: NDArray[np.float64], dtype: torch.dtype, seed: int) -> Tensor:
    """Logits of the rows of a policy: log-probabilities and one arbitrary constant per row."""
    with np.errstate(divide="ignore"):
        rows = np.log(policy) + np.random.default_rng(seed).normal(0, 5, (*policy.shape[:-1], 1))
    return torch.from_numpy(rows).to(dtype)


def softmax(table: Tensor) -> NDArray[np.float64]:
    """The policy of stored logits, in float64."""
    found: NDArray[np.float64] = torch.softmax(table.double(), -1).numpy()
    return found / found.sum(-1, keepdims=True)


class Batch(NamedTuple):
    """Rollouts ``[N, T]``; tokens after an EOS do not count."""

    rollout_logits: Tensor
    train_logits: Tensor
    tokens: Tensor
    layout: SequenceLayout


class Tables(NamedTuple):
    """Logits per depth, ``[contexts, V]``, and the tree whose policies they are exactly."""

    rollout: list[Tensor]
    train: list[Tensor]
    tree: Tree

    def batch(self, rows: NDArray[np.int64], eos: bool = False) -> Batch:
        """The sequences of these rows of ``tree.tokens()`` as a padded batch."""
        tree = self.tree
        tokens = tree.tokens()[rows]
        contexts = [torch.from_numpy(tree.contexts(t)[rows]) for t in range(tree.length)]
        ended = np.cumsum(tokens == 0, axis=1) - (tokens == 0) > 0
        mask = torch.from_numpy(~ended) if eos else torch.ones(tokens.shape, dtype=torch.bool)
        return Batch(
            *(
                torch.stack([side[t][contexts[t]] for t in range(tree.length)], 1)
                for side in (self.rollout, self.train)
            ),
            torch.from_numpy(tokens),
            SequenceLayout.from_mask(mask),
        )


def tables_of(tree: Tree, dtype: torch.dtype = torch.float64) -> Tables:
    """Stores a tree's policies in a dtype; the result's tree has the policies that were stored."""
    rollout = [log_table(p, dtype, 2 * t) for t, p in enumerate(tree.rollout)]
    train = [log_table(q, dtype, 2 * t + 1) for t, q in enumerate(tree.train)]
    stored = Tree(
        tuple(softmax(table) for table in rollout),
        tuple(softmax(table) for table in train),
        tree.prompts,
    )
    return Tables(rollout, train, stored)


def kernel_divergences(rollout: Tensor, train: Tensor) -> RowDivergences:
    """``token_divergence`` of rows of logits, in the conventions of ``theory.divergences``.

    There chi-square and the largest ratio are infinite where train leaves the rollout's support;
    the kernel takes them on the support and reports the outside mass beside them.
    """
    found = token_divergence(rollout, train, outputs=ALL)
    value = {name: getattr(found, name).double().numpy() for name in ALL}
    outside = value["outside_mass"] > 0
    return RowDivergences(
        tv=value["tv"],
        kl_rollout_train=value["kl"],
        kl_train_rollout=value["kl_train_rollout"],
        chi2=np.where(outside, np.inf, value["chi2"]),
        bc=1 - value["bhattacharyya"],
        squared_hellinger=value["bhattacharyya"],
        max_log_ratio=np.where(outside, np.inf, np.maximum(value["max_log_ratio"], 0.0)),
        outside=value["outside_mass"],
    )


def kernel_row_divergences(rollout: NDArray[np.float64], train: NDArray[np.float64]):
    """A drop-in for ``theory.divergences.row_divergences`` that asks the kernel, in float64."""
    tables = (
        log_table(np.asarray(p), torch.float64, seed) for seed, p in ((0, rollout), (1, train))
    )
    return kernel_divergences(*tables)
