# SPDX-License-Identifier: Apache-2.0
"""AReaL's and SkyRL's masks, weights and losses from their documented formulas.

`areal` and `skyrl` are those formulas on Python floats, one sequence at a time, in which every
convention difference can be read; then where we agree, exactly, and each input where we do not.
"""

import math

import pytest
import torch

import trm_ext as trm
from trm_ext import SequenceLayout, weights

INF, NAN = math.inf, math.nan


def areal(lr, *, metric="ratio", aggregate=None, action="mask", upper=5.0, lower=None):
    """[(kept, weight)] of one sequence's tokens; without aggregate each is judged by itself.

    `lr` is proximal minus behaviour. A log-ratio that is not finite counts as 0 for ratios and
    weights. Ratios aggregate as logarithms, KLs arithmetically; with `metric="ratio"` a sequence's
    weight is the geometric mean, whatever the aggregate. Clamping changes weights, never masks.
    """
    safe = [x if math.isfinite(x) else 0.0 for x in lr]
    values = {
        "ratio": lambda: safe,
        "kl_k1": lambda: lr,  # written for samples from the other policy: the sign of ours
        "kl_k2": lambda: [x * x / 2 for x in lr],
        "kl_k3": lambda: [math.exp(-x) - 1 + x for x in lr],  # likewise mirrored
    }[metric]()
    if aggregate is not None:
        total = {"sum": sum(values), "mean": sum(values) / len(lr), "max": max(values)}[aggregate]
        total = NAN if any(map(math.isnan, values)) else total
        values = [total] * len(lr)
    weight = [math.exp(x) for x in safe]
    if aggregate is not None and metric == "ratio":
        weight = [math.exp(sum(safe) / len(lr))] * len(lr)
    floor = -INF if lower is None else lower
    judged = [math.exp(x) for x in values] if metric == "ratio" else values
    inside = [floor <= x <= upper for x in judged]
    if action == "mask":
        return [(good, w if good else 0.0) for good, w in zip(inside, weight, strict=True)]
    clamped = [min(max(w, lower or 0.0), upper) for w in weight]
    if aggregate is not None:  # only sequences out of bounds
        clamped = [w if good else c for good, w, c in zip(inside, weight, clamped, strict=True)]
    return [(True, w) for w in clamped]


def skyrl(lr, *, outlier=(None, None), token=None, product=None, geometric=None, tis=None, cap=INF):
    """[(kept, weight)] of one sequence's tokens: each mask sees what the ones before it left.

    `exp` clamps its argument at ±20. NaN is neither above nor below a bound.
    """

    def rho(x):
        return math.exp(min(max(x, -20.0), 20.0)) if not math.isnan(x) else NAN

    def outside(r, band):
        low, high = band
        return (high is not None and r > high) or (low is not None and r < low)

    kept = [not any(outside(rho(x), outlier) for x in lr)] * len(lr)
    if token is not None:
        kept = [k and token[0] <= rho(x) <= token[1] for k, x in zip(kept, lr, strict=True)]
    total = sum(x * k for x, k in zip(lr, kept, strict=True))
    weight = [1.0] * len(lr)
    if tis == "token":
        weight = [min(rho(x), cap) for x in lr]
    elif tis == "sequence":
        weight = [min(rho(total), cap)] * len(lr)
    if product is not None and outside(rho(total), product):
        kept = [False] * len(lr)
    if geometric is not None and outside(rho(total / max(1, sum(kept))), geometric):
        kept = [False] * len(lr)
    return list(zip(kept, weight, strict=True))


