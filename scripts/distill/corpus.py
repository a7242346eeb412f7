"""The corpus on disk: shards of chats with the target's distribution at every position.

corpus/
    corpus.json               what it was written with; a run with other settings refuses to add to it
    shard-000-0000/           chapter (which run wrote it) and number
        tokens.npy   int32 [N]       all chats, one after the other
        roles.npy    uint8 [N]       who wrote the NEXT token: NOBODY (opening, forced), USER, ASSISTANT
        ids.npy      int32 [N, K]    the target's K most likely next ids, most likely first
        logp.npy     float16 [N, K]  their log-probabilities under the whole vocabulary (temperature 1)
        chats.npy    int64 [C, 4]    first position, length, assistant temperature × 1000, chat number

A shard is written under another name and then renamed, so a folder called shard-… is always whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distill.faults import RunFault, UsageFault

NOBODY, USER, ASSISTANT = 0, 1, 2
_ARRAYS = ("tokens", "roles", "ids", "logp", "chats")

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CorpusSpec:
    """What a corpus was written with. Two runs may share a folder only if these are equal."""

    target: str
    vocab_size: int
    length: int
    top: int
    seed: int


@dataclass(frozen=True)
class Chat:
    """One chat. `tokens` [n], `roles` [n], `ids` [n, K], `logp` [n, K]; row t describes token t + 1."""

    number: int
    temperature: float
    tokens: Array
    roles: Array
    ids: Array
    logp: Array

    @property
    def counted(self) -> int:
        """Positions whose distribution is worth learning: those where the target itself wrote what follows."""
        return int((self.roles != NOBODY).sum())


def open_folder(folder: Path, spec: CorpusSpec) -> None:
    """Create the corpus folder, or check that the one that is there was written with the same settings."""
    file = folder / "corpus.json"
    if file.exists():
        found = json.loads(file.read_text())
        wrong = [name for name, value in asdict(spec).items() if found.get(name) != value]
        if wrong:
            said = ", ".join(f"{name} {found.get(name)!r} (now {asdict(spec)[name]!r})" for name in wrong)
            raise UsageFault(f"{folder} holds a corpus written with {said}: choose another --work folder")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(spec), indent=2) + "\n")
    except OSError as error:
        raise UsageFault(f"cannot write to {folder}: {error.strerror or error}") from error


def shard_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("shard-*") if path.is_dir() and path.suffix != ".tmp")


def next_chapter(folder: Path) -> int:
    """A number that no earlier run used, so that resuming repeats no noise and no name."""
    return 1 + max((int(path.name.split("-")[1]) for path in shard_folders(folder)), default=-1)


def write_shard(folder: Path, chapter: int, chats: list[Chat]) -> Path:
    """Write `chats` as the next shard of `chapter` and return its folder."""
    number = sum(path.name.startswith(f"shard-{chapter:03d}-") for path in shard_folders(folder))
    final = folder / f"shard-{chapter:03d}-{number:04d}"
    draft = final.with_suffix(".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    starts = np.cumsum([0] + [len(chat.tokens) for chat in chats])[:-1]
    rows = [
        (start, len(chat.tokens), round(chat.temperature * 1000), chat.number)
        for start, chat in zip(starts, chats, strict=True)
    ]
    try:
        draft.mkdir(parents=True)
        np.save(draft / "chats.npy", np.array(rows, np.int64))
        for name, dtype in (("tokens", np.int32), ("roles", np.uint8), ("ids", np.int32), ("logp", np.float16)):
            np.save(draft / f"{name}.npy", np.concatenate([getattr(chat, name) for chat in chats]).astype(dtype))
        os.rename(draft, final)
    except OSError as error:
        raise RunFault(f"cannot write corpus shard {final}: {error.strerror or error}") from error
    return final


class Corpus:
    """All shards of a folder, memory-mapped. Held-out chats are every `held_every`-th by chat number."""

    def __init__(self, folder: Path, held_every: int = 50) -> None:
        self.shards = [
            {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in _ARRAYS} for path in shard_folders(folder)
        ]
        if not self.shards:
            raise RunFault(f"no corpus in {folder}: run with --corpus-tokens above 0 first")
        entries = [(shard, row) for shard, arrays in enumerate(self.shards) for row in range(len(arrays["chats"]))]
        held = [int(self.shards[shard]["chats"][row, 3]) % held_every == 0 for shard, row in entries]
        self.training = [entry for entry, out in zip(entries, held, strict=True) if not out]
        self.held_out = [entry for entry, out in zip(entries, held, strict=True) if out]

    @property
    def tokens(self) -> int:
        """Tokens whose distribution the target gave, held-out ones among them."""
        return sum(int((arrays["roles"] != NOBODY).sum()) for arrays in self.shards)

    def length(self, entry: tuple[int, int]) -> int:
        return int(self.shards[entry[0]]["chats"][entry[1], 1])

    def chat(self, entry: tuple[int, int]) -> Chat:
        arrays = self.shards[entry[0]]
        start, length, temperature, number = (int(value) for value in arrays["chats"][entry[1]])
        span = slice(start, start + length)
        return Chat(number, temperature / 1000, *(np.asarray(arrays[name][span]) for name in _ARRAYS[:4]))

    def mass(self, vocab_size: int) -> Array:
        """float64 [V]: the probability that the target gave each id, summed over the positions that count."""
        total = np.zeros(vocab_size)
        for arrays in self.shards:
            counts = arrays["roles"] != NOBODY
            weights = np.exp(arrays["logp"][counts].astype(np.float32))
            total += np.bincount(arrays["ids"][counts].ravel(), weights.ravel(), vocab_size)
        return total

    def held_out_chats(self, temperature: float, at_most: int) -> Iterator[Chat]:
        """Held-out chats whose assistant wrote at `temperature`."""
        found = (chat for chat in map(self.chat, self.held_out) if abs(chat.temperature - temperature) < 1e-6)
        for _, chat in zip(range(at_most), found, strict=False):
            yield chat
