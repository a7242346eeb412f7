"""Recording a pass once and running it again with other contents of the same buffers. Imports torch.

A graph saves the CPU's part of a pass: eager kernels are launched one by one, which takes longer than they run when a
pass has few positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Pass = Callable[[], Tensor | None]  # runs on tensors whose addresses stay; its result, if it has one


class Graph(Protocol):
    """A recorded pass. `output` is the same tensor each time, and holds until any graph is replayed."""

    output: Tensor | None

    def replay(self) -> None:
        """Run the pass; `output` is its result then."""
        ...


class Graphs(Protocol):
    """A way to record passes."""

    def record(self, run: Pass) -> Graph:
        """May run the pass several times. Raises what keeps it from being recorded."""
        ...

    def forget(self) -> None:
        """No graph recorded so far is used again."""
        ...


class CudaGraph:
    """A captured CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor | None) -> None:
        self._graph, self.output = graph, output

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphs:
    """Captures on one device, in a stream of its own. All graphs share one memory pool: none reads what another has
    left there, and whoever replays one copies its output before the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.forget()

    def forget(self) -> None:
        # A pool that no graph holds any longer is not to be captured into again.
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Pass) -> Graph:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):  # what libraries set up at their first call isn't part of the graph
                run()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads of this process may use CUDA meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                output = run()
        return CudaGraph(graph, output)


def graphs_on(device: torch.device) -> Graphs | None:
    """Graphs where a device has them."""
    return CudaGraphs(device) if device.type == "cuda" else None


class RunAgain:
    """Where there is no CUDA: a graph that runs the pass again, with the same rules for buffers and output."""

    def __init__(self) -> None:
        self.recorded = 0

    def forget(self) -> None:
        return

    def record(self, run: Pass) -> Graph:
        self.recorded += 1
        return _Rerun(run)


class _Rerun:
    def __init__(self, run: Pass) -> None:
        self._run, self.output = run, run()

    def replay(self) -> None:
        found = self._run()
        if self.output is not None and found is not None:
            self.output.copy_(found)
