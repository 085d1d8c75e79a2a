# SPDX-License-Identifier: Apache-2.0
"""The verdict: a plain-Python oracle over padded, packed and segmented layouts, and its rules."""

import math

import pytest
import torch

import trm_ext as trm
from tests.rows import base_rows
from trm_ext import Reason, SequenceLayout

INF, NAN = float("inf"), float("nan")


def oracle(kl, ids, positions, mask, batch, threshold):
    """Verdict by the definition, one sequence at a time, on Python floats."""
    rows = []
    for b in range(batch):
        here = [(p, v) for v, i, p, m in zip(kl, ids, positions, mask, strict=True) if i == b and m]
        here.sort()
        if not here:
            rows.append((True, Reason.EMPTY, -1, 0.0, 0.0, 0.0))
            continue
        values = [v for _, v in here]
        missing = [p for p, v in here if math.isnan(v)]
        total = math.fsum(values)
        if missing:
            rows.append((False, Reason.NON_FINITE, missing[0], NAN, NAN, NAN))
            continue
        worst = max(values)
        position = next(p for p, v in here if v == worst)
        keep = worst <= threshold
        reason = Reason.NON_FINITE if worst == INF else Reason.KEPT if keep else Reason.MAX_KL
        keep = keep and worst != INF
        rows.append((keep, reason, position, worst, total / len(values), total))
    return rows


def assert_verdict(verdict, rows):
    for index, field in enumerate(("keep", "reason", "position")):
        assert getattr(verdict, field).tolist() == [row[index] for row in rows], field
    for index, field in ((3, "max_kl"), (4, "mean_kl"), (5, "sum_kl")):
        torch.testing.assert_close(
            getattr(verdict, field).double(),
            torch.tensor([row[index] for row in rows], dtype=torch.float64),
            rtol=2e-7,
            atol=0,
            equal_nan=True,
        )


def random_kl(count, generator):
    kl = torch.rand(count, generator=generator)
    kl[torch.rand(count, generator=generator) < 0.3] = 0.25  # ties
    kl[torch.rand(count, generator=generator) < 0.03] = NAN
    kl[torch.rand(count, generator=generator) < 0.03] = INF
    return kl


@pytest.mark.parametrize("seed", range(20))
def test_every_layout_against_the_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (7,), generator=generator)
    total = int(lengths.sum())
    kl = random_kl(total, generator)
    mask = torch.rand(total, generator=generator) < 0.8
    packed = SequenceLayout.from_cu_seqlens(
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), mask
    )
    flat = (kl.tolist(), packed.sequence_id.tolist(), packed.position.tolist(), mask.tolist())
    rows = oracle(*flat, 7, 0.5)
    verdict = trm.max_kl_verdict(kl, packed, max_kl=0.5)
    assert_verdict(verdict, rows)
    assert verdict.token_keep.tolist() == [
        m and rows[i][0] for m, i in zip(mask.tolist(), flat[1], strict=True)
    ]
    # Padded: the same tokens at the same positions, poison everywhere else.
    padded_kl, padded_mask = torch.full((7, 6), NAN), torch.zeros(7, 6, dtype=torch.bool)
    padded_kl[packed.sequence_id, packed.position] = kl
    padded_mask[packed.sequence_id, packed.position] = mask
    padded = trm.max_kl_verdict(padded_kl, SequenceLayout.from_mask(padded_mask), max_kl=0.5)
    assert_verdict(padded, rows)
    # Segments: the same tokens in random order.
    order = torch.randperm(total, generator=generator)
    pieces = SequenceLayout.from_segments(
        packed.sequence_id[order], packed.position[order], 7, mask[order]
    )
    assert_verdict(trm.max_kl_verdict(kl[order], pieces, max_kl=0.5), rows)


def test_the_threshold_is_inclusive():
    layout = SequenceLayout.from_lengths([1, 1])
    kl = torch.tensor([0.02, torch.nextafter(torch.tensor(0.02), torch.tensor(1.0)).item()])
    at = float(kl[0])
    assert trm.max_kl_verdict(kl, layout, max_kl=at).keep.tolist() == [True, False]
    assert trm.max_kl_verdict(torch.zeros(2), layout, max_kl=0).keep.all()


