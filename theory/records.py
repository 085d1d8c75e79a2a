# SPDX-License-Identifier: Apache-2.0
"""The record that every bound returns: a number that carries its own conditions.

A bound without the list of quantities it needs, and without saying whether each of them is a
maximum over all contexts, a rollout average or a moment, is a number that nobody can use. So no
function of this package returns one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bound", "Need", "Number", "AVERAGE", "LAW", "MAXIMUM", "MOMENT"]

Number: TypeAlias = "float | NDArray[np.float64]"


class Need(str, Enum):
    """How a quantity must be known for the bound to hold."""

    MAXIMUM = "maximum over all contexts"
    AVERAGE = "rollout average"
    MOMENT = "rollout moment"
    LAW = "whole law"

    def __str__(self) -> str:
        return self.value


MAXIMUM, AVERAGE, MOMENT, LAW = Need.MAXIMUM, Need.AVERAGE, Need.MOMENT, Need.LAW


@dataclass(frozen=True)
class Bound:
    """An upper bound on ``|Error|``, with what it needs and where it comes from.

    ``Error = J(train) - J(rollout) - L'`` with ``L' = E_rollout[(R - a) sum_t (rho_t - 1)]`` and a
    reward in [a, b]; the value is for [a, b] = [0, 1] unless :meth:`for_reward_range` was called.

    Attributes:
        name: a stable, machine-readable name.
        value: the bound, in units of reward; an array when the inputs were arrays.
        needs: pairs (quantity, how it must be known).
        assumes_support: True when the statement needs the train policy to put no mass outside the
            rollout policy's support; :meth:`with_outside_mass` repairs it otherwise.
        rigorous: True when the value is implied by a theorem for the inputs that were given.
        source: the theorem it rests on, or "ours" with the anchor of the proof in docs/theory.md.

    Example:
        >>> b = Bound("demo", 0.25, (("seq_kl", AVERAGE),), False, True, "a theorem")
        >>> b.for_reward_range(0.0, 2.0).value
        0.5
        >>> b.to_dict()["needs"]
        {'seq_kl': 'rollout average'}
    """

    name: str
    value: Number
    needs: tuple[tuple[str, Need], ...]
    assumes_support: bool
    rigorous: bool
    source: str

    def for_reward_range(self, low: float, high: float) -> Bound:
        """Scale from a reward in [0, 1] to a reward in [low, high].

        |Error| <= (high - low) * bound, with L' formed from R - low.

        Assumes the surrogate uses ``R - low``; without outside mass the shift changes nothing.
        Units of reward. Source: ours, docs/theory.md#range.

        Raises:
            ValueError: when the range is empty or not finite.

        Example:
            >>> Bound("demo", 2.0, (), False, True, "").for_reward_range(-1.0, 1.0).value
            4.0
        """
        if not (np.isfinite(low) and np.isfinite(high) and low < high):
            raise ValueError(f"The reward range must satisfy low < high, got [{low}, {high}].")
        return replace(self, value=self.value * (high - low))

    def with_outside_mass(self, outside_mass: float) -> Bound:
        """Make the bound hold when the train policy leaves the rollout's support.

        |Error| <= bound + S_out,  S_out = E_rollout sum_t s(c_t),  s(c) = train mass outside
        support.

        SeqKL needs no such term and is returned unchanged. The maxima inside the bound run over
        the contexts that the rollout policy reaches. Reward in [0, 1].
        Source: ours, docs/theory.md#outside-mass.

        Raises:
            ValueError: when the mass is negative or NaN.

        Example:
            >>> Bound("demo", 0.5, (), True, True, "").with_outside_mass(0.25).value
            0.75
        """
        if not outside_mass >= 0:
            raise ValueError(f"The outside mass must be a number >= 0, got {outside_mass}.")
        if not self.assumes_support or outside_mass == 0:
            return self
        needs = (*self.needs, ("outside_mass", AVERAGE))
        return replace(self, value=self.value + outside_mass, needs=needs, assumes_support=False)

    def to_dict(self) -> dict[str, object]:
        """Plain, JSON-ready form with stable keys.

        Keys: name, value, rigorous, needs, source, assumes_support. An infinite value becomes the
        string "inf", because JSON has no infinity.

        Example:
            >>> Bound("demo", float("inf"), (), True, True, "").to_dict()["value"]
            'inf'
        """
        value: object
        if np.ndim(self.value) == 0:
            value = _plain(float(self.value))
        else:
            value = [_plain(float(v)) for v in np.ravel(self.value)]
        return {
            "name": self.name,
            "value": value,
            "rigorous": self.rigorous,
            "needs": {quantity: str(how) for quantity, how in self.needs},
            "source": self.source,
            "assumes_support": self.assumes_support,
        }


def _plain(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)
