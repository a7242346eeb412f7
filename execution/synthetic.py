"""A device that waits: passes of a set duration over distributions of a set entropy, and drafts of a set acceptance.

For measuring the runtime alone: what a pass computes is hidden in its duration. Imports torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from execution.interface import Extension, check_batch
from execution.synthetic_spec import TARGET, SyntheticSpec
from execution.token_rows import TokenRows

_CHUNK = 1 << 18  # numbers solved for at a time: they stay in the cache
_NOISE_SEED = 1 << 32  # apart from every seed of a target
_MOST_NOISE = 4.0  # standard deviation of log q − log p; a smaller acceptance than it gives comes by mixing
_EXACT = 2e-5  # of an acceptance
_SPIN = 150e-6  # a sleep may end this much late


class SyntheticExecutor(TokenRows):
    """Executor over `synthetic_table`; the row of a prefix is chosen by the hash of all of it."""

    def __init__(self, reference: str, device: str = "cpu", dtype: str = "float32") -> None:
        self.spec = SyntheticSpec.parse(reference)
        super().__init__(0, self.spec.context)
        self.model = reference
        self.vocab_size = self.spec.vocab
        self.device, self.dtype = device, dtype
        self._table = synthetic_table(self.spec)  # [contexts, vocab]
        self._torch_device = torch.device(device)

    def extend(self, batch: Sequence[Extension]) -> list[Tensor]:
        start = time.perf_counter()
        arrays = check_batch(batch, self.length, self.vocab_size, self.context_length)
        if not batch:
            return []
        slots, ends = self._append(batch, arrays)
        contexts = (self._hashes[slots, ends] >> 33) % self.spec.contexts  # numpy's % is never negative
        logits = self._table[torch.from_numpy(contexts)].to(self._torch_device)  # [Σ logits, vocab]
        found = list(torch.split(logits, [extension.logits for extension in batch]))
        more = max(0, sum(array.size for array in arrays) - 1)
        _sleep_until(start + (self.spec.step_ms + self.spec.token_ms * more) / 1000)
        return found


def _sleep_until(end: float) -> None:
    """Until the clock of perf_counter shows `end`: asleep but for the last moment."""
    left = end - time.perf_counter() - _SPIN
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < end:
        time.sleep(0)  # other threads of the process may run


def synthetic_table(spec: SyntheticSpec) -> Tensor:
    """Log-probabilities of every context: float32 [contexts, vocab], of p or, with `alpha`, of the draft's q.

    p is Zipf's law over the ranks, p ∝ rank⁻ˢ, on ids in another order for each context. All is drawn from `seed`, p in
    the draft as in the target.
    """
    log_p = _zipf(spec.vocab, spec.entropy)
    table = torch.empty(spec.contexts, spec.vocab)
    orders = torch.Generator().manual_seed(spec.seed)
    noise = torch.Generator().manual_seed(spec.seed + _NOISE_SEED)
    rows, place = max(1, _CHUNK // spec.vocab), torch.tensor(0.5)
    for start in range(0, spec.contexts, rows):
        chunk = table[start : start + rows]
        ids = torch.stack([torch.randperm(spec.vocab, generator=orders) for _ in chunk])  # by rank
        by_rank = log_p.float().expand(chunk.shape)
        if spec.alpha not in (TARGET, 1.0):
            path = _Path(log_p, torch.randn(chunk.shape, generator=noise), spec.alpha)
            places = path.solve(place.expand(len(chunk)))
            place, by_rank = places.mean(), path.log_q(places)
        chunk.scatter_(1, ids, by_rank)
    return table


def _zipf(vocab: int, entropy: float) -> Tensor:
    """log p of each rank, float64 [vocab], p ∝ rank⁻ˢ with the s that gives this entropy (nats)."""
    log_rank = torch.arange(1, vocab + 1, dtype=torch.float64).log()
    low, high = 0.0, 256.0
    for _ in range(80):
        middle = (low + high) / 2
        log_p = torch.log_softmax(-middle * log_rank, -1)
        if -float((log_p.exp() * log_p).sum()) > entropy:
            low = middle
        else:
            high = middle
    return torch.log_softmax(-low * log_rank, -1)


class _Path:
    """Distributions q ever further from p, by a place in [0, 2] for each context: Σ min(p, q) falls from 1 below alpha.

    Up to 1, log q = log p + σ · noise, σ rising. From there on, q is mixed with p's own tail, of which p has at most
    half of alpha (noise alone need not reach a small alpha).
    """

    def __init__(self, log_p: Tensor, noise: Tensor, alpha: float) -> None:
        self.log_p, self.p, self.noise, self.alpha = log_p.float(), log_p.exp().float(), noise, alpha
        beyond = log_p.exp().flip(0).cumsum(0).flip(0)  # mass of each rank and all after it
        first = min(int((beyond > alpha / 2).sum()), len(log_p) - 1)
        tail = torch.arange(len(log_p)) >= first
        self.mass = float(beyond[first])
        self.log_tail = torch.where(tail, log_p - math.log(self.mass), -torch.inf).float()
        self.tail = self.log_tail.exp()

    def overlap(self, places: Tensor) -> Tensor:
        """Σ min(p, q) of each context."""
        sigma, weight = self._split(places)
        q = torch.addcmul(self.log_p, sigma, self.noise).softmax(-1)
        if bool(weight.any()):
            q.lerp_(self.tail.expand_as(q), weight)
        return torch.minimum(q, self.p, out=q).sum(-1)

    def log_q(self, places: Tensor) -> Tensor:
        sigma, weight = self._split(places)
        log_q = torch.addcmul(self.log_p, sigma, self.noise).log_softmax(-1)
        mixed = torch.logaddexp(log_q + torch.log1p(-weight), self.log_tail + weight.log())
        return torch.where(weight > 0, mixed, log_q)

    def solve(self, guess: Tensor) -> Tensor:
        """The places at which the overlap is alpha."""
        ends = (torch.zeros_like(guess), 1 - self.alpha), (torch.full_like(guess, 2.0), self.mass - self.alpha)
        return _root(lambda places: self.overlap(places) - self.alpha, guess, *ends)

    @staticmethod
    def _split(places: Tensor) -> tuple[Tensor, Tensor]:
        """Standard deviation of the noise and weight of the tail, [contexts, 1] each."""
        return _MOST_NOISE * places.clamp(max=1)[:, None], (places - 1).clamp(min=0)[:, None]


def _root(
    function: Callable[[Tensor], Tensor], guess: Tensor, above: tuple[Tensor, float], below: tuple[Tensor, float]
) -> Tensor:
    """Where each entry of `function` is 0, between a place where it is above and one where it is below: Illinois'
    false position, which halves the weight of an end that stays."""
    (low, f_low), (high, f_high) = above, below
    value_low, value_high = torch.full_like(guess, f_low), torch.full_like(guess, f_high)
    place, before = guess, torch.zeros_like(guess)
    for _ in range(100):
        value = function(place)
        done = value.abs() <= _EXACT
        if bool(done.all()):
            break
        up = value > 0
        low, high = torch.where(up, place, low), torch.where(up, high, place)
        value_low = torch.where(up, value, torch.where(before < 0, value_low / 2, value_low))
        value_high = torch.where(up, torch.where(before > 0, value_high / 2, value_high), value)
        before = value
        place = torch.where(done, place, (low * value_high - high * value_low) / (value_high - value_low))
    return place
