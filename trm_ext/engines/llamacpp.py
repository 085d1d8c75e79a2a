# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the GGUF file as it ships (Q4_1), through ``llama-cpp-python``. Optional."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch

from trm_ext.engines import EngineError, Rollout, smollm2
from trm_ext.engines.sampling import Sampler


class LlamaCppEngine:
    """SmolLM2 in llama.cpp; every decode step copies its full logits out."""

    def __init__(self, seed: int) -> None:
        import llama_cpp

        threads = os.cpu_count() or 1
        self.name = "llama.cpp"
        self.version = str(llama_cpp.__version__)
        self.precision = "q4_1"
        self._sampler = Sampler(seed)
        self._module = llama_cpp
        self._llama = llama_cpp.Llama(
            model_path=str(smollm2.gguf_path()),
            n_ctx=4096,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=False,
            verbose=False,
        )

    def generate(self, prompt: list[int], *, max_new_tokens: int, temperature: float) -> Rollout:
        """Sample a continuation; see :class:`trm_ext.engines.Engine`."""
        end = self._llama.token_eos()
        self._llama.reset()
        step, tokens, rows = list(prompt), [], []
        for _ in range(max_new_tokens):
            self._llama.eval(step)
            pointer = self._module.llama_get_logits_ith(self._llama.ctx, -1)
            row = np.ctypeslib.as_array(pointer, shape=(self._llama.n_vocab(),)).copy()
            rows.append(torch.from_numpy(row))
            token = self._sampler.draw(rows[-1], temperature)
            tokens.append(token)
            if token == end:
                break
            step = [token]
        return Rollout(tokens=torch.tensor(tokens, dtype=torch.int64), logits=torch.stack(rows))

    def logits(self, prompt: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """Refuse: the context is built to hand out the last position's logits only."""
        raise EngineError("llama-cpp records decode logits only, so it has no noise-floor pair")

    def close(self) -> None:
        """Free the model now: at interpreter exit it is too late for llama.cpp."""
        self._llama.close()


def load(seed: int, announce: Callable[[str], None]) -> LlamaCppEngine:
    """Load the engine; nothing has to be converted, so ``announce`` is not used."""
    del announce
    return LlamaCppEngine(seed)
