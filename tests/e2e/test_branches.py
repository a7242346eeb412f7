"""Branches in process, step by step: each continues from its own outcome, whatever it is and whoever interrupts.

The measure is `Propose`: asked after an outcome, on a draft that never heard of branches, it must give the very tokens
and the very q̃ that the outcome's branch has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draft_worker.engine import ModelDraftEngine
from execution.toy import ToyExecutor
from protocol.codecs import NO_Q, EncodedQ
from protocol.messages import Block, Branch, Branches, Close, Message, Open, Opened, Propose, Sampling, token_array
from tests.e2e.inprocess import PEER, Drafted, Worker, outcomes
from tests.e2e.support import toy

V = 8
DRAFT = toy(vocab=V, order=2, seed=5, scale=1.3)
PROMPT = [1, 2, 3, 4]
GAMMA = 4
MODES: dict[str, tuple[str, str, float]] = {
    "counts": ("rejection", "counts", 1.0),
    "dense": ("rejection", "dense", 1.0),
    "coupled": ("coupled", "none", 1.0),
    "greedy": ("rejection", "counts", 0.0),
}


class Draft(Worker):
    """A draft worker with one request open."""

    def __init__(self, mode: str = "counts", model: str = DRAFT, prompt: list[int] = PROMPT) -> None:
        self.executor = ToyExecutor(model)
        super().__init__(ModelDraftEngine(self.executor))
        verify, codec, temperature = MODES[mode]
        sampling = Sampling(temperature, 0, 1.0, 0.0)
        (opened,) = self.ask([Open(1, 1, 77, verify, codec, sampling, V, token_array(prompt))])
        assert isinstance(opened, Opened)
        self.at_rest = self.rows
        self.key = (PEER, 1)

    @property
    def rows(self) -> int:
        return len(self.executor._lengths)


def propose(tokens: list[int], gamma: int = GAMMA, block_id: int = 2, ready: int = 0) -> Propose:
    return Propose(1, 1, len(tokens), block_id, gamma, ready, token_array(tokens))


def branch(block: list[int], tokens: list[int] = PROMPT, **fields: Any) -> Branch:
    """`block` is in flight after `tokens`."""
    asked = Branch(
        1, 1, len(tokens), 1, GAMMA, GAMMA, 0.0, 40, 0.6, 100, (), token_array(tokens), token_array(block)
    )  # fmt: skip
    return replace(asked, **fields)


def drafted(message: Message) -> Drafted:
    assert isinstance(message, Block), message
    return Drafted(message.tokens.tolist(), message.q)


def same(one: Drafted, other: Drafted) -> bool:
    return one.tokens == other.tokens and same_q(one.q, other.q)


def same_q(one: EncodedQ, other: EncodedQ) -> bool:
    return one.codec == other.codec and all(map(np.array_equal, one.arrays, other.arrays))


def asked(draft: Worker, message: Message) -> Any:
    (reply,) = draft.ask([message])
    return reply


def found_branches(draft: Worker, message: Branch) -> dict[tuple[int, int], Drafted]:
    reply = asked(draft, message)
    assert isinstance(reply, Branches), reply
    assert len(reply.accepted) <= message.width
    return outcomes(reply)


def after(mode: str, outcome: tuple[int, int], block: list[int], gamma: int = GAMMA, **how: Any) -> Drafted:
    """What a fresh draft proposes once the outcome is committed."""
    accepted, token = outcome
    return drafted(asked(Draft(mode, **how), propose([*PROMPT, *block[:accepted], token], gamma)))


BLOCKS = {"the draft's own": None, "of other hands": [5, 0, 6, 2], "short": [3], "empty": []}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BLOCKS)
def test_each_branch_is_the_block_after_its_outcome(mode: str, name: str) -> None:
    """k = 0, 0 < k < γ and k = γ, all in one run; never the refused token again, and no outcome twice."""
    draft = Draft(mode)
    block = BLOCKS[name]
    if block is None:
        block = drafted(asked(draft, propose(PROMPT, block_id=1))).tokens
    found = found_branches(draft, branch(block))
    assert {accepted for accepted, _ in found} == set(range(len(block) + 1))
    assert len(found) == V if not block else len(found) >= 3 * len(block)
    for outcome, one in found.items():
        accepted, token = outcome
        assert accepted == len(block) or token != block[accepted]
        assert len(one.tokens) == GAMMA
        assert same(one, after(mode, outcome, block)), outcome
    assert draft.rows == draft.at_rest + len(found), "they wait for the outcome"


@pytest.mark.parametrize("place", range(3))
def test_nothing_follows_an_end_token(place: int) -> None:
    """End token 6 at `place` of the block: the text ends there if it's accepted. And no guess is an end token."""
    block = [5, 0, 2, 3]
    block[place] = 6
    free = found_branches(Draft(), branch(block))
    assert any(token in (6, 1) for _, token in free), "else nothing shows that they are left out below"
    found = found_branches(Draft(), branch(block, ends=(1, 6)))
    assert {accepted for accepted, _ in found} == set(range(place + 1))
    assert not any(token in (6, 1) for _, token in found)
    for outcome, one in found.items():
        assert same(one, free[outcome])


