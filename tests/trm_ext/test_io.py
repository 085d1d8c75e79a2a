# SPDX-License-Identifier: Apache-2.0
"""The rollout-pair file, against the safetensors library as an independent reader and writer."""

from __future__ import annotations

import json
import mmap
import os
import re
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trm_ext.io import (
    PairMetadata,
    PolicyRecord,
    RolloutPairError,
    RolloutPairReader,
    RolloutPairWriter,
    copy_pair,
    host_processor,
)


def tensors(n: int = 5, v: int = 7, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A small valid file: sequences of 2, 0 and 3 tokens."""
    rng = torch.Generator().manual_seed(n * 1000 + v)
    return {
        "rollout_logits": torch.randn(n, v, generator=rng).to(dtype),
        "train_logits": torch.randn(n, v, generator=rng).to(dtype),
        "tokens": torch.randint(0, v, (n,), generator=rng),
        "cu_seqlens": torch.tensor([0, 2, 2, n]),
    }


def save(path: Path, values: dict[str, torch.Tensor], **metadata: str) -> Path:
    save_file(values, str(path), metadata={"format_version": "1", **metadata})
    return path


def write(
    path: Path, values: dict[str, torch.Tensor], metadata: PairMetadata | None = None
) -> Path:
    bounds = values["cu_seqlens"].tolist()
    with RolloutPairWriter(path, metadata) as writer:
        for start, stop in pairwise(bounds):
            names = ("rollout_logits", "train_logits", "tokens")
            writer.append_sequence(*(values[name][start:stop] for name in names))
    return path


# Odd sizes in half precision leave the int64 tensors misaligned unless the writer pads.
@pytest.mark.parametrize("v", [1, 7, 64])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_written_file_is_read_by_the_safetensors_library(
    tmp_path: Path, dtype: torch.dtype, v: int
) -> None:
    expected = tensors(v=v, dtype=dtype)
    write(tmp_path / "pair", expected)
    with safe_open(str(tmp_path / "pair"), framework="pt") as file:
        for name, value in expected.items():
            assert torch.equal(file.get_tensor(name), value), name
        assert file.metadata()["format_version"] == "1"


def test_mixed_dtypes_stay_as_they_are(tmp_path: Path) -> None:
    values = tensors(v=7)
    values["rollout_logits"] = values["rollout_logits"].bfloat16()
    with RolloutPairReader(write(tmp_path / "pair", values)) as pair:
        rollout, train = pair.rows(0, 5)
    assert torch.equal(rollout, values["rollout_logits"]) and rollout.dtype == torch.bfloat16
    assert torch.equal(train, values["train_logits"]) and train.dtype == torch.float32


@pytest.mark.parametrize("chunk_rows", [1, 2, 5, 100])
def test_reads_what_the_safetensors_library_wrote(tmp_path: Path, chunk_rows: int) -> None:
    values = tensors() | {
        "token_mask": torch.tensor([True, False, True, True, False]),
        "rollout_logps": torch.randn(5, dtype=torch.float64),
        "rewards": torch.tensor([1.0, 0.5, -1.0]),
        "group_ids": torch.tensor([0, 0, 1]),
        "prompt_tokens": torch.tensor([3, 1, 2]),
        "prompt_cu_seqlens": torch.tensor([0, 1, 1, 3]),
    }
    with RolloutPairReader(save(tmp_path / "pair", values)) as pair:
        assert (pair.num_tokens, pair.num_sequences, pair.vocab_size) == (5, 3, 7)
        for name in set(values) - {"rollout_logits", "train_logits"}:
            assert torch.equal(getattr(pair, name), values[name]), name
        chunks = list(pair.chunks(chunk_rows))
    assert [start for start, _, _ in chunks] == list(range(0, 5, chunk_rows))
    assert max(len(rollout) for _, rollout, _ in chunks) <= chunk_rows
    assert torch.equal(torch.cat([rollout for _, rollout, _ in chunks]), values["rollout_logits"])
    assert torch.equal(torch.cat([train for _, _, train in chunks]), values["train_logits"])


def test_chunks_outlive_the_reader_and_never_write_to_the_file(tmp_path: Path) -> None:
    values = tensors()
    path = save(tmp_path / "pair", values)
    before = path.read_bytes()
    with RolloutPairReader(path) as pair:
        chunks = list(pair.chunks(2))
    assert torch.equal(torch.cat([train for _, _, train in chunks]), values["train_logits"])
    for _, rollout, train in chunks:
        rollout.zero_()
        train.fill_(torch.nan)
    assert path.read_bytes() == before


# An odd count of float16 logits puts the float32 side at no multiple of 4 bytes.
def test_chunks_are_aligned_where_the_file_is_not(tmp_path: Path) -> None:
    values = tensors(v=7)
    values["rollout_logits"] = values["rollout_logits"].half()
    path = write(tmp_path / "pair", values)
    with RolloutPairReader(path) as pair:
        assert (pair._data_start + pair._tensors["train_logits"].begin) % 4 == 2
        for start, rollout, train in pair.chunks(2):
            assert torch.equal(rollout, values["rollout_logits"][start : start + 2])
            assert torch.equal(train, values["train_logits"][start : start + 2])
            assert train.data_ptr() % 4 == 0


@pytest.mark.parametrize("v", [7, 5000])  # the end inside a page, and pages before it
def test_a_file_that_is_cut_between_chunks(tmp_path: Path, v: int) -> None:
    path = save(tmp_path / "pair", tensors(v=v))
    with RolloutPairReader(path) as pair:
        chunks = pair.chunks(1)
        next(chunks)
        os.truncate(path, pair._data_start + pair._tensors["train_logits"].begin + 2 * v * 4 - 1)
        with pytest.raises(RolloutPairError, match="the file ended while train_logits was being"):
            next(chunks)


def test_optional_fields_and_row_pieces(tmp_path: Path) -> None:
    values = tensors()
    mask = torch.tensor([True, False, True, True, False])
    logps = torch.randn(5)
    with RolloutPairWriter(tmp_path / "pair") as writer:
        for rows in (slice(0, 2), slice(2, 3), slice(3, 5)):
            writer.append_rows(
                values["rollout_logits"][rows],
                values["train_logits"][rows],
                values["tokens"][rows],
                token_mask=mask[rows],
                rollout_logps=logps[rows],
            )
            if rows.stop != 3:
                prompt = torch.arange(rows.stop)
                writer.end_sequence(reward=0.1, group_id=rows.stop, prompt_tokens=prompt)
    with RolloutPairReader(tmp_path / "pair") as pair:
        assert pair.cu_seqlens.tolist() == [0, 2, 5]
        assert torch.equal(pair.rows(0, 5)[1], values["train_logits"])
        assert pair.token_mask is not None and torch.equal(pair.token_mask, mask)
        assert pair.rollout_logps is not None and torch.equal(pair.rollout_logps, logps)
        assert pair.rewards is not None and pair.rewards.tolist() == [0.1, 0.1]
        assert pair.group_ids is not None and pair.group_ids.tolist() == [2, 5]
        assert pair.prompt_tokens is not None
        assert pair.prompt_tokens.tolist() == [0, 1, 0, 1, 2, 3, 4]
        assert pair.prompt_cu_seqlens is not None
        assert pair.prompt_cu_seqlens.tolist() == [0, 2, 7]


def test_no_sequences(tmp_path: Path) -> None:
    with RolloutPairWriter(tmp_path / "pair", PairMetadata(vocab_size=9)):
        pass
    with RolloutPairReader(tmp_path / "pair") as pair:
        assert (pair.num_sequences, pair.num_tokens, pair.vocab_size) == (0, 0, 9)
        assert list(pair.chunks(4)) == []


def test_metadata_round_trip(tmp_path: Path) -> None:
    metadata = PairMetadata(
        rollout=PolicyRecord("vllm", "0.12", "fp8", 0.7, 50, 0.9, 0.05, "processed", {"seed": 3}),
        train=PolicyRecord("torch", "2.13", "bfloat16", 0.7),
        vocab_size=6,
        host_processor=host_processor(),
        extra={"run": {"id": 7, "name": "π"}},
        other={"owner": "somebody"},
    )
    values = tensors()
    values["tokens"] = values["tokens"] % 6
    with RolloutPairReader(write(tmp_path / "pair", values, metadata)) as pair:
        assert pair.metadata == metadata
        assert pair.num_columns == 7
        assert torch.equal(pair.rows(1, 4)[0], values["rollout_logits"][1:4, :6])


def test_unknown_keys_and_tensors_survive(tmp_path: Path) -> None:
    document = {
        "vocab_size": 6,
        "rollout": {"engine": "x", "temperature": 0.5, "kv_cache": "fp8"},
        "cluster": [1, {"a": None}],
    }
    values = tensors() | {
        "token_mask": torch.tensor([True, False, True, True, False]),
        "rollout_hidden": torch.randn(5, 3).half(),
        "notes": torch.tensor([], dtype=torch.int32),
        "rewards": torch.tensor([1.0, 0.25, -1.0]),
        "group_ids": torch.tensor([4, 4, 5]),
        "prompt_tokens": torch.tensor([3, 1, 2]),
        "prompt_cu_seqlens": torch.tensor([0, 1, 1, 3]),
        "rollout_logps": torch.randn(5),
    }
    values["tokens"] = values["tokens"] % 6
    save(tmp_path / "a", values, rollout_pair=json.dumps(document), written_by="another tool")
    copy_pair(tmp_path / "a", tmp_path / "b")
    with RolloutPairReader(tmp_path / "a") as a, RolloutPairReader(tmp_path / "b") as b:
        assert a.metadata == b.metadata
        assert b.metadata.other == {"written_by": "another tool"}
        assert b.metadata.extra == {"cluster": [1, {"a": None}]}
        assert b.metadata.rollout.extra == {"kv_cache": "fp8"}
        assert set(b.extra_names) == {"rollout_hidden", "notes"}
    with safe_open(str(tmp_path / "b"), framework="pt") as file:
        for name, value in values.items():
            assert torch.equal(file.get_tensor(name), value.to(file.get_tensor(name).dtype)), name
        assert file.get_tensor("rollout_hidden").dtype == torch.float16


def edited(**changes: Any) -> dict[str, torch.Tensor]:
    values = tensors() | changes
    return {name: value for name, value in values.items() if value is not None}


BAD_TENSORS = {
    "missing": (edited(train_logits=None), "missing tensor train_logits (the file has: cu_seq"),
    "not a matrix": (
        edited(rollout_logits=torch.zeros(5)),
        "rollout_logits has shape [5], expected [N, V]",
    ),
    "different logits": (
        edited(train_logits=torch.zeros(5, 6)),
        "train_logits has shape [5, 6], expected [5, 7]",
    ),
    "integer logits": (
        edited(rollout_logits=torch.zeros(5, 7, dtype=torch.int32)),
        "rollout_logits has dtype I32, expected F64 or F32 or F16 or BF16",
    ),
    "float tokens": (edited(tokens=torch.zeros(5)), "tokens has dtype F32, expected I64"),
    "few tokens": (
        edited(tokens=torch.zeros(4, dtype=torch.int64)),
        "tokens has shape [4], expected [5]",
    ),
    "large token": (
        edited(tokens=torch.tensor([0, 1, 2, 70000, 4])),
        "tokens[3] = 70000 is outside [0, 7)",
    ),
    "negative token": (
        edited(tokens=torch.tensor([0, -100, 2, 3, 4])),
        "tokens[1] = -100 is outside [0, 7)",
    ),
    "late start": (edited(cu_seqlens=torch.tensor([1, 5])), "cu_seqlens starts at 1, expected 0"),
    "decreasing": (
        edited(cu_seqlens=torch.tensor([0, 4, 3, 5])),
        "cu_seqlens decreases from 4 to 3 at index 2",
    ),
    "wrong end": (edited(cu_seqlens=torch.tensor([0, 4])), "cu_seqlens ends at 4, expected 5"),
    "empty bounds": (
        edited(cu_seqlens=torch.zeros(0, dtype=torch.int64)),
        "cu_seqlens has shape [0], expected [B + 1]",
    ),
    "mask dtype": (
        edited(token_mask=torch.ones(5)),
        "token_mask has dtype F32, expected BOOL",
    ),
    "rewards": (edited(rewards=torch.zeros(5)), "rewards has shape [5], expected [3]"),
    "half a prompt": (
        edited(prompt_tokens=torch.tensor([1])),
        "prompt_tokens and prompt_cu_seqlens must be there together",
    ),
    "prompt end": (
        edited(prompt_tokens=torch.tensor([1]), prompt_cu_seqlens=torch.tensor([0, 0, 0, 2])),
        "prompt_cu_seqlens ends at 2, expected 1",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors(tmp_path: Path, case: str) -> None:
    values, message = BAD_TENSORS[case]
    path = save(tmp_path / "pair", values)
    with pytest.raises(RolloutPairError, match=re.escape(f"{path}: {message}")):
        RolloutPairReader(path)


BAD_METADATA = {
    "newer": ({"format_version": "2"}, "format_version 2 is newer than 1"),
    "odd version": ({"format_version": "one"}, "format_version is 'one'"),
    "not json": ({"rollout_pair": "{"}, "the metadata rollout_pair is not JSON"),
    "not an object": ({"rollout_pair": "[]"}, "the metadata rollout_pair is not a JSON object"),
    "cold": (
        {"rollout_pair": '{"rollout": {"temperature": 0}}'},
        "temperature of rollout is 0",
    ),
    "hot": (
        {"rollout_pair": '{"train": {"temperature": NaN}}'},
        "temperature of train is nan",
    ),
    "half cooked": (
        {"rollout_pair": '{"train": {"logits": "warm"}}'},
        """logits of train are 'warm', expected "raw" or "processed\"""",
    ),
    "wide": ({"rollout_pair": '{"vocab_size": 8}'}, "vocab_size is 8, the logits have 7 columns"),
    "no words": ({"rollout_pair": '{"vocab_size": 0}'}, "vocab_size is 0, expected"),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata(tmp_path: Path, case: str) -> None:
    metadata, message = BAD_METADATA[case]
    path = save(tmp_path / "pair", tensors(), **metadata)
    with pytest.raises(RolloutPairError, match=re.escape(message)):
        RolloutPairReader(path)


