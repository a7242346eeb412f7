"""Draw what both devices do, round by round, from traces that `bench --trace` or `generate --trace` wrote.

    python scripts/draw_timeline.py overlapped.jsonl taking-turns.jsonl --out docs/timeline.svg

One panel a trace, on one scale of time. A trace knows when a message left and when the answer came, and how long the
worker computed for it; a bar is put in the middle of its trip, so the pale ends are wire, queues and both loops.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

Line = Mapping[str, Any]
TARGET, DRAFT, BRANCHES, WIRE, TEXT = "#0969da", "#9a6700", "#d4a72c", "#d0d7de", "#57606a"
STYLE: dict[Any, Any] = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "timeline"}
LANES = {"target": 1.0, "draft": 0.0}
HEIGHT = 0.5
LEAD = 3.0  # ms before the round that is shown


def read_trace(path: str) -> list[list[Line]]:
    """Requests that speculated, each as its lines in order. Raises click.UsageError where there are none."""
    requests: dict[int, list[Line]] = {}
    try:
        with open(path, encoding="utf-8") as stream:
            for text in stream:
                line = json.loads(text)
                requests.setdefault(line["request"], []).append(line)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise click.UsageError(f"{path}: {error}; expected a file that --trace wrote") from error
    speculative = [lines for lines in requests.values() if sum(bool(line["proposed"]) for line in lines) > 1]
    if not speculative:
        raise click.UsageError(f"{path} has no request of two rounds with a block; run it with a draft, for longer")
    return speculative


def milliseconds(line: Line, name: str = "round") -> float:
    start, end = line["spans"][name]
    return float(end - start) * 1e3


def typical(requests: Sequence[Sequence[Line]]) -> tuple[Sequence[Line], int]:
    """The request and the place in it of a round that takes the median time of its kind.

    Rounds whose block was there already, where there are any; a round after which another follows.
    """
    places = [(lines, place) for lines in requests for place in range(1, len(lines) - 1) if lines[place]["proposed"]]
    hits = [(lines, place) for lines, place in places if lines[place]["origin"] == "branch"]
    chosen = hits or places
    middle = statistics.median(milliseconds(lines[place]) for lines, place in chosen)
    return min(chosen, key=lambda one: abs(milliseconds(one[0][one[1]]) - middle))


def bars(line: Line) -> Iterator[tuple[str, str, float, float, float]]:
    """(lane, colour, start, end, ms computed) of each trip that the round waited for or started."""
    seconds, spans, branches = line["seconds"], line["spans"], line["branches"]
    if spans["draft"] is not None:
        yield "draft", DRAFT, *spans["draft"], seconds["draft"] * 1e3
    yield "target", TARGET, *spans["verify"], seconds["verify"] * 1e3
    if spans["branches"] is not None:
        yield "draft", BRANCHES, *spans["branches"], branches["seconds"] * 1e3


def draw_round(axes: Axes, line: Line, zero: float) -> None:
    """Its trips, and the tokens that it committed."""
    for lane, colour, start, end, computed in bars(line):
        left, length = (start - zero) * 1e3, (end - start) * 1e3
        y = LANES[lane] - HEIGHT / 2
        axes.broken_barh([(left, length)], (y + 0.15, HEIGHT - 0.3), facecolors=WIRE, zorder=2)
        axes.broken_barh([(left + (length - computed) / 2, computed)], (y, HEIGHT), facecolors=colour, zorder=3)
    end = (line["spans"]["round"][1] - zero) * 1e3
    axes.plot([end, end], [-0.4, 1.4], color=TEXT, linewidth=0.8, linestyle=":", zorder=1)
    axes.text(end, 1.45, f"+{len(line['emitted'])}", ha="center", va="bottom", color=TEXT, clip_on=True)


def draw_panel(axes: Axes, path: str, window: float) -> None:
    """The rounds of a trace for `window` ms around a typical one, which is bracketed and described."""
    lines, place = typical(read_trace(path))
    shown = lines[place]
    zero = shown["spans"]["round"][0] - LEAD / 1e3
    for line in lines:
        if (line["spans"]["round"][0] - zero) * 1e3 < window and line["spans"]["round"][1] > zero:
            draw_round(axes, line, zero)
    right = LEAD + milliseconds(shown)
    axes.annotate(
        "", (LEAD, -0.62), (right, -0.62), arrowprops={"arrowstyle": "<->", "color": TEXT, "shrinkA": 0, "shrinkB": 0}
    )
    axes.text(LEAD, -0.72, described(shown), va="top", color=TEXT)
    axes.set_title(Path(path).stem.replace("-", " "), loc="left", fontsize=10)
    axes.set_xlim(0, window)
    axes.set_ylim(-1.1, 1.8)
    axes.set_yticks(list(LANES.values()), list(LANES))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def described(line: Line) -> str:
    """Where the round's time went."""
    whole, verify = milliseconds(line), line["seconds"]["verify"] * 1e3
    draft = line["seconds"]["draft"] * 1e3 if line["spans"]["draft"] is not None else 0.0
    parts = (
        [f"{verify:.1f} pass"] + ([f"{draft:.1f} draft"] if draft else []) + [f"{whole - verify - draft:.1f} between"]
    )
    return f"one round of {len(line['proposed'])} draft tokens: {whole:.1f} ms = {' + '.join(parts)}"


@click.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--out", required=True, metavar="FILE", help="The picture: .svg, .png or .pdf.")
@click.option("--window", default=150.0, show_default=True, type=click.FloatRange(1), help="Milliseconds to show.")
def main(traces: tuple[str, ...], out: str, window: float) -> None:
    """Draw one panel for each of TRACES, named after its file."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 0.6 + 1.9 * len(traces)), layout="constrained", facecolor="white")
        panels = figure.subplots(len(traces), sharex=True, squeeze=False)[:, 0]
        for axes, path in zip(panels, traces, strict=True):
            draw_panel(axes, path, window)
        panels[-1].set_xlabel("ms")
        names = {
            "target's pass": TARGET,
            "block drafted": DRAFT,
            "branches drafted meanwhile": BRANCHES,
            "on the way": WIRE,
        }
        handles = [Patch(color=colour, label=name) for name, colour in names.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        figure.savefig(out, dpi=160, metadata={"Date": None} if out.endswith(".svg") else None)


if __name__ == "__main__":
    main()
