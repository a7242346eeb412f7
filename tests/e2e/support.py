"""What the end-to-end tests share: toy references, runs and their rounds, bounded waits, workers started by hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

from execution.toy import toy_table
from execution.toy_spec import ToySpec
from orchestrator import Generation, Runtime
from orchestrator.request import Request, Round
from speculative import SamplingOptions, Stream, gumbel, log_distribution
from tests.protocol.support import free_port

T = TypeVar("T")
MARK = "E2E_RUN"
START_SECONDS = 120.0  # a worker imports torch; on a loaded machine that takes its time


def toy(**options: object) -> str:
    """The reference of a toy model."""
    return "toy:" + ",".join(f"{name}={value}" for name, value in options.items())


class Run:
    """Runs coroutines on one loop, each for a bounded time."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner

    def __call__(self, work: Coroutine[Any, Any, T], seconds: float = 240.0) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await work

        return self._runner.run(bounded())


def runtime_of(target: str, draft: str, **fields: Any) -> Runtime:
    """A runtime over toy models; `draft` may be none or ngram. A block is waited for patiently unless told else."""
    if draft not in ("none", "ngram"):
        fields |= {"draft_model": draft}
        draft = fields.pop("draft_place", "cpu")
    if "://" not in target:
        fields |= {"target_model": target}
        target = "cpu"
    fields = {"draft_timeout": 60.0, "connect_timeout": START_SECONDS, "target_threads": 1, **fields}
    return Runtime(target=target, draft=draft, **fields)


# ---------------------------------------------------------------- runs


@dataclass
class Taken:
    """A finished request: its tokens, its rounds and when each came."""

    rounds: list[Round] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    prompt: tuple[int, ...] = ()
    generation: Generation | None = None

    def write(self, request: Request, done: Round) -> None:
        """As a trace sink."""
        self.prompt = request.prompt
        self.rounds.append(done)
        self.times.append(time.perf_counter())

    @property
    def tokens(self) -> list[int]:
        return [token for done in self.rounds for token in done.emitted]

    @property
    def drafted(self) -> int:
        return sum(len(done.proposal.tokens) for done in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(done.kept for done in self.rounds)


async def take(
    runtime: Runtime,
    prompt: str | Sequence[int],
    on_round: Callable[[Taken], Any] | None = None,
    **options: Any,
) -> Taken:
    """Generate to the end. `on_round` is called after each round with what is there so far."""
    taken = Taken()
    async with contextlib.aclosing(runtime.generate(prompt, trace=taken, **options)) as chunks:
        async for chunk in chunks:
            taken.text += chunk.text
            taken.generation = chunk.generation
            if on_round is not None:
                on_round(taken)
    assert taken.generation is not None, "the last chunk carries the generation"
    assert list(taken.generation.token_ids) == taken.tokens
    return taken


async def take_many(runtime: Runtime, requests: Sequence[dict[str, Any]]) -> list[Taken]:
    """All at once."""
    return list(await asyncio.gather(*(take(runtime, **request) for request in requests)))


# ---------------------------------------------------------------- the oracle


def plain_coupled(
    reference: str, prompt: Sequence[int], seed: int, count: int, options: SamplingOptions | None = None
) -> list[int]:
    """Plain decoding with public noise, by the toy's table: token n is argmax(log p + gumbel(RACE, n)), or the argmax.

    Written over the table alone, without rows, blocks or messages. Ends with the toy's end token.
    """
    options = options or SamplingOptions()
    spec, table = ToySpec.parse(reference), toy_table(reference)
    law = log_distribution(table, [options] * len(table))
    places = range(len(prompt), len(prompt) + count)
    noise = gumbel([seed] * count, Stream.RACE, places, spec.vocab_size)
    tokens = list(prompt)
    for step in range(count):
        log_p = law[context_of(spec, tokens)]
        tokens.append(int((log_p if options.greedy else log_p + noise[step]).argmax()))
        if tokens[-1] == spec.eos:
            break
    return tokens[len(prompt) :]


def context_of(spec: ToySpec, tokens: Sequence[int]) -> int:
    """The row of the toy's table after `tokens`."""
    if spec.state == "hash":
        value = 0
        for token in tokens:
            value = (value * 6364136223846793005 + token + 1) % 2**64
        return (value >> 33) & (spec.contexts - 1)
    row = 0
    for token in [0] * spec.order + list(tokens[-spec.order :] if spec.order else []):
        row = (row * spec.vocab_size + token) % max(1, spec.contexts)
    return row


def probabilities(reference: str) -> np.ndarray:
    """The toy's own law, float64 [contexts, V]."""
    return torch.softmax(toy_table(reference).double(), -1).numpy()


# ---------------------------------------------------------------- processes


def marked_processes() -> list[psutil.Process]:
    """Living processes that descend from this test run, orphans too."""
    value, found = os.environ[MARK], []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.environ().get(MARK) != value:
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


LASTING: set[object] = set()  # pids and folders of runtimes that several tests of a module share


def let_last() -> None:
    """What runs now is shared by the tests of this module; it's checked when the module ends."""
    LASTING.update(process.pid for process in marked_processes())
    LASTING.update(Path(tempfile.gettempdir()).glob("specdec-*"))


def sockets_here() -> set[str]:
    """Sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            where = os.readlink(f"/proc/self/fd/{name}")
            if where.startswith("socket:"):
                found.add(where)
    return found


def wait_until(true: Callable[[], Any], seconds: float, what: Callable[[], str] | str) -> None:
    """Poll until `true`, at most `seconds`; then fail, saying `what`."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(what() if callable(what) else f"{what}: not within {seconds:g} s")
        time.sleep(0.02)


async def until(true: Callable[[], Any], seconds: float, what: str) -> None:
    """The same on an event loop."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        await asyncio.sleep(0.02)


ORCHESTRATOR = (sys.executable, "-m", "orchestrator")


def cli(*arguments: str, seconds: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line, to its end."""
    return subprocess.run(
        [*ORCHESTRATOR, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
    )


def one_error(done: subprocess.CompletedProcess[str] | str, status: int | None = None) -> str:
    """The single `error: …` line of stderr; no traceback, and the status where it's given."""
    text = done if isinstance(done, str) else done.stderr
    assert "Traceback" not in text, text
    errors = [line for line in text.splitlines() if line.lower().startswith("error: ")]
    assert len(errors) == 1, text
    if status is not None and not isinstance(done, str):
        assert done.returncode == status, (done.returncode, text)
    return errors[0]


class WorkerByHand:
    """`specdec-ROLE-worker --listen tcp://127.0.0.1:PORT`, in a process of its own."""

    def __init__(self, role: str, model: str, *arguments: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{role}_worker", "--model", model, "--listen", self.address, *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> int:
        """SIGTERM, and the status; fails where that takes more than 10 s."""
        try:
            self.process.send_signal(signal.SIGTERM)
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker at {self.address} did not end on SIGTERM within 10 s") from None
        finally:
            self.kill()

    def kill(self) -> None:
        if self.alive:
            self.process.kill()
        self.process.wait(10)
        if self.process.stderr is not None:
            self.process.stderr.close()
