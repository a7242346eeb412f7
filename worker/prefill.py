"""Prompts on their way into rows: first come, first served, in pieces, so that a long one stalls nobody's pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from protocol.messages import Message, Opened
from worker.table import Entry

PASS_TOKENS = 1024  # tokens of one pass
BESIDE_WORK = 128  # prefilled tokens of a pass that others wait for
ALONE = 512  # and of one that nobody waits for: whoever comes meanwhile waits for its end


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a request's prompt; after the last of them, `logits` next-token distributions."""

    entry: Entry
    start: int
    stop: int
    logits: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.entry.tokens[self.start : self.stop]


class PrefillQueue:
    """Requests that were opened and are owed an `Opened`. All but the last token goes in: work feeds that one.

    `checked`: logits at the end of a prompt tell whether other rows may rely on it.
    """

    def __init__(self, *, checked: bool) -> None:
        self._checked = checked
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)

    def drop(self, entry: Entry) -> None:
        self._entries = [other for other in self._entries if other is not entry]

    def take(self, budget: int) -> list[Piece]:
        """The next pieces, `budget` tokens at most (an empty piece for a prompt of one token)."""
        pieces = []
        for entry in self._entries:
            start, wanted = len(entry.cached), len(entry.tokens) - 1
            if start < wanted and budget <= 0:
                break
            stop = min(wanted, start + max(0, budget))
            pieces.append(Piece(entry, start, stop, int(self._checked and start < stop == wanted)))
            budget -= stop - start
        return pieces

    def fed(self, pieces: list[Piece], logits: Sequence[Tensor]) -> list[tuple[Entry, Message]]:
        """Note what the pass has fed; the replies to those that are complete.

        `logits` [piece.logits, V] are those of the pieces that have tokens.
        """
        replies: list[tuple[Entry, Message]] = []
        given = iter(logits)
        for piece in pieces:
            entry = piece.entry
            entry.cached = entry.tokens[: piece.stop]
            end = next(given) if piece.tokens else None
            if end is not None and len(end) and bool(end.amax().isfinite()):  # amax carries NaN
                entry.holds(entry.cached)
            if piece.stop == len(entry.tokens) - 1:
                self.drop(entry)
                replies.append((entry, Opened(entry.request_id, entry.opened.epoch, len(entry.tokens))))
        return replies
