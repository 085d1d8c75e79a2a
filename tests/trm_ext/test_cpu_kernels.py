# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of every instruction set this machine has, against the float64 twin."""

import itertools
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trm_ext as trm
from tests.rows import (
    GRADIENT_RTOL,
    KL_RTOL,
    LOG_RATIO_ATOL,
    LOG_RATIO_RTOL,
    base_rows,
    exact_kl,
    row_pair,
)
from trm_ext import _lib, reference
from trm_ext.outputs import DIAGNOSTICS, OUTPUTS, VALUES, encode

INF, NAN = float("inf"), float("nan")
# The values of one sweep that need no token.
SUMS = ("kl", "kl_train_rollout", "entropy_rollout", "entropy_train")
STORED = (torch.float32, torch.bfloat16, torch.float16)


AVAILABLE = _lib.available_cpu_capabilities()


@pytest.fixture(params=_lib.CPU_CAPABILITIES)
def capability(request):
    if request.param not in AVAILABLE:
        pytest.skip(f"this processor lacks {request.param}")
    _lib.force_cpu_capability(request.param)
    yield request.param
    _lib.force_cpu_capability(None)


def twin(x, y, tokens=None, outputs=("kl",), temperatures=(None, None)):
    bits = encode(outputs)
    return reference.token_divergence(x, y, tokens, None, *temperatures, x.shape[-1], bits)


def exact_log_ratios(x, y):
    """Of every token, in float64."""
    return y.double().log_softmax(-1) - x.double().log_softmax(-1)


def log_ratio_errors(x, y, tokens):
    """Of these tokens of one row [1, V]."""
    rows = [logits.expand(len(tokens), -1) for logits in (x, y)]
    got = trm.token_divergence(*rows, tokens=tokens, outputs=("log_ratio",)).log_ratio
    return (got.double() - exact_log_ratios(x, y)[0, tokens]).abs()


def check(x, y, outputs, tokens=None):
    """Divergences and diagnostics to KL_RTOL; log-probs and entropies also to 4e-6.

    That is 2^-24 of log S and of logits below 32. chi2 is a sum of q^2/p less what is twice the
    mass outside the rollout's support; the logarithms to base 2 of its terms, below 16, are rounded
    at 2^-20: that much of twice the mass, too.
    """
    got = trm.token_divergence(x, y, tokens=tokens, outputs=outputs)
    values, diagnostics, _ = twin(x, y, tokens, outputs)
    for name, want in zip(outputs, [*values, *diagnostics], strict=True):
        absolute = 0.0 if name in ("kl", "kl_train_rollout", *DIAGNOSTICS) else 4e-6
        if name == "chi2":
            outside = diagnostics[DIAGNOSTICS.index("outside_mass")]
            absolute = 2.0**-20 * 2 * float(outside.max())
        torch.testing.assert_close(
            getattr(got, name).double(), want, rtol=KL_RTOL, atol=absolute, msg=name
        )


def test_a_name_this_processor_lacks_is_refused():
    with pytest.raises(ValueError, match="'mmx' is not one of scalar, avx2, avx512"):
        _lib.force_cpu_capability("mmx")
    code = "import trm_ext"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"TRM_CPU_CAPABILITY": "mmx", "PATH": ""},
    )
    assert result.returncode != 0 and "'mmx' is not one of" in result.stderr


# Around the lanes (8, 16) and blocks (16, 32), the looked-ahead columns (1024), the runs (2048,
# 4096, 12288), a slice (81920).
SMALL = (1, *range(7, 10), *range(15, 18), *range(31, 34))
VOCABULARIES = (*SMALL, 257, 1025, 6143, 6145, 18433, *range(81919, 81922))


