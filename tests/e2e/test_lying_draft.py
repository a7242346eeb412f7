"""A draft worker that speaks the protocol and says wrong things: it costs speed, and never the text or the session.

The liar is an Endpoint in a thread of this process; the target is a real worker. What it sends is refused by the link,
by the target, or accepted as the poor guess that it is; the ids are those of plain coupled decoding all the same.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from execution.toy_spec import ToySpec
from execution.toy_vocabulary import toy_vocabulary
from orchestrator import UsageError
from protocol.codecs import NO_Q, EncodedQ, pack_counts
from protocol.endpoint import Endpoint
from protocol.handshake import vocabulary_fingerprint
from protocol.limits import PROTOCOL_VERSION
from protocol.messages import (
    Block,
    Branch,
    Branches,
    Close,
    Failure,
    Hello,
    Message,
    Open,
    Opened,
    Propose,
    Welcome,
    token_array,
)
from tests.e2e.support import Run, Taken, WorkerByHand, let_last, plain_coupled, runtime_of, take, toy

V = 12
TARGET = toy(vocab=V, order=2, seed=4, scale=1.5, delay_ms=2)  # branches come in time
PROMPT = [1, 2, 3]
TOKENS = 40
WELCOME = Welcome(
    protocol_version=PROTOCOL_VERSION,
    role="draft",
    instance="liar",
    pid=os.getpid(),
    package_version="0",
    model="liar",
    source="model",
    vocab_size=V,
    vocabulary=vocabulary_fingerprint(toy_vocabulary(ToySpec.parse(TARGET)).pairs),
    context_length=4096,
    device="cpu",
    dtype="float32",
    threads=1,
    verify_modes=("rejection", "coupled"),
    codecs=("none", "counts", "dense"),
    eos_ids=(),
)
Lie = Callable[[Propose], Message | None]
BranchLie = Callable[[Branch], Message | None]


def block(asked: Propose, tokens: list[int], q: EncodedQ = NO_Q) -> Block:
    drafted = np.array(tokens, dtype=np.int32)
    return Block(asked.request_id, asked.epoch, asked.base_length, asked.block_id, 0.001, 1, len(tokens), drafted, q)


def honest_counts(tokens: list[int]) -> EncodedQ:
    """A q̃ that is certain of each token."""
    return pack_counts(np.array([[token] for token in tokens]), np.full((len(tokens), 1), 65536), V)


def bad_counts(asked: Propose) -> Block:
    """Counts that do not sum to 65536."""
    q = honest_counts([1] * asked.gamma)
    ids, less_one, lengths = q.arrays
    return block(asked, [1] * asked.gamma, replace(q, arrays=(ids, less_one // 2, lengths)))


COUPLED_LIES: dict[str, Lie] = {
    "C11: one token too many": lambda asked: block(asked, [1] * (asked.gamma + 1)),
    "ids beyond the vocabulary": lambda asked: block(asked, [V + 5] * asked.gamma),
    "an empty block": lambda asked: block(asked, []),
    "a shorter block": lambda asked: block(asked, [2]),
    "another base length": lambda asked: block(replace(asked, base_length=asked.base_length + 1), [2] * asked.gamma),
    "another block": lambda asked: block(replace(asked, block_id=asked.block_id + 7), [2] * asked.gamma),
    "an older epoch": lambda asked: block(replace(asked, epoch=asked.epoch + 7), [2] * asked.gamma),
    "a q̃ that nobody asked for": lambda asked: block(asked, [1] * asked.gamma, honest_counts([1] * asked.gamma)),
    "out of sync": lambda asked: Failure(asked.request_id, asked.epoch, asked.block_id, "out_of_sync", "what?"),
    "an internal error": lambda asked: Failure(asked.request_id, asked.epoch, asked.block_id, "internal", "ouch"),
    "no answer": lambda asked: None,
}
REJECTION_LIES: dict[str, Lie] = {
    "counts that are off": bad_counts,
    "no q̃ at all": lambda asked: block(asked, [1] * asked.gamma),
    "NaN": lambda asked: block(
        asked, [1] * asked.gamma, EncodedQ("dense", (np.full((asked.gamma, V), np.nan, dtype=np.float32),))
    ),
    "q̃ = 0 at the token": lambda asked: block(asked, [1] * asked.gamma, honest_counts([2] * asked.gamma)),
}


def branches(
    asked: Branch, outcomes: list[tuple[int, int]], tokens: list[int], q: EncodedQ = NO_Q, **other: int
) -> Branches:
    """The same tokens after each of the outcomes."""
    return Branches(
        request_id=asked.request_id,
        epoch=other.get("epoch", asked.epoch),
        base_length=other.get("base_length", asked.base_length),
        block_id=asked.block_id,
        seconds=1e-6,
        rows=len(outcomes),
        steps=1,
        accepted=token_array([accepted for accepted, _ in outcomes]),
        next=token_array([token for _, token in outcomes]),
        lengths=token_array([len(tokens)] * len(outcomes)),
        tokens=token_array(tokens * len(outcomes)),
        q=q,
    )


def every(asked: Branch) -> list[tuple[int, int]]:
    """As many outcomes as may be told, the likeliest first."""
    outcomes = [(accepted, token) for accepted in range(len(asked.tokens) + 1) for token in range(V)]
    return outcomes[: asked.width]


def failure(asked: Branch, code: str) -> Failure:
    return Failure(asked.request_id, asked.epoch, asked.block_id, code, "what?")


def certain(asked: Branch, says: int, means: int) -> Branches:
    """Counts that are certain of token `means`, with token `says`."""
    tokens = [says] * asked.gamma
    return branches(asked, every(asked), tokens, honest_counts([means] * asked.gamma * len(every(asked))))


BRANCH_LIES: dict[str, BranchLie] = {
    "wrong tokens after every outcome": lambda asked: branches(asked, every(asked), [2] * asked.gamma),
    "shorter ones": lambda asked: branches(asked, every(asked), [2]),
    "empty ones": lambda asked: branches(asked, every(asked), []),
    "longer ones": lambda asked: branches(asked, every(asked), [2] * (asked.gamma + 1)),
    "more than asked for": lambda asked: branches(asked, [(0, token) for token in range(asked.width + 1)], [2]),
    "more kept than drafted": lambda asked: branches(asked, [(len(asked.tokens) + 1, 1)], [2]),
    "ids beyond the vocabulary": lambda asked: branches(asked, every(asked), [V + 5] * asked.gamma),
    "another base length": lambda asked: branches(asked, every(asked), [2], base_length=asked.base_length + 1),
    "an older epoch": lambda asked: branches(asked, every(asked), [2], epoch=asked.epoch + 7),
    "a q̃ that nobody asked for": lambda asked: certain(asked, 2, 2),
    "no branches": lambda asked: branches(asked, [], []),
    "out of sync": lambda asked: failure(asked, "out_of_sync"),
    "an internal error": lambda asked: failure(asked, "internal"),
    "no answer": lambda asked: None,
}
BRANCH_REJECTION_LIES: dict[str, BranchLie] = {
    "no q̃ at all": lambda asked: branches(asked, every(asked), [1] * asked.gamma),
    "q̃ = 0 at the token": lambda asked: certain(asked, 1, 2),
}


class Liar:
    """Serves one address until it's told to stop."""

    def __init__(self, address: str, lie: Lie, branch_lie: BranchLie) -> None:
        self.lies = self.branch_lies = 0
        self._lie = lie
        self._branch_lie = branch_lie
        self._endpoint: Endpoint
        self._address = address
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="liar")
        self._thread.start()
        assert self._bound.wait(10), "the liar did not start"

    def _serve(self) -> None:
        with Endpoint(self._address) as self._endpoint:
            self._endpoint.status.update(state="ready")
            self._bound.set()
            while not self._endpoint.stopping.is_set():
                for peer, message in self._endpoint.receive(1.0):
                    reply = self._reply(message)
                    if reply is not None:
                        self._endpoint.send(peer, reply)

    def _reply(self, message: Message) -> Message | None:
        if isinstance(message, Hello):
            return WELCOME
        if isinstance(message, Open):
            return Opened(message.request_id, message.epoch, len(message.tokens))
        if isinstance(message, Propose):
            self.lies += 1
            return self._lie(message)
        if isinstance(message, Branch):
            self.branch_lies += 1
            return self._branch_lie(message)
        assert isinstance(message, Close), message
        return None

    def stop(self) -> None:
        self._endpoint.stop()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the liar did not stop"


