# SPDX-License-Identifier: Apache-2.0
"""Reductions over sequences and the mask, against the CPU on the same per-token values."""

import pytest
import torch

import trm_ext as trm
from tests.gpu.rows import pair

INF, NAN = float("inf"), float("nan")


def layouts(name):
    lengths = [0, 1, 31, 33, 256, 257, 600]
    yield "packed", trm.SequenceLayout.from_lengths(torch.tensor(lengths, device=name))
    yield (
        "padded",
        trm.SequenceLayout.from_lengths(torch.tensor(lengths, device=name), padded_length=600),
    )
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(9, 300, generator=generator) < 0.6
    mask[3] = False
    yield "scattered mask", trm.SequenceLayout.from_mask(mask.to(name))
    ids = torch.randint(20, (3000,), generator=generator).to(name)
    position = torch.arange(3000, device=name)
    yield "pieces", trm.SequenceLayout.from_segments(ids, position, 25)


@pytest.mark.parametrize("bad", (None, NAN, INF))
def test_verdicts_equal_those_of_the_cpu(device, bad):
    for (name, layout), (_, other) in zip(layouts(device.name), layouts("cpu"), strict=True):
        generator = torch.Generator().manual_seed(1)
        # Multiples of 1/64 add up exactly in any order, and tie.
        kl = torch.randint(0, 9, layout.shape, generator=generator).float() / 64
        if bad is not None:
            kl.view(-1)[7::97] = bad
        got = trm.max_kl_verdict(kl.to(device.name), layout, max_kl=0.1)
        want = trm.max_kl_verdict(kl, other, max_kl=0.1)
        for field, value, expected in zip(got._fields, got, want, strict=True):
            torch.testing.assert_close(
                value.cpu(),
                expected,
                rtol=0,
                atol=0,
                equal_nan=True,
                msg=lambda m, n=name, f=field: f"{n}, {f}: {m}",
            )


@pytest.mark.parametrize("dtypes", ("bf16", "fp32"))
def test_the_mask_from_logits(device, dtypes):
    x, y = pair(device, 40, device.pick(32000, 257), dtypes, noise=0.2)
    lengths = [7, 0, 20, 13]
    layout = trm.SequenceLayout.from_lengths(torch.tensor(lengths, device=device.name))
    kl = trm.token_divergence(x, y).kl
    limit = float(kl[:7].max())  # inclusive: the first sequence stays
    got = trm.trust_region_mask(x, y, layout, max_kl=limit)
    want = trm.max_kl_verdict(kl, layout, max_kl=limit)
    assert bool(got.keep[0])
    assert all(torch.equal(a, b) for a, b in zip(got[:4], want[:4], strict=True))


def test_rows_outside_every_sequence_influence_nothing(device):
    x, y = (z.view(4, 10, -1) for z in pair(device, 40, 257))
    layout = trm.SequenceLayout.from_lengths(
        torch.tensor([3, 10, 0, 7], device=device.name), padded_length=10
    )
    clean = trm.trust_region_mask(x, y, layout, max_kl=0.02)
    x[~layout.token_mask], y[~layout.token_mask] = NAN, NAN
    poisoned = trm.trust_region_mask(x, y, layout, max_kl=0.02)
    assert all(torch.equal(a, b) for a, b in zip(clean[:6], poisoned[:6], strict=True))
