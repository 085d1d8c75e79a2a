# SPDX-License-Identifier: Apache-2.0
"""Audit a rollout-pair file: exact KL of every token, and which sequences a threshold masks.

Memory is bounded by the chunk of logits that is being looked at, plus a few numbers per token.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import trm_ext
from trm_ext.io import PolicyRecord, RolloutPairReader, default_chunk_rows
from trm_ext.masks import max_kl_verdict

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class SequenceAudit:
    """What the audit found in one sequence. Divergences are in nats.

    Only tokens that count (``token_mask``) enter the statistics. Positions are indices on the
    sequence's own token axis, holes counted; -1 when no token counts.

    Attributes:
        sequence: index b.
        tokens: number of tokens that count.
        max_kl: largest exact KL(rollout || train).
        position: where it is.
        token_id: the token that was sampled there, -1 if none.
        mean_kl: mean exact KL.
        sum_kl: total exact KL.
        keep: True when the sequence stays in the gradient.
        reason: ``kept``, ``max_kl``, ``non_finite`` (NaN), ``support`` (+inf) or ``empty`` (kept).
        max_abs_log_rho: largest abs log_ratio of the sampled token.
        log_rho_position: where that is.
        mean_k3: mean k3 of the sampled token.
        max_k3: largest k3 of the sampled token.
    """

    sequence: int
    tokens: int
    max_kl: float
    position: int
    token_id: int
    mean_kl: float
    sum_kl: float
    keep: bool
    reason: str
    max_abs_log_rho: float
    log_rho_position: int
    mean_k3: float
    max_k3: float


@dataclass(frozen=True)
class Audit:
    """The result of :func:`audit_file`.

    Attributes:
        path: the file that was read.
        max_kl: the threshold, nats.
        sequences: one entry per sequence.
        vocab_size: real vocabulary size.
        rollout: how the rollout side was produced.
        train: how the train side was produced.
        notes: what a reader of the numbers should know, one sentence each.
        tokens: int64 ``[N]``.
        cu_seqlens: int64 ``[B + 1]``.
        counted: bool ``[N]``, tokens that count.
        kl: ``[N]`` nats, exact KL(rollout || train), fp32 or fp64; 0 where not counted.
        log_ratio: float64 ``[N]``, log q(token) - log p(token); 0 where not counted.
    """

    path: Path
    max_kl: float
    sequences: tuple[SequenceAudit, ...]
    vocab_size: int
    rollout: PolicyRecord
    train: PolicyRecord
    notes: tuple[str, ...]
    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    counted: torch.Tensor
    kl: torch.Tensor
    log_ratio: torch.Tensor

    @property
    def k3(self) -> torch.Tensor:
        """float64 ``[N]``: rho - 1 - log rho, the sampled-token estimate of the KL."""
        return k3_of(self.log_ratio)

    @property
    def kept(self) -> int:
        """Number of sequences that are kept."""
        return sum(entry.keep for entry in self.sequences)

    @property
    def worst(self) -> SequenceAudit | None:
        """The sequence with the largest max KL (non-finite first); None without tokens."""
        counted = [entry for entry in self.sequences if entry.tokens]
        return max(counted, key=lambda entry: _rank(entry.max_kl), default=None)

    @property
    def mean_kl(self) -> float:
        """Mean exact KL over all tokens that count; NaN without any."""
        return float(self.kl[self.counted].double().mean())

    @property
    def mean_k3(self) -> float:
        """Mean k3 over all tokens that count; NaN without any."""
        return float(self.k3[self.counted].mean())

    @property
    def max_abs_log_rho(self) -> float:
        """Largest abs log_ratio over all tokens that count; NaN without any."""
        values = self.log_ratio[self.counted].abs()
        return float(values.max()) if len(values) else math.nan


def audit_file(
    path: str | os.PathLike[str],
    max_kl: float,
    *,
    chunk_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Compute the exact KL of every token of a rollout-pair file and judge its sequences.

    KL(p || q) = Σ_v p_v (log p_v - log q_v), with p = softmax(x / T_rollout) and q likewise; a
    temperature applies when the file says that its logits are raw. When one is not 1, logits are
    divided in float64 and the KL comes out in float64. A sequence is kept iff its largest KL is
    at most ``max_kl``; NaN or +inf at a token that counts masks it.

    Args:
        path: a rollout-pair file.
        max_kl: threshold in nats, >= 0.
        chunk_rows: rows of logits in memory at a time; None takes about 32 MiB per side.
        progress: called with (rows done, rows in all) after each chunk.

    Returns:
        An :class:`Audit`.

    Raises:
        RolloutPairError: the file is wrong, or ``chunk_rows`` is below 1.
        ValueError: ``max_kl`` is negative or NaN.
    """
    if not max_kl >= 0:
        raise ValueError(f"max_kl must be a number >= 0, got {max_kl}")
    with RolloutPairReader(path) as pair:
        total = pair.num_tokens
        counted = pair.token_mask
        if counted is None:
            counted = torch.ones(total, dtype=torch.bool)
        kl: list[torch.Tensor] = []
        log_ratio = torch.zeros(total, dtype=torch.float64)
        rollout_logp = torch.zeros(total, dtype=torch.float64)
        step = default_chunk_rows(pair.num_columns) if chunk_rows is None else chunk_rows
        for start, rollout, train in pair.chunks(step):
            span = slice(start, start + len(rollout))
            rollout = _tempered(rollout, pair.metadata.rollout)
            train = _tempered(train, pair.metadata.train)
            exact = trm_ext.token_divergence(
                rollout,
                train,
                tokens=pair.tokens[span],
                token_mask=counted[span],
                outputs=("kl", "logp_rollout", "log_ratio"),
            )
            assert exact.kl is not None
            assert exact.logp_rollout is not None
            assert exact.log_ratio is not None
            kl.append(exact.kl)
            rollout_logp[span] = exact.logp_rollout
            log_ratio[span] = exact.log_ratio
            if progress is not None:
                progress(span.stop, total)
        values = torch.cat(kl) if kl else torch.zeros(0)
        return Audit(
            path=pair.path,
            max_kl=float(max_kl),
            sequences=_judge(values, log_ratio, counted, pair, max_kl),
            vocab_size=pair.vocab_size,
            rollout=pair.metadata.rollout,
            train=pair.metadata.train,
            notes=_notes(pair, counted, rollout_logp),
            tokens=pair.tokens,
            cu_seqlens=pair.cu_seqlens,
            counted=counted,
            kl=values,
            log_ratio=log_ratio,
        )


