# SPDX-License-Identifier: Apache-2.0
"""Importance weights: the definition on Python floats, for every layout, and hostile values."""

import math

import pytest
import torch

import trm_ext as trm
from tests.quoted import quoted
from tests.trm_ext.test_masks import batch, layouts
from trm_ext import SequenceLayout, weights
from trm_ext._sequences import sum_tokens

INF, NAN = float("inf"), float("nan")
BAND, CAP = (0.75, 1.3), 1.4

#: name: (function of log_ratio, layout; definition from one sequence's log-ratios)
TABLE = {
    "token_is": (weights.token_is, lambda x: [math.exp(v) for v in x]),
    "token_tis": (
        lambda r, s, **k: weights.token_tis(r, s, cap=CAP, **k),
        lambda x: [min(math.exp(v), CAP) for v in x],
    ),
    "token_mask": (
        lambda r, s, **k: weights.token_mask(r, s, band=BAND, **k),
        lambda x: [math.exp(v) * (BAND[0] <= math.exp(v) <= BAND[1]) for v in x],
    ),
    "ppo_clip": (
        lambda r, s, **k: weights.ppo_clip(r, signs(s), s, clip=(0.2, 0.25, 1.6), **k),
        lambda x, b: [
            0.0 if (r > 1.25 if b % 2 else r < 0.8 or r > 1.6) else r for r in map(math.exp, x)
        ],
    ),
    "seq_is": (weights.seq_is, lambda x: [math.prod(map(math.exp, x))] * len(x)),
    "seq_tis": (
        lambda r, s, **k: weights.seq_tis(r, s, cap=CAP, **k),
        lambda x: [min(math.prod(map(math.exp, x)), CAP)] * len(x),
    ),
    "seq_mis": (
        lambda r, s, **k: weights.seq_mis(r, s, cap=CAP, **k),
        lambda x: [w * (w <= CAP) for w in [math.prod(map(math.exp, x))] * len(x)],
    ),
    "geo_mask": (
        lambda r, s, **k: weights.geo_mask(r, s, band=BAND),
        lambda x: [float(BAND[0] <= geometric(x) <= BAND[1])] * len(x),
    ),
    "geo_mask_token_tis": (
        lambda r, s, **k: weights.geo_mask_token_tis(r, s, band=BAND, cap=CAP, **k),
        lambda x: [min(math.exp(v), CAP) * (BAND[0] <= geometric(x) <= BAND[1]) for v in x],
    ),
    "gspo": (weights.gspo, lambda x: [geometric(x)] * len(x)),
    "trm": (
        lambda r, s, **k: weights.trm(r, s, torch.arange(s.num_sequences) % 2 == 0, **k),
        None,
    ),
}


def signs(layout):
    """Advantages: positive in odd sequences."""
    return layout.sequence_id % 2 - 0.5


def geometric(x):
    return math.prod(map(math.exp, x)) ** (1 / max(1, len(x)))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("poison", (NAN, INF, -INF, 1e30))
def test_every_weight_on_every_layout(name, poison):
    packed, _, ratio = batch(3)
    function, definition = TABLE[name]
    expected = {}
    for b in range(40):
        here = (packed.sequence_id == b) & packed.token_mask
        x = ratio[here].double().tolist()
        if name == "trm":
            values = [math.exp(v) * (b % 2 == 0) for v in x]
        else:
            values = definition(x, b) if name == "ppo_clip" else definition(x)
        for p, value in zip(packed.position[here].tolist(), values, strict=True):
            expected[b, p] = value
    kinds = {value == 0 for value in expected.values()}
    assert kinds == (
        {True, False} if "mask" in name or name in ("trm", "seq_mis", "ppo_clip") else {False}
    )
    for label, (layout, move) in layouts(packed, poison).items():
        x = torch.where(layout.token_mask, move(ratio), poison).requires_grad_()
        found = function(x, layout)
        assert not found.requires_grad and found.dtype == torch.float32
        wanted = torch.zeros(layout.shape, dtype=torch.float64)
        for index in layout.token_mask.nonzero().tolist():
            at = tuple(index)
            wanted[at] = expected[int(layout.sequence_id[at]), int(layout.position[at])]
        # float32 log-ratios of up to 6 tokens: exp has the relative error of their sum's rounding
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0, msg=label)
        if name == "geo_mask":
            continue
        live = function(x, layout, detach=False)
        (gradient,) = torch.autograd.grad((live * 3).sum(), x)
        assert torch.isfinite(gradient).all() and (gradient[~layout.token_mask] == 0).all()


