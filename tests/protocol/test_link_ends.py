"""How a link ends, and what must survive it: a worker that goes, comes back, or serves two orchestrators."""

from __future__ import annotations

import asyncio
import threading

import pytest
import zmq
import zmq.asyncio

from protocol.endpoint import Endpoint, Peer
from protocol.errors import LinkLost
from protocol.framing import decode, encode
from protocol.link import Link
from protocol.messages import (
    Close,
    Message,
    Verify,
)
from tests.protocol.links import Context, Held, StartWorker, linked, verdict
from tests.protocol.support import (
    PATIENCE,
    free_port,
    open_request,
    verify,
    welcome,
)


async def test_a_worker_that_ends_fails_what_waits(address: str, context: Context, worker: StartWorker) -> None:
    started = worker(address, behave=Held())
    async with linked(address, context) as link:
        waiting = [asyncio.create_task(link.request(verify(n), None)) for n in range(3)]
        await asyncio.sleep(0)
        await asyncio.to_thread(started.stop)
        for task in waiting:
            with pytest.raises(LinkLost, match=r"target worker at .* (ended|went away)"):
                await asyncio.wait_for(task, PATIENCE)
        assert link.lost.is_set() and link.lost_reason
        with pytest.raises(LinkLost, match=r"ended|went away"):
            await link.request(verify(), 1)
        with pytest.raises(LinkLost):
            link.post(Close(1))
        await link.shutdown(1)  # it is gone: that is what was wanted


async def test_what_was_answered_before_the_end_is_delivered() -> None:
    """The end of a connection is told on another path than its messages, and may come first."""
    address, count = f"tcp://127.0.0.1:{free_port()}", 300

    def serve() -> None:
        with zmq.Context() as own, own.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, int(PATIENCE * 1000))
            router.bind(address)
            identity, *_ = router.recv_multipart()
            router.send_multipart([identity, *encode(welcome())])
            replies = []
            for _ in range(count):
                message = decode(router.recv_multipart()[1:])
                assert isinstance(message, Verify)
                replies.append([identity, *encode(verdict(message))])
            for reply in replies:
                router.send_multipart(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    async with linked(address, None) as link:
        asked = [verify(request_id) for request_id in range(count)]
        replies = await asyncio.gather(*(link.request(message, PATIENCE) for message in asked))
        assert len(replies) == count
        await asyncio.wait_for(link.lost.wait(), PATIENCE)
    thread.join()


async def test_a_new_link_to_a_worker_that_came_back(address: str, context: Context, worker: StartWorker) -> None:
    for _ in range(3):
        started = worker(address)
        async with linked(address, context) as link:
            await link.request(verify(), PATIENCE)
            await asyncio.to_thread(started.stop)
            await asyncio.wait_for(link.lost.wait(), PATIENCE)


async def test_two_orchestrators_do_not_meet(address: str, context: Context, worker: StartWorker) -> None:
    worker(address, behave=Held())
    async with linked(address, context) as one, linked(address, context) as other:
        waiting = asyncio.create_task(one.request(verify(1), PATIENCE))
        await asyncio.sleep(0)
        await one.request(open_request(), PATIENCE)
        other.post(Close(1))  # releases the answer, which goes to `other`, who never asked
        await other.request(open_request(), PATIENCE)
        assert other.dropped == 1 and not waiting.done()
        waiting.cancel()


async def test_probes_are_ignored(
    address: str, context: Context, worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.endpoint.PROBE_SECONDS", 0.0)

    def probing(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        assert endpoint.take_departed() == []
        return False

    worker(address, behave=probing)
    async with linked(address, context) as link:
        await link.request(verify(), PATIENCE)
        assert link.malformed == link.dropped == 0


async def test_cancelled_while_connecting(address: str, context: Context) -> None:
    link = Link(address, name="target worker", context=context)
    connecting = asyncio.create_task(link.connect("target", PATIENCE))
    await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
