"""Measure a pair on prompts: acceptance, tokens a round, and seconds against plain decoding in the same processes.

    python scripts/measure_pair.py --prompts scripts/heldout_prompts.jsonl --gammas 2,4 --temperatures 0

Prints a Markdown table. Requests run one at a time; with and without the draft alternate, prompt by prompt, so that a
drift of the machine's speed meets both. α is the share of tested draft tokens that were accepted: a token after the
first refused one was never tested.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from orchestrator import Generation, Runtime
from orchestrator.options import runtime_config, runtime_options


@dataclass
class Row:
    """One setting over all prompts."""

    label: str
    gamma: int
    temperature: float
    generations: list[Generation] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> list[float]:
        return [len(g.token_ids) / g.seconds for g in self.generations]

    def cells(self, plain: Row) -> list[str]:
        """The row of the table; `plain` is the same temperature at γ = 0."""
        stats = [g.stats for g in self.generations]
        accepted, rounds = sum(s.accepted for s in stats), sum(s.rounds for s in stats)
        refused = sum(g.stats.refused for g in self.generations)
        tested = accepted + refused
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(self.tokens_per_second, plain.tokens_per_second, strict=True)
        )
        return [
            f"{self.temperature:g}",
            self.label,
            f"{accepted / tested:.3f}" if tested else "-",
            f"{sum(s.emitted for s in stats) / rounds:.2f}",
            f"{sum(g.seconds for g in self.generations):.1f}",
            f"{statistics.median(self.tokens_per_second):.1f}",
            f"{ratio:.2f}",
        ]


HEADER = ("temperature", "setting", "α", "tokens a round", "seconds", "tokens/s (median)", "against plain (median)")


async def _measure(runtime: Runtime, rows: list[Row], prompts: list[str], max_tokens: int, seed: int) -> None:
    async def run(row: Row, index: int) -> Generation:
        chunks = runtime.generate(
            prompts[index], gamma=row.gamma, temperature=row.temperature, max_tokens=max_tokens, seed=seed + index
        )
        return [chunk async for chunk in chunks][-1].generation  # type: ignore[return-value]

    for row in rows:  # the first pass of a process is slower than all others
        await run(row, 0)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("prompts", total=len(prompts) * len(rows))
        for index in range(len(prompts)):
            for row in rows:
                row.generations.append(await run(row, index))
                progress.advance(task)


@click.command(help=__doc__)
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--gammas", default="1,2,4", show_default=True, help="Block lengths to measure, with commas.")
@click.option("--temperatures", default="1,0", show_default=True, help="Temperatures, with commas.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--limit", type=click.IntRange(1), default=None, help="Only the first N prompts.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@runtime_options
@click.pass_context
def main(
    context: click.Context,
    /,
    prompts: Path,
    gammas: str,
    temperatures: str,
    max_tokens: int,
    limit: int | None,
    seed: int,
    **_flags: Any,
) -> None:
    texts = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines() if line][:limit]
    lengths = [int(gamma) for gamma in gammas.split(",")]
    tables: list[list[str]] = []

    async def run() -> None:
        async with Runtime(runtime_config(context)) as runtime:
            for temperature in (float(text) for text in temperatures.split(",")):
                plain = Row("plain (γ = 0)", 0, temperature)
                rows = [plain, *(Row(f"γ = {gamma}", gamma, temperature) for gamma in lengths)]
                await _measure(runtime, rows, texts, max_tokens, seed)
                tables.extend(row.cells(plain) for row in rows)

    asyncio.run(run())
    for cells in (HEADER, ["---"] * len(HEADER), *tables):
        click.echo(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
