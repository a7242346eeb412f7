"""Checks of arguments. Every message says what was wrong, what was expected, and what to do.

Imports torch and nothing of ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A half-precision softmax over a large vocabulary sums to 1 within this.
_SUM_TOLERANCE = 1e-3


def check_distribution(probs: Tensor, name: str, dims: int = 1) -> None:
    """ValueError unless `probs` is a float tensor of `dims` dimensions whose last one holds probabilities."""
    shape = "[V]" if dims == 1 else "[rows, V]"
    if probs.dim() != dims or probs.shape[-1] == 0 or not probs.is_floating_point():
        raise ValueError(f"{name} is {probs.dtype} {tuple(probs.shape)}; expected float probabilities {shape}")
    if not probs.numel():
        return
    if bool(probs.isnan().any()):
        raise ValueError(f"{name} has NaN; expected probabilities: look for overflow in the logits it came from")
    if bool((probs < 0).any()):
        raise ValueError(f"{name} has {float(probs.min())}, below 0; expected probabilities: pass softmax(logits)")
    sums = probs.to(torch.float32).sum(dim=-1)
    if bool(((sums - 1).abs() > _SUM_TOLERANCE).any()):
        worst = float(sums.flatten()[(sums.flatten() - 1).abs().argmax()])
        raise ValueError(f"{name} sums to {worst:.6g}; expected 1: normalise it, or pass softmax(logits)")


def check_same_shape(p: Tensor, q: Tensor) -> None:
    if p.shape != q.shape:
        raise ValueError(
            f"p has shape {tuple(p.shape)} and q {tuple(q.shape)}; expected the same vocabulary: widen the narrower "
            "with pad_distribution if the tokenizers are equal"
        )


def check_tokens(tokens: Tensor, vocab: int, name: str) -> None:
    """ValueError unless `tokens` is a 1-D integer tensor of ids below `vocab`."""
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"{name} is {tokens.dtype} {tuple(tokens.shape)}; expected a 1-D tensor of token ids")
    wild = (tokens < 0) | (tokens >= vocab)
    if bool(wild.any()):
        raise ValueError(
            f"{name} holds id {int(tokens[wild][0])}; expected 0 <= id < {vocab}: draft and target must share their "
            "tokenizer"
        )
