"""Proposing with a model: γ batched steps over every request that wants a block; finished rows leave early.

Rule E4: encode, decode, sample, send. A token is always drawn from the very q̃ that travels with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draft_worker.quantize import Row, draw_counts_rows, draw_dense_rows, pack_rows
from execution.interface import Executor, Extension
from protocol.codecs import NO_Q
from protocol.errors import FailureCode, ProtocolError
from protocol.messages import Block, Message, Open, Propose, Verify
from speculative import Stream, draw_coupled, draw_greedy, integers16, log_distribution
from worker.loop import Job, failure
from worker.sampling import check_open, sampling_options
from worker.table import Entry


@dataclass
class Drafting:
    """One request's block while it grows."""

    entry: Entry
    message: Propose
    gamma: int
    feed: list[int]  # what the next step feeds
    tokens: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # q̃ so far; empty where nothing but tokens travels
    broken: bool = False  # its logits were NaN

    @property
    def position(self) -> int:
        """Of the next token."""
        return self.message.base_length + len(self.tokens)

    @property
    def wants_more(self) -> bool:
        return len(self.tokens) < self.gamma and not self.broken

    def take(self, token: int, row: Row) -> None:
        """Append a token and the q̃ that it was drawn from (() where none travels)."""
        if self.tokens:
            self.entry.cached.append(self.tokens[-1])  # the step that drew this one fed it
        self.tokens.append(token)
        self.feed = [token]
        if row:
            self.rows.append(row)

    @property
    def mode(self) -> str:
        if self.entry.opened.sampling.temperature == 0:
            return "greedy"
        return "coupled" if self.entry.opened.verify == "coupled" else self.entry.opened.codec


