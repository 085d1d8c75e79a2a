# SPDX-License-Identifier: Apache-2.0
"""token_divergence: values and gradients against the float64 twin, and every edge rule."""

import itertools

import pytest
import torch

import trm_ext as trm
from tests.rows import GRADIENT_RTOL, KL_RTOL, base_rows, exact_kl, row_pair
from trm_ext import reference
from trm_ext.outputs import OUTPUTS, VALUES, encode

INF = float("inf")
NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def oracle(x, y, tokens=None, token_mask=None, outputs=("kl",)):
    bits = encode(outputs)
    return reference.token_divergence(x, y, tokens, token_mask, None, None, x.shape[-1], bits)


def oracle_gradient(x, y, grads, outputs=("kl",), tokens=None, token_mask=None, vocab_size=None):
    """d(sum of grads * values)/dx and /dy in float64, by the analytic twin."""
    vocab_size = x.shape[-1] if vocab_size is None else vocab_size
    bits = encode(outputs)
    statistics = reference.token_divergence(x, y, tokens, token_mask, None, None, vocab_size, bits)[
        2
    ]
    return reference.token_divergence_backward(
        grads, x, y, statistics, tokens, token_mask, None, None, 0, vocab_size, bits, True, True
    )


def gradients(x, y, weight, **arguments):
    x = x.detach().clone().requires_grad_()
    y = y.detach().clone().requires_grad_()
    kl = trm.token_divergence(x, y, **arguments).kl
    return torch.autograd.grad((kl * weight).sum(), (x, y))


def gradients_of_views(x, y, weight):
    """As gradients(), on the tensors themselves instead of copies."""
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    return torch.autograd.grad((trm.token_divergence(x, y).kl * weight).sum(), (x, y))


def relative_l2(got, want):
    return float((got.double() - want).norm() / want.norm())


def rollout_error(got, want, x, y, weight):
    """Relative L2 error of d kl / d rollout, against its terms p (|t| + KL).

    The difference p (t - KL) cancels where t is close to KL: on a row with one heavy token.
    """
    p, q = torch.log_softmax(x.double(), -1), torch.log_softmax(y.double(), -1)
    t = torch.where(p > -INF, p - q, 0.0)
    terms = p.exp() * (t.abs() + exact_kl(x, y)[:, None]) * weight[:, None]
    return float((got.double() - want).norm() / terms.norm())


