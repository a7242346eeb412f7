"""How much to speculate: γ, the branches' γ and their number, chosen for the most tokens a second.

From history and costs only, before anything is drawn (rule E2). No protocol, no clock: rounds report what they saw.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import TracebackType

import numpy as np
import numpy.typing as npt

from orchestrator.goodput import MAX_HIT_SHARE, Line, Mean, Share, expected_tokens, forks, hit_share

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_AUTO = 16  # τ at α .9 is within a fifth of its limit there, and the time lost on a wrong guess stays bounded
WIDTHS = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
MOST_BRANCHING = 3  # requests; of more, taking turns fills both devices: 8 made 365 tokens/s, and 323 with branches
COLD_GAMMA = 2  # while nothing was measured; without branches, so that a pass is seen that has its device to itself
FIRST_REACH = 4  # longest block at first: what was measured at γ = 2 says little about 16
COLD_ALPHA, COLD_WEIGHT = 0.7, 1.5  # what a draft is taken for; two tokens refused halve that: a bad one is found fast
INHERITED = 8.0  # tested tokens that what all requests saw counts for in one's own estimate
MEMORY = 200.0  # tested tokens, or hits, that an estimate is made of
FADED = 2.0  # tested tokens that an α which isn't tested any more still counts for
MARGIN = 0.02  # speculating for less gain than this isn't worth the risk of a wrong estimate
CLOSE = 0.003  # fewer branches that come as close to the most goodput as this are preferred
LEAST_SLOPE = 0.002  # of a pass, each position: tokens that bring next to nothing aren't drafted for nothing
TOLERANCE = 0.05  # costs that moved by less leave the plan as it is: working it out takes most of a millisecond
UNSEEN = 0.01  # nor do such shares of a target step matter
FIRST_WAIT, LAST_WAIT = 16, 128  # rounds before what was given up is tried again, doubling
TRY_COST = 0.01  # share of the time that tries may take
SPREADS = 2.0  # mean deviations of a trip that the draft is given less time for its branches: one in ten is later
LEAST_TIME = 1e-3  # seconds for branches where there is hardly any; 0 would be no limit
MAX_TRY, TRY_WIDTH = 4, 8
NEWS = 0.05  # a try that raises α by more is followed by another at once
LATE = 3.0  # a block that takes so many times what is expected is late
MIN_DEADLINE = 0.05  # seconds; below it, scheduling noise alone would leave rows without their block


@dataclass(frozen=True)
class Plan:
    """For one round: γ of a block drafted now; the branches' γ and number behind it; seconds to wait for the block."""

    gamma: int
    branch_gamma: int
    width: int
    deadline: float | None = None


@dataclass
class Costs:
    """Measured on the workers and on the way to them, in seconds; shared by all requests."""

    target: Line = field(default_factory=lambda: Line(fade=0.001))  # a pass, by the positions in it; d: beside branches
    draft: Line = field(default_factory=Line)  # a step, by its rows
    draft_trip: Mean = field(default_factory=Mean)
    branch_trip: Mean = field(default_factory=Mean)  # the same with branches, which are many times a block
    branch_spread: Mean = field(default_factory=Mean)  # how far one lies from the mean
    target_trip: Mean = field(default_factory=Mean)

    @property
    def known(self) -> bool:
        return self.target.known and self.draft.known

    @property
    def to_branches(self) -> float:
        """Seconds beside the draft's compute that branches are reckoned with: a trip, and what it varies by."""
        if not self.branch_trip.known:
            return self.draft_trip.value
        return self.branch_trip.value + SPREADS * self.branch_spread.value

    def try_block(self) -> tuple[int, float]:
        """The γ of a try, and what it costs in rounds without a block.

        As many tokens as cost what the trip does: one of them tells little, and the trip is paid anyway.
        """
        token = self.draft.at(1) + self.target.b
        gamma = min(MAX_TRY, 1 + int(self.draft_trip.value / token))
        seconds = gamma * token + self.draft_trip.value
        return gamma, seconds / (self.target.at(1) + self.target_trip.value)

    def summary(self) -> tuple[float, ...]:
        """What the plans depend on; times in target steps."""
        step = self.target.at(1)
        times = (self.target.at(9), self.target.d, self.draft.at(1), self.draft.at(32))
        return tuple(time / step for time in (*times, self.draft_trip.value, self.target_trip.value))


