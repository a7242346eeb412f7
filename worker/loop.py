"""The receive loop of a worker: take what has come, run one step of the engine, answer. Knows messages, not models.

Imports protocol only. Requests join and leave between two steps: what comes while one runs is taken before the next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from protocol.endpoint import Endpoint, Peer
from protocol.errors import ProtocolError
from protocol.matching import REPLIES
from protocol.messages import (
    Branch,
    Close,
    Failure,
    GetTokenizer,
    Hello,
    Message,
    Open,
    TokenizerReply,
    Verify,
    Welcome,
)
from worker.table import Entry, Key, RequestTable, Work

logger = logging.getLogger(__name__)
IDLE_SECONDS = 1.0  # how long a receive waits; an abort or a shutdown wakes it at once
GATHER_SHARE, GATHER_SECONDS = 0.1, 0.004  # of a step, and at most: the wait for rows that were just answered


class Engine(Protocol):
    """What a worker does with its requests, a step at a time."""

    @property
    def work_types(self) -> tuple[type[Work], ...]:
        """The messages that it works on."""

    @property
    def gathers(self) -> bool:
        """Whether a step waits a moment for the requests that the one before it answered."""

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""

    @property
    def in_hand(self) -> Sequence[Entry]:
        """The requests of the last step that was begun: what fails with it."""

    def open(self, opened: Open) -> int:
        """A row for a new request; ProtocolError `bad_value` or `context_full` where it can't be served."""

    def fill(self, entry: Entry) -> None:
        """Prefill a request that was just opened, in the steps to come; `Opened` is the reply."""

    def check(self, entry: Entry, message: Work) -> None:
        """ProtocolError where `message` can't be run, before anything has changed."""

    def start(self, entry: Entry, message: Work) -> None:
        """Work on `message` in the steps to come; `entry` follows it already."""

    def step(self) -> list[tuple[Entry, Message]]:
        """One pass of the model over what is there, and the replies that are ready after it."""

    def close(self, entry: Entry) -> None:
        """Free the row and drop what is being done for it."""


