"""Training the student on the target's distributions, with a schedule over time or steps and a resumable state."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.corpus import ASSISTANT, NOBODY, Chat, Corpus
from distill.faults import RunFault, UsageFault
from distill.student import Student


@dataclass(frozen=True)
class Course:
    """How to train. One of `minutes` and `steps` ends it; the other is None."""

    minutes: float | None = 60.0
    steps: int | None = None
    learning_rate: float = 1.5e-3
    batch_tokens: int = 2048
    warm_up: float = 0.02  # share of the course
    kl_share: float = 0.15  # share of the course trained on KL alone: TV has no gradient where q is far from p
    kl_weight: float = 0.3  # what KL weighs beside TV afterwards
    user_weight: float = 0.3  # what a position of a user turn weighs beside one of the assistant's
    weight_decay: float = 0.02
    save_seconds: float = 120.0
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """tokens [b, n]; and for the m positions that count, by flat index: weights [m], ids [m, K], logp [m, K]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    logp: torch.Tensor


def collate(chats: list[Chat], user_weight: float) -> Batch:
    """Pad on the right and gather the positions that the target described."""
    width = max(len(chat.tokens) for chat in chats)
    tokens = np.zeros((len(chats), width), np.int64)
    for index, chat in enumerate(chats):
        tokens[index, : len(chat.tokens)] = chat.tokens
    counts = [np.flatnonzero(chat.roles != NOBODY) for chat in chats]
    roles = np.concatenate([chat.roles[at] for chat, at in zip(chats, counts, strict=True)])
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(np.concatenate([index * width + at for index, at in enumerate(counts)])),
        torch.from_numpy(np.where(roles == ASSISTANT, 1.0, user_weight).astype(np.float32)),
        torch.from_numpy(np.concatenate([c.ids[at] for c, at in zip(chats, counts, strict=True)]).astype(np.int64)),
        torch.from_numpy(np.concatenate([c.logp[at] for c, at in zip(chats, counts, strict=True)]).astype(np.float32)),
    )


def epoch_batches(corpus: Corpus, course: Course, epoch: int) -> list[list[tuple[int, int]]]:
    """The epoch's batches of corpus entries: chats of similar length together, order a function of (seed, epoch)."""
    noise = np.random.default_rng((course.seed, epoch))
    entries = [corpus.training[index] for index in noise.permutation(len(corpus.training))]
    batches: list[list[tuple[int, int]]] = []
    for start in range(0, len(entries), 512):
        pool = sorted(entries[start : start + 512], key=corpus.length)
        batch: list[tuple[int, int]] = []
        for entry in pool:
            if batch and (len(batch) + 1) * corpus.length(entry) > course.batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(entry)
        batches.append(batch)
    return [batches[index] for index in noise.permutation(len(batches))]


