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
    log_q: Tensor, mode: str, seed: int, base: int, block: Sequence[int], counts: Sequence[int], ends: Sequence[int]
) -> list[list[int]]:
    """Guesses of t for each fork, best first: log_q float32 [γ + 1, V], counts[k] of them at fork k.

    `block` [γ] starts at position `base`; a fork below γ never guesses the token that was refused there, since the
    target then draws another one. `ends` are ids that end the text: nothing follows them.
    """
    forks = [k for k, count in enumerate(counts) if count and not bool(log_q[k].isnan().any())]
    if not forks:
        return [[] for _ in counts]
    rows = log_q[torch.tensor(forks, device=log_q.device)]
    top = torch.topk(rows, min(CANDIDATES, rows.shape[1]))
    scores, ids = top.values.cpu(), top.indices.cpu()  # [F, C]
    if mode != "greedy":
        scores = scores + _noise(mode, seed, base, forks, len(block), log_q.shape[1], ids)
    ids = ids.gather(1, scores.argsort(dim=1, descending=True, stable=True))
    scores = scores.sort(dim=1, descending=True, stable=True).values
    found: list[list[int]] = [[] for _ in counts]
    for row, k in enumerate(forks):
        barred = {*ends, block[k]} if k < len(block) else set(ends)
        possible = [
            token
            for token, score in zip(ids[row].tolist(), scores[row].tolist(), strict=True)
            if score > -math.inf and token not in barred
        ]
        found[k] = possible[: counts[k]]
    return found


def _noise(mode: str, seed: int, base: int, forks: Sequence[int], gamma: int, vocab: int, ids: Tensor) -> Tensor:
    """The target's own noise of the candidates `ids` [F, C] at each fork."""
    if mode == "coupled":
        streams = [Stream.RACE for _ in forks]
    else:
        streams = [Stream.RESIDUAL if k < gamma else Stream.BONUS for k in forks]
    return gumbel([seed] * len(forks), streams, [base + k for k in forks], vocab, ids=ids)
