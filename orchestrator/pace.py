"""How much to speculate: γ, the branches' γ and their number, chosen for the most tokens a second.

From history and costs only, before anything is drawn (rule E2). No protocol, no clock: rounds report what they saw.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import TracebackType

from orchestrator.goodput import MAX_HIT_SHARE, Line, Mean, Share, expected_tokens, forks, hit_share

MAX_AUTO = 16  # τ at α .9 is within a fifth of its limit there, and the time lost on a wrong guess stays bounded
WIDTHS = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
COLD_GAMMA, COLD_WIDTH = 4, 16  # while nothing was measured
COLD_ALPHA, COLD_WEIGHT = 0.7, 4.0  # what a draft is taken for, and how many tokens against it change that
MEMORY = 50.0  # tested tokens, or hits, that an estimate is made of
FADED = 2.0  # tested tokens that an α which isn't tested any more still counts for
MARGIN = 1.02  # speculating for less gain than this isn't worth the risk of a wrong estimate
WIDER = 1.002  # and a wider run, or a longer block, has to gain something
TOLERANCE = 0.05  # costs that moved by less leave the plan as it is: working it out takes most of a millisecond
UNSEEN = 0.01  # nor do such shares of a target step matter
FIRST_WAIT, LAST_WAIT = 16, 128  # rounds before what was given up is tried again, doubling
TRY_COST = 0.01  # share of the time that tries may take
TRY_WIDTH = 8
NEWS = 0.1  # a try that raises α by more is followed by another at once
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

    target: Line = field(default_factory=Line)  # a pass, by the positions in it
    draft: Line = field(default_factory=Line)  # a step, by its rows
    draft_trip: Mean = field(default_factory=Mean)
    target_trip: Mean = field(default_factory=Mean)
    together: Share = field(default_factory=lambda: Share(1.0, 1.0, 30.0))  # rows of a pass, of the active requests
    positions: Share = field(default_factory=lambda: Share(1.0, 1.0, 100.0))  # of a row
    tokens: Share = field(default_factory=lambda: Share(1.0, 1.0, 100.0))  # that a round emits

    @property
    def known(self) -> bool:
        return self.target.known and self.draft.known

    def summary(self) -> tuple[float, ...]:
        """What the plans depend on; times in target steps."""
        step = self.target.at(1)
        times = (self.target.at(9), self.draft.at(1), self.draft.at(32), self.draft_trip.value, self.target_trip.value)
        shares = (self.together.value, self.positions.value, self.tokens.value)
        return (*(time / step for time in times), *shares)


class Outlook:
    """Tokens a second of every choice, for one request of acceptance α among `active` ones. One round of its takes

    - hit:  max(pass + trip to the target, branch run + trip to the draft)
    - miss: pass + γ draft steps + both trips, and half a wide step where the branch run is still going on

    and no less than the target needs for a round of everybody. The others' tokens count too: each position more in
    the pass slows them.
    """

    def __init__(self, costs: Costs, active: int, alpha: float, scale: float, longest: int) -> None:
        self._costs = costs
        self._active = active
        self._scale = scale
        self._rows = max(1.0, costs.together.value * active)
        gammas = range(longest + 1)
        self._tau = [expected_tokens(alpha, gamma) for gamma in gammas]
        self._forks = [forks(alpha, gamma) for gamma in gammas]

    def _h(self, gamma: int, width: int) -> float:
        return min(MAX_HIT_SHARE, self._scale * hit_share(width, self._forks[gamma]))

    def step(self, width: int) -> float:
        """A draft step of the blocks asked for together, and the others' branches, `width` each."""
        return self._costs.draft.at(self._rows + (self._active - 1) * width)

    def verify(self, gamma: float) -> float:
        """A pass with this request's block in it, and the trip."""
        others = (self._rows - 1) * self._costs.positions.value
        return self._costs.target.at(others + gamma + 1) + self._costs.target_trip.value

    def hit(self, gamma: int, width: int) -> float:
        run = (gamma + 1) * self._costs.draft.at(self._active * width)
        return max(self.verify(gamma), run + self._costs.draft_trip.value)

    def miss(self, gamma: int, branch_gamma: int, width: int) -> float:
        seconds = self.verify(gamma)
        if width:
            wide = self._costs.draft.at(self._active * width)
            if (branch_gamma + 1) * wide > seconds:
                seconds += wide / 2  # a step isn't left half done
        if gamma:
            seconds += gamma * self.step(width) + self._costs.draft_trip.value
        return seconds

    def goodput(self, gamma: int, branch_gamma: int, width: int) -> float:
        """Tokens a second of all active requests."""
        h = 0.0
        if width and branch_gamma:  # after a hit a block of γ' is in flight, after a miss one of γ
            h = self._h(gamma, width)
            h /= 1 - self._h(branch_gamma, width) + h
        tokens, length, seconds = self._tau[gamma], float(gamma), self.miss(gamma, branch_gamma, width)
        if h:
            tokens += h * (self._tau[branch_gamma] - tokens)
            length += h * (branch_gamma - gamma)
            seconds += h * (self.hit(branch_gamma, width) - seconds)
        if self._active == 1:
            return tokens / seconds
        costs, others = self._costs, self._active - 1
        positions = others * costs.positions.value + length + 1
        cycle = costs.target.a * self._active / self._rows + costs.target.b * positions
        typical = max(0.0, costs.positions.value - 1) * self.step(width) + costs.draft_trip.value
        return tokens / max(cycle, seconds) + others * costs.tokens.value / max(cycle, self.verify(length) + typical)


