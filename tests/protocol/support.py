"""What several tests of the wire share: example messages, free ports, a worker in a thread."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from protocol.codecs import NO_Q
from protocol.endpoint import Endpoint, Peer
from protocol.limits import PROTOCOL_VERSION
from protocol.messages import (
    Block,
    Branch,
    Branches,
    Close,
    GetTokenizer,
    Hello,
    Message,
    Open,
    Opened,
    Propose,
    Sampling,
    TokenizerReply,
    Verdict,
    Verify,
    Welcome,
    token_array,
)

PATIENCE = 10.0  # seconds that a test waits for what must happen before it fails


def welcome(role: str = "target", **changes: object) -> Welcome:
    fields: dict[str, object] = {
        "protocol_version": PROTOCOL_VERSION,
        "role": role,
        "instance": "a1b2",
        "pid": 4242,
        "package_version": "0.1.0",
        "model": "toy",
        "source": "model",
        "vocab_size": 100,
        "vocabulary": "ab" * 32,
        "context_length": 128,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "verify_modes": ("rejection", "coupled"),
        "codecs": ("none", "counts", "dense"),
        "eos_ids": (0,),
    }
    return Welcome(**(fields | changes))  # type: ignore[arg-type]


def open_request(request_id: int = 1, tokens: int = 3) -> Open:
    return Open(request_id, 0, 7, "coupled", "none", Sampling(), 100, token_array(range(1, tokens + 1)))


def propose(request_id: int = 1, block_id: int = 0, gamma: int = 4) -> Propose:
    return Propose(request_id, 0, 3, block_id, gamma, gamma, token_array([]))


def branch(
    request_id: int = 1, block_id: int = 0, gamma: int = 4, tokens: tuple[int, ...] = (11, 12, 13, 14)
) -> Branch:
    return Branch(
        request_id, 0, 3, block_id, gamma, gamma, 0.0, 8, 0.75, 100, (0,), token_array([]), token_array(tokens)
    )


def branches(message: Branch, **changes: object) -> Branches:
    """One branch of the most tokens behind the whole block, one of a single token behind a refusal."""
    fields: dict[str, object] = {
        "base_length": message.base_length,
        "accepted": [len(message.tokens), 0],
        "next": [21, 22],
        "lengths": [message.gamma, 1],
    }
    fields |= changes
    arrays = {name: token_array(fields.pop(name)) for name in ("accepted", "next", "lengths")}  # type: ignore[arg-type]
    return Branches(
        request_id=message.request_id,
        epoch=message.epoch,
        block_id=message.block_id,
        seconds=0.25,
        rows=2,
        steps=message.gamma,
        **arrays,
        tokens=token_array(range(int(arrays["lengths"].sum()))),
        q=NO_Q,
        **fields,
    )  # type: ignore[arg-type]


def verify(request_id: int = 1, block_id: int = 0, tokens: tuple[int, ...] = (11, 12, 13, 14)) -> Verify:
    return Verify(request_id, 0, 3, block_id, token_array([]), token_array(tokens), NO_Q)


def answer(message: Message, me: Welcome) -> Message | None:
    """What a worker that agrees with everything says."""
    if isinstance(message, Hello):
        return me
    if isinstance(message, GetTokenizer):
        return TokenizerReply(b'{"model": {}}', "{{ messages }}")
    if isinstance(message, Open):
        return Opened(message.request_id, message.epoch, len(message.tokens))
    if isinstance(message, Propose):
        tokens = token_array(range(message.gamma))
        ids = (message.request_id, message.epoch, message.base_length, message.block_id)
        return Block(*ids, 0.25, 1, message.gamma, tokens, NO_Q)
    if isinstance(message, Branch):
        return branches(message)
    if isinstance(message, Verify):
        kept = len(message.tokens)
        return Verdict(
            message.request_id, message.epoch, message.base_length, message.block_id, kept, 7, "bonus", 0.5, 1, 5
        )
    return None


Behaviour = Callable[[Endpoint, Peer, Message], bool]


@dataclass
class ThreadedWorker:
    """A worker's loop in a thread; `behave` may answer a message in its own way (True) before `answer` does."""

    address: str
    context: zmq.Context[zmq.Socket[bytes]]
    role: str = "target"
    behave: Behaviour = lambda endpoint, peer, message: False
    me: Welcome | None = None
    received: list[Message] = field(default_factory=list)
    aborted: list[tuple[Peer, int]] = field(default_factory=list)
    closed_seen: threading.Event = field(default_factory=threading.Event)
    abort_seen: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.endpoint = Endpoint(self.address, context=self.context)
        self._thread = threading.Thread(target=self._serve, name="test-worker")
        self._thread.start()

    def stop(self) -> None:
        self.endpoint.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the worker's thread did not end"

    def _serve(self) -> None:
        with self.endpoint as endpoint:
            endpoint.status.update(state="ready")
            while not endpoint.stopping.is_set():
                for peer, message in endpoint.receive(PATIENCE):
                    self.received.append(message)
                    if isinstance(message, Close):
                        self.closed_seen.set()
                    if self.behave(endpoint, peer, message):
                        continue
                    reply = answer(message, self.me or welcome(self.role))
                    if reply is not None:
                        endpoint.send(peer, reply)
                self.aborted += endpoint.take_aborts()
                if self.aborted:
                    self.abort_seen.set()


def free_port() -> int:
    """A port that is free together with the next one, out of this test process's own: another may look at once.

    All are below those that systems give out by themselves.
    """
    first = 10_000 + 2_000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 10)
    for _ in range(100):
        port = random.SystemRandom().randrange(first, first + 2_000, 2)  # not as a property test seeds it
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no two free ports in a row")


@contextlib.contextmanager
def tcp_server(port: int, handle: Callable[[socket.socket], None]) -> Iterator[None]:
    """Accepts connections on a port and hands each to `handle`, in a thread, until the block ends."""
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(0.1)
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(0.5)
                handle(connection)

    thread = threading.Thread(target=serve, name="test-server")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE)
        listener.close()
