"""The orchestrator's end against a worker in a thread, over every transport: handshake, matching, failures, endings."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
import zmq
import zmq.asyncio

from protocol.codecs import NO_Q
from protocol.endpoint import Endpoint, Peer
from protocol.errors import FailureCode, HandshakeError, LinkLost, LinkTimeout, ProtocolError, WorkerFailure
from protocol.framing import decode, encode, frames_size
from protocol.link import Link
from protocol.messages import (
    Block,
    Close,
    Failure,
    GetTokenizer,
    Hello,
    Message,
    Opened,
    Verdict,
    Verify,
    token_array,
)
from tests.protocol.support import (
    PATIENCE,
    ThreadedWorker,
    answer,
    free_port,
    open_request,
    propose,
    tcp_server,
    verify,
    welcome,
)

Context = zmq.Context[zmq.Socket[bytes]]
StartWorker = Callable[..., ThreadedWorker]


@asynccontextmanager
async def linked(address: str, context: Context | None, role: str = "target") -> AsyncIterator[Link]:
    async with Link(address, name=f"{role} worker", context=context) as link:
        await link.connect(role, PATIENCE)
        yield link


def verdict(message: Verify, **changes: object) -> Verdict:
    fields: dict[str, object] = {"accepted": len(message.tokens), "token": 7, "origin": "bonus", "base_length": 3}
    fields |= changes
    return Verdict(
        request_id=message.request_id, epoch=message.epoch, block_id=message.block_id, seconds=0.5, rows=1, **fields
    )  # type: ignore[arg-type]


class Held:
    """A worker that keeps its Verify messages until release() is called from its own thread by a Close."""

    def __init__(self, order: Callable[[list[Message]], list[Message]] = list) -> None:
        self.kept: list[Message] = []
        self.order = order

    def __call__(self, endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        if isinstance(message, Verify):
            self.kept.append(message)
        if isinstance(message, Close):
            for each in self.order(self.kept):
                reply = answer(each, welcome())
                assert reply is not None
                endpoint.send(peer, reply)
            self.kept.clear()
        return isinstance(message, (Verify, Close))


# ---------------------------------------------------------------- handshake


async def test_handshake_and_every_request(address: str, context: Context, worker: StartWorker) -> None:
    started = worker(address, role="draft")
    async with Link(address, name="draft worker", context=context) as link:
        assert await link.connect("draft", PATIENCE) == welcome("draft") == link.welcome
        assert (await link.request(GetTokenizer(), PATIENCE)).message.chat_template == "{{ messages }}"
        assert (await link.request(open_request(), PATIENCE)).message == Opened(1, 0, 3)
        assert (await link.request(propose(), PATIENCE)).message.tokens.tolist() == [0, 1, 2, 3]
        assert (await link.request(verify(), PATIENCE)).message == verdict(verify())
        link.post(Close(1))
        assert await asyncio.to_thread(started.closed_seen.wait, PATIENCE), "Close did not arrive"
        assert not link.lost.is_set() and link.dropped == link.malformed == 0


async def test_what_was_posted_last_arrives_though_the_link_closes(
    address: str, context: Context, worker: StartWorker
) -> None:
    started = worker(address)
    async with linked(address, context) as link:
        link.post(Close(1))
    assert await asyncio.to_thread(started.closed_seen.wait, PATIENCE), "Close did not arrive"


async def test_connect_waits_for_a_worker_that_is_late(address: str, context: Context, worker: StartWorker) -> None:
    async with Link(address, name="target worker", context=context) as link:
        connecting = asyncio.create_task(link.connect("target", PATIENCE))
        done, _ = await asyncio.wait([connecting], timeout=0.15)
        assert not done
        worker(address)
        assert (await connecting).role == "target"


async def test_a_link_and_an_endpoint_each_with_its_own_context(remote_address: str) -> None:
    with Endpoint(remote_address) as endpoint:
        async with Link(remote_address, name="target worker") as link:
            connecting = asyncio.create_task(link.connect("target", PATIENCE))
            ((peer, message),) = await asyncio.to_thread(endpoint.receive, PATIENCE)
            assert isinstance(message, Hello)
            endpoint.send(peer, welcome())
            await connecting


async def test_an_asyncio_context_is_fine(address: str, context: Context, worker: StartWorker) -> None:
    worker(address)
    async with linked(address, zmq.asyncio.Context.shadow(context.underlying)) as link:
        await link.ping(PATIENCE)


async def test_ipv6(context: Context, worker: StartWorker) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    address = f"tcp://[::1]:{free_port()}"
    worker(address)
    async with linked(address, context) as link:
        await link.ping(PATIENCE)


async def refused(link: Link, role: str, timeout: float = PATIENCE) -> Exception:
    """How a connect fails; the link is closed by it."""
    with pytest.raises((HandshakeError, LinkTimeout, LinkLost)) as caught:
        await link.connect(role, timeout)
    assert "\n" not in str(caught.value)
    with pytest.raises(LinkLost):
        await link.request(verify(), 1)
    return caught.value


async def test_the_wrong_role(address: str, context: Context, worker: StartWorker) -> None:
    worker(address, role="draft")
    error = await refused(Link(address, name="target worker", context=context), "target")
    assert isinstance(error, HandshakeError) and "is a draft worker, but a target worker is wanted" in str(error)


async def test_the_wrong_version_of_the_worker(address: str, context: Context, worker: StartWorker) -> None:
    worker(address, me=welcome(protocol_version=2))
    error = await refused(Link(address, name="target worker", context=context), "target")
    assert isinstance(error, HandshakeError) and error.code is FailureCode.VERSION
    assert "protocol version 2, this side speaks 1" in str(error)


async def test_the_wrong_version_of_the_orchestrator(address: str, context: Context, worker: StartWorker) -> None:
    def old(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        return endpoint.send(peer, Failure(-1, 0, -1, FailureCode.VERSION, "Hello speaks protocol version 1"))

    worker(address, behave=old)
    error = await refused(Link(address, name="target worker", context=context), "target")
    assert isinstance(error, HandshakeError) and error.code is FailureCode.VERSION
    assert "refuses the handshake" in str(error)


async def test_nobody_there(address: str, context: Context) -> None:
    error = await refused(Link(address, name="target worker", context=context), "target", 0.3)
    assert isinstance(error, LinkTimeout) and "nobody listens there" in str(error)


async def test_a_worker_that_says_loading_is_asked_again(address: str, context: Context, worker: StartWorker) -> None:
    asked = []

    def loading(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        asked.append(message)
        return len(asked) < 3 and endpoint.send(peer, Failure(-1, 0, -1, FailureCode.LOADING, "wait"))

    worker(address, behave=loading)
    async with linked(address, context):
        assert len(asked) == 3


async def test_a_worker_that_loads_for_ever(address: str, context: Context, worker: StartWorker) -> None:
    def loading(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        return endpoint.send(peer, Failure(-1, 0, -1, FailureCode.LOADING, "wait"))

    worker(address, behave=loading)
    error = await refused(Link(address, name="target worker", context=context), "target", 0.3)
    assert isinstance(error, LinkTimeout) and "is still loading its model after 0.3 s" in str(error)


async def test_a_worker_that_loads_and_reads_nothing(address: str, context: Context) -> None:
    """Its control thread tells; its main thread is in the loader."""
    with Endpoint(address, context=context):
        error = await refused(Link(address, name="target worker", context=context), "target", 0.5)
    assert isinstance(error, LinkTimeout) and "is still loading its model" in str(error)


async def test_a_worker_that_is_ready_and_hangs(address: str, context: Context) -> None:
    with Endpoint(address, context=context) as endpoint:
        endpoint.status.update(state="ready")
        error = await refused(Link(address, name="target worker", context=context), "target", 0.5)
    assert isinstance(error, LinkTimeout) and "is there but did not answer within 0.5 s" in str(error)


async def test_a_worker_that_ends_while_loading(address: str, context: Context) -> None:
    link = Link(address, name="target worker", context=context)
    with Endpoint(address, context=context) as endpoint:
        failing = asyncio.create_task(refused(link, "target"))
        assert len(await asyncio.to_thread(endpoint.receive, PATIENCE)) == 1
    assert isinstance(await failing, LinkLost)


def http(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 11\r\n\r\nBad Request")


def mute(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def noise(connection: socket.socket) -> None:
    connection.sendall(bytes(np.random.default_rng(3).integers(0, 256, 4096, dtype=np.uint8)))
    mute(connection)


def greeting_then_noise(connection: socket.socket) -> None:
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 32) + b"\x04\xff" + b"\xff" * 40)
    mute(connection)


def smtp(connection: socket.socket) -> None:
    connection.sendall(b"220 mail.example ESMTP ready\r\n")
    mute(connection)


@pytest.mark.parametrize("handle", [http, mute, noise, greeting_then_noise, smtp], ids=lambda each: each.__name__)
async def test_something_else_listens_there(handle: Callable[[socket.socket], None]) -> None:
    port = free_port()
    with tcp_server(port, handle):
        link = Link(f"tcp://127.0.0.1:{port}", name="target worker")
        error = await asyncio.wait_for(refused(link, "target", 1.0), PATIENCE)
    assert "no worker of ours" in str(error)


async def test_another_zmq_service(context: Context) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with context.socket(zmq.ROUTER) as router:
        router.bind(address)
        link = Link(address, name="target worker", context=context)
        failing = asyncio.create_task(refused(link, "target"))
        identity, *_ = await asyncio.to_thread(router.recv_multipart)
        router.send_multipart([identity, b"{}"])
        error = await failing
    assert isinstance(error, HandshakeError) and "no worker of ours" in str(error)


async def test_a_link_connects_once(address: str, context: Context, worker: StartWorker) -> None:
    worker(address)
    async with linked(address, context) as link:
        with pytest.raises(LinkLost, match="a link connects once"):
            await link.connect("target", PATIENCE)
        await link.ping(PATIENCE)


async def test_before_it_is_connected(address: str) -> None:
    async with Link(address, name="target worker") as link:
        with pytest.raises(LinkLost, match="not connected yet"):
            await link.request(verify(), 1)


# ---------------------------------------------------------------- requests and replies


async def test_replies_in_any_order(address: str, context: Context, worker: StartWorker) -> None:
    worker(address, behave=Held(order=lambda kept: kept[::-1]))
    async with linked(address, context) as link:
        asked = [verify(request_id, block_id) for request_id in range(4) for block_id in range(3)]
        waiting = [asyncio.create_task(link.request(message, PATIENCE)) for message in asked]
        await asyncio.sleep(0)  # each task sends
        link.post(Close(0))
        replies = await asyncio.gather(*waiting)
        assert [reply.message for reply in replies] == [verdict(message) for message in asked]


async def test_bytes_and_times_are_counted(address: str, context: Context, worker: StartWorker) -> None:
    worker(address)
    async with linked(address, context) as link:
        sent, received = link.bytes_sent, link.bytes_received
        reply = await link.request(verify(), PATIENCE)
        assert reply.bytes_sent == frames_size(encode(verify())) == link.bytes_sent - sent
        assert reply.bytes_received == frames_size(encode(reply.message)) == link.bytes_received - received
        assert 0 < reply.round_trip_seconds < PATIENCE
        await link.ping(PATIENCE)
        assert link.bytes_sent - sent == reply.bytes_sent  # the data link's alone


async def test_a_failure_fails_its_request_alone(address: str, context: Context, worker: StartWorker) -> None:
    def fail_second(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        if isinstance(message, Verify) and message.request_id == 2:
            return endpoint.send(peer, Failure(2, 0, message.block_id, FailureCode.NAN, "row 3 is NaN"))
        return False

    worker(address, behave=fail_second)
    async with linked(address, context) as link:
        first, second = await asyncio.gather(
            link.request(verify(1), PATIENCE), link.request(verify(2), PATIENCE), return_exceptions=True
        )
        assert not isinstance(first, BaseException)
        assert isinstance(second, WorkerFailure)
        assert (second.code, second.text) == (FailureCode.NAN, "row 3 is NaN")


async def test_which_requests_a_failure_answers(address: str, context: Context, worker: StartWorker) -> None:
    """No block: all of that request and epoch. No request: those that are about none."""
    answers = {
        30: Failure(1, 0, -1, FailureCode.INTERNAL, "the pass failed"),
        31: Failure(-1, 0, -1, FailureCode.INTERNAL, "no tokenizer"),
        32: Failure(9, 0, 1, FailureCode.INTERNAL, "unknown to all"),
    }

    def behave(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        if isinstance(message, Close):
            endpoint.send(peer, answers[message.request_id])
        return not isinstance(message, Hello)

    worker(address, behave=behave)
    async with linked(address, context) as link:
        asked = [verify(1, 0), verify(1, 1), open_request(1), verify(2, 0), GetTokenizer()]
        tasks = [asyncio.create_task(link.request(each, PATIENCE)) for each in asked]  # type: ignore[call-overload]
        await asyncio.sleep(0)
        link.post(Close(32))
        link.post(Close(30))
        for task in tasks[:3]:
            with pytest.raises(WorkerFailure, match="the pass failed"):
                await task
        assert link.dropped == 1 and not tasks[3].done() and not tasks[4].done()
        link.post(Close(31))
        with pytest.raises(WorkerFailure, match="no tokenizer"):
            await tasks[4]
        assert not tasks[3].done()
        await link.close()
        with pytest.raises(LinkLost, match="closed"):
            await tasks[3]


async def test_a_late_reply_is_dropped_and_the_slot_is_free(
    address: str, context: Context, worker: StartWorker
) -> None:
    worker(address, behave=Held())
    async with linked(address, context) as link:
        with pytest.raises(LinkTimeout, match=r"did not answer Verify within 0\.05 s"):
            await link.request(verify(), 0.05)
        cancelled = asyncio.create_task(link.request(verify(2), None))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        link.post(Close(1))  # both replies come now, to nobody
        await link.request(open_request(), PATIENCE)
        assert link.dropped == 2
        again = asyncio.create_task(link.request(verify(), PATIENCE))  # the same ids
        await asyncio.sleep(0)
        link.post(Close(1))
        assert (await again).message == verdict(verify())


async def test_the_same_request_twice_at_once(address: str, context: Context, worker: StartWorker) -> None:
    worker(address, behave=Held())
    async with linked(address, context) as link:
        first = asyncio.create_task(link.request(verify(), PATIENCE))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="waits for its reply already"):
            await link.request(verify(), PATIENCE)
        link.post(Close(1))
        assert (await first).message == verdict(verify())


async def test_messages_without_a_reply_are_no_requests(address: str, context: Context, worker: StartWorker) -> None:
    worker(address)
    async with linked(address, context) as link:
        with pytest.raises(ValueError, match="Close has no reply"):
            await link.request(Close(1), 1)  # type: ignore[call-overload]


UNTRUE = {
    "tokens": (propose(gamma=2), Block(1, 0, 3, 0, 0.0, token_array([1, 2, 3]), NO_Q), "asked were at most 2"),
    "base": (propose(), Block(1, 0, 4, 0, 0.0, token_array([1]), NO_Q), "another base length"),
    "accepted": (verify(), verdict(verify(), accepted=5), "accepts 5 of 4"),
    "bonus": (verify(), verdict(verify(), accepted=3), "calls its own a bonus"),
    "correction": (verify(), verdict(verify(), origin="correction"), "calls its own a correction"),
    "verdict's base": (verify(), verdict(verify(), base_length=2), "another base length"),
    "length": (open_request(), Opened(1, 0, 2), "holds 2 tokens, sent were 3"),
}


@pytest.mark.parametrize("case", UNTRUE)
async def test_replies_that_cannot_be_true(case: str, context: Context, worker: StartWorker) -> None:
    """Fault C11 on this side: γ + 1 tokens from a draft fail that block, and the session survives."""
    request, reply, says = UNTRUE[case]

    def lie(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        return type(message) is type(request) and endpoint.send(peer, reply)

    worker("inproc://liar", behave=lie)
    async with linked("inproc://liar", context) as link:
        with pytest.raises(ProtocolError, match=says):
            await link.request(request, PATIENCE)  # type: ignore[call-overload]
        await link.request(GetTokenizer(), PATIENCE)


async def test_garbage_from_a_worker_is_counted_and_survived(
    address: str, context: Context, worker: StartWorker
) -> None:
    def garble(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        if isinstance(message, GetTokenizer):
            endpoint._send(peer.identity, [b"\x00garbage"])
            endpoint._send(peer.identity, [bytes(frame) for frame in encode(verify())])
        if isinstance(message, Verify):  # a verdict with a field too many: its ids can be read
            header = bytes(encode(verdict(message))[0])
            endpoint._send(peer.identity, [b"\x9b" + header[1:] + b"\xc0"])
            return True
        return False

    worker(address, behave=garble)
    async with linked(address, context) as link:
        with pytest.raises(ProtocolError, match="cannot be read"):  # it may have been the answer: better than silence
            await link.request(GetTokenizer(), PATIENCE)
        await link.request(open_request(), PATIENCE)
        assert link.malformed == 2
        with pytest.raises(ProtocolError, match="Verdict has 9 fields, not 10"):
            await link.request(verify(), PATIENCE)


async def test_large_messages(address: str, context: Context, worker: StartWorker) -> None:
    worker(address)
    async with linked(address, context) as link:
        reply = await link.request(open_request(tokens=1_000_000), PATIENCE)
        assert reply.message.length == 1_000_000 and reply.bytes_sent > 4_000_000


async def test_a_thousand_requests_at_once(address: str, context: Context, worker: StartWorker) -> None:
    """More than one batch of the reader: no edge of the descriptor may be lost."""
    worker(address)
    async with linked(address, context) as link:
        asked = [verify(request_id) for request_id in range(1_000)]
        replies = await asyncio.gather(*(link.request(message, PATIENCE) for message in asked))
        assert [reply.message.request_id for reply in replies] == list(range(1_000))
        assert link.dropped == 0


# ---------------------------------------------------------------- control beside compute


async def test_ping_abort_and_shutdown_while_the_worker_computes(
    address: str, context: Context, worker: StartWorker
) -> None:
    computing, done = threading.Event(), threading.Event()

    def compute(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        if isinstance(message, Verify):
            computing.set()
            assert done.wait(PATIENCE), "nobody ended the computation"
        return False

    started = worker(address, behave=compute)
    async with linked(address, context) as link:
        waiting = asyncio.create_task(link.request(verify(6), PATIENCE))
        assert await asyncio.to_thread(computing.wait, PATIENCE)
        pong, seconds = await link.ping(PATIENCE)
        assert pong.state == "ready" and 0 < seconds < PATIENCE
        await link.abort(6)
        await link.shutdown(PATIENCE)  # answered though the computation goes on
        assert started.endpoint.stopping.is_set() and not waiting.done()
        done.set()
        assert (await waiting).message.request_id == 6
        assert await asyncio.to_thread(started.abort_seen.wait, PATIENCE), "the abort did not arrive"
        assert [request_id for _, request_id in started.aborted] == [6]
        await asyncio.wait_for(link.lost.wait(), PATIENCE)


async def test_an_abort_reaches_an_idle_worker_at_once(address: str, context: Context, worker: StartWorker) -> None:
    started = worker(address)
    async with linked(address, context) as link:
        await link.abort(3)
        assert await asyncio.to_thread(started.abort_seen.wait, PATIENCE / 2), "the abort waited for a message"


# ---------------------------------------------------------------- endings


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
