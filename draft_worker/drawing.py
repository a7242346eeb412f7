"""Drawing the next token of every row that grows, whoever it is for and however its tokens are drawn.

Rule E4: encode, decode, sample, send: a token is always drawn from the very q̃ that travels with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_worker.drafting import Drafting, mode_of
from draft_worker.noise_cache import DraftDraws, PublicNoise
from draft_worker.outcomes import guesses, shares
from draft_worker.quantize import Row, draw_counts_rows, draw_dense_rows
from speculative import SamplingOptions, draw_greedy, log_distribution
from worker.sampling import sampling_options
from worker.table import Entry

PLAIN = SamplingOptions()


class Drawer:
    """Turns a pass's logits into scores and tokens; keeps the noise that comes again and again."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.noise = PublicNoise(device)
        self._draws = DraftDraws()

    def warm_up(self, vocab_size: int) -> None:
        """Run everything once, on made-up rows: a library's first calls take many times what later ones do."""
        log_q = log_distribution(torch.zeros(2, vocab_size, device=self._device), [PLAIN] * 2)
        draw_counts_rows(log_q, self._draws.integers([0, 0], [0, 1]))
        self.noise.race(log_q, [0, 0], [0, 1])
        for mode in ("coupled", "counts"):
            guesses(self.noise, log_q.unbind(), 0, mode, 0, 0, [0], shares(2, 0, 0.5, mode), ())

    def draw(self, growing: Sequence[Drafting], scores: Tensor) -> None:
        """Append each row's next token; scores [N, V] of their last logits, see `scores_of`."""
        whole = scores.amax(dim=-1).isfinite().tolist()  # amax carries NaN
        for one, is_whole, score in zip(growing, whole, scores.unbind(), strict=True):
            one.broken = not is_whole
            if is_whole:
                one.scores.append(score)
        for mode in ("greedy", "coupled", "counts", "dense"):
            chosen = [i for i, one in enumerate(growing) if not one.broken and mode_of(one.entry) == mode]
            if not chosen:
                continue
            group = [growing[i] for i in chosen]
            q = scores if len(chosen) == len(scores) else scores[chosen]
            seeds, positions = [one.entry.opened.seed for one in group], [one.position for one in group]
            rows: list[Row] = [()] * len(group)
            if mode == "greedy":
                tokens = draw_greedy(q).tolist()
            elif mode == "coupled":
                tokens = self.noise.race(q, seeds, positions)
            elif mode == "counts":
                tokens, rows = draw_counts_rows(q, self._draws.integers(seeds, positions))
            else:
                tokens, rows = draw_dense_rows(q, seeds, positions)
            for one, token, row in zip(group, tokens, rows, strict=True):
                one.take(token, row)


def scores_of(logits: Sequence[Tensor], owners: Sequence[Entry]) -> list[Tensor]:
    """log q after each owner's sampling options, [n_i, V]; ids at and above the target's vocabulary are excluded.

    Of a greedy request the logits as they are: they have log q's argmax, and tell who comes after it.
    """
    scores = [_limited(part, entry.opened.vocab_size) for part, entry in zip(logits, owners, strict=True)]
    sampled = [place for place, entry in enumerate(owners) if mode_of(entry) != "greedy"]
    if sampled:
        sizes = [len(scores[place]) for place in sampled]
        options = [
            sampling_options(owners[place].opened.sampling)
            for place, size in zip(sampled, sizes, strict=True)
            for _ in range(size)
        ]
        log_q = torch.cat([scores[place] for place in sampled])
        for place, part in zip(sampled, torch.split(log_distribution(log_q, options), sizes), strict=True):
            scores[place] = part
    return scores


def _limited(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [n, V] with the ids at and above `vocab_size` (the target's) excluded."""
    if logits.shape[1] > vocab_size:
        logits = logits.clone()
        logits[:, vocab_size:] = -torch.inf
    return logits
