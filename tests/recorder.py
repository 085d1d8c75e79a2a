# SPDX-License-Identifier: Apache-2.0
"""Calls the CUDA ops on pretended devices and hands back what their host code did.

A worker process loads the library of :mod:`tests.recorder_build`, which registers the real ops for
the real CUDA dispatch key. Its tensors are CUDA tensors whose addresses no process can have: host
code that reads one dies, and the test with it. Torch's allocator is pretended too, so whatever an
op allocates through torch is an event like the others.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import trm_ext as trm
from trm_ext.outputs import OUTPUTS

DEVICE = 1  # of every tensor; device 0 is current before and after
NOWHERE = 1 << 56  # no address of x86-64: bits 56 to 63, at least, must be equal


@dataclass(frozen=True)
class Pretend:
    """A CUDA tensor to be. ``offset`` is in bytes from where an allocation begins."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if self.strides is None:
            object.__setattr__(self, "strides", contiguous(self.shape))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)


@dataclass
class Recording:
    """What happened, in order. Addresses read ``name+offset``, after the argument or allocation."""

    events: list[dict[str, Any]]
    stream: str
    error: str | None = None
    devices: tuple[int, int] = (0, 0)  # current before and after
    results: list[str] = field(default_factory=list)  # addresses of what was returned

    def calls(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["call"] == name]

    @property
    def launches(self) -> list[dict[str, Any]]:
        return self.calls("cudaLaunchKernelExC")


class _Memory:
    """Addresses that are given out, and whose they are."""

    def __init__(self) -> None:
        self.next = NOWHERE
        self.ranges: list[tuple[int, int, str]] = []

    def take(self, size: int, name: str) -> int:
        begin = self.next
        self.next += (size + 511) // 512 * 512 + 512
        self.ranges.append((begin, size, name))
        return begin

    def name(self, address: int) -> str | None:
        if address == 0:
            return None
        for begin, size, name in self.ranges:
            if begin <= address < begin + max(size, 1):
                return f"{name}+{address - begin}"
        return f"unknown {address:#x}"