class WorkerLoop:
    """Serves one endpoint with one engine until it is told to shut down."""

    def __init__(self, endpoint: Endpoint, welcome: Welcome, tokenizer: TokenizerReply, engine: Engine) -> None:
        self._endpoint = endpoint
        self._welcome = welcome
        self._tokenizer = tokenizer
        self._engine = engine
        self._table = RequestTable()
        self._passes = 0
        self._step_seconds = 0.0
        self._answered = 0  # requests that the last step answered
        self._plain: set[Key] = set()  # of these, those that had no block: they are back as soon as they can be

    def run(self) -> None:
        self._endpoint.status.update(state="ready")
        while not self._endpoint.stopping.is_set():
            pending = self._endpoint.receive(0.0 if self._engine.busy else IDLE_SECONDS)
            self.step(self._gathered(pending) if self._engine.gathers else pending)

    def _gathered(self, pending: list[tuple[Peer, Message]]) -> list[tuple[Peer, Message]]:
        """`pending`, and what the rows of the last step send in a moment: a step that left without them would have a
        few of them each time, and take as long. Without blocks two groups that take turns become one; with blocks they
        stay apart, since one is drafted for while the other is verified.
        """
        deadline = time.monotonic() + min(GATHER_SECONDS, GATHER_SHARE * self._step_seconds)
        while (pending or self._engine.busy) and not self._endpoint.stopping.is_set():
            work = [(peer, message) for peer, message in pending if isinstance(message, self._engine.work_types)]
            back = self._plain.intersection((peer, message.request_id) for peer, message in work)
            left = deadline - time.monotonic()
            if (len(work) >= self._answered and back == self._plain) or left <= 0:
                break
            pending += self._endpoint.receive(left)
        return pending

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def step(self, pending: Sequence[tuple[Peer, Message]]) -> None:
        """Take everything in `pending`, then run one step over all that is there."""
        for peer, message in pending:
            try:
                self._take(peer, message)
            except ProtocolError as error:
                self._endpoint.send(peer, failure(message, error))
        for key in self._endpoint.take_aborts():
            self._close(key)
        for departed in self._endpoint.take_departed():  # an orchestrator that is gone asks for nothing more
            for key in self._table.of(departed):
                self._close(key)
        if self._engine.busy:
            self._pass()
        self._endpoint.status.update(requests=len(self._table), passes=self._passes)

    def _take(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Hello):
            self._endpoint.send(peer, self._welcome)
        elif isinstance(message, GetTokenizer):
            self._endpoint.send(peer, self._tokenizer)
        elif isinstance(message, Open):
            self._close((peer, message.request_id))
            row = self._engine.open(message)
            entry = Entry((peer, message.request_id), message, row, message.tokens.tolist())
            self._table.add(entry)
            self._engine.fill(entry)
        elif isinstance(message, Close):
            self._close((peer, message.request_id))
        elif isinstance(message, self._engine.work_types):
            self._take_work(peer, message)
        else:
            names = ", ".join(work.__name__ for work in self._engine.work_types)
            raise ProtocolError(
                "bad_value",
                f"a {self._welcome.role} worker of {self._welcome.model} doesn't take {type(message).__name__}; "
                f"it takes Hello, GetTokenizer, Open, {names} and Close",
            )

    def _take_work(self, peer: Peer, message: Work) -> None:
        entry = self._table.get((peer, message.request_id))
        if isinstance(message, Verify) and entry.verdict is not None and entry.opened.epoch == message.epoch:
            if message.block_id == entry.verdict.block_id:  # one verdict a block (E5): asked again, the same answer
                self._endpoint.send(peer, entry.verdict)
                return
            if message.block_id < entry.verdict.block_id:
                raise ProtocolError("out_of_sync", f"block {message.block_id} is older than the last one verified")
        entry.check(message.epoch, message.base_length, len(message.tail))
        if entry.work is not None:
            if type(entry.work) is type(message) and entry.work.block_id == message.block_id:
                return  # a repeat of what is being worked on
            if not isinstance(entry.work, Branch):  # a guess ahead gives way to whatever comes after it
                raise ProtocolError("out_of_sync", "one block of a request at a time: wait for the reply")
        self._engine.check(entry, message)
        entry.follow(message.base_length, message.tail.tolist())
        entry.work = message
        self._engine.start(entry, message)

    def _close(self, key: tuple[Peer, int]) -> None:
        entry = self._table.remove(key)
        if entry is not None:
            self._engine.close(entry)

    def _pass(self) -> None:
        self._passes += 1
        started = time.monotonic()
        try:
            replies = self._engine.step()
        except Exception as error:  # an engine's own checks come before: this is a fault; the process lives on
            logger.exception("a pass failed")
            self._fail_pass(error)
            return
        self._step_seconds = time.monotonic() - started
        worked = [entry for entry, _ in replies if entry.work is not None]
        self._answered = len(worked)
        self._plain = {one.key for one in worked if isinstance(one.work, Verify) and not one.work.tokens.size}
        for entry, reply in replies:
            self._reply(entry, reply)

    def _reply(self, entry: Entry, reply: Message) -> None:
        work = entry.work
        if work is not None and isinstance(reply, (REPLIES[type(work)], Failure)):
            entry.work = None
        try:
            self._endpoint.send(entry.key[0], reply)
        except ProtocolError as error:  # a reply that the wire can't carry is the request's misfortune alone
            logger.exception("a reply can't be sent")
            cause = ProtocolError("internal", f"the reply can't be sent: {error.text}")
            self._endpoint.send(entry.key[0], failure(work or entry.opened, cause))

    def _fail_pass(self, error: Exception) -> None:
        """Close every request of a pass that raised: their rows are in an unknown state."""
        cause = ProtocolError("internal", f"the pass failed: {type(error).__name__}: {error}")
        for entry in list(self._engine.in_hand):
            if self._table.remove(entry.key) is None:
                continue
            try:
                self._engine.close(entry)
            except Exception:
                logger.exception("closing request %d failed", entry.request_id)
            self._endpoint.send(entry.key[0], failure(entry.work or entry.opened, cause))


def failure(message: Message, error: ProtocolError) -> Failure:
    """The answer to `message` that says what was wrong with it."""
    return Failure(
        request_id=getattr(message, "request_id", -1),
        epoch=getattr(message, "epoch", 0),
        block_id=getattr(message, "block_id", -1),
        code=error.code,
        text=error.text,
    )
