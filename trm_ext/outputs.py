# SPDX-License-Identifier: Apache-2.0
"""Names and order of what one divergence sweep can return; mirrors trm::Output in csrc."""

from __future__ import annotations

from collections.abc import Sequence

VALUES: tuple[str, ...] = (
    "kl",
    "kl_train_rollout",
    "entropy_rollout",
    "entropy_train",
    "logp_rollout",
    "logp_train",
    "log_ratio",
)
# These need a second sweep over the finished row and have no gradient.
DIAGNOSTICS: tuple[str, ...] = ("tv", "chi2", "bhattacharyya", "max_log_ratio", "outside_mass")
OUTPUTS = VALUES + DIAGNOSTICS
VALUE_BITS = (1 << len(VALUES)) - 1
TOKEN_OUTPUTS = frozenset({"logp_rollout", "logp_train", "log_ratio"})


def encode(names: Sequence[str]) -> int:
    """Bit set of the named outputs, as the ops take it.

    Raises:
        ValueError: no name, or a name that is not an output.

    >>> encode(["kl", "log_ratio"])
    65
    """
    if isinstance(names, str):
        names = (names,)
    unknown = [name for name in names if name not in OUTPUTS]
    if unknown or not names:
        what = f"unknown output {unknown[0]!r}" if unknown else "outputs is empty"
        raise ValueError(f"{what}; choose from {', '.join(OUTPUTS)}")
    return sum(1 << OUTPUTS.index(name) for name in set(names))


def decode(bits: int) -> tuple[str, ...]:
    """Names of a bit set, in the order in which the ops return them.

    >>> decode(65)
    ('kl', 'log_ratio')
    """
    return tuple(name for index, name in enumerate(OUTPUTS) if bits >> index & 1)


def count_values(bits: int) -> int:
    """Number of differentiable outputs in a bit set.

    >>> count_values(encode(["kl", "tv"]))
    1
    """
    return (bits & VALUE_BITS).bit_count()


def count_diagnostics(bits: int) -> int:
    """Number of diagnostics in a bit set.

    >>> count_diagnostics(encode(["kl", "tv"]))
    1
    """
    return (bits & ~VALUE_BITS).bit_count()