class TestValues:
    @pytest.mark.parametrize("rollout,train", list(itertools.product(DTYPES, DTYPES)), ids=str)
    def test_every_dtype_pair(self, rollout, train):
        # 4099 is prime: no vector width, tile or slice divides it.
        x, y = row_pair("flat", 3, 4099, 1e-2)
        x, y = x.to(rollout), y.to(train)
        got = trm.token_divergence(x, y).kl
        wide = torch.float64 in (rollout, train)
        assert got.dtype == (torch.float64 if wide else torch.float32)
        want = oracle(x, y)[0][0]
        rtol = 1e-12 if wide else KL_RTOL
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=0)

    @pytest.mark.parametrize("kl", (1e-9, 1e-6, 1e-3, 0.1, 1.0, 10.0))
    @pytest.mark.parametrize("kind", ("flat", "peaked", "sharp"))
    def test_relative_accuracy_from_1e9_up(self, kind, kl):
        x, y = row_pair(kind, 2, 32768, kl)
        cases = {
            "plain": (x, y),
            "log-probs": (x, torch.log_softmax(y, -1)),
            "+60": (x, y + 60),
        }
        for name, (a, b) in cases.items():
            a, b = a.float(), b.float()
            want = exact_kl(a, b)
            got = trm.token_divergence(a, b).kl.double()
            assert float(((got - want) / want).abs().max()) <= KL_RTOL, name

    def test_all_outputs(self):
        x, y = row_pair("flat", 4, 1009, 0.3)
        tokens = torch.tensor([0, 7, 1008, 500])
        got = trm.token_divergence(x, y, tokens=tokens, outputs=OUTPUTS)
        values, diagnostics, _ = oracle(x, y, tokens, outputs=OUTPUTS)
        for name, value in zip(OUTPUTS, [*values, *diagnostics], strict=True):
            torch.testing.assert_close(getattr(got, name), value, rtol=1e-12, atol=0, msg=name)

    def test_unrequested_outputs_are_none(self):
        got = trm.token_divergence(torch.zeros(1, 3), torch.zeros(1, 3), outputs=("entropy_train",))
        assert got.kl is None and got.entropy_train is not None

    @pytest.mark.parametrize("vocab", (1, 2, 15, 16, 17, 2047, 2048, 2049, 4097))
    def test_vocabularies_around_every_slice(self, vocab):
        x, y = base_rows("flat", 2, vocab, 3), base_rows("flat", 2, vocab, 4)
        got = trm.token_divergence(x.float(), y.float()).kl.double()
        want = exact_kl(x.float(), y.float())
        torch.testing.assert_close(got, want, rtol=KL_RTOL, atol=0)

    def test_one_column_is_zero(self):
        assert trm.token_divergence(torch.tensor([[3.0]]), torch.tensor([[-1.0]])).kl.item() == 0

    def test_closed_form_two_tokens(self):
        # p = (1/2, 1/2), q = (1, e)/(1 + e): KL = log((1 + e)/2) - 1/2
        got = trm.token_divergence(torch.zeros(2), torch.tensor([0.0, 1.0])).kl
        want = torch.tensor(2.718281828459045 + 1).div(2).log() - 0.5
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)

    def test_rows_do_not_depend_on_each_other_or_on_threads(self):
        x, y = row_pair("flat", 5, 5000, 1e-3)
        x, y = x.float(), y.float()
        alone = torch.cat([trm.token_divergence(x[i : i + 1], y[i : i + 1]).kl for i in range(5)])
        threads = torch.get_num_threads()
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert torch.equal(trm.token_divergence(x, y).kl, alone)
        finally:
            torch.set_num_threads(threads)


