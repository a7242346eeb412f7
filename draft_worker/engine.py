"""Proposing with a model: every step is one batched pass over all rows that grow, whoever they are for.

Requests join between steps, finished rows leave at once. What a row's scores tell of each place is kept until the next
message of its request: branches fork off there, without reading anything again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draft_worker.branching import Run
from draft_worker.drafting import Drafting, mode_of
from draft_worker.drawing import Drawer, scores_of
from draft_worker.noise_cache import Place
from draft_worker.outcomes import guesses
from draft_worker.quantize import pack_rows
from execution.interface import Executor, Extension
from protocol.codecs import NO_Q
from protocol.errors import FailureCode, ProtocolError
from protocol.messages import Block, Branch, Message, Propose
from worker.kept_rows import SPARE_ROWS, KeptRows
from worker.loop import failure
from worker.prefill import ALONE, BESIDE_WORK, PrefillQueue
from worker.sampling import check_open
from worker.table import Entry, Key, Work

AT_ONCE = 4  # rows of noise drawn in a step for which nobody waits
JUST_NOW = 3e-4  # seconds: a message that comes so soon after a pass had waited for its end
PAUSES = 8  # how many messages the estimate of the pause before them remembers


@dataclass
class Asked:
    """A block that was asked for, growing on the request's own row."""

    entry: Entry
    message: Propose
    drafting: Drafting
    started: float = field(default_factory=time.perf_counter)
    rows: int = 1  # of its widest step
    steps: int = 0


@dataclass
class Foreseen:
    """What the message after a finished run will need, got ready while nobody waits."""

    entry: Entry
    places: list[Place]  # of noise, what is needed first in front
    branches: list[Drafting]  # whose last tokens aren't read yet: each may be the next block in flight
    latest: float  # when a pass that reads them must begin, to end before that message comes