def sequences(seed=0, scale=0.4):
    """A packed layout, its log-ratios, and these as lists of one sequence each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (60,), generator=generator)
    lr = scale * torch.randn(int(lengths.sum()), generator=generator).double()
    lr[torch.rand(lr.shape, generator=generator) < 0.1] = 0
    return (
        SequenceLayout.from_lengths(lengths),
        lr,
        [x.tolist() for x in lr.split(lengths.tolist())],
    )


def flat(function, parts, **options):
    """(kept, weight) tensors over all tokens."""
    found = [entry for part in parts for entry in function(part, **options)]
    kept, weight = zip(*found, strict=True)
    return torch.tensor(kept), torch.tensor(weight, dtype=torch.float64)


#: AReaL's option, and our criterion.
AREAL_MASKS = (
    ({"aggregate": "mean", "upper": 1.2, "lower": 0.9}, "0.9<=geo_ratio<=1.2"),
    ({"aggregate": "mean", "upper": 1.2}, "geo_ratio<=1.2"),
    ({"aggregate": "sum", "upper": 1.8, "lower": 0.7}, "0.7<=seq_ratio<=1.8"),
    # The largest ratio: where upper >= 2 nothing below 1 is as far from 1.
    ({"aggregate": "max", "upper": 2.0}, "max_ratio_gap<=1"),
    ({"aggregate": "max", "upper": 2.5}, "max_ratio_gap<=1.5"),
    ({"upper": 1.5, "lower": 0.6}, "0.6<=token_ratio<=1.5"),
    ({"upper": 1.5}, "token_ratio<=1.5"),
    # Their k1 is the log-ratio itself.
    (
        {"metric": "kl_k1", "aggregate": "mean", "upper": 0.2, "lower": -0.1},
        f"{math.exp(-0.1)!r}<=geo_ratio<={math.exp(0.2)!r}",
    ),
    ({"metric": "kl_k1", "aggregate": "sum", "upper": 0.5}, f"seq_ratio<={math.exp(0.5)!r}"),
    ({"metric": "kl_k1", "upper": 0.3}, f"token_ratio<={math.exp(0.3)!r}"),
    ({"metric": "kl_k2", "aggregate": "max", "upper": 0.3}, "max_k2<=0.3"),
    ({"metric": "kl_k2", "aggregate": "mean", "upper": 0.1}, "mean_k2<=0.1"),
    ({"metric": "kl_k2", "aggregate": "sum", "upper": 0.6}, "sum_k2<=0.6"),
    ({"metric": "kl_k2", "upper": 0.2}, "token_k2<=0.2"),
)


class TestAReaL:
    @pytest.mark.parametrize(("options", "criterion"), AREAL_MASKS)
    def test_masks_agree(self, options, criterion):
        layout, lr, parts = sequences()
        kept, _ = flat(areal, parts, **options)
        found = trm.verdict(criterion, layout, log_ratio=lr)
        assert found.token_keep.equal(kept) and 0.1 < kept.double().mean() < 0.95

    @pytest.mark.parametrize(
        ("options", "ours"),
        (
            ({"action": "clamp", "upper": 1.4}, lambda r, s: weights.token_tis(r, s, cap=1.4)),
            (
                {"upper": 1.4, "lower": 0.6},
                lambda r, s: weights.token_mask(r, s, band=(0.6, 1.4)),
            ),
            # Sequences: the weight is the geometric mean, GSPO's.
            (
                {"aggregate": "mean", "action": "clamp", "upper": 1.1},
                lambda r, s: weights.gspo(r, s).clamp(max=1.1),
            ),
            (
                {"aggregate": "mean", "action": "clamp", "upper": 1.1, "lower": 0.95},
                lambda r, s: weights.gspo(r, s).clamp(0.95, 1.1),
            ),
            (
                {"aggregate": "mean", "upper": 1.2, "lower": 0.9},
                lambda r, s: weights.gspo(r, s) * weights.geo_mask(r, s, band=(0.9, 1.2)),
            ),
            (
                {"aggregate": "sum", "upper": 1.8},
                lambda r, s: weights.gspo(r, s) * (weights.seq_mis(r, s, cap=1.8) > 0),
            ),
            # KLs: the tokens' own ratios.
            (
                {"metric": "kl_k2", "aggregate": "max", "upper": 0.3},
                lambda r, s: weights.trm(r, s, trm.verdict("max_k2<=0.3", s, log_ratio=r).keep),
            ),
            (
                {"metric": "kl_k2", "upper": 0.2},
                lambda r, s: (
                    weights.token_is(r, s) * trm.verdict("token_k2<=0.2", s, log_ratio=r).token_keep
                ),
            ),
        ),
    )
    def test_weights_agree(self, options, ours):
        layout, lr, parts = sequences(1)
        _, weight = flat(areal, parts, **options)
        found = ours(lr, layout)
        torch.testing.assert_close(found, weight, rtol=1e-12, atol=0)
        assert weight.unique().numel() > 5

    @pytest.mark.parametrize(
        ("options", "ours"),
        (
            ({"action": "clamp", "upper": 1.4}, {"estimator": "token_tis", "clip": 1.4}),
            ({"upper": 1.4, "lower": 0.6}, {"estimator": "icepop", "band": (0.6, 1.4)}),
            (
                {"metric": "kl_k2", "aggregate": "mean", "upper": 0.1},
                {"estimator": "trm", "verdict": "mean_k2<=0.1"},
            ),
        ),
    )
    def test_losses_and_gradients_agree(self, options, ours):
        # The proximal policy is the trained one; the denominator is every token, as theirs.
        layout, lr, parts = sequences(2)
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(lr.shape, generator=generator).double()
        if "verdict" in ours:
            ours = {**ours, "verdict": trm.verdict(ours["verdict"], layout, log_ratio=lr)}
        kept, weight = flat(areal, parts, **options)
        theirs, live = (lr.clone().requires_grad_() for _ in range(2))
        surrogate = torch.where(kept, -a * (theirs - lr).exp() * weight, 0.0)
        wanted = surrogate.sum() / lr.numel()
        found, _ = trm.policy_loss(
            live, torch.zeros_like(lr), a, layout, denominator="tokens", **ours
        )
        wanted.backward()
        found.backward()
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
        torch.testing.assert_close(live.grad, theirs.grad, rtol=1e-12, atol=0)

    def test_clipped_loss_agrees(self):
        # -A r and -A clip(r): the larger one, and with A < 0 at most c |A|.
        layout, lr, _ = sequences(3)
        a = torch.randn(lr.shape, generator=torch.Generator().manual_seed(1)).double()
        theirs, live = (lr.clone().requires_grad_() for _ in range(2))
        rho = theirs.exp()
        worst = torch.max(-a * rho, -a * rho.clamp(1 - 0.2, 1 + 0.25))
        wanted = torch.min(worst, a.sign() * 1.5 * a).sum() / lr.numel()
        found, _ = trm.policy_loss(
            live,
            torch.zeros_like(lr),
            a,
            layout,
            estimator="ppo_clip",
            clip=(0.2, 0.25, 1.5),
            denominator="tokens",
        )
        wanted.backward()
        found.backward()
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
        torch.testing.assert_close(live.grad, theirs.grad, rtol=1e-12, atol=0)

    # Differences, each in docs/conventions.md.

    def test_k3_is_the_mirror_image_of_ours(self):
        layout, rho = SequenceLayout.from_lengths([1, 1]), [100.0, 0.01]
        ours = trm.verdict("max_k3<=4", layout, log_ratio=torch.tensor(rho).log())
        assert ours.keep.tolist() == [False, True]
        k3 = {"metric": "kl_k3", "aggregate": "max", "upper": 4}
        assert [areal([math.log(r)], **k3)[0][0] for r in rho] == [True, False]

    @pytest.mark.parametrize("value", (-INF, INF, NAN))
    def test_an_impossible_or_missing_token_counts_as_on_policy(self, value):
        layout, lr = SequenceLayout.from_lengths([1]), torch.tensor([value])
        reason = trm.Reason.UNSCORED if math.isnan(value) else trm.Reason.SUPPORT
        assert areal([value], aggregate="mean") == [(True, 1.0)]
        assert areal([value], action="clamp") == [(True, 1.0)]
        assert trm.verdict("geo_ratio<=5", layout, log_ratio=lr).reason == reason
        k2 = {"metric": "kl_k2", "aggregate": "max", "upper": 9}
        assert not areal([value], **k2)[0][0]
        assert trm.verdict("max_k2<=9", layout, log_ratio=lr).reason == reason

    def test_the_largest_ratio_below_two_sees_one_side_only(self):
        layout, lr = SequenceLayout.from_lengths([1]), math.log(0.4)
        assert areal([lr], aggregate="max", upper=1.5)[0][0]
        ours = trm.verdict("max_ratio_gap<=0.5", layout, log_ratio=torch.tensor([lr]))
        assert not ours.keep.any()

    def test_a_lower_clamp_raises_the_weight_of_what_train_dropped(self):
        layout, lr = SequenceLayout.from_lengths([1]), math.log(0.1)
        assert areal([lr], action="clamp", lower=0.5)[0][1] == 0.5
        ours = weights.token_tis(torch.tensor([lr]), layout, cap=5.0)
        assert ours.item() == pytest.approx(0.1)

    def test_a_clamped_product_clamps_the_mean(self):
        # The product e^3 is past 5; the weight is the mean e, which 5 does not clamp.
        layout, lr = SequenceLayout.from_lengths([3]), [1.0, 1.0, 1.0]
        theirs = areal(lr, aggregate="sum", action="clamp", upper=5.0)
        assert [w for _, w in theirs] == pytest.approx([math.e] * 3)
        assert weights.seq_tis(torch.tensor(lr), layout, cap=5.0).tolist() == [5.0] * 3

    def test_survivors_of_a_geometric_mask_carry_its_mean(self):
        layout, lr = SequenceLayout.from_lengths([2]), [0.3, -0.1]
        theirs = areal(lr, aggregate="mean", upper=1.2, lower=0.9)
        assert [w for _, w in theirs] == pytest.approx([math.exp(0.1)] * 2)
        x = torch.tensor(lr)
        assert weights.geo_mask(x, layout, band=(0.9, 1.2)).tolist() == [1, 1]
        ours = weights.geo_mask_token_tis(x, layout, band=(0.9, 1.2), cap=INF)
        assert ours.tolist() == pytest.approx([math.exp(0.3), math.exp(-0.1)])


class TestSkyRL:
    @pytest.mark.parametrize(
        ("options", "criterion"),
        (
            ({"geometric": (0.9, 1.2)}, "0.9<=geo_ratio<=1.2"),
            ({"product": (0.5, 2.0)}, "0.5<=seq_ratio<=2"),
            ({"token": (0.6, 1.5)}, "0.6<=token_ratio<=1.5"),
            # One token out of bounds rejects its sequence.
            ({"outlier": (0.5, None)}, f"max_k1<={-math.log(0.5)!r}"),
            ({"outlier": (None, 2.0)}, "max_ratio_gap<=1"),
            ({"outlier": (0.5, 2.5)}, f"max_k1<={-math.log(0.5)!r} & max_ratio_gap<=1.5"),
            (
                {"outlier": (0.5, None), "product": (0.5, 2.0)},
                f"max_k1<={-math.log(0.5)!r} & 0.5<=seq_ratio<=2",
            ),
        ),
    )
    def test_masks_agree(self, options, criterion):
        layout, lr, parts = sequences(4)
        kept, _ = flat(skyrl, parts, **options)
        found = trm.verdict(criterion, layout, log_ratio=lr)
        assert found.token_keep.equal(kept) and 0.1 < kept.double().mean() < 0.97

    @pytest.mark.parametrize(
        ("options", "ours"),
        (
            ({"tis": "token", "cap": 1.3}, lambda r, s: weights.token_tis(r, s, cap=1.3)),
            ({"tis": "sequence", "cap": 1.5}, lambda r, s: weights.seq_tis(r, s, cap=1.5)),
        ),
    )
    def test_weights_agree(self, options, ours):
        layout, lr, parts = sequences(5)
        _, weight = flat(skyrl, parts, **options)
        torch.testing.assert_close(ours(lr, layout), weight, rtol=1e-12, atol=0)

    # Differences, each in docs/conventions.md.

    def test_a_token_mask_before_a_sequence_mask(self):
        layout = SequenceLayout.from_lengths([3, 3])
        lr = torch.tensor([0.1, 0.2, 0.0, 0.0, 3.0, 0.0])
        found = trm.verdict("0.5<=token_ratio<=2 & 0.9<=geo_ratio<=1.2", layout, log_ratio=lr)
        parts = [part.tolist() for part in lr.split(3)]
        kept, _ = flat(skyrl, parts, token=(0.5, 2), geometric=(0.9, 1.2))
        assert kept.tolist() == [True, True, True, True, False, True]
        assert found.token_keep.tolist() == [True, True, True, False, False, False]

    def test_a_missing_value_is_inside_every_band(self):
        layout, lr = SequenceLayout.from_lengths([2]), [NAN, 0.0]
        for options in ({"geometric": (0.9, 1.2)}, {"product": (0.5, 2)}, {"outlier": (0.1, 9)}):
            assert [kept for kept, _ in skyrl(lr, **options)] == [True, True]
        found = trm.verdict("geo_ratio<=1.2", layout, log_ratio=torch.tensor(lr))
        assert found.reason == trm.Reason.UNSCORED

    def test_a_masked_token_leaves_the_sequence_weight(self):
        layout, lr = SequenceLayout.from_lengths([2]), [0.1, 3.0]
        theirs = skyrl(lr, token=(0.5, 2), tis="sequence", cap=5.0)
        assert theirs[0][1] == pytest.approx(math.exp(0.1))
        assert weights.seq_tis(torch.tensor(lr), layout, cap=5.0).tolist() == [5, 5]
