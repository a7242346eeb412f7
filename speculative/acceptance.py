"""How well a draft distribution q covers a target distribution p, and what a rejection leaves to draw from.

Imports torch and this package's checks.
"""

from __future__ import annotations

from torch import Tensor

from speculative.checks import check_distribution, check_same_shape


def total_variation(p: Tensor, q: Tensor) -> float:
    """Total variation distance ½ Σ|p - q| of two distributions [V], in [0, 1]. ValueError for anything else."""
    _check_pair(p, q)
    return float(0.5 * (p - q).abs().sum())


def acceptance_rate(p: Tensor, q: Tensor) -> float:
    """α = Σ min(p, q) = 1 - TV(p, q): the chance that a token drawn from q is kept (Leviathan et al. 2023, §3.2).

    p, q [V]. ValueError unless both are distributions over the same vocabulary.
    """
    _check_pair(p, q)
    return float(p.minimum(q).sum())


def residual_distribution(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)₊ normalised: the law of the token that replaces a rejected one -> [V], of p's dtype.

    Where its mass is 0 (p = q, so nothing is ever rejected but by rounding) the answer is p itself, never NaN.
    ValueError unless p and q are distributions [V] over the same vocabulary.
    """
    _check_pair(p, q)
    return normalised_residual(p, q)


def normalised_residual(p: Tensor, q: Tensor) -> Tensor:
    """residual_distribution without its checks, for callers that made them."""
    excess = (p - q).clamp(min=0)
    mass = excess.sum()
    return excess / mass if mass > 0 else p


def _check_pair(p: Tensor, q: Tensor) -> None:
    check_distribution(p, "p")
    check_distribution(q, "q")
    check_same_shape(p, q)
