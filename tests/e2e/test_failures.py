"""Processes that die, are stopped, or are the wrong ones: what the user sees, how soon, and that nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator import Runtime, UsageError, WorkerFault
from tests.e2e.support import (
    ORCHESTRATOR,
    Run,
    Taken,
    WorkerByHand,
    free_port,
    marked_processes,
    one_error,
    plain_coupled,
    runtime_of,
    take,
    toy,
    until,
    wait_until,
)

ByHand = Callable[..., WorkerByHand]
TABLE = {"vocab": 12, "order": 2, "seed": 4, "scale": 1.5}
TARGET = toy(**TABLE, context=1_000_000)
DRAFT = toy(**TABLE, context=1_000_000, noise=0.7, noise_seed=9)
PROMPT = [3, 1, 4, 1, 5]
COUPLED = {"verify": "coupled", "seed": 17, "max_tokens": 900_000}


async def endless(runtime: Runtime, step: Callable[[Taken], bool]) -> Taken:
    """Generate until `step` says it's enough, then leave the loop early."""
    taken = Taken()
    async with contextlib.aclosing(runtime.generate(PROMPT, trace=taken, **COUPLED)) as chunks:
        async for _ in chunks:
            if not step(taken):
                break
    return taken


def gap(taken: Taken, since: float) -> float:
    """The longest time without a round after `since`, seconds."""
    times = [since, *(at for at in taken.times if at > since)]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def test_killed_draft_costs_speed_and_comes_back(run: Run) -> None:
    """kill -9 of the draft: the text goes on within 2 s, is right, and is drafted again once the draft is back."""
    killed_at, rounds_then = 0.0, 0

    async def all_of_it() -> tuple[Taken, int]:
        nonlocal killed_at, rounds_then
        async with runtime_of(TARGET, DRAFT) as runtime:
            deadline = time.perf_counter() + 90

            def step(taken: Taken) -> bool:
                nonlocal killed_at, rounds_then
                if not killed_at and len(taken.tokens) >= 40:
                    assert runtime.draft is not None and runtime.draft.process is not None
                    os.kill(runtime.draft.process.pid, signal.SIGKILL)
                    killed_at, rounds_then = time.perf_counter(), len(taken.rounds)
                assert time.perf_counter() < deadline, "the draft did not come back within 90 s"
                again = sum(bool(done.proposal.tokens) for done in taken.rounds[rounds_then + 2 :])
                return not (killed_at and runtime.draft_restarts and again >= 5)

            taken = await endless(runtime, step)
            left = await runtime.target.link.ping(5)
            for _ in range(100):  # leaving the loop closes the request there, by a message that may be on its way
                if left[0].requests == 0:
                    break
                left = await runtime.target.link.ping(5)
            assert left[0].requests == 0, "leaving the loop early left the request open on the target"
            return taken, runtime.draft_restarts

    taken, restarts = run(all_of_it())
    assert restarts == 1
    assert taken.tokens[:5000] == plain_coupled(TARGET, PROMPT, 17, len(taken.tokens))[:5000]
    plain = [done for done in taken.rounds if not done.proposal.tokens]
    assert plain, "no round went on at γ = 0"
    assert gap(taken, killed_at) < 2, f"{gap(taken, killed_at):.2f} s without a token after the draft was killed"


def test_killed_target_is_a_clear_fault(run: Run) -> None:
    async def all_of_it() -> tuple[str, float, int]:
        async with runtime_of(TARGET, DRAFT) as runtime:
            killed_at, pid = 0.0, 0

            def step(taken: Taken) -> bool:
                nonlocal killed_at, pid
                if not killed_at and len(taken.tokens) >= 40:
                    assert runtime.target.process is not None
                    pid, killed_at = runtime.target.process.pid, time.perf_counter()
                    os.kill(pid, signal.SIGKILL)
                return True

            with pytest.raises(WorkerFault) as caught:
                await endless(runtime, step)
            took = time.perf_counter() - killed_at
            with pytest.raises(WorkerFault):  # and the next request says so too, at once
                await take(runtime, PROMPT, max_tokens=3)
            return str(caught.value), took, pid

    text, took, pid = run(all_of_it(), 120)
    assert "target worker" in text and str(pid) in text and "SIGKILL" in text, text
    assert took < 5


