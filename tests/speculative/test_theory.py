"""The speed-up formulas: limits, the general form, and a simulation of the rule they describe."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative import demonstrate_speculative, expected_accepted_tokens, speculative_speedup


@settings(deadline=None)
@given(st.floats(0, 1), st.integers(0, 40))
def test_closed_form_is_the_series(alpha: float, gamma: int) -> None:
    tokens = expected_accepted_tokens(alpha, gamma)
    assert tokens == pytest.approx(math.fsum(alpha**k for k in range(gamma + 1)), rel=1e-9)
    assert tokens + 1e-12 >= 1 and tokens <= gamma + 1 + 1e-9


def test_limits() -> None:
    assert expected_accepted_tokens(0, 5) == 1.0
    assert expected_accepted_tokens(1, 5) == 6.0
    assert expected_accepted_tokens(1 - 1e-12, 5) == pytest.approx(6.0)
    assert speculative_speedup(0.8, 0, 0.3) == 1.0


def test_general_form_reduces_to_the_textbook() -> None:
    textbook = (1 - 0.7**5) / ((1 - 0.7) * (4 * 0.1 + 1))
    assert speculative_speedup(0.7, 4, 0.1) == pytest.approx(textbook)
    assert speculative_speedup(0.7, 4, 0.1, 1.5, 0.2) == pytest.approx(textbook * 1.4 / 2.1)


def test_a_simulation_emits_as_many() -> None:
    u = torch.rand((200_000, 4), generator=torch.Generator().manual_seed(0))
    emitted = (u < 0.6).long().cumprod(dim=1).sum(dim=1) + 1
    error = float(emitted.double().std()) / math.sqrt(200_000)
    assert abs(float(emitted.double().mean()) - expected_accepted_tokens(0.6, 4)) < 5 * error


def test_demonstration_tabulates_the_formulas() -> None:
    table = demonstrate_speculative(alphas=(0.4, 0.9), gammas=(1, 4), c=0.1)
    assert [(point.alpha, point.gamma) for point in table] == [(0.4, 1), (0.4, 4), (0.9, 1), (0.9, 4)]
    for point in table:
        assert point.tokens_per_round == expected_accepted_tokens(point.alpha, point.gamma)
        assert point.speedup == speculative_speedup(point.alpha, point.gamma, 0.1)
    by_gamma = {point.gamma: point.speedup for point in demonstrate_speculative(alphas=(0.8,), c=0.1)}
    best = max(by_gamma, key=lambda gamma: by_gamma[gamma])
    assert min(by_gamma) < best < max(by_gamma)  # a sweet spot inside


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_alpha_out_of_range(alpha: float) -> None:
    with pytest.raises(ValueError, match="expected an acceptance rate"):
        expected_accepted_tokens(alpha, 2)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="gamma is -1"):
        expected_accepted_tokens(0.5, -1)
    for costs in ((-0.1, 1.0, 0.0), (0.1, 0.0, 0.0), (0.1, 1.0, math.inf), (math.nan, 1.0, 0.0)):
        with pytest.raises(ValueError, match="expected a finite cost"):
            speculative_speedup(0.5, 2, *costs)