class _Worker:
    """The state of the worker process."""

    def __init__(self, library: str) -> None:
        torch.ops.load_library(library)
        self.c = ctypes.CDLL(library)
        self.c.recorder_events.restype = ctypes.c_char_p
        self.c.recorder_set.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
        self.memory = _Memory()
        self.allocations = 0
        self.impl = torch.library.Library("aten", "IMPL", "CUDA")
        self.impl.impl("empty.memory_format", self._empty)
        torch.cuda._lazy_init = lambda: None  # factories with device= ask for it

    def note(self, **event: Any) -> None:
        event["current"] = self.c.recorder_current_device()
        self.c.recorder_note(json.dumps(event).encode())

    def at(self, address: int, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        like = torch.empty(0, dtype=dtype)
        tensor: Tensor = torch.ops.trm_recorder.tensor(
            like, address, DEVICE, list(shape), list(strides)
        )
        return tensor

    def fresh(self, shape: Any, strides: Any, dtype: torch.dtype, name: str) -> Tensor:
        size = span(shape, strides) * dtype.itemsize
        return self.at(self.memory.take(size, name), shape, strides, dtype)

    def _empty(
        self,
        size: list[int],
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        memory_format: Any = None,
    ) -> Tensor:
        assert device == torch.device("cuda", DEVICE), f"allocation on {device}"
        name = f"allocation {self.allocations}"
        self.allocations += 1
        made = self.fresh(size, contiguous(tuple(size)), dtype or torch.float32, name)
        self.note(call="allocate", name=name, bytes=made.numel() * made.element_size())
        return made

    def make(self, given: dict[str, Any]) -> dict[str, Any]:
        made = {}
        for name, value in given.items():
            if isinstance(value, Pretend):
                assert value.strides is not None
                size = value.offset + span(value.shape, value.strides) * value.dtype.itemsize
                address = self.memory.take(size, name) + value.offset
                made[name] = self.at(address, value.shape, value.strides, value.dtype)
            else:
                made[name] = value
        return made

    def record(
        self, call: Callable[..., Any], given: dict[str, Any], twice: bool, **device: Any
    ) -> list[Recording]:
        """One recording per call; a second call has the same tensors and another stream."""
        self.memory = _Memory()
        made = self.make(given)
        kept = self.memory.next, len(self.memory.ranges)
        found = []
        for index in range(2 if twice else 1):
            self.memory.next, self.allocations = kept[0], 0
            del self.memory.ranges[kept[1] :]
            stream = 0x57EA0 + index
            self.c.recorder_set(
                device.get("capability", 90),
                device.get("multiprocessors", 132),
                stream,
                device.get("failing_launch", -1),
            )
            before = self.c.recorder_current_device()
            error, results = None, ()
            try:
                results = call(**made)
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}".splitlines()[0]
            events = json.loads(f"[{self.c.recorder_events().decode()}]")
            after = self.c.recorder_current_device()
            tensors = [results] if isinstance(results, Tensor) else list(results or ())
            returned = [
                str(self.memory.name(t.data_ptr())) for t in tensors if isinstance(t, Tensor)
            ]
            found.append(
                Recording(self._named(events), hex(stream), error, (before, after), returned)
            )
        return found

    def _named(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: self._named(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [self._named(v, key) for v in value]
        if isinstance(value, str) and value.startswith("0x") and key != "stream":
            return self.memory.name(int(value, 16))
        return value


def span(shape: Any, strides: Any) -> int:
    """Elements from a tensor's first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class Pretending(TorchDispatchMode):
    """Lets every other torch op pass by its shapes alone; one that needs values or copies fails."""

    def __init__(self, worker: _Worker) -> None:
        super().__init__()
        self.worker = worker

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func.namespace in ("trm", "trm_recorder"):
            return func(*args, **kwargs)
        self.worker.note(call="torch", op=str(func))
        originals: dict[int, tuple[Tensor, Tensor]] = {}
        crosses = kwargs.get("device", torch.device("cuda")) == torch.device("cpu")

        def to_meta(value: Any) -> Any:
            nonlocal crosses
            if isinstance(value, torch.device):
                return torch.device("meta")
            if not isinstance(value, Tensor) or value.device.type != "cuda":
                copies = func.overloadpacket.__name__ in ("copy_", "_to_copy")
                crosses |= isinstance(value, Tensor) and (copies or value.dim() > 0)
                return value
            meta = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            originals[meta.untyped_storage()._cdata] = (value, meta)
            return meta

        meta_args, meta_kwargs = tree_map(to_meta, (args, kwargs))
        if crosses:
            raise RuntimeError(f"{func} copies between host and device")
        out = func(*meta_args, **meta_kwargs)

        def back(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.device.type != "meta":
                raise RuntimeError(f"{func} made a tensor on the host")
            owner = originals.get(value.untyped_storage()._cdata)
            if owner is None:
                name = f"torch {self.worker.allocations}"
                self.worker.allocations += 1
                return self.worker.fresh(value.shape, value.stride(), value.dtype, name)
            original, meta = owner
            if value is meta:
                return original
            address = original.data_ptr() + value.storage_offset() * value.element_size()
            return self.worker.at(address, value.shape, value.stride(), value.dtype)

        return tree_map(back, out)


_worker: _Worker | None = None


def _start(library: str) -> None:
    global _worker
    _worker = _Worker(library)


def _run(target: str, given: dict[str, Any], twice: bool, device: dict[str, Any]) -> Any:
    assert _worker is not None
    if target.startswith("trm::"):
        op = getattr(torch.ops.trm, target.removeprefix("trm::"))
        names = [argument.name for argument in op.default._schema.arguments]
        assert set(given) <= set(names), (target, sorted(given))

        def call(**made: Any) -> Any:
            return op(*(made.get(name, 0 if name == "vocab_start" else None) for name in names))
    else:
        function = globals()[target]

        def call(**made: Any) -> Any:
            with Pretending(_worker):  # type: ignore[arg-type]
                return function(**made)

    return _worker.record(call, given, twice, **device)


def fused_mask(  # type: ignore[no-untyped-def]
    rollout_logits, train_logits, sequence_id, position, token_mask, offsets, order=None, **options
):
    """The mask of a layout whose tensors are there already."""
    layout = trm.SequenceLayout(sequence_id, position, token_mask, offsets, order)
    return trm.trust_region_mask(rollout_logits, train_logits, layout, **options)


def training_step(  # type: ignore[no-untyped-def]
    rollout_logits,
    train_logits,
    tokens,
    advantages,
    sequence_id,
    position,
    token_mask,
    offsets,
    order=None,
    *,
    criteria,
):
    """Divergence, verdict, loss and metrics; forward, in eager mode."""
    layout = trm.SequenceLayout(sequence_id, position, token_mask, offsets, order)
    exact = trm.token_divergence(
        rollout_logits, train_logits, tokens=tokens, token_mask=token_mask, outputs=OUTPUTS
    )
    verdict = trm.verdict(criteria, layout, divergence=exact)
    loss, _ = trm.policy_loss(
        exact.logp_train,
        exact.logp_rollout,
        advantages,
        layout,
        verdict=verdict,
        kl=exact.kl,
        kl_coef=0.1,
    )
    trm.batch_metrics(layout, verdict=verdict, divergence=exact, log_ratio=exact.log_ratio)
    return loss


def read_a_value(values):  # type: ignore[no-untyped-def]
    return values.sum().item()


def copy_to_the_host(values):  # type: ignore[no-untyped-def]
    return values.cpu()


def copy_from_the_host(values):  # type: ignore[no-untyped-def]
    return values + torch.tensor(0.5, device=values.device)


class Recorder:
    """Handle of a worker process with one library."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self.pool = pool

    def __call__(self, target: str, given: dict[str, Any], **device: Any) -> Recording:
        """Records one call of an op such as ``trm::sequence_reduce`` or of a function above.

        ``given`` are its arguments by name; those of an op that are absent are None or 0. The
        device's ``capability`` and ``multiprocessors`` may be given, and the ``failing_launch``.
        """
        found: list[Recording] = self.pool.submit(_run, target, given, False, device).result()
        return found[0]

    def twice(
        self, target: str, given: dict[str, Any], **device: Any
    ) -> tuple[Recording, Recording]:
        """Two calls with the same tensors, on one stream and then on another."""
        first, second = self.pool.submit(_run, target, given, True, device).result()
        return first, second


@contextmanager
def recording(library: Path) -> Iterator[Recorder]:
    """A recorder for as long as the context lasts."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _start, (str(library),)) as pool:
        yield Recorder(pool)