class TestShapesAndStrides:
    def views(self):
        base = torch.randn(4, 3, 90)
        yield "transposed lead", base.transpose(0, 1)
        yield "vocabulary first", base.permute(1, 2, 0)[..., :3]
        yield "shifted", base[:, :-1]
        yield "step 2 columns", base[..., ::2]
        yield "unaligned by one", base.reshape(-1)[1 : 1 + 4 * 200].reshape(4, 200)
        yield "expanded rows", base[:1, :1].expand(5, 2, 90)
        yield "four lead dimensions", torch.randn(2, 2, 2, 2, 17)
        yield "no lead dimension", torch.randn(33)

    def test_every_view_equals_its_copy(self):
        for name, x in self.views():
            noise = torch.randn(x.shape[-1]) * 0.1
            y = x + noise
            weight = torch.rand(x.shape[:-1])
            got = trm.token_divergence(x, y.contiguous()).kl
            copy = trm.token_divergence(x.clone(), y.clone()).kl
            assert torch.equal(got, copy), name
            assert got.shape == x.shape[:-1], name
            x_view = x.detach().requires_grad_()
            kl = trm.token_divergence(x_view, y.detach()).kl
            (grad,) = torch.autograd.grad((kl * weight).sum(), x_view)
            flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1])
            want = oracle_gradient(flat_x, flat_y, weight.reshape(1, -1))[0]
            assert relative_l2(grad.reshape(flat_x.shape), want) < 1e-5, name

    def test_masks_ids_temperatures_and_gradients_of_any_stride(self):
        x, y = torch.randn(3, 4, 50), torch.randn(3, 4, 50)
        tokens = torch.randint(50, (4, 3)).t()
        mask = torch.rand(3, 8)[:, ::2] < 0.7
        temperature = torch.tensor([0.5, 1.0, 2.0]).double()[:, None].expand(3, 4)
        results = []
        for dense in (False, True):
            arguments = [t.contiguous() if dense else t for t in (tokens, mask, temperature)]
            leaf = y.clone().requires_grad_()
            got = trm.token_divergence(
                x,
                leaf,
                tokens=arguments[0],
                token_mask=arguments[1],
                train_temperature=arguments[2],
                outputs=("kl", "log_ratio", "tv"),
            )
            upstream = torch.arange(12.0).reshape(4, 3).t()
            upstream = upstream.contiguous() if dense else upstream
            torch.autograd.backward([got.kl, got.log_ratio], [upstream, upstream])
            results.append([got.kl.detach(), got.log_ratio.detach(), got.tv.detach(), leaf.grad])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert results[0][3].any()

    @pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
    @pytest.mark.parametrize("shift", (1, 2, 3))
    def test_misaligned_views_forward_and_backward(self, dtype, shift):
        memory = torch.full((3 * 131 + 8,), NAN, dtype=dtype)
        window = memory[shift : shift + 3 * 131].view(3, 131)
        window.copy_(torch.randn(3, 131))
        y = torch.randn(3, 131).to(dtype)
        weight = torch.tensor([1.0, -2.0, 0.5])
        assert torch.equal(
            trm.token_divergence(window, y).kl, trm.token_divergence(window.clone(), y).kl
        )
        for one, other in zip(
            gradients_of_views(window, y, weight), gradients(window, y, weight), strict=True
        ):
            assert torch.equal(one, other) and one.isfinite().all()

    def test_offsets_beyond_32_bits(self):
        # Two rows 2^31 + 64 elements apart in one sparse allocation.
        stride = 2**31 + 64
        memory = torch.empty(stride + 64, dtype=torch.bfloat16)
        x = memory.as_strided((2, 50), (stride, 1))
        x.copy_(torch.randn(2, 50))
        y = torch.randn(2, 50)
        got = trm.token_divergence(x, y).kl.double()
        torch.testing.assert_close(got, exact_kl(x.clone(), y), rtol=KL_RTOL, atol=0)

    def test_no_rows(self):
        x = torch.empty(0, 7, requires_grad=True)
        y = torch.empty(0, 7, requires_grad=True)
        kl = trm.token_divergence(x, y).kl
        assert kl.shape == (0,)
        kl.sum().backward()
        assert x.grad.shape == (0, 7) and y.grad.shape == (0, 7)

    def test_no_columns_have_no_value(self):
        assert torch.isnan(trm.token_divergence(torch.empty(2, 0), torch.empty(2, 0)).kl).all()

    def test_inputs_are_not_written(self):
        x, y = torch.randn(3, 100), torch.randn(3, 100)
        before = x.clone(), y.clone()
        gradients(x, y, torch.ones(3))
        assert torch.equal(x, before[0]) and torch.equal(y, before[1])

    def test_the_same_tensor_twice(self):
        x = torch.randn(3, 100, requires_grad=True)
        kl = trm.token_divergence(x, x).kl
        assert torch.equal(kl, torch.zeros(3))
        kl.sum().backward()
        assert torch.equal(x.grad, torch.zeros(3, 100))


