"""What speculation is worth, and online estimates of what it costs. Pure: no clock, no request.

Words as in the design: τ tokens a round, v verify pass, c draft step, r orchestration and network, h hit share; times
in target steps (one pass of one position) unless a name says seconds.
"""

from __future__ import annotations

import math
import operator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", float, npt.NDArray[np.float64])
MAX_HIT_SHARE = 0.97  # some outcomes are never guessed, whatever the width
# Branches for each place that the outcome may come at with which half of the outcomes are guessed, and how fast the
# odds rise with their number. Measured on Zipf-like pairs in rejection mode (α .8, entropy of p 2.7): at γ = 5, 8 hit
# .59 of the outcomes, 16 hit .77, 24 hit .87 and 32 hit .91; coupled hits more.
HALF_WIDTH_PER_FORK, HIT_ODDS_EXPONENT = 1.2, 1.43


def expected_tokens(alpha: float, gamma: float) -> float:
    """τ = 1 + α + … + α^γ = (1 - α^(γ+1)) / (1 - α): mean tokens a round at constant acceptance α in [0, 1].

    Counts the correction or bonus: in [1, γ + 1]. Fractions of γ >= 0 interpolate. Source: Leviathan et al. 2023,
    equation 1.
    """
    if alpha > 1 - 1e-9:  # the closed form is 0 / 0 at 1
        return gamma + 1.0
    return (1 - math.pow(alpha, gamma + 1)) / (1 - alpha)


def speedup(tau: float, *, v: float, gamma: float, c: float, r: float) -> float:
    """S = τ / (v + γc + r): over plain decoding, draft and target taking turns. Leviathan et al. 2023: v = 1, r = 0."""
    return tau / (v + gamma * c + r)


def overlapped_speedup(
    tau: float, *, v: float, gamma: float, c: float, r: float, h: float, branch: float = 0.0
) -> float:
    """S where a share h of the rounds finds its block drafted, in a run of `branch` target steps behind the last pass.

    τ / (h·max(v, branch) + (1 - h)(v + γc) + r): a run that outlasts the pass delays a hit; a miss interrupts it.
    """
    return tau / (h * max(v, branch) + (1 - h) * (v + gamma * c) + r)


def forks(alpha: float, gamma: float) -> float:
    """How many equally likely places the outcome's accepted count is worth: e^H, in [1, γ + 1].

    H is the count's entropy in nats: each test is a coin of chance α, and τ(γ - 1) tests are made on average.
    """
    if not 0 < alpha < 1 or gamma < 1:
        return 1.0
    coin = -alpha * math.log(alpha) - (1 - alpha) * math.log1p(-alpha)
    return math.exp(coin * expected_tokens(alpha, gamma - 1))


def hit_share(width: Number, forks: Number) -> Number:
    """h that `width` branches reach before what is observed corrects it; 0 at width 0. An empirical saturation."""
    odds: Number = (width / (HALF_WIDTH_PER_FORK * forks)) ** HIT_ODDS_EXPONENT
    return odds / (1 + odds)


