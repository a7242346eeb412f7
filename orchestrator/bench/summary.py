"""What the benchmark reports of one mode at one concurrency, against target-only batches on the same prompts.

The keys of the JSON object are made here. α, τ and the costs come from all rounds in the steady windows, rates from
batch medians, and the speed-up is the median of the ratios group by group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.bench.rates import median, p99, rates, steady_samples, tpot_ms, ttft_ms, window
from orchestrator.bench.samples import Batch, Sample
from orchestrator.goodput import overlapped_speedup, speedup


@dataclass(frozen=True)
class Pairs:
    """Batches of one mode and target-only batches on the same prompts, group by group."""

    plain: tuple[Batch, ...]
    speculative: tuple[Batch, ...]

    @property
    def speedups(self) -> list[float]:
        both = zip(self.speculative, self.plain, strict=True)
        return [rates(fast).tokens_per_second / rates(plain).tokens_per_second for fast, plain in both]


@dataclass(frozen=True)
class Costs:
    """What a round cost. Times in target steps, but for the seconds."""

    step_seconds: float  # a target pass of one token a row, at this concurrency
    draft_step_seconds: float
    c: float
    v: float  # over the rounds that had a block
    v_by_gamma: dict[int, float]
    branch: float  # the draft's run of branches behind a pass
    r_seconds: float
    plain_r_seconds: float  # the same of a target-only round; the formula takes it as 0

    @property
    def r(self) -> float:
        return _ratio(self.r_seconds, self.step_seconds)

    @property
    def plain_r(self) -> float:
        return _ratio(self.plain_r_seconds, self.step_seconds)


@dataclass(frozen=True)
class Rounds:
    """What the rounds brought."""

    tau: float  # tokens a round, over those that had a block
    alpha: float  # accepted of the draft tokens that were tested: those after a refused one never were
    gamma: float  # draft tokens in a block
    block_share: float  # of the rounds that had a block
    branch_share: float  # of the blocks that were drafted behind the round before
    accepted_per_position: list[float]


def costs(plain: Sequence[Sample], speculative: Sequence[Sample]) -> Costs:
    """Medians; the draft's step is that of a block drafted by itself, or else of the branches."""
    step = median(one.verify_seconds for one in plain)
    blocks = [one for one in speculative if one.drafted]
    drafting = [one.draft_seconds / one.draft_steps for one in blocks if one.draft_steps and not one.from_branch]
    runs = [one for one in speculative if one.branch_steps]
    drafting = drafting or [one.branch_seconds / one.branch_steps for one in runs]
    lengths = sorted({one.drafted for one in blocks})
    by_gamma = {g: [one.verify_seconds for one in blocks if one.drafted == g] for g in lengths}
    return Costs(
        step_seconds=step,
        draft_step_seconds=median(drafting),
        c=_ratio(median(drafting), step),
        v=_ratio(median(one.verify_seconds for one in blocks), step),
        v_by_gamma={g: _ratio(median(seconds), step) for g, seconds in by_gamma.items()},
        branch=_ratio(median(one.branch_seconds for one in runs), step),
        r_seconds=median(one.wall - one.verify_seconds - one.draft_seconds for one in blocks),
        plain_r_seconds=median(one.wall - one.verify_seconds for one in plain),
    )


def rounds(samples: Sequence[Sample]) -> Rounds:
    """Sums over `samples`."""
    blocks = [one for one in samples if one.drafted]
    accepted = sum(one.accepted for one in blocks)
    refused = sum(one.accepted < one.drafted for one in blocks)
    longest = max((one.drafted for one in blocks), default=0)
    return Rounds(
        tau=_mean([one.emitted for one in blocks]),
        alpha=_ratio(accepted, accepted + refused),
        gamma=_mean([one.drafted for one in blocks]),
        block_share=_ratio(len(blocks), len(samples)),
        branch_share=_ratio(sum(one.from_branch for one in blocks), len(blocks)),
        accepted_per_position=[
            _mean([one.accepted > place for one in blocks if one.drafted > place]) for place in range(longest)
        ],
    )


def predicted(found: Rounds, cost: Costs, *, overlap: bool, waits: bool = False) -> float:
    """S of the rounds that had a block, and 1 for those that had none, weighted by their time.

    `waits`: several requests wait for one another, in r and in target-only rounds alike; these are then the unit.
    """
    if not found.block_share:
        return 1.0
    arguments = {"v": cost.v, "gamma": found.gamma, "c": cost.c, "r": cost.r}
    if overlap:
        block = overlapped_speedup(found.tau, **arguments, h=found.branch_share, branch=cost.branch)
    else:
        block = speedup(found.tau, **arguments)
    block *= 1 + cost.plain_r if waits else 1
    tokens = found.block_share * found.tau + 1 - found.block_share
    time = found.block_share * found.tau / block + 1 - found.block_share
    return tokens / time


