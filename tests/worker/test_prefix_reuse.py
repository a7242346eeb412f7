"""Both engines in their own loops: a prompt that begins as an earlier one isn't run again, and nothing else changes.

The measure is the same conversation on workers that keep nothing: every message that they send, every logit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draft_worker.engine import ModelDraftEngine
from execution.interface import Executor, Extension
from execution.toy import ToyExecutor
from protocol.codecs import EncodedQ
from protocol.messages import Block, Branch, Branches, Close, Failure, Message, Open, Propose, Sampling, Verdict, Verify
from protocol.messages import token_array as ids
from target_worker.engine import TargetEngine
from tests.e2e.inprocess import PEER, Worker, outcomes
from tests.execution.conftest import VOCAB, tiny_config
from worker.table import Entry

V = 24
TABLE = f"toy:vocab={V},state=hash,seed=6,scale=1.5"
NOISY = f"{TABLE},noise=0.5,noise_seed=2"
GAMMA = 4
MODES = {
    "counts": ("rejection", "counts", 1.0),
    "dense": ("rejection", "dense", 1.0),
    "coupled": ("coupled", "none", 1.0),
    "greedy": ("rejection", "none", 0.0),
}
FIRST = [3 * i % V for i in range(700)]  # more than one pass takes


class Counting:
    """An executor that notes what is fed, and what came of it."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.fed: list[int] = []  # tokens, a pass
        self.logits: list[list[Tensor]] = []
        self.opened: set[int] = set()
        self.break_next = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def extend(self, batch: Sequence[Extension]) -> list[Tensor]:
        self.fed.append(sum(len(extension.tokens) for extension in batch))
        if self.break_next:
            self.break_next = False
            raise RuntimeError("the test's own")
        self.logits.append(self._executor.extend(batch))
        return self.logits[-1]

    def open(self) -> int:
        row = self._executor.open()
        self.opened.add(row)
        return row

    def fork(self, row: int, length: int) -> int:
        fresh = self._executor.fork(row, length)
        self.opened.add(fresh)
        return fresh

    def close(self, row: int) -> None:
        self._executor.close(row)
        self.opened.remove(row)


class Talk:
    """A draft and a target worker, and the requests of one orchestrator."""

    def __init__(self, kept_tokens: int, mode: str = "counts", make: Callable[[str], Executor] = ToyExecutor) -> None:
        self.mode = mode
        self.target_executor, self.draft_executor = Counting(make(TABLE)), Counting(make(NOISY))
        self.target = Worker(TargetEngine(self.target_executor, kept_tokens))
        self.drafter = Worker(ModelDraftEngine(self.draft_executor, kept_tokens))
        self.said: list[Any] = []  # what the workers answered, without times

    def ask(self, worker: Worker, message: Message) -> Any:
        (reply,) = worker.ask([message])
        self.said.append(timeless(reply))
        return reply

    def open(self, request_id: int, prompt: list[int], workers: Sequence[Worker] = (), **changes: Any) -> None:
        verify, codec, temperature = MODES[self.mode]
        opened = Open(request_id, 1, 77, verify, codec, Sampling(temperature, 0, 1.0, 0.0), V, ids(prompt))
        for worker in workers or (self.target, self.drafter):
            self.ask(worker, replace(opened, **changes))

    def round(self, request_id: int, tokens: list[int], block_id: int, *, ahead: bool = False) -> list[int]:
        """What one round emits."""
        block = self.ask(self.drafter, Propose(request_id, 1, len(tokens), block_id, GAMMA, 0, ids(tokens[-9:])))
        assert isinstance(block, Block), block
        if ahead:
            self.branch(request_id, tokens, block.tokens.tolist(), block_id)
        verdict = self.ask(
            self.target, Verify(request_id, 1, len(tokens), block_id, ids(tokens[-9:]), block.tokens, block.q)
        )
        assert isinstance(verdict, Verdict), verdict
        return [*block.tokens[: verdict.accepted].tolist(), verdict.token]

    def branch(self, request_id: int, tokens: list[int], block: list[int], block_id: int = 1) -> None:
        """Have the draft work behind a block in flight."""
        tail = ids(tokens[-9:])
        self.ask(
            self.drafter,
            Branch(request_id, 1, len(tokens), block_id, GAMMA, GAMMA, 0.0, 8, 0.6, 100, (), tail, ids(block)),
        )

    def close(self, request_id: int) -> None:
        for worker in (self.target, self.drafter):
            worker.tell(Close(request_id))

    def turn(self, request_id: int, prompt: list[int], rounds: int = 6) -> list[int]:
        """A request from beginning to end: prompt and what was emitted."""
        self.open(request_id, prompt)
        tokens = list(prompt)
        for block_id in range(1, rounds + 1):
            tokens += self.round(request_id, tokens, block_id, ahead=block_id % 2 == 0)
        self.close(request_id)
        return tokens

    def forget(self) -> None:
        self.said = []
        for executor in (self.target_executor, self.draft_executor):
            executor.fed, executor.logits = [], []


