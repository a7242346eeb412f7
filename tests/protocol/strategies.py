"""Hypothesis strategies: any valid message of the registry, built from the declared wire types."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from protocol import fields
from protocol.codecs import EncodedQ
from protocol.messages import LAYOUTS, REGISTRY, Block, Hello, Message, Propose, Verify, Welcome

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
def messages_of(draw: st.DrawFn, cls: type[Message]) -> Message:
    values = {name: draw(_field(wire)) for name, wire in LAYOUTS[cls] if not isinstance(wire, fields.Quantized)}
    if cls in (Hello, Welcome):
        values["protocol_version"] = 1
    if cls in (Block, Verify):
        values["q"] = draw(encoded_q(len(values["tokens"])))
    if cls in (Propose, Verify):
        values["base_length"] = draw(st.integers(len(values["tail"]), 2**20))
    return cls(**values)


def messages() -> st.SearchStrategy[Message]:
    return st.sampled_from(list(REGISTRY.values())).flatmap(messages_of)
