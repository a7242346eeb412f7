"""The reference of a synthetic model, `synthetic:step_ms=30,vocab=4096,...`, parsed. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from execution.options import parse_options, refuse

_CELLS = 1 << 24  # of the table: 64 MB in float32
_CONTEXTS = 512
TARGET = -1.0


@dataclass(frozen=True)
class SyntheticSpec:
    """All options of a synthetic model; target and draft of one pair differ in `alpha` and the times alone."""

    vocab: int = 4096
    entropy: float = 2.7  # of every next-token distribution p of the target, in nats
    alpha: float = TARGET  # given: the draft, Σ min(p, q) is this in every context
    seed: int = 0
    step_ms: float = 30.0  # how long a pass takes,
    token_ms: float = 0.0  # and how much longer for each token fed beyond the first
    context: int = 4096
    eos: int = -1  # id of the end-of-sequence token; -1: none

    @classmethod
    def parse(cls, reference: str) -> SyntheticSpec:
        """From `synthetic:key=value,...`. ModelError for an unknown key or a bad value."""
        spec = parse_options(cls, "synthetic", reference)
        spec._check(reference)
        return spec

    def _check(self, reference: str) -> None:
        if not 2 <= self.vocab <= 65536:
            refuse("synthetic", reference, {"vocab must be 2 to 65536": True})
        most, least = math.log(self.vocab), 2 / self.vocab
        problems = {
            f"entropy must be above 0 and at most log(vocab) = {most:.4f}": not 0 < self.entropy <= most,
            f"alpha must be 2/vocab = {least:.2g} to 1": not (self.alpha == TARGET or least <= self.alpha <= 1),
            "seed must be 0 to 2**32 - 1": not 0 <= self.seed < 1 << 32,
            "step_ms must be 0 or more": not 0 <= self.step_ms < math.inf,
            "token_ms must be 0 or more": not 0 <= self.token_ms < math.inf,
            "context must be 1 or more": self.context < 1,
            "eos must be below vocab": self.eos >= self.vocab,
        }
        refuse("synthetic", reference, problems)

    @property
    def contexts(self) -> int:
        """Rows of the table."""
        return min(_CONTEXTS, _CELLS // self.vocab)
