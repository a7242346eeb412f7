"""The worker's end of its links: a ROUTER data socket read by the worker's loop, a control socket in its own thread.

Synchronous. Everything but stop() and status belongs to the thread that made the endpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import stat
import threading
import time
from types import TracebackType
from typing import Any, Final

import zmq

from . import framing
from .addresses import Address, parse_listen
from .control import ControlThread, Peer, Waker, WorkerStatus
from .errors import AddressError, AddressInUse, FailureCode, ProtocolError
from .messages import DATA_TO_WORKER, Failure, Goodbye, Message
from .sockets import Context, Socket, close_bound, configure, plain_context, receive_frames

__all__ = ["Endpoint", "Peer", "WorkerStatus"]

MAX_DRAIN: Final = 4_096  # messages that one receive returns at most: a flood must not keep the worker from its work
PROBE_SECONDS: Final = 1.0


class Endpoint:
    """Listens at an address for orchestrators.

    `status` feeds the Pong; `stopping` is set by a Shutdown message or by stop(). context is used for inproc, where
    both ends must share it. Raises AddressError, AddressInUse.
    """

    def __init__(self, listen: str, *, insecure: bool = False, context: zmq.Context[Any] | None = None) -> None:
        address = parse_listen(listen, insecure=insecure)
        self.address = str(address)
        self.status = WorkerStatus()
        self.stopping = threading.Event()
        self.malformed = 0  # messages refused
        self.dropped = 0  # messages that could not be sent
        self._peers: set[bytes] = set()  # seen alive
        self._departed: list[Peer] = []
        self._probed = time.monotonic()
        self._closed = False
        # Only inproc needs to share one; with its own to end, the address is free when close() returns.
        self._context, self._owned = plain_context(context if address.scheme == "inproc" else None)
        self._files = IpcFiles()
        bound: list[Socket] = []
        try:
            self._data = _bind(self._context, address, address.data, bound, self._files)
            control = _bind(self._context, address, address.control, bound, self._files)
        except BaseException:
            self._files.remove()
            for each in bound:
                each.close(0)
            if self._owned:
                self._context.term()
            raise
        self._data.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a vanished peer is an error here, which send() tells
        self._waker = Waker()
        self._control = ControlThread(control, self.status, self.stop, self._waker.wake)
        self._control.start()
        self._poller = zmq.Poller()
        self._poller.register(self._data, zmq.POLLIN)
        self._poller.register(self._waker.reader, zmq.POLLIN)

    def receive(self, timeout_seconds: float | None = None) -> list[tuple[Peer, Message]]:
        """All that waits, after waiting up to timeout_seconds (None: for ever) for the first.

        Returns early, maybe with nothing, at wake(), when an abort arrived, the endpoint is stopping, or what came was
        malformed (its sender has the answer already). Only messages meant for a worker are returned.
        """
        if timeout_seconds and timeout_seconds < 0:
            timeout_seconds = 0.0
        if self.stopping.is_set():
            timeout_seconds = 0.0
        self._poller.poll(None if timeout_seconds is None else math.ceil(timeout_seconds * 1000))
        self._waker.clear()
        received: list[tuple[Peer, Message]] = []
        for _ in range(MAX_DRAIN):
            frames = receive_frames(self._data, extra=1)
            if frames is None:
                break
            peer = Peer(frames[0])
            self._peers.add(peer.identity)
            message = self._accept(peer, frames[1:])
            if message is not None:
                received.append((peer, message))
        return received

    def send(self, peer: Peer, message: Message) -> bool:
        """Send without waiting; False where the peer is gone or reads too slowly, and the message is dropped.

        Raises ProtocolError for a message that is not valid.
        """
        sent = self._send(peer.identity, framing.encode(message))
        self.dropped += not sent
        return sent

    def take_aborts(self) -> list[tuple[Peer, int]]:
        """The (peer, request id) pairs that were aborted since the last call. Ids may be unknown: ignore those."""
        return self._control.take_aborts()

    def take_departed(self) -> list[Peer]:
        """The peers found gone since the last call; their requests can be freed. Looks at most once a second."""
        if time.monotonic() - self._probed >= PROBE_SECONDS:
            for identity in tuple(self._peers):
                self._send(identity, [b""])  # a probe: one empty frame, which a link ignores
            self._probed = time.monotonic()
        departed, self._departed = self._departed, []
        return departed

    def stop(self) -> None:
        """Set `stopping` and wake receive(). From any thread, and from a signal handler."""
        self.stopping.set()
        self._waker.wake()

    def wake(self) -> None:
        """Let a receive() that waits return. From any thread."""
        self._waker.wake()

    def close(self) -> None:
        """Say Goodbye to every peer and free everything: sockets, thread, ipc files."""
        if self._closed:
            return
        self._closed = True
        farewell = framing.encode(Goodbye())
        for identity in tuple(self._peers):
            self._send(identity, farewell)
        self._files.remove()
        self._control.stop()
        close_bound(self._data)
        self._waker.close()
        if self._owned:
            self._context.term()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self, peer: Peer, frames: list[bytes]) -> Message | None:
        try:
            message = framing.decode(frames)
            if isinstance(message, DATA_TO_WORKER):
                return message
            if isinstance(message, Failure):  # a failure is never answered by a failure
                self.malformed += 1
                return None
            raise ProtocolError(FailureCode.BAD_FRAME, f"{type(message).__name__} does not belong on the data link")
        except ProtocolError as error:
            self.malformed += 1
            failure = Failure(error.request_id, error.epoch, error.block_id, error.code, error.text)
            self._send(peer.identity, framing.encode(failure))
            return None

    def _send(self, identity: bytes, frames: list[Any]) -> bool:
        try:
            self._data.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.Again:  # its queue is full
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if identity in self._peers:
                self._peers.discard(identity)
                self._departed.append(Peer(identity))
            return False
        return True


class IpcFiles:
    """The socket files of an endpoint. zmq makes them and leaves them."""

    def __init__(self) -> None:
        self._made: dict[str, int] = {}  # path -> inode

    def add(self, path: str) -> None:
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)  # no other user may connect
        self._made[path] = os.stat(path).st_ino

    def remove(self) -> None:
        """While the sockets are still bound, so that what is removed is ours and no successor's."""
        for path, inode in self._made.items():
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)


