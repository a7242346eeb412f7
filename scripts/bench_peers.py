"""Measure this runtime against its peers, on the same prompts, greedily, and print the tables of ratios.

    python scripts/bench_peers.py > peers.md                # the default pair; with nothing else running
    python scripts/bench_peers.py --gguf smollm2-f32.gguf   # llama.cpp with the same weights, as scripts/gguf_as.py
                                                            # makes them of the default target's file, which is Q4_1
    python scripts/bench_peers.py --only assisted           # fewer peers

Peers are transformers' generate and assisted generation (with the same draft) and, where llama-cpp-python is
installed, llama.cpp plain and with its own prompt lookup. All stay loaded, one generates at a time: each prompt goes
round all of them, forward and backward in turn, once a round. A rate is a round's tokens, up to the end token, by the
seconds of its prompts, prefill included; a ratio is the median over the rounds of the ratio of two rates of one round.
Prompts are some of `specdec-orchestrator bench`'s, drawn with the seed. A first prompt of each isn't counted.
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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console
from rich.progress import Progress

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
NO_NETWORKS = ("toy", "synthetic", "ngram")
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


Rounds = Sequence[Sequence[Run]]  # a run a prompt, in each round
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


# ---------------------------------------------------------------- contestants


class Contestant(Protocol):
    """Something that continues a prompt greedily, up to an end token."""

    name: str

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def rest(self) -> None:
        """Until nothing is left to do of the last answer."""

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> Run: ...


class InProcess:
    """A contestant of this process. It runs in a thread: the loop goes on reading what workers send."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.setting = name, setting

    async def start(self) -> None:
        await asyncio.to_thread(self.load)

    async def close(self) -> None:
        await asyncio.to_thread(self.unload)

    async def rest(self) -> None:
        pass

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> Run:
        return await asyncio.to_thread(self._timed, prompt, max_tokens)

    def _timed(self, prompt: Sequence[int], max_tokens: int) -> Run:
        started = time.perf_counter()
        ids = self.answer(prompt, max_tokens)
        return Run(tuple(ids), time.perf_counter() - started)

    def load(self) -> None:
        raise NotImplementedError

    def unload(self) -> None:
        pass

    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        raise NotImplementedError


class Transformers(InProcess):
    """transformers' `generate` of the target's network, as it was read; `assisted`: with our draft as its assistant."""

    def __init__(self, name: str, setting: Setting, network: Any, *, assisted: bool) -> None:
        super().__init__(name, setting)
        self.network, self.assisted, self.more = network, assisted, {}

    def load(self) -> None:
        import torch
        from transformers import GenerationConfig

        torch.set_num_threads(self.setting.threads)
        self.network.eval().generation_config = GenerationConfig()  # a model's own may punish repetition
        if self.assisted:
            self.more = {"assistant_model": read_draft(self.setting.draft_model)}

    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        import torch

        ids = torch.tensor([list(prompt)])
        eos = list(self.setting.eos_ids)
        found = self.network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else None,
            **self.more,
        )
        return found[0, len(prompt) :].tolist()