def k3_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return k3 = rho - 1 - log rho >= 0, with log rho = log q - log p of the sampled token.

    Example:
        >>> k3_of(torch.tensor([0.0], dtype=torch.float64)).item()
        0.0
    """
    return torch.expm1(log_ratio) - log_ratio


def as_dict(audit: Audit) -> dict[str, Any]:
    """Return the audit as a JSON-ready dictionary with stable keys.

    Non-finite numbers become the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``: JSON has no
    other way to keep them. ``schema_version`` grows when a key changes its meaning or leaves.
    """
    worst = audit.worst
    return {
        "schema_version": SCHEMA_VERSION,
        "file": str(audit.path),
        "max_kl": audit.max_kl,
        "vocab_size": audit.vocab_size,
        "rollout": _policy_dict(audit.rollout),
        "train": _policy_dict(audit.train),
        "notes": list(audit.notes),
        "summary": {
            "sequences": len(audit.sequences),
            "kept": audit.kept,
            "masked": len(audit.sequences) - audit.kept,
            "tokens": int(audit.counted.sum()),
            "mean_kl": _number(audit.mean_kl),
            "max_kl": _number(worst.max_kl if worst else math.nan),
            "max_kl_sequence": worst.sequence if worst else -1,
            "mean_k3": _number(audit.mean_k3),
            "max_abs_log_rho": _number(audit.max_abs_log_rho),
        },
        "sequences": [
            {name: _number(getattr(entry, name)) for name in entry.__dataclass_fields__}
            for entry in audit.sequences
        ],
    }


def write_results(audit: Audit, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write ``audit.json`` and ``tokens.csv`` into a folder, all or nothing.

    Both are written under temporary names first; an interrupt before they are complete leaves
    the folder as it was (absent, if it was absent).

    Args:
        audit: what to write.
        folder: created if it is absent; files in it with these names are replaced.

    Returns:
        The paths of the files.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: exists and is not a folder")
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with (temporary / "tokens.csv").open("w", newline="") as stream:
            _write_tokens(audit, stream)
        text = json.dumps(as_dict(audit), indent=2, allow_nan=False)
        (temporary / "audit.json").write_text(text + "\n")
        names = ("tokens.csv", "audit.json")
        temporary.chmod(0o755)
        if folder.exists():
            for name in names:
                os.replace(temporary / name, folder / name)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return tuple(folder / name for name in names)


def _write_tokens(audit: Audit, stream: Any) -> None:
    """One line per token: sequence, position, token id, counted, kl, log_ratio, k3."""
    writer = csv.writer(stream)
    writer.writerow(["sequence", "position", "token_id", "counted", "kl", "log_ratio", "k3"])
    bounds = audit.cu_seqlens.tolist()
    k3 = audit.k3
    for b, (start, stop) in enumerate(pairwise(bounds)):
        columns = (
            audit.tokens[start:stop].tolist(),
            audit.counted[start:stop].int().tolist(),
            audit.kl[start:stop].tolist(),
            audit.log_ratio[start:stop].tolist(),
            k3[start:stop].tolist(),
        )
        for position, values in enumerate(zip(*columns, strict=True)):
            writer.writerow([b, position, *values])


def _tempered(logits: torch.Tensor, policy: PolicyRecord) -> torch.Tensor:
    """Return logits whose softmax is the policy; in float64 when a division is needed."""
    return logits if policy.divisor == 1.0 else logits.double() / policy.divisor


def _judge(
    kl: torch.Tensor,
    log_ratio: torch.Tensor,
    counted: torch.Tensor,
    pair: RolloutPairReader,
    max_kl: float,
) -> tuple[SequenceAudit, ...]:
    """Reduce per-token values to one entry per sequence."""
    layout = trm_ext.SequenceLayout.from_cu_seqlens(pair.cu_seqlens, token_mask=pair.token_mask)
    verdict = max_kl_verdict(kl, layout, max_kl=max_kl)
    bounds = pair.cu_seqlens.tolist()
    entries = []
    for b, (start, stop) in enumerate(pairwise(bounds)):
        counts = counted[start:stop]
        log_rho = log_ratio[start:stop].abs()
        k3 = k3_of(log_ratio[start:stop][counts])
        some = bool(counts.any())
        position = int(verdict.position[b])
        entries.append(
            SequenceAudit(
                sequence=b,
                tokens=int(counts.sum()),
                max_kl=float(verdict.max_kl[b]),
                position=position,
                token_id=int(pair.tokens[start + position]) if position >= 0 else -1,
                mean_kl=float(verdict.mean_kl[b]),
                sum_kl=float(verdict.sum_kl[b]),
                keep=bool(verdict.keep[b]),
                reason=trm_ext.Reason(int(verdict.reason[b])).name.lower(),
                max_abs_log_rho=float(log_rho[counts].max()) if some else math.nan,
                log_rho_position=(int(torch.where(counts, log_rho, -1.0).argmax()) if some else -1),
                mean_k3=float(k3.mean()),
                max_k3=float(k3.max()) if some else math.nan,
            )
        )
    return tuple(entries)


def _notes(
    pair: RolloutPairReader, counted: torch.Tensor, rollout_logp: torch.Tensor
) -> tuple[str, ...]:
    """What the numbers do not say by themselves."""
    notes = []
    for side in ("rollout", "train"):
        policy: PolicyRecord = getattr(pair.metadata, side)
        if policy.truncated:
            notes.append(
                f"the {side} logits are raw but sampling was truncated (top_k {policy.top_k}, "
                f"top_p {policy.top_p}, min_p {policy.min_p}): the KL is that of the whole laws"
            )
    if pair.metadata.rollout.divisor != pair.metadata.train.divisor:
        notes.append(
            f"the two sides are compared at different temperatures "
            f"({pair.metadata.rollout.temperature} and {pair.metadata.train.temperature})"
        )
    if pair.rollout_logps is not None:
        error = (pair.rollout_logps.double() - rollout_logp)[counted].abs()
        if len(error) and not float(error.max()) <= 0.05:
            notes.append(
                f"rollout_logps differ from the rollout logits by up to {float(error.max()):.3g} "
                "nats: shifted by one row, or another temperature?"
            )
    return tuple(notes)


def _policy_dict(policy: PolicyRecord) -> dict[str, Any]:
    names = [name for name in policy.__dataclass_fields__ if name != "extra"]
    return {name: _number(getattr(policy, name)) for name in names}


def _number(value: Any) -> Any:
    """Return a value that strict JSON can hold."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _rank(value: float) -> float:
    """Order NaN above everything."""
    return math.inf if math.isnan(value) else value