def _bind(context: Context, address: Address, url: str, bound: list[Socket], files: IpcFiles) -> Socket:
    router = context.socket(zmq.ROUTER)
    bound.append(router)
    configure(router, ipv6=":" in address.host)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # identities are 128 random bits: who comes back with one is its owner
    if address.scheme == "ipc":
        _check_ipc_path(url)
    try:
        router.bind(_resolved(address, url))
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise _in_use(url) from None
        raise AddressError(f"cannot listen on {url}: {error.strerror}; choose another --listen address") from None
    if address.scheme == "ipc":
        files.add(url.removeprefix("ipc://"))
    return router


def _check_ipc_path(url: str) -> None:
    """zmq would replace whatever is at the path, a live worker's socket and a file of the user included."""
    path = url.removeprefix("ipc://")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise AddressError(f"cannot listen on {url}: the folder does not exist; make it, or choose another --listen")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressError(f"cannot listen on {url}: a file that is no socket is there; choose another --listen path")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return  # left behind by a process that died
        except OSError:
            pass
    raise _in_use(url)


def _in_use(url: str) -> AddressInUse:
    return AddressInUse(f"cannot listen on {url}: the address is in use; stop what runs there or change --listen")


def _resolved(address: Address, url: str) -> str:
    """zmq binds to numbers and interfaces, not to host names."""
    if address.scheme != "tcp" or address.host == "*" or ":" in address.host:
        return url
    port = url.rpartition(":")[2]
    try:
        found = socket.getaddrinfo(address.host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"cannot listen on {url}: host {address.host!r} is unknown ({error.strerror})") from None
    return f"tcp://{found[0][4][0]}:{port}"
