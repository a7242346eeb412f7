"""The orchestrator's end of a link to one worker: asyncio; requests and their replies, liveness, counts.

A link lives once: after connect() it ends by close() or when the worker goes away. A worker that comes back gets a new
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import itertools
import logging
import os
import time
from dataclasses import dataclass
from typing import Any, overload

import zmq

from . import addresses, framing
from .channel import Channel, Connection
from .errors import FailureCode, HandshakeError, LinkError, LinkLost, LinkTimeout, ProtocolError, WorkerFailure
from .fields import Frame
from .handshake import check_welcome
from .limits import PROTOCOL_VERSION
from .matching import Key, Reply, check_reply, concerns, reply_key, request_key
from .messages import (
    CONTROL_TO_ORCHESTRATOR,
    CONTROL_TO_WORKER,
    DATA_TO_ORCHESTRATOR,
    Abort,
    Block,
    Branch,
    Branches,
    Failure,
    GetTokenizer,
    Goodbye,
    Hello,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    Propose,
    Shutdown,
    TokenizerReply,
    Verdict,
    Verify,
    Welcome,
)
from .sockets import LINGER_MS, plain_context

__all__ = ["Link", "LinkError", "LinkLost", "LinkTimeout", "Reply", "WorkerFailure"]

log = logging.getLogger(__name__)
LOADING_RETRY_SECONDS = 0.1


@dataclass(slots=True)
class _Waiting:
    request: Message
    future: asyncio.Future[Reply[Any]]
    bytes_sent: int
    started: float


class Link:
    """A link to the worker at address; errors call it name ("draft worker"). Bound to the loop that connects it."""

    def __init__(self, address: str, *, name: str, context: zmq.Context[Any] | None = None) -> None:
        self.address = addresses.parse(address)
        self.name = name
        self.welcome: Welcome | None = None
        self.lost = asyncio.Event()  # set when the worker went away; lost_reason says how
        self.lost_reason = ""
        self.bytes_sent = self.bytes_received = 0  # data link, all frames
        self.messages = 0  # received on both links
        self.dropped = 0  # received, and matching nothing that waits
        self.malformed = 0  # received, and no message
        self._context = context
        self._owned: zmq.Context[Any] | None = None
        self._data: Channel | None = None
        self._control: Channel | None = None
        self._waiting: dict[Key, _Waiting] = {}
        self._nonces = itertools.count(1)
        self._seen: set[Connection] = set()
        self._worker_state = ""
        self._closed = False

    async def connect(self, role: str, timeout: float) -> Welcome:
        """Wait for the worker, shake hands, and check its protocol version and role.

        Raises HandshakeError (another version or role, or no worker of ours), LinkTimeout (nobody there, or still
        loading), LinkLost (it went away meanwhile), each with one clear line; the link is closed then.
        """
        if self._data is not None or self._closed:
            raise LinkLost(f"{self}: a link connects once; make a new one")
        try:
            self._open()
            welcome = await self._shake_hands(time.monotonic() + timeout, timeout)
            check_welcome(welcome, role, str(self.address))
        except BaseException:
            await self.close()
            raise
        self.welcome = welcome
        return welcome

    @overload
    async def request(self, message: Hello, timeout: float | None) -> Reply[Welcome]: ...
    @overload
    async def request(self, message: GetTokenizer, timeout: float | None) -> Reply[TokenizerReply]: ...
    @overload
    async def request(self, message: Open, timeout: float | None) -> Reply[Opened]: ...
    @overload
    async def request(self, message: Propose, timeout: float | None) -> Reply[Block]: ...
    @overload
    async def request(self, message: Branch, timeout: float | None) -> Reply[Branches]: ...
    @overload
    async def request(self, message: Verify, timeout: float | None) -> Reply[Verdict]: ...
    @overload
    async def request(self, message: Ping, timeout: float | None) -> Reply[Pong]: ...
    @overload
    async def request(self, message: Shutdown, timeout: float | None) -> Reply[Goodbye]: ...

    async def request(self, message: Message, timeout: float | None) -> Reply[Any]:
        """Send and wait for the matching reply. Cancelling it is safe: a late reply is dropped and counted.

        Raises WorkerFailure, LinkTimeout, LinkLost; ProtocolError for a reply that cannot be true; ValueError where the
        same request waits already.
        """
        key = request_key(message)
        if key in self._waiting:
            raise ValueError(f"{self}: the same {type(message).__name__} waits for its reply already")
        loop = asyncio.get_running_loop()
        frames = framing.encode(message)
        waiting = _Waiting(message, loop.create_future(), framing.frames_size(frames), time.perf_counter())
        self._waiting[key] = waiting
        timer = None if timeout is None else loop.call_later(timeout, self._time_out, waiting, timeout)
        try:
            self._send(message, frames)
            return await waiting.future
        finally:
            del self._waiting[key]
            if timer is not None:
                timer.cancel()
            if waiting.future.done() and not waiting.future.cancelled():
                waiting.future.exception()  # seen, also where the caller was cancelled in the same moment

    def post(self, message: Message) -> None:
        """Send a message that has no reply (Close). Raises LinkLost."""
        self._send(message, framing.encode(message))

    async def ping(self, timeout: float) -> tuple[Pong, float]:
        """The worker's status and the round trip in seconds; answered while it computes."""
        reply = await self.request(Ping(next(self._nonces)), timeout)
        return reply.message, reply.round_trip_seconds

    async def abort(self, request_id: int) -> None:
        """Tell the worker to stop work on a request; nothing is answered."""
        self.post(Abort(request_id))

    async def shutdown(self, timeout: float) -> None:
        """Ask the worker to end; returns when it said goodbye or is gone. Raises LinkTimeout."""
        with contextlib.suppress(LinkLost):
            await self.request(Shutdown(), timeout)

    async def close(self) -> None:
        """Fail what waits, let what was posted go out, free everything."""
        if self._closed:
            return
        self._closed = True
        self._fail_all(LinkLost(f"{self}: the link was closed"))
        self._close_channels(0 if self.lost.is_set() else LINGER_MS)
        if self._owned is not None:
            self._owned.term()

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"

    # ------------------------------------------------------------ connecting

    def _open(self) -> None:
        context, owned = plain_context(self._context)
        self._owned = context if owned else None
        identity = b"o" + os.urandom(15)  # one for both sockets: the worker knows whose abort it is
        self._data = Channel(context, self.address.data, identity, self._on_data, self._on_event)
        self._control = Channel(context, self.address.control, identity, self._on_control)

    async def _shake_hands(self, deadline: float, timeout: float) -> Welcome:
        assert self._control is not None
        self._control.send(framing.encode(Ping(0)))  # its Pong tells a loading worker from a silent one
        hello = Hello(PROTOCOL_VERSION, "orchestrator", _package_version())
        while True:
            try:
                return (await self.request(hello, max(0.0, deadline - time.monotonic()))).message
            except LinkTimeout:
                raise self._no_answer(timeout) from None
            except WorkerFailure as failure:
                if failure.code != FailureCode.LOADING:
                    raise HandshakeError(failure.code, f"{self} refuses the handshake: {failure.text}") from None
                self._worker_state = "loading"
                if time.monotonic() + LOADING_RETRY_SECONDS >= deadline:
                    raise self._no_answer(timeout) from None
                await asyncio.sleep(LOADING_RETRY_SECONDS)

    def _no_answer(self, timeout: float) -> LinkError | HandshakeError:
        waited = f"within {timeout:g} s"
        if self._worker_state == "loading":
            return LinkTimeout(f"{self} is still loading its model after {timeout:g} s: wait longer or look at its log")
        if self._worker_state or Connection.ESTABLISHED in self._seen:
            return LinkTimeout(f"{self} is there but did not answer {waited}: it may be busy or hang; look at its log")
        if Connection.CONNECTED in self._seen:
            return HandshakeError(
                FailureCode.BAD_FRAME,
                f"what listens at {self.address} is no worker of ours, it did not speak ZMTP {waited}: check it",
            )
        return LinkTimeout(f"{self}: nobody listens there, waited {timeout:g} s; start the worker or check the address")

    # ------------------------------------------------------------ from the channels

    def _on_event(self, event: Connection) -> None:
        established = Connection.ESTABLISHED in self._seen
        self._seen.add(event)
        if event is Connection.DISCONNECTED and established and self._data is not None:
            self._data.drain_all()  # what it said before it went
            self._lose(
                f"{self} went away"
                if self.welcome is not None
                else f"{self} hung up during the handshake: it ended while loading, or it is no worker of ours"
            )

    def _on_data(self, frames: list[bytes]) -> None:
        if frames == [b""]:
            return  # a probe
        size = framing.frames_size(frames)
        self.bytes_received += size
        message = self._decoded(frames, DATA_TO_ORCHESTRATOR)
        if isinstance(message, Goodbye):
            self._lose(f"{self} ended")
        elif message is not None:
            self._deliver(message, size)

    def _on_control(self, frames: list[bytes]) -> None:
        message = self._decoded(frames, CONTROL_TO_ORCHESTRATOR)
        if isinstance(message, Pong):
            self._worker_state = message.state
            if message.nonce == 0:
                return  # of the handshake: nobody waits for it
        if message is not None:
            self._deliver(message, framing.frames_size(frames))

    def _decoded(self, frames: list[bytes], allowed: tuple[type[Message], ...]) -> Message | None:
        self.messages += 1
        try:
            message = framing.decode(frames)
            if not isinstance(message, allowed):
                raise ProtocolError(FailureCode.BAD_FRAME, f"{type(message).__name__} does not belong on this link")
            return message
        except ProtocolError as error:
            self.malformed += 1
            failed = self._answer(error, error.request_id, error.epoch, error.block_id)
            log.warning("%s sent what is no message of ours (%d requests fail): %s", self, failed, error.text)
            return None

    def _deliver(self, message: Message, size: int) -> None:
        if isinstance(message, Failure):
            failure = WorkerFailure(message.code, message.text)
            if not self._answer(failure, message.request_id, message.epoch, message.block_id):
                self.dropped += 1
                log.info("%s: a failure that nobody waits for: %s", self, failure)
            return
        waiting = self._waiting.get(reply_key(message))
        if waiting is None or waiting.future.done():
            self.dropped += 1
            return
        try:
            check_reply(waiting.request, message)
        except ProtocolError as error:
            waiting.future.set_exception(error)
            return
        waiting.future.set_result(Reply(message, waiting.bytes_sent, size, time.perf_counter() - waiting.started))

    # ------------------------------------------------------------ endings

    def _answer(self, error: ProtocolError | LinkError, request_id: int, epoch: int, block_id: int) -> int:
        """Fail what waits and is concerned; returns how many. During the handshake an unreadable peer is not ours."""
        if isinstance(error, ProtocolError) and self.welcome is None:
            error = HandshakeError(error.code, f"what answers at {self.address} is no worker of ours: {error.text}")
        concerned = [w for key, w in self._waiting.items() if concerns(key, request_id, epoch, block_id)]
        for waiting in concerned:
            if not waiting.future.done():
                waiting.future.set_exception(error)
        return len(concerned)

    def _time_out(self, waiting: _Waiting, timeout: float) -> None:
        if not waiting.future.done():
            text = f"{self} did not answer {type(waiting.request).__name__} within {timeout:g} s"
            waiting.future.set_exception(LinkTimeout(text))

    def _lose(self, reason: str) -> None:
        if self.lost.is_set() or self._closed:
            return
        self.lost_reason = reason
        self.lost.set()
        self._fail_all(LinkLost(reason))
        self._close_channels(0)  # at once: zmq would connect again by itself, and a new worker knows nothing of us

    def _fail_all(self, error: LinkLost) -> None:
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(error)

    def _close_channels(self, linger_ms: int) -> None:
        for channel in (self._data, self._control):
            if channel is not None:
                channel.close(linger_ms)

    def _send(self, message: Message, frames: list[Frame]) -> None:
        if self.lost.is_set():
            raise LinkLost(self.lost_reason)
        if self._data is None or self._control is None or self._closed:
            raise LinkLost(f"{self}: the link is {'closed' if self._closed else 'not connected yet'}")
        to_control = isinstance(message, CONTROL_TO_WORKER)
        try:
            (self._control if to_control else self._data).send(frames)
        except LinkLost as error:
            raise LinkLost(f"{self}: {error}") from None
        if not to_control:
            self.bytes_sent += framing.frames_size(frames)


def _package_version() -> str:
    try:
        return importlib.metadata.version("specdec-orchestrator")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