def read_draft(model: str) -> Any:
    """The draft's network, its head at the full width: −inf where a reduced one has no output."""
    import torch
    from execution.loading import read_network

    network, head_ids, _ = read_network(model, torch.device("cpu"), torch.float32)
    size = network.config.get_text_config(decoder=True).vocab_size

    def widen(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:  # [batch, positions, H] -> [.., .., V]
        return logits.new_full((*logits.shape[:-1], size), -torch.inf).index_copy_(-1, head_ids, logits)

    if head_ids is not None:
        network.get_output_embeddings().register_forward_hook(widen)
    return network.eval()


class LlamaCpp(InProcess):
    """llama-cpp-python's own loop; `lookup`: with its own speculative mode, which looks blocks up in the prompt."""

    def __init__(self, name: str, setting: Setting, *, lookup: bool) -> None:
        super().__init__(name, setting)
        self.lookup = lookup
        self.llama: Any = None

    def load(self) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        cache = llama_cpp.GGML_TYPE_F32 if self.setting.kind == "F32" else llama_cpp.GGML_TYPE_F16
        try:
            self.llama = llama_cpp.Llama(
                str(self.setting.gguf),
                n_ctx=-(-(self.setting.context + LOOKED_UP + 1) // 256) * 256,
                n_threads=self.setting.threads,
                n_threads_batch=self.setting.threads,
                type_k=cache,
                type_v=cache,
                draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOKED_UP) if self.lookup else None,
                verbose=False,
            )
        except ValueError as error:
            raise click.ClickException(f"--gguf {self.setting.gguf}: llama.cpp can't load it ({error})") from error

    def unload(self) -> None:
        if self.llama is not None:
            self.llama.close()

    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        self.llama.reset()  # or what begins like the last prompt isn't prefilled again
        found: list[int] = []
        with contextlib.closing(self.llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0)) as tokens:
            for token in tokens:
                found.append(int(token))
                if len(found) == max_tokens or token in self.setting.eos_ids:
                    break
        return found


class Own:
    """This runtime, its workers as processes of their own."""

    def __init__(self, name: str, config: RuntimeConfig, seed: int) -> None:
        self.name, self.config, self.seed = name, config, seed
        self.runtime = Runtime(config)

    async def start(self) -> None:
        await self.runtime.__aenter__()

    async def close(self) -> None:
        await self.runtime.close()

    async def rest(self) -> None:
        for peer in (self.runtime.target, self.runtime.draft):
            async with asyncio.timeout(PATIENCE):
                while peer is not None and (await peer.link.ping(PATIENCE))[0].requests:
                    await asyncio.sleep(0.01)

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> Run:
        started, found = time.perf_counter(), []
        async for chunk in self.runtime.generate(prompt, temperature=0, seed=self.seed, max_tokens=max_tokens):
            found += chunk.token_ids
        return Run(tuple(found), time.perf_counter() - started)


def make_contestants(setting: Setting, network: Any, only: Sequence[str]) -> list[Contestant]:
    """What is measured; transformers' generate and this runtime always: ratios are against them."""
    base = {"target_threads": setting.threads, "draft_model": setting.draft_model, "draft_engine": "torch"}
    base |= {"kept_tokens": 0}  # every round has the same prompts: each is prefilled anew
    torch = base | {"target_model": setting.target_model, "target_engine": "torch"}
    dtype = "float16" if setting.kind == "F16" else "float32"  # of keys and values, as LlamaCpp has them
    llama = base | {"target_model": str(setting.gguf), "target_engine": "llamacpp", "target_dtype": dtype}

    def own(name: str, options: Mapping[str, Any], draft: str = "cpu") -> Callable[[], Contestant]:
        return lambda: Own(name, RuntimeConfig(**options, draft=draft), setting.seed)

    makers: dict[str, Callable[[], Contestant]] = {
        GENERATE: lambda: Transformers(GENERATE, setting, network, assisted=False),
        ASSISTED: lambda: Transformers(ASSISTED, setting, network, assisted=True),
        OURS: own(OURS, torch),
        OURS_PLAIN: own(OURS_PLAIN, torch, "none"),
    }
    if setting.gguf is not None:
        makers |= {
            LLAMA: lambda: LlamaCpp(LLAMA, setting, lookup=False),
            LOOKUP: lambda: LlamaCpp(LOOKUP, setting, lookup=True),
            OURS_LLAMA: own(OURS_LLAMA, llama),
            OURS_LLAMA_PLAIN: own(OURS_LLAMA_PLAIN, llama, "none"),
        }
    wanted = [name for name in makers if not only or any(text in name for text in only)]
    if not wanted:
        raise click.UsageError(f"--only {', '.join(only)}: no name contains it; there are {'; '.join(makers)}")
    return [make() for name, make in makers.items() if name in {GENERATE, OURS, *wanted}]


