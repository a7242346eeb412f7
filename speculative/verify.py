"""Verification of one block of drafted tokens, with a torch.Generator: the rule in its plainest form.

Imports torch and this package's acceptance and checks. The workers use batch_verify instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculative.acceptance import normalised_residual
from speculative.checks import check_distribution, check_tokens


def speculative_verify(
    target_probs: Tensor, draft_probs: Tensor, draft_tokens: Tensor, *, generator: torch.Generator | None = None
) -> tuple[Tensor, int]:
    """Keeps a prefix of the drafted tokens and adds one: a correction, or the bonus when all were kept.

    target_probs [γ + 1, V], draft_probs [γ, V'], draft_tokens int [γ] -> (emitted int64 [n_accepted + 1], n_accepted).
    The emitted tokens have the target's law whatever the draft (Leviathan et al. 2023, theorem 1), provided that each
    drafted token was drawn from its row of draft_probs. A draft vocabulary narrower than the target's is padded with
    zeros. Draws one uniform number for each token tested, then one multinomial. ValueError for shapes that do not fit,
    rows that are no distributions, and ids out of range.
    """
    check_distribution(target_probs, "target_probs", dims=2)
    gamma, vocab = target_probs.shape[0] - 1, target_probs.shape[1]
    if draft_probs.dim() != 2 or draft_probs.shape[0] != gamma or draft_tokens.shape != (gamma,):
        raise ValueError(
            f"target_probs {tuple(target_probs.shape)}, draft_probs {tuple(draft_probs.shape)} and draft_tokens "
            f"{tuple(draft_tokens.shape)} do not fit; expected [γ + 1, V], [γ, V] and [γ]: the target scores one row "
            "more than was drafted"
        )
    if gamma:
        check_tokens(draft_tokens, vocab, "draft_tokens")
        check_distribution(draft_probs, "draft_probs", dims=2)
        draft_probs = pad_distribution(draft_probs, vocab)

    drafted: list[int] = draft_tokens.tolist()
    for k, token in enumerate(drafted):
        p, q = target_probs[k], draft_probs[k]
        u = float(torch.rand(1, generator=generator, device=p.device))
        # Strict: u may be 0, and a token that the target excludes must not pass. Nor one that q calls impossible.
        if u * float(q[token]) < float(p[token]) and q[token] > 0:
            continue
        return _emit(drafted[:k], normalised_residual(p, q), generator), k
    return _emit(drafted, target_probs[gamma], generator), gamma


def _emit(kept: list[int], law: Tensor, generator: torch.Generator | None) -> Tensor:
    following = torch.multinomial(law, 1, generator=generator)
    return torch.cat([torch.tensor(kept, dtype=torch.int64, device=law.device), following])


def pad_distribution(probs: Tensor, vocab: int) -> Tensor:
    """Widens probabilities [..., V'] to [..., vocab] with zeros: one tokenizer, two padded vocabulary sizes.

    A wider draft is cut when it has no mass at ids the target lacks; else ValueError names the first such id.
    """
    width = probs.shape[-1]
    if width <= vocab:
        return torch.nn.functional.pad(probs, (0, vocab - width))
    extra = (probs[..., vocab:] > 0).reshape(-1, width - vocab).any(dim=0).nonzero()
    if len(extra):
        raise ValueError(
            f"the draft gives probability to id {vocab + int(extra[0])}; expected none at or above {vocab}, the "
            "target's vocabulary: mask those ids before sampling"
        )
    return probs[..., :vocab]
