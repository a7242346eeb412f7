"""The race's noise by position, computed once: branches meet the same positions again and again. Imports torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from speculative import Stream, gumbel

KEPT_BYTES = 1 << 26


class PublicNoise:
    """Rows of gumbel(seed, RACE, position), the latest ones kept."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._rows: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def race(self, log_q: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
        """The draft's guess at the target's public race: argmax(log q + gumbel(RACE)), log_q [N, V] -> N tokens.

        The same tokens as `speculative.draw_coupled`, to the bit.
        """
        return self._noise(seeds, positions, log_q.shape[1]).add_(log_q).argmax(dim=-1).tolist()

    def _noise(self, seeds: Sequence[int], positions: Sequence[int], vocab: int) -> Tensor:
        """float32 [N, vocab], a copy."""
        keys = list(zip(seeds, positions, strict=True))
        missing = [key for key in dict.fromkeys(keys) if key not in self._rows or len(self._rows[key]) < vocab]
        if missing:
            drawn = gumbel(
                [seed for seed, _ in missing], Stream.RACE, [place for _, place in missing], vocab, device=self._device
            )
            self._rows.update(zip(missing, drawn.unbind(), strict=True))
        rows = torch.stack([self._rows[key][:vocab] for key in keys])
        for key in dict.fromkeys(keys):
            self._rows.move_to_end(key)
        while len(self._rows) * vocab * 4 > KEPT_BYTES:
            self._rows.popitem(last=False)
        return rows
