# SPDX-License-Identifier: Apache-2.0
"""What went wrong in RL libraries with masks, ratios, denominators, metrics: the smallest input.

docs/conventions.md says who reported each, and names each test here.
"""

import math
import warnings

import pytest
import torch

import trm_ext as trm
from tests.quoted import quoted
from tests.trm_ext.test_losses import OPTIONS, simple
from tests.trm_ext.test_masks import batch
from trm_ext import SequenceLayout
from trm_ext.masks import warn_identical

INF, NAN = float("inf"), float("nan")


def test_overflow_under_padding_poisons_no_gradient():
    clean = simple([[0.0, 0.0]], [1.0], estimator="ppo_clip")
    dirty = simple([[0.0, 0.0, 200.0]], [1.0], estimator="ppo_clip", mask=[[1 > 0, 1 > 0, 0 > 1]])
    assert dirty[0] == clean[0] and dirty[1][0] == [*clean[1][0], 0.0]


@pytest.mark.parametrize("value", (200.0, -200.0, INF, -INF, NAN))
@pytest.mark.parametrize("name", OPTIONS)
def test_masked_positions_leave_loss_metrics_and_gradients_bit_equal(name, value):
    mask = torch.tensor([[False, True, True, False], [True, True, False, False]])
    results = []
    for fill in (0.0, value):
        lr = torch.where(mask, torch.tensor([0.1, -0.3, 0.2, 0.0]), fill)
        verdict = trm.verdict("max_k2<=9", SequenceLayout.from_mask(mask), log_ratio=lr)
        results.append(
            simple(lr, [1.0, -2.0], estimator=name, mask=mask, verdict=verdict, **OPTIONS[name])
        )
    (loss, gradient, metrics), (other, other_gradient, other_metrics) = results
    assert loss == other and gradient == other_gradient
    assert all(torch.equal(metrics[key], other_metrics[key]) for key in metrics)


@pytest.mark.parametrize("value", (200.0, -200.0, INF, -INF, NAN))
@pytest.mark.parametrize("name", OPTIONS)
def test_excluded_sequences_leave_loss_and_gradients_bit_equal(name, value):
    layout = SequenceLayout.from_lengths([2, 3, 1])
    kl = torch.tensor([0.1, 0.1, 9.0, 0.1, 0.1, 0.1])
    verdict = trm.max_kl_verdict(kl, layout, max_kl=1)
    results = []
    for fill in (0.0, value):
        lr = torch.tensor([0.1, -0.15, fill, fill, 0.0, 0.02])
        results.append(
            simple(
                lr,
                [1.0, fill, -3.0],
                layout=layout,
                estimator=name,
                verdict=verdict,
                **OPTIONS[name],
            )
        )
    assert results[0][:2] == results[1][:2] and results[0][0] != 0


@pytest.mark.parametrize("value", (NAN, INF, -INF))
def test_every_path_to_the_ratio_has_one_policy(value):
    # Two code paths of one library disagreed on NaN: weights, verdict, loss and metrics here.
    layout = SequenceLayout.from_lengths([2, 2])
    train = torch.tensor([-1.0, value, -1.0, -0.5], requires_grad=True)
    rollout = torch.full((4,), -1.0)
    lr = trm.log_ratio(train, rollout).detach()
    logps = {"logp_train": train.detach(), "logp_rollout": rollout}
    for criteria in ("max_k2<=9", "geo_ratio<=9", "token_ratio<=9", "max_binary_kl<=99"):
        given = {"divergence": logps} if "binary" in criteria else {"log_ratio": lr}
        for evidence in ({"divergence": logps}, given):
            assert trm.verdict(criteria, layout, **evidence).keep.tolist() == [False, True]
    loss, metrics = trm.policy_loss(train, rollout, torch.ones(2), layout, estimator="token_is")
    loss.backward()
    assert loss.item() == pytest.approx(-(1 + math.exp(0.5)) / 2, rel=1e-6)
    assert train.grad.tolist() == pytest.approx([0, 0, -0.5, -math.exp(0.5) / 2], rel=1e-6)
    assert metrics["trm/loss/unusable_sequences"] == 1
    assert trm.batch_metrics(layout, log_ratio=lr)["trm/k1"] == pytest.approx(-0.5 / 3)


def test_a_rejected_stale_token_contributes_exactly_nothing():
    layout = SequenceLayout.from_lengths([1, 1])
    train = torch.tensor([-1.0, -1.0], requires_grad=True)
    rollout = torch.tensor([-100.0, -1.0])
    lr = trm.log_ratio(train, rollout)
    verdict = trm.verdict("max_k2<=10", layout, log_ratio=lr)
    loss, _ = trm.policy_loss(train, rollout, torch.ones(2), layout, verdict=verdict)
    loss.backward()
    assert loss.item() == -0.5 and train.grad.tolist() == [0.0, -0.5]


