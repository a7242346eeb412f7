"""Whether passes of static shapes give the logits of eager ones, and replays the same bits each time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from execution.interface import Executor, Extension
from gpu.models import executor

TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 1e-3}  # of the largest logit
PHASES, ROUNDS = 10, 4
WIDTHS = (1, 5, 9, 2)
LONG = 300  # tokens: beyond the first storage


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    what: str
    seen: str
    right: bool


class Lives:
    """The same rows on two executors."""

    def __init__(self, eager: Executor, static: Executor, seed: int) -> None:
        self._both, self._rng = (eager, static), random.Random(seed)
        self.lengths: dict[int, int] = {}
        self.difference = 0.0  # the largest of a logit, as a share of the largest logit
        self.swapped = 0  # positions where the likeliest tokens differ although the eager ones' lead is no rounding
        self.led = 0  # positions with such a lead
        self.passes = 0

    def _text(self, count: int) -> list[int]:
        return [self._rng.randrange(self._both[0].vocab_size) for _ in range(count)]

    def extend(self, batch: list[Extension], tolerance: float) -> None:
        eager, static = (each.extend(batch) for each in self._both)
        self.passes += 1
        for extension in batch:
            self.lengths[extension.row] += len(extension.tokens)
        if not any(extension.logits for extension in batch):
            return
        ours, expected = torch.cat(static), torch.cat(eager)
        largest = float(expected.abs().max())
        self.difference = max(self.difference, float((ours - expected).abs().max()) / largest)
        first, second = expected.topk(2).values.unbind(-1)
        leads = first - second > tolerance * largest
        self.led += int(leads.sum())
        self.swapped += int((leads & (ours.argmax(-1) != expected.argmax(-1))).sum())

    def change(self, phase: int, tolerance: float) -> None:
        """Open, fork, roll back and close some rows."""
        if len(self.lengths) > 3:
            row = self._rng.choice(sorted(self.lengths))
            for each in self._both:
                each.close(row)
            del self.lengths[row]
        for _ in range(2):
            opened = {each.open() for each in self._both}
            assert len(opened) == 1
            row = opened.pop()
            self.lengths[row] = 0
            size = LONG if phase == PHASES // 2 else self._rng.randint(2, 40)
            self.extend([Extension(row, self._text(size), 1)], tolerance)
        source = self._rng.choice(sorted(self.lengths))
        cut = self._rng.randint(0, self.lengths[source])
        forks = {each.fork(source, cut) for each in self._both}
        assert len(forks) == 1
        self.lengths[forks.pop()] = cut

    def live(self, tolerance: float) -> None:
        """Phases in which the same rows take passes of one width, with tokens rolled back between them."""
        for phase in range(PHASES):
            self.change(phase, tolerance)
            width, every = WIDTHS[phase % len(WIDTHS)], phase % 2 == 0
            rows = self._rng.sample(sorted(self.lengths), self._rng.randint(1, len(self.lengths)))
            for _ in range(ROUNDS):
                counts = [width, *(self._rng.randint(1, width) for _ in rows[1:])]
                batch = [
                    Extension(row, self._text(count), count if every else 1)
                    for row, count in zip(rows, counts, strict=True)
                ]
                self.extend(batch, tolerance)
                for extension in batch:
                    row = extension.row
                    kept = self.lengths[row] - self._rng.randint(0, len(extension.tokens))
                    for each in self._both:
                        each.truncate(row, kept)
                    self.lengths[row] = kept


def check_logits(network: Any, what: str, seed: int = 1) -> list[Finding]:
    """Random lives of ragged rows with rollback, forks, and growth beyond a resize of the storage."""
    (eager, _), (static, graphs) = executor(network, graphs=False), executor(network, graphs=True)
    assert graphs is not None
    tolerance = TOLERANCE[next(network.parameters()).dtype]
    lives = Lives(eager, static, seed)
    lives.live(tolerance)
    return [
        Finding(
            f"{what}: logits of static passes, of eager ones (≤ {tolerance:g} of the largest)",
            f"{lives.difference:.1e} at most, {graphs.replays} of {lives.passes} passes replayed",
            lives.difference <= tolerance and graphs.replays > 0,
        ),
        Finding(
            f"{what}: likeliest token, where its lead is above that",
            f"{lives.led - lives.swapped} of {lives.led} the same",
            not lives.swapped,
        ),
        _check_replays(network, what),
    ]


def _check_replays(network: Any, what: str) -> Finding:
    static, graphs = executor(network, graphs=True)
    assert graphs is not None
    rows = [static.open(), static.open()]
    static.extend([Extension(row, list(range(1, 30 + row)), 0) for row in rows])
    found = []
    for _ in range(8):
        batch = [Extension(row, list(range(40, 45 - row)), 5 - row) for row in rows]
        found.append(torch.cat(static.extend(batch)))
        for extension, length in zip(batch, (29, 30), strict=True):
            static.truncate(extension.row, length)
    same = sum(torch.equal(one, found[-1]) for one in found[1:])
    return Finding(
        f"{what}: the same pass again and again, bit for bit", f"{same} of {len(found) - 1} the same", same == 7
    )