@pytest.fixture
def lying(tmp_path: Path) -> Iterator[Callable[..., tuple[str, Liar]]]:
    started: list[Liar] = []

    def start(lie: Lie, branch_lie: BranchLie = lambda asked: None) -> tuple[str, Liar]:
        address = f"ipc://{tmp_path}/liar{len(started)}"
        started.append(Liar(address, lie, branch_lie))
        return address, started[-1]

    yield start
    for liar in started:
        liar.stop()


@pytest.fixture(scope="module")
def target(module_leaks: None) -> Iterator[str]:
    worker = WorkerByHand("target", TARGET, "--threads", "1")
    let_last()
    yield worker.address
    assert worker.end() == 0


def lied_to(
    run: Run, target: str, address: str, verify: str, codec: str = "counts", overlap: str = "off"
) -> list[Taken]:
    async def all_of_it() -> list[Taken]:
        async with runtime_of(target, "liar", draft_place=address, draft_timeout=0.2) as runtime:
            options = {"verify": verify, "codec": codec, "max_tokens": TOKENS, "gamma": 3, "overlap": overlap}
            return [await take(runtime, PROMPT, seed=seed, **options) for seed in (1, 2)]

    return run(all_of_it(), 90)


@pytest.mark.parametrize("name", COUPLED_LIES)
def test_coupled_text_is_the_same(run: Run, target: str, lying: Callable[..., tuple[str, Liar]], name: str) -> None:
    address, liar = lying(COUPLED_LIES[name])
    for seed, taken in zip((1, 2), lied_to(run, target, address, "coupled"), strict=True):
        assert taken.tokens == plain_coupled(TARGET, PROMPT, seed, TOKENS)
        assert all(len(done.proposal.tokens) <= 3 for done in taken.rounds)
    assert liar.lies > 0


