"""Shared by the tests of speculative/: one thread, and the statistic of the law tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy import stats


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def p_value() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """G-test of counted outcomes against a law, over cells of any shape; a hit of probability 0 gives 0."""

    def test(counts: torch.Tensor, law: torch.Tensor) -> float:
        observed, expected = counts.flatten().double(), law.flatten().double()
        if bool(((expected == 0) & (observed > 0)).any()):
            return 0.0
        live = expected > 0
        observed, expected = observed[live], expected[live]
        if len(expected) == 1:
            return 1.0
        expected = expected / expected.sum() * observed.sum()
        assert float(expected.min()) >= 5, "too few draws for the test's approximation"
        return float(stats.power_divergence(observed.numpy(), expected.numpy(), lambda_="log-likelihood").pvalue)

    return test
