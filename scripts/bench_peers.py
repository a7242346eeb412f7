"""Measure this runtime against its peers, on the same prompts, greedily, and print the tables of ratios.

    python scripts/bench_peers.py > peers.md                # the default pair; with nothing else running
    python scripts/bench_peers.py --gguf smollm2.F32.gguf   # llama.cpp with the same weights: scripts/gguf_as.py makes
                                                            # that file of the default target's own, which is Q4_1
    python scripts/bench_peers.py --only assisted           # fewer peers

Peers are transformers' generate and assisted generation (with the same draft) and, where llama-cpp-python is
installed, llama.cpp plain and with its own prompt lookup. All stay loaded, one generates at a time: each prompt goes
round all of them, forward and backward in turn, once a round. A rate is a round's tokens, up to the end token, by the
seconds of its prompts, prefill included; a ratio is the median over the rounds, both its rates from one round.
Prompts are some of `specdec-orchestrator bench`'s. A first answer of each contestant isn't counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import random
import shlex
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.progress import Progress

from execution import default_models
from execution.errors import ModelError
from orchestrator import Runtime, RuntimeConfig, SpecdecError
from orchestrator.bench.machine import described
from orchestrator.bench.workload import shipped_prompts
from orchestrator.request import GenerateOptions
from orchestrator.text import TextCodec

DEFAULTS = RuntimeConfig()
GENERATE, ASSISTED = "transformers generate", "transformers assisted"
LLAMA, LOOKUP = "llama.cpp", "llama.cpp prompt lookup"
OURS, OURS_PLAIN = "specdec torch", "specdec torch, target only"
OURS_LLAMA, OURS_LLAMA_PLAIN = "specdec llama.cpp", "specdec llama.cpp, target only"
LOOKED_UP = 2  # tokens of a looked-up block: what llama-cpp-python's README advises for CPUs
PATIENCE = 60.0  # seconds until a worker has taken the end of a request
PAUSE = 0.02  # seconds in which threads that wait for more work fall asleep


@dataclass(frozen=True)
class Setting:
    """What all contestants share. `gguf` is the file of those that run llama.cpp, `kind` what its weights are."""

    target_model: str
    draft_model: str
    gguf: Path | None
    kind: str
    threads: int
    max_tokens: int
    seed: int
    context: int  # tokens of the longest prompt and its answer
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """One answer: its ids, with the end token where there is one."""

    ids: tuple[int, ...]
    seconds: float


Rounds = Sequence[Sequence[Run]]  # in each round, a run a prompt
Runs = Mapping[str, Rounds]  # by contestant


@dataclass(frozen=True)
class Bar:
    """One promise: the rate of `above` by that of `below`. `kind`: the GGUF file's weights that it is made for."""

    above: str
    below: str
    least: float
    kind: str = ""


BARS = (
    Bar(OURS, GENERATE, 1.6),
    Bar(OURS, ASSISTED, 2.0),
    Bar(OURS, OURS_PLAIN, 1.15),
    Bar(OURS_LLAMA, GENERATE, 3.0, "F32"),
    Bar(OURS_LLAMA_PLAIN, LLAMA, 0.93, "F16"),
)


class Contestant(ABC):
    """Something that continues a prompt greedily, up to an end token."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.setting = name, setting

    @abstractmethod
    async def start(self) -> None: ...

    async def close(self) -> None:  # noqa: B027  # most have nothing to end
        pass

    @abstractmethod
    async def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The new ids."""

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> Run:
        started = time.perf_counter()
        ids = await self.answer(list(prompt), max_tokens)
        return Run(tuple(ids), time.perf_counter() - started)


class Transformers(Contestant):
    """transformers' `generate` of the target's network as it was read; `assisted`: with our draft as its assistant."""

    def __init__(self, name: str, setting: Setting, network: Any, *, assisted: bool) -> None:
        super().__init__(name, setting)
        self.network, self.assisted, self.options = network, assisted, {}

    async def start(self) -> None:
        import torch
        from transformers import GenerationConfig

        torch.set_num_threads(self.setting.threads)
        self.network.eval().generation_config = GenerationConfig()  # a model's own may punish repetition
        eos = list(self.setting.eos_ids)
        self.options = {"do_sample": False, "eos_token_id": eos or None, "pad_token_id": eos[0] if eos else None}
        if self.assisted:
            self.options["assistant_model"] = read_draft(self.setting.draft_model)

    async def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        import torch

        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_tokens, **self.options}
        found = await asyncio.to_thread(self.network.generate, ids, **options)  # the loop goes on reading the workers
        return found[0, len(prompt) :].tolist()


