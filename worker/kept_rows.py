"""Rows of the executor by what they hold: a prompt that begins as another row does isn't run through the model again.

Knows tokens and rows; no messages, no torch. Keys and values depend on a row's tokens alone, so that a row may serve
any request whose prompt begins with them, whatever its options and whoever asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from execution.interface import Executor
from worker.table import Entry, Key, common_prefix

LEAST = 16  # tokens: fewer are fed again as quickly, and nearly all prompts of one template share as many
SPARE_ROWS = 32  # an engine of few rows keeps as many for requests to come, rather than ended ones or branches
ROW = 128  # tokens that a row counts as at least: thousands of short ones would be as many comparisons a prompt


@dataclass(frozen=True)
class Kept:
    """A row that no request owns, and the tokens that it holds."""

    row: int
    tokens: list[int]


class KeptRows:
    """Opens and closes the rows of an engine's requests; keeps some of the closed ones for prompts to come.

    A cache of rows is a rectangle, its longest row as wide as all: kept rows times the tokens of the longest row, open
    or kept, and `ROW` at the least, are at most `limit`, so that there are at most limit / ROW of them (one where the
    limit is lower). 0: every prompt starts with an empty row. As an executor, not thread-safe.
    """

    def __init__(self, executor: Executor, limit: int) -> None:
        """`limit` in tokens, 0 or more."""
        self._executor = executor
        self._limit = limit
        self._live: dict[Key, Entry] = {}
        self._kept: list[Kept] = []  # least recently used first

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def open(self, entry: Entry) -> None:
        """Give the request its row and note what that holds: the longest start of its prompt that any row has.

        Never the whole prompt: its last token is for the pass that reads the logits. Raises what the executor does.
        """
        entry.row, held = self._begun(entry.tokens[:-1]) if self._limit else (self._executor.open(), 0)
        entry.holds(entry.tokens[:held])
        self._live[entry.key] = entry
        self.make_room()

    def close(self, entry: Entry, *, keep: bool) -> None:
        """Free the request's row, or keep it. Not `keep`: something went wrong, and no kept row is trusted either."""
        del self._live[entry.key]
        tokens = self._sound(entry)[: self._limit] if keep else []
        if not keep:
            self.clear()
        if len(tokens) < LEAST or any(_nearly_in(tokens, one.tokens) for one in self._kept):
            self._executor.close(entry.row)
            return
        for one in [one for one in self._kept if _nearly_in(one.tokens, tokens)]:
            self._kept.remove(one)
            self._executor.close(one.row)
        self._executor.truncate(entry.row, len(tokens))
        self._kept.append(Kept(entry.row, tokens))
        self.make_room()

    def make_room(self) -> None:
        """Close kept rows until the limit holds, least recently used first: open rows grow, and take others' place."""
        while self._kept and self._executor.free_rows < SPARE_ROWS:
            self._executor.close(self._kept.pop(0).row)
        if not self._kept:
            return
        longest = max((len(entry.tokens) for entry in self._live.values()), default=0)
        longest = max(longest, min(ROW, self._limit))
        while self._kept and len(self._kept) * max(longest, *(len(one.tokens) for one in self._kept)) > self._limit:
            self._executor.close(self._kept.pop(0).row)

    def clear(self) -> None:
        """Keep nothing of what there is."""
        while self._kept:
            self._executor.close(self._kept.pop().row)

    def _begun(self, tokens: list[int]) -> tuple[int, int]:
        """(a row that begins as `tokens` do, how many of them it holds and nothing else)."""
        kept = max(self._kept, key=lambda one: common_prefix(one.tokens, tokens), default=None)
        live = max(self._live.values(), key=lambda entry: common_prefix(self._sound(entry), tokens), default=None)
        held = common_prefix(kept.tokens, tokens) if kept is not None else 0
        shared = common_prefix(self._sound(live), tokens) if live is not None else 0
        if max(held, shared) < LEAST:
            return self._executor.open(), 0
        if live is not None and shared > held:
            return self._executor.fork(live.row, shared), shared
        assert kept is not None
        self._kept.remove(kept)
        if len(kept.tokens) - held < LEAST:  # what it loses would serve nobody
            self._executor.truncate(kept.row, held)
            return kept.row, held
        self._kept.append(kept)
        return self._executor.fork(kept.row, held), held

    def _sound(self, entry: Entry) -> list[int]:
        """The tokens that the request's row holds for certain, and that finite logits have followed."""
        return entry.cached[: min(entry.sound, self._executor.length(entry.row))]


def _nearly_in(tokens: list[int], others: list[int]) -> bool:
    """Whether `others` begin with all of `tokens` but fewer than LEAST."""
    return len(tokens) - common_prefix(tokens, others) < LEAST
