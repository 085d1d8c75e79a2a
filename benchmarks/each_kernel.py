# SPDX-License-Identifier: Apache-2.0
"""One small call of each kernel, compared with the CPU: what compute-sanitizer watches.

Inputs come from the host by copies, which every tool sees; masked rows stay uninitialised.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import torch
from torch import Tensor

import trm_ext as trm
from trm_ext import _lib
from trm_ext.outputs import OUTPUTS, VALUES

PAIRS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "bf16-fp32": (torch.bfloat16, torch.float32),
    "fp32-bf16": (torch.float32, torch.bfloat16),
    "fp16-fp32": (torch.float16, torch.float32),  # served by the generic kernel, like fp64
    "fp64": (torch.float64, torch.float64),
}
VOCAB = 16643  # several regions, and a tail that no vector divides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")


def run(arguments: argparse.Namespace) -> int:
    device = arguments.device
    if device == "cuda" and (reason := _lib.describe()["cuda"]["reason"]) is not None:
        print(f"each-kernel: there is no CUDA device here, {reason}", file=sys.stderr)
        return 2
    many = 9
    if device == "cuda":
        many = 2 * torch.cuda.get_device_properties(0).multi_processor_count + 1
    calls = 0
    for name, dtypes in PAIRS.items():
        # Few rows are split over blocks, many are not.
        for rows, vocab in ((3, VOCAB), (many, 1031), (3, 33)):
            calls += divergences(device, name, dtypes, rows, vocab)
    calls += sequences(device) + shards(device)
    print(f"{calls} comparisons on {device}")
    return 0


def logits(dtypes: tuple[torch.dtype, torch.dtype], rows: int, vocab: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows + vocab)
    x = torch.randn(rows, vocab, generator=generator) * 3
    y = x + 0.05 * torch.randn(rows, vocab, generator=generator)
    far = torch.rand(rows, vocab, generator=generator) < 1e-3
    y = torch.where(far, y + 2, y)
    x[:, 5] = -torch.inf  # a train mass outside the rollout's support
    return [x.to(dtypes[0]), y.to(dtypes[1])]


def divergences(
    device: str, name: str, dtypes: tuple[torch.dtype, torch.dtype], rows: int, vocab: int
) -> int:
    x, y = logits(dtypes, rows, vocab)
    tokens = torch.arange(rows) % vocab
    mask = torch.arange(rows) != 1
    warm = torch.full((rows,), 0.7, dtype=torch.float64)
    # Each call's names select a kernel: outputs, temperatures, a mask, alignment.
    variants: dict[str, dict[str, Any]] = {
        "kl": dict(outputs=("kl",)),
        "gap": dict(outputs=("kl", "kl_train_rollout")),
        "entropy": dict(outputs=("entropy_rollout", "entropy_train")),
        "all": dict(outputs=VALUES, tokens=tokens, token_mask=mask),
        "scaled": dict(outputs=("kl",), rollout_temperature=warm, train_temperature=2 * warm),
        "scaled all": dict(outputs=VALUES, tokens=tokens, rollout_temperature=warm),
        "diagnostics": dict(outputs=OUTPUTS, tokens=tokens),
    }
    found = 0
    for variant, named in variants.items():
        for offset in (0, 1) if variant in ("kl", "all") else (0,):
            masked = "token_mask" in named
            here = [_window(z, device, offset, mask if masked else None) for z in (x, y)]
            want = results(x, y, named)
            moved = {
                key: value.to(device) if isinstance(value, Tensor) else value
                for key, value in named.items()
            }
            for got, expected in zip(results(*here, moved), want, strict=True):
                rounding = max(torch.finfo(got.dtype).eps, 1e-5)
                torch.testing.assert_close(
                    got.cpu(),
                    expected,
                    rtol=4 * rounding,
                    atol=4 * rounding,
                    equal_nan=True,
                    msg=lambda m, v=variant: f"{name} {rows}x{vocab} {v}: {m}",
                )
                found += 1
    return found


def _window(z: Tensor, device: str, offset: int, mask: Tensor | None) -> Tensor:
    """The rows inside a larger buffer, ``offset`` elements from its start; masked ones unset."""
    rows, vocab = z.shape
    memory = torch.empty(rows * vocab + offset, dtype=z.dtype, device=device)
    window = memory[offset:].view(rows, vocab)
    for row in range(rows):
        if mask is None or bool(mask[row]):
            window[row].copy_(z[row])
    return window


def results(x: Tensor, y: Tensor, named: dict[str, Any]) -> list[Tensor]:
    """Requested values and, where all have one, both gradients."""
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    names = named["outputs"]
    differentiable = set(names) <= set(VALUES)
    with torch.set_grad_enabled(differentiable):
        values = trm.token_divergence(x, y, **named)
    found = [getattr(values, name) for name in names]
    if differentiable:
        upstream = torch.ones(x.shape[0]).to(x.device)
        parts = [(value * upstream).nan_to_num(posinf=0.0).sum() for value in found]
        found += torch.autograd.grad(sum(parts), (x, y))
        if names == ("kl",):  # the train side alone has a kernel of its own
            kl = trm.token_divergence(x.detach(), y, **named).kl
            assert kl is not None
            found += torch.autograd.grad((kl * upstream).sum(), y)
    return [value.detach() for value in found]


def sequences(device: str) -> int:
    lengths = torch.tensor([0, 1, 31, 33, 129])
    kl = torch.randint(0, 9, (int(lengths.sum()),)).float() / 64
    kl[40] = torch.nan
    ids = torch.arange(len(kl)) % 4
    want = [
        trm.max_kl_verdict(kl, trm.SequenceLayout.from_lengths(lengths), max_kl=0.1),
        trm.max_kl_verdict(
            kl, trm.SequenceLayout.from_segments(ids, torch.arange(len(kl)), 5), max_kl=0.1
        ),
    ]
    lengths, kl, ids = (t.to(device) for t in (lengths, kl, ids))
    position = torch.arange(len(kl)).to(device)
    got = [
        trm.max_kl_verdict(kl, trm.SequenceLayout.from_lengths(lengths), max_kl=0.1),
        trm.max_kl_verdict(kl, trm.SequenceLayout.from_segments(ids, position, 5), max_kl=0.1),
    ]
    for one, other in zip(got, want, strict=True):
        for value, expected in zip(one, other, strict=True):
            torch.testing.assert_close(value.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    return 2 * len(want[0])


def shards(device: str) -> int:
    found = 0
    for dtypes in (PAIRS["bf16"], PAIRS["fp64"]):
        x, y = logits(dtypes, 3, VOCAB)
        want = trm.token_divergence(x, y).kl
        x, y = x.to(device), y.to(device)
        cuts = (0, 5000, 5001, VOCAB)
        states = [
            trm.divergence_state(x[:, a:b], y[:, a:b], vocab_start=a)
            for a, b in itertools.pairwise(cuts)
        ]
        finished, _ = trm.divergence_finish(trm.divergence_state_merge(torch.stack(states)))
        assert finished.kl is not None
        torch.testing.assert_close(finished.kl.cpu(), want, rtol=2e-5, atol=0)
        found += 1
    return found
