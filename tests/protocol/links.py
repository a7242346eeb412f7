"""What the tests of a link share: a connected link, verdicts, a worker that holds its answers back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from protocol.endpoint import Endpoint, Peer
from protocol.link import Link
from protocol.messages import (
    Close,
    Message,
    Verdict,
    Verify,
)
from tests.protocol.support import (
    PATIENCE,
    ThreadedWorker,
    answer,
    welcome,
)

Context = zmq.Context[zmq.Socket[bytes]]
StartWorker = Callable[..., ThreadedWorker]


@asynccontextmanager
async def linked(address: str, context: Context | None, role: str = "target") -> AsyncIterator[Link]:
    async with Link(address, name=f"{role} worker", context=context) as link:
        await link.connect(role, PATIENCE)
        yield link


def verdict(message: Verify, **changes: object) -> Verdict:
    fields: dict[str, object] = {"accepted": len(message.tokens), "token": 7, "origin": "bonus", "base_length": 3}
    fields |= changes
    return Verdict(
        request_id=message.request_id,
        epoch=message.epoch,
        block_id=message.block_id,
        seconds=0.5,
        rows=1,
        positions=5,
        **fields,
    )  # type: ignore[arg-type]


class Held:
    """A worker that keeps its Verify messages until release() is called from its own thread by a Close."""

    def __init__(self, order: Callable[[list[Message]], list[Message]] = list) -> None:
        self.kept: list[Message] = []
        self.order = order

    def __call__(self, endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        if isinstance(message, Verify):
            self.kept.append(message)
        if isinstance(message, Close):
            for each in self.order(self.kept):
                reply = answer(each, welcome())
                assert reply is not None
                endpoint.send(peer, reply)
            self.kept.clear()
        return isinstance(message, (Verify, Close))
