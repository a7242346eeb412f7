"""A request and its commit log: the only truth about what has been generated.

Imports nothing of the wire's sockets. A round's result goes in through `commit`, and nothing else changes the log.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.errors import UsageError

FinishReason = Literal["stop", "length"]
Origin = Literal["correction", "bonus"]
MAX_SEED = 2**64


@dataclass(frozen=True)
class GenerateOptions:
    """How one request samples. Defaults are those of the command line. UsageError on anything impossible."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: drawn, and reported

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"--max-tokens {self.max_tokens} is out of range: expected at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"--temperature {self.temperature} is out of range: expected 0 (greedy) or more")
        if self.top_k < 0:
            raise UsageError(f"--top-k {self.top_k} is out of range: expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p} is out of range: expected more than 0, at most 1 (off)")
        if not 0 <= self.min_p < 1:
            raise UsageError(f"--min-p {self.min_p} is out of range: expected 0 (off) or more, less than 1")
        if self.seed is not None and not 0 <= self.seed < MAX_SEED:
            raise UsageError(f"--seed {self.seed} is out of range: expected 0 to 2**64 - 1")

    def seeded(self) -> int:
        """The seed, drawn where none is given (48 bits: exact in every JSON reader)."""
        return self.seed if self.seed is not None else secrets.randbits(48)


@dataclass(frozen=True)
class Span:
    """From `start` to `end`, in seconds of time.perf_counter."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Proposal:
    """A drafted block as the orchestrator sees it; `source` is who proposed it ("" at γ = 0).

    A block from a branch was drafted while the one before it was verified: it costs this round no time.
    """

    tokens: tuple[int, ...] = ()
    source: str = ""
    seconds: float = 0.0  # the draft worker's compute
    wire_seconds: float = 0.0  # round trip less compute
    origin: Literal["", "drafted", "branch"] = ""
    rows: int = 1  # of the draft's widest step
    steps: int = 0  # passes of the draft since it was asked; fewer than tokens where a branch had most of them, late
    span: Span | None = None


@dataclass(frozen=True)
class Verified:
    """A verdict with what it cost."""

    accepted: int
    token: int
    origin: Origin
    seconds: float  # the target worker's compute
    wire_seconds: float
    bytes_sent: int  # the block as sent to the target, all frames
    rows: int = 1  # requests in the pass
    positions: int = 1  # tokens fed in the pass
    span: Span | None = None


@dataclass(frozen=True)
class Branching:
    """The branches that were drafted while this round's block was verified; `hit`: one was for what came out."""

    asked: int
    width: int = 0  # that came in time
    hit: bool = False
    seconds: float = 0.0
    rows: int = 1
    steps: int = 0
    bytes_received: int = 0
    span: Span | None = None


@dataclass(frozen=True)
class Round:
    """One round, committed: the unit that stats, traces and streams read."""

    index: int
    base_length: int
    proposal: Proposal
    verified: Verified
    emitted: tuple[int, ...]  # what was committed: cut at an end token or at the token limit
    finish_reason: FinishReason | None
    gamma: int = 0  # decided before anything was drawn
    branching: Branching | None = None  # None: no branches were asked for
    span: Span | None = None

    @property
    def kept(self) -> int:
        """Draft tokens that were emitted (an end inside the block cuts accepted ones)."""
        return min(self.verified.accepted, len(self.emitted))


@dataclass
class Request:
    """One generation. `tokens` is the commit log: the prompt, then everything committed."""

    request_id: int
    prompt: tuple[int, ...]
    options: GenerateOptions
    seed: int
    eos_ids: frozenset[int]
    context_length: int
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> Sequence[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def room(self) -> int:
        """Tokens that may still be emitted: the token limit and the target's context."""
        wanted = self.options.max_tokens - (len(self.tokens) - len(self.prompt))
        return min(wanted, self.context_length - len(self.tokens))

    def clip(self, gamma: int) -> int:
        """γ for the next round: a round emits up to γ + 1 tokens, so no more than room − 1 are worth drafting."""
        return max(0, min(gamma, self.room - 1))

    def commit(
        self,
        proposal: Proposal,
        verified: Verified,
        *,
        gamma: int = 0,
        branching: Branching | None = None,
        span: Span | None = None,
    ) -> Round:
        """Append a round's tokens, cut at the first end token and at the token limit, and return the round."""
        base_length = len(self.tokens)
        emitted = [*proposal.tokens[: verified.accepted], verified.token][: self.room]
        for index, token in enumerate(emitted):
            if token in self.eos_ids:
                emitted = emitted[: index + 1]
                self.finish_reason = "stop"
                break
        self.tokens.extend(emitted)
        if self.finish_reason is None and self.room == 0:
            self.finish_reason = "length"
        done = Round(
            index=self.rounds,
            base_length=base_length,
            proposal=proposal,
            verified=verified,
            emitted=tuple(emitted),
            finish_reason=self.finish_reason,
            gamma=gamma,
            branching=branching,
            span=span,
        )
        self.rounds += 1
        return done
