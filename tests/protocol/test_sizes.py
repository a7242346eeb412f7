"""Bytes on the wire: the bars that were set for a drafted token, all frames of the message together."""

from __future__ import annotations

import numpy as np

from protocol.codecs import NO_Q, EncodedQ, encode_counts, encode_dense, pack_counts, pack_dense
from protocol.framing import encode, frames_size
from protocol.limits import MAX_LENGTH, MAX_UINT32
from protocol.messages import Branches, Verify, token_array

GAMMA, V, K = 4, 49_152, 64


def bytes_a_token(q: EncodedQ, tail: int = 0) -> float:
    """With every integer at its largest."""
    tokens = token_array([V - 1] * GAMMA)
    message = Verify(MAX_UINT32, MAX_UINT32, MAX_LENGTH, MAX_UINT32, token_array([V - 1] * tail), tokens, q)
    return frames_size(encode(message)) / GAMMA


def test_coupled_takes_at_most_24_bytes_a_token() -> None:
    assert bytes_a_token(NO_Q) <= 24
    assert bytes_a_token(NO_Q, tail=GAMMA + 1) <= 24


def test_coupled_branches_take_12_bytes_each_and_4_a_token() -> None:
    """Bytes that no one may use: little beside those of the block itself."""
    for width in (1, 32):
        ids, lengths = token_array(range(width)), token_array([GAMMA] * width)
        tokens = token_array([V - 1] * (GAMMA * width))
        message = Branches(
            MAX_UINT32, MAX_UINT32, MAX_LENGTH, MAX_UINT32, 0.1, width, GAMMA, ids, ids, lengths, tokens, NO_Q
        )
        assert frames_size(encode(message)) <= 72 + width * (12 + 4 * GAMMA)


def test_counts_take_at_most_320_bytes_a_token() -> None:
    random = np.random.default_rng(1)
    q = random.dirichlet(np.ones(K), size=GAMMA)
    ids = np.stack([random.permutation(V)[:K] for _ in range(GAMMA)])
    packed = pack_counts(*encode_counts(q, ids), vocab_size=V)
    assert packed.nbytes == GAMMA * (4 * K + 1)
    assert bytes_a_token(packed) <= 320
    assert bytes_a_token(packed, tail=GAMMA + 1) <= 320


def test_counts_take_no_more_columns_than_are_used() -> None:
    q = np.zeros((GAMMA, K))
    q[:, 5] = 1
    packed = pack_counts(*encode_counts(q, np.tile(np.arange(K), (GAMMA, 1))), vocab_size=V)
    assert packed.nbytes == GAMMA * 5


def test_dense_takes_two_or_four_bytes_an_entry() -> None:
    q = np.ones((GAMMA, 1_000))
    assert bytes_a_token(pack_dense(encode_dense(q, "float16"))) < 2_000 + 20
    assert bytes_a_token(pack_dense(encode_dense(q, "float32"))) < 4_000 + 20
