"""A worker process that is killed, or stops, is noticed by everything that waits for it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.endpoint import Endpoint
from protocol.errors import LinkLost
from protocol.link import Link
from protocol.messages import GetTokenizer
from protocol.sockets import HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS
from tests.protocol.support import PATIENCE, answer, free_port, verify, welcome

STARTING = 60.0  # seconds for a Python process on a busy machine
CHILD = Path(__file__).with_name("child_worker.py")


@pytest.fixture
def child(remote_address: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(CHILD), remote_address])
    yield process
    process.kill()
    process.wait()


async def test_kill_9_is_noticed_within_a_second(remote_address: str, child: subprocess.Popen[bytes]) -> None:
    async with Link(remote_address, name="target worker") as link:
        await link.connect("target", STARTING)
        waiting = [asyncio.create_task(link.request(verify(n), None)) for n in range(3)]
        await link.request(GetTokenizer(), PATIENCE)  # behind them: they have arrived
        child.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        for task in waiting:
            with pytest.raises(LinkLost, match=r"target worker at .* went away"):
                await asyncio.wait_for(task, PATIENCE)
        assert time.monotonic() - killed < 1.0
        assert link.lost.is_set()
        with pytest.raises(LinkLost):
            await link.ping(1)


async def test_a_successor_takes_the_dead_ones_place(remote_address: str, child: subprocess.Popen[bytes]) -> None:
    """Also over ipc, where the dead process left its files."""
    async with Link(remote_address, name="target worker") as link:
        await link.connect("target", STARTING)
        child.kill()
        await asyncio.wait_for(link.lost.wait(), PATIENCE)
    child.wait()
    with Endpoint(remote_address) as endpoint:
        async with Link(remote_address, name="target worker") as link:
            connecting = asyncio.create_task(link.connect("target", PATIENCE))
            ((peer, hello),) = await asyncio.to_thread(endpoint.receive, PATIENCE)
            reply = answer(hello, welcome())
            assert reply is not None and endpoint.send(peer, reply)
            await connecting


async def test_shutdown_ends_the_process(remote_address: str, child: subprocess.Popen[bytes]) -> None:
    async with Link(remote_address, name="target worker") as link:
        await link.connect("target", STARTING)
        await link.shutdown(PATIENCE)
        await asyncio.wait_for(link.lost.wait(), PATIENCE)
    assert await asyncio.to_thread(child.wait, PATIENCE) == 0
    if remote_address.startswith("ipc"):
        assert not Path(remote_address.removeprefix("ipc://")).exists()


async def test_a_stopped_process_misses_its_heartbeats() -> None:
    """SIGSTOP: the connection stays open, and nothing is ever answered."""
    address = f"tcp://127.0.0.1:{free_port()}"
    process = subprocess.Popen([sys.executable, str(CHILD), address])
    try:
        async with Link(address, name="target worker") as link:
            await link.connect("target", STARTING)
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(LinkLost, match="went away"):
                bound = (HEARTBEAT_INTERVAL_MS + HEARTBEAT_TIMEOUT_MS) / 1000 + PATIENCE
                await asyncio.wait_for(link.request(verify(), None), bound)
    finally:
        process.kill()
        process.wait()


async def test_a_worker_that_computes_with_the_interpreter_locked_is_not_lost() -> None:
    """Heartbeats are zmq's own threads' business: holding the interpreter for longer than their time is no death."""
    address = f"tcp://127.0.0.1:{free_port()}"
    held = HEARTBEAT_TIMEOUT_MS / 1000 + 1.5
    code = (
        "import sys, ctypes\n"
        f"sys.path.insert(0, {str(CHILD.parents[2])!r})\n"
        "from protocol.endpoint import Endpoint\n"
        "from protocol.messages import Verify\n"
        "from tests.protocol.support import answer, welcome\n"
        "sleep = ctypes.PyDLL(None).usleep  # PyDLL keeps the interpreter's lock\n"
        "with Endpoint(sys.argv[1]) as endpoint:\n"
        "    while not endpoint.stopping.is_set():\n"
        "        for peer, message in endpoint.receive(None):\n"
        f"            isinstance(message, Verify) and [sleep(500_000) for _ in range({int(held * 2)})]\n"
        "            endpoint.send(peer, answer(message, welcome()))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, address])
    try:
        async with Link(address, name="target worker") as link:
            await link.connect("target", STARTING)
            reply = await link.request(verify(), held + STARTING)
            assert reply.round_trip_seconds > held - 0.5
            await link.shutdown(PATIENCE)
    finally:
        process.kill()
        process.wait()