class TestEdgeRules:
    def test_identical_rows_are_exactly_zero(self):
        for dtype in DTYPES:
            x = (torch.randn(4, 3000) * 5).to(dtype)
            assert torch.equal(
                trm.token_divergence(x, x.clone()).kl,
                torch.zeros(4).to(
                    x.new_empty(0).double().dtype if dtype == torch.float64 else torch.float32
                ),
            )
            grad_x, grad_y = gradients(x, x.clone(), torch.ones(4))
            assert not grad_x.any() and not grad_y.any()

    def test_an_exact_constant_offset_is_exactly_zero(self):
        x = torch.randint(-64, 64, (4, 3000)).float() / 8
        y = x + 7.25
        assert torch.equal(trm.token_divergence(x, y).kl, torch.zeros(4))
        assert not gradients(x, y, torch.ones(4))[1].any()

    def test_a_constant_offset_changes_nothing(self):
        x = torch.randint(-64, 64, (4, 3000)).float() / 8
        y = x + torch.randint(-8, 8, (4, 3000)).float() / 64
        plain = trm.token_divergence(x, y).kl
        for offset in (-32.0, 64.0, 1024.0):
            moved = trm.token_divergence(x, y + offset).kl
            torch.testing.assert_close(
                moved, plain, rtol=2 * torch.finfo(torch.float32).eps, atol=0
            )

    def test_minus_infinity_on_both_sides_contributes_nothing(self):
        x, y = torch.randn(2, 500), torch.randn(2, 500)
        padded_x = torch.cat([x, torch.full((2, 37), -INF)], 1)
        padded_y = torch.cat([y, torch.full((2, 37), -INF)], 1)
        got = trm.token_divergence(padded_x, padded_y).kl
        assert torch.equal(got, trm.token_divergence(x, y).kl)
        for grad in gradients(padded_x, padded_y, torch.ones(2)):
            assert not grad[:, 500:].any() and grad[:, :500].isfinite().all()

    @pytest.mark.parametrize("column", (0, 2047, 2048, 4999))
    def test_support_violation_is_infinite_even_where_the_exponential_underflows(self, column):
        x, y = torch.randn(1, 5000), torch.randn(1, 5000)
        x[0, column], y[0, column] = -300.0, -INF  # exp(-300) is 0 in float32
        assert trm.token_divergence(x, y).kl.item() == INF
        grad = gradients(x, y, torch.ones(1))[1]
        p, q = torch.softmax(x.double(), -1), torch.softmax(y.double(), -1)
        torch.testing.assert_close(grad.double(), q - p, rtol=1e-5, atol=1e-9)

    def test_train_mass_outside_the_rollouts_support_is_finite(self):
        # 90 % of the rollout logits cut by top-p.
        x, y = base_rows("flat", 3, 4099, 8), base_rows("flat", 3, 4099, 9)
        cut = torch.rand(3, 4099) < 0.9
        x, y = x.masked_fill(cut, -INF).float(), y.float()
        got = trm.token_divergence(x, y, outputs=("kl", "kl_train_rollout"))
        torch.testing.assert_close(got.kl.double(), exact_kl(x, y), rtol=KL_RTOL, atol=0)
        assert (got.kl_train_rollout == INF).all()
        grad_x, grad_y = gradients(x, y, torch.ones(3))
        want_x, want_y = oracle_gradient(x, y, torch.ones(1, 3))
        assert rollout_error(grad_x, want_x, x, y, torch.ones(3)) <= GRADIENT_RTOL
        assert relative_l2(grad_y, want_y) < GRADIENT_RTOL
        assert not grad_x[cut].any()

    def test_gradient_where_the_rollout_underflows_and_the_train_policy_does_not(self):
        x = torch.zeros(1, 8)
        x[0, 3] = -120.0
        y = torch.zeros(1, 8)
        y[0, 3] = torch.tensor(7 * 0.3 / 0.7).log()  # q = 0.3
        grad = gradients(x, y, torch.ones(1))[1]
        torch.testing.assert_close(grad[0, 3], torch.tensor(0.3), rtol=1e-6, atol=0)
        torch.testing.assert_close(grad[0, 0], torch.tensor(0.1 - 1 / 7), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("bad", (NAN, INF))
    @pytest.mark.parametrize("side", (0, 1))
    def test_nan_or_plus_infinity_spoils_its_row_only(self, bad, side):
        pair = [torch.randn(3, 3000), torch.randn(3, 3000)]
        pair[side][1, 2500] = bad
        kl = trm.token_divergence(*pair).kl
        assert torch.isnan(kl).tolist() == [False, True, False]
        for grad in gradients(*pair, torch.ones(3)):
            assert torch.isnan(grad[1]).all() and grad[[0, 2]].isfinite().all()

    @pytest.mark.parametrize("side", (0, 1))
    def test_a_side_without_a_finite_logit_has_no_value(self, side):
        pair = [torch.randn(2, 300), torch.randn(2, 300)]
        pair[side][0] = -INF
        assert torch.isnan(trm.token_divergence(*pair).kl).tolist() == [True, False]
        for grad in gradients(*pair, torch.ones(2)):
            assert torch.isnan(grad[0]).all() and grad[1].isfinite().all()

    def test_one_finite_rollout_logit_in_a_late_slice(self):
        x = torch.full((1, 4099), -INF)
        x[0, 4000] = 2.0
        y = torch.randn(1, 4099)
        want = -torch.log_softmax(y.double(), -1)[:, 4000]
        torch.testing.assert_close(
            trm.token_divergence(x, y).kl.double(), want, rtol=KL_RTOL, atol=0
        )

    def test_nearly_disjoint_and_huge_logits_stay_finite(self):
        x, y = torch.full((1, 100), -80.0), torch.full((1, 100), -80.0)
        x[0, 3], y[0, 60] = 80.0, 80.0
        torch.testing.assert_close(
            trm.token_divergence(x, y).kl, torch.tensor([160.0]), rtol=1e-6, atol=0
        )
        x, y = torch.randn(3, 500) * 1e37, torch.randn(3, 500) * 1e37
        kl = trm.token_divergence(x, y).kl
        assert kl.isfinite().all() and (kl > 1e35).all()

    def test_log_probabilities_are_never_positive(self):
        x = torch.zeros(1, 50)
        x[0, 0] = 100.0
        got = trm.token_divergence(
            x, x.clone(), tokens=torch.tensor([0]), outputs=("logp_rollout", "logp_train")
        )
        assert got.logp_rollout.item() <= 0 and got.logp_train.item() <= 0

    def test_log_ratio_of_unlikely_tokens(self):
        x, y = row_pair("flat", 2, 3000, 1e-6)
        x, y = x.float(), y.float()
        x[:, 5], y[:, 5] = x[:, 5] - 30, y[:, 5] - 30
        got = trm.token_divergence(x, y, tokens=torch.tensor([5, 5]), outputs=("log_ratio",))
        want = oracle(x, y, torch.tensor([5, 5]), outputs=("log_ratio",))[0][0]
        torch.testing.assert_close(got.log_ratio.double(), want, rtol=1e-6, atol=1e-7)

    def test_a_token_outside_the_vocabulary_has_no_log_ratio(self):
        got = trm.token_divergence(
            torch.randn(2, 9),
            torch.randn(2, 9),
            tokens=torch.tensor([9, -1]),
            outputs=("log_ratio",),
        )
        assert torch.isnan(got.log_ratio).all()


class TestMaskAndPadding:
    @pytest.mark.parametrize("poison", (NAN, INF, -INF, 1e30))
    def test_masked_rows_influence_nothing(self, poison):
        x, y = torch.randn(2, 3, 700), torch.randn(2, 3, 700)
        mask = torch.tensor([[True, False, True], [False, True, True]])
        clean = trm.token_divergence(x, y, token_mask=mask).kl
        bad_x, bad_y = (t.masked_fill(~mask[..., None], poison) for t in (x, y))
        assert torch.equal(trm.token_divergence(bad_x, bad_y, token_mask=mask).kl, clean)
        assert not clean[~mask].any()
        for grad in gradients(bad_x, bad_y, torch.ones(2, 3), token_mask=mask):
            assert not grad[~mask].any() and grad.isfinite().all()

    def test_a_row_with_zero_upstream_gradient_gets_zero_whatever_it_holds(self):
        x, y = torch.randn(2, 50), torch.randn(2, 50)
        x[0, 3] = NAN
        weight = torch.tensor([0.0, 1.0])
        x = x.requires_grad_()
        y = y.requires_grad_()
        kl = trm.token_divergence(x, y).kl
        kl.backward(weight)
        assert not x.grad[0].any() and not y.grad[0].any() and x.grad[1].isfinite().all()

    def test_padding_columns_are_not_read(self):
        x, y = torch.randn(2, 100), torch.randn(2, 100)
        want = trm.token_divergence(x[:, :77], y[:, :77]).kl
        x[:, 77:], y[:, 77:] = NAN, INF
        assert torch.equal(trm.token_divergence(x, y, vocab_size=77).kl, want)
        for grad in gradients(x, y, torch.ones(2), vocab_size=77):
            assert not grad[:, 77:].any() and grad.isfinite().all()


class TestGradients:
    @pytest.mark.parametrize("kl", (1e-9, 1e-6, 1e-3, 1.0))
    @pytest.mark.parametrize("kind", ("flat", "peaked", "sharp"))
    def test_relative_accuracy(self, kind, kl):
        x, y = row_pair(kind, 2, 8192, kl)
        x, y = x.float(), torch.log_softmax(y, -1).float()
        weight = torch.tensor([1.0, 0.25])
        want_x, want_y = oracle_gradient(x, y, weight[None])
        grad_x, grad_y = gradients(x, y, weight)
        assert relative_l2(grad_y, want_y) <= GRADIENT_RTOL
        assert rollout_error(grad_x, want_x, x, y, weight) <= GRADIENT_RTOL

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_gradient_dtype_is_its_inputs_and_rounded_once(self, dtype):
        x, y = row_pair("flat", 2, 1000, 0.1)
        x, y = x.float(), y.to(dtype)
        grad_x, grad_y = gradients(x, y, torch.ones(2))
        assert grad_x.dtype == torch.float32 and grad_y.dtype == dtype
        want = oracle_gradient(x, y, torch.ones(1, 2))[1]
        # Stored: half a step of the dtype. Computed in float32: p's exponent, up to 32, is rounded
        # at 2^-20, and t = u - residual at 2^-24 of terms below 1, which p expm1(-t) inherits.
        stored = torch.finfo(dtype).eps / 2 * want.abs()
        p = torch.softmax(x.double(), -1)
        computed = (2**-44 if dtype == torch.float64 else 2**-19) * (p + want.abs())
        subnormal = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
        error = (grad_y.double() - want).abs()
        assert bool((error <= stored + computed + subnormal).all())

    def test_all_outputs_at_once(self):
        x, y = row_pair("flat", 3, 300, 0.3)
        tokens = torch.tensor([0, 299, 7])
        upstream = torch.randn(len(VALUES), 3, dtype=torch.float64)
        x, y = x.requires_grad_(), y.requires_grad_()
        got = trm.token_divergence(x, y, tokens=tokens, outputs=VALUES)[: len(VALUES)]
        grads = torch.autograd.grad(list(got), (x, y), list(upstream))
        p, q = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
        # An independent oracle: autograd through the textbook formulas in float64.
        index = tokens[:, None]
        textbook = [
            (p.exp() * (p - q)).sum(-1),
            (q.exp() * (q - p)).sum(-1),
            -(p.exp() * p).sum(-1),
            -(q.exp() * q).sum(-1),
            p.gather(1, index)[:, 0],
            q.gather(1, index)[:, 0],
            (q - p).gather(1, index)[:, 0],
        ]
        wants = torch.autograd.grad(textbook, (x, y), list(upstream))
        for grad, want in zip(grads, wants, strict=True):
            assert relative_l2(grad, want) < 1e-12

    def test_upstream_gradient_of_stride_zero(self):
        x, y = torch.randn(4, 50), torch.randn(4, 50, requires_grad=True)
        kl = trm.token_divergence(x, y).kl
        kl.sum().backward()  # autograd hands an expanded scalar down
        want = oracle_gradient(x, y, torch.ones(1, 4))[1]
        assert relative_l2(y.grad, want) < GRADIENT_RTOL

    def test_gradcheck(self):
        x = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
        y = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
        tokens = torch.tensor([0, 5, 10])

        def every_output(x, y):
            return trm.token_divergence(x, y, tokens=tokens, outputs=VALUES)[: len(VALUES)]

        assert torch.autograd.gradcheck(every_output, (x, y))

    def test_no_grad_and_partial_grad(self):
        x, y = torch.randn(2, 9), torch.randn(2, 9, requires_grad=True)
        with torch.no_grad():
            assert not trm.token_divergence(x, y).kl.requires_grad
        assert not trm.token_divergence(x, y.detach()).kl.requires_grad
        trm.token_divergence(x, y).kl.sum().backward()
        assert x.grad is None and y.grad is not None

    def test_second_derivative_raises(self):
        y = torch.randn(2, 9, requires_grad=True)
        kl = trm.token_divergence(torch.randn(2, 9), y).kl
        (grad,) = torch.autograd.grad(kl.sum(), y, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward()

    def test_retain_graph_and_a_second_loss_on_the_same_logits(self):
        x, y = torch.randn(2, 9), torch.randn(2, 9, requires_grad=True)
        kl = trm.token_divergence(x, y).kl
        first = torch.autograd.grad(kl.sum(), y, retain_graph=True)[0]
        both = torch.autograd.grad(kl.sum() + (y**2).sum(), y)[0]
        torch.testing.assert_close(both, first + 2 * y.detach(), rtol=1e-6, atol=1e-6)


class TestCompiled:
    def test_forward_and_backward_in_one_graph(self):
        def step(x, y, mask):
            kl = trm.token_divergence(x, y, token_mask=mask).kl
            return (kl * torch.arange(1, kl.numel() + 1).reshape(kl.shape)).sum()

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        mask = torch.tensor([[True, False, True], [True, True, True]])
        x, y = torch.randn(2, 3, 100), torch.randn(2, 3, 100)
        grads = []
        for run in (step, compiled):
            leaf = y.clone().requires_grad_()
            loss = run(x, leaf, mask)
            loss.backward()
            grads.append((loss.detach(), leaf.grad))
        assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])

    def test_dynamic_shapes(self):
        compiled = torch.compile(
            lambda x, y: trm.token_divergence(x, y).kl,
            fullgraph=True,
            backend="aot_eager",
            dynamic=True,
        )
        for rows in (2, 5):
            x, y = torch.randn(rows, 40), torch.randn(rows, 40)
            assert torch.equal(compiled(x, y), trm.token_divergence(x, y).kl)

    def test_autocast_changes_nothing(self):
        x, y = torch.randn(2, 100), torch.randn(2, 100)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = trm.token_divergence(x, y).kl
        assert torch.equal(inside, trm.token_divergence(x, y).kl)


