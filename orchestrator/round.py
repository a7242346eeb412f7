"""One round: draft → verify → commit, the next one drafted meanwhile. A draft's failure costs speed only (γ = 0)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from orchestrator.drafting import EMPTY, Ahead, Drafted, Drafter
from orchestrator.errors import SpecdecError, WorkerFault
from orchestrator.lane import Lane
from orchestrator.pace import Pace, Pacer
from orchestrator.peer import Peer
from orchestrator.request import Branching, Request, Round, Span, Verified
from protocol.errors import FailureCode, LinkError, LinkLost, ProtocolError, WorkerFailure
from protocol.link import Reply
from protocol.messages import Verdict, Verify, token_array

logger = logging.getLogger(__name__)
MAX_REOPENS = 3  # a worker that refuses a request freshly opened more often than this is broken


# What the target answers where the block itself is at fault: malformed, never a matter of which tokens were drawn (E2).
BLOCK_CODES = frozenset({FailureCode.BAD_VALUE, FailureCode.BAD_FRAME})


class BlockRefused(Exception):
    """The target can't read the block: ids outside its vocabulary, a q̃ that is no distribution."""


class Rounds:
    """The loop of one request over the two workers."""

    def __init__(self, request: Request, target: Peer, lane: Lane, drafter: Drafter, pacer: Pacer) -> None:
        self._request = request
        self._target = target
        self._lane = lane
        self._drafter = drafter
        self._pacer = pacer
        self._pace: Pace = pacer.request()
        self._block_id = 0
        self._late_run: tuple[int, int] | None = None  # branches asked for and γ of the block that they followed
        self._next: Drafted | None = None  # a branch that was hit: this round's block is there already

    async def open(self) -> None:
        """Open the request on both workers at once: both prefill the prompt. Only the target is waited for."""
        if self._pacer.drafts:
            self._drafter.open()
        try:
            await self._lane.open(self._target)
        except (LinkError, ProtocolError) as error:
            raise await self._target_fault(error) from error

    async def run(self) -> Round:
        """Draft, verify, commit."""
        started = time.perf_counter()
        self._block_id += 1
        plan, drafted, self._next = None, self._next, None
        if drafted is None:
            plan = self._pace.plan()
            drafted = await self._drafter.block(self._block_id, plan)
        self._judge_late_run(drafted)
        verifying = asyncio.create_task(self._verify(drafted))
        await asyncio.sleep(0)  # a block that is there goes out before anything is planned
        plan = plan or self._pace.plan()
        ahead = self._drafter.ahead(self._block_id, drafted, plan, self._pace.alpha)
        try:
            verified = await verifying
        except BlockRefused as error:
            logger.warning("request %d: %s; going on without this block", self._request.request_id, error)
            self._block_id += 1
            drafted = EMPTY
            verified = await self._verify(drafted)
        finally:
            await _cancel(verifying)
        branching = self._settle(ahead, verified)
        self._learn(drafted, verified, branching)
        span = Span(started, time.perf_counter())
        return self._request.commit(drafted.proposal, verified, gamma=drafted.gamma, branching=branching, span=span)

    def _settle(self, ahead: Ahead | None, verified: Verified) -> Branching | None:
        """Look the outcome up among the branches.

        A branch is for committed tokens, so that one of a block which the target refused serves as well.
        """
        if ahead is None:
            return None
        branching, self._next = self._drafter.settle(ahead, verified.accepted, verified.token)
        return branching

    def _judge_late_run(self, drafted: Drafted) -> None:
        """A run that the verdict overtook: the draft had a branch for the outcome where its block took fewer steps."""
        if self._late_run is not None and drafted.proposal.origin == "drafted":
            width, gamma = self._late_run
            self._pace.guessed(drafted.proposal.steps < len(drafted.proposal.tokens), width, gamma)
        self._late_run = None

    def _learn(self, drafted: Drafted, verified: Verified, branching: Branching | None) -> None:
        count = len(drafted.proposal.tokens)
        self._pacer.verified(verified.seconds, verified.positions, beside=branching is not None)
        self._pacer.round_trips(target=verified.wire_seconds)
        if branching is not None:
            if branching.span is None:
                self._late_run = (branching.asked, count)
            else:
                self._pace.guessed(branching.hit, branching.asked, count)
        self._pace.add(count, verified.accepted, verified.accepted < count)

    async def close(self) -> None:
        """Free both workers' state; never raises."""
        self._pace.close()
        await self._drafter.close()
        with contextlib.suppress(LinkError):  # the worker is gone, and what it held with it
            self._lane.close(self._target)

    # ------------------------------------------------------------------ verify

    async def _verify(self, drafted: Drafted) -> Verified:
        """The target's verdict on the block. Raises WorkerFault when the target is gone."""
        started = time.perf_counter()
        for _ in range(MAX_REOPENS):
            try:
                await self._lane.open(self._target)
                reply = await self._target.link.request(self._verify_message(drafted), None)
            except WorkerFailure as error:
                if self._lane.reopens(error):
                    continue
                if drafted.proposal.tokens and error.code in BLOCK_CODES:
                    raise BlockRefused(f"the target refused the draft's block: {error.text}") from error
                raise await self._target_fault(error) from error
            except (LinkError, ProtocolError) as error:
                raise await self._target_fault(error) from error
            return self._verified(reply, started)
        raise WorkerFault("the target worker keeps refusing a request that was just opened; restart it")

    def _verify_message(self, drafted: Drafted) -> Verify:
        return Verify(
            request_id=self._request.request_id,
            epoch=self._lane.epoch,
            base_length=len(self._request.tokens),
            block_id=self._block_id,
            tail=self._lane.tail(),
            tokens=token_array(drafted.proposal.tokens),
            q=drafted.q,
        )

    def _verified(self, reply: Reply[Verdict], started: float) -> Verified:
        verdict = reply.message
        self._lane.known = len(self._request.tokens) + verdict.accepted + 1
        return Verified(
            accepted=verdict.accepted,
            token=verdict.token,
            origin="bonus" if verdict.origin == "bonus" else "correction",
            seconds=verdict.seconds,
            wire_seconds=max(0.0, reply.round_trip_seconds - verdict.seconds),
            bytes_sent=reply.bytes_sent,
            rows=verdict.rows,
            positions=verdict.positions,
            span=Span(started, time.perf_counter()),
        )

    async def _target_fault(self, error: LinkError | ProtocolError) -> SpecdecError:
        if isinstance(error, LinkLost):
            return await self._target.lost  # says how it went
        return WorkerFault(f"the target worker failed the request: {error}")


async def _cancel(task: asyncio.Task[Verified]) -> None:
    """Whatever ended the round, nothing of it goes on."""
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
