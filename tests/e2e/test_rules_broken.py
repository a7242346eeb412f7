"""The rules E1 to E5 and their neighbours, broken on purpose: the statistic of the law tests must find each fault.

Both workers' real loops and engines run in this process; one fault is put in at a time, and the same G-test that
accepts the intact pair at significance 1e-6 must reject. What is legal and looks like a fault (stopping after an
unlikely token that is kept) must pass. Sizes: SAMPLES transitions of an order-1 target over V = 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import draft_worker.engine as draft_engine
from draft_worker import drawing
from draft_worker.quantize import draw_counts_rows
from execution.toy import toy_table
from orchestrator.request import GenerateOptions, Request, Round
from protocol.codecs import NO_Q, decode
from protocol.messages import Verdict
from speculative import Stream, batch_verify
from speculative import race as speculative_race
from tests.e2e.inprocess import Drafted, Outcomes, Pair, as_drafted, hit_share, plain_ahead, plain_draft
from tests.e2e.law import Verdict as Found
from tests.e2e.law import g_test, planted, sampled_law, transitions
from tests.e2e.support import toy

pytestmark = pytest.mark.slow

V = 8
TARGET = toy(vocab=V, seed=5, scale=1.3)
DRAFT = toy(vocab=V, seed=5, scale=1.3, noise=0.9, noise_seed=7)
REQUESTS = 400
SAMPLES = 24_000
Patch = pytest.MonkeyPatch


FAR_DRAFT = toy(vocab=V, seed=5, scale=1.3, noise=3, noise_seed=7)  # refused often, as E1 needs to show


NAN_DRAFT = DRAFT + ",nan_token=2"  # whatever follows token 2 is NaN; prompts and corrections hold it too


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {draft: Pair(TARGET, draft) for draft in (DRAFT, FAR_DRAFT, NAN_DRAFT)}


def statistic(pair: Pair, sampling: dict[str, Any], seed: int, **how: Any) -> Found:
    options = GenerateOptions(max_tokens=SAMPLES // REQUESTS, **sampling)
    done = pair.generate(REQUESTS, options, vocab=V, seed=seed, **how)
    law = sampled_law(toy_table(TARGET).numpy(), **sampling)
    return g_test(transitions([(r.prompt[-1], list(r.generated)) for r, _ in done], V), law)


# ---------------------------------------------------------------- the faults


def shared_noise(patch: Patch) -> None:
    """E1: the draft draws by a race, and the residual's race reads the same stream."""

    def draw(log_q: torch.Tensor, draws: Any) -> Any:
        rows = draw_counts_rows(log_q, draws)[1]
        seeds, positions = asked.pop()
        return speculative_race(log_q, seeds, Stream.DRAFT, positions).tolist(), rows

    asked: list[Any] = []
    intact = drawing.Drawer.draw

    def remember(self: Any, growing: Any, log_q: Any) -> None:
        asked.append(([one.entry.opened.seed for one in growing], [one.position for one in growing]))
        intact(self, growing, log_q)

    def race(log_p: Any, seeds: Any, streams: Any, positions: Any, ids: Any = None) -> Any:
        shared = [Stream.DRAFT if stream == Stream.RESIDUAL else stream for stream in streams]
        return speculative_race(log_p, seeds, shared, positions, ids)

    patch.setattr(drawing.Drawer, "draw", remember)
    patch.setattr(drawing, "draw_counts_rows", draw)
    patch.setattr(batch_verify, "race", race)


def drawn_by_race(patch: Patch) -> None:
    """The control of E1: the same draw by a race over the draft's stream, but the residual keeps its own."""
    shared_noise(patch)
    patch.setattr(batch_verify, "race", speculative_race)


def likelihoods(drafted: Drafted) -> np.ndarray:
    """q̃ of each drafted token, [γ]."""
    if not drafted.tokens:
        return np.ones(0)
    ids, probs = decode(drafted.q, drafted.tokens, V)
    return np.where(ids == np.array(drafted.tokens)[:, None], probs, 0).sum(1)


def tail_dropped(pair: Pair, requests: list[Request], gamma: int, block_id: int) -> list[Drafted]:
    """E2: the block ends before its first unlikely token, which was sampled and is thrown away."""
    blocks = plain_draft(pair, requests, gamma, block_id)
    return [block.cut(next(iter(np.flatnonzero(likelihoods(block) < 0.2)), len(block.tokens))) for block in blocks]


def tail_kept(pair: Pair, requests: list[Request], gamma: int, block_id: int) -> list[Drafted]:
    """The control of E2: the block ends after its first unlikely token, which is verified like any other."""
    blocks = plain_draft(pair, requests, gamma, block_id)
    return [block.cut(next(iter(np.flatnonzero(likelihoods(block) < 0.2) + 1), len(block.tokens))) for block in blocks]


