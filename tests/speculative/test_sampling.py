"""Sampling options: the same kept sets as transformers' warpers, exact counts under ties, rows that do not mix."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speculative import SamplingOptions, log_distribution
from speculative import sampling as module

NAN = float("nan")


def logits_of(seed: int, rows: int, vocab: int, spread: float = 3.0) -> Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * spread


def warped(logits: Tensor, option: SamplingOptions) -> Tensor:
    """transformers' own processors in the order of its `generate`, then log_softmax."""
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    scores, ids = logits.clone(), torch.zeros((len(logits), 1), dtype=torch.int64)
    if option.temperature != 1:
        scores = TemperatureLogitsWarper(option.temperature)(ids, scores)
    if option.top_k:
        scores = TopKLogitsWarper(option.top_k)(ids, scores)
    if option.top_p < 1:
        scores = TopPLogitsWarper(option.top_p)(ids, scores)
    if option.min_p:
        scores = MinPLogitsWarper(option.min_p)(ids, scores)
    return torch.log_softmax(scores, dim=-1)


OPTIONS = [
    SamplingOptions(),
    SamplingOptions(temperature=0.7),
    SamplingOptions(temperature=1.8),
    SamplingOptions(top_k=1),
    SamplingOptions(top_k=40),
    SamplingOptions(top_k=10_000),
    SamplingOptions(top_p=0.3),
    SamplingOptions(top_p=0.95),
    SamplingOptions(top_p=0.999),
    SamplingOptions(min_p=0.05),
    SamplingOptions(min_p=0.9),
    SamplingOptions(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
    SamplingOptions(temperature=1.3, top_p=0.8, min_p=0.1),
    SamplingOptions(temperature=0.6, top_k=7, min_p=0.01),
]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize(("vocab", "spread"), [(5, 1.0), (300, 3.0), (5000, 1.0), (5000, 4.0)])
def test_kept_sets_and_values_are_those_of_transformers(option: SamplingOptions, vocab: int, spread: float) -> None:
    logits = logits_of(vocab, 8, vocab, spread)
    got, expected = log_distribution(logits, [option] * 8), warped(logits, option)
    assert torch.equal(got.isfinite(), expected.isfinite())
    kept = got.isfinite()
    torch.testing.assert_close(got[kept], expected[kept], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(got.exp().sum(dim=-1), torch.ones(8), atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 10_000),
    st.builds(
        SamplingOptions,
        temperature=st.floats(0.05, 5),
        top_k=st.integers(0, 40),
        top_p=st.floats(0.05, 1),
        min_p=st.floats(0, 0.9),
    ),
)
def test_kept_sets_on_random_options(seed: int, option: SamplingOptions) -> None:
    logits = logits_of(seed, 3, 30)
    got, expected = log_distribution(logits, [option] * 3).exp(), warped(logits, option).exp()
    # Where they differ the cumulated mass must be within rounding of top_p: both sides cut at a float32 sum.
    differ = (got > 0) != (expected > 0)
    for row in differ.any(dim=-1).nonzero().flatten().tolist():
        base = warped(logits[row : row + 1], SamplingOptions(option.temperature, option.top_k))[0]
        cumulated = base.exp().sort(descending=True).values.cumsum(dim=0)
        assert float((cumulated - option.top_p).abs().min()) < 1e-5


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([*OPTIONS, SamplingOptions(temperature=0)]), min_size=1, max_size=6), st.integers(0, 99)
)
def test_each_row_is_what_it_would_be_alone(options: list[SamplingOptions], seed: int) -> None:
    logits = logits_of(seed, len(options), 1501)
    together = log_distribution(logits, options)
    for row, option in enumerate(options):
        assert torch.equal(together[row : row + 1], log_distribution(logits[row : row + 1], [option]))


def test_nucleus_beyond_the_head_is_sorted_further(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.cat([logits_of(0, 2, 4000, 0.1), logits_of(1, 2, 4000, 6.0)])
    option = SamplingOptions(top_p=0.9)
    narrow = log_distribution(logits, [option] * 4)
    monkeypatch.setattr(module, "_HEAD", 4000)
    whole = log_distribution(logits, [option] * 4)
    assert torch.equal(narrow.isfinite(), whole.isfinite())
    assert int(narrow[0].isfinite().sum()) > 3000 > int(narrow[3].isfinite().sum())


def test_greedy_is_a_point_mass_on_the_lowest_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]])
    got = log_distribution(logits, [SamplingOptions(temperature=0)] * 2)
    assert got.tolist() == [[-math.inf, 0.0, -math.inf], [0.0, -math.inf, -math.inf]]


