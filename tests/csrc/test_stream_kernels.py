# SPDX-License-Identifier: Apache-2.0
"""What only the streaming CUDA kernels can get wrong: runs, regions, splits, frames, far columns.

Run by the emulator, and on a GPU where there is one; the oracle is the float64 twin. Together with
test_backends.py it covers, by value and gradient, the faults that such kernels have had elsewhere:

    32-bit offsets, also of strided views         test_offsets_beyond_32_bits (and tests/gpu)
    rows on grid y                                test_launch_plan.py (and tests/gpu)
    strides, slices, transposes, steps            test_views_of_sixteen_bit_rows, test_backends.py
    upstream gradients of stride 0                test_upstream_gradients_of_any_stride
    phantom columns, padding, lost tails          test_runs_steps_and_regions
    misaligned vector loads                       test_views_of_sixteen_bit_rows
    a first tile of -inf, -inf on both sides      test_rows_that_begin_with_nothing
    logits 300 apart                              test_a_spread_of_300
    an input written, an output left unwritten    every test: the emulator stops at either
    mixed types, gradient in its logits' type     every test over PAIRS
    no rows, no columns                           test_nothing_to_do (test_backends.py)
    each output alone                             test_each_output_alone
    vocabularies that do not divide               test_state_merge_and_finish (test_backends.py)
    temperature on one side                       test_temperatures
"""

import itertools
import math

import pytest
import torch

from tests import emulator_build
from tests.backends import Backend, usable
from tests.rows import GRADIENT_RTOL, KL_RTOL, base_rows
from trm_ext.outputs import OUTPUTS, VALUES, encode

INF, NAN = float("inf"), float("nan")
PAIRS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "bf16-fp32": (torch.bfloat16, torch.float32),
    "fp32-bf16": (torch.float32, torch.bfloat16),
}
ALL = encode(OUTPUTS)
KL = encode(["kl"])
TOKENLESS = encode([name for name in OUTPUTS if not name.startswith("log")])
# Around a run (8), a step of a warp (256), two of them, a region and a block's step of backward.
EDGES = (8, 9, 255, 256, 257, 511, 513, 2047, 2049, 8191, 8193)


@pytest.fixture(params=("emulator-greedy-one-warp", "cuda"))
def backend(request):
    yield usable(request.param)
    if request.param.startswith("emulator"):
        emulator_build.module().set_device(90, 1)


def rows_of(pair, rows, vocab, noise=0.05, seed=0):
    x = base_rows("flat", rows, vocab, seed)
    y = x + noise * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed + 1))
    return x.to(PAIRS[pair][0]), y.to(PAIRS[pair][1])


def padded(x, columns, fill=NAN):
    """The rows in a buffer of ``columns`` columns, whose padding nobody may read."""
    out = torch.full((len(x), columns), fill, dtype=x.dtype)
    out[:, : x.shape[1]] = x
    return out


def forward(backend, x, y, vocab, outputs=ALL, **given):
    return backend(
        "token_divergence",
        rollout_logits=x,
        train_logits=y,
        vocab_size=vocab,
        outputs=outputs,
        **given,
    )


def gradients(backend, x, y, vocab, outputs, upstream, statistics, rollout=True, **given):
    return backend(
        "token_divergence_backward",
        grad_values=upstream,
        rollout_logits=x,
        train_logits=y,
        statistics=statistics,
        vocab_size=vocab,
        outputs=outputs,
        want_rollout=rollout,
        want_train=True,
        **given,
    )