def likelier_of_two(pair: Pair, requests: list[Request], gamma: int, block_id: int) -> list[Drafted]:
    """E3: two blocks from different noise; the likelier one is sent."""
    first = plain_draft(pair, requests, gamma, block_id)
    second = [as_drafted(block) for block in pair.propose(pair.other_drafter, requests, gamma, block_id)]
    return [
        one if np.log(likelihoods(one)).sum() >= np.log(likelihoods(other)).sum() else other
        for one, other in zip(first, second, strict=True)
    ]


def other_of_two(pair: Pair, requests: list[Request], gamma: int, block_id: int) -> list[Drafted]:
    """The control of E3: two blocks, and the choice looks at neither."""
    first = plain_draft(pair, requests, gamma, block_id)
    second = [as_drafted(block) for block in pair.propose(pair.other_drafter, requests, gamma, block_id)]
    return [(one, other)[block_id % 2] for one, other in zip(first, second, strict=True)]


def likelier_of_two_branches(
    pair: Pair, requests: list[Request], drafted: list[Drafted], gamma: int, block_id: int
) -> list[Outcomes]:
    """E3: two branches for an outcome, from different noise; the likelier one is kept."""
    first = pair.branches(pair.drafter, requests, drafted, gamma, block_id)
    second = pair.branches(pair.other_drafter, requests, drafted, gamma, block_id)
    return [
        {at: max(one[at], other.get(at, one[at]), key=lambda block: np.log(likelihoods(block)).sum()) for at in one}
        for one, other in zip(first, second, strict=True)
    ]


def only_likely_branches(
    pair: Pair, requests: list[Request], drafted: list[Drafted], gamma: int, block_id: int
) -> list[Outcomes]:
    """E2, where a miss is drafted from other noise: a branch with an unlikely token is thrown away."""
    found = pair.branches(pair.drafter, requests, drafted, gamma, block_id)
    return [{at: one for at, one in each.items() if likelihoods(one).min() >= 0.2} for each in found]


def from_other_noise(pair: Pair, requests: list[Request], gamma: int, block_id: int) -> list[Drafted]:
    """What is not there as a branch is drafted by a draft of another seed. That alone is legal: no token is seen."""
    return [as_drafted(block) for block in pair.propose(pair.other_drafter, requests, gamma, block_id)]


def raw_q_sent(patch: Patch) -> None:
    """E4: drawn after top-k 3, but the q that is sent is the one before it."""

    def draw(log_q: torch.Tensor, draws: Any) -> Any:
        least = log_q.topk(3).values[:, -1:]
        filtered = log_q.masked_fill(log_q < least, -torch.inf).log_softmax(-1)
        return draw_counts_rows(filtered, draws)[0], draw_counts_rows(log_q, draws)[1]

    patch.setattr(drawing, "draw_counts_rows", draw)


def greedy_draft_with_softmax(patch: Patch) -> None:
    """E4 (B1): the draft's argmax, sent with its softmax as q."""
    patch.setattr(drawing, "draw_counts_rows", lambda q, draws: (q.argmax(-1).tolist(), draw_counts_rows(q, draws)[1]))


def coarse_counts(patch: Patch) -> None:
    """E4: drawn before the rounding of a coarse codec (to sixteenths), and sent after it."""

    def draw(log_q: torch.Tensor, draws: Any) -> Any:
        sixteenths = (log_q.softmax(-1) * 16).round().clamp(min=1e-9)
        rounded = (sixteenths / sixteenths.sum(-1, keepdim=True)).log()
        return draw_counts_rows(log_q, draws)[0], draw_counts_rows(rounded, draws)[1]

    patch.setattr(drawing, "draw_counts_rows", draw)


def q_lost(pair: Pair, requests: list[Request], gamma: int, block_id: int) -> list[Drafted]:
    """A control: a sampled token verified as a point mass. Exact: accept d with p(d), else draw from p without d.

    So leaving q̃ away costs acceptance only; it is sending another q that costs the law.
    """
    return [Drafted(block.tokens, NO_Q) for block in plain_draft(pair, requests, gamma, block_id)]


def better_verdict(pair: Pair, requests: list[Request], drafted: list[Drafted], block_id: int) -> list[Verdict]:
    """E5: two verdicts from different noise; the one that keeps more is taken."""
    first = pair.judge(pair.target, requests, drafted, block_id)
    second = pair.judge(pair.other_target, requests, drafted, block_id)
    return [one if one.accepted >= other.accepted else other for one, other in zip(first, second, strict=True)]


