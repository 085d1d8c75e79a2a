# SPDX-License-Identifier: Apache-2.0
"""Token trees small enough to enumerate: two policies, every prompt, context and sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from theory import checks

__all__ = ["Tree", "random_tree"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tree:
    """Rollout and train policy on all contexts of length < T.

    P(x, y) = prompts[x] prod_t policy[t][c_t, y_t],  c_t = (x, y_1..y_{t-1})

    Context (x, y_1, .., y_{t-1}) is row ``((x V + y_1) V + y_2) ...`` of the array of depth t-1,
    so the children of row i are rows ``i V .. i V + V - 1`` one level down. Zero probabilities
    are allowed; a deterministic EOS is a token after which both policies repeat it for ever.
    Conditionals of contexts that nobody reaches must still be probabilities.

    Attributes:
        rollout: T arrays, shape (prompts * V^t, V) at depth t = 0..T-1.
        train: the same for the train policy.
        prompts: probabilities of the prompts, shape (prompts,).

    Raises:
        ValueError: when rows do not sum to 1, shapes do not fit, or there are too many sequences.

    Source: docs/theory.md#setting.

    Example:
        >>> tree = Tree(([[0.5, 0.5]],), ([[0.25, 0.75]],), [1.0])
        >>> tree.vocab, tree.length, tree.sequences
        (2, 1, 2)
    """

    rollout: tuple[Array, ...]
    train: tuple[Array, ...]
    prompts: Array

    def __post_init__(self) -> None:
        prompts = checks.probabilities("prompt", self.prompts)
        if len(self.rollout) != len(self.train) or not self.rollout:
            raise ValueError(
                f"Both policies need T >= 1 arrays, got {len(self.rollout)} and {len(self.train)}."
            )
        vocab = np.shape(self.rollout[0])[-1]
        checks.enumeration(vocab, len(self.rollout), prompts.size)
        for name in ("rollout", "train"):
            arrays = []
            for depth, values in enumerate(getattr(self, name)):
                rows = checks.probabilities(name, values)
                expected = (prompts.size * vocab**depth, vocab)
                if rows.shape != expected:
                    raise ValueError(
                        f"{name}[{depth}] must have shape {expected}, got {rows.shape}."
                    )
                arrays.append(rows)
            object.__setattr__(self, name, tuple(arrays))
        object.__setattr__(self, "prompts", prompts)

    @property
    def vocab(self) -> int:
        """Size V of the vocabulary."""
        return int(self.rollout[0].shape[1])

    @property
    def length(self) -> int:
        """Horizon T."""
        return len(self.rollout)

    @property
    def sequences(self) -> int:
        """Number of (prompt, sequence) pairs, prompts * V^T."""
        return int(self.prompts.size * self.vocab**self.length)

    def tokens(self) -> NDArray[np.int64]:
        """Token matrix of all sequences.

        Row i holds y_1..y_T of sequence i; shape (sequences, T), values 0..V-1. No assumption.
        Source: row order of :class:`Tree`.

        Example:
            >>> Tree(([[0.5, 0.5]],), ([[0.5, 0.5]],), [1.0]).tokens().tolist()
            [[0], [1]]
        """
        index = np.arange(self.sequences)
        columns = [index // self.vocab**k % self.vocab for k in range(self.length)]
        return np.stack(columns[::-1], axis=1)

    def contexts(self, depth: int) -> NDArray[np.int64]:
        """Row of the context at a depth that each sequence passes through.

        c_{depth+1} of sequence i is row ``i // V^(T-depth)``; shape (sequences,).
        Source: row order of :class:`Tree`.

        Example:
            >>> Tree(([[0.5, 0.5]],), ([[0.5, 0.5]],), [1.0]).contexts(0).tolist()
            [0, 0]
        """
        return np.asarray(np.arange(self.sequences) // self.vocab ** (self.length - depth))

    def sample(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw rollouts token by token: x ~ prompts, y_t ~ rollout(.|c_t).

        Assumes independent rollouts. Returns the rows of :meth:`tokens`, shape (n,), values
        0..sequences-1. Source: none needed.

        Raises:
            ValueError: on n < 1.

        Example:
            >>> tree = Tree(([[0.0, 1.0]],), ([[0.5, 0.5]],), [1.0])
            >>> tree.sample(3, np.random.default_rng(0)).tolist()
            [1, 1, 1]
        """
        count = int(checks.horizon(n))
        row = rng.choice(self.prompts.size, size=count, p=self.prompts)
        for policy in self.rollout:
            ladder = np.cumsum(policy, axis=1)[row]
            # Scaled to the last rung: a token of probability 0 is never drawn, whatever rounds.
            token = (rng.random(count)[:, None] * ladder[:, -1:] >= ladder).sum(1)
            row = row * self.vocab + token
        return np.asarray(row)

    def with_train(self, train: Sequence[Array]) -> Tree:
        """Return the same tree with another train policy.

        Assumes arrays of the same shapes. Source: none needed.

        Example:
            >>> tree = Tree(([[0.5, 0.5]],), ([[0.25, 0.75]],), [1.0])
            >>> tree.with_train(tree.rollout).train[0].tolist()
            [[0.5, 0.5]]
        """
        return replace(self, train=tuple(train))

    def frozen_train(self, keep: Callable[[int], NDArray[np.bool_]]) -> Tree:
        """Replace train by rollout on the contexts that a gate closes.

        train~(.|c) = train(.|c) if keep(depth)[c] else rollout(.|c)

        Assumes the gate looks at the context only. Source: ours, docs/theory.md#frozen-policy.

        Example:
            >>> tree = Tree(([[0.5, 0.5]],), ([[0.25, 0.75]],), [1.0])
            >>> tree.frozen_train(lambda depth: np.array([False])).train[0].tolist()
            [[0.5, 0.5]]
        """
        return self.with_train(
            [
                np.where(keep(depth)[:, None], q, p)
                for depth, (p, q) in enumerate(zip(self.rollout, self.train, strict=True))
            ]
        )


