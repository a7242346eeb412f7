"""Storage of keys and values: unused columns have no influence, rows stay dense, storage grows and shrinks."""

from __future__ import annotations

import pytest
import torch

from execution.interface import Extension

VOCAB = 61


def cache_of(pair):
    return pair.executor._cache


def poison(cache, value):
    """Write `value` into every column that no row uses, far beyond the rows too."""
    cache._grow(60)
    for block in cache._blocks:
        for index in range(block.shape[1]):
            used = cache._slots[index].length if index < len(cache._slots) else 0
            block[:, index, :, used:] = value


@pytest.mark.parametrize("value", [1e4, -1e4, 3.0])
def test_unused_columns_contribute_exactly_nothing(family, value, make_pair, some_tokens):
    """Bit for bit: the weight of a masked column is 0, not merely small."""
    clean, dirty = make_pair(family), make_pair(family)
    texts = [some_tokens(13, 1), some_tokens(4, 2)]
    found = []
    for pair in (clean, dirty):
        rows = [pair.executor.open() for _ in texts]
        pair.executor.extend([Extension(row, text, 0) for row, text in zip(rows, texts, strict=True)])
        if pair is dirty:
            poison(cache_of(pair), value)
        found.append(pair.executor.extend([Extension(rows[0], [5, 6], 2), Extension(rows[1], [7, 8, 9, 10], 4)]))
    for ours, poisoned in zip(*found, strict=True):
        assert torch.equal(ours, poisoned)


def nan_for(pair, token):
    with torch.no_grad():
        pair.executor._network.get_input_embeddings().weight[token] = torch.nan


def test_nan_of_one_row_reaches_no_other(make_pair, some_tokens):
    pair = make_pair()
    nan_for(pair, 50)
    clean = [token % 50 for token in some_tokens(9, 1)]
    row, bad = pair.executor.open(), pair.executor.open()
    found = pair.executor.extend([Extension(row, clean, 9), Extension(bad, [1, 50, 2], 3)])
    assert torch.isnan(found[1][1:]).all()  # (within a row and a pass, attention spreads NaN to earlier tokens too)
    torch.testing.assert_close(found[0][:, :50], pair.plain(clean)[:, :50], rtol=1e-5, atol=1e-5)
    # The slot is used again: nothing of the old row may shine through the mask.
    pair.executor.close(bad)
    again = pair.executor.open()
    found = pair.executor.extend([Extension(row, [3], 1), Extension(again, [1], 1)])
    assert not any(torch.isnan(logits[:, :50]).any() for logits in found)


def test_nan_of_a_rolled_back_block_is_gone(make_pair):
    pair = make_pair()
    nan_for(pair, 50)
    row, longer = pair.executor.open(), pair.executor.open()
    pair.executor.extend([Extension(row, [1, 2], 0), Extension(longer, [4] * 9, 0)])
    pair.executor.extend([Extension(row, [50, 3, 4], 3)])
    pair.executor.truncate(row, 2)
    # In a batch with a longer row, columns beyond the row's own end are read and masked.
    logits, _ = pair.executor.extend([Extension(row, [5], 1), Extension(longer, [4], 1)])
    torch.testing.assert_close(logits[:, :50], pair.plain([1, 2, 5])[-1:, :50], rtol=1e-5, atol=1e-5)


def test_rows_stay_dense_and_neighbours(make_pair, some_tokens):
    pair = make_pair()
    cache = cache_of(pair)
    texts = {pair.executor.open(): some_tokens(6, seed) for seed in range(6)}
    pair.executor.extend([Extension(row, text, 0) for row, text in texts.items()])
    for row in (0, 3):  # the first and one in the middle
        pair.executor.close(row)
        del texts[row]
    assert sorted(cache._slot_of.values()) == [0, 1, 2, 3]
    # Two groups take turns: moved once, then never again.
    moves = []
    exchange = cache._exchange
    cache._exchange = lambda pairs: (moves.append(len(pairs)), exchange(pairs))[1]
    groups = (sorted(texts)[::2], sorted(texts)[1::2])
    for _ in range(4):
        for group in groups:
            for row, logits in zip(group, pair.executor.extend([Extension(r, [9], 1) for r in group]), strict=True):
                texts[row].append(9)
                torch.testing.assert_close(logits, pair.plain(texts[row])[-1:], rtol=1e-5, atol=1e-5)
    assert sum(moves[:2]) > 0 == sum(moves[2:])


def test_storage_grows_by_doubling_and_shrinks_when_mostly_empty(make_pair, some_tokens, monkeypatch):
    monkeypatch.setattr("execution.row_cache._FIRST_COLUMNS", 4)
    monkeypatch.setattr("execution.row_cache._KEPT_BYTES", 0)
    pair = make_pair()
    cache = cache_of(pair)
    assert cache.capacity == (1, 4)
    long, texts = some_tokens(60, 1), {}
    row = pair.executor.open()
    pair.executor.extend([Extension(row, long, 0)])
    for seed in range(4):
        texts[pair.executor.open()] = some_tokens(3, seed)
    pair.executor.extend([Extension(other, text, 0) for other, text in texts.items()])
    assert cache.capacity == (8, 64)
    pair.executor.close(row)
    assert cache.capacity == (8, 8)
    for other in list(texts)[1:]:
        pair.executor.close(other)
    assert cache.capacity == (2, 4) or cache.capacity == (2, 8)
    [left] = list(texts)[:1]
    [logits] = pair.executor.extend([Extension(left, [1], 1)])
    torch.testing.assert_close(logits, pair.plain([*texts[left], 1])[-1:], rtol=1e-5, atol=1e-5)
    pair.executor.close(left)
    assert cache.capacity == (1, 4)


def test_forking_and_closing_again_and_again_moves_no_storage(make_pair, some_tokens):
    pair = make_pair()
    row, cache, homes = pair.executor.open(), cache_of(pair), []
    pair.executor.extend([Extension(row, some_tokens(9, 1), 0)])
    for _ in range(3):
        for fork in [pair.executor.fork(row, 9) for _ in range(6)]:
            pair.executor.close(fork)
        homes.append([block.data_ptr() for block in cache._blocks])
    assert homes[0] == homes[1] == homes[2] and cache.capacity[0] == 8


def test_all_that_is_given_up_is_cleared(make_pair, some_tokens):
    pair = make_pair()
    rows = [pair.executor.open(), pair.executor.open(), pair.executor.open()]
    pair.executor.extend([Extension(row, some_tokens(6 + 3 * row, row), 0) for row in rows])  # 12 at most: no padding
    pair.executor.close(rows[0])
    pair.executor.truncate(rows[1], 2)
    cache = cache_of(pair)
    for block in cache._blocks:
        for index in range(block.shape[1]):
            held = cache._slots[index].length if index < len(cache._slots) else 0
            assert not block[:, index, :, held:].any()
    for row in rows[1:]:
        pair.executor.close(row)
    assert not any(block.any() for block in cache._blocks)