def timeless(message: Message) -> Any:
    """A message as it can be compared: without seconds, and without what a pass had to do beside the request's own."""
    fields = {name: getattr(message, name) for name in type(message).__slots__}
    if isinstance(message, Branches):
        fields |= {place: timeless_q(one.q) for place, one in outcomes(message).items()}
    left_out = ("seconds", "rows", "positions", "q")
    plain = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in fields.items() if name not in left_out}
    return type(message).__name__, plain, timeless_q(getattr(message, "q", None))


def timeless_q(q: EncodedQ | None) -> Any:
    return None if q is None else (q.codec, [array.tolist() for array in q.arrays])


@pytest.mark.parametrize("mode", MODES)
def test_a_second_turn_is_the_cold_one_without_its_prefill(mode: str) -> None:
    warm, cold = Talk(4096, mode), Talk(0, mode)
    first = warm.turn(1, FIRST)
    assert cold.turn(1, FIRST) == first and warm.said == cold.said
    warm.forget()
    cold.forget()
    prompt = first + [5, 1, 4] * 7
    assert warm.turn(2, prompt) == cold.turn(2, prompt)
    assert warm.said == cold.said
    new = len(prompt) - len(first)
    for hot, plain in ((warm.target_executor, cold.target_executor), (warm.draft_executor, cold.draft_executor)):
        ahead = len(plain.fed) - len(hot.fed)
        assert plain.fed[0] == 512 and ahead >= 1, "two passes of prefill, and one"
        assert hot.fed[0] <= new + GAMMA + 2 and hot.fed[1:] == plain.fed[1 + ahead :]
        assert all(
            one.tolist() == other.tolist()
            for ours, theirs in zip(hot.logits[1:], plain.logits[1 + ahead :], strict=True)
            for one, other in zip(ours, theirs, strict=True)
        )


def test_a_draft_that_was_never_asked_has_its_prompt_all_the_same() -> None:
    """Where drafting doesn't pay, γ is 0: the draft has read the prompt and nothing else."""
    talk = Talk(4096)
    talk.open(1, FIRST)
    talk.close(1)
    talk.forget()
    talk.open(2, [*FIRST, 1, 2])
    assert talk.draft_executor.fed == talk.target_executor.fed == [2]


def test_requests_beside_each_other_share_a_prompt_that_was_read() -> None:
    talk, alone = Talk(4096), Talk(0)
    talk.open(1, FIRST)
    tokens = FIRST + talk.round(1, FIRST, 1)
    talk.forget()
    talk.open(2, [*FIRST[:600], 1, 1, 2])
    assert talk.target_executor.fed == [2] == talk.draft_executor.fed
    talk.forget()
    for block_id in (2, 3):
        tokens += talk.round(1, tokens, block_id)
    alone.open(1, FIRST)
    expected = list(FIRST)
    for block_id in (1, 2, 3):
        expected += alone.round(1, expected, block_id)
    assert tokens == expected, "the one that was forked goes on as if nobody had"


def test_a_request_that_is_opened_again_goes_on_from_its_row() -> None:
    """An epoch higher: the orchestrator wasn't sure what the worker had."""
    talk = Talk(4096)
    tokens = talk.turn(1, FIRST)
    talk.open(1, tokens)
    tokens += talk.round(1, tokens, 1)
    talk.forget()
    talk.open(1, tokens, epoch=2)
    assert sum(talk.target_executor.fed) <= 1 and sum(talk.draft_executor.fed) <= GAMMA + 1


def test_a_request_cancelled_midway_leaves_what_was_read() -> None:
    talk = Talk(4096)
    talk.open(1, FIRST)
    tokens = FIRST + talk.round(1, FIRST, 1)
    talk.drafter.tell(Propose(1, 1, len(tokens), 2, GAMMA, 0, ids(tokens[-9:])))  # one step of it
    talk.close(1)
    talk.forget()
    prompt = [*tokens, 1, 2, 3]
    talk.open(2, prompt)
    assert all(0 < sum(one.fed) <= 3 + GAMMA for one in (talk.target_executor, talk.draft_executor))
    assert talk.round(2, prompt, 1) == reference(prompt)


