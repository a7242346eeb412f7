"""Keys and values of many rows for transformers' attention layers: the column of a token is its position.

Each row owns a slot and writes its tokens at its own columns, so that rolling back moves a cursor and nothing else, and
the padding of a ragged batch lands beyond the row's end, where the mask hides it until real tokens overwrite it.
Imports torch and transformers' cache classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from execution.errors import RowError
from execution.interface import check_fork, check_truncate
from execution.placement import Placement

_FIRST_COLUMNS = 256
_FIRST_SLOTS = 1
_KEPT_BYTES = 768 << 20  # storage up to this size stays: rows forked and closed in each round shall cost no resize


@dataclass
class _Slot:
    row: int
    length: int = 0  # tokens held
    written: int = 0  # columns at or beyond this one are zero


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer's part of the storage, as one pass sees it: `show` sets `keys`, `values` and where to write.

    transformers calls `update`; sizes matter to no mask of ours.
    """

    is_sliding = False
    is_compileable = False
    keys_into: Tensor | None = None
    values_into: Tensor | None = None

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        place = self.owner.placement
        if place is None:  # the first passes of all, which are only there to learn the shapes
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        place.write(self.keys_into, key_states)
        place.write(self.values_into, value_states)
        return self.keys, self.values

    def get_seq_length(self, *_: Any) -> int:
        return max(self.owner.placement.starts) if self.owner.placement else 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        width = query_length if isinstance(query_length, int) else len(query_length)
        return self.get_seq_length() + width, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.0


