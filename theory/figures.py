# SPDX-License-Identifier: Apache-2.0
"""The figures: drawn with matplotlib, which is imported when the first one is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from theory.bounds import paper, sharp
from theory.bounds.catalogue import every_bound
from theory.gradients import Settings, fit_exponent, importance_mass, product_estimators
from theory.mdp.adversarial import (
    bernoulli_at_kl,
    hazard_error,
    rare_token_sup,
    two_step_branch,
)
from theory.mdp.markov import random_markov
from theory.mdp.product import BernoulliProduct

__all__ = ["FIGURES", "draw"]

#: Okabe-Ito colours, distinguishable with colour-vision deficiencies.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def _figure(width: float = 7.0, height: float = 4.6, columns: int = 1) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:  # pragma: no cover - depends on the installation
        raise ImportError("Figures need matplotlib; install the 'report' extra.") from missing
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns)
    for axis in np.ravel(np.asarray(axes, dtype=object)):
        axis.grid(True, which="major", linewidth=0.4, alpha=0.5)
        axis.set_prop_cycle(color=list(COLOURS))
    return figure, axes


def bounds_vs_horizon() -> Any:
    """Bounds against the horizon at fixed divergence, log-log.

    delta = 1e-4 nats (``kl_rollout_train``), D_seq = 0.01 nats

    Assumes reward in [0, 1]. Returns a matplotlib figure. Source: docs/theory.md#numbers.

    Example:
        >>> len(bounds_vs_horizon().axes)
        1
    """
    figure, axis = _figure()
    t = np.unique(np.geomspace(128, 32768, 60).astype(int))
    delta, total = 1e-4, 0.01
    curves = {
        "classical, T(T-1)δ": paper.classical_kl(t, delta).value,
        "coupling": paper.coupling(t, np.sqrt(delta / 2)).value,
        "Pinsker-marginal": paper.pinsker_marginal_kl(t, delta).value,
        "mixed, 2T√(δ D)": paper.mixed_kl(t, delta, total).value,
        "dyadic (ours)": sharp.dyadic(t[5::6], max_kl=delta).value,
        "chi-square at X = 2δ (ours)": sharp.chi2(t, 2 * delta).value,
        "Tδ (ours)": sharp.seq_kl_from_max(t, delta).value,
        "SeqKL = D (ours)": np.full(t.size, total),
    }
    for label, value in curves.items():
        x = t[5::6] if np.size(value) != t.size else t
        shown = np.where(np.asarray(value) < 1e6, value, np.nan)
        axis.loglog(x, shown, label=label, linestyle="-" if "ours" in label else "--")
    axis.axhline(1.0, color="0.4", linewidth=0.8)
    axis.text(130, 1.1, "span of the reward", fontsize=8, color="0.3")
    axis.set_xlabel("horizon T (tokens)")
    axis.set_ylabel("bound on |Error| (reward units)")
    axis.set_title("Bounds at δ = 1e-4, D = 0.01 nats")
    axis.legend(fontsize=7, ncols=2)
    return figure


def worst_case_error() -> Any:
    """Exact worst-case error against the horizon, per family, with fitted exponents.

    slope of log sup|Error| (log |Error| for the chain and the hazard) in log T

    Assumes small mismatch so that each family shows its own exponent. Source:
    docs/theory.md#scaling.

    Example:
        >>> len(worst_case_error().axes)
        1
    """
    figure, axis = _figure()
    t = np.array([16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
    for label, value in worst_case_curves(t).items():
        slope = fit_exponent(t, value)
        axis.loglog(t, value, marker="o", markersize=3, label=f"{label}: exponent {slope:.2f}")
    axis.set_xlabel("horizon T (tokens)")
    axis.set_ylabel("exact error (reward units)")
    axis.set_title("How the worst-case error really grows")
    axis.legend(fontsize=8)
    return figure


def worst_case_curves(horizons: Any) -> dict[str, Any]:
    """Exact errors of the families in :func:`worst_case_error`.

    rare token T eps (1-(1-eps)^{T-1}); product sup|Error| at fixed delta; ergodic chain; hazard

    Assumes eps = 1e-7, delta = 1e-8 nats (``kl_rollout_train``), a seeded 8-state chain with
    reward on its last state, hazards 1 and 1.5. Reward units. Source: docs/theory.md#scaling.

    Example:
        >>> sorted(worst_case_curves([16, 32]))[0]
        'ergodic chain, reward on the last state'
    """
    t = np.asarray(horizons)
    q = bernoulli_at_kl(0.5, 1e-8)
    chain = random_markov(1, 8, 0.05)
    last = np.eye(8)[3]
    return {
        "rare token, fixed eps": rare_token_sup(t, 1e-7),
        "product policy, fixed KL": np.array(
            [BernoulliProduct(0.5, q, int(n)).sup_error for n in t]
        ),
        "hazard, fixed total": np.abs(hazard_error(t, 1.0, 1.5)),
        "ergodic chain, reward on the last state": np.array(
            [abs(chain.evaluate(int(n), last).error) for n in t]
        ),
    }


def tightness() -> Any:
    """How close the exact supremum comes to each bound, on three families.

    ratio = sup|Error| / bound; 1 is attained

    Assumes the families' default parameters. Source: docs/theory.md#tightness.

    Example:
        >>> len(tightness().axes)
        1
    """
    from theory import exact

    figure, axis = _figure(height=5.2)
    q = bernoulli_at_kl(0.5, 1e-4)
    product = BernoulliProduct(0.5, q, 1024)
    two_step = two_step_branch()
    families = {
        "product, T = 1024": (product.sup_error, every_bound(1024, **product.known())),
        "rare token, T ε = 0.1": (
            float(rare_token_sup(1000, 1e-4)),
            every_bound(1000, max_tv=1e-4),
        ),
        "two-step branch": (exact.sup_error(two_step), exact.bounds(two_step)),
    }
    names = [
        "classical_tv",
        "half_classical_tv",
        "pinsker_marginal_kl",
        "mixed_kl",
        "forward",
        "dyadic",
        "chi2",
        "split",
        "seq_kl",
    ]
    for i, (label, (truth, found)) in enumerate(families.items()):
        ratio = {b.name: truth / float(b.value) for b in found if 0 < float(b.value) < np.inf}
        where = np.arange(len(names)) + (i - 1) * 0.25
        axis.barh(where, [ratio.get(n, 0.0) for n in names], height=0.22, label=label)
    axis.set_yticks(np.arange(len(names)), names)
    axis.set_xscale("symlog", linthresh=1e-3)
    axis.set_xlim(0, 1.3)
    axis.set_xlabel("exact sup |Error| / bound")
    axis.set_title("Tightness")
    axis.legend(fontsize=8)
    return figure


def estimator_bias_variance() -> Any:
    """Bias and variance of the gradient estimators against the length.

    product policy with one shared logit, KL 1e-3 nats per token (``kl_rollout_train``), reward 1
    when ones are in the majority

    Assumes C = 2, geometric limits 0.999 and 1.001. Source: docs/theory.md#gradients.

    Example:
        >>> len(estimator_bias_variance().axes)
        2
    """
    figure, (left, right) = _figure(10.0, 4.4, 2)
    lengths = 2 * np.unique(np.geomspace(2, 2048, 22).astype(int))  # even: no parity ripple
    q = bernoulli_at_kl(0.5, 1e-3)
    use = Settings(ratio_cap=2.0, geo_low=0.999, geo_high=1.001, max_kl=0.01)
    shown = ("token_is", "seq_is", "seq_tis", "seq_mis", "geo_mask", "geo_mask_token_tis")
    table: dict[str, list[tuple[float, float]]] = {name: [] for name in shown}
    for t in lengths:
        pay = (np.arange(t + 1) * 2 > t).astype(float)
        found = product_estimators(BernoulliProduct(0.5, q, int(t)), pay, use)
        for name in shown:
            table[name].append((abs(found[name][1]), found[name][2]))
    for colour, (name, values) in zip(COLOURS, table.items(), strict=False):
        bias, variance = np.array(values).T
        if name != "seq_is":
            left.loglog(lengths, np.where(bias > 1e-9, bias, np.nan), color=colour)
        right.loglog(
            lengths,
            np.where((variance > 1e-6) & (variance < 1e12), variance, np.nan),
            color=colour,
            label=name,
        )
    left.set_ylabel("|bias| against grad J")
    right.set_ylabel("variance of one rollout")
    for axis in (left, right):
        axis.set_xlabel("length T (tokens)")
    left.set_title("Bias (Seq-IS has none)")
    right.set_title("Variance")
    right.legend(fontsize=7)
    return figure


def acceptance_and_lost_mass() -> Any:
    """What a cap on the sequence ratio accepts, and what it loses, against the length.

    accepted = P_rollout(W <= 5), kept = E_rollout[W 1(W <= 5)] = P_train(W <= 5)

    Assumes a product policy with KL 1e-3 nats per token (``kl_rollout_train``).
    Source: docs/theory.md#gradients.

    Example:
        >>> len(acceptance_and_lost_mass().axes)
        1
    """
    figure, axis = _figure()
    lengths = np.unique(np.geomspace(10, 20000, 40).astype(int))
    q = bernoulli_at_kl(0.5, 1e-3)
    pairs = np.array([importance_mass(BernoulliProduct(0.5, q, int(t)), 5.0) for t in lengths])
    axis.semilogx(lengths, pairs[:, 0], label="accepted by W ≤ 5, under the rollout")
    axis.semilogx(lengths, pairs[:, 1], label="importance mass kept")
    axis.semilogx(lengths, np.full(lengths.size, 0.8), "--", label="Markov: at least 1 - 1/5")
    for p in (1e-3, 1e-4):
        axis.semilogx(
            lengths, (1 - p) ** lengths, ":", label=f"max-masking, violations {p:g} per token"
        )
    axis.axvline(np.log(5) / np.log(1.001), color="0.5", linewidth=0.8)
    axis.set_xlabel("length T (tokens)")
    axis.set_ylabel("share")
    axis.set_ylim(0, 1.05)
    axis.set_title("Nearly everything is accepted; what is lost is the mass")
    axis.legend(fontsize=8)
    return figure


FIGURES: dict[str, Callable[[], Any]] = {
    "bounds_vs_horizon": bounds_vs_horizon,
    "worst_case_error": worst_case_error,
    "tightness": tightness,
    "estimator_bias_variance": estimator_bias_variance,
    "acceptance_and_lost_mass": acceptance_and_lost_mass,
}


def draw(out: str | Path, names: Iterable[str] | None = None) -> list[Path]:
    """Draw figures into a folder.

    one PNG (150 dpi) per name of ``FIGURES``

    Assumes matplotlib is installed. Source: the functions of this module.

    Args:
        out: folder, created when missing.
        names: which figures; default all.

    Returns:
        The files' paths.

    Raises:
        ValueError: on an unknown name.
        ImportError: when matplotlib is missing.

    Example:
        >>> sorted(FIGURES)[0]
        'acceptance_and_lost_mass'
    """
    chosen = list(FIGURES if names is None else names)
    for name in chosen:
        if name not in FIGURES:
            raise ValueError(f"Unknown figure {name!r}; known ones are {', '.join(FIGURES)}.")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in chosen:
        path = folder / f"{name}.png"
        FIGURES[name]().savefig(path, dpi=150, metadata={"Software": None})
        paths.append(path)
    return paths
