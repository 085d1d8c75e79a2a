# SPDX-License-Identifier: Apache-2.0
"""SequenceLayout: every constructor, its errors, and what a shift by one costs."""

import pytest
import torch

import trm_ext as trm
from trm_ext import SequenceLayout

NAN = float("nan")


class TestConstructors:
    def test_padded_with_holes(self):
        mask = torch.tensor([[False, True, False, True], [True, True, False, False]])
        layout = SequenceLayout.from_mask(mask)
        assert layout.num_sequences == 2 and layout.shape == (2, 4)
        assert layout.sequence_id.tolist() == [[0] * 4, [1] * 4]
        assert layout.position.tolist() == [[0, 1, 2, 3]] * 2

    @pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
    def test_packed_with_empty_sequences(self, dtype):
        layout = SequenceLayout.from_cu_seqlens(torch.tensor([0, 0, 3, 3, 5, 5], dtype=dtype))
        assert layout.num_sequences == 5
        assert layout.sequence_id.tolist() == [1, 1, 1, 3, 3]
        assert layout.position.tolist() == [0, 1, 2, 0, 1]
        assert layout.token_mask.all()

    def test_no_sequences(self):
        assert SequenceLayout.from_cu_seqlens(torch.tensor([0])).num_sequences == 0
        assert SequenceLayout.from_lengths([]).num_sequences == 0

    def test_lengths_packed_and_padded_agree(self):
        packed = SequenceLayout.from_lengths([2, 0, 1])
        padded = SequenceLayout.from_lengths(torch.tensor([2, 0, 1]), padded_length=3)
        assert padded.sequence_id[padded.token_mask].tolist() == packed.sequence_id.tolist()
        assert padded.position[padded.token_mask].tolist() == packed.position.tolist()

    def test_segments_in_any_order(self):
        layout = SequenceLayout.from_segments(
            torch.tensor([1, 0, 1]), torch.tensor([5, 0, 4]), 3, torch.tensor([True, True, False])
        )
        assert layout.num_sequences == 3 and layout.token_mask.tolist() == [True, True, False]


class TestShift:
    def test_packed_never_crosses_a_boundary(self):
        layout = SequenceLayout.from_lengths([3, 0, 1, 2])
        logits = torch.arange(6.0)[:, None].expand(6, 2)
        got = layout.shift(logits)[:, 0]
        torch.testing.assert_close(
            got, torch.tensor([NAN, 0.0, 1.0, NAN, NAN, 4.0]), equal_nan=True
        )

    def test_padded_equals_the_slice(self):
        layout = SequenceLayout.from_mask(torch.ones(2, 4, dtype=torch.bool))
        logits = torch.randn(2, 4, 3, requires_grad=True)
        got = layout.shift(logits)
        assert torch.equal(got[:, 1:], logits[:, :-1]) and torch.isnan(got[:, 0]).all()
        got[:, 1:].sum().backward()
        assert torch.equal(logits.grad[:, :-1], torch.ones(2, 3, 3))

    def test_segments_shift_only_onto_the_next_position(self):
        layout = SequenceLayout.from_segments(torch.tensor([0, 0, 0]), torch.tensor([4, 5, 9]), 1)
        got = layout.shift(torch.tensor([[1.0], [2.0], [3.0]])).flatten()
        torch.testing.assert_close(got, torch.tensor([NAN, 1.0, NAN]), equal_nan=True)

    def test_a_token_without_evidence_is_masked_not_judged_by_a_neighbour(self):
        layout = SequenceLayout.from_lengths([2, 2])
        x, y = torch.randn(4, 7), torch.randn(4, 7)
        verdict = trm.trust_region_mask(layout.shift(x), layout.shift(y), layout, max_kl=100.0)
        assert verdict.reason.tolist() == [trm.Reason.NON_FINITE] * 2
        assert verdict.position.tolist() == [0, 0]

    def test_what_an_off_by_one_costs(self):
        # Same model on both sides: the aligned log-ratio of every sampled token is exactly 0. A
        # caller who forgets the shift on one side compares unrelated distributions: several nats.
        layout = SequenceLayout.from_lengths([50])
        output = torch.randn(50, 200) * 3
        response = torch.arange(50) > 0
        aligned = layout.shift(output)
        clean = trm.token_divergence(aligned, aligned.clone(), token_mask=response).kl
        wrong = trm.token_divergence(aligned, output, token_mask=response).kl
        assert not clean.any()
        assert float(wrong[1:].min()) > 1.0


class TestBadInput:
    @pytest.mark.parametrize(
        "call,error,message",
        [
            (lambda: SequenceLayout.from_mask(torch.ones(2, 3)), TypeError, "torch.float32"),
            (lambda: SequenceLayout.from_mask([True]), TypeError, "got list"),
            (
                lambda: SequenceLayout.from_mask(torch.ones(3, dtype=torch.bool)),
                ValueError,
                r"\[B, T\], got \[3\]",
            ),
            (
                lambda: SequenceLayout.from_cu_seqlens(torch.tensor([1, 3])),
                ValueError,
                "start at 0, got 1",
            ),
            (
                lambda: SequenceLayout.from_cu_seqlens(torch.tensor([0, 4, 2])),
                ValueError,
                "decreases from 4 to 2 at sequence 1",
            ),
            (
                lambda: SequenceLayout.from_cu_seqlens(
                    torch.tensor([0, 4]), torch.ones(5, dtype=torch.bool)
                ),
                ValueError,
                r"ends at 4, token_mask has shape \[5\]",
            ),
            (
                lambda: SequenceLayout.from_cu_seqlens(torch.tensor([0.0, 4.0])),
                TypeError,
                "torch.float32",
            ),
            (
                lambda: SequenceLayout.from_cu_seqlens(torch.tensor([[0, 4]])),
                ValueError,
                r"\[B\+1\], got \[1, 2\]",
            ),
            (lambda: SequenceLayout.from_lengths([2, -1]), ValueError, "got -1"),
            (lambda: SequenceLayout.from_lengths([2.5]), ValueError, "integers"),
            (
                lambda: SequenceLayout.from_lengths([4], padded_length=3),
                ValueError,
                "4 exceeds padded_length 3",
            ),
            (
                lambda: SequenceLayout.from_segments(torch.tensor([0, 2]), torch.tensor([0, 0]), 2),
                ValueError,
                r"0\.\.1, got 2",
            ),
            (
                lambda: SequenceLayout.from_segments(torch.tensor([0]), torch.tensor([-3]), 2),
                ValueError,
                "position must be >= 0, got -3",
            ),
            (
                lambda: SequenceLayout.from_segments(torch.tensor([0]), torch.tensor([0, 1]), 2),
                ValueError,
                r"\[1\] and \[2\]",
            ),
            (
                lambda: SequenceLayout.from_lengths([2]).shift(torch.zeros(3, 4)),
                ValueError,
                r"\[2\], got \[3\]",
            ),
        ],
    )
    def test_one_sentence(self, call, error, message):
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
