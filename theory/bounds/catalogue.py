# SPDX-License-Identifier: Apache-2.0
"""Every bound by name, with the quantities it takes; the command line iterates over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from theory.bounds import paper, sharp
from theory.records import Bound

__all__ = ["CATALOGUE", "Entry", "every_bound"]


@dataclass(frozen=True)
class Entry:
    """A bound as a function of the horizon and of named quantities.

    Attributes:
        compute: called as ``compute(horizon, **quantities)``.
        required: names that must be given.
        optional: names that are used when given.
        any_of: at least one of these must be given (empty: no such condition).

    Example:
        >>> CATALOGUE["seq_kl"].required
        ('seq_kl',)
    """

    compute: Callable[..., Bound]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()

    def select(self, known: dict[str, Any]) -> dict[str, Any] | None:
        """Pick this bound's quantities, or None when one is missing.

        Example:
            >>> CATALOGUE["seq_kl"].select({"max_kl": 0.1}) is None
            True
        """
        if any(name not in known for name in self.required):
            return None
        if self.any_of and not any(name in known for name in self.any_of):
            return None
        names = (*self.required, *self.optional)
        return {name: known[name] for name in names if name in known}


_MAXIMA = ("max_tv", "max_kl", "max_kl_train_rollout", "min_bc", "max_chi2")


def _halved(compute: Callable[..., Bound]) -> Callable[..., Bound]:
    return lambda horizon, **known: paper.halved(compute(horizon, **known))


_PAPER = {
    "classical_tv": Entry(paper.classical_tv, ("max_tv",)),
    "classical_kl": Entry(paper.classical_kl, ("max_kl",)),
    "coupling": Entry(paper.coupling, ("max_tv",)),
    "pinsker_marginal_kl": Entry(paper.pinsker_marginal_kl, ("max_kl",)),
    "pinsker_marginal_tv": Entry(paper.pinsker_marginal_tv, ("max_kl", "max_tv")),
    "mixed_kl": Entry(paper.mixed_kl, ("max_kl", "seq_kl")),
    "mixed_tv": Entry(paper.mixed_tv, ("max_tv", "seq_tv")),
    "adaptive": Entry(
        lambda horizon, **k: paper.adaptive(**k),
        ("mean_tv",),
        ("max_kl", "max_tv"),
        ("max_kl", "max_tv"),
    ),
    "adaptive_worst_case": Entry(paper.adaptive_worst_case, ("max_kl",)),
    "adaptive_linear": Entry(lambda horizon, **k: paper.adaptive_linear(**k), ("mean_tv",)),
}

#: All bounds for a terminal reward, in the order in which tables print them.
CATALOGUE: dict[str, Entry] = {
    **_PAPER,
    "trpo_linear_as_printed": Entry(paper.trpo_linear_as_printed, ("max_tv",)),
    **{
        f"half_{name}": replace(entry, compute=_halved(entry.compute))
        for name, entry in _PAPER.items()
    },
    "forward": Entry(sharp.forward, (), (*_MAXIMA, "seq_kl", "seq_tv"), _MAXIMA),
    "forward_moment": Entry(lambda horizon, **k: sharp.forward_moment(**k), ("moment",)),
    "backward": Entry(lambda horizon, **k: sharp.backward(**k), ("mean_tv",), _MAXIMA, _MAXIMA),
    "dyadic": Entry(sharp.dyadic, (), _MAXIMA, _MAXIMA),
    "dyadic_capped": Entry(
        lambda horizon, **k: sharp.dyadic(horizon, capped=True, **k), (), _MAXIMA, _MAXIMA
    ),
    "chi2": Entry(sharp.chi2, ("max_chi2",)),
    "chi2_from_ratio": Entry(sharp.chi2_from_ratio, ("max_kl", "max_log_ratio")),
    "chi2_moment": Entry(lambda horizon, **k: sharp.chi2_moment(**k), ("second_moment",)),
    "split": Entry(
        lambda horizon, **k: sharp.split(**k),
        (),
        ("seq_kl", "seq_tv", "mean_tv", "seq_chi2"),
        ("mean_tv", "seq_chi2"),
    ),
    "split_seq_kl": Entry(sharp.split_seq_kl, ("seq_kl",)),
    "seq_kl_from_max": Entry(sharp.seq_kl_from_max, ("max_kl",)),
    "seq_kl": Entry(lambda horizon, **k: sharp.seq_kl(**k), ("seq_kl",)),
}


def every_bound(horizon: ArrayLike, **known: Any) -> list[Bound]:
    """Evaluate every bound whose quantities are known.

        {B_i(T, known)} for reward in [0, 1]

    Assumes the quantities belong to one pair of policies. When ``max_tv`` is missing, eps is taken
    from Pinsker, min(1, sqrt(max_kl/2)), and the records say that they need ``max_kl``. Directions
    and units as in :mod:`theory.bounds.paper` and :mod:`theory.bounds.sharp`
    (KL: ``kl_rollout_train``, nats). Range of each value [0, inf].

    Args:
        horizon: T, whole number(s) >= 1.
        **known: any of max_kl, max_tv, max_kl_train_rollout, min_bc, max_chi2, max_log_ratio,
            seq_kl, seq_tv, seq_chi2, mean_tv, moment, second_moment; None means unknown.

    Returns:
        Records in the order of the catalogue.

    Raises:
        ValueError: on bad or inconsistent values, or an unknown name.

    Source: each record names its theorem; docs/theory.md.

    Example:
        >>> [b.name for b in every_bound(10, seq_kl=0.01)]
        ['split_seq_kl', 'seq_kl']
    """
    given = {name: value for name, value in known.items() if value is not None}
    names = {n for entry in CATALOGUE.values() for n in (*entry.required, *entry.optional)}
    unknown = sorted(set(given) - names)
    if unknown:
        raise ValueError(f"Unknown quantity {unknown[0]!r}; known ones are {sorted(names)}.")
    derived = "max_tv" not in given and "max_kl" in given
    if derived:
        kl = np.asarray(given["max_kl"], dtype=np.float64)
        given["max_tv"] = np.minimum(1.0, np.sqrt(np.maximum(kl, 0) / 2))
    records = []
    for entry in CATALOGUE.values():
        chosen = entry.select(given)
        if chosen is None:
            continue
        record = entry.compute(horizon, **chosen)
        if derived and any(quantity == "max_tv" for quantity, _ in record.needs):
            needs = dict.fromkeys(
                ("max_kl", how) if quantity == "max_tv" else (quantity, how)
                for quantity, how in record.needs
            )
            record = replace(record, needs=tuple(needs), source=f"{record.source} (eps by Pinsker)")
        records.append(record)
    return records
