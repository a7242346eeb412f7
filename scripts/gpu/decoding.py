"""Whether the pair, both engines in this process and passes replayed, emits what plain decoding emits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from draft_worker.engine import ModelDraftEngine
from gpu.exactness import Finding
from gpu.models import PAIR, build, executor, resembling
from protocol.codecs import NO_Q
from protocol.messages import Block, Failure, Open, Propose, Sampling, Verdict, Verify, token_array
from target_worker.engine import TargetEngine
from worker.loop import Engine
from worker.table import Entry, Work

GAMMA, REQUESTS = 4, 3
MODES = {"greedy": ("rejection", 0.0), "coupled": ("coupled", 1.0)}


class Side:
    """One engine with its requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._entries = engine, dict[int, Entry]()

    def open(self, requests: Sequence[Open]) -> None:
        for opened in requests:
            entry = Entry((_PEER, opened.request_id), opened, opened.tokens.tolist())
            self._entries[opened.request_id] = entry
            self._engine.open(entry)
        self._replies(len(requests))

    def ask(self, messages: Sequence[Work]) -> list[Any]:
        """The replies in the order of the messages, all of them in the same passes."""
        for message in messages:
            entry = self._entries[message.request_id]
            self._engine.check(entry, message)
            entry.follow(message.base_length, message.tail.tolist())
            self._engine.start(entry, message)
        replies = {reply.request_id: reply for reply in self._replies(len(messages))}
        return [replies[message.request_id] for message in messages]

    def _replies(self, count: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            found += [reply for _, reply in self._engine.step()]
        failed = [reply for reply in found if isinstance(reply, Failure)]
        if failed:
            raise RuntimeError(f"an engine failed: {failed[0].text}")
        return found


def decode(target: Side, draft: Side | None, mode: str, prompts: Sequence[list[int]], vocab: int, count: int) -> Any:
    """(tokens of each request, accepted, drafted): `count` tokens each, or a few more."""
    verify, temperature = MODES[mode]
    opened = [
        Open(i, 1, 77 + i, verify, "none", Sampling(temperature, 0, 1.0, 0.0), vocab, token_array(prompt))
        for i, prompt in enumerate(prompts)
    ]
    for side in (target, draft):
        if side is not None:
            side.open(opened)
    texts, accepted, drafted = [list(prompt) for prompt in prompts], 0, 0
    for block_id in range(1, count + 1):
        going = [i for i, text in enumerate(texts) if len(text) - len(prompts[i]) < count]
        if not going:
            break
        tails = {i: token_array(texts[i][-9:]) for i in going}
        blocks: list[Any] = [np.zeros(0, np.int32)] * len(going)
        if draft is not None:
            asked = [Propose(i, 1, len(texts[i]), block_id, GAMMA, 0, tails[i]) for i in going]
            replies = draft.ask(asked)
            assert all(isinstance(reply, Block) for reply in replies)
            blocks = [reply.tokens for reply in replies]
        verdicts = target.ask(
            [
                Verify(i, 1, len(texts[i]), block_id, tails[i], block, NO_Q)
                for i, block in zip(going, blocks, strict=True)
            ]
        )
        for i, block, verdict in zip(going, blocks, verdicts, strict=True):
            assert isinstance(verdict, Verdict)
            texts[i] += [*block[: verdict.accepted].tolist(), verdict.token]
            accepted, drafted = accepted + verdict.accepted, drafted + len(block)
    return [text[len(prompt) :][:count] for text, prompt in zip(texts, prompts, strict=True)], accepted, drafted


def check_decoding(device: torch.device, count: int) -> list[Finding]:
    """float32, where passes of different widths round alike to a millionth: the texts are the same token for token."""
    network = build(PAIR, torch.float32, device, 5)
    with torch.no_grad():
        network.lm_head.weight *= 8  # distributions far from uniform
    follower = resembling(network, 0.1, 6)
    prompts = [[7 * i + step for step in range(10 + 5 * i)] for i in range(REQUESTS)]
    plain = {}
    for mode in MODES:
        side = Side(TargetEngine(executor(network, graphs=False, packed=False)[0]))
        plain[mode], _, _ = decode(side, None, mode, prompts, PAIR["vocab_size"], count)
    findings = []
    for mode, expected in plain.items():
        target, graphs = executor(network, graphs=True, packed=True)
        draft, _ = executor(follower, graphs=True, packed=True)
        sides = Side(TargetEngine(target)), Side(ModelDraftEngine(draft))
        found, accepted, drafted = decode(*sides, mode, prompts, PAIR["vocab_size"], count)
        same = sum(one == other for one, other in zip(found, expected, strict=True))
        assert graphs is not None
        findings.append(
            Finding(
                f"{mode} decoding of a pair in float32, γ = {GAMMA}: plain decoding's tokens",
                f"{same} of {REQUESTS} texts of {count} tokens the same, {accepted / drafted:.2f} of the draft's tokens"
                f" accepted, {graphs.replays} passes replayed",
                same == REQUESTS and 0 < accepted < drafted and graphs.replays > 0,
            )
        )
    return findings


_PEER: Any = "this process"
