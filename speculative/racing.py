"""Exponential races: argmax(log p + Gumbel) draws a token of law p from named noise.

Imports torch and this package's noise.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from speculative.noise import WORD, Positions, Seeds, Streams, WordSource, gumbel, gumbel_of_words

# Below this many columns one batched computation beats pruning row by row.
_PRUNE_FROM = 4096
# Rows with at most so many tokens left (top-k, top-p) race on those alone, several rows over their union.
_FEW = 1024
_TOGETHER = 8
# Other rows race together while their words stay in the cache: a row alone is a hundred calls on short tensors.
_TOGETHER_WORDS = 1 << 16
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


def rows_together(log_p: Tensor) -> int:
    """How many rows like those of `log_p` [N, V] race in little more time than one: any number on an accelerator."""
    if log_p.device.type != "cpu":
        return sys.maxsize
    return max(1, _TOGETHER_WORDS // log_p.shape[1])


def _pruned_race(log_p: Tensor, source: WordSource, ids: Tensor | None) -> Tensor:
    """The same winners with a fraction of the work: excluded tokens get no noise, hopeless ones no logarithm."""
    winners = torch.zeros(len(log_p), dtype=torch.int64)
    peaks, floors = log_p.amax(dim=-1), log_p.amin(dim=-1)  # both carry NaN
    racing = peaks.isfinite()
    sparse = (racing & floors.isinf()).nonzero().squeeze(1)
    few = sparse[torch.count_nonzero(log_p[sparse] != -math.inf, dim=-1) <= _FEW]
    for start in range(0, len(few), _TOGETHER):
        group = few[start : start + _TOGETHER]
        winners[group] = _race_of_few(log_p[group], source.rows(group), ids)
    racing[few] = False
    many = racing.nonzero().squeeze(1)
    step = rows_together(log_p)
    for start in range(0, len(many), step):
        group = many[start : start + step]
        winners[group] = _race_of_many(log_p[group], peaks[group], source.rows(group), ids)
    return winners


def _race_of_few(log_p: Tensor, source: WordSource, ids: Tensor | None) -> Tensor:
    """Winning columns of rows [N, V] that have few tokens left -> int64 [N]."""
    columns = (log_p != -math.inf).any(dim=0).nonzero().squeeze(1)
    if len(columns) == 1:
        return columns.expand(len(log_p))
    words = source.words_of(columns if ids is None else ids[columns])
    return columns[gumbel_of_words(words).add_(log_p[:, columns]).argmax(dim=-1)]


def _race_of_many(log_p: Tensor, peaks: Tensor, source: WordSource, ids: Tensor | None) -> Tensor:
    """Winning columns of rows [N, V] whose maxima are `peaks` [N] -> int64 [N].

    With x the uniform number of a token, E = -log(1 - x) >= x, so no token wins whose x / p is above the E / p of any
    other. That leaves a handful, and needs no logarithm of the rest.
    """
    words = source.words(log_p.shape[1]) if ids is None else source.words_of(ids)
    bound = words.to(torch.float32).add_(0.5).mul_(1.0 / (WORD + 1)).mul_((peaks[:, None] - log_p).exp_())
    reach = 2 * bound.amin(dim=-1)
    winners = torch.zeros(len(log_p), dtype=torch.int64)
    going = torch.arange(len(log_p))
    while len(going):
        place, column = (bound[going] <= reach[going, None]).nonzero().unbind(-1)  # rows one after another
        row = going[place]
        scores = gumbel_of_words(words[row, column]).add_(log_p[row, column])
        best = torch.full((len(going),), -math.inf).scatter_reduce_(0, place, scores, "amax")
        won = scores == best[place]
        winners.scatter_reduce_(0, row[won], column[won], "amin", include_self=False)  # of equals the lowest column
        needed = (peaks[going] - best).to(torch.float64).exp().mul_(_SLACK).to(torch.float32)
        short = needed > reach[going]
        reach[going] = torch.maximum(reach[going], needed)
        going = going[short]
    return winners
