"""The target: the model that is imitated, its tokenizer, and how its chats begin.

Everything model-specific is read from the chat template, so that the rest of the tool knows only token ids.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.faults import UsageFault
from execution.errors import ModelError
from execution.gguf_models import converted_vocabulary
from execution.hub_models import load_network, readable_errors
from execution.loading import model_source

_SENTINEL = "SPECDECCONTENT"


@dataclass(frozen=True)
class ChatShape:
    """How a chat of the target looks, as token ids.

    `openings` are the texts up to the user's first word: the template's own rendering (which may hold a default
    system message) and the bare start of a user turn. `turn_end` is what stands between the user's last word and
    the assistant's first one. A model without a chat template has one opening and no `turn_end`: plain text.
    """

    openings: tuple[tuple[int, ...], ...]
    turn_end: tuple[int, ...]
    stops: frozenset[int]


@dataclass(frozen=True)
class Target:
    """A loaded target. `reference` is what the user wrote."""

    reference: str
    model: Any
    tokenizer: Any
    chat: ChatShape

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def cache_argument(self) -> str:
        """What the model's forward calls its cache: newer transformers `cache`, older ones `past_key_values`."""
        names = inspect.signature(type(self.model).forward).parameters
        return "cache" if "cache" in names else "past_key_values"


def load_target(reference: str, dtype: torch.dtype, device: torch.device) -> Target:
    """Load what the runtime can load: the default target by name, a Hugging Face id, a folder, or a GGUF file.

    Raises: UsageFault where `reference` names no causal language model whose layers are all attention.
    """
    try:
        source = model_source(reference)
        model = load_network(reference, source, dtype, device).eval().requires_grad_(False)
        tokenizer = _tokenizer(reference, source, model.config.get_text_config())
    except ModelError as error:
        raise UsageFault(str(error)) from error
    return Target(reference, model, tokenizer, chat_shape(tokenizer, model.generation_config))


def _tokenizer(reference: str, source: Path | str, config: Any) -> Any:
    """The tokenizer of a folder or hub id; of a converted GGUF file, whose folder names no tokenizer class, by hand."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (isinstance(source, Path) and (source / "vocabulary.json").is_file()):
        with readable_errors(reference):
            return AutoTokenizer.from_pretrained(source)
    vocabulary = converted_vocabulary(source)
    backend = Tokenizer.from_buffer(vocabulary.tokenizer_json)
    start = getattr(config, "bos_token_id", None)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=vocabulary.chat_template or None,
        eos_token=backend.id_to_token(vocabulary.eos_ids[0]) if vocabulary.eos_ids else None,
        bos_token=None if start is None else backend.id_to_token(start),
    )


def chat_shape(tokenizer: Any, generation_config: Any) -> ChatShape:
    """Read the openings, the turn end and the stop ids from the tokenizer's chat template."""
    stops = _stop_ids(tokenizer, generation_config)
    if not getattr(tokenizer, "chat_template", None):
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else next(iter(sorted(stops)), 0)
        return ChatShape(((int(start),),), (), stops)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _SENTINEL}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition(_SENTINEL)
    opening = _encode(tokenizer, before)
    turn_end = _encode(tokenizer, after)
    return ChatShape(_distinct(opening, _bare(tokenizer, opening, turn_end)), turn_end, stops)


def _bare(tokenizer: Any, opening: tuple[int, ...], turn_end: tuple[int, ...]) -> tuple[int, ...]:
    """The opening without its system message: what follows the last turn's end in it."""
    if not turn_end or turn_end[0] not in opening:
        return opening
    last = len(opening) - 1 - opening[::-1].index(turn_end[0])
    rest = list(opening[last + 1 :])
    while rest and not tokenizer.decode(rest[:1]).strip():
        rest.pop(0)
    return tuple(rest) or opening


def _stop_ids(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    stops = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    configured = getattr(generation_config, "eos_token_id", None)
    stops |= set(configured) if isinstance(configured, (list, tuple)) else {configured} - {None}
    return frozenset(int(stop) for stop in stops)


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])


def _distinct(*openings: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(dict.fromkeys(openings))
