"""Codecs of q̃, the distribution that the draft really sampled from: none, counts, dense.

numpy only, never torch. Order on the draft (rule E4): encode, decode, sample, send; so the draft samples from exactly
what the target decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import FailureCode, ProtocolError
from .limits import COUNTS_TOTAL, MAX_SUPPORT, MAX_VOCAB

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CODECS: Final = ("none", "counts", "dense")

_UINT8, _UINT16, _UINT32 = np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4")
_DENSE_DTYPES: Final = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4")}


@dataclass(frozen=True, slots=True, eq=False)
class EncodedQ:
    """q̃ of a block of γ tokens as it travels.

    none: no array. counts: ids uint16|uint32 [γ, K], count − 1 uint16 [γ, K], lengths uint8|uint16 [γ].
    dense: float16|float32 [γ, V].
    """

    codec: str
    arrays: tuple[Array, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EncodedQ):
            return NotImplemented
        return (
            self.codec == other.codec
            and len(self.arrays) == len(other.arrays)
            and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(self.arrays, other.arrays, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, headers not counted."""
        return sum(array.nbytes for array in self.arrays)

    def part(self, start: int, stop: int) -> EncodedQ:
        """q̃ of the tokens [start, stop) alone, as a block of just these would carry it: no wider than its rows need."""
        arrays = tuple(array[start:stop] for array in self.arrays)
        if self.codec == "counts":
            ids, less_one, lengths = arrays
            width = int(lengths.max(initial=1))
            arrays = (ids[:, :width], less_one[:, :width], lengths.astype(_UINT8 if width <= 255 else _UINT16))
        return EncodedQ(self.codec, arrays)


NO_Q: Final = EncodedQ("none")


# ---------------------------------------------------------------- counts


def encode_counts(q_top: Floats, ids: Ints) -> tuple[Ints, Ints]:
    """Round each row to integer counts that sum to 65536, by largest remainders.

    q_top [n, K] ≥ 0 in any scale (each row is normalised over its K entries), ids [n, K] distinct in a row. Returns
    (ids, counts), both int64 [n, K]; entries whose count is 0 are dropped, the rest moves left in its order, and what
    is free at the end is id 0 with count 0. Each count is within 1 of 65536·q; ties go to the earlier column. This pair
    *is* q̃: draw from it (`draw_counts`), then send it (`pack_counts`). Raises ProtocolError (nan, bad_value).
    """
    q = np.asarray(q_top, dtype=np.float64)  # [n, K]
    chosen = np.asarray(ids, dtype=np.int64)  # [n, K]
    if q.ndim != 2 or q.shape != chosen.shape or not 1 <= q.shape[1] <= MAX_SUPPORT:
        raise _bad(f"q_top {q.shape} and ids {chosen.shape} must both be [n, K] with 1 <= K <= {MAX_SUPPORT}")
    exact = _normalised(q) * COUNTS_TOTAL
    counts = exact.astype(np.int64)  # rounded down
    missing = COUNTS_TOTAL - counts.sum(axis=1, keepdims=True)  # [n, 1], 0 <= missing <= K
    order = np.argsort(counts - exact, axis=1, kind="stable")  # largest remainder first
    counts += np.argsort(order, axis=1) < missing  # its rank
    if counts.all():
        return chosen, counts
    if np.any((counts[:, :-1] == 0) & (counts[:, 1:] > 0)):  # never where q_top falls from column to column
        left = np.argsort(counts == 0, axis=1, kind="stable")  # kept entries first, in their order
        counts, chosen = np.take_along_axis(counts, left, axis=1), np.take_along_axis(chosen, left, axis=1)
    return np.where(counts > 0, chosen, 0), counts


def draw_counts(ids: Ints, counts: Ints, draws: Ints) -> Ints:
    """The token of each row: draws int64 [n], uniform below 65536, against the running sum of counts [n, K] -> [n]."""
    below = np.cumsum(counts, axis=1) <= np.asarray(draws, dtype=np.int64)[:, None]  # [n, K]
    tokens: Ints = ids[np.arange(len(ids)), below.sum(axis=1)]
    return tokens