def test_temperature_zero_beside_one_divides_by_nothing() -> None:
    """B6: a batch of {0, 1}: the greedy row is an argmax, and neither has NaN."""
    logits = logits_of(2, 2, 50, 30.0)
    got = log_distribution(logits, [SamplingOptions(temperature=0), SamplingOptions()])
    assert not bool(got.isnan().any())
    assert int(got[0].argmax()) == int(logits[0].argmax()) and int(got[0].isfinite().sum()) == 1
    torch.testing.assert_close(got[1], torch.log_softmax(logits[1], dim=-1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_tiny_temperatures_neither_overflow_nor_lose_ties(temperature: float) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [5.0, 5.0, 0.0]])
    got = log_distribution(logits, [SamplingOptions(temperature=temperature)] * 2).exp()
    assert got.tolist() == [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]


def test_exactly_k_stay_under_ties_the_lowest_ids_first() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    kept = log_distribution(logits, [SamplingOptions(top_k=3)] * 3).isfinite()
    assert [row.nonzero().flatten().tolist() for row in kept] == [[0, 1, 4], [0, 1, 2], [0, 1, 2]]
    halves = log_distribution(torch.zeros(1, 4), [SamplingOptions(top_p=0.5)]).isfinite()
    assert halves.tolist() == [[True, True, False, False]]


def test_top_k_one_is_greedy_in_law() -> None:
    logits = logits_of(3, 4, 100)
    one = log_distribution(logits, [SamplingOptions(top_k=1)] * 4)
    assert torch.equal(one, log_distribution(logits, [SamplingOptions(temperature=0)] * 4))


def test_logits_that_are_masked_beforehand_stay_out() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    for option in (
        SamplingOptions(),
        SamplingOptions(top_k=3),
        SamplingOptions(top_p=0.99),
        SamplingOptions(min_p=0.1),
    ):
        assert log_distribution(logits, [option]).isfinite().tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("option", [*OPTIONS, SamplingOptions(temperature=0)], ids=str)
@pytest.mark.parametrize("poison", [NAN, math.inf])
def test_nan_and_infinity_stay_in_their_row(option: SamplingOptions, poison: float) -> None:
    logits = logits_of(4, 3, 1200)
    alone = log_distribution(logits, [option] * 3)
    logits[1, 7] = poison
    got = log_distribution(logits, [option] * 3)
    assert bool(got[1].isnan().all())
    assert torch.equal(got[[0, 2]], alone[[0, 2]])
    logits[1] = -math.inf
    assert bool(log_distribution(logits, [option] * 3)[1].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_come_out_as_float32(dtype: torch.dtype) -> None:
    logits = logits_of(5, 2, 64).to(dtype)
    for option in OPTIONS:
        got = log_distribution(logits, [option] * 2)
        assert got.dtype == torch.float32
        assert torch.equal(got.isfinite(), log_distribution(logits.float(), [option] * 2).isfinite())


def test_logits_are_left_alone() -> None:
    logits = logits_of(6, 2, 2000)
    before = logits.clone()
    for option in [*OPTIONS, SamplingOptions(temperature=0)]:
        log_distribution(logits, [option, SamplingOptions()])
        log_distribution(logits, [option] * 2)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; expected a finite number >= 0"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1; expected an integer >= 0"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 0.0}, "top_p is 0.0; expected 0 < top_p <= 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"min_p": 1.0}, "min_p is 1.0; expected 0 <= min_p < 1"),
        ({"min_p": -0.5}, "min_p is -0.5"),
        ({"min_p": NAN}, "min_p is nan"),
    ],
)
def test_options_out_of_range(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingOptions(**arguments)  # type: ignore[arg-type]


def test_shapes_that_do_not_fit() -> None:
    for logits in (torch.zeros(4), torch.zeros(3, 4), torch.zeros(2, 0)):
        with pytest.raises(ValueError, match=r"expected \[N, V\] with one option a row"):
            log_distribution(logits, [SamplingOptions()] * 2)
    assert log_distribution(torch.zeros(0, 4), []).shape == (0, 4)