def test_accepted_by_the_mean_with_one_huge_token():
    loss, gradient, _ = simple([[100.0, -100.0, 0.0]], [1.0], estimator="geo_mask_token_tis")
    # The second is subnormal: its neighbours in float32 are 4 % away.
    assert gradient[0] == pytest.approx([-2, -3.7835e-44, -1], rel=1e-3)
    assert loss == pytest.approx(-3)
    loss, gradient, _ = simple([[100.0, -99.0, 0.0]], [1.0], estimator="geo_mask_token_tis")
    assert loss == 0 and gradient[0] == [0, 0, 0]


def test_unscored_and_impossible_tokens_reject_their_sequence():
    for value in (NAN, INF, -INF):
        loss, gradient, metrics = simple([[0.0, value], [0.0, 0.0]], [1.0, 1.0])
        assert loss == -1 and gradient == [[0, 0], [-0.5, -0.5]]
        assert metrics["trm/loss/unusable_sequences"] == 1


@pytest.mark.parametrize("value", (NAN, INF))
def test_a_penalty_that_is_not_finite_rejects_its_sequence(value):
    kl = torch.tensor([[0.5, value], [0.5, 0.5]], requires_grad=True)
    loss, gradient, _ = simple([[0.0, 0.0], [0.0, 0.0]], [1.0, 1.0], kl=kl, kl_coef=1.0)
    assert loss == -0.5 and gradient == [[0, 0], [-0.5, -0.5]]
    assert kl.grad.tolist() == [[0, 0], [0.5, 0.5]]


def test_both_denominators_and_the_kept_ratio():
    lr = [[0.1, -1.5, 0.8, -10.0, 0.3]]
    numerator = -(math.exp(0.1) + math.exp(0.3))
    for denominator, d in (("kept_tokens", 2), ("tokens", 5)):
        loss, gradient, metrics = simple(
            lr, [1.0], estimator="icepop", band=(0.5, 2.0), denominator=denominator
        )
        assert loss == pytest.approx(numerator / d, rel=1e-6)
        wanted = [-math.exp(0.1) / d, 0, 0, 0, -math.exp(0.3) / d]
        assert gradient[0] == pytest.approx(wanted, rel=1e-6)
        assert metrics["trm/loss/kept_token_ratio"].item() == 0.4


def test_one_effective_mask_in_every_reduction():
    # The sequence-mean reduction once used the mask from before the token mask.
    lr = [[0.0, 9.0], [0.0, 0.0]]
    for denominator, d in (("sequences", 2), ("tokens", 4), ("kept_tokens", 3)):
        loss, gradient, _ = simple(lr, [1.0, 1.0], estimator="icepop", denominator=denominator)
        assert loss == pytest.approx(-3 / d)
        assert [*gradient[0], *gradient[1]] == pytest.approx([-1 / d, 0, -1 / d, -1 / d])


def test_everything_rejected_by_a_narrow_band_goes_on():
    loss, gradient, metrics = simple(
        [[0.3], [-0.3]], [1.0, 1.0], estimator="geo_mask", band=(0.99, 1.001)
    )
    assert loss == 0 and gradient == [[0], [0]] and metrics["trm/loss/all_rejected"] == 1


def test_a_rejected_sequence_never_trains_through_its_last_token():
    # The outcome reward sat on a masked last token and still reached the loss.
    layout = SequenceLayout.from_lengths([2, 2])
    kl = torch.tensor([0.0, 5.0, 0.0, 0.0])
    verdict = trm.max_kl_verdict(kl, layout, max_kl=1)
    loss, gradient, _ = simple(
        [0.0] * 4, [9.0, 1.0], layout=layout, verdict=verdict, estimator="trm"
    )
    assert loss == -1 and gradient == [0, 0, -0.5, -0.5]


def test_a_token_mask_does_not_take_the_outcome_reward_away():
    layout = SequenceLayout.from_lengths([3])
    kl = torch.tensor([0.0, 0.0, 5.0])  # where an engine puts the reward
    verdict = trm.verdict("token_kl<=1", layout, divergence={"kl": kl})
    loss, gradient, _ = simple(
        [0.0] * 3, [2.0], layout=layout, verdict=verdict, estimator="token_mask"
    )
    assert loss == -4 and gradient == [-2, -2, 0]


