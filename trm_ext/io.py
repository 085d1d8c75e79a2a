# SPDX-License-Identifier: Apache-2.0
"""The rollout-pair file: both policies' logits of the same tokens, in one safetensors file.

``docs/rollout_pair_format.md`` is the specification. The reader never holds more logits than the
rows that were asked for; the writer takes rows as they come and leaves no file behind unless it
was closed properly.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch

FORMAT_VERSION = 1

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
FLOATS = ("F64", "F32", "F16", "BF16")
_REQUIRED = ("rollout_logits", "train_logits", "tokens", "cu_seqlens")
_OPTIONAL = (
    "token_mask",
    "rollout_logps",
    "rewards",
    "group_ids",
    "prompt_tokens",
    "prompt_cu_seqlens",
)
_PADDING = "_padding"  # fewer than 8 bytes, so that int64 tensors after the logits are aligned
_JSON_KEY = "rollout_pair"
_MAX_HEADER = 100 * 1000 * 1000  # the limit of the safetensors format itself
_COPY_BYTES = 16 << 20


class RolloutPairError(ValueError):
    """A rollout-pair file, or what was given to its writer, is wrong; one sentence says how."""


@dataclass(frozen=True)
class PolicyRecord:
    """How one side's logits were produced.

    The law of the token at row t is softmax(logits[t] / temperature) when ``logits`` is
    ``"raw"``, and softmax(logits[t]) when it is ``"processed"`` (temperature, top-k, top-p and
    min-p have then been applied already, and removed words hold -inf).

    Attributes:
        engine: name of the engine, for instance ``"ctranslate2"``.
        version: its version.
        precision: its arithmetic, for instance ``"int8"``.
        temperature: > 0.
        top_k: 0 when it was off.
        top_p: 1.0 when it was off.
        min_p: 0.0 when it was off.
        logits: ``"raw"`` or ``"processed"``.
        extra: keys of the file that this version does not know; written back as they are.
    """

    engine: str = "unknown"
    version: str = ""
    precision: str = ""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logits: str = "raw"
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def divisor(self) -> float:
        """What the stored logits have to be divided by before the softmax."""
        return 1.0 if self.logits == "processed" else self.temperature

    @property
    def truncated(self) -> bool:
        """True when raw logits are stored but sampling dropped part of the vocabulary."""
        active = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return self.logits == "raw" and active


@dataclass(frozen=True)
class PairMetadata:
    """The metadata of a rollout-pair file.

    Attributes:
        rollout: the policy that sampled the tokens.
        train: the policy that is being optimised.
        vocab_size: real vocabulary size; columns from there on are padding and are ignored.
            None when every column is real.
        host_processor: where the logits were computed.
        extra: unknown keys of the JSON document; written back as they are.
        other: unknown keys of the safetensors metadata; written back as they are.
    """

    rollout: PolicyRecord = field(default_factory=PolicyRecord)
    train: PolicyRecord = field(default_factory=PolicyRecord)
    vocab_size: int | None = None
    host_processor: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    other: Mapping[str, str] = field(default_factory=dict)


def host_processor() -> str:
    """Return the name of this machine's processor, as far as the system tells.

    Example:
        >>> len(host_processor()) > 0
        True
    """
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


class RolloutPairReader:
    """Reads a rollout-pair file; logits are read row by row, everything else at once.

    The whole file is checked before the constructor returns, except the values of the logits.

    Args:
        path: the file.

    Attributes:
        path: the file.
        metadata: a :class:`PairMetadata`.
        num_sequences: B.
        num_tokens: N.
        vocab_size: real vocabulary size; the logits that :meth:`rows` returns have exactly
            these columns.
        num_columns: V as stored.
        tokens: int64 ``[N]``.
        cu_seqlens: int64 ``[B + 1]``; sequence b is rows ``cu_seqlens[b]:cu_seqlens[b + 1]``.
        token_mask: bool ``[N]``, or None when every token counts.
        rollout_logps: float ``[N]`` nats, or None.
        rewards: float ``[B]``, or None.
        group_ids: int64 ``[B]``, or None.
        prompt_tokens: int64 ``[P]``, or None.
        prompt_cu_seqlens: int64 ``[B + 1]``, or None.
        extra_names: names of the tensors that this version does not know.

    Raises:
        RolloutPairError: the file is missing, truncated or not safetensors; a tensor is missing
            or has a wrong shape, type or value; the file is newer than this package.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = _open(self.path)
        try:
            self._tensors, self._data_start, strings = _read_header(self.path, self._file)
            self.metadata = _parse_metadata(self.path, strings)
            self._check()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> RolloutPairReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def rows(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the logits of rows ``start:stop``.

        Returns:
            (rollout, train), each ``[stop - start, vocab_size]`` in its stored dtype, without
            the padding columns. Only these rows are in memory.
        """
        rollout, train = self.padded_rows(start, stop)
        return rollout[:, : self.vocab_size], train[:, : self.vocab_size]

    def padded_rows(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read rows ``start:stop`` as stored: all ``num_columns`` columns."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise RolloutPairError(f"rows {start}:{stop} are outside [0, {self.num_tokens}]")
        return self._rows("rollout_logits", start, stop), self._rows("train_logits", start, stop)

    def chunks(self, chunk_rows: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Iterate over all rows in order, at most ``chunk_rows`` at a time.

        A chunk is the file's own pages, mapped and not copied, and unmapped when its tensors are
        gone; writing to it changes the chunk, never the file. A file that is cut, overwritten
        or unreadable while a chunk is in use can end the process (SIGBUS), as any mapped file can:
        replace it by renaming, as :class:`RolloutPairWriter` does. :meth:`rows` copies.

        Args:
            chunk_rows: rows in memory at a time, >= 1.

        Returns:
            Iterator over (index of the first row, rollout logits, train logits).

        Raises:
            RolloutPairError: ``chunk_rows`` is below 1, or the file was cut before the end of the
                next chunk.
        """
        if chunk_rows < 1:
            raise RolloutPairError(f"chunk_rows must be at least 1, got {chunk_rows}")
        for start in range(0, self.num_tokens, chunk_rows):
            stop = min(start + chunk_rows, self.num_tokens)
            rollout, train = (
                _map_tensor(
                    self.path, self._file, self._data_start, name, self._part(name, start, stop)
                )[:, : self.vocab_size]
                for name in ("rollout_logits", "train_logits")
            )
            yield start, rollout, train

    def tensor(self, name: str) -> torch.Tensor:
        """Read one whole tensor by name, known or not."""
        if name not in self._tensors:
            raise RolloutPairError(f"{self.path}: no tensor {name}")
        entry = self._tensors[name]
        return _read_tensor(self.path, self._file, self._data_start, name, entry)

    def _rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        part = self._part(name, start, stop)
        return _read_tensor(self.path, self._file, self._data_start, name, part)

    def _part(self, name: str, start: int, stop: int) -> _TensorEntry:
        """Where some rows of the logits are."""
        entry = self._tensors[name]
        width = self.num_columns * _DTYPES[entry.code].itemsize
        return _TensorEntry(
            entry.code,
            (stop - start, self.num_columns),
            entry.begin + start * width,
            entry.begin + stop * width,
        )

    def _optional(self, name: str) -> torch.Tensor | None:
        return self.tensor(name) if name in self._tensors else None

    def _check(self) -> None:
        """Check shapes, dtypes and values; fill the attributes."""
        where = self.path
        for name in _REQUIRED:
            if name not in self._tensors:
                have = ", ".join(sorted(self._tensors)) or "none"
                raise RolloutPairError(f"{where}: missing tensor {name} (the file has: {have})")
        logits = self._tensors["rollout_logits"]
        if len(logits.shape) != 2:
            raise RolloutPairError(
                f"{where}: rollout_logits has shape {list(logits.shape)}, expected [N, V]"
            )
        self.num_tokens, self.num_columns = logits.shape
        cu_shape = self._tensors["cu_seqlens"].shape
        if len(cu_shape) != 1 or cu_shape[0] < 1:
            raise RolloutPairError(
                f"{where}: cu_seqlens has shape {list(cu_shape)}, expected [B + 1]"
            )
        n, b = self.num_tokens, cu_shape[0] - 1
        self.num_sequences = b
        prompt = self._tensors.get("prompt_tokens")
        expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            "rollout_logits": ((n, self.num_columns), FLOATS),
            "train_logits": ((n, self.num_columns), FLOATS),
            "tokens": ((n,), ("I64",)),
            "cu_seqlens": ((b + 1,), ("I64",)),
            "token_mask": ((n,), ("BOOL",)),
            "rollout_logps": ((n,), FLOATS),
            "rewards": ((b,), FLOATS),
            "group_ids": ((b,), ("I64",)),
            "prompt_tokens": ((math.prod(prompt.shape) if prompt else 0,), ("I64",)),
            "prompt_cu_seqlens": ((b + 1,), ("I64",)),
        }
        check_fields(where, self._tensors, expected)
        if ("prompt_tokens" in self._tensors) != ("prompt_cu_seqlens" in self._tensors):
            raise RolloutPairError(
                f"{where}: prompt_tokens and prompt_cu_seqlens must be there together"
            )
        real = self.metadata.vocab_size
        self.vocab_size = self.num_columns if real is None else real
        if not 0 <= self.vocab_size <= self.num_columns:
            raise RolloutPairError(
                f"{where}: vocab_size is {real}, the logits have {self.num_columns} columns"
            )
        self.tokens = self.tensor("tokens")
        self.cu_seqlens = self.tensor("cu_seqlens")
        self.token_mask = self._optional("token_mask")
        self.rollout_logps = self._optional("rollout_logps")
        self.rewards = self._optional("rewards")
        self.group_ids = self._optional("group_ids")
        self.prompt_tokens = self._optional("prompt_tokens")
        self.prompt_cu_seqlens = self._optional("prompt_cu_seqlens")
        known = {*_REQUIRED, *_OPTIONAL, _PADDING}
        self.extra_names = tuple(name for name in self._tensors if name not in known)
        _check_token_ids(where, "tokens", self.tokens, self.vocab_size)
        check_boundaries(where, "cu_seqlens", self.cu_seqlens, n)
        if self.prompt_tokens is not None and self.prompt_cu_seqlens is not None:
            _check_token_ids(where, "prompt_tokens", self.prompt_tokens, self.vocab_size)
            total = len(self.prompt_tokens)
            check_boundaries(where, "prompt_cu_seqlens", self.prompt_cu_seqlens, total)


