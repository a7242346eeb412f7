"""The configuration of a Runtime. The command line's defaults and its TOML keys are these fields."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.errors import UsageError
from orchestrator.places import Place, parse_place

MAX_GAMMA = 64  # protocol.MAX_GAMMA; a test holds the two together (importing it here would cost --help its speed)
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("packed", "plain")
ENGINES = ("auto", "torch", "llamacpp")
GRAPHS = ("on", "off")
VERIFY_MODES = ("rejection", "coupled")
CODECS = ("counts", "dense")
OVERLAPS = ("on", "off")
Gamma = int | Literal["auto"]
DEFAULT_TARGET_MODEL = "smollm2-135m-instruct"
DEFAULT_DRAFT_MODEL = "smollm2-135m-draft"


@dataclass(frozen=True)
class RuntimeConfig:
    """Where the two workers run and how they speculate.

    `target`, `draft`: a device (cpu, gpu0, mps), an address (tcp://host:port, ipc://path); `draft` also "none" (plain
    decoding) and "ngram" (short for draft_model="ngram" on cpu). `kept_tokens` is for workers started here. Times in
    seconds. UsageError on anything impossible.
    """

    target: str = "cpu"
    draft: str = "cpu"
    target_model: str = DEFAULT_TARGET_MODEL
    draft_model: str = DEFAULT_DRAFT_MODEL
    target_dtype: str = "float32"
    draft_dtype: str = "float32"
    target_threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    draft_threads: int = 1
    target_engine: str = "auto"  # llamacpp for a .gguf file where that is installed, else torch
    draft_engine: str = "auto"
    weights: str = "packed"  # of both workers, on CUDA or in float32 on a CPU; plain: as transformers runs them
    graphs: str = "on"  # of both workers, on CUDA: torch's small passes are captured and replayed
    gamma: Gamma = "auto"  # by goodput: what is measured decides, round by round
    overlap: str = "on"  # draft while the target verifies; off: take turns
    verify: str = "rejection"
    codec: str = "counts"
    connect_timeout: float = 10.0  # for a worker at an address; one started here is waited for while it lives
    draft_timeout: float = 10.0  # a block that takes longer is not waited for: the round goes on at γ = 0
    kept_tokens: int = 4096  # of ended requests, on each worker, for prompts that begin alike; 0: none
    debug: bool = False

    def __post_init__(self) -> None:
        if self.draft == "ngram":
            object.__setattr__(self, "draft", "cpu")
            object.__setattr__(self, "draft_model", "ngram")
        if self.gamma != "auto" and not (isinstance(self.gamma, int) and 0 <= self.gamma <= MAX_GAMMA):
            raise UsageError(f"--gamma {self.gamma} is out of range: expected auto, or 0 (plain) to {MAX_GAMMA}")
        for name, value, known in (
            ("verify", self.verify, VERIFY_MODES),
            ("codec", self.codec, CODECS),
            ("overlap", self.overlap, OVERLAPS),
            ("weights", self.weights, WEIGHTS),
            ("graphs", self.graphs, GRAPHS),
            ("target-engine", self.target_engine, ENGINES),
            ("draft-engine", self.draft_engine, ENGINES),
            ("target-dtype", self.target_dtype, DTYPES),
            ("draft-dtype", self.draft_dtype, DTYPES),
        ):
            if value not in known:
                raise UsageError(f"--{name} {value!r} is unknown: expected one of {', '.join(known)}")
        for name, count in (("target-threads", self.target_threads), ("draft-threads", self.draft_threads)):
            if not 1 <= count <= 1024:
                raise UsageError(f"--{name} {count} is out of range: expected 1 to 1024")
        if not self.kept_tokens >= 0:
            raise UsageError(f"--kept-tokens {self.kept_tokens} is out of range: expected 0 (off) or more")
        for name, seconds in (("connect-timeout", self.connect_timeout), ("draft-timeout", self.draft_timeout)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise UsageError(f"--{name} {seconds} is out of range: expected a positive number of seconds")
        _ = self.target_place, self.draft_place  # both parse, or say why not, before anything starts

    @property
    def target_place(self) -> Place:
        return parse_place(self.target, "--target")

    @property
    def draft_place(self) -> Place | None:
        """None: no draft at all (`--draft none`)."""
        return None if self.draft == "none" else parse_place(self.draft, "--draft")
