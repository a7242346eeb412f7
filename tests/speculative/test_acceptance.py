"""α, total variation and the residual: the identities behind exactness, and the edges where mass vanishes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speculative import acceptance_rate, residual_distribution, total_variation
from speculative.batch_verify import _log_residual


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two distributions over one vocabulary, in float64, with zeros here and there."""
    vocab = draw(st.integers(1, 9))
    weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=vocab, max_size=vocab).filter(any)
    p, q = (torch.tensor(draw(weights), dtype=torch.float64) for _ in range(2))
    return p / p.sum(), q / q.sum()


@settings(deadline=None)
@given(pairs())
def test_accepted_and_corrected_mass_make_up_the_target(pair: tuple[Tensor, Tensor]) -> None:
    p, q = pair
    alpha = acceptance_rate(p, q)
    torch.testing.assert_close(p.minimum(q) + (1 - alpha) * residual_distribution(p, q), p, atol=1e-12, rtol=0)
    assert alpha == pytest.approx(1 - total_variation(p, q), abs=1e-12)


@settings(deadline=None)
@given(pairs())
def test_residual_is_a_distribution_where_the_target_wants_more(pair: tuple[Tensor, Tensor]) -> None:
    p, q = pair
    residual = residual_distribution(p, q)
    assert abs(float(residual.sum()) - 1) < 1e-9 and bool((residual >= 0).all())
    if total_variation(p, q) > 1e-9:
        assert bool((residual[p <= q] == 0).all())


@settings(deadline=None)
@given(pairs())
def test_sparse_residual_of_the_workers_is_the_same(pair: tuple[Tensor, Tensor]) -> None:
    p, q = pair
    log_p = p.log().to(torch.float32).unsqueeze(0)
    ids = q.nonzero().squeeze(1)
    ids = torch.cat([ids, torch.zeros(3, dtype=torch.int64)]).unsqueeze(0)  # padded with id 0, probability 0
    probs = torch.cat([q[q > 0], torch.zeros(3, dtype=torch.float64)]).unsqueeze(0)
    got = _log_residual(log_p, ids, probs)[0].double().exp()
    p32 = log_p[0].double().exp()
    excess = (p32 - q).clamp(min=0)
    torch.testing.assert_close(got, excess if excess.sum() > 0 else p32, atol=1e-7, rtol=0)


def test_residual_is_normalised_and_never_soft_maxed() -> None:
    """B3."""
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.9, 0.1, 0.0])
    assert residual_distribution(p, q).tolist() == [0.0, 1.0, 0.0]


def test_equal_distributions_leave_p_and_no_nan() -> None:
    """B11."""
    p = torch.tensor([0.2, 0.5, 0.3])
    assert torch.equal(residual_distribution(p, p.clone()), p)
    assert acceptance_rate(p, p) == pytest.approx(1.0) and total_variation(p, p) == 0.0


GOOD = torch.tensor([0.5, 0.5])


@pytest.mark.parametrize("function", [total_variation, acceptance_rate, residual_distribution])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.tensor([0.5, 0.6]), "sums to 1.1; expected 1"),
        (torch.tensor([1.5, -0.5]), "-0.5, below 0"),
        (torch.tensor([float("nan"), 1.0]), "has NaN"),
        (torch.tensor([1, 0]), "expected float probabilities"),
        (torch.tensor([[0.5, 0.5]]), r"expected float probabilities \[V\]"),
        (torch.tensor([]), r"expected float probabilities \[V\]"),
        (torch.tensor([float("inf"), 0.0]), "sums to inf"),
        (torch.tensor([0.5, 0.25, 0.25]), "widen the narrower with pad_distribution"),
    ],
)
def test_refusals(function: object, bad: Tensor, message: str) -> None:
    for pair in ((GOOD, bad), (bad, GOOD)):
        with pytest.raises(ValueError, match=message):
            function(*pair)  # type: ignore[operator]
