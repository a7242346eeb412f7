"""The worker's end: it drains, refuses, wakes up, never blocks on a peer that is gone, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from protocol.control import WorkerStatus
from protocol.endpoint import Endpoint
from protocol.errors import ProtocolError
from protocol.framing import encode
from protocol.limits import MAX_FRAMES
from protocol.messages import Abort, Failure, Goodbye, Ping, Pong, Shutdown, Verdict, Verify
from tests.protocol.rawpeer import HELLO, Context, RawPeer, receive, until
from tests.protocol.support import PATIENCE, verify, welcome


@pytest.fixture
def endpoint(address: str, context: Context) -> Iterator[Endpoint]:
    with Endpoint(address, context=context) as made:
        yield made


@pytest.fixture
def peer(endpoint: Endpoint, context: Context) -> Iterator[RawPeer]:
    made = RawPeer(context, endpoint.address)
    yield made
    made.close()


def test_messages_and_answers(endpoint: Endpoint, peer: RawPeer) -> None:
    peer.say(HELLO)
    ((who, message),) = endpoint.receive(PATIENCE)
    assert message == HELLO
    assert endpoint.send(who, welcome())
    assert peer.hear(type(welcome())) == welcome()


def test_everything_that_waits_comes_at_once(endpoint: Endpoint, peer: RawPeer) -> None:
    sent = [verify(request_id) for request_id in range(50)]
    for message in sent:
        peer.say(message)
    peer.control.send_multipart(encode(Ping(1)))
    peer.hear(Pong, peer.control)
    assert receive(endpoint, 50) == sent


def test_nothing_comes_within_the_time(endpoint: Endpoint) -> None:
    started = time.monotonic()
    assert endpoint.receive(0.05) == []
    assert 0.04 < time.monotonic() - started < PATIENCE
    assert endpoint.receive(0) == [] == endpoint.receive(-1)


BAD = [[b""], [b"GET / HTTP/1.1"], [b"\xc1"], [b"x"] * (MAX_FRAMES + 1), [b"x"] * 5_000, [encode(verify())[0]]]


@pytest.mark.parametrize("frames", BAD, ids=["empty", "text", "no msgpack", "9 frames", "5000 frames", "frame missing"])
def test_malformed_messages_are_answered_and_the_session_survives(
    endpoint: Endpoint, peer: RawPeer, frames: list[bytes]
) -> None:
    peer.data.send_multipart(frames)
    assert endpoint.receive(PATIENCE) == []
    assert peer.hear(Failure).code == "bad_frame"
    assert endpoint.malformed == 1
    peer.say(verify())
    assert receive(endpoint) == [verify()]


def test_too_many_drafted_tokens_fail_their_own_request(endpoint: Endpoint, peer: RawPeer) -> None:
    """Fault C11: an assertion killed the session. Here its sender is told which block was refused, and goes on."""
    header = encode(verify(9, 5))[0]
    assert isinstance(header, bytes)
    frames = [header.replace(b"\x92\xa2i4\x04", b"\x92\xa2i4\x41"), bytes(65 * 4)]
    peer.data.send_multipart(frames)
    assert endpoint.receive(PATIENCE) == []
    failure = peer.hear(Failure)
    assert (failure.request_id, failure.block_id, failure.code) == (9, 5, "bad_frame")
    assert "65 tokens" in failure.text
    peer.say(verify(9, 6))
    ((who, message),) = endpoint.receive(PATIENCE)
    assert message == verify(9, 6)
    endpoint.send(who, Verdict(9, 0, 3, 6, 4, 7, "bonus", 0.0, 1, 5))
    assert peer.hear(Verdict).block_id == 6


def test_another_version_is_told_so(endpoint: Endpoint, peer: RawPeer) -> None:
    peer.data.send_multipart([b"\x94\x01\x09\xa3new\xc0"])
    assert endpoint.receive(PATIENCE) == []
    failure = peer.hear(Failure)
    assert failure.code == "version" and "protocol version 9" in failure.text


def test_messages_of_the_other_direction_or_link_are_refused(endpoint: Endpoint, peer: RawPeer) -> None:
    for message in (welcome(), Ping(1), Goodbye()):
        peer.say(message)
        endpoint.receive(PATIENCE)
        assert "does not belong on the data link" in peer.hear(Failure).text
    peer.control.send_multipart(encode(verify()))
    assert "does not belong on the control link" in peer.hear(Failure, peer.control).text
    peer.control.send_multipart([b"garbage"])
    assert peer.hear(Failure, peer.control).code == "bad_frame"


def test_a_failure_is_never_answered(endpoint: Endpoint, peer: RawPeer) -> None:
    for link in (peer.data, peer.control):
        link.send_multipart(encode(Failure(-1, 0, -1, "internal", "mirror")))
    endpoint.receive(PATIENCE)
    assert endpoint.malformed == 1
    peer.say(HELLO)
    ((who, _),) = endpoint.receive(PATIENCE)
    endpoint.send(who, welcome())
    peer.hear(type(welcome()))  # the first thing that comes
    peer.control.send_multipart(encode(Ping(3)))
    assert peer.hear(Pong, peer.control).nonce == 3


def test_ping_is_answered_without_the_workers_thread(endpoint: Endpoint, peer: RawPeer) -> None:
    """This thread, the worker's, never calls receive."""
    for state in ("loading", "ready"):
        endpoint.status.update(state=state, requests=3, passes=9)
        peer.control.send_multipart(encode(Ping(7)))
        pong = peer.hear(Pong, peer.control)
        assert (pong.nonce, pong.state, pong.requests, pong.passes) == (7, state, 3, 9)
        assert pong.uptime >= 0 and pong.rss_bytes > 1_000_000


