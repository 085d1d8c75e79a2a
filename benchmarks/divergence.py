# SPDX-License-Identifier: Apache-2.0
"""token_divergence against other ways to get the same number, and against reading the memory.

Bytes per pair: 2 x the size of a stored logit forward; the gradient adds the same reads and one
write. The ceiling is a two-stream read of the same buffers with the same threads, interleaved.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import trm_ext as trm
from benchmarks import record
from trm_ext import _lib
from trm_ext.reference import token_divergence as reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCABULARIES = (32000, 49152, 128256, 151936, 262144)
GATE_VOCABULARY, GATE_ROWS = 151936, 256
# (lines ahead, cache that they go to): what the ceiling tries
PREFETCHES = ((0, 1), (8, 1), (16, 1), (32, 1), (64, 1), (32, 2), (40, 2), (48, 2))
# Eager forms with gradients have rounds of their own: they last seconds, in which a virtual machine
# takes back the memory of the last gradient, and every provider's next one waits for it.
EAGER = ("eager", "lse form")
COMPILED = ("torch.compile", "torch.compile lse")
KINDS = (
    "near",
    "far1",
    "far20",
    "far50",
    "remote1",
    "remote20",
    "top-p",
    "few",
    "top-k",
    "half",
    "gaps",
    "truncated",
    "masked",
    "lacks",
    "own",
    "own-finite",
    "constrained",
    "constrained-rollout",
    "ways1",
    "unrelated",
    "unrelated4",
    "unrelated6",
)
MIXES = ("top-p far20", "half far20", "half remote20", "gaps far20", "lacks far20")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="also write the result as JSON")
    parser.add_argument("--only", nargs="*", help="sections: gates, vocabularies, ...")
    parser.add_argument("--pairs", type=Path, nargs="*", default=[], help="rollout-pair files")


def run(arguments: argparse.Namespace) -> int:
    sections = arguments.only or ["gates", "kinds", "vocabularies", "scaling", "recorded"]
    environment = record.environment()
    print(" | ".join(f"{key} {value}" for key, value in environment.items()))
    cases: list[dict[str, Any]] = []
    rounds = arguments.rounds
    if "gates" in sections:
        for dtype in ("fp32", "bf16"):
            x, y = rows("near", GATE_ROWS, GATE_VOCABULARY, dtype)
            cases.append(measure(f"forward {dtype}", x, y, rounds, peers=COMPILED + EAGER))
            both = f"forward+backward {dtype}"
            cases.append(measure(both, x, y, rounds, peers=COMPILED, grad=True))
            cases.append(measure(f"{both}, eager", x, y, rounds, peers=EAGER, grad=True))
        show(cases)
        gates(cases)
    if "kinds" in sections:
        kinds(rounds)
    if "vocabularies" in sections:
        sizes = []
        for dtype in ("fp32", "bf16"):
            for vocab in VOCABULARIES:
                x, y = rows("near", 2**25 // vocab, vocab, dtype)
                sizes.append(measure(f"V={vocab} {dtype}", x, y, rounds, sets=True))
                both = f"V={vocab} {dtype} forward+backward"
                sizes.append(measure(both, x, y, rounds, grad=True))
        show(sizes)
        cases += sizes
    if "scaling" in sections:
        scaling(rounds)
    if "recorded" in sections and arguments.pairs:
        real = [measure(path.parent.name, *recorded(path), rounds) for path in arguments.pairs]
        show(real)
        cases += real
        recorded_kinds(arguments.pairs, rounds)
    if arguments.out:
        arguments.out.write_text(json.dumps({"environment": environment, "cases": cases}, indent=1))
    return 0


def rows(kind: str, count: int, vocab: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Logits of std 3 with mismatch noise 0.05, and columns apart from that.

    far: by 1/2 to some 4 nats; remote: by 9 to 13; ways: by 17 to 20, either way; top-p, few, top-k
    and half: 90, 99, 99.9 and 50 % of the rollout -inf; gaps and truncated: 10 and 90 % of both
    sides -inf; masked: half of the rollout -1e4; lacks: 10 % of the train side -inf, so that the KL
    is infinite; own: 10 % of each side -inf where the other is not; own-finite: 1 % of each side
    -1e4 likewise; constrained: all but 8 columns the lowest number, on both sides or one;
    unrelated: the logits of another policy, unrelated4 and 6 both of std 4 and 6. A mix has 20 % of
    other columns apart, too.
    """
    kind, *mixed = kind.split()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, vocab, generator=generator) * 3
    noise = torch.randn(count, vocab, generator=generator)
    shares = {"far1": 0.01, "far20": 0.2, "far50": 0.5, "remote1": 0.01, "remote20": 0.2}
    shares |= {"ways1": 0.01, "top-p": 0.9, "few": 0.99, "top-k": 0.999, "half": 0.5, "gaps": 0.1}
    shares |= {"truncated": 0.9, "masked": 0.5, "lacks": 0.1, "own": 0.1, "own-finite": 0.01}
    chosen = torch.rand(count, vocab, generator=generator) < shares.get(kind, 0.0)
    y = x + 0.05 * noise
    steps = {"far": -noise.sign() * (0.5 + noise.abs()), "remote": 9 + noise.abs()}
    steps["ways"] = noise.sign() * (17 + noise.abs())
    if mixed:
        apart = torch.rand(count, vocab, generator=generator) < 0.2
        y = torch.where(apart, x - steps[mixed[0].rstrip("0123456789")], y)
    if (step := steps.get(kind.rstrip("0123456789"))) is not None:
        y = torch.where(chosen, x - step, y)
    elif kind in ("masked", "own-finite"):
        x = x.masked_fill(chosen, -1e4)
    elif kind.startswith("constrained"):
        allowed = torch.randint(vocab, (8,), generator=generator)
        lowest = torch.full_like(x, torch.finfo(DTYPES[dtype]).min)
        x = lowest.index_copy(1, allowed, x[:, allowed])
        y = y if kind.endswith("rollout") else lowest.index_copy(1, allowed, y[:, allowed])
    elif kind.startswith("unrelated"):
        std = int(kind[-1]) if kind[-1].isdigit() else 3
        x, y = x * (std / 3), std * noise
    elif kind not in ("near", "lacks"):
        x = x.masked_fill(chosen, -float("inf"))
    if kind in ("gaps", "truncated", "lacks"):
        y = y.masked_fill(chosen, -float("inf"))
    elif kind in ("own", "own-finite"):
        low = -float("inf") if kind == "own" else -1e4
        y = y.masked_fill(chosen.roll(1, -1) & ~chosen, low)
    return x.to(DTYPES[dtype]), y.to(DTYPES[dtype])


