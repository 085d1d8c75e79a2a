# SPDX-License-Identifier: Apache-2.0
"""Values and gradients on a GPU: accuracy, outputs, edge rules."""

import itertools

import pytest
import torch

import trm_ext as trm
from tests.gpu.rows import DTYPES, check_gradients, check_kl, gradients, pair
from tests.rows import KL_RTOL, base_rows, row_pair
from trm_ext import reference
from trm_ext.outputs import OUTPUTS, VALUES, encode

INF, NAN = float("inf"), float("nan")


def exact(x, y, outputs, tokens=None, temperatures=(None, None)):
    """Requested values by name, in float64."""
    rows = [None if t is None else t.cpu() for t in (tokens, None, *temperatures)]
    values, diagnostics, _ = reference.token_divergence(
        x.cpu(), y.cpu(), *rows, x.shape[-1], encode(outputs)
    )
    names = [name for name in OUTPUTS if name in outputs]
    return dict(zip(names, [*values, *diagnostics], strict=True))


@pytest.mark.parametrize("kind", ("flat", "peaked", "sharp"))
@pytest.mark.parametrize("kl", (1e-9, 1e-6, 1e-3, 0.1, 10.0))
def test_small_divergences_keep_their_digits(device, kind, kl):
    x, y = row_pair(kind, 2, device.pick(32768, 509), kl)
    cases = {"plain": (x, y), "log-probs": (x, torch.log_softmax(y, -1)), "+60": (x, y + 60)}
    for name, (a, b) in cases.items():
        for dtypes in ("fp32", "bf16", "fp16", "bf16-fp32", "fp32-bf16"):
            if name == "log-probs" and dtypes in ("bf16", "fp16"):
                continue  # test_sixteen_bit_log_probs_against_logits
            rollout, train = DTYPES[dtypes]
            one, other = a.to(rollout).to(device.name), b.to(train).to(device.name)
            got = trm.token_divergence(one, other).kl.cpu().double()
            want = exact(one, other, ("kl",))["kl"]
            # Rounding both sides to 16 bits leaves rows that differ less than what is promised.
            assert bool(((got - want).abs() <= KL_RTOL * want + 1e-14).all()), (name, dtypes)


