"""Counting rounds: one dataclass that sinks (summary line, --json, --trace) read. Every counter uses emitted tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import IO, Any

from orchestrator.request import Branching, Request, Round


@dataclass
class RequestStats:
    """Sums over the rounds of one request. Seconds: worker compute (`draft`, `verify`), and the rest of the trips."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    refused: int = 0  # draft tokens tested and refused: at most one a round, those after it were never tested
    emitted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    hits: int = 0  # rounds after which a branch was there for what came out
    misses: int = 0  # and those that had asked for branches in vain
    gammas: dict[int, int] = field(default_factory=dict)  # rounds by the γ that was decided
    block_bytes: int = 0  # frames of verifies that carried draft tokens
    branch_bytes: int = 0  # frames that brought branches
    draft_seconds: float = 0.0
    branch_seconds: float = 0.0
    verify_seconds: float = 0.0
    wire_seconds: float = 0.0

    def add(self, done: Round) -> None:
        drafted = len(done.proposal.tokens)
        self.rounds += 1
        self.drafted += drafted
        self.accepted += done.kept
        self.refused += done.verified.accepted < drafted
        self.emitted += len(done.emitted)
        if drafted:
            self.block_bytes += done.verified.bytes_sent
        missing = drafted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(done.kept):
            self.accepted_per_position[position] += 1
        self.gammas[done.gamma] = self.gammas.get(done.gamma, 0) + 1
        branching = done.branching
        if branching is not None:
            self.branch_bytes += branching.bytes_received
            self.branch_seconds += branching.seconds
            if done.finish_reason is None:  # after the last round nothing could be hit
                self.hits += branching.hit
                self.misses += not branching.hit
        self.draft_seconds += done.proposal.seconds
        self.verify_seconds += done.verified.seconds
        self.wire_seconds += done.proposal.wire_seconds + done.verified.wire_seconds

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def mean_gamma(self) -> float:
        return sum(gamma * rounds for gamma, rounds in self.gammas.items()) / self.rounds if self.rounds else 0.0

    @property
    def hit_share(self) -> float:
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0

    @property
    def wire_bytes_per_draft_token(self) -> float:
        return self.block_bytes / self.drafted if self.drafted else 0.0

    def speculative(self) -> dict[str, Any]:
        """The object `speculative` of --json."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": self.tokens_per_round,
            "wire_bytes_per_draft_token": self.wire_bytes_per_draft_token,
            "accepted_per_position": list(self.accepted_per_position),
            "gammas": {str(gamma): rounds for gamma, rounds in sorted(self.gammas.items())},
            "branch_hits": self.hits,
            "branch_misses": self.misses,
        }

    def seconds(self, total: float) -> dict[str, float]:
        """The object `seconds` of --json; `total` is the request's wall time."""
        return {
            "draft": self.draft_seconds,
            "branches": self.branch_seconds,
            "verify": self.verify_seconds,
            "wire": self.wire_seconds,
            "total": total,
        }


class TraceSink:
    """Writes one JSON line a round: who proposed what, what was accepted, what corrected it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, request: Request, done: Round) -> None:
        proposal, verified, branching = done.proposal, done.verified, done.branching
        line = {
            "request": request.request_id,
            "round": done.index,
            "base_length": done.base_length,
            "gamma": done.gamma,
            "source": proposal.source or None,
            "origin": proposal.origin or None,
            "proposed": list(proposal.tokens),
            "accepted": verified.accepted,
            verified.origin: verified.token,
            "emitted": list(done.emitted),
            "finish_reason": done.finish_reason,
            "bytes_to_target": verified.bytes_sent,
            "branches": _branches(branching),
            "rows": verified.rows,
            "spans": {
                name: None if span is None else [span.start, span.end]
                for name, span in (
                    ("round", done.span),
                    ("draft", proposal.span),
                    ("verify", verified.span),
                    ("branches", branching.span if branching is not None else None),
                )
            },
            "seconds": {
                "draft": proposal.seconds,
                "verify": verified.seconds,
                "wire": proposal.wire_seconds + verified.wire_seconds,
            },
        }
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


def _branches(branching: Branching | None) -> dict[str, Any] | None:
    if branching is None:
        return None
    return {
        "asked": branching.asked,
        "came": branching.width,
        "hit": branching.hit,
        "seconds": branching.seconds,
        "bytes": branching.bytes_received,
    }