def recorded(path: Path) -> tuple[Tensor, Tensor]:
    """Real logits of both engines, from a rollout-pair file."""
    from trm_ext.io import RolloutPairReader

    with RolloutPairReader(path) as pair:
        return pair.rows(0, pair.num_tokens)


def eager(x: Tensor, y: Tensor) -> Tensor:
    """What one writes without a kernel."""
    p, q = torch.log_softmax(x.float(), -1), torch.log_softmax(y.float(), -1)
    return torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)


def lse_form(x: Tensor, y: Tensor) -> Tensor:
    """E[x - y] - lse(x) + lse(y): one pass fewer, one cancellation more."""
    x, y = x.float(), y.float()
    lse_x, lse_y = torch.logsumexp(x, -1), torch.logsumexp(y, -1)
    return ((x - lse_x[..., None]).exp() * (x - y)).sum(-1) - lse_x + lse_y


def ours(x: Tensor, y: Tensor) -> Tensor:
    kl = trm.token_divergence(x, y).kl
    assert kl is not None
    return kl


def measure(
    name: str,
    x: Tensor,
    y: Tensor,
    rounds: int,
    *,
    peers: tuple[str, ...] = (),
    sets: bool = False,
    grad: bool = False,
) -> dict[str, Any]:
    """Times of ours, the two-stream read, and on request peers or every instruction set."""
    forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ours": ours}
    every = {
        "eager": eager,
        "lse form": lse_form,
        "torch.compile": torch.compile(eager, dynamic=False),
        "torch.compile lse": torch.compile(lse_form, dynamic=False),
    }
    forms |= {peer: every[peer] for peer in peers}
    providers: dict[str, Callable[[], object]] = {"read": two_stream_read(x, y)}
    for form_name, form in forms.items():
        providers[form_name] = with_gradient(form, x, y) if grad else no_grad(form, x, y)
    if sets:
        for capability in _lib.CPU_CAPABILITIES[:-1]:
            providers[capability] = with_capability(capability, providers["ours"])
    seconds = record.interleaved(providers, rounds)
    few = slice(0, min(4, len(x)))
    want = reference(x[few], y[few], None, None, None, None, x.shape[-1], 1)[0][0]
    errors = {}
    for form_name, form in forms.items():
        with torch.no_grad():
            got = form(x[few], y[few]).double()
        errors[form_name] = float(((got - want) / want).abs().max())
    return {
        "case": name,
        "shape": list(x.shape),
        "pairs": x.numel(),
        "bytes": x.numel() * x.element_size() * (5 if grad else 2),
        "read_bytes": 2 * x.numel() * x.element_size(),
        "seconds": seconds,
        "relative_error": errors,
        "peak_bytes": {form: record.peak_bytes(providers[form]) for form in forms},
    }


