"""Rows of an executor, transformers' or llama.cpp's, give the plain network's logits, whatever happens around them."""

from __future__ import annotations

import random

import pytest
import torch

from execution.errors import ContextFull, RowError
from execution.interface import Extension

VOCAB, WINDOW = 61, 8  # of the tiny networks in conftest.py
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def same(ours, expected):
    scale = max(1.0, float(expected.abs().max()))  # gemma's logits are in the tens
    torch.testing.assert_close(ours / scale, expected / scale, **CLOSE)


def test_ragged_batch_equals_each_row_alone(family, make_pair, some_tokens):
    pair = make_pair(family)
    texts = [some_tokens(count, seed=count) for count in (3, 17, 9, 1)]
    rows = [pair.executor.open() for _ in texts]
    found = pair.executor.extend([Extension(row, text, len(text)) for row, text in zip(rows, texts, strict=True)])
    for logits, text in zip(found, texts, strict=True):
        assert logits.dtype == torch.float32 and logits.shape == (len(text), VOCAB)
        same(logits, pair.plain(text))


def test_pieces_equal_one_pass(family, make_pair, some_tokens):
    """Also fault E4: the pieces cross the sliding window of 8, in steps that lie across its edge."""
    pair = make_pair(family)
    text = some_tokens(40, seed=1)
    row, held, found = pair.executor.open(), 0, []
    for count in (1, 5, 3, 7, 1, 1, 12, 10):
        found += pair.executor.extend([Extension(row, text[held : held + count], count)])
        held += count
    assert held == 40 > 2 * WINDOW
    same(torch.cat(found), pair.plain(text))


def test_window_is_seen_by_these_tests(make_pair, some_tokens):
    """The windows of the tiny networks matter: with a wider one the logits differ."""
    pair = make_pair("mistral")
    text = some_tokens(40, seed=1)
    inside = pair.plain(text)
    pair.network.config.sliding_window = 90
    assert (inside[WINDOW + 1 :] - pair.plain(text)[WINDOW + 1 :]).abs().max() > 1e-2


def test_random_life_of_many_rows(family, make_pair):
    """Open, extend in ragged batches, roll back, close, in random order; every logit is checked."""
    pair, rng = make_pair(family), random.Random(family)
    texts: dict[int, list[int]] = {}
    for _ in range(25):
        if len(texts) < 5 and rng.random() < 0.5:
            texts[pair.executor.open()] = []
        for row in rng.sample(sorted(texts), rng.randint(0, len(texts) // 2)):
            cut = rng.randint(0, len(texts[row]))
            pair.executor.truncate(row, cut)
            del texts[row][cut:]
        batch = []
        for row in rng.sample(sorted(texts), rng.randint(0, len(texts))):
            fresh = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, 9)))][: 90 - len(texts[row])]
            if fresh:
                batch.append(Extension(row, fresh, rng.randint(0, len(fresh))))
        for extension, logits in zip(batch, pair.executor.extend(batch), strict=True):
            texts[extension.row] += extension.tokens
            assert logits.shape == (extension.logits, VOCAB)
            if extension.logits:
                same(logits, pair.plain(texts[extension.row])[-extension.logits :])
        for row in texts:
            assert pair.executor.length(row) == len(texts[row])
        if texts and rng.random() < 0.3:
            row = rng.choice(sorted(texts))
            pair.executor.close(row)
            del texts[row]


def test_partial_accept_leaves_no_stale_state(engine, make_pair, some_tokens):
    """Fault E3: after a block of which two tokens were kept, the next logits are those of the kept tokens."""
    pair = make_pair(engine)
    prompt, block, other = some_tokens(12, 1), some_tokens(6, 2), some_tokens(3, 3)
    row = pair.executor.open()
    pair.executor.extend([Extension(row, prompt, 0)])
    pair.executor.extend([Extension(row, block, 6)])
    pair.executor.truncate(row, 12 + 2)
    [logits] = pair.executor.extend([Extension(row, other, 3)])
    same(logits, pair.plain(prompt + block[:2] + other)[-3:])


def test_parallel_requests_do_not_interfere(engine, make_pair, some_tokens):
    """Fault E7: one repetitive text beside another, token by token in one batch."""
    pair = make_pair(engine)
    texts = [some_tokens(20, 4), [7] * 20]
    rows = [pair.executor.open(), pair.executor.open()]
    found: list[list[torch.Tensor]] = [[], []]
    for position in range(20):
        batch = [Extension(row, [text[position]], 1) for row, text in zip(rows, texts, strict=True)]
        for logits, parts in zip(pair.executor.extend(batch), found, strict=True):
            parts.append(logits)
    for text, parts in zip(texts, found, strict=True):
        same(torch.cat(parts), pair.plain(text))


def test_long_prompts_go_in_chunks_beside_short_rows(make_pair, some_tokens, monkeypatch):
    monkeypatch.setattr("execution.passes.CHUNK", 16)
    pair = make_pair()
    long, short = some_tokens(75, 1), some_tokens(2, 2)
    rows = [pair.executor.open(), pair.executor.open()]
    # The asked positions of the long row lie in two chunks.
    found = pair.executor.extend([Extension(rows[0], long, 20), Extension(rows[1], short, 1)])
    same(found[0], pair.plain(long)[-20:])
    same(found[1], pair.plain(short)[-1:])


