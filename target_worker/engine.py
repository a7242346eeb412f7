"""The target's passes: each extends every row that waits, verifies every block, keeps what was accepted.

Continuous batching: a request joins the next pass, whatever the others are at. Requests of any verify mode, γ and
options share a pass; only the comparison afterwards is done by mode.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from execution.interface import Executor, Extension
from protocol.codecs import decode
from protocol.errors import FailureCode, ProtocolError
from protocol.messages import Message, Verdict, Verify
from speculative import Outcome, SamplingOptions, log_distribution, verify_coupled, verify_greedy, verify_rejection
from worker.kept_rows import KeptRows
from worker.loop import failure
from worker.prefill import ALONE, BESIDE_WORK, PASS_TOKENS, PrefillQueue
from worker.sampling import check_open, sampling_options
from worker.table import Entry, Work


@dataclass(frozen=True)
class Checked:
    """A block as the verifier reads it: its q̃ decoded."""

    entry: Entry
    message: Verify
    tokens: list[int]  # [γ]
    q_ids: Tensor  # int64 [γ, K]
    q_probs: Tensor  # float64 [γ, K]

    @property
    def mode(self) -> str:
        return "greedy" if self.entry.opened.sampling.temperature == 0 else self.entry.opened.verify

    def feed(self) -> tuple[int, list[int]]:
        """(length to which the row is rolled back, tokens that the pass feeds after it)."""
        keep, missing = self.entry.uncached()
        return keep, missing + self.tokens


class TargetEngine:
    """Verifies blocks with one executor. A pass takes at most `pass_tokens` tokens (one block always fits).

    `kept_tokens`: how many are kept of ended requests for prompts that begin alike, see KeptRows.
    """

    threaded = True
    work_types: tuple[type[Work], ...] = (Verify,)

    def __init__(self, executor: Executor, kept_tokens: int = 0, pass_tokens: int = PASS_TOKENS) -> None:
        self._executor = executor
        self._rows = KeptRows(executor, kept_tokens)
        self._pass_tokens = pass_tokens
        self._waiting: list[Checked] = []  # in the order of arrival
        self._refused: list[tuple[Entry, Message]] = []  # answers that need no pass
        self._prefill = PrefillQueue(checked=kept_tokens > 0)
        self._lock = threading.Lock()  # around what `start`, beside a pass, adds to
        self.in_hand: list[Entry] = []

    def warm_up(self) -> None:
        """Verify once, on made-up rows: a library's first calls take many times what later ones do."""
        log_p = log_distribution(
            torch.zeros(2, self._executor.vocab_size, device=self._executor.device), [SamplingOptions()] * 2
        )
        drafted = torch.zeros(1, dtype=torch.int64)
        verify_coupled(log_p, [1], drafted, [0], [0])
        verify_rejection(log_p, [1], drafted, drafted[:, None], torch.ones(1, 1, dtype=torch.float64), [0], [0])

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._refused or len(self._prefill))

    def open(self, entry: Entry) -> None:
        check_open(entry.opened, self._executor.vocab_size, self._executor)
        self._rows.open(entry)
        self._prefill.add(entry)

    def close(self, entry: Entry, *, keep: bool) -> None:
        self._prefill.drop(entry)
        self._waiting = [one for one in self._waiting if one.entry is not entry]
        self._refused = [one for one in self._refused if one[0] is not entry]
        self._rows.close(entry, keep=keep)

    def check(self, entry: Entry, message: Work) -> None:
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

    def start(self, entry: Entry, message: Work) -> None:
        """A block whose q̃ is malformed fails alone."""
        assert isinstance(message, Verify)
        try:
            checked = self._checked(entry, message)
        except ProtocolError as error:
            with self._lock:
                self._refused.append((entry, failure(message, error)))
        else:
            with self._lock:
                self._waiting.append(checked)

    def step(self) -> list[tuple[Entry, Message]]:
        """One pass over the blocks that wait, oldest first, and a piece of the prompts that wait."""
        started = time.perf_counter()
        self._rows.make_room()
        with self._lock:
            replies, self._refused = self._refused, []
            batch, chosen = self._chosen()
        room = self._pass_tokens - sum(len(extension.tokens) for extension in batch)
        pieces = self._prefill.take(min(room, BESIDE_WORK if batch else ALONE))
        self.in_hand = [one.entry for one in chosen] + [piece.entry for piece in pieces]
        batch += [Extension(piece.entry.row, piece.tokens, piece.logits) for piece in pieces if piece.tokens]
        logits = self._executor.extend(batch) if batch else []
        replies += self._prefill.fed(pieces, logits[len(chosen) :])
        if chosen:
            outcomes = self._verify(chosen, logits[: len(chosen)])
            for one, outcome in zip(chosen, outcomes, strict=True):
                self._settle(one, outcome)
            cost = (time.perf_counter() - started, len(chosen), sum(len(extension.tokens) for extension in batch))
            for one, outcome in zip(chosen, outcomes, strict=True):
                replies.append((one.entry, _answer(one, outcome, cost)))
        return replies

    def _chosen(self) -> tuple[list[Extension], list[Checked]]:
        """The pass's blocks and what they feed; the rest waits for the next one."""
        batch: list[Extension] = []
        chosen: list[Checked] = []
        later: list[Checked] = []
        room = self._pass_tokens
        for one in self._waiting:
            keep, feed = one.feed()
            if batch and len(feed) > room:
                later.append(one)
                continue
            entry = one.entry
            self._executor.truncate(entry.row, keep)
            batch.append(Extension(entry.row, feed, len(one.tokens) + 1))
            entry.cached = entry.tokens + one.tokens
            chosen.append(one)
            room -= len(feed)
        self._waiting = later
        return batch, chosen

    def _checked(self, entry: Entry, message: Verify) -> Checked:
        try:
            q_ids, q_probs = decode(message.q, message.tokens, self._executor.vocab_size)
        except ProtocolError as error:
            # Whatever is wrong with a block, NaN too, is the draft's: code nan is kept for the target's own logits.
            code = FailureCode.BAD_VALUE if error.code == FailureCode.NAN else error.code
            raise ProtocolError(code, error.text) from error
        return Checked(
            entry,
            message,
            message.tokens.tolist(),
            torch.from_numpy(q_ids.copy()),
            torch.from_numpy(q_probs.copy()),
        )

    def _verify(self, checked: Sequence[Checked], logits: Sequence[Tensor]) -> list[Outcome]:
        """Outcomes in the order of `checked`, each mode's requests in one call."""
        outcomes: dict[int, Outcome] = {}
        for mode in ("greedy", "coupled", "rejection"):
            chosen = [index for index, one in enumerate(checked) if one.mode == mode]
            if chosen:
                group = [checked[index] for index in chosen]
                outcomes.update(zip(chosen, _verify_group(mode, group, [logits[i] for i in chosen]), strict=True))
        return [outcomes[index] for index in range(len(checked))]

    def _settle(self, one: Checked, outcome: Outcome) -> None:
        """Keep the accepted prefix on the row."""
        entry = one.entry
        if outcome.error is not None:
            self._executor.truncate(entry.row, 0)  # nothing computed from a NaN may stay
            entry.holds([])
            self._rows.clear()  # asked again, the prompt starts afresh
            return
        entry.tokens += [*one.tokens[: outcome.accepted], outcome.token]
        kept = len(entry.tokens) - 1  # the new token isn't fed yet
        self._executor.truncate(entry.row, kept)
        entry.holds(entry.tokens[:kept])


def _answer(one: Checked, outcome: Outcome, cost: tuple[float, int, int]) -> Message:
    """The verdict, which the entry keeps; cost: seconds, rows, positions of the pass."""
    entry, message = one.entry, one.message
    if outcome.error is not None:
        return failure(message, ProtocolError(FailureCode.NAN, outcome.error))
    entry.verdict = Verdict(
        request_id=message.request_id,
        epoch=message.epoch,
        base_length=message.base_length,
        block_id=message.block_id,
        accepted=outcome.accepted,
        token=outcome.token,
        origin=outcome.origin,
        seconds=cost[0],
        rows=cost[1],
        positions=cost[2],
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