def describe(concurrency: int, pairs: Pairs, *, overlap: bool) -> dict[str, Any]:
    """The object of one concurrency under `results`."""
    samples, plain_samples = steady_samples(pairs.speculative), steady_samples(pairs.plain)
    cost, found = costs(plain_samples, samples), rounds(samples)
    in_turn, overlapped = (predicted(found, cost, overlap=form, waits=concurrency > 1) for form in (False, True))
    measured, formula = median(pairs.speedups), overlapped if overlap else in_turn
    asked = [one for one in samples if one.branches is not None and not one.last]
    drafted = sum(one.drafted for one in samples)
    return {
        "concurrency": concurrency,
        "groups": len(pairs.plain),
        "requests": sum(len(batch.streams) for batch in pairs.plain),
        "speedup": measured,
        "speedup_range": [min(pairs.speedups), max(pairs.speedups)],
        "predicted": formula,
        "ratio": _ratio(measured, formula),
        "predicted_in_turn": in_turn,
        "predicted_overlapped": overlapped,
        "tau": found.tau,
        "alpha": found.alpha,
        "accepted_per_position": found.accepted_per_position,
        "gamma": found.gamma,
        "gamma_chosen": {str(g): count for g, count in sorted(Counter(one.gamma for one in samples).items())},
        "block_share": found.block_share,
        "c": cost.c,
        "v": cost.v,
        "v_by_gamma": {str(g): v for g, v in cost.v_by_gamma.items()},
        "branch_run": cost.branch,
        "r_ms": cost.r_seconds * 1e3,
        "target_only_r_ms": cost.plain_r_seconds * 1e3,
        "target_step_ms": cost.step_seconds * 1e3,
        "draft_step_ms": cost.draft_step_seconds * 1e3,
        "hit_share": _ratio(sum(one.hit for one in asked), len(asked)),
        "branch_share": found.branch_share,
        "branches": _mean([one.branches or 0 for one in asked]),
        "wire_bytes_per_draft_token": _ratio(sum(one.bytes_sent for one in samples if one.drafted), drafted),
        "branch_bytes_per_draft_token": _ratio(sum(one.branch_bytes for one in samples), drafted),
        "tokens_per_pass": _mean([one.emitted for one in samples]),
        **_rates("", pairs.speculative),
        **_rates("target_only_", pairs.plain),
        "same_output": _same_output(pairs),
        "whole_batches": sum(window(batch).whole for batch in (*pairs.plain, *pairs.speculative)),
    }


def by_category(pairs: Pairs) -> dict[str, dict[str, float]]:
    """α, τ and the speed-up of a token (median of TPOT ratios, request by request) for each category of prompts."""
    both = [
        (plain, fast)
        for batches in zip(pairs.plain, pairs.speculative, strict=True)
        for plain, fast in zip(*(batch.streams for batch in batches), strict=True)
    ]
    report = {}
    for category in dict.fromkeys(plain.category for plain, _ in both):
        chosen = [(plain, fast) for plain, fast in both if plain.category == category]
        found = rounds([one for _, fast in chosen for one in fast.samples])
        ratios = [_ratio(*tpot_ms(pair)) for pair in chosen if len(tpot_ms(pair)) == 2]
        speed = median(ratios)
        report[category] = {"requests": len(chosen), "alpha": found.alpha, "tau": found.tau, "tpot_speedup": speed}
    return report


def _rates(prefix: str, batches: Sequence[Batch]) -> dict[str, float]:
    found = [rates(batch) for batch in batches]
    streams = [stream for batch in batches for stream in batch.streams]
    first, later = ttft_ms(streams), tpot_ms(streams)
    values = {
        "tokens_per_second": median(one.tokens_per_second for one in found),
        "target_busy": median(one.target_busy for one in found),
        "rows_per_pass": median(one.rows_per_pass for one in found),
        "ttft_ms": median(first),
        "ttft_p99_ms": p99(first),
        "tpot_ms": median(later),
        "tpot_p99_ms": p99(later),
    }
    return {prefix + name: value for name, value in values.items()}


def _same_output(pairs: Pairs) -> float:
    """Share of the requests whose tokens are those of target-only: all of them where the seed alone decides."""
    both = zip(pairs.plain, pairs.speculative, strict=True)
    return _mean([a.tokens == b.tokens for x, y in both for a, b in zip(x.streams, y.streams, strict=True)])


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
