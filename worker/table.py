"""The open requests of a worker, and the one rule by which they follow the orchestrator's commit log.

A worker holds nothing that can't be rebuilt from committed tokens: an entry is those tokens, the options that the
request was opened with, and a row of the executor whose cached tokens are a prefix of what was fed. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.control import Peer
from protocol.errors import ProtocolError
from protocol.messages import Branch, Open, Propose, Verdict, Verify

Key = tuple[Peer, int]
Work = Propose | Branch | Verify


@dataclass
class Entry:
    """One open request: `tokens` are committed, `cached` are the tokens whose keys and values the row holds.

    `sound`: how many of them, from the first, finite logits have followed; others don't rely on the rest.
    """

    key: Key
    opened: Open
    tokens: list[int]
    row: int = -1  # given by the engine when it opens the request
    cached: list[int] = field(default_factory=list)
    sound: int = 0
    verdict: Verdict | None = None  # the last one given: a repeated verify returns it (rule E5)
    work: Work | None = None  # what is being worked on

    @property
    def request_id(self) -> int:
        return self.key[1]

    def check(self, epoch: int, base_length: int, tail_length: int) -> None:
        """ProtocolError `stale_epoch` when the state was rebuilt since, `out_of_sync` when the tail leaves a gap."""
        if epoch != self.opened.epoch:
            raise ProtocolError(
                "stale_epoch", f"request {self.request_id} is at epoch {self.opened.epoch}, the message at {epoch}"
            )
        start = base_length - tail_length
        if start < 0 or start > len(self.tokens):
            raise ProtocolError(
                "out_of_sync",
                f"request {self.request_id} holds {len(self.tokens)} committed tokens, the message continues from "
                f"{start}; open the request again with all its tokens",
            )

    def follow(self, base_length: int, tail: Sequence[int]) -> None:
        """Set the committed tokens to `base_length` tokens that end in `tail`, which `check` has let pass."""
        self.tokens[base_length - len(tail) :] = tail

    def uncached(self) -> tuple[int, list[int]]:
        """(length to which the row must be rolled back, committed tokens to feed: at least the last one).

        The last committed token is always fed again if it has to be, since its logits are what is asked for.
        """
        keep = min(common_prefix(self.cached, self.tokens), len(self.tokens) - 1)
        return keep, self.tokens[keep:]

    def holds(self, tokens: list[int]) -> None:
        """The row holds these tokens, and the logits after them were finite."""
        self.cached, self.sound = tokens, len(tokens)


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:  # nearly always, and one comparison in C
        return limit
    return next(i for i in range(limit) if one[i] != other[i])


class RequestTable:
    """All open requests of a worker, by (connection, request id): two orchestrators never meet."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry

    def get(self, key: Key) -> Entry:
        """The entry, or ProtocolError `unknown_request`."""
        entry = self._entries.get(key)
        if entry is None:
            raise ProtocolError("unknown_request", f"request {key[1]} is not open on this worker; open it first")
        return entry

    def of(self, peer: Peer) -> list[Key]:
        """The keys of one connection's requests."""
        return [key for key in self._entries if key[0] == peer]

    def remove(self, key: Key) -> Entry | None:
        return self._entries.pop(key, None)
