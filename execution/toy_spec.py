"""The reference of a toy model, `toy:vocab=16,order=1,...`, parsed. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from execution.options import parse_options, refuse


@dataclass(frozen=True)
class ToySpec:
    """All options of a toy model; the keys of the reference are these names, unknown ones are errors."""

    vocab: int = 16  # tokens of the tokenizer
    padded: int = 0  # the model's vocab_size is larger than the tokenizer's size by this much
    order: int = 1  # logits depend on the last `order` tokens
    seed: int = 0  # of the table
    scale: float = 1.0  # logits are normal variates times this,
    temperature: float = 1.0  # divided by this
    noise: float = 0.0  # weight of a second table, so that a draft resembles its target
    noise_seed: int = 0
    context: int = 4096
    state: str = "table"  # "hash": logits depend on the whole prefix through a hash
    constant: int = -1  # always propose this token
    nan_token: int = -1  # logits after this token are NaN
    eos: int = -1  # id of the end-of-sequence token
    names: str = "plain"  # "permuted": the same texts at other ids
    delay_ms: float = 0.0  # each pass takes this much longer
    load_ms: float = 0.0  # loading takes this much longer
    fail_load: int = 0  # 1: loading raises; 2: the process dies while loading
    die_after: int = 0  # the process exits in this pass (1 = the first)
    hang_after: int = 0  # the process blocks for ever in this pass

    @property
    def vocab_size(self) -> int:
        return self.vocab + self.padded

    @classmethod
    def parse(cls, reference: str) -> ToySpec:
        """From `toy:key=value,...`. ModelError for an unknown key or a bad value."""
        spec = parse_options(cls, "toy", reference)
        spec._check(reference)
        return spec

    def _check(self, reference: str) -> None:
        problems = {
            "vocab must be 1 to 50000": not 1 <= self.vocab <= 50_000,
            "padded must be 0 or more": self.padded < 0,
            "order must be 0 or more": self.order < 0,
            "the table must hold at most 2**26 numbers": self.cells > 2**26,
            "temperature must be above 0": not (self.temperature > 0 and math.isfinite(self.temperature)),
            "context must be 1 or more": self.context < 1,
            "state must be table or hash": self.state not in ("table", "hash"),
            "names must be plain or permuted": self.names not in ("plain", "permuted"),
            "constant must be below vocab + padded": self.constant >= self.vocab_size,
            "eos must be below vocab": self.eos >= self.vocab,
        }
        refuse("toy", reference, problems)

    @property
    def contexts(self) -> int:
        """Rows of the table."""
        return 4096 if self.state == "hash" else self.vocab_size**self.order

    @property
    def cells(self) -> int:
        return self.contexts * self.vocab_size
