"""Eight requests in one ragged batch, each with its own prompt, γ, way to verify, codec and options: each equals its
solo run, token for token. Targets whose logits depend on more than the last token, so that a mixed-up row shows."""

from __future__ import annotations

from typing import Any

import pytest

from speculative import SamplingOptions
from tests.e2e.support import Run, Taken, plain_coupled, runtime_of, take, take_many, toy

ORDER_2 = {"vocab": 14, "order": 2, "seed": 8, "scale": 1.4}
HASH = {"vocab": 14, "state": "hash", "seed": 8, "scale": 1.4}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": [1], "gamma": 4, "seed": 1, "max_tokens": 60},
    {"prompt": [2, 3, 4], "gamma": 1, "codec": "dense", "seed": 2, "max_tokens": 45},
    {"prompt": [5] * 30, "gamma": 8, "verify": "coupled", "seed": 3, "max_tokens": 70},
    {"prompt": [0, 13, 0, 13], "gamma": 0, "seed": 4, "max_tokens": 33},
    {"prompt": list(range(14)), "gamma": 6, "temperature": 0, "seed": 5, "max_tokens": 64},
    {"prompt": [7, 7], "gamma": 3, "temperature": 0.7, "top_p": 0.9, "seed": 6, "max_tokens": 50},
    {"prompt": [9, 1], "gamma": 5, "top_k": 3, "codec": "dense", "seed": 7, "max_tokens": 57},
    {"prompt": [4, 2] * 8, "gamma": 2, "verify": "coupled", "temperature": 1.4, "min_p": 0.05,
     "seed": 8, "max_tokens": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    "table",
    [ORDER_2, HASH, HASH | {"delay_ms": 5}],
    ids=["order 2", "hash of the whole prefix", "passes long enough to be run in a thread"],
)
def test_each_equals_its_solo_run(run: Run, table: dict[str, Any]) -> None:
    async def all_of_it() -> tuple[list[Taken], list[Taken], list[Taken]]:
        async with runtime_of(toy(**table), toy(**table, noise=0.8, noise_seed=3)) as runtime:
            together = await take_many(runtime, REQUESTS)
            solo = [await take(runtime, **request) for request in REQUESTS]
            crowd = await take_many(runtime, REQUESTS * 4)
            return together, solo, crowd

    together, solo, crowd = run(all_of_it())
    assert [one.tokens for one in together] == [one.tokens for one in solo]
    assert [one.tokens for one in crowd] == [one.tokens for one in solo] * 4
    for request, one in zip(REQUESTS, together, strict=True):
        assert len(one.tokens) == request["max_tokens"]
        rounds = [(done.base_length, done.proposal.tokens, done.emitted) for done in one.rounds]
        alone = solo[REQUESTS.index(request)].rounds
        assert rounds == [(done.base_length, done.proposal.tokens, done.emitted) for done in alone]
        assert (one.drafted > 0) == (request["gamma"] > 0 and request["max_tokens"] > 1)
        if request.get("verify") == "coupled" or request.get("temperature") == 0:
            names = ("temperature", "top_k", "top_p", "min_p")
            options = SamplingOptions(**{name: request[name] for name in names if name in request})
            wanted = plain_coupled(toy(**table), request["prompt"], request["seed"], request["max_tokens"], options)
            assert one.tokens == wanted
