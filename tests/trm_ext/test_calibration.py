# SPDX-License-Identifier: Apache-2.0
"""Calibration against counting by hand; two recordings of the same tokens."""

from __future__ import annotations

import io
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from tests.rows import KL_RTOL
from theory.certify import rejection_quantile
from trm_ext.calibration import GRID, as_dict, calibrate
from trm_ext.io import PairMetadata, PolicyRecord, RolloutPairError, RolloutPairWriter
from trm_ext.report.calibration import print_calibration
from trm_ext.token_statistics import read_statistics, write_statistics

LENGTHS = (3, 40, 0, 18, 70)
V = 13


def make(
    path: Path,
    *,
    noise: float = 0.1,
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
    edit: Any = None,
    engine: str = "engine",
    **extra: Any,
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Write a file; return both sides' logits and the kl of each sequence's tokens that count."""
    rng = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    x = torch.randn(n, V, generator=rng)
    y = x + noise * torch.randn(n, V, generator=rng)
    if edit is not None:
        edit(x, y)
    tokens = torch.arange(n) % V
    mask = torch.arange(n) % 11 != 5
    bounds = [0, *np.cumsum(lengths)]
    with RolloutPairWriter(path, PairMetadata(PolicyRecord(engine), extra=extra)) as writer:
        for a, b in pairwise(bounds):
            writer.append_sequence(x[a:b], y[a:b], tokens[a:b], token_mask=mask[a:b])
    lp, lq = (log_softmax(z.double().numpy(), axis=-1) for z in (x, y))
    kl = (np.exp(lp) * (lp - lq)).sum(-1)
    return x.numpy(), y.numpy(), [kl[a:b][mask[a:b].numpy()] for a, b in pairwise(bounds)]


def test_every_number_is_a_count(tmp_path: Path) -> None:
    _, _, by_sequence = make(tmp_path / "pair")
    made = calibrate([tmp_path / "pair"], thresholds=[0.02, 0.5], target_acceptance=0.5)
    some = [kl for kl in by_sequence if len(kl)]
    longest = max(map(len, some))
    assert made.kind == "engine pair" and made.lengths == (16, longest)
    assert made.horizon == longest
    maxima = [kl.max() for kl in some]
    assert made.sequence_max_kl.tolist() == pytest.approx(maxima, rel=KL_RTOL)
    assert [row.max_kl for row in made.thresholds] == sorted(
        {*GRID, 0.02, 0.5, made.target_threshold}
    )
    for row in made.thresholds:
        kept = sum(top <= row.max_kl * (1 + 1e-5) for top in maxima)
        assert (row.kept, row.acceptance) == (kept, kept / 4)
        for n, share in zip(made.lengths, row.acceptance_by_length, strict=True):
            prefixes = [kl[:n].max() for kl in some if len(kl) >= n]
            assert share == np.mean([top <= row.max_kl * (1 + 1e-5) for top in prefixes])
        assert row.rejection_upper == rejection_quantile(kept, 4, 0.05).upper
        assert row.premise_refuted == (kept < 4)
        assert row.error_bound == longest * row.max_kl
        assert row.can_certify == (longest * row.max_kl < 1 / math.pi)
        word = "premise false" if kept < 4 else "P(a rollout exceeds it) <="
        assert row.says.startswith(word)
        assert not row.below_floor
    assert made.target_threshold == pytest.approx(sorted(maxima)[1], rel=KL_RTOL)
    sixteen = sorted(kl[:16].max() for kl in some if len(kl) >= 16)
    assert made.target_by_length[0] == pytest.approx(sixteen[1], rel=KL_RTOL)
    every = np.concatenate(some)
    s = made.pair
    assert (s.tokens, s.sequences, s.unscored, s.unsupported) == (len(every), 4, 0, 0)
    assert s.mean == pytest.approx(every.mean(), rel=KL_RTOL)
    assert s.median == pytest.approx(np.median(every), rel=KL_RTOL)
    assert s.maximum == pytest.approx(every.max(), rel=KL_RTOL)
    assert s.p99 == pytest.approx(sorted(every)[math.ceil(0.99 * len(every)) - 1], rel=KL_RTOL)
    assert s.seq_kl == pytest.approx(every.sum() / 5, rel=KL_RTOL)  # the empty one counts
    assert made.floor is None and any("no file says what the floor is" in n for n in made.notes)


def test_a_threshold_below_the_floor_is_warned_about(tmp_path: Path) -> None:
    make(tmp_path / "pair", noise=0.3, engine="fast")
    _, _, floor = make(tmp_path / "floor", noise=0.1, seed=1, pair="noise-floor")
    made = calibrate(
        [tmp_path / "floor", tmp_path / "pair"], thresholds=[1e-4, 1.0], target_acceptance=1.0
    )
    top = max(kl.max() for kl in floor if len(kl))
    assert made.kind == "engine pair" and made.floor_threshold == pytest.approx(top, rel=KL_RTOL)
    assert made.floor is not None and made.floor.maximum == pytest.approx(top, rel=KL_RTOL)
    assert len(made.warnings) == 1
    assert made.rollout.engine == "fast"  # the pair's, not the floor's
    assert made.warnings[0].startswith(f"threshold 0.0001 lies below the noise floor {top:.3g}")
    assert all(row.below_floor == (row.max_kl < made.floor_threshold) for row in made.thresholds)
    # the floor alone
    alone = calibrate([tmp_path / "floor"])
    assert alone.kind == "noise floor" and alone.floor == alone.pair
    # a pair that is quieter than its own floor
    odd = calibrate([tmp_path / "pair", tmp_path / "floor"], target_acceptance=0.5)
    make(tmp_path / "quiet", noise=0.001)
    odd = calibrate([tmp_path / "quiet", tmp_path / "floor"], target_acceptance=0.5)
    assert any("on other tokens or another engine" in w for w in odd.warnings)


def test_the_same_tokens_recorded_twice(tmp_path: Path) -> None:
    xa, ya, _ = make(tmp_path / "a")

    def other_machine(x: torch.Tensor, y: torch.Tensor) -> None:
        x[1::2] += 0.01 * torch.randn(x[1::2].shape, generator=torch.Generator().manual_seed(9))
        y[30] = -y[30]

    xb, yb, _ = make(tmp_path / "b", edit=other_machine)
    made = calibrate([tmp_path / "a", tmp_path / "b"], thresholds=[1e-6], target_acceptance=0.75)
    assert made.kind == "recorded twice"
    mask = np.arange(sum(LENGTHS)) % 11 != 5
    tokens = np.arange(sum(LENGTHS)) % V
    rollout, train = made.differences
    for found, a, b in ((rollout, xa, xb), (train, ya, yb)):
        lp, lq = (log_softmax(z.astype(np.float64), axis=-1) for z in (a, b))
        kl = (np.exp(lp) * (lp - lq)).sum(-1)[mask]
        moved = (lq - lp)[np.arange(len(tokens)), tokens][mask]
        assert found.kl.mean == pytest.approx(kl.mean(), rel=KL_RTOL)
        assert found.kl.maximum == pytest.approx(kl.max(), rel=KL_RTOL)
        assert found.identical == pytest.approx((a == b).all(1)[mask].mean())
        assert found.max_abs_log_ratio == pytest.approx(abs(moved).max(), rel=KL_RTOL)
    assert (rollout.side, train.side) == ("rollout", "train")
    assert 0.4 < rollout.identical < 0.6 and train.identical == pytest.approx(1 - 1 / mask.sum())
    assert train.worst == (1, 27)  # row 30 of a file whose sequence 1 starts at 3
    assert made.floor is not None and made.floor.mean == pytest.approx(rollout.kl.mean)
    assert made.warnings[0].startswith("threshold 1e-06 lies below the noise floor")
    # once more the same file: nothing differs
    same = calibrate([tmp_path / "a", tmp_path / "a"])
    assert [d.identical for d in same.differences] == [1.0, 1.0]
    assert same.floor is not None and same.floor.maximum == 0 and same.warnings == ()
    # statistics have no logits to compare
    write_statistics(tmp_path / "s", read_statistics(tmp_path / "a"))
    with pytest.raises(ValueError, match="s: comparing two recordings needs logits"):
        calibrate([tmp_path / "a", tmp_path / "s"])


def test_different_tokens_are_pooled_and_said(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", lengths=(4, 5))
    made = calibrate([tmp_path / "a", tmp_path / "b"])
    assert made.pair.sequences == 6
    assert "the two files hold different tokens: their sequences are pooled" in made.notes


def test_non_finite_values_are_never_kept(tmp_path: Path) -> None:
    def edit(x: torch.Tensor, y: torch.Tensor) -> None:
        x[0] = float("nan")
        y[3, 1:] = float("-inf")

    make(tmp_path / "pair", edit=edit)
    made = calibrate([tmp_path / "pair"])
    assert (made.pair.unscored, made.pair.unsupported) == (1, 1)
    assert all(row.kept <= 2 for row in made.thresholds)
    assert made.target_threshold == math.inf
    assert any("no threshold keeps 90%" in warning for warning in made.warnings)
    json.dumps(as_dict(made), allow_nan=False)


def test_what_the_terminal_says(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "floor", seed=1, pair="noise-floor")
    for paths in (["a"], ["a", "floor"], ["a", "a"]):
        made = calibrate([tmp_path / p for p in paths], thresholds=[1e-5])
        stream = io.StringIO()
        print_calibration(made, stream)
        text = stream.getvalue()
        assert text.startswith(f"{made.kind}: engine")
        for row in made.thresholds:
            assert row.says in text
        for line in (*made.warnings, *made.notes):
            assert line in text
        assert ("noise floor: max KL <=" in text) == (made.floor is not None)
        assert json.dumps(as_dict(made), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"thresholds": [-1.0]}, r"a threshold must be a finite number >= 0, got -1\.0"),
        ({"target_acceptance": 0.0}, r"target_acceptance must be in \(0, 1\], got 0\.0"),
        ({"alpha": 1.0}, r"alpha must lie strictly between 0 and 1, got 1\.0"),
        ({"horizon": 5}, "horizon 5 is below the longest sequence, 64"),
        ({"paths": []}, "calibrate needs at least one file, got none"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    make(tmp_path / "pair")
    paths = change.pop("paths", [tmp_path / "pair"])
    with pytest.raises(ValueError, match=message):
        calibrate(paths, **change)


def test_files_without_anything_to_calibrate(tmp_path: Path) -> None:
    make(tmp_path / "empty", lengths=(0, 0))
    with pytest.raises(ValueError, match="empty: no token counts"):
        calibrate([tmp_path / "empty"])
    with pytest.raises(RolloutPairError, match="absent: no such file"):
        calibrate([tmp_path / "absent"])
