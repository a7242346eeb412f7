"""The flags of `bench`. Imports click and dataclasses of defaults only: --help must be instant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from orchestrator.options import generate_options

MAX_TOKENS = 64  # enough rounds for a mean, few enough for a dozen prompts
MAX_CONCURRENCY = 1024
PLOT_GAMMAS = (1, 2, 4, 8)


class Numbers(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer releases only
    """Whole numbers with commas between them, each once, in a range."""

    name = "N,N,…"

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of whole numbers such as 1,8", param, ctx)
        if any(not self._least <= number <= self._most for number in numbers):
            self.fail(f"{value!r} is out of range: expected {self._least} to {self._most}", param, ctx)
        if len(set(numbers)) < len(numbers):
            self.fail(f"{value!r} names a number twice", param, ctx)
        return numbers


_OPTIONS = (
    click.option(
        "--concurrency",
        type=Numbers(1, MAX_CONCURRENCY),
        default="1",
        show_default=True,
        metavar="N,N,…",
        help="Requests at once; several numbers are measured one after the other.",
    ),
    click.option(
        "--requests",
        type=click.IntRange(1),
        metavar="N",
        help="Requests in each mode at each concurrency, rounded up to whole batches.  "
        "[default: 5 batches, and every prompt once]",
    ),
    click.option(
        "--synthetic",
        metavar="SPEC",
        help='Devices that wait instead of models, and random prompts: "target=30ms draft=3ms alpha=0.8 rtt=0ms '
        'vocab=4096 bandwidth=1Gbps entropy=2.7 seed=0 token=0ms", each with this default.',
    ),
    click.option(
        "--gammas",
        type=Numbers(1, 64),
        metavar="N,N,…",
        help=f"More γ to measure, each fixed, at the last concurrency; with --plot {','.join(map(str, PLOT_GAMMAS))} "
        "where it's not given.",
    ),
    click.option("--json", "json_file", metavar="FILE", help="Write one JSON object; - is standard output."),
    click.option(
        "--plot", "plot_file", metavar="FILE", help="Draw speed-up over γ, measured and predicted: .svg, .png or .pdf."
    ),
    click.option("--trace", "trace_file", metavar="FILE", help="Write one JSON line a round."),
)


def bench_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the benchmark's flags and the sampling flags to a command, with its own default of --max-tokens."""
    command = generate_options(command)
    for parameter in command.__click_params__:  # type: ignore[attr-defined]  # click's own list, before it's a Command
        if parameter.name == "max_tokens":
            parameter.default = MAX_TOKENS
    for option in reversed(_OPTIONS):  # last applied, first listed
        command = option(command)
    return command