def test_context_end(engine, make_pair, some_tokens):
    pair = make_pair(engine)
    assert pair.executor.context_length == 96
    row, other, text = pair.executor.open(), pair.executor.open(), some_tokens(96, 1)
    pair.executor.extend([Extension(row, text[:90], 0)])
    with pytest.raises(ContextFull, match=rf"row {row}: 90 \+ 7 tokens do not fit the context of 96"):
        pair.executor.extend([Extension(other, [1], 1), Extension(row, [1] * 7, 1)])
    assert (pair.executor.length(row), pair.executor.length(other)) == (90, 0)
    # Up to the last position, in a batch whose padding points beyond it.
    found = pair.executor.extend([Extension(row, text[90:], 6), Extension(other, text[:9], 1)])
    same(found[0], pair.plain(text)[-6:])


def test_learned_positions_at_the_context_end(make_pair, some_tokens):
    """Padding must not index beyond the table of positions."""
    pair = make_pair("gpt2")
    row, other, text = pair.executor.open(), pair.executor.open(), some_tokens(96, 1)
    pair.executor.extend([Extension(row, text[:95], 0)])
    found = pair.executor.extend([Extension(row, text[95:], 1), Extension(other, text[:9], 1)])
    same(found[0], pair.plain(text)[-1:])
    same(found[1], pair.plain(text[:9])[-1:])


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_bad_token_is_refused_before_anything_changes(token, engine, make_pair):
    executor = make_pair(engine).executor
    row, other = executor.open(), executor.open()
    with pytest.raises(RowError, match=f"row {other}: token id {token} is outside 0..{VOCAB - 1}") as caught:
        executor.extend([Extension(row, [1, 2], 1), Extension(other, [3, token], 1)])
    assert caught.value.row == other
    assert executor.length(row) == executor.length(other) == 0


def test_bad_rows_and_counts_are_refused(engine, make_pair):
    executor = make_pair(engine).executor
    row = executor.open()
    with pytest.raises(ValueError, match="row 99: is not open"):
        executor.extend([Extension(99, [1], 1)])
    with pytest.raises(ValueError, match="twice"):
        executor.extend([Extension(row, [1], 1), Extension(row, [2], 1)])
    with pytest.raises(ValueError, match="logits wanted at 2 of 1 tokens"):
        executor.extend([Extension(row, [1], 2)])
    with pytest.raises(ValueError, match="cannot roll back to 1 tokens: it holds 0"):
        executor.truncate(row, 1)
    executor.close(row)
    with pytest.raises(ValueError, match="not open"):
        executor.length(row)
    assert executor.extend([]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows(dtype, make_config, some_tokens):
    from transformers import AutoModelForCausalLM

    from execution.transformers_executor import TransformersExecutor

    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(make_config("llama"), dtype=dtype).eval()
    executor = TransformersExecutor(network, "half", vocab_size=VOCAB)
    assert executor.dtype == str(dtype).removeprefix("torch.")
    texts = [some_tokens(5, 1), some_tokens(11, 2)]
    rows = [executor.open(), executor.open()]
    solo = [executor.extend([Extension(row, text, 2)])[0] for row, text in zip(rows, texts, strict=True)]
    rows = [executor.open(), executor.open()]
    batch = executor.extend([Extension(row, text, 2) for row, text in zip(rows, texts, strict=True)])
    for ours, alone in zip(batch, solo, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, alone, rtol=0, atol=2e-2)


def test_a_fork_goes_on_as_its_row_would_have(family, make_pair, some_tokens):
    """Also through growth of the slots, rows that move when others close, and the window's edge."""
    pair = make_pair(family)
    executor, plain = pair.executor, pair.plain
    text, other = some_tokens(20, 1), some_tokens(7, 2)
    row, stranger = executor.open(), executor.open()
    executor.extend([Extension(row, text, 0), Extension(stranger, other, 0)])
    cuts = [0, 1, 11, 12, 20]
    texts = {executor.fork(row, cut): text[:cut] for cut in cuts}
    assert [executor.length(fork) for fork in texts] == cuts and executor.length(row) == 20
    texts |= {row: text[:], stranger: other[:]}
    for step, gone in enumerate((stranger, row, next(iter(texts)))):  # each close moves the last row
        batch = [Extension(one, some_tokens(2 + one % 3, 10 * step + one), 1) for one in texts]
        for extension, logits in zip(batch, executor.extend(batch), strict=True):
            texts[extension.row] += extension.tokens
            same(logits, plain(texts[extension.row])[-1:])
        executor.close(gone)
        del texts[gone]
        source = max(texts)
        texts[executor.fork(source, 1)] = texts[source][:1]


def test_forks_that_cannot_be_change_nothing(make_pair, some_tokens):
    executor = make_pair().executor
    row = executor.open()
    executor.extend([Extension(row, some_tokens(5, 1), 0)])
    before = executor._cache.capacity
    for bad, length, text in (
        (row, 6, "first 6 tokens: it holds 5"),
        (row, -1, "first -1"),
        (9, 0, "row 9: is not open"),
    ):
        with pytest.raises(RowError, match=text):
            executor.fork(bad, length)
    assert executor.length(row) == 5 and executor._cache.capacity == before and executor.open() == row + 1
