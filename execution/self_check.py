"""A model of a family that our tests don't cover is compared with itself, run the plain way. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from execution.errors import ModelError
from execution.interface import Executor, Extension

TESTED = frozenset(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2"))  # by tests/execution
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of the largest logit


def plain_logits(network: Any, vocab_size: int) -> torch.Tensor:
    """float32 [9, vocab_size]: what the network says of `self_check`'s tokens in one plain forward pass."""
    device = next(network.parameters()).device
    with torch.no_grad():
        ids = torch.tensor([_tokens(vocab_size)], device=device)
        return network(input_ids=ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def self_check(executor: Executor, plain: torch.Tensor, kind: str, dtype: torch.dtype) -> None:
    """ModelError unless ragged, piecewise, rolled-back rows give the `plain` logits. `kind` is the architecture."""
    tokens = _tokens(executor.vocab_size)
    first, second = executor.open(), executor.open()
    wrong = [tokens[-1]] * 3
    executor.extend([Extension(first, tokens[:2] + wrong, 1), Extension(second, tokens[:4], 0)])
    executor.truncate(first, 2)
    ragged = executor.extend([Extension(first, tokens[2:], 7), Extension(second, tokens[4:6], 2)])
    executor.close(first)
    executor.close(second)
    ours, expected = torch.cat(ragged), torch.cat([plain[2:9], plain[4:6]])
    difference = float((ours - expected).abs().max() / expected.abs().max())
    if not difference <= _TOLERANCE[dtype]:
        raise ModelError(
            f"model {executor.model!r}: architecture {kind!r} gives other logits in ragged batches"
            f" than alone (by {difference:.1e} of the largest), so it cannot be run here: choose another model"
        )


def _tokens(vocab_size: int) -> list[int]:
    return [(7 * i + 3) % min(vocab_size, 97) for i in range(9)]
