"""Measure what a chat's second turn waits for its first token, against the same prompt on workers that never saw it.

    python scripts/measure_turns.py > turns.md    # the default pair, 1,000 tokens of history; nothing else running

A pair is a first turn, then its second one and the same prompt with another first token, which no kept row begins with:
both in the same processes, one after the other, which comes first in turn. A first pair isn't counted. The bar is on
the median over the pairs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from orchestrator import Runtime, RuntimeConfig, SpecdecError
from orchestrator.text import TextCodec

BAR = 0.25  # of a cold start's time to the first token
ANSWER = 16  # tokens of the first turn
QUESTION = "And what would you say to someone who doubts that?"
QUESTIONS = Path(__file__).parent / "heldout_prompts.jsonl"
PATIENCE = 60.0  # seconds until a worker has taken the end of a request
DEFAULTS = RuntimeConfig()


@dataclass(frozen=True)
class Pair:
    """Seconds to the first token, and tokens of the prompt."""

    tokens: int
    second: float
    cold: float

    @property
    def ratio(self) -> float:
        return self.second / self.cold


def encoded(codec: TextCodec, texts: Sequence[str]) -> list[int]:
    """A chat as tokens, user and assistant in turn; without a chat template the texts alone."""
    messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    return codec.encode(codec.render(messages) or "\n".join(texts), raw=True)


def history(codec: TextCodec, start: int, tokens: int) -> list[str]:
    """Texts of a chat of at least `tokens` tokens that ends with the user's; each `start` begins another one."""
    lines = [json.loads(line)["prompt"] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    texts = [f"{start}: {lines[start % len(lines)]}"]
    while len(encoded(codec, texts)) < tokens:
        texts += [lines[(start + len(texts) + i) % len(lines)] for i in range(2)]
    return texts


async def at_rest(runtime: Runtime) -> None:
    """Until both workers have taken the end of all requests: what they still did would be measured."""
    for peer in (runtime.target, runtime.draft):
        async with asyncio.timeout(PATIENCE):
            while peer is not None and (await peer.link.ping(PATIENCE))[0].requests:
                await asyncio.sleep(0.01)


async def first_token(runtime: Runtime, prompt: Sequence[int]) -> float:
    """Seconds until there is one; the request ends with it."""
    await at_rest(runtime)
    started = time.perf_counter()
    async with contextlib.aclosing(runtime.generate(prompt, temperature=0, seed=1)) as chunks:
        await anext(chunks)
        return time.perf_counter() - started


async def answer(runtime: Runtime, prompt: Sequence[int]) -> str:
    """The text of the first turn."""
    chunks = runtime.generate(prompt, temperature=0, seed=1, max_tokens=ANSWER)
    return "".join([chunk.text async for chunk in chunks])


async def measure_pair(runtime: Runtime, index: int, tokens: int) -> Pair:
    """A first turn, then the second one, warm and cold."""
    codec = runtime.text
    texts = history(codec, index, tokens)
    said = await answer(runtime, encoded(codec, texts))
    prompt = encoded(codec, [*texts, said or "…", QUESTION])
    stranger = [(prompt[0] + 1 + index) % runtime.target.welcome.vocab_size, *prompt[1:]]
    if index % 2:
        cold = await first_token(runtime, stranger)
        return Pair(len(prompt), await first_token(runtime, prompt), cold)
    second = await first_token(runtime, prompt)
    return Pair(len(prompt), second, await first_token(runtime, stranger))


async def measure(config: RuntimeConfig, tokens: int, count: int) -> list[Pair]:
    """The pairs that count."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("pairs", total=count + 1)
        pairs = []
        async with Runtime(config) as runtime:
            for index in range(count + 1):
                pairs.append(await measure_pair(runtime, index, tokens))
                progress.advance(task)
    return pairs[1:]


def table(pairs: Sequence[Pair]) -> str:
    """Markdown: a row a pair, and the bar."""
    lines = ["| prompt, tokens | cold, ms | second turn, ms | ratio |", "|---|---|---|---|"]
    lines += [f"| {one.tokens} | {one.cold * 1e3:.1f} | {one.second * 1e3:.1f} | {one.ratio:.3f} |" for one in pairs]
    cold, second = (statistics.median(getattr(one, name) for one in pairs) for name in ("cold", "second"))
    middle = statistics.median(one.ratio for one in pairs)
    kept = "yes" if middle <= BAR else "**no**"
    lines += [
        f"| median | {cold * 1e3:.1f} | {second * 1e3:.1f} | {middle:.3f} |",
        "",
        "| what | bar | median | kept |",
        "|---|---|---|---|",
        f"| time to the first token, second turn / cold | ≤ {BAR:.2f} | {middle:.3f} | {kept} |",
    ]
    return "\n".join(lines)


@click.command()
@click.option("--target-model", default=DEFAULTS.target_model, show_default=True)
@click.option("--draft-model", default=DEFAULTS.draft_model, show_default=True)
@click.option("--history", "tokens", default=1000, show_default=True, type=click.IntRange(min=32), metavar="TOKENS")
@click.option("--pairs", default=5, show_default=True, type=click.IntRange(min=1), help="Pairs that count.")
@click.option("--kept-tokens", default=DEFAULTS.kept_tokens, show_default=True, type=click.IntRange(min=0))
def main(target_model: str, draft_model: str, tokens: int, pairs: int, kept_tokens: int) -> None:
    """Print the pairs, and the ratio against its bar."""
    config = RuntimeConfig(target_model=target_model, draft_model=draft_model, kept_tokens=kept_tokens)
    try:
        found = asyncio.run(measure(config, tokens, pairs))
    except SpecdecError as error:
        raise click.ClickException(str(error)) from error
    print(table(found))


if __name__ == "__main__":
    main()