def goodput(costs: Costs, active: int, alpha: float, scale: float, gammas: Counts, widths: Counts) -> Floats:
    """Tokens a second of one of `active` requests: [width, γ, γ'].

    Its α, and its hits against those expected. A block has γ tokens if drafted now, γ' if in one of `width` branches
    drafted while the block before was verified. From when a block is sent, until the next one

    - is there, at a hit: max(pass + trip to the target, γ' wide steps + trip of branches); where draft and target
      share cores, a pass beside branches takes longer
    - has to be drafted, at a miss: pass + trip, and half a wide step where the run goes on; then γ steps + trip

    Several requests play ping-pong: half of them are in a pass, and who drafts is away for two passes at least. All are
    taken to do alike, so that a position costs one row what it costs all of them, and plans don't chase each other.
    """
    others = active - 1
    rows = np.where(gammas > 0, max(1.0, active / 2), active)  # of a pass, where everybody does alike
    to_draft, to_target = costs.draft_trip.value, costs.target_trip.value
    to_branches = costs.to_branches
    tau = np.array([expected_tokens(alpha, gamma) for gamma in gammas])  # [γ]
    target, draft = costs.target, costs.draft
    one_pass = target.a + max(target.b, LEAST_SLOPE * target.a) * rows * (gammas + 1)  # [γ]
    beside = target.d * (widths > 0) * (active == 1)  # where there are several, drafting is beside all of their passes
    verify = beside[:, None] + one_pass + to_target  # [width, γ]
    step = draft.a + draft.b * (max(1.0, active / 2) + others * widths)  # [width], with the others' blocks and branches
    wide = draft.a + draft.b * active * widths  # [width]
    run = wide[:, None] * gammas  # [width, γ']

    guessed = scale * hit_share(widths[:, None].astype(float), np.array([forks(alpha, gamma) for gamma in gammas]))
    guessed = np.minimum(guessed, MAX_HIT_SHARE)  # [width, γ of the block in flight]
    after_miss, after_hit = guessed[:, :, None], guessed[:, None, :]
    h = after_miss / (1 - after_hit + after_miss) * (gammas > 0)  # of the blocks: the next is γ' at a hit, γ at a miss

    late = np.maximum(0.0, (run + to_branches)[:, None, :] - verify[:, :, None])  # [width, γ in flight, γ']
    goes_on = (late > 0) * (widths > 0)[:, None, None]
    half = goes_on * (wide / 2)[:, None, None]  # a step isn't left half done
    wait = verify[:, :, None] + after_miss * late + (1 - after_miss) * half
    drafting = gammas * step[:, None] + to_draft * (gammas > 0)  # [width, γ]
    away = np.maximum(wait + drafting[:, :, None], (np.minimum(2, active) * one_pass * (gammas > 0))[:, None])
    same = np.einsum("wgg->wg", wait)[:, None, :]  # γ' in flight, and asked for again: such rows are in every pass
    same = same + target.b * (active - rows) * (gammas + 1)
    seconds = h * same + (1 - h) * away
    return np.asarray((h * tau + (1 - h) * tau[:, None]) / seconds)


def best_plan(found: Floats, gammas: Counts, widths: Counts) -> Plan:
    """The choice of most goodput [width, γ, γ']: the best blocks at the narrowest width that comes close to it."""
    if gammas[0] == 0:
        found[0, 0] *= 1 + MARGIN
    reached = found.max(axis=(1, 2))
    width = int(np.argmax(reached >= (1 - CLOSE) * reached.max()))
    gamma, branch_gamma = (int(gammas[place]) for place in np.unravel_index(int(found[width].argmax()), found[0].shape))
    return Plan(gamma, branch_gamma if width else gamma, int(widths[width]))


class Retry:
    """When to try again what was given up: after 16 rounds, 32, 64, …, and seldom enough to cost little."""

    def __init__(self, waited: int = 0) -> None:
        self._wait = FIRST_WAIT
        self._waited = waited

    def due(self, excess: float) -> bool:
        """Another round without it. `excess`: rounds that a try costs more."""
        self._waited += 1
        return self._waited > max(self._wait, excess / TRY_COST)

    def tried(self, *, news: bool) -> None:
        if news:
            self._wait, self._waited = FIRST_WAIT, 10**9  # again at once
        else:
            self._wait, self._waited = min(2 * self._wait, LAST_WAIT), 0

    def reset(self) -> None:
        self._wait, self._waited = FIRST_WAIT, 0


