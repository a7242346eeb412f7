"""The command `generate`: text to stdout as it is committed, one summary line on stderr, or one JSON object."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import IO

from orchestrator.config import RuntimeConfig
from orchestrator.errors import UsageError
from orchestrator.request import GenerateOptions
from orchestrator.runtime import Chunk, Generation, Runtime
from orchestrator.stats import TraceSink


@dataclass(frozen=True)
class GenerateJob:
    """One call of the command."""

    config: RuntimeConfig
    options: GenerateOptions
    prompt: str
    raw: bool
    as_json: bool
    trace: str | None


async def run_generate(job: GenerateJob) -> int:
    """Returns the exit status."""
    if not job.prompt:
        raise UsageError("the prompt is empty: expected some text")  # before any worker is started
    with _trace_file(job.trace) as stream:
        sink = TraceSink(stream) if stream is not None else None
        _tell_start(job.config)
        async with Runtime(job.config) as runtime:
            gc.freeze()  # what is loaded stays: looking through it again would stall a round
            chunks = runtime.generate(job.prompt, raw=job.raw, trace=sink, **dataclasses.asdict(job.options))
            generation = await _stream(chunks, quiet=job.as_json)
    if job.as_json:
        sys.stdout.write(json.dumps(generation.to_json(), ensure_ascii=False) + "\n")
    else:
        sys.stderr.write(_summary(generation) + "\n")
    return 0


@contextlib.contextmanager
def _trace_file(path: str | None) -> Iterator[IO[str] | None]:
    if path is None:
        yield None
        return
    try:
        with open(path, "w", encoding="utf-8") as stream:
            yield stream
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror}; name a file that can be written") from error


def _tell_start(config: RuntimeConfig) -> None:
    """On a terminal, say what is being waited for: loading takes seconds, a first start minutes."""
    if sys.stderr.isatty():
        draft = "no draft" if config.draft_place is None else f"draft {config.draft_model} on {config.draft}"
        sys.stderr.write(f"starting target {config.target_model} on {config.target}, {draft}\n")


async def _stream(chunks: AsyncGenerator[Chunk], *, quiet: bool) -> Generation:
    generation: Generation | None = None
    async with contextlib.aclosing(chunks) as stream:
        async for chunk in stream:
            if not quiet:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            generation = chunk.generation
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
    assert generation is not None
    return generation


def _summary(generation: Generation) -> str:
    stats, tokens = generation.stats, len(generation.token_ids)
    line = (
        f"{tokens} tokens in {generation.seconds:.2f} s ({tokens / generation.seconds:.1f} tokens/s), "
        f"{generation.finish_reason}, seed {generation.seed}"
    )
    if stats.drafted:
        line += (
            f"; {stats.rounds} rounds, {stats.tokens_per_round:.2f} tokens a round, "
            f"{stats.accepted} of {stats.drafted} draft tokens accepted ({stats.acceptance_rate:.0%}), "
            f"mean γ {stats.mean_gamma:.1f}"
        )
    if stats.hits + stats.misses:
        line += f", {stats.hit_share:.0%} of next blocks ready in time"
    return line