def check(backend, x, y, vocab, *, tokens=None, differentiated=VALUES, **given):
    """Values, diagnostics and both gradients against the twin."""
    rows = len(x)
    tokens = torch.arange(rows) * 7919 % vocab if tokens is None else tokens
    shared = dict(tokens=tokens, **given)
    *got, statistics = forward(backend, x, y, vocab, **shared)
    *want, exact = forward(Backend("reference"), x, y, vocab, **shared)
    for name, value, expected in zip(OUTPUTS, torch.cat(got), torch.cat(want), strict=True):
        gap = name in ("kl", "kl_train_rollout", "tv", "chi2", "bhattacharyya", "outside_mass")
        # Entropies and log-probs are sums of terms of order one, whose size their rounding has.
        atol = 1e-14 if gap else KL_RTOL
        torch.testing.assert_close(
            value.double(), expected, rtol=KL_RTOL, atol=atol, equal_nan=True, msg=name
        )
    generator = torch.Generator().manual_seed(rows)
    for outputs in (KL, encode(differentiated)):
        count = bin(outputs).count("1")
        upstream = torch.randn(count, rows, generator=generator)
        for rollout in (False, True):
            shared["rollout"] = rollout
            found = gradients(backend, x, y, vocab, outputs, upstream, statistics, **shared)
            wanted = gradients(
                Backend("reference"), x, y, vocab, outputs, upstream.double(), exact, **shared
            )
            sides = zip(found, wanted, (x, y), strict=True)
            for gradient, expected, logits in list(sides)[0 if rollout else 1 :]:
                assert gradient.dtype == logits.dtype
                columns = expected[:, :vocab].double()
                difference = gradient[:, :vocab].double() - columns
                assert torch.isfinite(columns).all() and torch.isfinite(difference).all()
                eps = torch.finfo(gradient.dtype).eps
                smallest = torch.finfo(gradient.dtype).smallest_normal
                # The rollout side, p (t - KL), is measured against its terms.
                scale = columns.norm() + (upstream.norm() if outputs != KL or rollout else 0)
                floor = smallest * columns.numel() ** 0.5
                assert difference.norm() <= (GRADIENT_RTOL + eps) * scale + floor
                assert (gradient[:, vocab:] == 0).all()


@pytest.mark.parametrize("vocab", EDGES)
@pytest.mark.parametrize("pair", PAIRS)
def test_runs_steps_and_regions(backend, pair, vocab):
    x, y = rows_of(pair, 2, vocab)
    columns = (vocab + 15) // 8 * 8
    check(backend, padded(x, columns), padded(y, columns), vocab)


@pytest.mark.parametrize("share", (0.01, 0.2, 1.0))
@pytest.mark.parametrize("pair", PAIRS)
def test_far_columns_anywhere(backend, pair, share):
    x, y = rows_of(pair, 2, 4096)
    far = torch.rand(2, 4096, generator=torch.Generator().manual_seed(3)) < share
    y = torch.where(far, y + 3 * torch.randn(2, 4096).to(y.dtype), y)
    check(backend, x, y, 4096)


