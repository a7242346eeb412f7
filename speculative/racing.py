"""Exponential races: argmax(log p + Gumbel) draws a token of law p from named noise.

Imports torch and this package's noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from speculative.noise import WORD, Positions, Seeds, Streams, WordSource, gumbel, gumbel_of_words

# Below this many columns one batched computation beats pruning row by row.
_PRUNE_FROM = 4096
# A row whose tokens are mostly excluded (top-k, top-p) races only those that are left.
_SPARSE = 8
# The bound below is float32: wider than its error, and than that of the scores it stands for.
_SLACK = 1.001


def race(log_p: Tensor, seeds: Seeds, stream: Streams, positions: Positions, ids: Tensor | None = None) -> Tensor:
    """The winner of each row's race: argmax over tokens of log p + gumbel(seed, stream, position) -> int64 [N].

    log_p float32 [N, V]; column v stands for token `ids[v]` where ids is given, else for token v. The lowest
    column wins a tie, and a token at -inf never wins. A row with NaN or without a finite maximum has no winner: what is
    answered for it means nothing. A constant added to a row changes nothing but rounding.
    """
    if log_p.device.type == "cpu" and log_p.shape[-1] >= _PRUNE_FROM:
        columns = _pruned_race(log_p, WordSource(seeds, stream, positions, "cpu"), ids)
    else:
        noise = gumbel(seeds, stream, positions, log_p.shape[-1], ids=ids, device=log_p.device)
        columns = noise.add_(log_p).argmax(dim=-1)
    return columns if ids is None else ids.to(columns.device)[columns]


def _pruned_race(log_p: Tensor, source: WordSource, ids: Tensor | None) -> Tensor:
    """The same winners, row by row in cache, with logarithms of the few candidates alone."""
    peaks = log_p.amax(dim=-1).tolist()  # carries NaN
    winners = [
        _winner(log_p[row], peak, source.slice(row, row + 1), ids) if math.isfinite(peak) else 0
        for row, peak in enumerate(peaks)
    ]
    return torch.tensor(winners, dtype=torch.int64)


def _winner(log_p: Tensor, peak: float, source: WordSource, ids: Tensor | None) -> int:
    """Winning column of one row [V] whose maximum is `peak`.

    With x the uniform number of a token, E = -log(1 - x) >= x, so no token wins whose x / p is above the E / p of any
    other. That leaves a handful, and needs no logarithm of the rest.
    """
    columns = _left_over(log_p)
    if columns is not None:
        if len(columns) == 1:
            return int(columns[0])
        log_p = log_p[columns]
    tokens = columns if ids is None else ids if columns is None else ids[columns]
    words = (source.words(len(log_p)) if tokens is None else source.words_of(tokens))[0]
    bound = words.to(torch.float32).add_(0.5).mul_(1.0 / (WORD + 1)).mul_((peak - log_p).exp_())
    reach = 2 * float(bound.min())
    while True:
        near = (bound <= reach).nonzero().squeeze(1)
        scores = gumbel_of_words(words[near]).add_(log_p[near])
        best = int(scores.argmax())
        needed = math.exp(peak - float(scores[best])) * _SLACK
        if needed <= reach:
            return int(near[best] if columns is None else columns[near[best]])
        reach = needed


def _left_over(log_p: Tensor) -> Tensor | None:
    """The columns that are not excluded, where they are few; None where racing the whole row is as cheap."""
    if math.isfinite(float(log_p.min())):
        return None
    columns = (log_p != -math.inf).nonzero().squeeze(1)
    return columns if len(columns) * _SPARSE < len(log_p) or len(columns) == 1 else None
