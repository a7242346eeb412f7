"""What the benchmark generates from: prompt files, the prompts that ship with it, or random token ids.

Of a Spec-Bench question its first turn is used: the later ones mean nothing without the answers between them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.errors import UsageError

T = TypeVar("T")
SYNTHETIC_LENGTHS = (8, 32)  # tokens of a random prompt: at least, at most


@dataclass(frozen=True)
class Prompt:
    """Text, or token ids where `tokens` isn't empty. `where` names it in errors."""

    text: str
    tokens: tuple[int, ...] = ()
    category: str = ""
    where: str = ""


def load_prompts(paths: Sequence[str]) -> list[Prompt]:
    """The prompts of all files, in order. UsageError names the file, the line, and what was expected there."""
    prompts: list[Prompt] = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; expected a file of JSON lines") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not UTF-8 text ({error.reason}); expected a file of JSON lines") from error
        found = _prompts(text, path)
        if not found:
            raise UsageError(f"{path}: holds no prompt; expected JSON lines")
        prompts += found
    return prompts


def shipped_prompts() -> list[Prompt]:
    """One or two for each of Spec-Bench's categories."""
    text = resources.files("orchestrator.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return _prompts(text, "prompts.jsonl")


def random_prompts(count: int, vocab_size: int, seed: int) -> list[Prompt]:
    """`count` prompts of random token ids, of different lengths; the same ones for the same seed."""
    source = random.Random(seed)
    lengths = [source.randint(*SYNTHETIC_LENGTHS) for _ in range(count)]
    return [
        Prompt("", tuple(source.randrange(vocab_size) for _ in range(length)), "synthetic", f"prompt {index}")
        for index, length in enumerate(lengths)
    ]


def choose(prompts: Sequence[T], count: int) -> list[T]:
    """`count` of them: spread evenly over all (files are sorted by category), or all again and again."""
    if count >= len(prompts):
        return [prompts[index % len(prompts)] for index in range(count)]
    return [prompts[index * len(prompts) // count] for index in range(count)]


def _prompts(text: str, path: str) -> list[Prompt]:
    lines = enumerate(text.split("\n"), start=1)  # not splitlines: U+2028 may stand inside a JSON string
    return [_prompt(line, f"{path}:{number}") for number, line in lines if line.strip()]


def _prompt(line: str, where: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    text: Any = None
    if isinstance(entry, dict):
        turns = entry.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else entry.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f'{where}: expected {{"prompt": "…"}} or Spec-Bench\'s {{"turns": ["…", …]}} with some text')
    return Prompt(text, category=str(entry.get("category", "")), where=where)
