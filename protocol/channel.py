"""One DEALER socket on an asyncio loop, and the events of its connection.

A plain socket with the loop watching its descriptor: half the cost of zmq.asyncio a message. The descriptor is edge
triggered and tells only that something changed, so whoever sends or receives looks at EVENTS afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from .errors import LinkLost
from .fields import Frame
from .sockets import Context, Socket, configure, receive_frames

RECONNECT_MS: Final = 50
_BATCH: Final = 64  # messages handled before other work of the loop gets its turn


class Connection(Enum):
    """What happened to the connection below a channel."""

    CONNECTED = auto()  # something accepted; it may be anything
    ESTABLISHED = auto()  # it speaks ZMTP
    REFUSED = auto()  # it does not
    DISCONNECTED = auto()


_EVENTS: Final = {
    zmq.EVENT_CONNECTED: Connection.CONNECTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Connection.ESTABLISHED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Connection.REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Connection.REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Connection.REFUSED,
    zmq.EVENT_DISCONNECTED: Connection.DISCONNECTED,
}


class Channel:
    """Frames in and out of one address. Made, used and closed on one running loop."""

    def __init__(
        self,
        context: Context,
        url: str,
        identity: bytes,
        on_frames: Callable[[list[bytes]], None],
        on_event: Callable[[Connection], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frames = on_frames
        self._on_event = on_event
        self._closed = False
        self._monitor: Socket | None = None
        self._socket: Socket = context.socket(zmq.DEALER)
        configure(self._socket, ipv6="[" in url)
        self._socket.setsockopt(zmq.ROUTING_ID, identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        if on_event is not None:
            self._monitor = self._socket.get_monitor_socket()
            self._watch(self._monitor, self._drain_events)
        self._socket.connect(url)
        self._watch(self._socket, self.drain)

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue a message without waiting. Raises LinkLost where there is nobody to queue it for."""
        if self._closed:
            raise LinkLost("the link is closed")
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            raise LinkLost("the worker is gone, or reads nothing any more: the send queue is full") from None
        if self._readable(self._socket):  # sending may have eaten the edge
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Hand over what has arrived, with a pause for other work of the loop after each batch."""
        if self._hand_over(_BATCH) == _BATCH:
            self._loop.call_soon(self.drain)

    def drain_all(self) -> None:
        """Hand over everything that has arrived: for a connection that has ended."""
        while self._hand_over(_BATCH) == _BATCH:
            pass

    def close(self, linger_ms: int) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close(linger_ms)

    def _hand_over(self, most: int) -> int:
        for handed in range(most):
            if self._closed or not self._readable(self._socket):
                return handed
            frames = receive_frames(self._socket)
            if frames is None:
                return handed
            self._on_frames(frames)
        return most

    def _drain_events(self) -> None:
        while not self._closed and self._monitor is not None and self._readable(self._monitor):
            event: dict[str, Any] = recv_monitor_message(self._monitor, zmq.NOBLOCK)  # type: ignore[assignment]
            known = _EVENTS.get(event["event"])
            if known is not None and self._on_event is not None:
                self._on_event(known)

    def _watch(self, watched: Socket, callback: Callable[[], None]) -> None:
        self._loop.add_reader(watched.fileno(), callback)
        self._loop.call_soon(callback)  # an edge before now is not shown again

    @staticmethod
    def _readable(watched: Socket) -> bool:
        return bool(int(watched.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
