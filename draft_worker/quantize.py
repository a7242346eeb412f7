"""q on its way to the wire: rows are encoded first, and tokens are drawn from what the target will decode (rule E4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.codecs import (
    EncodedQ,
    dense_probabilities,
    draw_counts,
    encode_counts,
    encode_dense,
    pack_counts,
    pack_dense,
)
from speculative import draw_dense

SMALL = 4096  # a row that torch.topk searches as fast
COUNTS_WIDTH = 64  # ids a row: about 256 bytes a token
HALF_FROM = 4096  # vocabularies above this go as float16 in codec dense

Row = tuple[npt.NDArray[Any], ...]  # counts: ids [K], counts [K]; dense: floats [V]


def draw_counts_rows(scores: Tensor, draws: npt.NDArray[np.int64]) -> tuple[list[int], list[Row]]:
    """Codec counts: the likeliest ids with integer counts, then a draw among 65536 integers.

    scores float [N, V], log q up to a constant a row; draws int64 [N] of stream DRAFT -> N tokens and the N rows that
    they were drawn from.
    """
    values, top = likeliest(scores, min(COUNTS_WIDTH, scores.shape[1]))
    odds = values.double().cpu().numpy()
    odds -= odds[:, :1].copy()  # to the largest of the row
    ids, counts = encode_counts(np.exp(odds, out=odds), top.cpu().numpy())  # int64 [N, K]
    return draw_counts(ids, counts, draws).tolist(), list(zip(ids, counts, strict=True))


def likeliest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, largest first: values and ids [N, count]. `rows` [N, V] has no NaN.

    `torch.topk`, after two looks at fewer numbers: a row is folded into columns, the largest are in the `count` columns
    with the largest maxima, and only those are searched. Of equals, which are taken depends on the row alone.
    """
    size = rows.shape[1]
    columns = 1 << round(math.log2(max(1.0, math.sqrt(count * size))))  # about as many as numbers are left in them
    depth = -(-size // columns)
    if size <= SMALL or columns <= count or depth < 2:
        top = torch.topk(rows, count)
        return top.values, top.indices
    if size < columns * depth:
        rows = torch.nn.functional.pad(rows, (0, columns * depth - size), value=-torch.inf)
    folded = rows.view(len(rows), depth, columns)
    best = likeliest(folded.amax(dim=1), count)[1]  # [N, count]
    left = folded.gather(2, best[:, None, :].expand(-1, depth, -1)).flatten(1)  # [N, depth * count]
    values, places = likeliest(left, count)
    ids = places // count * columns + best.gather(1, places % count)
    return values, ids.clamp_(max=size - 1)  # padding is taken only where less than `count` of a row is finite


def draw_dense_rows(log_q: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> tuple[list[int], list[Row]]:
    """Codec dense: the whole row as floats, then a draw from those floats normalised in float64.

    log_q float32 [N, V] -> N tokens and the N rows that they were drawn from.
    """
    dtype = "float16" if log_q.shape[1] > HALF_FROM else "float32"
    rows = encode_dense(log_q.cpu().double().exp().numpy(), dtype)  # [N, V]
    tokens = draw_dense(torch.from_numpy(dense_probabilities(rows)), seeds, positions)
    return tokens.tolist(), [(row,) for row in rows]


def pack_rows(codec: str, rows: Sequence[Row], vocab_size: int) -> EncodedQ:
    """The rows of one block in the wire's form."""
    columns = [np.concatenate(column).reshape(len(rows), -1) for column in zip(*rows, strict=True)]
    if codec == "counts":
        return pack_counts(columns[0], columns[1], vocab_size)
    return pack_dense(columns[0])
