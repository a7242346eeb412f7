"""Chats over real processes: later turns aren't prefilled again, and what comes out is what came out without that.

Whether a prompt was run again is read from the number of passes that a worker tells: 512 tokens of a prompt are one.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from execution.toy import toy_table
from orchestrator import Runtime
from tests.e2e.law import POWER, g_test, needed, planted, power, sampled_law, transitions
from tests.e2e.support import Run, Taken, plain_coupled, runtime_of, take, take_many, toy
from tests.execution.conftest import VOCAB, tiny_config
from worker.prefill import ALONE

V = 12
WHOLE = {"vocab": V, "state": "hash", "seed": 4, "scale": 1.5}  # logits depend on every token of the prefix
PATIENCE = 60.0


async def passes(runtime: Runtime) -> tuple[int, int]:
    """Of the target and of the draft, once both have taken the end of all requests."""
    assert runtime.draft is not None
    found = []
    for peer in (runtime.target, runtime.draft):
        told = []

        async def at_rest(link: Any = peer.link, told: list[Any] = told) -> bool:
            told.append((await link.ping(PATIENCE))[0])
            return told[-1].requests == 0

        deadline = time.monotonic() + PATIENCE / 3
        while not await at_rest():
            assert time.monotonic() < deadline, f"a request that has ended stays open on the {peer.role}"
            await asyncio.sleep(0.01)
        found.append(told[-1].passes)
    return found[0], found[1]


async def chat(runtime: Runtime, first: list[int], turns: int, **options: Any) -> tuple[list[Taken], list[Any]]:
    """Each turn's prompt is all that was said, and a new part. (what came, passes of both workers a turn)"""
    prompt, taken, counts = list(first), [], [await passes(runtime)]
    for turn in range(turns):
        taken.append(await take(runtime, prompt, seed=31 + turn, **options))
        counts.append(await passes(runtime))
        prompt += [*taken[-1].tokens, *(7 * i % V for i in range(20 + turn))]
    return taken, np.diff(np.array(counts), axis=0).tolist()


def rounds_of(taken: Taken) -> list[tuple[tuple[int, ...], int, int]]:
    """Tokens proposed, accepted, and the target's own token, round by round."""
    return [(done.proposal.tokens, done.verified.accepted, done.verified.token) for done in taken.rounds]


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_a_chat_is_the_same_and_isnt_prefilled_again(run: Run, verify: str) -> None:
    """Round by round: what is proposed, accepted and emitted; and, coupled, what an oracle says."""
    first = [5 * i % V for i in range(2 * ALONE + 100)]

    async def all_of_it(kept_tokens: int) -> tuple[list[Taken], list[Any]]:
        async with runtime_of(toy(**WHOLE), toy(**WHOLE, noise=0.6, noise_seed=9), kept_tokens=kept_tokens) as runtime:
            return await chat(runtime, first, 3, gamma=4, overlap="off", verify=verify, max_tokens=24)

    warm, warm_passes = run(all_of_it(4096))
    cold, cold_passes = run(all_of_it(0))
    assert [rounds_of(one) for one in warm] == [rounds_of(one) for one in cold]
    assert sum(one.accepted for one in warm) > 0
    assert warm_passes[0] == cold_passes[0]
    for ours, theirs in zip(warm_passes[1:], cold_passes[1:], strict=True):
        assert [plain - reused for plain, reused in zip(theirs, ours, strict=True)] == [2, 2]
    if verify == "coupled":
        for turn, one in enumerate(warm):
            assert one.tokens == plain_coupled(toy(**WHOLE), list(one.prompt), 31 + turn, 24), turn


@pytest.mark.parametrize("overlap, gamma", [("on", 4), ("on", "auto")])
def test_coupled_with_branches_follows_the_seed(run: Run, overlap: str, gamma: Any) -> None:
    """Chats beside each other that begin alike, one of them cancelled midway and begun again."""
    first = [5 * i % V for i in range(200)]

    async def all_of_it() -> list[Taken]:
        options = {"gamma": gamma, "overlap": overlap, "verify": "coupled", "max_tokens": 40}
        async with runtime_of(toy(**WHOLE), toy(**WHOLE, noise=0.4, noise_seed=9)) as runtime:
            chunks = runtime.generate(first, seed=1, **options)
            await anext(chunks)
            await chunks.aclose()
            taken = await take_many(runtime, [{"prompt": [*first, i], "seed": i, **options} for i in range(4)])
            later = [[*one.prompt, *one.tokens, 1, 2, 3] for one in taken]
            both = [*later, [*later[0][:250], 3], later[1]]
            return taken + await take_many(runtime, [{"prompt": one, "seed": 50, **options} for one in both])

    for one, seed in zip(run(all_of_it()), [0, 1, 2, 3, *[50] * 6], strict=True):
        assert one.tokens == plain_coupled(toy(**WHOLE), list(one.prompt), seed, 40)


