# SPDX-License-Identifier: Apache-2.0
"""Bounds on the surrogate's error: published (:mod:`paper`) and ours (:mod:`sharp`)."""

from theory.bounds import paper, sharp
from theory.bounds.catalogue import CATALOGUE, every_bound
from theory.bounds.inverse import inverse, vacuous_horizon
from theory.bounds.paper import halved, unified

__all__ = [
    "CATALOGUE",
    "every_bound",
    "halved",
    "inverse",
    "paper",
    "sharp",
    "unified",
    "vacuous_horizon",
]
