"""The benchmark's statistics on made-up rounds whose answers are worked out by hand, its table and its plot."""

from __future__ import annotations

import dataclasses
import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bench.plot import draw
from orchestrator.bench.rates import p99, rates, tpot_ms, ttft_ms, window
from orchestrator.bench.report import plain_console, show
from orchestrator.bench.samples import Batch, Recorder, Sample, Stream
from orchestrator.bench.summary import Costs, Pairs, Rounds, by_category, costs, describe, predicted, rounds
from orchestrator.goodput import overlapped_speedup, speedup
from orchestrator.request import Branching, GenerateOptions, Proposal, Request, Round, Span, Verified

ISSUE_KEYS = {
    "speedup", "predicted", "ratio", "tau", "alpha", "c", "v", "r_ms", "hit_share", "target_busy", "tokens_per_pass",
    "wire_bytes_per_draft_token", "tokens_per_second", "target_only_tokens_per_second", "ttft_ms", "tpot_ms",
}  # fmt: skip


def step(at: float, **changes: Any) -> Sample:
    """A round without a block."""
    fields = {"wall": 0.1, "gamma": 0, "drafted": 0, "accepted": 0, "emitted": 1, "verify_seconds": 0.1}
    return Sample(at=at, **{**fields, **changes})


def stream(samples: Sequence[Sample], started: float = 0.0, tokens: Sequence[int] | None = None, category: str = ""):
    emitted = sum(one.emitted for one in samples)
    return Stream(started, tuple(samples), tuple(tokens if tokens is not None else range(emitted)), category)


def plain_stream(count: int = 13, category: str = "") -> Stream:
    """A token every 0.2 s, of which the target computes 0.16."""
    return stream([step(0.2 * n, wall=0.19, verify_seconds=0.16) for n in range(1, count + 1)], category=category)


def fast_stream(category: str = "") -> Stream:
    """Four rounds of γ = 4 after the first: 5, 2, 1 and 4 tokens in 0.3 s each, of which drafting takes 0.08."""
    block = {
        "gamma": 4,
        "drafted": 4,
        "wall": 0.3,
        "verify_seconds": 0.2,
        "draft_seconds": 0.08,
        "draft_steps": 4,
        "bytes_sent": 1000,
    }
    samples = [step(0.3)]
    for place, (accepted, emitted) in enumerate(((4, 5), (1, 2), (0, 1), (3, 4))):
        asked = {"branches": 10, "branch_bytes": 4000, "branch_seconds": 0.15, "branch_steps": 5, "hit": place != 1}
        samples.append(step(0.6 + 0.3 * place, accepted=accepted, emitted=emitted, last=place == 3, **block, **asked))
    return stream(samples, category=category)


def pairs(count: int = 5) -> Pairs:
    return Pairs((Batch((plain_stream(),)),) * count, (Batch((fast_stream(),)),) * count)


# ---------------------------------------------------------------- windows and rates


def test_the_steady_window() -> None:
    """Two streams, first tokens at 1 and 2, ends at 4 and 5: four tokens in (2, 4], from two shared passes of 0.5 s."""
    shared = {"rows": 2, "verify_seconds": 0.5}
    batch = Batch(tuple(stream([step(at, **shared) for at in range(first, first + 4)]) for first in (1, 2)))
    span = window(batch)
    assert (span.start, span.end, span.whole) == (2, 4, False)
    found = rates(batch)
    assert found.tokens_per_second == 2.0 and found.target_busy == 0.5 and found.rows_per_pass == 2.0


def test_of_a_pass_that_the_window_cuts_only_the_part_in_it_is_busy_time() -> None:
    """The window is (2, 4]; passes of .8 s end at 2.4 and 3.4 and, outside, at 4.4: .4 + .8 + .4 s of its 2."""
    one = stream([step(at, verify_seconds=0.8) for at in (1.4, 2.4, 3.4, 4.4)])
    other = stream([step(at, verify_seconds=0.0) for at in (2, 3, 4)])
    assert (window(Batch((one, other))).start, window(Batch((one, other))).end) == (2, 4)
    assert rates(Batch((one, other))).target_busy == pytest.approx(1.6 / 2)


def test_a_batch_whose_stream_ends_at_once_counts_whole() -> None:
    """From the first token of all to the last: 3 of the first stream's 4 tokens, and the other's, in 3 s."""
    batch = Batch((stream([step(at) for at in (1, 2, 3, 4)]), stream([step(2.5)])))
    assert window(batch).whole
    assert rates(batch).tokens_per_second == pytest.approx(4 / 3)


