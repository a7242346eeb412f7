"""Requests and replies over every transport: matching, failures, counts, and control beside compute."""

from __future__ import annotations

import asyncio
import threading

import pytest

from protocol.codecs import NO_Q
from protocol.endpoint import Endpoint, Peer
from protocol.errors import FailureCode, LinkLost, LinkTimeout, ProtocolError, WorkerFailure
from protocol.framing import encode, frames_size
from protocol.messages import (
    Block,
    Branch,
    Close,
    Failure,
    GetTokenizer,
    Hello,
    Message,
    Opened,
    Propose,
    Verify,
    token_array,
)
from tests.protocol.links import Context, Held, StartWorker, linked, verdict
from tests.protocol.support import (
    PATIENCE,
    answer,
    branch,
    branches,
    open_request,
    propose,
    verify,
    welcome,
)


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


async def test_a_failure_of_one_block_leaves_the_others(context: Context, worker: StartWorker) -> None:
    def fail_first(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        if isinstance(message, Verify) and message.block_id == 0:
            return endpoint.send(peer, Failure(1, 0, 0, FailureCode.NAN, "row 3 is NaN"))
        return False

    worker("inproc://blocks", behave=fail_first)
    async with linked("inproc://blocks", context) as link:
        asked = (link.request(verify(1, block_id), PATIENCE) for block_id in range(3))
        first, *others = await asyncio.gather(*asked, link.request(open_request(1), PATIENCE), return_exceptions=True)
        assert isinstance(first, WorkerFailure)
        assert not any(isinstance(other, BaseException) for other in others)


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


async def test_branches_and_a_block_are_told_apart(address: str, context: Context, worker: StartWorker) -> None:
    """A Branch is superseded by a Propose of the next block; its own answer may come after, or never."""

    def propose_first(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        if isinstance(message, Propose):
            for each in (message, asked):
                reply = answer(each, welcome("draft"))
                assert reply is not None
                endpoint.send(peer, reply)
        return isinstance(message, (Branch, Propose))

    worker(address, role="draft", behave=propose_first)
    asked = branch(1, 3)
    async with linked(address, context, "draft") as link:
        ahead, never = (asyncio.create_task(link.request(each, PATIENCE)) for each in (asked, branch(1, 2)))
        await asyncio.sleep(0)
        assert isinstance((await link.request(propose(1, 3), PATIENCE)).message, Block)
        assert (await ahead).message == branches(asked)
        assert not never.done() and link.dropped == 0
        never.cancel()
        await asyncio.wait([never])


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
    "tokens": (propose(gamma=2), Block(1, 0, 3, 0, 0.0, 1, 3, token_array([1, 2, 3]), NO_Q), "asked were at most 2"),
    "base": (propose(), Block(1, 0, 4, 0, 0.0, 1, 1, token_array([1]), NO_Q), "another base length"),
    "accepted": (verify(), verdict(verify(), accepted=5), "accepts 5 of 4"),
    "bonus": (verify(), verdict(verify(), accepted=3), "calls its own a bonus"),
    "correction": (verify(), verdict(verify(), origin="correction"), "calls its own a correction"),
    "verdict's base": (verify(), verdict(verify(), base_length=2), "another base length"),
    "branches' base": (branch(), branches(branch(), base_length=4), "Branches is about another base length"),
    "width": (branch(), branches(branch(), accepted=[0] * 9, next=range(9), lengths=[0] * 9), "9 branches, .* most 8"),
    "fork": (branch(tokens=(11,)), branches(branch()), "after 4 accepted tokens of 1"),
    "branch": (branch(gamma=2), branches(branch(gamma=3)), "a branch of 3 tokens, asked were at most 2"),
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
            endpoint._send(peer.identity, [b"\x9c" + header[1:] + b"\xc0"])
            return True
        return False

    worker(address, behave=garble)
    async with linked(address, context) as link:
        with pytest.raises(ProtocolError, match="cannot be read"):  # it may have been the answer: better than silence
            await link.request(GetTokenizer(), PATIENCE)
        await link.request(open_request(), PATIENCE)
        assert link.malformed == 2
        with pytest.raises(ProtocolError, match="Verdict has 10 fields, not 11"):
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
