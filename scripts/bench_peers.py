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
import json
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from itertools import zip_longest
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

    def value(self, runs: Runs, kind: str) -> float | None:
        """None: not measured, or with other weights."""
        measured = self.above in runs and self.below in runs and self.kind in ("", kind)
        return ratio(runs[self.above], runs[self.below]) if measured else None


BARS = (
    Bar(OURS, GENERATE, 1.6),
    Bar(OURS, ASSISTED, 2.0),
    Bar(OURS, OURS_PLAIN, 1.15),
    Bar(OURS_LLAMA, GENERATE, 3.0, "F32"),
    Bar(OURS_LLAMA_PLAIN, LLAMA, 0.93, "F16"),
)


class Contestant:
    """Something that continues a prompt greedily, up to an end token. Those of this process have load and answer, which
    runs in a thread: the loop goes on meanwhile.
    """

    load: Callable[[], None]
    answer: Callable[[list[int], int], list[int]]

    def __init__(self, name: str, setting: Setting, **options: Any) -> None:
        self.name, self.setting, self.options = name, setting, options

    async def start(self) -> None:
        self.load()

    async def close(self) -> None:
        pass

    async def generate(self, prompt: list[int], max_tokens: int) -> Run:
        started = time.perf_counter()
        ids = await asyncio.to_thread(self.answer, prompt, max_tokens)
        return Run(tuple(ids), time.perf_counter() - started)


class Transformers(Contestant):
    """transformers' `generate` of a network as it was read. Options: network; draft, its assistant in generation."""

    def load(self) -> None:
        import torch
        from transformers import GenerationConfig

        torch.set_num_threads(self.setting.threads)
        self.network = self.options["network"].eval()
        self.network.generation_config = GenerationConfig()  # a model's own may punish repetition
        eos = [*self.setting.eos_ids]
        self.fixed = {"do_sample": False, "eos_token_id": eos or None, "pad_token_id": eos[0] if eos else None}
        if "draft" in self.options:
            self.fixed["assistant_model"] = read_draft(self.options["draft"])

    def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        import torch

        ids = torch.tensor([prompt])
        seen = torch.ones_like(ids)
        found = self.network.generate(ids, attention_mask=seen, max_new_tokens=max_tokens, **self.fixed)
        return list(found[0, len(prompt) :].tolist())


