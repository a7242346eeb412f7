"""The byte-level BPE tokenizer that a GGUF file describes. Imports tokenizers.

Built here and not by transformers, whose releases disagree: 5.0 adds five tokens to the default target's 49,152, and
none sets digits apart as `smollm` says. Two hosts must find the same vocabulary in the same file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_DIGITS_ALONE = {"gpt-2": False, "smollm": True}  # tokenizer.ggml.pre: how text is cut before the merges


def byte_level_tokenizer(fields: Mapping[str, Any]) -> Any | None:
    """The `tokenizers.Tokenizer` of `GGUFReader(path).fields`; None for a kind that is not known here."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def value(key: str, otherwise: Any = None) -> Any:
        return fields[f"tokenizer.{key}"].contents() if f"tokenizer.{key}" in fields else otherwise

    if value("ggml.model") != "gpt2" or value("ggml.pre") not in _DIGITS_ALONE or value("ggml.add_bos_token"):
        return None
    texts = value("ggml.tokens")
    vocabulary = {text: index for index, text in enumerate(texts)}
    merges = [tuple(merge.split(" ", 1)) for merge in value("ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if _DIGITS_ALONE[value("ggml.pre")] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = value("ggml.token_type", [])
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [text for text, found in zip(texts, kinds, strict=False) if found == kind]
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=special) for text in chosen])
    return tokenizer
