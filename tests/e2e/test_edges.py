"""Ends and borders of a request over real workers: where it stops, what is counted, the shortest and the oddest."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from execution.toy import toy_table
from orchestrator import UsageError, WorkerFault
from speculative import SamplingOptions
from tests.e2e.support import Run, Taken, plain_coupled, runtime_of, take, take_many, toy

TABLE = {"vocab": 10, "order": 1, "seed": 2, "scale": 1.2}
GREEDY = {"temperature": 0}
COUPLED = {"verify": "coupled"}


def served(run: Run, target: str, draft: str, *requests: dict[str, Any], **fields: Any) -> list[Taken]:
    """The requests, all at once, over one pair."""

    async def all_of_it() -> list[Taken]:
        async with runtime_of(target, draft, **fields) as runtime:
            return await take_many(runtime, requests)

    return run(all_of_it())


def consistent(taken: Taken) -> None:
    """C10: every counter is of emitted tokens, and they agree with each other and with the rounds."""
    assert taken.generation is not None
    report = taken.generation.to_json()
    spec, usage = report["speculative"], report["usage"]
    assert usage["completion_tokens"] == len(report["token_ids"]) == spec["emitted"] == len(taken.tokens)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert spec["rounds"] == len(taken.rounds)
    assert spec["drafted"] == taken.drafted and spec["accepted"] == taken.accepted <= spec["drafted"]
    assert spec["accepted"] <= spec["emitted"]
    assert sum(spec["accepted_per_position"]) == spec["accepted"]
    assert spec["accepted_per_position"] == sorted(spec["accepted_per_position"], reverse=True)


def test_end_inside_a_block(run: Run) -> None:
    """C1: the block (a, E, b) is accepted whole; the text ends with E, b is neither streamed nor counted."""
    argmax = toy_table(toy(**TABLE)).argmax(-1).tolist()
    path = [0]
    while argmax[path[-1]] not in path:
        path.append(argmax[path[-1]])
    assert len(path) >= 3, "choose another seed: the greedy path is too short for a block around its end token"
    end = path[2]
    target = toy(**TABLE, eos=end)
    greedy, sampled = served(
        run, target, target,
        {"prompt": [0], "gamma": 8, "max_tokens": 50, **GREEDY},
        {"prompt": [0], "gamma": 8, "max_tokens": 200, "seed": 3, **COUPLED},
    )  # fmt: skip
    assert greedy.tokens == path[1:3]
    assert greedy.rounds[0].verified.accepted == 8, "the whole block was accepted, E and what follows it"
    assert greedy.accepted == 2 and len(greedy.rounds) == 1
    assert sampled.tokens == plain_coupled(target, [0], 3, 200)
    for one in (greedy, sampled):
        assert one.generation is not None and one.generation.finish_reason == "stop"
        assert one.tokens.count(end) == 1 and one.tokens[-1] == end
        assert "</s>" not in one.text and len(one.text) == len(one.tokens) - 1
        consistent(one)


def test_limits(run: Run) -> None:
    """C6, C7, B12 over one pair of equal weights: exact token limits for any γ, and a clean end at the context's."""
    target = toy(**TABLE, context=40)
    limits = [
        {"prompt": [1, 2], "gamma": gamma, "max_tokens": limit, "seed": 5, **COUPLED}
        for gamma in (0, 1, 4, 8, 64)
        for limit in (1, 2, 8, 9)
    ]
    contexts = [
        {"prompt": [1] * length, "gamma": gamma, "max_tokens": 256, "seed": 5, **COUPLED}
        for gamma in (0, 5, 64)
        for length in (1, 34, 38, 39)
    ]
    taken = served(run, target, target, *limits, *contexts, {"prompt": [1], "max_tokens": 30, "gamma": 4, **GREEDY})
    for request, one in zip(limits + contexts, taken, strict=False):
        wanted = min(request["max_tokens"], 40 - len(request["prompt"]))
        assert len(one.tokens) == wanted, request
        assert one.tokens == plain_coupled(target, request["prompt"], 5, wanted)
        assert one.generation is not None and one.generation.finish_reason == "length"
        assert one.accepted == one.drafted, "equal weights: all is accepted"
        room = wanted
        for done in one.rounds:
            assert len(done.proposal.tokens) <= max(0, room - 1), "γ is clipped to what may still be emitted, less one"
            room -= len(done.emitted)
        consistent(one)
    assert taken[-1].accepted == taken[-1].drafted == 24 and len(taken[-1].rounds) == 6


def test_prompt_that_leaves_no_room(run: Run) -> None:
    async def ask() -> None:
        async with runtime_of(toy(**TABLE, context=40), "none") as runtime:
            for prompt, says in (([1] * 40, "40 tokens"), ([], "empty"), ("", "empty"), ([10], "outside")):
                with pytest.raises(UsageError, match=says):
                    await take(runtime, prompt)
            assert len((await take(runtime, [1], max_tokens=3)).tokens) == 3

    run(ask())