class Pacer:
    """One for each runtime: measured costs, and what the draft was worth lately. `gamma` None: chosen by goodput."""

    def __init__(self, gamma: int | None, overlap: bool, costs: Costs | None = None) -> None:
        self.costs = costs if costs is not None else Costs()
        self.alpha = Share(COLD_ALPHA, COLD_WEIGHT, MEMORY)
        self.scale = Share(1.0, COLD_WEIGHT, MEMORY)
        self.active = 0
        self.waited = 0  # rounds at γ = 0 since anybody's last block: requests too short to wait carry on from there
        self.gamma = gamma
        self.overlap = overlap
        self._gammas = np.arange(MAX_AUTO + 1) if gamma is None else np.array([gamma])
        self._widths = np.array(WIDTHS if overlap and gamma != 0 else (0,))
        self._reach = FIRST_REACH
        self._plans: dict[tuple[int, int], Plan] = {}
        self._plans_for: tuple[float, ...] = ()

    def verified(self, seconds: float, positions: int, *, beside: bool = False) -> None:
        """A pass of the target: compute seconds, and tokens fed in it by all rows. Each of its rows may tell.

        `beside`: the draft was asked for branches behind it.
        """
        self.costs.target.add(positions, seconds, beside=beside and self.active <= 1)

    def drafted(self, seconds: float, steps: int, rows: int) -> None:
        """Steps of the draft: compute seconds of all of them, and the rows of the widest."""
        if steps > 0:
            self.costs.draft.add(rows, seconds / steps)

    def round_trips(
        self, draft: float | None = None, branches: float | None = None, target: float | None = None
    ) -> None:
        """Seconds of round trips beside the workers' compute: for a block, for branches, for a verdict; None: none."""
        costs = self.costs
        if draft is not None:
            costs.draft_trip.add(draft)
        if branches is not None:
            if costs.branch_trip.known:
                costs.branch_spread.add(abs(branches - costs.branch_trip.value))
            costs.branch_trip.add(branches)
        trip = costs.target_trip
        if target is not None and (self.active <= 1 or not trip.known or target < 2 * trip.value):
            trip.add(target)  # with others it may have the wait for a pass in it, which the plan counts apart

    @property
    def drafts(self) -> bool:
        """Whether a request that starts now would draft: not at γ = 0, and not where the draft doesn't pay."""
        return self.gamma != 0 and (self.gamma is not None or self.plan(self.alpha.value, self.scale.value).gamma > 0)

    def request(self) -> Pace:
        """A request starts; close it."""
        self.active += 1
        return Pace(self)

    def plan(self, alpha: float, scale: float) -> Plan:
        """The best for a request of these estimates; kept while costs stay as they are."""
        if not self.costs.known:
            gamma = COLD_GAMMA if self.gamma is None else self.gamma
            return Plan(gamma, gamma, 0)
        summary = (self.active, *self.costs.summary())
        if not self._plans_for or any(
            abs(now - then) > TOLERANCE * then + UNSEEN for now, then in zip(summary, self._plans_for, strict=True)
        ):
            self._plans, self._plans_for = {}, summary
        key = (round(100 * alpha), round(20 * scale))
        if key not in self._plans:
            active = max(1, self.active)
            widths = np.unique(self._widths // active)[: None if active <= MOST_BRANCHING else 1]  # rows are shared out
            gammas = self._gammas[: self._reach + 1]
            found = goodput(self.costs, active, key[0] / 100, key[1] / 20, gammas, widths)
            self._plans[key] = best_plan(found, gammas, widths)
        return self._plans[key]

    def reached(self, drafted: int) -> None:
        """A block of so many tokens was verified: costs of one twice as long may be reckoned with."""
        if self._reach < min(2 * drafted, MAX_AUTO):
            self._reach = min(2 * drafted, MAX_AUTO)
            self._plans = {}

    def time_for_branches(self, gamma: int) -> float:
        """Seconds that the draft has for branches of a block of γ tokens, until the verdict is expected.

        0 where there is no limit: γ is fixed, nothing is measured, or others' passes come between.
        """
        costs = self.costs
        if self.gamma is not None or not (costs.known and costs.branch_trip.known) or self.active > 1:
            return 0.0
        return max(LEAST_TIME, costs.target.at(gamma + 1, beside=True) + costs.target_trip.value - costs.to_branches)

    def deadline(self, gamma: int) -> float | None:
        """Seconds after which a row goes on without its block; None for a γ that was asked for, or unmeasured."""
        if self.gamma is not None or not self.costs.known:
            return None
        block = gamma * self.costs.draft.at(max(1, self.active)) + self.costs.draft_trip.value
        return max(MIN_DEADLINE, LATE * block + self.costs.target.at(1))


class Pace:
    """One request's: `plan` before each round, `add` after it."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._alpha = Share(pacer.alpha.value, 0.0, MEMORY)
        self._scale = Share(pacer.scale.value, 0.0, MEMORY)
        self._gamma_retry = Retry(pacer.waited)
        self._width_retry = Retry()
        self._trying: tuple[Retry, float] | None = None  # what this round tries again, and α before it
        self._width = 0
        self._closed = False

    @property
    def alpha(self) -> float:
        """The estimate of this request's acceptance rate: its own tests, beside what all requests saw lately."""
        return self._alpha.beside(self._pacer.alpha.value, min(INHERITED, self._pacer.alpha.weight))

    @property
    def scale(self) -> float:
        """Hits against those expected, in the same way."""
        return self._scale.beside(self._pacer.scale.value, min(INHERITED, self._pacer.scale.weight))

    def plan(self) -> Plan:
        """The next round's."""
        pacer = self._pacer
        found = pacer.plan(self.alpha, self.scale)
        self._trying = None
        if found.gamma == 0 and not found.width and pacer.gamma is None:
            found = self._try_gamma(found)
        elif not found.width and found.gamma and pacer.overlap and pacer.costs.known:
            found = self._try_width(found)
        self._width = found.width
        return replace(found, deadline=pacer.deadline(found.gamma))

    def _try_gamma(self, found: Plan) -> Plan:
        gamma, excess = self._pacer.costs.try_block()
        if not self._gamma_retry.due(excess):
            return found
        self._trying = (self._gamma_retry, self.alpha)
        return Plan(gamma, gamma, 0)

    def _try_width(self, found: Plan) -> Plan:
        width = TRY_WIDTH // max(1, self._pacer.active) if self._pacer.active <= MOST_BRANCHING else 0
        target = self._pacer.costs.target
        if not width or not self._width_retry.due(target.d / target.at(1)):
            return found
        self._trying = (self._width_retry, self.alpha)
        return Plan(found.gamma, found.gamma, width)

    def add(self, drafted: int, accepted: int, refused: bool, hit: bool | None = None) -> None:
        """A round's outcome: tokens in its block, those accepted, whether one was refused; `hit`: its outcome was among
        the branches in time (None: none were asked for)."""
        pacer = self._pacer
        if hit is not None and self._width:
            self.guessed(hit, self._width, drafted)
        for alpha in (self._alpha, pacer.alpha):
            alpha.add(accepted, accepted + refused)
        pacer.reached(drafted)
        pacer.waited = 0 if drafted else pacer.waited + 1
        self._settle_tries(drafted)

    def guessed(self, right: bool, width: int, drafted: int) -> None:
        """Whether the outcome of a block of `drafted` tokens was among `width` branches, in time or not."""
        expected = hit_share(width, forks(self.alpha, drafted))
        for scale in (self._scale, self._pacer.scale):
            scale.add(right, expected)

    def _settle_tries(self, drafted: int) -> None:
        if self._trying is not None:
            retry, alpha = self._trying
            retry.tried(news=self.alpha > alpha + NEWS or self._pacer.costs.draft.doubtful)
        elif drafted:
            self._gamma_retry.reset()
        else:
            self._alpha.fade(max(FADED, 0.9 * self._alpha.weight))
        if self._trying is None and self._width:
            self._width_retry.reset()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pacer.active -= 1

    def __enter__(self) -> Pace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
