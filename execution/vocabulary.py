"""A model's vocabulary as bytes that travel: the tokenizer file, the chat template, the end-of-sequence ids.

Imports tokenizers only, and only when the token texts are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Vocabulary:
    """`tokenizer_json` is what `tokenizers.Tokenizer.from_buffer` reads; `chat_template` is Jinja, "" for none."""

    tokenizer_json: bytes
    chat_template: str = ""
    eos_ids: tuple[int, ...] = ()

    @cached_property
    def _texts(self) -> tuple[tuple[int, str], ...]:
        from tokenizers import Tokenizer

        vocabulary = Tokenizer.from_buffer(self.tokenizer_json).get_vocab(with_added_tokens=True)
        return tuple(sorted((index, text) for text, index in vocabulary.items()))

    @property
    def pairs(self) -> Iterable[tuple[int, str]]:
        """(id, text) of every token, added ones too, by rising id: what a fingerprint is taken of."""
        return self._texts

    @property
    def size(self) -> int:
        """One more than the highest id. The model's `vocab_size` may be larger (padding), never smaller."""
        return self._texts[-1][0] + 1 if self._texts else 0