@pytest.mark.parametrize("name", [name for name in TABLE if name != "geo_mask"])
def test_gradients_without_detach_against_finite_differences(name):
    function, _ = TABLE[name]
    layout = SequenceLayout.from_lengths([3, 0, 4, 1])
    x = torch.tensor([0.1, -0.2, 0.15, 0.5, 0.3, -0.1, 0.02, -0.05], dtype=torch.float64)
    upstream = torch.linspace(1, 2, 8, dtype=torch.float64)
    live = x.clone().requires_grad_()
    (found,) = torch.autograd.grad((function(live, layout, detach=False) * upstream).sum(), live)
    h = 1e-6  # central differences: error h² f''' plus 2e-16/h
    for i in range(8):
        step = torch.zeros(8, dtype=torch.float64)
        step[i] = h
        up, down = (function(x + s, layout) * upstream for s in (step, -step))
        assert found[i].item() == pytest.approx(float((up - down).sum() / (2 * h)), abs=1e-8)


def test_an_accepted_sequence_with_one_huge_token_stays_finite():
    # Peers accept it by its geometric mean and multiply by e^100.
    layout, x = SequenceLayout.from_lengths([3]), torch.tensor([100.0, -100.0, 0.0])
    found = weights.geo_mask_token_tis(x, layout)
    # The second is subnormal: its neighbours in float32 are 4 % away.
    assert found.tolist() == pytest.approx([2, 3.7835e-44, 1], rel=1e-3)
    assert weights.geo_mask_token_tis(x + 0.01, layout).tolist() == [0, 0, 0]


def test_a_sum_over_tokens_has_no_gradient_outside_the_mask():
    layout = SequenceLayout.from_cu_seqlens(
        torch.tensor([0, 2, 4]), torch.tensor([True, False, True, True])
    )
    x = torch.tensor([1.0, NAN, 2.0, 4.0], requires_grad=True)
    total = sum_tokens(x, layout)
    assert total.tolist() == [1, 6] and total.dtype == torch.float64
    (total * torch.tensor([3.0, 5.0])).sum().backward()
    assert x.grad.tolist() == [3, 0, 5, 5]


def test_no_advantage_is_never_clipped():
    layout, x = SequenceLayout.from_lengths([2]), torch.tensor([4.0, 0.25]).log()
    found = weights.ppo_clip(x, torch.zeros(2), layout, clip=(0.2, 0.2, 3.0))
    torch.testing.assert_close(found, torch.tensor([4.0, 0.25]))


def test_exp_saturates_and_caps_are_exact():
    layout, x = SequenceLayout.from_lengths([2]), torch.tensor([1e30, 3.0])
    for f in (weights.token_is, weights.seq_is, weights.gspo):
        assert f(x, layout)[0].item() == pytest.approx(math.exp(80), rel=2**-22)
    assert weights.token_tis(x, layout, cap=2.0).tolist() == [2, 2]
    assert weights.seq_tis(x, layout, cap=0.3).tolist() == [torch.tensor(0.3).item()] * 2


def test_missing_evidence_is_not_replaced_and_stays_in_its_sequence():
    layout, x = SequenceLayout.from_lengths([2, 1]), torch.tensor([NAN, 0.0, 0.0])
    assert weights.token_is(x, layout).isnan().tolist() == [True, False, False]
    assert weights.seq_is(x, layout).isnan().tolist() == [True, True, False]
    keep = torch.tensor([False, True])
    assert weights.trm(x, layout, keep).tolist() == [0, 0, 1]