def read_draft(model: str) -> Any:
    """The draft's network, its head at the full width: −inf where a reduced one has no output."""
    import torch

    from execution.loading import read_network

    network, head_ids, _ = read_network(model, torch.device("cpu"), torch.float32)
    size = network.config.get_text_config(decoder=True).vocab_size

    def widen(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:  # [batch, positions, H] -> [.., .., vocab]
        return logits.new_full((*logits.shape[:-1], size), -torch.inf).index_copy_(-1, head_ids, logits)

    if head_ids is not None:
        network.get_output_embeddings().register_forward_hook(widen)
    return network.eval()


class LlamaCpp(Contestant):
    """llama-cpp-python's own loop; `lookup`: with its own speculative mode, which looks blocks up in the prompt."""

    def __init__(self, name: str, setting: Setting, *, lookup: bool) -> None:
        super().__init__(name, setting)
        self.lookup = lookup
        self.llama: Any = None

    async def start(self) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        half, threads = self.setting.kind == "F16", self.setting.threads
        cache = llama_cpp.GGML_TYPE_F16 if half else llama_cpp.GGML_TYPE_F32
        try:
            self.llama = llama_cpp.Llama(
                str(self.setting.gguf),
                n_ctx=-(-(self.setting.context + LOOKED_UP + 1) // 256) * 256,
                n_threads=threads,
                n_threads_batch=threads,
                type_k=cache,
                type_v=cache,
                flash_attn=half,  # as our engine sets it
                draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOKED_UP) if self.lookup else None,
                verbose=False,
            )
        except ValueError as error:
            raise click.ClickException(f"--gguf {self.setting.gguf}: llama.cpp can't load it ({error})") from error

    async def close(self) -> None:
        if self.llama is not None:
            self.llama.close()

    async def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        return await asyncio.to_thread(self._answer, prompt, max_tokens)

    def _answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        self.llama.reset()  # or what begins like the last prompt isn't prefilled again
        found: list[int] = []
        with contextlib.closing(self.llama.generate(prompt, temp=0.0)) as tokens:
            while len(found) < max_tokens and (not found or found[-1] not in self.setting.eos_ids):
                found.append(next(tokens))
        return found


class Own(Contestant):
    """This runtime, its workers processes of their own."""

    def __init__(self, name: str, setting: Setting, **fields: Any) -> None:
        super().__init__(name, setting)
        fields |= {"target_threads": setting.threads, "draft_model": setting.draft_model, "draft_engine": "torch"}
        self.config = RuntimeConfig(**fields, kept_tokens=0)  # rounds have the same prompts: each is prefilled anew
        self.runtime = Runtime(self.config)

    async def start(self) -> None:
        await self.runtime.__aenter__()

    async def close(self) -> None:
        await self.runtime.close()

    async def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        chunks = self.runtime.generate(prompt, temperature=0, seed=self.setting.seed, max_tokens=max_tokens)
        return [token async for chunk in chunks for token in chunk.token_ids]

    async def rest(self) -> None:
        """Until both workers have taken the end of the request."""
        for peer in (self.runtime.target, self.runtime.draft):
            async with asyncio.timeout(PATIENCE):
                while peer is not None and (await peer.link.ping(PATIENCE))[0].requests:
                    await asyncio.sleep(0.01)


def make_contestants(setting: Setting, network: Any, only: Sequence[str]) -> list[Contestant]:
    """What is measured; transformers' generate and this runtime always, as ratios are against them."""
    torch = {"target_model": setting.target_model, "target_engine": "torch"}
    every: list[Contestant] = [
        Transformers(GENERATE, setting, network, assisted=False),
        Transformers(ASSISTED, setting, network, assisted=True),
        Own(OURS, setting, **torch),
        Own(OURS_PLAIN, setting, **torch, draft="none"),
    ]
    if setting.gguf is not None:
        dtype = "float16" if setting.kind == "F16" else "float32"  # of keys and values
        llama = {"target_model": str(setting.gguf), "target_engine": "llamacpp", "target_dtype": dtype}
        every += [
            LlamaCpp(LLAMA, setting, lookup=False),
            LlamaCpp(LOOKUP, setting, lookup=True),
            Own(OURS_LLAMA, setting, **llama),
            Own(OURS_LLAMA_PLAIN, setting, **llama, draft="none"),
        ]
    wanted = {one.name for one in every if not only or any(text in one.name for text in only)}
    if not wanted:
        names = "; ".join(one.name for one in every)
        raise click.UsageError(f"--only {', '.join(only)}: no name contains it; there are {names}")
    return [one for one in every if one.name in {GENERATE, OURS, *wanted}]


def in_turn(contestants: Sequence[Contestant], turn: int) -> Sequence[Contestant]:
    """Forward and backward in turn: a drift of the machine's speed meets all alike."""
    return contestants if turn % 2 == 0 else contestants[::-1]


async def measure(
    contestants: Sequence[Contestant], prompts: Sequence[Sequence[int]], rounds: int, max_tokens: int
) -> Runs:
    """What started contestants answer."""
    runs: dict[str, list[list[Run]]] = {one.name: [[] for _ in range(rounds)] for one in contestants}
    turns = [(index, number) for index in range(rounds) for number in range(len(prompts))]
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=(1 + len(turns)) * len(contestants))
        for index, number in [(-1, 0), *turns]:  # the first warms up
            for one in in_turn(contestants, index + number):
                progress.update(task, description=one.name)
                run = await one.generate(prompts[number], max_tokens)
                if index >= 0:
                    runs[one.name][index].append(run)
                if isinstance(one, Own):
                    await one.rest()
                await asyncio.sleep(PAUSE)
                progress.advance(task)
            gc.freeze()  # what is loaded stays: looking through it again would stall an answer
    return runs


