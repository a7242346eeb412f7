"""The benchmark's table: one block a concurrency, a column for each of the two modes, readable at 100 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

WIDTH = 100  # where the output is no terminal
Result = Mapping[str, Any]


def show(results: Sequence[Result], notes: Sequence[str], console: Console, *, overlap: bool) -> None:
    """Write every block, then the notes. `overlap`: which form of the prediction applies."""
    for result in results:
        console.print(_block(result, overlap=overlap))
        console.print()
    for note in notes:
        console.print(Text(note))


def plain_console(stream: Any, *, terminal: bool) -> Console:
    """Colours and the terminal's width on a terminal; plain text of WIDTH columns elsewhere."""
    return Console(file=stream) if terminal else Console(file=stream, width=WIDTH, no_color=True, force_terminal=False)


def _block(result: Result, *, overlap: bool) -> Group:
    concurrency, requests, groups = result["concurrency"], result["requests"], result["groups"]
    head = f"{concurrency} at a time: {requests} requests in each mode, medians of {groups} pairs of batches"
    if concurrency == 1:
        head = f"1 request at a time: {requests} in each mode, medians of {groups} pairs"
    return Group(Text(head, style="bold"), _modes(result), _rounds(result, overlap=overlap))


def _modes(result: Result) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("target only", justify="right")
    table.add_column("speculative", justify="right")
    rows = (
        ("tokens/s", "tokens_per_second", "{:,.1f}"),
        ("time to first token, median", "ttft_ms", "{:,.1f} ms"),
        ("time to first token, p99", "ttft_p99_ms", "{:,.1f} ms"),
        ("time per token, median", "tpot_ms", "{:,.2f} ms"),
        ("time per token, p99", "tpot_p99_ms", "{:,.2f} ms"),
        ("target busy", "target_busy", "{:.1%}"),
        ("rows a target pass", "rows_per_pass", "{:.2f}"),
    )
    for label, key, form in rows:
        table.add_row(label, form.format(result[f"target_only_{key}"]), form.format(result[key]))
    table.add_row("tokens a row of a target pass", "1.00", f"{result['tokens_per_pass']:.2f}")
    return table


def _rounds(result: Result, *, overlap: bool) -> Table:
    low, high = result["speedup_range"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    rows = {
        "speed-up": f"{result['speedup']:.2f} measured, from {low:.2f} to {high:.2f} over the pairs",
        "predicted": f"{_predictions(result, overlap=overlap)}; measured/predicted {result['ratio']:.3f}",
        "α, τ": f"{result['alpha']:.3f} of the tested draft tokens accepted, {result['tau']:.2f} tokens a round",
        "accepted at 1, 2, …": " ".join(f"{share:.2f}" for share in result["accepted_per_position"]) or "-",
        "γ": f"{result['gamma']:.2f} draft tokens a block; chosen {_chosen(result['gamma_chosen'])}",
        "c, v": f"{result['c']:.3f}, {result['v']:.3f} (a target step is {result['target_step_ms']:.2f} ms, "
        f"a draft step {result['draft_step_ms']:.2f} ms)",
        "r": f"{result['r_ms']:.2f} ms a round, {result['target_only_r_ms']:.2f} ms target only{_waiting(result)}",
        "hit share h": f"{result['hit_share']:.3f} in time, of {result['branches']:.1f} branches a round; "
        f"{result['branch_share']:.3f} of the blocks came of branches, late or not"
        if result["branches"]
        else "no branches",
        "wire": f"{result['wire_bytes_per_draft_token']:,.0f} bytes a draft token to the target, "
        f"{result['branch_bytes_per_draft_token']:,.0f} of branches from the draft",
    }
    for label, text in rows.items():
        table.add_row(label, text)
    return table


def _predictions(result: Result, *, overlap: bool) -> str:
    """The form that applies first."""
    in_turn = f"{result['predicted_in_turn']:.2f} taking turns"
    overlapped = f"{result['predicted_overlapped']:.2f} overlapped"
    return f"{overlapped} ({in_turn})" if overlap else f"{in_turn} ({overlapped})"


def _chosen(histogram: Mapping[str, int]) -> str:
    """Shares of the rounds by γ, the five most frequent, in order of γ."""
    total = sum(histogram.values())
    most = sorted(sorted(histogram, key=lambda g: -histogram[g])[:5], key=int)
    listed = ", ".join(f"{gamma} in {histogram[gamma] / total:.0%}" for gamma in most) if total else "never"
    return listed + (", others" if len(histogram) > len(most) else "")


def _waiting(result: Result) -> str:
    return " (waits for other requests in it)" if result["concurrency"] > 1 else ""
