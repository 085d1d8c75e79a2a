# SPDX-License-Identifier: Apache-2.0
"""The audit of a rollout-pair file, against numpy in float64."""

from __future__ import annotations

import csv
import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from trm_ext.audit import AUDIT_OUTPUTS, Audit, as_dict, audit_file, write_results
from trm_ext.divergence import token_divergence
from trm_ext.io import (
    PairMetadata,
    PolicyRecord,
    RolloutPairError,
    RolloutPairReader,
    RolloutPairWriter,
)
from trm_ext.token_statistics import read_statistics

LENGTHS = (5, 1, 0, 9)
V = 37


def make(
    path: Path,
    *,
    metadata: PairMetadata | None = None,
    dtype: torch.dtype = torch.float32,
    holes: bool = False,
    edit: Any = None,
    logps: Any = None,
) -> dict[str, np.ndarray]:
    """Write a file; return its content in float64."""
    rng = torch.Generator().manual_seed(11)
    n = sum(LENGTHS)
    x = 2 * torch.randn(n, V, generator=rng)
    y = x + 0.3 * torch.randn(n, V, generator=rng)
    x, y = x.to(dtype), y.to(dtype)
    limit = (metadata and metadata.vocab_size) or V
    tokens = torch.randint(0, limit, (n,), generator=rng)
    mask = torch.ones(n, dtype=torch.bool)
    if holes:
        mask[[0, 3, 8]] = False
        mask[5] = False  # the only token of sequence 1
    if edit is not None:
        edit(x, y)
    bounds = [0, *np.cumsum(LENGTHS)]
    with RolloutPairWriter(path, metadata) as writer:
        for a, b in pairwise(bounds):
            writer.append_sequence(
                x[a:b],
                y[a:b],
                tokens[a:b],
                token_mask=mask[a:b] if holes else None,
                rollout_logps=None if logps is None else logps(x, tokens)[a:b],
            )
    return {
        "x": x.double().numpy(),
        "y": y.double().numpy(),
        "tokens": tokens.numpy(),
        "mask": mask.numpy(),
    }


def oracle(
    content: dict[str, np.ndarray], t_rollout: float = 1.0, t_train: float = 1.0, v: int = V
) -> tuple[np.ndarray, np.ndarray]:
    """(KL, log_ratio) of every token, 0 where masked."""
    lp = log_softmax(content["x"][:, :v] / t_rollout, axis=-1)
    lq = log_softmax(content["y"][:, :v] / t_train, axis=-1)
    kl = np.sum(np.exp(lp) * (lp - lq), axis=-1)
    index = content["tokens"][:, None]
    log_ratio = np.take_along_axis(lq - lp, index, axis=-1)[:, 0]
    return np.where(content["mask"], kl, 0), np.where(content["mask"], log_ratio, 0)


def compare(audit: Audit, content: dict[str, np.ndarray], kl: np.ndarray, lr: np.ndarray) -> None:
    """Every number of the audit, per token and per sequence."""
    # what token_divergence promises for float32; float64 where a temperature was applied
    rtol = 1e-11 if audit.kl.dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(audit.kl.double().numpy(), kl, rtol=rtol, atol=1e-9)
    # The op's contract for log_ratio: 1e-6 of it, or 1e-7. k3 is quadratic in it, so twice that,
    # and as much again for the oracle's own cancellation.
    lr_rtol = 1e-10 if audit.kl.dtype == torch.float64 else 1e-6
    k3_rtol = 4 * lr_rtol
    np.testing.assert_allclose(audit.log_ratio.numpy(), lr, rtol=lr_rtol, atol=0.1 * lr_rtol)
    np.testing.assert_allclose(audit.k3.numpy(), np.exp(lr) - 1 - lr, rtol=k3_rtol, atol=1e-14)
    bounds = [0, *np.cumsum(LENGTHS)]
    for entry, (a, b) in zip(audit.sequences, pairwise(bounds), strict=True):
        counts = content["mask"][a:b]
        assert entry.tokens == counts.sum()
        if not counts.any():
            assert (entry.position, entry.token_id, entry.log_rho_position) == (-1, -1, -1)
            assert (entry.keep, entry.reason, entry.max_kl) == (True, "empty", 0.0)
            continue
        k, r = kl[a:b], lr[a:b]
        k3 = (np.exp(r) - 1 - r)[counts]
        assert entry.position == int(np.argmax(np.where(counts, k, -1)))
        assert entry.token_id == content["tokens"][a + entry.position]
        assert entry.log_rho_position == int(np.argmax(np.where(counts, abs(r), -1)))
        assert entry.max_kl == pytest.approx(k[counts].max(), rel=rtol)
        assert entry.mean_kl == pytest.approx(k[counts].mean(), rel=rtol)
        assert entry.sum_kl == pytest.approx(k[counts].sum(), rel=rtol)
        assert entry.max_abs_log_rho == pytest.approx(abs(r[counts]).max(), rel=lr_rtol)
        assert entry.mean_k3 == pytest.approx(k3.mean(), rel=k3_rtol)
        assert entry.max_k3 == pytest.approx(k3.max(), rel=k3_rtol)
        assert entry.keep == (entry.max_kl <= audit.max_kl)
        assert entry.reason == ("kept" if entry.keep else "max_kl")


