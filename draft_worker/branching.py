"""Drafting ahead: while a block is verified, the blocks that would follow its likely outcomes.

A branch grows on a fork of the request's row, from the same noise by position as a block that is asked for after that
outcome: both give the same tokens, so a branch may take such a block's place at any time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draft_worker.drafting import Drafting, mode_of
from draft_worker.quantize import pack_rows
from protocol.codecs import NO_Q
from protocol.messages import Branch, Branches, Propose
from worker.table import Entry


@dataclass
class Run:
    """The branches of one block in flight. The first pass reads the block itself and finds the forks."""

    entry: Entry
    message: Branch
    started: float = field(default_factory=time.perf_counter)
    forked: bool = False
    answered: bool = False
    outcomes: list[tuple[int, int]] = field(default_factory=list)  # (accepted, token) of each branch
    branches: list[Drafting] = field(default_factory=list)
    steps: int = 0
    rows: int = 0

    @property
    def block(self) -> list[int]:
        return [int(token) for token in self.message.tokens]

    @property
    def done(self) -> bool:
        return self.forked and not any(branch.wants_more for branch in self.branches)

    def length(self, kept: int, context_length: int) -> int:
        """Tokens worth drafting after `kept` tokens and the target's own one: the token limit, the context, γ."""
        room = self.message.room - (kept + 1) - 1  # the round after ends with the target's own token
        return max(0, min(self.message.gamma, room, context_length - (self.message.base_length + kept + 1)))

    def forks(self) -> int:
        """Outcomes 0..forks - 1 are possible with the text going on: nothing follows an accepted end token."""
        ends = set(self.message.ends)
        return next((i + 1 for i, token in enumerate(self.block) if token in ends), len(self.block) + 1)

    def follows(self, message: Propose) -> Drafting | None:
        """The branch of the outcome that `message` continues from, if there is one; `entry` follows it already."""
        base = self.message.base_length
        came = self.entry.tokens[base : message.base_length]
        for (kept, token), branch in zip(self.outcomes, self.branches, strict=True):
            if message.base_length == base + kept + 1 and came == [*self.block[:kept], token]:
                return branch
        return None

    def reply(self, drafted: Sequence[tuple[tuple[int, int], Drafting]]) -> Branches:
        """The branches `drafted`, each with its outcome (none where the run was cut short), and what it took.

        One whose first logits were NaN is left out: nothing was drawn in it.
        """
        kept = [(outcome, branch) for outcome, branch in drafted if branch.tokens]
        rows = [row for _, branch in kept for row in branch.q]
        return Branches(
            request_id=self.message.request_id,
            epoch=self.message.epoch,
            base_length=self.message.base_length,
            block_id=self.message.block_id,
            seconds=time.perf_counter() - self.started,
            rows=self.rows,
            steps=self.steps,
            accepted=np.array([accepted for (accepted, _), _ in kept], dtype=np.int32),
            next=np.array([token for (_, token), _ in kept], dtype=np.int32),
            lengths=np.array([len(branch.tokens) for _, branch in kept], dtype=np.int32),
            tokens=np.array([token for _, branch in kept for token in branch.tokens], dtype=np.int32),
            q=pack_rows(mode_of(self.entry), rows, self.entry.opened.vocab_size) if rows else NO_Q,
        )
