# SPDX-License-Identifier: Apache-2.0
"""Input checks shared by the package: each failure is one sentence with the offending value."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["divergence", "enumeration", "horizon", "pinsker", "probabilities", "rewards", "scalar"]

#: Rows of probabilities may miss 1 by this much (float64 rounding of a few thousand terms).
ROW_SUM_TOLERANCE = 1e-9
#: Largest number of sequences that full enumeration accepts.
MAX_SEQUENCES = 2**22


def horizon(value: ArrayLike) -> NDArray[np.int64]:
    """Return the horizon as integers >= 1, or say which value is not one.

    Raises ValueError with the offending value. Units and range of the input are kept. Source:
    none needed.

    Example:
        >>> horizon(0)
        Traceback (most recent call last):
        ValueError: The horizon T must be a whole number >= 1, got 0.
    """
    raw = np.asarray(value)
    as_float = np.asarray(raw, dtype=np.float64)
    wrong = ~((as_float >= 1) & (as_float == np.floor(as_float)) & np.isfinite(as_float))
    if np.any(wrong):
        offender = np.ravel(raw)[int(np.argmax(np.ravel(wrong)))]
        raise ValueError(f"The horizon T must be a whole number >= 1, got {offender}.")
    return as_float.astype(np.int64)


def divergence(name: str, value: ArrayLike, *, at_most: float = np.inf) -> NDArray[np.float64]:
    """Return a divergence as float64, refusing negative numbers, NaN and values above ``at_most``.

    Raises ValueError with the offending value. Units and range of the input are kept. Source:
    none needed.

    Example:
        >>> divergence("max_kl", -0.1)
        Traceback (most recent call last):
        ValueError: The divergence max_kl must be a number >= 0, got -0.1.
    """
    array = np.asarray(value, dtype=np.float64)
    wrong = ~(array >= 0)
    if np.any(wrong):
        raise ValueError(
            f"The divergence {name} must be a number >= 0, got {array[wrong].flat[0]}."
        )
    if np.any(array > at_most):
        offender = array[array > at_most].flat[0]
        raise ValueError(f"The divergence {name} is at most {at_most:g}, got {offender}.")
    return array


def pinsker(max_kl: ArrayLike, max_tv: ArrayLike) -> None:
    """Refuse a total variation that exceeds what Pinsker's inequality allows for the KL.

    Assumes both are maxima over the same contexts: eps <= sqrt(delta / 2), checked to one part in
    10^9 so that ``max_tv = sqrt(max_kl / 2)`` passes.

    Raises ValueError with the offending value. Units and range of the input are kept. Source:
    none needed.

    Example:
        >>> pinsker(1e-4, 0.5)
        Traceback (most recent call last):
        ValueError: Pinsker's inequality fails: max_tv = 0.5 exceeds sqrt(max_kl/2) = 0.00707107 \
for max_kl = 0.0001.
    """
    kl, tv = np.broadcast_arrays(np.asarray(max_kl, float), np.asarray(max_tv, float))
    limit = np.sqrt(kl / 2)
    wrong = tv > limit * (1 + 1e-9)
    if np.any(wrong):
        i = int(np.argmax(np.ravel(wrong)))
        raise ValueError(
            f"Pinsker's inequality fails: max_tv = {np.ravel(tv)[i]:g} exceeds sqrt(max_kl/2) = "
            f"{np.ravel(limit)[i]:g} for max_kl = {np.ravel(kl)[i]:g}."
        )


def probabilities(name: str, value: ArrayLike) -> NDArray[np.float64]:
    """Return rows of probabilities (last axis), or print the sum that is not 1.

    Raises ValueError with the offending value. Units and range of the input are kept. Source:
    none needed.

    Example:
        >>> probabilities("rollout", [0.5, 0.4])
        Traceback (most recent call last):
        ValueError: The rollout probabilities must sum to 1, but a row sums to 0.9.
    """
    array = np.asarray(value, dtype=np.float64)
    if not np.all(array >= 0):
        offender = array[~(array >= 0)].flat[0]
        raise ValueError(f"The {name} probabilities must be numbers >= 0, got {offender}.")
    sums = array.sum(axis=-1)
    wrong = np.abs(sums - 1) > ROW_SUM_TOLERANCE
    if np.any(wrong):
        offender = np.ravel(sums)[int(np.argmax(np.ravel(wrong)))]
        raise ValueError(
            f"The {name} probabilities must sum to 1, but a row sums to {offender:.12g}."
        )
    return array


def rewards(value: ArrayLike, low: float = 0.0, high: float = 1.0) -> NDArray[np.float64]:
    """Return rewards as float64, refusing those outside the stated range.

    Raises ValueError with the offending value. Units and range of the input are kept. Source:
    none needed.

    Example:
        >>> rewards([0.0, 1.5])
        Traceback (most recent call last):
        ValueError: Every reward must lie in the stated range [0, 1], got 1.5.
    """
    array = np.asarray(value, dtype=np.float64)
    wrong = ~((array >= low) & (array <= high))
    if np.any(wrong):
        offender = array[wrong].flat[0]
        raise ValueError(
            f"Every reward must lie in the stated range [{low:g}, {high:g}], got {offender:g}."
        )
    return array


def enumeration(vocab: int, length: int, prompts: int = 1, limit: int = MAX_SEQUENCES) -> int:
    """Return the number of sequences ``prompts * V^T``, refusing more than ``limit``.

    Raises ValueError with the offending value. Units and range of the input are kept. Source:
    none needed.

    Example:
        >>> enumeration(10, 12)
        Traceback (most recent call last):
        ValueError: Enumeration needs V^T = 10^12 = 1e+12 sequences times 1 prompt(s), more than \
the limit 4194304.
    """
    count = int(prompts * vocab**length)
    if count > limit:
        raise ValueError(
            f"Enumeration needs V^T = {vocab}^{length} = {float(vocab) ** length:g} sequences "
            f"times {prompts} prompt(s), more than the limit {limit}."
        )
    return count


def scalar(name: str, value: float, low: float, high: float) -> float:
    """Return a number in [low, high], or say which value lies outside.

    Raises ValueError with the offending value. Units and range of the input are kept. Source:
    none needed.

    Example:
        >>> scalar("gamma", 1.5, 0, 1)
        Traceback (most recent call last):
        ValueError: gamma must lie in [0, 1], got 1.5.
    """
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {value:g}.")
    return float(value)
