"""One request's side of the draft worker: blocks when they are asked for, branches while a block is verified.

What can go wrong on the draft's side costs speed and nothing else: no block (γ = 0), no branches (a miss).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from orchestrator.draft_pool import DraftPool
from orchestrator.lane import Lane
from orchestrator.pace import Pacer, Plan
from orchestrator.peer import Peer
from orchestrator.request import Branching, Proposal, Request, Span
from protocol.codecs import NO_Q, EncodedQ
from protocol.errors import LinkError, LinkLost, ProtocolError, WorkerFailure
from protocol.link import Reply
from protocol.messages import Block, Branch, Branches, Propose, token_array

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafted:
    """What a round starts from: the γ that was decided, the proposal, and the block's q̃ as it came, still encoded."""

    gamma: int = 0
    proposal: Proposal = field(default_factory=Proposal)
    q: EncodedQ = field(default_factory=lambda: NO_Q)


EMPTY = Drafted()


class Drafter:
    """Asks the draft for one request, and never lets its failures out."""

    def __init__(self, request: Request, drafts: DraftPool, lane: Lane, pacer: Pacer) -> None:
        self._request = request
        self._drafts = drafts
        self._lane = lane
        self._pacer = pacer
        self._opening: asyncio.Task[None] | None = None  # the draft's prefill, beside the target's
        self._asked: asyncio.Task[Reply[Block]] | None = None  # a block still to come, maybe not waited for any more
        self._asked_since = 0.0
        self._told_late = False
        self._ahead: Ahead | None = None

    def open(self) -> None:
        """Begin the draft's prefill now, beside the target's."""
        if self._drafts.peer is not None:
            self._opening = asyncio.create_task(self._lane.open(self._drafts.peer))

    async def close(self) -> None:
        """Free the draft's state; never raises what the link does."""
        ahead = None if self._ahead is None else self._ahead.task
        tasks: tuple[asyncio.Task[Any] | None, ...] = (self._opening, self._asked, ahead)
        pending = [task for task in tasks if task is not None]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        with contextlib.suppress(LinkError):  # the worker is gone, and what it held with it
            self._lane.close(self._drafts.peer)

    # ------------------------------------------------------------ a block

    async def block(self, block_id: int, plan: Plan) -> Drafted:
        """A block of up to γ tokens, or none: the draft is absent, dead, late, full or confused.

        Where a branch that came too late has more tokens than γ, up to the branches' own γ of them.
        """
        peer = self._usable()
        base_length = len(self._request.tokens)
        gamma, ready = self._request.clip(plan.gamma), self._request.clip(plan.branch_gamma)
        if peer is not None:
            gamma = min(gamma, peer.welcome.context_length - base_length)  # it may be shorter than the target's
        if peer is None or gamma <= 0:
            return EMPTY
        started = self._asked_since = time.perf_counter()
        asked = self._asked = asyncio.create_task(self._propose(peer, block_id, base_length, gamma, ready))
        timeout = self._drafts.timeout if plan.deadline is None else min(plan.deadline, self._drafts.timeout)
        try:
            async with asyncio.timeout(timeout):  # wait_for loses a cancellation that comes together with the block
                reply = await asyncio.shield(asked)
        except TimeoutError:
            self._tell_late()
            return Drafted(gamma)
        except (LinkError, ProtocolError) as error:
            self._asked = None
            self._failed(error)
            return Drafted(gamma)
        self._asked = None
        block = reply.message
        wire_seconds = max(0.0, reply.round_trip_seconds - block.seconds)
        self._pacer.drafted(block.seconds, block.steps, block.rows)
        self._pacer.round_trips(draft=wire_seconds)
        tokens = tuple(block.tokens.tolist())
        span = Span(started, time.perf_counter())
        proposal = Proposal(
            tokens=tokens,
            source=peer.welcome.model,
            seconds=block.seconds,
            wire_seconds=wire_seconds,
            origin="drafted",
            rows=block.rows,
            steps=block.steps,
            span=span,
        )
        return Drafted(max(gamma, len(tokens)), proposal, block.q)

    def _usable(self) -> Peer | None:
        """The draft, unless it's gone or owes an answer."""
        if self._asked is not None:
            if not self._asked.done():
                self._tell_late()
                return None
            if not self._asked.cancelled():
                self._asked.exception()  # the answer to a late question: of no use any more, and no noise about it
            self._asked = None
        return self._drafts.peer

    async def _propose(self, peer: Peer, block_id: int, base_length: int, gamma: int, ready: int) -> Reply[Block]:
        await self._open(peer)
        message = Propose(
            request_id=self._request.request_id,
            epoch=self._lane.epoch,
            base_length=base_length,
            block_id=block_id,
            gamma=gamma,
            ready=ready,
            tail=self._lane.tail(),
        )
        reply = await peer.link.request(message, None)
        self._lane.known = base_length
        return reply

    async def _open(self, peer: Peer) -> None:
        """Open the request on the draft where it isn't."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            await opening
        await self._lane.open(peer)

    def _tell_late(self) -> None:
        """One line a request, once a block is later than the user's own limit; a missed deadline is everyday."""
        waited = time.perf_counter() - self._asked_since
        if waited >= self._drafts.timeout and not self._told_late:
            self._told_late = True
            logger.warning(
                "request %d: no block from the draft within %g s; going on at γ = 0 until it answers",
                self._request.request_id,
                self._drafts.timeout,
            )

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, WorkerFailure) and self._lane.reopens(error):
            return  # opened again next time, at the next epoch
        if not isinstance(error, LinkLost):  # a lost worker is reported once, by the pool
            logger.warning("request %d: nothing from the draft: %s", self._request.request_id, error)
        self._lane.forget()

    # ------------------------------------------------------------ branches

    def ahead(self, block_id: int, drafted: Drafted, plan: Plan, alpha: float) -> Ahead | None:
        """Ask for the blocks that may follow this one. None where no branch could serve."""
        peer = self._usable()
        gamma = plan.branch_gamma
        # After the shortest round two more tokens must fit: one drafted, and the target's own after it.
        if peer is None or not plan.width or gamma <= 0 or self._request.room < 3:
            return None
        if self._ahead is not None:
            self._ahead.task.cancel()
        base_length = len(self._request.tokens)
        if base_length + len(drafted.proposal.tokens) + 1 >= peer.welcome.context_length:
            return None
        asking = asyncio.create_task(self._branch(peer, block_id, base_length, drafted, plan, alpha))
        self._ahead = Ahead(asking, plan, peer.welcome.model)
        return self._ahead

    async def _branch(
        self, peer: Peer, block_id: int, base_length: int, drafted: Drafted, plan: Plan, alpha: float
    ) -> Reply[Branches]:
        await self._open(peer)
        message = Branch(
            request_id=self._request.request_id,
            epoch=self._lane.epoch,
            base_length=base_length,
            block_id=block_id,
            gamma=plan.branch_gamma,
            least=plan.branch_gamma if self._pacer.gamma is not None else 1,
            seconds=self._pacer.time_for_branches(len(drafted.proposal.tokens)),
            width=plan.width,
            alpha=min(1.0, max(0.0, alpha)),
            room=self._request.room,
            ends=tuple(sorted(self._request.eos_ids)),
            tail=self._lane.tail(),
            tokens=token_array(drafted.proposal.tokens),
        )
        reply = await peer.link.request(message, None)
        self._lane.known = base_length
        return reply

    def settle(self, ahead: Ahead, accepted: int, token: int) -> tuple[Branching, Drafted | None]:
        """The outcome is known: the branch for it, if it came in time. What is still on its way isn't waited for."""
        if not ahead.task.done():
            ahead.task.add_done_callback(self._learn)  # a run that is cut short still tells what it cost
            return ahead.none(), None
        self._learn(ahead.task)
        try:
            reply = ahead.task.result()
        except (LinkError, ProtocolError) as error:
            self._failed(error)
            return ahead.none(), None
        return ahead.found(reply, accepted, token)

    def _learn(self, task: asyncio.Task[Reply[Branches]]) -> None:
        if not task.cancelled() and task.exception() is None:
            reply = task.result()
            branches = reply.message
            self._pacer.drafted(branches.seconds, branches.steps, branches.rows)
            if len(branches.accepted):  # a run that was cut short says nothing of the way
                self._pacer.round_trips(branches=max(0.0, reply.round_trip_seconds - branches.seconds))