def test_a_batch_of_one_round_counts_from_its_start() -> None:
    batch = Batch((stream([step(4.0, emitted=8)], started=2.0),))
    assert rates(batch).tokens_per_second == 4.0


def test_times_to_tokens() -> None:
    streams = [stream([step(1.5), step(2.5, emitted=4)], started=1.0), stream([step(3.0)], started=1.0)]
    assert ttft_ms(streams) == [500.0, 2000.0]
    assert tpot_ms(streams) == [250.0]  # 4 tokens after the first, in a second; one token has no rate
    assert p99([]) == 0.0 and p99([float(n) for n in range(101)]) == 99.0


# ---------------------------------------------------------------- rounds and costs


def test_samples_of_rounds() -> None:
    """A block that came after branches, and took fewer passes than it has tokens, was mostly there: no drafting."""
    late = Proposal((5, 6, 7), "draft", 0.001, origin="drafted", steps=1)
    missed = dataclasses.replace(late, seconds=0.009, steps=3)
    verdict = Verified(2, 9, "correction", 0.03, 0.001, bytes_sent=300, rows=2)
    asked = Branching(asked=16, width=8, hit=True, seconds=0.02, steps=4, bytes_received=900)
    recorder = Recorder("qa", None)
    request = Request(1, (1, 2), GenerateOptions(), 0, frozenset(), 100)
    for index, (proposal, branching) in enumerate(((late, asked), (late, None), (late, asked), (missed, None))):
        done = Round(index, 2, proposal, verdict, (5, 6, 9), None, 3, branching, Span(1.0, 1.5))
        recorder.write(request, done)
    found = recorder.stream()
    assert found.category == "qa" and found.tokens == (5, 6, 9) * 4
    assert [one.from_branch for one in found.samples] == [False, True, False, False]
    first = found.samples[0]
    assert (first.wall, first.gamma, first.drafted, first.accepted, first.emitted) == (0.5, 3, 3, 2, 3)
    assert (first.verify_seconds, first.rows, first.bytes_sent) == (0.03, 2, 300)
    assert (first.branches, first.branch_bytes, first.branch_seconds, first.hit) == (8, 900, 0.02, True)
    assert found.samples[1].branches is None and not found.samples[1].hit


def test_rounds_by_hand() -> None:
    """4, 1, 0 and 3 of 4 accepted: 8 of the 11 that were tested."""
    found = rounds([*fast_stream().samples[1:], step(9.0)])
    assert found.alpha == pytest.approx(8 / 11)
    assert found.tau == 3.0 and found.gamma == 4.0 and found.block_share == 0.8
    assert found.accepted_per_position == [0.75, 0.5, 0.5, 0.25]
    of_two_lengths = [step(1.0, drafted=1, accepted=1), step(2.0, drafted=3, accepted=2)]
    assert rounds(of_two_lengths).accepted_per_position == [1.0, 1.0, 0.0]  # only one of them had a second token


def test_costs_by_hand() -> None:
    plain, blocks = plain_stream().samples, list(fast_stream().samples)
    found = costs(plain, blocks)
    assert found.step_seconds == 0.16 and found.c == pytest.approx(0.02 / 0.16) and found.v == pytest.approx(1.25)
    assert found.r_seconds == pytest.approx(0.3 - 0.2 - 0.08) and found.r == pytest.approx(0.125)
    assert found.plain_r_seconds == pytest.approx(0.03) and found.v_by_gamma == {4: pytest.approx(1.25)}


def test_costs_where_every_block_was_a_branch() -> None:
    """The draft's step is then that of the branches, and nothing of drafting is left in the round."""
    hit = {"from_branch": True, "draft_seconds": 0.0, "wall": 0.21}
    blocks = [dataclasses.replace(one, **hit) for one in fast_stream().samples if one.drafted]
    found = costs(plain_stream().samples, blocks)
    assert found.c == pytest.approx(0.03 / 0.16) and found.branch == pytest.approx(0.15 / 0.16)
    assert found.r_seconds == pytest.approx(0.01)


