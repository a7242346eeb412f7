"""Philox against its published answers and a reference of another kind; independence of batches; disjoint streams."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative import Stream, gumbel, integers16, philox4x32, random_words, uniform
from speculative.noise import WordSource, gumbel_of_words

MASK = 0xFFFFFFFF
WORDS = st.integers(0, MASK)


def reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's unbounded integers, straight from the paper's figure."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (right >> 32) ^ x1 ^ k0, right & MASK, (left >> 32) ^ x3 ^ k1, left & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [x0, x1, x2, x3]


def from_hex(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


KNOWN = [  # Random123, tests/kat_vectors, philox4x32 10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_published_known_answers(counter: str, key: str, answer: str) -> None:
    assert reference(from_hex(counter), from_hex(key)) == from_hex(answer)
    got = philox4x32(torch.tensor(from_hex(counter)), torch.tensor(from_hex(key)))
    assert got.tolist() == from_hex(answer)


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS, min_size=4, max_size=4), st.lists(WORDS, min_size=2, max_size=2))
def test_agrees_with_the_reference_everywhere(counter: list[int], key: list[int]) -> None:
    assert philox4x32(torch.tensor(counter), torch.tensor(key)).tolist() == reference(counter, key)


def test_broadcasts_and_refuses_other_shapes() -> None:
    counters = torch.arange(24).view(3, 2, 4)
    key = torch.tensor([7, 9])
    got = philox4x32(counters, key)
    assert got.shape == (3, 2, 4)
    assert got[2, 1].tolist() == reference(counters[2, 1].tolist(), [7, 9])
    one_counter = philox4x32(counters[0, 0], torch.tensor([[7, 9], [1, 2]]))
    assert one_counter[1].tolist() == reference(counters[0, 0].tolist(), [1, 2])
    with pytest.raises(ValueError, match="expected int64"):
        philox4x32(torch.zeros(3, dtype=torch.int64), key)
    with pytest.raises(ValueError, match="expected int64"):
        philox4x32(torch.zeros(4), key)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**64 - 1), st.sampled_from(Stream), WORDS, st.integers(0, 60))
def test_key_and_counter_layout(seed: int, stream: Stream, position: int, token: int) -> None:
    expected = reference([token // 4, position, int(stream), 0], [seed & MASK, seed >> 32])[token % 4]
    assert int(random_words([seed], stream, [position], token + 1)[0, token]) == expected
    source = WordSource([seed], stream, [position])
    assert int(source.words_of(torch.tensor([token]))[0, 0]) == expected


def test_seed_forms_and_refusals() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1]
    bits = torch.tensor([0, 1, -(2**63), -1])
    assert torch.equal(uniform(seeds, Stream.ACCEPT, [5] * 4), uniform(bits, Stream.ACCEPT, torch.tensor([5] * 4)))
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=r"expected 0 <= seed < 2\*\*64"):
            uniform([seed], Stream.ACCEPT, [0])
    with pytest.raises(ValueError, match="one of each a row"):
        uniform([1, 2], Stream.ACCEPT, [0])
    with pytest.raises(ValueError, match="int64"):
        uniform(torch.zeros(1), Stream.ACCEPT, [0])


def test_uniform_and_integers_read_the_words_they_claim() -> None:
    seeds, positions = list(range(1000)), list(range(1000))
    words = random_words(seeds, Stream.ACCEPT, positions, 2)
    u = uniform(seeds, Stream.ACCEPT, positions)
    assert u.dtype == torch.float64 and bool(((u >= 0) & (u < 1)).all())
    for row in range(0, 1000, 97):
        high, low = words[row].tolist()
        assert float(u[row]) == ((high >> 5) * 2**26 + (low >> 6)) / 2**53
    assert integers16(seeds, Stream.ACCEPT, positions).tolist() == [high >> 16 for high in words[:, 0].tolist()]


def test_uniform_is_uniform_and_may_be_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    u = uniform(list(range(60_000)), Stream.ACCEPT, [3] * 60_000).sort().values
    steps = (torch.arange(60_000) + 0.5) / 60_000
    assert float((u - steps).abs().max()) < 2.7 / math.sqrt(60_000)  # Kolmogorov-Smirnov at 1e-6
    for word, value in ((0, 0.0), (MASK, 1 - 2.0**-53)):
        constant = torch.full((1, 4), word)
        monkeypatch.setattr("speculative.noise._first_words", lambda *_, answer=constant: answer)
        assert float(uniform([1], Stream.ACCEPT, [0])) == value


def test_a_few_rows_and_many_have_the_same_numbers() -> None:
    """A few are made of Python's integers, many of tensors."""
    draws = random.Random(3)
    seeds = [0, 2**64 - 1, 2**63, *(draws.getrandbits(64) for _ in range(297))]
    positions = [0, 2**31, 2**32 - 1, *(draws.getrandbits(32) for _ in range(297))]
    for few in (1, 7, 24, 25):
        for function in (uniform, integers16):
            parts = [
                function(seeds[i : i + few], Stream.DRAFT, positions[i : i + few]) for i in range(0, len(seeds), few)
            ]
            assert torch.equal(torch.cat(parts), function(seeds, Stream.DRAFT, positions))
            bits = torch.tensor([seed - 2**64 if seed >> 63 else seed for seed in seeds])
            assert torch.equal(torch.cat(parts), function(bits, Stream.DRAFT, positions))


