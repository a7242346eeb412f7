"""Text to tokens and back, with the target's own tokenizer as the target worker sent it.

Uses the `tokenizers` library alone: importing transformers would cost seconds and torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from orchestrator.errors import UsageError, WorkerFault


class TextCodec:
    """Encodes prompts and decodes committed tokens. `chat_template` may be "": then only raw prompts exist."""

    def __init__(self, tokenizer_json: bytes, chat_template: str) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception on a broken file
            raise WorkerFault(f"the target sent a tokenizer that can't be read: {error}") from error
        self._chat_template = chat_template

    def encode(self, prompt: str, *, raw: bool) -> list[int]:
        """Token ids of a prompt; a chat model's prompt is one user message unless `raw`."""
        if not prompt:
            raise UsageError("the prompt is empty: expected some text")
        if raw or not self._chat_template:
            ids = self._tokenizer.encode(prompt).ids
        else:
            text = self.render([{"role": "user", "content": prompt}])
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids  # the template wrote them already
        if not ids:
            raise UsageError("the prompt holds no token of this model's vocabulary: expected some text")
        return list(ids)

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The chat template's text for `messages`, ready for the assistant's turn."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise_template_error
        try:
            template = environment.from_string(self._chat_template)
            return template.render(messages=list(messages), add_generation_prompt=True, bos_token="", eos_token="")
        except jinja2.TemplateError as error:
            raise UsageError(
                f"the model's chat template failed: {error}; use --raw to send the prompt as is"
            ) from error

    def decode(self, tokens: Sequence[int]) -> str:
        """The whole text of `tokens`, special tokens left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def stream(self) -> TextStream:
        return TextStream(self._tokenizer)


class TextStream:
    """Decodes tokens as they are committed: never emits half a character; `finish` gives what is still held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._emitted = ""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete."""
        text = "".join(self._stream.step(self._tokenizer, token) or "" for token in tokens)
        self._tokens.extend(tokens)
        self._emitted += text
        return text

    def finish(self) -> str:
        """What the whole text has beyond what was emitted (a character cut off at the token limit)."""
        whole = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        return whole[len(self._emitted) :] if whole.startswith(self._emitted) else ""


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
