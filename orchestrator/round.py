"""One round: draft → verify → commit. What can go wrong on the draft's side costs speed and nothing else (γ = 0)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from orchestrator.draft_pool import DraftPool
from orchestrator.errors import SpecdecError, WorkerFault
from orchestrator.lane import Lane
from orchestrator.peer import Peer
from orchestrator.request import Proposal, Request, Round, Verified
from protocol.codecs import NO_Q, EncodedQ
from protocol.errors import FailureCode, LinkError, LinkLost, ProtocolError, WorkerFailure
from protocol.link import Reply
from protocol.messages import Block, Propose, Verdict, Verify, token_array

logger = logging.getLogger(__name__)
MAX_REOPENS = 3  # a worker that refuses a request freshly opened more often than this is broken


# What the target answers where the block itself is at fault: malformed, never a matter of which tokens were drawn (E2).
BLOCK_CODES = frozenset({FailureCode.BAD_VALUE, FailureCode.BAD_FRAME})


class BlockRefused(Exception):
    """The target can't read the block: ids outside its vocabulary, a q̃ that is no distribution."""


@dataclass(frozen=True)
class Drafted:
    """What a round starts from: the proposal, and the block's q̃ as it came, passed on undecoded."""

    proposal: Proposal
    q: EncodedQ


EMPTY = Drafted(Proposal(), NO_Q)


class Rounds:
    """The loop of one request over the two workers."""

    def __init__(self, request: Request, target: Peer, drafts: DraftPool, gamma: int, lanes: tuple[Lane, Lane]) -> None:
        self._request = request
        self._target = target
        self._drafts = drafts
        self._gamma = gamma
        self._target_lane, self._draft_lane = lanes
        self._block_id = 0
        self._opening: asyncio.Task[None] | None = None  # the draft's prefill, beside the target's
        self._asked: asyncio.Task[Reply[Block]] | None = None  # a proposal still to come, maybe not waited for any more

    async def open(self) -> None:
        """Open the request on both workers at once: both prefill the prompt. Only the target is waited for."""
        if self._drafts.peer is not None and self._gamma > 0:
            self._opening = asyncio.create_task(self._draft_lane.open(self._drafts.peer))
        try:
            await self._target_lane.open(self._target)
        except (LinkError, ProtocolError) as error:
            raise await self._target_fault(error) from error

    async def run(self) -> Round:
        """Draft, verify, commit."""
        self._block_id += 1
        drafted = await self._draft(self._request.clip(self._gamma))
        try:
            verified = await self._verify(drafted)
        except BlockRefused as error:
            logger.warning("request %d: %s; going on without this block", self._request.request_id, error)
            self._block_id += 1
            drafted = EMPTY
            verified = await self._verify(drafted)
        return self._request.commit(drafted.proposal, verified)

    async def close(self) -> None:
        """Free both workers' state; never raises."""
        pending = [task for task in (self._opening, self._asked) if task is not None]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for lane, peer in ((self._target_lane, self._target), (self._draft_lane, self._drafts.peer)):
            with contextlib.suppress(LinkError):  # the worker is gone, and what it held with it
                lane.close(peer)

    # ------------------------------------------------------------------ draft

    async def _draft(self, gamma: int) -> Drafted:
        """A block of up to γ tokens, or none: the draft is absent, dead, late, full or confused."""
        peer = self._drafts.peer
        if self._asked is not None and self._asked.done():  # the answer to a late question: of no use any more
            self._asked.exception()  # retrieved, so that nothing is logged about it
            self._asked = None
        if peer is None or gamma == 0 or self._asked is not None:
            return EMPTY
        base_length = len(self._request.tokens)
        gamma = min(gamma, peer.welcome.context_length - base_length)
        if gamma <= 0:  # the draft's context is shorter than the target's
            return EMPTY
        asked = asyncio.create_task(self._propose(peer, base_length, gamma))
        self._asked = asked
        try:
            reply = await asyncio.wait_for(asyncio.shield(asked), self._drafts.timeout)
        except TimeoutError:
            self._tell_late()
            return EMPTY
        except (LinkError, ProtocolError) as error:
            self._asked = None
            self._drop_draft(error)
            return EMPTY
        self._asked = None
        block = reply.message
        self._draft_lane.known = base_length
        wire_seconds = max(0.0, reply.round_trip_seconds - block.seconds)
        proposal = Proposal(tuple(block.tokens.tolist()), peer.welcome.model, block.seconds, wire_seconds)
        return Drafted(proposal, block.q)

    async def _propose(self, peer: Peer, base_length: int, gamma: int) -> Reply[Block]:
        """Open the request on the draft where it isn't, and ask for a block."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            await opening
        await self._draft_lane.open(peer)
        message = Propose(
            request_id=self._request.request_id,
            epoch=self._draft_lane.epoch,
            base_length=base_length,
            block_id=self._block_id,
            gamma=gamma,
            tail=self._draft_lane.tail(),
        )
        return await peer.link.request(message, None)

    def _tell_late(self) -> None:
        logger.warning(
            "request %d: no block from the draft within %g s; going on at γ = 0 until it answers",
            self._request.request_id,
            self._drafts.timeout,
        )

    def _drop_draft(self, error: LinkError | ProtocolError) -> None:
        if isinstance(error, WorkerFailure) and self._draft_lane.reopens(error):
            return  # opened again next round, at the next epoch
        if not isinstance(error, LinkLost):  # a lost worker is reported once, by the pool
            logger.warning("request %d: no block from the draft: %s", self._request.request_id, error)
        self._draft_lane.forget()

    # ------------------------------------------------------------------ verify

    async def _verify(self, drafted: Drafted) -> Verified:
        """The target's verdict on the block. Raises WorkerFault when the target is gone."""
        for _ in range(MAX_REOPENS):
            try:
                await self._target_lane.open(self._target)
                reply = await self._target.link.request(self._verify_message(drafted), None)
            except WorkerFailure as error:
                if self._target_lane.reopens(error):
                    continue
                if drafted.proposal.tokens and error.code in BLOCK_CODES:
                    raise BlockRefused(f"the target refused the draft's block: {error.text}") from error
                raise await self._target_fault(error) from error
            except (LinkError, ProtocolError) as error:
                raise await self._target_fault(error) from error
            return self._verified(reply)
        raise WorkerFault("the target worker keeps refusing a request that was just opened; restart it")

    def _verify_message(self, drafted: Drafted) -> Verify:
        return Verify(
            request_id=self._request.request_id,
            epoch=self._target_lane.epoch,
            base_length=len(self._request.tokens),
            block_id=self._block_id,
            tail=self._target_lane.tail(),
            tokens=token_array(drafted.proposal.tokens),
            q=drafted.q,
        )

    def _verified(self, reply: Reply[Verdict]) -> Verified:
        verdict = reply.message
        self._target_lane.known = len(self._request.tokens) + verdict.accepted + 1
        return Verified(
            accepted=verdict.accepted,
            token=verdict.token,
            origin="bonus" if verdict.origin == "bonus" else "correction",
            seconds=verdict.seconds,
            wire_seconds=max(0.0, reply.round_trip_seconds - verdict.seconds),
            bytes_sent=reply.bytes_sent,
        )

    async def _target_fault(self, error: LinkError | ProtocolError) -> SpecdecError:
        if isinstance(error, LinkLost):
            return await self._target.lost  # says how it went
        return WorkerFault(f"the target worker failed the request: {error}")