def pack_counts(ids: Ints, counts: Ints, vocab_size: int) -> EncodedQ:
    """The wire form of γ rows from `encode_counts` (int64 [γ, K] each); ids take 2 bytes where vocab_size ≤ 65536."""
    lengths = (counts > 0).sum(axis=1)  # [γ]
    width = int(lengths.max(initial=1))
    used = counts[:, :width]
    return EncodedQ(
        "counts",
        (
            ids[:, :width].astype(_UINT16 if vocab_size <= 65_536 else _UINT32),
            np.maximum(used - 1, 0).astype(_UINT16),
            lengths.astype(_UINT8 if width <= 255 else _UINT16),
        ),
    )


def _decode_counts(q: EncodedQ, vocab_size: int) -> tuple[Ints, Floats]:
    ids, less_one, lengths = (array.astype(np.int64) for array in q.arrays)
    width = ids.shape[1]
    if np.any((lengths < 1) | (lengths > width)):
        raise _bad(f"counts: a row's length is outside 1..{width}")
    held = np.arange(width) < lengths[:, None]  # [γ, K]
    if np.any(~held & ((ids != 0) | (less_one != 0))):
        raise _bad("counts: padding is not zero")
    counts = np.where(held, less_one + 1, 0)
    sums = counts.sum(axis=1)
    if np.any(sums != COUNTS_TOTAL):
        raise _bad(f"counts: a row sums to {int(sums[sums != COUNTS_TOTAL][0])}, not {COUNTS_TOTAL}")
    if np.any(ids >= vocab_size):
        raise _bad(f"counts: id {int(ids.max())} is outside the vocabulary of {vocab_size}")
    distinct = np.sort(np.where(held, ids, -1 - np.arange(width)), axis=1)  # padding made distinct too
    if np.any(distinct[:, 1:] == distinct[:, :-1]):
        raise _bad("counts: an id appears twice in a row")
    return ids, counts / COUNTS_TOTAL


# ---------------------------------------------------------------- dense


def encode_dense(q: Floats | npt.NDArray[np.float32], dtype: str = "float32") -> Array:
    """Rows q [n, V] ≥ 0 in any scale as float16|float32 [n, V], scaled to a largest entry of 1 (float16 keeps more so).

    The draft samples from `dense_probabilities` of this array, then sends `pack_dense` of it. Raises ProtocolError.
    """
    if dtype not in _DENSE_DTYPES:
        raise _bad(f"dense: dtype {dtype!r} is not one of {', '.join(_DENSE_DTYPES)}")
    rows = np.asarray(q, dtype=np.float64)
    if rows.ndim != 2 or not 1 <= rows.shape[1] <= MAX_VOCAB:
        raise _bad(f"dense: q {rows.shape} must be [n, V] with 1 <= V <= {MAX_VOCAB}")
    _check_rows(rows)
    peak = rows.max(axis=1, keepdims=True, initial=0.0)
    scaled: Array = (rows / peak).astype(_DENSE_DTYPES[dtype])
    return scaled


def dense_probabilities(array: Array) -> Floats:
    """float64 [n, V], each row summing to 1: what an array from `encode_dense` means. Raises ProtocolError."""
    return _normalised(array.astype(np.float64))


def pack_dense(array: Array) -> EncodedQ:
    """The wire form of γ rows from `encode_dense`."""
    return EncodedQ("dense", (np.ascontiguousarray(array),))


def _decode_dense(q: EncodedQ, vocab_size: int) -> tuple[Ints, Floats]:
    (array,) = q.arrays
    rows, width = array.shape
    if width > vocab_size:
        raise _bad(f"dense: {width} entries a row, but the vocabulary has {vocab_size}")
    ids = np.broadcast_to(np.arange(width, dtype=np.int64), (rows, width))
    return ids, dense_probabilities(array)


