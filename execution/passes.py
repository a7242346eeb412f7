"""Cutting a ragged batch into forward passes that waste little on padding and bound memory. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHUNK = 512  # tokens of one row in one pass
_AREA = 2048  # padded tokens of a pass beyond which no more rows join
_SLACK = 1.25  # padded tokens may exceed the real ones by this factor, and by
_FREE = 64  # this many in any case: small passes cost the weights' reading, not the padding


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of extension `index`; logits are wanted at the last `logits` of them."""

    index: int
    start: int
    stop: int
    logits: int

    @property
    def count(self) -> int:
        return self.stop - self.start


def plan(counts: Sequence[int], logits: Sequence[int]) -> list[list[Piece]]:
    """Passes in order. `counts[i]` tokens of extension i, logits at its last `logits[i]`.

    Long rows go in chunks of CHUNK; the last chunks, and the short rows, are grouped by length. An ordinary round of
    decoding, where all rows have few tokens, is one pass.
    """
    passes: list[list[Piece]] = []
    tails: list[Piece] = []
    for index, (count, wanted) in enumerate(zip(counts, logits, strict=True)):
        cut = 0
        while count - cut > CHUNK:
            passes.append([_piece(index, cut, cut + CHUNK, count, wanted)])
            cut += CHUNK
        if count > cut:
            tails.append(_piece(index, cut, count, count, wanted))
    group: list[Piece] = []
    for piece in sorted(tails, key=lambda tail: -tail.count):
        real = sum(other.count for other in group) + piece.count
        padded = (group[0].count if group else piece.count) * (len(group) + 1)
        if group and (padded > _SLACK * real + _FREE or padded > _AREA):
            passes.append(group)
            group = []
        group.append(piece)
    if group:
        passes.append(group)
    return passes


def _piece(index: int, start: int, stop: int, count: int, logits: int) -> Piece:
    return Piece(index, start, stop, max(0, stop - max(start, count - logits)))
