"""Counter-based noise: Philox4x32-10 (Salmon et al., SC 2011) in integer tensor operations.

Every random number is a pure function of (seed, stream, absolute position, index), so it depends neither on the device,
nor on the batch a row is computed in, nor on what was drawn before. Imports torch and nothing of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_FEW_ROWS = 24  # with more the tensor operations are as fast
# One row of 49,152 words at a time stays in a CPU's second-level cache; an accelerator wants few, large launches.
_CHUNK_CPU = 1 << 16
_CHUNK_ACCELERATOR = 1 << 24


class Stream(IntEnum):
    """Disjoint families of noise. What draws a drafted token (DRAFT) is read by nothing else."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3
    RACE = 4  # public: coupled verification, and the plain seeded decoding that it equals


Seeds = Sequence[int] | Tensor
Streams = Stream | Sequence[Stream]
Positions = Sequence[int] | Tensor


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds of Philox4x32 on int64 tensors whose values are uint32.

    counter [..., 4], key [..., 2] (broadcast against each other) -> [..., 4]. Known answers: Random123's kat_vectors.
    """
    if counter.dtype != torch.int64 or key.dtype != torch.int64 or counter.shape[-1] != 4 or key.shape[-1] != 2:
        raise ValueError(
            f"philox4x32 got counter {counter.dtype} {tuple(counter.shape)} and key {key.dtype} {tuple(key.shape)}; "
            "expected int64 [..., 4] and int64 [..., 2]: pass uint32 values in int64 tensors"
        )
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    return torch.stack(_rounds(c0, c1, c2, c3, k0, k1), dim=-1)


def _rounds(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rounds on separate words that may broadcast: what is equal along a row is computed once."""
    keys0, keys1 = _key_schedule(k0, _KEY_STEPS[0]), _key_schedule(k1, _KEY_STEPS[1])
    for key0, key1 in zip(keys0, keys1, strict=True):
        # The 64-bit product wraps to the unsigned product's bits, so shifting and masking gives its exact halves.
        # Words 1 and 3 are only ever XORed into a masked word: their bits above 32 may stay until the end.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> 32 ^ (c1 ^ key0)).bitwise_and_(WORD)
        c2 = (product0 >> 32 ^ (c3 ^ key1)).bitwise_and_(WORD)
        c1, c3 = product1, product0
    return c0, c1 & WORD, c2, c3 & WORD


def _key_schedule(key: Tensor, step: int) -> tuple[Tensor, ...]:
    steps = torch.arange(_ROUNDS, dtype=torch.int64, device=key.device) * step
    return ((key.unsqueeze(-1) + steps) & WORD).unbind(-1)


def random_words(
    seeds: Seeds, stream: Streams, positions: Positions, count: int, *, device: torch.device | str | None = None
) -> Tensor:
    """The first `count` words of each row's block -> int64 [N, count], each below 2**32.

    Word w of the counter (index, position, stream, 0) is column 4 * index + w. Seeds are integers below 2**64, or an
    int64 tensor of their bit patterns; `stream` is one for all rows or one a row.
    """
    return WordSource(seeds, stream, positions, device).words(count)


def uniform(seeds: Seeds, stream: Streams, positions: Positions) -> Tensor:
    """One uniform number a row in [0, 1), 53 random bits -> float64 [N] on the CPU (float64 does not exist everywhere).

    It may be exactly 0: compare with a strict `<`.
    """
    words = _first_words(seeds, stream, positions)
    return ((words[:, 0] >> 5) * (1 << 26) + (words[:, 1] >> 6)).to(torch.float64) / float(1 << 53)


def integers16(seeds: Seeds, stream: Streams, positions: Positions) -> Tensor:
    """One integer a row in [0, 65536): the top 16 bits of word 0 -> int64 [N], on the CPU."""
    return _first_words(seeds, stream, positions)[:, 0] >> 16


