"""The control socket of a worker, served by a thread of its own: it answers while the worker computes.

Blocking code; never waits for the worker. The worker reads what it left: aborts and the stop event.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from . import framing
from .errors import FailureCode, ProtocolError
from .messages import Abort, Failure, Goodbye, Message, Ping, Pong, Shutdown
from .sockets import Socket, close_bound, receive_frames

MAX_ABORTS: Final = 10_000  # kept for a worker that does not fetch them; the oldest go first


@dataclass(frozen=True, slots=True)
class Peer:
    """One orchestrator's connection; request ids are scoped by it. The same on the data and on the control socket."""

    identity: bytes

    def __str__(self) -> str:
        return self.identity.hex()[:8]


class WorkerStatus:
    """What a Pong tells. The worker updates it, the control thread reads it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._state, self._requests, self._passes = "loading", 0, 0

    def update(self, *, state: str | None = None, requests: int | None = None, passes: int | None = None) -> None:
        """Set what is given; state is loading or ready."""
        with self._lock:
            self._state = self._state if state is None else state
            self._requests = self._requests if requests is None else requests
            self._passes = self._passes if passes is None else passes

    def pong(self, nonce: int) -> Pong:
        with self._lock:
            state, requests, passes = self._state, self._requests, self._passes
        return Pong(nonce, state, requests, passes, time.monotonic() - self._started, resident_bytes())


class Waker:
    """Wakes a zmq poll from any thread or signal handler: a socket pair, since zmq sockets belong to one thread."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up waits already; closed: nobody polls
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.reader.recv(4096):
                pass

    def close(self) -> None:
        self.reader.close()
        self._writer.close()


class ControlThread:
    """Serves one bound ROUTER socket until stop(); owns it from start() on."""

    def __init__(
        self, router: Socket, status: WorkerStatus, on_shutdown: Callable[[], None], on_abort: Callable[[], None]
    ) -> None:
        self._router = router
        self._status = status
        self._on_shutdown = on_shutdown
        self._on_abort = on_abort
        self._aborts: list[tuple[Peer, int]] = []
        self._lock = threading.Lock()
        self._end = Waker()
        self._ended = False
        self._thread = threading.Thread(target=self._serve, name="specdec-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take_aborts(self) -> list[tuple[Peer, int]]:
        with self._lock:
            taken, self._aborts = self._aborts, []
        return taken

    def stop(self) -> None:
        """End the thread and close its socket; what was answered already still goes out."""
        self._ended = True
        self._end.wake()
        self._thread.join()
        self._end.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._end.reader, zmq.POLLIN)
        try:
            while not self._ended:
                poller.poll()
                while not self._ended and (frames := receive_frames(self._router, extra=1)) is not None:
                    self._answer(frames[0], frames[1:])
        finally:
            close_bound(self._router)

    def _answer(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            message = framing.decode(frames)
        except ProtocolError as error:
            self._send(identity, Failure(error.request_id, error.epoch, error.block_id, error.code, error.text))
            return
        if isinstance(message, Ping):
            self._send(identity, self._status.pong(message.nonce))
        elif isinstance(message, Abort):
            with self._lock:
                self._aborts.append((Peer(identity), message.request_id))
                del self._aborts[:-MAX_ABORTS]
            self._on_abort()
        elif isinstance(message, Shutdown):
            self._on_shutdown()
            self._send(identity, Goodbye())
        elif not isinstance(message, Failure):  # a failure is never answered by a failure
            text = f"{type(message).__name__} does not belong on the control link"
            self._send(identity, Failure(-1, 0, -1, FailureCode.BAD_FRAME, text))

    def _send(self, identity: bytes, message: Message) -> None:
        with contextlib.suppress(zmq.Again):
            self._router.send_multipart([identity, *framing.encode(message)], zmq.NOBLOCK)


def resident_bytes() -> int:
    """Resident memory of this process; where the system does not tell, its peak."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource  # here: POSIX only

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