class Line:
    """y = a + b·x, or a + b·x + d beside other work; a, b, d >= 0, learnt one observation at a time.

    y > 0 is a duration; x a count.

    A Kalman filter on (a, b, d), whose spreads are relative to the scale of y. The slope starts small, d at nothing.
    Where only one x is seen the slope stays, but for `fade`: slowly, so that a wrong one is looked at again some time,
    and a right one isn't forgotten at once, as it would be in least squares that forget. An observation far off is cut:
    a hiccup comes alone. The third in a row on one side is a change, and is believed.
    """

    DRIFT = 0.03  # of a from one observation to the next, relative: about ten observations are remembered
    SLOPE = 0.3  # prior spread of b, in a a unit of x: a processor's pass may well cost this much for each position
    BESIDE = 0.5  # prior spread of d, in a: on shared cores a pass may take twice as long
    MOST_BESIDE = 3.0  # d, in y without it: work beside leaves a quarter of the cores at least
    GUESS = 0.03  # b before a second x was seen, relative to a: enough to be careful far from the first
    SIGMAS = 3.0  # what is farther off is cut
    ROW = 3

    def __init__(self, noise: float = 0.15, fade: float = 0.0) -> None:
        self._noise = noise  # of one observation, relative: scheduling and clocks
        self._fade = fade  # of b, each observation
        self.a = 0.0
        self.b = 0.0
        self.d = 0.0
        self._spread = [[0.0] * 3 for _ in range(3)]  # covariances of (a, b, d)
        self._far = 0  # observations in a row beyond SIGMAS; the sign is their side

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._spread[0][0] > 0

    @property
    def doubtful(self) -> bool:
        """The last observation was far off, and not believed yet."""
        return self._far != 0

    def at(self, x: float, *, beside: bool = False) -> float:
        return self.a + self.b * x + self.d * beside

    def add(self, x: float, y: float, *, beside: bool = False) -> None:
        """Learn from one observation; what is no positive finite duration is left out."""
        if not (math.isfinite(y) and y > 0):
            return
        if not self.known:
            a = y / (1 + self.GUESS * x)
            self._start(a, self.GUESS * a, 0.0)
        expected = self.at(x, beside=beside)
        error = y - expected
        spread, weights = self._spread, (1.0, x, float(beside))
        spread[0][0] += (self.DRIFT * expected) ** 2
        spread[1][1] += (2 * self._fade * expected) ** 2
        self.a, self.b = self.a + self._fade * self.b * x, (1 - self._fade) * self.b
        shared = [sum(cell * weight for cell, weight in zip(row, weights, strict=True)) for row in spread]
        variance = sum(map(operator.mul, shared, weights)) + (self._noise * expected) ** 2
        limit = self.SIGMAS * math.sqrt(variance)
        side = (error > limit) - (error < -limit)
        self._far = self._far + side if side and side * self._far >= 0 else side
        if abs(self._far) >= self.ROW:  # not a hiccup: begin again from here, with the others in proportion
            scale = y / expected
            self._start(self.a * scale, self.b * scale, self.d * scale)
            return
        error = max(-limit, min(limit, error))
        gains = [one / variance for one in shared]
        self._spread = [
            [cell - gain * one for cell, one in zip(row, shared, strict=True)]
            for row, gain in zip(spread, gains, strict=True)
        ]
        a, b, d = (part + gain * error for part, gain in zip((self.a, self.b, self.d), gains, strict=True))
        value = a + b * x + d * beside  # between what was expected and what was seen
        self.d = min(max(d, 0.0), self.MOST_BESIDE * value / (1 + self.MOST_BESIDE * beside))
        self.a, self.b = self._legal(x, value - b * x - self.d * beside, b)

    def _start(self, a: float, b: float, d: float) -> None:
        scale = a + b
        self.a, self.b, self.d, self._far = a, b, d, 0
        spreads = (scale, self.SLOPE * scale, self.BESIDE * scale)
        self._spread = [[spreads[i] ** 2 if i == j else 0.0 for j in range(3)] for i in range(3)]

    @staticmethod
    def _legal(x: float, a: float, b: float) -> tuple[float, float]:
        """a, b >= 0 with the same value at x."""
        y = max(a + b * x, 0.0)
        if b < 0:
            return y, 0.0
        if a < 0:
            return 0.0, y / x if x else 0.0
        return a, b


class Mean:
    """A duration's mean over about the last ten, robust as `Line` is. 0 while nothing was observed."""

    def __init__(self) -> None:
        self._line = Line(noise=0.5)  # a trip may have a wait in it

    @property
    def known(self) -> bool:
        return self._line.known

    @property
    def value(self) -> float:
        return self._line.a

    def add(self, y: float) -> None:
        self._line.add(0.0, y)


class Share:
    """Σ part / Σ whole with old observations fading: an acceptance rate (a Beta's mean), or hits against expected ones.

    `weight` is how much `whole` it counts for, at most `memory`. Where the last ten or so disagree with all the others,
    they are right: what is measured has changed.
    """

    QUICK = 10.0
    APART = 0.35  # three standard deviations of the last ten, at a rate of one half

    def __init__(self, value: float, weight: float, memory: float) -> None:
        self._memory = memory
        self._part, self._whole = value * weight, weight
        self._quick = value

    @property
    def value(self) -> float:
        return self._part / self._whole

    def beside(self, value: float, weight: float) -> float:
        """The value together with one from elsewhere, of some weight."""
        return (self._part + value * weight) / (self._whole + weight)

    @property
    def weight(self) -> float:
        return self._whole

    def add(self, part: float, whole: float) -> None:
        if whole <= 0:
            return
        keep = max(0.0, 1 - whole / self._memory)
        self._part = keep * self._part + part
        self._whole = keep * self._whole + whole
        self._quick += (part / whole - self._quick) * min(1.0, whole / self.QUICK)
        if self._whole > 2 * self.QUICK and abs(self._quick - self.value) > self.APART * max(1.0, self.value):
            self._part, self._whole = self._quick * self.QUICK, self.QUICK

    def fade(self, weight: float) -> None:
        """Count for no more than `weight`: what was seen long ago may not hold any more."""
        if self._whole > weight:
            self._part *= weight / self._whole
            self._whole = weight
