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

from execution.interface import Extension, check_batch
from execution.token_rows import Integers, TokenRows
from execution.toy_spec import ToySpec


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


class ToyExecutor(TokenRows):
    """Executor over `toy_table`. Deterministic to the bit, whatever else is in the batch."""

    def __init__(self, reference: str, device: str = "cpu", dtype: str = "float32") -> None:
        self.spec = ToySpec.parse(reference)
        super().__init__(self.spec.order, self.spec.context)
        self.model = reference
        self.vocab_size = self.spec.vocab_size
        self.device, self.dtype = device, dtype
        self._table = toy_table(self.spec)  # [contexts, vocab]
        self._torch_device = torch.device(device)
        self._passes = 0

    def extend(self, batch: Sequence[Extension]) -> list[Tensor]:
        arrays = check_batch(batch, self.length, self.vocab_size, self.context_length)
        self._misbehave()
        if not batch:
            return []
        logits = self._logits(*self._append(batch, arrays))  # [Σ logits, vocab]
        return list(torch.split(logits, [extension.logits for extension in batch]))

    def _logits(self, slots: Integers, ends: Integers) -> Tensor:
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