class TestValues:
    @pytest.mark.parametrize("vocab", VOCABULARIES)
    def test_every_output_at_every_size(self, capability, vocab):
        x, y = base_rows("flat", 2, vocab, 3).float(), base_rows("flat", 2, vocab, 4).float() * 0.3
        tokens = torch.tensor([0, vocab - 1])
        got = trm.token_divergence(x, y, tokens=tokens, outputs=OUTPUTS)
        values, diagnostics, _ = twin(x, y, tokens, OUTPUTS)
        for name, want in zip(OUTPUTS, [*values, *diagnostics], strict=True):
            # log-probs and entropies: 2^-24 of log S and of logits below 32, absolutely
            torch.testing.assert_close(
                getattr(got, name).double(), want, rtol=KL_RTOL, atol=4e-6, msg=name
            )

    @pytest.mark.parametrize("rollout,train", list(itertools.product(STORED, STORED)), ids=str)
    def test_every_stored_pair(self, capability, rollout, train):
        x, y = row_pair("flat", 3, 4099, 1e-2)
        x, y = x.to(rollout), y.to(train)
        check(x, y, ("kl", "kl_train_rollout", *DIAGNOSTICS))

    @pytest.mark.parametrize("share", (0.01, 0.2, 1.0))
    def test_far_tokens(self, capability, share):
        x = base_rows("flat", 3, 20000)
        far = torch.rand(3, 20000) < share
        y = x + torch.randn(3, 20000).double() * torch.where(far, 3.0, 0.01)
        x, y = x.float(), y.float()
        check(x, y, ("kl", "kl_train_rollout"))

    def test_rising_rows_move_their_frame_often(self, capability):
        x = torch.linspace(-300, 300, 9001)[None].repeat(2, 1)
        y = x.flip(1) * 0.01
        y[1] = x[1] + 0.001 * torch.randn(9001)
        got = trm.token_divergence(x, y).kl.double()
        torch.testing.assert_close(got, exact_kl(x, y), rtol=KL_RTOL, atol=0)

    @pytest.mark.parametrize("lead", (0.5, 2.0, 3.5))
    def test_a_late_heavy_token_with_another_log_ratio(self, capability, lead):
        # As real quantised engines have it: the heaviest token comes late, `lead` nats above what
        # was seen before, and its log-ratio differs from theirs by half a nat. A frame that lags
        # behind would cost digits: G/S is many times the KL.
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(24, 8000, generator=generator) * 3
        y = x - 0.3 * torch.randn(24, 8000, generator=generator)
        x[:, 10], y[:, 10] = 21.2, 21.2 - 0.04
        x[:, 7000], y[:, 7000] = 21.2 + lead, 21.2 + lead - 0.576
        got = trm.token_divergence(x, y).kl.double()
        torch.testing.assert_close(got, exact_kl(x, y), rtol=KL_RTOL, atol=0)

    @pytest.mark.parametrize("cut", (0.1, 0.9, 0.999))
    def test_truncated_rollouts_and_late_support(self, capability, cut):
        x, y = base_rows("flat", 2, 20011, 8), base_rows("flat", 2, 20011, 9)
        off = torch.rand(2, 20011) < cut
        off[:, :9000] = True  # nothing finite in the first run
        x, y = x.masked_fill(off, -INF).float(), y.float()
        check(x, y, ("kl", "kl_train_rollout", *DIAGNOSTICS))

    @pytest.mark.parametrize("noise", (0.05, 1.0, 4.0))
    @pytest.mark.parametrize("share", (0.02, 0.5, 0.9))
    @pytest.mark.parametrize("lacking", ("rollout", "train", "both", "each its own"))
    def test_gaps(self, capability, lacking, share, noise):
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 2, 5003, generator=generator, dtype=torch.float64)
        gap, other = torch.rand(2, *x.shape, generator=generator) < share
        nowhere = torch.zeros_like(gap)
        x_gap, y_gap = {
            "rollout": (gap, nowhere),
            "train": (nowhere, gap),
            "both": (gap, gap),
            "each its own": (gap, other),
        }[lacking]
        y = (x + noise * e).float().masked_fill(y_gap, -INF)
        x = x.float().masked_fill(x_gap, -INF)
        tokens = (x + y).argmax(1)  # a column of both
        check(x, y, OUTPUTS, tokens)

    @pytest.mark.parametrize("noise", (0.05, 2.0, 6.0))
    @pytest.mark.parametrize("low", (80.0, 90.0, 100.0, 120.0, 1e4))
    def test_finite_masks(self, capability, low, noise):
        # Columns so far below the others that their weights are denormal numbers, or 0.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 2, 5003, generator=generator, dtype=torch.float64)
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.3, x - low, x)
        check(x.float(), (x + noise * e).float(), SUMS)

    @pytest.mark.parametrize("height", (10.0, 20.0, 40.0, 54.0))
    @pytest.mark.parametrize("side", ("rollout", "train"))
    def test_a_token_that_one_side_lacks_and_the_other_likes(self, capability, side, height):
        # The divergence of the side that lacks it is that of columns exp(-height) of the other's.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 2, 20011, generator=generator)
        y = x + 0.3 * e
        liked, lacked = (x, y) if side == "rollout" else (y, x)
        liked[:, 700], lacked[:, 700] = height, -INF
        check(x, y, SUMS)
        many = torch.rand(x.shape, generator=generator) < 0.1
        liked[many] += height
        lacked[many] = -INF
        check(x, y, SUMS)

    @pytest.mark.parametrize("noise", (0.05, 2.0))
    @pytest.mark.parametrize("lacking", ("rollout", "train"))
    def test_a_slice_that_one_side_lacks(self, capability, lacking, noise):
        # Slices are merged, whichever sides each of them has.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 2, 90001, generator=generator)
        y = x + noise * e
        (x if lacking == "rollout" else y)[:, :50000] = -INF
        check(x, y, SUMS)
        check(x.flip(1), y.flip(1), SUMS)

    @pytest.mark.parametrize("height", (20.0, 60.0, 100.0))
    @pytest.mark.parametrize("side", ("rollout", "train"))
    def test_a_token_that_one_side_likes_and_the_other_does_not(self, capability, side, height):
        # Elsewhere the sides' masses differ by exp(height): neither may drown the other.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 2, 20011, generator=generator)
        y = x + 0.3 * e
        (x if side == "rollout" else y)[:, 700] = height
        check(x, y, SUMS)
        x[torch.rand(x.shape, generator=generator) < 0.3] = -INF
        check(x, y, SUMS)

    @pytest.mark.parametrize("noise", (0.05, 2.0))
    @pytest.mark.parametrize("share", (0.001, 0.02, 0.3, 0.9))
    def test_each_side_lacks_columns_of_its_own(self, capability, share, noise):
        # Both divergences are infinite; the masses and what is near keep their digits.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 2, 20011, generator=generator)
        y = x + noise * e
        for lacking in ((x,), (y,), (x, y)):
            columns = torch.rand(x.shape, generator=generator) < share
            for side in lacking:
                side[columns] = -INF
        check(x, y, SUMS)
        check(x, y, ("kl", *DIAGNOSTICS))
        leaf = y.clone().requires_grad_()
        kl = trm.token_divergence(x, leaf).kl
        (got,) = torch.autograd.grad(kl, leaf, torch.ones(2))
        want = torch.softmax(y.double(), -1) - torch.softmax(x.double(), -1)
        assert float((got - want).norm() / want.norm()) <= GRADIENT_RTOL

    @pytest.mark.parametrize("vocab", (32, 45, 700))
    def test_one_column_of_each_kind(self, capability, vocab):
        # One that neither side has must not hide the two that make both divergences infinite.
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(2, 300, vocab, generator=generator)
        places = torch.rand(x.shape, generator=generator).argsort(-1)
        for side, columns in ((x, places[:, :2]), (y, places[:, 1:3])):
            side.scatter_(1, columns, -INF)
        check(x, y, SUMS)
        check(x, y, ("kl",))

    @pytest.mark.parametrize("share", (0.01, 0.3))
    @pytest.mark.parametrize("distance", (15.0, 18.0, 40.0, 150.0, 1e4, 1e30, 3e38))
    def test_log_ratios_far_both_ways(self, capability, distance, share):
        # Neither side's mass follows from the other's.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 2, 5003, generator=generator)
        y = x + 0.3 * e
        for side in (x, y):
            low = torch.rand(x.shape, generator=generator) < share
            side[low] = (side[low] - distance).clamp(min=-3.3e38)
        check(x, y, SUMS)
        check(x, y, ("kl",))
        y[:, ::7] = -INF
        check(x, y, ("kl", "tv", "bhattacharyya", "outside_mass"))

    @pytest.mark.parametrize("low", (INF, 1e9, 1e4, 200.0))
    @pytest.mark.parametrize("share", (0.95, 0.99, 0.9995))
    @pytest.mark.parametrize("side", ("rollout", "train", "both"))
    def test_next_to_nothing_is_left(self, capability, side, share, low):
        # As of top-k: hardly a column of the side has mass.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 2, 40009, generator=generator)
        y = x + 0.3 * e
        columns = torch.rand(x.shape, generator=generator) < share
        if side != "train":
            x[columns] = -low
        if side != "rollout":
            y[columns] = -low
        check(x, y, SUMS)
        check(x, y, ("kl",))

    def test_a_rollout_spike_before_the_train_side_s(self, capability):
        # Summed in the frame of what came before, it would drown all that follows.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 1, 23001, generator=generator)
        x, y = 3 * x, 3 * x - 1.4 + 0.01 * e
        x[:, 10089], y[:, 10089] = 40.0, 7.0
        x[:, 21000:], y[:, 21000:] = 0.2 * x[:, 21000:], 12 * x[:, 21000:]
        check(x, y, SUMS)
        check(x, y, ("kl",))

    def test_columns_that_say_nothing_come_first(self, capability):
        # Neither of the KL, nor of whether it needs the rounding of x - y.
        generator = torch.Generator().manual_seed(0)
        x, y = torch.full((2, 6, 32768), -INF)
        columns = 1100 + torch.randperm(1900, generator=generator)[:28]
        x[:, columns] = -3.3322
        y[:, columns] = 5e-5 * torch.randn(6, 28, generator=generator)
        check(x.bfloat16(), y.bfloat16(), ("kl",))

    def test_near_columns_outweigh_the_far_ones_before_them(self, capability):
        # What the far ones' KL allows to round, these do not; here all roundings of x - y add up.
        x, y = torch.full((2, 1, 32768), -INF)
        x[:, :40:2], y[:, :40:2] = 5.5, -9.5
        x[:, 1:40:2], y[:, 1:40:2] = -9.5, 5.5 - 6.125
        ulp = 2.0**-22
        for place, difference in ((9216, 6.115), (9217, 6.135)):
            steps = round(difference / ulp)
            steps += (1 if place % 2 else 3) - steps % 4
            x[:, place::2], y[:, place::2] = 10.0, 10.0 - steps * ulp
            rounding = (x - y)[0, place].double() - steps * ulp
            assert rounding == (-ulp if place % 2 else ulp)
        check(x, y, ("kl",))

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
    @pytest.mark.parametrize("std", (0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0))
    def test_unrelated_policies(self, capability, std, dtype):
        x, y = std * torch.randn(2, 3, 90001, generator=torch.Generator().manual_seed(0))
        check(x.to(dtype), y.to(dtype), ("kl",))
        check(x.to(dtype), y.to(dtype), SUMS)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_next_to_all_mass_is_near_and_comes_last(self, capability, dtype):
        # The KL of what comes first allows sums that this does not.
        x, y, e = torch.randn(3, 3, 32768, generator=torch.Generator().manual_seed(0))
        x[:, :6000] -= 20
        y[:, :6000] -= 20
        y[:, 6000:] = x[:, 6000:] + 0.02 * e[:, 6000:]
        check(x.to(dtype), y.to(dtype), ("kl",))

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
    @pytest.mark.parametrize("noise", (0.02, 0.3))
    @pytest.mark.parametrize("share,low", ((0.01, 1e4), (0.05, 20.0), (0.001, 1e9), (1e-4, 40.0)))
    def test_masks_of_each_side_s_own_among_near_columns(
        self, capability, share, low, noise, dtype
    ):
        # Theirs is the KL, and the near columns' the gradient.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 3, 50021, generator=generator)
        y = x + noise * e
        for side in (x, y):
            side[torch.rand(x.shape, generator=generator) < share] = -low
        x, y = x.to(dtype), y.to(dtype)
        check(x, y, ("kl",))
        check(x, y, SUMS)
        leaf = y.clone().requires_grad_()
        (got,) = torch.autograd.grad(trm.token_divergence(x, leaf).kl, leaf, torch.ones(3))
        want = torch.softmax(y.double(), -1) - torch.softmax(x.double(), -1)
        error = float((got.double() - want).norm() / want.norm())
        assert error <= GRADIENT_RTOL + torch.finfo(dtype).eps / 2

    @pytest.mark.parametrize("begins_apart", (False, True))
    @pytest.mark.parametrize("step", (7e-5, 1.3e-4, 3e-4, 1.1e-3, 0.03))
    def test_light_columns_of_each_side_s_own_among_near_ones(self, capability, step, begins_apart):
        # The KL is the near columns', which all round alike, and too small for differences of sums;
        # that of the first columns alone would not be.
        generator = torch.Generator().manual_seed(0)
        x = torch.zeros(3, 8192)
        y = step * torch.randn(x.shape, generator=generator).sign()
        if begins_apart:
            x[:, :6144], y[:, :6144], y[:, :6144:20] = -20.0, -20.0, -40.0
        x[:, ::97], y[:, ::97] = -20.0, -50.0
        x[:, 5::97], y[:, 5::97] = -50.0, -20.0
        check(x, y, ("kl",))
        check(x, y, SUMS)

    @pytest.mark.parametrize("low", (1e4, 1e9))
    def test_the_gradient_beside_a_column_far_out(self, capability, low):
        # Its log-ratio makes the KL large, and its share next to nothing of the gradient.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 3, 32768, generator=generator)
        y = x + 0.01 * e
        y[:, 100::4000] = -low
        leaf = y.clone().requires_grad_()
        kl = trm.token_divergence(x, leaf).kl
        assert float(kl.detach().min()) > 0.5
        (got,) = torch.autograd.grad(kl, leaf, torch.ones(3))
        want = torch.softmax(y.double(), -1) - torch.softmax(x.double(), -1)
        assert float((got - want).norm() / want.norm()) <= GRADIENT_RTOL

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
    @pytest.mark.parametrize("kind", ("noise", "unrelated", "remote", "gaps", "masks", "spike"))
    def test_log_ratios_near_zero(self, capability, kind, dtype):
        # All tokens of a row inherit the error of its two masses.
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            x, e, f = torch.randn(3, 1, 4099, generator=generator)
            x = (1, 3, 6, 9)[seed] * x
            y = x + e
            lacking = torch.rand(x.shape, generator=generator) < 0.1
            if kind == "unrelated":
                y = x.std() * f
            elif kind == "remote":
                y = y - (15 + f.abs()) * ~lacking
            elif kind == "gaps":
                y[lacking] = -INF
            elif kind == "masks":
                y[lacking] = -1e4
            elif kind == "spike":
                x[:, 700] += 40
            x, y = x.to(dtype), y.to(dtype)
            sizes, tokens = (found[:20] for found in exact_log_ratios(x, y)[0].abs().sort())
            limits = (LOG_RATIO_RTOL * sizes).clamp_min(LOG_RATIO_ATOL)
            assert bool((log_ratio_errors(x, y, tokens) <= limits).all())

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_the_log_ratio_beside_equal_columns(self, capability, dtype):
        # Beside a token that holds the mass, a float rounds what such columns add, each alike.
        # However many they are, less than one rounding of a float32 mass may come of it.
        x = torch.linspace(0, 0.5, 50000)[None]
        y = x + 0.3
        tokens = torch.tensor([2382, 11747, 23171, 45470, 49628])
        x[:, tokens] += 15
        y[:, tokens] += 15 * torch.tensor([1.0, 1.03, 0.98, 1.0, 1.02])
        x, y = x.to(dtype), y.to(dtype)
        errors = log_ratio_errors(x, y, tokens)
        assert float(errors.max()) <= torch.finfo(torch.float32).eps / 2

    @pytest.mark.parametrize("first", (5, 40, 300))
    @pytest.mark.parametrize("move", (0.05, 0.1, 0.2, 0.3, 0.6))
    def test_the_log_ratios_of_two_tokens_above_equal_columns(self, capability, move, first):
        # A chain of floats that holds such a token rounds all that it adds to it alike.
        for level in (0.0, 0.003, 0.1, 0.3):
            x = torch.full((1, 4097), level)
            y = 0.7 * x + 0.01
            tokens = torch.tensor([first, first + 1500, 9])
            x[0, tokens[:2]] += 15
            y[0, tokens[:2]] += 15 + move * torch.tensor([1.0, -0.7])
            for dtype in STORED:
                pair = x.to(dtype), y.to(dtype)
                sizes = exact_log_ratios(*pair)[0, tokens].abs()
                limits = (LOG_RATIO_RTOL * sizes).clamp_min(LOG_RATIO_ATOL)
                assert bool((log_ratio_errors(*pair, tokens) <= limits).all())

    def test_the_entropy_of_a_train_side_far_apart(self, capability):
        # Next to all of the rollout's mass is where the train side has next to none.
        x, e = torch.randn(2, 24, 50000, generator=torch.Generator().manual_seed(0))
        x = 9 * x
        y = torch.where(e < 0, x - 100 + e, x)
        x[:, 10000:11500] += 40
        got = trm.token_divergence(x, y, outputs=SUMS).entropy_train
        want = twin(x, y, outputs=("entropy_train",))[0][0]
        # 2^-24 of logarithms of masses below 32.
        limit = 32 * torch.finfo(torch.float32).eps / 2
        torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit)

    @pytest.mark.parametrize("temperatures", ((1.0, 1.0), (0.6, 0.6), (0.7, 1.3)), ids=str)
    @pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
    @pytest.mark.parametrize("offset", (1e6, 1e9, 1e11, 1e15, 3e38))
    @pytest.mark.parametrize("side", ("rollout", "train"))
    def test_one_side_far_off_as_a_whole(self, capability, side, offset, dtype, temperatures):
        # Equal logits are the uniform policy wherever they lie. The shift keeps what a float of its
        # size would round, and of a quotient's rounding nothing is left.
        x = 6 * torch.randn(3, 5003, generator=torch.Generator().manual_seed(0))
        x, tokens = x.to(dtype), torch.tensor([0, 7, 5002])
        far, zero = torch.full_like(x, -offset), torch.zeros_like(x)
        pair, same = ((far, x), (zero, x)) if side == "rollout" else ((x, far), (x, zero))
        leaves = [t.clone().requires_grad_() for t in pair]
        t_x, t_y = (torch.full((3,), t, dtype=torch.float64) for t in temperatures)
        got = trm.token_divergence(
            *leaves, tokens=tokens, outputs=OUTPUTS, rollout_temperature=t_x, train_temperature=t_y
        )
        values, diagnostics, statistics = twin(*same, tokens, OUTPUTS, (t_x, t_y))
        for name, want in zip(OUTPUTS, [*values, *diagnostics], strict=True):
            absolute = 0.0 if name in ("kl", "kl_train_rollout", *DIAGNOSTICS[:2]) else 4e-6
            torch.testing.assert_close(
                getattr(got, name).double(), want, rtol=KL_RTOL, atol=absolute, msg=name
            )
        upstream = torch.randn(len(VALUES), 3, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad(list(got[: len(VALUES)]), leaves, list(upstream.to(got.kl)))
        wants = reference.token_divergence_backward(
            upstream, *same, statistics, tokens, None, t_x, t_y, 0, 5003, encode(VALUES), True, True
        )
        for grad, want in zip(grads, wants, strict=True):
            error = float((grad.double() - want).norm() / want.norm())
            assert error <= GRADIENT_RTOL + torch.finfo(dtype).eps / 2

    @pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
    @pytest.mark.parametrize(
        "depths", ((1e20, 1e9), (1e9, 3e38), (1e4, 3e38), (3e38, 1e4)), ids=str
    )
    def test_both_sides_masked_each_at_its_own_depth(self, capability, depths, dtype):
        # Wholly, and all but one token of one side.
        x, y = (torch.full((3, 4099), -depth, dtype=dtype) for depth in depths)
        x[1, 5], y[2, 4000] = 3.0, -20.0
        check(x, y, (*SUMS, "log_ratio"), torch.tensor([0, 5, 4000]))

    @pytest.mark.parametrize("gaps", (0.0, 0.3))
    @pytest.mark.parametrize("low", (1e3, 3e5, 1e6, 1e7, 1e16, 3e38))
    @pytest.mark.parametrize("side", ("rollout", "train"))
    def test_finite_masks_of_one_side(self, capability, side, low, gaps):
        # The divergence of the other side is their share of it times `low`.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 2, 5003, generator=generator)
        y = x + 0.3 * e
        masked = x if side == "rollout" else y
        masked[torch.rand(x.shape, generator=generator) < 0.1] = -low
        x[torch.rand(x.shape, generator=generator) < gaps] = -INF
        check(x, y, SUMS)

    @pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
    @pytest.mark.parametrize("low", (1e4, 1e6, 1e9, 1e20, 3e38))
    @pytest.mark.parametrize("side", ("rollout", "train", "both"))
    def test_slices_of_finite_masks_alone(self, capability, side, low, dtype):
        # As a grammar leaves them: few tokens in the first slice and the last, none in between.
        generator = torch.Generator().manual_seed(0)
        vocab = 199999
        x, e = torch.randn(2, 2, vocab, generator=generator)
        x, y = (3 * x).to(dtype), (3 * x + 0.3 * e).to(dtype)
        masked = torch.ones(vocab, dtype=torch.bool)
        masked[[5, 77, 30000, 180000, 199990]] = False
        x = x if side == "train" else x.masked_fill(masked, -low)
        y = y if side == "rollout" else y.masked_fill(masked, -low)
        tokens = torch.tensor([77, 180000])
        check(x, y, (*SUMS, "log_ratio"), tokens)
        leaves = [t.clone().requires_grad_() for t in (x, y)]
        kl = trm.token_divergence(*leaves).kl
        grads = torch.autograd.grad(kl, leaves, torch.ones_like(kl))
        bits = encode(("kl",))
        upstream, whole = torch.ones(1, 2), (None, None, None, None, 0, vocab, bits, True, True)
        wants = reference.token_divergence_backward(upstream, x, y, twin(x, y)[2], *whole)
        # The rollout side, p (t - KL), is measured against its terms.
        terms = (torch.softmax(x.double(), -1) * kl.detach()[:, None]).norm(), 0.0
        for grad, want, scale in zip(grads, wants, terms, strict=True):
            if side == "train" and low > 1e30 and grad is grads[0]:
                continue  # float32 gradients bound log-ratios at 1e30
            error = float((grad.double() - want).norm() / (want.norm() + scale))
            assert error <= GRADIENT_RTOL + torch.finfo(dtype).eps / 2

    @pytest.mark.parametrize("temperatures", ((1.0, 1.0), (0.5, 0.5), (0.5, 0.6), (2.0, 0.5)))
    @pytest.mark.parametrize("noise", (0.05, 1.0))
    @pytest.mark.parametrize("dtype", STORED)
    def test_columns_masked_with_the_lowest_number(self, capability, dtype, noise, temperatures):
        # Its product with log2(e), or over a temperature below 1, overflows.
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 2, 300, generator=generator, dtype=torch.float64)
        y = x + noise * e
        x[:, ::3] = y[:, ::3] = torch.finfo(dtype).min
        x, y = x.to(dtype), y.to(dtype)
        leaves = [t.clone().requires_grad_() for t in (x, y)]
        t_x, t_y = (torch.full((2,), t, dtype=torch.float64) for t in temperatures)
        tokens = torch.tensor([1, 2])
        got = trm.token_divergence(
            *leaves, tokens=tokens, outputs=OUTPUTS, rollout_temperature=t_x, train_temperature=t_y
        )
        values, diagnostics, statistics = twin(x, y, tokens, OUTPUTS, (t_x, t_y))
        overflow = t_x[0] != t_y[0] and min(temperatures) < 1 and dtype != torch.float16
        for name, want in zip(OUTPUTS, [*values, *diagnostics], strict=True):
            if name == "max_log_ratio" and overflow:
                continue  # of the masked columns: between logits of which one is no float32
            torch.testing.assert_close(
                getattr(got, name).double(), want, rtol=KL_RTOL, atol=4e-6, msg=name
            )
        upstream = torch.randn(len(VALUES), 2)
        grads = torch.autograd.grad(list(got[: len(VALUES)]), leaves, list(upstream))
        wants = reference.token_divergence_backward(
            upstream, x, y, statistics, tokens, None, t_x, t_y, 0, 300, encode(VALUES), True, True
        )
        for grad, want in zip(grads, wants, strict=True):
            error = float((grad.double() - want).norm() / want.norm())
            assert error <= GRADIENT_RTOL + torch.finfo(dtype).eps / 2

    @pytest.mark.parametrize("height", (60.0, 90.0, 118.0, 300.0))
    @pytest.mark.parametrize("side", ("rollout", "train"))
    def test_a_spike_leaves_one_side_no_weight_elsewhere(self, capability, side, height):
        generator = torch.Generator().manual_seed(0)
        x, e = torch.randn(2, 2, 20011, generator=generator, dtype=torch.float64)
        x = 2 * x
        y = x - 9 + 0.3 * e
        (x if side == "rollout" else y)[:, 3800] += height
        check(x.float(), y.float(), SUMS)

    @pytest.mark.parametrize("column", (0, 8000, 8192, 44991, 44992, 89999))
    def test_flags_anywhere(self, capability, column):
        x, y = torch.randn(4, 90000), torch.randn(4, 90000)
        x[0, column] = NAN
        y[1, column] = INF
        x[2, column], y[2, column] = -200.0, -INF
        x[3, column], y[3, column] = -INF, -200.0
        got = trm.token_divergence(x, y, outputs=("kl", "kl_train_rollout"))
        assert torch.isnan(got.kl[:2]).all() and torch.isnan(got.kl_train_rollout[:2]).all()
        assert got.kl[2] == INF and got.kl_train_rollout[2].isfinite()
        assert got.kl[3].isfinite() and got.kl_train_rollout[3] == INF

    def test_logits_whose_difference_overflows_float32(self, capability):
        x = torch.tensor([[3e38, -3e38, 0.0]])
        y = torch.tensor([[-3e38, 3e38, 0.0]])
        got = trm.token_divergence(x, y).kl
        assert got.item() == INF or got.item() > 3e38  # 6e38 is not a float32
        x = torch.tensor([[1e37, -3.4e38, 0.0, 5.0]])
        y = torch.tensor([[1e37, 1e36, -3.4e38, 7.0]])
        torch.testing.assert_close(
            trm.token_divergence(x, y, outputs=OUTPUTS[:4])[:4],
            tuple(twin(x, y, outputs=OUTPUTS[:4])[0].float()),
            rtol=1e-6,
            atol=1e-6,
        )

    def test_instruction_sets_agree(self):
        x, y = row_pair("flat", 2, 30000, 1e-6)
        x, y = x.float(), torch.log_softmax(y, -1).float()
        found = []
        for name in AVAILABLE:
            _lib.force_cpu_capability(name)
            found.append(trm.token_divergence(x, y).kl)
        _lib.force_cpu_capability(None)
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=2 * KL_RTOL, atol=0)


