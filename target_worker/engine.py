"""One batched pass of the target: extend every pending row, verify every block, keep what was accepted.

Requests of any verify mode, γ and options share the pass; only the comparison afterwards is done by mode.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from execution.interface import Executor, Extension
from protocol.codecs import decode
from protocol.errors import FailureCode, ProtocolError
from protocol.messages import Message, Open, Propose, Verdict, Verify
from speculative import Outcome, log_distribution, verify_coupled, verify_greedy, verify_rejection
from worker.loop import Job, failure
from worker.sampling import check_open, sampling_options
from worker.table import Entry


@dataclass(frozen=True)
class Checked:
    """A job whose q̃ was decoded: the block as the verifier reads it."""

    place: int  # in the batch's replies
    entry: Entry
    message: Verify
    tokens: list[int]  # [γ]
    q_ids: Tensor  # int64 [γ, K]
    q_probs: Tensor  # float64 [γ, K]

    @property
    def mode(self) -> str:
        return "greedy" if self.entry.opened.sampling.temperature == 0 else self.entry.opened.verify


class TargetEngine:
    """Verifies blocks with one executor."""

    work_type: type[Verify] = Verify

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def open(self, opened: Open) -> int:
        check_open(opened, self._executor.vocab_size, self._executor.context_length)
        return self._executor.open()

    def close(self, entry: Entry) -> None:
        self._executor.close(entry.row)

    def check(self, entry: Entry, message: Verify | Propose) -> None:
        assert isinstance(message, Verify)
        vocab_size, context_length = self._executor.vocab_size, self._executor.context_length
        for tokens in (message.tail, message.tokens):
            if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
                raise ProtocolError(
                    FailureCode.BAD_VALUE, f"a token id is outside the target's vocabulary of {vocab_size}"
                )
        if message.base_length + message.tokens.size > context_length:
            raise ProtocolError(
                FailureCode.CONTEXT_FULL,
                f"{message.base_length} committed and {message.tokens.size} drafted tokens don't fit the target's "
                f"context of {context_length}; draft fewer",
            )

    def run(self, opened: Sequence[Entry], jobs: Sequence[Job]) -> list[Message]:
        """One pass. A job whose q̃ is malformed, or whose logits are NaN, fails alone."""
        started = time.perf_counter()
        replies: list[Message | None] = [None] * len(jobs)
        checked: list[Checked] = []
        for place, job in enumerate(jobs):
            try:
                checked.append(self._checked(place, job))
            except ProtocolError as error:
                replies[place] = failure(job.message, error)
        logits = self._extend(opened, checked)
        outcomes = self._verify(checked, logits)
        seconds = time.perf_counter() - started
        for one, outcome in zip(checked, outcomes, strict=True):
            replies[one.place] = self._settle(one, outcome, seconds, len(checked))
        return [reply for reply in replies if reply is not None]

    def _checked(self, place: int, job: Job) -> Checked:
        message = job.message
        assert isinstance(message, Verify)
        try:
            q_ids, q_probs = decode(message.q, message.tokens, self._executor.vocab_size)
        except ProtocolError as error:
            # Whatever is wrong with a block, NaN too, is the draft's: code nan is kept for the target's own logits.
            code = FailureCode.BAD_VALUE if error.code == FailureCode.NAN else error.code
            raise ProtocolError(code, error.text) from error
        return Checked(
            place,
            job.entry,
            message,
            message.tokens.tolist(),
            torch.from_numpy(q_ids.copy()),
            torch.from_numpy(q_probs.copy()),
        )

    def _extend(self, opened: Sequence[Entry], checked: Sequence[Checked]) -> list[Tensor]:
        """The pass itself. Returns a block's logits [γ + 1, V] for each of `checked`."""
        batch: list[Extension] = []
        for one in checked:
            keep, feed = one.entry.uncached()
            self._executor.truncate(one.entry.row, keep)
            batch.append(Extension(one.entry.row, feed + one.tokens, len(one.tokens) + 1))
            one.entry.cached = one.entry.tokens + one.tokens
        verified = {id(one.entry) for one in checked}
        for entry in opened:
            if id(entry) not in verified and len(entry.tokens) > 1:  # prefill all but the last: a block feeds that
                batch.append(Extension(entry.row, entry.tokens[:-1], 0))
                entry.cached = entry.tokens[:-1]
        return self._executor.extend(batch)[: len(checked)] if batch else []

    def _verify(self, checked: Sequence[Checked], logits: Sequence[Tensor]) -> list[Outcome]:
        """Outcomes in the order of `checked`, each mode's requests in one call."""
        outcomes: dict[int, Outcome] = {}
        for mode in ("greedy", "coupled", "rejection"):
            chosen = [index for index, one in enumerate(checked) if one.mode == mode]
            if chosen:
                group = [checked[index] for index in chosen]
                outcomes.update(zip(chosen, _verify_group(mode, group, [logits[i] for i in chosen]), strict=True))
        return [outcomes[index] for index in range(len(checked))]

    def _settle(self, one: Checked, outcome: Outcome, seconds: float, rows: int) -> Message:
        """Keep the accepted prefix on the row, and make the verdict."""
        entry, message = one.entry, one.message
        if outcome.error is not None:
            self._executor.truncate(entry.row, 0)  # nothing computed from a NaN may stay
            entry.cached = []
            return failure(message, ProtocolError(FailureCode.NAN, outcome.error))
        entry.tokens += [*one.tokens[: outcome.accepted], outcome.token]
        kept = len(entry.tokens) - 1  # the new token isn't fed yet
        self._executor.truncate(entry.row, kept)
        entry.cached = entry.tokens[:kept]
        entry.verdict = Verdict(
            request_id=message.request_id,
            epoch=message.epoch,
            base_length=message.base_length,
            block_id=message.block_id,
            accepted=outcome.accepted,
            token=outcome.token,
            origin=outcome.origin,
            seconds=seconds,
            rows=rows,
        )
        return entry.verdict


def _verify_group(mode: str, group: Sequence[Checked], logits: Sequence[Tensor]) -> list[Outcome]:
    """Verify requests that share a mode; logits [γ_i + 1, V] each."""
    gammas = [len(one.tokens) for one in group]
    rows = torch.cat(list(logits))  # [Σ(γ + 1), V]
    drafted = torch.tensor([token for one in group for token in one.tokens], dtype=torch.int64)  # [Σγ]
    if mode == "greedy":
        return verify_greedy(rows, gammas, drafted)
    options = [
        sampling_options(one.entry.opened.sampling)
        for one, gamma in zip(group, gammas, strict=True)
        for _ in range(gamma + 1)
    ]
    log_p = log_distribution(rows, options)  # [Σ(γ + 1), V]
    seeds = [one.entry.opened.seed for one in group]
    positions = [one.message.base_length for one in group]
    if mode == "coupled":
        return verify_coupled(log_p, gammas, drafted, seeds, positions)
    width = max(one.q_ids.shape[1] for one in group)
    q_ids = torch.cat([_padded(one.q_ids, width) for one in group])  # [Σγ, K]
    q_probs = torch.cat([_padded(one.q_probs, width) for one in group])  # [Σγ, K]
    return verify_rejection(log_p, gammas, drafted, q_ids, q_probs, seeds, positions)


def _padded(rows: Tensor, width: int) -> Tensor:
    """Rows [γ, K] with zero columns up to `width`."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