class RolloutPairWriter:
    """Writes a rollout-pair file row by row, without knowing how many rows will come.

    Rows go to temporary files in the target's folder; :meth:`close` assembles them and renames
    the result to ``path``. Used as a context manager, an exception inside the block (an
    interrupt too) removes the temporaries and leaves ``path`` as it was.

    Args:
        path: the file to create or replace.
        metadata: see :class:`PairMetadata`.

    Raises:
        RolloutPairError: the folder does not exist, or rows do not fit each other.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name) / "pair.safetensors"
        >>> with RolloutPairWriter(path) as writer:
        ...     writer.append_sequence(torch.zeros(2, 5), torch.zeros(2, 5), torch.tensor([4, 0]))
        >>> with RolloutPairReader(path) as pair:
        ...     pair.cu_seqlens.tolist(), pair.rows(1, 2)[0].shape
        ([0, 2], torch.Size([1, 5]))
        >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], metadata: PairMetadata | None = None) -> None:
        self.path = Path(path)
        self.metadata = metadata or PairMetadata()
        self._strings = _format_metadata(self.metadata)
        _parse_metadata(self.path, self._strings)  # refuse now what the reader would refuse
        # Room for the metadata, 32 KiB of tensor entries, rounded to a page.
        size = len(json.dumps(self._strings)) + (32 << 10)
        self._reserved = -(-size // 4096) * 4096
        self._budget = 16 << 10
        if not self.path.parent.is_dir():
            raise RolloutPairError(f"{self.path}: the folder {self.path.parent} does not exist")
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._lengths = [0]
        self._fields: dict[str, list[torch.Tensor]] = {}
        self._presence: dict[str, bool] = {}
        self._extra: dict[str, torch.Tensor] = {}
        self._columns: int | None = None
        self._dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
        self._closed = False
        self._file: BinaryIO = self._temporary.open("w+b")
        self._train: BinaryIO = tempfile.TemporaryFile(dir=self.path.parent)
        self._file.seek(self._reserved)

    def __enter__(self) -> RolloutPairWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @property
    def num_tokens(self) -> int:
        """Rows written so far."""
        return self._lengths[-1]

    def append_rows(
        self,
        rollout_logits: torch.Tensor,
        train_logits: torch.Tensor,
        tokens: torch.Tensor,
        *,
        token_mask: torch.Tensor | None = None,
        rollout_logps: torch.Tensor | None = None,
    ) -> None:
        """Append rows to the sequence that is being written.

        Args:
            rollout_logits: ``[T, V]`` float; row t is the distribution that produced
                ``tokens[t]``.
            train_logits: ``[T, V]`` float.
            tokens: int64 ``[T]`` in [0, V).
            token_mask: bool ``[T]``, True where the token counts. Always or never.
            rollout_logps: float ``[T]`` nats, as the engine reported them. Always or never.
        """
        count = self._check_logits(rollout_logits, train_logits)
        limit = self.metadata.vocab_size or rollout_logits.shape[1]
        _check_vector("tokens", tokens, count, (torch.int64,))
        _check_token_ids(self.path, "tokens", tokens, limit)
        floats = tuple(_DTYPES[code] for code in FLOATS)
        if token_mask is not None:
            _check_vector("token_mask", token_mask, count, (torch.bool,))
        if rollout_logps is not None:
            _check_vector("rollout_logps", rollout_logps, count, floats)
        self._always_or_never("token_mask", token_mask is not None)
        self._always_or_never("rollout_logps", rollout_logps is not None)
        self._keep("tokens", tokens)
        self._keep("token_mask", token_mask)
        self._keep("rollout_logps", rollout_logps)
        self._file.write(_bytes(rollout_logits))
        self._train.write(_bytes(train_logits))
        self._lengths[-1] += count

    def end_sequence(
        self,
        *,
        reward: float | None = None,
        group_id: int | None = None,
        prompt_tokens: torch.Tensor | None = None,
    ) -> None:
        """End the sequence; the next rows belong to the next one. Each field always or never."""
        self._always_or_never("rewards", reward is not None)
        self._always_or_never("group_ids", group_id is not None)
        self._always_or_never("prompt_tokens", prompt_tokens is not None)
        if prompt_tokens is not None:
            _check_vector("prompt_tokens", prompt_tokens, len(prompt_tokens), (torch.int64,))
            self._keep("prompt_tokens", prompt_tokens)
        if reward is not None:
            self._keep("rewards", torch.tensor([reward], dtype=torch.float64))
        if group_id is not None:
            self._keep("group_ids", torch.tensor([group_id]))
        self._lengths.append(self._lengths[-1])

    def append_sequence(
        self,
        rollout_logits: torch.Tensor,
        train_logits: torch.Tensor,
        tokens: torch.Tensor,
        *,
        token_mask: torch.Tensor | None = None,
        rollout_logps: torch.Tensor | None = None,
        reward: float | None = None,
        group_id: int | None = None,
        prompt_tokens: torch.Tensor | None = None,
    ) -> None:
        """Append one whole sequence: :meth:`append_rows`, then :meth:`end_sequence`."""
        self.append_rows(
            rollout_logits,
            train_logits,
            tokens,
            token_mask=token_mask,
            rollout_logps=rollout_logps,
        )
        self.end_sequence(reward=reward, group_id=group_id, prompt_tokens=prompt_tokens)

    def add_tensor(self, name: str, value: torch.Tensor) -> None:
        """Add a tensor that the format does not define; readers pass it through."""
        if name in (*_REQUIRED, *_OPTIONAL, _PADDING, "__metadata__"):
            raise RolloutPairError(f"{name} is a tensor of the format, not an extra one")
        if value.dtype not in _CODES:
            raise RolloutPairError(f"{name} has dtype {value.dtype}, which is not supported")
        self._budget -= len(json.dumps(name)) + 24 * (value.dim() + 4)
        if self._budget < 0:
            raise RolloutPairError(f"no room in the header for the extra tensor {name}")
        self._extra[name] = value.detach().cpu()

    def close(self) -> None:
        """Finish the file and give it its name."""
        if self._closed:
            return
        try:
            self._assemble()
        except BaseException:
            self.abort()
            raise
        self._closed = True

    def abort(self) -> None:
        """Drop everything that was written."""
        self._file.close()
        self._train.close()
        self._temporary.unlink(missing_ok=True)
        self._closed = True

    def _check_logits(self, rollout: torch.Tensor, train: torch.Tensor) -> int:
        """Check one pair of logits against each other and the earlier ones; return its rows."""
        for name, value in (("rollout_logits", rollout), ("train_logits", train)):
            if value.dim() != 2:
                raise RolloutPairError(f"{name} has shape {list(value.shape)}, expected [T, V]")
            if _CODES.get(value.dtype) not in FLOATS:
                raise RolloutPairError(f"{name} has dtype {value.dtype}, expected a float dtype")
        if rollout.shape != train.shape:
            raise RolloutPairError(
                f"rollout_logits has shape {list(rollout.shape)}, "
                f"train_logits has shape {list(train.shape)}; they must be equal"
            )
        count, columns = rollout.shape
        dtypes = (rollout.dtype, train.dtype)
        if self._columns is None:
            self._columns, self._dtypes = columns, dtypes
        if columns != self._columns:
            raise RolloutPairError(f"rows have {columns} columns, earlier rows {self._columns}")
        if dtypes != self._dtypes:
            raise RolloutPairError(f"logits have dtypes {dtypes}, earlier rows {self._dtypes}")
        return count

    def _keep(self, name: str, value: torch.Tensor | None) -> None:
        """Hold a copy of a small tensor until the file is assembled."""
        if value is not None:
            self._fields.setdefault(name, []).append(value.detach().cpu().clone())

    def _always_or_never(self, name: str, present: bool) -> None:
        if self._presence.setdefault(name, present) != present:
            raise RolloutPairError(f"{name} must be given for every sequence or for none")

    def _assemble(self) -> None:
        """Put train logits and small tensors after the rollout logits; rewrite the header."""
        rows = self._lengths[-1] - [0, *self._lengths][-2]
        if rows:
            raise RolloutPairError(f"the last {rows} rows have no end_sequence()")
        n, columns = self.num_tokens, self._columns or self.metadata.vocab_size or 0
        small: dict[str, torch.Tensor] = {
            "tokens": torch.zeros(0, dtype=torch.int64),
            "cu_seqlens": torch.tensor([0, *self._lengths[:-1]], dtype=torch.int64),
        }
        small.update({name: torch.cat(parts) for name, parts in self._fields.items()})
        if "prompt_tokens" in self._fields:
            lengths = [0, *(len(part) for part in self._fields["prompt_tokens"])]
            small["prompt_cu_seqlens"] = torch.tensor(lengths).cumsum(0)
        small.update(self._extra)
        small = dict(sorted(small.items(), key=lambda item: -item[1].dtype.itemsize))

        self._train.seek(0)
        shutil.copyfileobj(self._train, self._file, _COPY_BYTES)
        header: dict[str, Any] = {"__metadata__": self._strings}
        end = 0
        for name, dtype in zip(_REQUIRED, self._dtypes, strict=False):
            begin, end = end, end + n * columns * dtype.itemsize
            header[name] = _entry(_CODES[dtype], (n, columns), begin, end)
        if end % 8:
            small = {_PADDING: torch.zeros(8 - end % 8, dtype=torch.uint8), **small}
        for name, value in small.items():
            raw = _bytes(value)
            begin, end = end, end + len(raw)
            header[name] = _entry(_CODES[value.dtype], tuple(value.shape), begin, end)
            self._file.write(raw)
        text = json.dumps(header, separators=(",", ":")).encode()
        room = self._reserved - 8
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + text.ljust(room, b" "))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._train.close()
        self._temporary.replace(self.path)


def tensor_names(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the names of the tensors in a safetensors file, without reading them.

    Raises:
        RolloutPairError: as the reader.
    """
    with _open(Path(path)) as file:
        return tuple(_read_header(Path(path), file)[0])


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], PairMetadata]:
    """Read every tensor of a small file that carries rollout-pair metadata.

    Raises:
        RolloutPairError: as the reader.
    """
    path = Path(path)
    with _open(path) as file:
        entries, start, strings = _read_header(path, file)
        metadata = _parse_metadata(path, strings)
        return {
            name: _read_tensor(path, file, start, name, entry) for name, entry in entries.items()
        }, metadata


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: PairMetadata
) -> None:
    """Write a small file with rollout-pair metadata under a temporary name, then rename it."""
    from safetensors.torch import save_file

    path = Path(path)
    if not path.parent.is_dir():
        raise RolloutPairError(f"{path}: the folder {path.parent} does not exist")
    strings = _format_metadata(metadata)
    _parse_metadata(path, strings)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file({n: t.contiguous() for n, t in tensors.items()}, str(temporary), strings)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def copy_pair(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a rollout-pair file through the reader and the writer, unknown parts included.

    Memory stays bounded. What this package does not know (metadata keys, tensors) comes out as
    it went in.
    """
    with (
        RolloutPairReader(source) as pair,
        RolloutPairWriter(target, pair.metadata) as writer,
    ):
        for name in pair.extra_names:
            writer.add_tensor(name, pair.tensor(name))
        step = default_chunk_rows(pair.num_columns)
        bounds = pair.cu_seqlens.tolist()
        for b in range(pair.num_sequences):
            for start in range(bounds[b], bounds[b + 1], step):
                stop = min(start + step, bounds[b + 1])
                writer.append_rows(
                    *pair.padded_rows(start, stop),
                    pair.tokens[start:stop],
                    token_mask=_cut(pair.token_mask, start, stop),
                    rollout_logps=_cut(pair.rollout_logps, start, stop),
                )
            prompt = pair.prompt_cu_seqlens
            writer.end_sequence(
                reward=None if pair.rewards is None else float(pair.rewards[b]),
                group_id=None if pair.group_ids is None else int(pair.group_ids[b]),
                prompt_tokens=(
                    None
                    if prompt is None
                    else _cut(pair.prompt_tokens, int(prompt[b]), int(prompt[b + 1]))
                ),
            )


def default_chunk_rows(columns: int) -> int:
    """Return how many rows of float32 logits make about 32 MiB.

    Example:
        >>> default_chunk_rows(151936)
        55
    """
    return max(1, (32 << 20) // (4 * max(1, columns)))


@dataclass(frozen=True)
class _TensorEntry:
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _open(path: Path) -> BufferedReader:
    if path.is_dir():
        raise RolloutPairError(f"{path}: is a folder, not a rollout-pair file")
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise RolloutPairError(f"{path}: no such file") from None
    except OSError as error:
        raise RolloutPairError(f"{path}: cannot be opened ({error.strerror})") from None


def _read_tensor(
    path: Path, file: BufferedReader, data_start: int, name: str, entry: _TensorEntry
) -> torch.Tensor:
    """Read one tensor, or the part of it that ``entry`` describes."""
    if entry.code not in _DTYPES:
        raise RolloutPairError(f"{path}: {name} has dtype {entry.code}, which is not supported")
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=_DTYPES[entry.code])
    raw = np.empty(entry.end - entry.begin, dtype=np.uint8)
    file.seek(data_start + entry.begin)
    if file.readinto(raw.data) != len(raw):
        raise RolloutPairError(f"{path}: the file ended while {name} was being read")
    return torch.from_numpy(raw).view(_DTYPES[entry.code]).reshape(entry.shape)


def _map_tensor(
    path: Path, file: BufferedReader, data_start: int, name: str, entry: _TensorEntry
) -> torch.Tensor:
    """As :func:`_read_tensor`, on the pages of the file where their alignment allows it."""
    dtype = _DTYPES[entry.code]
    offset = data_start + entry.begin
    if entry.begin == entry.end or offset % dtype.itemsize:
        return _read_tensor(path, file, data_start, name, entry)
    descriptor, skip = file.fileno(), offset % mmap.ALLOCATIONGRANULARITY
    length = skip + entry.end - entry.begin
    try:
        pages = mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=offset - skip)
    except ValueError:
        raise RolloutPairError(f"{path}: the file ended while {name} was being read") from None
    raw = np.frombuffer(pages, dtype=np.uint8, offset=skip)
    return torch.from_numpy(raw).view(dtype).reshape(entry.shape)


def _read_header(
    path: Path, file: BufferedReader
) -> tuple[dict[str, _TensorEntry], int, dict[str, str]]:
    """Parse the safetensors header: (entries by name, offset of the data, metadata)."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 10 or length > _MAX_HEADER:
        raise RolloutPairError(f"{path}: not a safetensors file (it does not start with a header)")
    if 8 + length > size:
        raise RolloutPairError(
            f"{path}: truncated or not a safetensors file (the header should take {length} bytes, "
            f"the file has {size})"
        )
    try:
        header = json.loads(file.read(length))
        strings = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
        entries = {
            str(name): _TensorEntry(
                str(entry["dtype"]),
                tuple(int(axis) for axis in entry["shape"]),
                int(entry["data_offsets"][0]),
                int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise RolloutPairError(f"{path}: not a safetensors file (unreadable header)") from None
    start = 8 + length
    for name, entry in entries.items():
        if entry.code in _DTYPES:
            need = math.prod(entry.shape) * _DTYPES[entry.code].itemsize
            if min(entry.shape, default=0) < 0 or entry.end - entry.begin != need:
                raise RolloutPairError(
                    f"{path}: {name} spans {entry.end - entry.begin} bytes, its shape "
                    f"{list(entry.shape)} in {entry.code} needs {need}"
                )
        if entry.begin < 0 or entry.end < entry.begin:
            raise RolloutPairError(f"{path}: {name} has offsets {entry.begin}:{entry.end}")
        if start + entry.end > size:
            raise RolloutPairError(
                f"{path}: truncated ({name} should end at byte {start + entry.end}, "
                f"the file has {size})"
            )
    return entries, start, strings


def _parse_metadata(path: Path, strings: dict[str, str]) -> PairMetadata:
    """Turn the safetensors metadata into a :class:`PairMetadata`, checking its values."""
    version = strings.get("format_version")
    if version is None:
        raise RolloutPairError(f"{path}: not a rollout-pair file (no format_version in it)")
    if not version.isdigit() or int(version) < 1:
        raise RolloutPairError(f"{path}: format_version is {version!r}, expected a whole number")
    if int(version) > FORMAT_VERSION:
        raise RolloutPairError(
            f"{path}: format_version {version} is newer than {FORMAT_VERSION}, "
            "the newest that this version of trm_ext reads"
        )
    try:
        document = json.loads(strings.get(_JSON_KEY, "{}"))
    except ValueError:
        raise RolloutPairError(f"{path}: the metadata {_JSON_KEY} is not JSON") from None
    if not isinstance(document, dict):
        raise RolloutPairError(f"{path}: the metadata {_JSON_KEY} is not a JSON object")
    vocab = document.get("vocab_size")
    if vocab is not None and (type(vocab) is not int or vocab < 1):
        raise RolloutPairError(f"{path}: vocab_size is {vocab!r}, expected a whole number >= 1")
    known = ("rollout", "train", "vocab_size", "host_processor")
    return PairMetadata(
        rollout=_parse_policy(path, "rollout", document.get("rollout", {})),
        train=_parse_policy(path, "train", document.get("train", {})),
        vocab_size=vocab,
        host_processor=str(document.get("host_processor", "")),
        extra={key: value for key, value in document.items() if key not in known},
        other={k: v for k, v in strings.items() if k not in ("format_version", _JSON_KEY)},
    )


def _parse_policy(path: Path, side: str, values: Any) -> PolicyRecord:
    if not isinstance(values, dict):
        raise RolloutPairError(f"{path}: the metadata of {side} is {values!r}, expected an object")
    known = [name for name in PolicyRecord.__dataclass_fields__ if name != "extra"]
    for name, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_k", -0.5, math.inf),
        ("top_p", 0.0, 1.0 + 1e-9),
        ("min_p", -1e-9, 1.0),
    ):
        value = values.get(name, getattr(PolicyRecord, name))
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low < value < high:
            raise RolloutPairError(f"{path}: {name} of {side} is {value!r}")
    kind = values.get("logits", "raw")
    if kind not in ("raw", "processed"):
        raise RolloutPairError(
            f'{path}: logits of {side} are {kind!r}, expected "raw" or "processed"'
        )
    return PolicyRecord(
        **{name: values[name] for name in known if name in values},
        extra={name: value for name, value in values.items() if name not in known},
    )


def _format_metadata(metadata: PairMetadata) -> dict[str, str]:
    """The inverse of :func:`_parse_metadata`."""

    def policy(record: PolicyRecord) -> dict[str, Any]:
        known = {name: getattr(record, name) for name in record.__dataclass_fields__}
        extra = known.pop("extra")
        return {**extra, **known}

    document = {
        **metadata.extra,
        "rollout": policy(metadata.rollout),
        "train": policy(metadata.train),
        "vocab_size": metadata.vocab_size,
        "host_processor": metadata.host_processor,
    }
    return {
        **metadata.other,
        "format_version": str(FORMAT_VERSION),
        _JSON_KEY: json.dumps(document),
    }


def check_fields(
    path: Path,
    tensors: Mapping[str, Any],
    expected: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]],
) -> None:
    """Check shape and dtype of every expected tensor that is there.

    Args:
        path: named in the message.
        tensors: by name, anything with ``shape`` and a dtype (``code`` or ``dtype``).
        expected: by name, the shape and the allowed dtypes.

    Raises:
        RolloutPairError: with the offending shape or dtype.
    """
    for name, (shape, codes) in expected.items():
        entry = tensors.get(name)
        if entry is None:
            continue
        code = entry.code if isinstance(entry, _TensorEntry) else _CODES[entry.dtype]
        if code not in codes:
            raise RolloutPairError(
                f"{path}: {name} has dtype {code}, expected {' or '.join(codes)}"
            )
        if tuple(entry.shape) != shape:
            raise RolloutPairError(
                f"{path}: {name} has shape {list(entry.shape)}, expected {list(shape)}"
            )


