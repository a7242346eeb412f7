"""Noise by position, computed once: branches meet the same positions again and again. Imports torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speculative import Stream, gumbel, integers16

Place = tuple[int, Stream, int]  # seed, stream, position
KEPT_BYTES = 1 << 26
AHEAD = 64  # positions drawn in one call: it costs little more than one position does
KEPT_RANGES = 4096


class DraftDraws:
    """The integers below 65536 of stream DRAFT, by (seed, position): what draws a token of codec counts."""

    def __init__(self) -> None:
        self._ranges: OrderedDict[tuple[int, int], npt.NDArray[np.int64]] = OrderedDict()

    def integers(self, seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """int64 [N], the same as `integers16(seeds, Stream.DRAFT, positions)`."""
        return np.array([self._one(seed, place) for seed, place in zip(seeds, positions, strict=True)], dtype=np.int64)

    def _one(self, seed: int, position: int) -> int:
        key = (seed, position // AHEAD)
        if key not in self._ranges:
            first = key[1] * AHEAD
            self._ranges[key] = integers16([seed] * AHEAD, Stream.DRAFT, range(first, first + AHEAD)).numpy()
            if len(self._ranges) > KEPT_RANGES:
                self._ranges.popitem(last=False)
        return int(self._ranges[key][position % AHEAD])


class PublicNoise:
    """Rows of gumbel(seed, stream, position) of the target's streams, the latest ones kept."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._rows: OrderedDict[Place, Tensor] = OrderedDict()

    def race(self, log_q: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
        """The draft's guess at the target's public race: argmax(log q + gumbel(RACE)), log_q [N, V] -> N tokens.

        The same tokens as `speculative.draw_coupled`, to the bit.
        """
        places = [(seed, Stream.RACE, place) for seed, place in zip(seeds, positions, strict=True)]
        return self.rows(places, log_q.shape[1]).add_(log_q).argmax(dim=-1).tolist()

    def rows(self, places: Sequence[Place], vocab: int) -> Tensor:
        """float32 [N, vocab] of the (seed, stream, position)s, a copy."""
        self.fill(places, vocab)
        rows = torch.stack([self._rows[place][:vocab] for place in places])
        while len(self._rows) * vocab * 4 > KEPT_BYTES:
            self._rows.popitem(last=False)
        return rows

    def fill(self, places: Sequence[Place], vocab: int) -> None:
        """Compute the rows that aren't there."""
        known = dict.fromkeys(places)
        missing = [place for place in known if place not in self._rows or len(self._rows[place]) < vocab]
        if missing:
            seeds, streams, positions = zip(*missing, strict=True)
            drawn = gumbel(seeds, streams, positions, vocab, device=self._device)
            self._rows.update(zip(missing, drawn.unbind(), strict=True))
        for place in known:
            self._rows.move_to_end(place)