class TestBadInput:
    @pytest.mark.parametrize(
        "arguments,error,message",
        [
            ((torch.zeros(2, 3), torch.zeros(2, 4)), ValueError, r"\[2, 3\] and \[2, 4\]"),
            ((torch.tensor(1.0), torch.tensor(1.0)), ValueError, "no vocabulary dimension"),
            ((torch.zeros(2, 3).long(), torch.zeros(2, 3)), TypeError, "torch.int64"),
            (([1.0], torch.zeros(1)), TypeError, "must be a tensor, got list"),
            ((torch.zeros(2, 3), torch.zeros(2, 3, device="meta")), ValueError, "cpu and meta"),
        ],
        ids=["shapes", "no vocabulary", "integers", "list", "devices"],
    )
    def test_logits(self, arguments, error, message):
        with pytest.raises(error, match=message):
            trm.token_divergence(*arguments)

    @pytest.mark.parametrize(
        "keywords,error,message",
        [
            ({"token_mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"\[2\], got \[3\]"),
            ({"token_mask": torch.ones(2)}, TypeError, "must be bool, got torch.float32"),
            ({"tokens": torch.zeros(2, dtype=torch.int32)}, TypeError, "must be int64"),
            ({"vocab_size": 4}, ValueError, r"1\.\.3 .*, got 4"),
            ({"vocab_size": 0}, ValueError, "got 0"),
            ({"outputs": ("tvd",)}, ValueError, "unknown output 'tvd'; choose from kl, "),
            ({"outputs": ()}, ValueError, "outputs is empty"),
            ({"outputs": ("log_ratio",)}, ValueError, "'log_ratio' needs tokens"),
        ],
    )
    def test_arguments(self, keywords, error, message):
        with pytest.raises(error, match=message):
            trm.token_divergence(torch.zeros(2, 3), torch.zeros(2, 3), **keywords)