@pytest.mark.parametrize("room", range(9))
def test_no_branch_is_longer_than_the_room_left(room: int) -> None:
    """After outcome (k, t) room − k − 1 tokens may come, and the last of them is the target's own."""
    block = [5, 0, 2]
    for (accepted, _), one in found_branches(Draft(), branch(block, room=room)).items():
        assert 1 <= len(one.tokens) == min(GAMMA, room - accepted - 2)
    forks = {accepted for accepted, _ in found_branches(Draft(), branch(block, room=room))}
    assert forks == {accepted for accepted in range(4) if room - accepted - 2 > 0}


@pytest.mark.parametrize("context", range(5, 14))
def test_no_branch_outgrows_the_context(context: int) -> None:
    model = f"{DRAFT},context={context}"
    block = [5, 0, 2]
    if len(PROMPT) + len(block) > context:
        assert asked(Draft(model=model), branch(block)).code == "context_full"
        return
    draft = Draft(model=model)
    found = found_branches(draft, branch(block))
    for outcome, one in found.items():
        assert 1 <= len(one.tokens) <= context - (len(PROMPT) + outcome[0] + 1) + 1
        wanted = after("counts", outcome, block, model=model)
        assert wanted.tokens[: len(one.tokens)] == one.tokens
    assert draft.rows == draft.at_rest + len(found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", range(7))
def test_a_proposal_meets_an_unfinished_run(mode: str, steps: int) -> None:
    """After `steps` passes of the run: its outcome's branch is finished and sent; steps done are not done again."""
    block = [5, 0, 6, 2]
    outcomes_there = list(found_branches(Draft(mode), branch(block)))
    for outcome in (outcomes_there[0], next(one for one in outcomes_there if one[0] == 2)):
        draft = Draft(mode)
        sent = draft.tell(branch(block)) if steps else []
        for _ in range(steps - 1):
            sent += draft.tell()
        message = propose([*PROMPT, *block[: outcome[0]], outcome[1]])
        before = draft.executor._passes
        replies = draft.tell(message)
        while not any(isinstance(one, Block) for one in replies):
            replies += draft.tell()
        passes = draft.executor._passes - before
        reply = next(one for one in replies if isinstance(one, Block))
        assert same(drafted(reply), after(mode, outcome, block))
        draft.finish()
        assert passes == reply.steps == (max(0, GAMMA - (steps - 1)) if steps else GAMMA)
        assert sum(isinstance(one, Branches) for one in sent) == (steps > GAMMA)
        assert draft.rows == draft.at_rest and not draft.busy
        # and the request's own row is in order: the next block is right too
        tokens = [*PROMPT, *block[: outcome[0]], outcome[1], *reply.tokens[:2].tolist(), 7]
        assert same(drafted(asked(draft, propose(tokens, block_id=3))), drafted(asked(Draft(mode), propose(tokens))))


@pytest.mark.parametrize("gamma", [1, 2, GAMMA, 9])
def test_a_proposal_of_another_gamma(gamma: int) -> None:
    """The branch is cut to what is asked for; where more is asked for, what there is comes."""
    block = [5, 0, 6, 2]
    outcome = next(iter(found_branches(Draft(), branch(block))))
    for steps in (2, GAMMA + 2):
        draft = Draft()
        draft.tell(branch(block))
        for _ in range(steps - 1):
            draft.tell()
        reply = drafted(asked(draft, propose([*PROMPT, *block[: outcome[0]], outcome[1]], gamma)))
        assert same(reply, after("counts", outcome, block, min(gamma, GAMMA)))
        assert draft.rows == draft.at_rest


@pytest.mark.parametrize("mode", ["counts", "coupled"])
@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("ready", [0, 2, GAMMA, 9])
@pytest.mark.parametrize("steps", range(1, 7))
def test_a_proposal_takes_what_a_branch_has(mode: str, gamma: int, ready: int, steps: int) -> None:
    """As many tokens as are drawn already, up to `ready`; the others are drawn up to γ."""
    block = [5, 0, 6, 2]
    outcome = next(one for one in found_branches(Draft(mode), branch(block)) if one[0] == 2)
    draft = Draft(mode)
    draft.tell(branch(block))
    for _ in range(steps - 1):
        draft.tell()
    tokens = [*PROMPT, *block[:2], outcome[1]]
    reply = asked(draft, propose(tokens, gamma, ready=ready))
    there = min(steps - 1, GAMMA)  # the first step reads the block
    wanted = max(gamma, min(ready, there))
    assert same(drafted(reply), after(mode, outcome, block, wanted))
    assert reply.steps == max(0, wanted - there)
    following = [*tokens, *reply.tokens.tolist(), 7]
    assert same(drafted(asked(draft, propose(following, block_id=3))), drafted(asked(Draft(mode), propose(following))))
    assert draft.rows == draft.at_rest and not draft.busy


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_proposal_for_another_outcome_drops_the_run(steps: int) -> None:
    block = [5, 0, 6, 2]
    there = found_branches(Draft(), branch(block, width=2))
    outcome = next((0, token) for token in range(V) if (0, token) not in there and token != block[0])
    for tokens in ([*PROMPT, outcome[1]], [*PROMPT, 7, 7], PROMPT, PROMPT[:2]):
        draft = Draft()
        draft.tell(branch(block, width=2))
        for _ in range(steps - 1):
            draft.tell()
        assert same(drafted(asked(draft, propose(tokens))), drafted(asked(Draft(), propose(tokens))))
        assert draft.rows == draft.at_rest and not draft.busy


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_hit_after_hit(mode: str, rank: int, spare: int, seconds: float) -> None:
    """Each block is a branch of the one before, and its own run starts from what the draft knows: one pass a token.

    What follows the whole block is read beside the first tokens, so those branches come a pass later, or are a token
    shorter where that will do. Where there was time, it was read before, and all have the same length at once.
    """
    draft = Draft(mode)
    tokens, block = list(PROMPT), drafted(asked(draft, propose(PROMPT, block_id=1))).tokens
    for turn in range(6):
        read = bool(turn and seconds)
        shorter = GAMMA if read else GAMMA - spare
        fields = {"block_id": turn + 1, "tail": token_array(tokens), "least": GAMMA - spare, "seconds": seconds}
        reply = asked(draft, branch(block, tokens, **fields))
        assert isinstance(reply, Branches)
        assert reply.steps == (GAMMA if read else GAMMA + 1 - spare), "no pass but those that draw"
        found = outcomes(reply)
        fresh, whole = Draft(mode, prompt=tokens), [one for one in found if one[0] == len(block)]
        assert {len(found[one].tokens) for one in whole} == {shorter}
        assert all(len(found[one].tokens) == GAMMA for one in found if one not in whole)
        assert found.keys() == found_branches(fresh, branch(block, tokens)).keys()
        for accepted, token in found:
            after_it = propose([*tokens, *block[:accepted], token], len(found[accepted, token].tokens))
            assert same(found[accepted, token], drafted(asked(Draft(mode, prompt=tokens), after_it)))
        assert draft.rows == draft.at_rest + len(found) and not draft.busy
        kept = [len(block), 0, 2, 1, len(block), 3][turn]
        outcome = [one for one in found if one[0] == kept][rank]
        tokens = [*tokens, *block[:kept], outcome[1]]
        block = found[outcome].tokens
    assert draft.tell(Close(1)) == [] and draft.rows == 0


@pytest.mark.parametrize("change", ["another block", "another past", "a part of it"])
def test_a_run_for_what_the_draft_did_not_draw(change: str) -> None:
    """What it knows of its own block serves that block alone."""
    draft = Draft()
    asked(draft, branch([]))  # from now on it reads its blocks to their ends
    block = drafted(asked(draft, propose(PROMPT))).tokens
    tokens = list(PROMPT)
    if change == "another block":
        block = [*block[:1], (block[1] + 1) % V, *block[2:]]
    elif change == "another past":
        tokens = [7, *PROMPT[1:]]
    else:
        block = block[:2]
    found = found_branches(draft, branch(block, tokens))
    fresh = found_branches(Draft(prompt=tokens), branch(block, tokens))
    assert found.keys() == fresh.keys() and all(same(found[one], fresh[one]) for one in found)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_answers_in_time(mode: str) -> None:
    """Where the time is over, branches are sent as they are, but for those with less than the least; without, whole."""
    block, beyond = [5, 0, 6, 2], 1e-9
    for least in range(1, GAMMA + 2):
        reply = asked(Draft(mode), branch(block, least=least, seconds=beyond))
        assert reply.steps == 1 + min(least, GAMMA)  # the first step reads the block
        found = outcomes(reply)
        assert {len(one.tokens) for one in found.values()} == {min(least, GAMMA)}
        for outcome, one in list(found.items())[::5]:
            assert same(one, after(mode, outcome, block, min(least, GAMMA)))
    for seconds in (0.0, 3600.0):
        assert asked(Draft(mode), branch(block, least=1, seconds=seconds)).steps == 1 + GAMMA


@pytest.mark.parametrize("mode", MODES)
def test_what_a_hurried_run_has_sent_is_what_goes_on(mode: str) -> None:
    """A hit on a branch that could have had more: the next run, and the next block, start from what was sent."""
    draft, block = Draft(mode), [5, 0, 6, 2]
    found = found_branches(draft, branch(block, least=2, seconds=1e-9))
    outcome = next(one for one in found if one[0] == 1)
    tokens, block = [*PROMPT, *block[:1], outcome[1]], found[outcome].tokens
    assert len(block) == 2
    following = found_branches(draft, branch(block, tokens, block_id=2, tail=token_array(tokens)))
    fresh = found_branches(Draft(mode, prompt=tokens), branch(block, tokens))
    assert following.keys() == fresh.keys() and all(same(following[one], fresh[one]) for one in fresh)
    tokens = [*tokens, block[0], 7]
    assert same(drafted(asked(draft, propose(tokens, block_id=3))), drafted(asked(Draft(mode), propose(tokens))))
    assert draft.rows == draft.at_rest and not draft.busy


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gamma", [1, GAMMA, 9])
def test_a_proposal_after_a_branch_was_read_to_its_end(mode: str, gamma: int) -> None:
    """It grows from its last token all the same, be it one that has all its tokens or one that was sent unfinished."""
    block = [5, 0, 6, 2]
    for least, seconds in ((GAMMA, 3600.0), (2, 1e-9)):
        draft = Draft(mode)
        draft._loop._engine._pause = 3600.0  # there is time after either
        found = found_branches(draft, branch(block, least=least, seconds=seconds))
        outcome = next(one for one in found if one[0] == 1)
        reply = drafted(asked(draft, propose([*PROMPT, *block[:1], outcome[1]], gamma, ready=least)))
        assert same(reply, after(mode, outcome, block, max(least, min(gamma, GAMMA))))
        assert draft.rows == draft.at_rest and not draft.busy


@pytest.mark.parametrize(("seconds", "passes"), [(0.0, 0), (1e-9, 0), (3600.0, 1)])
def test_branches_are_read_to_their_end_only_where_there_is_time_for_it(seconds: float, passes: int) -> None:
    """One pass for all of them, after the reply; none where the next message may come meanwhile."""
    draft, calls = Draft(), []
    extend = draft.executor.extend
    draft.executor.extend = lambda batch: calls.append(len(batch)) or extend(batch)  # type: ignore[method-assign]
    sent = draft.tell(branch([5, 0, 6, 2], seconds=seconds))
    while not sent:
        sent = draft.tell()
    assert isinstance(sent[0], Branches) and draft.busy
    before, rows = len(calls), len(sent[0].accepted)
    assert draft.finish() == []
    assert calls[before:] == [rows] * passes


def test_the_pause_before_a_message_is_learnt_unless_it_waited_for_a_pass() -> None:
    """After a run that was due long ago, what comes shows that there is time for a pass, unless a pass kept it."""
    draft, tokens = Draft(), list(PROMPT)
    engine: Any = draft._loop._engine
    for turn in range(3):
        asked(draft, branch([], tokens, block_id=turn + 1, tail=token_array(tokens), seconds=1e-9))
        engine._runs[draft.key].started -= 50.0
        engine._passed = -np.inf
        tokens.append(turn)
    assert engine._pause == pytest.approx(1e-9 * (1 - (1 - 1 / 8) ** 2)), "no more than the time that was given"
    engine._passed = np.inf
    asked(draft, branch([], tokens, block_id=9, tail=token_array(tokens), seconds=1e-9))
    assert engine._pause == pytest.approx(1e-9 * (1 - (1 - 1 / 8) ** 2))


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_branch_supersedes_a_branch(steps: int) -> None:
    """The first run's rows are freed, its answer never comes if it wasn't sent; the second is whole."""
    block, next_block = [5, 0, 6, 2], [1, 1]
    tokens = [*PROMPT, 5, 3]
    draft = Draft()
    draft.tell(branch(block))
    for _ in range(steps - 1):
        draft.tell()
    second = replace(branch(next_block, tokens), block_id=2)
    found = found_branches(draft, second)  # exactly one reply
    fresh = found_branches(Draft(prompt=tokens), second)
    assert found.keys() == fresh.keys() and all(same(found[one], fresh[one]) for one in found)
    assert draft.rows == draft.at_rest + len(found) and not draft.busy


@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("proposed", [False, True])
def test_close_in_the_middle_frees_all_rows(steps: int, proposed: bool) -> None:
    block = [5, 0, 6, 2]
    outcome = next(iter(found_branches(Draft(), branch(block))))
    draft = Draft()
    draft.tell(branch(block))
    for _ in range(steps - 1):
        draft.tell()
    assert draft.rows > draft.at_rest or steps > GAMMA
    if proposed:
        draft.tell(propose([*PROMPT, *block[: outcome[0]], outcome[1]]))
    assert draft.tell(Close(1)) == []
    assert draft.rows == 0 and not draft.busy


def test_opened_again_in_the_middle() -> None:
    """A second Open of the id: nothing of the run is left."""
    draft = Draft()
    draft.tell(branch([5, 0, 6, 2]))
    draft.ask([Open(1, 2, 77, "rejection", "counts", Sampling(1.0, 0, 1.0, 0.0), V, token_array(PROMPT))])
    assert draft.rows == draft.at_rest and not draft.busy
    reply = asked(draft, replace(propose(PROMPT), epoch=2))
    assert same(drafted(reply), drafted(asked(Draft(), propose(PROMPT))))


@pytest.mark.parametrize("mode", ["counts", "dense", "coupled", "greedy"])
def test_nan_in_the_block_in_flight(mode: str) -> None:
    """After token 6 the draft is NaN: the forks before it have their branches, and the draft lives on."""
    model = f"{DRAFT},nan_token=6"
    for block in ([5, 0, 6], [6], [5, 6, 2]):
        draft = Draft(mode, model)
        found = found_branches(draft, branch(block))
        place = block.index(6)
        assert found and all(accepted != place + 1 for accepted, _ in found)
        assert {accepted for accepted, _ in found} >= set(range(place + 1))
        for outcome, one in found.items():
            assert outcome[1] != 6, "nothing can be drafted after it"
            assert same(one, after(mode, outcome, block, model=model)), outcome
        tokens = [*PROMPT, 0, 1]
        assert same(drafted(asked(draft, propose(tokens))), drafted(asked(Draft(mode, model), propose(tokens))))


@pytest.mark.parametrize("mode", MODES)
def test_nan_at_the_end_of_a_branch_that_is_read(mode: str) -> None:
    """A branch that ends in token 6: nothing of what was read behind it stays, and it serves as any other."""
    model, block = f"{DRAFT},nan_token=6", [5, 0, 2]
    found = found_branches(Draft(mode, model), branch(block, seconds=3600.0))
    ending = [one for one in found if found[one].tokens[-1] == 6]
    assert ending
    for accepted, token in ending:
        draft = Draft(mode, model)
        found_branches(draft, branch(block, seconds=3600.0))
        for one in (one for one in draft._loop._engine._runs[draft.key].branches if not one.broken):
            assert draft.executor.length(one.row) == one.position - (one.tokens[-1] == 6), "unread where it's NaN"
        tokens, next_block = [*PROMPT, *block[:accepted], token], found[accepted, token].tokens
        message = branch(next_block, tokens, block_id=2, tail=token_array(tokens))
        following = found_branches(draft, message)
        fresh = found_branches(Draft(mode, model, tokens), branch(next_block, tokens))
        assert following.keys() == fresh.keys() and all(same(following[one], fresh[one]) for one in fresh)


def test_two_requests_do_not_meet() -> None:
    """A run beside another request's block: both as if alone."""
    block = [5, 0, 6, 2]
    draft = Draft()
    draft.ask([Open(2, 1, 78, "rejection", "dense", Sampling(0.7, 5, 1.0, 0.0), V, token_array([3, 3]))])
    other = Propose(2, 1, 2, 1, 6, 0, token_array([3, 3]))
    alone = asked(draft, other)
    draft.tell(branch(block))
    draft.tell(replace(other, block_id=2))
    replies = draft.finish()
    (branches,) = [one for one in replies if isinstance(one, Branches)]
    (beside,) = [one for one in replies if isinstance(one, Block)]
    assert same(drafted(alone), drafted(beside))
    found, wanted = outcomes(branches), found_branches(Draft(), branch(block))
    assert found.keys() == wanted.keys() and all(same(found[one], wanted[one]) for one in found)
    assert NO_Q is not beside.q
