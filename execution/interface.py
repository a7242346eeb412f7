"""What the workers ask of a model: rows of tokens that are extended in ragged batches and rolled back.

Imports torch and numpy only; the implementations are toy.py, transformers_executor.py and
llamacpp_executor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from execution.errors import ContextFull, RowError

UNBOUNDED = 1 << 30  # rows: as many as memory holds


@dataclass(frozen=True)
class Extension:
    """Tokens to append to one row.

    `logits` next-token distributions are wanted, at the last `logits` of these tokens (0: prefill only).
    """

    row: int
    tokens: Sequence[int] | npt.NDArray[np.integer]
    logits: int


class Executor(Protocol):
    """A loaded model. Not thread-safe: one thread owns it."""

    model: str  # the reference that it was loaded from
    vocab_size: int  # width of the logits; may exceed the tokenizer's size (padding)
    context_length: int  # the most tokens that a row holds
    device: str
    dtype: str

    @property
    def free_rows(self) -> int:
        """How many more can be opened now, `UNBOUNDED` where only memory says."""

    def open(self) -> int:
        """A new empty row; its number stays valid until `close`. NoFreeRow (ValueError) where there is none."""
        ...

    def extend(self, batch: Sequence[Extension]) -> list[Tensor]:
        """Append to many rows (each at most once). Per extension: float32 [logits, vocab_size] on the device.

        A reduced draft head gives −inf for ids that it cannot propose. Raises RowError (ValueError) for a token id
        outside 0..vocab_size−1, ContextFull (a RowError) for a row that would outgrow the context, ValueError for an
        unknown or repeated row; in all three cases nothing has been changed.
        """
        ...

    def length(self, row: int) -> int:
        """Tokens that the row holds."""
        ...

    def truncate(self, row: int, length: int) -> None:
        """Roll the row back to its first `length` tokens. ValueError beyond what it holds."""
        ...

    def fork(self, row: int, length: int) -> int:
        """A new row that holds the first `length` tokens of `row`; from then on neither knows of the other.

        Copies what the model keeps of them, and runs nothing. RowError (ValueError) for an unknown row and beyond
        what it holds, NoFreeRow as `open`; then nothing has been changed.
        """
        ...

    def close(self, row: int) -> None:
        """Forget the row."""
        ...


def check_batch(
    batch: Sequence[Extension], length: Callable[[int], int], vocab_size: int, context_length: int
) -> list[npt.NDArray[np.int64]]:
    """The batch's tokens as arrays, int64 [t] each, after every check that `Executor.extend` promises."""
    seen: set[int] = set()
    arrays = []
    for extension in batch:
        row, held = extension.row, length(extension.row)  # ValueError for an unknown row
        tokens = np.asarray(extension.tokens, dtype=np.int64).reshape(-1)
        if row in seen:
            raise RowError(row, "is in the batch twice; give each row one extension")
        if not 0 <= extension.logits <= tokens.size:
            raise RowError(row, f"logits wanted at {extension.logits} of {tokens.size} tokens")
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if outside.size:
            raise RowError(row, f"token id {outside[0]} is outside 0..{vocab_size - 1}")
        if held + tokens.size > context_length:
            raise ContextFull(row, held, int(tokens.size), context_length)
        seen.add(row)
        arrays.append(tokens)
    return arrays


def check_truncate(row: int, held: int, length: int) -> None:
    """ValueError unless 0 <= length <= held."""
    if not 0 <= length <= held:
        raise RowError(row, f"cannot roll back to {length} tokens: it holds {held}")


def check_fork(row: int, held: int, length: int) -> None:
    """ValueError unless 0 <= length <= held."""
    if not 0 <= length <= held:
        raise RowError(row, f"cannot fork its first {length} tokens: it holds {held}")