# ---------------------------------------------------------------- the command line's process


class Command:
    """`specdec-orchestrator generate`, running."""

    def __init__(self) -> None:
        self.folders = set(Path(tempfile.gettempdir()).glob("specdec-*"))
        self.process = subprocess.Popen(
            [*ORCHESTRATOR, "generate", "abc", "--target-model", TARGET, "--draft-model", DRAFT,
             "--target-threads", "1", "--max-tokens", "900000", "--verify", "coupled"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        os.set_blocking(self.process.stdout.fileno(), False)  # type: ignore[union-attr]
        wait_until(lambda: self.process.poll() is not None or self._read(), 120, "no text came")
        assert self.process.poll() is None, self.process.stderr.read()  # type: ignore[union-attr]

    def _read(self) -> bytes | None:
        assert self.process.stdout is not None
        return self.process.stdout.read(65536)

    def worker(self, role: str) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children():
            if f"{role}_worker" in child.cmdline():
                return child
        raise AssertionError(f"no {role} worker among the children")

    def ended(self, seconds: float) -> tuple[int, str]:
        """Its status and stderr, once it and all that it started are gone."""
        wait_until(lambda: (self._read(), self.process.poll())[1] is not None, seconds, "the command did not end")
        wait_until(lambda: not marked_processes(), seconds, lambda: f"left running: {marked_processes()}")
        assert self.process.stderr is not None
        return self.process.returncode, self.process.stderr.read().decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def command() -> Iterator[Command]:
    started = Command()
    yield started
    started.close()


def test_cli_killed_target(command: Command) -> None:
    pid = command.worker("target").pid
    os.kill(pid, signal.SIGKILL)
    status, stderr = command.ended(10)
    assert status == 1
    line = one_error(stderr)
    assert "target worker" in line and "SIGKILL" in line and str(pid) in line


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_cli_is_stopped(command: Command, number: signal.Signals, status: int) -> None:
    """It ends its workers and removes its folders (the leak check), and says what happened in one line."""
    command.process.send_signal(number)
    returned, stderr = command.ended(15)
    assert returned == status
    assert one_error(stderr)


def test_cli_is_killed(command: Command) -> None:
    """kill -9 of the orchestrator: it can tidy nothing, and its workers end all the same, their folders with them."""
    command.process.kill()
    command.ended(15)

    def left() -> set[Path]:
        return set(Path(tempfile.gettempdir()).glob("specdec-*")) - command.folders

    wait_until(lambda: not left(), 15, lambda: f"folders left behind: {left()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_cli_is_stopped_while_a_model_loads(number: signal.Signals) -> None:
    """The workers are deep in loading, and end all the same."""
    folders = set(Path(tempfile.gettempdir()).glob("specdec-*"))
    model = toy(load_ms=300_000)
    process = subprocess.Popen(
        [*ORCHESTRATOR, "generate", "abc", "--target-model", model, "--draft-model", model],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: len(marked_processes()) >= 3, 60, "the workers did not start")
        wait_until(
            lambda: len(list(Path(tempfile.gettempdir()).glob("specdec-*/*"))) >= 2, 60, "the workers did not listen"
        )
        process.send_signal(number)
        _, stderr = process.communicate(timeout=20)
        wait_until(lambda: not marked_processes(), 15, lambda: f"left running: {marked_processes()}")
    finally:
        process.kill()
        process.wait(10)
    if number == signal.SIGKILL:
        for folder in set(Path(tempfile.gettempdir()).glob("specdec-*")) - folders:
            shutil.rmtree(folder)
    else:
        assert one_error(stderr)


# ---------------------------------------------------------------- attached workers


def test_two_orchestrators_on_one_target(run: Run, by_hand: ByHand) -> None:
    """Same request ids, at the same time, over tcp; the worker outlives both and holds nothing of them."""
    worker = by_hand("target", TARGET, "--threads", "1")

    async def all_of_it() -> None:
        async with runtime_of(worker.address, "none") as one, runtime_of(worker.address, "ngram") as two:
            seeds = range(8)
            options = {"verify": "coupled", "max_tokens": 40}
            taken = await asyncio.gather(
                *(take(one, PROMPT, seed=seed, **options) for seed in seeds),
                *(take(two, PROMPT, seed=seed + 100, **options) for seed in seeds),
            )
            for seed, done in zip([*seeds, *(seed + 100 for seed in seeds)], taken, strict=True):
                assert done.tokens == plain_coupled(TARGET, PROMPT, seed, 40), seed
        async with runtime_of(worker.address, "none") as late:
            taken_late = await take(late, PROMPT, seed=1, **options)
            assert taken_late.tokens == plain_coupled(TARGET, PROMPT, 1, 40)
            status = (await late.target.link.ping(5))[0]
            for _ in range(200):
                if status.requests == 0:
                    break
                await asyncio.sleep(0.02)
                status = (await late.target.link.ping(5))[0]
            assert status.requests == 0

    run(all_of_it())
    assert worker.alive
    assert worker.end() == 0


def test_an_attached_draft_is_left_running_and_found_again(run: Run, by_hand: ByHand) -> None:
    """The attached draft dies and another is started at the same address: drafting goes on."""
    worker = by_hand("draft", DRAFT, "--threads", "1")

    async def all_of_it() -> Taken:
        deadline = time.perf_counter() + 120
        killed = 0
        async with runtime_of(TARGET, DRAFT, draft_place=worker.address) as runtime:

            def step(taken: Taken) -> bool:
                nonlocal killed
                if not killed and len(taken.tokens) >= 40:
                    assert taken.drafted
                    worker.kill()
                    by_hand("draft", DRAFT, "--threads", "1", port=worker.port)
                    killed = len(taken.rounds)
                assert time.perf_counter() < deadline, "the draft was not found again within 120 s"
                return not (killed and any(done.proposal.tokens for done in taken.rounds[killed + 2 :]))

            return await endless(runtime, step)

    taken = run(all_of_it())
    assert taken.tokens[:3000] == plain_coupled(TARGET, PROMPT, 17, 3000)[: len(taken.tokens)]


def test_wrong_role(run: Run, by_hand: ByHand) -> None:
    worker = by_hand("draft", "ngram")

    async def attach() -> None:
        async with runtime_of(worker.address, "none"):
            pass

    with pytest.raises(UsageError, match=r"draft worker.*target worker is wanted"):
        run(attach())
    assert worker.alive


def test_nobody_listens(run: Run) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"

    async def attach() -> None:
        async with runtime_of(address, "none", connect_timeout=1.0):
            pass

    with pytest.raises(WorkerFault, match=f"{address}.*specdec-target-worker --listen") as caught:
        run(attach(), 20)
    assert "\n" not in str(caught.value)


def test_permuted_tokenizer_is_refused(run: Run) -> None:
    """A3: the same size, other texts: refused before the first request, and nothing stays."""

    async def start() -> None:
        async with runtime_of(TARGET, toy(vocab=12, names="permuted")):
            pass

    with pytest.raises(UsageError, match="another vocabulary than the target"):
        run(start())


@pytest.mark.parametrize("role", ["target", "draft"])
def test_port_in_use(by_hand: ByHand, role: str) -> None:
    first = by_hand("draft", "ngram")

    async def ready() -> None:
        from protocol.link import Link

        link = Link(first.address, name="draft worker")
        await link.connect("draft", 60)
        await link.close()

    asyncio.run(ready())
    second = by_hand(role, "toy:" if role == "target" else "ngram", port=first.port)
    assert second.process.wait(60) == 1
    assert second.process.stderr is not None
    line = one_error(second.process.stderr.read())
    assert str(first.port) in line and "in use" in line
    assert first.alive


def test_workers_end_on_sigterm_with_status_0(by_hand: ByHand) -> None:
    worker = by_hand("draft", "ngram")

    async def ready() -> None:
        from protocol.link import Link

        link = Link(worker.address, name="draft worker")
        await link.connect("draft", 60)
        worker.process.send_signal(signal.SIGTERM)
        await until(lambda: link.lost.is_set(), 10, "the worker did not say goodbye")
        await link.close()

    asyncio.run(ready())
    assert worker.process.wait(10) == 0
