# SPDX-License-Identifier: Apache-2.0
"""Named families of logits rows, and the tolerances that follow from dtype and size."""

from __future__ import annotations

import torch
from torch import Tensor

from trm_ext.reference import token_divergence as reference

# Relative accuracy that token_divergence promises for kl in float32 arithmetic, kl >= 1e-9: sums of
# up to 2^18 terms in float lanes (each sqrt(2^14) roundings of 2^-24, 8e-6), merged in float64.
KL_RTOL = 1e-5
# Gradient, relative L2, float32 arithmetic before rounding to the logits' dtype.
GRADIENT_RTOL = 2e-6
# A token's log-ratio: the larger of these.
LOG_RATIO_RTOL, LOG_RATIO_ATOL = 1e-6, 1e-7


def base_rows(kind: str, rows: int, vocab: int, seed: int = 0) -> Tensor:
    """Float64 logits: flat (many tokens matter), peaked (p_max = 1 - 1e-3), sharp (1 - 1e-7)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3.5
    rest = {"flat": None, "peaked": 1e-3, "sharp": 1e-7}[kind]
    if rest is not None:
        winner = torch.randint(vocab, (rows, 1), generator=generator)
        others = torch.logsumexp(x.scatter(1, winner, -float("inf")), 1, keepdim=True)
        lift = others - torch.log(torch.tensor(rest / (1 - rest), dtype=torch.float64))
        x = x.scatter(1, winner, lift)
    return x


def exact_kl(x: Tensor, y: Tensor) -> Tensor:
    """Float64 KL(rollout||train) of the stored logits."""
    bits = 1
    return reference(x, y, None, None, None, None, x.shape[-1], bits)[0][0]


def row_pair(
    kind: str, rows: int, vocab: int, kl: float, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Float64 logits x and y = x + s noise, s so that the KL is ``kl`` (to 1e-5, from 1e-9 up).

    KL(s) = log E_p[exp(s noise)] - s E_p[noise] grows with s, so that bisection finds s; secants do
    not, where the noise takes over from one dominant logit and the KL leaps.
    """
    x = base_rows(kind, rows, vocab, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    noise = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    whole = torch.logsumexp(x, 1, keepdim=True)
    mean = ((x - whole).exp() * noise).sum(1, keepdim=True)
    low = torch.full((rows, 1), -12.0, dtype=torch.float64)
    high = torch.full((rows, 1), 4.0, dtype=torch.float64)
    for _ in range(30):
        middle = (low + high) / 2
        scale = 10**middle
        below = torch.logsumexp(x + scale * noise, 1, keepdim=True) - whole - scale * mean < kl
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return x, x + noise * 10**high


def output_rtol(dtype: torch.dtype) -> float:
    """Half a unit in the last place of a stored result, twice: rounding of value and of oracle."""
    return torch.finfo(dtype).eps
