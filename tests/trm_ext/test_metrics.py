# SPDX-License-Identifier: Apache-2.0
"""Metrics: numpy on the counted values, for every layout; raw statistics; no device wait."""

import math

import numpy as np
import pytest
import torch

import trm_ext as trm
from tests.trm_ext.test_masks import batch, layouts
from trm_ext import SequenceLayout

INF, NAN = float("inf"), float("nan")


def nearest_rank(values, level):
    return sorted(values)[max(1, math.ceil(level * len(values) - 1e-9)) - 1]


@pytest.mark.parametrize("poison", (NAN, INF, 1e30))
def test_every_number_on_every_layout(poison):
    packed, kl, ratio = batch(7)
    weights = ratio.exp()
    m = packed.token_mask.numpy()
    k, r = kl.double().numpy()[m], ratio.double().numpy()[m]
    ids = packed.sequence_id.numpy()[m]
    sums = np.bincount(ids, k, minlength=40)
    length = np.bincount(ids, minlength=40)
    some = length > 0
    largest = np.array([k[ids == b].max(initial=0) for b in range(40)])
    keep = largest <= 0.9
    w = np.exp(r)
    wanted = {
        "trm/sequences": some.sum(),
        "trm/tokens": m.sum(),
        "trm/accepted": keep[some].mean(),
        "trm/rejected/max_kl": 1 - keep[some].mean(),
        "trm/accepted/len_1_2": keep[some & (length <= 2)].mean(),
        "trm/accepted/len_3_4": keep[(length > 2) & (length <= 4)].mean(),
        "trm/accepted/len_5_up": keep[length > 4].mean(),
        "trm/sequences/len_5_up": (length > 4).sum(),
        "trm/kl/mean": k.mean(),
        "trm/kl/max": k.max(),
        "trm/kl/not_finite": 0,
        "trm/kl/sequences": some.sum(),
        "trm/ratio/tokens": m.sum(),
        "trm/estimate/tokens": m.sum(),
        "trm/kl/seq_max": largest[some].mean(),
        "trm/kl/seq_sum": sums[some].mean(),
        "trm/kl/seq_sum_max": sums.max(),
        "trm/kl/seq_mean": (sums[some] / length[some]).mean(),
        "trm/k1": -r.mean(),
        "trm/k2": (r * r).mean() / 2,
        "trm/k3": (np.expm1(r) - r).mean(),
        "trm/abs_log_ratio": abs(r).mean(),
        "trm/abs_log_ratio_max": abs(r).max(),
        "trm/ratio_gap": abs(np.expm1(r)).mean(),
        "trm/ratio/identical": 0,
        "trm/estimate/k1_minus_kl": (-r - k).mean(),
        "trm/estimate/k3_minus_kl": (np.expm1(r) - r - k).mean(),
        "trm/weights/ess": w.sum() ** 2 / (w * w).sum() / len(w),
        "trm/weights/mean": w.mean(),
        **{f"trm/kl/p{100 * q:g}": nearest_rank(k, q) for q in (0.5, 0.9, 0.99, 0.999)},
    }
    for name, (layout, move) in layouts(packed, poison).items():
        values = {
            key: torch.where(layout.token_mask, move(value), poison)
            for key, value in (("kl", kl), ("ratio", ratio), ("w", weights))
        }
        verdict = trm.max_kl_verdict(values["kl"], layout, max_kl=0.9)
        found = trm.batch_metrics(
            layout,
            verdict=verdict,
            divergence={"kl": values["kl"]},
            log_ratio=values["ratio"],
            weights=values["w"],
            length_edges=(2, 4),
            sync=True,
        )
        for key, value in wanted.items():
            assert found[key] == pytest.approx(float(value), rel=1e-6, abs=1e-8), (name, key)


def test_values_that_are_not_finite_are_counted_and_do_not_spoil_the_rest():
    layout = SequenceLayout.from_lengths([3, 2])
    kl = torch.tensor([0.1, NAN, 0.3, INF, 0.2])
    lr = torch.tensor([0.1, NAN, 0.1, -INF, 0.1])
    found = trm.batch_metrics(layout, divergence={"kl": kl}, log_ratio=lr, sync=True)
    assert found["trm/kl/not_finite"] == 2 and found["trm/kl/tokens"] == 3
    assert found["trm/kl/mean"] == pytest.approx(0.2) and found["trm/kl/max"] == pytest.approx(0.3)
    assert found["trm/kl/p50"] == pytest.approx(0.2)
    assert found["trm/k1"] == pytest.approx(-0.1) and found["trm/unscored_tokens"] == 1
    assert math.isnan(found["trm/kl/seq_sum"])


def test_one_large_ratio_leaves_metrics_finite():
    # e^100 - 1 - 100 overflowed the k3 metric.
    layout = SequenceLayout.from_lengths([2])
    found = trm.batch_metrics(layout, log_ratio=torch.tensor([100.0, 0.0]), sync=True)
    assert all(math.isfinite(value) for value in found.values())
    assert found["trm/abs_log_ratio_max"] == 100


def test_a_batch_that_was_compared_with_itself_is_flagged():
    layout = SequenceLayout.from_mask(torch.tensor([[True, True, False]]))
    for ratio, flag in (([0.0, 0.0, 5.0], 1), ([0.0, 1e-9, 0.0], 0), ([NAN, 0.0, 0.0], 0)):
        found = trm.batch_metrics(layout, log_ratio=torch.tensor([ratio]))
        assert found["trm/ratio/identical"] == flag


