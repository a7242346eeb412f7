"""Whether a pass waits a moment for requests that should be back: a pass without them costs them the length of one.

No clock of its own, no torch: the loop tells what happened when.
"""

from __future__ import annotations

from worker.table import Key

SHARE, SECONDS = 0.1, 0.004  # of a pass, and at most: the longest wait
LAST = 8.0  # how many requests the estimate of the chance remembers


class Returning:
    """Requests that are expected any moment, and how many of such came in time lately."""

    def __init__(self) -> None:
        self._missing: set[Key] = set()
        self._longest = 0.0  # seconds that a pass waits for them
        self._until = 0.0  # who comes later came too late
        self._chance = 1.0

    def expect(self, keys: set[Key], now: float, pass_seconds: float) -> None:
        """These should be back; those that were expected before and are still missing came too late."""
        for _ in self._missing:
            self._learn(in_time=False)
        self._missing = set(keys)
        self._longest = min(SECONDS, SHARE * pass_seconds)
        self._until = now + self._longest

    def back(self, key: Key, now: float) -> None:
        """A request has sent its next block."""
        if key in self._missing:
            self._missing.remove(key)
            self._learn(in_time=now <= self._until)

    def gone(self, key: Key) -> None:
        """A request has ended: it was never late."""
        self._missing.discard(key)

    def wait(self, now: float, pass_seconds: float, ready: int) -> float:
        """Seconds that a pass of `ready` requests had better wait; 0 where that costs them more than others gain."""
        left = self._until - now
        gain = self._chance * len(self._missing) * pass_seconds
        return left if left > 0 and gain > ready * self._longest else 0.0

    def _learn(self, *, in_time: bool) -> None:
        self._chance += (in_time - self._chance) / LAST
