# SPDX-License-Identifier: Apache-2.0
"""Rollout engines that can record their full logits, by name.

An engine answers one question: given prompt tokens, which tokens did you sample, and what were
the logits that each of them was sampled from? Engines are imported when they are asked for, so
that this module needs nothing beyond torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class EngineError(Exception):
    """An engine cannot be used; the message is one sentence for the user."""


class UnknownEngineError(EngineError, ValueError):
    """No engine has that name."""


class EngineNotInstalledError(EngineError, ImportError):
    """The engine exists but something that it needs is not installed."""


@dataclass(frozen=True)
class Rollout:
    """What one engine sampled for one prompt.

    Attributes:
        tokens: int64 ``[T]``, the sampled tokens, a final end-of-sequence token included.
        logits: float ``[T, V]``, raw logits: no temperature, no truncation. Row t is the
            distribution that produced ``tokens[t]``.
    """

    tokens: torch.Tensor
    logits: torch.Tensor


class Engine(Protocol):
    """The interface of every rollout engine."""

    name: str
    version: str
    precision: str

    def generate(self, prompt: list[int], *, max_new_tokens: int, temperature: float) -> Rollout:
        """Sample a continuation of ``prompt`` from the full vocabulary, without truncation.

        The seed belongs to the engine, not to the call (CTranslate2 seeds its worker threads
        once): a sequence of calls is reproducible as a whole, from a freshly loaded engine.
        """
        ...

    def logits(self, prompt: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """Score given tokens after a prompt in one pass (prefill): float32 ``[T, V]``, raw.

        Row t is the distribution of ``tokens[t]``. What this differs by from the logits that
        :meth:`generate` reports for the same tokens is the engine's own noise floor.
        """
        ...

    def close(self) -> None:
        """Free the model."""
        ...


# name -> (module, function that builds the engine, arguments, what must be importable)
_REGISTRY: dict[str, tuple[str, str, dict[str, str], tuple[str, ...]]] = {
    "ctranslate2-int8": ("ct2", "load", {"precision": "int8"}, ("ctranslate2",)),
    "ctranslate2-float32": ("ct2", "load", {"precision": "float32"}, ("ctranslate2",)),
    "torch-bf16": ("torch_lm", "load", {"precision": "bfloat16"}, ("transformers",)),
    "torch-float32": ("torch_lm", "load", {"precision": "float32"}, ("transformers",)),
    "llama-cpp": ("llamacpp", "load", {}, ("llama_cpp",)),
}
_HOW_TO_INSTALL = {
    "ctranslate2": 'pip install "trm-ext[demo]"',
    "transformers": 'pip install "trm-ext[demo]"',
    "gguf": 'pip install "trm-ext[demo]"',
    "llama_cpp": "see docs/engines.md for its two-minute build",
}


def names() -> tuple[str, ...]:
    """Return the names of all engines, installed or not.

    Example:
        >>> "torch-bf16" in names()
        True
    """
    return tuple(_REGISTRY)


def require(module: str) -> None:
    """Raise unless a module that an engine needs can be imported.

    Raises:
        EngineNotInstalledError: it cannot; the message says how to install it.
    """
    if importlib.util.find_spec(module) is None:
        raise EngineNotInstalledError(f"the package {module} is not installed; {_advice(module)}")


def check(name: str) -> None:
    """Raise unless the engine ``name`` exists and everything it needs is installed.

    Raises:
        UnknownEngineError: no engine has that name; the message lists the names.
        EngineNotInstalledError: a package or the weights are missing; the message says how to
            install them.

    Example:
        >>> check("vllm")
        Traceback (most recent call last):
        ...
        trm_ext.engines.UnknownEngineError: unknown engine 'vllm'; the engines are ...
    """
    if name not in _REGISTRY:
        raise UnknownEngineError(f"unknown engine {name!r}; the engines are {', '.join(_REGISTRY)}")
    for module in (*_REGISTRY[name][3], "transformers", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise EngineNotInstalledError(
                f"engine {name} needs the package {module}, which is not installed; "
                f"{_advice(module)}"
            )
    from trm_ext.engines import smollm2

    smollm2.gguf_path()


def load(name: str, *, seed: int = 0, announce: Callable[[str], None] | None = None) -> Engine:
    """Load an engine by name.

    Args:
        name: one of :func:`names`.
        seed: of the sampler, >= 0.
        announce: receives a sentence when a model has to be converted first.

    Raises:
        UnknownEngineError, EngineNotInstalledError: as :func:`check`.
    """
    check(name)
    module, function, arguments, _ = _REGISTRY[name]
    build = getattr(importlib.import_module(f"trm_ext.engines.{module}"), function)
    engine: Engine = build(**arguments, seed=seed, announce=announce or (lambda message: None))
    return engine


def _advice(module: str) -> str:
    """Say how to install a module, as the second half of a sentence."""
    how = _HOW_TO_INSTALL[module]
    return how if how.startswith("see") else f"run: {how}"
