# SPDX-License-Identifier: Apache-2.0
"""token_divergence on a GPU, against other ways to get the same number and against the memory.

Every provider runs from a CUDA graph over as many input sets as do not fit into the L2 cache
together, one after the other in each round; times are those of events. The ceiling is a kernel that
reads the same two buffers and does nothing, in the same rounds. Percentages are of its rate.

`--dry` runs the same code on the CPU with tiny tensors: a rehearsal whose times mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import trm_ext as trm
from benchmarks import cuda_build, divergence, record
from trm_ext import _lib
from trm_ext.outputs import OUTPUTS, VALUES
from trm_ext.reference import token_divergence as reference

Form = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Tensor, Tensor]
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "bf16-fp32": (torch.bfloat16, torch.float32),
}
GATE = (8192, 151936)
VOCABULARIES = (32000, 50257, 128256, 151936, 262144)
ROWS = (1, 16, 128, 264, 1024, 8192)
GRID_PAIRS = 2**28  # per case of the grid over V
SEQUENCES = 16
SECTIONS = ("gates", "outputs", "vocabularies", "rows")
# (case, against, least ratio of rates), at the gate's shape in bf16.
TARGETS = (
    ("forward", "read", 0.88),
    ("forward+backward", "read", 0.80),
    ("forward", "torch.compile", 2.0),
    ("forward", "eager", 10.0),
)
MASK_SHARE = 0.03


class Machine:
    """Where the providers run and how a call is timed."""

    def __init__(self, dry: bool):
        self.dry = dry
        self.device = "cpu" if dry else "cuda"

    def size(self, rows: int, vocab: int) -> tuple[int, int]:
        """The shape itself, or one for the rehearsal."""
        return (min(rows, 8), min(vocab, 500)) if self.dry else (rows, vocab)

    @functools.cached_property
    def flush(self) -> Tensor:
        """Twice the L2 cache; writing it evicts everything else."""
        return torch.empty(2 * self.cache_bytes, dtype=torch.uint8, device=self.device)

    @functools.cached_property
    def pool(self) -> Any:
        """Memory of all graphs: nobody looks at the results of a replay, only at its time."""
        return torch.cuda.graph_pool_handle()

    @property
    def cache_bytes(self) -> int:
        return 2**14 if self.dry else torch.cuda.get_device_properties(0).L2_cache_size

    def free_bytes(self) -> int:
        if self.dry:
            return 2**33
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def graph(self, call: Callable[[], object]) -> tuple[Callable[[], object], bool]:
        """The call as a graph's replay where it can be captured; and whether it could."""
        if self.dry:
            return call, False
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                kept = call()
        except RuntimeError:
            torch.cuda.synchronize()
            return call, False

        def replay() -> object:
            graph.replay()
            return kept  # its memory belongs to the graph

        return replay, True

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call that finds the L2 cache full of something else."""
        if self.dry:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        self.flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def peak_bytes(self, call: Callable[[Tensor, Tensor], object], x: Tensor, y: Tensor) -> Any:
        """Most bytes allocated by a call beyond those before it; None where nobody can say."""
        if self.dry:
            return record.peak_bytes(lambda: call(x, y))
        self.free_bytes()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            call(x, y)
        except torch.OutOfMemoryError:
            return None
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def environment(self) -> dict[str, Any]:
        found = record.environment()
        if self.dry:
            return found | {"device": "rehearsal on the CPU: no figure means anything"}
        facts = torch.cuda.get_device_properties(0)
        query, smi = "driver_version,clocks.max.sm,clocks.max.mem,power.limit", "unknown"
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "-i", "0", f"--query-gpu={query}", "--format=csv,noheader"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            smi = done.stdout.strip()
        return found | {
            "device": facts.name,
            "compute_capability": f"{facts.major}.{facts.minor}",
            "multiprocessors": facts.multi_processor_count,
            "memory_bytes": facts.total_memory,
            "cache_bytes": facts.L2_cache_size,
            "cuda": torch.version.cuda,
            query: smi,
            "library": _lib.describe()["cuda"]["architectures"],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry", action="store_true", help="rehearse `--device cuda` on the CPU")


def run(arguments: argparse.Namespace) -> int:
    reason = None if arguments.dry else _lib.describe()["cuda"]["reason"]
    if reason is not None:
        print(f"divergence --device cuda: there is no CUDA device here, {reason}", file=sys.stderr)
        return 2
    machine = Machine(arguments.dry)
    rounds = 2 if arguments.dry else arguments.rounds
    sections = [name for name in SECTIONS if not arguments.only or name in arguments.only]
    environment = machine.environment()
    print(" | ".join(f"{key} {value}" for key, value in environment.items()))
    result: dict[str, Any] = {"environment": environment, "cases": [], "targets": []}
    for section in sections:
        cases = SECTION[section](machine, rounds)
        show(section, cases)
        result["cases"] += cases
        if section == "gates":
            result["targets"] = targets(cases, machine.dry)
        if arguments.out:  # after each section: a run that is cut short leaves what it had
            arguments.out.write_text(json.dumps(result, indent=1))
    return 0


def rows(machine: Machine, count: int, vocab: int, dtypes: str) -> Pair:
    """Logits of std 3 with mismatch noise 0.05, made where they are used."""
    x = torch.empty(count, vocab, dtype=DTYPES[dtypes][0], device=machine.device)
    y = torch.empty(count, vocab, dtype=DTYPES[dtypes][1], device=machine.device)
    step = max(1, 2**27 // max(vocab, 1))
    for a, b in zip(x.split(step), y.split(step), strict=True):
        a.normal_(std=3)
        b.copy_(a.float() + 0.05 * torch.randn(a.shape, device=machine.device))
    return x, y


def sets(machine: Machine, count: int, vocab: int, dtypes: str) -> list[Pair]:
    """As many inputs as it takes for none to be in the cache when its turn comes again."""
    size = count * vocab * sum(dtype.itemsize for dtype in DTYPES[dtypes])
    copies = max(1, min(64, -(-4 * machine.cache_bytes // max(size, 1))))
    return [rows(machine, count, vocab, dtypes) for _ in range(copies)]


def peers(machine: Machine) -> dict[str, Form]:
    """Other ways to write it, as far as they are installed."""
    compiled = functools.partial(torch.compile, dynamic=False)
    if machine.dry:
        compiled = functools.partial(compiled, backend="aot_eager")
    found: dict[str, Form] = {
        "eager": divergence.eager,
        "lse form": divergence.lse_form,
        "torch.compile": compiled(divergence.eager),
        "torch.compile lse": compiled(divergence.lse_form),
    }
    if not machine.dry:
        try:
            found["Liger"] = _liger()
        except Exception as reason:  # a peer that does not load here is no reason to stop
            print(f"no Liger: {reason}", file=sys.stderr)
    return found


def _liger() -> Form:
    from liger_kernel.transformers import LigerKLDIVLoss

    loss = LigerKLDIVLoss(reduction="none", log_target=True)

    def form(x: Tensor, y: Tensor) -> Tensor:
        return loss(torch.log_softmax(y.float(), -1), torch.log_softmax(x.float(), -1)).sum(-1)

    return form


def no_grad(form: Form) -> Callable[[Tensor, Tensor], object]:
    def call(x: Tensor, y: Tensor) -> object:
        with torch.no_grad():
            return form(x, y)

    return call


def with_gradient(form: Form) -> Callable[[Tensor, Tensor], object]:
    def call(x: Tensor, y: Tensor) -> object:
        leaf = y.detach().requires_grad_()
        return torch.autograd.grad(form(x, leaf).sum(), leaf)

    return call


@functools.cache
def _sweeps() -> ctypes.CDLL | str:
    """The ceiling's kernels, built here or beforehand; or why there are none."""
    source = Path(__file__).with_name("read_pair.cu")
    target = cuda_build.ROOT / "build/benchmarks/read_pair_cuda.so"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        if (reason := cuda_build.why_not()) is not None:
            return reason
        target.parent.mkdir(parents=True, exist_ok=True)
        codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in ("80", "90", "100", "120")]
        codes.append("-gencode=arch=compute_120,code=compute_120")
        options = ["-std=c++20", "-O3", "-shared", "-Xcompiler=-fPIC", "-cudart=static"]
        command = ["nvcc", *options, "-Werror=all-warnings", *codes, "-o", target, source]
        subprocess.run([str(word) for word in command], check=True)
    return ctypes.CDLL(str(target))


