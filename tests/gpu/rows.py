# SPDX-License-Identifier: Apache-2.0
"""Logits on a device, and what the float64 twins on the CPU say about them."""

from __future__ import annotations

import torch
from torch import Tensor

import trm_ext as trm
from tests.rows import GRADIENT_RTOL, KL_RTOL, exact_kl
from trm_ext import reference
from trm_ext.outputs import encode

DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "bf16-fp32": (torch.bfloat16, torch.float32),
    "fp32-bf16": (torch.float32, torch.bfloat16),
    "fp16-fp32": (torch.float16, torch.float32),
    "fp64": (torch.float64, torch.float64),
}


def pair(device, rows, vocab, dtypes="bf16", noise=0.05):
    """Logits of std 3 and a mismatch; the same on every device."""
    generator = torch.Generator().manual_seed(rows * 1000003 + vocab)
    x = torch.randn(rows, vocab, generator=generator) * 3
    y = x + noise * torch.randn(rows, vocab, generator=generator)
    rollout, train = DTYPES[dtypes]
    return x.to(rollout).to(device.name), y.to(train).to(device.name)


def check_kl(got: Tensor, x: Tensor, y: Tensor) -> None:
    """Against the stored logits' exact KL."""
    wide = torch.float64 in (x.dtype, y.dtype)
    want = exact_kl(x.cpu(), y.cpu())
    rtol = 1e-10 if wide else KL_RTOL
    torch.testing.assert_close(got.detach().cpu().double(), want, rtol=rtol, atol=1e-14)


def gradients(x, y, weight, sides=(True, True), **arguments):
    """Of sum(weight * kl), for detached views of both sides; None for a side not asked for."""
    x, y = x.detach().requires_grad_(sides[0]), y.detach().requires_grad_(sides[1])
    kl = trm.token_divergence(x, y, **arguments).kl
    wanted = [logits for logits, side in zip((x, y), sides, strict=True) if side]
    found = iter(torch.autograd.grad((kl * weight).sum(), wanted))
    return [next(found) if side else None for side in sides]


def exact_gradients(x, y, weight):
    """The same in float64 on the CPU."""
    x, y = x.detach().cpu(), y.detach().cpu()
    nothing, bits = (None,) * 4, encode(("kl",))
    vocab = x.shape[-1]
    statistics = reference.token_divergence(x, y, *nothing, vocab, bits)[2]
    return reference.token_divergence_backward(
        weight.detach().cpu().double()[None],
        x,
        y,
        statistics,
        *nothing,
        0,
        vocab,
        bits,
        True,
        True,
    )


def check_gradients(got, x, y, weight) -> None:
    """Relative L2: of train against itself, of rollout against its terms p (|t| + KL)."""
    p, q = (torch.log_softmax(z.detach().cpu().double(), -1) for z in (x, y))
    ratio = torch.where(p > -torch.inf, p - q, 0.0)
    kl = exact_kl(x.cpu(), y.cpu())[:, None]
    terms = p.exp() * (ratio.abs() + kl) * weight.cpu().double()[:, None]
    want = exact_gradients(x, y, weight)
    for gradient, exact, scale, logits in zip(got, want, (terms, want[1]), (x, y), strict=True):
        if gradient is None:
            continue
        assert gradient.dtype == logits.dtype and gradient.shape == logits.shape
        wide = logits.dtype == torch.float64
        rounding = torch.finfo(logits.dtype).eps
        allowed = (1e-10 if wide else GRADIENT_RTOL + rounding) * float(scale.norm())
        # Small entries are rounded at half of the type's smallest number, float32's in between.
        smallest = 2**-25 if logits.dtype == torch.float16 else 2**-126
        allowed += smallest * exact.numel() ** 0.5
        assert float((gradient.cpu().double() - exact).norm()) <= allowed