def test_infinite_threshold_still_masks_a_support_violation():
    layout = SequenceLayout.from_lengths([1, 1])
    verdict = trm.max_kl_verdict(torch.tensor([1e30, INF]), layout, max_kl=INF)
    assert verdict.keep.tolist() == [True, False]
    assert verdict.reason.tolist() == [Reason.KEPT, Reason.NON_FINITE]


@pytest.mark.parametrize("poison", (NAN, INF, -INF, 1e30))
def test_values_under_the_mask_are_never_used(poison):
    layout = SequenceLayout.from_mask(torch.tensor([[True, False, True]]))
    clean = trm.max_kl_verdict(torch.tensor([[0.1, 0.0, 0.2]]), layout, max_kl=0.5)
    dirty = trm.max_kl_verdict(torch.tensor([[0.1, poison, 0.2]]), layout, max_kl=0.5)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert dirty.position.tolist() == [2] and not dirty.token_keep[0, 1]


class TestFromLogits:
    def test_a_planted_divergence_is_found_where_it_is(self):
        x = base_rows("flat", 12, 500).float().reshape(3, 4, 500)
        y = x.clone()
        y[1, 2] += torch.randn(500)
        layout = SequenceLayout.from_mask(torch.ones(3, 4, dtype=torch.bool))
        verdict = trm.trust_region_mask(x, y, layout, max_kl=0.02)
        assert verdict.keep.tolist() == [True, False, True]
        assert verdict.reason.tolist() == [Reason.KEPT, Reason.MAX_KL, Reason.KEPT]
        assert verdict.position[1] == 2 and verdict.token_keep.sum() == 8
        # A hole over it: never read, so the sequence is kept.
        mask = torch.ones(3, 4, dtype=torch.bool)
        mask[1, 2] = False
        y[1, 2] = NAN
        holed = trm.trust_region_mask(x, y, SequenceLayout.from_mask(mask), max_kl=0.02)
        assert holed.keep.all()

    def test_packed_equals_padded(self):
        x, y = torch.randn(6, 90), torch.randn(6, 90)
        packed = trm.trust_region_mask(x, y, SequenceLayout.from_lengths([3, 3]), max_kl=1.0)
        padded = trm.trust_region_mask(
            x.reshape(2, 3, 90),
            y.reshape(2, 3, 90),
            SequenceLayout.from_lengths([3, 3], padded_length=3),
            max_kl=1.0,
        )
        for a, b in zip(packed, padded, strict=True):
            assert torch.equal(a.flatten(), b.flatten())

    def test_no_gradient_flows(self):
        y = torch.randn(2, 9, requires_grad=True)
        verdict = trm.trust_region_mask(
            torch.randn(2, 9), y, SequenceLayout.from_lengths([2]), max_kl=1.0
        )
        assert not verdict.max_kl.requires_grad

    def test_no_value_leaves_the_device(self):
        # Fake tensors have no values: any .item(), bool() or data-dependent shape would raise.
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            layout = SequenceLayout.from_mask(torch.ones(2, 3, dtype=torch.bool))
            logits = torch.randn(2, 3, 9)
            verdict = trm.trust_region_mask(logits, logits + 1, layout, max_kl=0.1)
        assert mode is not None and verdict.keep.shape == (2,)

    def test_compiles_in_one_graph(self):
        layout = SequenceLayout.from_lengths([2, 1])

        def mask(x, y):
            return trm.trust_region_mask(x, y, layout, max_kl=0.5)

        x, y = torch.randn(3, 9), torch.randn(3, 9)
        compiled = torch.compile(mask, fullgraph=True, backend="aot_eager")
        assert all(torch.equal(a, b) for a, b in zip(compiled(x, y), mask(x, y), strict=True))


class TestBadInput:
    @pytest.mark.parametrize("threshold", (-0.1, NAN))
    def test_threshold(self, threshold):
        x, layout = torch.zeros(1, 3), SequenceLayout.from_lengths([1])
        with pytest.raises(ValueError, match=f"max_kl must be >= 0, got {threshold}"):
            trm.trust_region_mask(x, x, layout, max_kl=threshold)

    def test_layout_of_another_shape(self):
        x, layout = torch.zeros(4, 3), SequenceLayout.from_lengths([3])
        with pytest.raises(ValueError, match=r"\[3\], got \[4\]"):
            trm.trust_region_mask(x, x, layout, max_kl=0.1)
