"""The receive loop of a worker: take what has come, run one step of the engine, answer. Knows messages, not models.

Imports protocol only. Requests join and leave between two steps. Where the engine allows it and there are several
requests, a step runs in a thread: what comes meanwhile is read and checked beside it, what it answered is sent beside
the next one, and the device has hardly a pause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from worker.returning import Returning
from worker.table import Entry, Key, RequestTable, Work

logger = logging.getLogger(__name__)
IDLE_SECONDS = 1.0  # how long a receive waits; an abort or a shutdown wakes it at once
LEAST_THREADED = 0.003  # seconds of a step; to a thread and back takes 0.3 ms, and a short pass is a small one
Replies = list[tuple[Entry, Message]]


class Engine(Protocol):
    """What a worker does with its requests, a step at a time."""

    @property
    def work_types(self) -> tuple[type[Work], ...]:
        """The messages that it works on."""

    @property
    def threaded(self) -> bool:
        """Whether `check` and `start` may be called for other requests while `step` runs in another thread."""

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""

    @property
    def in_hand(self) -> Sequence[Entry]:
        """The requests of the last step that was begun: what fails with it."""

    def open(self, entry: Entry) -> None:
        """Give a new request its row and prefill it in the steps to come; `Opened` is the reply. ProtocolError
        `bad_value` or `context_full` where it can't be served, and then nothing has changed.
        """

    def check(self, entry: Entry, message: Work) -> None:
        """ProtocolError where `message` can't be run, before anything has changed."""

    def start(self, entry: Entry, message: Work) -> None:
        """Work on `message` in the steps to come; `entry` follows it already."""

    def step(self) -> Replies:
        """One pass of the model over what is there, and the replies that are ready after it."""

    def close(self, entry: Entry, *, keep: bool) -> None:
        """Drop what is being done for the request and free its row. `keep`: prompts to come may use what that holds;
        not where a pass failed.
        """


class WorkerLoop:
    """Serves one endpoint with one engine until it is told to shut down."""

    def __init__(self, endpoint: Endpoint, welcome: Welcome, tokenizer: TokenizerReply, engine: Engine) -> None:
        self._endpoint = endpoint
        self._welcome = welcome
        self._tokenizer = tokenizer
        self._engine = engine
        self._table = RequestTable()
        self._passes = 0
        self._step: Future[Replies] | None = None  # runs in the thread
        self._step_seconds = 0.0
        self._kept: list[tuple[Peer, Message]] = []  # what changes rows, and came while a step ran
        self._plain = Returning()  # requests that the last step gave a verdict without a block
        self._ready: set[Key] = set()  # have work for the next step

    def run(self) -> None:
        self._endpoint.status.update(state="ready")
        with ThreadPoolExecutor(1, "specdec-pass") as thread:
            while not self._endpoint.stopping.is_set():
                if self._engine.threaded:
                    self._turn(thread)
                else:
                    self.step(self._endpoint.receive(0.0 if self._engine.busy else IDLE_SECONDS))

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def step(self, pending: Sequence[tuple[Peer, Message]]) -> None:
        """Take everything in `pending`, then run one step over all that is there, and answer."""
        self._take_all(pending)
        self._take_kept()
        if self._engine.busy:
            self._send(self._ended(self._run))
        self._endpoint.status.update(requests=len(self._table), passes=self._passes)

    # ------------------------------------------------------------ a step beside what comes

    def _turn(self, thread: ThreadPoolExecutor) -> None:
        """Take what comes; once no step runs, begin the next one, then answer for the last one."""
        self._take_all(self._endpoint.receive(self._patience()))
        replies: Replies = []
        if self._step is not None:
            if not self._step.done():
                return
            replies = self._ended(self._step.result)
            self._step = None
        self._take_kept()
        begins = self._engine.busy and not self._wait()
        beside = begins and len(self._table) > 1 and self._step_seconds > LEAST_THREADED
        if begins:
            self._ready.clear()
        if beside:
            self._step = thread.submit(self._run)
            self._step.add_done_callback(lambda _: self._endpoint.wake())
        self._send(replies)
        if begins and not beside:  # nobody else to take anything from, or hardly any time for it
            self._send(self._ended(self._run))
        self._endpoint.status.update(requests=len(self._table), passes=self._passes)

    def _patience(self) -> float:
        """Seconds that a receive may wait."""
        return IDLE_SECONDS if self._step is not None or not self._engine.busy else self._wait()

    def _wait(self) -> float:
        """Seconds to wait for requests that have no block: they are back as soon as they can be, and two groups of them
        that take turns become one. Groups with blocks stay apart: one is drafted for while the other is verified. (To
        wait for a late block too made 8 requests no faster, and the target idle 3 % more.)
        """
        return self._plain.wait(time.monotonic(), self._step_seconds, len(self._ready))

    # ------------------------------------------------------------ what comes

    def _take_all(self, pending: Sequence[tuple[Peer, Message]]) -> None:
        """Take each, or keep it until no step runs; of one request in the order in which they came."""
        for peer, message in pending:
            if self._step is not None and (isinstance(message, (Open, Close)) or self._follows_kept(peer, message)):
                self._kept.append((peer, message))
                continue
            try:
                self._take(peer, message)
            except ProtocolError as error:
                self._endpoint.send(peer, failure(message, error))

    def _follows_kept(self, peer: Peer, message: Message) -> bool:
        key = (peer, getattr(message, "request_id", None))
        return any(key == (other, getattr(kept, "request_id", None)) for other, kept in self._kept)

    def _take_kept(self) -> None:
        """What changes rows, between two steps."""
        kept, self._kept = self._kept, []
        self._take_all(kept)
        for key in self._endpoint.take_aborts():
            self._close(key)
        for departed in self._endpoint.take_departed():  # an orchestrator that is gone asks for nothing more
            for key in self._table.of(departed):
                self._close(key)

    def _take(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Hello):
            self._endpoint.send(peer, self._welcome)
        elif isinstance(message, GetTokenizer):
            self._endpoint.send(peer, self._tokenizer)
        elif isinstance(message, Open):
            self._close((peer, message.request_id))
            entry = Entry((peer, message.request_id), message, message.tokens.tolist())
            self._engine.open(entry)
            self._table.add(entry)
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
        self._ready.add(entry.key)
        self._plain.back(entry.key, time.monotonic())

    def _close(self, key: tuple[Peer, int]) -> None:
        entry = self._table.remove(key)
        if entry is not None:
            self._forget(key)
            self._engine.close(entry, keep=True)

    def _forget(self, key: Key) -> None:
        """Nothing is expected of a request that has ended."""
        self._ready.discard(key)
        self._plain.gone(key)

    # ------------------------------------------------------------ steps and what they answer

    def _run(self) -> Replies:
        started = time.monotonic()
        replies = self._engine.step()
        self._step_seconds = time.monotonic() - started
        return replies

    def _ended(self, step: Callable[[], Replies]) -> Replies:
        """The replies of a step, to be sent; who should be back when is noted. One that failed is answered here."""
        self._passes += 1
        try:
            replies = step()
        except Exception as error:  # an engine's own checks come before: this is a fault; the process lives on
            logger.exception("a pass failed")
            self._fail_pass(error)
            return []
        works = [(entry.key, entry.work) for entry, _ in replies]
        plain = {key for key, work in works if isinstance(work, Verify) and not work.tokens.size}
        self._plain.expect(plain, time.monotonic(), self._step_seconds)
        return replies

    def _send(self, replies: Replies) -> None:
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
            self._forget(entry.key)
            try:
                self._engine.close(entry, keep=False)
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