@pytest.mark.parametrize("dtype,rest", ((torch.bfloat16, 1e-4), (torch.float16, 1e-3)), ids=str)
def test_sixteen_bit_log_probs_against_logits(device, dtype, rest):
    """A heavy token's log-prob is tiny: beside a logit of 20 it has more than 24 bits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1000, generator=generator, dtype=torch.float64) * 3.5
    others = torch.logsumexp(x[:, 1:], 1)
    x[:, 0] = others - torch.log(torch.tensor(rest / (1 - rest)).double())
    x += 20 - x[:, :1]
    y = torch.log_softmax(x + 1e-3 * torch.randn(200, 1000, generator=generator).double(), -1)
    x, y = x.to(dtype).to(device.name), y.to(dtype).to(device.name)
    check_kl(trm.token_divergence(x, y).kl, x, y)


@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_real_vocabulary(device, dtypes):
    x, y = pair(device, 3, device.pick(151936, 1021), dtypes)
    check_kl(trm.token_divergence(x, y).kl, x, y)
    weight = torch.tensor([1.0, -2.0, 0.5], device=device.name)
    check_gradients(gradients(x, y, weight), x, y, weight)


@pytest.mark.parametrize("vocab", (1, 2, 7, 8, 33, 255, 256, 1023, 4099, 50257, 129920, 151937))
@pytest.mark.parametrize("dtypes", ("bf16", "fp32", "bf16-fp32"))
def test_vocabularies_that_no_tile_divides(device, vocab, dtypes):
    vocab = device.pick(vocab, min(vocab, 4099))
    x, y = pair(device, 2, vocab, dtypes)
    check_kl(trm.token_divergence(x, y).kl, x, y)
    weight = torch.tensor([1.0, 0.25], device=device.name)
    if vocab > 1:
        check_gradients(gradients(x, y, weight), x, y, weight)


@pytest.mark.parametrize("dtypes", ("fp32", "bf16", "fp64"))
def test_every_output_and_each_alone(device, dtypes):
    x, y = pair(device, 5, device.pick(32000, 1009), dtypes, noise=0.5)
    tokens = torch.tensor([0, 7, 100, 1008, 500], device=device.name)
    together = trm.token_divergence(x, y, tokens=tokens, outputs=OUTPUTS)
    want = exact(x, y, OUTPUTS, tokens)
    for name in OUTPUTS:
        value = getattr(together, name)
        rtol = 1e-9 if dtypes == "fp64" else KL_RTOL
        torch.testing.assert_close(
            value.cpu().double(),
            want[name],
            rtol=rtol,
            atol=rtol,
            msg=lambda m, n=name: f"{n}: {m}",
        )
        alone = getattr(trm.token_divergence(x, y, tokens=tokens, outputs=(name,)), name)
        torch.testing.assert_close(
            alone.cpu().double(),
            want[name],
            rtol=rtol,
            atol=rtol,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("dtypes", ("fp32", "bf16"))
def test_all_upstream_gradients_in_one_sweep(device, dtypes):
    x, y = pair(device, 4, device.pick(32000, 257), dtypes, noise=0.3)
    tokens = torch.tensor([3, 0, 256, 100], device=device.name)
    x, y = x.requires_grad_(), y.requires_grad_()
    found = trm.token_divergence(x, y, tokens=tokens, outputs=VALUES)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(len(VALUES), 4, generator=generator).to(device.name)
    total = sum((getattr(found, name) * w).sum() for name, w in zip(VALUES, weights, strict=True))
    got = torch.autograd.grad(total, (x, y))
    nothing, bits = (None,) * 3, encode(VALUES)
    sides = x.detach().cpu(), y.detach().cpu()
    statistics = reference.token_divergence(*sides, tokens.cpu(), *nothing, x.shape[-1], bits)[2]
    want = reference.token_divergence_backward(
        weights.cpu().double(),
        *sides,
        statistics,
        tokens.cpu(),
        *nothing,
        0,
        x.shape[-1],
        bits,
        True,
        True,
    )
    for gradient, exact_gradient, logits in zip(got, want, (x, y), strict=True):
        error = float((gradient.cpu().double() - exact_gradient).norm())
        scale = max(float(exact_gradient.norm()), float(weights.norm()))
        assert error <= (1e-5 + torch.finfo(logits.dtype).eps) * scale


@pytest.mark.parametrize("sides", ((True, True), (False, True), (True, False)))
def test_each_gradient_alone_equals_both(device, sides):
    x, y = pair(device, 3, device.pick(50257, 257), "bf16")
    weight = torch.tensor([1.0, -2.0, 0.5], device=device.name)
    both = gradients(x, y, weight)
    for one, other, side in zip(gradients(x, y, weight, sides), both, sides, strict=True):
        assert (one is None) != side
        if side:
            torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-24)


def test_without_a_gradient(device):
    x, y = pair(device, 3, 257)
    with torch.no_grad():
        got = trm.token_divergence(x.requires_grad_(), y).kl
    assert not got.requires_grad
    check_kl(got, x.detach(), y)


def test_a_second_derivative_is_refused(device):
    x, y = pair(device, 2, 33, "fp32")
    kl = trm.token_divergence(x, y.requires_grad_()).kl
    (gradient,) = torch.autograd.grad(kl.sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def test_upstream_gradients_of_stride_zero_and_per_row(device):
    x, y = pair(device, 6, device.pick(32000, 257), "fp32")
    ones = gradients(x, y, torch.ones(6, device=device.name))
    leaf = y.detach().requires_grad_()
    trm.token_divergence(x, leaf).kl.sum().backward()  # an expanded scalar
    assert torch.equal(leaf.grad, ones[1])
    weight = torch.arange(12.0, device=device.name)[::2]
    check_gradients(gradients(x, y, weight), x, y, weight)


@pytest.mark.parametrize("pairs", ((0.7, 0.7), (0.7, 1.3), (2.0, 1.0)))
@pytest.mark.parametrize("dtypes", ("fp32", "bf16"))
def test_temperatures_per_row(device, pairs, dtypes):
    x, y = pair(device, 3, device.pick(32000, 257), dtypes)
    scale = torch.tensor([1.0, 1.1, 0.9], dtype=torch.float64)
    rows = [scale * temperature for temperature in pairs]
    got = trm.token_divergence(
        x,
        y,
        rollout_temperature=rows[0].to(device.name),
        train_temperature=rows[1].to(device.name),
    ).kl
    want = exact(x, y, ("kl",), temperatures=rows)["kl"]
    torch.testing.assert_close(got.cpu().double(), want, rtol=KL_RTOL, atol=0)


def edge_rows(vocab):
    """(name, rollout, train), one row each, float32."""
    x = base_rows("flat", 1, vocab, 8).float()
    y = (x + 0.1 * torch.randn(1, vocab)).float()
    columns = torch.arange(vocab)[None]
    padding = columns >= vocab - 61
    yield "-inf on both sides", x.masked_fill(padding, -INF), y.masked_fill(padding, -INF)
    yield "90 % of the rollout cut", x.masked_fill(torch.rand(1, vocab) < 0.9, -INF), y
    yield "late finite token", x.masked_fill(columns != vocab - 9, -INF), y
    yield "first half without rollout", x.masked_fill(columns < vocab // 2, -INF), y
    yield "spread of 300", x * 40, y * 40
    yield "offset", x, y + 1e4
    underflow = torch.zeros(1, vocab)
    underflow[0, 3] = -120.0
    heavy = torch.zeros(1, vocab)
    heavy[0, 3] = float(torch.tensor((vocab - 1) * 0.3 / 0.7).log())
    yield "p underflows where q = 0.3", underflow, heavy


@pytest.mark.parametrize("dtypes", ("fp32", "bf16"))
def test_edge_rows_have_values_and_gradients(device, dtypes):
    for name, x, y in edge_rows(device.pick(32771, 517)):
        x, y = (z.to(t).to(device.name) for z, t in zip((x, y), DTYPES[dtypes], strict=True))
        got = trm.token_divergence(x, y).kl.cpu().double()
        want = exact(x, y, ("kl",))["kl"]
        torch.testing.assert_close(
            got, want, rtol=KL_RTOL, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
        one = torch.ones(1, device=device.name)
        found = gradients(x, y, one)
        for gradient in found:
            assert bool(gradient.isfinite().all()), name
        check_gradients([None, found[1]], x, y, one)


def test_equal_rows_are_exactly_zero(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (torch.randn(3, device.pick(50257, 301)) * 5).to(dtype).to(device.name)
        assert not trm.token_divergence(x, x.clone()).kl.any()
        for gradient in gradients(x, x.clone(), torch.ones(3, device=device.name)):
            assert not gradient.any()


@pytest.mark.parametrize("column", (0, 5, -1))
def test_a_support_violation_is_infinite(device, column):
    x, y = pair(device, 1, device.pick(50257, 301), "fp32")
    x[0, column], y[0, column] = -300.0, -INF  # its exponential is 0 in float32
    assert trm.token_divergence(x, y).kl.item() == INF
    gradient = gradients(x, y, torch.ones(1, device=device.name))[1]
    p, q = (torch.softmax(z.double(), -1) for z in (x, y))
    torch.testing.assert_close(gradient.double(), q - p, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("bad", (NAN, INF))
@pytest.mark.parametrize("side", (0, 1))
def test_what_is_not_finite_spoils_its_row_only(device, bad, side):
    logits = list(pair(device, 3, device.pick(50257, 301), "bf16"))
    logits[side][1, 200] = bad
    kl = trm.token_divergence(*logits).kl
    assert torch.isnan(kl).tolist() == [False, True, False]
    for gradient in gradients(*logits, torch.ones(3, device=device.name)):
        assert bool(gradient[1].isnan().all()) and bool(gradient[[0, 2]].isfinite().all())


def test_shards_of_any_size_merge_to_the_whole(device):
    vocab = device.pick(151936, 1021)
    x, y = pair(device, 4, vocab, "bf16")
    cuts = [0, vocab // 3, vocab // 3, vocab // 3 + 1, vocab - 7, vocab]
    states = [
        trm.divergence_state(
            x[:, a:b], y[:, a:b], vocab_start=a, outputs=("kl", "kl_train_rollout")
        )
        for a, b in itertools.pairwise(cuts)
    ]
    merged = trm.divergence_state_merge(torch.stack(states))
    found, _ = trm.divergence_finish(merged, outputs=("kl", "kl_train_rollout"))
    want = exact(x, y, ("kl", "kl_train_rollout"))
    for name in want:
        got = getattr(found, name).cpu().double()
        torch.testing.assert_close(got, want[name], rtol=KL_RTOL, atol=0)


def test_autocast_changes_nothing(device):
    x, y = pair(device, 3, 257, "fp32")
    want = trm.token_divergence(x, y).kl
    with torch.autocast(device.name, dtype=torch.bfloat16):
        got = trm.token_divergence(x, y).kl
    assert got.dtype == torch.float32 and torch.equal(got, want)


def test_inputs_are_not_written(device):
    x, y = pair(device, 3, 4099, "fp32")
    before = x.clone(), y.clone()
    gradients(x, y, torch.ones(3, device=device.name))
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])