def test_prediction() -> None:
    """The two forms; rounds without a block bring one token in one step each."""
    cost = Costs(0.1, 0.01, c=0.1, v=1.1, v_by_gamma={}, branch=1.2, r_seconds=0.002, plain_r_seconds=0.0)
    all_blocks = Rounds(3.36, 0.8, 4.0, block_share=1.0, branch_share=0.75, accepted_per_position=[])
    assert predicted(all_blocks, cost, overlap=False) == pytest.approx(3.36 / (1.1 + 0.4 + 0.02))
    overlapped = overlapped_speedup(3.36, v=1.1, gamma=4.0, c=0.1, r=0.02, h=0.75, branch=1.2)
    assert predicted(all_blocks, cost, overlap=True) == pytest.approx(overlapped)
    assert overlapped > speedup(3.36, v=1.1, gamma=4.0, c=0.1, r=0.02)
    waiting = dataclasses.replace(cost, plain_r_seconds=0.05)  # half a step, with each round of target-only too
    assert predicted(all_blocks, waiting, overlap=False) == pytest.approx(3.36 / 1.52)
    assert predicted(all_blocks, waiting, overlap=False, waits=True) == pytest.approx(1.5 * 3.36 / 1.52)
    half = dataclasses.replace(all_blocks, block_share=0.5)
    assert predicted(half, cost, overlap=False) == pytest.approx((3.36 + 1) / (1.52 + 1))
    assert predicted(dataclasses.replace(all_blocks, block_share=0.0), cost, overlap=True) == 1.0


# ---------------------------------------------------------------- the report


def test_describe() -> None:
    """12 tokens in 1.2 s against 12 in 2.4; the last round asked for branches that nothing could follow."""
    found = describe(1, pairs(), overlap=False)
    assert set(found) >= ISSUE_KEYS
    assert all(isinstance(found[key], int | float) for key in ISSUE_KEYS)
    assert found["tokens_per_second"] == pytest.approx(10) and found["target_only_tokens_per_second"] == pytest.approx(
        5
    )
    assert found["speedup"] == pytest.approx(2) and found["speedup_range"] == pytest.approx([2, 2])
    assert found["predicted"] == pytest.approx(3 / (1.25 + 4 * 0.125 + 0.125)) == found["predicted_in_turn"]
    assert found["ratio"] == pytest.approx(2 / found["predicted"])
    assert found["hit_share"] == pytest.approx(2 / 3) and found["branches"] == 10
    assert found["wire_bytes_per_draft_token"] == 250 and found["branch_bytes_per_draft_token"] == 1000
    assert found["tokens_per_pass"] == 3 and found["target_busy"] == pytest.approx(0.8 / 1.2)
    assert found["gamma_chosen"] == {"4": 20} and found["requests"] == found["groups"] == 5
    assert found["ttft_ms"] == pytest.approx(300) and found["tpot_ms"] == pytest.approx(100)
    assert found["same_output"] == 1.0


def test_the_speedup_is_the_median_of_the_ratios() -> None:
    """One pair ran on a machine that was twice as slow in one mode: the others decide."""
    slow = stream([dataclasses.replace(one, at=one.at * 2) for one in fast_stream().samples], tokens=[9] * 13)
    five = pairs()
    found = describe(1, Pairs(five.plain, (*five.speculative[:4], Batch((slow,)))), overlap=False)
    assert found["speedup"] == pytest.approx(2) and found["speedup_range"] == pytest.approx([1, 2])
    assert found["same_output"] == 0.8


def test_categories() -> None:
    plain = [Batch((plain_stream(category="qa"), plain_stream(category="rag")))]
    fast = [Batch((fast_stream("qa"), stream([step(0.2 * n) for n in range(1, 14)], category="rag")))]
    found = by_category(Pairs(tuple(plain), tuple(fast)))
    assert found["qa"]["tpot_speedup"] == pytest.approx(2) and found["rag"]["tpot_speedup"] == pytest.approx(1)
    assert found["qa"]["alpha"] == pytest.approx(8 / 11) and found["rag"]["alpha"] == 0.0


def report(overlap: str = "on") -> dict[str, Any]:
    fixed = [{"fixed": 2, **describe(1, pairs(), overlap=True), "gamma": 2.0}]
    summary = {**describe(1, pairs(), overlap=overlap == "on"), "gammas": fixed}
    return {
        "results": [summary],
        "summary": summary,
        "config": {"gamma": "auto", "overlap": overlap, "verify": "coupled"},
    }


def test_the_table_fits_100_columns() -> None:
    out = io.StringIO()
    show(report()["results"] * 2, ["a note"], plain_console(out, terminal=False), overlap=True)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100 and "\x1b" not in out.getvalue()
    assert any("speed-up" in line and "2.00 measured" in line for line in lines)
    assert any("tokens/s" in line and "5.0" in line and "10.0" in line for line in lines)
    assert lines[-1] == "a note"


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_the_plot_is_written(tmp_path: Path, overlap: str) -> None:
    path = tmp_path / "plot.svg"
    draw(report(overlap), str(path))
    texts = {node.text for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}
    assert {"measured, γ auto", "target only", "γ, draft tokens in a block"} <= texts
    assert ("predicted, overlapped" in texts) == (overlap == "on")
