# SPDX-License-Identifier: Apache-2.0
"""One grid over every implementation of the ops: reference, CPU, emulated CUDA kernels, CUDA.

The emulator runs the very kernels of csrc/include/trm/kernels under every schedule; the others are
what users get. Each is compared with the float64 twins (the twins with plain autograd).
"""

import functools
import itertools

import numpy as np
import pytest
import torch

from tests import emulator_build
from tests.backends import Backend, usable
from tests.emulator_build import SCHEDULES
from tests.rows import GRADIENT_RTOL, KL_RTOL, base_rows
from tests.rows import row_pair as make_row_pair
from trm_ext.outputs import OUTPUTS, VALUES, encode
from trm_ext.reference import TWINS

INF, NAN = float("inf"), float("nan")
VOCABULARIES = (1, 7, 33, 257, 1024, 4099)
LARGE = 151936  # a real model's vocabulary
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16-fp32": (torch.float16, torch.float32),
    "fp64": (torch.float64, torch.float64),
}
ALL = encode(OUTPUTS)
row_pair = functools.cache(make_row_pair)
BACKENDS = ("reference", "cpu", "cuda", *(f"emulator-{schedule}" for schedule in SCHEDULES))


@pytest.fixture(params=BACKENDS)
def backend(request):
    yield from reproducible(request)


@pytest.fixture(params=("reference", "cpu", "cuda", "emulator-greedy-one-warp"))
def one_backend(request):
    """Every backend once: where the schedule is not the subject."""
    yield from reproducible(request)


def reproducible(request):
    backend = usable(request.param)
    request.node.user_properties.append(("calls", backend.calls))
    yield backend


def autograd_twin(x, y, tokens, vocab, grads):
    """Values and gradients by log_softmax and autograd, in float64; the definition itself."""
    x = x.double().clone().requires_grad_()
    y = y.double().clone().requires_grad_()
    p, q = torch.log_softmax(x[..., :vocab], -1), torch.log_softmax(y[..., :vocab], -1)
    picked = [rows.gather(-1, tokens[..., None])[..., 0] for rows in (p, q)]
    values = torch.stack(
        [
            (p.exp() * (p - q)).sum(-1),
            (q.exp() * (q - p)).sum(-1),
            -(p.exp() * p).sum(-1),
            -(q.exp() * q).sum(-1),
            *picked,
            picked[1] - picked[0],
        ]
    )
    return values.detach(), torch.autograd.grad((values * grads).sum(), (x, y))


