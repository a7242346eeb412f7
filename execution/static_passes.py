"""Small passes with shapes out of few: recorded once as a graph and then replayed, since buffers and storage stay.

A pass of any row lengths runs as the next larger shape. Its padding lies in columns after each row's end, as that of a
ragged batch does: masked, and overwritten by what comes. Imports torch.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from execution.cuda_graphs import Graph, Graphs
from execution.pass_inputs import Ids, asked_positions, filled, padded
from execution.placement import Placement
from execution.row_cache import RowCache

MOST_POSITIONS = 128  # rows · width of a static pass; larger ones keep a device busy by themselves
MOST_GRAPHS = 64  # of the least recently used shapes, graphs are given up
_MOST_SEEN = 4096  # shapes remembered as seen once
COLUMNS = 256  # attended columns come in multiples of so many, or of a quarter of the power of two below them

Network = Callable[[Placement, Tensor, Tensor, Tensor | None], Tensor | None]

_log = logging.getLogger(__name__)


def bucket(count: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, … that is `count` or more."""
    power = 1 << (count - 1).bit_length()
    return 3 * power // 4 if power > 2 and count <= 3 * power // 4 else power


def columns(length: int) -> int:
    """How many columns are attended for `length`: at most a quarter more, or COLUMNS more."""
    step = max(COLUMNS, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


@dataclass(frozen=True)
class Shape:
    """All of a pass that isn't in its buffers."""

    first: int  # slot of the first row
    rows: int
    width: int  # tokens of each row
    length: int  # columns that attention sees
    asked: int  # positions that the head computes


@dataclass(frozen=True)
class _Frame:
    """A shape's views of the buffers."""

    place: Placement
    ids: Tensor  # int64 [rows, width]
    positions: Tensor  # int64 [rows, width]
    asked: Tensor | None  # int64 [asked]: of the rows · width positions


class StaticPasses:
    """Runs passes over rows of `cache`. `network(place, ids, positions, asked)`: raw logits [asked, H], or None.

    The first time that a shape is seen it's run, the second time recorded; then replayed until the cache's storage
    moves. A pass that can't be recorded is told of once, and `takes` says no from then on. `least`: positions of a pass
    and of the head, at least.
    """

    def __init__(
        self, cache: RowCache, network: Network, graphs: Graphs, *, model: str, device: torch.device, least: int = 1
    ) -> None:
        self._cache, self._network, self._graphs = cache, network, graphs
        self._model, self._least = model, least
        self._inputs = torch.zeros(4 * MOST_POSITIONS, dtype=torch.int64, device=device)
        self._seen: set[Shape] = set()
        self._held: OrderedDict[Shape, tuple[_Frame, Graph]] = OrderedDict()  # least recently used first
        self._generation = cache.generation
        self._failed = False

    def takes(self, rows: int, width: int) -> bool:
        """Whether `run` is for a pass of `rows` rows, the longest of `width` tokens."""
        return not self._failed and rows * self._width(rows, width) <= MOST_POSITIONS

    def run(self, rows: Sequence[int], tokens: Sequence[Ids], wanted: Sequence[int]) -> Tensor | None:
        """Raw logits [Σ wanted or more, H], the caller's own, or None where none are wanted. Rows as
        `RowCache.arrange` gave them; `RowCache.advance` is for the caller."""
        counts, starts = [array.size for array in tokens], self._cache.starts(rows)
        width = self._width(len(rows), max(counts))
        length = columns(max(starts) + width)
        asked = asked_positions(width, counts, wanted)
        asked = filled(asked, bucket(max(len(asked), self._least)))
        shape = Shape(self._cache.claim(rows, width, length), len(rows), width, length, len(asked))
        if self._cache.generation != self._generation:
            self._drop()
        writes = np.array(starts)[:, None] + np.arange(width)
        inputs = np.concatenate([part.reshape(-1) for part in (*padded(starts, width, tokens), writes)] + [asked])
        self._inputs[: inputs.size].copy_(torch.from_numpy(inputs.astype(np.int64, copy=False)), non_blocking=True)
        output = self._output(shape)
        return None if output is None else output.clone()

    def _width(self, rows: int, width: int) -> int:
        return bucket(max(width, -(-self._least // rows)))

    def _output(self, shape: Shape) -> Tensor | None:
        """What the network says of what is in the buffers."""
        if shape not in self._held:
            frame = self._frame(shape)
            if shape not in self._seen:
                if len(self._seen) == _MOST_SEEN:
                    self._seen.clear()
                self._seen.add(shape)
                return self._through(frame)
            try:
                graph = self._graphs.record(lambda: self._through(frame))
            except Exception as error:
                self._give_up(error)
                return self._through(frame)
            self._held[shape] = frame, graph
            if len(self._held) > MOST_GRAPHS:
                self._held.popitem(last=False)
        self._held.move_to_end(shape)
        _, graph = self._held[shape]
        graph.replay()
        return graph.output

    def _through(self, frame: _Frame) -> Tensor | None:
        return self._network(frame.place, frame.ids, frame.positions, frame.asked)

    def _frame(self, shape: Shape) -> _Frame:
        size = shape.rows * shape.width
        ids, positions, columns = self._inputs[: 3 * size].view(3, shape.rows, shape.width).unbind()
        asked = self._inputs[3 * size : 3 * size + shape.asked] if shape.asked else None
        starts = (shape.length - shape.width,) * shape.rows  # the same for every pass of this shape
        place = Placement(shape.first, starts, shape.width, columns, shape.length, even=False)
        _ = place.batch  # made now, not while a graph is captured
        return _Frame(place, ids, positions, asked)

    def _drop(self) -> None:
        """Graphs write to addresses: with the storage they're gone."""
        self._held.clear()
        self._graphs.forget()
        self._generation = self._cache.generation

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        self._drop()
        root: BaseException = error
        while root.__context__ is not None:  # the end of a failed capture fails too
            root = root.__context__
        reason = " ".join(str(root).split()[:60])
        _log.warning(
            "model %r: its passes cannot be captured as CUDA graphs and run eagerly, which is slower (%s: %s)",
            self._model, type(root).__name__, reason,
        )  # fmt: skip