@pytest.mark.parametrize("name", REJECTION_LIES)
def test_rejection_goes_on(run: Run, target: str, lying: Callable[..., tuple[str, Liar]], name: str) -> None:
    """Text of the right length with ids of the target; a q̃ that can't be is refused, and an impossible token is."""
    address, liar = lying(REJECTION_LIES[name])
    codec = "dense" if name == "NaN" else "counts"
    for taken in lied_to(run, target, address, "rejection", codec):
        assert len(taken.tokens) == TOKENS and all(0 <= token < V for token in taken.tokens)
        if name != "no q̃ at all":
            assert taken.accepted == 0
    assert liar.lies > 0


def ones(asked: Propose) -> Block:
    """An honest block of a simple mind."""
    return block(asked, [1] * asked.gamma)


@pytest.mark.parametrize("name", BRANCH_LIES)
def test_coupled_text_is_the_same_with_false_branches(
    run: Run, target: str, lying: Callable[..., tuple[str, Liar]], name: str
) -> None:
    address, liar = lying(ones, BRANCH_LIES[name])
    hits = 0
    for seed, taken in zip((1, 2), lied_to(run, target, address, "coupled", overlap="on"), strict=True):
        assert taken.tokens == plain_coupled(TARGET, PROMPT, seed, TOKENS)
        assert all(len(done.proposal.tokens) <= 3 for done in taken.rounds)
        hits += sum(done.branching is not None and done.branching.hit for done in taken.rounds)
    assert liar.branch_lies > 0
    assert (hits > 0) == (name in ("wrong tokens after every outcome", "shorter ones", "empty ones",
                                   "ids beyond the vocabulary", "a q̃ that nobody asked for"))  # fmt: skip


@pytest.mark.parametrize("name", BRANCH_REJECTION_LIES)
def test_rejection_goes_on_with_false_branches(
    run: Run, target: str, lying: Callable[..., tuple[str, Liar]], name: str
) -> None:
    address, liar = lying(ones, BRANCH_REJECTION_LIES[name])
    for taken in lied_to(run, target, address, "rejection", overlap="on"):
        assert len(taken.tokens) == TOKENS and all(0 <= token < V for token in taken.tokens)
        if name != "no q̃ at all":
            assert not any(done.kept for done in taken.rounds if done.proposal.origin == "branch")
    assert liar.branch_lies > 0


def test_another_vocabulary_is_refused_at_the_handshake(
    run: Run, target: str, lying: Callable[..., tuple[str, Liar]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Liar, "_reply", lambda self, message: replace(WELCOME, vocabulary="00" * 32))
    address, liar = lying(lambda asked: None)
    with pytest.raises(UsageError, match="another vocabulary"):
        lied_to(run, target, address, "coupled")
    assert liar.lies == 0