@pytest.mark.parametrize("slow", ["target", "draft"])
def test_a_request_that_ends_while_its_prompt_goes_in_is_closed(run: Run, slow: str) -> None:
    """On both workers: what it holds there would stay for ever. One of them takes 0.2 s for each part of the prompt."""

    async def all_of_it() -> None:
        models = [toy(vocab=V, delay_ms=200 if role == slow else 0) for role in ("target", "draft")]
        async with runtime_of(*models, gamma=4, draft_timeout=0.05) as runtime:
            chunks = runtime.generate([i % V for i in range(2000)], max_tokens=4)
            first = asyncio.ensure_future(anext(chunks))
            peer = runtime.target if slow == "target" else runtime.draft
            assert peer is not None
            while not (await peer.link.ping(PATIENCE))[0].requests:
                await asyncio.sleep(0.01)
            if slow == "draft":
                await first  # the draft isn't waited for
            first.cancel()
            await asyncio.wait([first])
            await chunks.aclose()
            await passes(runtime)

    run(all_of_it(), 60)


SMALL = {"vocab": 8, "seed": 5, "scale": 1.3, "context": 16384}
CHATS, TURNS = 40, 4
LONG = 8000


@pytest.mark.parametrize("verify", ["rejection", "coupled"])
def test_tokens_of_later_turns_follow_the_targets_law(run: Run, verify: str) -> None:
    law = sampled_law(toy_table(toy(**SMALL)).numpy())
    each = -(-needed(law, planted(law)) // (CHATS * (TURNS - 1)))

    async def all_of_it() -> tuple[list[Taken], list[int]]:
        later, counts = list[Taken](), list[int]()
        draft = toy(**SMALL, noise=0.9, noise_seed=7)
        async with runtime_of(toy(**SMALL), draft, kept_tokens=CHATS * 16384, gamma=4, verify=verify) as runtime:
            prompts = np.random.default_rng(1).integers(0, 8, (CHATS, LONG)).tolist()
            for turn in range(TURNS):
                before = await passes(runtime)
                asked = [{"prompt": one, "seed": 1000 * turn + i, "max_tokens": each} for i, one in enumerate(prompts)]
                taken = await take_many(runtime, asked)
                prompts = [[*one.prompt, *one.tokens, 1, 2, 3, i % 8] for i, one in enumerate(taken)]
                counts.append((await passes(runtime))[0] - before[0])
                later += taken if turn else []
        return later, counts

    taken, counts = run(all_of_it())
    assert counts[0] > CHATS * LONG / ALONE > max(counts[1:]), "the prompts alone are more passes than these turns took"
    seen = transitions([(one.prompt[-1], one.tokens) for one in taken], len(law))
    verdict = g_test(seen, law)
    assert not verdict.rejected, verdict
    assert power(law, planted(law), verdict.samples) >= POWER
    assert g_test(seen, planted(law)).rejected, "a planted bias of 1 % was not found"
    drafted, accepted = sum(one.drafted for one in taken), sum(one.accepted for one in taken)
    assert 0.05 * drafted < accepted < 0.95 * drafted


def save_tiny(folder: Path, seed: int, noise: float = 0.0) -> str:
    """A small random Llama with a character tokenizer, far from uniform; `noise`: one that resembles it."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from execution.toy_spec import ToySpec
    from execution.toy_vocabulary import toy_vocabulary

    torch.manual_seed(seed)
    config = tiny_config("llama")
    config.max_position_embeddings = 512
    config.eos_token_id = 3
    network = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3)
            parameter.add_(noise * parameter.std().nan_to_num() * torch.randn_like(parameter))
    network.save_pretrained(folder)
    text = Tokenizer.from_buffer(toy_vocabulary(ToySpec(vocab=VOCAB - 3)).tokenizer_json)
    PreTrainedTokenizerFast(tokenizer_object=text).save_pretrained(folder)
    return str(folder)


def test_a_real_cache_gives_the_same_tokens(run: Run, tmp_path: Path) -> None:
    """Greedy, so that nothing but the logits decides: three turns with reuse on and off, each round's acceptance."""
    target, draft = save_tiny(tmp_path / "target", 5), save_tiny(tmp_path / "draft", 5, noise=0.03)
    first = [4 + 11 * i % 50 for i in range(90)]

    async def all_of_it(kept_tokens: int) -> list[Taken]:
        async with runtime_of(target, draft, kept_tokens=kept_tokens) as runtime:
            options = {"gamma": 3, "overlap": "off", "verify": "coupled", "temperature": 0, "max_tokens": 40}
            return (await chat(runtime, first, 3, **options))[0]

    warm, cold = run(all_of_it(2048)), run(all_of_it(0))
    assert [one.tokens for one in warm] == [one.tokens for one in cold]
    assert [rounds_of(one) for one in warm] == [rounds_of(one) for one in cold]
    assert all(len(one.tokens) > 10 for one in warm) and sum(one.accepted for one in warm) > 5