def prepare() -> int:
    """Builds what a benchmark on a machine without nvcc needs."""
    found = _sweeps()
    print(f"read_pair.cu: {found}" if isinstance(found, str) else "read_pair.cu: built")
    return 0


def ceilings(machine: Machine, pairs: Sequence[Pair]) -> dict[str, Callable[[Tensor, Tensor], Any]]:
    """read: both buffers; read+write: both and one written; copy: one to another, by torch."""
    x, y = pairs[0]
    out = torch.empty_like(y)

    def copy(a: Tensor, b: Tensor) -> object:
        return out.copy_(b)

    if machine.dry:
        return {"read": lambda a, b: (a.max(), b.max()), "copy": copy}
    library = _sweeps()
    if isinstance(library, str):
        print(f"no two-stream read ({library}): only the copy is measured", file=sys.stderr)
        return {"copy": copy}
    sink = torch.zeros(1, dtype=torch.int32, device=machine.device)
    each = min(x.numel() * x.element_size(), y.numel() * y.element_size()) // 16 * 16

    def sweep(name: str, target: Tensor, blocks: int) -> Callable[[Tensor, Tensor], Any]:
        function = getattr(library, name)
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

        def call(a: Tensor, b: Tensor) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            places = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, target)]
            size = ctypes.c_size_t(each)
            status = function(*places, size, blocks * multiprocessors, stream)
            if status != 0:
                raise RuntimeError(f"{name} failed with CUDA error {status}")

        return call

    found = {}
    for title, name, target in (
        ("read", "read_pair_cuda", sink),
        ("read+write", "read_pair_write_cuda", out),
    ):
        tried = {}
        for blocks in (2, 4, 8, 32):
            call = sweep(name, target, blocks)
            tried[blocks] = (statistics.median(measure(machine, call, pairs, 3)[0]), call)
        found[title] = min(tried.values(), key=lambda entry: entry[0])[1]
    return found | {"copy": copy}