def test_a_block_that_the_draft_has_read_is_on_its_row() -> None:
    talk = Talk(4096)
    talk.open(1, FIRST)
    talk.branch(1, FIRST, [5, 0, 6, 2])
    talk.close(1)
    talk.forget()
    talk.open(2, [*FIRST, 5, 0, 6, 2, 1, 1])
    assert talk.draft_executor.fed == [1]


def test_a_prompt_cancelled_while_it_goes_in_is_not_kept() -> None:
    talk = Talk(4096)
    opened = Open(1, 1, 77, "rejection", "counts", Sampling(1.0, 0, 1.0, 0.0), V, ids(FIRST))
    for worker in (talk.target, talk.drafter):
        worker.tell(opened)
        assert worker.busy
        worker.tell(Close(1))
    assert not talk.target_executor.opened and not talk.draft_executor.opened


def test_the_tokens_kept_are_bounded_and_no_row_is_lost() -> None:
    """Rows of 700 tokens and more: of 2,300, three; while requests of 1,200 are open, one."""
    talk = Talk(2300)
    for start in range(6):
        talk.turn(start + 1, [(start + 1) * token % V for token in FIRST], rounds=2)
        assert len(talk.target_executor.opened) == len(talk.draft_executor.opened) == min(3, start + 1)
    talk.open(9, [7] * 1200)
    assert len(talk.target_executor.opened) == len(talk.draft_executor.opened) == 1 + 1


def test_a_live_row_that_grows_takes_the_room_of_kept_ones() -> None:
    talk = Talk(2 * 704)
    for start in range(2):
        talk.open(start + 1, [(start + 2) * token % V for token in FIRST])
        talk.close(start + 1)
    prompt = [11] * 700
    talk.open(9, prompt)
    assert len(talk.target_executor.opened) == len(talk.draft_executor.opened) == 2 + 1
    tokens, block_id = list(prompt), 0
    while len(tokens) <= 704:
        block_id += 1
        tokens += talk.round(9, tokens, block_id)
    talk.round(9, tokens, block_id + 1)
    assert len(talk.target_executor.opened) == len(talk.draft_executor.opened) == 1 + 1


def reference(prompt: list[int]) -> list[int]:
    """One round on workers that keep nothing."""
    cold = Talk(0)
    cold.open(1, prompt)
    return cold.round(1, prompt, 1)


def test_after_a_pass_that_failed_everything_starts_afresh() -> None:
    for name in ("target", "drafter"):
        talk = Talk(4096)
        tokens = talk.turn(1, FIRST)
        worker = getattr(talk, name)
        executor = talk.target_executor if name == "target" else talk.draft_executor
        executor.break_next = True
        opened = Open(2, 1, 77, "rejection", "counts", Sampling(1.0, 0, 1.0, 0.0), V, ids([1, 2, 3]))
        (failed,) = worker.ask([opened])
        assert isinstance(failed, Failure) and not executor.opened
        talk.forget()
        talk.open(3, tokens)
        assert sum(executor.fed) == len(tokens) - 1, name
        assert talk.round(3, tokens, 1) == reference(tokens)


def test_after_a_nan_everything_starts_afresh() -> None:
    """Logits after token 23 are NaN. Their request keeps nothing, nor is what was kept before trusted."""
    for name in ("target", "drafter"):
        talk = Talk(4096, "coupled", lambda table: ToyExecutor(f"{table},nan_token={V - 1}"))
        prompt = [token % (V - 1) for token in FIRST]
        for start in (1, 2):  # the bad prompt takes one of the two rows over
            talk.open(1, prompt[start:])
            talk.close(1)
        worker = getattr(talk, name)
        executor = talk.target_executor if name == "target" else talk.draft_executor
        bad = [*prompt[1:], V - 1]
        talk.open(2, bad, [worker])
        empty = np.zeros(0, dtype=np.int32)
        asked = {
            "target": Verify(2, 1, len(bad), 1, ids(bad[-1:]), empty, EncodedQ("none", ())),
            "drafter": Propose(2, 1, len(bad), 1, GAMMA, 0, ids(bad[-1:])),
        }
        (failed,) = worker.ask([asked[name]])
        assert isinstance(failed, Failure) and failed.code == "nan"
        worker.tell(Close(2))
        assert not executor.opened, name