def read_draft(model: str) -> Any:
    """The draft's network, its head at the full width: −inf where a reduced one has no output."""
    import torch

    from execution.loading import read_network

    network, head_ids, _ = read_network(model, torch.device("cpu"), torch.float32)
    size = network.config.get_text_config(decoder=True).vocab_size

    def widen(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:  # [batch, positions, H] -> [.., .., vocab]
        return logits.new_full((*logits.shape[:-1], size), -torch.inf).index_copy_(-1, ids, logits)

    if head_ids is not None:
        network.get_output_embeddings().register_forward_hook(lambda _, __, logits: widen(head_ids, logits))
    return network.eval()


class LlamaCpp(Contestant):
    """llama-cpp-python's own loop. Option: lookup, its own speculative mode, which looks blocks up in the prompt."""

    def load(self) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        half, threads = self.setting.kind == "F16", self.setting.threads
        cache = llama_cpp.GGML_TYPE_F16 if half else llama_cpp.GGML_TYPE_F32
        options = {"n_threads": threads, "n_threads_batch": threads, "type_k": cache, "type_v": cache}
        options |= {"n_ctx": self.setting.context + LOOKED_UP + 1, "flash_attn": half}  # as our engine has it
        if "lookup" in self.options:
            options["draft_model"] = LlamaPromptLookupDecoding(num_pred_tokens=self.options["lookup"])
        try:
            self.llama = llama_cpp.Llama(str(self.setting.gguf), verbose=False, **options)
        except ValueError as error:
            raise click.ClickException(f"--gguf {self.setting.gguf}: llama.cpp can't load it ({error})") from error

    async def close(self) -> None:
        self.llama.close()

    def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        self.llama.reset()  # or what begins like the last prompt isn't prefilled again
        found: list[int] = []
        with contextlib.closing(self.llama.generate(prompt, temp=0.0)) as tokens:
            while len(found) < max_tokens and (not found or found[-1] not in self.setting.eos_ids):
                found.append(next(tokens))
        return found


class Own(Contestant):
    """This runtime, its workers processes of their own. Options: fields of its configuration."""

    async def start(self) -> None:
        fields = {"draft_model": self.setting.draft_model, "draft_engine": "torch", **self.options}
        fields["kept_tokens"] = 0  # rounds have the same prompts: each is prefilled anew
        self.config = RuntimeConfig(target_threads=self.setting.threads, **fields)
        self.runtime = await Runtime(self.config).__aenter__()

    async def close(self) -> None:
        await self.runtime.close()

    async def generate(self, prompt: list[int], max_tokens: int) -> Run:
        """Returns when both workers have taken the request's end too."""
        started = time.perf_counter()
        chunks = self.runtime.generate(prompt, temperature=0, seed=self.setting.seed, max_tokens=max_tokens)
        ids = tuple([token async for chunk in chunks for token in chunk.token_ids])
        run = Run(ids, time.perf_counter() - started)
        for peer in (self.runtime.target, self.runtime.draft):
            async with asyncio.timeout(PATIENCE):
                while peer is not None and (await peer.link.ping(PATIENCE))[0].requests:
                    await asyncio.sleep(0.01)
        return run


def make_contestants(setting: Setting, network: Any, only: Sequence[str]) -> list[Contestant]:
    """What is measured; transformers' generate and this runtime always, as ratios are against them."""
    torch = {"target_model": setting.target_model, "target_engine": "torch"}
    every = [
        Transformers(GENERATE, setting, network=network),
        Transformers(ASSISTED, setting, network=network, draft=setting.draft_model),
        Own(OURS, setting, **torch),
        Own(OURS_PLAIN, setting, **torch, draft="none"),
    ]
    if setting.gguf is not None:
        dtype = "float16" if setting.kind == "F16" else "float32"  # of keys and values
        llama = {"target_model": str(setting.gguf), "target_engine": "llamacpp", "target_dtype": dtype}
        every += [
            LlamaCpp(LLAMA, setting),
            LlamaCpp(LOOKUP, setting, lookup=LOOKED_UP),
            Own(OURS_LLAMA, setting, **llama),
            Own(OURS_LLAMA_PLAIN, setting, **llama, draft="none"),
        ]
    wanted = [one for one in every if not only or any(text in one.name for text in only)]
    if not wanted:
        raise click.UsageError(f"--only {only[0]}: no name has it; there are {'; '.join(one.name for one in every)}")
    return [one for one in every if one in wanted or one.name in (GENERATE, OURS)]


async def measure(
    contestants: Sequence[Contestant], prompts: Sequence[list[int]], rounds: int, max_tokens: int
) -> Runs:
    """What started contestants answer; their order is forward and backward in turn, so that a drift meets all alike."""
    runs: dict[str, list[list[Run]]] = {one.name: [[] for _ in range(rounds)] for one in contestants}
    turns = [(index, number) for index in range(rounds) for number in range(len(prompts))]
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=(1 + len(turns)) * len(contestants))
        for index, number in [(-1, 0), *turns]:  # the first warms up
            for one in contestants[:: -1 if (index + number) % 2 else 1]:
                progress.update(task, description=one.name)
                found = await one.generate(prompts[number], max_tokens)
                if index >= 0:
                    runs[one.name][index].append(found)
                await asyncio.sleep(PAUSE)
                progress.advance(task)
            gc.freeze()  # what is loaded stays: looking through it again would stall an answer
    return runs


async def run(setting: Setting, contestants: Sequence[Contestant], prompts: Sequence[list[int]], rounds: int) -> Any:
    """The runs, and what they ran on and with."""
    async with contextlib.AsyncExitStack() as stack:
        for one in contestants:
            await one.start()
            stack.push_async_callback(one.close)
        runs = await measure(contestants, prompts, rounds, setting.max_tokens)
        ours = next(one for one in contestants if isinstance(one, Own))
        options = GenerateOptions(max_tokens=setting.max_tokens, temperature=0, seed=setting.seed)
        return runs, described(ours.runtime, ours.config, options, None)


def rates(rounds: Rounds) -> list[float]:
    """Tokens a second in each round."""
    return [sum(len(run.ids) for run in runs) / sum(run.seconds for run in runs) for runs in rounds]


def ratio(above: Rounds, below: Rounds) -> float:
    return statistics.median(a / b for a, b in zip(rates(above), rates(below), strict=True))


def differences(found: Rounds, expected: Rounds) -> list[int | None]:
    """For each prompt the index of the earliest id, in any round, that isn't the expected one; None: all are."""

    def first(a: Run, b: Run) -> int | None:
        return next((at for at, (x, y) in enumerate(zip_longest(a.ids, b.ids)) if x != y), None)

    each = [map(first, *pair) for pair in zip(found, expected, strict=True)]
    return [min((at for at in one if at is not None), default=None) for one in zip(*each, strict=True)]