def test_draft_of_a_shorter_context(run: Run) -> None:
    """Past the draft's context the request goes on plainly; E2's neighbour: nothing is prefilled again each round."""
    target, draft = toy(**TABLE, context=120), toy(**TABLE, context=30, noise=0.5)
    taken, long_prompt = served(
        run, target, draft,
        {"prompt": [1, 2, 3], "gamma": 4, "max_tokens": 100, "seed": 8, **COUPLED},
        {"prompt": [1] * 60, "gamma": 4, "max_tokens": 20, "seed": 8, **COUPLED},
    )  # fmt: skip
    assert taken.tokens == plain_coupled(target, [1, 2, 3], 8, 100)
    assert long_prompt.tokens == plain_coupled(target, [1] * 60, 8, 20)
    assert taken.drafted > 0 and long_prompt.drafted == 0
    assert all(not done.proposal.tokens for done in taken.rounds if done.base_length > 30)
    consistent(taken)


def test_constant_draft(run: Run) -> None:
    """E11: a draft that says one thing for ever. The text is exact; hardly anything is accepted."""
    target = toy(**TABLE)
    coupled, greedy, *rejection = served(
        run, target, toy(vocab=10, constant=0),
        {"prompt": [1], "gamma": 4, "max_tokens": 80, "seed": 8, **COUPLED},
        {"prompt": [1], "gamma": 4, "max_tokens": 80, **GREEDY},
        {"prompt": [1], "gamma": 4, "max_tokens": 80, "seed": 8},
        {"prompt": [1], "gamma": 4, "max_tokens": 80, "seed": 8, "codec": "dense"},
    )  # fmt: skip
    assert coupled.tokens == plain_coupled(target, [1], 8, 80)
    assert greedy.tokens == plain_coupled(target, [1], 8, 80, SamplingOptions(temperature=0))
    assert coupled.drafted > coupled.accepted
    for one in (coupled, greedy, *rejection):
        assert len(one.tokens) == 80
        assert all(token == 0 for done in one.rounds for token in done.proposal.tokens)
        consistent(one)


def test_odd_options(run: Run) -> None:
    """γ = 0 beside a draft, a prompt of one token, the first and the last seed, a temperature of 1e-6, top-k 1."""
    target = toy(**TABLE)
    seeds = (0, 1, 2**32, 2**63, 2**64 - 1)
    requests = [{"prompt": [4], "gamma": gamma, "max_tokens": 30, "seed": seed} for gamma in (0, 4) for seed in seeds]
    cold = [
        {"prompt": [4], "gamma": 4, "max_tokens": 30, "seed": 3, "temperature": 1e-6, **verify}
        for verify in ({}, COUPLED, {"codec": "dense"})
    ]
    top_1 = [{"prompt": [4], "gamma": 4, "max_tokens": 30, "seed": 3, "top_k": 1}]
    taken = served(
        run, target, toy(**TABLE, noise=0.6), *({**one, **COUPLED} for one in requests), *requests, *cold, *top_1
    )
    coupled, rejection, frozen = taken[:10], taken[10:20], taken[20:]
    for request, one in zip(requests, coupled, strict=True):
        assert one.tokens == plain_coupled(target, [4], request["seed"], 30)
        assert (one.drafted == 0) == (request["gamma"] == 0)
        assert one.generation is not None and one.generation.seed == request["seed"]
    assert len({tuple(one.tokens) for one in rejection}) == 10, "seeds and γ give different texts in rejection mode"
    for one in frozen:
        assert one.tokens == plain_coupled(target, [4], 0, 30, SamplingOptions(temperature=0))
    for one in taken:
        consistent(one)


def test_a_seed_is_drawn_and_reported(run: Run) -> None:
    target = toy(**TABLE)
    first, second = served(run, target, "none", *({"prompt": [4], "max_tokens": 30, **COUPLED},) * 2)
    assert first.generation is not None and second.generation is not None
    assert first.generation.seed != second.generation.seed
    assert first.tokens == plain_coupled(target, [4], first.generation.seed, 30)


def test_target_with_nan_fails_its_request_alone(run: Run) -> None:
    """A NaN row is the end of its own request; the one beside it, and the next, go on."""

    async def all_of_it() -> None:
        target = toy(**TABLE, nan_token=8)
        async with runtime_of(target, "none") as runtime:
            bad, good = await asyncio.gather(
                take(runtime, [8], max_tokens=5),
                take(runtime, [1], max_tokens=5, seed=2, temperature=0),
                return_exceptions=True,
            )
            assert isinstance(bad, WorkerFault) and "nan" in str(bad).lower(), bad
            wanted = plain_coupled(toy(**TABLE), [1], 2, 5, SamplingOptions(temperature=0))
            assert 8 not in wanted[:-1]
            assert isinstance(good, Taken) and good.tokens == wanted, good

    run(all_of_it())