class RowCache(Cache):  # type: ignore[misc]
    """Rows over slots 0..n−1, kept dense. Storage is one block for all layers of one shape, [layers·2, slots, ...]."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(layers)])
        self.placement: Placement | None = None
        self._blocks: list[Tensor] = []  # [parts, slots, heads, capacity, dim]
        self._parts: list[list[tuple[_Layer, str]]] = []  # whose parts a block holds
        self._slots: list[_Slot] = []
        self._slot_of: dict[int, int] = {}
        self._next_row = 0
        self.generation = 0  # of the storage: rises when that moves
        self._device = torch.device("cpu")

    # -- rows

    def open(self) -> int:
        row, self._next_row = self._next_row, self._next_row + 1
        self._slot_of[row] = len(self._slots)
        self._slots.append(_Slot(row))
        self._grow(0)
        return row

    def length(self, row: int) -> int:
        return self._slots[self._slot(row)].length

    def truncate(self, row: int, length: int) -> None:
        """Roll back. The columns given up are cleared: were they NaN, 0 · NaN would reach over the mask."""
        slot = self._slot(row)
        check_truncate(row, self._slots[slot].length, length)
        self._slots[slot].length = length
        self._clear(slot, length)

    def fork(self, row: int, length: int) -> int:
        """A new row with a copy of the first `length` columns."""
        old = self._slot(row)
        check_fork(row, self._slots[old].length, length)
        fresh = self.open()
        new = self._slot_of[fresh]
        for block in self._blocks:
            block[:, new, :, :length] = block[:, old, :, :length]
        self._slots[new].length = self._slots[new].written = length
        return fresh

    def close(self, row: int) -> None:
        """Free the row's slot, and move the last row into it so that the rows stay dense."""
        slot, last = self._slot(row), len(self._slots) - 1
        if slot != last:
            moved = self._slots[last]
            self._clear(slot, moved.written)
            for block in self._blocks:
                block[:, slot, :, : moved.written] = block[:, last, :, : moved.written]
            self._slots[slot] = _Slot(moved.row, moved.length, moved.written)
            self._slot_of[moved.row] = slot
        self._clear(last, 0)
        self._slots.pop()
        del self._slot_of[row]
        self._shrink()

    def _slot(self, row: int) -> int:
        if row not in self._slot_of:
            raise RowError(row, "is not open")
        return self._slot_of[row]

    def _clear(self, slot: int, start: int) -> None:
        held = self._slots[slot]
        if held.written > start:
            for block in self._blocks:
                block[:, slot, :, start : held.written] = 0
            held.written = start

    # -- one pass

    def arrange(self, rows: Sequence[int]) -> list[int]:
        """Make the rows' slots neighbours, moving as few as possible; the rows in the order of their slots.

        Two groups that take turns are moved once and stay where they are.
        """
        members = {self._slot(row) for row in rows}
        size = len(members)
        inside = [sum(slot in members for slot in range(size))]
        for first in range(1, len(self._slots) - size + 1):
            inside.append(inside[-1] - (first - 1 in members) + (first + size - 1 in members))
        first = inside.index(max(inside))
        window = range(first, first + size)
        strangers = [slot for slot in window if slot not in members]
        outside = sorted(slot for slot in members if slot not in window)
        self._exchange(list(zip(strangers, outside, strict=True)))
        return [self._slots[slot].row for slot in window]

    def starts(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Tokens that each row holds."""
        return tuple(self.length(row) for row in rows)

    def place(self, rows: Sequence[int], width: int) -> Placement:
        """Where to put at most `width` tokens of each row, rows as `arrange` gave them. Grows the storage."""
        starts = self.starts(rows)
        length = max(starts) + width
        first = self.claim(rows, width, length)
        columns = torch.tensor(starts)[:, None] + torch.arange(width)
        even = min(starts) == max(starts)
        return Placement(first, starts, width, columns.to(self._device), length, even)

    def claim(self, rows: Sequence[int], width: int, length: int) -> int:
        """Room for `width` columns after each row's end and `length` in all; the slot of the first row."""
        self._grow(length)
        first = self._slot_of[rows[0]]
        for slot in self._slots[
            first : first + len(rows)
        ]:  # before the pass: if it fails halfway, what it wrote is known
            slot.written = max(slot.written, slot.length + width)
        return first

    def show(self, place: Placement) -> None:
        """Let the layers read and write there."""
        self.placement = place
        for block, parts in zip(self._blocks, self._parts, strict=True):
            for (layer, part), seen, into in zip(parts, *place.places(block), strict=True):
                setattr(layer, part, seen)
                setattr(layer, f"{part}_into", into)

    def advance(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """The pass is done: the rows hold these tokens now."""
        for row, count in zip(rows, counts, strict=True):
            self._slots[self._slot(row)].length += count

    def _exchange(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        there = [a for a, _ in pairs] + [b for _, b in pairs]
        here = [b for _, b in pairs] + [a for a, _ in pairs]
        written = max(self._slots[slot].written for slot in there)
        for block in self._blocks:
            used = block[:, :, :, :written]
            used[:, torch.tensor(there, device=block.device)] = used[:, torch.tensor(here, device=block.device)]
        for a, b in pairs:
            self._slots[a], self._slots[b] = self._slots[b], self._slots[a]
            self._slot_of[self._slots[a].row], self._slot_of[self._slots[b].row] = a, b

    # -- storage

    def allocate(self) -> None:
        """After the probing pass: make blocks of the shapes that the layers showed."""
        groups: dict[tuple[int, int, torch.dtype], list[tuple[_Layer, str]]] = {}
        for layer in self.layers:
            for part in ("keys", "values"):
                shown = getattr(layer, part)
                if shown is not None:
                    groups.setdefault((shown.shape[1], shown.shape[3], shown.dtype), []).append((layer, part))
                    self._device = shown.device
        self._parts = list(groups.values())
        self._blocks = [
            torch.zeros(len(parts), _FIRST_SLOTS, heads, _FIRST_COLUMNS, dim, dtype=dtype, device=self._device)
            for (heads, dim, dtype), parts in groups.items()
        ]

    @property
    def capacity(self) -> tuple[int, int]:
        """(slots, columns) of the storage."""
        return (self._blocks[0].shape[1], self._blocks[0].shape[3]) if self._blocks else (0, 0)

    def _grow(self, length: int) -> None:
        slots, columns = self.capacity
        wanted = (_doubled(slots, len(self._slots)), _doubled(columns, length))
        if wanted != (slots, columns):
            self._resize(*wanted)

    def _shrink(self) -> None:
        """Of large storage: halve what is at most a quarter full, down to the first size."""
        if sum(block.nbytes for block in self._blocks) <= _KEPT_BYTES:
            return
        slots, columns = self.capacity
        longest = max((slot.written for slot in self._slots), default=0)
        while slots > _FIRST_SLOTS and len(self._slots) <= slots // 4:
            slots //= 2
        while columns > _FIRST_COLUMNS and longest <= columns // 4:
            columns //= 2
        if self._blocks and (slots, columns) != self.capacity:
            self._resize(slots, columns)

    def _resize(self, slots: int, columns: int) -> None:
        self.generation += 1
        used = len(self._slots)
        written = max((slot.written for slot in self._slots), default=0)
        kept = min(written, columns, self.capacity[1])
        count = min(used, slots, self.capacity[0])
        for index, old in enumerate(self._blocks):
            parts, _, heads, _, dim = old.shape
            new = torch.zeros(parts, slots, heads, columns, dim, dtype=old.dtype, device=old.device)
            new[:, :count, :, :kept] = old[:, :count, :, :kept]
            self._blocks[index] = new
            for layer, part in self._parts[index]:  # its view would keep the old block
                setattr(layer, part, None)
                setattr(layer, f"{part}_into", None)


def _doubled(now: int, needed: int) -> int:
    """`now`, doubled until it holds `needed`."""
    while now < needed:
        now *= 2
    return now