class TestTemperature:
    @pytest.mark.parametrize("pair", ((1.0, 1.0), (0.6, 0.6), (0.6, 1.0), (1.3, 0.7)), ids=str)
    @pytest.mark.parametrize("kind", ("flat", "peaked"))
    def test_accuracy(self, capability, kind, pair):
        scaled_x, scaled_y = row_pair(kind, 2, 8192, 1e-9)
        x, y = (scaled_x * pair[0]).float(), (scaled_y * pair[1]).float()
        rows = [torch.full((2,), t, dtype=torch.float64) for t in pair]
        outputs = ("kl", "kl_train_rollout", *DIAGNOSTICS)
        got = trm.token_divergence(
            x, y, outputs=outputs, rollout_temperature=pair[0], train_temperature=pair[1]
        )
        values, diagnostics, _ = twin(x, y, outputs=outputs, temperatures=rows)
        for name, want in zip(outputs, [*values, *diagnostics], strict=True):
            atol = 1e-6 if name == "max_log_ratio" else 0
            torch.testing.assert_close(
                getattr(got, name).double(), want, rtol=KL_RTOL, atol=atol, msg=name
            )

    @pytest.mark.parametrize("dtype", STORED, ids=str)
    def test_per_row_and_gradients(self, capability, dtype):
        x, y = row_pair("flat", 3, 1000, 1e-2)
        x, y = x.to(dtype), y.to(dtype)
        t_x = torch.tensor([0.6, 1.0, 2.0], dtype=torch.float64)
        t_y = torch.tensor([0.6, 1.5, 2.0], dtype=torch.float64)
        leaves = [t.detach().clone().requires_grad_() for t in (x, y)]
        tokens = torch.tensor([1, 2, 999])
        got = trm.token_divergence(
            *leaves, tokens=tokens, outputs=VALUES, rollout_temperature=t_x, train_temperature=t_y
        )
        bits = encode(VALUES)
        values, _, statistics = twin(x, y, tokens, VALUES, (t_x, t_y))
        for name, want in zip(VALUES, values, strict=True):
            torch.testing.assert_close(getattr(got, name).double(), want, rtol=KL_RTOL, atol=4e-6)
        upstream = torch.randn(len(VALUES), 3)
        grads = torch.autograd.grad(list(got[: len(VALUES)]), leaves, list(upstream))
        wants = reference.token_divergence_backward(
            upstream, x, y, statistics, tokens, None, t_x, t_y, 0, 1000, bits, True, True
        )
        for grad, want in zip(grads, wants, strict=True):
            error = float((grad.double() - want).norm() / want.norm())
            assert error <= GRADIENT_RTOL + torch.finfo(dtype).eps / 2

    @pytest.mark.parametrize("temperature", (0.6, 0.7, 1.3))
    def test_the_same_logits_at_the_same_temperature_have_no_divergence(self, temperature):
        x = torch.randn(3, 500) * 5
        same = {"rollout_temperature": temperature, "train_temperature": temperature}
        assert torch.equal(trm.token_divergence(x, x.clone(), **same).kl, torch.zeros(3))
        # One side forgotten: nats of divergence, not rounding.
        assert trm.token_divergence(x, x.clone(), rollout_temperature=temperature).kl.min() > 1e-3

    @pytest.mark.parametrize("bad", (0.0, -1.0, NAN, INF))
    def test_bad_numbers(self, bad):
        x = torch.zeros(2, 3)
        with pytest.raises(ValueError, match=f"rollout_temperature must be .* got {bad}"):
            trm.token_divergence(x, x, rollout_temperature=bad)
        row = torch.tensor([1.0, bad])
        kl = trm.token_divergence(torch.randn(2, 3), torch.randn(2, 3), train_temperature=row).kl
        assert kl[0].isfinite() and torch.isnan(kl[1])

    def test_bad_shapes(self):
        x = torch.zeros(2, 3)
        with pytest.raises(ValueError, match=r"\[2\], got \[3\]"):
            trm.token_divergence(x, x, train_temperature=torch.ones(3))
        with pytest.raises(TypeError, match=r"torch\.int64"):
            trm.token_divergence(x, x, train_temperature=torch.ones(2).long())