def no_grad(form: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return form(x, y)

    return call


def with_gradient(
    form: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor
) -> Callable[[], object]:
    leaf = y.detach().requires_grad_()
    upstream = torch.ones(len(x))

    def call() -> object:
        return torch.autograd.grad(form(x, leaf), leaf, upstream)

    return call


def with_capability(name: str, call: Callable[[], object]) -> Callable[[], object]:
    def forced() -> object:
        _lib.force_cpu_capability(name)
        try:
            return call()
        finally:
            _lib.force_cpu_capability(None)

    return forced


def two_stream_read(x: Tensor, y: Tensor) -> Callable[[], object]:
    library = _read_library()
    size = x.numel() * x.element_size()
    pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())

    def read(ahead: int, cache: int) -> Callable[[], object]:
        threads = torch.get_num_threads()
        arguments = (*pointers, ctypes.c_size_t(size), threads, ctypes.c_size_t(ahead), cache)
        return lambda: library.read_pair(*arguments)

    # The ceiling is the best prefetch on these very buffers.
    reads = {str(prefetch): read(*prefetch) for prefetch in PREFETCHES}
    tried = record.interleaved(reads, 3)
    return reads[min(tried, key=lambda prefetch: min(tried[prefetch]))]


def _read_library() -> ctypes.CDLL:
    target = Path(tempfile.gettempdir()) / f"trm-read-pair-{os.getuid()}.so"
    source = Path(__file__).with_name("read_pair.cpp")
    flags = ["-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread", "-Wno-psabi"]
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def rate(case: dict[str, Any], provider: str) -> float:
    """Gpair/s at the median."""
    return float(case["pairs"] / statistics.median(case["seconds"][provider]) / 1e9)


def show(cases: list[dict[str, Any]]) -> None:
    header = [
        "case | provider",
        "Gpair/s",
        "GB/s",
        "% of read",
        "spread",
        "max rel err",
        "peak MiB",
    ]
    table = []
    for case in cases:
        for name, samples in case["seconds"].items():
            median = statistics.median(samples)
            error = case["relative_error"].get(name)
            peak = case["peak_bytes"].get(name)
            line = [
                f"{case['case']} | {name}",
                f"{rate(case, name):.3f}",
                f"{case['read_bytes' if name == 'read' else 'bytes'] / median / 1e9:.2f}",
                f"{100 * record.paired_ratio(case['seconds'], 'read', name):.0f}",
                f"{100 * record.spread(samples):.0f} %",
                "" if error is None else f"{error:.1e}",
                "" if peak is None else f"{peak / 2**20:.0f}",
            ]
            table.append(line)
    print()
    record.table(header, table, sys.stdout)


def gates(cases: list[dict[str, Any]]) -> None:
    """The ratios that this project promises, each from paired rounds of one run."""
    forward = {case["case"]: case["seconds"] for case in cases}
    noisy = record.spread(forward["forward fp32"]["read"]) > 0.2
    compile_gate = 3.5 if noisy else 4.5
    wanted = [
        ("forward fp32", "read", 0.85),
        ("forward fp32", "eager", 30.0),
        ("forward fp32", "torch.compile", compile_gate),
        ("forward bf16", "torch.compile", 4.0),
        ("forward bf16", "eager", 35.0),
        ("forward+backward fp32", "torch.compile", 3.0),
        ("forward+backward bf16", "torch.compile", 3.0),
    ]
    print(f"\ngates (read spread {'above' if noisy else 'within'} 20 %)")
    lines = []
    for case, peer, least in wanted:
        ratio = record.paired_ratio(forward[case], peer, "ours")
        verdict = "met" if ratio >= least else "MISSED"
        lines.append([f"{case} vs {peer}", f"{ratio:.2f}", f">= {least}", verdict])
    record.table(["gate", "ratio", "wanted", ""], lines, sys.stdout)


