# SPDX-License-Identifier: Apache-2.0
"""Parts that several reports share: engines, distribution, drift, strips, estimators, deciles."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

import trm_ext
from trm_ext import _lib
from trm_ext.drift import LEAST_TOKENS, Drift, locate_drift
from trm_ext.io import PolicyRecord
from trm_ext.metrics import threshold_for_acceptance
from trm_ext.report import charts
from trm_ext.report.charts import count, number
from trm_ext.report.page import Html, element, facts, figures, join, paragraph, section, table
from trm_ext.report.svg import Scale, log_range
from trm_ext.report.token_text import TokenText, in_context

__all__ = ["Tokens"]

MOST_STRIPS = 24
MOST_ROWS = 50
MOST_TOKENS = 20
MOST_TURNS = 16
_ACCEPTANCES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Per-token values of a packed batch, as the sections need them.

    Attributes:
        layout: packed.
        kl: ``[N]`` nats.
        log_ratio: ``[N]`` nats, or None.
        logp_rollout: ``[N]`` nats, or None.
        ids: int64 ``[N]`` token ids, or None.
        text: from a token's id to its text, or None.
    """

    layout: trm_ext.SequenceLayout
    kl: torch.Tensor
    log_ratio: torch.Tensor | None = None
    logp_rollout: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    text: TokenText | None = None

    @cached_property
    def counted(self) -> NDArray[np.bool_]:
        """Tokens that count."""
        return np.asarray(self.layout.token_mask.numpy())

    @cached_property
    def values(self) -> Array:
        """KL of every token."""
        return np.asarray(self.kl.double().numpy())

    @cached_property
    def exact(self) -> Array:
        """KL of the counted tokens."""
        return np.asarray(self.values[self.counted])

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """First token and end of each sequence."""
        return list(pairwise(self.layout.offsets.tolist()))

    @cached_property
    def sequence_count(self) -> NDArray[np.int64]:
        """Counted tokens of each sequence."""
        total = np.concatenate([[0], np.cumsum(self.counted)])
        offsets = self.layout.offsets.numpy()
        return np.asarray(np.diff(total[offsets]))

    def largest(self, values: Array) -> Array:
        """The largest counted value of each sequence (NaN wins); NaN where none counts."""
        found = [
            values[start:stop][self.counted[start:stop]].max(initial=-math.inf)
            for start, stop in self.bounds
        ]
        return np.where(self.sequence_count > 0, found, math.nan)

    @cached_property
    def drift(self) -> Drift:
        """Spikes or drift."""
        return locate_drift(self.kl, self.layout)

    def context(self, row: int) -> Html:
        """The token of a row, between its neighbours in the sequence."""
        if self.ids is None:
            return Html("")
        start, stop = self.bounds[int(self.layout.sequence_id[row])]
        near = self.ids[max(start, row - 16) : min(stop, row + 16)].tolist()
        return in_context(near, row - max(start, row - 16), self.text)


def engines(
    rollout: PolicyRecord,
    train: PolicyRecord,
    vocab_size: int | None,
    processor: str,
    extra: Mapping[str, Any],
) -> Html:
    """Which pair this is, and where the numbers come from."""

    def sampling(policy: PolicyRecord) -> str:
        cuts = [
            f"{name} {getattr(policy, name):g}"
            for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
            if getattr(policy, name) != off
        ]
        return ", ".join([f"T = {policy.temperature:g}", *cuts, f"{policy.logits} logits"])

    rows = [
        [side, policy.engine, policy.version, policy.precision, sampling(policy)]
        for side, policy in (("rollout (sampled)", rollout), ("train (optimised)", train))
    ]
    known = [
        ("vocabulary", "" if vocab_size is None else f"{vocab_size:,}"),
        ("logits computed on", processor),
        *((name, extra[name]) for name in ("model", "seed") if name in extra),
    ]
    header = ["policy", "engine", "version", "precision", "sampling"]
    return section(
        "Engine pair",
        table(header, rows, left=header),
        facts([(name, value) for name, value in known if value != ""]),
    )