def test_rejected_siblings_do_not_move_the_kept_ones():
    # Rewards 100 (rejected) and 1: the kept row once trained on -49.5.
    layout = SequenceLayout.from_lengths([1, 1])
    verdict = trm.max_kl_verdict(torch.tensor([9.0, 0.0]), layout, max_kl=1)
    groups = torch.zeros(2, dtype=torch.int64)
    advantages = trm.group_advantages(torch.tensor([100.0, 1.0]), groups, verdict.keep)
    loss, gradient, _ = simple([0.0, 0.0], advantages, layout=layout, verdict=verdict)
    assert loss == -0.5 and gradient == [0, -0.5]


def test_what_length_does_to_a_product_and_not_to_a_mean():
    T, drift = 2000, -0.001
    lr = torch.full((1, T), drift, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    _, product, _ = simple(lr, one, estimator="seq_is")
    _, mean, _ = simple(lr, one, estimator="gspo", clip=1.0)
    assert product[0][0] == quoted("-0.1353")
    assert T * mean[0][0] == quoted("-0.9990")
    # 0.012 over 100 tokens: past a product's cap of 3, well inside one of the mean's.
    lr = torch.full((1, 100), 0.012, dtype=torch.float64)
    loss, product, _ = simple(lr, one, estimator="seq_mis", clip=3.0)
    assert loss == 0 and product[0][0] == 0
    loss, mean, _ = simple(lr, one, estimator="geo_mask", band=(0.5, 3.0))
    assert loss == -100 and mean[0][0] == -1


NAMES = ("kl", "logp_train", "logp_rollout", "log_ratio")


def gradient_of_weighted_loss(exact, layout, logits):
    """Of -rho, rho being a constant weight, plus the exact KL; advantage 1, by the train logits."""
    loss, _ = trm.policy_loss(
        exact.logp_train,
        exact.logp_rollout,
        torch.ones(1).double(),
        layout,
        estimator="token_is",
        kl=exact.kl,
        kl_coef=1.0,
    )
    return torch.autograd.grad(loss, logits)[0]


def test_ratios_of_a_truncated_rollout():
    # Top-2 of (.5, .3, .1, .1): processed rollout log-probs make every ratio 0.8 = S.
    layout = SequenceLayout.from_lengths([2])
    law = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64)
    rollout = torch.tensor([0.625, 0.375, 0.0, 0.0], dtype=torch.float64).log().expand(2, 4)
    tokens = torch.tensor([0, 1])
    z = law.log().expand(2, 4).clone().requires_grad_()
    exact = trm.token_divergence(rollout, z, tokens=tokens, outputs=NAMES)
    assert exact.log_ratio.exp().tolist() == pytest.approx([0.8, 0.8], rel=1e-12)
    assert exact.kl.tolist() == pytest.approx([-math.log(0.8)] * 2, rel=1e-12)
    gradient = gradient_of_weighted_loss(exact, layout, z)
    one_hot = torch.nn.functional.one_hot(tokens, 4)
    wanted = -0.8 * (one_hot - law) + (law - rollout.exp())
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)
    # The same support replayed on the train side: nothing is left.
    replayed = torch.where(rollout == -INF, -INF, law.log().expand(2, 4))
    exact = trm.token_divergence(rollout, replayed, tokens=tokens, outputs=NAMES)
    assert exact.kl.abs().max() < 1e-15 and exact.log_ratio.abs().max() < 1e-15


def test_a_temperature_that_one_side_forgets():
    # Sampled at 0.6, scored at 1: every ratio is off. Given to both sides, nothing is left.
    z = torch.tensor([[1.0, 0.2, -0.5]], dtype=torch.float64, requires_grad=True)
    layout, tokens = SequenceLayout.from_lengths([1]), torch.tensor([0])
    for train_temperature in (0.6, 1.0):
        exact = trm.token_divergence(
            z.detach(),
            z,
            tokens=tokens,
            rollout_temperature=0.6,
            train_temperature=train_temperature,
            outputs=NAMES,
        )
        p, q = (torch.softmax(z.detach() / t, -1) for t in (0.6, train_temperature))
        assert exact.kl.item() == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-15)
        gradient = gradient_of_weighted_loss(exact, layout, z)
        rho = float(q[0, 0] / p[0, 0])
        assert exact.log_ratio.item() == pytest.approx(math.log(rho), abs=1e-15)
        policy = -rho * (torch.tensor([[1.0, 0.0, 0.0]]) - q)
        wanted = (policy + q - p) / train_temperature
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)
        assert (rho == 1) == (train_temperature == 0.6)
    with pytest.raises(ValueError, match="rollout_temperature must be a finite number > 0"):
        trm.token_divergence(z, z, rollout_temperature=0.0)