def check_values(got, want, wide, exact=False):
    """By name: kl, both ways, relatively; the others against their scale of one nat."""
    rtol = 1e-10 if wide else KL_RTOL
    for name, value, expected in zip(OUTPUTS, got, want, strict=False):
        divergence = name in ("kl", "kl_train_rollout", "tv", "chi2", "bhattacharyya")
        # Where KL is below 1e-9 nats (one column, say) nothing is promised but its size.
        atol = (1e-14 if exact else 0 if wide else 1e-14) if divergence else rtol
        torch.testing.assert_close(
            value.double(),
            expected,
            rtol=1e-8 if exact else rtol,
            atol=atol,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def check_gradient(got, want, dtype, upstream):
    rounding = torch.finfo(dtype).eps if dtype != torch.float64 else 0.0
    # A column's gradient is a difference of terms as large as the upstream gradient; with one
    # column nothing but their rounding is left.
    scale = max(float(want.norm()), float(upstream.norm()))
    allowed = (1e-10 if dtype == torch.float64 else GRADIENT_RTOL) + rounding
    # Half-precision gradients underflow; a unit of the smallest number per entry covers that.
    floor = 2 * torch.finfo(dtype).smallest_normal * want.numel() ** 0.5
    assert float((got.double() - want).norm()) <= allowed * scale + floor


def forward_and_backward(backend, x, y, vocab, *, token_mask=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lead = x.shape[:-1]
    tokens = torch.randint(max(vocab, 1), lead, generator=generator)
    wide = torch.float64 in (x.dtype, y.dtype)
    grads = torch.randn(len(VALUES), *lead, generator=generator, dtype=torch.float64)
    grads = grads if wide else grads.float()
    shared = dict(
        rollout_logits=x,
        train_logits=y,
        tokens=tokens,
        token_mask=token_mask,
        vocab_size=vocab,
        outputs=ALL,
    )

    def both(run, grads):
        *values, statistics = run("token_divergence", **shared)
        gradients = run(
            "token_divergence_backward",
            grad_values=grads,
            statistics=statistics,
            want_rollout=True,
            want_train=True,
            **shared,
        )
        return torch.cat([v.double() for v in values]), gradients

    got, gradients = both(backend, grads)
    if backend.name == "reference" and token_mask is None and bool(torch.isfinite(x).all()):
        want, want_gradients = autograd_twin(x, y, tokens, vocab, grads.double())
        check_values(got, want, wide, exact=True)
    else:
        want, want_gradients = both(Backend("reference"), grads.double())
        check_values(got, want, wide)
    for gradient, wanted, logits in zip(gradients, want_gradients, (x, y), strict=True):
        dtype = torch.float64 if backend.name == "reference" else logits.dtype
        assert gradient.dtype == dtype
        check_gradient(gradient, wanted, dtype, grads)
    return got, gradients


def check_kl_gradient(backend, x, y, vocab):
    """The gradient of kl alone, relative to itself: the other outputs' would drown it."""
    shared = dict(rollout_logits=x, train_logits=y, vocab_size=vocab, outputs=1)
    wide = torch.float64 in (x.dtype, y.dtype)
    grads = torch.ones(1, *x.shape[:-1], dtype=torch.float64 if wide else torch.float32)
    wanted = dict(want_rollout=True, want_train=True, grad_values=grads)
    found = []
    for run in (backend, Backend("reference")):
        statistics = run("token_divergence", **shared)[-1]
        found.append(run("token_divergence_backward", statistics=statistics, **wanted, **shared))
    for got, want in zip(*found, strict=True):
        rounding = torch.finfo(got.dtype).eps if got.dtype != torch.float64 else 0.0
        allowed = (1e-10 if wide else GRADIENT_RTOL) + rounding
        if got.dtype == torch.float16:  # its small entries are rounded at 2^-25
            allowed += 2**-25 * want.numel() ** 0.5 / float(want.norm())
        assert float((got.double() - want).norm()) <= allowed * float(want.norm())


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_values_and_gradients(backend, vocab, dtypes):
    x, y = row_pair("flat", 3, vocab, 1e-2) if vocab > 1 else (torch.ones(3, 1), torch.zeros(3, 1))
    x, y = x.to(DTYPES[dtypes][0]), y.to(DTYPES[dtypes][1])
    forward_and_backward(backend, x, y, vocab)
    if vocab > 1:
        check_kl_gradient(backend, x, y, vocab)


@pytest.mark.parametrize("dtypes", ("fp32", "bf16"))
def test_one_row_of_a_real_vocabulary(backend, dtypes):
    x, y = base_rows("flat", 1, LARGE, 1), base_rows("flat", 1, LARGE, 2)
    y = x + 0.05 * y
    x, y = x.to(DTYPES[dtypes][0]), y.to(DTYPES[dtypes][1])
    forward_and_backward(backend, x, y, LARGE)
    check_kl_gradient(backend, x, y, LARGE)


@pytest.mark.parametrize("kl", (1e-9, 1e-6, 1e-3, 0.1, 10.0))
@pytest.mark.parametrize("kind", ("flat", "peaked", "sharp"))
def test_small_divergences_keep_their_digits(one_backend, kind, kl):
    x, y = row_pair(kind, 2, 4099, kl)
    for a, b in ((x, y), (x, torch.log_softmax(y, -1)), (x, y + 60)):
        arguments = dict(
            rollout_logits=a.float(), train_logits=b.float(), vocab_size=4099, outputs=1
        )
        got = one_backend("token_divergence", **arguments)[0]
        want = Backend("reference")("token_divergence", **arguments)[0]
        torch.testing.assert_close(got.double(), want, rtol=KL_RTOL, atol=0)


def test_maxima_in_different_columns(one_backend):
    # The shift, a difference of maxima from two columns 60 apart, is no float then: rounding it
    # alone would cost the gradient 1e-3.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 257, generator=generator, dtype=torch.float64) * 2
    x[:, 0] = 9 + torch.rand(16, generator=generator, dtype=torch.float64)
    x[:, 1] = x[:, 0] - 1e-4
    x = x.float()
    y = x.double() + 60 + 1e-3 * torch.randn(16, 257, generator=generator, dtype=torch.float64)
    y[:, 0], y[:, 1] = x[:, 0].double() + 60 - 1e-3, x[:, 1].double() + 60 + 1e-3
    check_kl_gradient(one_backend, x, y.float(), 257)


def test_temperatures(one_backend):
    x, y = row_pair("flat", 3, 257, 0.1)
    tokens = torch.tensor([0, 7, 256])
    temperatures = dict(
        rollout_temperature=torch.tensor([0.7, 1.0, 3.0], dtype=torch.float64),
        train_temperature=torch.tensor([0.9, 1.0, 2.0], dtype=torch.float64),
    )
    arguments = dict(
        rollout_logits=x.float(),
        train_logits=y.float(),
        tokens=tokens,
        vocab_size=257,
        outputs=ALL,
        **temperatures,
    )
    *got, statistics = one_backend("token_divergence", **arguments)
    *want, exact = Backend("reference")("token_divergence", **arguments)
    check_values(torch.cat([v.double() for v in got]), torch.cat(want), False)
    grads = torch.randn(len(VALUES), 3)
    sides = dict(want_rollout=True, want_train=True, **arguments)
    gradients = one_backend(
        "token_divergence_backward", grad_values=grads, statistics=statistics, **sides
    )
    wanted = Backend("reference")(
        "token_divergence_backward", grad_values=grads, statistics=exact, **sides
    )
    for gradient, other in zip(gradients, wanted, strict=True):
        check_gradient(gradient, other, torch.float32, grads)


@pytest.mark.parametrize("dtypes", ("fp32", "fp64"))
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_state_merge_and_finish(backend, vocab, dtypes):
    x, y = (rows.to(DTYPES[dtypes][0]) for rows in (base_rows("flat", 3, vocab, 5),) * 2)
    y = y + 0.1 * torch.sin(torch.arange(vocab)).to(y.dtype)
    tokens = torch.tensor([0, vocab - 1, vocab // 2])
    cuts = [0, vocab // 3, vocab // 3, vocab - vocab // 4, vocab]  # uneven, and one is empty
    bits = encode(VALUES)
    states = torch.stack(
        [
            backend(
                "divergence_state",
                rollout_shard=x[:, begin:end],
                train_shard=y[:, begin:end],
                tokens=tokens,
                vocab_start=begin,
                vocab_size=end - begin,
                outputs=bits,
            )
            for begin, end in itertools.pairwise(cuts)
        ]
    )
    merged = backend("divergence_state_merge", states=states)
    values, _ = backend("divergence_finish", state=merged, outputs=bits)
    want = TWINS["token_divergence"]
    names = [a.name for a in torch.ops.trm.token_divergence.default._schema.arguments]
    given = dict(rollout_logits=x, train_logits=y, tokens=tokens, vocab_size=vocab, outputs=bits)
    check_values(values, want(*(given.get(name) for name in names))[0], dtypes == "fp64")


def views(vocab):
    base = torch.randn(4, 3, 2 * vocab + 3)
    yield "rows of a wider tensor", base[..., :vocab]
    for offset in (1, 2, 3):
        yield f"offset of {offset} elements", base[..., offset : offset + vocab]
    yield "every second column", base[..., : 2 * vocab : 2]
    yield "transposed lead", base[..., :vocab].transpose(0, 1)
    yield "transposed columns", torch.randn(3, vocab, 4).transpose(1, 2)
    yield "expanded", base[:1, :, :vocab].expand(4, 3, vocab)
    yield "two dimensions", base[0, :, :vocab]


@pytest.mark.parametrize("index", range(9))
def test_views_are_read_where_they_are(one_backend, index):
    name, x = list(views(33))[index]
    y = x + 0.1 * torch.randn(x.shape)
    forward_and_backward(one_backend, x, y, 33)
    assert name


def test_padding_and_masked_rows_are_never_read(backend):
    x, y = row_pair("flat", 5, 257, 0.1)
    x, y = x.float(), y.float()
    x[:, 250:], y[:, 250:] = NAN, NAN
    mask = torch.tensor([True, False, True, True, False])
    x[1], y[4] = NAN, INF
    got, gradients = forward_and_backward(backend, x, y, 250, token_mask=mask)
    assert (got[:, ~mask] == 0).all() and torch.isfinite(got).all()
    for gradient in gradients:
        assert (gradient[~mask] == 0).all() and (gradient[:, 250:] == 0).all()


def test_infinities_are_judged_alike(backend):
    x = torch.tensor(
        [
            [0.5, -INF, 1.0, 2.0],  # p = 0 where q > 0
            [0.5, 0.1, 1.0, 2.0],  # p > 0 where q = 0: KL is infinite
            [-INF, -INF, -INF, 3.0],  # one finite column
            [-INF, 0.0, 1.0, -INF],  # -inf on both sides does not exist
        ]
    )
    y = torch.tensor(
        [[0.4, 0.2, 1.0, 2.0], [0.4, -INF, 1.0, 2.0], [0.0, 0.0, 0.0, 3.0], [-INF, 0.5, 1.0, -INF]]
    )
    arguments = dict(rollout_logits=x, train_logits=y, vocab_size=4, outputs=encode(("kl",)))
    got = backend("token_divergence", **arguments)[0]
    want = Backend("reference")("token_divergence", **arguments)[0]
    torch.testing.assert_close(got.double(), want, rtol=KL_RTOL, atol=0)
    assert torch.isinf(got[0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ordered", [False, True])
def test_sequence_reduce(backend, ordered, dtype):
    lengths = torch.tensor([0, 1, 31, 33, 256, 257, 600])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(offsets[-1])
    values = torch.randint(-9, 9, (count,)).to(dtype) / 8  # exact sums, and many ties
    values[-100], values[-200], values[300], values[310] = NAN, -INF, INF, -INF
    arguments = dict(
        values=values,
        positions=torch.arange(count) * 2,
        token_mask=torch.rand(count) < 0.8,
        offsets=offsets,
        order=torch.randperm(count) if ordered else None,
    )
    got = backend("sequence_reduce", **arguments)
    want = Backend("reference")("sequence_reduce", **arguments)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ordered", [False, True])
def test_sequence_verdict(backend, ordered, dtype):
    """Every reason, every criterion; the lengths around a block, and none."""
    lengths = torch.tensor([0, 1, 31, 33, 256, 257, 600, 3, 4])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(offsets[-1])
    values = torch.randint(-9, 9, (count,)).to(dtype) / 8
    mask = torch.rand(count) < 0.8
    order = torch.randperm(count) if ordered else torch.arange(count)
    values[order[-100]], values[order[-200]] = NAN, -INF
    values[order[300]], values[order[310]], values[order[200]] = INF, -INF, -INF
    mask[order[offsets[-2] :]] = False  # no token of the last sequence counts
    seen = set()
    for criterion in range(3):
        for limit in (0.0, 1.0, INF):
            arguments = dict(
                values=values,
                positions=torch.arange(count) * 2,
                token_mask=mask,
                offsets=offsets,
                order=order if ordered else None,
                criterion=criterion,
                limit=limit,
                reason=7,
            )
            got = backend("sequence_verdict", **arguments)
            want = Backend("reference")("sequence_verdict", **arguments)
            rounded = [w.to(g.dtype).double() for g, w in zip(got, want, strict=True)]
            for one, other in zip(got, rounded, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=0, atol=0, equal_nan=True)
            seen.update(want[1].tolist())
    assert seen == {0, 2, 3, 4, 7}


def test_a_state_does_not_look_at_diagnostic_bits(one_backend):
    x, y = row_pair("flat", 3, 33, 1e-2)
    shared = dict(rollout_shard=x, train_shard=y, vocab_size=33)
    plain = one_backend("divergence_state", outputs=encode(("kl",)), **shared)
    asked = one_backend("divergence_state", outputs=encode(("kl", "tv", "chi2")), **shared)
    assert torch.equal(plain, asked)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (3, 0)])
def test_nothing_to_do(one_backend, shape):
    x = torch.zeros(shape)
    *values, statistics = one_backend(
        "token_divergence", rollout_logits=x, train_logits=x, vocab_size=shape[-1], outputs=ALL
    )
    assert sum(len(v) for v in values) == len(OUTPUTS) and statistics.shape[:-1] == shape[:-1]


@pytest.mark.skipif(emulator_build.why_not() is not None, reason=str(emulator_build.why_not()))
class TestEmulator:
    def bits_under(self, seeds):
        x, y = (rows.float() for rows in row_pair("flat", 2, 1024, 1e-3))
        found = set()
        for schedule in SCHEDULES:
            for seed in range(seeds):
                results = Backend(f"emulator-{schedule}", seed)(
                    "token_divergence", rollout_logits=x, train_logits=y, vocab_size=1024, outputs=1
                )
                found.add(tuple(r.double().numpy().tobytes() for r in results))
        return found

    def test_no_schedule_changes_a_bit(self):
        assert len(self.bits_under(3)) == 1

    @pytest.mark.slow
    def test_no_schedule_changes_a_bit_on_200_seeds(self):
        assert len(self.bits_under(200)) == 1

    def test_numpy_in_numpy_out(self):
        x, y = (rows.float() for rows in row_pair("flat", 2, 33, 1e-3))
        run = Backend("emulator-inorder")
        arguments = dict(vocab_size=33, outputs=1)
        tensors = run("token_divergence", rollout_logits=x, train_logits=y, **arguments)
        arrays = run(
            "token_divergence", rollout_logits=x.numpy(), train_logits=y.numpy(), **arguments
        )
        for array, tensor in zip(arrays, tensors, strict=True):
            assert isinstance(array, np.ndarray)
            np.testing.assert_array_equal(array, tensor.numpy())

    def test_a_fault_reaches_python_with_its_place_and_its_repro_line(self):
        x = torch.frombuffer(bytearray(1 + 4 * 7), dtype=torch.float32, offset=1)[None]
        with pytest.raises(RuntimeError) as caught:
            Backend("emulator-reverse", 8)(
                "token_divergence", rollout_logits=x, train_logits=x, vocab_size=7, outputs=1
            )
        for part in (
            "misaligned read of 4 bytes",
            "of block (0,0,0), lane 1 of warp 0",
            "stream.cuh",
            "repro: kernel=trm::kernels::stream_divergence_kernel<float, float, false, false, ",
            'shape="token_divergence torch.float32[1, 7] torch.float32[1, 7]" '
            "schedule=reverse seed=8",
        ):
            assert part in str(caught.value)

    def test_an_unknown_schedule_is_named(self):
        with pytest.raises(ValueError, match="no schedule is called fair"):
            emulator_build.module().divergence_finish(torch.zeros(1, 14), 1, schedule="fair")

    def test_every_op_is_exposed(self):
        assert {name for name in dir(emulator_build.module()) if name in TWINS} == set(TWINS)
