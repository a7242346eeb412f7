"""Cutting a batch into passes: every token once, in order, padding and memory bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from execution.passes import CHUNK, Piece, plan


def test_a_round_of_decoding_is_one_pass():
    assert len(plan([1, 5, 9, 3, 1, 1, 2, 9], [1, 5, 9, 3, 1, 1, 2, 9])) == 1
    assert plan([], []) == [] == plan([0], [0])


def test_a_long_prompt_goes_in_chunks_and_alone():
    passes = plan([2 * CHUNK + 10, 3], [1, 3])
    assert passes[:2] == [[Piece(0, 0, CHUNK, 0)], [Piece(0, CHUNK, 2 * CHUNK, 0)]]
    assert passes[2] == [Piece(0, 2 * CHUNK, 2 * CHUNK + 10, 1), Piece(1, 0, 3, 3)]
    assert [len(group) for group in plan([500, 1, 1, 1], [1, 1, 1, 1])] == [1, 3]


@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 1500)), max_size=20))
def test_every_token_once_and_in_order(rows):
    counts = [count for count, _ in rows]
    logits = [min(rows[index][1], count) for index, count in enumerate(counts)]
    held, asked = [0] * len(rows), [0] * len(rows)
    for group in plan(counts, logits):
        assert len({piece.index for piece in group}) == len(group)
        padded = max(piece.count for piece in group) * len(group)
        assert padded <= 2048 or len(group) == 1
        assert padded <= 1.25 * sum(piece.count for piece in group) + 64
        for piece in group:
            assert piece.start == held[piece.index] and 0 < piece.count <= CHUNK
            held[piece.index] = piece.stop
            asked[piece.index] += piece.logits
            first = counts[piece.index] - logits[piece.index]
            assert piece.logits == sum(first <= at < piece.stop for at in range(piece.start, piece.stop))
    assert (held, asked) == (counts, logits)
