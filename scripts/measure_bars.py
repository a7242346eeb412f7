"""Measure what this runtime promises about its speed, each promise a ratio in one run, and print the table.

    python scripts/measure_bars.py --seeds 1,2,3 > bars.md    # about 12 minutes a seed; with nothing else running
    python scripts/measure_bars.py --only single              # the bars of runs whose name contains a text

A bar is read from the JSON of one or two `specdec-orchestrator bench` runs, each of at least 5 pairs of batches,
speculative and target-only in turn. The table has the median over the seeds, and all their values. A folder keeps each
run's JSON; a run that is there already isn't made again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

Report = Mapping[str, Any]
DEVICES = "target=30ms draft=3ms alpha=0.8"  # c = .1; entropy of p 2.7 and V = 4,096 are the defaults
HALF_STEP_AWAY = (f"{DEVICES} rtt=15ms", "--max-tokens", "96", "--requests", "5", "--gammas", "2,3,4,5,6,8")
BYTES = "wire_bytes_per_draft_token"
SINGLE = ("--max-tokens", "160", "--requests", "5")

RUNS: dict[str, tuple[str, ...]] = {
    "in-turn": ("--synthetic", DEVICES, *SINGLE, "--overlap", "off"),
    "in-turn-coupled": ("--synthetic", DEVICES, *SINGLE, "--overlap", "off", "--verify", "coupled"),
    "single": ("--synthetic", DEVICES, *SINGLE),
    "single-coupled": ("--synthetic", DEVICES, *SINGLE, "--verify", "coupled"),
    "eight": ("--synthetic", DEVICES, "--max-tokens", "96", "--concurrency", "8"),
    "far": ("--synthetic", *HALF_STEP_AWAY),
    "far-in-turn": ("--synthetic", *HALF_STEP_AWAY, "--overlap", "off"),
    "wide": ("--synthetic", f"{DEVICES} vocab=49152", "--max-tokens", "64", "--requests", "5"),
    "wide-coupled": (
        "--synthetic",
        f"{DEVICES} vocab=49152",
        "--max-tokens",
        "64",
        "--requests",
        "5",
        "--verify",
        "coupled",
    ),
    "bad-draft": ("--synthetic", "target=30ms draft=3ms alpha=0.05", *SINGLE),
    "sixty-four": ("--synthetic", DEVICES, "--max-tokens", "64", "--concurrency", "64"),
    "real": ("--concurrency", "1,8", "--max-tokens", "48", "--requests", "16", "--gamma", "1"),
}


@dataclass(frozen=True)
class Bar:
    """One promise: `value` of the reports of `runs`, in their order."""

    what: str
    runs: tuple[str, ...]
    value: Callable[..., float]
    least: float | None = None
    most: float | None = None
    form: str = "{:.2f}"

    @property
    def promise(self) -> str:
        return f"≥ {self.form.format(self.least)}" if self.least is not None else f"≤ {self.form.format(self.most)}"

    def kept(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def of(key: str) -> Callable[[Report], float]:
    """A number of the summary."""
    return lambda report: float(report["summary"][key])


def best_speedup(report: Report) -> float:
    """At γ auto, or at the best of the fixed γ."""
    summary = report["summary"]
    return float(max(one["speedup"] for one in [summary, *summary["gammas"]]))


def batching(report: Report) -> float:
    """Tokens a second at the last concurrency, against the first."""
    first, last = report["results"][0], report["results"][-1]
    return float(last["tokens_per_second"] / first["tokens_per_second"])


BARS = (
    Bar("taking turns: measured / predicted, rejection", ("in-turn",), of("ratio"), least=0.95),
    Bar("taking turns: measured / predicted, coupled", ("in-turn-coupled",), of("ratio"), least=0.95),
    Bar("single request, overlap on: speed-up, rejection", ("single",), of("speedup"), least=3.3),
    Bar("single request, overlap on: speed-up, coupled", ("single-coupled",), of("speedup"), least=3.3),
    Bar("the same: hit share, rejection", ("single",), of("hit_share"), least=0.75),
    Bar("the same: hit share, coupled", ("single-coupled",), of("hit_share"), least=0.85),
    Bar(
        "8 requests: tokens a row of a target pass / τ",
        ("eight",),
        lambda report: report["summary"]["tokens_per_pass"] / report["summary"]["tau"],
        least=0.9,
    ),
    Bar("8 requests: target idle", ("eight",), lambda report: 1 - report["summary"]["target_busy"], most=0.08),
    Bar(
        "draft 15 ms away: overlap on / taking turns, each at its best γ",
        ("far", "far-in-turn"),
        lambda on, off: best_speedup(on) / best_speedup(off),
        least=1.3,
    ),
    Bar("r of a turn-taking round, ms", ("in-turn",), of("r_ms"), most=1.0),
    Bar("bytes a draft token, V = 49,152, counts", ("wide",), of(BYTES), most=320, form="{:.0f}"),
    Bar("bytes a draft token, V = 49,152, coupled", ("wide-coupled",), of(BYTES), most=24, form="{:.1f}"),
    Bar("draft of α = .05: tokens/s against target-only", ("bad-draft",), of("speedup"), least=0.97, form="{:.3f}"),
    Bar("64 requests: target busy", ("sixty-four",), of("target_busy"), least=0.95, form="{:.3f}"),
    Bar("default pair, 8 requests at once: tokens/s against one at a time", ("real",), batching, least=2.5),
)  # fmt: skip


def bench(run: str, seed: int, folder: Path) -> Report:
    """The report of a run, from its file where it was made before. Raises click.ClickException when it fails."""
    path = folder / f"{run}-{seed}.json"
    if not path.exists():
        command = [sys.executable, "-m", "orchestrator", "bench", *RUNS[run], "--seed", str(seed), "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise click.ClickException(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report


def table(bars: Sequence[Bar], values: Mapping[str, Sequence[float]]) -> str:
    """Markdown: a row a bar, median and every value."""
    lines = ["| what | bar | median | each seed | kept | runs |", "|---|---|---|---|---|---|"]
    for bar in bars:
        found = values[bar.what]
        middle = statistics.median(found)
        each = ", ".join(bar.form.format(value) for value in found)
        kept = "yes" if bar.kept(middle) else "**no**"
        lines.append(
            f"| {bar.what} | {bar.promise} | {bar.form.format(middle)} | {each} | {kept} | {', '.join(bar.runs)} |"
        )
    return "\n".join(lines)


def commands(runs: Sequence[str], seeds: Sequence[int]) -> str:
    """What was run, for a reader to repeat."""

    def quoted(argument: str) -> str:
        return f'"{argument}"' if " " in argument else argument

    lines = ["| run | `specdec-orchestrator bench` … `--seed " + "`, `".join(map(str, seeds)) + "` |", "|---|---|"]
    return "\n".join(lines + [f"| {run} | `{' '.join(map(quoted, RUNS[run]))}` |" for run in runs])


@click.command()
@click.option("--seeds", default="1", show_default=True, metavar="N,N,…", help="One value a seed.")
@click.option("--only", default="", metavar="TEXT", help="Only the bars of runs whose name contains TEXT.")
@click.option("--folder", default="bars", show_default=True, type=click.Path(file_okay=False, path_type=Path))
def main(seeds: str, only: str, folder: Path) -> None:
    """Print the table of bars, then the table of commands."""
    bars = [bar for bar in BARS if any(only in run for run in bar.runs)]
    if not bars:
        raise click.UsageError(f"--only {only}: no run's name contains it; there are {', '.join(RUNS)}")
    numbers = [int(part) for part in seeds.split(",")]
    runs = list(dict.fromkeys(run for bar in bars for run in bar.runs))
    folder.mkdir(parents=True, exist_ok=True)
    reports: dict[tuple[str, int], Report] = {}
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("runs", total=len(runs) * len(numbers))
        for seed in numbers:
            for run in runs:
                progress.update(task, description=f"{run}, seed {seed}")
                reports[run, seed] = bench(run, seed, folder)
                progress.advance(task)
    values = {bar.what: [bar.value(*(reports[run, seed] for run in bar.runs)) for seed in numbers] for bar in bars}
    machine = reports[runs[0], numbers[0]]["machine"]
    print(table(bars, values), commands(runs, numbers), f"Machine: {json.dumps(machine)}", sep="\n\n")


if __name__ == "__main__":
    main()
