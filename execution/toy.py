"""A table for a model: next-token logits are a known function of the last tokens, so that tests know p exactly.

Real in every other way (rows, ragged batches, rollback, failures on request). Imports torch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from execution.interface import Extension, check_batch, check_truncate
from execution.toy_spec import ToySpec

_MULTIPLIER = 6364136223846793005  # Knuth's MMIX congruential generator; int64 products wrap


def toy_table(reference: str | ToySpec) -> Tensor:
    """Logits of a toy model for every context: float32 [V**order, V] (V = vocab + padded), temperature applied.

    The row of a context is its last `order` tokens read as a number in base V, the latest token the last digit;
    tokens before the beginning count as 0. With state=hash [4096, V], the row chosen by a hash of the whole prefix.
    NaN of `nan_token` is not in the table. The part over the tokenizer's ids is the same whatever `padded` is.
    """
    spec = ToySpec.parse(reference) if isinstance(reference, str) else reference
    if spec.constant >= 0:
        table = torch.full((spec.contexts, spec.vocab_size), -torch.inf)
        table[:, spec.constant] = 0.0
        return table
    table = spec.scale * _normal(spec, spec.seed)
    if spec.noise:
        table += spec.noise * _normal(spec, spec.noise_seed)
    return table / spec.temperature


def _normal(spec: ToySpec, seed: int) -> Tensor:
    """Normal variates, float32 [contexts, V]; those over the unpadded ids do not depend on `padded`."""
    inner = torch.Generator().manual_seed(seed)
    if not spec.padded:
        return torch.randn(spec.contexts, spec.vocab, generator=inner)
    full = torch.randn(spec.contexts, spec.vocab_size, generator=torch.Generator().manual_seed(seed + 2**32))
    if spec.state == "hash":
        full[:, : spec.vocab] = torch.randn(spec.contexts, spec.vocab, generator=inner)
        return full
    shape = (spec.vocab_size,) * spec.order + (spec.vocab_size,)
    unpadded = (slice(spec.vocab),) * (spec.order + 1)
    small = torch.randn(spec.vocab**spec.order, spec.vocab, generator=inner)
    full.view(shape)[unpadded] = small.view((spec.vocab,) * (spec.order + 1))
    return full


class ToyExecutor:
    """Executor over `toy_table`. Deterministic to the bit, whatever else is in the batch."""

    def __init__(self, reference: str, device: str = "cpu", dtype: str = "float32") -> None:
        self.spec = ToySpec.parse(reference)
        self.model = reference
        self.vocab_size = self.spec.vocab_size
        self.context_length = self.spec.context
        self.device, self.dtype = device, dtype
        self._table = toy_table(self.spec)  # [contexts, vocab]
        self._torch_device = torch.device(device)
        self._lengths: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._next = 0
        self._passes = 0
        # Tokens after `order` leading zeros, so that windows never start before the row: [slots, order + capacity].
        self._tokens = np.zeros((0, self.spec.order), dtype=np.int64)
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
            raise ValueError(f"row {row}: is not open")
        return self._lengths[row]

    def truncate(self, row: int, length: int) -> None:
        check_truncate(row, self.length(row), length)
        self._lengths[row] = length

    def close(self, row: int) -> None:
        self.length(row)
        self._free.append(self._slots.pop(row))
        del self._lengths[row]

    def extend(self, batch: Sequence[Extension]) -> list[Tensor]:
        arrays = check_batch(batch, self.length, self.vocab_size, self.context_length)
        self._misbehave()
        if not batch:
            return []
        counts = np.array([array.size for array in arrays])
        starts = np.array([self._lengths[extension.row] for extension in batch])
        slots = np.array([self._slots[extension.row] for extension in batch])
        self._append(slots, starts, counts, arrays)
        for extension, count in zip(batch, counts, strict=True):
            self._lengths[extension.row] += int(count)
        wanted = np.array([extension.logits for extension in batch])
        # The asked positions of all rows, concatenated: slot and number of tokens before and at each.  [Σ logits]
        of = np.repeat(np.arange(len(batch)), wanted)
        within = np.arange(of.size) - np.repeat(np.cumsum(wanted) - wanted, wanted)
        ends = (starts + counts - wanted)[of] + within + 1
        logits = self._logits(slots[of], ends)  # [Σ logits, vocab]
        return list(torch.split(logits, wanted.tolist()))

    def _append(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, arrays: list[np.ndarray]) -> None:
        order, needed = self.spec.order, int((starts + counts).max())
        if needed > self._hashes.shape[1] - 1:
            more = min(self.context_length, max(64, 2 * needed)) - (self._hashes.shape[1] - 1)
            self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))
            self._hashes = np.pad(self._hashes, ((0, 0), (0, more)))
        for slot, start, array in zip(slots, starts, arrays, strict=True):
            self._tokens[slot, order + start : order + start + array.size] = array
        if self.spec.state != "hash":
            return
        for step in range(int(counts.max(initial=0))):
            live = np.nonzero(counts > step)[0]
            slot, at = slots[live], starts[live] + step
            with np.errstate(over="ignore"):
                self._hashes[slot, at + 1] = self._hashes[slot, at] * _MULTIPLIER + self._tokens[slot, order + at] + 1

    def _logits(self, slots: np.ndarray, ends: np.ndarray) -> Tensor:
        """float32 [n, vocab] after the first `ends[i]` tokens of slot `slots[i]`."""
        if self.spec.state == "hash":
            contexts = (self._hashes[slots, ends] >> 33) & (self.spec.contexts - 1)
        else:
            contexts = np.zeros(len(slots), dtype=np.int64)
            for back in range(self.spec.order, 0, -1):
                contexts = contexts * self.vocab_size + self._tokens[slots, self.spec.order + ends - back]
        logits = self._table[torch.from_numpy(contexts)]
        if self.spec.nan_token >= 0:
            last = self._tokens[slots, self.spec.order + ends - 1]
            logits[torch.from_numpy(last == self.spec.nan_token)] = torch.nan
        return logits.to(self._torch_device)

    def _misbehave(self) -> None:
        """The failures that the reference asked for."""
        self._passes += 1
        if self._passes == self.spec.die_after:
            os._exit(17)
        if self._passes == self.spec.hang_after:
            threading.Event().wait()
        if self.spec.delay_ms:
            time.sleep(self.spec.delay_ms / 1000)