def zero_uniform(patch: Patch) -> None:
    """B5: u is 0, so every draft that the target finds possible is accepted."""
    patch.setattr(batch_verify, "uniform", lambda seeds, *_: torch.zeros(len(seeds), dtype=torch.float64))


def softmaxed_residual(patch: Patch) -> None:
    """B3: the residual goes through a softmax instead of being normalised."""
    intact = batch_verify._log_residual
    patch.setattr(batch_verify, "_log_residual", lambda *given: intact(*given).exp().log_softmax(-1))


def resampled_from_p(patch: Patch) -> None:
    """The correction is drawn from p instead of (p − q̃)₊."""
    patch.setattr(batch_verify, "_log_residual", lambda log_p, *_: log_p)


def accepted_by_own_q(patch: Patch) -> None:
    """p/q on untempered probabilities: the test's p is that of another temperature (B8)."""
    intact = batch_verify._accepted_lengths
    patch.setattr(
        batch_verify, "_accepted_lengths", lambda log_p, *given: intact((log_p * 1.3).log_softmax(-1), *given)
    )


def nan_drops_the_block(patch: Patch) -> None:
    """E2: a block in which the draft's logits became NaN is thrown away whole, with the token that led there."""
    intact = draft_engine.ModelDraftEngine._block

    def block(self: Any, asked: Any) -> Any:
        if asked.drafting.broken:
            asked.drafting.tokens.clear()
            asked.drafting.q.clear()
        return intact(self, asked)

    patch.setattr(draft_engine.ModelDraftEngine, "_block", block)


def nothing(patch: Patch) -> None:
    """The intact pair."""


@dataclass(frozen=True)
class Variant:
    name: str
    patch: Callable[[Patch], None] = nothing
    how: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    draft: str = DRAFT


BROKEN = [
    Variant("E1 the residual's race reads the draft's noise", shared_noise, draft=FAR_DRAFT),
    Variant("E2 an unlikely token is thrown away", how={"draft": tail_dropped}),
    Variant("E2 a NaN throws the block away", nan_drops_the_block, draft=NAN_DRAFT),
    Variant("E3 the likelier of two blocks", how={"draft": likelier_of_two, "second_draft": True}),
    Variant("E4 q from before top-k", raw_q_sent),
    Variant("E1 with branches", shared_noise, {"ahead": plain_ahead}, draft=FAR_DRAFT),
    Variant("E3 the likelier of two branches", how={"ahead": likelier_of_two_branches, "second_draft": True}),
    Variant(
        "E2 an unlikely branch is drafted anew from other noise",
        how={"ahead": only_likely_branches, "draft": from_other_noise, "second_draft": True},
    ),
    Variant("E4 argmax with its softmax", greedy_draft_with_softmax),
    Variant("E4 drawn before a coarse rounding", coarse_counts),
    Variant("E5 the better of two verdicts", how={"verify": better_verdict, "second_verdict": True}),
    Variant("B5 u = 0", zero_uniform),
    Variant("B3 softmaxed residual", softmaxed_residual),
    Variant("resampled from p", resampled_from_p),
    Variant("B8 the accept test at another temperature", accepted_by_own_q),
]
INTACT = [
    Variant("intact"),
    Variant("intact, dense", how={"codec": "dense"}),
    Variant("branches", how={"ahead": plain_ahead}),
    Variant("branches, filtered", how={"ahead": plain_ahead}, sampling={"temperature": 0.8, "top_k": 6, "min_p": 0.02}),
    Variant("branches, NaN", how={"ahead": plain_ahead}, draft=NAN_DRAFT),
    Variant(
        "control of E2 and E3 with branches: misses from other noise",
        how={"ahead": plain_ahead, "draft": from_other_noise, "second_draft": True},
    ),
    Variant("intact, filtered", sampling={"temperature": 0.8, "top_k": 6, "min_p": 0.02}),
    Variant("control of E1: drawn by a race of its own", drawn_by_race, draft=FAR_DRAFT),
    Variant("control of E2: stopping after a token that is kept", how={"draft": tail_kept}),
    Variant("control of E4: no q̃ at all, a point mass", how={"draft": q_lost}),
    Variant("control of E2: a NaN ends the block", draft=NAN_DRAFT),
    Variant("control of E3: one of two blocks, unseen", how={"draft": other_of_two, "second_draft": True}),
]


def found(pair: Pair, variant: Variant, monkeypatch: Patch) -> Found:
    variant.patch(monkeypatch)
    seed = 1_000_000 * (1 + (BROKEN + INTACT).index(variant))
    return statistic(pair, variant.sampling, seed, **variant.how)


