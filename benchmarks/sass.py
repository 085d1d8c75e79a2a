# SPDX-License-Identifier: Apache-2.0
"""Reads compiled kernels back: the hot loop, its near path, and what that costs on which GPU.

A streaming kernel's hot loop is the innermost loop with 128-bit global loads (64-bit ones for the
narrower side of a mixed pair). Its near path is the way round that executes all loads and stores of
such width and at least one exponential per pair of logits, enters no loop inside, and has the
fewest exponentials, then instructions: far tokens take two exponentials, and frame moves are
branches beside it. Instructions that are predicated off count, since they are issued. Where one
condition is tested twice the figure is a lower bound.

Predictions are arithmetic from public peaks, never a measurement.
"""

from __future__ import annotations

import argparse
import heapq
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks import cuda_build
from trm_ext import _lib

DOCUMENT = cuda_build.ROOT / "docs" / "cuda_performance.md"
STREAMING = r"stream_\w+_kernel<"  # kernels whose hot loop is tabled
BYTES = {"float": 4, "double": 8, "BFloat16": 2, "Float16": 2}
TYPE_NAMES = {"float": "fp32", "double": "fp64", "BFloat16": "bf16", "Float16": "fp16"}
NOT_EXECUTED = ("NOP",)


@dataclass(frozen=True)
class Device:
    """Public figures of one GPU; rates are lanes per clock and multiprocessor."""

    name: str
    architecture: str
    multiprocessors: int
    gigahertz: float
    terabytes: float  # DRAM peak per second
    fp32: int

    def seconds_per_pair(self, cost: Mapping[str, float]) -> dict[str, float]:
        """Time of one pair of logits on the whole GPU, by what would be its only limit."""
        rates = {"issue": 128, "fp32": self.fp32, "alu": 64, "special": 16}
        clocks = self.multiprocessors * self.gigahertz * 1e9
        found = {name: cost[name] / (rate * clocks) for name, rate in rates.items()}
        return found | {"memory": cost["bytes"] / (ATTAINABLE * self.terabytes * 1e12)}


ATTAINABLE = 0.9  # of the DRAM peak, by a kernel that does nothing but read
DEVICES = (
    Device("A100", "8.0", 108, 1.41, 2.04, 64),
    Device("H100", "9.0", 132, 1.755, 3.35, 128),
    Device("H200", "9.0", 132, 1.755, 4.8, 128),
    Device("B200", "10.0", 148, 1.9, 8.0, 128),
)


@dataclass(frozen=True)
class Instruction:
    """One line of a listing."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def mnemonic(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> int | None:
        """Address that a branch names."""
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(found[1], 16) if found else None

    @property
    def width(self) -> int:
        """Bytes per thread that a load or store moves."""
        found = re.search(r"\.(?:[US]?(8|16)|(32|64|128|256))(?=\.|$)", self.opcode)
        return int(found[1] or found[2]) // 8 if found else 4

    def __str__(self) -> str:
        return f"{self.address:05x} {self.predicate:>5} {self.opcode} {self.operands}"


@dataclass(frozen=True)
class Function:
    """A kernel's machine code; ``name`` is demangled, without parameters."""

    name: str
    instructions: tuple[Instruction, ...]


_BRANCHES = ("BRA", "JMP", "CALL", "BSSY")
Graph = dict[int, tuple[tuple[Instruction, ...], tuple[int, ...]]]  # block -> its code, successors

_LINE = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[T\d]\d?)\s+)?([A-Z][A-Z0-9_.a-z]*)\s*([^;]*?)\s*;"
)


def parse(listing: str) -> list[Function]:
    """Functions of a listing as `cuobjdump -sass` prints it."""
    found: list[tuple[str, list[Instruction]]] = []
    for line in listing.splitlines():
        if header := re.match(r"\s*Function : (\S+)", line):
            found.append((header[1], []))
        elif found and (code := _LINE.match(line)):
            found[-1][1].append(Instruction(int(code[1], 16), code[2] or "", code[3], code[4]))
    names = cuda_build.demangle([name for name, _ in found])
    return [Function(name, tuple(code)) for name, (_, code) in zip(names, found, strict=True)]


