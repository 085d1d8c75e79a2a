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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from trm_ext.io import PolicyRecord
from trm_ext.masks import Reason, max_kl_verdict
from trm_ext.token_statistics import TokenStatistics, read_statistics

SCHEMA_VERSION = 1
AUDIT_OUTPUTS = ("kl", "logp_rollout", "log_ratio")  # what an audit asks of the logits


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
        host_processor: where the logits were computed, as far as the file says.
        extra: further metadata of the file (model, seed, prompts, ...).
        notes: what a reader of the numbers should know, one sentence each.
        tokens: int64 ``[N]``.
        cu_seqlens: int64 ``[B + 1]``.
        counted: bool ``[N]``, tokens that count.
        kl: ``[N]`` nats, exact KL(rollout || train), fp32 or fp64; 0 where not counted.
        log_ratio: float64 ``[N]``, log q(token) - log p(token); 0 where not counted.
        logp_rollout: float64 ``[N]``, log p(token) nats; 0 where not counted; None when unknown.
    """

    path: Path
    max_kl: float
    sequences: tuple[SequenceAudit, ...]
    vocab_size: int
    rollout: PolicyRecord
    train: PolicyRecord
    host_processor: str
    extra: Mapping[str, Any]
    notes: tuple[str, ...]
    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    counted: torch.Tensor
    kl: torch.Tensor
    log_ratio: torch.Tensor
    logp_rollout: torch.Tensor | None

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
    _check_threshold(max_kl)
    statistics = read_statistics(path, AUDIT_OUTPUTS, chunk_rows=chunk_rows, progress=progress)
    return audit_statistics(statistics, max_kl)


def audit_statistics(statistics: TokenStatistics, max_kl: float) -> Audit:
    """Judge sequences by their per-token statistics, as :func:`audit_file` does.

    Args:
        statistics: with ``kl`` and ``log_ratio``.
        max_kl: threshold in nats, >= 0.

    Returns:
        An :class:`Audit`; token ids are -1 where the statistics have none.

    Raises:
        ValueError: ``max_kl`` is negative or NaN, or there is no path or statistic.
    """
    _check_threshold(max_kl)
    kl, log_ratio = statistics.divergence.kl, statistics.divergence.log_ratio
    if statistics.path is None or kl is None or log_ratio is None:
        raise ValueError("an audit needs statistics that were read from a file, with kl, log_ratio")
    logp_rollout, tokens = statistics.divergence.logp_rollout, statistics.tokens
    if tokens is None:
        tokens = torch.full(statistics.counted.shape, -1, dtype=torch.int64)
    return Audit(
        path=statistics.path,
        max_kl=float(max_kl),
        sequences=_judge(kl, log_ratio.double(), tokens, statistics, max_kl),
        vocab_size=statistics.vocab_size or 0,
        rollout=statistics.rollout,
        train=statistics.train,
        host_processor=statistics.host_processor,
        extra=statistics.extra,
        notes=statistics.notes,
        tokens=tokens,
        cu_seqlens=statistics.cu_seqlens,
        counted=statistics.counted,
        kl=kl,
        log_ratio=log_ratio.double(),
        logp_rollout=None if logp_rollout is None else logp_rollout.double(),
    )


def _check_threshold(max_kl: float) -> None:
    if not max_kl >= 0:
        raise ValueError(f"max_kl must be a number >= 0, got {max_kl}")


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
        "rollout": policy_dict(audit.rollout),
        "train": policy_dict(audit.train),
        "notes": list(audit.notes),
        "summary": {
            "sequences": len(audit.sequences),
            "kept": audit.kept,
            "masked": len(audit.sequences) - audit.kept,
            "tokens": int(audit.counted.sum()),
            "mean_kl": json_number(audit.mean_kl),
            "max_kl": json_number(worst.max_kl if worst else math.nan),
            "max_kl_sequence": worst.sequence if worst else -1,
            "mean_k3": json_number(audit.mean_k3),
            "max_abs_log_rho": json_number(audit.max_abs_log_rho),
        },
        "sequences": [
            {name: json_number(getattr(entry, name)) for name in entry.__dataclass_fields__}
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
    document = as_dict(audit)

    def write_tokens(path: Path) -> None:
        with path.open("w", newline="") as stream:
            _write_tokens(audit, stream)

    return write_folder(
        folder,
        {"tokens.csv": write_tokens, "audit.json": lambda path: write_json(path, document)},
    )


def write_json(path: Path, document: Any) -> None:
    """Write a document as strict JSON."""
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def write_folder(
    folder: str | os.PathLike[str], files: Mapping[str, Callable[[Path], None]]
) -> tuple[Path, ...]:
    """Write several files into a folder, all or nothing.

    Args:
        folder: created if it is absent; files in it with these names are replaced.
        files: by name, what writes the file at the path that it is given.

    Returns:
        The paths of the files.

    Raises:
        ValueError: the folder exists and is a file.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: exists and is not a folder")
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, write in files.items():
            write(temporary / name)
        temporary.chmod(0o755)
        if folder.exists():
            for name in files:
                os.replace(temporary / name, folder / name)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return tuple(folder / name for name in files)


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


def _judge(
    kl: torch.Tensor,
    log_ratio: torch.Tensor,
    tokens: torch.Tensor,
    statistics: TokenStatistics,
    max_kl: float,
) -> tuple[SequenceAudit, ...]:
    """Reduce per-token values to one entry per sequence."""
    counted = statistics.counted
    verdict = max_kl_verdict(kl, statistics.layout, max_kl=max_kl)
    bounds = statistics.cu_seqlens.tolist()
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
                token_id=int(tokens[start + position]) if position >= 0 else -1,
                mean_kl=float(verdict.mean_kl[b]),
                sum_kl=float(verdict.sum_kl[b]),
                keep=bool(verdict.keep[b]),
                reason=Reason(int(verdict.reason[b])).name.lower(),
                max_abs_log_rho=float(log_rho[counts].max()) if some else math.nan,
                log_rho_position=(int(torch.where(counts, log_rho, -1.0).argmax()) if some else -1),
                mean_k3=float(k3.mean()),
                max_k3=float(k3.max()) if some else math.nan,
            )
        )
    return tuple(entries)


def policy_dict(policy: PolicyRecord) -> dict[str, Any]:
    """Return the known fields of a policy record, ready for strict JSON."""
    names = [name for name in policy.__dataclass_fields__ if name != "extra"]
    return {name: json_number(getattr(policy, name)) for name in names}


def json_number(value: Any) -> Any:
    """Return a value that strict JSON can hold."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _rank(value: float) -> float:
    """Order NaN above everything."""
    return math.inf if math.isnan(value) else value