def tables(runs: Runs, kind: str) -> str:
    """Markdown: a row a contestant, then a row a bar."""
    lines = [f"| | weights | tokens/s | min–max | / {GENERATE} | {OURS} / it | same ids |", "|---|" + "---|" * 6]
    for name, rounds in runs.items():
        each, differ = rates(rounds), differences(rounds, runs[GENERATE])
        weights = f"{kind}{' (others)' * (kind != 'F32')}" if LLAMA in name else "float32"
        spread = f"{statistics.median(each):.1f} | {min(each):.1f}–{max(each):.1f}"
        ratios = f"{ratio(rounds, runs[GENERATE]):.2f} | {ratio(runs[OURS], rounds):.2f}"
        lines.append(f"| {name} | {weights} | {spread} | {ratios} | {differ.count(None)} of {len(differ)} |")
    lines += ["", "| what | bar | median | kept |", "|---|---|---|---|"]
    for bar in BARS:
        value = bar.value(runs, kind)
        found = "– | not measured" if value is None else f"{value:.2f} | {'yes' if value >= bar.least else '**no**'}"
        what = f"{bar.above} / {bar.below}" + (f", --gguf with {bar.kind}" if bar.kind else "")
        lines.append(f"| {what} | ≥ {bar.least:.2f} | {found} |")
    return "\n".join(lines)


def as_json(runs: Runs, kind: str) -> dict[str, Any]:
    each = {
        name: {
            "tokens_per_second": rates(rounds),
            "first_difference": differences(rounds, runs[GENERATE]),  # from transformers' ids, by prompt
            "rounds": [[asdict(run) for run in one] for one in rounds],
        }
        for name, rounds in runs.items()
    }
    return {"contestants": each, "bars": [{**asdict(bar), "value": bar.value(runs, kind)} for bar in BARS]}


def find_gguf(path: Path | None, target_model: str) -> tuple[Path | None, str]:
    """The file for llama.cpp and what most of its matrices are, as F32; (None, ""), said aloud, where there is none."""
    from gguf import GGUFReader

    why = None if find_spec("llama_cpp") else "not installed: pip install 'specdec-orchestrator[llamacpp]'"
    if path is None and target_model != default_models.TARGET:
        why = why or f"without a file: name one of {target_model} with --gguf"
    if why is not None:
        click.echo(f"llama.cpp is left out, {why}", err=True)
        return None, ""
    path = path or default_models.target_file()
    try:
        return path, statistics.mode(one.tensor_type.name for one in GGUFReader(path).tensors if len(one.shape) > 1)
    except (ValueError, IndexError) as error:
        raise click.UsageError(f"--gguf {path} can't be read ({error}): name a GGUF file of a model") from error


def read_target(model: str, count: int, seed: int) -> tuple[Any, tuple[int, ...], list[list[int]]]:
    """The target's network, its end tokens, and the prompts as it reads them."""
    import torch

    from execution.loading import read_network

    network, _, vocabulary = read_network(model, torch.device("cpu"), torch.float32)
    codec = TextCodec(vocabulary.tokenizer_json, vocabulary.chat_template)
    chosen = random.Random(seed).sample(shipped_prompts(), count)
    return network, vocabulary.eos_ids, [codec.encode(one.text, raw=False) for one in chosen]


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
        gguf, kind = find_gguf(gguf, given["target_model"])
        network, eos_ids, prompts = read_target(given["target_model"], count, given["seed"])
        context = max(map(len, prompts)) + given["max_tokens"]
        setting = Setting(**given, gguf=gguf, kind=kind, context=context, eos_ids=eos_ids)
        contestants = make_contestants(setting, network, only)
        runs, about = asyncio.run(run(setting, contestants, prompts, rounds))
    except (ModelError, SpecdecError) as error:
        raise click.ClickException(str(error)) from error
    about["versions"] |= {one.name: one.version for one in distributions(name="llama-cpp-python")}
    print(tables(runs, kind))
    if gguf is not None and kind != "F32" and any(LLAMA in name for name in runs):
        print(f"\n{gguf.name} isn't float32: rows of llama.cpp are of other weights (scripts/gguf_as.py).")
    print(f"\nCommand: `python scripts/bench_peers.py {shlex.join(sys.argv[1:])}`; {about['date']}.")
    print(f"\nMachine: {json.dumps(about['machine'])}\n\nVersions: {json.dumps(about['versions'])}")
    if json_file is not None:
        json.dump({**as_json(runs, kind), **about}, json_file, ensure_ascii=False, indent=1)


if __name__ == "__main__":
    main()