def _check_token_ids(path: Path, name: str, tokens: torch.Tensor, limit: int) -> None:
    bad = ((tokens < 0) | (tokens >= limit)).nonzero()
    if len(bad):
        index = int(bad[0])
        raise RolloutPairError(
            f"{path}: {name}[{index}] = {int(tokens[index])} is outside [0, {limit})"
        )


def check_boundaries(path: Path, name: str, bounds: torch.Tensor, total: int) -> None:
    """Raise RolloutPairError unless ``bounds`` starts at 0, never decreases and ends at total."""
    if int(bounds[0]) != 0:
        raise RolloutPairError(f"{path}: {name} starts at {int(bounds[0])}, expected 0")
    down = (bounds.diff() < 0).nonzero()
    if len(down):
        i = int(down[0])
        raise RolloutPairError(
            f"{path}: {name} decreases from {int(bounds[i])} to {int(bounds[i + 1])} "
            f"at index {i + 1}"
        )
    if int(bounds[-1]) != total:
        raise RolloutPairError(f"{path}: {name} ends at {int(bounds[-1])}, expected {total}")


def _check_vector(
    name: str, value: torch.Tensor, count: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise RolloutPairError(f"{name} has dtype {value.dtype}, expected {expected}")
    if tuple(value.shape) != (count,):
        raise RolloutPairError(f"{name} has shape {list(value.shape)}, expected [{count}]")


def _cut(value: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return None if value is None else value[start:stop]


def _entry(code: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}


def _bytes(value: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row-major."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