def test_the_loss_does_not_depend_on_who_holds_which_tokens():
    # Context parallelism: two ranks hold interleaved pieces and the verdict of the whole.
    packed, kl, ratio = batch(6)
    advantages = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    verdict = trm.max_kl_verdict(kl, packed, max_kl=0.9)
    train, rollout = ratio.double().requires_grad_(), torch.zeros_like(ratio).double()
    whole, _ = trm.policy_loss(train, rollout, advantages, packed, verdict=verdict)
    (wanted,) = torch.autograd.grad(whole, train)
    total = 0.0
    for rank in (0, 1):
        here = (packed.position % 2 == rank).nonzero().flatten().flip(0)
        layout = SequenceLayout.from_segments(
            packed.sequence_id[here], packed.position[here], 40, packed.token_mask[here]
        )
        part = verdict._replace(token_keep=verdict.token_keep[here])
        loss, _ = trm.policy_loss(
            train[here], rollout[here], advantages, layout, verdict=part, denominator=40
        )
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.item(), rel=1e-13) and total != 0
    torch.testing.assert_close(train.grad, wanted, rtol=1e-13, atol=0)


def test_clip_fractions_count_the_same_mask_above_and_below():
    lr = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, False, False]])
    _, _, metrics = simple(lr, [1.0], estimator="ppo_clip", mask=mask)
    assert metrics["trm/clip/high"] == 0.5


def test_diagnostics_are_taken_before_the_cap():
    _, _, metrics = simple([[3.0, 0.0]], [1.0], estimator="token_tis", clip=2.0)
    assert metrics["trm/ratio/log_max"] == 3 and metrics["trm/clip/high"] == 0.5


def test_identical_log_probs_are_flagged():
    assert simple([[0.0, 0.0]], [1.0])[2]["trm/ratio/identical"] == 1
    assert simple([[0.0, 1e-7]], [1.0])[2]["trm/ratio/identical"] == 0
    assert simple([[0.1, 0.1]], [1.0])[2]["trm/ratio/identical"] == 0


def test_identical_log_probs_warn_once():
    zero, other = [[0.0, 0.0]], [[0.0, 0.1]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_identical.cache_clear()
        simple(other, [1.0])
        simple([[0.1, 0.1]], [1.0])
        with pytest.raises(UserWarning, match="exactly 0: logp_train and logp_rollout are"):
            simple(zero, [1.0])
    warn_identical.cache_clear()
    with pytest.warns(UserWarning, match="exactly 0") as caught:
        simple(zero, [1.0])
        simple(zero, [1.0])
    # It points at the caller of policy_loss: `simple`.
    assert len(caught) == 1 and caught[0].filename.endswith("test_losses.py")


def test_a_warning_where_the_metrics_reach_the_host():
    # On a GPU the loss looks at nothing: what reads its metrics warns.
    _, _, metrics = simple([[0.0, 0.0]], [1.0])
    layout, zero = SequenceLayout.from_lengths([2]), torch.zeros(2)
    calls = (
        lambda: trm.as_floats(metrics),
        lambda: trm.batch_metrics(layout, log_ratio=zero, sync=True),
    )
    for call in calls:
        warn_identical.cache_clear()
        with pytest.warns(UserWarning, match="exactly 0") as caught:
            call()
            call()
        assert len(caught) == 1
    warn_identical.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trm.batch_metrics(layout, log_ratio=zero)
        trm.as_floats(simple([[0.0, 0.1]], [1.0])[2])


def test_a_sampled_kl_has_no_gradient_and_the_exact_one_has():
    # E[grad k1] = 0 by enumeration; the exact penalty's gradient is q - p.
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    z = torch.tensor([[0.2, 0.1, -0.4]], dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(z, -1)
    (sampled,) = torch.autograd.grad((q.exp().detach() * -q).sum(), z, retain_graph=True)
    assert sampled.abs().max() < 1e-15
    layout = SequenceLayout.from_lengths([1])
    kl = trm.token_divergence(p.log(), z).kl
    loss, _ = trm.policy_loss(
        q[:, 0],
        p.log()[:, 0],
        torch.zeros(1).double(),
        layout,
        estimator="token_is",
        kl=kl,
        kl_coef=2.0,
    )
    (exact,) = torch.autograd.grad(loss, z)
    torch.testing.assert_close(exact, 2 * (q.exp() - p).detach(), rtol=1e-10, atol=1e-12)


def test_coarse_log_probs_are_subtracted_in_float32():
    train = torch.tensor([[-0.998]], dtype=torch.bfloat16, requires_grad=True)
    loss, _ = trm.policy_loss(
        train,
        torch.tensor([[-1.0]]),
        torch.ones(1),
        SequenceLayout.from_lengths([1], padded_length=1),
        estimator="token_is",
    )
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-math.exp(1 - 0.99609375), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, train)
    assert gradient.dtype == torch.bfloat16 and torch.isfinite(gradient).all()
