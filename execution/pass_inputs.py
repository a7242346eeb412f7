"""What one pass feeds a network, row by row and padded. Imports numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def padded(starts: Sequence[int], width: int, tokens: Sequence[Ids]) -> tuple[Ids, Ids]:
    """Ids and positions, [B, width] each. Padding repeats the row's last token and position."""
    size = (len(tokens), width)
    ids, positions = np.empty(size, np.int64), np.empty(size, np.int64)
    for index, (array, start) in enumerate(zip(tokens, starts, strict=True)):
        ids[index, : array.size], ids[index, array.size :] = array, array[-1]
        positions[index] = np.minimum(np.arange(start, start + width), start + array.size - 1)
    return ids, positions


def asked_positions(width: int, counts: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Of B · width positions: the last `wanted[b]` of the `counts[b]` tokens of each row."""
    ends = [row * width + count for row, count in enumerate(counts)]
    return [at for end, logits in zip(ends, wanted, strict=True) for at in range(end - logits, end)]


def filled(asked: list[int], least: int) -> list[int]:
    """At least so many: the last one repeated. None stay none."""
    return asked + asked[-1:] * (least - len(asked))
