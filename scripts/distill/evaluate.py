"""What a student is worth: α on held-out chats at temperature 1 and 0, and the time of one draft step."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from distill.corpus import ASSISTANT, Chat, Corpus
from distill.student import Student


@dataclass(frozen=True)
class Score:
    """α by its two definitions, over the assistant's positions of held-out chats.

    `alpha_1`: mean Σ min(p, q) on text sampled at temperature 1. `alpha_1_wire`: the same with q cut to its 64
    likeliest ids and normalised, which is what goes over the wire. `alpha_0`: share of the positions of greedy text
    where argmax q = argmax p. `error_…`: the standard error of each, by chat.
    """

    alpha_1: float
    alpha_1_wire: float
    alpha_0: float
    error_1: float
    error_0: float
    positions_1: int
    positions_0: int

    def rounded(self) -> dict[str, float | None]:
        """For JSON, which has no nan."""
        return {name: round(value, 4) if math.isfinite(value) else None for name, value in asdict(self).items()}

    def sentence(self) -> str:
        return (
            f"held-out α {self.alpha_1:.3f} ± {self.error_1:.3f} at temperature 1 "
            f"({self.alpha_1_wire:.3f} with q cut to its likeliest), {self.alpha_0:.3f} ± {self.error_0:.3f} at 0"
        )


@torch.inference_mode()
def evaluate(target: Any, student: Student, corpus: Corpus, chats: int = 64, wire: int = 64) -> Score:
    """Score `student` against `target`, both in the dtype that they come in, on `chats` held-out chats a temperature.

    A temperature of which the corpus holds no chats scores nan.
    """
    sampled = [_overlaps(target, student, chat, wire) for chat in corpus.held_out_chats(1.0, chats)]
    greedy = [_agreements(target, student, chat) for chat in corpus.held_out_chats(0.0, chats)]
    full, cut = [pair[0] for pair in sampled], [pair[1] for pair in sampled]
    return Score(
        _mean(full), _mean(cut), _mean(greedy), _error(full), _error(greedy),
        sum(map(len, full)), sum(map(len, greedy)),
    )  # fmt: skip


def _scores(target: Any, student: Student, chat: Chat) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and student logits [m, V] at the m positions where the assistant wrote what follows."""
    at = torch.from_numpy((chat.roles == ASSISTANT).nonzero()[0])
    tokens = torch.from_numpy(chat.tokens.astype(np.int64))[None].to(target.device)
    theirs = target(input_ids=tokens, use_cache=False).logits[0, at].float()
    device = student.causal.device
    ours = student.spread(student.logits(tokens.to(device), at.to(device)).float())
    return theirs.cpu(), ours.cpu()


def _overlaps(target: Any, student: Student, chat: Chat, wire: int) -> tuple[torch.Tensor, torch.Tensor]:
    theirs, ours = _scores(target, student, chat)
    p, q = torch.softmax(theirs, -1), torch.softmax(ours, -1)
    top, ids = torch.topk(q, min(wire, q.shape[-1]), -1)
    cut = torch.zeros_like(q).scatter(1, ids, top / top.sum(-1, keepdim=True))
    return torch.minimum(p, q).sum(-1), torch.minimum(p, cut).sum(-1)


def _agreements(target: Any, student: Student, chat: Chat) -> torch.Tensor:
    theirs, ours = _scores(target, student, chat)
    return (theirs.argmax(-1) == ours.argmax(-1)).float()


def _mean(values: list[torch.Tensor]) -> float:
    return float(torch.cat(values).mean()) if sum(map(len, values)) else float("nan")


def _error(values: list[torch.Tensor]) -> float:
    """Standard error of the pooled mean when chats, not positions, are independent."""
    kept = [value for value in values if len(value)]
    if len(kept) < 2:
        return float("nan")
    lengths = torch.tensor([len(value) for value in kept]).float()
    drifts = torch.stack([(value - _mean(kept)).sum() for value in kept])
    return float(drifts.square().sum().sqrt() / lengths.sum())


@torch.inference_mode()
def step_milliseconds(student: Student, context: int = 128, steps: int = 30) -> float:
    """Median time of one draft step of one sequence, in ms, on one thread after `context` tokens."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        out = student.causal(input_ids=torch.zeros(1, context, dtype=torch.long), use_cache=True)
        name = "cache" if "cache" in out else "past_key_values"
        taken = []
        for _ in range(steps):
            began = time.perf_counter()
            scores = student.causal(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=True, **{name: out[name]})
            scores.logits[0, -1].softmax(-1).argmax()
            taken.append(1000 * (time.perf_counter() - began))
        return sorted(taken)[len(taken) // 2]
    finally:
        torch.set_num_threads(threads)
