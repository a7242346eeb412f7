"""Hypothesis strategies: any valid message of the registry, built from the declared wire types."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from protocol import fields
from protocol.codecs import EncodedQ
from protocol.limits import MAX_GAMMA, PROTOCOL_VERSION
from protocol.messages import Block, Branch, Branches, Hello, Message, Propose, Verify, Welcome, token_array
from protocol.registry import LAYOUTS, REGISTRY

_SHORT = 40  # items and characters: limits are tested on their own


def _field(wire: fields.Wire) -> st.SearchStrategy[Any]:
    if isinstance(wire, fields.Int):
        return st.integers(wire.low, wire.high)
    if isinstance(wire, fields.Real):
        low, high = wire.interval[1:-1].split(", ")
        return st.floats(
            float(low),
            None if high == "inf" else float(high),
            exclude_min=wire.interval[0] == "(",
            exclude_max=wire.interval[-1] == ")" and high != "inf",
            allow_nan=False,
            allow_infinity=False,
        )
    if isinstance(wire, fields.Text):
        text = st.text(st.characters(exclude_categories=("Cs",)), max_size=_SHORT)
        return text.filter(lambda value: len(value.encode()) <= wire.limit)
    if isinstance(wire, fields.Choice):
        return st.sampled_from(wire.options)
    if isinstance(wire, fields.Many):
        return st.lists(_field(wire.item), max_size=min(wire.limit, 8)).map(tuple)
    if isinstance(wire, fields.Record):
        return st.builds(wire.cls, **{name: _field(inner) for name, inner in wire.layout})
    if isinstance(wire, fields.TokenIds):
        return token_ids(wire.least, min(wire.limit, _SHORT))
    if isinstance(wire, fields.Blob):
        return st.binary(max_size=_SHORT)
    raise AssertionError(f"no strategy for {wire}")


def token_ids(least: int, most: int) -> st.SearchStrategy[Any]:
    return st.lists(st.integers(0, 2**31 - 1), min_size=least, max_size=most).map(
        lambda ids: np.array(ids, dtype=np.int32)
    )


@st.composite
def encoded_q(draw: st.DrawFn, gamma: int) -> EncodedQ:
    """A q̃ of the right form; its values are any."""
    codec = draw(st.sampled_from(("none", "counts", "dense")))
    width = draw(st.integers(1, 9))
    if codec == "none":
        return EncodedQ("none")
    if codec == "dense":
        dtype = draw(st.sampled_from(("<f2", "<f4")))
        values = st.floats(0, 1, width=16)
        return EncodedQ("dense", (draw(npst.arrays(dtype, (gamma, width), elements=values)),))
    kinds = draw(st.tuples(st.sampled_from(("<u2", "<u4")), st.sampled_from(("<u1", "<u2"))))
    shapes = ((kinds[0], (gamma, width)), ("<u2", (gamma, width)), (kinds[1], (gamma,)))
    return EncodedQ("counts", tuple(draw(npst.arrays(dtype, shape)) for dtype, shape in shapes))


@st.composite
def branch_arrays(draw: st.DrawFn) -> dict[str, Any]:
    """Outcomes that differ, a length for each, and as many tokens as these sum to."""
    outcomes = draw(st.lists(st.tuples(st.integers(0, MAX_GAMMA), st.integers(0, 9)), max_size=6, unique=True))
    lengths = draw(st.lists(st.integers(0, 7), min_size=len(outcomes), max_size=len(outcomes)))
    return {
        "accepted": token_array([accepted for accepted, _ in outcomes]),
        "next": token_array([token for _, token in outcomes]),
        "lengths": token_array(lengths),
        "tokens": draw(token_ids(sum(lengths), sum(lengths))),
    }


@st.composite
def messages_of(draw: st.DrawFn, cls: type[Message]) -> Message:
    values = {name: draw(_field(wire)) for name, wire in LAYOUTS[cls] if not isinstance(wire, fields.Quantized)}
    if cls in (Hello, Welcome):
        values["protocol_version"] = PROTOCOL_VERSION
    if cls is Branches:
        values |= draw(branch_arrays())
    if cls in (Block, Branches, Verify):
        values["q"] = draw(encoded_q(len(values["tokens"])))
    if cls in (Propose, Branch, Verify):
        values["base_length"] = draw(st.integers(len(values["tail"]), 2**20))
    return cls(**values)


def messages() -> st.SearchStrategy[Message]:
    return st.sampled_from(list(REGISTRY.values())).flatmap(messages_of)
