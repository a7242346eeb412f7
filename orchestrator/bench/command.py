"""The command `bench`: check everything, start both workers, measure, then report. Progress on a terminal's stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress

from orchestrator.bench.machine import described
from orchestrator.bench.measure import PLAIN, SPECULATIVE, Mode, Plan, Work, make_plan, measure
from orchestrator.bench.options import PLOT_GAMMAS
from orchestrator.bench.report import plain_console, show
from orchestrator.bench.samples import Batch
from orchestrator.bench.summary import Pairs, by_category, describe
from orchestrator.bench.synthetic import Synthetic, parse_synthetic
from orchestrator.bench.workload import Prompt, load_prompts, random_prompts, shipped_prompts
from orchestrator.config import RuntimeConfig
from orchestrator.errors import UsageError
from orchestrator.request import GenerateOptions
from orchestrator.runtime import Runtime
from orchestrator.stats import TraceSink
from protocol.link import Link

PLOT_ENDINGS = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class BenchJob:
    """One call of the command."""

    config: RuntimeConfig
    options: GenerateOptions
    files: tuple[str, ...]
    concurrency: tuple[int, ...]
    requests: int | None
    synthetic: str | None
    gammas: tuple[int, ...] | None
    json_file: str | None
    plot_file: str | None
    trace_file: str | None


async def run_bench(job: BenchJob) -> int:
    """Returns the exit status."""
    if job.synthetic is not None and job.files:
        raise UsageError(f"--synthetic reads no text: leave out {job.files[0]}")
    synthetic = None if job.synthetic is None else parse_synthetic(job.synthetic)
    config = dataclasses.replace(job.config, kept_tokens=0)  # both modes run the same prompts: each is prefilled anew
    config = config if synthetic is None else synthetic.configure(config)
    options = dataclasses.replace(job.options, seed=job.options.seeded())
    _check(job, config)
    prompts = _prompts(job, synthetic)
    for path in (job.json_file, job.plot_file):
        _check_writable(path)
    with _trace(job.trace_file) as trace:
        async with Runtime(config, draft_link=Link if synthetic is None else synthetic.link.link) as runtime:
            work, left_out = _work(runtime, prompts, options.max_tokens)
            plans = [_plan(job, work, index) for index in range(len(job.concurrency))]
            report = described(runtime, config, options, job.synthetic)
            gc.freeze()  # what is loaded stays: looking through it again would stall a round
            measured = await _measure(runtime, plans, options, trace)
    overlap = config.overlap == "on"
    results = [_result(plan, groups, overlap=overlap) for plan, groups in zip(plans, measured, strict=True)]
    report = {"results": results, "summary": results[-1], **report}
    console = plain_console(sys.stderr if job.json_file == "-" else sys.stdout, terminal=_on_terminal(job))
    show(results, _notes(results, left_out, report), console, overlap=overlap)
    _write(job, report)
    return 0


# ---------------------------------------------------------------- before anything starts


def _check(job: BenchJob, config: RuntimeConfig) -> None:
    if config.draft_place is None or config.gamma == 0:
        raise UsageError(
            "bench compares with target-only decoding: leave out --draft none and --gamma 0, it runs that anyway"
        )
    if job.options.max_tokens < 2:
        raise UsageError(f"--max-tokens {job.options.max_tokens} has no rate: expected at least 2")
    if job.plot_file is not None and not job.plot_file.endswith(PLOT_ENDINGS):
        raise UsageError(f"--plot {job.plot_file}: expected a name that ends in {', '.join(PLOT_ENDINGS)}")


def _prompts(job: BenchJob, synthetic: Synthetic | None) -> list[Prompt]:
    if synthetic is None:
        return load_prompts(job.files) if job.files else shipped_prompts()
    count = max(job.requests or 0, 5 * max(job.concurrency))
    return random_prompts(count, synthetic.vocab, synthetic.seed)


def _check_writable(path: str | None) -> None:
    """Now, rather than after minutes of measuring."""
    if path is None or path == "-":
        return
    place = Path(path)
    if place.is_dir() or not os.access(place if place.exists() else place.absolute().parent, os.W_OK):
        raise UsageError(f"{path} can't be written: name a file in a folder that is there and is yours")


@contextlib.contextmanager
def _trace(path: str | None) -> Iterator[TraceSink | None]:
    if path is None:
        yield None
        return
    try:
        stream = open(path, "w", encoding="utf-8")  # noqa: SIM115  # only opening it may be the user's fault
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror}; name a file that can be written") from error
    with stream:
        yield TraceSink(stream)


# ---------------------------------------------------------------- running


def _work(runtime: Runtime, prompts: Sequence[Prompt], max_tokens: int) -> tuple[list[Work], int]:
    """Prompts as tokens, and how many are left out: the target's context has no room for them and `max_tokens`."""
    room = runtime.target.welcome.context_length - max_tokens
    work = [Work(one.tokens or tuple(runtime.text.encode(one.text, raw=False)), one.category) for one in prompts]
    fitting = [one for one in work if len(one.tokens) <= room]
    if not fitting:
        raise UsageError(f"no prompt fits: each has more than {room} tokens; lower --max-tokens or shorten them")
    return fitting, len(work) - len(fitting)


