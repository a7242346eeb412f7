"""Socket options and frame reading shared by both ends of a link."""

from __future__ import annotations

from typing import Any, Final

import zmq

from .limits import MAX_ARRAY_BYTES, MAX_FRAMES

HEARTBEAT_INTERVAL_MS: Final = 1_000
HEARTBEAT_TIMEOUT_MS: Final = 5_000
HANDSHAKE_MS: Final = 5_000
LINGER_MS: Final = 100
HIGH_WATER_MARK: Final = 10_000  # messages queued in each direction

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def configure(socket: Socket, *, ipv6: bool = False) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_ARRAY_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, int(ipv6))


def receive_frames(socket: Socket, extra: int = 0) -> list[bytes] | None:
    """One message without waiting, or None. Frames past the limit (+ extra for identities) are read and left out, so
    that one message cannot fill memory with frames; the one that is kept too many makes decode refuse it."""
    try:
        frames = [socket.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while socket.getsockopt(zmq.RCVMORE):
        frame = socket.recv()
        if len(frames) <= MAX_FRAMES + extra:
            frames.append(frame)
    return frames


def close_bound(socket: Socket) -> None:
    """Close a bound socket. An inproc name is free at once, where close alone leaves that to a thread of zmq."""
    url = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if url.startswith("inproc://"):
        socket.unbind(url)
    socket.close()


def plain_context(context: zmq.Context[Any] | None) -> tuple[Context, bool]:
    """A context of plain sockets over the given one (also a zmq.asyncio one), and whether it is ours to end."""
    if context is None:
        return zmq.Context(), True
    return zmq.Context.shadow(context.underlying), False
