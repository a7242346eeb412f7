"""Drafting while the target verifies, over real workers: hits are many, and no token depends on them.

The target takes a few milliseconds a pass, so that branches come in time. At a fixed γ a seed gives the same rounds
with overlap on and off. With γ auto blocks depend on what was measured: then coupled ids are those of plain decoding,
and rejection follows the target's law.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from execution.toy import toy_table
from orchestrator import Runtime
from speculative import SamplingOptions
from tests.e2e.law import g_test, needed, planted, sampled_law, transitions
from tests.e2e.support import Run, Taken, let_last, plain_coupled, runtime_of, take, take_many, toy

V = 14
TABLE = {"vocab": V, "order": 2, "seed": 8, "scale": 1.4}
TARGET = toy(**TABLE, delay_ms=4)
DRAFTS = {
    "noisy": toy(**TABLE, noise=0.8, noise_seed=3),
    "NaN after a token": toy(**TABLE, noise=0.4, nan_token=3),
}
WAYS: dict[str, dict[str, Any]] = {
    "counts": {},
    "dense": {"codec": "dense"},
    "filtered": {"temperature": 0.7, "top_k": 5},
    "greedy": {"temperature": 0},
    "coupled": {"verify": "coupled"},
}


@pytest.fixture(scope="module")
def runtimes(run: Run, module_leaks: None) -> Iterator[dict[str, Runtime]]:
    started = {name: runtime_of(TARGET, draft) for name, draft in DRAFTS.items()}
    for runtime in started.values():
        run(runtime.__aenter__())
    let_last()
    yield started
    for runtime in started.values():
        run(runtime.close())


def rounds_of(taken: Taken) -> list[Any]:
    return [(done.base_length, done.proposal.tokens, done.emitted) for done in taken.rounds]


def hits_of(*taken: Taken) -> int:
    return sum(done.branching is not None and done.branching.hit for one in taken for done in one.rounds)


def from_branches(*taken: Taken) -> int:
    return sum(done.proposal.origin == "branch" for one in taken for done in one.rounds)


@pytest.mark.parametrize("way", WAYS)
def test_overlap_changes_no_round(run: Run, runtimes: dict[str, Runtime], way: str) -> None:
    """γ 1, 4 and 7, each alone; a third of the rounds at least start from a branch."""

    async def twice(gamma: int, overlap: str) -> Taken:
        asked = {"seed": 5, "max_tokens": 70, "gamma": gamma, "overlap": overlap, **WAYS[way]}
        return await take(runtimes["noisy"], [3, 1], **asked)

    branched = [run(twice(gamma, "on")) for gamma in (1, 4, 7)]
    taking_turns = [run(twice(gamma, "off")) for gamma in (1, 4, 7)]
    for one, other in zip(branched, taking_turns, strict=True):
        assert rounds_of(one) == rounds_of(other)
    assert from_branches(*taking_turns) == 0 == hits_of(*taking_turns)
    assert from_branches(*branched) > sum(len(one.rounds) for one in branched) / 3


def test_overlap_changes_no_round_of_eight_at_once(run: Run, runtimes: dict[str, Runtime]) -> None:
    """Each with its own way to draw, its own γ and limit; alone, taking turns, is the measure."""
    ways = [
        *WAYS.values(),
        {"min_p": 0.05},
        {"verify": "coupled", "temperature": 1.3},
        {"codec": "dense", "top_p": 0.9},
    ]
    asked = [
        {"prompt": [i, 3], "seed": 40 + i, "max_tokens": 50 + i, "gamma": 1 + i % 5, **way}
        for i, way in enumerate(ways)
    ]

    async def alone() -> list[Taken]:
        return [await take(runtimes["noisy"], overlap="off", **one) for one in asked]

    together = run(take_many(runtimes["noisy"], [{**one, "overlap": "on"} for one in asked]))
    for one, other in zip(together, run(alone()), strict=True):
        assert rounds_of(one) == rounds_of(other)
    assert from_branches(*together) > 20


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("many", [1, 8])
def test_coupled_at_auto_is_plain_decoding(run: Run, runtimes: dict[str, Runtime], draft: str, many: int) -> None:
    options: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0}]
    asked = [
        {"prompt": [i, 3, 1], "seed": 60 + i, "max_tokens": 150, "verify": "coupled", **options[i % 3]}
        for i in range(many)
    ]
    taken = run(take_many(runtimes[draft], [{**one, "gamma": "auto", "overlap": "on"} for one in asked]))
    for i, (request, one) in enumerate(zip(asked, taken, strict=True)):
        wanted = plain_coupled(TARGET, request["prompt"], request["seed"], 150, SamplingOptions(**options[i % 3]))
        assert one.tokens == wanted
    assert from_branches(*taken) > 5 and hits_of(*taken) > 5


def test_rejection_at_auto_follows_the_law(run: Run) -> None:
    """Which blocks there are depends on time and on hits, so no two runs are alike; the law is the same."""
    table = {"vocab": 8, "seed": 5, "scale": 1.3}
    target = toy(**table, delay_ms=2)
    law = sampled_law(toy_table(target).numpy())
    samples, at_once = int(1.3 * needed(law, planted(law, 0.012))), 3
    asked = [{"prompt": [i % 8], "seed": 500 + i, "max_tokens": -(-samples // at_once)} for i in range(at_once)]

    async def all_of_it() -> list[Taken]:
        async with runtime_of(target, toy(**table, noise=0.9, noise_seed=7)) as runtime:
            return await take_many(runtime, [{**one, "gamma": "auto", "overlap": "on"} for one in asked])

    taken = run(all_of_it())
    verdict = g_test(transitions([(one.prompt[-1], one.tokens) for one in taken], 8), law)
    assert not verdict.rejected, verdict
    after = {"branch": np.zeros_like(law), "drafted": np.zeros_like(law)}
    for one in taken:
        tokens = [*one.prompt, *one.tokens]
        for done in one.rounds:
            if done.proposal.tokens:
                path = tokens[done.base_length - 1 : done.base_length + len(done.emitted)]
                np.add.at(after[done.proposal.origin], (path[:-1], path[1:]), 1)
    for origin, counts in after.items():
        assert counts.sum() > 300, (origin, counts.sum())  # how many there are depends on the machine
        assert not g_test(counts, law).rejected, (origin, g_test(counts, law))
    assert g_test(transitions([(one.prompt[-1], one.tokens) for one in taken], 8), planted(law, 0.02)).rejected