def why_not() -> str | None:
    """The reason why nothing can be disassembled here, or None."""
    for name in ("cuobjdump", "nvdisasm"):
        if cuda_build.tool(name) is None:
            return f"no {name}: install nvidia-cuda-{name}"
    return None


@cache
def disassemble(binary: Path, architecture: str) -> list[Function]:
    """Kernels for one architecture such as 9.0, of a cubin or a library."""
    number = architecture.replace(".", "")
    done = subprocess.run(
        [str(cuda_build.tool("cuobjdump")), "-sass", "-arch", f"sm_{number}", str(binary)],
        env={**os.environ, "NVDISASM_PATH": str(cuda_build.tool("nvdisasm"))},
        capture_output=True,
        text=True,
        check=True,
    )
    return parse(done.stdout)


def graph(function: Function) -> Graph:
    """Basic blocks by the address of their first instruction.

    A call may return to the next instruction or, as sm_80 leaves loops, not. A barrier's end
    continues where its start says. Indirect branches have no successors: a loop round one is not
    seen.
    """
    code = function.instructions
    index = {instruction.address: i for i, instruction in enumerate(code)}
    barriers: dict[str, int] = {}
    after: list[tuple[int, ...]] = []
    for i, instruction in enumerate(code):
        following = (code[i + 1].address,) if i + 1 < len(code) else ()
        name = instruction.mnemonic
        target = instruction.target if name in _BRANCHES else None
        if name == "BSSY" and target is not None:
            barriers[instruction.operands.split(",")[0].strip()] = target
        conditional = instruction.predicate not in ("", "@PT", "@!UPT") or "," in (
            instruction.operands
        )
        if name in ("BRA", "JMP") and target in index:
            after.append((*following, target) if conditional else (target,))
        elif name == "CALL" and target in index:
            after.append((*following, target))
        elif name == "BSYNC":
            end = barriers.get(instruction.operands.strip())
            after.append((end,) if end in index else following)
        elif name in ("EXIT", "RET", "BRX", "JMX", "KILL", "BPT", "BRA", "JMP"):
            after.append(following if instruction.predicate else ())
        else:
            after.append(following)
    starts = {code[0].address} if code else set()
    for i, successors in enumerate(after):
        following = (code[i + 1].address,) if i + 1 < len(code) else ()
        if successors != following:
            starts.update(successors, following)
    result: Graph = {}
    begin = 0
    for i in range(len(code)):
        if i + 1 == len(code) or code[i + 1].address in starts:
            result[code[begin].address] = (code[begin : i + 1], after[i])
            begin = i + 1
    return result


def loops(blocks: Graph) -> list[tuple[int, frozenset[int]]]:
    """Natural loops: header and blocks. Back edges of one header make one loop."""
    entry = min(blocks)
    order, seen, stack = [], {entry}, [(entry, iter(blocks[entry][1]))]
    while stack:
        node, rest = stack[-1]
        for successor in rest:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(blocks[successor][1])))
                break
        else:
            order.append(node)
            stack.pop()
    order.reverse()
    before: dict[int, list[int]] = {node: [] for node in order}
    for node in order:
        for successor in blocks[node][1]:
            before[successor].append(node)
    dominators = {node: set(order) for node in order}
    dominators[entry] = {entry}
    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            new = set.intersection(*(dominators[p] for p in before[node])) | {node}
            if new != dominators[node]:
                dominators[node], changed = new, True
    bodies: dict[int, set[int]] = {}
    for node in order:
        for header in blocks[node][1]:
            if header not in dominators[node]:
                continue
            body = bodies.setdefault(header, {header})
            pending = [node]
            while pending:
                if (member := pending.pop()) not in body:
                    body.add(member)
                    pending += before[member]
    return [(header, frozenset(body)) for header, body in bodies.items()]