# ---------------------------------------------------------------- running


def in_turn(contestants: Sequence[Contestant], turn: int) -> Sequence[Contestant]:
    """Forward and backward in turn: a drift of the machine's speed meets all alike."""
    return contestants if turn % 2 == 0 else contestants[::-1]


async def measure(
    contestants: Sequence[Contestant], prompts: Sequence[Sequence[int]], rounds: int, max_tokens: int
) -> Runs:
    """Runs of contestants that are started."""
    runs: dict[str, list[list[Run]]] = {one.name: [] for one in contestants}
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("answers", total=(rounds * len(prompts) + 1) * len(contestants))

        async def turn(one: Contestant, prompt: Sequence[int]) -> Run:
            progress.update(task, description=one.name)
            run = await one.generate(prompt, max_tokens)
            await one.rest()
            await asyncio.sleep(PAUSE)
            progress.advance(task)
            return run

        for one in contestants:
            await turn(one, prompts[0])
        gc.freeze()  # what is loaded stays: looking through it again would stall an answer
        for index in range(rounds):
            for one in contestants:
                runs[one.name].append([])
            for number, prompt in enumerate(prompts):
                for one in in_turn(contestants, index + number):
                    runs[one.name][-1].append(await turn(one, prompt))
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
        about = described(ours.runtime, ours.config, options, None)
    about["versions"]["llama-cpp-python"] = version_of_llama()
    return runs, about


# ---------------------------------------------------------------- reporting


def rates(rounds: Rounds) -> list[float]:
    """Tokens a second in each round."""
    return [sum(len(run.ids) for run in runs) / sum(run.seconds for run in runs) for runs in rounds]


def ratio(above: Rounds, below: Rounds) -> float:
    """The median over the rounds; both rates of a ratio are of one round."""
    return statistics.median(a / b for a, b in zip(rates(above), rates(below), strict=True))


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """The index of the first id that isn't the expected one, or that only one of them has."""
    if list(found) == list(expected):
        return None
    pairs = zip(found, expected, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))


def differences(found: Rounds, expected: Rounds) -> list[int | None]:
    """For each prompt, the earliest first difference over the rounds."""
    each = [
        [first_difference(run.ids, other.ids) for run, other in zip(*pair, strict=True)]
        for pair in zip(found, expected, strict=True)
    ]
    return [min((i for i in of if i is not None), default=None) for of in zip(*each, strict=True)]


def weights_of(name: str, kind: str) -> str:
    return "float32" if "llama.cpp" not in name else kind if kind == "F32" else f"{kind} (others)"


def table(runs: Runs, kind: str) -> str:
    """Markdown: a row a contestant."""
    lines = [f"| | weights | tokens/s | min–max | / {GENERATE} | {OURS} / it | same ids |", "|---|---|---|---|---|---|---|"]
    for name, rounds in runs.items():
        each, differ = rates(rounds), differences(rounds, runs[GENERATE])
        same = f"{differ.count(None)} of {len(differ)}"
        lines.append(
            f"| {name} | {weights_of(name, kind)} | {statistics.median(each):.1f} | {min(each):.1f}–{max(each):.1f} "
            f"| {ratio(rounds, runs[GENERATE]):.2f} | {ratio(runs[OURS], rounds):.2f} | {same} |"
        )
    return "\n".join(lines)


def bar_value(bar: Bar, runs: Runs, kind: str) -> float | str:
    """The ratio, or why there is none."""
    absent = [name for name in (bar.above, bar.below) if name not in runs]
    if absent:
        return f"not measured: without {' and '.join(absent)}"
    if bar.kind and bar.kind != kind:
        return f"not measured: needs {bar.kind} weights, not {kind}"
    return ratio(runs[bar.above], runs[bar.below])


