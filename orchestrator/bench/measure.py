"""Running the batches: every mode on the same prompts, in turn, in the same processes.

Requests of a batch start together and the batch ends with its last one. Which mode comes first alternates, so that a
drift of the machine's speed meets all of them. A first, shorter group warms up and isn't counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.bench.samples import Batch, Recorder, Stream
from orchestrator.bench.workload import choose
from orchestrator.request import MAX_SEED, GenerateOptions
from orchestrator.runtime import Runtime
from orchestrator.stats import TraceSink

LEAST_GROUPS = 5  # medians over fewer say little
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Mode:
    """How a batch decodes: `gamma` None is what the runtime is set to."""

    name: str
    gamma: int | None


PLAIN = Mode("target only", 0)
SPECULATIVE = Mode("speculative", None)


@dataclass(frozen=True)
class Work:
    """A prompt as the target reads it."""

    tokens: tuple[int, ...]
    category: str


@dataclass(frozen=True)
class Plan:
    """What is measured at one concurrency: `groups` of prompts, and the modes that each of them runs in."""

    concurrency: int
    groups: tuple[tuple[Work, ...], ...]
    modes: tuple[Mode, ...]

    @property
    def batches(self) -> int:
        """Warm-up included."""
        return (len(self.groups) + 1) * len(self.modes)


def make_plan(work: Sequence[Work], concurrency: int, requests: int | None, modes: Sequence[Mode]) -> Plan:
    """Whole groups of `concurrency` requests: at least `requests` (None: 5 groups, and every prompt once)."""
    wanted = max(LEAST_GROUPS * concurrency, len(work)) if requests is None else requests
    count = math.ceil(wanted / concurrency)
    chosen = choose(work, count * concurrency)
    groups = tuple(tuple(chosen[start::count]) for start in range(count))  # each meets all parts of the files
    return Plan(concurrency, groups, tuple(modes))


async def measure(
    runtime: Runtime,
    plan: Plan,
    options: GenerateOptions,
    trace: TraceSink | None,
    advance: Callable[[], None],
) -> list[Mapping[Mode, Batch]]:
    """The batches of each group, by mode. Raises what Runtime.generate raises; nothing is left running then."""
    seed = options.seeded()
    short = dataclasses.replace(options, max_tokens=min(options.max_tokens, WARM_UP_TOKENS))
    for mode in plan.modes:
        await run_batch(runtime, plan.groups[0], mode, short, seed, None)
        advance()
    measured: list[Mapping[Mode, Batch]] = []
    for index, group in enumerate(plan.groups):
        batches: dict[Mode, Batch] = {}
        for mode in plan.modes if index % 2 == 0 else plan.modes[::-1]:
            first_seed = seed + index * plan.concurrency
            batches[mode] = await run_batch(runtime, group, mode, options, first_seed, trace)
            advance()
        measured.append(batches)
    return measured


async def run_batch(
    runtime: Runtime,
    group: Sequence[Work],
    mode: Mode,
    options: GenerateOptions,
    seed: int,
    trace: TraceSink | None,
) -> Batch:
    """All requests of `group` at once; the i-th has seed + i, the same in every mode."""
    seeded = [dataclasses.replace(options, seed=(seed + place) % MAX_SEED) for place in range(len(group))]
    tasks = [
        asyncio.create_task(_run_one(runtime, work, mode, one, trace)) for work, one in zip(group, seeded, strict=True)
    ]
    try:
        return Batch(tuple(await asyncio.gather(*tasks)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_one(
    runtime: Runtime, work: Work, mode: Mode, options: GenerateOptions, trace: TraceSink | None
) -> Stream:
    recorder = Recorder(work.category, trace)
    chunks = runtime.generate(work.tokens, gamma=mode.gamma, trace=recorder, **dataclasses.asdict(options))
    async with contextlib.aclosing(chunks) as stream:
        async for _ in stream:
            pass
    return recorder.stream()