def is_wide(instruction: Instruction) -> bool:
    return instruction.mnemonic in ("LDG", "STG") and instruction.width >= 8


def is_wide_load(instruction: Instruction) -> bool:
    return instruction.mnemonic == "LDG" and is_wide(instruction)


def is_exponential(instruction: Instruction) -> bool:
    return instruction.opcode.startswith("MUFU.EX2")


def is_local(instruction: Instruction) -> bool:
    return instruction.mnemonic in ("LDL", "STL")


@dataclass(frozen=True)
class HotLoop:
    """What one instantiation does per pair of logits; see the module's docstring."""

    function: Function
    body: tuple[Instruction, ...]
    path: tuple[Instruction, ...]
    pairs: int

    def count(self, wanted: Iterable[str]) -> float:
        """Instructions of these mnemonics per pair, on the near path."""
        return sum(i.mnemonic in wanted for i in self.path) / self.pairs

    def cost(self) -> dict[str, float]:
        """Per pair on the near path: warp instructions by pipe, and bytes of global memory."""
        pipes = [pipe(instruction) for instruction in self.path]
        moved = sum(i.width for i in self.path if i.mnemonic in ("LDG", "STG"))
        return {
            "issue": len(self.path) / self.pairs,
            "special": pipes.count("special") / self.pairs,
            "alu": pipes.count("alu") / self.pairs,
            # A packed instruction is issued once and takes both halves of the pipe.
            "fp32": (pipes.count("fp32") + 2 * pipes.count("fp32x2")) / self.pairs,
            "bytes": moved / self.pairs,
        }

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that the wide loads of one round ask for, per thread."""
        return sum(i.width for i in self.path if is_wide_load(i))


_FP32 = "FFMA FMUL FADD HFMA2 HADD2 HMUL2 IMAD FSWZADD FFMA32I FADD32I FMUL32I"
_ALU = (
    "FMNMX FMNMX3 FSETP FSET FSEL SEL LOP3 PLOP3 IADD3 IADD VIADD ISETP SHF PRMT LEA IMNMX VIMNMX"
)
_ALU += " HMNMX2 VHMNMX HSETP2 HSET2 MOV FCHK IABS LOP SHL SHR BFE P2R R2P VOTE CS2R VIADDMNMX SGXT"
_PIPES = {name: "fp32" for name in _FP32.split()} | {name: "alu" for name in _ALU.split()}
_PIPES |= {name: "fp32x2" for name in ("FFMA2", "FADD2", "FMUL2")}
_PIPES |= {name: "special" for name in ("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "BREV")}


def pipe(instruction: Instruction) -> str:
    """Where an instruction is executed, as far as it can be a limit here."""
    return _PIPES.get(instruction.mnemonic, "other")


def logit_types(name: str) -> tuple[str, str]:
    """The first two template arguments of a kernel: how rollout and train logits are stored."""
    arguments = name.partition("<")[2].rstrip(">").split(",")
    found = [argument.strip() for argument in arguments if argument.strip() in BYTES]
    if len(found) < 2:
        raise ValueError(f"{name} does not name the storage of both logits")
    return found[0], found[1]


def hot_loop(function: Function, pair_bytes: int | None = None) -> HotLoop:
    """The innermost loop with the most wide loads, and its near path.

    Raises:
        ValueError: there is no such loop, or no such path round it.
    """
    if pair_bytes is None:
        pair_bytes = sum(BYTES[name] for name in logit_types(function.name))
    blocks = graph(function)
    natural = loops(blocks)
    found = []
    for header, body in natural:
        wide = [i for block in body for i in blocks[block][0] if is_wide(i)]
        if any(i.mnemonic == "LDG" and i.width >= 16 for i in wide):
            found.append((header, body, wide))
    inner = [one for one in found if not any(other[1] < one[1] for other in found)]
    if not inner:
        raise ValueError(f"{function.name}: no loop with 128-bit global loads")
    header, body, wide = max(inner, key=lambda one: (len(one[2]), -len(one[1])))
    loaded = [i.width for i in wide if i.mnemonic == "LDG"]
    pairs, rest = divmod(sum(loaded), pair_bytes)
    if rest:
        raise ValueError(f"{function.name}: loads of {loaded} bytes are no whole number of pairs")
    nested = {b for _, inside in natural if inside < body for b in inside}
    path = _cheapest(blocks, header, body - nested, len(wide), pairs)
    if path is None:
        raise ValueError(f"{function.name}: no way round the loop with {pairs} exponentials")
    code = [i for block in sorted(body) for i in blocks[block][0]]
    return HotLoop(function, tuple(code), path, pairs)


def _cheapest(
    blocks: Graph, header: int, body: frozenset[int], accesses: int, exponentials: int
) -> tuple[Instruction, ...] | None:
    """Dijkstra over (block, wide accesses, exponentials), from the header to itself."""
    done = {block: sum(map(is_wide, blocks[block][0])) for block in body}
    powers = {block: sum(map(is_exponential, blocks[block][0])) for block in body}
    length = {
        block: sum(i.mnemonic not in NOT_EXECUTED for i in blocks[block][0]) for block in body
    }

    # (exponentials, instructions), (block, wide accesses), route
    queue = [((powers[header], length[header]), (header, done[header]), (header,))]
    settled = set()
    while queue:
        cost, state, route = heapq.heappop(queue)
        if (state, cost[0]) in settled:
            continue
        settled.add((state, cost[0]))
        for successor in blocks[state[0]][1]:
            if successor == header and state[1] == accesses and cost[0] >= exponentials:
                code = [i for start in route for i in blocks[start][0]]
                return tuple(i for i in code if i.mnemonic not in NOT_EXECUTED)
            if successor in body and successor not in route:
                more = (cost[0] + powers[successor], cost[1] + length[successor])
                place = (successor, state[1] + done[successor])
                heapq.heappush(queue, (more, place, (*route, successor)))
    return None


def streaming(functions: Iterable[Function]) -> list[HotLoop]:
    """Hot loops of the tuned kernels, by name."""
    chosen = [function for function in functions if re.match(STREAMING, function.name)]
    return [hot_loop(function) for function in sorted(chosen, key=lambda f: f.name)]


def resident_threads(registers: int, block: int) -> int:
    """Threads per multiprocessor that the 64 Ki registers and 2048 threads allow."""
    per_warp = -(-registers * 32 // 256) * 256  # allocated in units of 256
    warps = min(64, 65536 // per_warp)
    return warps * 32 // block * block


def rows(
    found: list[HotLoop], resources: Mapping[str, cuda_build.Resources], architecture: str
) -> list[list[str]]:
    """One line per instantiation: its counts, then each GPU's slots and predicted share."""
    lines = []
    for loop in found:
        cost = loop.cost()
        name = loop.function.name
        used = resources[name]
        assert used.registers is not None
        threads = resident_threads(used.registers, 256)
        line = [label(name), str(used.registers), str(used.spills), str(threads)]
        line += [f"{threads * loop.bytes_in_flight / 1024:.0f}", str(loop.pairs)]
        line += [f"{cost['issue']:.1f}", f"{cost['special']:.2f}"]
        for device in devices(architecture):
            seconds = device.seconds_per_pair(cost)
            slots = cost["issue"] * seconds["memory"] / seconds["issue"]
            limit = max(seconds, key=lambda name: seconds[name])
            share = 100 * cost["bytes"] / (seconds[limit] * device.terabytes * 1e12)
            line += [f"{slots:.0f}", f"{share:.0f} % {limit}"]
        lines.append(line)
    return lines


