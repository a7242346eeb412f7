"""Whether passes of static shapes give the logits of eager ones, and replays the same bits each time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


class Life:
    """Rows on one executor; what happens to them depends on the seed alone."""

    def __init__(self, runner: Executor, seed: int) -> None:
        self._runner, self._rng = runner, random.Random(seed)
        self._lengths: dict[int, int] = {}
        self.logits: list[Tensor] = []  # float32 [asked positions, V], a pass each

    def live(self) -> list[Tensor]:
        """Phases in which the same rows take passes of one width, with tokens rolled back between them."""
        for phase in range(PHASES):
            self._change(phase)
            width, every = WIDTHS[phase % len(WIDTHS)], phase % 2 == 0
            rows = self._rng.sample(sorted(self._lengths), self._rng.randint(1, len(self._lengths)))
            for _ in range(ROUNDS):
                counts = [width, *(self._rng.randint(1, width) for _ in rows[1:])]
                self._extend(
                    [
                        Extension(row, self._text(count), count if every else 1)
                        for row, count in zip(rows, counts, strict=True)
                    ]
                )
                for row, count in zip(rows, counts, strict=True):
                    self._lengths[row] -= self._rng.randint(0, count)
                    self._runner.truncate(row, self._lengths[row])
        return self.logits

    def _change(self, phase: int) -> None:
        """Close a row, open two, fork one."""
        if len(self._lengths) > 3:
            row = self._rng.choice(sorted(self._lengths))
            self._runner.close(row)
            del self._lengths[row]
        for _ in range(2):
            row = self._runner.open()
            self._lengths[row] = 0
            self._extend([Extension(row, self._text(LONG if phase == PHASES // 2 else self._rng.randint(2, 40)), 1)])
        source = self._rng.choice(sorted(self._lengths))
        cut = self._rng.randint(0, self._lengths[source])
        self._lengths[self._runner.fork(source, cut)] = cut

    def _extend(self, batch: list[Extension]) -> None:
        self.logits.append(torch.cat(self._runner.extend(batch)))
        for extension in batch:
            self._lengths[extension.row] += len(extension.tokens)

    def _text(self, count: int) -> list[int]:
        return [self._rng.randrange(self._runner.vocab_size) for _ in range(count)]


def check_logits(network: Any, what: str, seed: int = 1) -> list[Finding]:
    """Random lives of ragged rows with rollback, forks, and growth beyond a resize of the storage: first on `network`
    as it is, then on the same with packed weights and replayed passes."""
    expected = Life(executor(network, graphs=False, packed=False)[0], seed).live()
    static, graphs = executor(network, graphs=True, packed=True)
    assert graphs is not None
    found = Life(static, seed).live()
    tolerance = TOLERANCE[next(network.parameters()).dtype]
    difference, led, swapped = 0.0, 0, 0
    for ours, plain in zip(found, expected, strict=True):
        largest = float(plain.abs().max())
        difference = max(difference, float((ours - plain).abs().max()) / largest)
        first, second = plain.topk(2).values.unbind(-1)
        leads = first - second > tolerance * largest
        led, swapped = led + int(leads.sum()), swapped + int((leads & (ours.argmax(-1) != plain.argmax(-1))).sum())
    return [
        Finding(
            f"{what}: packed and replayed, the plain eager logits (within {tolerance:g} of the largest)",
            f"{difference:.1e} at most, {graphs.replays} of {len(found)} passes replayed",
            difference <= tolerance and graphs.replays > 0,
        ),
        Finding(
            f"{what}: likeliest token, where its lead is above that", f"{led - swapped} of {led} the same", not swapped
        ),
        _check_replays(network, what),
    ]


def _check_replays(network: Any, what: str) -> Finding:
    static, _ = executor(network, graphs=True, packed=True)
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