def _first_words(seeds: Seeds, stream: Streams, positions: Positions) -> Tensor:
    """The words at index 0, on the CPU; of a few rows in Python's own integers, ten times as fast there."""
    listed = not (isinstance(seeds, Tensor) or isinstance(positions, Tensor))
    if listed and isinstance(stream, Stream) and 0 < len(seeds) == len(positions) <= _FEW_ROWS:
        _seed_bits(seeds)
        return torch.tensor([_words_of_one(seed, stream, place) for seed, place in zip(seeds, positions, strict=True)])
    return random_words(seeds, stream, positions, 4, device="cpu")


def _words_of_one(seed: int, stream: Stream, position: int) -> tuple[int, int, int, int]:
    key0, key1 = seed & WORD, seed >> 32
    c0, c1, c2, c3 = 0, position & WORD, int(stream), 0
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = product1 >> 32 ^ c1 ^ key0, product1 & WORD
        c2, c3 = product0 >> 32 ^ c3 ^ key1, product0 & WORD
        key0, key1 = key0 + _KEY_STEPS[0] & WORD, key1 + _KEY_STEPS[1] & WORD
    return c0, c1, c2, c3


def gumbel(
    seeds: Seeds,
    stream: Streams,
    positions: Positions,
    vocab: int,
    *,
    ids: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Standard Gumbel noise of every token -> float32 [N, vocab]; of the tokens `ids` alone -> [N, M].

    `ids` is int64 [M], the same for all rows, or [N, M], each row its own; the values are the full rows' columns.
    -log(E) with E = -log1p(-(w + 0.5) / 2**32) and w the token's word: exponential races, argmax(log p + gumbel) has
    law p. Small E, the ones that win, keep full relative precision; every value is finite. The logarithms are made of
    single additions and multiplications, which IEEE rounds alike everywhere: values agree between devices bit for bit.
    """
    source = WordSource(seeds, stream, positions, device)
    columns = vocab if ids is None else ids.shape[-1]
    if ids is not None:
        if ids.dim() != 1 and ids.shape[:-1] != (len(source),):
            raise ValueError(f"noise got ids {list(ids.shape)} for {len(source)} rows; expected [M], or [N, M] by row")
        ids = ids.to(source.device)
    out = torch.empty((len(source), columns), dtype=torch.float32, device=source.device)
    budget = _CHUNK_CPU if source.device.type == "cpu" else _CHUNK_ACCELERATOR
    step = max(1, budget // max(1, columns))
    for start in range(0, len(source), step):
        chunk = slice(start, start + step)
        part = source.rows(chunk)
        words = part.words(vocab) if ids is None else part.words_of(ids if ids.dim() == 1 else ids[chunk])
        out[start : start + step] = gumbel_of_words(words)
    return out


class WordSource:
    """The words of N rows; keys, positions and streams are columns [N, 1] that broadcast against an index."""

    def __init__(
        self, seeds: Seeds, stream: Streams, positions: Positions, device: torch.device | str | None = None
    ) -> None:
        where = device if device is not None else (seeds.device if isinstance(seeds, Tensor) else "cpu")
        self.device = torch.device(where)
        key = _seed_bits(seeds).to(self.device)
        place = torch.as_tensor(positions, dtype=torch.int64).to(self.device)
        streams = [int(stream)] * len(key) if isinstance(stream, Stream) else [int(one) for one in stream]
        if not len(key) == len(place) == len(streams):
            raise ValueError(
                f"noise got {len(key)} seeds, {len(place)} positions and {len(streams)} streams; "
                "expected one of each a row"
            )
        self.low = (key & WORD).unsqueeze(1)
        self.high = ((key >> 32) & WORD).unsqueeze(1)
        self.place = (place & WORD).unsqueeze(1)
        self.streams = torch.tensor(streams, dtype=torch.int64).to(self.device).unsqueeze(1)

    def __len__(self) -> int:
        return len(self.low)

    def rows(self, where: slice | Tensor) -> WordSource:
        part = object.__new__(WordSource)
        part.device = self.device
        part.low, part.high = self.low[where], self.high[where]
        part.place, part.streams = self.place[where], self.streams[where]
        return part

    def words(self, count: int) -> Tensor:
        """Words 0 .. count - 1 of each row -> int64 [N, count]."""
        index = torch.arange((count + 3) // 4, dtype=torch.int64, device=self.device)
        out = torch.empty((len(self), len(index), 4), dtype=torch.int64, device=self.device)
        for lane, word in enumerate(self._block(index)):
            out[:, :, lane] = word
        return out.flatten(1)[:, :count]

    def words_of(self, ids: Tensor) -> Tensor:
        """Words `ids` [M], or [N, M] with each row's own, of each row -> int64 [N, M]."""
        lanes = torch.stack(self._block(ids // 4), dim=-1)  # [N, M, 4]
        return lanes.gather(2, (ids % 4).expand(lanes.shape[:2]).unsqueeze(2)).squeeze(2)

    def _block(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four words of each counter index, [M] or [N, M] -> four int64 [N, M]."""
        zero = torch.zeros_like(self.streams)
        return _rounds(index, self.place, self.streams, zero, self.low, self.high)


def _seed_bits(seeds: Seeds) -> Tensor:
    """Seeds as int64 bit patterns [N]."""
    if isinstance(seeds, Tensor):
        if seeds.dtype != torch.int64:
            raise ValueError(f"seeds are {seeds.dtype}; expected int64 bit patterns: pass integers or an int64 tensor")
        return seeds
    for seed in seeds:
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed {seed} is out of range; expected 0 <= seed < 2**64: reduce it modulo 2**64")
    return torch.tensor([seed - (1 << 64) if seed >> 63 else seed for seed in seeds], dtype=torch.int64)


# log(1 + f) = f - f²/2 + f³ P(f) on [√½ - 1, √2 - 1]; the minimax P of Cephes' logf, highest power first.
_LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_SQRT_HALF_BITS = 0x3F3504F3


def gumbel_of_words(words: Tensor) -> Tensor:
    """-log(-log1p(-x)), x = (w + 0.5) / 2**32, of uint32 words held in int64 -> float32, same shape.

    Selection is by bit masks: on random words they run several times faster than `where`.
    """
    # Below 2**30 take -x as it is; above, 1 - x is the complement's fraction, exact where 1.0 - x would cancel.
    far = ((1 << 30) - 1 - words).bitwise_right_shift_(63)
    fraction = (words ^ far).bitwise_and_(WORD).to(torch.float32).add_(0.5).mul_(2.0**-32)
    far = far.to(torch.int32)
    offset, exponent = _split(fraction)
    near_bits = fraction.neg_().view(torch.int32)
    offset = offset.view(torch.int32).bitwise_xor_(near_bits).bitwise_and_(far).bitwise_xor_(near_bits)
    exponential = _log(offset.view(torch.float32), exponent.bitwise_and_(far)).neg_()
    return _log(*_split(exponential)).neg_()


def _split(value: Tensor) -> tuple[Tensor, Tensor]:
    """Positive normal float32 = (1 + f) * 2**e with 1 + f in [√½, √2) -> f in float32, e in int32."""
    bits = value.view(torch.int32) - _SQRT_HALF_BITS
    exponent = bits >> 23
    mantissa = bits.bitwise_and_(0x7FFFFF).add_(_SQRT_HALF_BITS).view(torch.float32)
    return mantissa.sub_(1.0), exponent


def _log(offset: Tensor, exponent: Tensor) -> Tensor:
    """log((1 + offset) * 2**exponent) in float32, one rounding an operation (no fused multiply-add)."""
    scale = exponent.to(torch.float32)
    square = offset * offset
    series = offset * _LOG_COEFFICIENTS[0]
    for coefficient in _LOG_COEFFICIENTS[1:-1]:
        series.add_(coefficient).mul_(offset)
    series.add_(_LOG_COEFFICIENTS[-1]).mul_(offset).mul_(square)
    series.add_(scale * -2.12194440e-4)  # ln 2 in two parts: the larger is exact in float32 times any exponent
    series.sub_(square.mul_(0.5))
    return series.add_(offset).add_(scale.mul_(0.693359375))
