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

from speculative import Stream, gumbel

CANDIDATES = 256  # likeliest tokens among which a fork's guesses are looked for
RIGHT = 0.55  # chance that the best guess left is the right one; only the shares depend on it


def shares(width: int, gamma: int, alpha: float) -> list[int]:
    """Guesses for each fork k = 0..γ, `width` in all: each goes to the fork where it is likeliest to be right."""
    chances = [alpha**k * (1 - alpha) for k in range(gamma)] + [alpha**gamma]
    given = [0] * (gamma + 1)
    queue = [(-chance, k) for k, chance in enumerate(chances)]
    heapq.heapify(queue)
    for _ in range(width):
        chance, k = queue[0]
        given[k] += 1
        heapq.heapreplace(queue, (chance * (1 - RIGHT), k))
    return given


def guesses(
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
    top = torch.topk(rows, min(CANDIDATES, rows.shape[1]))
    best, ids = top.values.cpu(), top.indices.cpu()  # [F, C]
    if mode != "greedy":
        best = best + _noise(mode, seed, base, [first + place for place in places], len(block), rows.shape[1], ids)
    most = min(best.shape[1], max(counts) + len(ends) + 1)
    best, order = best.topk(most)  # NaN comes first
    for place, row, chosen in zip(places, best.tolist(), ids.gather(1, order).tolist(), strict=True):
        if not math.isnan(row[0]):
            fork = first + place
            barred = {*ends, block[fork]} if fork < len(block) else set(ends)
            possible = [t for t, score in zip(chosen, row, strict=True) if score > -math.inf and t not in barred]
            found[place] = possible[: counts[place]]
    return found


def _noise(mode: str, seed: int, base: int, forks: Sequence[int], gamma: int, vocab: int, ids: Tensor) -> Tensor:
    """The target's own noise of the candidates `ids` [F, C] at each fork."""
    if mode == "coupled":
        streams = [Stream.RACE for _ in forks]
    else:
        streams = [Stream.RESIDUAL if k < gamma else Stream.BONUS for k in forks]
    return gumbel([seed] * len(forks), streams, [base + k for k in forks], vocab, ids=ids)