def test_another_safetensors_file(tmp_path: Path) -> None:
    save_file(tensors(), str(tmp_path / "model"))
    with pytest.raises(RolloutPairError, match="not a rollout-pair file"):
        RolloutPairReader(tmp_path / "model")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"PK\x03\x04" + b"\xff" * 100, "not a safetensors file"),
        ((500).to_bytes(8, "little") + b"{}  ", "the header should take 500 bytes"),
        ((4).to_bytes(8, "little") + b"{]  ", "unreadable header"),
        ((18).to_bytes(8, "little") + b'{"a": {"shape": 3}', "unreadable header"),
    ],
)
def test_not_safetensors(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "pair"
    path.write_bytes(content)
    with pytest.raises(RolloutPairError, match=message):
        RolloutPairReader(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(RolloutPairError, match="absent: no such file"):
        RolloutPairReader(tmp_path / "absent")
    with pytest.raises(RolloutPairError, match="is a folder"):
        RolloutPairReader(tmp_path)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_truncated(tmp_path: Path, share: float) -> None:
    path = save(tmp_path / "pair", tensors(v=301))
    size = path.stat().st_size
    os.truncate(path, int(size * share))
    with pytest.raises(RolloutPairError, match=f"truncated .*the file has {int(size * share)}"):
        RolloutPairReader(path)


def test_rows_outside(tmp_path: Path) -> None:
    with RolloutPairReader(save(tmp_path / "pair", tensors())) as pair:
        with pytest.raises(RolloutPairError, match=re.escape("rows 3:6 are outside [0, 5]")):
            pair.rows(3, 6)
        with pytest.raises(RolloutPairError, match="chunk_rows must be at least 1, got 0"):
            next(pair.chunks(0))


def test_writer_refuses(tmp_path: Path) -> None:
    ids = torch.tensor([0, 1])
    with RolloutPairWriter(tmp_path / "pair") as writer:
        writer.append_sequence(torch.zeros(2, 5), torch.zeros(2, 5), ids)
        for arguments, message in (
            ((torch.zeros(2, 4), torch.zeros(2, 4), ids), "rows have 4 columns, earlier rows 5"),
            ((torch.zeros(2, 5), torch.zeros(3, 5), ids), "they must be equal"),
            ((torch.zeros(2), torch.zeros(2), ids), "expected [T, V]"),
            ((torch.zeros(2, 5).half(), torch.zeros(2, 5), ids), "logits have dtypes"),
            ((torch.zeros(2, 5).long(), torch.zeros(2, 5), ids), "expected a float dtype"),
            ((torch.zeros(2, 5), torch.zeros(2, 5), ids + 4), "tokens[1] = 5 is outside [0, 5)"),
            ((torch.zeros(2, 5), torch.zeros(2, 5), ids[:1]), "tokens has shape [1], expected [2]"),
            ((torch.zeros(2, 5), torch.zeros(2, 5), ids.int()), "tokens has dtype torch.int32"),
        ):
            with pytest.raises(RolloutPairError, match=re.escape(message)):
                writer.append_sequence(*arguments)
        with pytest.raises(RolloutPairError, match="rewards must be given for every sequence"):
            writer.end_sequence(reward=1.0)
        with pytest.raises(RolloutPairError, match="tokens is a tensor of the format"):
            writer.add_tensor("tokens", ids)
    with RolloutPairReader(tmp_path / "pair") as pair:  # the refused rows left no trace
        assert pair.cu_seqlens.tolist() == [0, 2]


def test_writer_needs_a_folder_and_finished_sequences(tmp_path: Path) -> None:
    with pytest.raises(RolloutPairError, match="does not exist"):
        RolloutPairWriter(tmp_path / "absent" / "pair")
    with pytest.raises(RolloutPairError, match="temperature of rollout is -1"):
        RolloutPairWriter(tmp_path / "p", PairMetadata(rollout=PolicyRecord(temperature=-1)))
    with (
        pytest.raises(RolloutPairError, match=re.escape("the last 2 rows have no end_sequence()")),
        RolloutPairWriter(tmp_path / "pair") as writer,
    ):
        writer.append_rows(torch.zeros(2, 5), torch.zeros(2, 5), torch.tensor([0, 1]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("existing", [False, True])
def test_interrupted_writer_leaves_nothing(tmp_path: Path, existing: bool) -> None:
    path = tmp_path / "pair"
    if existing:
        path.write_bytes(b"the earlier one")
    values = tensors()
    with pytest.raises(KeyboardInterrupt), RolloutPairWriter(path) as writer:
        writer.append_sequence(*(values[k] for k in ("rollout_logits", "train_logits", "tokens")))
        raise KeyboardInterrupt
    assert [entry.name for entry in tmp_path.iterdir()] == (["pair"] if existing else [])
    assert not existing or path.read_bytes() == b"the earlier one"


def test_interrupt_inside_close_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "pair", tensors())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="this system has no /proc/self/maps"
)
@pytest.mark.parametrize("aligned", [True, False])
def test_memory_is_bounded_by_the_chunk(tmp_path: Path, aligned: bool) -> None:
    """A sparse file of 200 MB, mapped one chunk at a time; copied only if it is not aligned."""
    n, v = 512, 50_000
    path = tmp_path / "pair"
    end, header = 0, {"__metadata__": {"format_version": "1"}}
    for name, shape, code, width in (
        ("rollout_logits", [n, v], "F32", 4),
        ("train_logits", [n, v], "F32", 4),
        ("tokens", [n], "I64", 8),
        ("cu_seqlens", [1], "I64", 8),
    ):
        size = width * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    # One sequence boundary only would not end at N, so store [0, N] instead.
    header["cu_seqlens"] = {"dtype": "I64", "shape": [2], "data_offsets": [end - 8, end + 8]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + (not aligned))
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.seek(8 + len(text) + end)
        stream.write(n.to_bytes(8, "little"))
    assert path.stat().st_size > 200_000_000
    chunk = 2 * 2 * v * 4
    slack = 2 * 2 * mmap.PAGESIZE  # each side begins and ends inside a page
    rows, mapped = 0, set()
    tracemalloc.start()
    try:
        with RolloutPairReader(path) as pair:
            for _, rollout, _train in pair.chunks(2):
                rows += len(rollout)
                mapped.add(mapped_bytes(path))
        _, allocated = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del rollout, _train
    assert rows == n and mapped_bytes(path) == 0
    if aligned:
        assert chunk <= min(mapped) and max(mapped) <= chunk + slack
        assert allocated < 200_000
    else:
        assert mapped == {0}
        assert chunk < allocated < 3_000_000


def mapped_bytes(path: Path) -> int:
    """How much of a file is mapped into this process."""
    total = 0
    with Path("/proc/self/maps").open() as lines:
        for line in lines:
            if line.endswith(f" {path}\n"):
                start, stop = line.split(maxsplit=1)[0].split("-")
                total += int(stop, 16) - int(start, 16)
    return total
