"""Messages to frames and back. Frame 0 is a msgpack array [tag, fields in order], each non-empty array its own frame.

decode(anything) gives a message or ProtocolError, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from .errors import FailureCode, ProtocolError
from .fields import Frame, FrameReader, Wire, refuse
from .limits import MAX_ARRAY_BYTES, MAX_FRAMES, MAX_HEADER_BYTES, PROTOCOL_VERSION
from .messages import Hello, Message, Welcome
from .registry import LAYOUTS, REGISTRY

_IDS = ("request_id", "epoch", "block_id")
_VERSIONED = (Hello.TAG, Welcome.TAG)


def encode(message: Message) -> list[Frame]:
    """The frames of a message; arrays are not copied where they are contiguous. Raises ProtocolError (bad_frame)."""
    layout = LAYOUTS.get(type(message)) if isinstance(message, Message) else None
    if layout is None:
        raise refuse(f"{type(message).__name__} is not a message")
    arrays: list[Frame] = []
    header: list[object] = [message.TAG]
    for name, wire in layout:
        try:
            header.append(wire.pack(getattr(message, name), arrays))
        except ProtocolError as error:
            raise refuse(f"{type(message).__name__}.{name}: {error.text}") from None
    message.check()
    return [msgpack.packb(header), *arrays]


def decode(frames: Sequence[Any]) -> Message:
    """The message in frames (bytes-like each); its arrays are read-only views of them.

    Raises ProtocolError, and nothing else: `version` for a Hello or Welcome of another version, bad_frame for all else.
    """
    try:
        return _decode([memoryview(frame).cast("B") for frame in _bounded(frames)])
    except ProtocolError:
        raise
    except Exception as error:  # whatever a library says about bytes from outside is the sender's fault
        raise refuse(f"cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


def frames_size(frames: Sequence[Frame]) -> int:
    """Bytes of all frames together, as the report counts them (ZMTP adds 2 or 9 a frame)."""
    return sum(frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames)


def _bounded(frames: Sequence[Any]) -> Sequence[Any]:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise refuse(f"{len(frames)} frames, allowed are 1..{MAX_FRAMES}")
    return frames


def _decode(frames: list[memoryview]) -> Message:
    if frames[0].nbytes > MAX_HEADER_BYTES:
        raise refuse(f"a header of {frames[0].nbytes} bytes, the limit is {MAX_HEADER_BYTES}")
    for frame in frames[1:]:
        if frame.nbytes > MAX_ARRAY_BYTES:
            raise refuse(f"a frame of {frame.nbytes} bytes, the limit is {MAX_ARRAY_BYTES}")
    header = msgpack.unpackb(frames[0], raw=False, use_list=True)
    if type(header) is not list or not header or type(header[0]) is not int:
        raise refuse("the header is not an array that starts with a tag")
    cls = REGISTRY.get(header[0])
    if cls is None:
        raise refuse(f"no message has the tag {header[0]}")
    if cls.TAG in _VERSIONED:
        _check_version(header, cls)
    layout = LAYOUTS[cls]
    try:
        return _build(cls, layout, header[1:], FrameReader(frames[1:]))
    except ProtocolError as error:
        raise ProtocolError(error.code, error.text, **_salvaged(layout, header[1:])) from None


def _build(cls: type[Message], layout: tuple[tuple[str, Wire], ...], items: list[Any], frames: FrameReader) -> Message:
    if len(items) != len(layout):
        raise refuse(f"{cls.__name__} has {len(layout)} fields, not {len(items)}")
    values = []
    for item, (name, wire) in zip(items, layout, strict=True):
        try:
            values.append(wire.unpack(item, frames))
        except ProtocolError as error:
            raise refuse(f"{cls.__name__}.{name}: {error.text}") from None
    frames.finish()
    message = cls(*values)
    message.check()
    return message


def _check_version(header: list[Any], cls: type[Message]) -> None:
    """Before the other fields are looked at: another version may have others. Its place in the header never changes."""
    version = header[1] if len(header) > 1 else None
    if type(version) is int and version != PROTOCOL_VERSION:
        raise ProtocolError(
            FailureCode.VERSION,
            f"{cls.__name__} speaks protocol version {version}, this side speaks {PROTOCOL_VERSION}: "
            "install the same release of specdec-orchestrator on both sides",
        )


def _salvaged(layout: tuple[tuple[str, Wire], ...], items: list[Any]) -> dict[str, int]:
    """What a refused message was about, as far as it can be read: the answer then reaches the request that waits."""
    found: dict[str, int] = {}
    for item, (name, wire) in zip(items, layout, strict=False):
        if name in _IDS:
            try:
                found[name] = wire.unpack(item, FrameReader([]))
            except ProtocolError:
                return {}
    return found
