# SPDX-License-Identifier: Apache-2.0
"""Many rows, many elements, strides and alignments: what 32 bits and wide loads get wrong."""

import pytest
import torch

import trm_ext as trm
from tests.gpu.rows import check_gradients, check_kl, gradients, pair

NAN = float("nan")


@pytest.mark.parametrize("rows", (0, 1, 65535, 65536, 70000))
@pytest.mark.parametrize("vocab", (64, 33))
@pytest.mark.parametrize("dtypes", ("bf16", "fp32"))
def test_number_of_rows(device, rows, vocab, dtypes):
    x, y = pair(device, rows, vocab, dtypes)
    kl = trm.token_divergence(x, y).kl
    weight = torch.linspace(-1, 1, rows, device=device.name)
    found = gradients(x, y, weight)
    assert kl.shape == (rows,) and all(g.shape == x.shape for g in found)
    if rows == 0:
        return
    few = sorted({0, 1, rows // 2, 65534, 65535, 65536, rows - 1} & set(range(rows)))
    assert torch.equal(kl[few], trm.token_divergence(x[few], y[few]).kl)
    check_kl(kl[few], x[few], y[few])
    check_gradients([g[few] for g in found], x[few], y[few], weight[few])


def test_no_columns(device):
    x = torch.empty(3, 0, device=device.name)
    assert bool(trm.token_divergence(x, x).kl.isnan().all())


@pytest.mark.parametrize("elements", (2**31, 2**32))
def test_more_elements_than_an_integer_counts(device, elements):
    """Forward and backward over one tensor; the rows at the border equal a small run of them."""
    vocab = device.pick(151936, 1000)
    border = device.pick(elements, elements // 2**18)
    rows = border // vocab + 3
    needed = 3 * 2 * rows * vocab + 2**30
    if device.free_bytes() < needed:
        pytest.skip(f"needs {needed >> 30} GiB of device memory, {device.free_bytes() >> 30} free")
    x = torch.empty(rows, vocab, dtype=torch.bfloat16, device=device.name)
    y = torch.empty_like(x)
    for a, b in zip(x.split(1024), y.split(1024), strict=True):
        a.normal_(std=3)
        b.copy_(a + 0.05 * torch.randn_like(a))
    assert x.numel() > border
    few = sorted({0, 1, border // vocab - 1, border // vocab, border // vocab + 1, rows - 1})
    kl = trm.token_divergence(x, y).kl
    assert bool((kl > 0).all())
    assert torch.equal(kl[few], trm.token_divergence(x[few], y[few]).kl)
    check_kl(kl[few], x[few], y[few])
    weight = torch.linspace(-1, 1, rows, device=device.name)
    found = gradients(x, y, weight, (False, True))[1]
    assert bool(found[few].isfinite().all())
    check_gradients([None, found[few]], x[few], y[few], weight[few])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_rows_further_apart_than_an_integer_counts(device, dtype):
    stride = device.pick(2**31 + 64, 2**12 + 64)
    needed = 2 * stride * dtype.itemsize
    if device.free_bytes() < needed:
        pytest.skip(f"needs {needed >> 30} GiB of device memory, {device.free_bytes() >> 30} free")
    memory = torch.empty(stride + 512, dtype=dtype, device=device.name)
    for columns in (1, 5):  # contiguous rows, and strided columns
        x = memory.as_strided((2, 50), (stride, columns))
        x.copy_(torch.randn(2, 50))
        y = (x + 0.1 * torch.randn(2, 50, device=device.name)).to(dtype)
        check_kl(trm.token_divergence(x, y).kl, x.clone(), y)
        weight = torch.tensor([1.0, -0.5], device=device.name)
        check_gradients(gradients(x, y, weight), x.clone(), y, weight)


def views(device, vocab, dtype):
    def fresh(*shape):
        return torch.randn(shape, device=device.name).to(dtype)

    base = fresh(4, 3, 2 * vocab + 3)
    yield "rows of a wider tensor", base[0, :, :vocab]
    for offset in (1, 2, 3, 5):
        flat = fresh(4 * vocab + 8)
        yield f"offset of {offset} elements", flat[offset : offset + 4 * vocab].view(4, vocab)
        yield f"offset of {offset} in a wider row", base[0, :, offset : offset + vocab]
    yield "every second column", base[0, :, : 2 * vocab : 2]
    yield "every second row", base[:, 1, :vocab]
    yield "transposed", fresh(vocab, 5).t()
    yield "transposed lead", base[..., :vocab].transpose(0, 1)
    yield "columns first", fresh(3, vocab, 4).transpose(1, 2)
    yield "expanded rows", fresh(1, vocab).expand(6, vocab)
    yield "expanded columns", fresh(6, 1).expand(6, vocab)
    yield "shifted by one token", fresh(2, 5, vocab)[:, :-1]
    yield "four lead dimensions", fresh(2, 1, 2, 2, vocab)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("vocab", (1000, 1001))
def test_views_are_read_where_they_are(device, vocab, dtype):
    for name, x in views(device, vocab, dtype):
        y = (x + 0.1 * torch.randn(x.shape, device=device.name)).to(dtype)
        for one, other in ((x, y), (y, x)):
            kl = trm.token_divergence(one, other).kl
            assert kl.shape == x.shape[:-1], name
            flat = [z.reshape(-1, vocab).clone() for z in (one, other)]
            check_kl(kl.reshape(-1), *flat)
            weight = torch.linspace(-1, 1, kl.numel(), device=device.name)
            found = gradients(one, other, weight.reshape(kl.shape))
            check_gradients([g.reshape(-1, vocab) for g in found], *flat, weight)


def test_rows_beside_a_view_are_not_read(device):
    """NaN everywhere but in the window: before, after and between the rows."""
    for dtype in (torch.bfloat16, torch.float32):
        for offset in (0, 1, 3):
            memory = torch.full((5, 1100), NAN, dtype=dtype, device=device.name)
            x = memory[1:4, offset : offset + 1001]
            x.copy_(torch.randn(3, 1001))
            y = (x + 0.1).to(dtype)
            assert bool(trm.token_divergence(x, y).kl.isfinite().all())
            for gradient in gradients(x, y, torch.ones(3, device=device.name)):
                assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("dtypes", ("bf16", "fp32"))
def test_padding_columns_are_not_read(device, dtypes):
    vocab, padded = device.pick((50257, 50304), (257, 320))
    x, y = pair(device, 3, padded, dtypes)
    x[:, vocab:], y[:, vocab:] = NAN, NAN
    kl = trm.token_divergence(x, y, vocab_size=vocab).kl
    check_kl(kl, x[:, :vocab], y[:, :vocab])
    weight = torch.tensor([1.0, -2.0, 0.5], device=device.name)
    found = gradients(x, y, weight, vocab_size=vocab)
    assert not any(bool(g[:, vocab:].any()) for g in found)
    check_gradients([g[:, :vocab] for g in found], x[:, :vocab], y[:, :vocab], weight)


@pytest.mark.parametrize("dtypes", ("bf16", "fp32"))
def test_masked_rows_are_not_read(device, dtypes):
    for rows in (6, device.pick(1000, 40)):
        x, y = pair(device, rows, device.pick(32000, 257), dtypes)
        mask = torch.arange(rows, device=device.name) % 3 != 1
        clean = trm.token_divergence(x, y, token_mask=mask).kl
        x[~mask], y[~mask] = NAN, NAN
        weight = torch.linspace(0.5, 1, rows, device=device.name)
        kl = trm.token_divergence(x, y, token_mask=mask).kl
        assert torch.equal(kl, clean) and not kl[~mask].any()
        found = gradients(x, y, weight, token_mask=mask)
        assert not any(bool(g[~mask].any()) for g in found)
        few = torch.arange(rows, device=device.name)[mask][:5]
        check_gradients([g[few] for g in found], x[few], y[few], weight[few])
