"""What a worker's loop does while a pass runs in a thread, and how passes gather those who should be in them.

A real loop over a real socket; the engine is one whose steps end when the test says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

import worker.loop
from protocol.codecs import NO_Q
from protocol.endpoint import Endpoint
from protocol.errors import ProtocolError
from protocol.messages import (
    Close,
    Failure,
    Message,
    Open,
    Opened,
    Sampling,
    TokenizerReply,
    Verdict,
    Verify,
    Welcome,
    token_array,
)
from tests.protocol.rawpeer import HELLO, RawPeer
from tests.protocol.support import PATIENCE, welcome
from worker.loop import WorkerLoop
from worker.returning import Returning
from worker.table import Entry, Work


class GatedEngine:
    """Answers all that it was given; a step waits for `gate` once it is closed. `steps`: who was in each."""

    threaded = True
    work_types: tuple[type[Work], ...] = (Verify,)

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.steps: list[list[int]] = []
        self.changed: list[tuple[str, int]] = []  # rows opened and closed
        self.broken = False
        self.in_hand: list[Entry] = []
        self._filling: list[Entry] = []
        self._waiting: list[Entry] = []

    @property
    def busy(self) -> bool:
        return bool(self._filling or self._waiting)

    def open(self, entry: Entry) -> None:
        self.changed.append(("open", entry.request_id))
        self._filling.append(entry)

    def close(self, entry: Entry, *, keep: bool) -> None:
        self.changed.append(("close", entry.request_id))
        self._waiting = [one for one in self._waiting if one is not entry]

    def check(self, entry: Entry, message: Work) -> None:
        if message.block_id == 666:
            raise ProtocolError("bad_value", "the test's own")

    def start(self, entry: Entry, message: Work) -> None:
        self._waiting.append(entry)

    def step(self) -> list[tuple[Entry, Message]]:
        filled, self._filling = self._filling, []
        self.in_hand, self._waiting = self._waiting, []
        if self.in_hand:
            self.steps.append([entry.request_id for entry in self.in_hand])
            self.entered.set()
            assert self.gate.wait(PATIENCE), "the test left the gate closed"
        if self.broken:
            raise RuntimeError("the test's own")
        opened: list[tuple[Entry, Message]] = [
            (entry, Opened(entry.request_id, entry.opened.epoch, len(entry.tokens))) for entry in filled
        ]
        return opened + [(entry, _verdict(entry)) for entry in self.in_hand]


def _verdict(entry: Entry) -> Verdict:
    assert isinstance(entry.work, Verify)
    work = entry.work
    entry.tokens.append(1)
    entry.verdict = Verdict(work.request_id, work.epoch, work.base_length, work.block_id, 0, 1, "bonus", 0.01, 1, 1)
    return entry.verdict


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> GatedEngine:
    monkeypatch.setattr(worker.loop, "LEAST_THREADED", -1.0)
    return GatedEngine()


@pytest.fixture
def peer(engine: GatedEngine) -> Iterator[RawPeer]:
    """Talks to a loop in a thread; requests 1 to 4 are open."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint: list[Endpoint] = []
    bound = threading.Event()

    def serve() -> None:
        with Endpoint("inproc://loop", context=context) as made:
            endpoint.append(made)
            bound.set()
            WorkerLoop(made, welcome(), TokenizerReply("{}", ""), engine).run()

    thread = threading.Thread(target=serve)
    thread.start()
    assert bound.wait(PATIENCE)
    talker = RawPeer(context, "inproc://loop")
    try:
        for request_id in (1, 2, 3, 4):
            talker.say(_open(request_id))
            talker.hear(Opened)
        yield talker
    finally:
        engine.gate.set()
        endpoint[0].stop()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the loop did not stop"
        talker.close()
        context.term()


def _open(request_id: int) -> Open:
    return Open(request_id, 1, 7, "coupled", "none", Sampling(1.0, 0, 1.0, 0.0), 100, token_array([5]))


def _verify(request_id: int, block_id: int = 1, length: int = 1) -> Verify:
    none = np.zeros(0, dtype=np.int32)
    return Verify(request_id, 1, length, block_id, none, none, NO_Q)