def test_noise_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
    positions = torch.randint(0, 10_000, (40,), generator=generator)
    vocab = 3001  # not a multiple of any vector width
    batched = gumbel(seeds, Stream.RACE, positions, vocab)
    order = torch.randperm(40, generator=generator)
    assert torch.equal(gumbel(seeds[order], Stream.RACE, positions[order], vocab), batched[order])
    for row in range(40):
        solo = gumbel(seeds[row : row + 1], Stream.RACE, positions[row : row + 1], vocab)
        assert torch.equal(solo[0], batched[row])
    assert torch.equal(gumbel(seeds, Stream.RACE, positions, 17), batched[:, :17])
    ids = torch.randperm(vocab, generator=generator)[:203]
    assert torch.equal(gumbel(seeds, Stream.RACE, positions, vocab, ids=ids), batched[:, ids])
    u = uniform(seeds, Stream.ACCEPT, positions)
    assert torch.equal(uniform(seeds[order], Stream.ACCEPT, positions[order]), u[order])
    assert all(float(uniform(seeds[i : i + 1], Stream.ACCEPT, positions[i : i + 1])) == float(u[i]) for i in range(40))


@pytest.mark.parametrize("chunk", [1 << 16, 10])  # all rows at once; two rows at a time
def test_each_row_may_have_ids_of_its_own(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculative.noise._CHUNK_CPU", chunk)
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (7,), generator=generator)
    positions, vocab = list(range(100, 107)), 1003
    full = gumbel(seeds, Stream.RACE, positions, vocab)
    ids = torch.randint(0, vocab, (7, 5), generator=generator)  # any order, repeats too
    assert torch.equal(gumbel(seeds, Stream.RACE, positions, vocab, ids=ids), full.gather(1, ids))
    assert torch.equal(gumbel(seeds, Stream.RACE, positions, vocab, ids=ids[2]), full[:, ids[2]])
    words = WordSource(seeds, Stream.RACE, positions)
    assert torch.equal(words.words_of(ids), words.words(vocab).gather(1, ids))
    assert gumbel(seeds, Stream.RACE, positions, vocab, ids=ids[:, :0]).shape == (7, 0)
    for wrong in (ids[:1], ids[:3], ids[None]):
        with pytest.raises(ValueError, match=r"expected \[M\], or \[N, M\] by row"):
            gumbel(seeds, Stream.RACE, positions, vocab, ids=wrong)


def test_one_stream_a_row() -> None:
    streams = [Stream.BONUS, Stream.RESIDUAL, Stream.BONUS]
    mixed = gumbel([1, 2, 3], streams, [7, 8, 9], 50)
    for row, stream in enumerate(streams):
        assert torch.equal(mixed[row : row + 1], gumbel([row + 1], stream, [row + 7], 50))


def test_streams_positions_and_seeds_are_disjoint() -> None:
    """No counter block is read under two names, so all words differ (B4: draft noise shared with the residual)."""
    blocks = [
        tuple(random_words([seed], stream, [position], 4)[0].tolist())
        for seed in (0, 1, 1 << 32, 2**64 - 1)
        for stream in Stream
        for position in (0, 1, 4, 1 << 31)
    ]
    assert len(set(blocks)) == len(blocks)
    draws = torch.stack([uniform(list(range(20_000)), stream, [11] * 20_000) for stream in Stream])
    correlation = torch.corrcoef(draws) - torch.eye(len(Stream))
    assert float(correlation.abs().max()) < 5 / math.sqrt(20_000)


def test_gumbel_is_precise_where_it_wins_and_finite_everywhere() -> None:
    generator = torch.Generator().manual_seed(1)
    edges = torch.arange(3000)
    words = torch.cat(
        [edges, MASK - edges, (1 << 30) - 1500 + edges, torch.randint(0, 2**32, (200_000,), generator=generator)]
    )
    exact = -torch.log(-torch.log1p(-(words.double() + 0.5) / 2**32))
    got = gumbel_of_words(words)
    assert got.dtype == torch.float32 and bool(got.isfinite().all())
    assert float(((got.double() - exact).abs() / exact.abs().clamp(min=1)).max()) < 2.5e-7
    assert bool((got[:2999] > got[1:3000]).all())  # the likeliest winners stay in order


def test_gumbel_takes_one_rounding_an_operation() -> None:
    """Single IEEE operations agree between devices bit for bit: numpy, with none of torch's kernels, must agree too."""
    import numpy as np

    words = random_words([5], Stream.RACE, [6], 4096)[0]
    one = np.float32
    coefficients = [7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1]
    coefficients += [-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1]

    def split(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits = value.view(np.int32) - np.int32(0x3F3504F3)
        return ((bits & 0x7FFFFF) + np.int32(0x3F3504F3)).view(np.float32) - one(1), (bits >> 23).astype(np.float32)

    def log(f: np.ndarray, e: np.ndarray) -> np.ndarray:
        series = f * one(coefficients[0])
        for coefficient in coefficients[1:]:
            series = (series + one(coefficient)) * f if coefficient != coefficients[-1] else series + one(coefficient)
        series = series * f * (f * f)
        series = series + e * one(-2.12194440e-4)
        series = series - (f * f) * one(0.5)
        return series + f + e * one(0.693359375)

    w = words.numpy()
    near = w < 1 << 30
    fraction = (np.where(near, w, MASK - w).astype(np.float32) + one(0.5)) * one(2.0**-32)
    f, e = split(fraction)
    exponential = -log(np.where(near, -fraction, f), np.where(near, one(0), e))
    assert torch.equal(gumbel_of_words(words), torch.from_numpy(-log(*split(exponential))))