def distribution(tokens: Tokens, marks: Sequence[tuple[float, str]]) -> Html:
    """KL over tokens, and what thresholds on its maximum keep."""
    some = tokens.sequence_count > 0
    largest = tokens.largest(tokens.values)[some]
    finite = tokens.exact[np.isfinite(tokens.exact)]
    quantiles = "no finite KL"
    if len(finite):
        levels = np.quantile(finite, (0.5, 0.9, 0.99, 0.999))
        quantiles = ", ".join(
            f"{name} {number(value)}"
            for name, value in zip(("median", "p90", "p99", "p99.9"), levels, strict=True)
        )
    blocks: list[object] = [
        paragraph(f"Exact KL(rollout‖train) over the whole vocabulary, in nats: {quantiles}."),
        figures(
            charts.kl_histogram(tokens.exact, marks),
            charts.acceptance_curves(largest, tokens.sequence_count[some], marks),
        ),
    ]
    if len(largest):
        statistic = torch.from_numpy(largest)
        rows = []
        for share in _ACCEPTANCES:
            limit = float(threshold_for_acceptance(statistic, share))
            kept = int((largest <= limit).sum()) if math.isfinite(limit) else 0
            rows.append(
                [
                    f"{share:.0%}",
                    number(limit) if math.isfinite(limit) else "none does",
                    kept,
                ]
            )
        blocks.append(
            table(
                ["to keep", "smallest threshold", "kept"],
                rows,
                caption="Smallest threshold on the largest KL that keeps a share of the sequences. "
                "Acceptance is no evidence that the policies are close: one masked sequence "
                "disproves max KL ≤ threshold over all contexts.",
            )
        )
    return section("KL distribution and acceptance", *blocks)


def drift(tokens: Tokens) -> Html:
    """Spikes or drift, in words and over positions."""
    found = tokens.drift
    finite = np.flatnonzero(tokens.counted & np.isfinite(tokens.values))
    blocks: list[object] = [element("p", _drift_sentence(found), style="lead")]
    if len(finite):
        position = tokens.layout.position.numpy()[finite]
        blocks.append(
            figures(charts.position_profile(position, tokens.values[finite], found.limit))
        )
    blocks.append(
        facts(
            [
                ("median KL", _known(found.median)),
                ("a spike exceeds", _known(found.limit)),
                ("spikes", f"{len(found.spikes):,}"),
                ("share of all KL at spikes", _percent(found.spike_share)),
                ("spikes that stand alone", _percent(found.isolated)),
                ("share of all KL at the top 1 % of tokens", _percent(found.top_share)),
                ("rank correlation with position", _signed(found.trend)),
            ]
        )
    )
    blocks.append(
        element(
            "p",
            "A spike is a token above max(10 Q75, Q50 exp(z s)): Q50 and Q75 are quartiles of the "
            "KL, s = ln(Q75/Q50)/0.6745, and z makes a false spike in a log-normal bulk a 1 % "
            "event for the whole file. “Spikes”: they carry at least half of all KL; “drift”: at "
            "most a tenth.",
            style="caption",
        )
    )
    return section("Isolated spikes or drift everywhere?", *blocks)


def worst_tokens(tokens: Tokens) -> Html:
    """The tokens with the largest KL; those without a finite one first."""
    rank = np.where(tokens.counted, np.where(np.isnan(tokens.values), np.inf, tokens.values), -1.0)
    few = min(MOST_TOKENS, int(tokens.counted.sum()))
    rows = []
    spikes = set(tokens.drift.spikes.tolist())
    top = np.argpartition(-rank, few - 1)[:few] if few else np.zeros(0, np.int64)
    for row in top[np.lexsort((top, -rank[top]))]:
        where = f"{int(tokens.layout.sequence_id[row])}:{int(tokens.layout.position[row])}"
        cells: list[object] = [where, number(tokens.values[row])]
        if tokens.ids is not None:
            cells.append(tokens.context(int(row)))
        cells.append("spike" if int(row) in spikes else "")
        if tokens.log_ratio is not None:
            cells.append(_signed(float(tokens.log_ratio[row])))
        if tokens.logp_rollout is not None:
            cells.append(number(math.exp(float(tokens.logp_rollout[row]))))
        rows.append(cells)
    header = ["seq:pos", "KL", *(["token"] if tokens.ids is not None else []), ""]
    header += ["log rho"] if tokens.log_ratio is not None else []
    header += ["p(token)"] if tokens.logp_rollout is not None else []
    return section(
        "Worst tokens",
        table(
            header,
            rows,
            left=["", "token"],
            caption="log rho = log q(token) - log p(token) of the token that was sampled; "
            "p(token): its probability under the rollout policy. The KL belongs to the whole "
            "distribution at that position, so the sampled token may look harmless.",
        ),
    )


