"""The one configuration of a worker process. Command-line defaults are read from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["draft", "target"]
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("packed", "plain")
ENGINES = ("auto", "torch", "llamacpp")
GRAPHS = ("on", "off")


@dataclass(frozen=True)
class WorkerConfig:
    """How one worker process runs.

    `listen` is the data address; the control address follows from it (protocol.addresses). `threads` is how many a pass
    uses. `engine`: "torch", "llamacpp" for .gguf files, or "auto", the latter where it can. `weights`: "packed" lays
    out a CPU's float32 weights anew, "plain" leaves them as they are. `graphs`: on CUDA, torch's small passes are
    captured and replayed. `exit_with_stdin` ends the process when its standard input closes: a supervising parent holds
    the other end of that pipe, so that no worker outlives it. `kept_tokens` bounds what is kept of ended requests for
    prompts that begin alike (worker.kept_rows); 0: nothing is kept or shared.
    """

    role: Role
    model: str
    listen: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    engine: str = "auto"
    weights: str = "packed"
    graphs: str = "on"
    kept_tokens: int = 4096
    insecure: bool = False
    exit_with_stdin: bool = False
    debug: bool = False