def test_an_abort_wakes_receive(endpoint: Endpoint, peer: RawPeer) -> None:
    peer.say(verify(5))
    ((who, _),) = endpoint.receive(PATIENCE)
    sender = threading.Timer(0.1, peer.control.send_multipart, (encode(Abort(5)),))
    started = time.monotonic()
    sender.start()
    assert endpoint.receive(PATIENCE) == []
    assert time.monotonic() - started < PATIENCE / 2
    sender.join()
    assert endpoint.take_aborts() == [(who, 5)]  # the peer of the data link
    assert endpoint.take_aborts() == []


def test_shutdown_wakes_receive_and_is_answered(endpoint: Endpoint, peer: RawPeer) -> None:
    sender = threading.Timer(0.1, peer.control.send_multipart, (encode(Shutdown()),))  # while receive waits
    started = time.monotonic()
    sender.start()
    assert endpoint.receive(PATIENCE) == []
    assert time.monotonic() - started < PATIENCE / 2
    sender.join()
    assert endpoint.stopping.is_set()
    peer.hear(Goodbye, peer.control)
    assert endpoint.receive(PATIENCE) == []  # at once: stopping stays


def test_stop_from_another_thread_and_from_a_signal(endpoint: Endpoint) -> None:
    timer = threading.Timer(0.05, endpoint.stop)
    timer.start()
    endpoint.receive(PATIENCE)
    timer.join()
    assert endpoint.stopping.is_set()
    endpoint.stopping.clear()
    endpoint.receive(0)
    before = signal.signal(signal.SIGUSR1, lambda *_: endpoint.stop())
    try:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        started = time.monotonic()
        endpoint.receive(PATIENCE)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert endpoint.stopping.is_set() and time.monotonic() - started < PATIENCE / 2


def test_send_to_a_peer_that_is_gone(endpoint: Endpoint, context: Context) -> None:
    gone = RawPeer(context, endpoint.address, b"short-lived")
    gone.say(HELLO)
    ((who, _),) = endpoint.receive(PATIENCE)
    gone.close()
    until(lambda: not endpoint.send(who, welcome()), "the endpoint still sends to a closed peer")
    assert endpoint.dropped == 1
    assert endpoint.take_departed() == [who]
    assert endpoint.take_departed() == []


def test_departed_peers_are_found_by_probes(
    endpoint: Endpoint, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.endpoint.PROBE_SECONDS", 0.0)
    stays, goes = (RawPeer(context, endpoint.address, name) for name in (b"stays", b"goes"))
    stays.say(HELLO)
    goes.say(HELLO)
    receive(endpoint, 2)
    assert endpoint.take_departed() == []
    goes.close()
    departed = []
    until(lambda: departed.extend(endpoint.take_departed()) or departed, "a closed peer was not found")
    assert [each.identity for each in departed] == [b"goes"]
    stays.close()


def test_an_invalid_message_is_the_workers_fault(endpoint: Endpoint, peer: RawPeer) -> None:
    peer.say(HELLO)
    ((who, _),) = endpoint.receive(PATIENCE)
    with pytest.raises(ProtocolError, match=r"Verdict\.seconds"):
        endpoint.send(who, Verdict(1, 0, 3, 0, 4, 7, "bonus", float("nan"), 1, 5))


def test_close_says_goodbye_and_may_be_repeated(endpoint: Endpoint, peer: RawPeer) -> None:
    peer.say(HELLO)
    receive(endpoint)
    endpoint.close()
    endpoint.close()
    peer.hear(Goodbye)


def test_a_status_may_be_updated_from_anywhere() -> None:
    status = WorkerStatus()
    threads = [threading.Thread(target=lambda: [status.update(passes=n) for n in range(500)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        assert status.pong(1).state == "loading"
    for thread in threads:
        thread.join()
    assert status.pong(2).passes == 499


def test_received_messages_keep_their_order_and_type(endpoint: Endpoint, peer: RawPeer) -> None:
    for block_id in range(5):
        peer.say(verify(1, block_id))
    got = receive(endpoint, 5)
    assert [message.block_id for message in got if isinstance(message, Verify)] == list(range(5))