def test_a_row_on_which_the_draft_met_a_nan_is_not_kept() -> None:
    """In the middle of another's block, long after the prompt."""
    talk = Talk(4096, "coupled", lambda table: ToyExecutor(f"{table},nan_token={V - 1}"))
    prompt = [token % (V - 1) for token in FIRST]
    talk.open(1, prompt)
    talk.branch(1, prompt, [1, V - 1, 2])
    talk.close(1)
    assert not talk.draft_executor.opened


def test_a_prompt_that_ends_in_nan_is_not_kept() -> None:
    """Nobody asked for logits yet; the prefill looks at the last of its own."""
    talk = Talk(4096, "coupled", lambda table: ToyExecutor(f"{table},nan_token={V - 1}"))
    bad = [*([1] * 40), V - 1, 2]
    talk.open(1, bad)
    talk.close(1)
    assert not talk.target_executor.opened and not talk.draft_executor.opened

    good = [2] * 40  # and the same beside the block of a request whose logits are finite
    talk.open(2, good)
    opened = Open(3, 1, 77, "coupled", "none", Sampling(1.0, 0, 1.0, 0.0), V, ids(bad))
    talk.target.tell(Verify(2, 1, len(good), 1, ids([]), ids([3]), EncodedQ("none", ())), opened)
    talk.drafter.tell(Propose(2, 1, len(good), 1, 1, 0, ids([])), opened)
    for worker in (talk.target, talk.drafter):
        assert not worker.busy
        worker.tell(Close(3))
    assert len(talk.target_executor.opened) == len(talk.draft_executor.opened) == 1


@dataclass
class Tiny:
    """A transformers executor of a tiny random network."""

    family: str

    def __call__(self, reference: str) -> Executor:
        from transformers import AutoModelForCausalLM

        from execution.transformers_executor import TransformersExecutor

        torch.manual_seed(len(reference))
        network = AutoModelForCausalLM.from_config(tiny_config(self.family)).eval()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(3)
        return TransformersExecutor(network, reference, vocab_size=VOCAB)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_of_a_real_cache(family: str) -> None:
    """With full and with sliding attention: a kept row, taken over and forked, gives the logits of a cold one."""
    first = [7 * i % VOCAB for i in range(50)]
    turns = [[*first, 1, 2, 3, 4, 5, 6], first + [9] * 20]  # the second leaves the first one's end to others
    for prompt in turns:
        warm, cold = Talk(400, "coupled", Tiny(family)), Talk(0, "coupled", Tiny(family))
        for talk in (warm, cold):
            talk.open(1, first + [8] * 20 if prompt is turns[1] else first, vocab_size=VOCAB)
            talk.close(1)
            talk.forget()
            talk.open(2, prompt, vocab_size=VOCAB)
            talk.ask(talk.target, Verify(2, 1, len(prompt), 1, ids([]), ids([1, 2, 3]), EncodedQ("none", ())))
            talk.ask(talk.drafter, Propose(2, 1, len(prompt), 1, GAMMA, 0, ids([])))
        for hot, plain in ((warm.target_executor, cold.target_executor), (warm.draft_executor, cold.draft_executor)):
            assert hot.fed[0] < 20 < plain.fed[0]
            for ours, theirs in zip(hot.logits[1:], plain.logits[1:], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_options_seeds_and_modes_share_rows() -> None:
    """What a row holds depends on tokens alone."""
    talk = Talk(4096, "counts")
    tokens = talk.turn(1, FIRST)
    for other in ("coupled", "greedy", "dense"):
        talk.mode = other
        talk.forget()
        talk.open(2, tokens, seed=5)
        assert sum(talk.target_executor.fed) <= 1
        talk.round(2, tokens, 1)
        talk.close(2)


def test_entries_are_as_after_a_cold_start() -> None:
    """`cached` and the committed tokens of the request, which all that follows is decided by."""
    found: list[tuple[list[int], list[int], int]] = []
    for kept in (4096, 0):
        talk = Talk(kept)
        tokens = talk.turn(1, FIRST)
        talk.open(2, [*tokens, 4, 2])
        entry: Entry = talk.target._loop._table.get((PEER, 2))
        found.append((entry.tokens, entry.cached, talk.target_executor.length(entry.row)))
    assert found[0] == found[1]
