# SPDX-License-Identifier: Apache-2.0
"""``trm audit --html``: the numbers on the page are those of the audit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from scipy.stats import t as student

import trm_ext as trm
from tests.trm_ext.report.documents import Document
from trm_ext import cli
from trm_ext.audit import Audit, audit_file
from trm_ext.io import PairMetadata, PolicyRecord, RolloutPairWriter
from trm_ext.report.audit_page import audit_page
from trm_ext.report.token_text import load_tokenizer

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
V = 60


def make(
    path: Path,
    lengths: tuple[int, ...] = (40, 25, 60, 33),
    *,
    metadata: PairMetadata | None = None,
    holes: bool = False,
    edit: Any = None,
) -> Audit:
    rng = torch.Generator().manual_seed(9)
    with RolloutPairWriter(path, metadata) as writer:
        for b, length in enumerate(lengths):
            x = 2 * torch.randn(length, V, generator=rng)
            y = x + 0.15 * torch.randn(length, V, generator=rng)
            tokens = torch.zeros(0, dtype=torch.int64)
            if length:
                tokens = torch.multinomial(x.softmax(-1), 1, generator=rng)[:, 0]
            if edit is not None:
                edit(b, x, y)
            mask = torch.ones(length, dtype=torch.bool)
            if holes:
                mask[length // 3 : length // 2] = False
            writer.append_sequence(x, y, tokens, token_mask=mask if holes else None)
    return audit_file(path, 0.02)


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    def flip(b: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if b == 2:
            y[41] = -x[41]

    return make(tmp_path / "pair.safetensors", edit=flip)


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def test_every_number_is_the_audits(audit: Audit) -> None:
    document = Document(audit_page(audit, command="trm audit pair --max-kl 0.02"))
    kl, lr = audit.kl.double().numpy(), audit.log_ratio.numpy()
    assert f"{audit.kept} of 4 sequences kept, {4 - audit.kept} masked" in document.text
    totals = [entry.sum_kl for entry in audit.sequences]
    for value in (audit.mean_kl, audit.mean_k3, audit.max_abs_log_rho, np.mean(totals)):
        assert f"{value:.3g}" in document.text

    rows = document.table("sequence", "verdict")
    by_kl = sorted(audit.sequences, key=lambda entry: -entry.max_kl)
    assert [row[0] for row in rows] == [str(entry.sequence) for entry in by_kl]
    for row, entry in zip(rows, by_kl, strict=True):
        numbers = (entry.max_kl, entry.mean_kl, entry.sum_kl, entry.max_k3, entry.max_abs_log_rho)
        assert row[2] == str(entry.tokens) and row[4] == str(entry.position)
        assert [row[3], *row[5:]] == [f"{value:.3g}" for value in numbers]
        assert row[1] == ("kept" if entry.keep else "masked")

    worst = document.table("seq:pos", "KL")
    order = np.argsort(-kl, kind="stable")[:20]
    starts = audit.cu_seqlens.numpy()
    for row, index in zip(worst, order, strict=True):
        b = int(np.searchsorted(starts, index, side="right")) - 1
        assert row[0] == f"{b}:{index - starts[b]}" and row[1] == f"{kl[index]:.3g}"
        assert row[2] == f"#{int(audit.tokens[index])}"
        assert row[4:] == [f"{lr[index]:+.3g}", f"{math.exp(audit.logp_rollout[index]):.3g}"]
    assert worst[0][0] == "2:41" and worst[0][3] == "spike"

    largest = np.array([entry.max_kl for entry in audit.sequences])
    for share, limit, kept in document.table("to keep", "smallest threshold"):
        want = np.sort(largest)[math.ceil(4 * float(share[:-1]) / 100) - 1]
        assert limit == f"{want:.3g}" and int(kept) == (largest <= want).sum()


def test_deciles_and_correlations(audit: Audit) -> None:
    document = Document(audit_page(audit))
    kl, logp = audit.kl.double().numpy(), audit.logp_rollout.numpy()
    parts = np.array_split(np.argsort(logp, kind="stable"), 10)
    for row, part in zip(document.table("decile"), parts, strict=True):
        assert row[1] == f"{np.exp(logp[part[0]]):.2g} – {np.exp(logp[part[-1]]):.2g}"
        assert row[2:5] == [
            f"{kl[part].mean():.3g}",
            f"{kl[part].max():.3g}",
            percent(kl[part].sum() / kl.sum()),
        ]
        assert row[5] == f"{np.abs(audit.log_ratio.numpy()[part]).mean():.3g}"
    rows = dict(document.table("exact KL against"))
    assert rows["per token, k3"] == f"{spearmanr(kl, audit.k3).statistic:.2f} ({len(kl)})"
    most = [entry.max_kl for entry in audit.sequences]
    k3 = [entry.max_k3 for entry in audit.sequences]
    assert rows["largest of a sequence, k3"] == f"{spearmanr(most, k3).statistic:.2f} (4)"


def test_the_bound_and_whether_it_says_anything(audit: Audit) -> None:
    rows = Document(audit_page(audit)).table("D_seq", "error ≤")
    totals = np.array([entry.sum_kl for entry in audit.sequences])
    upper = totals.mean() + student.ppf(0.95, 3) * totals.std(ddof=1) / 2
    for row, value in zip(rows, (totals.mean(), upper), strict=True):
        attainable = math.sqrt(60 * value / 2)
        assert row[1] == f"{value:.3g}" and row[4] == f"{attainable:.3g}"
        assert row[2] == ("below 1" if value < 1 else "vacuous")
        assert row[3] == ("possible" if value < attainable else "never")
    assert rows[0][2] == "vacuous"


def test_drift_and_spikes_are_named(audit: Audit, tmp_path: Path) -> None:
    assert "Isolated spikes: 1 spike carries" in Document(audit_page(audit)).text
    assert "Drift: the mismatch" in Document(audit_page(make(tmp_path / "even"))).text


def test_turns_are_runs_of_tokens_that_count(tmp_path: Path) -> None:
    audit = make(tmp_path / "pair", (30, 12, 0), holes=True)
    rows = Document(audit_page(audit)).table("turn", "sequences")
    kl = audit.kl.double().numpy()
    first = np.concatenate([kl[0:10], kl[30:34]])
    second = np.concatenate([kl[15:30], kl[36:42]])
    for row, part in zip(rows, (first, second), strict=True):
        assert row[1:3] == ["2", str(len(part))]
        assert row[3:] == [
            f"{part.mean():.3g}",
            f"{part.max():.3g}",
            percent(part.sum() / (first.sum() + second.sum())),
        ]
    assert "By turn" not in audit_page(make(tmp_path / "one"))


def test_many_turns_are_merged(tmp_path: Path) -> None:
    audit = make(tmp_path / "pair", (60,))
    counted = torch.arange(60) % 3 != 2
    audit = replace(audit, counted=counted, kl=torch.where(counted, audit.kl, 0.0))
    rows = Document(audit_page(audit)).table("turn")
    assert len(rows) == 16 and rows[-1][0] == "15 and later" and rows[-1][2] == "10"
    assert sum(int(row[2]) for row in rows) == 40


def test_strings_of_the_file_and_the_tokenizer_stay_strings(tmp_path: Path) -> None:
    side = PolicyRecord(HOSTILE, HOSTILE, HOSTILE)
    extra = {"model": HOSTILE, "seed": HOSTILE}
    metadata = PairMetadata(side, side, None, HOSTILE, extra)
    audit = make(tmp_path / "pair", metadata=metadata)
    audit = replace(audit, path=Path(HOSTILE.replace("/", "")), notes=(HOSTILE,))
    document = Document(audit_page(audit, text=lambda token: HOSTILE, command=HOSTILE))
    assert document.text.count("<script>alert(1)</script>") > 100
    assert not {"script", "img"} & set(document.tags)


def hurt(b: int, x: torch.Tensor, y: torch.Tensor) -> None:
    if b == 0:
        x[3, 0] = math.nan
    if b == 1:
        y[4, :] = -math.inf
        y[4, 0] = 0.0


def identical(b: int, x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x)


CASES: dict[str, dict[str, Any]] = {
    "no sequence": {"lengths": ()},
    "no token": {"lengths": (0, 0)},
    "one token": {"lengths": (1,)},
    "nine tokens": {"lengths": (4, 5)},
    "not finite": {"edit": hurt},
    "identical": {"edit": identical},
    "holes": {"holes": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("max_kl", [0.0, 0.02, 1e9])
def test_every_file_has_a_page(tmp_path: Path, case: str, max_kl: float) -> None:
    audit = make(tmp_path / "pair", **CASES[case])
    document = Document(audit_page(audit_file(audit.path, max_kl)))
    if case in ("one token", "nine tokens", "identical", "holes"):
        assert not {"nan", "inf"} & set(document.text.split())
    if case == "not finite":
        assert "2 tokens with a KL that is not finite not drawn" in document.text
        assert [row[1] for row in document.table("seq:pos")][:2] == ["nan", "inf"]
        assert "masked (non_finite)" in document.text and "masked (support)" in document.text
        assert "No statement: that takes" in document.text
    if case == "identical":
        assert "No mismatch" in document.text and "KL exactly 0 not drawn" in document.text


def test_a_page_of_a_million_tokens_is_small_and_keeps_the_worst(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(2)
    n, b = 1_000_000, 500
    cu = torch.arange(b + 1) * (n // b)
    kl = torch.exp(torch.randn(n, generator=rng, dtype=torch.float64) - 7)
    kl[123_457] = 7.25
    layout = trm.SequenceLayout.from_cu_seqlens(cu)
    verdict = trm.max_kl_verdict(kl, layout, max_kl=1.0)
    entry = make(tmp_path / "pair", (3,)).sequences[0]
    audit = Audit(
        path=tmp_path / "pair",
        max_kl=1.0,
        sequences=tuple(
            replace(
                entry,
                sequence=i,
                tokens=n // b,
                max_kl=float(verdict.max_kl[i]),
                sum_kl=float(verdict.sum_kl[i]),
                keep=bool(verdict.keep[i]),
            )
            for i in range(b)
        ),
        vocab_size=V,
        rollout=PolicyRecord(),
        train=PolicyRecord(),
        host_processor="",
        extra={},
        notes=(),
        tokens=torch.zeros(n, dtype=torch.int64),
        cu_seqlens=cu,
        counted=torch.ones(n, dtype=torch.bool),
        kl=kl,
        log_ratio=0.01 * torch.randn(n, generator=rng, dtype=torch.float64),
        logp_rollout=-torch.rand(n, generator=rng, dtype=torch.float64),
    )
    source = audit_page(audit)
    document = Document(source)
    assert len(source) < 1_000_000
    assert document.table("seq:pos")[0][:2] == ["61:1457", "7.25"]
    # not the first position of its bar: a bar keeps its largest
    assert "Sequence 61" in document.text and "position 1457: 7.25" in document.text
    assert "24 of 500 sequences drawn" in document.text and "50 of 500" in document.text
    assert len(document.table("sequence", "verdict")) == 50


def test_the_same_audit_gives_the_same_page(audit: Audit) -> None:
    assert audit_page(audit) == audit_page(audit)


def tokenizer_file(path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    vocabulary = {f"w{i}": i for i in range(V)}
    vocabulary["w7"], vocabulary[" <b>\n"] = V, 7
    model = tokenizers.models.WordLevel(vocabulary, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(path))
    return path


def test_tokens_as_text(audit: Audit, tmp_path: Path) -> None:
    text = load_tokenizer(tokenizer_file(tmp_path / "tokenizer.json"))
    assert (text(3), text(7), text(99)) == ("w3", " <b>\n", "#99")
    assert load_tokenizer(tmp_path)(3) == "w3"
    row = int(audit.cu_seqlens[2]) + 41
    audit.tokens[row] = 7
    near = [text(int(token)) for token in audit.tokens[row - 8 : row + 5]]
    wanted = f"…{''.join(near[:8])}␣<b>⏎{''.join(near[9:])}…".replace("\n", "⏎")
    document = Document(audit_page(audit, text=text))
    assert document.table("seq:pos")[0][2] == wanted


def test_through_the_command_line(
    audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "audit page.html"
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    arguments = ["audit", str(audit.path), "--max-kl", "0.02", "--html", str(page)]
    assert cli.main([*arguments, "--tokenizer", str(tokenizer)]) == cli.OK
    assert f"written to {page}" in capsys.readouterr().out
    document = Document(page.read_text(encoding="utf-8"))
    assert f"trm audit {audit.path} --max-kl 0.02 --html '{page}'" in document.text
    assert f"{audit.path.stat().st_size:,} bytes" in document.text


BAD = {
    "folder": (["--html", "/absent/page.html"], "the folder /absent does not exist"),
    "tokenizer alone": (["--tokenizer", "FILE"], "--tokenizer is for the page: add --html FILE"),
    "no tokenizer": (["--html", "PAGE", "--tokenizer", "/absent"], "/absent: no such tokenizer"),
    "not one": (["--html", "PAGE", "--tokenizer", "FILE"], "pair.safetensors: not a tokenizer ("),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_one_sentence(
    audit: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    words, message = BAD[case]
    names = {"PAGE": str(tmp_path / "page.html"), "FILE": str(audit.path)}
    arguments = ["audit", str(audit.path), "--max-kl", "1", *(names.get(w, w) for w in words)]
    assert cli.main(arguments) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not (tmp_path / "page.html").exists()