def test_ranks_add_counts_not_averages():
    # An all-masked rank that enters a mean as 0 halves it; counts add up.
    layouts_ = [SequenceLayout.from_lengths([2, 2]), SequenceLayout.from_lengths([0, 0])]
    parts = [
        trm.batch_metrics(
            one, verdict=trm.max_kl_verdict(torch.full(one.shape, 0.1), one, max_kl=1)
        )
        for one in layouts_
    ]
    kept, some = (
        sum(part[key] for part in parts) for key in ("trm/sequences_kept", "trm/sequences")
    )
    assert kept / some == 1 and math.isnan(parts[1]["trm/accepted"])
    # Means come with what they are means of, whatever is missing on a rank.
    one = SequenceLayout.from_lengths([2, 1])
    kls = (torch.tensor([0.1, NAN, 0.3]), torch.tensor([0.2, 0.4, INF]))
    ratios = (torch.tensor([0.1, 0.2, -INF]), torch.tensor([NAN, NAN, -0.5]))
    parts = [
        trm.batch_metrics(one, divergence={"kl": k}, log_ratio=r)
        for k, r in zip(kls, ratios, strict=True)
    ]
    for mean, count, wanted in (
        ("trm/kl/mean", "trm/kl/tokens", 1.0 / 4),
        ("trm/kl/seq_sum", "trm/kl/sequences", 0.9 / 2),
        ("trm/k1", "trm/ratio/tokens", 0.2 / 3),
    ):
        total = sum(part[mean] * part[count] for part in parts)
        assert total / sum(part[count] for part in parts) == pytest.approx(wanted, rel=1e-6)
    assert [int(part["trm/estimate/tokens"]) for part in parts] == [1, 0]
    assert [int(part["trm/kl/sequences"]) for part in parts] == [1, 1]
    # An on-policy, padded batch: no padding value enters a minimum or a spread.
    ones = trm.batch_metrics(
        SequenceLayout.from_lengths([1, 3], padded_length=3), log_ratio=torch.zeros(2, 3)
    )
    assert ones["trm/ratio_gap"] == 0 == ones["trm/abs_log_ratio_max"]


def test_agreement_of_an_estimator_with_the_exact_verdict():
    layout = SequenceLayout.from_lengths([1, 1, 1, 1, 0])
    exact = trm.max_kl_verdict(torch.tensor([0.0, 1.0, 1.0, 0.0]), layout, max_kl=0.5)
    sampled = trm.verdict("max_k2<=0.5", layout, log_ratio=torch.tensor([0.0, 2.0, 0.0, 2.0]))
    found = trm.batch_metrics(layout, verdict=exact, other=sampled, sync=True)
    assert found["trm/agreement"] == 0.5
    assert found["trm/agreement/missed"] == found["trm/agreement/extra"] == 0.25


def test_nothing_gives_nan_and_no_error():
    layout = SequenceLayout.from_lengths([0])
    verdict = trm.max_kl_verdict(torch.zeros(0), layout, max_kl=1)
    found = trm.batch_metrics(
        layout,
        verdict=verdict,
        divergence={"kl": torch.zeros(0)},
        log_ratio=torch.zeros(0),
        weights=torch.zeros(0),
        sync=True,
    )
    assert math.isnan(found["trm/kl/mean"]) and math.isnan(found["trm/kl/p99"])
    assert found["trm/all_rejected"] == 0 and found["trm/sequences"] == 0


def test_effective_sample_size():
    assert trm.effective_sample_size(torch.ones(7)).item() == 7
    assert trm.effective_sample_size(torch.tensor([1e30, 1.0])).item() == pytest.approx(1)
    assert trm.effective_sample_size(torch.tensor([3.0, 1.0])).item() == pytest.approx(16 / 10)


def test_threshold_for_a_target_acceptance():
    generator = torch.Generator().manual_seed(0)
    statistic = torch.rand(101, generator=generator)
    statistic[:10] = NAN
    layout = SequenceLayout.from_lengths([1] * 101)
    for share in (0.1, 0.5, 0.9):
        limit = trm.threshold_for_acceptance(statistic, share).item()
        keep = trm.max_kl_verdict(statistic, layout, max_kl=limit).keep
        assert int(keep.sum()) == math.ceil(share * 101)
    assert trm.threshold_for_acceptance(statistic, 1.0) == INF


def test_bad_input():
    layout = SequenceLayout.from_lengths([1])
    verdict = trm.max_kl_verdict(torch.zeros(1), layout, max_kl=1)
    with pytest.raises(ValueError, match=r"length_edges must increase from above 0, got \[4, 2\]"):
        trm.batch_metrics(layout, verdict=verdict, length_edges=(4, 2))
    with pytest.raises(ValueError, match=r"weights must have .* \[1\], got \[2\]"):
        trm.batch_metrics(layout, weights=torch.zeros(2))
    with pytest.raises(ValueError, match=r"acceptance must be in \(0, 1\], got 0"):
        trm.threshold_for_acceptance(torch.zeros(1), 0)


def test_without_sync_no_value_leaves_the_device():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        layout = SequenceLayout.from_mask(torch.ones(2, 3, dtype=torch.bool))
        values = torch.rand(2, 3)
        verdict = trm.verdict("max_kl<=1", layout, divergence={"kl": values})
        found = trm.batch_metrics(
            layout,
            verdict=verdict,
            other=verdict,
            divergence={"kl": values},
            log_ratio=values,
            weights=values,
        )
        loss, more = trm.policy_loss(values, values, torch.zeros(2), layout, verdict=verdict)
    assert all(isinstance(v, torch.Tensor) and v.dim() == 0 for v in {**found, **more}.values())
    assert loss.dim() == 0
