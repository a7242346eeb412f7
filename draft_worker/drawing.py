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
        groups: dict[str, list[int]] = {}
        for place, (one, is_whole, score) in enumerate(zip(growing, whole, scores.unbind(), strict=True)):
            one.broken = not is_whole
            if is_whole:
                one.scores.append(score)
                groups.setdefault(mode_of(one.entry), []).append(place)
        for mode, chosen in groups.items():
            group = [growing[i] for i in chosen]
            seeds, positions = [one.entry.opened.seed for one in group], [one.position for one in group]
            tokens, rows = self._drawn(mode, scores if len(chosen) == len(scores) else scores[chosen], seeds, positions)
            for one, token, row in zip(group, tokens, rows, strict=True):
                one.take(token, row)

    def _drawn(
        self, mode: str, scores: Tensor, seeds: Sequence[int], positions: Sequence[int]
    ) -> tuple[list[int], Sequence[Row]]:
        """A token a row, and the q̃ that it was drawn from where one travels."""
        if mode == "counts":
            return draw_counts_rows(scores, self._draws.integers(seeds, positions))
        if mode == "dense":
            return draw_dense_rows(scores, seeds, positions)
        tokens = draw_greedy(scores).tolist() if mode == "greedy" else self.noise.race(scores, seeds, positions)
        return tokens, [()] * len(tokens)


def scores_of(logits: Sequence[Tensor], owners: Sequence[Entry]) -> list[Tensor]:
    """log q after each owner's sampling options, up to a constant a row: [n_i, V]; ids at and above the target's
    vocabulary are excluded.

    Where q is the softmax of the logits, or only its argmax counts, these are the logits as they are: a race, a guess
    and codec counts, which normalises what it keeps, need no more.
    """
    scores = [_limited(part, entry.opened.vocab_size) for part, entry in zip(logits, owners, strict=True)]
    as_they_are = {entry.key: _as_they_are(entry) for entry in {entry.key: entry for entry in owners}.values()}
    changed = [place for place, entry in enumerate(owners) if not as_they_are[entry.key]]
    if changed:
        sizes = [len(scores[place]) for place in changed]
        options = [
            sampling_options(owners[place].opened.sampling)
            for place, size in zip(changed, sizes, strict=True)
            for _ in range(size)
        ]
        log_q = torch.cat([scores[place] for place in changed])
        for place, part in zip(changed, torch.split(log_distribution(log_q, options), sizes), strict=True):
            scores[place] = part
    return scores


def _as_they_are(entry: Entry) -> bool:
    mode = mode_of(entry)
    return mode == "greedy" or (mode != "dense" and sampling_options(entry.opened.sampling).plain)


def _limited(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [n, V] with the ids at and above `vocab_size` (the target's) excluded."""
    if logits.shape[1] > vocab_size:
        logits = logits.clone()
        logits[:, vocab_size:] = -torch.inf
    return logits