def running(engine: GatedEngine, peer: RawPeer) -> None:
    """Request 1 is in a step that doesn't end before the gate opens."""
    engine.gate.clear()
    peer.say(_verify(1))
    assert engine.entered.wait(PATIENCE)


def test_what_needs_no_row_is_answered_while_a_step_runs(engine: GatedEngine, peer: RawPeer) -> None:
    running(engine, peer)
    peer.say(HELLO)
    assert peer.hear(Welcome).role == "target"
    peer.say(_verify(2, block_id=666))
    assert peer.hear(Failure).code == "bad_value"
    peer.say(_verify(9))
    assert peer.hear(Failure).code == "unknown_request"
    engine.gate.set()
    assert peer.hear(Verdict).request_id == 1


def test_what_came_while_a_step_ran_is_in_the_next_one(engine: GatedEngine, peer: RawPeer) -> None:
    running(engine, peer)
    for request_id in (2, 3):
        peer.say(_verify(request_id))
    peer.say(HELLO)
    peer.hear(Welcome)  # so the two have been taken
    engine.gate.set()
    assert sorted(peer.hear(Verdict).request_id for _ in range(3)) == [1, 2, 3]
    assert engine.steps == [[1], [2, 3]]


def test_rows_are_opened_and_closed_only_between_steps_and_in_order(engine: GatedEngine, peer: RawPeer) -> None:
    running(engine, peer)
    engine.changed.clear()
    for message in (_verify(2), Close(2), _open(5), _verify(5), HELLO):
        peer.say(message)
    peer.hear(Welcome)
    assert engine.changed == []
    engine.gate.set()
    heard = {type(peer.hear(Message)) for _ in range(3)}  # of 1 and 5; request 2 was closed before its step
    assert heard == {Verdict, Opened} and engine.changed == [("close", 2), ("open", 5)]
    assert engine.steps[0] == [1] and not any(2 in step for step in engine.steps)


def test_a_step_that_fails_in_the_thread_fails_its_own_requests_alone(engine: GatedEngine, peer: RawPeer) -> None:
    running(engine, peer)
    peer.say(_verify(2))
    peer.say(HELLO)
    peer.hear(Welcome)
    engine.broken = True
    engine.entered.clear()
    engine.gate.set()
    failed = {peer.hear(Failure).request_id, peer.hear(Failure).request_id}
    assert failed == {1, 2}, "each was in a step that broke"
    engine.broken = False
    peer.say(_verify(3))
    assert peer.hear(Verdict).request_id == 3


def test_a_repeat_of_what_a_running_step_works_on_is_answered_once(engine: GatedEngine, peer: RawPeer) -> None:
    running(engine, peer)
    peer.say(_verify(1))
    peer.say(HELLO)
    peer.hear(Welcome)
    engine.gate.set()
    peer.hear(Verdict)
    peer.say(HELLO)
    peer.hear(Welcome)  # no second verdict before it
    assert engine.steps == [[1]]


def test_requests_without_blocks_gather_in_one_step(
    engine: GatedEngine, peer: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 and 4, which are ready, wait for 1, which was just answered. The window is as long as it takes."""
    monkeypatch.setattr(worker.returning, "SECONDS", PATIENCE)
    monkeypatch.setattr(worker.returning, "SHARE", 1e9)
    monkeypatch.setattr(Returning, "wait", _always_worth_it)
    running(engine, peer)
    for message in (_verify(3), _verify(4), HELLO):
        peer.say(message)
    peer.hear(Welcome)
    engine.gate.set()
    assert peer.hear(Verdict).request_id == 1
    peer.say(_verify(1, block_id=2, length=2))
    assert sorted(peer.hear(Verdict).request_id for _ in range(3)) == [1, 3, 4]
    assert engine.steps == [[1], [3, 4, 1]]


def _always_worth_it(self: Returning, now: float, pass_seconds: float, ready: int) -> float:
    return max(0.0, self._until - now) if self._missing else 0.0