def kinds(rounds: int) -> None:
    """Rates by kind of row, relative to rows of near tokens."""
    print("\nkinds of rows, V = 151936 (wanted: any mix >= 0.65 of near)")
    lines = []
    for dtype in ("fp32", "bf16"):
        pairs = {kind: rows(kind, 48, GATE_VOCABULARY, dtype) for kind in KINDS + MIXES}
        lines += side_by_side(pairs, dtype, rounds)
    record.table(["case", "Gpair/s", "of near"], lines, sys.stdout)
    x, y = rows("near", 48, GATE_VOCABULARY, "fp32")
    late = torch.arange(len(x)) >= len(x) // 2
    calls = {
        "all rows": no_grad(ours, x, y),
        "half of them masked": lambda: trm.token_divergence(x, y, token_mask=late),
    }
    seconds = record.interleaved(calls, 3 * rounds)
    share = 1 / record.paired_ratio(seconds, *calls)
    print(f"the first half of the rows masked, fp32: {share:.2f} of the time of all rows")


def recorded_kinds(paths: list[Path], rounds: int) -> None:
    """Rates of real rows, as stored and rounded to bf16, relative to rows of near tokens."""
    print("\nrecorded rows (wanted: >= 0.65 of near)")
    lines = []
    for dtype in ("fp32", "bf16"):
        pairs = {}
        for path in paths:
            x, y = (logits.to(DTYPES[dtype], copy=True) for logits in recorded(path))
            pairs.setdefault("near", rows("near", *x.shape, dtype))
            pairs[path.parent.name] = x, y
        lines += side_by_side(pairs, dtype, rounds)
    record.table(["case", "Gpair/s", "of near"], lines, sys.stdout)


def side_by_side(
    pairs: dict[str, tuple[Tensor, Tensor]], dtype: str, rounds: int
) -> list[list[str]]:
    """One call of each pair per round: rates, and pairs per second relative to the near rows'."""
    seconds = record.interleaved({k: no_grad(ours, *p) for k, p in pairs.items()}, 3 * rounds)
    lines = []
    for kind, (x, _) in pairs.items():
        work = x.numel() / pairs["near"][0].numel()
        rate = x.numel() / statistics.median(seconds[kind]) / 1e9
        ratio = work * record.paired_ratio(seconds, "near", kind)
        lines.append([f"{kind} {dtype}", f"{rate:.3f}", f"{ratio:.2f}"])
    return lines


def scaling(rounds: int) -> None:
    """Seconds over N and over V, and how far they lie from a line through the origin."""
    print("\ncost over N and V, fp32: seconds = c N V")
    sizes = [(64, 65536), (128, 65536), (256, 65536), (64, 131072), (64, 262144)]
    pairs = {f"N={n} V={v}": rows("near", n, v, "fp32") for n, v in sizes}
    calls = {name: no_grad(ours, *pair) for name, pair in pairs.items()}
    seconds = record.interleaved(calls, rounds)
    work = {name: x.numel() for name, (x, _) in pairs.items()}
    times = {name: statistics.median(samples) for name, samples in seconds.items()}
    # The mean is the least-squares fit of seconds per pair.
    slope = statistics.fmean(times[name] / work[name] for name in pairs)
    lines = [
        [
            name,
            f"{times[name] / work[name] * 1e9:.3f}",
            f"{100 * (times[name] / work[name] / slope - 1):+.1f} %",
            f"{100 * record.spread(seconds[name]):.0f} %",
        ]
        for name in pairs
    ]
    record.table(["case", "ns/pair", "from the fit", "spread"], lines, sys.stdout)
    print(f"fit: {slope * 1e9:.3f} ns per pair")
