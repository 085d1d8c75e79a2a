# SPDX-License-Identifier: Apache-2.0
"""SequenceLayout: which token belongs to which sequence, where in it, and whether it counts.

The one place that knows padded ``[B, T]`` batches, packed ``[N]`` batches and pieces of sequences.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from trm_ext import _checks

__all__ = ["SequenceLayout"]

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """How a batch of tokens falls into sequences; build it with one of the ``from_`` methods.

    Attributes:
        sequence_id: int64, shaped like the tokens: index of each token's sequence.
        position: int64, shaped like the tokens: index on the sequence's own token axis, with tokens
            that do not count included (a hole keeps its number).
        token_mask: bool, shaped like the tokens: True at tokens that count.
        offsets: int64 ``[B + 1]``: sequence b is tokens offsets[b] .. offsets[b + 1] - 1 of the
            flattened batch, or of ``order`` where there is one.
        order: int64 ``[N]`` that groups the tokens by sequence, or None where they already are.

    >>> layout = SequenceLayout.from_lengths([2, 3])
    >>> layout.sequence_id, layout.position
    (tensor([0, 0, 1, 1, 1]), tensor([0, 1, 0, 1, 2]))
    """

    sequence_id: Tensor
    position: Tensor
    token_mask: Tensor
    offsets: Tensor
    order: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences B.

        >>> SequenceLayout.from_lengths([2, 3]).num_sequences
        2
        """
        return self.offsets.shape[0] - 1

    @classmethod
    def from_mask(cls, token_mask: Tensor) -> SequenceLayout:
        """Padded batch: row b of ``token_mask [B, T]`` is sequence b; holes are allowed.

        Args:
            token_mask: ``[B, T]`` bool, True at response tokens that count; prompt, tool and
                padding tokens are False, wherever they are.

        Returns:
            A layout of tokens ``[B, T]``; ``position`` is the column.

        Raises:
            TypeError: the mask is not a bool tensor.
            ValueError: the mask is not two-dimensional.

        >>> SequenceLayout.from_mask(torch.tensor([[True, False, True]])).num_sequences
        1
        """
        _check_bool("token_mask", token_mask)
        if token_mask.dim() != 2:
            raise ValueError(f"token_mask must be [B, T], got {_checks.shape_text(token_mask)}")
        batch, length = token_mask.shape
        device = token_mask.device
        rows = torch.arange(batch, device=device)[:, None].expand(batch, length)
        columns = torch.arange(length, device=device)[None, :].expand(batch, length)
        offsets = torch.arange(batch + 1, device=device) * length
        return cls(rows, columns, token_mask, offsets)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, token_mask: Tensor | None = None
    ) -> SequenceLayout:
        """Packed batch: sequence b is tokens ``cu_seqlens[b] .. cu_seqlens[b+1] - 1``.

        Args:
            cu_seqlens: ``[B+1]`` int32 or int64 from 0 to N, not decreasing. Its values are read,
                which waits for the device once; the layout is then used without waiting.
            token_mask: ``[N]`` bool, or None where every token counts.

        Returns:
            A layout of tokens ``[N]``.

        Raises:
            TypeError: a wrong dtype.
            ValueError: cu_seqlens does not start at 0, decreases, or does not end at N.

        >>> SequenceLayout.from_cu_seqlens(torch.tensor([0, 2, 2, 5])).sequence_id
        tensor([0, 0, 2, 2, 2])
        """
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in _INTEGERS:
            kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
            raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, got {kind}")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"cu_seqlens must be [B+1], got {_checks.shape_text(cu_seqlens)}")
        ends = cu_seqlens.tolist()
        if ends[0] != 0:
            raise ValueError(f"cu_seqlens must start at 0, got {ends[0]}")
        for b, (start, end) in enumerate(itertools.pairwise(ends)):
            if end < start:
                raise ValueError(f"cu_seqlens decreases from {start} to {end} at sequence {b}")
        total = ends[-1]
        if token_mask is None:
            token_mask = torch.ones(total, dtype=torch.bool, device=cu_seqlens.device)
        _check_bool("token_mask", token_mask)
        if token_mask.dim() != 1 or token_mask.shape[0] != total:
            raise ValueError(
                f"cu_seqlens ends at {total}, token_mask has shape {_checks.shape_text(token_mask)}"
            )
        starts = cu_seqlens.to(torch.int64)
        sequence_id = torch.repeat_interleave(
            torch.arange(len(ends) - 1, device=starts.device), starts.diff(), output_size=total
        )
        position = torch.arange(total, device=starts.device) - starts[:-1][sequence_id]
        return cls(sequence_id, position, token_mask, starts)

    @classmethod
    def from_lengths(
        cls, lengths: Tensor | list[int] | tuple[int, ...], padded_length: int | None = None
    ) -> SequenceLayout:
        """Sequences of given lengths: packed end to end, or left-aligned in ``padded_length``.

        Args:
            lengths: ``[B]`` integers >= 0.
            padded_length: T of a padded ``[B, T]`` batch; None means packed.

        Returns:
            A layout of tokens ``[sum(lengths)]`` or ``[B, padded_length]``.

        Raises:
            ValueError: a negative length, or one beyond padded_length.

        >>> SequenceLayout.from_lengths([1, 2], padded_length=3).token_mask
        tensor([[ True, False, False],
                [ True,  True, False]])
        """
        lengths = torch.as_tensor(lengths)
        if lengths.numel() == 0:
            lengths = lengths.to(torch.int64)
        if lengths.dim() != 1 or lengths.dtype not in _INTEGERS:
            raise ValueError(
                f"lengths must be [B] integers, got {_checks.shape_text(lengths)} {lengths.dtype}"
            )
        values = lengths.tolist()
        if values and min(values) < 0:
            raise ValueError(f"lengths must be >= 0, got {min(values)}")
        if padded_length is None:
            return cls.from_cu_seqlens(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
        if values and max(values) > padded_length:
            raise ValueError(f"a length of {max(values)} exceeds padded_length {padded_length}")
        columns = torch.arange(padded_length, device=lengths.device)
        return cls.from_mask(columns[None, :] < lengths[:, None])

    @classmethod
    def from_segments(
        cls,
        sequence_id: Tensor,
        position: Tensor,
        num_sequences: int,
        token_mask: Tensor | None = None,
    ) -> SequenceLayout:
        """Pieces of sequences in any order, as a context-parallel rank holds them.

        Args:
            sequence_id: ``[N]`` int64 in 0 .. num_sequences - 1.
            position: ``[N]`` int64, each token's index in its whole sequence.
            num_sequences: B over all ranks.
            token_mask: ``[N]`` bool, or None where every token counts.

        Returns:
            A layout of tokens ``[N]``.

        Raises:
            TypeError: a wrong dtype.
            ValueError: shapes that differ, an id outside the range, a negative position.

        >>> ids, where = torch.tensor([1, 0, 1]), torch.tensor([7, 0, 8])
        >>> SequenceLayout.from_segments(ids, where, 2).num_sequences
        2
        """
        for name, tensor in (("sequence_id", sequence_id), ("position", position)):
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
                raise TypeError(f"{name} must be an int64 tensor")
        if sequence_id.dim() != 1 or sequence_id.shape != position.shape:
            raise ValueError(
                "sequence_id and position must both be [N], got "
                f"{_checks.shape_text(sequence_id)} and {_checks.shape_text(position)}"
            )
        if token_mask is None:
            token_mask = torch.ones_like(sequence_id, dtype=torch.bool)
        _check_bool("token_mask", token_mask)
        if token_mask.shape != sequence_id.shape:
            raise ValueError(
                f"token_mask must be {_checks.shape_text(sequence_id)}, "
                f"got {_checks.shape_text(token_mask)}"
            )
        if sequence_id.numel():
            low, high = int(sequence_id.min()), int(sequence_id.max())
            if low < 0 or high >= num_sequences:
                raise ValueError(
                    f"sequence_id must be in 0..{num_sequences - 1}, got {low if low < 0 else high}"
                )
            if int(position.min()) < 0:
                raise ValueError(f"position must be >= 0, got {int(position.min())}")
        order = torch.argsort(sequence_id, stable=True)
        ids = torch.arange(num_sequences + 1, device=sequence_id.device)
        offsets = torch.searchsorted(sequence_id[order], ids)
        return cls(sequence_id, position, token_mask, offsets, order)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tokens: ``[B, T]`` padded, ``[N]`` packed.

        >>> SequenceLayout.from_lengths([2, 3]).shape
        torch.Size([5])
        """
        return self.token_mask.shape

    def shift(self, logits: Tensor) -> Tensor:
        """Aligns a model's output with the tokens it predicts: row t becomes output row t - 1.

        A model's output at token t is the distribution of token t + 1. Within a sequence row t of
        the result is ``logits`` of the token before it; it never crosses a sequence boundary, and a
        token without a predecessor here gets NaN: no evidence, so if such a token counts, its
        sequence is masked as NON_FINITE rather than judged by another sequence's logits.
        It copies; where memory matters take views: ``logits[:, :-1]`` against ``tokens[:, 1:]``.

        Args:
            logits: ``[*tokens, V]``, the model's output at the tokens of this layout.

        Returns:
            ``[*tokens, V]``, differentiable.

        Raises:
            ValueError: the leading shape is not the layout's.

        >>> layout = SequenceLayout.from_lengths([2, 1])
        >>> layout.shift(torch.tensor([[1.0], [2.0], [3.0]])).flatten()
        tensor([nan, 1., nan])
        """
        self.check("logits", logits[..., 0] if logits.dim() else logits)
        flat = logits.reshape(-1, logits.shape[-1])
        ids, where = self.sequence_id.reshape(-1), self.position.reshape(-1)
        follows = torch.zeros_like(ids, dtype=torch.bool)
        follows[1:] = (ids[1:] == ids[:-1]) & (where[1:] == where[:-1] + 1)
        shifted = torch.where(follows[:, None], flat.roll(1, 0), float("nan"))
        return shifted.reshape(logits.shape)

    def check(self, name: str, rows: Tensor) -> None:
        """Raises ValueError unless ``rows`` is shaped like this layout's tokens."""
        if rows.shape != self.shape:
            raise ValueError(
                f"{name} must have the layout's token shape {list(self.shape)}, "
                f"got {_checks.shape_text(rows)}"
            )


def _check_bool(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a bool tensor, got {kind}")
