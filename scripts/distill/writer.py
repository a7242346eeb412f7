"""The target writes its own corpus: many chats at once, one token of each a step.

A row of the batch that ends its chat starts the next one in place, so the batch is always full and no step is
spent on padding. Openings are few, so their keys and values are computed once and copied into the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from distill.corpus import ASSISTANT, NOBODY, USER, Chat, CorpusSpec, write_shard
from distill.target import Target


@dataclass(frozen=True)
class Recipe:
    """What share of the chats is written how. Shares are weights, they need not sum to 1."""

    rows: int = 192
    user_tokens: int = 120  # a user turn longer than this is closed by force
    opening_shares: tuple[float, ...] = (0.75, 0.25)  # the template's rendering, the bare user turn
    user_temperatures: tuple[tuple[float, float], ...] = ((1.0, 0.5), (0.7, 0.5))  # varied; like a person's
    temperatures: tuple[tuple[float, float], ...] = ((1.0, 0.5), (0.6, 0.25), (0.0, 0.25))  # (temperature, share)
    shard_tokens: int = 50_000


class RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [rows, heads, length, width] where each row writes at a position of its own."""

    is_sliding = False

    def __init__(self, rows: int, length: int, clock: Clock) -> None:
        super().__init__()
        self.rows, self.length, self.clock = rows, length, clock

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states.new_zeros(self.rows, key_states.shape[1], self.length, key_states.shape[3])
        self.values = value_states.new_zeros(self.rows, value_states.shape[1], self.length, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[self.clock.rows, :, self.clock.positions] = key_states[:, :, 0]
        self.values[self.clock.rows, :, self.clock.positions] = value_states[:, :, 0]
        return self.keys[:, :, : self.clock.extent], self.values[:, :, : self.clock.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.clock.extent, 0

    def get_seq_length(self) -> int:
        return self.clock.extent

    def get_max_length(self) -> int:
        return self.length


@dataclass
class Clock:
    """Where each row stands: the position [rows] that this step fills, and the longest row."""

    rows: torch.Tensor
    positions: torch.Tensor
    extent: int = 1


@dataclass
class Row:
    """The chat that a row of the batch is writing."""

    number: int = 0
    temperature: float = 1.0  # of the assistant
    user_temperature: float = 1.0
    length: int = 0
    role: int = USER
    turn: int = 0  # tokens of the user's turn so far
    forced: list[int] = field(default_factory=list)


class Writer:
    """Writes chats of `target` until told to stop. State between steps is one Row a chat and the buffers."""

    def __init__(self, target: Target, spec: CorpusSpec, recipe: Recipe, chapter: int) -> None:
        """`chapter` numbers the runs that share a corpus: each continues with fresh noise and chat numbers."""
        self.target, self.spec, self.recipe, self.chapter = target, spec, recipe, chapter
        self.noise = np.random.default_rng((spec.seed, chapter))
        self.next_number = chapter * 1_000_000
        rows, length = recipe.rows, spec.length
        self.tokens = np.zeros((rows, length), np.int32)
        self.roles = np.zeros((rows, length), np.uint8)
        self.ids = np.zeros((rows, length, spec.top), np.int32)
        self.logp = np.zeros((rows, length, spec.top), np.float16)
        self.rows = [Row() for _ in range(rows)]
        device = target.model.device
        self.clock = Clock(torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.long, device=device))
        count = target.model.config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[RowLayer(rows, length, self.clock) for _ in range(count)])
        self.prefixes = [self._prefill(opening) for opening in target.chat.openings]
        for row in range(rows):
            self._start(row)

    def _prefill(self, opening: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of all but the last token of an opening, one pair a layer."""
        if len(opening) < 2:
            return []
        cache = DynamicCache()
        tokens = torch.tensor([opening[:-1]], device=self.target.model.device)
        self.target.model(tokens, use_cache=True, **{self.target.cache_argument: cache})
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _start(self, index: int) -> None:
        """Begin a new chat in row `index`."""
        which = self._pick(self.recipe.opening_shares[: len(self.prefixes)])
        temperature, user_temperature = (
            choices[self._pick([share for _, share in choices])][0]
            for choices in (self.recipe.temperatures, self.recipe.user_temperatures)
        )
        opening = self.target.chat.openings[which]
        for layer, (keys, values) in zip(self.cache.layers, self.prefixes[which], strict=False):
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            layer.keys[index, :, : keys.shape[2]] = keys[0]
            layer.values[index, :, : values.shape[2]] = values[0]
        self.tokens[index, : len(opening)] = opening
        self.roles[index] = NOBODY
        role = USER if self.target.chat.turn_end else ASSISTANT
        self.rows[index] = Row(self.next_number, temperature, user_temperature, len(opening), role)
        self.next_number += 1

    def _pick(self, shares: Sequence[float]) -> int:
        """An index, drawn by weight."""
        weights = np.array(shares)
        return int(self.noise.choice(len(weights), p=weights / weights.sum()))

    @torch.inference_mode()
    def step(self) -> list[Chat]:
        """Write one token in every row; return the chats that ended with it."""
        logits = self._forward()  # [rows, V]
        # In the model's own dtype: at the size of a vocabulary float32 would double the time spent here.
        top, ids = torch.topk(torch.softmax(logits, -1), self.spec.top, -1)  # [rows, K]
        logp, ids = top.float().log().cpu(), ids.cpu()
        drawn = self._draw(logits, logp, ids)
        ended = []
        for index, row in enumerate(self.rows):
            at = row.length - 1
            self.ids[index, at], self.logp[index, at] = ids[index], logp[index]
            self._append(index, row, drawn[index])
            if row.length == self.spec.length or self._over(index, row):
                ended.append(self._take(index))
                self._start(index)
        return ended

    def _forward(self) -> torch.Tensor:
        device = self.target.model.device
        lengths = torch.tensor([row.length for row in self.rows])
        last = torch.from_numpy(self.tokens)[torch.arange(len(lengths)), lengths - 1].long()
        self.clock.positions = (lengths - 1).to(device)
        self.clock.extent = int(lengths.max())
        mask = (torch.arange(self.clock.extent)[None, :] < lengths[:, None]).to(device)  # [rows, extent]
        out = self.target.model(
            last.to(device)[:, None],
            attention_mask=mask[:, None, None, :],
            position_ids=self.clock.positions[:, None],
            use_cache=True,
            **{self.target.cache_argument: self.cache},
        )
        scores: torch.Tensor = out.logits[:, -1]
        return scores

    def _draw(self, logits: torch.Tensor, logp: torch.Tensor, ids: torch.Tensor) -> list[int]:
        """One id a row. At temperature 1 exact; below it among the K most likely, which hold nearly all mass."""
        heat = np.array([row.user_temperature if row.role == USER else row.temperature for row in self.rows])
        scaled = logp / torch.from_numpy(np.where(heat > 0, heat, 1.0)).float()[:, None]
        weights = torch.where(torch.from_numpy(heat == 1.0)[:, None], logp.exp(), torch.softmax(scaled, -1))
        points = torch.from_numpy(self.noise.random(len(self.rows))).float()
        slots = (weights.cumsum(-1) <= points[:, None]).sum(-1)  # == K: the draw fell into the tail
        slots[torch.from_numpy(heat == 0)] = 0
        drawn = ids.gather(1, slots.clamp(max=ids.shape[1] - 1)[:, None])[:, 0]
        for index in (slots == ids.shape[1]).nonzero()[:, 0].tolist():
            drawn[index] = ids[index, 0] if heat[index] != 1.0 else self._tail(logits[index], ids[index])
        return list(drawn.tolist())

    def _tail(self, logits: torch.Tensor, ids: torch.Tensor) -> int:
        """Draw outside the K most likely ids. logits [V], ids [K]."""
        scores = logits.float().cpu().index_fill(0, ids, -torch.inf)
        rest = torch.softmax(scores, -1).numpy().astype(np.float64)
        if not np.isfinite(rest).all() or rest.sum() <= 0:  # K covers the vocabulary: rounding brought us here
            return int(ids[-1])
        return int(self.noise.choice(len(rest), p=rest / rest.sum()))

    def _append(self, index: int, row: Row, token: int) -> None:
        """Put the drawn token, or the next forced one in its place, after the row's text."""
        end = self.target.chat.turn_end
        if not row.forced and row.role == USER and row.turn >= self.recipe.user_tokens:
            row.forced = list(end)
        self.roles[index, row.length - 1] = NOBODY if row.forced else row.role
        if row.forced:
            token = row.forced.pop(0)
            row.role = row.role if row.forced else ASSISTANT
        elif row.role == USER:
            row.turn += 1
            if token == end[0] or token in self.target.chat.stops:
                row.forced = list(end[1:] if token == end[0] else end)
                row.role = row.role if row.forced else ASSISTANT
        self.tokens[index, row.length] = token
        row.length += 1

    def _over(self, index: int, row: Row) -> bool:
        """Did the assistant itself just write a stop?"""
        own = self.roles[index, row.length - 2] == ASSISTANT
        return bool(own) and int(self.tokens[index, row.length - 1]) in self.target.chat.stops

    def _take(self, index: int) -> Chat:
        row = self.rows[index]
        arrays = (array[index, : row.length].copy() for array in (self.tokens, self.roles, self.ids, self.logp))
        return Chat(row.number, row.temperature, *arrays)

    def unfinished(self) -> list[Chat]:
        """What the rows hold now, cut short: dropping it would favour short chats."""
        return [self._take(index) for index, row in enumerate(self.rows) if self.roles[index].any()]


def write_corpus(
    writer: Writer, folder: Path, goal: int, done: int, stop: Callable[[], bool], report: Callable[[int], None]
) -> int:
    """Write shards until the corpus holds `goal` counted tokens or `stop()` says so; return the count.

    `done` tokens are there already. `report` hears the count after each step.
    """
    pending: list[Chat] = []
    held = 0
    while done + held < goal and not stop():
        for chat in writer.step():
            pending.append(chat)
            held += chat.counted
        report(done + held)
        if held >= writer.recipe.shard_tokens:
            write_shard(folder, writer.chapter, pending)
            done, held, pending = done + held, 0, []
    pending += writer.unfinished()
    if pending:
        write_shard(folder, writer.chapter, pending)
    return done + sum(chat.counted for chat in pending)
