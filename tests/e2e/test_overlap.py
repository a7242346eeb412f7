"""Drafting while the target verifies, over real workers: hits are many, and no token depends on them.

The target takes long for a pass, so that branches come in time on a busy machine too. At a fixed γ a seed gives the
same rounds with overlap on and off. With γ auto blocks depend on what was measured: then coupled ids are those of plain
decoding, and rejection follows the target's law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
TARGET = toy(**TABLE, delay_ms=20)
DRAFTS = {
    "noisy": toy(**TABLE, noise=0.8, noise_seed=3),
    "NaN after a token": toy(**TABLE, noise=0.4, nan_token=3),
}
ATTEMPTS = 12
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


def until_branches_came(more_of: Callable[[int], list[Taken]], enough: int) -> None:
    """Take seed after seed until `enough` rounds have started from a branch.

    A busy machine has few branches in time, and a test that saw none would have tested nothing.
    """
    came = 0
    for seed in range(5, 5 + ATTEMPTS):
        came += from_branches(*more_of(seed))
        if came >= enough:
            return
    pytest.fail(f"{came} rounds started from a branch in {ATTEMPTS} attempts, and {enough} were expected")


@pytest.mark.parametrize("way", WAYS)
def test_overlap_changes_no_round(run: Run, runtimes: dict[str, Runtime], way: str) -> None:
    """γ 1, 4 and 7, each alone."""

    def thrice(seed: int, overlap: str) -> list[Taken]:
        asked = {"seed": seed, "max_tokens": 70, "overlap": overlap, **WAYS[way]}
        return [run(take(runtimes["noisy"], [3, 1], **asked, gamma=gamma)) for gamma in (1, 4, 7)]

    def branched(seed: int) -> list[Taken]:
        on, off = thrice(seed, "on"), thrice(seed, "off")
        for one, other in zip(on, off, strict=True):
            assert rounds_of(one) == rounds_of(other)
        assert from_branches(*off) == 0 == hits_of(*off)
        return on

    until_branches_came(branched, 20)


def test_overlap_changes_no_round_of_eight_at_once(run: Run, runtimes: dict[str, Runtime]) -> None:
    """Each with its own way to draw, its own γ and limit; alone, taking turns, is the measure."""
    ways = [
        *WAYS.values(),
        {"min_p": 0.05},
        {"verify": "coupled", "temperature": 1.3},
        {"codec": "dense", "top_p": 0.9},
    ]

    def branched(seed: int) -> list[Taken]:
        asked = [
            {"prompt": [i, 3], "seed": 40 * seed + i, "max_tokens": 50 + i, "gamma": 1 + i % 5, **way}
            for i, way in enumerate(ways)
        ]
        together = run(take_many(runtimes["noisy"], [{**one, "overlap": "on"} for one in asked]))
        alone = [run(take(runtimes["noisy"], overlap="off", **one)) for one in asked]
        for one, other in zip(together, alone, strict=True):
            assert rounds_of(one) == rounds_of(other)
        return together

    until_branches_came(branched, 20)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("many", [1, 8])
def test_coupled_at_auto_is_plain_decoding(run: Run, runtimes: dict[str, Runtime], draft: str, many: int) -> None:
    options: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0}]

    def branched(seed: int) -> list[Taken]:
        asked = [
            {"prompt": [i, 3, 1], "seed": 60 * seed + i, "max_tokens": 150, "verify": "coupled", **options[i % 3]}
            for i in range(many)
        ]
        taken = run(take_many(runtimes[draft], [{**one, "gamma": "auto", "overlap": "on"} for one in asked]))
        for i, (request, one) in enumerate(zip(asked, taken, strict=True)):
            wanted = plain_coupled(TARGET, request["prompt"], request["seed"], 150, SamplingOptions(**options[i % 3]))
            assert one.tokens == wanted
        return taken

    until_branches_came(branched, 5)


def after_origin(*taken: Taken) -> dict[str, np.ndarray]:
    """Transitions counted by where the round's block came from: of a toy of order 1, int [V, V] each."""
    counts = {"branch": np.zeros((8, 8)), "drafted": np.zeros((8, 8))}
    for one in taken:
        tokens = [*one.prompt, *one.tokens]
        for done in one.rounds:
            if done.proposal.tokens:
                path = tokens[done.base_length - 1 : done.base_length + len(done.emitted)]
                np.add.at(counts[done.proposal.origin], (path[:-1], path[1:]), 1)
    return counts


def test_rejection_at_auto_follows_the_law(run: Run) -> None:
    """Which blocks there are depends on time and on hits, so no two runs are alike; the law is the same."""
    table = {"vocab": 8, "seed": 5, "scale": 1.3}
    target = toy(**table, delay_ms=6)
    law = sampled_law(toy_table(target).numpy())
    samples, at_once = int(1.3 * needed(law, planted(law, 0.012))), 3

    async def all_of_it() -> list[Taken]:
        taken: list[Taken] = []
        async with runtime_of(target, toy(**table, noise=0.9, noise_seed=7)) as runtime:
            for seed in range(500, 500 + ATTEMPTS * at_once, at_once):  # a busy machine has few branches in time
                asked = [
                    {"prompt": [i % 8], "seed": seed + i, "max_tokens": -(-samples // at_once)} for i in range(at_once)
                ]
                taken += await take_many(runtime, [{**one, "gamma": "auto", "overlap": "on"} for one in asked])
                if min(counts.sum() for counts in after_origin(*taken).values()) > 300:
                    return taken
        pytest.fail(f"too few rounds of one origin after {ATTEMPTS} times {samples} tokens")

    taken = run(all_of_it())
    verdict = g_test(transitions([(one.prompt[-1], one.tokens) for one in taken], 8), law)
    assert not verdict.rejected, verdict
    for origin, counts in after_origin(*taken).items():
        assert not g_test(counts, law).rejected, (origin, g_test(counts, law))
    assert g_test(transitions([(one.prompt[-1], one.tokens) for one in taken], 8), planted(law, 0.02)).rejected