def best_plan(outlook: Outlook, active: int, gammas: tuple[int, ...], widths: tuple[int, ...]) -> Plan:
    """The choice of most goodput: γ and width together, then γ' and γ apart, each to the least that reaches it."""
    best, most = Plan(gammas[0], gammas[0], 0), outlook.goodput(gammas[0], gammas[0], 0)
    bar = MARGIN if gammas[0] == 0 else WIDER

    def consider(gamma: int, branch_gamma: int, width: int) -> None:
        nonlocal best, most, bar
        found = outlook.goodput(gamma, branch_gamma, width)
        if found > most * bar:
            best, most, bar = Plan(gamma, branch_gamma, width), found, WIDER

    each = sorted({width // active for width in widths})
    for width in each:
        for gamma in gammas:
            consider(gamma, gamma, width)
    if 0 not in gammas:
        return best
    for width in each[1:]:  # a draft too slow to wait for may still run behind plain decoding
        for branch_gamma in gammas:
            consider(0, branch_gamma, width)
    for branch_gamma in gammas:
        consider(best.gamma, branch_gamma, best.width)
    for gamma in gammas:
        consider(gamma, best.branch_gamma, best.width)
    return best


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

    def __init__(self, gamma: int | None, overlap: bool) -> None:
        self.costs = Costs()
        self.alpha = Share(COLD_ALPHA, COLD_WEIGHT, 2 * MEMORY)
        self.scale = Share(1.0, COLD_WEIGHT, 2 * MEMORY)
        self.active = 0
        self.waited = 0  # rounds at γ = 0 since anybody's last block: requests too short to wait carry on from there
        self.gamma = gamma
        self.overlap = overlap
        self._gammas = tuple(range(MAX_AUTO + 1)) if gamma is None else (gamma,)
        self._widths = WIDTHS if overlap else (0,)
        self._plans: dict[tuple[int, int], Plan] = {}
        self._plans_for: tuple[float, ...] = ()

    def verified(self, seconds: float, rows: int, positions: int) -> None:
        """A pass of the target: compute seconds, requests and tokens in it."""
        self.costs.target.add(positions, seconds)
        self.costs.together.add(min(1.0, rows / max(1, self.active)), 1.0)
        self.costs.positions.add(positions, rows)

    def drafted(self, seconds: float, steps: int, rows: int) -> None:
        """Steps of the draft: compute seconds of all of them, and the rows of the widest."""
        if steps > 0:
            self.costs.draft.add(rows, seconds / steps)

    def round_trips(self, draft: float | None = None, target: float | None = None) -> None:
        """Seconds of a round trip to each worker beside its compute; None: none was made."""
        if draft is not None:
            self.costs.draft_trip.add(draft)
        if target is not None:
            self.costs.target_trip.add(target)

    def request(self) -> Pace:
        """A request starts; close it."""
        self.active += 1
        return Pace(self)

    def plan(self, alpha: float, scale: float) -> Plan:
        """The best for a request of these estimates; kept while costs stay as they are."""
        if not self.costs.known:
            gamma = COLD_GAMMA if self.gamma is None else self.gamma
            return Plan(gamma, gamma, COLD_WIDTH // max(1, self.active) if self._widths[-1] and gamma else 0)
        summary = (self.active, *self.costs.summary())
        if not self._plans_for or any(
            abs(now - then) > TOLERANCE * then + UNSEEN for now, then in zip(summary, self._plans_for, strict=True)
        ):
            self._plans, self._plans_for = {}, summary
        key = (round(50 * alpha), round(20 * scale))
        if key not in self._plans:
            outlook = self.outlook(key[0] / 50, key[1] / 20)
            self._plans[key] = best_plan(outlook, self.active, self._gammas, self._widths)
        return self._plans[key]

    def outlook(self, alpha: float, scale: float) -> Outlook:
        return Outlook(self.costs, self.active, alpha, scale, max(self._gammas))

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
        self._alpha = Share(pacer.alpha.value, COLD_WEIGHT, MEMORY)
        self._scale = Share(pacer.scale.value, COLD_WEIGHT, MEMORY)
        self._gamma_retry = Retry(pacer.waited)
        self._width_retry = Retry()
        self._trying: tuple[Retry, float] | None = None  # what this round tries again, and α before it
        self._width = 0
        self._closed = False

    @property
    def alpha(self) -> float:
        """The estimate of this request's acceptance rate."""
        return self._alpha.value

    def plan(self) -> Plan:
        """The next round's."""
        pacer = self._pacer
        found = pacer.plan(self.alpha, self._scale.value)
        self._trying = None
        if found.gamma == 0 and not found.width and pacer.gamma is None:
            found = self._try_gamma(found)
        elif not found.width and found.gamma and pacer.overlap:
            found = self._try_width(found)
        self._width = found.width
        return replace(found, deadline=pacer.deadline(found.gamma))

    def _try_gamma(self, found: Plan) -> Plan:
        outlook = self._pacer.outlook(self.alpha, self._scale.value)
        gamma = 1
        excess = outlook.miss(gamma, gamma, 0) / outlook.miss(0, 0, 0) - expected_tokens(self.alpha, gamma)
        if not self._gamma_retry.due(excess):
            return found
        self._trying = (self._gamma_retry, self.alpha)
        return Plan(gamma, gamma, 0)

    def _try_width(self, found: Plan) -> Plan:
        width = TRY_WIDTH // self._pacer.active
        if not width or not self._width_retry.due(0.0):
            return found
        self._trying = (self._width_retry, self.alpha)
        return Plan(found.gamma, found.gamma, width)

    def add(self, drafted: int, accepted: int, refused: bool, hit: bool | None = None) -> None:
        """A round's outcome: tokens in its block, those accepted, whether one was refused; `hit`: its outcome was among
        the branches in time (None: none were asked for)."""
        pacer = self._pacer
        if hit is not None and self._width:
            expected = hit_share(self._width, forks(self.alpha, drafted))
            for scale in (self._scale, pacer.scale):
                scale.add(hit, expected)
        for alpha in (self._alpha, pacer.alpha):
            alpha.add(accepted, accepted + refused)
        pacer.costs.tokens.add(accepted + 1, 1.0)
        pacer.waited = 0 if drafted else pacer.waited + 1
        self._settle_tries(drafted)

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