class TestGradients:
    @pytest.mark.parametrize("rollout,train", list(itertools.product(STORED, STORED)), ids=str)
    def test_every_stored_pair(self, capability, rollout, train):
        x, y = row_pair("flat", 2, 4099, 0.05)
        x = x.masked_fill(torch.rand(2, 4099) < 0.2, -INF).to(rollout)
        y = y.to(train)
        tokens = torch.tensor([5, 4098])
        x[:, 5] = 1.0
        for outputs in (("kl",), VALUES[:1] + VALUES[2:]):
            leaves = [t.detach().clone().requires_grad_() for t in (x, y)]
            got = trm.token_divergence(*leaves, tokens=tokens, outputs=outputs)
            fields = [getattr(got, name) for name in outputs]
            upstream = torch.randn(len(outputs), 2)
            grads = torch.autograd.grad(fields, leaves, list(upstream))
            statistics = twin(x, y, tokens, outputs)[2]
            wants = reference.token_divergence_backward(
                upstream, x, y, statistics, tokens, None, None, None, 0, 4099, encode(outputs),
                True, True,
            )  # fmt: skip
            for grad, want, leaf in zip(grads, wants, leaves, strict=True):
                known = want.isfinite()
                error = float((grad.double() - want)[known].norm() / want[known].norm())
                assert error <= GRADIENT_RTOL + torch.finfo(leaf.dtype).eps / 2

    def test_diagnostics_have_no_gradient_and_say_so(self):
        y = torch.randn(2, 9, requires_grad=True)
        got = trm.token_divergence(torch.randn(2, 9), y, outputs=("kl", "tv"))
        with pytest.raises(RuntimeError, match="diagnostics without a gradient"):
            (got.kl + got.tv).sum().backward()
        got = trm.token_divergence(torch.randn(2, 9), y, outputs=("kl", "tv"))
        (got.kl + got.tv.detach()).sum().backward()
        assert y.grad.isfinite().all()

    def test_each_output_alone(self, capability):
        x, y = torch.randn(2, 40), torch.randn(2, 40)
        for name in VALUES:
            leaves = [t.clone().requires_grad_() for t in (x, y)]
            got = trm.token_divergence(*leaves, tokens=torch.tensor([3, 4]), outputs=(name,))
            getattr(got, name).sum().backward()
            wide = [t.double().requires_grad_() for t in (x, y)]
            want = trm.token_divergence(*wide, tokens=torch.tensor([3, 4]), outputs=(name,))
            getattr(want, name).sum().backward()
            for leaf, exact in zip(leaves, wide, strict=True):
                torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


