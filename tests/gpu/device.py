# SPDX-License-Identifier: Apache-2.0
"""Where a test of tests/gpu runs, and how large.

Each runs twice: on "cuda" (marked gpu), and on "cpu" with small sizes, where streams, graphs and
the like are stand-ins. The latter is a rehearsal: it shows that the test itself is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Device:
    """A device under test."""

    name: str

    @property
    def real(self) -> bool:
        return self.name.startswith("cuda")

    def pick(self, cuda, rehearsal):
        """A size, or a list of them: as asked on a GPU, small otherwise."""
        return cuda if self.real else rehearsal

    @property
    def multiprocessors(self) -> int:
        if not self.real:
            return 4
        return torch.cuda.get_device_properties(self.name).multi_processor_count

    def free_bytes(self) -> int:
        if not self.real:
            return 2**40
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.name)[0]

    def synchronize(self) -> None:
        if self.real:
            torch.cuda.synchronize(self.name)

    @contextlib.contextmanager
    def forbidding_sync(self) -> Iterator[None]:
        """Within it, an operation that makes the host wait for the device raises."""
        if not self.real:
            yield
            return
        torch.cuda.synchronize(self.name)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def run_on_streams(self, calls: Sequence[Callable[[], object]]) -> list[object]:
        """Results of the calls, each on a stream of its own, all in flight together."""
        if not self.real:
            return [call() for call in calls]
        current = torch.cuda.current_stream(self.name)
        streams = [torch.cuda.Stream(self.name) for _ in calls]
        results = []
        for stream, call in zip(streams, calls, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results.append(call())
        for stream in streams:
            current.wait_stream(stream)
        self.synchronize()
        return results

    def capture(self, call: Callable[[], tuple[Tensor, ...]]) -> Graph:
        """The call in a CUDA graph; it must allocate nothing outside torch's allocator."""
        if not self.real:
            return Graph(call(), None, call)
        side = torch.cuda.Stream(self.name)
        side.wait_stream(torch.cuda.current_stream(self.name))
        with torch.cuda.stream(side):
            call()  # lazy initialisation is not capturable
        torch.cuda.current_stream(self.name).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        return Graph(results, graph, call)

    def peak_growth(self, call: Callable[[], object]) -> int | None:
        """Most bytes allocated during a call beyond those before it; None if nobody counts."""
        if not self.real:
            call()
            return None
        call()
        torch.cuda.synchronize(self.name)
        torch.cuda.reset_peak_memory_stats(self.name)
        before = torch.cuda.memory_allocated(self.name)
        result = call()
        torch.cuda.synchronize(self.name)
        del result
        return torch.cuda.max_memory_allocated(self.name) - before


@dataclass(frozen=True)
class Graph:
    """Results that every replay overwrites."""

    results: tuple[Tensor, ...]
    graph: torch.cuda.CUDAGraph | None
    call: Callable[[], tuple[Tensor, ...]]

    def replay(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        for old, new in zip(self.results, self.call(), strict=True):
            old.copy_(new)
