# SPDX-License-Identifier: Apache-2.0
"""The accuracy table: relative error of kl by size, shape, offset, temperature and dtype.

Truth is the float64 twin of the *stored* logits (mpmath for spot checks); the KL in a row's label
is nominal. Printed with ``pytest -s``.
"""

import mpmath as mp
import pytest
import torch

import trm_ext as trm
from tests.backends import usable
from tests.rows import GRADIENT_RTOL, KL_RTOL, base_rows, exact_kl, row_pair
from trm_ext import _lib, reference
from trm_ext.outputs import encode

inf = float("inf")
KLS = (1e-9, 1e-6, 1e-3, 0.1, 1.0, 10.0)
KINDS = ("flat", "peaked", "sharp")
OFFSETS = ("none", "log-probs", "+60", "+1e4")
TEMPERATURES = ((1.0, 1.0), (0.6, 0.6), (0.6, 1.0))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABULARIES = (
    1000,
    32768,
    pytest.param(151936, marks=pytest.mark.slow),
    pytest.param(262144, marks=pytest.mark.slow),
)


@pytest.fixture(params=("cpu", "emulator-inorder", "cuda"))
def backend(request):
    return usable(request.param)


@pytest.fixture(params=(*(f"cpu-{name}" for name in _lib.CPU_CAPABILITIES), "emulator-inorder"))
def any_kernel(request):
    """The CPU kernels of each instruction set, and the CUDA kernels."""
    name, _, capability = request.param.partition("-")
    if name != "cpu":
        yield usable(request.param)
        return
    try:
        _lib.force_cpu_capability(capability)
    except ValueError as lacking:
        pytest.skip(str(lacking))
    yield usable("cpu")
    _lib.force_cpu_capability(None)


def offset(y, name):
    if name == "log-probs":
        return torch.log_softmax(y, -1)
    return y + {"none": 0.0, "+60": 60.0, "+1e4": 1e4}[name]


def kl_of(backend, x, y, rows=(None, None)):
    return backend(
        "token_divergence",
        rollout_logits=x,
        train_logits=y,
        rollout_temperature=rows[0],
        train_temperature=rows[1],
        vocab_size=x.shape[-1],
        outputs=encode(["kl"]),
    )[0][0].double()


def worst(backend, x, y, temperatures=None):
    """Largest relative error over the rows whose stored KL the contract covers."""
    rows = [None, None]
    if temperatures is not None:
        rows = [torch.full((len(x),), t, dtype=torch.float64) for t in temperatures]
    truth = reference.token_divergence(x, y, None, None, *rows, x.shape[-1], 1)[0][0]
    got = kl_of(backend, x, y, rows)
    assert bool((got >= 0).all())
    covered = truth >= 0.9e-9  # below: rows of which 16 bits store too little of the noise
    assert bool((got[~covered] <= 1e-9).all())
    return float(((got - truth) / truth)[covered].abs().max()) if covered.any() else 0.0


def gradient_error(backend, x, y):
    """Relative L2 error of d kl / d train of all rows together; 0 where the gradient is 0."""
    vocab, bits = x.shape[-1], encode(["kl"])
    shared = dict(rollout_logits=x, train_logits=y, vocab_size=vocab, outputs=bits)
    got = backend(
        "token_divergence_backward",
        grad_values=torch.ones(1, len(x)),
        statistics=backend("token_divergence", **shared)[2],
        want_rollout=False,
        want_train=True,
        **shared,
    )[1]
    rows = (None, None, None, None)
    statistics = reference.token_divergence(x, y, *rows, vocab, bits)[2]
    want = reference.token_divergence_backward(
        torch.ones(1, len(x)), x, y, statistics, *rows, 0, vocab, bits, False, True
    )[1]
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-300))


