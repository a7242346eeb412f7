"""References with options, `kind:key=value,...`, read into a dataclass. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from execution.errors import ModelError

Spec = TypeVar("Spec")


def parse_options(spec: type[Spec], kind: str, reference: str) -> Spec:
    """The dataclass `spec` of int, float and str fields. ModelError for an unknown or repeated key or a bad value."""
    fields = {field.name: field for field in dataclasses.fields(spec)}  # type: ignore[arg-type]
    given: dict[str, int | float | str] = {}
    for part in filter(None, reference.removeprefix(kind).removeprefix(":").split(",")):
        key, _, value = part.partition("=")
        if key not in fields:
            raise ModelError(f"{kind} model {reference!r} has no option {key!r}: it has {', '.join(fields)}")
        if key in given:
            raise ModelError(f"{kind} model {reference!r} has {key!r} twice: give it once")
        of = {"int": int, "float": float, "str": str}[str(fields[key].type)]
        try:
            given[key] = of(value)
        except ValueError:
            raise ModelError(f"{kind} model {reference!r}: {key}={value!r} is not of type {of.__name__}") from None
    return spec(**given)


def refuse(kind: str, reference: str, problems: dict[str, bool]) -> None:
    """ModelError with the first of `problems` (what must be, whether it is not) that holds."""
    for text, wrong in problems.items():
        if wrong:
            raise ModelError(f"{kind} model {reference!r}: {text}")
