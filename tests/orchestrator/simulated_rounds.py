"""Two devices that take stated times, in target steps, and requests that go round between them as a Pacer says.

The draft runs step by step, and what waits joins at the next step; the target takes what is there when it is free,
once that is half of the requests (ping-pong).
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.goodput import expected_tokens, forks, hit_share
from orchestrator.pace import MAX_AUTO, WIDTHS, Pace, Pacer, Plan


@dataclass
class World:
    """What is true, and may be changed while it runs. `jitter` and `hiccups` (10 times as long) are of the measured
    times only: what they do to estimates is of interest, not what they cost."""

    alpha: float = 0.8
    c: float = 0.1
    v_slope: float = 0.0  # target steps for each position beyond the first
    c_slope: float = 0.0  # of a draft step for each row beyond the first
    to_draft: float = 0.0  # a round trip
    to_target: float = 0.01
    beside: float = 1.0  # how many times as long a pass takes while the draft is at branches, of one request
    jitter: float = 0.05
    hiccups: float = 0.01
    one: float = 1.0  # a pass of one position

    def verify(self, positions: float) -> float:
        return self.one + self.v_slope * (positions - 1)

    def step(self, rows: float) -> float:
        return self.c * (1 + self.c_slope * (rows - 1))

    def hits(self, width: int, gamma: int) -> float:
        return min(0.97, hit_share(width, forks(self.alpha, gamma))) if width else 0.0

    def goodput(self, gamma: int, width: int) -> float:
        """Tokens a target step of one request at a fixed choice, in the long run."""
        h = self.hits(width, gamma) if gamma else 0.0
        verified = self.verify(gamma + 1) * (self.beside if width else 1.0) + self.to_target
        run = gamma * self.step(width) + self.to_draft
        drafting = gamma * self.step(1) + (self.to_draft if gamma else 0.0)
        interrupted = self.step(width) / 2 if width and run > verified else 0.0
        return expected_tokens(self.alpha, gamma) / (
            h * max(verified, run) + (1 - h) * (verified + interrupted + drafting)
        )

    def best(self, *, overlap: bool) -> float:
        widths = WIDTHS if overlap else (0,)
        return max(self.goodput(gamma, width) for gamma in range(MAX_AUTO + 1) for width in widths)


@dataclass
class Job:
    """Something that the draft is at: `rows` for so many more steps."""

    rows: int
    steps: int
    done: Callable[[], None]
    asked: int = 0


@dataclass
class Row:
    """A request between rounds. `expected` counts its tokens by their expectation, which varies less than they do."""

    pace: Pace | None
    fixed: Plan
    wanted: float
    plan: Plan = field(default_factory=lambda: Plan(0, 0, 0))
    block: int = 0
    sent: float = 0.0
    ready: int | None = None  # γ of a branch that came
    guess: Job | None = None
    landing: bool = False  # the verdict hit, and waits for that branch
    expected: float = 0.0
    rounds: int = 0
    history: list[tuple[Plan, int]] = field(default_factory=list)


class Simulation:
    """`requests` at once, each until `tokens` are expected to be out; with a Pacer, or a fixed plan."""

    def __init__(
        self, world: World, pacer: Pacer | None, requests: int = 1, fixed: Plan | None = None, seed: int = 0
    ) -> None:
        self.world, self.pacer, self.now = world, pacer, 0.0
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._jobs: list[Job] = []
        self._stepping = self._passing = False
        self._waiting: list[Row] = []
        self.rows = [Row(pacer.request() if pacer else None, fixed or Plan(0, 0, 0), 0.0) for _ in range(requests)]

    def run(self, tokens: float) -> float:
        """Go on for `tokens` a request; tokens a target step of all."""
        begun, before = self.now, sum(row.expected for row in self.rows)
        for place, row in enumerate(self.rows):  # not in step from the start
            row.wanted = row.expected + tokens
            self._at(place / len(self.rows), lambda row=row: self._begin(row))  # type: ignore[misc]
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return (sum(row.expected for row in self.rows) - before) / (self.now - begun)

    def close(self) -> None:
        for row in self.rows:
            if row.pace:
                row.pace.close()

    def _at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def _seen(self, seconds: float) -> float:
        noise = max(0.5, self._random.gauss(1, self.world.jitter))
        return seconds * noise * (10 if self._random.random() < self.world.hiccups else 1)

    # ------------------------------------------------------------------ a round

    def _begin(self, row: Row) -> None:
        row.plan = row.pace.plan() if row.pace else row.fixed
        if row.ready is not None:
            self._send(row, row.ready)
        elif row.plan.gamma:
            gamma = row.plan.gamma
            self._at(self.world.to_draft / 2, lambda: self._ask(1, gamma, lambda: self._drafted(row, gamma)))
        else:
            self._send(row, 0)

    def _drafted(self, row: Row, gamma: int) -> None:
        if self.pacer:
            self.pacer.round_trips(draft=self._seen(self.world.to_draft))
        self._at(self.world.to_draft / 2, lambda: self._send(row, gamma))

    def _send(self, row: Row, gamma: int) -> None:
        row.sent = self.now
        row.block, row.ready, row.guess, row.landing = gamma, None, None, False
        self._waiting.append(row)
        if row.plan.width:
            row.guess = Job(row.plan.width, row.plan.branch_gamma, lambda: self._guessed(row))
            row.guess.asked = row.plan.branch_gamma
            guess = row.guess
            self._at(self.world.to_draft / 2, lambda: self._start(guess))
        self._at(0.0, self._pass)

    def _guessed(self, row: Row) -> None:
        guess = row.guess

        def come() -> None:
            if row.guess is guess:
                row.ready = row.plan.branch_gamma
                if row.landing:
                    self._end(row, hit=True)

        self._at(self.world.to_draft / 2, come)

    def _verdict(self, row: Row) -> None:
        if not row.plan.width:
            self._end(row, hit=None)
        elif self._random.random() >= self.world.hits(row.plan.width, row.block):
            if row.guess in self._jobs:
                self._jobs.remove(row.guess)
            row.guess = row.ready = None
            self._end(row, hit=False)
        elif row.ready is not None:
            self._end(row, hit=True)
        else:
            row.landing = True

    def _end(self, row: Row, hit: bool | None) -> None:
        kept = 0
        while kept < row.block and self._random.random() < self.world.alpha:
            kept += 1
        row.expected += expected_tokens(self.world.alpha, row.block)
        row.rounds += 1
        row.history.append((row.plan, row.block))
        if row.pace:
            row.pace.add(row.block, kept, kept < row.block, hit)
        if row.expected < row.wanted:
            self._begin(row)
        else:
            self._pass()

    # ------------------------------------------------------------------ the target

    def _pass(self) -> None:
        active = sum(row.expected < row.wanted for row in self.rows)
        if self._passing or not self._waiting or 2 * len(self._waiting) < active:
            return
        batch, self._waiting, self._passing = self._waiting, [], True
        positions = sum(row.block + 1 for row in batch)
        beside = any(row.guess is not None for row in batch)
        seconds = self.world.verify(positions) * (self.world.beside if beside else 1.0)

        def passed() -> None:
            self._passing = False
            if self.pacer:
                seen = self._seen(seconds)
                for row in batch:
                    waited = self.now - seconds - row.sent
                    self.pacer.verified(seen, positions, beside=beside)
                    self.pacer.round_trips(target=self._seen(self.world.to_target) + waited)
            for row in batch:
                self._at(self.world.to_target, lambda row=row: self._verdict(row))  # type: ignore[misc]
            # What is drafted within a moment of it goes along: verdicts and blocks travel at the same time.
            self._at(2 * self.world.to_target, self._pass)

        self._at(seconds, passed)

    # ------------------------------------------------------------------ the draft

    def _ask(self, rows: int, steps: int, done: Callable[[], None]) -> None:
        self._start(Job(rows, steps, done, asked=steps))

    def _start(self, job: Job) -> None:
        self._jobs.append(job)
        self._step()

    def _step(self) -> None:
        if self._stepping or not self._jobs:
            return
        self._stepping = True
        rows = sum(job.rows for job in self._jobs)
        seconds, taking = self.world.step(rows), list(self._jobs)

        def stepped() -> None:
            self._stepping = False
            for job in taking:
                job.steps -= 1
                if job.steps == 0 and job in self._jobs:
                    self._jobs.remove(job)
                    if self.pacer:
                        self.pacer.drafted(job.asked * self._seen(seconds), job.asked, rows)
                    job.done()
            self._step()

        self._at(seconds, stepped)
