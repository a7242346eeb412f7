"""One row of the draft while its block grows: what to feed, what was drawn, and the q̃ that it was drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from draft_worker.quantize import Row
from worker.table import Entry


def mode_of(entry: Entry) -> str:
    """How a request's tokens are drawn: greedy, coupled, or by the codec that its q̃ travels in."""
    if entry.opened.sampling.temperature == 0:
        return "greedy"
    return "coupled" if entry.opened.verify == "coupled" else entry.opened.codec


@dataclass
class Drafting:
    """A block of up to γ tokens, the first at position `base`, on one row of the executor."""

    entry: Entry
    row: int
    base: int
    gamma: int
    feed: list[int]  # what the next step feeds
    tokens: list[int] = field(default_factory=list)
    q: list[Row] = field(default_factory=list)  # q̃ so far; empty where nothing but tokens travels
    scores: list[Tensor] = field(default_factory=list)  # [V] each: what is known of the token at base, base + 1, ...
    broken: bool = False  # its logits were NaN

    @property
    def position(self) -> int:
        """Of the next token."""
        return self.base + len(self.tokens)

    @property
    def wants_more(self) -> bool:
        return len(self.tokens) < self.gamma and not self.broken

    @property
    def held(self) -> int:
        """Tokens that the row holds: each row of scores came of the token before it."""
        return self.base - 1 + len(self.scores)

    def take(self, token: int, q: Row) -> None:
        """Append a token and the q̃ that it was drawn from (() where none travels)."""
        self.tokens.append(token)
        self.feed = [token]
        if q:
            self.q.append(q)
