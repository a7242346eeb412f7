"""Drafting ahead: while a block is verified, the blocks that would follow its likely outcomes.

A branch grows on a fork of the request's row, from the same noise by position as a block that is asked for after that
outcome: both give the same tokens, so a branch may take such a block's place at any time, and its row the request's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from draft_worker.drafting import Drafting, mode_of
from draft_worker.noise_cache import Place
from draft_worker.outcomes import ALL_UP_TO, noise_place, shares
from draft_worker.quantize import pack_rows
from protocol.codecs import NO_Q
from protocol.limits import MAX_ARRAY_BYTES
from protocol.messages import Branch, Branches, Propose
from worker.table import Entry


@dataclass
class Run:
    """The branches of one block in flight.

    Fork k follows k accepted tokens. It takes the draft's scores at that place: those of the pass that drew the block,
    where it is the draft's own, or else of a first pass that reads the block. Forks below `forked` have their branches.
    """

    entry: Entry
    message: Branch
    context_length: int
    known: Sequence[Tensor] = ()  # scores of the first places, from when the block was drawn
    started: float = field(default_factory=time.perf_counter)
    forked: int = 0
    answered: bool = False
    outcomes: list[tuple[int, int]] = field(default_factory=list)  # (accepted, token) of each branch
    branches: list[Drafting] = field(default_factory=list)
    steps: int = 0
    rows: int = 0
    block: list[int] = field(init=False)
    counts: list[int] = field(init=False)  # branches of each fork

    def __post_init__(self) -> None:
        self.block = self.message.tokens.tolist()
        ends = set(self.message.ends)  # nothing follows an accepted end token
        forks = next((i + 1 for i, token in enumerate(self.block) if token in ends), len(self.block) + 1)
        counts = shares(self._width(), len(self.block), self.message.alpha, mode_of(self.entry))
        self.counts = [count if k < forks and self.length(k) else 0 for k, count in enumerate(counts)]

    def _width(self) -> int:
        """Branches asked for, as many as one message can carry with their q̃."""
        row_bytes = 4 * self.entry.opened.vocab_size if mode_of(self.entry) == "dense" else 1
        return min(self.message.width, MAX_ARRAY_BYTES // row_bytes // max(1, self.message.gamma))

    @property
    def reads(self) -> int:
        """Scores that are still to be read, of the last places."""
        return len(self.block) + 1 - self.forked if any(self.counts[self.forked :]) else 0

    @property
    def due(self) -> float:
        """When the answer should leave, where the message says so."""
        return self.started + self.message.seconds

    def done(self, step_seconds: float) -> bool:
        """Nothing is missing, or what is can be done without, and a step more would keep the answer too long."""
        if self.reads:
            return False
        growing = [branch for branch in self.branches if branch.wants_more]
        if not growing or not self.message.seconds:
            return not growing
        late = time.perf_counter() + step_seconds > self.due
        return late and all(len(branch.tokens) >= self.message.least for branch in growing)

    def length(self, kept: int, *, behind: bool = False) -> int:
        """Tokens worth drafting after `kept` tokens and the target's own one: the token limit, the context, γ.

        `behind`: other branches have a step's lead, and a token less may do.
        """
        gamma = self.message.gamma
        if behind:
            gamma = max(min(gamma, self.message.least), gamma - 1)
        room = self.message.room - (kept + 1) - 1  # the round after ends with the target's own token
        return max(0, min(gamma, room, self.context_length - (self.message.base_length + kept + 1)))

    def follows(self, message: Propose | Branch) -> Drafting | None:
        """The branch of the outcome that `message` continues from, if there is one; `entry` follows it already."""
        base = self.message.base_length
        came = self.entry.tokens[base : message.base_length]
        for (kept, token), branch in zip(self.outcomes, self.branches, strict=True):
            if message.base_length == base + kept + 1 and came == [*self.block[:kept], token]:
                return branch
        return None

    def unread(self) -> list[Drafting]:
        """Branches to read to their end: each may be the next block in flight. None where no time for it is known."""
        if not self.message.seconds:
            return []
        return [one for one in self.branches if one.tokens and not one.broken and one.position <= self.context_length]

    def foreseen(self) -> list[Place]:
        """Noise that guesses at the outcomes of this run's branches will read.

        Of a vocabulary too large to be guessed in whole, or where no noise decides, there is none.
        """
        mode, opened = mode_of(self.entry), self.entry.opened
        if mode == "greedy" or opened.vocab_size > ALL_UP_TO:
            return []
        first, gamma = self.message.base_length + 1, self.message.gamma
        inside = [noise_place(mode, opened.seed, first + i, last=False) for i in range(len(self.block) + gamma)]
        after = [noise_place(mode, opened.seed, first + gamma + i, last=True) for i in range(len(self.block) + 1)]
        return list(dict.fromkeys(inside + after))

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
