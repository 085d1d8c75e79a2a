# SPDX-License-Identifier: Apache-2.0
"""Masks, weights, losses and metrics against verl 0.9.1, which `make test-parity` installs.

The adapter, in which every convention difference is spelled out:

* verl's k1 bounds ``lo_hi`` are on rollout/train, ours on train/rollout: ours are 1/hi .. 1/lo.
* verl clamps log-ratios at ±20 and we do not: inputs stay inside, `TestDifferences` shows the rest.
* verl's weight is a truncation where the threshold is a number and a band where it is ``lo_hi``.
* verl's rejection modes mask tokens or whole sequences; an empty row is nothing to either.
* verl excludes empty sequences from seq-mean denominators: no row here is empty in those tests.
"""

import math

import numpy as np
import pytest
import torch

import trm_ext as trm
from trm_ext import SequenceLayout, weights

pytest.importorskip("verl", reason="verl 0.9.1 is not installed here: run `make test-parity`")

from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

SHARED = 30  # random batches per option


def text(option, threshold):
    """One verl option as our criterion."""
    if option.endswith("k1"):
        low, high = (1 / float(bound) for bound in reversed(threshold.split("_")))
        name = {"token_k1": "token_ratio", "seq_sum_k1": "seq_ratio", "seq_mean_k1": "geo_ratio"}
        return f"{low!r}<={name[option]}<={high!r}"
    statistic = option.removeprefix("seq_")
    return f"{statistic}<={threshold}"


OPTIONS = {
    "token_k1": "0.7_1.3",
    "token_k2": "0.05",
    "token_k3": "0.05",
    "seq_sum_k1": "0.5_1.4",
    "seq_sum_k2": "0.3",
    "seq_sum_k3": "0.3",
    "seq_mean_k1": "0.9_1.15",
    "seq_mean_k2": "0.05",
    "seq_mean_k3": "0.05",
    "seq_max_k2": "0.15",
    "seq_max_k3": "0.15",
}
COMBINED = {
    "token_k1,seq_mean_k3": "0.7_1.3,0.08",
    "seq_max_k2,seq_mean_k1": "0.3,0.8_1.3",
    "seq_sum_k1,token_k2,seq_max_k3": "0.4_2.5,0.3,0.5",
}


