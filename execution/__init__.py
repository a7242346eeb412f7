"""Running a model: loading, KV cache, ragged batches -> logits. Of ours it may import speculative, nothing else.

Nothing heavy is imported before it is asked for: `from execution import load`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from execution.errors import ContextFull, ModelError, RowError
    from execution.interface import Executor, Extension
    from execution.loading import load
    from execution.vocabulary import Vocabulary

__all__ = ["ContextFull", "Executor", "Extension", "ModelError", "RowError", "Vocabulary", "load"]

_HOMES = {
    "ContextFull": "errors",
    "Executor": "interface",
    "Extension": "interface",
    "ModelError": "errors",
    "RowError": "errors",
    "Vocabulary": "vocabulary",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'execution' has no attribute {name!r}")
    return getattr(import_module(f"execution.{_HOMES[name]}"), name)