def test_low_precision_and_double():
    layout = SequenceLayout.from_lengths([2])
    assert weights.seq_is(torch.zeros(2, dtype=torch.bfloat16), layout).dtype == torch.float32
    x = torch.tensor([1e-12, 0.0], dtype=torch.float64)
    assert weights.seq_is(x, layout)[0].item() == 1 + 1e-12


class TestLength:
    def test_products_and_critical_length(self):
        products = [(10, "1.0100"), (1000, "2.7169"), (2000, "7.382"), (5000, "148.04")]
        for T, value in products:
            assert weights.product_ratio(1.001, T) == quoted(value)
        drift = math.log(1.001)
        assert weights.critical_length(5, drift) == quoted("1610.24")
        assert weights.product_ratio(1.001, 1610) < 5 < weights.product_ratio(1.001, 1611)
        assert weights.product_ratio(2, 10**6) == INF and weights.product_ratio(3.0, 0) == 1

    def test_rollout_keeps_the_ratio_at_one_on_average_and_small_typically(self):
        # Two tokens, exact over all counts: E rho = 1, P(rho > C) <= 1/C, the lost mass is P_train.
        p, q, T, C = 0.5, 0.5224, 400, 5.0
        log_choose = [
            math.lgamma(T + 1) - math.lgamma(n + 1) - math.lgamma(T - n + 1) for n in range(T + 1)
        ]
        layout = SequenceLayout.from_lengths([T] * (T + 1))
        up, down = math.log(q / p), math.log((1 - q) / (1 - p))
        x = torch.tensor(
            [up if t < n else down for n in range(T + 1) for t in range(T)],
            dtype=torch.float64,
        )
        rho = weights.seq_is(x, layout)[::T]
        kept = weights.seq_mis(x, layout, cap=C)[::T]
        law = torch.tensor([math.exp(c + T * math.log(p)) for c in log_choose]).double()
        train = torch.tensor(
            [
                math.exp(c + n * math.log(q) + (T - n) * math.log(1 - q))
                for n, c in enumerate(log_choose)
            ]
        ).double()
        assert float((law * rho).sum()) == pytest.approx(1, rel=1e-9)
        assert float(law[rho > C].sum()) < 1 / C
        lost = 1 - float((law * kept).sum())
        assert lost == pytest.approx(float(train[rho > C].sum()), rel=1e-6) and lost > 0.05


class TestBadInput:
    layout = SequenceLayout.from_lengths([2])

    def test_one_sentence_each(self):
        x = torch.zeros(2)
        with pytest.raises(ValueError, match="cap must be > 0, got 0"):
            weights.token_tis(x, self.layout, cap=0)
        with pytest.raises(ValueError, match="cap must be >= 0, got -1"):
            weights.seq_mis(x, self.layout, cap=-1)
        with pytest.raises(ValueError, match=r"lower bound 2.0 exceeds its upper bound 1.0"):
            weights.geo_mask(x, self.layout, band=(2, 1))
        with pytest.raises(ValueError, match=r"keep must be bool \[1\], got torch.bool \[2\]"):
            weights.trm(x, self.layout, torch.ones(2, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"log_ratio must have .* \[2\], got \[3\]"):
            weights.token_is(torch.zeros(3), self.layout)
        with pytest.raises(TypeError, match="log_ratio must be floating point"):
            weights.token_is(torch.zeros(2, dtype=torch.int32), self.layout)
        with pytest.raises(ValueError, match="rho must be finite and > 0 and T >= 0"):
            weights.product_ratio(0, 3)
        with pytest.raises(ValueError, match="C must be finite and > 1 and log_ratio_drift > 0"):
            weights.critical_length(1, 0.1)


def test_weights_compile_in_one_graph_with_their_backward():
    def total(x, mask):
        layout = SequenceLayout.from_mask(mask)
        parts = [f(x, layout, detach=False) for n, (f, _) in TABLE.items() if n != "geo_mask"]
        return torch.stack(parts).sum(0)

    mask = torch.rand(3, 4) < 0.7
    x = torch.randn(3, 4) * 0.2
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    results = []
    for f in (total, compiled):
        live = x.clone().requires_grad_()
        value = f(live, mask)
        value.sum().backward()
        results.append((value.detach(), live.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert trm.weights is weights