def batch(seed, *, full=False):
    """log-ratios and a mask with holes and an empty row, and garbage that is finite elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(8, 7, generator=generator) < 0.75
    if full:
        mask[:, 0] = True
    else:
        mask[3] = False
    lr = 0.3 * torch.randn(8, 7, generator=generator)
    lr[torch.rand(8, 7, generator=generator) < 0.1] = 0
    return torch.where(mask, lr, torch.full_like(lr, 1e4)), mask


def verl_mask(lr, mask, option, threshold):
    found, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        lr, mask.float(), option, threshold
    )
    return found.bool()


@pytest.mark.parametrize(("option", "threshold"), [*OPTIONS.items(), *COMBINED.items()])
def test_rejection_masks_agree(option, threshold):
    criteria = [
        text(one, limit) for one, limit in zip(option.split(","), threshold.split(","), strict=True)
    ]
    kept = counted = 0
    for seed in range(SHARED):
        lr, mask = batch(seed)
        ours = trm.verdict(criteria, SequenceLayout.from_mask(mask), log_ratio=lr)
        assert ours.token_keep.equal(verl_mask(lr, mask, option, threshold)), seed
        kept, counted = kept + int(ours.token_keep.sum()), counted + int(mask.sum())
    assert 0.1 < kept / counted < 0.95


@pytest.mark.parametrize("option", [name for name in OPTIONS if not name.endswith("k1")])
def test_adversarial_values_inside_the_clamp(option):
    rows = [[19.9, -19.9], [0.0, 0.0], [-19.9, 0.0], [5.0, -5.0], [0.01, -0.01], [0.7, 0.0]]
    lr, mask = torch.tensor(rows), torch.ones(6, 2, dtype=torch.bool)
    for threshold in ("1e-12", "0.3", "12.5", "150", "1e9"):
        ours = trm.verdict(text(option, threshold), SequenceLayout.from_mask(mask), log_ratio=lr)
        assert ours.token_keep.equal(verl_mask(lr, mask, option, threshold)), threshold


@pytest.mark.parametrize(("option", "threshold"), OPTIONS.items())
def test_infinities_agree_where_they_are_capped_as_verl_clamps(option, threshold):
    differs = 0
    for seed in range(SHARED):
        lr, mask = batch(seed)
        generator = torch.Generator().manual_seed(seed)
        where = torch.rand(8, 7, generator=generator) < 0.08
        sign = torch.where(torch.rand(8, 7, generator=generator) < 0.5, 1.0, -1.0)
        lr = torch.where(mask & where, math.inf * sign, lr)
        layout = SequenceLayout.from_mask(mask)
        for limit in (threshold, "1e-9_1e12" if option.endswith("k1") else "1e9"):
            wanted = verl_mask(lr, mask, option, limit)
            criterion = text(option, limit)
            ours = trm.verdict(criterion, layout, log_ratio=lr, infinity_cap=20.0)
            assert ours.token_keep.equal(wanted), seed
            off = trm.verdict(criterion, layout, log_ratio=lr)
            differs += int((off.token_keep != wanted).sum())
        assert int(ours.capped.sum()) == int((mask & where).sum())
    assert differs > 0


@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("threshold", (1.2, 2.0, "0.7_1.3"))
def test_weights_agree(level, threshold):
    for seed in range(SHARED):
        lr, mask = batch(seed)
        lr = torch.where(mask, lr, 0.0)  # verl multiplies by the mask: 1e4 would be 485165195 * 0
        layout = SequenceLayout.from_mask(mask)
        try:
            found, _ = rollout_corr_helper.compute_rollout_correction_weights(
                lr, mask.float(), level, threshold
            )
        except ZeroDivisionError:  # every weight is 0: its metric divides by their squares
            found = torch.zeros_like(lr)
        if isinstance(threshold, str):
            band = tuple(map(float, threshold.split("_")))
            if level == "token":
                ours = weights.token_mask(lr, layout, band=band)
            else:
                verdict = trm.verdict(trm.SequenceRatioBand(*band), layout, log_ratio=lr)
                ours = weights.seq_is(lr, layout) * verdict.token_keep
        elif level == "token":
            ours = weights.token_tis(lr, layout, cap=threshold)
        else:
            ours = weights.seq_tis(lr, layout, cap=threshold)
        torch.testing.assert_close(ours, found, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "mode", "denominator"),
    (
        ("ppo_clip", "token-mean", "tokens"),
        ("ppo_clip", "seq-mean-token-sum", "sequences"),
        # GSPO's mean over tokens is part of our estimator: its loss is a mean over sequences.
        ("gspo", "seq-mean-token-mean", "sequences"),
    ),
)
def test_losses_and_gradients_agree(name, mode, denominator):
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        clip_ratio_low=0.15,
        clip_ratio_high=0.25,
        clip_ratio_c=1.5,
    )
    function = {
        "ppo_clip": core_algos.compute_policy_loss_vanilla,
        "gspo": core_algos.compute_policy_loss_gspo,
    }[name]
    clip = (0.15, 0.25, 1.5) if name == "ppo_clip" else (0.15, 0.25)
    for seed in range(SHARED):
        lr, mask = batch(seed, full=True)
        lr = torch.where(mask, lr, 0.0)
        advantages = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        theirs, ours = (torch.zeros(8, 7) + lr for _ in range(2))
        theirs.requires_grad_()
        ours.requires_grad_()
        wanted, _ = function(
            torch.zeros(8, 7), theirs, advantages[:, None].expand(8, 7), mask.float(), mode, config
        )
        found, _ = trm.policy_loss(
            ours,
            torch.zeros(8, 7),
            advantages,
            SequenceLayout.from_mask(mask),
            estimator=name,
            clip=clip,
            denominator=denominator,
        )
        wanted.backward()
        found.backward()
        torch.testing.assert_close(found, wanted, rtol=3e-6, atol=1e-7)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=3e-6, atol=1e-8)


def test_metrics_agree():
    lr, mask = batch(1)
    lr = torch.where(mask, lr, 0.0)
    train = -torch.ones(8, 7)
    wanted = rollout_corr_helper.compute_offpolicy_metrics(train, train - lr, mask.float())
    layout = SequenceLayout.from_mask(mask)
    found = trm.batch_metrics(layout, log_ratio=lr, sync=True)
    assert found["trm/k1"] == pytest.approx(float(wanted["kl"]), rel=1e-5, abs=1e-7)
    assert found["trm/k3"] == pytest.approx(float(wanted["k3_kl"]), rel=1e-5)
    _, theirs = rollout_corr_helper.compute_rollout_correction_weights(
        lr, mask.float(), "token", 2.0
    )
    used = weights.token_tis(lr, layout, cap=2.0)
    ours = trm.batch_metrics(layout, weights=used, sync=True)
    assert ours["trm/weights/ess"] == pytest.approx(theirs["rollout_is_eff_sample_size"], rel=1e-5)


class TestDifferences:
    """docs/conventions.md: each input on which the two differ, and what each of them says."""

    one = torch.ones(1, 1, dtype=torch.bool)
    layout = SequenceLayout.from_mask(one)

    def both(self, criteria, lr, option, threshold):
        ours = trm.verdict(criteria, self.layout, log_ratio=torch.tensor([[lr]]))
        theirs = verl_mask(torch.tensor([[lr]]), self.one, option, threshold)
        return bool(ours.keep), bool(theirs)

    def test_k1_bounds_are_reciprocal(self):
        lr = math.log(0.6)
        assert self.both("0.5<=geo_ratio<=1.2", lr, "seq_mean_k1", "0.5_1.2") == (True, False)
        lr = math.log(1 / 0.6)
        assert self.both("0.5<=geo_ratio<=1.2", lr, "seq_mean_k1", "0.5_1.2") == (False, True)

    def test_the_clamp_caps_the_statistic(self):
        assert self.both("max_k2<=250", 50.0, "seq_max_k2", "250") == (False, True)
        assert self.both("max_k3<=25", -math.inf, "seq_max_k3", "25") == (False, True)

    def test_k3_of_nearly_equal_policies(self):
        # exp(x) - 1 - x in float32 leaves 1e-8 of what is 5e-17.
        assert self.both("max_k3<=1e-12", -1e-8, "seq_max_k3", "1e-12") == (True, False)

    def test_every_token_out_of_band(self):
        lr = torch.tensor([[3.0]])
        with pytest.raises(ZeroDivisionError):
            rollout_corr_helper.compute_rollout_correction_weights(
                lr, self.one.float(), "token", "0.5_2.0"
            )
        assert weights.token_mask(lr, self.layout, band=(0.5, 2.0)).tolist() == [[0]]

    def test_rejected_siblings_and_the_baseline(self):
        rewards, uid = torch.tensor([[100.0], [1.0]]), np.array(["a", "a"])
        theirs, _ = core_algos.compute_grpo_outcome_advantage(
            rewards, torch.tensor([[0.0], [1.0]]), uid, norm_adv_by_std_in_grpo=False
        )
        assert theirs[1].item() == -49.5
        keep = torch.tensor([False, True])
        ours = trm.group_advantages(rewards[:, 0], torch.zeros(2, dtype=torch.int64), keep)
        assert ours.tolist() == [0, 1]

    def test_a_missing_value_at_a_token_criterion(self):
        lr, mask = torch.tensor([[math.nan, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
        ours = trm.verdict("token_k2<=1", SequenceLayout.from_mask(mask), log_ratio=lr)
        assert ours.token_keep.tolist() == [[False, False]]  # the sequence is rejected
        assert verl_mask(lr, mask, "token_k2", "1").tolist() == [[False, True]]

    def test_a_missing_value_at_a_sequence_criterion_rejects_in_both(self):
        assert self.both("max_k2<=1", math.nan, "seq_max_k2", "1") == (False, False)
        assert self.both("geo_ratio<=2", math.nan, "seq_mean_k1", "0.5_2") == (False, False)

    def test_what_is_under_the_mask_reaches_the_weights(self):
        lr, mask = torch.tensor([[0.0, math.nan]]), torch.tensor([[True, False]])
        theirs, _ = rollout_corr_helper.compute_rollout_correction_weights(
            lr, mask.float(), "token", 2.0
        )
        assert theirs.isnan().tolist() == [[False, True]]
        assert weights.token_tis(lr, SequenceLayout.from_mask(mask)).tolist() == [[1, 0]]

    def test_a_batch_without_tokens(self):
        lr, mask = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool)
        with pytest.raises(ValueError, match="at least one valid token"):
            verl_mask(lr, mask, "seq_max_k2", "1")
        ours = trm.verdict("max_k2<=1", SequenceLayout.from_mask(mask), log_ratio=lr)
        assert ours.reason.tolist() == [trm.Reason.EMPTY] * 2

    def test_the_mean_of_nothing(self):
        mask = torch.zeros(1, 2)
        theirs = core_algos.agg_loss(torch.zeros(1, 2), mask, "token-mean")
        assert theirs.isnan()
        loss, metrics = trm.policy_loss(
            torch.zeros(1, 2),
            torch.zeros(1, 2),
            torch.zeros(1),
            SequenceLayout.from_mask(mask.bool()),
            estimator="token_is",
            denominator="tokens",
        )
        assert loss == 0 and metrics["trm/loss/all_rejected"] == 1
