# SPDX-License-Identifier: Apache-2.0
"""Models of rollout/train mismatch: flipped expert routing, and amplification of rare tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from theory import checks
from theory.mdp.tree import Tree

__all__ = ["rare_token_amplification", "routing_flip"]

Array = NDArray[np.float64]


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def routing_flip(
    seed: int,
    vocab: int = 4,
    length: int = 5,
    *,
    flip_rate: float = 0.05,
    flip_scale: float = 2.0,
) -> Tree:
    """Mixture-of-experts mismatch: rare contexts use another expert's logits, all others are exact.

    train(.|c) = softmax(a_c + flip_scale * b_c) on flipped contexts, = rollout(.|c) elsewhere

    Assumes contexts flip independently with probability ``flip_rate`` (at least one flips), a, b
    standard normal. The average KL is small while the maximum is not: the case where a maximum
    over contexts says nothing about the error. KL: ``kl_rollout_train`` about flip_scale^2 / 2
    nats when flipped.

    Args:
        seed: seed of the generator.
        vocab: V >= 2.
        length: T >= 1.
        flip_rate: probability of a flip, in [0, 1].
        flip_scale: standard deviation of the logit difference in a flipped context.

    Returns:
        The tree.

    Raises:
        ValueError: on a rate outside [0, 1] or too many sequences.

    Source: docs/theory.md#families; the mismatch described in the TRM paper's appendix.

    Example:
        >>> from theory.exact import summary
        >>> found = summary(routing_flip(0))
        >>> found.seq_kl < 0.5 * found.horizon * found.max_kl
        True
    """
    checks.enumeration(vocab, length)
    checks.scalar("flip_rate", flip_rate, 0, 1)
    rng = np.random.default_rng(seed)
    base = [rng.normal(size=(vocab**t, vocab)) for t in range(length)]
    other = [a + flip_scale * rng.normal(size=a.shape) for a in base]
    flips = [rng.random(vocab**t) < flip_rate for t in range(length)]
    if not any(f.any() for f in flips):
        flips[-1][0] = True
    rollout = [_softmax(a) for a in base]
    train = [
        np.where(f[:, None], _softmax(b), p) for f, b, p in zip(flips, other, rollout, strict=True)
    ]
    return Tree(tuple(rollout), tuple(train), np.ones(1))


def rare_token_amplification(
    seed: int,
    vocab: int = 4,
    length: int = 5,
    *,
    strength: float = 0.02,
    exponent: float = 0.5,
    spread: float = 2.0,
) -> Tree:
    """Mismatch that grows as a token's probability falls.

    log train(v|c) = log p_v + strength * xi_v * (p_v / max p)^{-exponent} - normaliser

    Assumes xi standard normal, p = softmax of normal logits with standard deviation ``spread``,
    and the amplified standard deviation capped at 1. The same logit noise moves rare tokens'
    log-probability by more; those tokens carry large sampled ratios and little KL. KL in nats.

    Args:
        seed: seed of the generator.
        vocab: V >= 2.
        length: T >= 1.
        strength: noise on the likeliest token, >= 0.
        exponent: 0 is plain logit noise; 0.5 makes every token add about the same KL.
        spread: standard deviation of the rollout's logits.

    Returns:
        The tree.

    Raises:
        ValueError: on a negative strength or exponent, or too many sequences.

    Range: probabilities in (0, 1).
    Source: docs/theory.md#families.

    Example:
        >>> rare_token_amplification(0).length
        5
    """
    checks.enumeration(vocab, length)
    checks.divergence("strength", strength)
    checks.divergence("exponent", exponent)
    rng = np.random.default_rng(seed)
    rollout, train = [], []
    for t in range(length):
        p = _softmax(spread * rng.normal(size=(vocab**t, vocab)))
        scale = np.minimum(strength * (p / p.max(axis=1, keepdims=True)) ** -exponent, 1.0)
        rollout.append(p)
        train.append(_softmax(np.log(p) + scale * rng.normal(size=p.shape)))
    return Tree(tuple(rollout), tuple(train), np.ones(1))