class ModelDraftEngine:
    """Proposes blocks with one executor."""

    work_type: type[Propose] = Propose

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def open(self, opened: Open) -> int:
        check_open(opened, opened.vocab_size, self._executor.context_length)
        if opened.verify == "rejection" and opened.codec == "none" and opened.sampling.temperature > 0:
            raise ProtocolError(
                FailureCode.BAD_VALUE, "a model's q is no point mass: rejection needs codec counts or dense"
            )
        return self._executor.open()

    def close(self, entry: Entry) -> None:
        self._executor.close(entry.row)

    def check(self, entry: Entry, message: Propose | Verify) -> None:
        if message.base_length + 1 > self._executor.context_length:
            raise ProtocolError(
                FailureCode.CONTEXT_FULL,
                f"{message.base_length} committed tokens fill the draft's context of {self._executor.context_length}",
            )

    def run(self, opened: Sequence[Entry], jobs: Sequence[Job]) -> list[Message]:
        """Draft every job's block in as many batched steps as the longest takes."""
        started = time.perf_counter()
        blocks = [self._begin(job) for job in jobs]
        drafting = {id(block.entry) for block in blocks if block.gamma}
        prefill = [entry for entry in opened if id(entry) not in drafting and len(entry.tokens) > 1]
        draws = _draft_draws([block for block in blocks if block.mode == "counts"])
        while prefill or any(block.wants_more for block in blocks):
            active = [block for block in blocks if block.wants_more]
            log_q = self._step(prefill, active)
            self._draw(active, log_q, draws)
            prefill = []
        seconds = time.perf_counter() - started
        return [self._finish(block, seconds) for block in blocks]

    def _begin(self, job: Job) -> Drafting:
        entry, message = job.entry, job.message
        assert isinstance(message, Propose)
        room = self._executor.context_length - message.base_length + 1  # the last token of a block is never fed
        gamma = min(message.gamma, room)
        block = Drafting(entry, message, gamma, [])
        if gamma:
            keep, block.feed = entry.uncached()
            self._executor.truncate(entry.row, keep)
            entry.cached = list(entry.tokens)
        return block

    def _step(self, prefill: Sequence[Entry], active: Sequence[Drafting]) -> Tensor:
        """One pass: log q of the next token of each of `active`, [N, V]; `prefill` rides along."""
        batch = [Extension(block.entry.row, self._known(block.feed), 1) for block in active]
        for entry in prefill:
            batch.append(Extension(entry.row, self._known(entry.tokens[:-1]), 0))
            entry.cached = entry.tokens[:-1]
        logits = self._executor.extend(batch)[: len(active)]
        if not active:
            return torch.empty(0)
        limited = torch.cat(
            [_limited(row, block.entry.opened.vocab_size) for row, block in zip(logits, active, strict=True)]
        )
        log_q = log_distribution(limited, [sampling_options(block.entry.opened.sampling) for block in active])
        broken = log_q.isnan().any(dim=-1).tolist()
        for block, is_broken in zip(active, broken, strict=True):
            block.broken = is_broken
        return log_q

    def _draw(self, active: Sequence[Drafting], log_q: Tensor, draws: dict[int, npt.NDArray[np.int64]]) -> None:
        """Append each block's next token; log_q [N, V]."""
        for mode in ("greedy", "coupled", "counts", "dense"):
            chosen = [i for i, block in enumerate(active) if block.mode == mode and not block.broken]
            if not chosen:
                continue
            group = [active[i] for i in chosen]
            q, seeds, positions = (
                log_q[chosen],
                [one.entry.opened.seed for one in group],
                [one.position for one in group],
            )
            rows: list[Row] = [()] * len(group)
            if mode == "greedy":
                tokens = draw_greedy(q).tolist()
            elif mode == "coupled":
                tokens = draw_coupled(q, seeds, positions).tolist()
            elif mode == "counts":
                step = np.array([draws[id(one.entry)][len(one.tokens)] for one in group])
                tokens, rows = draw_counts_rows(q, step)
            else:
                tokens, rows = draw_dense_rows(q, seeds, positions)
            for block, token, row in zip(group, tokens, rows, strict=True):
                block.take(token, row)

    def _finish(self, block: Drafting, seconds: float) -> Message:
        if block.broken:  # nothing computed from a NaN may stay
            keep = len(block.entry.cached) if block.tokens else 0
            self._executor.truncate(block.entry.row, keep)
            block.entry.cached = block.entry.cached[:keep]
            # Tokens drawn before the NaN are sent: it may have come of them, and a drawn token that is thrown away
            # for what it is would bias the text (rule E2).
            if not block.tokens:
                return failure(block.message, ProtocolError(FailureCode.NAN, "the draft's logits are NaN"))
        message = block.message
        return Block(
            request_id=message.request_id,
            epoch=message.epoch,
            base_length=message.base_length,
            block_id=message.block_id,
            seconds=seconds,
            tokens=np.asarray(block.tokens, dtype=np.int32),
            q=pack_rows(block.mode, block.rows, block.entry.opened.vocab_size) if block.rows else NO_Q,
        )

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as this model can read them: an id beyond its own (smaller, unpadded) vocabulary is read as id 0.

        It changes the draft's guesses and nothing else: q̃ is what was drawn from, whatever the draft has read.
        """
        size = self._executor.vocab_size
        return [token if token < size else 0 for token in tokens]


def _draft_draws(blocks: Sequence[Drafting]) -> dict[int, npt.NDArray[np.int64]]:
    """The integers below 65536 of stream DRAFT for every position of every block [γ], in one call."""
    if not blocks:
        return {}
    seeds = [block.entry.opened.seed for block in blocks for _ in range(block.gamma)]
    positions = [block.position + k for block in blocks for k in range(block.gamma)]
    drawn = integers16(seeds, Stream.DRAFT, positions).numpy()
    ends = np.cumsum([block.gamma for block in blocks])[:-1]
    return {id(block.entry): part for block, part in zip(blocks, np.split(drawn, ends), strict=True)}


def _limited(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [1, V] with the ids at and above `vocab_size` (the target's) excluded."""
    if logits.shape[1] > vocab_size:
        logits = logits.clone()
        logits[:, vocab_size:] = -torch.inf
    return logits
