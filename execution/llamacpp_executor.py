"""A GGUF file as an Executor, run by llama.cpp at the file's own quantisation: a row is a sequence id.

Imports torch, and llama_cpp through llamacpp_context.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from execution.errors import NoFreeRow, RowError
from execution.interface import Extension, check_batch, check_fork, check_truncate
from execution.llamacpp_context import SEQUENCES, LlamaContext, LlamaModel, Run


class LlamaCppExecutor:
    """Executor over llama.cpp. Logits lie on the host, wherever the layers run.

    `dtype` is that of keys and values; `layers`: how many run on GPU number `gpu` (−1: all). It has `SEQUENCES` rows.
    """

    device = "cpu"

    def __init__(
        self, path: Path, reference: str, *, dtype: str = "float32", threads: int = 1, layers: int = 0, gpu: int = 0
    ) -> None:
        model = LlamaModel(path, reference, layers=layers, gpu=gpu)
        self.model, self.dtype = reference, dtype
        self.vocab_size, self.context_length = model.vocab_size, model.context_length
        self.description = model.description
        self._context = LlamaContext(model, dtype=dtype, threads=threads)
        self._lengths: dict[int, int] = {}
        self._sequences: dict[int, int] = {}
        self._free = list(range(SEQUENCES))  # a heap: low numbers keep llama.cpp's tables short
        self._next = 0

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def open(self) -> int:
        if not self._free:
            raise NoFreeRow(SEQUENCES)
        row, self._next = self._next, self._next + 1
        self._sequences[row], self._lengths[row] = heapq.heappop(self._free), 0
        return row

    def length(self, row: int) -> int:
        if row not in self._lengths:
            raise RowError(row, "is not open")
        return self._lengths[row]

    def truncate(self, row: int, length: int) -> None:
        held = self.length(row)
        check_truncate(row, held, length)
        if length < held:
            self._context.cut(self._sequences[row], length)
            self._lengths[row] = length

    def fork(self, row: int, length: int) -> int:
        check_fork(row, self.length(row), length)
        fresh = self.open()
        self._context.copy(self._sequences[row], self._sequences[fresh], length)
        self._lengths[fresh] = length
        return fresh

    def close(self, row: int) -> None:
        self.truncate(row, 0)
        heapq.heappush(self._free, self._sequences.pop(row))
        del self._lengths[row]

    def extend(self, batch: Sequence[Extension]) -> list[Tensor]:
        """As the protocol has it. RuntimeError or MemoryError where llama.cpp fails: rows are what they were."""
        arrays = check_batch(batch, self.length, self.vocab_size, self.context_length)
        if not batch:
            return []
        runs = [
            Run(self._sequences[extension.row], self._lengths[extension.row], array, extension.logits)
            for extension, array in zip(batch, arrays, strict=True)
        ]
        try:
            logits = torch.from_numpy(self._context.decode(runs))
        except Exception:
            for run in runs:  # llama.cpp keeps the pieces that came before the one that failed
                self._context.cut(run.sequence, run.start)
            raise
        for extension, array in zip(batch, arrays, strict=True):
            self._lengths[extension.row] += array.size
        return list(torch.split(logits, [extension.logits for extension in batch]))