# ---------------------------------------------------------------- all


def decode(q: EncodedQ, tokens: npt.ArrayLike, vocab_size: int) -> tuple[Ints, Floats]:
    """q̃ of a block as (q_ids int64 [γ, K], q_probs float64 [γ, K]); free columns are id 0 with probability 0.

    none: K = 1, the token itself with probability 1 (a point mass). tokens int [γ], vocab_size the target's. A
    vocabulary smaller than the target's is fine: what q̃ does not name has probability 0. Raises ProtocolError:
    bad_frame for a wrong form, bad_value for ids outside the vocabulary, sums that are off or negative values, nan.
    """
    drafted = np.asarray(tokens, dtype=np.int64).reshape(-1)  # [γ]
    check_structure(q, drafted.size)
    if np.any((drafted < 0) | (drafted >= vocab_size)):
        raise _bad(f"a drafted token is outside the vocabulary of {vocab_size}")
    if q.codec == "counts":
        return _decode_counts(q, vocab_size)
    if q.codec == "dense":
        return _decode_dense(q, vocab_size)
    return drafted[:, None], np.ones((drafted.size, 1), dtype=np.float64)


def check_structure(q: EncodedQ, gamma: int) -> None:
    """Refuse (bad_frame) a q̃ whose arrays are not those of its codec for gamma rows. Values are `decode`'s business."""
    form = _FORMS.get(q.codec)
    if form is None:
        raise ProtocolError(FailureCode.BAD_FRAME, f"q: codec {str(q.codec)[:32]!r} is not one of {', '.join(CODECS)}")
    if not form(q.arrays, gamma):
        got = ", ".join(f"{array.dtype}{list(array.shape)}" for array in q.arrays) or "no array"
        raise ProtocolError(FailureCode.BAD_FRAME, f"q: {got} is not the {q.codec} codec of {gamma} tokens")


def _is_none(arrays: tuple[Array, ...], gamma: int) -> bool:
    return not arrays


def _is_counts(arrays: tuple[Array, ...], gamma: int) -> bool:
    if len(arrays) != 3:
        return False
    ids, less_one, lengths = arrays
    return (
        ids.dtype in (_UINT16, _UINT32)
        and less_one.dtype == _UINT16
        and lengths.dtype in (_UINT8, _UINT16)
        and ids.ndim == 2
        and ids.shape[0] == gamma
        and 1 <= ids.shape[1] <= MAX_SUPPORT
        and less_one.shape == ids.shape
        and lengths.shape == (gamma,)
    )


def _is_dense(arrays: tuple[Array, ...], gamma: int) -> bool:
    if len(arrays) != 1 or arrays[0].ndim != 2:
        return False
    (array,) = arrays
    return array.dtype in _DENSE_DTYPES.values() and array.shape[0] == gamma and 1 <= array.shape[1] <= MAX_VOCAB


_FORMS: Final[dict[str, Callable[[tuple[Array, ...], int], bool]]] = {
    "none": _is_none,
    "counts": _is_counts,
    "dense": _is_dense,
}


def _normalised(rows: Floats) -> Floats:
    """Each row over its sum; scaled by its peak first, so that neither tiny nor huge rows lose their sum."""
    _check_rows(rows)
    scaled = rows / rows.max(axis=1, keepdims=True, initial=0.0)
    return np.asarray(scaled / scaled.sum(axis=1, keepdims=True), dtype=np.float64)


def _check_rows(rows: Floats) -> None:
    if not np.all(np.isfinite(rows)):
        raise ProtocolError(FailureCode.NAN, "q: a row holds NaN or infinity")
    if np.any(rows < 0):
        raise _bad("q: a probability is negative")
    if not np.all(rows.max(axis=1, initial=0.0) > 0):
        raise _bad("q: a row has no mass")


def _bad(text: str) -> ProtocolError:
    return ProtocolError(FailureCode.BAD_VALUE, text)
