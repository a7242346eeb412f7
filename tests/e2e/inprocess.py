"""Both workers' own loops and engines in one process, over endpoints that are lists: for breaking rules on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draft_worker.engine import ModelDraftEngine
from execution.toy import ToyExecutor
from orchestrator.request import Branching, GenerateOptions, Proposal, Request, Round, Verified
from protocol.codecs import NO_Q, EncodedQ
from protocol.endpoint import Peer, WorkerStatus
from protocol.messages import (
    Block,
    Branch,
    Branches,
    Failure,
    Message,
    Open,
    Opened,
    Propose,
    Sampling,
    Verdict,
    Verify,
    token_array,
)
from target_worker.engine import TargetEngine
from worker.loop import WorkerLoop

PEER = Peer(b"tests")
WIDTH, ALPHA = 8, 0.6  # of the branches asked for


class ListEndpoint:
    """What a WorkerLoop needs of an endpoint."""

    def __init__(self) -> None:
        self.status, self.stopping, self.sent = WorkerStatus(), threading.Event(), list[Message]()

    def send(self, peer: Peer, message: Message) -> bool:
        self.sent.append(message)
        return True

    def take_aborts(self) -> list[Any]:
        return []

    def take_departed(self) -> list[Any]:
        return []


class Worker:
    """One loop with its engine."""

    def __init__(self, engine: Any) -> None:
        self._endpoint = ListEndpoint()
        self._loop = WorkerLoop(self._endpoint, None, None, engine)  # type: ignore[arg-type]

    @property
    def busy(self) -> bool:
        return self._loop.busy

    def tell(self, *messages: Message) -> list[Any]:
        """Take the messages and run one step: what was sent in it."""
        self._endpoint.sent = []
        self._loop.step([(PEER, message) for message in messages])
        return self._endpoint.sent

    def finish(self) -> list[Any]:
        """Step until there is nothing to do: all that was sent meanwhile."""
        sent: list[Any] = []
        while self.busy:
            sent += self.tell()
        return sent

    def ask(self, messages: Sequence[Message]) -> list[Any]:
        """The replies in the order of the messages, one each, whatever order they came in.

        What an earlier run of branches tells when it's cut short is left out.
        """
        runs = {(message.request_id, message.block_id) for message in messages if isinstance(message, Branch)}
        sent = [
            reply
            for reply in self.tell(*messages) + self.finish()
            if not isinstance(reply, Branches) or (reply.request_id, reply.block_id) in runs
        ]
        order = {message.request_id: place for place, message in enumerate(messages)}  # type: ignore[attr-defined]
        assert sorted(order) == sorted(reply.request_id for reply in sent), sent
        return sorted(sent, key=lambda reply: order[reply.request_id])


@dataclass(frozen=True)
class Drafted:
    """One request's block as it goes to the target."""

    tokens: list[int]
    q: EncodedQ

    def cut(self, length: int) -> Drafted:
        """The first `length` tokens."""
        if not length:
            return Drafted([], NO_Q)
        return Drafted(self.tokens[:length], replace(self.q, arrays=tuple(array[:length] for array in self.q.arrays)))


Draft = Callable[["Pair", list[Request], int, int], list[Drafted]]
Verifier = Callable[["Pair", list[Request], list[Drafted], int], list[Verdict]]
Outcomes = Mapping[tuple[int, int], Drafted]  # the branches of one block by (accepted, token)
Ahead = Callable[["Pair", list[Request], list[Drafted], int, int], list[Outcomes]]