@pytest.mark.parametrize("pair", PAIRS)
def test_truncated_rollouts(backend, pair):
    x, y = rows_of(pair, 3, 4096)
    order = x.argsort(-1, descending=True)
    x.scatter_(-1, order[:, 410:], -INF)
    # KL(train||rollout) is infinite; the other gradients exist.
    names = [name for name in VALUES if name != "kl_train_rollout"]
    check(backend, x, y, 4096, tokens=order[:, 0], differentiated=names)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_maximum_that_comes_late_or_alone(backend, pair):
    # Falling, rising and alternating rows: the frame moves never, always, and one side at a time.
    ramp = torch.linspace(-40, 40, 4096)
    x = torch.stack([-ramp, ramp, ramp, ramp * (-1) ** torch.arange(4096), 0 * ramp])
    y = torch.stack([-ramp, ramp, -ramp, ramp * (-1) ** (torch.arange(4096) // 7), ramp])
    check(backend, x.to(PAIRS[pair][0]), y.to(PAIRS[pair][1]), 4096)


@pytest.mark.parametrize("pair", PAIRS)
def test_masking_by_the_smallest_finite_number(backend, pair):
    x, y = rows_of(pair, 2, 2048)
    hidden = torch.rand(2, 2048, generator=torch.Generator().manual_seed(5)) < 0.3
    x = x.masked_fill(hidden, torch.finfo(x.dtype).min)
    y = y.masked_fill(hidden, torch.finfo(y.dtype).min)
    check(backend, x, y, 2048, tokens=(~hidden).int().argmax(-1))


@pytest.mark.parametrize("first", (0, 300, 2048, 5000))
@pytest.mark.parametrize("low", (1e4, 1e9, 1e20, 3.3e38))
@pytest.mark.parametrize("side", ("rollout", "train"))
@pytest.mark.parametrize("pair", ("bf16", "fp32"))
def test_masks_of_one_side_by_finite_numbers(backend, pair, side, low, first):
    # All but three columns, or the first ones: regions that one side has masks alone in.
    x, y = rows_of(pair, 2, 6000, noise=0.3)
    masked = torch.arange(6000) < first if first else torch.ones(6000, dtype=torch.bool)
    if not first:
        masked[[4, 3000, 5990]] = False
    x = x.masked_fill(masked, -low) if side == "rollout" else x
    y = y.masked_fill(masked, -low) if side == "train" else y
    names, tokens = [*VALUES[:4], "log_ratio"], torch.tensor([3000, 5990])
    got, want = (
        forward(place, x, y, 6000, outputs=encode(names), tokens=tokens)[0].double()
        for place in (backend, Backend("reference"))
    )
    overflows = want.abs() > 1e36  # as sums over masses above 1 may
    assert bool((got[overflows].abs() > 1e36).all())
    torch.testing.assert_close(got[~overflows], want[~overflows], rtol=KL_RTOL, atol=KL_RTOL / 10)


@pytest.mark.parametrize("pair", ("fp32", "bf16", "fp32-bf16"))
@pytest.mark.parametrize("size", (6e4, 7e4, 1e9, 1e30))
def test_logits_too_large_for_a_product(backend, pair, size):
    # The winner is `size` above the rest on both sides, the runners-up close to it.
    x, y = rows_of(pair, 2, 1024)
    x, y = x.float(), y.float()
    step = size * 2.0**-7  # bf16 tells them apart
    x[:, 5], y[:, 5] = size, size
    x[:, 900], y[:, 900] = size - step, size - 2 * step
    x[1], y[1] = x[1] - size, y[1] - size
    check_values = [rows.to(dtype) for rows, dtype in zip((x, y), PAIRS[pair], strict=True)]
    got = torch.cat(forward(backend, *check_values, 1024, TOKENLESS)[:2]).double()
    want = torch.cat(forward(Backend("reference"), *check_values, 1024, TOKENLESS)[:2])
    # Logits of this size have no digits below `size` * eps; the values follow the stored ones.
    torch.testing.assert_close(got, want, rtol=KL_RTOL, atol=KL_RTOL * (1 + size * 2.0**-24))


def test_maxima_whose_difference_overflows_have_no_value(backend):
    x = torch.full((1, 64), 3e38)
    got = forward(backend, x, -x, 64, KL)[0]
    assert torch.isnan(got).all()


@pytest.mark.parametrize("place", (0, 7, 255, 2048, 4095))
@pytest.mark.parametrize("value", (NAN, INF))
@pytest.mark.parametrize("train", (False, True))
@pytest.mark.parametrize("pair", ("bf16", "fp32"))
def test_evidence_that_is_missing(backend, pair, train, value, place):
    x, y = rows_of(pair, 3, 4096)
    (y if train else x)[1, place] = value
    got, _, statistics = forward(backend, x, y, 4096, KL)
    assert torch.isnan(got[0, 1]) and torch.isfinite(got[0, [0, 2]]).all()
    grads = gradients(backend, x, y, 4096, KL, torch.ones(1, 3), statistics)
    for gradient in grads:
        assert torch.isnan(gradient[1]).all() and torch.isfinite(gradient[[0, 2]]).all()


@pytest.mark.parametrize("pair", PAIRS)
def test_support_violations(backend, pair):
    x, y = rows_of(pair, 2, 4096)
    y[0, 2049] = -INF
    x[1, 17] = -INF
    got = torch.cat(forward(backend, x, y, 4096, TOKENLESS)[:2]).double()
    want = torch.cat(forward(Backend("reference"), x, y, 4096, TOKENLESS)[:2])
    torch.testing.assert_close(got, want, rtol=KL_RTOL, atol=KL_RTOL)
    assert got[0, 0] == INF and got[1, 1] == INF


@pytest.mark.parametrize("pair", PAIRS)
def test_temperatures(backend, pair):
    x, y = rows_of(pair, 3, 2049)
    check(
        backend,
        x,
        y,
        2049,
        rollout_temperature=torch.tensor([0.6, 1.0, 2.5], dtype=torch.float64),
        train_temperature=torch.tensor([0.6, 0.7, 1.0], dtype=torch.float64),
    )


def bits(results):
    return [r.contiguous().view(torch.uint8).clone() for r in results]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_row_has_one_answer(pair):
    """Not of the number of rows, of how many blocks share a row, or of where the row lies."""
    backend = usable("emulator-inorder")
    device = emulator_build.module().set_device
    vocab, rows = 8200, 3
    x, y = rows_of(pair, rows, vocab, noise=0.6)
    tokens = torch.tensor([0, 5000, vocab - 1])

    def answer(x, y, tokens):
        *values, statistics = forward(backend, x, y, vocab, tokens=tokens)
        upstream = torch.ones(1, len(x))
        train = gradients(backend, x, y, vocab, KL, upstream, statistics, rollout=False)[1]
        return bits([torch.cat(values).T, statistics, train[:, :vocab]])

    try:
        device(90, 1)
        whole = answer(x, y, tokens)
        for processors in (2, 132):
            device(90, processors)
            assert all(map(torch.equal, answer(x, y, tokens), whole))
        for row in range(rows):
            for processors in (1, 132):
                device(90, processors)
                alone = answer(x[row : row + 1], y[row : row + 1], tokens[row : row + 1])
                for one, other in zip(alone, whole, strict=True):
                    assert torch.equal(one[0], other[row])
        forward_only = slice(0, 2)  # backward reads unaligned rows by another formula
        for columns, offset in itertools.product((vocab + 8, vocab + 9), (0, 1, 2)):
            a, b = (padded(rows, columns + 8)[:, offset:] for rows in (x, y))
            a, b = (torch.full_like(rows, 0) for rows in (a, b))
            a[:, :vocab], b[:, :vocab] = x, y
            moved = answer(a[:, :columns], b[:, :columns], tokens)
            assert all(map(torch.equal, moved[forward_only], whole[forward_only]))
    finally:
        device(90, 1)


@pytest.mark.parametrize("pair", PAIRS)
def test_masked_rows_of_a_split(pair):
    """Not read, zero everywhere; also where their neighbours are shared by blocks."""
    backend = usable("emulator-shuffled")
    x, y = rows_of(pair, 3, 8200)
    x[1], y[1] = NAN, NAN
    mask = torch.tensor([True, False, True])
    try:
        emulator_build.module().set_device(90, 132)
        *values, statistics = forward(backend, x, y, 8200, TOKENLESS, token_mask=mask)
        assert (torch.cat(values)[:, 1] == 0).all() and torch.isfinite(torch.cat(values)).all()
        found = gradients(backend, x, y, 8200, KL, torch.ones(1, 3), statistics, token_mask=mask)
        for gradient in found:
            assert (gradient[1] == 0).all() and (gradient[[0, 2]] != 0).any(1).all()
    finally:
        emulator_build.module().set_device(90, 1)


def loaded_bytes(call, *arguments, **given):
    """Bytes of inputs that the emulated threads of a call load, each as often as it is loaded."""
    before = emulator_build.module().counters()["input_bytes"]
    results = call(*arguments, **given)
    return emulator_build.module().counters()["input_bytes"] - before, results


def loaded_per_block(backend, pair):
    """Bytes that a block of backward loads beside logits: its row's statistics and upstream."""
    vocab = 8  # were logits loaded twice, longer rows would not agree with so short a one
    x, y = rows_of(pair, 1, vocab)
    upstream, statistics = torch.ones(1, 1), forward(backend, x, y, vocab, KL)[2]
    found, _ = loaded_bytes(gradients, backend, x, y, vocab, KL, upstream, statistics)
    beside = found - vocab * (x.itemsize + y.itemsize)
    # One thread reads all eight statistics, some of them twice.
    assert 8 * 8 + 4 <= beside <= 2 * 8 * 8 + 4
    return beside


@pytest.mark.parametrize("processors", (1, 132))
@pytest.mark.parametrize(
    "vocab, columns",
    (
        (1001, 1001),  # rows that no wide load fits
        (4096, 4096),  # regions of one step of a warp in every type
        (4099, 4104),  # wide loads, and a run that ends within
        (8192, 8192),  # one step of 16-bit types, two of fp32
        (8200, 8200),  # two and three steps, and a last region of a run or of a step and a run
        (8202, 8202),  # rows that 4-byte loads fit
    ),
)
@pytest.mark.parametrize("pair", PAIRS)
def test_logits_are_loaded_once(pair, vocab, columns, processors):
    """And those of masked rows never; a second sweep loads them once more."""
    backend = usable("emulator-inorder")
    x, y = (padded(side, columns)[:, :columns] for side in rows_of(pair, 3, vocab))
    run = 16 // max(x.itemsize, y.itemsize)
    region = math.ceil(vocab / 32 / (32 * run)) * 32 * run
    row = vocab * (x.itemsize + y.itemsize)
    split = processors == 132 and vocab > 8 * region
    mask = torch.tensor([True, False, True])
    # The mask is read by every thread, of the sweep and of the split's merge.
    mask_bytes = 3 * (4 * 256 + 32 if split else 256)
    try:
        emulator_build.module().set_device(90, processors)
        found, results = loaded_bytes(forward, backend, x, y, vocab, KL)
        assert found == 3 * row
        found, _ = loaded_bytes(forward, backend, x, y, vocab, KL, token_mask=mask)
        assert found == 2 * row + mask_bytes
        found, _ = loaded_bytes(forward, backend, x, y, vocab, KL | encode(["tv"]))
        assert found == 3 * 2 * row
        if columns % run == 0:  # the streaming kernel
            blocks = 1 if processors == 1 else math.ceil(columns / (256 * run))
            beside = blocks * loaded_per_block(backend, pair)
            call = (gradients, backend, x, y, vocab, KL, torch.ones(1, 3), results[2])
            for rollout in (False, True):
                found, _ = loaded_bytes(*call, rollout=rollout)
                assert found == 3 * (row + beside)
            found, _ = loaded_bytes(*call, token_mask=mask)
            assert found == 2 * (row + beside) + 3 * blocks
    finally:
        emulator_build.module().set_device(90, 1)


@pytest.mark.parametrize("vocab", (24328, 32768, 151936))
@pytest.mark.parametrize("pair", PAIRS)
def test_logits_of_long_rows_are_loaded_once(pair, vocab):
    """Regions of 3, 4 and 19 steps of a warp in 16-bit types; a last one of 9 in the others."""
    backend = usable("emulator-inorder")
    x, y = rows_of(pair, 1, vocab)
    row = vocab * (x.itemsize + y.itemsize)
    found, results = loaded_bytes(forward, backend, x, y, vocab, KL)
    assert found == row
    call = (gradients, backend, x, y, vocab, KL, torch.ones(1, 1), results[2])
    found, _ = loaded_bytes(*call, rollout=False)
    blocks = 4  # that a device of one multiprocessor shares a row among
    assert found == row + blocks * loaded_per_block(backend, pair)


@pytest.mark.parametrize("pair", PAIRS)
def test_both_sides_may_be_one_tensor(pair):
    backend = usable("emulator-inorder")
    x, _ = rows_of(pair, 2, 2048)
    same = x if PAIRS[pair][0] == PAIRS[pair][1] else x.to(PAIRS[pair][1])
    x = x.to(PAIRS[pair][1]).to(PAIRS[pair][0])
    got = forward(backend, x, same.to(x.dtype).to(PAIRS[pair][1]), 2048, KL)[0]
    assert (got == 0).all()


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("pair", ("bf16", "fp16", "fp32-bf16"))
def test_views_of_sixteen_bit_rows(backend, pair, index):
    x, y = rows_of(pair, 3, 640)

    def view(rows):
        wide = torch.full((3, 2 * 640 + 8), NAN, dtype=rows.dtype)
        place = {
            0: wide[:, :640],
            1: wide[:, 1:641],
            2: wide[:, 2:642],
            3: wide[:, 3:643],
            4: wide[:, : 2 * 640 : 2],
            5: torch.full((640, 3), NAN, dtype=rows.dtype).T,
            6: wide.flip(0)[:, 8:648],
        }[index]
        place.copy_(rows)
        return place

    check(backend, view(x), view(y), 640)
    check(backend, x[:1].expand(3, 640), y[:1].expand(3, 640), 640)


def test_offsets_beyond_32_bits(backend):
    x, y = rows_of("bf16", 2, 512)
    stride = 2**31 + 8  # elements; the pages between are never touched

    def apart(rows):
        far = torch.empty(stride + 512, dtype=rows.dtype).as_strided((2, 512), (stride, 1))
        return far.copy_(rows)

    check(backend, apart(x), apart(y), 512)


@pytest.mark.parametrize("pair", ("bf16", "fp32"))
def test_upstream_gradients_of_any_stride(backend, pair):
    x, y = rows_of(pair, 4, 600)
    statistics = forward(backend, x, y, 600, KL)[2]
    base = torch.tensor([[2.0, 7.0, -1.0, 7.0, 0.5, 7.0, 3.0]])
    for upstream in (base[:, ::2], base[:, :1].expand(1, 4), base[:, :4].flip(1).T.contiguous().T):
        found = gradients(backend, x, y, 600, KL, upstream, statistics)
        again = gradients(backend, x, y, 600, KL, upstream.clone(), statistics)
        for one, other in zip(found, again, strict=True):
            assert torch.equal(one, other) and (one != 0).any()


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_that_begin_with_nothing(backend, pair):
    x, y = rows_of(pair, 3, 4096)
    hidden = torch.zeros(3, 4096, dtype=torch.bool)
    hidden[0, :3000] = True  # whole runs, regions of -inf on both sides
    hidden[1, :4000] = True
    hidden[2, 5:4090] = True
    x, y = x.masked_fill(hidden, -INF), y.masked_fill(hidden, -INF)
    check(backend, x, y, 4096, tokens=torch.tensor([3500, 4095, 0]))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_spread_of_300(backend, pair):
    x, y = rows_of(pair, 2, 1024)
    ramp = torch.linspace(-300, 0, 1024)
    check(backend, (x + ramp).to(x.dtype), (y + ramp).to(y.dtype), 1024)


@pytest.mark.parametrize("pair", PAIRS)
def test_each_output_alone(backend, pair):
    x, y = rows_of(pair, 2, 700)
    tokens = torch.tensor([3, 699])
    whole = torch.cat(forward(backend, x, y, 700, tokens=tokens)[:2])
    for index, name in enumerate(OUTPUTS):
        alone = torch.cat(forward(backend, x, y, 700, encode([name]), tokens=tokens)[:2])
        # Other sums in the same loop may change how the compiler rounds, no more.
        torch.testing.assert_close(alone[0], whole[index], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("pair", PAIRS)
def test_log_probs_against_raw_logits(backend, pair):
    # x - y then needs more digits than a float has, in the very columns that carry the row.
    x, _ = rows_of(pair, 4, 1000)
    x[:, 7] = x.float().amax(1) + torch.tensor([7.0, 9.0, 12.0, 15.0])
    y = torch.log_softmax(x.double() + 1e-3 * torch.randn(4, 1000), -1).to(PAIRS[pair][1])
    check(backend, x, y, 1000)
