"""Exponential races: argmax(log p + Gumbel) draws a token of law p from named noise.

Imports torch and this package's noise.
"""

from __future__ import annotations

from torch import Tensor

from speculative.noise import Positions, Seeds, Streams, gumbel


def race(log_p: Tensor, seeds: Seeds, stream: Streams, positions: Positions, ids: Tensor | None = None) -> Tensor:
    """The winner of each row's race: argmax over tokens of log p + gumbel(seed, stream, position) -> int64 [N].

    log_p float32 [N, V]; column v stands for token `ids[v]` where ids is given, else for token v. The answer is a
    token, and the lowest column's on a tie. A token at -inf never wins while the row has another; NaN rows answer
    with some token of no meaning. Adding a constant to a row changes nothing but rounding.
    """
    noise = gumbel(seeds, stream, positions, log_p.shape[-1], ids=ids, device=log_p.device)
    columns = noise.add_(log_p).argmax(dim=-1)
    return columns if ids is None else ids.to(columns.device)[columns]