def _plan(job: BenchJob, work: Sequence[Work], index: int) -> Plan:
    """The fixed γ are measured beside the last concurrency."""
    gammas = job.gammas or (PLOT_GAMMAS if job.plot_file else ())
    extra = [Mode(f"γ = {gamma}", gamma) for gamma in gammas] if index == len(job.concurrency) - 1 else []
    concurrency = job.concurrency[index]
    chosen = work if job.synthetic is None else work[: max(job.requests or 0, 5 * concurrency)]
    return make_plan(chosen, concurrency, job.requests, [PLAIN, SPECULATIVE, *extra])


async def _measure(
    runtime: Runtime, plans: Sequence[Plan], options: GenerateOptions, trace: TraceSink | None
) -> list[list[Mapping[Mode, Batch]]]:
    measured = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        for plan in plans:
            task = progress.add_task(f"{plan.concurrency} at a time", total=plan.batches)
            measured.append(await measure(runtime, plan, options, trace, functools.partial(progress.advance, task)))
    return measured


# ---------------------------------------------------------------- reporting


def _result(plan: Plan, groups: Sequence[Mapping[Mode, Batch]], *, overlap: bool) -> dict[str, Any]:
    def pairs(mode: Mode) -> Pairs:
        return Pairs(tuple(group[PLAIN] for group in groups), tuple(group[mode] for group in groups))

    main = pairs(SPECULATIVE)
    fixed = [
        {"fixed": mode.gamma, **describe(plan.concurrency, pairs(mode), overlap=overlap)} for mode in plan.modes[2:]
    ]
    return {
        **describe(plan.concurrency, main, overlap=overlap),
        "categories": by_category(main),
        "gammas": fixed,
    }


def _notes(results: Sequence[Mapping[str, Any]], left_out: int, report: Mapping[str, Any]) -> list[str]:
    notes = ["Pairs run the same prompts in both modes, in the same processes. A first, warm-up pair isn't counted."]
    whole = sum(result["whole_batches"] for result in results)
    if whole:
        notes.append(f"{whole} batches count from first to last token: a stream ended too early for a steady part.")
    if left_out:
        notes.append(f"{left_out} prompts were left out: the target's context has no room for them and --max-tokens.")
    notes.append(f"Seed {report['config']['seed']}; {report['machine']['cpu']}, {report['machine']['cores']} cores.")
    return notes


def _on_terminal(job: BenchJob) -> bool:
    return (sys.stderr if job.json_file == "-" else sys.stdout).isatty()


def _write(job: BenchJob, report: Mapping[str, Any]) -> None:
    text = json.dumps(report, ensure_ascii=False, indent=2) + "\n"
    if job.plot_file is not None:
        from orchestrator.bench.plot import draw  # matplotlib takes a second to import

        with _writing(job.plot_file):
            draw(report, job.plot_file)
    if job.json_file == "-":
        sys.stdout.write(text)
    elif job.json_file is not None:
        with _writing(job.json_file):
            Path(job.json_file).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _writing(path: str) -> Iterator[IO[str] | None]:
    try:
        yield None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a file that can be written") from error
