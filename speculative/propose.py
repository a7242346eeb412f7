"""What the draft worker draws: one token a row, from named noise and from exactly the q̃ that it will send.

Imports torch and this package's noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculative.noise import Positions, Seeds, Stream, uniform
from speculative.racing import race


def draw_coupled(log_q: Tensor, seeds: Seeds, positions: Positions, ids: Tensor | None = None) -> Tensor:
    """The draft's guess at the target's public race: argmax(log q + gumbel(RACE)) -> int64 [N].

    log_q float32 [N, V]; with `ids` int64 [V], column v stands for token ids[v] (a draft with a cut-down vocabulary).
    """
    return race(log_q, seeds, Stream.RACE, positions, ids)


def draw_greedy(log_q: Tensor, ids: Tensor | None = None) -> Tensor:
    """The likeliest token of each row, the lowest column of a tie -> int64 [N]. q̃ is then a point mass on it."""
    columns = log_q.argmax(dim=-1)
    return columns if ids is None else ids.to(columns.device)[columns]


def draw_dense(q_probs: Tensor, seeds: Seeds, positions: Positions, ids: Tensor | None = None) -> Tensor:
    """A token of law q_probs a row -> int64 [N], by inverting the cumulative sum at a 53-bit uniform of stream DRAFT.

    q_probs float64 [N, V], each row normalised (what codec `dense` decodes to); computed on the CPU in float64.
    """
    q_probs = q_probs.cpu()
    if q_probs.dtype != torch.float64 or q_probs.dim() != 2:
        raise ValueError(f"q_probs are {q_probs.dtype} {tuple(q_probs.shape)}; expected float64 [N, V]")
    edges = q_probs.cumsum(dim=-1)
    if bool((q_probs < 0).any()) or not bool((edges[:, -1] - 1).abs().le(1e-6).all()):
        raise ValueError(
            f"q_probs sum to {edges[:, -1].tolist()}; expected probabilities >= 0 that sum to 1 in each row"
        )
    # u is at most 1 - 2**-53, so the product stays below the total, and `right` passes over tokens of no mass.
    point = uniform(seeds, Stream.DRAFT, positions).unsqueeze(1) * edges[:, -1:]
    column = torch.searchsorted(edges, point, right=True)
    return column.squeeze(1) if ids is None else ids.cpu()[column.squeeze(1)]