def label(name: str) -> str:
    """`stream_divergence_kernel<BFloat16, float, true>` -> `divergence bf16 fp32 true`."""
    kernel, _, arguments = name.partition("<")
    kernel = kernel.removeprefix("stream_").removesuffix("_kernel")
    words = [TYPE_NAMES.get(word, word) for word in arguments.rstrip(">").split(", ")]
    return " ".join([kernel, *words])


def devices(architecture: str) -> list[Device]:
    return [device for device in DEVICES if device.architecture == architecture]


def header(architecture: str) -> list[str]:
    names = ["kernel", "registers", "spilled", "threads/SM", "KiB in flight/SM", "pairs/round"]
    names += ["instructions/pair", "special/pair"]
    for device in devices(architecture):
        names += [f"{device.name} slots/pair", f"{device.name} share of peak"]
    return names


def markdown(architecture: str, lines: list[list[str]]) -> str:
    """A table that stands in the document between two marks of its own."""
    titles = header(architecture)
    text = [f"<!-- sass {architecture} -->", " | ".join(["", *titles, ""]).strip()]
    text.append("|" + " --- |" * len(titles))
    text += [" | ".join(["", *line, ""]).strip() for line in lines]
    return "\n".join([*text, "<!-- end -->"])


def block_of(architecture: str, text: str) -> str | None:
    """The table of one architecture in a document."""
    pattern = rf"<!-- sass {re.escape(architecture)} -->.*?<!-- end -->"
    found = re.search(pattern, text, re.DOTALL)
    return found[0] if found else None


