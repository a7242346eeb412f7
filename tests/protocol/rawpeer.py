"""An orchestrator that can say anything: plain sockets against an endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import zmq

from protocol.endpoint import Endpoint
from protocol.framing import decode, encode
from protocol.limits import PROTOCOL_VERSION
from protocol.messages import Hello, Message
from tests.protocol.support import PATIENCE

Context = zmq.Context[zmq.Socket[bytes]]
HELLO = Hello(PROTOCOL_VERSION, "orchestrator", "test")
M = TypeVar("M", bound=Message)


class RawPeer:
    """A plain DEALER on each socket, which can say anything."""

    def __init__(self, context: Context, address: str, identity: bytes = b"peer") -> None:
        self.data, self.control = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        control = address + ".control"
        if address.startswith("tcp"):
            control = f"tcp://127.0.0.1:{int(address.rpartition(':')[2]) + 1}"
        for each, url in ((self.data, address), (self.control, control)):
            each.setsockopt(zmq.LINGER, 0)
            each.setsockopt(zmq.ROUTING_ID, identity)
            each.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
            each.connect(url)

    def say(self, message: Message) -> None:
        self.data.send_multipart(encode(message))

    def hear(self, kind: type[M], link: zmq.Socket[bytes] | None = None) -> M:
        message = decode((link or self.data).recv_multipart())
        assert isinstance(message, kind), message
        return message

    def close(self) -> None:
        self.data.close()
        self.control.close()


def receive(endpoint: Endpoint, count: int = 1) -> list[Message]:
    """The next messages, waiting for them."""
    got: list[Message] = []
    deadline = time.monotonic() + PATIENCE
    while len(got) < count:
        assert time.monotonic() < deadline, f"only {got} arrived"
        got += [message for _, message in endpoint.receive(deadline - time.monotonic())]
    return got


def until(condition: Callable[[], object], failing: str) -> None:
    """Wait for what happens in zmq's own threads and has no event."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, failing
        time.sleep(0.002)  # between looks, not instead of one