def measure(
    machine: Machine, call: Callable[[Tensor, Tensor], object], pairs: Sequence[Pair], rounds: int
) -> tuple[list[float], bool]:
    """Seconds per pair of inputs, and whether it ran from a graph."""
    run, captured = machine.graph(lambda: [call(x, y) for x, y in pairs])
    machine.seconds(run)
    return [machine.seconds(run) / len(pairs) for _ in range(rounds)], captured


def case(
    machine: Machine,
    name: str,
    pairs: Sequence[Pair],
    rounds: int,
    forms: Mapping[str, Form],
    *,
    grad: bool = False,
) -> dict[str, Any]:
    """Interleaved times of the forms and of the ceilings on the same inputs."""
    x, y = pairs[0]
    calls = ceilings(machine, pairs)
    calls |= {n: (with_gradient if grad else no_grad)(form) for n, form in forms.items()}
    runs, graphs, failed = {}, {}, {}
    for provider, call in calls.items():
        try:
            runs[provider], graphs[provider] = machine.graph(
                lambda call=call: [call(a, b) for a, b in pairs]
            )
            machine.seconds(runs[provider])
        except Exception as reason:
            if provider == "ours":
                raise
            runs.pop(provider, None)
            failed[provider] = str(reason).splitlines()[0][:60]
            machine.free_bytes()
    seconds = interleaved(machine, runs, len(pairs), rounds)
    runs.clear()  # and with the graphs their memory, before peaks are measured
    sizes = [t.numel() * t.element_size() for t in (x, y)]
    moved = dict.fromkeys(forms, 2 * sum(sizes) + sizes[1] if grad else sum(sizes))
    moved |= {"read": 2 * min(sizes), "read+write": 3 * min(sizes), "copy": 2 * sizes[1]}
    return {
        "case": name,
        "shape": list(x.shape),
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in (x, y)],
        "sets": len(pairs),
        "pairs": x.numel(),
        "bytes": {provider: moved[provider] for provider in seconds},
        "seconds": seconds,
        "graph": graphs,
        "failed": failed,
        "relative_error": {n: error(form, x, y) for n, form in forms.items() if n in seconds},
        "peak_bytes": {n: machine.peak_bytes(calls[n], x, y) for n in forms if n in seconds},
    }