class TestDeterminism:
    @pytest.mark.parametrize("rows", (1, 2, 3, 9))
    def test_threads_and_rows_never_change_a_bit(self, rows):
        x, y = torch.randn(rows, 190001), torch.randn(rows, 190001)
        tokens = torch.arange(rows)
        found = []
        threads = torch.get_num_threads()
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            leaf = y.clone().requires_grad_()
            got = trm.token_divergence(x, leaf, tokens=tokens, outputs=OUTPUTS)
            got.kl.sum().backward()
            found.append([*(field.detach() for field in got), leaf.grad])
        torch.set_num_threads(threads)
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
        alone = trm.token_divergence(x[-1:], y[-1:], tokens=tokens[-1:], outputs=OUTPUTS)
        assert all(
            torch.equal(a[-1:], b) for a, b in zip(found[0][: len(OUTPUTS)], alone, strict=True)
        )


class TestMemory:
    def test_masked_rows_lie_on_unreadable_pages(self):
        # Row 1 of three is made inaccessible: reading it would end the process.
        code = """
            import ctypes, mmap, torch
            import trm_ext as trm
            page, columns = mmap.PAGESIZE, mmap.PAGESIZE // 4 * 3
            maps = [mmap.mmap(-1, 9 * page) for _ in range(2)]
            x, y = (torch.frombuffer(m, dtype=torch.float32).view(3, columns) for m in maps)
            x.copy_(torch.randn(3, columns)); y.copy_(torch.randn(3, columns))
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            for t in (x, y):
                assert libc.mprotect(t.data_ptr() + 3 * page, 3 * page, 0) == 0
            mask = torch.tensor([True, False, True])
            leaf = y.requires_grad_()
            d = trm.token_divergence(x, leaf, token_mask=mask, outputs=("kl", "tv"))
            d.kl.sum().backward()
            assert leaf.grad[[0, 2]].any() and not leaf.grad[1].any()
            print("read nothing", d.kl[1].item())
        """
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.stdout == "read nothing 0.0\n", result.stderr

    def test_nothing_beside_the_columns_is_used(self):
        # NaN canaries on all sides of a misaligned window.
        for shift in (1, 2, 3):
            memory = torch.full((5, 140), NAN)
            x, y = torch.randn(3, 77), torch.randn(3, 77)
            window = memory[1:4, shift : shift + 77]
            window.copy_(x)
            assert torch.equal(trm.token_divergence(window, y).kl, trm.token_divergence(x, y).kl)

    @pytest.mark.parametrize("rows,vocab", ((4096, 64), (2, 200000)))
    def test_extra_memory_is_64_bytes_a_row(self, rows, vocab):
        x, y = torch.randn(rows, vocab), torch.randn(rows, vocab, requires_grad=True)
        upstream = torch.ones(rows)
        trm.token_divergence(x, y).kl.backward(upstream)  # warm
        y.grad = None
        with torch.profiler.profile(profile_memory=True) as profile:
            kl = trm.token_divergence(x, y).kl
            kl.backward(upstream)
        events = profile.profiler.kineto_results.events()
        live = peak = 0
        for event in events:
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        requested = rows * 4 + rows * vocab * 4  # kl and the gradient of y
        assert peak > requested  # the profiler saw our allocations
        # 4 more bytes a row: the upstream gradient stacked by autograd
        assert peak <= requested + (64 + 4) * rows + 2**20

    @pytest.mark.slow
    def test_more_than_2_to_31_elements(self):
        rows, vocab = 14200, 151936  # 2.16e9 elements; memory never touched costs nothing
        x = torch.empty(rows, vocab, dtype=torch.bfloat16)
        y = torch.empty(rows, vocab, dtype=torch.bfloat16)
        mask = torch.zeros(rows, dtype=torch.bool)
        for row in (0, 14135, rows - 1):  # 14135 * 151936 is just above 2^31
            x[row], y[row] = torch.randn(vocab), torch.randn(vocab)
            mask[row] = True
        kl = trm.token_divergence(x, y, token_mask=mask).kl
        small = trm.token_divergence(x[mask], y[mask]).kl
        assert torch.equal(kl[mask], small) and small.min() > 0.1 and not kl[~mask].any()
        leaf = y.requires_grad_()
        trm.token_divergence(x, leaf, token_mask=mask).kl.sum().backward()
        want = y.detach()[mask].clone().requires_grad_()
        trm.token_divergence(x[mask], want).kl.sum().backward()
        assert torch.equal(leaf.grad[mask], want.grad)
        assert not leaf.grad[1].any() and not leaf.grad[14136].any()