class Pair:
    """A target and a draft. `draft` and `verify` of a run may be replaced by broken ones."""

    def __init__(self, target: str, draft: str) -> None:
        self.target = Worker(TargetEngine(ToyExecutor(target)))
        self.drafter = Worker(ModelDraftEngine(ToyExecutor(draft)))
        self.other_target = Worker(TargetEngine(ToyExecutor(target)))
        self.other_drafter = Worker(ModelDraftEngine(ToyExecutor(draft)))
        self._vocab = ToyExecutor(target).vocab_size
        self._ids = 0

    def open(self, worker: Worker, requests: list[Request], verify: str, codec: str, seed_step: int = 0) -> None:
        sampling = [Sampling(o.temperature, o.top_k, o.top_p, o.min_p) for o in (r.options for r in requests)]
        opened = worker.ask(
            [
                Open(r.request_id, 1, r.seed + seed_step, verify, codec, s, self._vocab, token_array(r.tokens))
                for r, s in zip(requests, sampling, strict=True)
            ]
        )
        assert all(isinstance(reply, Opened) for reply in opened), opened

    def propose(self, worker: Worker, requests: list[Request], gamma: int, block_id: int) -> list[Block | Failure]:
        blocks = worker.ask(
            [
                Propose(r.request_id, 1, len(r.tokens), block_id, wanted, wanted, token_array(r.tokens[-64:]))
                for r, wanted in ((r, max(1, r.clip(gamma))) for r in requests)
            ]
        )
        assert all(isinstance(block, Block) or block.code == "nan" for block in blocks), blocks
        return blocks

    def branches(
        self, worker: Worker, requests: list[Request], drafted: list[Drafted], gamma: int, block_id: int
    ) -> list[Outcomes]:
        """The branches of each request's block in flight; none where nothing can follow it."""
        asked = [
            Branch(
                request_id=r.request_id,
                epoch=1,
                base_length=len(r.tokens),
                block_id=block_id,
                gamma=gamma,
                least=gamma,
                seconds=0.0,
                width=WIDTH,
                alpha=ALPHA,
                room=r.room,
                ends=tuple(sorted(r.eos_ids)),
                tail=token_array(r.tokens[-9:]),
                tokens=token_array(d.tokens),
            )
            for r, d in zip(requests, drafted, strict=True)
            if r.room >= 3
        ]
        found = {reply.request_id: outcomes(reply) for reply in worker.ask(asked)} if asked else {}
        return [found.get(r.request_id, {}) for r in requests]

    def judge(self, worker: Worker, requests: list[Request], drafted: list[Drafted], block_id: int) -> list[Verdict]:
        verdicts = worker.ask(
            [
                Verify(
                    r.request_id,
                    1,
                    len(r.tokens),
                    block_id,
                    token_array(r.tokens[-9:]),
                    np.asarray(d.tokens, dtype=np.int32),
                    d.q,
                )
                for r, d in zip(requests, drafted, strict=True)
            ]
        )
        assert all(isinstance(verdict, Verdict) for verdict in verdicts), verdicts
        return verdicts

    def generate(
        self,
        count: int,
        options: GenerateOptions,
        *,
        vocab: int,
        seed: int,
        gamma: int = 4,
        mode: str = "rejection",
        codec: str = "counts",
        draft: Draft | None = None,
        verify: Verifier | None = None,
        ahead: Ahead | None = None,
        second_draft: bool = False,
        second_verdict: bool = False,
    ) -> list[tuple[Request, list[Round]]]:
        """`count` requests in lockstep, every block of all of them in one pass. `ahead`: with branches."""
        requests = []
        for i in range(count):
            self._ids += 1
            requests.append(Request(self._ids, (i % vocab,), options, seed + i, frozenset(), 10**6))
        self.open(self.target, requests, mode, codec)
        self.open(self.drafter, requests, mode, codec)
        if second_draft:
            self.open(self.other_drafter, requests, mode, codec, seed_step=500_000)
        if second_verdict:
            self.open(self.other_target, requests, mode, codec, seed_step=500_000)
        done: dict[int, list[Round]] = {r.request_id: [] for r in requests}
        there: dict[int, Drafted] = {}  # a hit: the block is there already
        block_id, going = 0, requests
        while going:
            block_id += 1
            missing = [r for r in going if r.request_id not in there]
            fresh = (draft or plain_draft)(self, missing, gamma, block_id) if missing else []
            blocks = there | {r.request_id: d for r, d in zip(missing, fresh, strict=True)}
            drafted = [blocks[r.request_id] for r in going]
            branches = ahead(self, going, drafted, gamma, block_id) if ahead is not None else [{} for _ in going]
            verdicts = (
                self.judge(self.target, going, drafted, block_id)
                if verify is None
                else verify(self, going, drafted, block_id)
            )
            for r, d, v, outcomes_of in zip(going, drafted, verdicts, branches, strict=True):
                proposal = Proposal(tuple(d.tokens), "toy", origin="branch" if r.request_id in there else "drafted")
                hit = outcomes_of.get((v.accepted, v.token))
                told = Branching(WIDTH, len(outcomes_of), hit is not None) if outcomes_of else None
                origin = "bonus" if v.origin == "bonus" else "correction"
                verified = Verified(v.accepted, v.token, origin, 0, 0, 0)
                done[r.request_id].append(r.commit(proposal, verified, branching=told))
                there.pop(r.request_id, None)
                if hit is not None:
                    there[r.request_id] = hit
            going = [r for r in going if r.finish_reason is None]
        return [(r, done[r.request_id]) for r in requests]


def outcomes(branches: Branches) -> dict[tuple[int, int], Drafted]:
    """Each outcome's branch."""
    found, start = {}, 0
    for accepted, token, length in zip(branches.accepted, branches.next, branches.lengths, strict=True):
        stop = start + int(length)
        tokens = branches.tokens[start:stop].tolist()
        found[int(accepted), int(token)] = Drafted(tokens, branches.q.part(start, stop))
        start = stop
    return found


def hit_share(done: list[tuple[Request, list[Round]]]) -> float:
    """Of the rounds that had branches."""
    told = [one.branching.hit for _, rounds in done for one in rounds if one.branching is not None]
    return sum(told) / len(told) if told else 0.0


def as_drafted(block: Block | Failure) -> Drafted:
    """A draft that fails at its first token leaves the round at γ = 0."""
    if isinstance(block, Failure):
        return Drafted([], NO_Q)
    return Drafted(block.tokens.tolist(), block.q)


def plain_draft(pair: Pair, requests: list[Request], gamma: int, block_id: int) -> list[Drafted]:
    return [as_drafted(block) for block in pair.propose(pair.drafter, requests, gamma, block_id)]


def plain_ahead(
    pair: Pair, requests: list[Request], drafted: list[Drafted], gamma: int, block_id: int
) -> list[Outcomes]:
    return pair.branches(pair.drafter, requests, drafted, gamma, block_id)
