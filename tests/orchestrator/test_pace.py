"""The policy in simulation: near the best fixed choice, never far below plain decoding, and back when it pays again."""

from __future__ import annotations

import itertools
import statistics
from operator import itemgetter

import pytest

from orchestrator.pace import MIN_DEADLINE, WIDTHS, Pacer, Plan
from tests.orchestrator.simulated_rounds import Simulation, World

ALPHAS, DRAFT_STEPS = (0.05, 0.3, 0.6, 0.8, 0.95), (0.02, 0.1, 0.5)
V_AND_TRIP = ((0.0, 0.0), (0.3, 0.0), (0.0, 0.5))
PLAIN = 1 / 1.01  # tokens a step of plain decoding: the simulated trip to the target


@pytest.mark.parametrize("overlap", [False, True])
def test_near_the_best_fixed_choice_and_never_far_below_plain(overlap: bool) -> None:
    """Over the grid: ≥ .95 of the best fixed (γ, width) once it was looked for, < 5.5 % lost while it is."""
    shares = {}
    for alpha, c, (v_slope, trip) in itertools.product(ALPHAS, DRAFT_STEPS, V_AND_TRIP):
        world = World(alpha, c, v_slope, to_draft=trip)
        simulation = Simulation(world, Pacer(None, overlap))
        first, then = simulation.run(200), simulation.run(300)
        setting = f"α {alpha} c {c} v +{v_slope} trip {trip}"
        assert first > 0.945 * PLAIN, setting
        shares[setting] = then / world.best(overlap=overlap)
    # One run each: in a few of them the first tokens are so unlucky that finding back takes longer than this lasts.
    assert sum(share > 0.95 for share in shares.values()) >= 0.9 * len(shares), sorted(
        shares.items(), key=itemgetter(1)
    )
    assert statistics.mean(shares.values()) > 0.98
    assert min(shares.values()) > 0.75, min(shares.items(), key=itemgetter(1))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("alpha", "c", "v_slope", "trip"), [
    (0.05, 0.1, 0.0, 0.0), (0.05, 0.5, 0.3, 0.5), (0.05, 0.1, 0.3, 0.5), (0.3, 0.5, 0.3, 0.5),
])  # fmt: skip
def test_finding_out_costs_less_than_three_percent(
    alpha: float, c: float, v_slope: float, trip: float, overlap: bool
) -> None:
    world = World(alpha, c, v_slope, to_draft=trip)
    found = [
        Simulation(world, Pacer(None, overlap), seed=seed).run(200) for seed in range(24)
    ]  # one seed varies by a percent
    assert statistics.mean(found) > 0.97 * PLAIN


def test_a_bad_draft_is_found_by_the_first_request_and_known_to_the_next() -> None:
    """α .05, c .1, v 1, 128 tokens each, the draft's steps and tries all counted."""
    first, later = [], []
    for seed in range(12):
        pacer = Pacer(None, overlap=False)
        for number in range(4):
            simulation = Simulation(World(0.05, 0.1), pacer, seed=10 * seed + number)
            (later if number else first).append(simulation.run(128))
            simulation.close()
    assert statistics.mean(first) > 0.985 * PLAIN and min(first) > 0.965 * PLAIN
    assert statistics.mean(later) > 0.993 * PLAIN and min(later) > 0.975 * PLAIN


def test_settles_within_ten_rounds_or_so() -> None:
    for overlap in (False, True):
        world = World(0.8, 0.1)
        reached = []
        for seed in range(6):
            simulation = Simulation(world, Pacer(None, overlap), seed=seed)
            simulation.run(30)
            reached.append(simulation.run(30) / world.best(overlap=overlap))
        assert statistics.median(reached) > 0.95


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("c", "v_slope"), [(0.1, 0.0), (0.1, 0.3), (0.5, 0.0)])
def test_comes_back_when_the_draft_gets_better(c: float, v_slope: float, overlap: bool) -> None:
    waits = []
    for seed in range(5):
        world = World(0.05, c, v_slope)
        simulation = Simulation(world, Pacer(None, overlap), seed=seed)
        simulation.run(300)
        world.alpha = 0.8
        waits.append(next(n for n in range(20, 2000, 20) if simulation.run(20) > 0.85 * world.best(overlap=overlap)))
    assert statistics.median(waits) <= 240