async def run_all(
    setting: Setting, contestants: Sequence[Contestant], prompts: Sequence[Sequence[int]], rounds: int
) -> tuple[Runs, dict[str, Any]]:
    """Start all, measure, end all: the runs, and what they ran on and with."""
    async with contextlib.AsyncExitStack() as stack:
        for one in contestants:
            stack.push_async_callback(one.close)
            await one.start()
        runs = await measure(contestants, prompts, rounds, setting.max_tokens)
        ours = next(one for one in contestants if isinstance(one, Own))
        options = GenerateOptions(max_tokens=setting.max_tokens, temperature=0, seed=setting.seed)
        return runs, described(ours.runtime, ours.config, options, None)


def rates(rounds: Rounds) -> list[float]:
    """Tokens a second in each round."""
    return [sum(len(run.ids) for run in runs) / sum(run.seconds for run in runs) for runs in rounds]


def ratio(above: Rounds, below: Rounds) -> float:
    return statistics.median(a / b for a, b in zip(rates(above), rates(below), strict=True))


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """The index of the first id that isn't the expected one, or that only one of them has."""
    length = min(len(found), len(expected))
    same_length = None if len(found) == len(expected) else length
    return next((i for i in range(length) if found[i] != expected[i]), same_length)


def differences(found: Rounds, expected: Rounds) -> list[int | None]:
    """For each prompt the earliest first difference of all rounds."""
    pairs = zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True)  # by prompt
    each = [[first_difference(a.ids, b.ids) for a, b in zip(*pair, strict=True)] for pair in pairs]
    return [min((index for index in one if index is not None), default=None) for one in each]


def table(runs: Runs, kind: str) -> str:
    """Markdown: a row a contestant."""
    lines = [f"| | weights | tokens/s | min–max | / {GENERATE} | {OURS} / it | same ids |", "|---|" + "---|" * 6]
    for name, rounds in runs.items():
        each, differ = rates(rounds), differences(rounds, runs[GENERATE])
        weights = f"{kind}{' (others)' * (kind != 'F32')}" if LLAMA in name else "float32"
        lines.append(
            f"| {name} | {weights} | {statistics.median(each):.1f} | {min(each):.1f}–{max(each):.1f} | "
            f"{ratio(rounds, runs[GENERATE]):.2f} | {ratio(runs[OURS], rounds):.2f} | "
            f"{differ.count(None)} of {len(differ)} |"
        )
    return "\n".join(lines)


def value_of(bar: Bar, runs: Runs, kind: str) -> float | None:
    """None: not measured, or with other weights."""
    measured = bar.above in runs and bar.below in runs and bar.kind in ("", kind)
    return ratio(runs[bar.above], runs[bar.below]) if measured else None


def bars_table(runs: Runs, kind: str) -> str:
    """Markdown: a row a bar."""
    lines = ["| what | bar | median | kept |", "|---|---|---|---|"]
    for bar in BARS:
        value = value_of(bar, runs, kind)
        found = "– | not measured" if value is None else f"{value:.2f} | {'yes' if value >= bar.least else '**no**'}"
        what = f"{bar.above} / {bar.below}" + (f", --gguf with {bar.kind}" if bar.kind else "")
        lines.append(f"| {what} | ≥ {bar.least:.2f} | {found} |")
    return "\n".join(lines)


