"""Coupled, seeded: the ids are a function of (target, prompt, options, seed) alone, whatever becomes of the draft.

Each run is compared with an oracle written over the toy's table and the public noise: plain decoding, no blocks, no
messages. The target runs once, by hand on tcp; each draft source attaches to it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator import Runtime
from speculative import SamplingOptions
from tests.e2e.support import Run, Taken, WorkerByHand, let_last, plain_coupled, runtime_of, take, take_many, toy

V = 12
TABLE = {"vocab": V, "order": 2, "seed": 4, "scale": 1.5}
TARGET = toy(**TABLE)
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0}]
GAMMAS = (0, 1, 4, 8)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
TOKENS = 48
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "ngram": ("ngram", {}),
    "the same weights": (TARGET, {}),
    "noisy": (toy(**TABLE, noise=0.8, noise_seed=9), {}),
    "other": (toy(**{**TABLE, "seed": 99}), {}),
    "bfloat16": (toy(**TABLE, noise=0.4), {"draft_dtype": "bfloat16"}),
    "float16": (toy(**TABLE, noise=0.4), {"draft_dtype": "float16"}),
    "NaN after a token": (toy(**TABLE, noise=0.4, nan_token=3), {}),
}


@pytest.fixture(scope="module")
def target(module_leaks: None) -> Iterator[str]:
    worker = WorkerByHand("target", TARGET, "--threads", "1")
    let_last()
    yield worker.address
    assert worker.alive, "the attached target ended though nobody asked it to"
    assert worker.end() == 0


def oracle(seed: int, options: dict[str, Any], tokens: int = TOKENS) -> list[int]:
    return plain_coupled(TARGET, PROMPT, seed, tokens, SamplingOptions(**options))


def request(seed: int, options: dict[str, Any], gamma: int = 4, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT, "seed": seed, "gamma": gamma, "verify": "coupled", "max_tokens": tokens, **options, **more
    }  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_ids_do_not_depend_on_the_draft(run: Run, target: str, source: str) -> None:
    draft, fields = SOURCES[source]

    async def all_of_it() -> list[Taken]:
        async with runtime_of(target, draft, **fields) as runtime:
            return await take_many(runtime, [request(s, o, g) for s, o, g in asked])

    asked = [(seed, options, gamma) for seed in (11, 2**64 - 1) for options in OPTIONS for gamma in GAMMAS]
    for (seed, options, gamma), taken in zip(asked, run(all_of_it()), strict=True):
        assert taken.tokens == oracle(seed, options), (source, seed, options, gamma)
        assert all(len(done.proposal.tokens) <= gamma for done in taken.rounds)
        if source == "the same weights" and gamma:
            assert taken.accepted == taken.drafted > 0
        if source not in ("none", "ngram") and gamma:
            assert taken.drafted > 0, "nothing was drafted: the test would show nothing"


def test_a_draft_that_is_killed_midway(run: Run, target: str) -> None:
    """test_failures.py goes on until the draft is back."""
    killed: list[int] = []

    async def all_of_it() -> Taken:
        async with runtime_of(target, SOURCES["noisy"][0]) as runtime:

            def kill(taken: Taken) -> None:
                if len(taken.tokens) >= 20 and not killed and runtime.draft is not None:
                    killed.append(runtime.draft.welcome.pid)
                    os.kill(killed[0], signal.SIGKILL)

            return await take(runtime, on_round=kill, **request(7, {}, tokens=800))

    taken = run(all_of_it())
    assert killed
    assert taken.tokens == oracle(7, {}, 800)


@pytest.mark.parametrize("pass_number", [1, 9])
def test_a_draft_that_hangs(run: Run, target: str, pass_number: int) -> None:
    """In its first pass (the prefill) or in the middle of a block: γ = 0 from then on, also for the next request."""

    async def all_of_it() -> list[Taken]:
        draft = toy(**TABLE, noise=0.8, hang_after=pass_number)
        async with runtime_of(target, draft, draft_timeout=0.3) as runtime:
            return [await take(runtime, **request(seed, {})) for seed in (1, 2)]

    for seed, taken in zip((1, 2), run(all_of_it(), 60), strict=True):
        assert taken.tokens == oracle(seed, {})


def test_a_draft_that_answers_late(run: Run, target: str) -> None:
    """Each block takes longer than it's waited for: the late ones are dropped, and the ids are the same."""

    async def all_of_it() -> Taken:
        async with runtime_of(target, toy(**TABLE, noise=0.8, delay_ms=30), draft_timeout=0.05) as runtime:
            return await take(runtime, **request(5, {}, tokens=400))

    assert run(all_of_it()).tokens == oracle(5, {}, 400)


async def _twice(runtime: Runtime, verify: str) -> list[Taken]:
    asked = [request(seed, {}, verify=verify) for seed in (21, 21, 22)]
    together = await take_many(runtime, asked)
    return [*together, await take(runtime, **asked[0])]


def test_the_same_seed_gives_the_same_ids(run: Run, target: str) -> None:
    """In rejection mode too, at a fixed γ, alone or beside others, and from another process's life."""

    async def all_of_it() -> list[Taken]:
        taken: list[Taken] = []
        for _ in range(2):
            async with runtime_of(target, SOURCES["noisy"][0]) as runtime:
                taken += await _twice(runtime, "rejection")
        return taken

    first, again, other, alone, *second_life = run(all_of_it())
    assert first.tokens == again.tokens == alone.tokens
    assert [taken.tokens for taken in second_life] == [first.tokens, first.tokens, other.tokens, first.tokens]
    assert first.tokens != other.tokens
    assert first.tokens != oracle(21, {}), "rejection draws from other streams than the public race"
