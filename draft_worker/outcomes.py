"""Which outcomes of a verification are worth a branch: how many at each fork, and which tokens.

Outcome (k, t): k tokens of the block in flight are kept, then comes the target's own token t. The chance of k is
geometric, α^k (1 - α), and α^γ for the whole block. t is guessed from what the target's draw will read: its public
noise (coupled: the race; rejection: RESIDUAL after a refusal, BONUS after the whole block), with the draft's q in the
place of p. A guess is never tested and draws no token, so reading that noise biases nothing; what draws the branch's
tokens is DRAFT noise, which the outcome does not depend on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from draft_worker.noise_cache import Place, PublicNoise
from draft_worker.quantize import COUNTS_WIDTH
from speculative import Stream, gumbel

# Of a vocabulary larger than this, so many of the likeliest tokens are looked at for a fork's guesses.
CANDIDATES, ALL_UP_TO = 1024, 4096
# Chance that the best guess left is the right one, if those before it weren't; only the shares depend on it. Measured
# on Zipf-like pairs (α .8, entropy 1.3 to 4.7): a correction is harder to guess than a draw from p itself.
RIGHT_CORRECTION, RIGHT_DRAW = 0.33, 0.7
# A correction is drawn from p − q̃, which has all of p where q̃ is 0, and about a third of it where it isn't: that much
# less log q counts for there (nats). With codec counts q̃ is 0 for all but the likeliest tokens.
CLAIMED = 1.0


def shares(width: int, gamma: int, alpha: float, mode: str) -> list[int]:
    """Guesses for each fork k = 0..γ, `width` in all: each goes to the fork where it is likeliest to be right."""
    chances = [alpha**k * (1 - alpha) for k in range(gamma)] + [alpha**gamma]
    corrected = RIGHT_CORRECTION if mode in ("counts", "dense") else RIGHT_DRAW  # else it's a draw from p as well
    right = [corrected] * gamma + [RIGHT_DRAW]
    given = [0] * (gamma + 1)
    queue = [(-chance * right[k], k) for k, chance in enumerate(chances)]
    heapq.heapify(queue)
    for _ in range(width):
        gain, k = queue[0]
        given[k] += 1
        heapq.heapreplace(queue, (gain * (1 - right[k]), k))
    return given


def guesses(
    noise: PublicNoise,
    scores: Sequence[Tensor],
    first: int,
    mode: str,
    seed: int,
    base: int,
    block: Sequence[int],
    counts: Sequence[int],
    ends: Sequence[int],
) -> list[list[int]]:
    """Guesses of t, best first, for the forks `first`, `first` + 1, …: a row of scores [V] and a count of guesses each.

    Scores are log q (greedy: logits); a row with NaN gets no guess. `block` [γ] starts at position `base`; a fork below
    γ never guesses the token that was refused there, since the target then draws another one. `ends` are ids that end
    the text: nothing follows them.
    """
    found: list[list[int]] = [[] for _ in counts]
    places = [place for place, count in enumerate(counts) if count]
    if not places:
        return found
    rows = torch.stack([scores[place] for place in places])
    forks = [first + place for place in places]
    best, ids = _expected(rows, mode, forks, len(block)), None
    if rows.shape[1] > ALL_UP_TO:
        ids = torch.topk(rows, CANDIDATES).indices  # [F, C]
        best = best.gather(1, ids)
    if mode != "greedy":
        named = [noise_place(mode, seed, base + fork, last=fork == len(block)) for fork in forks]
        best = best + (noise.rows(named, rows.shape[1]) if ids is None else _noise_of(named, ids, rows.shape[1]))
    order = best.topk(min(best.shape[1], max(counts) + len(ends) + 1))  # NaN comes first
    tokens = order.indices if ids is None else ids.gather(1, order.indices)
    for place, row, chosen in zip(places, order.values.tolist(), tokens.tolist(), strict=True):
        if not math.isnan(row[0]):
            fork = first + place
            barred = {*ends, block[fork]} if fork < len(block) else set(ends)
            possible = [t for t, score in zip(chosen, row, strict=True) if score > -math.inf and t not in barred]
            found[place] = possible[: counts[place]]
    return found


def _expected(rows: Tensor, mode: str, forks: Sequence[int], gamma: int) -> Tensor:
    """log of what the target draws from at each fork, up to a constant, as far as log q [F, V] tells."""
    corrections = sum(fork < gamma for fork in forks)  # they come first
    if mode != "counts" or not corrections or rows.shape[1] <= COUNTS_WIDTH:
        return rows
    rows = rows.clone()
    least = torch.topk(rows[:corrections], COUNTS_WIDTH).values[:, -1:]
    rows[:corrections] -= CLAIMED * (rows[:corrections] >= least)
    return rows


def noise_place(mode: str, seed: int, position: int, *, last: bool) -> Place:
    """The noise that the target's own draw at `position` reads, after a refusal or after the `last` of the block."""
    if mode == "coupled":
        return seed, Stream.RACE, position
    return seed, Stream.BONUS if last else Stream.RESIDUAL, position


def _noise_of(places: Sequence[Place], ids: Tensor, vocab: int) -> Tensor:
    """Noise of the candidates `ids` [F, C] at each place."""
    seeds, streams, positions = zip(*places, strict=True)
    return gumbel(seeds, streams, positions, vocab, ids=ids, device=ids.device)
