"""Proposing with a model: every step is one batched pass over all rows that grow, whoever they are for.

Requests join between steps, finished rows leave at once. Rule E4: encode, decode, sample, send: a token is always drawn
from the very q̃ that travels with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draft_worker.branching import Run
from draft_worker.drafting import Drafting, mode_of
from draft_worker.noise_cache import DraftDraws, PublicNoise
from draft_worker.outcomes import guesses, shares
from draft_worker.quantize import Row, draw_counts_rows, draw_dense_rows, pack_rows
from execution.interface import Executor, Extension
from protocol.codecs import NO_Q
from protocol.errors import FailureCode, ProtocolError
from protocol.limits import MAX_ARRAY_BYTES
from protocol.messages import Block, Branch, Message, Open, Propose
from speculative import SamplingOptions, draw_greedy, log_distribution
from worker.loop import failure
from worker.prefill import ALONE, BESIDE_WORK, PrefillQueue
from worker.sampling import check_open, sampling_options
from worker.table import Entry, Key, Work

PLAIN = SamplingOptions()


@dataclass
class Asked:
    """A block that was asked for, and the row that grows it: the request's own, or a branch's fork."""

    entry: Entry
    message: Propose
    drafting: Drafting
    run: Run | None = None  # whose branch it continues
    started: float = field(default_factory=time.perf_counter)
    rows: int = 1  # of its widest step
    steps: int = 0


class ModelDraftEngine:
    """Proposes blocks, and branches ahead of them, with one executor."""

    gathers = False
    work_types: tuple[type[Work], ...] = (Propose, Branch)

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._asked: dict[Key, Asked] = {}
        self._runs: dict[Key, Run] = {}  # unfinished, or the last one finished
        self._cut_short: list[tuple[Entry, Message]] = []  # what unfinished runs have cost
        self._prefill = PrefillQueue()
        self._noise = PublicNoise(executor.device)
        self._draws = DraftDraws()
        self.in_hand: list[Entry] = []

    def warm_up(self) -> None:
        """Run what draws tokens once, on made-up rows: a library's first calls take many times what later ones do."""
        log_q = log_distribution(torch.zeros(2, self._executor.vocab_size, device=self._executor.device), [PLAIN] * 2)
        draw_counts_rows(log_q, self._draws.integers([0, 0], [0, 1]))
        self._noise.race(log_q, [0, 0], [0, 1])
        for mode in ("coupled", "counts"):
            guesses(log_q, mode, 0, 0, [0], shares(2, 1, 0.5), ())

    @property
    def busy(self) -> bool:
        return bool(self._asked or len(self._prefill) or self._cut_short or self._unfinished())

    def open(self, opened: Open) -> int:
        check_open(opened, opened.vocab_size, self._executor.context_length)
        if opened.verify == "rejection" and opened.codec == "none" and opened.sampling.temperature > 0:
            raise ProtocolError(
                FailureCode.BAD_VALUE, "a model's q is no point mass: rejection needs codec counts or dense"
            )
        return self._executor.open()

    def fill(self, entry: Entry) -> None:
        self._prefill.add(entry)

    def close(self, entry: Entry) -> None:
        self._prefill.drop(entry)
        asked = self._asked.pop(entry.key, None)
        if asked is not None and asked.run is not None:
            self._end(asked.run)
        self._drop_run(entry)
        self._cut_short = [one for one in self._cut_short if one[0] is not entry]
        self._executor.close(entry.row)

    def check(self, entry: Entry, message: Work) -> None:
        needed = message.base_length + (len(message.tokens) if isinstance(message, Branch) else 1)
        if needed > self._executor.context_length:
            raise ProtocolError(
                FailureCode.CONTEXT_FULL,
                f"{message.base_length} committed tokens, and what is to follow them, don't fit the draft's context of "
                f"{self._executor.context_length}",
            )

    def start(self, entry: Entry, message: Work) -> None:
        if isinstance(message, Branch):
            self._drop_run(entry)
            self._runs[entry.key] = Run(entry, message)
            return
        assert isinstance(message, Propose)
        run = self._runs.pop(entry.key, None)
        if run is not None and not run.answered and run.steps:
            self._cut_short.append((entry, run.reply([])))
        branch = run.follows(message) if run is not None else None
        if run is not None and branch is not None and (branch.tokens or branch.wants_more):
            for other in run.branches:
                if other is not branch:
                    self._free(other)
            run.branches = [branch]
            branch.gamma = min(branch.gamma, message.gamma)
            self._asked[entry.key] = Asked(entry, message, branch, run)
            return
        if run is not None:
            self._end(run)
        room = self._executor.context_length - message.base_length + 1  # the last token of a block is never fed
        drafting = Drafting(entry, entry.row, message.base_length, min(message.gamma, room), [])
        if drafting.gamma:
            keep, drafting.feed = entry.uncached()
            self._executor.truncate(entry.row, keep)
            entry.cached = list(entry.tokens)
        self._asked[entry.key] = Asked(entry, message, drafting)

    def step(self) -> list[tuple[Entry, Message]]:
        """One pass over all that grows; the blocks and branches that are complete after it."""
        asked = [one for one in self._asked.values() if one.drafting.wants_more]
        runs = self._unfinished()
        reading = [run for run in runs if not run.forked]
        growing = [one.drafting for one in asked]
        growing += [branch for run in runs for branch in run.branches if branch.wants_more]
        pieces = self._prefill.take(BESIDE_WORK if growing or reading else ALONE)
        self.in_hand = [one.entry for one in asked] + [run.entry for run in runs] + [piece.entry for piece in pieces]

        batch = [self._reading(run) for run in reading]
        batch += [Extension(one.row, self._known(one.feed), 1) for one in growing]
        fed = len(batch)
        batch += [Extension(p.entry.row, self._known(p.tokens), 0) for p in pieces if p.tokens]
        logits = self._executor.extend(batch)[:fed] if batch else []
        replies = self._prefill.fed(pieces) + self._cut_short
        self._cut_short = []
        if fed:
            owners = [run.entry for run in reading] + [one.entry for one in growing]
            log_q = _log_q(logits, owners)
            for run, rows, raw in zip(reading, log_q, logits, strict=False):
                greedy = mode_of(run.entry) == "greedy"  # then log q is of one token: who comes next, logits say
                self._fork(run, _limited(raw, run.entry.opened.vocab_size) if greedy else rows)
            if growing:
                self._draw(growing, torch.cat(log_q[len(reading) :]))
        for one in asked:
            one.steps, one.rows = one.steps + 1, max(one.rows, fed)
        for run in runs:
            run.steps, run.rows = run.steps + 1, max(run.rows, fed)
        return replies + self._finished(runs)

    # ------------------------------------------------------------ one step

    def _reading(self, run: Run) -> Extension:
        """The block in flight, on the request's own row: q is wanted at each place where it may end."""
        entry = run.entry
        keep, feed = entry.uncached()
        self._executor.truncate(entry.row, keep)
        entry.cached = entry.tokens + run.block
        return Extension(entry.row, self._known(feed + run.block), len(run.block) + 1)

    def _fork(self, run: Run, log_q: Tensor) -> None:
        """Choose outcomes and give each a row; log_q [γ + 1, V] of the block in flight."""
        entry, message = run.entry, run.message
        run.forked = True
        lengths = [run.length(kept, self._executor.context_length) for kept in range(run.forks())]
        counts = shares(self._width(run), len(run.block), message.alpha)[: len(lengths)]
        counts = [count if length else 0 for count, length in zip(counts, lengths, strict=True)]
        counts += [0] * (len(run.block) + 1 - len(counts))
        found = guesses(log_q, mode_of(entry), entry.opened.seed, message.base_length, run.block, counts, message.ends)
        for kept, tokens in enumerate(found):
            for token in tokens:
                row = self._executor.fork(entry.row, message.base_length + kept)
                run.outcomes.append((kept, token))
                run.branches.append(Drafting(entry, row, message.base_length + kept + 1, lengths[kept], [token]))
        if bool(log_q.isnan().any()):
            self._forget_from(entry, len(entry.tokens) - 1)

    @staticmethod
    def _width(run: Run) -> int:
        """Branches asked for, as many as one message can carry with their q̃."""
        rows = (
            MAX_ARRAY_BYTES // (4 * run.entry.opened.vocab_size) if mode_of(run.entry) == "dense" else MAX_ARRAY_BYTES
        )
        return min(run.message.width, rows // max(1, run.message.gamma))

    def _draw(self, growing: Sequence[Drafting], log_q: Tensor) -> None:
        """Append each row's next token; log_q [N, V]."""
        broken = log_q.amax(dim=-1).isnan().tolist()  # amax carries NaN
        for one, is_broken in zip(growing, broken, strict=True):
            one.broken = is_broken
        for mode in ("greedy", "coupled", "counts", "dense"):
            chosen = [i for i, one in enumerate(growing) if not one.broken and mode_of(one.entry) == mode]
            if not chosen:
                continue
            group = [growing[i] for i in chosen]
            q = log_q if len(chosen) == len(log_q) else log_q[chosen]
            seeds, positions = [one.entry.opened.seed for one in group], [one.position for one in group]
            rows: list[Row] = [()] * len(group)
            if mode == "greedy":
                tokens = draw_greedy(q).tolist()
            elif mode == "coupled":
                tokens = self._noise.race(q, seeds, positions)
            elif mode == "counts":
                tokens, rows = draw_counts_rows(q, self._draws.integers(seeds, positions))
            else:
                tokens, rows = draw_dense_rows(q, seeds, positions)
            for one, token, row in zip(group, tokens, rows, strict=True):
                one.take(token, row)

    def _finished(self, runs: Sequence[Run]) -> list[tuple[Entry, Message]]:
        replies: list[tuple[Entry, Message]] = []
        for asked in [one for one in self._asked.values() if not one.drafting.wants_more]:
            del self._asked[asked.entry.key]
            replies.append((asked.entry, self._block(asked)))
        for run in runs:
            if run.done:
                run.answered = True
                replies.append((run.entry, run.reply(list(zip(run.outcomes, run.branches, strict=True)))))
                for branch in run.branches:
                    self._free(branch)
        return replies

    def _block(self, asked: Asked) -> Message:
        drafting, message = asked.drafting, asked.message
        if asked.run is not None:
            self._end(asked.run)
        elif drafting.broken:
            self._forget_from(asked.entry, len(asked.entry.cached) if drafting.tokens else 0)
        # Tokens drawn before a NaN are sent: it may have come of them, and a drawn token that is thrown away for what
        # it is would bias the text (rule E2).
        if drafting.broken and not drafting.tokens:
            return failure(message, ProtocolError(FailureCode.NAN, "the draft's logits are NaN"))
        tokens, rows = drafting.tokens[: message.gamma], drafting.q[: message.gamma]
        return Block(
            request_id=message.request_id,
            epoch=message.epoch,
            base_length=message.base_length,
            block_id=message.block_id,
            seconds=time.perf_counter() - asked.started,
            rows=asked.rows,
            steps=asked.steps,
            tokens=np.asarray(tokens, dtype=np.int32),
            q=pack_rows(mode_of(asked.entry), rows, asked.entry.opened.vocab_size) if rows else NO_Q,
        )

    # ------------------------------------------------------------ rows

    def _unfinished(self) -> list[Run]:
        return [run for run in self._runs.values() if not run.answered]

    def _drop_run(self, entry: Entry) -> None:
        run = self._runs.pop(entry.key, None)
        if run is not None:
            self._end(run)

    def _end(self, run: Run) -> None:
        for branch in run.branches:
            self._free(branch)

    def _free(self, branch: Drafting) -> None:
        if branch.row >= 0:
            self._executor.close(branch.row)
            branch.row = -1

    def _forget_from(self, entry: Entry, length: int) -> None:
        """Roll the request's row back: nothing computed from a NaN may stay."""
        self._executor.truncate(entry.row, length)
        entry.cached = entry.cached[:length]

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as this model can read them: an id beyond its own (smaller, unpadded) vocabulary is read as id 0.

        It changes the draft's guesses and nothing else: q̃ is what was drawn from, whatever the draft has read.
        """
        size = self._executor.vocab_size
        return [token if token < size else 0 for token in tokens]


def _log_q(logits: Sequence[Tensor], owners: Sequence[Entry]) -> list[Tensor]:
    """log q after each owner's sampling options, [n_i, V]; ids at and above the target's vocabulary are excluded."""
    rows = [_limited(part, entry.opened.vocab_size) for part, entry in zip(logits, owners, strict=True)]
    options = [
        sampling_options(entry.opened.sampling)
        for part, entry in zip(rows, owners, strict=True)
        for _ in range(len(part))
    ]
    return list(torch.split(log_distribution(torch.cat(rows), options), [len(part) for part in rows]))


def _limited(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [n, V] with the ids at and above `vocab_size` (the target's) excluded."""
    if logits.shape[1] > vocab_size:
        logits = logits.clone()
        logits[:, vocab_size:] = -torch.inf
    return logits