@pytest.mark.parametrize("overlap", [False, True])
def test_follows_costs_and_a_draft_that_gets_worse(overlap: bool) -> None:
    world = World(0.8, 0.1)
    simulation = Simulation(world, Pacer(None, overlap))
    simulation.run(300)
    world.c = 2.0
    simulation.run(100)
    assert simulation.run(200) > 0.96 * PLAIN
    world.c = 0.1
    simulation.run(300)
    assert simulation.run(100) > 0.93 * world.best(overlap=overlap)
    world.alpha = 0.05
    assert simulation.run(100) > 0.90 * PLAIN
    assert simulation.run(100) > 0.97 * PLAIN


def test_a_short_request_passes_the_waiting_on() -> None:
    """Of requests with fewer rounds than a try waits for, some one tries, and the draft is found to be good again."""
    pacer, world = Pacer(None, overlap=False), World(0.05, 0.1)
    for number in range(80):
        world.alpha = 0.05 if number < 20 else 0.8
        simulation = Simulation(world, pacer, seed=number)
        rate = simulation.run(10)
        simulation.close()
    assert rate > 1.7


def test_an_unlucky_start_hardly_leaves_a_far_draft_out() -> None:
    """Where blocks have to be long to pay, a few refusals make one look bad; what other requests saw speaks for it."""
    world, shares = World(0.7, 0.12, to_draft=0.6), []
    for seed in range(16):
        pacer, rates = Pacer(None, overlap=False), []
        for number in range(6):
            simulation = Simulation(world, pacer, seed=100 * seed + number)
            rates.append(simulation.run(96))
            simulation.close()
        shares.append(statistics.harmonic_mean(rates) / world.best(overlap=False))
    assert statistics.mean(shares) > 0.89


@pytest.mark.parametrize("gamma", [None, 2])
@pytest.mark.parametrize("alpha", [0.4, 0.7])
def test_where_branches_slow_the_pass_down_turns_are_taken(gamma: int | None, alpha: float) -> None:
    """Draft and target on the same cores: a pass takes twice as long beside branches. Tries and all."""
    world, found, left = World(alpha, 0.15, 0.03, beside=2.0), [], []
    for seed in range(6):
        alone = Simulation(world, Pacer(gamma, overlap=False), seed=seed).run(300)
        simulation = Simulation(world, Pacer(gamma, overlap=True), seed=seed)
        found.append(simulation.run(300) / alone)
        history = [plan.width > 0 for plan, _ in simulation.rows[0].history]
        left.append(sum(history) / len(history))
    assert statistics.mean(found) > 0.96
    assert statistics.mean(left) < 0.08


def test_a_pass_that_is_slower_for_another_reason_is_no_reason_against_branches() -> None:
    """A context that grows makes every pass longer, not only those beside branches."""
    world = World(0.8, 0.1)
    simulation = Simulation(world, Pacer(None, overlap=True))
    simulation.run(200)
    shares = []
    for _ in range(8):
        world.one *= 1.1
        shares.append(simulation.run(100) / world.best(overlap=True))
    assert statistics.mean(shares) > 0.9


# ---------------------------------------------------------------- many requests


@pytest.mark.parametrize(("world", "best_gamma"), [
    (World(0.8, 0.1), 8), (World(0.05, 0.1), 0), (World(0.3, 0.1, 0.05), 0), (World(0.8, 0.02, 0.3), 0),
    (World(0.95, 0.1, 0.02, 0.1), 16), (World(0.8, 0.1, 0.05, 0.02), 4),
])  # fmt: skip
def test_eight_requests(world: World, best_gamma: int) -> None:
    """Against the best fixed γ, found beforehand. Where v rises, a row's tokens cost the others too."""
    fixed = Simulation(world, None, 8, Plan(best_gamma, best_gamma, 0)).run(150)
    simulation = Simulation(world, Pacer(None, overlap=False), 8)
    simulation.run(50)
    assert simulation.run(150) > 0.85 * fixed
    hidden = Simulation(world, Pacer(None, overlap=True), 8)
    hidden.run(50)
    assert hidden.run(150) > 0.85 * fixed


