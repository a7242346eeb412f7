"""The receive loop of a worker: drain what is pending, run one batch, answer. Knows messages, not models.

Imports protocol only. What a batch does is the engine's business (draft_worker.engines, target_worker.engine).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.endpoint import Endpoint, Peer
from protocol.errors import ProtocolError
from protocol.messages import (
    Close,
    Failure,
    GetTokenizer,
    Hello,
    Message,
    Open,
    Opened,
    Propose,
    TokenizerReply,
    Verify,
    Welcome,
)
from worker.table import Entry, RequestTable

logger = logging.getLogger(__name__)
IDLE_SECONDS = 1.0  # how long a receive waits; an abort or a shutdown wakes it at once

Work = Propose | Verify


@dataclass(frozen=True)
class Job:
    """One request's part of a batch."""

    entry: Entry
    message: Work


class Engine(Protocol):
    """What a worker does with a batch."""

    @property
    def work_type(self) -> type[Propose] | type[Verify]:
        """The message that it works on."""

    def open(self, opened: Open) -> int:
        """A row for a new request; ProtocolError `bad_value` or `context_full` where it can't be served."""

    def close(self, entry: Entry) -> None:
        """Free the row."""

    def check(self, entry: Entry, message: Work) -> None:
        """ProtocolError where `message` can't be run, before anything has changed."""

    def run(self, opened: Sequence[Entry], jobs: Sequence[Job]) -> list[Message]:
        """Prefill `opened`, run `jobs`, return one reply a job, in order."""


class WorkerLoop:
    """Serves one endpoint with one engine until it is told to shut down."""

    def __init__(self, endpoint: Endpoint, welcome: Welcome, tokenizer: TokenizerReply, engine: Engine) -> None:
        self._endpoint = endpoint
        self._welcome = welcome
        self._tokenizer = tokenizer
        self._engine = engine
        self._table = RequestTable()
        self._passes = 0

    def run(self) -> None:
        self._endpoint.status.update(state="ready")
        while not self._endpoint.stopping.is_set():
            self.step(self._endpoint.receive(IDLE_SECONDS))

    def step(self, pending: Sequence[tuple[Peer, Message]]) -> None:
        """Answer everything in `pending`; all verifies (or proposals) among it share one batch."""
        opened: list[Entry] = []
        jobs: list[Job] = []
        for peer, message in pending:
            try:
                self._take(peer, message, opened, jobs)
            except ProtocolError as error:
                self._endpoint.send(peer, failure(message, error))
        for key in self._endpoint.take_aborts():
            self._close(key, opened, jobs)
        for departed in self._endpoint.take_departed():  # an orchestrator that is gone asks for nothing more
            for key in self._table.of(departed):
                self._close(key, opened, jobs)
        if opened or jobs:
            self._run_batch(opened, jobs)
        self._endpoint.status.update(requests=len(self._table), passes=self._passes)

    def _take(self, peer: Peer, message: Message, opened: list[Entry], jobs: list[Job]) -> None:
        if isinstance(message, Hello):
            self._endpoint.send(peer, self._welcome)
        elif isinstance(message, GetTokenizer):
            self._endpoint.send(peer, self._tokenizer)
        elif isinstance(message, Open):
            self._close((peer, message.request_id), opened, jobs)
            row = self._engine.open(message)
            entry = Entry((peer, message.request_id), message, row, message.tokens.tolist())
            self._table.add(entry)
            opened.append(entry)
        elif isinstance(message, Close):
            self._close((peer, message.request_id), opened, jobs)
        elif isinstance(message, self._engine.work_type):
            self._take_work(peer, message, jobs)
        else:
            raise ProtocolError(
                "bad_value",
                f"a {self._welcome.role} worker doesn't take {type(message).__name__}; "
                f"it takes Hello, GetTokenizer, Open, {self._engine.work_type.__name__} and Close",
            )

    def _take_work(self, peer: Peer, message: Work, jobs: list[Job]) -> None:
        entry = self._table.get((peer, message.request_id))
        if isinstance(message, Verify) and entry.verdict is not None and entry.opened.epoch == message.epoch:
            if message.block_id == entry.verdict.block_id:  # one verdict a block (E5): asked again, the same answer
                self._endpoint.send(peer, entry.verdict)
                return
            if message.block_id < entry.verdict.block_id:
                raise ProtocolError("out_of_sync", f"block {message.block_id} is older than the last one verified")
        waiting = next((job for job in jobs if job.entry is entry), None)
        if waiting is not None:
            if waiting.message.block_id == message.block_id:
                return  # a repeat of what this very batch answers
            raise ProtocolError("out_of_sync", "one block of a request at a time: wait for the reply")
        self._engine.check(entry, message)
        entry.follow(message.epoch, message.base_length, message.tail.tolist())
        jobs.append(Job(entry, message))

    def _close(self, key: tuple[Peer, int], opened: list[Entry], jobs: list[Job]) -> None:
        entry = self._table.remove(key)
        if entry is None:
            return
        self._engine.close(entry)
        opened[:] = [other for other in opened if other is not entry]
        jobs[:] = [job for job in jobs if job.entry is not entry]

    def _run_batch(self, opened: list[Entry], jobs: list[Job]) -> None:
        self._passes += 1
        try:
            replies = self._engine.run(opened, jobs)
        except Exception as error:  # an engine's own checks come before: this is a fault; the process lives on
            logger.exception("a batch failed")
            self._fail_batch(opened, jobs, error)
            return
        for entry in opened:
            self._endpoint.send(entry.key[0], Opened(entry.request_id, entry.opened.epoch, len(entry.tokens)))
        for job, reply in zip(jobs, replies, strict=True):
            self._endpoint.send(job.entry.key[0], reply)

    def _fail_batch(self, opened: list[Entry], jobs: list[Job], error: Exception) -> None:
        """Close every request of a batch that raised: their rows are in an unknown state."""
        cause = ProtocolError("internal", f"the pass failed: {type(error).__name__}: {error}")
        answers = [(entry, failure(entry.opened, cause)) for entry in opened]
        answers += [(job.entry, failure(job.message, cause)) for job in jobs]
        for entry, answer in answers:
            if self._table.remove(entry.key) is None:
                continue  # opened and worked on in this very batch: it's answered already
            try:
                self._engine.close(entry)
            except Exception:
                logger.exception("closing request %d failed", entry.request_id)
            self._endpoint.send(entry.key[0], answer)


def failure(message: Message, error: ProtocolError) -> Failure:
    """The answer to `message` that says what was wrong with it."""
    return Failure(
        request_id=getattr(message, "request_id", -1),
        epoch=getattr(message, "epoch", 0),
        block_id=getattr(message, "block_id", -1),
        code=error.code,
        text=error.text,
    )
