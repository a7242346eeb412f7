"""The default pair, for real: SmolLM2-135M-Instruct as target, over processes and sockets, against transformers.

The oracle at temperature 0 is transformers' own `generate`; in coupled mode it is the same runtime without a draft.
Passes of different shapes differ in the last bits of a logit, so a near tie may fall the other way: a difference passes
only where the two tokens' scores, computed by transformers in one forward pass, are within TIE of one another, and the
test prints the gap. A wrong cache, mask or position moves logits by orders of magnitude more.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator import Runtime
from orchestrator.text import TextCodec
from speculative import Stream, gumbel
from tests.e2e.support import Run, Taken, take, take_many
from tests.tiny_gguf import needs_llamacpp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 128
COUPLED_TOKENS = 48
PROMPTS = 16
TIE = 1e-3  # of a logit, where ordinary gaps are above 0.01 and float32 passes differ by about 1e-5
SEED = 20_000
PROMPT_FILE = Path(__file__).parents[2] / "scripts" / "heldout_prompts.jsonl"


class Reference:
    """The target in transformers, in this process."""

    def __init__(self) -> None:
        from execution.loading import load

        executor, vocabulary = load("smollm2-135m-instruct", device="cpu", dtype="float32", threads=1, packed=False)
        self._network: Any = executor._network  # type: ignore[attr-defined]
        self._network.set_attn_implementation("sdpa")
        self.eos = vocabulary.eos_ids
        codec = TextCodec(vocabulary.tokenizer_json, vocabulary.chat_template)
        lines = PROMPT_FILE.read_text(encoding="utf-8").splitlines()[:PROMPTS]
        self.prompts = [codec.encode(json.loads(line)["prompt"], raw=False) for line in lines]

    def greedy(self) -> list[list[int]]:
        """transformers' own generate of all prompts, padded to the left; each cut after its end token."""
        width = max(len(prompt) for prompt in self.prompts)
        padding = [width - len(prompt) for prompt in self.prompts]
        output = self._network.generate(
            torch.tensor([[self.eos[0]] * pad + prompt for pad, prompt in zip(padding, self.prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
            do_sample=False,
            max_new_tokens=TOKENS,
            eos_token_id=list(self.eos),
            pad_token_id=self.eos[0],
        )
        return [_until_end(row, self.eos) for row in output[:, width:].tolist()]

    def scores(self, tokens: Sequence[int], seed: int | None) -> torch.Tensor:
        """The next token's scores [V]: logits, or log p + public noise where a seed is given."""
        with torch.no_grad():
            logits = self._network(torch.tensor([list(tokens)])).logits[0, -1].float()
        if seed is None:
            return logits
        return torch.log_softmax(logits, -1) + gumbel([seed], Stream.RACE, [len(tokens)], logits.shape[0])[0]


def _until_end(tokens: list[int], eos: Sequence[int]) -> list[int]:
    end = next((index for index, token in enumerate(tokens) if token in eos), len(tokens) - 1)
    return tokens[: end + 1]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def greedy(reference: Reference) -> list[list[int]]:
    return reference.greedy()


def default_pair(**fields: Any) -> Runtime:
    """One thread each: more gain little at this size, and spin against one another on a busy machine."""
    return Runtime(draft_timeout=120.0, target_threads=1, **fields)


def same_but_for_ties(
    reference: Reference, label: str, found: Sequence[Taken], expected: Sequence[Sequence[int]], seeded: bool
) -> None:
    """Equal token ids, or a first difference between two tokens of (nearly) equal score; at most 2 of those."""
    ties = 0
    for index, (taken, tokens) in enumerate(zip(found, expected, strict=True)):
        if taken.tokens == list(tokens):
            continue
        at = next(i for i, (a, b) in enumerate(zip(taken.tokens, tokens, strict=False)) if a != b)
        prefix = [*reference.prompts[index], *tokens[:at]]
        scores = reference.scores(prefix, SEED + index if seeded else None)
        gap = float((scores[taken.tokens[at]] - scores[tokens[at]]).abs())
        told = f"{label}: prompt {index}, token {at}: {taken.tokens[at]} for {tokens[at]}, a gap of {gap:.2e}"
        print(told)
        assert gap < TIE, told
        ties += 1
    assert ties <= 2, f"{label}: {ties} of {len(found)} prompts end in ties; float32 passes should meet far fewer"


async def complete(runtime: Runtime, reference: Reference, max_tokens: int, **options: Any) -> list[Taken]:
    """All prompts at once, each with a seed of its own."""
    return await take_many(
        runtime,
        [
            {"prompt": prompt, "max_tokens": max_tokens, "seed": SEED + index, **options}
            for index, prompt in enumerate(reference.prompts)
        ],
    )


def test_greedy_is_transformers_generate(run: Run, reference: Reference, greedy: list[list[int]]) -> None:
    """Shows 2 of the runtime: model draft at γ 1, 4, 8, ngram, none."""

    async def with_draft() -> None:
        async with default_pair() as runtime:
            for gamma in (1, 4, 8):
                found = await complete(runtime, reference, TOKENS, temperature=0.0, gamma=gamma)
                same_but_for_ties(reference, f"γ = {gamma}", found, greedy, seeded=False)
                assert sum(taken.accepted for taken in found) > 0.2 * sum(taken.drafted for taken in found) / gamma

    async def without_model(draft: str) -> None:
        async with default_pair(draft=draft) as runtime:
            found = await complete(runtime, reference, TOKENS, temperature=0.0)
            same_but_for_ties(reference, draft, found, greedy, seeded=False)

    run(with_draft(), 800)
    run(without_model("ngram"), 400)
    run(without_model("none"), 400)


@needs_llamacpp
def test_greedy_on_llamacpp_is_transformers_generate(
    run: Run, reference: Reference, greedy: list[list[int]], tmp_path: Path
) -> None:
    """The same weights in a GGUF file of float32, with our draft on torch, and without one."""
    from execution import default_models

    path = tmp_path / "target.F32.gguf"
    command = [sys.executable, "scripts/gguf_as.py", default_models.TARGET, str(path), "--type", "F32"]
    subprocess.run(command, cwd=PROMPT_FILE.parents[1], check=True, timeout=300, capture_output=True)

    async def generate(**fields: Any) -> None:
        async with default_pair(target_model=str(path), target_engine="llamacpp", **fields) as runtime:
            found = await complete(runtime, reference, TOKENS, temperature=0.0)
            same_but_for_ties(reference, f"llama.cpp, {fields}", found, greedy, seeded=False)

    run(generate(gamma=4), 800)
    run(generate(draft="none"), 400)


def test_coupled_depends_on_target_prompt_options_and_seed_alone(run: Run, reference: Reference) -> None:
    """Shows 3: γ, the draft's source, its dtype and its death change nothing."""
    expected: list[list[int]] = []

    async def plain() -> None:
        async with default_pair(draft="none", verify="coupled") as runtime:
            expected.extend(taken.tokens for taken in await complete(runtime, reference, COUPLED_TOKENS))

    async def with_draft(dtype: str, gammas: Sequence[int]) -> None:
        async with default_pair(verify="coupled", draft_dtype=dtype) as runtime:
            for gamma in gammas:
                found = await complete(runtime, reference, COUPLED_TOKENS, gamma=gamma)
                same_but_for_ties(reference, f"{dtype} draft, γ = {gamma}", found, expected, seeded=True)

    async def with_ngram() -> None:
        async with default_pair(verify="coupled", draft="ngram") as runtime:
            found = await complete(runtime, reference, COUPLED_TOKENS)
            same_but_for_ties(reference, "ngram", found, expected, seeded=True)

    async def with_a_restart() -> None:
        async with default_pair(verify="coupled") as runtime:
            killed = False

            def kill(taken: Taken) -> None:
                nonlocal killed
                if not killed and len(taken.tokens) > COUPLED_TOKENS // 4 and runtime.draft is not None:
                    killed = True
                    os.kill(runtime.draft.welcome.pid, signal.SIGKILL)

            tasks = [
                take(runtime, prompt, kill if index == 0 else None, max_tokens=COUPLED_TOKENS, seed=SEED + index)
                for index, prompt in enumerate(reference.prompts)
            ]
            found = list(await asyncio.gather(*tasks))
            assert killed, "the draft was never killed: the test shows nothing"
            same_but_for_ties(reference, "draft killed midway", found, expected, seeded=True)

    run(plain(), 400)
    run(with_draft("float32", (0, 1, 4, 8)), 800)
    run(with_draft("bfloat16", (4,)), 400)
    run(with_draft("float16", (4,)), 400)
    run(with_ngram(), 400)
    run(with_a_restart(), 400)


def test_ragged_batch_of_eight_is_its_solo_runs(run: Run, reference: Reference) -> None:
    """Shows 5: eight requests of different prompts, γ, modes and options at once, each as it is alone."""
    settings: list[dict[str, Any]] = [
        {"gamma": 0, "verify": "coupled"},
        {"gamma": 1, "verify": "coupled", "temperature": 0.7},
        {"gamma": 3, "verify": "coupled", "top_k": 40},
        {"gamma": 8, "verify": "coupled", "top_p": 0.9},
        {"gamma": 2, "temperature": 0.0},
        {"gamma": 4, "verify": "rejection"},
        {"gamma": 6, "verify": "rejection", "top_k": 20, "temperature": 0.8},
        {"gamma": 5, "verify": "rejection", "codec": "dense", "min_p": 0.05},
    ]
    requests = [
        {"prompt": reference.prompts[index], "max_tokens": 32 + 4 * index, "seed": SEED + index, **setting}
        for index, setting in enumerate(settings)
    ]

    async def together_and_alone() -> None:
        async with default_pair() as runtime:
            together = await take_many(runtime, requests)
            for request, taken in zip(requests, together, strict=True):
                alone = await take(runtime, **request)
                assert taken.tokens == alone.tokens, request

    run(together_and_alone(), 400)
