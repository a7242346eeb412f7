"""Sampling options, applied to logits by the one function that both workers call: p and q get the same treatment.

Imports torch and nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Nucleus sampling looks at this many of the likeliest tokens before it sorts a whole vocabulary.
_HEAD = 1024


@dataclass(frozen=True)
class SamplingOptions:
    """How logits become a distribution: temperature, then top-k, top-p and min-p, renormalised between.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Raises ValueError for anything else out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature is {self.temperature}; expected a finite number >= 0: use 0 for greedy decoding, 1 for the "
            "model's own distribution",
        )
        _require(
            isinstance(self.top_k, int) and not isinstance(self.top_k, bool) and self.top_k >= 0,
            f"top_k is {self.top_k!r}; expected an integer >= 0: use 0 to switch it off",
        )
        _require(
            0 < self.top_p <= 1, f"top_p is {self.top_p}; expected 0 < top_p <= 1: use 1 to switch it off"
        )  # NaN fails both comparisons
        _require(0 <= self.min_p < 1, f"min_p is {self.min_p}; expected 0 <= min_p < 1: use 0 to switch it off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """True when the distribution is the softmax of the logits as they are."""
        return self.temperature == 1 and self.top_k == 0 and self.top_p == 1 and self.min_p == 0


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def log_distribution(logits: Tensor, options: Sequence[SamplingOptions]) -> Tensor:
    """Log-probabilities of the next token under each row's options -> float32 [N, V], -inf where excluded.

    logits [N, V] of any float dtype, one SamplingOptions a row. A greedy row is 0 at its argmax (the lowest id of a
    tie) and -inf elsewhere. A row with NaN, or with no finite maximum, comes out as NaN and touches no other row:
    each row's result is what it would be alone. Raises ValueError for shapes that do not fit.
    """
    if logits.dim() != 2 or logits.shape[0] != len(options) or logits.shape[1] == 0:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} for {len(options)} sampling options; expected [N, V] with one "
            "option a row: pass the same number of both"
        )
    groups: dict[SamplingOptions, list[int]] = {}
    for row, option in enumerate(options):
        groups.setdefault(option, []).append(row)
    if len(groups) == 1:
        return _one_law(logits, options[0])
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for option, rows in groups.items():
        where = torch.tensor(rows, device=logits.device)
        out[where] = _one_law(logits[where], option)
    return out


def _one_law(logits: Tensor, option: SamplingOptions) -> Tensor:
    """log_distribution where all rows share their options: [N, V] -> float32 [N, V]."""
    if option.plain:
        return torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    scores = logits.to(torch.float32)
    peak = scores.amax(dim=-1, keepdim=True)  # carries NaN
    if option.greedy:
        return _greedy(scores, peak)
    # The maximum goes first: a temperature of 1e-6 must not overflow the likeliest token.
    scores = (scores - peak).div_(option.temperature)
    if option.top_k or option.top_p < 1:
        width = min(option.top_k or _HEAD, scores.shape[1])
        out = _keep_likeliest(scores, option, width)
    else:
        kept = scores if option.min_p == 0 else scores.masked_fill(scores < math.log(option.min_p), -math.inf)
        out = torch.log_softmax(kept, dim=-1)
    return out.masked_fill_(~peak.isfinite(), math.nan)


def _greedy(scores: Tensor, peak: Tensor) -> Tensor:
    out = torch.full_like(scores, -math.inf)
    out.scatter_(1, scores.argmax(dim=-1, keepdim=True), 0.0)
    return out.masked_fill_(~peak.isfinite(), math.nan)


def _keep_likeliest(scores: Tensor, option: SamplingOptions, width: int) -> Tensor:
    """Top-k, top-p and min-p together, read off the `width` largest scores of each row in order -> log-probabilities.

    Each filter keeps a number of the likeliest tokens, so their conjunction does too; equals at its end stay by lowest
    id. scores [N, V] have maximum 0.
    """
    ordered = torch.topk(scores, width, dim=-1).values  # [N, width]
    before = _mass_before(ordered, ordered if option.top_k else scores)
    kept = (before < option.top_p) if option.top_p < 1 else torch.ones_like(before, dtype=torch.bool)
    open_ended = kept[:, -1] if not option.top_k else torch.zeros_like(kept[:, -1])
    if option.min_p > 0:
        # A ratio to the likeliest token, so renormalising before it changes nothing.
        kept &= ordered >= math.log(option.min_p)
    count = kept.sum(dim=-1, keepdim=True)
    threshold = ordered.gather(1, count.clamp(min=1) - 1)
    total = ordered.masked_fill(~kept, -math.inf).logsumexp(dim=-1, keepdim=True)
    out = (scores - total).masked_fill_(~_largest(scores, count, threshold), -math.inf)
    flat = open_ended.nonzero().squeeze(1)
    if width < scores.shape[1] and len(flat):  # the nucleus may go on past the head
        out[flat] = _keep_likeliest(scores[flat], option, min(8 * width, scores.shape[1]))
    return out


def _mass_before(ordered: Tensor, law: Tensor) -> Tensor:
    """Probability, among `law` [N, any], of all that stands before each entry of descending scores -> [N, width]."""
    total = torch.logsumexp(law, dim=-1, keepdim=True)
    return torch.nn.functional.pad((ordered[:, :-1] - total).exp_().cumsum(dim=-1), (1, 0))


def _largest(scores: Tensor, count: Tensor, threshold: Tensor) -> Tensor:
    """Marks exactly the `count` [N, 1] largest of each row, of which `threshold` [N, 1] is the least -> bool [N, V]."""
    keep = scores >= threshold
    if bool((keep.sum(dim=-1, keepdim=True) > count).any()):  # equals at the threshold: the lowest ids stay
        tied = scores == threshold
        room = count - (scores > threshold).sum(dim=-1, keepdim=True)
        keep &= ~tied | (tied.cumsum(dim=-1) <= room)
    return keep