class ModelDraftEngine:
    """Proposes blocks, and branches ahead of them, with one executor. `kept_tokens` as in KeptRows."""

    threaded = False
    work_types: tuple[type[Work], ...] = (Propose, Branch)

    def __init__(self, executor: Executor, kept_tokens: int = 0) -> None:
        self._executor = executor
        self._rows = KeptRows(executor, kept_tokens)
        self._drawer = Drawer(executor.device)
        self._asked: dict[Key, Asked] = {}
        self._runs: dict[Key, Run] = {}  # unfinished, or the last one finished: its branches wait for the outcome
        self._latest: dict[Key, Drafting] = {}  # the block that the request's own row has drawn last
        self._foreseen: list[Foreseen] = []
        self._cut_short: list[tuple[Entry, Message]] = []  # what unfinished runs have cost
        self._pause = 0.0  # seconds between when a run is due and the message after it, lately
        self._passed = -math.inf  # when the last pass for which nobody waited ended
        self._prefill = PrefillQueue(checked=kept_tokens > 0)
        self.in_hand: list[Entry] = []

    def warm_up(self) -> None:
        self._drawer.warm_up(self._executor.vocab_size)

    @property
    def busy(self) -> bool:
        return bool(self._asked or len(self._prefill) or self._cut_short or self._foreseen or self._unfinished())

    def open(self, entry: Entry) -> None:
        opened = entry.opened
        check_open(opened, opened.vocab_size, self._executor)
        if opened.verify == "rejection" and opened.codec == "none" and opened.sampling.temperature > 0:
            raise ProtocolError(
                FailureCode.BAD_VALUE, "a model's q is no point mass: rejection needs codec counts or dense"
            )
        self._rows.open(entry)
        self._prefill.add(entry)

    def close(self, entry: Entry, *, keep: bool) -> None:
        self._prefill.drop(entry)
        self._asked.pop(entry.key, None)
        self._latest_of(entry, None)
        self._cut_short = [one for one in self._cut_short if one[0] is not entry]
        self._rows.close(entry, keep=keep)

    def check(self, entry: Entry, message: Work) -> None:
        needed = message.base_length + (len(message.tokens) if isinstance(message, Branch) else 1)
        if needed > self._executor.context_length:
            raise ProtocolError(
                FailureCode.CONTEXT_FULL,
                f"{message.base_length} committed tokens, and what is to follow them, don't fit the draft's context of "
                f"{self._executor.context_length}",
            )

    def start(self, entry: Entry, message: Work) -> None:
        run = self._runs.get(entry.key)
        if run is not None and run.answered:
            self._note_pause(run)
        if isinstance(message, Branch):
            latest = self._latest_of(entry, run.follows(message) if run is not None else None)
            known = latest.scores if latest is not None and _drew(latest, message) else []
            self._runs[entry.key] = Run(entry, message, self._executor.context_length, known)
            return
        assert isinstance(message, Propose)
        if run is not None and not run.answered and run.steps:
            self._cut_short.append((entry, run.reply([])))
        branch = run.follows(message) if run is not None else None
        if branch is not None:
            del branch.scores[len(branch.tokens) :]  # it grows from its last token, which is fed again
        self._latest_of(entry, branch)
        if branch is None or not (branch.tokens or branch.wants_more):
            branch = self._afresh(entry, message)
        ready = min(message.ready, len(branch.tokens))
        branch.gamma = min(branch.gamma, max(message.gamma, ready))
        self._asked[entry.key] = Asked(entry, message, branch)

    def _note_pause(self, run: Run) -> None:
        """The message after `run` is there. Where it waited for a pass, or its time isn't known, it tells nothing."""
        now, given = time.perf_counter(), run.message.seconds
        if given and now - self._passed > JUST_NOW:
            pause = min(now - run.due, given)  # a reader who stops for a minute is no measure
            self._pause += (pause - self._pause) / PAUSES

    def step(self) -> list[tuple[Entry, Message]]:
        """One pass over all that grows; the blocks and branches that are complete after it."""
        began = time.perf_counter()
        self._rows.make_room()
        asked = [one for one in self._asked.values() if one.drafting.wants_more]
        runs = self._unfinished()
        pieces = self._prefill.take(BESIDE_WORK if asked or runs else ALONE)
        self.in_hand = [one.entry for one in asked] + [run.entry for run in runs]
        self.in_hand += [piece.entry for piece in pieces]
        if self._foreseen and not (self._asked or runs or pieces):  # nobody waits
            self._foresee()

        for run in runs:
            known, run.known = run.known, []
            self._fork(run, known)
        reading = [run for run in runs if run.reads]
        growing = [one.drafting for one in asked]
        growing += [branch for run in runs for branch in run.branches if branch.wants_more]
        batch = [self._reading(run) for run in reading]
        batch += [Extension(one.row, self._known(one.feed), 1) for one in growing]
        fed = len(batch)
        batch += [Extension(p.entry.row, self._known(p.tokens), p.logits) for p in pieces if p.tokens]
        logits = self._executor.extend(batch) if batch else []
        replies = self._prefill.fed(pieces, logits[fed:]) + self._cut_short
        self._cut_short = []
        if fed:
            scores = scores_of(logits[:fed], [run.entry for run in reading] + [one.entry for one in growing])
            for run, read in zip(reading, scores, strict=False):
                self._read(run, read)
            if growing:
                self._drawer.draw(growing, torch.cat(scores[len(reading) :]))
        for block in asked:
            block.steps, block.rows = block.steps + 1, max(block.rows, fed)
        for run in runs:
            run.steps, run.rows = run.steps + 1, max(run.rows, fed)
        return replies + self._finished(runs, time.perf_counter() - began)

    # ------------------------------------------------------------ one step

    def _reading(self, run: Run) -> Extension:
        """What isn't known of the block in flight, on the request's own row: scores at each place where it may end."""
        entry = run.entry
        whole = entry.tokens + run.block
        keep = len(entry.tokens) - 1 + run.forked if run.forked else entry.uncached()[0]
        self._executor.truncate(entry.row, keep)
        entry.cached = whole
        return Extension(entry.row, self._known(whole[keep:]), run.reads)

    def _read(self, run: Run, scores: Tensor) -> None:
        """Fork off the places that a pass has just read: scores [reads, V]."""
        self._fork(run, scores.unbind(), behind=bool(run.branches))
        if bool(scores.amax(dim=-1).isfinite().all()):
            run.entry.holds(run.entry.cached)
        else:
            self._forget_from(run.entry, len(run.entry.tokens) - 1)

    def _fork(self, run: Run, scores: Sequence[Tensor], *, behind: bool = False) -> None:
        """Choose outcomes at the next places, one row of scores [V] each, and give each outcome a row.

        `behind`: branches at other places have a step's lead.
        """
        entry, message, first = run.entry, run.message, run.forked
        scores = scores[: len(run.block) + 1 - first]
        run.forked += len(scores)
        counts = run.counts[first : run.forked]
        mode, seed, base = mode_of(entry), entry.opened.seed, message.base_length
        found = guesses(self._drawer.noise, scores, first, mode, seed, base, run.block, counts, message.ends)
        for kept, tokens in enumerate(found, start=first):
            for token in tokens[: max(0, self._executor.free_rows - SPARE_ROWS)]:
                row = self._executor.fork(entry.row, base + kept)
                run.outcomes.append((kept, token))
                run.branches.append(Drafting(entry, row, base + kept + 1, run.length(kept, behind=behind), [token]))

    def _foresee(self) -> None:
        """Draw some noise, then read what the branches end with: little at a time, since what comes meanwhile waits."""
        one = self._foreseen[-1]
        if one.places:
            self._drawer.noise.fill(one.places[:AT_ONCE], one.entry.opened.vocab_size)
            del one.places[:AT_ONCE]
            return
        self._foreseen.pop()
        if one.branches and time.perf_counter() < one.latest:
            self.in_hand = [one.entry]
            self._read_last(one.branches)
            self._passed = time.perf_counter()

    def _read_last(self, branches: Sequence[Drafting]) -> None:
        """What follows each branch, should it be the next block in flight: that run needs no pass to fork behind it."""
        logits = self._executor.extend([Extension(one.row, self._known(one.feed), 1) for one in branches])
        scores = scores_of(logits, [one.entry for one in branches])
        whole = torch.cat(scores).amax(dim=-1).isfinite().tolist()
        for one, score, is_whole in zip(branches, scores, whole, strict=True):
            if is_whole:
                one.scores.append(score[0])
            else:
                self._executor.truncate(one.row, one.held)

    def _finished(self, runs: Sequence[Run], step_seconds: float) -> list[tuple[Entry, Message]]:
        replies: list[tuple[Entry, Message]] = []
        for asked in [one for one in self._asked.values() if not one.drafting.wants_more]:
            del self._asked[asked.entry.key]
            replies.append((asked.entry, self._block(asked)))
        for run in runs:
            if run.done(step_seconds):
                run.answered = True
                replies.append((run.entry, run.reply(list(zip(run.outcomes, run.branches, strict=True)))))
                latest = run.due + self._pause - step_seconds
                self._foreseen.append(Foreseen(run.entry, run.foreseen(), run.unread(), latest))
        return replies

    def _block(self, asked: Asked) -> Message:
        drafting, message, entry = asked.drafting, asked.message, asked.entry
        if drafting.broken:
            self._forget_from(entry, drafting.held if drafting.tokens else 0)
        elif drafting.tokens:
            entry.holds((entry.tokens + drafting.tokens)[: drafting.held])
            self._latest[entry.key] = drafting
        # Tokens drawn before a NaN are sent: it may have come of them, and a drawn token that is thrown away for what
        # it is would bias the text (rule E2).
        if drafting.broken and not drafting.tokens:
            return failure(message, ProtocolError(FailureCode.NAN, "the draft's logits are NaN"))
        tokens, rows = drafting.tokens[: drafting.gamma], drafting.q[: drafting.gamma]
        return Block(
            request_id=message.request_id,
            epoch=message.epoch,
            base_length=message.base_length,
            block_id=message.block_id,
            seconds=time.perf_counter() - asked.started,
            rows=asked.rows,
            steps=asked.steps,
            tokens=np.asarray(tokens, dtype=np.int32),
            q=pack_rows(mode_of(entry), rows, entry.opened.vocab_size) if rows else NO_Q,
        )

    # ------------------------------------------------------------ rows

    def _unfinished(self) -> list[Run]:
        return [run for run in self._runs.values() if not run.answered]

    def _afresh(self, entry: Entry, message: Propose) -> Drafting:
        """A block after the committed tokens, on the request's own row."""
        room = self._executor.context_length - message.base_length + 1  # the last token of a block is never fed
        drafting = Drafting(entry, entry.row, message.base_length, min(message.gamma, room), [])
        if drafting.gamma:
            keep, drafting.feed = entry.uncached()
            self._executor.truncate(entry.row, keep)
            entry.cached = list(entry.tokens)
        return drafting

    def _latest_of(self, entry: Entry, branch: Drafting | None) -> Drafting | None:
        """Let go of all that was drafted for the request, but for what its own row goes on from: `branch`, whose row
        takes the place of the old one, or the last block on that, where it follows the committed tokens.
        """
        latest = self._latest.pop(entry.key, None)
        run = self._runs.pop(entry.key, None)
        self._foreseen = [one for one in self._foreseen if one.entry is not entry]
        for other in run.branches if run is not None else ():
            if other is not branch:
                self._executor.close(other.row)
        if branch is None:
            return latest
        self._executor.close(entry.row)
        entry.row = branch.row
        entry.holds((entry.tokens + branch.tokens)[: branch.held])
        self._executor.truncate(entry.row, branch.held)  # of a NaN nothing may stay
        return branch

    def _forget_from(self, entry: Entry, length: int) -> None:
        """Roll the request's row back: nothing computed from a NaN may stay, nor does any other row rely on it."""
        self._executor.truncate(entry.row, length)
        entry.cached, entry.sound = entry.cached[:length], 0
        self._rows.clear()

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as this model can read them: an id beyond its own (smaller, unpadded) vocabulary is read as id 0.

        It changes the draft's guesses and nothing else: q̃ is what was drawn from, whatever the draft has read.
        """
        size = self._executor.vocab_size
        return [token if token < size else 0 for token in tokens]


def _drew(latest: Drafting, message: Branch) -> bool:
    """Whether `latest`, on the request's own row, is the block that `message` calls in flight."""
    entry, block = latest.entry, message.tokens.tolist()
    return (
        latest.base == message.base_length
        and latest.tokens[: len(block)] == block
        and entry.cached[: latest.base] == entry.tokens
    )