class LogProbabilities(torch.autograd.Function):
    """log softmax(scores) at chosen columns: scores [m, H], columns [m, K] -> [m, K], float32.

    The plain way (float32 log_softmax, then gather) spends more time on memory than the student's layers take:
    here only q and the gradient are of size m × H, both in the dtype of the scores.
    """

    @staticmethod
    def forward(context: Any, scores: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        q = torch.softmax(scores, -1)
        context.save_for_backward(q, columns)
        return q.gather(1, columns).float().clamp(min=1e-30).log()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        q, columns = context.saved_tensors
        gradient = gradients[0].to(q.dtype)
        out = q * -gradient.sum(-1, keepdim=True)
        return out.scatter_add_(1, columns, gradient), None


def divergences(scores: torch.Tensor, rows: torch.Tensor, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(p‖q) and Σ min(p, q), each [m], over the K ids that are kept of p.

    scores [m, H]: the student's. rows [m, K]: the head's row of each id, -1 where it has none. logp [m, K].
    What lies outside the K ids or outside the head counts as not overlapping, so Σ min(p, q) is a lower bound.
    """
    inside = rows >= 0
    logq: torch.Tensor = LogProbabilities.apply(scores, rows.clamp(min=0))  # type: ignore[no-untyped-call]
    p = logp.exp() * inside
    kl = (p * (logp - logq)).sum(-1)
    overlap = torch.minimum(p, logq.exp() * inside).sum(-1)
    return kl, overlap


class Trainer:
    """Weights, optimizer and clock of one training; `save` and `resume` keep all of it in one file."""

    def __init__(self, student: Student, corpus: Corpus, course: Course, file: Path) -> None:
        self.student, self.corpus, self.course, self.file = student, corpus, course, file
        self.step = self.epoch = self.index = self.tokens = 0
        self.batches = 1  # of this epoch
        self.seconds = 0.0
        self.overlap = 0.0  # running mean of Σ min(p, q) over assistant positions
        # The layers compute in the hardware's fast dtype; what is learnt lives in float32 masters beside them.
        self.masters = {name: weight.detach().clone() for name, weight in student.trained.items()}
        self.embedding = student.causal.get_input_embeddings().weight.data
        self.device = self.embedding.device
        self.optimizer = torch.optim.AdamW(
            self.masters.values(),
            lr=course.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=course.weight_decay,
            fused=self.device.type in ("cpu", "cuda"),
        )

    @property
    def progress(self) -> float:
        """The share of the course that is done."""
        if self.course.steps is not None:
            return min(1.0, self.step / max(1, self.course.steps))
        return min(1.0, self.seconds / max(1e-9, 60 * (self.course.minutes or 0.0)))

    def rate(self) -> float:
        done = self.progress
        return self.course.learning_rate * min(1.0, (done + 1e-3) / self.course.warm_up, (1 - done) + 1e-3)

    @staticmethod
    def saved_head(file: Path) -> torch.Tensor | None:
        """The head's ids of an earlier run. A corpus that has grown since would rank them anew, rows would not fit."""
        if not file.exists():
            return None
        head_ids: torch.Tensor | None = _read(file).get("head_ids")
        return head_ids

    def save(self) -> None:
        """Write the state beside its place and rename it, so that a crash leaves the last whole one."""
        state = {
            "weights": self.masters,
            "head_ids": self.student.head_ids,
            "optimizer": self.optimizer.state_dict(),
            "clock": (self.step, self.epoch, self.index, self.tokens, self.seconds, self.overlap),
        }
        draft = self.file.with_suffix(".tmp")
        try:
            torch.save(state, draft)
            os.replace(draft, self.file)
        except (OSError, RuntimeError) as error:
            raise RunFault(f"cannot write training state {self.file}: {error}") from error

    def resume(self) -> bool:
        """Continue from the file if there is one."""
        if not self.file.exists():
            return False
        try:
            state = _read(self.file)
            saved, own = (torch.empty(0) if ids is None else ids for ids in (state["head_ids"], self.student.head_ids))
            if not torch.equal(saved, own):
                raise ValueError("its head has other ids")
            for name, master in self.masters.items():
                master.copy_(state["weights"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.epoch, self.index, self.tokens, self.seconds, self.overlap = state["clock"]
        except (KeyError, RuntimeError, ValueError) as error:
            raise UsageFault(
                f"{self.file} does not fit this student: {str(error).splitlines()[0]} (delete it to train anew)"
            ) from error
        return True

    def run(self, stop: Callable[[], bool], report: Callable[[Trainer], None]) -> bool:
        """Train until the course is over (True) or `stop()` says so (False); the state is saved either way."""
        self._dress(working_dtype(self.device))
        usual = self.student.causal.config._attn_implementation
        if self.device.type == "cpu":
            self.student.causal.set_attn_implementation("eager")  # the CPU's fused backward is three times slower
        saved = time.monotonic()
        for chats in self._chats():
            if self.progress >= 1 or stop():
                break
            began = time.monotonic()
            self._learn(collate(chats, self.course.user_weight))
            self.seconds += time.monotonic() - began
            report(self)
            if time.monotonic() - saved > self.course.save_seconds:
                self.save()
                saved = time.monotonic()
        self.save()
        self.student.causal.set_attn_implementation(usual)
        self._dress(torch.float32)
        return self.progress >= 1

    def _dress(self, dtype: torch.dtype) -> None:
        """Give the student the masters' weights in `dtype`: the fast one to train in, float32 to be used."""
        causal = self.student.causal
        for name, weight in causal.named_parameters():
            weight.data = self.masters[name].to(dtype, copy=True) if name in self.masters else weight.data.to(dtype)
        causal.get_input_embeddings().weight.data = self.embedding.to(dtype)

    def _chats(self) -> Iterator[list[Chat]]:
        while True:
            batches = epoch_batches(self.corpus, self.course, self.epoch)
            self.batches = len(batches)
            while self.index < len(batches):
                entries = batches[self.index]
                self.index += 1
                yield [self.corpus.chat(entry) for entry in entries]
            self.epoch, self.index = self.epoch + 1, 0

    def _learn(self, batch: Batch) -> None:
        """One step of AdamW on one batch."""
        device, course = self.device, self.course
        scores = self.student.logits(batch.tokens.to(device), batch.positions.to(device))  # [m, H]
        weights = batch.weights.to(device)
        kl, overlap = divergences(scores, self.student.rows[batch.ids].to(device), batch.logp.to(device))
        early = self.progress < course.kl_share
        loss = ((kl if early else course.kl_weight * kl + 1 - overlap) * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        working = self.student.trained
        for name, master in self.masters.items():
            master.grad, working[name].grad = working[name].grad.float(), None  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(self.masters.values(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()
        for name, master in self.masters.items():
            working[name].data.copy_(master)
        self._count(batch, overlap.detach(), weights)

    def _count(self, batch: Batch, overlap: torch.Tensor, weights: torch.Tensor) -> None:
        own = weights == 1.0
        now = float(overlap[own].mean()) if bool(own.any()) else self.overlap
        self.overlap = now if self.step == 0 else 0.98 * self.overlap + 0.02 * now
        self.step += 1
        self.tokens += len(batch.positions)


def _read(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise RunFault(f"cannot read training state {file}: {str(error).splitlines()[0]} (delete it)") from error
    return state


def working_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it natively (five times float32's speed), else float32."""
    native = device.type == "cuda" or (device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if native else torch.float32