def bars_table(runs: Runs, kind: str) -> str:
    """Markdown: a row a bar."""
    lines = ["| what | bar | median | kept |", "|---|---|---|---|"]
    for bar in BARS:
        what = f"{bar.above} / {bar.below}" + (f", {bar.kind}" if bar.kind else "")
        value = bar_value(bar, runs, kind)
        if isinstance(value, str):
            lines.append(f"| {what} | ≥ {bar.least:.2f} | – | {value} |")
        else:
            lines.append(f"| {what} | ≥ {bar.least:.2f} | {value:.2f} | {'yes' if value >= bar.least else '**no**'} |")
    return "\n".join(lines)


def to_json(runs: Runs, kind: str, about: Mapping[str, Any]) -> dict[str, Any]:
    contestants = [
        {
            "name": name,
            "weights": weights_of(name, kind),
            "tokens_per_second": rates(rounds),
            "seconds": [[run.seconds for run in one] for one in rounds],
            "ids": [list(run.ids) for run in rounds[0]],
            "first_difference": differences(rounds, runs[GENERATE]),  # by prompt; null: the same ids in all rounds
        }
        for name, rounds in runs.items()
    ]
    bars = [{**vars(bar), "value": bar_value(bar, runs, kind)} for bar in BARS]
    return {"contestants": contestants, "bars": bars, **about}


# ---------------------------------------------------------------- the command


def version_of_llama() -> str:
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def find_gguf(path: Path | None, target_model: str) -> Path | None:
    """The file of the contestants that run llama.cpp; None, and a line that says why, where they are left out."""
    why = None
    if importlib.util.find_spec("llama_cpp") is None:
        why = "llama-cpp-python is not installed; pip install 'specdec-orchestrator[llamacpp]'"
    elif path is None and target_model == DEFAULTS.target_model:
        from execution.default_models import target_file

        return target_file()
    elif path is None and target_model.endswith(".gguf"):
        return Path(target_model)
    elif path is None:
        why = f"--gguf names no file of {target_model}"
    if why is not None:
        click.echo(f"llama.cpp is left out: {why}", err=True)
        return None
    return path


def kind_of(path: Path | None) -> str:
    """What most of a GGUF file's matrices are: F32, F16, Q4_1, …"""
    from gguf import GGUFReader

    if path is None:
        return ""
    try:
        kinds = Counter(tensor.tensor_type.name for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1)
        return str(kinds.most_common(1)[0][0])
    except (OSError, ValueError, IndexError) as error:
        raise click.UsageError(f"--gguf {path}: not a GGUF file of a model ({error})") from error


def choose_prompts(count: int, seed: int) -> list[str]:
    texts = [one.text for one in shipped_prompts()]
    if count > len(texts):
        raise click.UsageError(f"--prompts {count}: there are {len(texts)}")
    return random.Random(seed).sample(texts, count)


def check_models(**models: str) -> None:
    for flag, model in models.items():
        if model.split(":")[0] in NO_NETWORKS:
            raise click.UsageError(f"--{flag.replace('_', '-')} {model}: peers can't run it; name a network")


def check_writable(path: Path | None) -> None:
    """Now, rather than after minutes of measuring."""
    if path is not None and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise click.UsageError(f"--json {path} can't be written: name a file in a folder that is there and is yours")


@click.command()
@click.option("--target-model", default=DEFAULTS.target_model, show_default=True)
@click.option("--draft-model", default=DEFAULTS.draft_model, show_default=True)
@click.option(
    "--gguf",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The target for llama.cpp.  [default: the default target's own file, which is Q4_1]",
)
@click.option("--prompts", "count", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds that count.")
@click.option("--threads", default=os.cpu_count() or 1, show_default=True, type=click.IntRange(min=1, max=1024))
@click.option("--seed", default=1, show_default=True, type=click.IntRange(min=0), help="Of the choice of prompts.")
@click.option("--only", multiple=True, metavar="TEXT", help="Beside the two that ratios are against, names with TEXT.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write one JSON object.")
def main(count: int, rounds: int, only: tuple[str, ...], json_file: Path | None, **given: Any) -> None:
    """Print the contestants, then the bars, then what they ran on."""
