"""What the benchmark keeps of a run: flat numbers of each round with when it came, streams of them, and batches.

The only file here that reads a `Round`; everything after it works on these numbers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from orchestrator.request import Request, Round
from orchestrator.stats import TraceSink


@dataclass(frozen=True)
class Sample:
    """One round. Seconds; `at` is when its tokens were there (perf_counter)."""

    at: float
    wall: float  # the whole round
    gamma: int  # decided
    drafted: int
    accepted: int
    emitted: int
    verify_seconds: float = 0.0  # of the pass, which `rows` rounds shared
    rows: int = 1
    draft_seconds: float = 0.0  # that the round waited for; none where a branch was there
    draft_steps: int = 0
    from_branch: bool = False  # drafted behind the round before, if not quite in time
    bytes_sent: int = 0  # the block to the target
    branches: int | None = None  # branches that came while this block was in flight; None: not asked for
    branch_bytes: int = 0
    branch_seconds: float = 0.0  # the draft's run for them, of `branch_steps` passes with all branches in each
    branch_steps: int = 0
    hit: bool = False  # the outcome of this round was among them
    last: bool = False  # the request ended with it


@dataclass(frozen=True)
class Stream:
    """One request, ended."""

    started: float
    samples: tuple[Sample, ...]
    tokens: tuple[int, ...]
    category: str = ""

    @property
    def first(self) -> float:
        """When its first tokens were there."""
        return self.samples[0].at

    @property
    def end(self) -> float:
        return self.samples[-1].at


@dataclass(frozen=True)
class Batch:
    """Requests that were started together, one for each place of the concurrency."""

    streams: tuple[Stream, ...]


class Recorder(TraceSink):
    """A trace sink that keeps the rounds of one request as samples, and passes them on to `also`."""

    def __init__(self, category: str, also: TraceSink | None) -> None:
        self._also = also
        self._category = category
        self._started = time.perf_counter()
        self._samples: list[Sample] = []
        self._asked = False  # the round before asked for branches
        self._tokens: list[int] = []

    def write(self, request: Request, done: Round) -> None:
        self._samples.append(sample(done, time.perf_counter(), after_branches=self._asked))
        self._asked = done.branching is not None
        self._tokens.extend(done.emitted)
        if self._also is not None:
            self._also.write(request, done)

    def stream(self) -> Stream:
        return Stream(self._started, tuple(self._samples), tuple(self._tokens), self._category)


def sample(done: Round, at: float, *, after_branches: bool) -> Sample:
    """The numbers of a round that was committed at `at`; the one before it asked for branches, or not."""
    proposal, verified, branching = done.proposal, done.verified, done.branching
    late = after_branches and proposal.steps < len(proposal.tokens)  # the rest had been drafted before it was asked
    return Sample(
        at=at,
        wall=0.0 if done.span is None else done.span.seconds,
        gamma=done.gamma,
        drafted=len(proposal.tokens),
        accepted=verified.accepted,
        emitted=len(done.emitted),
        verify_seconds=verified.seconds,
        rows=max(1, verified.rows),
        draft_seconds=proposal.seconds,
        draft_steps=proposal.steps,
        from_branch=proposal.origin == "branch" or late,
        bytes_sent=verified.bytes_sent,
        branches=None if branching is None else branching.width,
        branch_bytes=0 if branching is None else branching.bytes_received,
        branch_seconds=0.0 if branching is None else branching.seconds,
        branch_steps=0 if branching is None else branching.steps,
        hit=branching is not None and branching.hit,
        last=done.finish_reason is not None,
    )
