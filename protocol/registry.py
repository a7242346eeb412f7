"""The closed registry tag -> class, and how the fields of each class lie on the wire, read from their annotations."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, get_args, get_type_hints

from .fields import Record, Wire
from .messages import (
    CONTROL_TO_ORCHESTRATOR,
    CONTROL_TO_WORKER,
    DATA_TO_ORCHESTRATOR,
    DATA_TO_WORKER,
    Message,
    Sampling,
)

_CLASSES: Final[tuple[type[Message], ...]] = tuple(
    dict.fromkeys(DATA_TO_WORKER + DATA_TO_ORCHESTRATOR + CONTROL_TO_WORKER + CONTROL_TO_ORCHESTRATOR)
)
REGISTRY: Final[dict[int, type[Message]]] = {cls.TAG: cls for cls in _CLASSES}


def _layout(cls: type) -> tuple[tuple[str, Wire], ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple((field.name, _wire(hints[field.name])) for field in dataclasses.fields(cls))


def _wire(hint: Any) -> Wire:
    wire: Any = get_args(hint)[1]
    return Record(wire, _layout(wire)) if isinstance(wire, type) else wire


LAYOUTS: Final[dict[type, tuple[tuple[str, Wire], ...]]] = {cls: _layout(cls) for cls in (*_CLASSES, Sampling)}
