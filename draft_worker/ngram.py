"""Proposing without a model: prompt lookup (Saxena 2023; Yang et al. 2023, "LLMA"). q is a point mass on each token.

No torch: this worker starts at once and costs next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from protocol.codecs import NO_Q
from protocol.errors import FailureCode, ProtocolError
from protocol.limits import MAX_LENGTH, MAX_VOCAB
from protocol.messages import Block, Message, Opened, Propose, TokenizerReply
from worker.process import Served
from worker.table import Entry, Work

LONGEST_MATCH = 4  # tokens of the suffix that is looked for; shorter ones are tried after


def continuation(tokens: Sequence[int], gamma: int, longest: int = LONGEST_MATCH) -> list[int]:
    """Up to γ tokens that followed the latest earlier occurrence of the longest suffix of `tokens`."""
    array = np.asarray(tokens, dtype=np.int64)
    for size in range(min(longest, len(array) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(array[:-1], size)  # the suffix itself is left out
        found = np.flatnonzero((windows == array[-size:]).all(axis=1))
        if found.size:
            start = int(found[-1]) + size
            return [int(token) for token in array[start : start + gamma]]
    return []


class NgramDraftEngine:
    """Looks each request's last tokens up in what it holds already. It costs too little to be done ahead (Branch)."""

    threaded = False
    work_types: tuple[type[Work], ...] = (Propose,)

    def __init__(self) -> None:
        self._replies: list[tuple[Entry, Message]] = []
        self.in_hand: list[Entry] = []

    @property
    def busy(self) -> bool:
        return bool(self._replies)

    def open(self, entry: Entry) -> None:
        opened = entry.opened
        if opened.verify == "rejection" and opened.codec != "none" and opened.sampling.temperature > 0:
            raise ProtocolError(
                FailureCode.BAD_VALUE, f"ngram's q is a point mass: open with codec none, not {opened.codec}"
            )
        self._replies.append((entry, Opened(entry.request_id, opened.epoch, len(entry.tokens))))

    def close(self, entry: Entry, *, keep: bool) -> None:
        self._replies = [one for one in self._replies if one[0] is not entry]

    def check(self, entry: Entry, message: Work) -> None:
        pass  # any block can be looked up

    def start(self, entry: Entry, message: Work) -> None:
        started = time.perf_counter()
        assert isinstance(message, Propose)
        tokens = continuation(entry.tokens, message.gamma)
        block = Block(
            request_id=message.request_id,
            epoch=message.epoch,
            base_length=message.base_length,
            block_id=message.block_id,
            seconds=time.perf_counter() - started,
            rows=1,
            steps=1,
            tokens=np.asarray(tokens, dtype=np.int32),
            q=NO_Q,
        )
        self._replies.append((entry, block))

    def step(self) -> list[tuple[Entry, Message]]:
        self.in_hand = [entry for entry, _ in self._replies]
        replies, self._replies = self._replies, []
        return replies


def served_ngram() -> Served:
    """What the handshake says of prompt lookup: any vocabulary, any length, a point mass."""
    return Served(
        engine=NgramDraftEngine(),
        model="ngram",
        source="ngram",
        vocab_size=MAX_VOCAB,
        vocabulary="",
        context_length=MAX_LENGTH,
        eos_ids=(),
        verify_modes=("rejection", "coupled"),
        codecs=("none",),
        tokenizer=TokenizerReply(b"", ""),
    )
