"""q on its way to the wire: rows are encoded first, and tokens are drawn from what the target will decode (rule E4)."""

from __future__ import annotations

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

COUNTS_WIDTH = 64  # ids a row: about 256 bytes a token
HALF_FROM = 4096  # vocabularies above this go as float16 in codec dense

Row = tuple[npt.NDArray[Any], ...]  # counts: ids [K], counts [K]; dense: floats [V]


def draw_counts_rows(log_q: Tensor, draws: npt.NDArray[np.int64]) -> tuple[list[int], list[Row]]:
    """Codec counts: the likeliest ids with integer counts, then a draw among 65536 integers.

    log_q float32 [N, V], draws int64 [N] of stream DRAFT -> N tokens and the N rows that they were drawn from.
    """
    top = torch.topk(log_q, min(COUNTS_WIDTH, log_q.shape[1]))
    probabilities = top.values.cpu().numpy().astype(np.float64)
    ids, counts = encode_counts(np.exp(probabilities, out=probabilities), top.indices.cpu().numpy())  # int64 [N, K]
    return draw_counts(ids, counts, draws).tolist(), list(zip(ids, counts, strict=True))


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
    columns = [np.stack(column) for column in zip(*rows, strict=True)]
    if codec == "counts":
        return pack_counts(columns[0], columns[1], vocab_size)
    return pack_dense(columns[0])