def print_table(title, table, columns):
    print(f"\n{title}")
    print("row".ljust(26) + "".join(str(c).rjust(12) for c in columns))
    for name, values in table.items():
        print(name.ljust(26) + "".join(f"{v:12.1e}" for v in values))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_float32_table(backend, vocab):
    table = {}
    for kind in KINDS:
        pairs = [row_pair(kind, 2, vocab, kl) for kl in KLS]
        for name in OFFSETS:
            table[f"{kind}, {name}"] = [
                worst(backend, x.float(), offset(y, name).float()) for x, y in pairs
            ]
    print_table(
        f"{backend.name}, V = {vocab}, float32: relative error of kl at nominal KL", table, KLS
    )
    assert max(map(max, table.values())) <= KL_RTOL


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_temperature_table(backend, vocab):
    table = {}
    for kind in KINDS:
        for pair in TEMPERATURES:
            table[f"{kind}, {pair[0]}/{pair[1]}"] = [
                worst(backend, (x * pair[0]).float(), (y * pair[1]).float(), pair)
                for x, y in (row_pair(kind, 2, vocab, kl) for kl in KLS)
            ]
    print_table(f"{backend.name}, V = {vocab}, float32, by temperatures", table, KLS)
    assert max(map(max, table.values())) <= KL_RTOL


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_sixteen_bit_table(backend, vocab):
    table = {}
    for kind in KINDS:
        for dtype in DTYPES[1:]:
            table[f"{kind}, {str(dtype).removeprefix('torch.')}"] = [
                worst(backend, x.to(dtype), y.to(dtype))
                for x, y in (row_pair(kind, 2, vocab, kl) for kl in KLS)
            ]
    print_table(f"{backend.name}, V = {vocab}, both sides in 16 bits", table, KLS)
    assert max(map(max, table.values())) <= KL_RTOL


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sixteen_bit_log_probs_against_raw_logits(backend, dtype):
    """Their differences need more than 24 bits: 15 against -1e-4."""
    x, y = row_pair("peaked", 2, 32768, 1e-3)
    x = x - x.amax(-1, keepdim=True) + 15
    error = worst(backend, x.to(dtype), torch.log_softmax(y, -1).to(dtype))
    print(f"{backend.name}, {dtype}: {error:.1e}")
    assert error <= KL_RTOL


def test_gradient_table(backend):
    table = {}
    for kind in KINDS:
        for name in OFFSETS[:3]:
            errors = []
            for kl in KLS:
                x, y = row_pair(kind, 2, 32768, kl)
                x, y = x.float(), offset(y, name).float()
                errors.append(gradient_error(backend, x, y))
            table[f"{kind}, {name}"] = errors
    print_table(
        f"{backend.name}, V = 32768, float32: relative L2 error of d kl / d train", table, KLS
    )
    assert max(map(max, table.values())) <= GRADIENT_RTOL


