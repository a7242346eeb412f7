"""The formulas against speculative.theory and worked-out cases; the estimators on noisy, lying and changing costs."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.goodput import Line, Mean, Share, expected_tokens, forks, hit_share, overlapped_speedup, speedup
from speculative.theory import expected_accepted_tokens, speculative_speedup


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3, 0.8, 0.95, 0.9999, 1.0])
def test_the_formulas_are_those_of_the_theory(alpha: float) -> None:
    for gamma in (0, 1, 4, 16):
        tau = expected_tokens(alpha, gamma)
        assert tau == pytest.approx(expected_accepted_tokens(alpha, gamma), rel=1e-9)
        found = speedup(tau, v=1.3, gamma=gamma, c=0.1, r=0.05)
        assert found == pytest.approx(speculative_speedup(alpha, gamma, 0.1, 1.3, 0.05), rel=1e-9)


def test_overlapped_speedup() -> None:
    costs = {"v": 1.2, "gamma": 4.0, "c": 0.1, "r": 0.05}
    assert overlapped_speedup(3.0, **costs, h=0.0, branch=9.0) == speedup(3.0, **costs)
    assert overlapped_speedup(3.0, **costs, h=1.0, branch=0.5) == pytest.approx(3 / 1.25)
    assert overlapped_speedup(3.0, **costs, h=1.0, branch=2.0) == pytest.approx(3 / 2.05)
    assert overlapped_speedup(3.0, **costs, h=0.5) == pytest.approx(3 / (0.6 + 0.8 + 0.05))


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.8])
def test_forks_are_the_perplexity_of_the_accepted_count(alpha: float) -> None:
    for gamma in (1, 4, 9):
        chances = [(1 - alpha) * alpha**k for k in range(gamma)] + [alpha**gamma]
        assert forks(alpha, gamma) == pytest.approx(math.exp(-sum(p * math.log(p) for p in chances)))
    assert forks(alpha, 0) == forks(0.0, 5) == forks(1.0, 5) == 1.0


def test_hit_share_fits_the_measured_pairs() -> None:
    measured = {4: (0.63, 0.81, 0.89, 0.93), 5: (0.59, 0.77, 0.87, 0.91), 6: (0.52, 0.71, 0.84, 0.89)}
    for gamma, shares in measured.items():
        for width, share in zip((8.0, 16.0, 24.0, 32.0), shares, strict=True):
            assert hit_share(width, forks(0.8, gamma)) == pytest.approx(share, abs=0.04)
    assert hit_share(0.0, 5.0) == 0.0


def observed(line: Line, xs: list[int], a: float, b: float, seed: int = 0, hiccup: int | None = None) -> None:
    noise = random.Random(seed)
    for place, x in enumerate(xs):
        line.add(x, (a + b * x) * noise.gauss(1, 0.05) * (10 if place == hiccup else 1))


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.7, 0.3), (0.03, 0.0001), (0.0, 2.0)])
def test_a_line_is_found_within_a_few_observations(a: float, b: float) -> None:
    line = Line()
    observed(line, [5, 3, 9, 1, 5, 2, 7, 1], a, b)
    for x in (1, 5, 9):
        assert line.at(x) == pytest.approx(a + b * x, rel=0.15)


def test_one_distinct_x_gives_its_value_and_a_careful_slope() -> None:
    line = Line()
    observed(line, [5] * 50, 1.0, 0.0)
    assert line.at(5) == pytest.approx(1.0, rel=0.05)
    assert 0 <= line.b < 0.05


def test_a_slope_survives_a_long_time_at_one_x() -> None:
    line = Line()
    observed(line, [5, 3, 1, 4, 2, 8, *[1] * 500], 0.7, 0.3)
    assert line.b == pytest.approx(0.3, rel=0.2)


def test_a_hiccup_hardly_moves_a_line_and_a_change_is_believed() -> None:
    line = Line()
    observed(line, [1, 5, 3] * 10, 1.0, 0.1)
    before = line.at(1)
    line.add(1, 10 * before)
    assert line.doubtful and line.at(1) < 1.2 * before
    line.add(1, before)
    assert not line.doubtful
    for _ in range(3):
        line.add(1, 10 * before)
    assert line.at(1) == pytest.approx(10 * before, rel=0.05)
    for _ in range(3):
        line.add(1, before)
    assert line.at(1) == pytest.approx(before, rel=0.05)


def test_a_line_never_slopes_down_and_takes_no_nonsense() -> None:
    line = Line()
    for x, y in ((1, 2.0), (5, 1.0), (9, 0.5)) * 5:
        line.add(x, y)
    assert line.a >= 0 and line.b == 0
    before = (line.a, line.b)
    for y in (math.nan, math.inf, 0.0, -1.0):
        line.add(1, y)
    assert (line.a, line.b) == before and not Line().known


def test_what_work_beside_costs_is_found_and_keeps_apart_from_a_change_of_all() -> None:
    line, noise = Line(), random.Random(2)
    for place in range(12):
        beside = place % 2 == 1
        line.add(3, (1.0 + 0.8 * beside) * noise.gauss(1, 0.05), beside=beside)
    assert line.at(3) == pytest.approx(1.0, rel=0.1) and line.d == pytest.approx(0.8, rel=0.15)
    for place in range(200):  # only beside it, and everything grows by half
        line.add(3, (1.8 + 0.5 * place / 200) * noise.gauss(1, 0.05), beside=True)
    assert line.at(3, beside=True) == pytest.approx(2.3, rel=0.1)
    assert line.d == pytest.approx(0.8, rel=0.3)


@given(
    observations=st.lists(st.tuples(st.integers(1, 40), st.floats(1e-5, 10.0), st.booleans()), min_size=1, max_size=60),
    fade=st.sampled_from([0.0, 0.001]),
)
def test_durations_stay_positive_whatever_is_seen(observations: list[tuple[int, float, bool]], fade: float) -> None:
    line = Line(fade=fade)
    for x, y, beside in observations:
        line.add(x, y, beside=beside)
        assert line.a >= 0 and line.b >= 0 and line.d >= 0
        assert line.at(1) > 0 and line.at(x) > 0


def test_mean_of_scattered_waits() -> None:
    mean, noise = Mean(), random.Random(1)
    assert mean.value == 0.0 and not mean.known
    for _ in range(100):
        mean.add(noise.uniform(0.5, 1.5) * 1e-3)
    assert mean.value == pytest.approx(1e-3, rel=0.25)


def test_share_settles_fades_and_notices_a_change() -> None:
    share, coin = Share(0.7, 2.0, 200.0), random.Random(2)
    for _ in range(400):
        share.add(coin.random() < 0.8, 1)
    assert share.value == pytest.approx(0.8, abs=0.08)
    share.fade(5.0)
    assert share.weight == 5.0 and share.value == pytest.approx(0.8, abs=0.08)
    for _ in range(400):
        share.add(coin.random() < 0.8, 1)
    for _ in range(40):
        share.add(coin.random() < 0.05, 1)
    assert share.value < 0.25  # two hundred observations don't outvote the last ones
