"""llama.cpp on both sides, over real workers: a target in one GGUF file, a draft in another, transformers as oracle."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator import Runtime
from speculative import Stream, gumbel
from tests.e2e.law import g_test
from tests.e2e.support import START_SECONDS, Run, take, take_many
from tests.tiny_gguf import EOS, VOCAB, needs_llamacpp, tiny_network, write_gguf

pytestmark = needs_llamacpp
PROMPT = [5, 9, 2, 30, 11]
COUNT = 40
SCALE = 1.5  # of the weights: far from uniform and far from certain


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Target and draft, the draft a disturbed copy, so that some tokens are accepted and some not."""
    folder: Path = tmp_path_factory.mktemp("gguf")
    before = os.environ.get("SPECDEC_CACHE")
    os.environ["SPECDEC_CACHE"] = str(folder / "cache")
    target, draft = tiny_network(3, scale=SCALE), tiny_network(3, scale=SCALE)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    yield {
        "network": target,
        "target": str(write_gguf(folder / "target.gguf", target)),
        "draft": str(write_gguf(folder / "draft.gguf", draft)),
    }
    os.environ.pop("SPECDEC_CACHE")
    if before is not None:
        os.environ["SPECDEC_CACHE"] = before


def runtime(networks: dict[str, Any], **fields: Any) -> Runtime:
    engines = {"target_engine": "llamacpp", "draft_engine": "llamacpp", "target_model": networks["target"]}
    models = engines | {"draft_model": networks["draft"], "target_threads": 1}
    return Runtime(**models, draft_timeout=60.0, connect_timeout=START_SECONDS, **fields)


def log_p(network: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(network(torch.tensor([tokens])).logits[0, -1].double(), -1)


def plainly(network: Any, prompt: list[int], seed: int | None) -> list[int]:
    """Plain decoding by transformers: the likeliest token, or the race with the public noise of `seed`."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + COUNT and (tokens == prompt or tokens[-1] != EOS):
        scores = log_p(network, tokens)
        if seed is not None:
            scores = scores + gumbel([seed], Stream.RACE, [len(tokens)], VOCAB)[0]
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_greedy_and_coupled_are_plain_decoding(networks: dict[str, Any], run: Run, overlap: str) -> None:
    """Several requests at once, γ fixed and auto, and a second turn that begins with a kept row."""
    prompts = [[*PROMPT, index] for index in range(4)]

    async def generate() -> None:
        async with runtime(networks, overlap=overlap, verify="coupled") as pair:
            for gamma in (4, "auto"):
                for temperature in (0.0, 1.0):
                    requests = [
                        {
                            "prompt": prompt,
                            "seed": index,
                            "max_tokens": COUNT,
                            "gamma": gamma,
                            "temperature": temperature,
                        }
                        for index, prompt in enumerate(prompts)
                    ]
                    for index, taken in enumerate(await take_many(pair, requests)):
                        seed = index if temperature else None
                        assert taken.tokens == plainly(networks["network"], prompts[index], seed)
                        assert gamma == "auto" or 0 < taken.accepted < taken.drafted
            first = plainly(networks["network"], PROMPT * 4, None)[:30]
            await take(pair, PROMPT * 4, max_tokens=30, temperature=0.0)
            longer = [*PROMPT * 4, *first, 7]
            taken = await take(pair, longer, max_tokens=20, temperature=0.0, gamma=4)
            assert taken.tokens == plainly(networks["network"], longer, None)[:20]

    run(generate())


def test_rejection_follows_the_targets_law(networks: dict[str, Any], run: Run) -> None:
    """The first token and, after the likeliest one, the second: both against transformers' distribution."""
    samples, at_once = 3000, 50

    async def generate() -> list[list[int]]:
        found: list[list[int]] = []
        async with runtime(networks, verify="rejection") as pair:
            for start in range(0, samples, at_once):
                seeds = range(start, start + at_once)
                requests = [{"prompt": PROMPT, "seed": seed, "max_tokens": 3, "gamma": 2} for seed in seeds]
                found += [taken.tokens for taken in await take_many(pair, requests)]
        return found

    found = run(generate())
    law = log_p(networks["network"], PROMPT).exp().numpy()
    first = np.bincount([tokens[0] for tokens in found], minlength=VOCAB)
    likeliest = int(law.argmax())
    after = [tokens[1] for tokens in found if tokens[0] == likeliest and len(tokens) > 1]
    second = np.bincount(after, minlength=VOCAB)
    laws = np.stack([law, log_p(networks["network"], [*PROMPT, likeliest]).exp().numpy()])
    verdict = g_test(np.stack([first, second]), laws)
    print(verdict)
    assert not verdict.rejected, str(verdict)
    other = np.stack([log_p(tiny_network(4, scale=SCALE), PROMPT).exp().numpy(), laws[1]])
    assert g_test(np.stack([first, second]), other).rejected, "another network's law would pass too"


def test_more_requests_than_rows_are_refused_one_by_one(networks: dict[str, Any], run: Run) -> None:
    """llama.cpp has 256 sequences: with 300 requests at once some are told so, and all others end well."""
    from orchestrator import SpecdecError

    async def generate() -> list[Any]:
        async with runtime(networks, draft="none") as target:
            tasks = [take(target, PROMPT, max_tokens=3, temperature=0.0) for _ in range(300)]
            return list(await asyncio.gather(*tasks, return_exceptions=True))

    results = run(generate())
    expected = plainly(networks["network"], PROMPT, None)[:3]
    refused = [one for one in results if isinstance(one, BaseException)]
    assert len(refused) < len(results)
    for one in results:
        if isinstance(one, BaseException):
            assert isinstance(one, SpecdecError) and "as many requests as its engine takes" in str(one)
        else:
            assert one.tokens == expected
