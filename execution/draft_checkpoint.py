"""Checkpoints of `scripts/distill_draft.py`: a model folder whose head may be reduced and embedding borrowed.

config.json has a key "specdec": {"head": "full" | "reduced", "embedding": "own" | "shared", "embedding_source":
reference, ...}; model.safetensors then holds lm_head.weight [H, hidden] and head_ids [H], and no embedding.
Imports torch and transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from execution.errors import ModelError
from execution.hub_models import hush, readable_errors

EMBEDDING = "model.embed_tokens.weight"


def draft_settings(folder: Path) -> dict[str, Any] | None:
    """The "specdec" part of a folder's config.json; None for an ordinary model."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("specdec")
    except (OSError, ValueError, AttributeError):
        return None
    return settings if isinstance(settings, dict) else None


def load_draft(
    folder: Path, reference: str, dtype: torch.dtype, device: torch.device, shared_embedding: Callable[[], Tensor]
) -> tuple[Any, Tensor | None]:
    """(network, head_ids): the network's head gives H logits, those of the ids in head_ids (int64 [H], or None)."""
    settings = draft_settings(folder) or {}
    with readable_errors(reference):
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        hush()
        config = AutoConfig.from_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        head_ids = tensors.pop("head_ids", None)
        if settings.get("embedding") == "shared":
            tensors[EMBEDDING] = shared_embedding()
        config.tie_word_embeddings = "lm_head.weight" not in tensors
        config.dtype = dtype
        with no_init_weights():
            network = AutoModelForCausalLM.from_config(config)
    if settings.get("head") == "reduced":
        head_ids = _checked_ids(head_ids, tensors, config.vocab_size, reference)
        network.set_output_embeddings(nn.Linear(config.hidden_size, len(head_ids), bias=False, device="meta"))
    else:
        head_ids = None
    _fill(network, {name: tensor.to(dtype) for name, tensor in tensors.items()}, reference)
    return network.to(device), head_ids


def _checked_ids(head_ids: Tensor | None, tensors: dict[str, Tensor], vocab_size: int, reference: str) -> Tensor:
    rows = len(tensors.get("lm_head.weight", ()))
    if head_ids is None or head_ids.ndim != 1 or len(head_ids) != rows or not rows:
        raise _broken(reference, "head_ids and lm_head.weight have not the same number of rows")
    head_ids = head_ids.long()
    if int(head_ids[0]) < 0 or int(head_ids[-1]) >= vocab_size or not bool((head_ids.diff() > 0).all()):
        raise _broken(reference, f"head_ids do not ascend within 0..{vocab_size - 1}")
    return head_ids


def _fill(network: Any, tensors: dict[str, Tensor], reference: str) -> None:
    try:
        missing, unexpected = network.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise _broken(reference, str(error).replace("\n", " ")[:300]) from error
    network.tie_weights()
    tied = {"lm_head.weight"} if network.config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise _broken(reference, f"weights missing: {sorted(set(missing) - tied)[:3]}, unknown: {unexpected[:3]}")


def _broken(reference: str, why: str) -> ModelError:
    return ModelError(f"model {reference!r} is not a whole draft checkpoint ({why}): write it again")
