# SPDX-License-Identifier: Apache-2.0
"""CTranslate2 on the CPU, in float32 or int8: an independent engine that installs as a wheel."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch

from trm_ext.engines import Rollout, smollm2


class CTranslate2Engine:
    """SmolLM2 in CTranslate2; sampling is done by the engine's own sampler."""

    def __init__(self, precision: str, seed: int, announce: Callable[[str], None]) -> None:
        import ctranslate2

        folder = smollm2.ctranslate2_folder(precision, announce)
        self.name = "ctranslate2"
        self.version = str(ctranslate2.__version__)
        self.precision = precision
        ctranslate2.set_random_seed(seed)  # read once, by the worker thread created below
        self._tokenizer = smollm2.load_tokenizer()
        self._generator = ctranslate2.Generator(
            str(folder),
            device="cpu",
            compute_type=precision,
            inter_threads=1,
            intra_threads=os.cpu_count() or 1,
        )

    def generate(self, prompt: list[int], *, max_new_tokens: int, temperature: float) -> Rollout:
        """Sample a continuation; see :class:`trm_ext.engines.Engine`."""
        result = self._generator.generate_batch(
            [self._tokenizer.convert_ids_to_tokens(prompt)],
            max_length=max_new_tokens,
            include_prompt_in_result=False,
            return_end_token=True,
            return_logits_vocab=True,
            sampling_topk=0,
            sampling_temperature=temperature,
        )[0]
        tokens = torch.tensor(result.sequences_ids[0], dtype=torch.int64)
        rows = [np.array(row, dtype=np.float32) for row in result.logits[0]]
        logits = torch.from_numpy(np.stack(rows).reshape(len(rows), -1))
        return Rollout(tokens=tokens, logits=logits)

    def logits(self, prompt: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """Score given tokens in one pass; see :class:`trm_ext.engines.Engine`."""
        context = [*prompt, *tokens.tolist()[:-1]]
        found = self._generator.forward_batch([context], return_log_probs=False)
        rows = torch.from_numpy(np.array(found, dtype=np.float32)[0])
        return rows[len(prompt) - 1 :].clone()

    def close(self) -> None:
        """Free the model."""
        self._generator.unload_model()


def load(precision: str, seed: int, announce: Callable[[str], None]) -> CTranslate2Engine:
    """Load the engine in ``"float32"`` or ``"int8"``."""
    return CTranslate2Engine(precision, seed, announce)
