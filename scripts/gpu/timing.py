"""Milliseconds of a pass against the time that reading its weights takes, graphs on and off in turn."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from execution.interface import Executor, Extension
from gpu.models import executor

RUNS, PASSES, WARM_UPS = 7, 10, 4  # a run is the mean of its passes; the median of the runs counts


@dataclass(frozen=True)
class Case:
    """`steps` passes, one after the other, of `positions` new tokens in each of `rows` rows. Attention sees `context`
    tokens in the last of them. `bar`: the most that the time may be, in floors."""

    model: str
    positions: int
    context: int
    rows: int = 1
    steps: int = 1
    bar: float | None = None

    @property
    def what(self) -> str:
        if self.steps > 1:
            return f"{self.model}: {self.steps} steps"
        rows = f"{self.rows} requests × " if self.rows > 1 else ""
        return f"{self.model}: {rows}{self.positions} position{'s' if self.positions > 1 else ''}"


SHORT, LONG = 128, 4096
CASES = (
    *(Case("target", n, SHORT, bar=1.3 if n == 5 else None) for n in (1, 2, 5, 9)),
    Case("target", 5, SHORT, rows=8),
    *(Case("target", n, LONG) for n in (1, 2, 5, 9)),
    Case("draft", 1, SHORT, bar=2.0),
    Case("draft", 1, SHORT, steps=4),
    Case("draft", 1, LONG),
)


@dataclass(frozen=True)
class Timed:
    """Milliseconds."""

    case: Case
    on: float
    off: float
    floor: float

    @property
    def kept(self) -> bool | None:
        return None if self.case.bar is None else self.on <= self.case.bar * self.floor


def bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second that the device reads, or reads and writes: the better of a sum and a copy of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    into = torch.empty_like(source)
    seconds = {"copy": lambda: into.copy_(source), "sum": lambda: source.sum()}
    found = {name: min(_seconds(run, device) for _ in range(10)) for name, run in seconds.items()}
    return max(2 * size / found["copy"], size / found["sum"])


def measure(
    networks: Mapping[str, Any], read: Mapping[str, int], rate: float, advance: Callable[[], None]
) -> list[Timed]:
    """All cases, with packed weights. `read`: bytes of each network's weights; `rate`: bytes a second."""
    found = []
    for case in CASES:
        network = networks[case.model]
        executors = [executor(network, graphs=graphs, packed=True)[0] for graphs in (True, False)]
        passes = [_prepared(each, case) for each in executors]
        device = next(network.parameters()).device
        for run in passes:
            for _ in range(WARM_UPS):
                run(device)
        times: list[list[float]] = [[], []]
        for index in range(RUNS):
            for which in (0, 1) if index % 2 else (1, 0):
                times[which].append(statistics.fmean(passes[which](device) for _ in range(PASSES)))
        on, off = (1e3 * statistics.median(each) for each in times)
        del executors, passes, run
        gc.collect()  # their storage: what an executor is made of refers to it
        found.append(Timed(case, on, off, 1e3 * case.steps * read[case.model] / rate))
        advance()
    return found


def _prepared(runner: Executor, case: Case) -> Callable[[torch.device], float]:
    """Rows at the case's length, and a function that runs its passes, takes them back, and says how long they took."""
    start = case.context - case.positions * case.steps
    rows = [runner.open() for _ in range(case.rows)]
    for row in rows:
        runner.extend([Extension(row, [(7 * at + row) % 500 for at in range(start)], 0)])

    def passes() -> None:
        tokens: Sequence[Sequence[int]] = [list(range(1, 1 + case.positions))] * case.rows
        for _ in range(case.steps):
            logits = runner.extend([Extension(row, fed, case.positions) for row, fed in zip(rows, tokens, strict=True)])
            if case.steps > 1:  # as in drafting, the next step reads what this one says
                tokens = torch.cat([each[-1:] for each in logits]).argmax(-1, keepdim=True).tolist()

    def timed(device: torch.device) -> float:
        took = _seconds(passes, device)
        for row in rows:
            runner.truncate(row, start)
        return took

    return timed


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(timed: Sequence[Timed]) -> str:
    """Markdown: a row a case."""
    lines = [
        "| pass | context | graphs on, ms | graphs off, ms | floor, ms | on / floor | off / floor | bar | kept |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in timed:
        bar = "" if one.case.bar is None else f"≤ {one.case.bar:g}"
        kept = {None: "", True: "yes", False: "**no**"}[one.kept]
        lines.append(
            f"| {one.case.what} | {one.case.context} | {one.on:.3f} | {one.off:.3f} | {one.floor:.3f}"
            f" | {one.on / one.floor:.2f} | {one.off / one.floor:.2f} | {bar} | {kept} |"
        )
    return "\n".join(lines)
