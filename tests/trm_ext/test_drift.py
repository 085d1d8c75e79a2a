# SPDX-License-Identifier: Apache-2.0
"""Spikes told from drift, on cases that were planted in logits or in the KL."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import trm_ext as trm
from trm_ext.drift import locate_drift

ROWS, V, LENGTH = 2000, 200, 250
LAYOUT = trm.SequenceLayout.from_lengths([LENGTH] * (ROWS // LENGTH))


def kl_of(noise: torch.Tensor) -> torch.Tensor:
    """KL of logits whose width varies from row to row, with noise of a given size per row."""
    x = torch.randn(ROWS, V) * (0.5 + 4 * torch.rand(ROWS, 1))
    y = x + noise[:, None] * torch.randn(ROWS, V)
    kl = trm.token_divergence(x, y).kl
    assert kl is not None
    return kl


def test_the_same_noise_at_every_token_is_drift() -> None:
    found = locate_drift(kl_of(torch.full((ROWS,), 0.1)), LAYOUT)
    assert found.kind == "drift" and found.spike_share < 0.1 and not found.grows
    assert found.tokens == ROWS and found.not_finite == 0


def test_flipped_routes_are_found_where_they_were_planted() -> None:
    planted = torch.arange(37, ROWS, 101)
    noise = torch.full((ROWS,), 0.01)
    noise[planted] = 3.0
    kl = kl_of(noise)
    found = locate_drift(kl, LAYOUT)
    assert found.kind == "spikes" and found.isolated == 1.0
    assert sorted(found.spikes.tolist()) == planted.tolist()
    assert (np.diff(kl[found.spikes].numpy()) <= 0).all()
    assert found.spike_share == pytest.approx(float(kl[planted].double().sum() / kl.double().sum()))


def test_spikes_side_by_side_are_bursts() -> None:
    noise = torch.full((ROWS,), 0.01)
    noise[600:620] = 3.0
    found = locate_drift(kl_of(noise), LAYOUT)
    assert found.kind == "bursts" and found.isolated == 0.0
    assert sorted(found.spikes.tolist()) == list(range(600, 620))


def test_a_sequence_boundary_and_a_hole_separate_or_do_not() -> None:
    kl = torch.full((120,), 1e-3)
    kl[[59, 60]] = 1.0  # last of one sequence, first of the next
    assert locate_drift(kl, trm.SequenceLayout.from_lengths([60, 60])).isolated == 1.0
    assert locate_drift(kl, trm.SequenceLayout.from_lengths([120])).isolated == 0.0
    mask = torch.ones(120, dtype=torch.bool)
    kl[61], mask[60] = 1.0, False  # 59 and 61 are neighbours among the tokens that count
    layout = trm.SequenceLayout.from_cu_seqlens(torch.tensor([0, 120]), mask)
    found = locate_drift(kl, layout)
    assert found.isolated == 0.0 and found.spikes.tolist() == [59, 61]


def test_few_flips_on_strong_drift_are_mixed() -> None:
    noise = torch.full((ROWS,), 0.2)
    noise[::200] = 2.0
    found = locate_drift(kl_of(noise), LAYOUT)
    assert found.kind == "mixed" and 0.1 < found.spike_share < 0.5


def test_spikes_on_a_bulk_that_is_exactly_zero() -> None:
    kl = torch.zeros(1000)
    kl[[3, 700]] = 0.5
    found = locate_drift(kl, trm.SequenceLayout.from_lengths([1000]))
    assert found.kind == "spikes" and found.spike_share == 1.0
    assert sorted(found.spikes.tolist()) == [3, 700]


@pytest.mark.parametrize("value", [0.0, 1e-11])
def test_no_mismatch(value: float) -> None:
    found = locate_drift(torch.full((100,), value), trm.SequenceLayout.from_lengths([100]))
    assert found.kind == "none" and len(found.spikes) == 0
    assert math.isnan(found.spike_share) == (value == 0)


def test_a_log_normal_bulk_rarely_has_a_spike() -> None:
    rng = np.random.default_rng(5)
    layout = trm.SequenceLayout.from_lengths([2000])
    false = 0
    for _ in range(400):
        kl = torch.from_numpy(np.exp(rng.normal(-6, 1.5, 2000)))
        false += len(locate_drift(kl, layout).spikes) > 0
    # Binomial(400, 0.015): P(more than 20) < 1e-5, P(0) = 0.2 %
    assert 0 < false <= 20


def test_up_to_a_quarter_may_be_spikes() -> None:
    rng = np.random.default_rng(1)
    for share, kind in ((0.2, "spikes"), (0.3, "drift")):
        kl = np.exp(rng.normal(-7, 0.5, 2000))
        flips = rng.permutation(2000)[: int(2000 * share)]
        kl[flips] = 1.0
        layout = trm.SequenceLayout.from_lengths([1] * 2000)
        assert locate_drift(torch.from_numpy(kl), layout).kind == kind


def test_growth_along_the_sequence_ignores_spikes() -> None:
    position = LAYOUT.position.double()
    noise = torch.exp(0.3 * torch.randn(ROWS, dtype=torch.float64))
    kl = 1e-4 * (1 + position / 50) * noise
    kl[::LENGTH] = 5.0  # one spike at each first position
    found = locate_drift(kl, LAYOUT)
    bulk = torch.ones(ROWS, dtype=torch.bool)
    bulk[::LENGTH] = False
    expected = spearmanr(position[bulk], kl[bulk]).statistic
    assert found.trend == pytest.approx(expected) and found.grows
    flat = locate_drift(1e-4 * noise, LAYOUT)
    assert abs(flat.trend) < 0.1 and not flat.grows


def test_values_that_are_not_finite_or_do_not_count_stay_out() -> None:
    kl = torch.full((100,), 1e-3)
    kl[5], kl[6], kl[7] = math.nan, math.inf, 9.0
    mask = torch.ones(100, dtype=torch.bool)
    mask[7] = False
    found = locate_drift(kl, trm.SequenceLayout.from_cu_seqlens(torch.tensor([0, 100]), mask))
    assert (found.tokens, found.not_finite, found.kind) == (97, 2, "drift")
    assert found.median == pytest.approx(1e-3) and len(found.spikes) == 0


@pytest.mark.parametrize("lengths", [[], [0], [3]])
def test_too_few_tokens_say_nothing(lengths: list[int]) -> None:
    layout = trm.SequenceLayout.from_lengths(lengths)
    found = locate_drift(torch.ones(sum(lengths)), layout)
    assert found.kind == "unknown" and found.limit == math.inf and len(found.spikes) == 0


def test_padded_batches_and_wrong_shapes() -> None:
    layout = trm.SequenceLayout.from_lengths([40, 2], padded_length=40)
    kl = torch.full((2, 40), 1e-3)
    kl[0, 7] = kl[1, 30] = 1.0  # the second does not count
    assert locate_drift(kl, layout).spikes.tolist() == [7]
    with pytest.raises(ValueError, match=r"kl must have the layout's token shape \[2, 40\]"):
        locate_drift(kl.flatten(), layout)
