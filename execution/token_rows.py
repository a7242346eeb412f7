"""Rows of plain tokens, with a hash of every prefix: what executors keep whose logits are a table's. Imports numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from execution.errors import RowError
from execution.interface import UNBOUNDED, Extension, check_fork, check_truncate

Integers = npt.NDArray[np.int64]

_MULTIPLIER = 6364136223846793005  # Knuth's MMIX congruential generator; int64 products wrap
_INVERSE = pow(_MULTIPLIER, -1, 1 << 64) - (1 << 64)  # as int64; odd numbers have one modulo 2**64


class TokenRows:
    """The row-keeping half of an Executor; `extend` is its subclass's.

    Tokens stand after `order` leading zeros, so that windows of the last `order` tokens never start before the row.
    """

    context_length: int
    free_rows = UNBOUNDED

    def __init__(self, order: int, context_length: int) -> None:
        self.context_length = context_length
        self._order = order
        self._lengths: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._next = 0
        self._tokens = np.zeros((0, order), dtype=np.int64)  # [slots, order + capacity]
        self._hashes = np.zeros((0, 1), dtype=np.int64)  # of the prefix of each length [slots, 1 + capacity]

    def open(self) -> int:
        row, self._next = self._next, self._next + 1
        if not self._free:
            slots = len(self._tokens)
            more = max(8, slots)
            self._tokens = np.pad(self._tokens, ((0, more), (0, 0)))
            self._hashes = np.pad(self._hashes, ((0, more), (0, 0)))
            self._free = list(range(slots + more - 1, slots - 1, -1))
        self._slots[row], self._lengths[row] = self._free.pop(), 0
        return row

    def length(self, row: int) -> int:
        if row not in self._lengths:
            raise RowError(row, "is not open")
        return self._lengths[row]

    def truncate(self, row: int, length: int) -> None:
        check_truncate(row, self.length(row), length)
        self._lengths[row] = length

    def fork(self, row: int, length: int) -> int:
        check_fork(row, self.length(row), length)
        fresh = self.open()
        old, new = self._slots[row], self._slots[fresh]
        self._tokens[new, : self._order + length] = self._tokens[old, : self._order + length]
        self._hashes[new, : length + 1] = self._hashes[old, : length + 1]
        self._lengths[fresh] = length
        return fresh

    def close(self, row: int) -> None:
        self.length(row)
        self._free.append(self._slots.pop(row))
        del self._lengths[row]

    def _append(self, batch: Sequence[Extension], arrays: Sequence[Integers]) -> tuple[Integers, Integers]:
        """Store a checked, non-empty batch.

        The asked positions of all rows, concatenated: slot and number of tokens before and at each. [Σ logits] each
        """
        counts = np.array([array.size for array in arrays])
        starts = np.array([self._lengths[extension.row] for extension in batch])
        slots = np.array([self._slots[extension.row] for extension in batch])
        self._reserve(int((starts + counts).max()))
        of, within = _ragged(counts)
        tokens = np.concatenate(arrays)
        at = starts[of] + within
        self._tokens[slots[of], self._order + at] = tokens
        self._hashes[slots[of], at + 1] = self._hashed(self._hashes[slots, starts], tokens, counts)
        for extension, array in zip(batch, arrays, strict=True):
            self._lengths[extension.row] += array.size
        wanted = np.array([extension.logits for extension in batch])
        of, within = _ragged(wanted)
        return slots[of], (starts + counts - wanted)[of] + within + 1

    def _reserve(self, length: int) -> None:
        capacity = self._hashes.shape[1] - 1
        if length > capacity:
            more = min(self.context_length, max(64, 2 * length)) - capacity
            self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))
            self._hashes = np.pad(self._hashes, ((0, 0), (0, more)))

    @staticmethod
    def _hashed(before: Integers, tokens: Integers, counts: Integers) -> Integers:
        """h ← h · M + t + 1 after each token, for all rows at once: h_k = Mᵏ (h₀ + Σ_{j≤k} (t_j + 1) M⁻ʲ)."""
        of, within = _ragged(counts)
        longest = int(counts.max())
        powers = np.full(longest, _MULTIPLIER).cumprod()[within]
        inverses = np.full(longest, _INVERSE).cumprod()[within]
        sums = np.concatenate(([0], ((tokens + 1) * inverses).cumsum()))  # differences are exact: all is modulo 2**64
        found: Integers = powers * ((before - sums[np.cumsum(counts) - counts])[of] + sums[1:])
        return found


def _ragged(counts: Integers) -> tuple[Integers, Integers]:
    """Of runs of these lengths, laid one after another: which run, and how far into it. [Σ counts] each"""
    of = np.repeat(np.arange(counts.size), counts)
    return of, np.arange(of.size) - (np.cumsum(counts) - counts)[of]
