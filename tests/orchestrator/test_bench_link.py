"""The emulated link: how long messages take, in which order they come, and what becomes of them at the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.config import RuntimeConfig
from orchestrator.emulated_link import LinkShape, Wire
from orchestrator.peer import Peer
from orchestrator.places import Place
from protocol.errors import LinkLost
from protocol.limits import PROTOCOL_VERSION
from protocol.link import Link
from protocol.messages import Hello


async def _arrivals(wire: Wire, sizes: list[int]) -> list[tuple[int, float]]:
    """(which, seconds) of messages that are all sent now, in the order in which they arrive."""
    loop, arrived, done = asyncio.get_running_loop(), [], asyncio.Event()
    started = loop.time()

    def arrive(index: int) -> None:
        arrived.append((index, loop.time() - started))
        if len(arrived) == len(sizes):
            done.set()

    for index, size in enumerate(sizes):
        wire.carry(size, lambda index=index: arrive(index))  # type: ignore[misc]
    await asyncio.wait_for(done.wait(), 10)
    return arrived


async def test_messages_leave_one_after_the_other() -> None:
    """1,000 bytes a millisecond: the second waits until the first has left, and both travel 20 ms."""
    arrived = await _arrivals(Wire(0.020, 1e6), [10_000, 1_000, 5_000])
    assert [index for index, _ in arrived] == [0, 1, 2]
    for (_, seconds), expected in zip(arrived, (0.030, 0.031, 0.036), strict=True):
        assert expected <= seconds < expected + 0.010


async def test_waits_are_shorter_than_a_tick_of_epoll() -> None:
    """The best of a few: nothing else disturbed that one."""
    took = [(await _arrivals(Wire(0.0002, float("inf")), [1]))[0][1] for _ in range(20)]
    assert 0.0002 <= min(took) < 0.0008


async def test_a_wire_that_is_cut_delivers_nothing() -> None:
    wire, arrived = Wire(0.005, float("inf")), []
    wire.carry(1, lambda: arrived.append(1))
    wire.cut()
    await asyncio.sleep(0.02)
    assert not arrived


async def _trip(link: Link) -> float:
    reply = await link.request(Hello(PROTOCOL_VERSION, "orchestrator", "test"), None)
    return reply.round_trip_seconds


async def test_round_trip_to_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """15 ms of link come on top of what the trip takes without; after the end there is no sending."""
    config = RuntimeConfig(draft="ngram")
    for shape, least, most in ((LinkShape(), 0.0, 0.012), (LinkShape(round_trip=0.015), 0.015, 0.025)):
        peer = await Peer.start("draft", Place(device="cpu"), config, shape.link)
        trips = [await _trip(peer.link) for _ in range(10)]
        await peer.close()
        assert least <= min(trips) < most
        with pytest.raises(LinkLost):
            await _trip(peer.link)