def mpmath_kl(x, y):
    with mp.workdps(50):
        x, y = ([mp.mpf(float(v)) for v in row] for row in (x, y))
        lse_x, lse_y = (mp.log(mp.fsum(mp.exp(v) for v in row)) for row in (x, y))
        return float(
            mp.fsum(
                mp.exp(a - lse_x) * ((a - lse_x) - (b - lse_y)) for a, b in zip(x, y, strict=True)
            )
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kl", (1e-9, 1e-3))
def test_the_oracle_itself_against_mpmath(kind, kl):
    x, y = row_pair(kind, 2, 300, kl)
    x, y = x.float(), torch.log_softmax(y, -1).float()
    truth = mpmath_kl(x[0], y[0])
    assert float(exact_kl(x, y)[0]) == pytest.approx(truth, rel=1e-9)
    assert float(trm.token_divergence(x, y).kl[0]) == pytest.approx(truth, rel=KL_RTOL)


# Edge inputs of a row of 4099 columns: (build, what the truth is).
def test_edge_table(backend):
    x = base_rows("flat", 1, 4099)
    y = x + 1e-2 * torch.randn(1, 4099, dtype=torch.float64)
    cut = torch.rand(1, 4099) < 0.9
    padding = torch.arange(4099)[None] >= 4038
    late = torch.full_like(x, -inf)
    late[0, 4000] = 1.0
    cases = {
        "-inf on both sides in 61 columns": (
            x.masked_fill(padding, -inf),
            y.masked_fill(padding, -inf),
        ),
        "90 % of rollout -inf": (x.masked_fill(cut, -inf), y),
        "one finite rollout token, late": (late, y),
        "logits x 300": (x * 300, y * 300),
        "y + 1e4": (x, y + 1e4),
        "nearly disjoint": (
            x * 0 - 80 * (torch.arange(4099) != 7),
            x * 0 - 80 * (torch.arange(4099) != 9),
        ),
    }
    for name, (a, b) in cases.items():
        a, b = a.float(), b.float()
        truth, got = float(exact_kl(a, b)), float(kl_of(backend, a, b))
        print(f"{name:36} {truth:12.6g} {got:12.6g}")
        assert abs(got - truth) <= KL_RTOL * truth + 1e-30, name
    violated = y.clone()
    violated[0, 5] = -inf
    assert kl_of(backend, x, violated).item() == inf
    assert kl_of(backend, x.float(), x.float()).item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("vocab", (1000, pytest.param(49152, marks=pytest.mark.slow)))
def test_one_logit_table(any_kernel, vocab, dtype):
    """A flat row whose one moved token is the largest: equal terms, and a misleading maximum.

    All other columns have the same weight, so rounding errors add up instead of averaging out; and
    the difference of the maxima is the log-ratio of no column but the moved one.
    """
    backend = any_kernel
    masses, kls = (1e-4, 1e-3, 0.1, 0.3, 0.5), (1e-9, 1e-6, 1e-3, 0.1)
    table, gradients = {}, {}
    for mass in masses:
        pairs = []
        for kl in kls:
            x = torch.zeros(1, vocab, dtype=torch.float64)
            x[0, vocab // 3] = torch.tensor(mass / (1 - mass) * (vocab - 1)).log()
            y = x.clone()
            y[0, vocab // 3] += (2 * kl / mass) ** 0.5
            pairs.append((x.to(dtype), y.to(dtype)))
        table[f"p = {mass}"] = [worst(backend, x, y) for x, y in pairs]
        gradients[f"p = {mass}"] = [gradient_error(backend, x, y) for x, y in pairs]
    print_table(
        f"{backend.name}, V = {vocab}, one logit, {dtype}: relative error of kl", table, kls
    )
    print_table("relative L2 error of d kl / d train", gradients, kls)
    assert max(map(max, table.values())) <= KL_RTOL
    assert max(map(max, gradients.values())) <= GRADIENT_RTOL + float(torch.finfo(dtype).eps) / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_first_part_that_misleads(any_kernel, dtype):
    """One moved token is all that the first columns hold; the mass comes later, and has not moved.

    The mean log-ratio of what is summed then says 0.1 of columns whose own is 1e-4: a frame with
    that shift would make G/S thousands of times the KL.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(1, 12000, dtype=torch.float64)
    x[0, :1024] = -20.0
    x[0, 5] = 0.5
    y = x + 1e-4 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    y[0, 5] = 0.4
    assert worst(any_kernel, x.to(dtype), y.to(dtype)) <= KL_RTOL


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_of_little_mass_that_is_summed_again(any_kernel, dtype):
    """Its own shift, 3 nats off, must end where it does: at a train token above the frame."""
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 1, 14000, generator=generator, dtype=torch.float64)
    y = x + 1e-3 * noise
    x[0, 2000:8000] -= 9
    y[0, 2000:8000] -= 6
    y[0, 7999] = y[0, :2000].max() + 1.5
    assert worst(any_kernel, x.to(dtype), y.to(dtype)) <= KL_RTOL


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", ("rollout", "train", "both"))
def test_a_token_far_above_what_came_before(any_kernel, side, dtype):
    """By up to 300 nats, in columns before, at and after a frame's end; exp(100) is no float32."""
    generator = torch.Generator().manual_seed(0)
    heights = torch.tensor([5.0, 50.0, 80.0, 100.0, 300.0], dtype=torch.float64)
    for column in (500, 1100, 3000, 4090):
        x, noise = torch.randn(2, 5, 4099, generator=generator, dtype=torch.float64)
        y = x + 0.05 * noise
        if side != "train":
            x[:, column] = heights + 0.3
        if side != "rollout":
            y[:, column] = heights
        assert worst(any_kernel, x.to(dtype), y.to(dtype)) <= KL_RTOL, column


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_train_mass_that_all_but_cancels(any_kernel, dtype):
    """In the frame of the first columns the train side has a hundredth of the later ones' mass.

    1 + B/S is then 0.01 and has lost two digits, though G/S is not 3 times the KL.
    """
    x = torch.full((1, 3072), -5.0, dtype=torch.float64)
    x[0, 0] = 0.0
    x[0, 1024:] = -0.3
    y = x.clone()
    y[0, 1024:] -= 7.75
    y[0, 1024::5] += 4.75
    assert worst(any_kernel, x.to(dtype), y.to(dtype)) <= KL_RTOL


def uneven_rows(seed, vocab):
    """Rows made of parts: each its own level, spread, log-ratio noise and share of the two sides.

    So that frames, their shifts and the loops over near, close, far and truncated columns change
    within a row, and early parts say nothing of later ones.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    def uniform(*sizes):
        return torch.rand(*sizes, generator=generator, dtype=torch.float64)

    rows, parts = 3, 1 + seed % 8
    edges = sorted((uniform(parts - 1) * vocab).int().tolist())
    x, noise = torch.empty(rows, vocab).double(), torch.empty(rows, vocab).double()
    gone = torch.zeros(rows, vocab, dtype=torch.bool)  # from both sides
    for first, last in zip([0, *edges], [*edges, vocab], strict=True):
        count = last - first
        x[:, first:last] = normal(rows, count) * uniform(1) * 4 + normal(rows, 1) * 6
        scale = 3 * 10 ** (-6 * uniform(rows, 1))
        noise[:, first:last] = (normal(rows, count) + normal(rows, 1) * (seed % 2)) * scale
        if seed % 3 == 1:  # some of any size, some too far for exp(-u) in one piece
            far = uniform(rows, count) < uniform(1) * 0.5
            noise[:, first:last] += far * normal(rows, count) * (1 if seed % 4 else 6)
        if seed % 3 == 2:
            x[:, first:last].masked_fill_(uniform(rows, count) < uniform(1), -inf)
            gone[:, first:last] = uniform(rows, count) < (2 * uniform(1) - 1)
    heavy = (uniform(rows, 1) * vocab).long()
    if seed % 5 < 2:
        x.scatter_(1, heavy, x.amax(1, keepdim=True) + normal(rows, 1).abs() * 8)
    y = x.masked_fill(x.isinf(), 0.0) + noise + normal(rows, 1) * (0, 1, 60)[seed % 3]
    return x.masked_fill(gone, -inf), y.masked_fill(gone, -inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "seeds", (range(12), pytest.param(range(12, 120), marks=pytest.mark.slow)), ids=len
)
def test_uneven_rows(any_kernel, dtype, seeds):
    errors = {}
    for seed in seeds:
        x, y = uneven_rows(seed, 3000 + 2900 * seed % 40000)
        errors[seed] = worst(any_kernel, x.to(dtype), y.to(dtype))
    print(f"\n{any_kernel.name}, uneven rows, {dtype}: {max(errors.values()):.1e}")
    assert max(errors.values()) <= KL_RTOL, errors