def test_branches_are_shared_out_over_requests() -> None:
    pacer = Pacer(None, overlap=True)
    paces = [pacer.request() for _ in range(8)]
    measure(pacer)
    assert max(pace.plan().width for pace in paces) <= max(WIDTHS) // 8
    for pace in paces[1:]:
        pace.close()
        pace.close()
    assert pacer.active == 1 and paces[0].plan().width > max(WIDTHS) // 8


# ---------------------------------------------------------------- single plans


def measure(pacer: Pacer, *, target: float = 0.03, draft: float = 0.003, row: float = 0.0, trip: float = 0.0) -> None:
    """Costs in seconds, without noise; `row`: more time of a draft step for each row beyond the first."""
    for positions, rows in ((1, 1), (5, 16), (9, 64)) * 5:
        pacer.verified(target, positions)
        pacer.drafted(5 * (draft + row * (rows - 1)), 5, rows)
        pacer.round_trips(draft=trip, target=0.0003)


def test_cold_start_and_deadlines() -> None:
    with Pacer(None, overlap=True).request() as pace:
        plan = pace.plan()
        assert 1 <= plan.gamma == plan.branch_gamma <= 4 and plan.width == 0 and plan.deadline is None
    quick, slow = Pacer(None, overlap=False), Pacer(None, overlap=False)
    measure(quick, target=0.003, draft=0.0003)
    measure(slow, target=0.3, draft=0.03, trip=0.1)
    assert quick.request().plan().deadline == MIN_DEADLINE
    pace = slow.request()
    plan = pace.plan()
    expected = plan.gamma * 0.03 + 0.1
    assert plan.deadline is not None and 0.3 + 2 * expected < plan.deadline < 0.3 + 5 * expected


def test_a_fixed_gamma_stays_and_its_width_adapts() -> None:
    free, dear = Pacer(6, overlap=True), Pacer(6, overlap=True)
    measure(free)
    measure(dear, target=0.003, draft=0.03, row=0.03)
    for pacer, widths in ((free, range(8, 65)), (dear, range(0, 2))):
        plan = pacer.request().plan()
        assert (plan.gamma, plan.branch_gamma, plan.deadline) == (6, 6, None) and plan.width in widths
    assert Pacer(0, overlap=True).request().plan() == Plan(0, 0, 0)
    assert Pacer(6, overlap=False).request().plan() == Plan(6, 6, 0)


def test_width_is_tried_again_seldom() -> None:
    pacer = Pacer(6, overlap=True)
    measure(pacer, target=0.003, draft=0.03, row=0.03)  # a run of one branch takes longer than drafting anew
    pace = pacer.request()
    tried = []
    for number in range(200):
        width = pace.plan().width
        if width:
            tried.append(number)
            pacer.drafted(7 * (0.03 + 0.03 * (width - 1)), 7, width)
        pace.add(6, 3, True, False if width else None)
    assert 1 <= len(tried) <= 5 and tried[0] >= 16


def test_guesses_that_never_hit_are_given_up() -> None:
    pacer = Pacer(None, overlap=True)
    measure(pacer, row=0.001)
    pace = pacer.request()
    hopeful = pace.plan()
    for _ in range(60):
        plan = pace.plan()
        pace.add(plan.gamma, min(plan.gamma, 4), plan.gamma > 4, False if plan.width else None)
    assert pacer.scale.value < 0.5 and pace.plan().width < hopeful.width


def test_time_for_branches_ends_before_the_verdict() -> None:
    """The pass and its trip, less the branches' way and what that varies by; no limit where nothing tells."""
    pacer = Pacer(None, overlap=True)
    pacer.request()
    assert pacer.time_for_branches(4) == 0.0  # nothing measured
    for branches in (0.003, 0.005) * 40:
        pacer.verified(0.030, 5)
        pacer.drafted(0.015, 3, 8)
        pacer.round_trips(draft=0.002, branches=branches, target=0.001)
    left = 0.030 + 0.001 - pacer.time_for_branches(4)
    assert 0.005 < left < 0.008  # 4 ms, and twice a deviation of 1 ms
    pacer.request()
    assert pacer.time_for_branches(4) == 0.0  # another's pass may come between
    fixed = Pacer(4, overlap=True, costs=pacer.costs)
    fixed.request()
    assert fixed.time_for_branches(4) == 0.0
