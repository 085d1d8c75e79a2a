# SPDX-License-Identifier: Apache-2.0
"""Per-token statistics: from logits, and from a file that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trm_ext
from trm_ext.audit import as_dict, audit_file
from trm_ext.io import (
    PairMetadata,
    PolicyRecord,
    RolloutPairError,
    RolloutPairReader,
    RolloutPairWriter,
    write_tensors,
)
from trm_ext.outputs import OUTPUTS
from trm_ext.token_statistics import read_statistics, write_statistics

LENGTHS = (4, 0, 7)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    rng = torch.Generator().manual_seed(5)
    metadata = PairMetadata(
        PolicyRecord("a", "1", "int8", temperature=0.7),
        PolicyRecord("b", temperature=0.7),
        vocab_size=20,
        extra={"max_new_tokens": 9},
    )
    with RolloutPairWriter(tmp_path / "pair", metadata) as writer:
        for b, n in enumerate(LENGTHS):
            x = torch.randn(n, 23, generator=rng)
            writer.append_sequence(
                x,
                x + 0.1 * torch.randn(n, 23, generator=rng),
                torch.randint(0, 20, (n,), generator=rng),
                token_mask=torch.arange(n) != 2,
                reward=b / 2,
                group_id=b // 2,
                prompt_tokens=torch.arange(b),
            )
    return tmp_path / "pair"


@pytest.mark.parametrize("chunk_rows", [None, 1, 3])
def test_every_statistic_is_the_op_s(pair: Path, chunk_rows: int | None) -> None:
    found = read_statistics(pair, chunk_rows=chunk_rows)
    with RolloutPairReader(pair) as reader:
        x, y = (side.double() / 0.7 for side in reader.rows(0, reader.num_tokens))
        direct = trm_ext.token_divergence(
            x, y, tokens=reader.tokens, token_mask=reader.token_mask, outputs=OUTPUTS
        )
    for name in OUTPUTS:
        assert torch.equal(getattr(found.divergence, name), getattr(direct, name)), name
        assert not getattr(found.divergence, name)[~found.counted].any()
    assert found.rewards is not None and found.rewards.tolist() == [0.0, 0.5, 1.0]
    assert found.cu_seqlens.tolist() == [0, 4, 4, 11]
    assert found.extra["max_new_tokens"] == 9


def test_only_what_was_asked_for(pair: Path) -> None:
    found = read_statistics(pair, ("kl",)).divergence
    assert found.kl is not None and found.tv is None and found.log_ratio is None


def test_a_file_of_statistics_holds_everything(pair: Path, tmp_path: Path) -> None:
    first = read_statistics(pair)
    write_statistics(tmp_path / "statistics", first)
    again = read_statistics(tmp_path / "statistics")
    for name in OUTPUTS:
        assert torch.equal(getattr(first.divergence, name), getattr(again.divergence, name))
    for name in ("tokens", "cu_seqlens", "counted", "rewards", "group_ids", "prompt_cu_seqlens"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert (first.rollout, first.train, first.notes) == (again.rollout, again.train, again.notes)
    assert again.extra == first.extra and again.vocab_size == 20
    assert (tmp_path / "statistics").stat().st_size < pair.stat().st_size
    # and the audit reads it
    one, two = (as_dict(audit_file(p, 0.01)) for p in (pair, tmp_path / "statistics"))
    assert {**one, "file": ""} == {**two, "file": ""}


def tensors(**change: torch.Tensor | None) -> dict[str, torch.Tensor]:
    made = {
        "kl": torch.tensor([0.1, 0.2, 0.3]),
        "log_ratio": torch.zeros(3),
        "cu_seqlens": torch.tensor([0, 1, 3]),
        **change,
    }
    return {name: value for name, value in made.items() if value is not None}


def test_the_smallest_file(tmp_path: Path) -> None:
    mask = torch.tensor([True, False, True])
    write_tensors(tmp_path / "s", tensors(token_mask=mask), PairMetadata())
    found = read_statistics(tmp_path / "s")
    assert found.divergence.kl is not None
    assert found.divergence.kl.tolist() == pytest.approx([0.1, 0.0, 0.3])  # 0 where not counted
    assert found.tokens is None and found.rewards is None and found.divergence.tv is None
    audit = audit_file(tmp_path / "s", 0.2)
    assert [entry.token_id for entry in audit.sequences] == [-1, -1]
    assert [entry.keep for entry in audit.sequences] == [True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_ratio": None}, r"missing tensor log_ratio \(the file has: cu_seqlens, kl\)"),
        ({"kl": None}, "missing tensor rollout_logits"),
        ({"log_ratio": torch.zeros(2)}, r"log_ratio has shape \[2\], expected \[3\]"),
        ({"kl": torch.zeros(3, dtype=torch.int64)}, "kl has dtype I64, expected F64 or F32"),
        ({"tv": torch.zeros(3, 1)}, r"tv has shape \[3, 1\], expected \[3\]"),
        ({"kl": torch.zeros(3, 1)}, r"kl has shape \[3, 1\] and cu_seqlens \[3\], expected \[N\]"),
        ({"cu_seqlens": torch.tensor([0, 1, 2])}, "cu_seqlens ends at 2, expected 3"),
        ({"rewards": torch.zeros(3)}, r"rewards has shape \[3\], expected \[2\]"),
    ],
)
def test_a_wrong_file_is_one_sentence(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    write_tensors(tmp_path / "s", tensors(**change), PairMetadata())
    with pytest.raises(RolloutPairError, match=message) as caught:
        read_statistics(tmp_path / "s")
    assert "\n" not in str(caught.value)


def test_statistics_without_a_ratio_are_not_written(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(RolloutPairError, match="a file of statistics needs log_ratio, got none"):
        write_statistics(tmp_path / "s", read_statistics(pair, ("kl",)))
    with pytest.raises(RolloutPairError, match="does not exist"):
        write_statistics(tmp_path / "absent" / "s", read_statistics(pair))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair"]
