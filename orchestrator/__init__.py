"""Requests, rounds, supervision, command line. Starts the workers as processes; never imports them, nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.config import RuntimeConfig
    from orchestrator.errors import SpecdecError, UsageError, WorkerFault
    from orchestrator.runtime import Chunk, Generation, Runtime

_HOMES = {
    "Runtime": "orchestrator.runtime",
    "Chunk": "orchestrator.runtime",
    "Generation": "orchestrator.runtime",
    "RuntimeConfig": "orchestrator.config",
    "SpecdecError": "orchestrator.errors",
    "UsageError": "orchestrator.errors",
    "WorkerFault": "orchestrator.errors",
}
__all__ = ["Chunk", "Generation", "Runtime", "RuntimeConfig", "SpecdecError", "UsageError", "WorkerFault"]


def __getattr__(name: str) -> Any:
    """Load on first use: `specdec-orchestrator --help` must not wait for sockets and tokenizers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