def strips(tokens: Tokens, max_kl: float, verdicts: Sequence[str]) -> Html:
    """One strip per sequence, the worst first.

    Args:
        tokens: the values.
        max_kl: threshold.
        verdicts: one word or two per sequence.
    """
    largest = tokens.largest(tokens.values)
    order = np.lexsort((np.arange(len(largest)), -np.where(np.isnan(largest), np.inf, largest)))
    order = order[tokens.sequence_count[order] > 0]
    chosen = order[:MOST_STRIPS]
    scale = _strip_scale(tokens, max_kl)
    made = []
    for b in chosen:
        start, stop = tokens.bounds[b]
        kl, counted = tokens.values[start:stop], tokens.counted[start:stop]
        where = int(np.argmax(np.where(counted, np.where(np.isnan(kl), np.inf, kl), -1.0)))
        caption = join(
            [
                element("b", f"Sequence {b}"),
                f": {verdicts[b]}; {count(int(tokens.sequence_count[b]), 'token')}, largest KL "
                f"{number(kl[where])} at {where} ",
                tokens.context(start + where),
            ]
        )
        label = f"KL along sequence {b}"
        made.append(charts.strip(kl, counted, max_kl, scale, label, caption))
    intro = paragraph(
        f"KL (up, logarithmic, nats) along the positions (across); red above the threshold of "
        f"{max_kl:g} or not finite, grey where tokens do not count. A bar shows the largest KL of "
        f"the positions that it covers. "
        f"{len(chosen)} of {count(len(order), 'sequence')} drawn, largest KL first."
    )
    return section("Sequences", intro, figures(*made))


def estimators(tokens: Tokens, max_kl: float) -> Html:
    """Exact KL against what the sampled token alone says."""
    if tokens.log_ratio is None:
        return Html("")
    ratio = tokens.log_ratio.double()
    k3 = trm_ext.k3(ratio).numpy()
    some = tokens.sequence_count > 0
    exact, sampled = tokens.largest(tokens.values)[some], tokens.largest(k3)[some]
    absolute = tokens.largest(ratio.abs().numpy())[some]
    counted = tokens.counted
    both = np.isfinite(tokens.exact) & np.isfinite(k3[counted])
    mean_kl, mean_k3 = _mean(tokens.exact[both]), _mean(k3[counted][both])
    rows = [
        ["per token, k3", _rank_correlation(tokens.exact, k3[counted])],
        ["per token, |log rho|", _rank_correlation(tokens.exact, ratio.abs().numpy()[counted])],
        ["largest of a sequence, k3", _rank_correlation(exact, sampled)],
        ["largest of a sequence, |log rho|", _rank_correlation(exact, absolute)],
    ]
    return section(
        "Exact KL against the sampled token",
        paragraph(
            f"k3 = rho - 1 - log rho is right on average over tokens that the rollout policy "
            f"sampled (mean k3 {_known(mean_k3)}, mean KL {_known(mean_kl)}), but a maximum or a "
            f"ranking needs every token to be right."
        ),
        figures(
            charts.estimator_map(tokens.exact, k3[counted], "k3"),
            charts.sequence_dots(exact, sampled, max_kl, "k3"),
        ),
        table(
            ["exact KL against", "rank correlation"],
            rows,
            left=["exact KL against"],
            caption="Spearman; 1 would mean that the sampled token ranks as the exact KL does.",
        ),
    )


def deciles(tokens: Tokens) -> Html:
    """Mismatch by how likely the sampled token was under the rollout policy."""
    if tokens.logp_rollout is None:
        return Html("")
    logp = tokens.logp_rollout.double().numpy()
    usable = tokens.counted & np.isfinite(tokens.values) & np.isfinite(logp)
    ratio = None
    if tokens.log_ratio is not None:
        ratio = tokens.log_ratio.double().abs().numpy()
        usable &= np.isfinite(ratio)
    if usable.sum() < 10:
        return Html("")
    index = np.flatnonzero(usable)
    parts = np.array_split(index[np.argsort(logp[index], kind="stable")], 10)
    total = float(tokens.values[index].sum())
    edges, rows = [], []
    series: dict[str, list[float]] = {"mean KL": []}
    if ratio is not None:
        series["mean |log rho|"] = []
    for n, part in enumerate(parts, start=1):
        low, high = math.exp(logp[part[0]]), math.exp(logp[part[-1]])
        kl = tokens.values[part]
        share = float(kl.sum()) / total if total > 0 else math.nan
        edges.append((low, high))
        series["mean KL"].append(float(kl.mean()))
        row = [n, f"{low:.2g} – {high:.2g}", number(kl.mean()), number(kl.max()), _percent(share)]
        if ratio is not None:
            series["mean |log rho|"].append(float(ratio[part].mean()))
            row.append(number(ratio[part].mean()))
        rows.append(row)
    header = ["decile", "p(token)", "mean KL", "max KL", "share of all KL"]
    header += ["mean |log rho|"] if ratio is not None else []
    return section(
        "By the sampled token's probability",
        paragraph(
            f"Tokens in ten equal parts by their probability under the rollout policy. The least "
            f"likely part carries {rows[0][4]} of all KL, the most likely one {rows[-1][4]}."
        ),
        figures(charts.decile_bars(edges, series)),
        table(header, rows),
    )