@pytest.mark.parametrize("variant", INTACT, ids=lambda variant: variant.name)
def test_intact_follows_the_law(pairs: dict[str, Pair], variant: Variant, monkeypatch: Patch) -> None:
    verdict = found(pairs[variant.draft], variant, monkeypatch)
    assert not verdict.rejected, verdict


@pytest.mark.parametrize("variant", BROKEN, ids=lambda variant: variant.name)
def test_broken_is_found(pairs: dict[str, Pair], variant: Variant, monkeypatch: Patch) -> None:
    verdict = found(pairs[variant.draft], variant, monkeypatch)
    assert verdict.rejected, f"{variant.name} was not found: {verdict}"


def not_strict(log_p: Any, layout: Any, drafted: Any, q_ids: Any, q_probs: Any, *_: Any) -> list[int]:
    """`u <= p/q̃` at u = 0."""
    lengths, row, draft = [], 0, 0
    for gamma in layout.gammas:
        kept = 0
        while kept < gamma and float(log_p[row + kept, drafted[draft + kept]].exp()) >= 0.0:
            kept += 1
        lengths.append(kept)
        row, draft = row + gamma + 1, draft + gamma
    return lengths


@pytest.mark.parametrize("broken", [False, True])
def test_the_accept_test_is_strict(pairs: dict[str, Pair], monkeypatch: Patch, broken: bool) -> None:
    """u = 0 happens once in 2**53 draws, so it is planted. A token with p = 0 must not pass; `<=` lets it.

    The draft proposes from all of V, the target keeps two tokens of it.
    """
    zero_uniform(monkeypatch)
    wide = drawing.log_distribution
    monkeypatch.setattr(drawing, "log_distribution", lambda rows, options: rows.log_softmax(-1))
    assert wide is not drawing.log_distribution
    if broken:
        monkeypatch.setattr(batch_verify, "_accepted_lengths", not_strict)
    options = GenerateOptions(max_tokens=20, top_k=2)
    law = sampled_law(toy_table(TARGET).numpy(), top_k=2)
    done = pairs[DRAFT].generate(50, options, vocab=V, seed=77)
    counts = transitions([(r.prompt[-1], list(r.generated)) for r, _ in done], V)
    assert bool(counts[law == 0].sum() > 0) == broken


# ---------------------------------------------------------------- branches


MODES = {
    "counts": {"codec": "counts"},
    "dense": {"codec": "dense"},
    "coupled": {"mode": "coupled", "codec": "none"},
    "greedy": {"codec": "counts", "temperature": 0.0},
}


def sampled(
    pair: Pair, seed: int, tokens: int = 40, ahead: Any = None, **how: Any
) -> list[tuple[Request, list[Round]]]:
    options = GenerateOptions(max_tokens=tokens, temperature=how.pop("temperature", 1.0))
    return pair.generate(100, options, vocab=V, seed=seed, ahead=ahead, **how)


@pytest.mark.parametrize("mode", MODES)
def test_branches_change_no_token_and_no_block(pairs: dict[str, Pair], mode: str) -> None:
    """At a fixed γ a hit is the very block that a miss would have drafted, so a seed gives the same rounds."""
    without = sampled(pairs[DRAFT], 9_000_000, **MODES[mode])
    branched = sampled(pairs[DRAFT], 9_000_000, ahead=plain_ahead, **MODES[mode])
    for (one, rounds), (other, same_rounds) in zip(without, branched, strict=True):
        assert one.tokens == other.tokens
        assert [(r.base_length, r.proposal.tokens) for r in rounds] == [
            (r.base_length, r.proposal.tokens) for r in same_rounds
        ]
    assert hit_share(branched) > 0.4, hit_share(branched)


def test_tokens_after_a_hit_and_after_a_miss_follow_the_law(pairs: dict[str, Pair]) -> None:
    """Each by itself: whether a branch was there is known before the round's tokens are drawn."""
    done = sampled(pairs[DRAFT], 10_000_000, tokens=240, ahead=plain_ahead)
    law = sampled_law(toy_table(TARGET).numpy())
    counts = {"branch": np.zeros_like(law), "drafted": np.zeros_like(law)}
    for request, rounds in done:
        for one in rounds:
            before = [request.tokens[one.base_length - 1], *one.emitted[:-1]]
            np.add.at(counts[one.proposal.origin], (before, list(one.emitted)), 1)
    for origin, seen in counts.items():
        verdict = g_test(seen, law)
        assert seen.sum() > 3_000 and not verdict.rejected, (origin, verdict)
        assert g_test(seen, planted(law, 0.03)).rejected, f"{origin}: a planted bias of 3 % was not found"
