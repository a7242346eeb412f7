"""Fixtures of the wire's tests: a leak check around each test, addresses of every transport, workers in threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `tests.protocol.support` is found from anywhere

from tests.protocol.support import ThreadedWorker, free_port

TRANSPORTS = ("inproc", "ipc", "tcp")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves a thread running or a descriptor open; each zmq socket and each context has some."""
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    left = [thread for thread in threading.enumerate() if thread not in threads]
    assert not left, f"threads left running: {left}"
    grown = {number: where for number, where in _descriptors().items() if number not in descriptors}
    assert not grown, f"descriptors left open: {grown}"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """One context for both ends, as inproc needs."""
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.term()


@pytest.fixture(params=TRANSPORTS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return _address(request.param, tmp_path)


@pytest.fixture(params=("ipc", "tcp"))
def remote_address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return _address(request.param, tmp_path)


@pytest.fixture
def worker(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Callable[..., ThreadedWorker]]:
    """worker(address, ...) starts a worker in a thread; all are stopped at the end."""
    started: list[ThreadedWorker] = []

    def start(address: str, **options: object) -> ThreadedWorker:
        started.append(ThreadedWorker(address, context, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.stop()


def _address(transport: str, folder: Path) -> str:
    if transport == "tcp":
        return f"tcp://127.0.0.1:{free_port()}"
    return f"ipc://{folder}/w" if transport == "ipc" else f"inproc://{folder.name}"


def _descriptors() -> dict[str, str]:
    if not os.path.isdir("/proc/self/fd"):
        return {}
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            where = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the listing's own
            continue
        if where.startswith(("socket:", "anon_inode:")):
            found[number] = where
    return found