def random_tree(
    seed: int,
    vocab: int = 3,
    length: int = 4,
    *,
    prompts: int = 1,
    mismatch: float = 0.5,
    eos: bool = False,
    zero: float = 0.0,
    outside: float = 0.0,
    dropped: float = 0.0,
) -> Tree:
    """Draw a tree with Gaussian logits.

    rollout = softmax(a),  train = softmax(a + mismatch * b),  a, b standard normal per context

    Assumes nothing else; the same seed gives the same tree. KL of a context (``kl_rollout_train``)
    is about mismatch^2 / 2 nats.

    Args:
        seed: seed of the generator.
        vocab: V >= 2.
        length: T >= 1.
        prompts: number of prompts, with random probabilities when above 1.
        mismatch: standard deviation of the difference of logits.
        eos: when True, token 0 ends the sequence: both policies repeat it for ever.
        zero: chance that a token has probability 0 under both policies (one token always stays).
        outside: chance that a token has probability 0 under the rollout policy only, so that the
        train
            policy leaves the rollout's support.
        dropped: chance that a token has probability 0 under the train policy only, so that the
            KL is infinite.

    Returns:
        The tree.

    Raises:
        ValueError: when enumeration is too large.

    Range: probabilities in [0, 1].
    Source: docs/theory.md#families.

    Example:
        >>> random_tree(0, vocab=2, length=3).sequences
        8
    """
    checks.enumeration(vocab, length, prompts)
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(prompts)) if prompts > 1 else np.ones(1)
    rollout, train = [], []
    ended = np.zeros(prompts, dtype=bool)
    for _ in range(length):
        rows = ended.size
        base = rng.normal(size=(rows, vocab))
        other = base + mismatch * rng.normal(size=(rows, vocab))
        survivor = np.eye(vocab, dtype=bool)[rng.integers(vocab, size=rows)]
        absent = (rng.random((rows, vocab)) < zero) & ~survivor
        truncated = absent | ((rng.random((rows, vocab)) < outside) & ~survivor)
        unused = absent | ((rng.random((rows, vocab)) < dropped) & ~survivor)
        p, q = _softmax(base, truncated), _softmax(other, unused)
        if eos:
            p[ended] = q[ended] = np.eye(vocab)[0]
        rollout.append(p)
        train.append(q)
        ended = np.repeat(ended, vocab)
        if eos:
            ended |= np.tile(np.arange(vocab) == 0, rows)
    return Tree(tuple(rollout), tuple(train), weights)


def _softmax(logits: ArrayLike, absent: NDArray[np.bool_]) -> Array:
    masked = np.where(absent, -np.inf, logits)
    weights = np.exp(masked - masked.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