@pytest.mark.parametrize("chunk_rows", [None, 1, 4])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number(
    tmp_path: Path, dtype: torch.dtype, holes: bool, chunk_rows: int | None
) -> None:
    content = make(tmp_path / "pair", dtype=dtype, holes=holes)
    audit = audit_file(tmp_path / "pair", 0.034, chunk_rows=chunk_rows)
    compare(audit, content, *oracle(content))
    assert {entry.keep for entry in audit.sequences if entry.tokens > 1} == {True, False}


def test_raw_logits_are_divided_by_each_temperature(tmp_path: Path) -> None:
    metadata = PairMetadata(
        rollout=PolicyRecord(temperature=0.7), train=PolicyRecord(temperature=1.3)
    )
    content = make(tmp_path / "pair", metadata=metadata)
    audit = audit_file(tmp_path / "pair", 0.034)
    assert audit.kl.dtype == torch.float64
    compare(audit, content, *oracle(content, 0.7, 1.3))
    assert "different temperatures (0.7 and 1.3)" in audit.notes[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_log_probability_of_every_token(tmp_path: Path, temperature: float) -> None:
    metadata = PairMetadata(rollout=PolicyRecord(temperature=temperature))
    content = make(tmp_path / "pair", metadata=metadata, holes=True)
    audit = audit_file(tmp_path / "pair", 0.034, chunk_rows=4)
    logp = log_softmax(content["x"] / temperature, axis=-1)
    logp = np.take_along_axis(logp, content["tokens"][:, None], axis=-1)[:, 0]
    expected = np.where(content["mask"], logp, 0)
    np.testing.assert_allclose(audit.logp_rollout.numpy(), expected, rtol=1e-6, atol=0)


def test_processed_logits_are_taken_as_they_are(tmp_path: Path) -> None:
    side = PolicyRecord(temperature=0.7, top_k=20, logits="processed")
    content = make(tmp_path / "pair", metadata=PairMetadata(rollout=side, train=side))
    audit = audit_file(tmp_path / "pair", 0.034)
    compare(audit, content, *oracle(content))
    assert audit.notes == ()


def test_truncated_sampling_with_raw_logits_is_noted(tmp_path: Path) -> None:
    make(tmp_path / "pair", metadata=PairMetadata(rollout=PolicyRecord(top_p=0.9)))
    (note,) = audit_file(tmp_path / "pair", 0.034).notes
    assert "sampling was truncated (top_k 0, top_p 0.9, min_p 0.0)" in note


def test_padding_columns_are_ignored(tmp_path: Path) -> None:
    def edit(x: torch.Tensor, y: torch.Tensor) -> None:
        x[:, 30:], y[:, 30:] = 50.0, float("nan")

    content = make(tmp_path / "pair", metadata=PairMetadata(vocab_size=30), edit=edit)
    audit = audit_file(tmp_path / "pair", 0.034)
    assert audit.vocab_size == 30
    compare(audit, content, *oracle(content, v=30))


def test_threshold_is_inclusive(tmp_path: Path) -> None:
    make(tmp_path / "pair")
    first = audit_file(tmp_path / "pair", 1.0).sequences[0].max_kl
    assert audit_file(tmp_path / "pair", first).sequences[0].keep
    below = float(np.nextafter(np.float32(first), np.float32(0)))
    entry = audit_file(tmp_path / "pair", below).sequences[0]
    assert (entry.keep, entry.reason) == (False, "max_kl")


def test_non_finite_tokens_mask_their_sequence(tmp_path: Path) -> None:
    def edit(x: torch.Tensor, y: torch.Tensor) -> None:
        x[2, 1] = float("nan")  # sequence 0, position 2
        y[8, :] = float("-inf")
        y[8, 3] = 0.0  # sequence 3, position 2: +inf

    make(tmp_path / "pair", edit=edit)
    audit = audit_file(tmp_path / "pair", 1e9)
    reasons = [entry.reason for entry in audit.sequences]
    assert reasons == ["non_finite", "kept", "empty", "support"]
    assert [entry.position for entry in audit.sequences] == [2, 0, -1, 2]
    assert math.isinf(audit.kl[8]) and math.isnan(audit.kl[2])
    document = json.dumps(as_dict(audit), allow_nan=False)  # strict JSON
    assert '"Infinity"' in document or '"NaN"' in document


def test_non_finite_masked_token_does_not_count(tmp_path: Path) -> None:
    def edit(x: torch.Tensor, y: torch.Tensor) -> None:
        x[3] = float("nan")  # a hole

    make(tmp_path / "pair", holes=True, edit=edit)
    audit = audit_file(tmp_path / "pair", 1e9)
    assert audit.sequences[0].reason == "kept"
    assert float(audit.kl[3]) == 0.0 and float(audit.log_ratio[3]) == 0.0
    assert math.isfinite(audit.mean_kl) and math.isfinite(audit.mean_k3)


def test_shifted_engine_log_probs_are_noticed(tmp_path: Path) -> None:
    def exact(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(x, -1).gather(1, tokens[:, None])[:, 0]

    make(tmp_path / "good", logps=exact)
    assert audit_file(tmp_path / "good", 0.034).notes == ()
    make(tmp_path / "bad", logps=lambda x, tokens: exact(x.roll(1, 0), tokens))
    (note,) = audit_file(tmp_path / "bad", 0.034).notes
    assert note.startswith("rollout_logps differ from the rollout logits by up to ")


def test_file_without_tokens(tmp_path: Path) -> None:
    with RolloutPairWriter(tmp_path / "pair", PairMetadata(vocab_size=4)):
        pass
    audit = audit_file(tmp_path / "pair", 0.02)
    assert (audit.sequences, audit.worst, audit.kept) == ((), None, 0)
    assert as_dict(audit)["summary"]["mean_kl"] == "NaN"


@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_bad_threshold(tmp_path: Path, value: float) -> None:
    make(tmp_path / "pair")
    with pytest.raises(ValueError, match=f"max_kl must be a number >= 0, got {value}"):
        audit_file(tmp_path / "pair", value)


def test_bad_chunk_rows(tmp_path: Path) -> None:
    make(tmp_path / "pair")
    with pytest.raises(RolloutPairError, match="chunk_rows must be at least 1, got 0"):
        audit_file(tmp_path / "pair", 0.02, chunk_rows=0)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    make(tmp_path / "pair")
    seen: list[tuple[int, int]] = []
    audit_file(tmp_path / "pair", 0.02, chunk_rows=4, progress=lambda *now: seen.append(now))
    assert seen == [(4, 15), (8, 15), (12, 15), (15, 15)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_chunks_give_the_bits_of_one_call_on_a_copy(tmp_path: Path, dtype: torch.dtype) -> None:
    make(tmp_path / "pair", dtype=dtype, holes=True)
    with RolloutPairReader(tmp_path / "pair") as pair:
        direct = token_divergence(
            *pair.rows(0, pair.num_tokens),
            tokens=pair.tokens,
            token_mask=pair.token_mask,
            outputs=AUDIT_OUTPUTS,
        )
    for chunk_rows in (None, 1, 4):
        found = read_statistics(tmp_path / "pair", AUDIT_OUTPUTS, chunk_rows=chunk_rows).divergence
        for name in AUDIT_OUTPUTS:
            assert torch.equal(getattr(found, name), getattr(direct, name)), (name, chunk_rows)


def test_a_file_that_is_cut_during_the_audit(tmp_path: Path) -> None:
    make(tmp_path / "pair")
    size = (tmp_path / "pair").stat().st_size

    def cut(done: int, _total: int) -> None:
        if done == 8:
            os.truncate(tmp_path / "pair", size // 2)

    with pytest.raises(RolloutPairError, match=r"the file ended while .* was being read"):
        audit_file(tmp_path / "pair", 0.02, chunk_rows=4, progress=cut)


def test_results_on_disk(tmp_path: Path) -> None:
    content = make(tmp_path / "pair", holes=True)
    audit = audit_file(tmp_path / "pair", 0.034)
    files = write_results(audit, tmp_path / "new" / "out")
    assert [path.name for path in files] == ["tokens.csv", "audit.json"]
    document = json.loads((tmp_path / "new" / "out" / "audit.json").read_text())
    assert document == as_dict(audit)
    assert document["schema_version"] == 1
    assert document["summary"]["kept"] == audit.kept
    with files[0].open() as stream:
        rows = list(csv.DictReader(stream))
    kl, log_ratio = oracle(content)
    np.testing.assert_allclose([float(row["kl"]) for row in rows], kl, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose([float(row["log_ratio"]) for row in rows], log_ratio, rtol=1e-6)
    assert [int(row["counted"]) for row in rows] == content["mask"].astype(int).tolist()
    assert [(int(row["sequence"]), int(row["position"])) for row in rows] == [
        (b, t) for b, length in enumerate(LENGTHS) for t in range(length)
    ]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("where", ["csv", "json"])
def test_interrupted_results_leave_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, existing: bool
) -> None:
    make(tmp_path / "pair")
    audit = audit_file(tmp_path / "pair", 0.034)
    out = tmp_path / "results" / "out"
    out.parent.mkdir()
    if existing:
        write_results(audit_file(tmp_path / "pair", 0.5), out)
    before = {path.name: path.read_bytes() for path in out.glob("*")}

    def interrupt(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    target = "trm_ext.audit.csv.writer" if where == "csv" else "trm_ext.audit.json.dumps"
    monkeypatch.setattr(target, interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_results(audit, out)
    assert {path.name: path.read_bytes() for path in out.glob("*")} == before
    assert os.listdir(out.parent) == (["out"] if existing else [])


def test_results_need_a_folder(tmp_path: Path) -> None:
    make(tmp_path / "pair")
    with pytest.raises(ValueError, match="exists and is not a folder"):
        write_results(audit_file(tmp_path / "pair", 0.034), tmp_path / "pair")