small_logits = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)


class TestProperties:
    @settings(max_examples=150, deadline=None)
    @given(small_logits, st.data())
    def test_laws_of_kl(self, values, data):
        x = torch.tensor([values])
        noise = data.draw(
            st.lists(st.floats(-3, 3, width=32), min_size=len(values), max_size=len(values))
        )
        y = x + torch.tensor([noise])
        got = trm.token_divergence(x, y, outputs=("kl", "tv", "bhattacharyya", "kl_train_rollout"))
        kl, tv, bhattacharyya = (float(t) for t in (got.kl, got.tv, got.bhattacharyya))
        slack = 1 + KL_RTOL
        assert kl >= 0 and 0 <= tv <= 1 + 1e-6
        assert tv <= (kl / 2) ** 0.5 * slack + 1e-7  # Pinsker
        assert 2 * bhattacharyya <= kl * slack + 1e-9  # Hellinger: -2 log(1 - b) <= KL
        exact = float(exact_kl(x, y)[0])
        assert abs(kl - exact) <= KL_RTOL * exact + 1e-12
        if float(exact) > 1e-9:
            assert kl > 0
        order = torch.randperm(len(values))
        permuted = float(trm.token_divergence(x[:, order], y[:, order]).kl)
        assert abs(permuted - kl) <= 2 * KL_RTOL * exact + 1e-12

    @settings(max_examples=80, deadline=None)
    @given(small_logits, st.integers(-64, 64))
    def test_shift_invariance(self, values, shift):
        x = torch.tensor([values], dtype=torch.float64)
        y = x * 0.5
        plain = trm.token_divergence(x, y).kl
        moved = trm.token_divergence(x + shift, y - shift).kl
        torch.testing.assert_close(moved, plain, rtol=1e-10, atol=1e-13)

    @settings(max_examples=80, deadline=None)
    @given(small_logits, small_logits)
    def test_chain_rule_over_a_split(self, left, right):
        # KL = KL of the split's masses + mass-weighted KL within each part.
        x = torch.tensor([left + right], dtype=torch.float64)
        y = x.flip(1) * 0.7
        cut = len(left)
        whole = trm.token_divergence(x, y).kl
        masses = [
            torch.stack([torch.logsumexp(t[:, :cut], 1), torch.logsumexp(t[:, cut:], 1)], 1)
            for t in (x, y)
        ]
        between = trm.token_divergence(*masses).kl
        p = torch.softmax(masses[0], 1)
        inside = [trm.token_divergence(x[:, a:b], y[:, a:b]).kl for a, b in ((0, cut), (cut, None))]
        total = between + p[:, 0] * inside[0] + p[:, 1] * inside[1]
        torch.testing.assert_close(whole, total, rtol=1e-9, atol=1e-12)
