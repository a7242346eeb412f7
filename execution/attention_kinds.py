"""Which architectures a RowCache is right for, and what their layers may see. Looks at a model, not at its name.

Imports nothing heavy.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from execution.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names of layer types
_CHANGING = ("dynamic", "longrope")  # rotary embeddings whose base changes with length


@dataclass(frozen=True)
class AttentionKind:
    """Layers of one type: each token sees all before it, or the last `window` including itself."""

    name: str
    window: int | None = None


def attention_kinds(config: Any) -> list[AttentionKind]:
    """The kinds of layers that a model has."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    names = getattr(config, "layer_types", None) or [SLIDING if window else FULL]
    return [AttentionKind(name, window if name == SLIDING else None) for name in sorted(set(names))]


def context_length(config: Any) -> int:
    """The most tokens a row may hold. Models whose rotary base changes with length are kept below the change:
    there the angles of one row would depend on its neighbours in the batch."""
    longest = next(
        (
            int(value)
            for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
            if (value := getattr(config, name, None))
        ),
        2048,
    )
    for part in _rotary(config):
        if part.get("rope_type") in _CHANGING:
            original = part.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, int(original or longest))
    return longest


def changing_rotary(config: Any) -> str:
    """The type of rotary embeddings whose base changes with length, or nothing: they compare positions in each pass."""
    kinds = [str(part.get("rope_type")) for part in _rotary(config)]
    return next((kind for kind in kinds if kind in _CHANGING), "")


def _rotary(config: Any) -> list[dict[str, Any]]:
    """The settings of rotary embeddings, those by type of layer too."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def refuse_unsupported(network: Any, reference: str) -> None:
    """ModelError for a model whose rows cannot be padded, batched and rolled back by masks alone."""
    config = network.config.get_text_config(decoder=True)
    names = inspect.signature(network.forward).parameters
    other = sorted({kind.name for kind in attention_kinds(config)} - {FULL, SLIDING})
    problems = {
        "it is an encoder-decoder": getattr(network.config, "is_encoder_decoder", False),
        "it keeps a recurrent state that cannot be rolled back": getattr(network, "_is_stateful", False),
        f"it has layers of type {', '.join(other)}": bool(other),
        "its attention biases come from the cache's length (ALiBi)": bool(getattr(config, "alibi", False)),
        "it takes no positions": "position_ids" not in names,
        "it takes no key-value cache": not {"cache", "past_key_values"} & set(names),
        "it has no language-model head": network.get_output_embeddings() is None,
    }
    for why, wrong in problems.items():
        if wrong:
            kind = network.config.model_type
            raise ModelError(
                f"model {reference!r}: architecture {kind!r} is not supported: {why}; choose a decoder-only attention"
                " model such as Llama, Qwen, Mistral, Gemma or GPT-2"
            )
