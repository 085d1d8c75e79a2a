# SPDX-License-Identifier: Apache-2.0
"""``trm certify --html`` and ``trm calibrate --html``: their pages hold the results' numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trm_ext as trm
from tests.trm_ext.report.documents import Document
from tests.trm_ext.report.test_audit_page import HOSTILE
from trm_ext import cli
from trm_ext.calibration import calibrate
from trm_ext.certification import Certification, GateConstants, certify_file
from trm_ext.io import PairMetadata, PolicyRecord, RolloutPairWriter
from trm_ext.report.calibrate_page import calibrate_page
from trm_ext.report.certificate import TITLES
from trm_ext.report.certify_page import certify_page

V = 30
# A percentage below 100 is printed to a tenth or finer; the rest is float64's own rounding.
PERCENTAGE = 0.05 + 1e-12


def make(
    path: Path,
    *,
    sequences: int = 40,
    noise: float = 0.1,
    seed: int = 0,
    metadata: PairMetadata | None = None,
    edit: Any = None,
) -> Path:
    rng = torch.Generator().manual_seed(seed)
    with RolloutPairWriter(path, metadata) as writer:
        for b in range(sequences):
            x = 2 * torch.randn(6 + b % 5, V, generator=rng)
            y = x + noise * torch.randn(x.shape, generator=rng)
            tokens = torch.multinomial(x.softmax(-1), 1, generator=rng)[:, 0]
            if edit is not None:
                edit(b, x, y)
            writer.append_sequence(x, y, tokens, reward=float(tokens[-1] % 2))
    return path


def number(value: float) -> str:
    return f"{value:.3g}"


def certified(path: Path, **options: Any) -> Certification:
    return certify_file(path, **options)


def test_every_number_of_the_certificate(tmp_path: Path) -> None:
    result = certified(make(tmp_path / "pair"), held_out=True)
    document = Document(certify_page(result, command="trm certify pair"))
    assert f"NOT CERTIFIED : {result.reasons[0]}" in document.text
    assert result.reasons[1] in document.text
    rows = document.table("certificate", "kind")
    assert len(rows) == len(result.certificates) + len(result.missing)
    for row, c in zip(rows, result.certificates, strict=False):
        radius = c.parts.get("radius", c.parts.get("surrogate_radius"))
        decides = c.name == result.primary_name and c.finite_sample
        assert row[:4] + row[6:] == [
            TITLES[c.name],
            "finite sample" if c.finite_sample else "asymptotic",
            number(c.lower_bound),
            number(radius),
            ("decides; " if decides else "") + c.label,
        ]
        needed = getattr(result.rollouts_needed, c.name, None)
        if c.finite_sample:
            verdict = str(result.judgement(c.name).verdict)
            assert row[4:6] == ["no number" if needed is None else str(needed), verdict]
        else:
            assert row[5] == "" and (row[4] != "") == (c.name == "seq_kl")
    assert "C3' budget gate alone: NOT_CERTIFIED; radius" in document.text
    decided = certified(tmp_path / "pair", held_out=True, primary="frozen_budget")
    assert "C3' budget gate decides; radius" in certify_page(decided).replace("&#x27;", "'")
    bounds = document.table("bound", "source")
    for row, b in zip(bounds, result.bounds, strict=True):
        assert row[:3] == [b.name, "published" if b.published else "ours", number(b.value)]
        assert row[4].startswith("vacuous") == (not (b.below_range and b.certifying))
        assert ("no guarantee" in row[3]) == b.assumes_maximum
    assert {row[4] for row in bounds} >= {"vacuous: above the reward span"}
    quantities = document.table("quantity", "estimate")
    assert quantities[0][1:4] == [
        number(v)
        for v in (result.surrogate.estimate, result.surrogate.lower, result.surrogate.upper)
    ]
    assert quantities[2][3] == "–"  # no upper limit from a finite sample
    for value in (result.min_certifiable_gain, result.min_certifiable_gain_finite):
        assert number(value) in document.text
    assert result.bottleneck is not None
    for sentence in result.bottleneck.sentences:
        assert sentence in document.text
    deciles = document.table("decile")
    kl = result.statistics.divergence.kl
    assert kl is not None and len(deciles) == 10
    shares = [float(row[4].split()[0]) for row in deciles]
    assert sum(shares) == pytest.approx(100, abs=len(shares) * PERCENTAGE)


def test_the_verdict_and_its_label(tmp_path: Path) -> None:
    pair = make(tmp_path / "pair", noise=2.0)
    same_data = Document(certify_page(certified(pair)))
    assert "VACUOUS : D_seq >=" in same_data.text
    assert "optimistic: same data" in same_data.text
    assert "optimistic" not in certify_page(certified(pair, held_out=True))
    split = certified(pair, held_out=True, constants="split")
    assert f"chosen on a split of {split.num_split} rollouts" in certify_page(split)


def hurt(b: int, x: torch.Tensor, y: torch.Tensor) -> None:
    if b == 0:
        x[3, 0] = math.nan
    if b == 1:
        y[4, 1:] = -math.inf


def same(b: int, x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x)


@pytest.mark.parametrize("edit", [hurt, same, None], ids=["hurt", "same", "two"])
def test_every_file_has_a_certificate_page(tmp_path: Path, edit: Any) -> None:
    sequences = 2 if edit is None else 5
    result = certified(make(tmp_path / "pair", sequences=sequences, edit=edit), held_out=True)
    document = Document(certify_page(result))
    missing = [row for row in document.table("certificate") if row[1] == "missing"]
    assert [row[6] for row in missing] == [why for _, why in result.missing]
    if edit is hurt:
        assert missing and "tokens with a KL that is not finite" in document.text
    if edit is same:
        assert "there is no update to certify" in document.text


def test_a_certificate_of_bare_statistics(tmp_path: Path) -> None:
    layout = trm.SequenceLayout.from_lengths([3, 4, 5])
    kl = torch.rand(12, dtype=torch.float64) / 50
    divergence = trm.TokenDivergence(kl=kl, log_ratio=torch.randn(12) / 10)
    result = trm.certify(divergence, torch.tensor([0.0, 1.0, 1.0]), layout)
    document = Document(certify_page(result))
    assert "Certificate of rollouts" in document.text
    assert [row[0] for row in document.table("seq:pos")] != []
    assert "By the sampled token" not in document.text  # no probabilities, no deciles


def test_strings_of_the_file_stay_strings(tmp_path: Path) -> None:
    side = PolicyRecord(HOSTILE, HOSTILE, HOSTILE)
    metadata = PairMetadata(side, side, None, HOSTILE, {"model": HOSTILE})
    pair = make(tmp_path / "pair", metadata=metadata)
    result = certified(pair)
    result = replace(result, notes=(HOSTILE,), reasons=(HOSTILE, HOSTILE))
    Document(certify_page(result, text=lambda token: HOSTILE, command=HOSTILE))
    found = calibrate([pair])
    paths = (Path(HOSTILE.replace("/", "")),)
    Document(calibrate_page(replace(found, warnings=(HOSTILE,), paths=paths), command=HOSTILE))


def test_every_number_of_the_calibration(tmp_path: Path) -> None:
    floor = PairMetadata(extra={"pair": "noise-floor"})
    pair = make(tmp_path / "pair")
    noise = make(tmp_path / "floor", noise=0.01, seed=1, metadata=floor)
    result = calibrate([pair, noise], thresholds=[1e-6], target_acceptance=0.8)
    document = Document(calibrate_page(result))
    rows = document.table("max KL", "kept")
    assert len(rows) == len(result.thresholds)
    for row, r in zip(rows, result.thresholds, strict=True):
        assert row[:2] == [number(r.max_kl), f"{r.acceptance:.0%}"]
        lengths = row[2 : 2 + len(result.lengths)]
        assert lengths == [f"{share:.0%}" for share in r.acceptance_by_length]
        assert row[-3:] == ["below" if r.below_floor else "above", number(r.error_bound), r.says]
    assert {row[-3] for row in rows} == {"below", "above"}
    target = f"max KL ≤ {number(result.target_threshold)} nats keeps 80% of the sequences"
    assert target in document.text and "that is at or above the noise floor" in document.text
    for warning in (*result.warnings, *result.notes):
        assert warning in document.text
    assert result.warnings
    summary = document.table("KL, nats")
    assert result.floor is not None
    for row, s in zip(summary, (result.pair, result.floor), strict=True):
        assert row[1:6] == [f"{s.tokens:,}", *map(number, (s.mean, s.median, s.p99, s.maximum))]
    assert "Dotted line : the noise floor." in document.text


def test_the_same_tokens_recorded_twice(tmp_path: Path) -> None:
    def nudge(b: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if b == 3:
            x[2] += 0.01 * torch.arange(V)

    first, second = make(tmp_path / "a"), make(tmp_path / "b", edit=nudge)
    result = calibrate([first, second])
    (rollout, train) = Document(calibrate_page(result)).table("side", "identical rows")
    assert rollout[0] == "rollout" and rollout[4] == "3:2"
    tokens = result.pair.tokens
    assert rollout[1] == f"{(tokens - 1) / tokens:.1%}" and train[1] == "100.0%"
    assert rollout[3] == number(result.differences[0].kl.maximum)


def test_through_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = make(tmp_path / "pair")
    for verb, title in (("certify", "Certificate of pair"), ("calibrate", "Calibration of pair")):
        page = tmp_path / f"{verb}.html"
        assert cli.main([verb, str(pair), "--html", str(page)]) == cli.OK
        assert f"written to {page}" in capsys.readouterr().out
        document = Document(page.read_text(encoding="utf-8"))
        assert title in document.text and f"trm {verb} {pair} --html {page}" in document.text
        assert cli.main([verb, str(pair), "--html", "/absent/page.html"]) == cli.BAD_INPUT
        assert "the folder /absent does not exist" in capsys.readouterr().err


def test_constants_are_shown(tmp_path: Path) -> None:
    constants = GateConstants(max_kl=0.07, max_ratio=3.0)
    result = certified(make(tmp_path / "pair"), constants=constants)
    assert "max KL 0.07, max ratio 3," in Document(certify_page(result)).text
