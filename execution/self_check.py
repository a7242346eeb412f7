"""A model of a family that our tests don't cover is compared with itself, run the plain way. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from execution.errors import ModelError
from execution.interface import Executor, Extension

TESTED = frozenset(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2"))  # by tests/execution
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of the largest logit


def self_check(executor: Executor, network: Any, dtype: torch.dtype) -> None:
    """ModelError unless ragged, piecewise, rolled-back rows give the logits of a plain forward pass."""
    tokens = [(7 * i + 3) % min(executor.vocab_size, 97) for i in range(9)]
    device = next(network.parameters()).device
    with torch.no_grad():
        plain = network(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0].float()
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
            f"model {executor.model!r}: architecture {network.config.model_type!r} gives other logits in ragged batches"
            f" than alone (by {difference:.1e} of the largest), so it cannot be run here: choose another model"
        )