class Ahead:
    """The branches of one block in flight: asked for, and looked up once its outcome is known."""

    def __init__(self, task: asyncio.Task[Reply[Branches]], plan: Plan, source: str) -> None:
        self.task = task
        self._plan = plan
        self._source = source
        self._started = time.perf_counter()
        self._ended: float | None = None
        task.add_done_callback(self._note_end)

    def _note_end(self, _: object) -> None:
        self._ended = time.perf_counter()

    def none(self) -> Branching:
        return Branching(asked=self._plan.width)

    def found(self, reply: Reply[Branches], accepted: int, token: int) -> tuple[Branching, Drafted | None]:
        """The branch of outcome (accepted, token)."""
        branches = reply.message
        outcomes = list(zip(branches.accepted.tolist(), branches.next.tolist(), strict=True))
        place = outcomes.index((accepted, token)) if (accepted, token) in outcomes else None
        told = Branching(
            asked=self._plan.width,
            width=len(outcomes),
            hit=place is not None,
            seconds=branches.seconds,
            rows=branches.rows,
            steps=branches.steps,
            bytes_received=reply.bytes_received,
            span=Span(self._started, self._ended or time.perf_counter()),  # done this moment: its callback comes later
        )
        if place is None:
            return told, None
        start = int(branches.lengths[:place].sum())
        stop = start + int(branches.lengths[place])
        tokens = tuple(branches.tokens[start:stop].tolist())
        proposal = Proposal(tokens, self._source, origin="branch", rows=branches.rows)
        return told, Drafted(self._plan.branch_gamma, proposal, branches.q.part(start, stop))
