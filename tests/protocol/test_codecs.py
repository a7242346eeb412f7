"""Codecs of q̃: counts sum exactly and stay near q, both sides read the same numbers, invalid forms are refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codecs import (
    NO_Q,
    EncodedQ,
    decode,
    dense_probabilities,
    draw_counts,
    encode_counts,
    encode_dense,
    pack_counts,
    pack_dense,
)
from protocol.errors import FailureCode, ProtocolError
from protocol.framing import decode as decode_frames
from protocol.framing import encode as encode_frames
from protocol.limits import COUNTS_TOTAL, MAX_SUPPORT
from protocol.messages import Verify, token_array

V = 49_152


@st.composite
def tops(draw: st.DrawFn) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Rows as different as softmax makes them: flat, sharp, tiny, with zeros and ties, in any scale."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = np.round(
        random.normal(0, draw(st.sampled_from((0, 0.1, 3, 40, 300))), (rows, width)), draw(st.integers(0, 9))
    )
    q = np.exp(logits - logits.max(axis=1, keepdims=True)) * draw(st.sampled_from((1.0, 1e-300, 1e300, 0.3)))
    if draw(st.booleans()):
        q *= random.random((rows, width)) < 0.5
        q[:, draw(st.integers(0, width - 1))] = 1e-3
    ids = np.stack([random.permutation(V)[:width] for _ in range(rows)])
    return q, ids


@settings(deadline=None, max_examples=200)
@given(tops())
def test_counts_follow_the_rounding_law(top: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]) -> None:
    q, ids = top
    kept, counts = encode_counts(q, ids)
    assert (counts.sum(axis=1) == COUNTS_TOTAL).all()
    assert (counts >= 0).all()
    scaled = q / q.max(axis=1, keepdims=True)
    exact = scaled / scaled.sum(axis=1, keepdims=True)
    for row in range(len(q)):
        length = int((counts[row] > 0).sum())
        assert (counts[row, :length] > 0).all() and (kept[row, length:] == 0).all()
        named = dict(zip(kept[row, :length].tolist(), counts[row, :length].tolist(), strict=True))
        assert len(named) == length
        assert [i for i in ids[row].tolist() if i in named] == kept[row, :length].tolist()  # order kept
        for token, probability in zip(ids[row].tolist(), exact[row].tolist(), strict=True):
            count = named.pop(token, 0)
            assert abs(count - COUNTS_TOTAL * probability) < 1 + 1e-6
            assert probability > 0 or count == 0  # nothing appears from nowhere
        assert not named


@settings(deadline=None, max_examples=100)
@given(tops())
def test_the_target_reads_what_the_draft_draws_from(top: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]) -> None:
    kept, counts = encode_counts(*top)
    gamma = len(kept)
    tokens = draw_counts(kept, counts, np.full(gamma, 17))
    message = Verify(1, 0, 9, 0, token_array([]), token_array(tokens), pack_counts(kept, counts, V))
    arrived = decode_frames([bytes(frame) for frame in encode_frames(message)])
    assert isinstance(arrived, Verify)
    ids, probabilities = decode(arrived.q, arrived.tokens, V)
    assert ids.dtype == np.int64 and probabilities.dtype == np.float64 and ids.shape == probabilities.shape
    width = ids.shape[1]
    assert (ids == kept[:, :width]).all() and not counts[:, width:].any()
    assert (probabilities * COUNTS_TOTAL == counts[:, :width]).all()  # exact in float64


def test_ties_and_remainders_go_to_the_earlier_column() -> None:
    kept, counts = encode_counts(np.array([[1.0, 1.0, 1.0]]), np.array([[7, 8, 9]]))
    assert counts.tolist() == [[21_846, 21_845, 21_845]] and kept.tolist() == [[7, 8, 9]]


def test_zero_counts_are_dropped_and_the_rest_moves_left() -> None:
    kept, counts = encode_counts(np.array([[0.5, 1e-9, 0.5, 0.0]]), np.array([[4, 5, 6, 7]]))
    assert kept.tolist() == [[4, 6, 0, 0]] and counts.tolist() == [[32_768, 32_768, 0, 0]]


def test_drawing_gives_each_id_its_count() -> None:
    kept, counts = encode_counts(np.array([[0.5, 0.3, 0.2, 0.0]]), np.array([[17, 4, 900, 3]]))
    draws = np.arange(COUNTS_TOTAL)
    tokens = draw_counts(np.repeat(kept, COUNTS_TOTAL, axis=0), np.repeat(counts, COUNTS_TOTAL, axis=0), draws)
    found, times = np.unique(tokens, return_counts=True)
    assert dict(zip(found.tolist(), times.tolist(), strict=True)) == {17: 32_768, 4: 19_661, 900: 13_107}


def test_a_point_mass_and_a_wide_row() -> None:
    kept, counts = encode_counts(np.array([[0.0, 2.0]]), np.array([[1, 2]]))
    packed = pack_counts(kept, counts, 10)
    assert packed.arrays[1].tolist() == [[65_535]]
    assert decode(packed, [2], 10)[1].tolist() == [[1.0]]
    wide = encode_counts(np.ones((1, MAX_SUPPORT)), np.arange(MAX_SUPPORT)[None])
    packed = pack_counts(*wide, vocab_size=V)
    assert packed.arrays[2].dtype == np.uint16
    assert decode(packed, [3], V)[1].tolist() == [[16 / COUNTS_TOTAL] * MAX_SUPPORT]


def test_ids_take_four_bytes_only_where_they_must() -> None:
    top = encode_counts(np.ones((1, 2)), np.array([[3, 65_535]]))
    assert pack_counts(*top, vocab_size=65_536).arrays[0].dtype == np.uint16
    top = encode_counts(np.ones((1, 2)), np.array([[3, 65_536]]))
    packed = pack_counts(*top, vocab_size=65_537)
    assert packed.arrays[0].dtype == np.uint32
    assert decode(packed, [3], 65_537)[0].tolist() == [[3, 65_536]]


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("codec", ["none", "counts", "dense"])
def test_every_codec_at_every_gamma(codec: str, gamma: int) -> None:
    q = np.tile([0.5, 0.25, 0.25], (gamma, 1))
    packed = {
        "none": NO_Q,
        "counts": pack_counts(*encode_counts(q, np.tile([0, 1, 2], (gamma, 1))), vocab_size=10),
        "dense": pack_dense(encode_dense(q)),
    }[codec]
    message = Verify(1, 0, 9, 0, token_array([]), token_array([1] * gamma), packed)
    assert decode_frames(encode_frames(message)) == message
    ids, probabilities = decode(packed, message.tokens, 10)
    assert len(ids) == len(probabilities) == gamma
    if gamma:
        expected = [[1.0]] * 3 if codec == "none" else [[0.5, 0.25, 0.25]] * 3
        assert probabilities.tolist() == expected


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dense_reads_the_same_on_both_sides_row_by_row(dtype: str) -> None:
    """The draft makes its rows one at a time, the target reads them together: to the last bit the same."""
    random = np.random.default_rng(5)
    q = random.dirichlet(np.full(1_001, 0.05), size=4)
    rows = encode_dense(q, dtype)
    alone = np.concatenate([dense_probabilities(encode_dense(q[i : i + 1], dtype)) for i in range(4)])
    ids, together = decode(pack_dense(rows), [1, 2, 3, 4], 1_001)
    assert (alone == together).all()
    assert (ids == np.arange(1_001)).all()
    assert np.abs(together - q).max() < (1e-3 if dtype == "float16" else 1e-7)
    assert together.sum(axis=1) == pytest.approx(np.ones(4), abs=1e-12)


def test_float16_keeps_small_probabilities_of_a_large_vocabulary() -> None:
    """Unscaled, 1 / 200,000 is a subnormal float16 that is off by up to a percent."""
    q = np.random.default_rng(2).uniform(0.5, 1.0, (1, 200_000))
    q /= q.sum()
    read = dense_probabilities(encode_dense(q, "float16"))
    assert np.abs(read / q - 1).max() < 2**-10


def test_a_smaller_vocabulary_of_the_draft_is_padded_with_nothing() -> None:
    """Fault A1: V = 8 on the draft, 10 on the target. Ids 8 and 9 have q̃ = 0; they come by residual or bonus alone."""
    dense = pack_dense(encode_dense(np.full((1, 8), 1 / 8)))
    ids, probabilities = decode(dense, [7], 10)
    assert ids.max() == 7 and probabilities.sum() == pytest.approx(1)
    counts = pack_counts(*encode_counts(np.full((1, 8), 1 / 8), np.arange(8)[None]), vocab_size=8)
    ids, probabilities = decode(counts, [7], 10)
    assert ids[probabilities > 0].max() == 7 and probabilities.sum() == 1


def test_a_drafted_token_without_mass_is_the_verifiers_business() -> None:
    q = pack_counts(*encode_counts(np.ones((1, 2)), np.array([[3, 4]])), vocab_size=10)
    ids, probabilities = decode(q, [5], 10)
    assert 5 not in ids[probabilities > 0]


def counts_of(
    ids: object, less_one: object, lengths: object, kinds: tuple[str, str, str] = ("<u2", "<u2", "<u1")
) -> EncodedQ:
    arrays = (np.array(each, dtype=kind) for each, kind in zip((ids, less_one, lengths), kinds, strict=True))
    return EncodedQ("counts", tuple(arrays))


HALF = 32_767  # count 32768


@pytest.mark.parametrize(
    ("q", "code", "says"),
    [
        (counts_of([[1, 2]], [[HALF, HALF - 1]], [2]), "bad_value", "sums to 65535"),
        (counts_of([[1, 2]], [[HALF, HALF + 1]], [2]), "bad_value", "sums to 65537"),
        (counts_of([[1, 2]], [[65_535, 65_535]], [2]), "bad_value", "sums to 131072"),
        (counts_of([[1, 1]], [[HALF, HALF]], [2]), "bad_value", "twice"),
        (counts_of([[1, 10]], [[HALF, HALF]], [2]), "bad_value", "outside the vocabulary of 10"),
        (counts_of([[1, 2]], [[65_535, 0]], [0]), "bad_value", "length"),
        (counts_of([[1, 2]], [[HALF, HALF]], [3]), "bad_value", "length"),
        (counts_of([[1, 2]], [[65_535, 0]], [1]), "bad_value", "padding"),
        (counts_of([[1, 0]], [[65_535, 5]], [1]), "bad_value", "padding"),
        (counts_of([[1, 2]], [[HALF, HALF]], [2], ("<u1", "<u2", "<u1")), "bad_frame", "counts codec"),
        (counts_of([[1, 2]], [[HALF, HALF]], [2], ("<u2", "<i4", "<u1")), "bad_frame", "counts codec"),
        (counts_of([[1, 2]], [[HALF, HALF]], [2], ("<u2", "<u2", "<u4")), "bad_frame", "counts codec"),
        (counts_of([[1, 2], [1, 2]], [[HALF, HALF]] * 2, [2, 2]), "bad_frame", "of 1 tokens"),
        (counts_of([[1, 2]], [[HALF, HALF, 0]], [2]), "bad_frame", "counts codec"),
        (counts_of([[1, 2]], [[HALF, HALF]], [2, 2]), "bad_frame", "counts codec"),
        (counts_of([1, 2], [HALF, HALF], [2]), "bad_frame", "counts codec"),
        (counts_of(np.zeros((1, 0)), np.zeros((1, 0)), [0]), "bad_frame", "counts codec"),
        (EncodedQ("counts"), "bad_frame", "no array"),
        (EncodedQ("none", (np.zeros((1, 1), np.float32),)), "bad_frame", "none codec"),
        (EncodedQ("novel"), "bad_frame", "not one of none, counts, dense"),
        (EncodedQ("dense"), "bad_frame", "dense codec"),
        (EncodedQ("dense", (np.ones((1, 3)),)), "bad_frame", "float64"),
        (EncodedQ("dense", (np.ones((2, 3), np.float32),)), "bad_frame", "of 1 tokens"),
        (EncodedQ("dense", (np.ones(3, np.float32),)), "bad_frame", "dense codec"),
        (EncodedQ("dense", (np.ones((1, 0), np.float32),)), "bad_frame", "dense codec"),
        (EncodedQ("dense", (np.ones((1, 11), np.float32),)), "bad_value", "the vocabulary has 10"),
        (EncodedQ("dense", (np.zeros((1, 3), np.float32),)), "bad_value", "no mass"),
        (EncodedQ("dense", (np.array([[1, -0.1]], np.float32),)), "bad_value", "negative"),
        (EncodedQ("dense", (np.array([[1, np.nan]], np.float32),)), "nan", "NaN"),
        (EncodedQ("dense", (np.array([[1, np.inf]], np.float16),)), "nan", "infinity"),
    ],
)  # fmt: skip
def test_every_invalid_form_is_refused(q: EncodedQ, code: str, says: str) -> None:
    with pytest.raises(ProtocolError, match=says) as caught:
        decode(q, [1], 10)
    assert caught.value.code == code


@pytest.mark.parametrize("token", [-1, 10, 2**31 - 1])
@pytest.mark.parametrize("q", [NO_Q, EncodedQ("dense", (np.ones((1, 3), np.float32),))], ids=["none", "dense"])
def test_drafted_tokens_are_in_the_vocabulary(q: EncodedQ, token: int) -> None:
    with pytest.raises(ProtocolError, match="outside the vocabulary of 10"):
        decode(q, [token], 10)


@pytest.mark.parametrize(
    ("row", "code"),
    [([0.5, np.nan], "nan"), ([0.5, np.inf], "nan"), ([0.5, -0.1], "bad_value"), ([0.0, 0.0], "bad_value")],
)
def test_a_draft_that_cannot_be_encoded_says_so(row: list[float], code: str) -> None:
    q = np.array([[0.5, 0.5], row])
    with pytest.raises(ProtocolError) as caught:
        encode_counts(q, np.array([[1, 2], [1, 2]]))
    assert caught.value.code == code
    with pytest.raises(ProtocolError) as caught:
        encode_dense(q)
    assert caught.value.code is FailureCode(code)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_counts_decode_to_a_distribution_or_are_refused(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kept, counts = encode_counts(random.dirichlet(np.full(6, 0.3), size=2), np.tile(np.arange(6), (2, 1)))
    arrays = [array.copy() for array in pack_counts(kept, counts, 10).arrays]
    for _ in range(data.draw(st.integers(0, 2))):
        array = arrays[data.draw(st.integers(0, 2))]
        array.flat[data.draw(st.integers(0, array.size - 1))] = data.draw(st.integers(0, 255))
    try:
        ids, probabilities = decode(EncodedQ("counts", tuple(arrays)), [1, 2], 10)
    except ProtocolError:
        return
    assert (probabilities.sum(axis=1) == 1).all() and (ids < 10).all()
    for row, mass in zip(ids, probabilities, strict=True):
        named = row[mass > 0]
        assert len(set(named.tolist())) == len(named)


@settings(deadline=None, max_examples=100)
@given(tops(), st.data())
def test_a_part_is_what_a_block_of_its_tokens_would_carry(
    top: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]], data: st.DataObject
) -> None:
    q, ids = top
    start = data.draw(st.integers(0, len(q) - 1))
    stop = data.draw(st.integers(start + 1, len(q)))
    kept, counts = encode_counts(q, ids)
    part = pack_counts(kept, counts, V).part(start, stop)
    assert part == pack_counts(kept[start:stop], counts[start:stop], V)
    assert part == through_the_wire(part, stop - start)
    dense = encode_dense(q, "float16")
    assert pack_dense(dense).part(start, stop) == pack_dense(dense[start:stop])


def test_parts_of_long_rows_none_and_nothing() -> None:
    """A row of more than 255 ids has wide lengths; without it the others have narrow ones."""
    q = np.zeros((2, 300))
    q[0], q[1, :3] = 1, 1
    whole = pack_counts(*encode_counts(q, np.tile(np.arange(300), (2, 1))), V)
    assert (whole.arrays[2].dtype, whole.part(1, 2).arrays[2].dtype) == (np.uint16, np.uint8)
    assert whole.part(1, 2).nbytes == 3 * 4 + 1 and whole.part(0, 2) == whole
    assert NO_Q.part(0, 3) == NO_Q
    assert whole.part(1, 1).arrays[0].shape[0] == 0


def through_the_wire(q: EncodedQ, gamma: int) -> EncodedQ:
    message = Verify(1, 0, 3, 0, token_array([]), token_array([1] * gamma), q)
    back = decode_frames(encode_frames(message))
    assert isinstance(back, Verify)
    return back.q
