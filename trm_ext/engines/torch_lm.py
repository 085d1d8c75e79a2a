# SPDX-License-Identifier: Apache-2.0
"""The model in torch: the training policy (float32), and a rollout engine (bfloat16)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trm_ext.engines import Rollout, require, smollm2
from trm_ext.engines.sampling import Sampler


class TorchPolicy:
    """SmolLM2 as a ``transformers`` model on the CPU.

    The training side of every recording is this class in float32. In bfloat16 it is also the
    rollout engine that needs no second library.
    """

    def __init__(self, precision: str, seed: int, announce: Callable[[str], None]) -> None:
        require("transformers")
        smollm2.offline()
        import transformers

        folder = smollm2.huggingface_folder(announce)
        self.name = "torch"
        self.version = str(torch.__version__)
        self.precision = precision
        with smollm2.quiet():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=getattr(torch, precision)
            )
        self._model = model.eval()
        self._sampler = Sampler(seed)
        self._end = int(model.config.eos_token_id)

    @torch.inference_mode()
    def logits(self, prompt: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of given tokens after a prompt, in one forward pass.

        Args:
            prompt: P token ids, P >= 1.
            tokens: int64 ``[T]``, T >= 1.

        Returns:
            float32 ``[T, V]``; row t is the distribution of ``tokens[t]`` given the prompt and
            ``tokens[:t]``, that is, the model's output at position P - 1 + t.
        """
        context = torch.tensor(prompt, dtype=torch.int64)
        context = torch.cat([context, tokens[:-1]])[None]
        out = self._model(input_ids=context, logits_to_keep=len(tokens), use_cache=False)
        rows: torch.Tensor = out.logits[0].float()
        return rows

    @torch.inference_mode()
    def generate(self, prompt: list[int], *, max_new_tokens: int, temperature: float) -> Rollout:
        """Sample a continuation with a key-value cache; see :class:`trm_ext.engines.Engine`."""
        step = torch.tensor([prompt], dtype=torch.int64)
        cache, tokens, rows = None, [], []
        for _ in range(max_new_tokens):
            out = self._model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1)
            cache = out.cache
            row = out.logits[0, -1].float()
            token = self._sampler.draw(row, temperature)
            tokens.append(token)
            rows.append(row)
            if token == self._end:
                break
            step = torch.tensor([[token]], dtype=torch.int64)
        return Rollout(tokens=torch.tensor(tokens, dtype=torch.int64), logits=torch.stack(rows))

    def policy_gradient_step(
        self,
        samples: Sequence[tuple[list[int], torch.Tensor]],
        advantages: torch.Tensor,
        learning_rate: float,
    ) -> None:
        """Take one AdamW step on the policy gradient of a batch: the policy becomes stale by it.

        loss = -(1/N) sum_i A_i sum_t log q(y_t), gradient norm clipped at 1, no weight decay.

        Args:
            samples: N pairs of prompt and sampled tokens.
            advantages: ``[N]``.
            learning_rate: of AdamW, otherwise with torch's defaults.
        """
        parameters = list(self._model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
        for (prompt, tokens), advantage in zip(samples, advantages.tolist(), strict=True):
            context = torch.cat([torch.tensor(prompt, dtype=torch.int64), tokens[:-1]])[None]
            out = self._model(input_ids=context, logits_to_keep=len(tokens), use_cache=False)
            logps = torch.log_softmax(out.logits[0].float(), dim=-1)
            total = logps.gather(1, tokens[:, None]).sum()
            (-advantage / len(samples) * total).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def close(self) -> None:
        """Free the model."""
        del self._model


def load(precision: str, seed: int, announce: Callable[[str], None]) -> TorchPolicy:
    """Load the model in ``"float32"`` or ``"bfloat16"``."""
    return TorchPolicy(precision, seed, announce)
