"""A link to a worker as over a network: its messages take half a round trip each way, and the time of their bytes.

For `bench --synthetic`. It slows what work travels on (the data link); control messages pass as they are.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from protocol import framing
from protocol.errors import LinkLost
from protocol.fields import Frame
from protocol.link import Link
from protocol.messages import CONTROL_TO_WORKER, Message

COARSE_SECONDS = 0.001  # epoll rounds a wait up to whole milliseconds: the last one is spent looking at the clock


@dataclass(frozen=True)
class LinkShape:
    """What is emulated: seconds there and back, bytes a second in each direction."""

    round_trip: float = 0.0
    bytes_per_second: float = math.inf

    def link(self, address: str, *, name: str) -> Link:
        """A link of this shape; a `LinkFactory`."""
        return EmulatedLink(address, name=name, shape=self)


class Wire:
    """One direction: messages leave one after the other at the wire's rate, and arrive in order, `delay` later."""

    def __init__(self, delay: float, bytes_per_second: float) -> None:
        self._delay = delay
        self._bytes_per_second = bytes_per_second
        self._free = -math.inf  # when the last byte of the last message has left
        self._under_way: deque[tuple[float, Callable[[], None]]] = deque()  # (due, deliver)
        self._timer: asyncio.Handle | None = None

    def carry(self, size: int, deliver: Callable[[], None]) -> None:
        """Call `deliver` when a message of `size` bytes that is sent now has arrived."""
        now = asyncio.get_running_loop().time()
        self._free = max(now, self._free) + size / self._bytes_per_second
        self._under_way.append((self._free + self._delay, deliver))
        self._wait()

    def cut(self) -> None:
        """What is under way never arrives."""
        self._under_way.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        if self._timer is not None or not self._under_way:
            return
        loop = asyncio.get_running_loop()
        left = self._under_way[0][0] - loop.time() - COARSE_SECONDS
        self._timer = loop.call_later(left, self._arrive) if left > 0 else loop.call_soon(self._arrive)

    def _arrive(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._under_way and self._under_way[0][0] <= loop.time():
            self._under_way.popleft()[1]()
        self._wait()


class EmulatedLink(Link):
    """A Link whose data messages travel over two wires, one each way."""

    def __init__(self, address: str, *, name: str, shape: LinkShape) -> None:
        super().__init__(address, name=name)
        self._out = Wire(shape.round_trip / 2, shape.bytes_per_second)
        self._back = Wire(shape.round_trip / 2, shape.bytes_per_second)

    async def close(self) -> None:
        self._out.cut()
        self._back.cut()
        await super().close()

    def _send(self, message: Message, frames: list[Frame]) -> None:
        if isinstance(message, CONTROL_TO_WORKER) or self.lost.is_set() or self._closed or self._data is None:
            super()._send(message, frames)  # at once, or LinkLost
            return
        self._out.carry(framing.frames_size(frames), functools.partial(self._send_late, message, frames))

    def _send_late(self, message: Message, frames: list[Frame]) -> None:
        try:
            super()._send(message, frames)
        except LinkLost as error:  # nobody waits here to be told: those who wait for a reply are
            self._lose(str(error))

    def _on_data(self, frames: list[bytes]) -> None:
        self._back.carry(framing.frames_size(frames), functools.partial(super()._on_data, frames))