def from_sources(architecture: str) -> list[list[str]]:
    cubins, log = cuda_build.compile_cubins(architecture)
    resources = {found.name: found for found in cuda_build.parse_ptxas(log)}
    functions = [f for cubin in cubins for f in disassemble(cubin, architecture)]
    return rows(streaming(functions), resources, architecture)


def from_library(library: Path, architecture: str) -> list[list[str]]:
    resources = {r.name: r for r in cuda_build.library_resources(library, architecture)}
    return rows(streaming(disassemble(library, architecture)), resources, architecture)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    choices = sorted({device.architecture for device in DEVICES}, key=float)
    parser.add_argument("--arch", nargs="*", choices=choices, default=choices)
    parser.add_argument("--library", action="store_true", help="the built _C_cuda, not the sources")
    parser.add_argument("--write", action="store_true", help=f"also into docs/{DOCUMENT.name}")
    parser.add_argument("--show", metavar="REGEX", help="print the near paths of these kernels")


def run(arguments: argparse.Namespace) -> int:
    library = _lib.find_library("_C_cuda") if arguments.library else None
    reason = why_not() or (None if arguments.library else cuda_build.why_not())
    if arguments.library and library is None:
        reason = "_C_cuda is not built"
    if reason is not None:
        print(f"sass: {reason}", file=sys.stderr)
        return 2
    for architecture in arguments.arch:
        if arguments.show:
            show(architecture, arguments.show, library)
            continue
        lines = from_library(library, architecture) if library else from_sources(architecture)
        table = markdown(architecture, lines)
        print(f"\nsm_{architecture.replace('.', '')}\n{table}")
        if arguments.write:
            text = DOCUMENT.read_text()
            old = block_of(architecture, text)
            if old is None:
                print(f"{DOCUMENT.name} has no place for {architecture}", file=sys.stderr)
                return 1
            DOCUMENT.write_text(text.replace(old, table))
    return 0


def show(architecture: str, pattern: str, library: Path | None) -> None:
    """Near path of every matching kernel, for reading."""
    binaries = [library] if library else cuda_build.compile_cubins(architecture)[0]
    for function in (f for binary in binaries for f in disassemble(binary, architecture)):
        if re.match(STREAMING, function.name) and re.search(pattern, function.name):
            loop = hot_loop(function)
            print(f"\n{function.name}: {len(loop.path)} instructions, {loop.pairs} pairs")
            print("\n".join(map(str, loop.path)))
