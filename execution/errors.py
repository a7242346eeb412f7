"""What can go wrong in running a model, as exceptions whose text is one line a user can act on.

Imports nothing.
"""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be loaded. The text is one line: what, why, what to do.

    `usage`: what was asked for can't be, as it was asked; False where something is broken (the network, a file).
    """

    def __init__(self, what: str, *, usage: bool = True) -> None:
        super().__init__(" ".join(what.split()))
        self.usage = usage


class RowError(ValueError):
    """One row of a batch cannot be extended; nothing was changed, the other rows may be sent again without it."""

    def __init__(self, row: int, text: str) -> None:
        super().__init__(f"row {row}: {text}")
        self.row = row


class NoFreeRow(ValueError):
    """All rows that the executor has are open; nothing was changed."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"all {rows} rows are in use: close one first")


class ContextFull(RowError):
    """The row would grow beyond the model's context length."""

    def __init__(self, row: int, length: int, more: int, context_length: int) -> None:
        super().__init__(row, f"{length} + {more} tokens do not fit the context of {context_length}")
        self.length = length
        self.more = more
        self.context_length = context_length
