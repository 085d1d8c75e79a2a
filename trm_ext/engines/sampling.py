# SPDX-License-Identifier: Apache-2.0
"""A seeded sampler over raw logits, for the engines that do not sample themselves."""

from __future__ import annotations

import torch


class Sampler:
    """Draws tokens from softmax(logits / temperature), in float64, without truncation.

    Args:
        seed: the same seed and the same logits give the same tokens.

    Example:
        >>> import torch
        >>> Sampler(seed=0).draw(torch.tensor([-torch.inf, 0.0, -torch.inf]), temperature=1.0)
        1
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, logits: torch.Tensor, temperature: float) -> int:
        """Return one token id, given raw logits ``[V]`` and a temperature > 0."""
        law = torch.softmax(logits.double() / temperature, dim=-1)
        return int(torch.multinomial(law, 1, generator=self._generator))
