"""Fixtures of the end-to-end tests: a folder and a mark of their own, the leak check, one event loop a module."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `tests.e2e.support` is found from anywhere

from tests.e2e.support import LASTING, MARK, Run, WorkerByHand, marked_processes, sockets_here, wait_until

MARK_VALUE = uuid.uuid4().hex


@pytest.fixture(scope="session", autouse=True)
def marked_folder() -> Iterator[Path]:
    """Everything started here carries a mark in its environment and makes its temporary folders in this one."""
    folder = Path(tempfile.mkdtemp(prefix="e2e-", dir="/tmp"))  # short: an ipc path has 107 bytes
    before = {name: os.environ.get(name) for name in os.environ}
    for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
        del os.environ[name]
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job: our children would ignore ^C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {MARK: MARK_VALUE, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    tempfile.tempdir = str(folder)
    torch.set_num_threads(1)
    yield folder
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update({name: value for name, value in before.items() if value is not None})
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def module_leaks(marked_folder: Path) -> Iterator[None]:
    """A module's own runtimes are gone when it ends: no process, no socket of this process, no folder."""
    sockets = sockets_here()
    yield
    wait_until(lambda: not marked_processes(), 10, lambda: f"processes left running: {marked_processes()}")
    left = [str(path) for path in marked_folder.glob("specdec-*")]
    assert not left, f"temporary folders left behind: {left}"
    wait_until(lambda: len(sockets_here() - sockets) == 0, 5, lambda: f"sockets left: {sockets_here() - sockets}")


@pytest.fixture(autouse=True)
def no_leaks(marked_folder: Path, module_leaks: None) -> Iterator[None]:
    """A test leaves no process and no temporary folder that was not there before it."""
    processes = {process.pid for process in marked_processes()}
    folders = set(marked_folder.glob("specdec-*"))
    yield

    def left() -> list[psutil.Process]:
        return [process for process in marked_processes() if process.pid not in processes | LASTING]

    wait_until(lambda: not left(), 10, lambda: f"processes left running: {left()}")
    more = set(marked_folder.glob("specdec-*")) - folders - LASTING
    assert not more, f"temporary folders left behind: {more}"


@pytest.fixture(scope="module")
def run(module_leaks: None) -> Iterator[Run]:
    """Runs a coroutine on the module's loop, for at most some seconds."""
    with asyncio.Runner() as runner:
        yield Run(runner)


@pytest.fixture
def by_hand() -> Iterator[Callable[..., WorkerByHand]]:
    """Starts workers as a user would, on tcp; ends those that the test has left."""
    started: list[WorkerByHand] = []

    def start(role: str, model: str, *arguments: str, port: int | None = None) -> WorkerByHand:
        started.append(WorkerByHand(role, model, *arguments, port=port))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()
