"""The whole loop in one process: draft, score, verify, append. For teaching, and as a yardstick of the runtime.

Imports torch and this package's verify.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor

from speculative.checks import check_distribution, check_tokens
from speculative.verify import pad_distribution, speculative_verify

Step = Callable[[Tensor], Tensor]  # token sequence [n] -> next-token distribution [V]


class Round(TypedDict):
    """One round of the trace: γ drafted tokens, how many were kept, and the tokens that came of it."""

    proposed: list[int]
    n_accepted: int
    emitted: list[int]


def speculative_decode(
    prompt: Tensor,
    target_step: Step,
    draft_step: Step,
    *,
    gamma: int = 4,
    max_new_tokens: int = 32,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, list[Round]]:
    """Decodes max_new_tokens tokens after `prompt` [n] -> (new tokens int64 [max_new_tokens], one Round a target pass).

    The tokens have target_step's law whatever draft_step is. The last round is drafted and recorded whole, and cut in
    the returned tokens. `target_step` is asked for the distribution after each of the γ + 1 prefixes of a block, which
    a real target computes in one pass. ValueError for γ < 0, max_new_tokens < 0, a prompt that is no 1-D tensor of
    token ids, or a step that returns no distribution.
    """
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}; expected an integer >= 0: use 0 for plain decoding")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected an integer >= 0")
    check_tokens(prompt, 1 << 62, "prompt")
    start = prompt.shape[0]
    tokens = prompt.to(torch.int64)
    trace: list[Round] = []
    while tokens.shape[0] - start < max_new_tokens:
        proposed, draft_probs = _draft(tokens, draft_step, gamma, generator)
        sequence = torch.cat([tokens, proposed])
        prefixes = range(tokens.shape[0], sequence.shape[0] + 1)
        target_probs = torch.stack([target_step(sequence[:length]) for length in prefixes])  # [γ + 1, V]
        emitted, n_accepted = speculative_verify(
            target_probs, _rows(draft_probs, target_probs), proposed, generator=generator
        )
        tokens = torch.cat([tokens, emitted.to(tokens.device)])
        trace.append(Round(proposed=proposed.tolist(), n_accepted=n_accepted, emitted=emitted.tolist()))
    return tokens[start : start + max_new_tokens], trace


def _draft(
    tokens: Tensor, draft_step: Step, gamma: int, generator: torch.Generator | None
) -> tuple[Tensor, list[Tensor]]:
    """γ tokens drawn one after another from the draft, and the distribution each was drawn from."""
    start, laws = tokens.shape[0], []
    for _ in range(gamma):
        law = draft_step(tokens)
        check_distribution(law, "the draft step's answer")
        laws.append(law)
        tokens = torch.cat([tokens, torch.multinomial(law, 1, generator=generator).to(tokens.device)])
    return tokens[start:], laws


def _rows(draft_probs: list[Tensor], target_probs: Tensor) -> Tensor:
    vocab = target_probs.shape[-1]
    if not draft_probs:
        return target_probs.new_empty((0, vocab))
    return pad_distribution(torch.stack(draft_probs), vocab)
