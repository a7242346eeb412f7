"""Speed-up over γ: the predicted curve from the measured α, c, v(γ), r and h, with the measured points on it.

The only file that imports matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from orchestrator.goodput import expected_tokens, overlapped_speedup, speedup

Floats = npt.NDArray[np.float64]
INCHES = (7.0, 4.4)
STYLE: dict[Any, Any] = {  # Any: newer releases name every key in a type, older ones don't
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "bench",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
MEASURED, PREDICTED, QUIET = "#c2410c", "#1d4ed8", "#6b7280"


@dataclass(frozen=True)
class Point:
    """One measured setting; `gamma` is the mean of its blocks."""

    adaptive: bool  # γ auto
    gamma: float
    speedup: float
    low: float
    high: float
    branch_share: float


@dataclass(frozen=True)
class Curve:
    """What the prediction is made of: numbers measured beside the points."""

    alpha: float
    c: float
    r: float
    unit: float  # a target-only round with its waits, where several requests wait for one another
    v: Mapping[float, float]  # by γ, in target steps; 1 at γ = 0
    h: Mapping[float, float]  # by γ
    branch: Mapping[float, float]  # by γ: the draft's run of branches behind a pass

    def at(self, gamma: float, *, overlap: bool) -> float:
        """The predicted speed-up."""
        tau = expected_tokens(self.alpha, gamma)
        v = _interpolated(self.v, gamma)
        if overlap:
            hidden = {"h": _interpolated(self.h, gamma), "branch": _interpolated(self.branch, gamma)}
            return self.unit * overlapped_speedup(tau, v=v, gamma=gamma, c=self.c, r=self.r, **hidden)
        return self.unit * speedup(tau, v=v, gamma=gamma, c=self.c, r=self.r)


def draw(report: Mapping[str, Any], path: str) -> None:
    """Write the picture of the report's summary; the ending of `path` says in which format. Raises OSError."""
    points, curve = _points(report), _curve(report["summary"])
    overlap = report["config"]["overlap"] == "on"
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        axes = figure.add_subplot()
        _draw_curves(axes, points, curve, overlap=overlap)
        _draw_points(axes, points)
        _label(axes, report)
        figure.legend(
            frameon=False, loc="outside lower center", ncols=4, fontsize=9, columnspacing=1.4, handlelength=1.6
        )
        metadata = {"Date": None} if path.endswith(".svg") else None  # the same numbers give the same file
        figure.savefig(path, dpi=160, metadata=metadata)


def _points(report: Mapping[str, Any]) -> list[Point]:
    summary, chosen = report["summary"], report["config"]["gamma"]
    found = [_point(summary, adaptive=chosen == "auto")] if summary["block_share"] else []
    return found + [_point(result, adaptive=False) for result in summary["gammas"] if result["fixed"] != chosen]


def _point(result: Mapping[str, Any], *, adaptive: bool) -> Point:
    low, high = result["speedup_range"]
    return Point(adaptive, result["gamma"], result["speedup"], low, high, result["branch_share"])


def _curve(summary: Mapping[str, Any]) -> Curve:
    """From the fixed γ where there are any: those are many rounds each. Else from what the run happened to choose."""
    results: Sequence[Mapping[str, Any]] = [summary, *summary["gammas"]]
    blocks = [result for result in results if result["block_share"]]
    steady = [result for result in blocks if "fixed" in result] or blocks
    v = {0.0: 1.0, **{float(result["fixed"]): result["v"] for result in steady if "fixed" in result}}
    if len(v) == 1:
        v |= {float(gamma): value for gamma, value in summary["v_by_gamma"].items()}
    return Curve(
        alpha=float(np.median([result["alpha"] for result in blocks])) if blocks else 0.0,
        c=float(np.median([result["c"] for result in blocks])) if blocks else 0.0,
        r=float(np.median([result["r_ms"] / result["target_step_ms"] for result in blocks])) if blocks else 0.0,
        unit=1.0 if summary["concurrency"] == 1 else 1 + summary["target_only_r_ms"] / summary["target_step_ms"],
        v=v,
        h={result["gamma"]: result["branch_share"] for result in steady} or {0.0: 0.0},
        branch={0.0: 0.0, **{result["gamma"]: result["branch_run"] for result in steady}},
    )


def _interpolated(known: Mapping[float, float], gamma: float) -> float:
    """Linear between what is known, constant outside of it."""
    places = sorted(known)
    return float(np.interp(gamma, places, [known[place] for place in places]))


def _draw_curves(axes: Axes, points: Sequence[Point], curve: Curve, *, overlap: bool) -> None:
    furthest = max([point.gamma for point in points] + [4.0])
    gammas = np.linspace(0.0, furthest + 0.5, 200)
    forms = [(False, "predicted, taking turns")] + ([(True, "predicted, overlapped")] if overlap else [])
    for form, label in forms:
        main = form == overlap
        values = [curve.at(float(gamma), overlap=form) for gamma in gammas]
        style: dict[str, Any] = {"color": PREDICTED if main else QUIET, "linewidth": 2.0 if main else 1.2}
        axes.plot(gammas, values, label=label, linestyle="-" if main else "--", zorder=2, **style)
    axes.axhline(1.0, color=QUIET, linewidth=1.0, zorder=1)
    axes.annotate("target only", (furthest + 0.5, 1.0), (0, 4), textcoords="offset points", ha="right", color=QUIET)


def _draw_points(axes: Axes, points: Sequence[Point]) -> None:
    """With the range of the pairs; γ auto has a mark of its own."""
    for adaptive, mark, label in ((False, "o", "measured, γ fixed"), (True, "D", "measured, γ auto")):
        chosen = [point for point in points if point.adaptive == adaptive]
        if chosen:
            spread = [[p.speedup - p.low for p in chosen], [p.high - p.speedup for p in chosen]]
            axes.errorbar(
                [p.gamma for p in chosen],
                [p.speedup for p in chosen],
                yerr=spread,
                fmt=mark,
                markersize=7,
                color=MEASURED,
                markerfacecolor="white" if adaptive else MEASURED,
                markeredgewidth=1.5,
                elinewidth=1.0,
                label=label,
                zorder=4 if adaptive else 3,
            )


def _label(axes: Axes, report: Mapping[str, Any]) -> None:
    summary = report["summary"]
    axes.set_xlabel("γ, draft tokens in a block")
    axes.set_ylabel("speed-up over target-only decoding")
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(left=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(
        f"{report['config']['verify']}, {summary['concurrency']} at a time: α {summary['alpha']:.2f}, "
        f"c {summary['c']:.2f}"
        + (f", r {summary['r_ms']:.1f} ms" if summary["concurrency"] == 1 else "")
        + (f", hit share {summary['hit_share']:.2f}" if summary["branches"] else ""),
        loc="left",
        fontsize=10,
        color=QUIET,
    )
