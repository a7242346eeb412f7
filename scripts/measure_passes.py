"""Measure what one pass of a model costs: by positions, by context, packed against plain, against reading the weights.

    python scripts/measure_passes.py > passes.md    # the default target; 4 minutes, with nothing else running
    python scripts/measure_passes.py --engine llamacpp --model smollm2.F32.gguf

v(γ) is the time of a pass of γ + 1 positions by that of one. The floor is the time in which this machine adds up
as many bytes as the weights have, with the same threads: no pass that reads them all can be faster. Each value is the
median of --runs passes, all of them made in turn; the first two of each aren't counted. Logits are compared over 16
prompts of heldout_prompts.jsonl, in passes of five positions after the first eight tokens, the same tokens both ways.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from execution import Executor, Extension, ModelError, default_models, load
from orchestrator.bench.machine import cpu

PROMPTS = Path(__file__).parent / "heldout_prompts.jsonl"
POSITIONS = (1, 2, 3, 5, 9)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
WARM = 2
ONE, V4, CONTEXT = 2.0, 1.4, 1.6  # the bars


def median_times(runs: int, what: Mapping[Hashable, Callable[[], Any]], label: str) -> dict[Hashable, float]:
    """Seconds of each, in turn."""
    times: dict[Hashable, list[float]] = {name: [] for name in what}
    console = Console(stderr=True)
    for index in track(range(WARM + runs), label, console=console, disable=not sys.stderr.isatty()):
        for name, call in what.items():
            started = time.perf_counter()
            call()
            if index >= WARM:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in times.items()}


def passes(executor: Executor, context: int) -> tuple[int, Callable[[int], Callable[[], Any]]]:
    """A row that holds `context` tokens, and a maker of passes over so many more, which are rolled back."""
    row, size = executor.open(), executor.vocab_size
    tokens = torch.randint(0, size, (context,), generator=torch.Generator().manual_seed(context)).tolist()
    for start in range(0, context, 512):
        executor.extend([Extension(row, tokens[start : start + 512], 0)])

    def of(count: int) -> Callable[[], Any]:
        def one() -> None:
            executor.extend([Extension(row, tokens[:count], count)])
            executor.truncate(row, context)

        return one

    return row, of


def by_positions(executors: Mapping[str, Executor], read: int | None, runs: int) -> dict[Hashable, float]:
    """Seconds by (name, positions) at the first context; by "floor" of adding up `read` bytes."""
    what: dict[Hashable, Callable[[], Any]] = {}
    rows = []
    for name, executor in executors.items():
        row, of = passes(executor, CONTEXTS[0])
        rows.append((executor, row))
        what |= {(name, count): of(count) for count in POSITIONS}
    if read is not None:
        what["floor"] = torch.ones(read // 4).sum
    found = median_times(runs, what, "positions")
    for executor, row in rows:
        executor.close(row)
    return found


def by_context(executor: Executor, runs: int) -> dict[int, tuple[float, ...]]:
    """By context, seconds of one position, of five, and of one at the first context, all three in turn."""
    found: dict[int, tuple[float, ...]] = {}
    first, at_first = passes(executor, CONTEXTS[0])
    for context in CONTEXTS:
        if context > executor.context_length:
            break
        row, of = passes(executor, min(context, executor.context_length - 5))
        what: dict[Hashable, Callable[[], Any]] = {0: of(1), 1: of(5), 2: at_first(1)}
        found[context] = tuple(median_times(runs, what, f"context {context}")[place] for place in what)
        executor.close(row)  # before the next one is filled
    executor.close(first)
    return found


def weights(path: Path) -> int:
    """How many a pass reads: an embedding that is no head too is left out, one that is both counts once."""
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.offset_keys()}
    apart = "lm_head.weight" in sizes
    return sum(size for name, size in sizes.items() if not (apart and "embed_tokens" in name))


def logits(executor: Executor, tokens: list[int]) -> torch.Tensor:
    """At every position but the first eight, in passes of five."""
    row, found = executor.open(), []
    executor.extend([Extension(row, tokens[:8], 0)])
    for start in range(8, len(tokens), 5):
        piece = tokens[start : start + 5]
        found += executor.extend([Extension(row, piece, len(piece))])
    executor.close(row)
    return torch.cat(found)


def largest_difference(one: Executor, other: Executor, texts: list[list[int]]) -> tuple[float, float]:
    """(largest difference of two logits, largest logit) over all texts."""
    worst, scale = 0.0, 0.0
    for tokens in texts:
        found, expected = logits(one, tokens), logits(other, tokens)
        finite = expected.isfinite()  # what a reduced head doesn't have is -inf
        found, expected = found[finite], expected[finite]
        worst = max(worst, float((found - expected).abs().max()))
        scale = max(scale, float(expected.abs().max()))
    return worst, scale


def table(head: str, rows: list[str]) -> str:
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *rows])


def bar(what: str, most: float, value: float) -> str:
    return f"| {what} | ≤ {most:.2f} | {value:.2f} | {'yes' if value <= most else '**no**'} |"


def report(executors: Mapping[str, Executor], read: int | None, runs: int) -> str:
    """Both tables of times, and the bars."""
    times, first = by_positions(executors, read, runs), next(iter(executors))
    rows = [
        f"| {name} | " + " | ".join(f"{1e3 * times[name, n]:.1f}" for n in POSITIONS)
        + f" | {times[name, 5] / times[name, 1]:.2f} |"
        for name in executors
    ]  # fmt: skip
    names = " | ".join(f"{n} position{'s' * (n > 1)}" for n in POSITIONS)
    parts = [table(f"| ms a pass at context {CONTEXTS[0]} | {names} | v(4) |", rows)]
    long = by_context(executors[first], runs)
    rows = [
        f"| {what} | " + " | ".join(f"{1e3 * each[place]:.1f}" for each in long.values()) + " |"
        for place, what in enumerate(("1 position", "5 positions", f"1 position at {CONTEXTS[0]}, in turn"))
    ]
    parts.append(table(f"| ms a pass, {first}, at context | " + " | ".join(map(str, long)) + " |", rows))
    bars = [] if read is None else [bar("one position / floor", ONE, times[first, 1] / times["floor"])]
    bars.append(bar("v(4)", V4, times[first, 5] / times[first, 1]))
    if 4096 in long:
        bars.append(bar("context 4,096 / 128, one position", CONTEXT, long[4096][0] / long[4096][2]))
    parts.append(table(f"| {first} | bar | median | kept |", bars))
    if read is not None:
        parts.append(f"Floor: {1e3 * times['floor']:.1f} ms to add up the bytes of the weights.")
    return "\n\n".join(parts)


@click.command()
@click.option("--model", default=default_models.TARGET, show_default=True)
@click.option("--engine", default="torch", show_default=True, type=click.Choice(["torch", "llamacpp"]))
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option("--threads", default=os.cpu_count() or 1, show_default=True, type=click.IntRange(1, 1024))
@click.option("--runs", default=11, show_default=True, type=click.IntRange(1), help="Passes that count.")
def main(model: str, engine: str, dtype: str, threads: int, runs: int) -> None:
    """Print the tables, the bars, and how far packed logits are from plain ones."""
    if model.startswith(("toy", "synthetic")):
        raise click.UsageError(f"{model!r} is no network: give one whose passes take what they compute")
    try:
        first, vocabulary = load(model, dtype=dtype, threads=threads, engine=engine)
        executors = {"packed" if engine == "torch" else engine: first}
        plain = None
        if engine == "torch":
            plain, _ = load(model, dtype=dtype, threads=threads, engine=engine, packed=False)
            executors["plain"] = plain
    except ModelError as error:
        raise click.ClickException(str(error)) from error
    read = None
    if engine == "torch":
        from execution.loading import model_source

        source = model_source(model)
        if isinstance(source, Path) and (source / "model.safetensors").is_file():
            read = weights(source) * getattr(torch, dtype).itemsize
    print(report(executors, read, runs))
    if plain is not None:
        tokenizer = Tokenizer.from_buffer(vocabulary.tokenizer_json)
        lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:16]
        texts = [[t % first.vocab_size for t in tokenizer.encode(json.loads(line)["prompt"] * 3).ids] for line in lines]
        worst, scale = largest_difference(first, plain, texts)
        print(f"\nPacked against plain, {len(texts)} prompts: logits differ by {worst:.1e} at most, of {scale:.1f}.")
    print(
        f"\n{date.today()}, {model}, {engine}, {dtype}, {threads} threads, medians of {runs}; torch {torch.__version__}"
    )
    print(f"on {cpu()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}.")


if __name__ == "__main__":
    main()
