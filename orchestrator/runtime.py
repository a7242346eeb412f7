"""The Python entry: `async with Runtime(...) as runtime: async for chunk in runtime.generate(...)`.

Starts or attaches both workers, keeps the commit logs, ends what it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config import Gamma, RuntimeConfig
from orchestrator.draft_pool import DraftPool
from orchestrator.drafting import Drafter
from orchestrator.errors import UsageError, WorkerFault
from orchestrator.lane import Lane, check_offered, negotiated_codec
from orchestrator.pace import Costs, Pacer
from orchestrator.peer import LinkFactory, Peer
from orchestrator.request import FinishReason, GenerateOptions, Request
from orchestrator.round import Rounds
from orchestrator.stats import RequestStats, TraceSink
from orchestrator.text import TextCodec
from protocol.errors import LinkError, ProtocolError
from protocol.link import Link
from protocol.messages import GetTokenizer

logger = logging.getLogger(__name__)
TOKENIZER_SECONDS = 60.0
ACCEPTANCE_FLOOR = 0.02  # accepted / drafted; even γ = 8 at α = .15 is above it
ENOUGH_DRAFTED = 64


@dataclass(frozen=True)
class Generation:
    """What a finished request amounts to."""

    text: str
    token_ids: tuple[int, ...]  # with the end token, if there was one
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    stats: RequestStats
    seconds: float  # wall time

    def to_json(self) -> dict[str, Any]:
        """The object that --json prints."""
        completion = len(self.token_ids)
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": completion,
                "total_tokens": self.prompt_tokens + completion,
            },
            "seed": self.seed,
            "speculative": self.stats.speculative(),
            "seconds": self.stats.seconds(self.seconds),
        }


@dataclass(frozen=True)
class Chunk:
    """What one round committed. The last chunk of a request carries `generation`."""

    text: str
    token_ids: tuple[int, ...]
    generation: Generation | None = None


class Runtime:
    """Two workers and the requests over them. Not thread-safe: one event loop owns it."""

    def __init__(self, config: RuntimeConfig | None = None, *, draft_link: LinkFactory = Link, **fields: Any) -> None:
        """`Runtime(gamma=8)` is short for `Runtime(RuntimeConfig(gamma=8))`. Raises UsageError on a bad field.

        `draft_link` makes the link to the draft worker.
        """
        if config is not None and fields:
            raise UsageError("give Runtime a RuntimeConfig or its fields, not both")
        try:
            self.config = config if config is not None else RuntimeConfig(**fields)
        except TypeError as error:
            raise UsageError(f"unknown Runtime field: {error}") from error
        self._drafts = DraftPool(self.config, draft_link)
        self._costs = Costs()
        self._pacers: dict[tuple[Gamma, bool], Pacer] = {}
        self._target: Peer | None = None
        self._text: TextCodec | None = None
        self._ids = itertools.count(1)

    async def __aenter__(self) -> Runtime:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _start(self) -> None:
        """Start both workers side by side; the first error ends the start."""
        async with contextlib.AsyncExitStack() as stack:
            starting = [
                asyncio.create_task(self._start_target(), name="start-target"),
                asyncio.create_task(self._drafts.start(), name="start-draft"),
            ]
            stack.push_async_callback(_cancel_all, starting)
            await asyncio.gather(*starting)
        for peer in (self.target, self.draft):
            if peer is not None:
                check_offered(peer, self.config)
        self._drafts.keep(self.target.welcome)

    async def _start_target(self) -> None:
        self._target = await Peer.start("target", self.config.target_place, self.config)
        try:
            reply = await self._target.link.request(GetTokenizer(), TOKENIZER_SECONDS)
        except (LinkError, ProtocolError) as error:
            raise WorkerFault(f"the target worker sent no tokenizer: {error}") from error
        self._text = TextCodec(reply.message.tokenizer_json, reply.message.chat_template)

    async def close(self) -> None:
        """End the workers that were started here; attached ones go on."""
        await self._drafts.close()
        if self._target is not None:
            await self._target.close()
            self._target = None

    @property
    def target(self) -> Peer:
        """The target worker. UsageError outside `async with`."""
        if self._target is None:
            raise UsageError("the runtime isn't started: use `async with Runtime(...) as runtime`")
        return self._target

    @property
    def draft(self) -> Peer | None:
        """The draft worker, while there is one."""
        return self._drafts.peer

    @property
    def draft_restarts(self) -> int:
        return self._drafts.restarts

    @property
    def text(self) -> TextCodec:
        assert self._text is not None or self.target  # UsageError outside `async with`
        assert self._text is not None
        return self._text

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        raw: bool = False,
        trace: TraceSink | None = None,
        gamma: Gamma | None = None,
        overlap: str | None = None,
        verify: str | None = None,
        codec: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[Chunk]:
        """Generate from text (through the chat template unless `raw`) or from token ids; a chunk a round.

        `options` are the fields of GenerateOptions; `gamma`, `overlap`, `verify` and `codec` override the runtime's for
        this request. Raises UsageError for what can't be served and WorkerFault when the target is lost. Leaving the
        loop early frees both workers' state (use contextlib.aclosing).
        """
        started = time.perf_counter()
        config = RuntimeConfig(
            **{**vars(self.config), **_given(gamma=gamma, overlap=overlap, verify=verify, codec=codec)}
        )
        request = self._request(prompt, raw, _options(options))
        rounds = self._rounds(request, config)
        stats, stream = RequestStats(), self.text.stream()
        try:
            await rounds.open()
            text = ""
            while request.finish_reason is None:
                done = await rounds.run()
                stats.add(done)
                if trace is not None:
                    trace.write(request, done)
                piece = stream.push(done.emitted)
                if request.finish_reason is not None:
                    piece += stream.finish()
                text += piece
                generation = None
                if request.finish_reason is not None:
                    self._warn_useless(stats)
                    generation = _generation(request, text, stats, time.perf_counter() - started)
                yield Chunk(piece, done.emitted, generation)
        finally:
            await rounds.close()

    def _warn_useless(self, stats: RequestStats) -> None:
        """A draft model that is nearly never right is the wrong one, or loaded wrongly. Prompt lookup may well be."""
        draft = self.draft
        if draft is None or draft.welcome.source == "ngram" or stats.drafted < ENOUGH_DRAFTED:
            return
        if stats.acceptance_rate < ACCEPTANCE_FLOOR:
            logger.warning(
                "the draft %s is of no use here: %d of %d tokens accepted; is it a draft of this target?",
                draft.welcome.model,
                stats.accepted,
                stats.drafted,
            )

    def _request(self, prompt: str | Sequence[int], raw: bool, options: GenerateOptions) -> Request:
        tokens = self.text.encode(prompt, raw=raw) if isinstance(prompt, str) else list(prompt)
        welcome = self.target.welcome
        if not tokens:
            raise UsageError("the prompt is empty: expected at least one token")
        bad = next((token for token in tokens if not 0 <= token < welcome.vocab_size), None)
        if bad is not None:
            raise UsageError(f"prompt token {bad} is outside the target's vocabulary of {welcome.vocab_size}")
        if len(tokens) >= welcome.context_length:
            raise UsageError(
                f"the prompt has {len(tokens)} tokens, the target's context holds {welcome.context_length} and at "
                f"least one must stay free: shorten the prompt or use a target with a longer context"
            )
        return Request(
            request_id=next(self._ids),
            prompt=tuple(tokens),
            options=options,
            seed=options.seeded(),
            eos_ids=frozenset(welcome.eos_ids),
            context_length=welcome.context_length,
        )

    def _rounds(self, request: Request, config: RuntimeConfig) -> Rounds:
        codec = negotiated_codec(config, request.options.temperature, self.draft)
        vocab_size = self.target.welcome.vocab_size
        target, draft = (Lane(request, config.verify, codec, vocab_size) for _ in range(2))
        pacer = self._pacer(config)
        return Rounds(request, self.target, target, Drafter(request, self._drafts, draft, pacer), pacer)

    def _pacer(self, config: RuntimeConfig) -> Pacer:
        """The pace of all requests with this γ and overlap; what was measured is shared by all."""
        overlap = config.overlap == "on" and self.draft is not None and self.draft.welcome.source == "model"
        key = (config.gamma, overlap)
        if key not in self._pacers:
            self._pacers[key] = Pacer(None if config.gamma == "auto" else config.gamma, overlap, self._costs)
        return self._pacers[key]


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if not task.cancelling():  # a second cancel would interrupt the tidying up after the first
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _given(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _options(fields: dict[str, Any]) -> GenerateOptions:
    try:
        return GenerateOptions(**fields)
    except TypeError as error:
        raise UsageError(f"unknown generate option: {error}") from error


def _generation(request: Request, text: str, stats: RequestStats, seconds: float) -> Generation:
    assert request.finish_reason is not None
    return Generation(
        text=text,
        token_ids=tuple(request.generated),
        finish_reason=request.finish_reason,
        prompt_tokens=len(request.prompt),
        seed=request.seed,
        stats=stats,
        seconds=seconds,
    )