def as_json(runs: Runs, kind: str) -> dict[str, Any]:
    """What was measured, and where answers differ from transformers' first (null: nowhere)."""
    each = {
        name: {
            "tokens_per_second": rates(rounds),
            "seconds": [[run.seconds for run in one] for one in rounds],
            "ids": [run.ids for run in rounds[0]],
            "first_difference": differences(rounds, runs[GENERATE]),
        }
        for name, rounds in runs.items()
    }
    return {"contestants": each, "bars": [{**vars(bar), "value": value_of(bar, runs, kind)} for bar in BARS]}


def find_gguf(path: Path | None, target_model: str) -> tuple[Path | None, str]:
    """The file for llama.cpp and what most of its matrices are, as F32; (None, ""), said aloud, where there is none."""
    from gguf import GGUFReader

    if importlib.util.find_spec("llama_cpp") is None:
        why = "llama-cpp-python isn't installed: pip install 'specdec-orchestrator[llamacpp]'"
    elif path is None and target_model != default_models.TARGET:
        why = f"--gguf names no file of {target_model}"
    else:
        path = path or default_models.target_file()
        try:
            kinds = Counter(one.tensor_type.name for one in GGUFReader(path).tensors if len(one.shape) > 1)
        except (ValueError, IndexError) as error:
            raise click.UsageError(f"--gguf {path} can't be read ({error}): name a GGUF file of a model") from error
        return path, max(kinds, key=lambda kind: kinds[kind], default="")
    click.echo(f"llama.cpp is left out: {why}", err=True)
    return None, ""


def prepare(count: int, only: Sequence[str], gguf: Path | None, given: dict[str, Any]) -> tuple[Any, ...]:
    """Setting, contestants and prompts. The target's network is read here: its vocabulary makes the prompts."""
    import torch

    from execution.loading import read_network

    path, kind = find_gguf(gguf, given["target_model"])
    network, _, vocabulary = read_network(given["target_model"], torch.device("cpu"), torch.float32)
    codec = TextCodec(vocabulary.tokenizer_json, vocabulary.chat_template)
    texts = random.Random(given["seed"]).sample([one.text for one in shipped_prompts()], count)
    prompts = [codec.encode(text, raw=False) for text in texts]
    context = max(map(len, prompts)) + given["max_tokens"]
    setting = Setting(**given, gguf=path, kind=kind, context=context, eos_ids=vocabulary.eos_ids)
    return setting, make_contestants(setting, network, only), prompts


@click.command()
@click.option("--target-model", default=DEFAULTS.target_model, show_default=True)
@click.option("--draft-model", default=DEFAULTS.draft_model, show_default=True)
@click.option("--gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The target for llama.cpp.")
@click.option("--prompts", "count", default=8, show_default=True, type=click.IntRange(1, len(shipped_prompts())))
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="That count.")
@click.option("--threads", default=os.cpu_count() or 1, show_default=True, type=click.IntRange(1, 1024))
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Of the choice of prompts.")
@click.option("--only", multiple=True, metavar="TEXT", help="These, and the two that ratios are against.")
@click.option("--json", "json_file", type=click.File("w", lazy=False, encoding="utf-8"), help="Write a JSON object.")
def main(
    count: int, rounds: int, only: tuple[str, ...], gguf: Path | None, json_file: IO[str] | None, **given: Any
) -> None:
    """Print the contestants, then the bars, then what they ran on."""
    for flag in ("target_model", "draft_model"):
        if given[flag].split(":")[0] in ("toy", "synthetic", "ngram", "none"):
            raise click.UsageError(f"--{flag.replace('_', '-')} {given[flag]}: peers can't run it, name a network")
    try:
        setting, contestants, prompts = prepare(count, only, gguf, given)
        runs, about = asyncio.run(run_all(setting, contestants, prompts, rounds))
    except (ModelError, SpecdecError) as error:
        raise click.ClickException(str(error)) from error
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        about["versions"]["llama-cpp-python"] = importlib.metadata.version("llama-cpp-python")
    print(table(runs, setting.kind), bars_table(runs, setting.kind), sep="\n\n")
    if setting.kind not in ("", "F32"):
        print(f"\n{setting.gguf.name} isn't float32: rows of llama.cpp are of other weights (scripts/gguf_as.py).")
    print(f"\nCommand: `python scripts/bench_peers.py {shlex.join(sys.argv[1:])}`; {about['date']}.")
    print(f"\nMachine: {json.dumps(about['machine'])}\n\nVersions: {json.dumps(about['versions'])}")
    if json_file is not None:
        json.dump({**as_json(runs, setting.kind), **about}, json_file, ensure_ascii=False, indent=1)


if __name__ == "__main__":
    main()