def interleaved(
    machine: Machine, runs: dict[str, Callable[[], object]], sets: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds per set of inputs, one call of each provider per round."""
    seconds: dict[str, list[float]] = {provider: [] for provider in runs}
    for _ in range(rounds):
        for provider, run in runs.items():
            seconds[provider].append(machine.seconds(run) / sets)
    return seconds


def error(form: Form, x: Tensor, y: Tensor) -> float:
    """Largest relative error of the first and last rows' KL."""
    few = sorted({0, 1, x.shape[0] - 1} & set(range(x.shape[0])))
    with torch.no_grad():
        got = form(x[few].clone(), y[few].clone()).cpu().double()
    one, other = x[few].cpu(), y[few].cpu()
    want = reference(one, other, None, None, None, None, x.shape[-1], 1)[0][0]
    return float(((got - want) / want).abs().max())


def gates(machine: Machine, rounds: int) -> list[dict[str, Any]]:
    """The shape of the targets, with peers; and the mask's share."""
    count, vocab = machine.size(*GATE)
    # Two inputs and a gradient in 16 bits, and some ten float32 tensors of an eager peer.
    most = machine.free_bytes() // (vocab * 50)
    count = max(1, min(count, most))
    forms = {"ours": divergence.ours} | peers(machine)
    found = []
    for dtypes in ("bf16", "fp32"):
        pairs = [rows(machine, count, vocab, dtypes)]
        for name, grad in (("forward", False), ("forward+backward", True)):
            if dtypes == "fp32":
                forms = {"ours": divergence.ours}
            elif grad:
                forms.pop("torch.compile lse")
            found.append(case(machine, f"{name} {dtypes}", pairs, rounds, forms, grad=grad))
        if dtypes == "bf16":
            found.append(mask(machine, pairs, rounds))
        del pairs
        machine.free_bytes()
    return found


def mask(machine: Machine, pairs: Sequence[Pair], rounds: int) -> dict[str, Any]:
    """The verdict alone from per-token KLs, and logits to verdict in one."""
    tokens = pairs[0][0].shape[0]
    lengths = torch.full((SEQUENCES,), tokens // SEQUENCES)
    lengths[-1] += tokens - int(lengths.sum())
    layout = trm.SequenceLayout.from_lengths(lengths.to(machine.device))

    def verdict(x: Tensor, y: Tensor) -> Tensor:
        return trm.max_kl_verdict(kl, layout, max_kl=0.02).keep

    def whole(x: Tensor, y: Tensor) -> Tensor:
        return trm.trust_region_mask(x, y, layout, max_kl=0.02).keep

    kl = divergence.ours(*pairs[0])
    calls = {"ours": no_grad(divergence.ours), "verdict": verdict, "mask": whole}
    runs = {n: machine.graph(lambda call=call: call(*pairs[0])) for n, call in calls.items()}
    replays = {name: run for name, (run, _) in runs.items()}
    interleaved(machine, replays, 1, 1)
    seconds = interleaved(machine, replays, 1, rounds)
    nothing: dict[str, Any] = {}
    return {
        "case": "sequence mask bf16",
        "shape": list(pairs[0][0].shape),
        "pairs": pairs[0][0].numel(),
        "bytes": nothing,
        "seconds": seconds,
        "graph": {name: captured for name, (_, captured) in runs.items()},
        "failed": nothing,
        "relative_error": nothing,
        "peak_bytes": nothing,
    }


def outputs(machine: Machine, rounds: int) -> list[dict[str, Any]]:
    """What further outputs and temperatures add to the plain KL."""
    count, vocab = machine.size(GATE[0] // 4, GATE[1])
    pairs = [rows(machine, count, vocab, "bf16")]
    tokens = torch.zeros(count, dtype=torch.int64, device=machine.device)
    warm = torch.full((count,), 0.7, dtype=torch.float64, device=machine.device)

    def asking(names: Sequence[str], **arguments: Any) -> Form:
        def form(x: Tensor, y: Tensor) -> Tensor:
            kl = trm.token_divergence(x, y, tokens=tokens[: len(x)], outputs=names, **arguments).kl
            assert kl is not None
            return kl

        return form

    def scaled(x: Tensor, y: Tensor) -> Tensor:
        some = warm[: len(x)]
        kl = trm.token_divergence(x, y, rollout_temperature=some, train_temperature=some).kl
        assert kl is not None
        return kl

    forms = {
        "ours": divergence.ours,
        "and log_ratio": asking(("kl", "log_ratio")),
        "and kl_train_rollout": asking(("kl", "kl_train_rollout")),
        "and entropies": asking(("kl", "entropy_rollout", "entropy_train")),
        "all values": asking(VALUES),
    }
    found = [case(machine, "outputs bf16", pairs, rounds, forms)]
    backward = {"ours": divergence.ours, "all values": asking(VALUES)}
    found.append(case(machine, "outputs forward+backward bf16", pairs, rounds, backward, grad=True))
    diagnostics = {"ours": divergence.ours, "all outputs": asking(OUTPUTS)}
    found.append(case(machine, "second sweep bf16", pairs, rounds, diagnostics))
    # Its KL is another one: no error against the plain one.
    temperatures = case(machine, "temperatures bf16", pairs, rounds, {"ours": scaled})
    return [*found, temperatures | {"relative_error": {}}]


def vocabularies(machine: Machine, rounds: int) -> list[dict[str, Any]]:
    found = []
    for dtypes in DTYPES:
        for vocabulary in VOCABULARIES:
            count, vocab = machine.size(max(1, GRID_PAIRS // vocabulary), vocabulary)
            pairs = sets(machine, count, vocab, dtypes)
            for grad in (False, True):
                name = f"V={vocabulary} {dtypes}" + (" forward+backward" if grad else "")
                forms = {"ours": divergence.ours}
                found.append(case(machine, name, pairs, rounds, forms, grad=grad))
            del pairs
    return found


def few_rows(machine: Machine, rounds: int) -> list[dict[str, Any]]:
    """From one row, split over the whole GPU, to many."""
    found = []
    for number in ROWS:
        count, vocab = machine.size(number, GATE[1])
        pairs = sets(machine, count, vocab, "bf16")
        for grad in (False, True):
            name = f"N={number} bf16" + (" forward+backward" if grad else "")
            forms = {"ours": divergence.ours}
            found.append(case(machine, name, pairs, rounds, forms, grad=grad))
        del pairs
    return found


SECTION: dict[str, Callable[[Machine, int], list[dict[str, Any]]]] = {
    "gates": gates,
    "outputs": outputs,
    "vocabularies": vocabularies,
    "rows": few_rows,
}


def rate(found: dict[str, Any], provider: str) -> float:
    """Bytes per second at the median."""
    median = statistics.median(found["seconds"][provider])
    return float(found["bytes"][provider] / median) if median else 0.0


def show(section: str, cases: list[dict[str, Any]]) -> None:
    header = ["case | provider", "shape", "ms", "spread", "TB/s", "% of read", "max rel err"]
    header += ["peak MiB", "graph"]
    lines = []
    for found in cases:
        for provider, samples in found["seconds"].items():
            sized = provider in found["bytes"]
            share = sized and "read" in found["seconds"]
            wrong = found["relative_error"].get(provider)
            peak = found["peak_bytes"].get(provider)
            lines.append(
                [
                    f"{found['case']} | {provider}",
                    "x".join(map(str, found["shape"])),
                    f"{1e3 * statistics.median(samples):.3f}",
                    f"{100 * record.spread(samples):.0f} %",
                    f"{rate(found, provider) / 1e12:.3f}" if sized else "",
                    f"{100 * rate(found, provider) / rate(found, 'read'):.0f}" if share else "",
                    "" if wrong is None else f"{wrong:.1e}",
                    "" if peak is None else f"{peak / 2**20:.0f}",
                    "yes" if found["graph"].get(provider) else "no",
                ]
            )
        for provider, reason in found["failed"].items():
            blank = [""] * (len(header) - 2)
            lines.append([f"{found['case']} | {provider}", reason, *blank])
    print(f"\n{section}")
    record.table(header, lines, sys.stdout)
    sys.stdout.flush()


def targets(cases: list[dict[str, Any]], dry: bool) -> list[dict[str, Any]]:
    """The ratios that we aim at, from medians of paired rounds; nothing fails if one is missed."""
    by_name = {found["case"]: found for found in cases}
    found: list[dict[str, Any]] = []
    for name, against, least in TARGETS:
        one = by_name[f"{name} bf16"]
        if not {"ours", against} <= one["seconds"].keys():
            found.append({"target": f"{name} vs {against}", "wanted": least, "ratio": None})
            continue
        ratio = record.paired_ratio(one["seconds"], against, "ours")
        if against == "read":
            ratio *= one["bytes"]["ours"] / one["bytes"]["read"]
        found.append({"target": f"{name} vs {against}", "wanted": least, "ratio": ratio})
    masks = by_name["sequence mask bf16"]["seconds"]
    share = record.paired_ratio(masks, "verdict", "ours")
    found.append({"target": "verdict's share of the forward", "most": MASK_SHARE, "ratio": share})
    lines = []
    for entry in found:
        ratio, least, most = entry["ratio"], entry.get("wanted"), entry.get("most")
        wanted = f">= {least}" if least is not None else f"< {most}"
        if ratio is None:
            verdict, text = "not measured", "-"
        else:
            met = ratio >= least if least is not None else ratio < most
            verdict, text = ("met" if met else "MISSED"), f"{ratio:.3f}"
        verdict = "rehearsal" if dry else verdict
        entry["verdict"] = verdict
        lines.append([entry["target"], text, wanted, verdict])
    print("\ntargets")
    record.table(["target", "ratio", "wanted", ""], lines, sys.stdout)
    return found
