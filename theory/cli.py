# SPDX-License-Identifier: Apache-2.0
"""Command line of the package: ``python -m theory``.

Results go to standard output, errors to standard error as one sentence with exit code 2.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from theory import exact, gradients
from theory.bounds import CATALOGUE, every_bound, inverse, vacuous_horizon
from theory.bounds.paper import unified
from theory.certify import clopper_pearson, vacuity
from theory.coverage import CASES, coverage
from theory.mdp import adversarial
from theory.mdp.markov import random_markov
from theory.mdp.product import BernoulliProduct
from theory.mdp.routing_flip import rare_token_amplification, routing_flip
from theory.mdp.tree import Tree, random_tree
from theory.records import Bound
from theory.selfcheck import selfcheck
from theory.tables import TABLES, all_tables

__all__ = ["main", "parser"]

Rows = list[dict[str, Any]]

#: Options of the bounds sub-command, and the quantities they set.
QUANTITIES = {
    "max_kl": "largest KL(rollout || train) over all contexts, nats",
    "max_tv": "largest total variation over all contexts",
    "max_kl_train_rollout": "largest KL(train || rollout) over all contexts, nats",
    "min_bc": "smallest Bhattacharyya affinity over all contexts",
    "max_chi2": "largest chi-square(train || rollout) over all contexts",
    "max_log_ratio": "largest log(train / rollout) over all contexts and tokens, nats",
    "seq_kl": "D_seq: rollout average of the summed KL(rollout || train), nats",
    "seq_tv": "total variation of whole sequences",
    "seq_chi2": "rollout average of the summed chi-square",
}


def _print(rows: Rows, style: str, head: dict[str, Any] | None = None) -> None:
    """Write rows as a table, JSON or CSV."""
    if style == "json":
        print(json.dumps({**(head or {}), "rows": rows}, indent=2))
        return
    if style == "csv":
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        keys = list(rows[0]) if rows else []
        writer.writerow(keys)
        writer.writerows([[_cell(row[k], exact_number=True) for k in keys] for row in rows])
        print(buffer.getvalue(), end="")
        return
    for name, value in (head or {}).items():
        print(f"{name}: {_cell(value)}")
    if not rows:
        return
    keys = list(rows[0])
    cells = [[_cell(row[k]) for k in keys] for row in rows]
    widths = [max(len(k), *(len(line[i]) for line in cells)) for i, k in enumerate(keys)]
    numeric = [all(isinstance(row[k], float | int) for row in rows) for k in keys]
    for line in [keys, ["-" * w for w in widths], *cells]:
        text = [
            c.rjust(w) if right else c.ljust(w)
            for c, w, right in zip(line, widths, numeric, strict=True)
        ]
        print("  ".join(text).rstrip())


def _cell(value: Any, exact_number: bool = False) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return repr(value) if exact_number else f"{value:.6g}"
    if isinstance(value, dict):
        return "; ".join(f"{k}: {v}" for k, v in value.items())
    return "" if value is None else str(value)


def _short(needs: Any) -> str:
    """Quantities with one word each: max, average, moment or law."""
    return ", ".join(
        f"{quantity} ({'max' if 'maximum' in how else how.split()[-1]})"
        for quantity, how in needs.items()
    )


def _records(bounds: Sequence[Bound], short: bool) -> Rows:
    """Bounds as rows with stable keys: name, value, rigorous, needs, source."""
    rows = []
    for bound in bounds:
        row = bound.to_dict()
        if short:
            row.pop("assumes_support")
            row["needs"] = _short(row["needs"])
            row["source"] = (
                bound.source.replace(
                    "Li et al., Trust Region Masking, arXiv:2512.23075v3", "TRM v3"
                )
                .replace("Li and Liu, RL collapse part 3 (blog): ", "blog: ")
                .replace("docs/theory.md", "")
            )
        rows.append(row)
    return rows


def _bounds(options: argparse.Namespace) -> int:
    known = {name: getattr(options, name) for name in QUANTITIES}
    if all(value is None for value in known.values()):
        raise ValueError("Give at least one divergence, for instance --max-kl 1e-4.")
    low, high = options.reward_range
    found = [b.for_reward_range(low, high) for b in every_bound(options.horizon, **known)]
    if not found:
        raise ValueError("No bound follows from these quantities alone.")
    found = sorted(found, key=lambda b: -float(b.value))
    best = unified(found)
    given = {k: v for k, v in known.items() if v is not None}
    verdict = vacuity(
        best,
        options.horizon,
        max_kl=options.max_kl,
        seq_kl=options.seq_kl,
        seq_chi2=options.seq_chi2,
        span=high - low,
    )
    head = {
        "horizon": options.horizon,
        "given": given,
        "smallest bound": float(best.value),
        "below the reward's span": verdict.below_range,
        "largest attainable surrogate": float(verdict.attainable),
        "can certify improvement": verdict.certifying,
    }
    if options.format == "json" and not np.isfinite(verdict.attainable):
        head["largest attainable surrogate"] = str(verdict.attainable)
    _print(_records([*found, best], options.format == "table"), options.format, head)
    return 0


#: How each bound of the invert sub-command is reached: quantity to solve for.
_SOLVABLE = {
    "classical_tv": "max_tv",
    "classical_kl": "max_kl",
    "coupling": "max_tv",
    "pinsker_marginal_kl": "max_kl",
    "mixed_kl": "seq_kl",
    "mixed_tv": "seq_tv",
    "trpo_linear_as_printed": "max_tv",
    "half_pinsker_marginal_kl": "max_kl",
    "half_mixed_kl": "seq_kl",
    "forward": "max_kl",
    "dyadic": "max_kl",
    "chi2": "max_chi2",
    "chi2_from_ratio": "max_kl",
    "split_seq_kl": "seq_kl",
    "seq_kl_from_max": "max_kl",
    "seq_kl": "seq_kl",
}


def _invert(options: argparse.Namespace) -> int:
    known = {name: getattr(options, name) for name in QUANTITIES}
    given = {k: v for k, v in known.items() if v is not None}
    rows: Rows = []
    for name, quantity in _SOLVABLE.items():
        entry = CATALOGUE[name]
        accepted = {*entry.required, *entry.optional}
        rest = {k: v for k, v in given.items() if k in accepted and k != quantity}
        if any(r not in rest and r != quantity for r in entry.required):
            continue
        largest = inverse(name, options.target, quantity, options.horizon, **rest)
        at: int | None = None
        if quantity in given:
            at = vacuous_horizon(name, options.target, **{quantity: given[quantity]}, **rest)
        rows.append(
            {
                "name": name,
                "solve_for": quantity,
                "largest": float(largest) if np.isfinite(largest) else str(largest),
                "given": "" if quantity not in given else float(given[quantity]),
                "vacuous_from": ("never" if at is None else at) if quantity in given else "",
            }
        )
    head = {"horizon": options.horizon, "target": options.target}
    _print(rows, options.format, head)
    return 0


def _tree_rows(tree: Tree) -> tuple[Rows, dict[str, Any]]:
    found, truth = exact.summary(tree), exact.sup_error(tree)
    bounds = sorted(exact.bounds(tree), key=lambda b: -float(b.value))
    head: dict[str, Any] = {
        "horizon": tree.length,
        "vocabulary": tree.vocab,
        "sequences": tree.sequences,
        "exact sup |Error|": truth,
        "exact sup |L'|": exact.sup_surrogate(tree),
        "seq_kl": found.seq_kl,
        "seq_tv": found.seq_tv,
        "max_kl": found.max_kl,
        "max_tv": found.max_tv,
        "outside_mass": found.outside_mass,
    }
    return _ratios(bounds, truth), head


def _ratios(bounds: Sequence[Bound], truth: float) -> Rows:
    rows = []
    for b in bounds:
        value = float(b.value)
        plain = b.to_dict()
        rows.append(
            {
                "name": b.name,
                "value": plain["value"],
                "truth/bound": truth / value if value > 0 else 1.0,
                "rigorous": b.rigorous,
                "needs": plain["needs"],
                "source": b.source,
            }
        )
    return rows


def _product_rows(options: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    pair = BernoulliProduct(options.p, options.q, options.length)
    bounds = sorted(every_bound(options.length, **pair.known()), key=lambda b: -float(b.value))
    head = {
        "horizon": pair.length,
        "exact sup |Error|": pair.sup_error,
        "exact sup |L'|": pair.sup_surrogate,
        "seq_kl": pair.seq_kl,
        "seq_tv": pair.seq_tv,
        **pair.token,
    }
    return _ratios(bounds, pair.sup_error), head


def _markov_rows(options: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    pair = random_markov(options.seed, options.states, options.mismatch)
    found = pair.summary(options.length)
    final = np.eye(options.states)[0]
    v = pair.evaluate(options.length, final)
    bounds = sorted(every_bound(options.length, **found.known()), key=lambda b: -float(b.value))
    head = {
        "horizon": options.length,
        "states": options.states,
        "reward": "1 when the last state is 0",
        "J(rollout)": v.j_rollout,
        "J(train)": v.j_train,
        "surrogate L'": v.surrogate,
        "exact |Error|": abs(v.error),
        "seq_kl": found.seq_kl,
        "seq_tv at least": found.seq_tv_low,
        "seq_tv at most": found.seq_tv_high,
        **found.token,
    }
    return _ratios(bounds, abs(v.error)), head


def _rare_rows(options: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    truth = float(adversarial.rare_token_sup(options.length, options.eps))
    bounds = sorted(every_bound(options.length, max_tv=options.eps), key=lambda b: -float(b.value))
    head = {"horizon": options.length, "max_tv": options.eps, "exact sup |Error|": truth}
    return _ratios(bounds, truth), head


def _hazard_rows(options: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    t = options.length
    h, h_train = options.rollout_rate / t, options.train_rate / t
    truth = abs(float(adversarial.hazard_error(t, options.rollout_rate, options.train_rate)))
    pair = BernoulliProduct(h, h_train, t)
    bounds = sorted(every_bound(t, **pair.known()), key=lambda b: -float(b.value))
    head = {
        "horizon": t,
        "reward": "1 when no fatal token appears",
        "exact |Error|": truth,
        "exact sup |Error| over rewards": pair.sup_error,
        "seq_kl": pair.seq_kl,
    }
    return _ratios(bounds, truth), head


_TREES: dict[str, Callable[[argparse.Namespace], Tree]] = {
    "tree": lambda o: random_tree(
        o.seed,
        o.vocab,
        o.length,
        prompts=o.prompts,
        mismatch=o.mismatch,
        eos=o.eos,
        zero=o.zero,
        outside=o.outside,
    ),
    "routing-flip": lambda o: routing_flip(
        o.seed, o.vocab, o.length, flip_rate=o.flip_rate, flip_scale=o.flip_scale
    ),
    "amplification": lambda o: rare_token_amplification(
        o.seed, o.vocab, o.length, strength=o.strength, exponent=o.exponent
    ),
    "two-step": lambda o: adversarial.two_step_branch(o.branch, o.gain),
    "reverse-branch": lambda o: adversarial.reverse_branch(o.length),
    "search": lambda o: (
        adversarial.coordinate_search(o.length, delta=o.delta, sweeps=o.sweeps, seed=o.seed).tree
    ),
}
_OTHERS: dict[str, Callable[[argparse.Namespace], tuple[Rows, dict[str, Any]]]] = {
    "product": _product_rows,
    "markov": _markov_rows,
    "rare-token": _rare_rows,
    "hazard": _hazard_rows,
}
_DEFAULT_LENGTH = {"product": 4096, "markov": 4096, "rare-token": 1000, "hazard": 4096}


def _mdp(options: argparse.Namespace) -> int:
    if options.length is None:
        options.length = _DEFAULT_LENGTH.get(options.family, 4)
    if options.mismatch is None:
        options.mismatch = 0.01 if options.family == "markov" else 0.5
    if options.family in _TREES:
        tree = _TREES[options.family](options)
        rows, head = _tree_rows(tree)
        if options.family == "reverse-branch":
            wrong = float(exact.sequence_divergences(tree).kl_train_rollout)
            head["KL(train || rollout), which is no bound"] = wrong
            head["sup |Error| over it"] = exact.sup_error(tree) / wrong
    else:
        rows, head = _OTHERS[options.family](options)
    if options.format == "table":
        rows = [
            {**{k: row[k] for k in ("name", "value", "truth/bound")}, "needs": _short(row["needs"])}
            for row in rows
        ]
    _print(rows, options.format, {"family": options.family, **head})
    return 0


def _gradients(options: argparse.Namespace) -> int:
    tree = random_tree(options.seed, options.vocab, options.length, mismatch=options.mismatch)
    reward = (np.random.default_rng(options.seed).random(tree.sequences) < 0.5).astype(float)
    use = gradients.Settings(
        clip=options.clip,
        ratio_cap=options.ratio_cap,
        geo_low=options.geo_low,
        geo_high=options.geo_high,
        max_kl=options.max_kl,
    )
    found = gradients.estimators(tree, reward, use)
    rows: Rows = [
        {
            "estimator": name,
            "bias against grad J": m.bias_j,
            "bias against grad L": m.bias_surrogate,
            "variance": m.variance,
            "accepted": m.accepted,
        }
        for name, m in found.items()
    ]
    share, largest = gradients.ppo_leakage(tree, reward, options.clip, 0.5)
    flip = gradients.masked_gradient(tree, reward, options.max_kl)
    head = {
        "seed": options.seed,
        "norm of grad J": float(np.linalg.norm(gradients.grad_j(tree, reward))),
        "E[log rho_geo] = -KL per token": gradients.geometric_log_ratio(tree),
        "PPO leakage with baseline 0.5": share,
        "largest leaking ratio": largest,
        "a logit with opposite signs exists": flip.opposed,
        "most opposed logit, exact": flip.exact,
        "most opposed logit, masked": flip.masked,
        "exponent of Token-IS bias (rare token)": gradients.token_is_bias_growth(
            [64, 256, 1024, 4096], 1e-8
        )[1],
    }
    _print(rows, options.format, head)
    return 0


def _tables(options: argparse.Namespace) -> int:
    tables = all_tables(options.name)
    if options.format == "json":
        plain = [
            {
                "name": t.name,
                "title": t.title,
                "source": t.source,
                "rows": [
                    {
                        "label": r.label,
                        "theirs": r.theirs,
                        "ours": r.ours,
                        "agrees": r.agrees,
                        "note": r.note,
                    }
                    for r in t.rows
                ],
            }
            for t in tables
        ]
        print(json.dumps(plain, indent=2))
        return 0
    for i, table in enumerate(tables):
        rows: Rows = [
            {
                **({"table": table.name} if options.format == "csv" else {}),
                "quantity": r.label,
                "theirs": r.theirs,
                "ours": float(r.ours),
                "agrees": {True: "yes", False: "NO", None: ""}[r.agrees],
                "note": r.note,
            }
            for r in table.rows
        ]
        if options.format == "table":
            print(("\n" if i else "") + f"{table.name}: {table.title}  [{table.source}]")
        _print(rows, options.format)
    return 0


def _figures(options: argparse.Namespace) -> int:
    from theory.figures import draw

    for path in draw(options.out, names=options.only):
        print(path)
    return 0


def _selfcheck(options: argparse.Namespace) -> int:
    report = selfcheck(options.trees, options.seed)
    rows: Rows = [
        {
            "bound": name,
            "inside the support": float(report.largest_ratio["inside"].get(name, np.nan)),
            "leaving it": float(report.largest_ratio["outside"].get(name, np.nan)),
        }
        for name in CATALOGUE
        if name in report.largest_ratio["inside"] or name in report.largest_ratio["outside"]
    ]
    head = {
        "trees": f"{report.trees} inside the support, {report.trees} leaving it",
        "largest ratio": "exact sup |Error| / bound, at most 1",
        "largest gap between the error's identities": report.largest_identity_gap,
        "violations": len(report.violations),
    }
    if options.format == "json":
        head["sentences"] = list(report.violations)
    _print(rows, options.format, head)
    for sentence in report.violations:
        print(sentence, file=sys.stderr)
    return 1 if report.violations else 0


def _coverage(options: argparse.Namespace) -> int:
    found = coverage(
        options.batches, options.rollouts, options.alpha, options.seed, tuple(options.cases)
    )

    def share(count: int | None) -> float | str:
        return "unknown" if count is None else count / options.batches

    rows: Rows = [
        {
            "case": c.case,
            "certificate": c.certificate,
            "covers J(train) - J(rollout)": share(c.covered),
            "at least (95 %)": c.at_least,
            "covers its own limit": share(c.covered_limit),
            "certified": share(c.certified),
            "truth": c.gain,
            "limit": "unknown" if c.limit is None else c.limit,
            "mean lower bound": c.mean_lower_bound,
        }
        for c in found
    ]
    # A coverage below the stated one with certainty 1 - 1e-6, not by bad luck.
    failed = [
        f"{c.certificate} covers {c.covered} of {c.batches} batches of {c.case}, "
        f"stated {c.confidence:g}"
        for c in found
        if c.finite_sample and clopper_pearson(c.covered, c.batches, 1e-6).upper < c.confidence
    ]
    head = {
        "batches": options.batches,
        "rollouts per batch": options.rollouts,
        "stated confidence": 1 - options.alpha,
        "finite-sample certificates below it": len(failed),
    }
    _print(rows, options.format, head)
    for sentence in failed:
        print(sentence, file=sys.stderr)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """Build the argument parser.

    Sub-commands: bounds, invert, mdp, gradients, tables, figures, selfcheck, coverage.

    Source: none needed.

    Example:
        >>> parser().parse_args(["bounds", "--horizon", "8", "--max-kl", "0.1"]).horizon
        8
    """
    top = argparse.ArgumentParser(
        prog="python -m theory",
        description="Error bounds for the surrogate of LLM reinforcement learning, and exact MDPs.",
    )
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--format", choices=("table", "json", "csv"), default="table")
        return sub

    def quantities(sub: Any) -> None:
        for name, text in QUANTITIES.items():
            sub.add_argument(f"--{name.replace('_', '-')}", type=float, help=text)

    sub = add("bounds", _bounds, "Every bound that follows from the given divergences.")
    sub.add_argument("--horizon", type=int, required=True, help="T, largest number of tokens")
    quantities(sub)
    sub.add_argument(
        "--reward-range", type=float, nargs=2, default=(0.0, 1.0), metavar=("LOW", "HIGH")
    )

    sub = add("invert", _invert, "Largest divergence per bound for a target, and vacuous horizons.")
    sub.add_argument("--horizon", type=int, required=True)
    sub.add_argument("--target", type=float, default=1.0, help="largest acceptable bound")
    quantities(sub)

    sub = add("mdp", _mdp, "Exact values of a family and every bound beside the truth.")
    sub.add_argument("family", choices=[*_TREES, *_OTHERS])
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--vocab", type=int, default=3)
    sub.add_argument("--length", type=int, help="T (default 4 for trees)")
    sub.add_argument("--prompts", type=int, default=1)
    sub.add_argument(
        "--mismatch", type=float, help="sd of the logit difference (0.5; 0.01 for markov)"
    )
    sub.add_argument("--eos", action="store_true", help="token 0 ends the sequence")
    sub.add_argument("--zero", type=float, default=0.0, help="share of zero-probability tokens")
    sub.add_argument("--outside", type=float, default=0.0, help="share cut from the rollout only")
    sub.add_argument("--states", type=int, default=16)
    sub.add_argument("--p", type=float, default=0.5, help="product: rollout probability of a 1")
    sub.add_argument("--q", type=float, default=0.50707, help="product: train probability of a 1")
    sub.add_argument("--eps", type=float, default=1e-4, help="rare token: its train probability")
    sub.add_argument("--rollout-rate", type=float, default=1.0, help="hazard: a")
    sub.add_argument("--train-rate", type=float, default=1.5, help="hazard: a'")
    sub.add_argument("--flip-rate", type=float, default=0.05)
    sub.add_argument("--flip-scale", type=float, default=2.0)
    sub.add_argument("--strength", type=float, default=0.02)
    sub.add_argument("--exponent", type=float, default=0.5)
    sub.add_argument("--branch", type=float, default=1e-10)
    sub.add_argument("--gain", type=float, default=1e6)
    sub.add_argument("--delta", type=float, default=1e-3, help="search: KL of every context, nats")
    sub.add_argument("--sweeps", type=int, default=4)

    sub = add("gradients", _gradients, "Exact bias and variance of the gradient estimators.")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--vocab", type=int, default=3)
    sub.add_argument("--length", type=int, default=4)
    sub.add_argument("--mismatch", type=float, default=0.5)
    sub.add_argument("--clip", type=float, default=0.2)
    sub.add_argument("--ratio-cap", type=float, default=2.0)
    sub.add_argument("--geo-low", type=float, default=0.9)
    sub.add_argument("--geo-high", type=float, default=1.1)
    sub.add_argument("--max-kl", type=float, default=0.1)

    sub = add("tables", _tables, "Published tables recomputed: theirs, ours, and why they differ.")
    sub.add_argument("name", nargs="?", choices=list(TABLES))

    sub = add("figures", _figures, "Draw the figures.")
    sub.add_argument("--out", required=True, help="folder for the files")
    sub.add_argument("--only", nargs="*", help="names of the figures; default all")

    sub = add("selfcheck", _selfcheck, "Random trees against every rigorous bound.")
    sub.add_argument("--trees", type=int, default=200, help="per group")
    sub.add_argument("--seed", type=int, default=0)

    sub = add("coverage", _coverage, "How often certificates hold on MDPs with known improvement.")
    sub.add_argument("--batches", type=int, default=1000)
    sub.add_argument("--rollouts", type=int, default=1000, help="per batch")
    sub.add_argument("--alpha", type=float, default=0.05, help="failure probability that is stated")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--cases", nargs="+", default=tuple(CASES), help=f"of {', '.join(CASES)}")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns 0 on success, 1 when the self-check finds a violation or a certificate covers less than
    stated, 2 on bad input.

    Source: none needed.

    Example:
        >>> main(["bounds", "--horizon", "4096", "--seq-kl", "0.01", "--format", "csv"])
        ... # doctest: +ELLIPSIS
        name,value,rigorous,needs,source,assumes_support
        ...
        0
    """
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, ImportError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
