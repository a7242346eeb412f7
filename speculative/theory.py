"""What speculation is worth: tokens a round and speed-up as functions of α, γ and the costs.

Imports nothing but the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def expected_accepted_tokens(alpha: float, gamma: int) -> float:
    """τ = 1 + α + … + α^γ = (1 - α^(γ+1)) / (1 - α): mean tokens emitted a round at constant acceptance α.

    Counts the correction or bonus, so it lies in [1, γ + 1]. ValueError unless 0 <= α <= 1 and γ is an integer >= 0.
    Source: Leviathan et al. 2023, equation 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; expected an acceptance rate 0 <= α <= 1")
    if gamma < 0 or gamma != int(gamma):
        raise ValueError(f"gamma is {gamma}; expected an integer >= 0: use 0 for plain decoding")
    if alpha > 1 - 1e-4:  # the closed form cancels near 1
        return float(sum(alpha**k for k in range(int(gamma) + 1)))
    return float((1 - alpha ** (gamma + 1)) / (1 - alpha))


def speculative_speedup(alpha: float, gamma: int, c: float, v: float = 1.0, r: float = 0.0) -> float:
    """Predicted speed-up over plain decoding, S = τ / (v + γc + r); costs in units of one target step.

    c: draft step; v: verify pass of γ + 1 positions; r: orchestration and network a round. The textbook form
    (1 - α^(γ+1)) / ((1 - α)(γc + 1)) is v = 1, r = 0. ValueError for negative or non-finite costs, or v = 0.
    """
    for name, cost in (("c", c), ("v", v), ("r", r)):
        if not math.isfinite(cost) or cost < 0 or (name == "v" and cost == 0):
            raise ValueError(f"{name} is {cost}; expected a finite cost >= 0 in target steps (v above 0): measure it")
    return expected_accepted_tokens(alpha, gamma) / (v + gamma * c + r)


@dataclass(frozen=True)
class SpeedupPoint:
    """One cell of demonstrate_speculative's table."""

    alpha: float
    gamma: int
    tokens_per_round: float
    speedup: float


def demonstrate_speculative(
    alphas: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95),
    gammas: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16),
    c: float = 0.1,
    v: float = 1.0,
    r: float = 0.0,
) -> list[SpeedupPoint]:
    """The table of τ and S over acceptance rates and block lengths at fixed costs, alpha by alpha."""
    return [
        SpeedupPoint(alpha, gamma, expected_accepted_tokens(alpha, gamma), speculative_speedup(alpha, gamma, c, v, r))
        for alpha in alphas
        for gamma in gammas
    ]