def turns(tokens: Tokens) -> Html:
    """By turn: a run of counted tokens without a gap; nothing when no sequence has two."""
    index = np.flatnonzero(tokens.counted)
    if len(index) == 0:
        return Html("")
    sequence = tokens.layout.sequence_id.numpy()[index]
    position = tokens.layout.position.numpy()[index]
    follows = np.zeros(len(index), dtype=bool)
    follows[1:] = (sequence[1:] == sequence[:-1]) & (position[1:] == position[:-1] + 1)
    run = np.cumsum(~follows) - 1
    first_run = np.zeros(sequence.max() + 1, dtype=np.int64)
    first_run[sequence[::-1]] = run[::-1]
    turn = run - first_run[sequence]
    if turn.max() == 0:
        return Html("")
    kl = tokens.values[index]
    total = float(kl[np.isfinite(kl)].sum())
    rows = []
    last = min(int(turn.max()), MOST_TURNS - 1)
    for n in range(last + 1):
        where = turn >= n if n == last < turn.max() else turn == n
        finite = kl[where][np.isfinite(kl[where])]
        rows.append(
            [
                f"{n}" if n < last or last == turn.max() else f"{n} and later",
                len(np.unique(sequence[where])),
                f"{int(where.sum()):,}",
                number(_mean(finite)),
                number(float(finite.max(initial=0.0))),
                _percent(float(finite.sum()) / total if total > 0 else math.nan),
            ]
        )
    return section(
        "By turn",
        table(
            ["turn", "sequences", "tokens", "mean KL", "max KL", "share of all KL"],
            rows,
            caption="A turn is a run of tokens that count; what lies between (tool output, user "
            "messages) does not count.",
        ),
    )


def reproduce(command: str, paths: Sequence[Path], tokens: Tokens) -> Html:
    """What to run to get the same page, and what it was run with."""
    digest = hashlib.sha256()
    for value in (tokens.layout.offsets, tokens.layout.token_mask, tokens.ids):
        if value is not None:
            digest.update(value.numpy().tobytes())
    sizes = "".join(f"; {path.stat().st_size:,} bytes" for path in paths if path.exists())
    line = f"{versions()}{sizes}; tokens sha256 {digest.hexdigest()[:16]}"
    return section(
        "Reproduce",
        paragraph(element("code", command)) if command else "",
        paragraph(line),
    )


def versions() -> str:
    """What a reader needs to run the same code."""
    cpu = _lib.describe().get("cpu")
    kernel = cpu.get("capability", "") if isinstance(cpu, Mapping) else ""
    return (
        f"trm {trm_ext.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()} {kernel}".rstrip()
    )


def _drift_sentence(found: Drift) -> str:
    spikes = count(len(found.spikes), "spike")
    spikes += " carries" if len(found.spikes) == 1 else " carry"
    spikes += f" {_percent(found.spike_share)} of all KL"
    words = {
        "unknown": f"{count(found.tokens, 'token')} with a finite KL: at least {LEAST_TOKENS} are "
        "needed to tell spikes from drift.",
        "none": "No mismatch: every KL is below 1e-9 nats, the accuracy of float32 logits.",
        "drift": f"Drift: the mismatch is spread over the tokens; {spikes}. Look at what all "
        "tokens share: precision, kernels, stale weights.",
        "spikes": f"Isolated spikes: {spikes} and mostly stand alone. Look at discrete events: "
        "expert routing that flips, a special token, a cache that was rebuilt.",
        "bursts": f"Bursts: {spikes} and mostly stand in groups. Look at what happened in these "
        "stretches: a tool message, truncation, weights that changed in mid-sequence.",
        "mixed": f"Both: {spikes}, on top of a drift that carries the rest.",
    }[found.kind]
    if found.grows:
        words += f" KL grows along the sequences (rank correlation {found.trend:.2f})."
    return words


def _strip_scale(tokens: Tokens, max_kl: float) -> Scale:
    """Decades from the 5 % quantile to the maximum, at most eight, with the threshold inside."""
    positive = tokens.exact[np.isfinite(tokens.exact) & (tokens.exact > 0)]
    if len(positive) == 0:
        return log_range([max_kl])
    low, high = float(np.quantile(positive, 0.05)), float(positive.max())
    ends = [low, high, *([max_kl] if max_kl > 0 else [])]
    scale = log_range(ends)
    return log_range([max(scale.low, scale.high * 1e-8, 1e-16), scale.high])


def _rank_correlation(x: Array, y: Array) -> str:
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return "not defined"
    return f"{float(spearmanr(x, y).statistic):.2f} ({len(x):,})"


def _mean(values: Array) -> float:
    return float(values.mean()) if len(values) else math.nan


def _known(value: float) -> str:
    return number(value) if math.isfinite(value) else "–"


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.3g} %"


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:+.3g}"
