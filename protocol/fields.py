"""How one field of a message lies on the wire: its type, its limits, and the text PROTOCOL.md has for it.

Each wire type has pack(value, frames) -> what goes into the header (arrays are appended to frames), its inverse
unpack(item, frames), and describe(). Both directions check the same limits and raise ProtocolError (bad_frame).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .codecs import CODECS, EncodedQ
from .errors import FailureCode, ProtocolError
from .limits import MAX_ARRAY_BYTES

Frame = bytes | memoryview
DTYPES = {code: np.dtype("<" + code) for code in ("u1", "u2", "i4", "u4", "f2", "f4")}  # the allow-list
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def refuse(text: str) -> ProtocolError:
    return ProtocolError(FailureCode.BAD_FRAME, text)


class FrameReader:
    """The array frames of one message, taken in order."""

    def __init__(self, frames: list[memoryview]) -> None:
        self._frames = frames
        self._next = 0

    def take(self, nbytes: int) -> memoryview:
        if self._next == len(self._frames):
            raise refuse("an array's frame is missing")
        frame = self._frames[self._next]
        self._next += 1
        if frame.nbytes != nbytes:
            raise refuse(f"an array's frame has {frame.nbytes} bytes, its header says {nbytes}")
        return frame

    def finish(self) -> None:
        if self._next != len(self._frames):
            raise refuse(f"{len(self._frames) - self._next} frames too many")


class Wire(Protocol):
    """What every wire type offers."""

    def pack(self, value: Any, frames: list[Frame]) -> object: ...
    def unpack(self, item: object, frames: FrameReader) -> Any: ...
    def describe(self) -> str: ...


@dataclass(frozen=True)
class Int:
    low: int
    high: int

    def pack(self, value: Any, frames: list[Frame]) -> object:
        if type(value) is not int:
            if isinstance(value, (bool, np.bool_)):
                raise refuse("a bool is not an integer")
            try:
                value = operator.index(value)
            except TypeError:
                raise refuse(f"{type(value).__name__} is not an integer") from None
        return self._checked(value)

    def unpack(self, item: object, frames: FrameReader) -> int:
        if type(item) is not int:
            raise refuse(f"{type(item).__name__} is not an integer")
        return self._checked(item)

    def _checked(self, value: int) -> int:
        if not self.low <= value <= self.high:
            raise refuse(f"{value} is outside {self.low}..{self.high}")
        return value

    def describe(self) -> str:
        return f"int {self.low}..{self.high}"


@dataclass(frozen=True)
class Real:
    """A finite float in an interval written as text, such as [0, inf) or (0, 1]."""

    interval: str

    def __post_init__(self) -> None:
        low, high = self.interval[1:-1].split(", ")
        object.__setattr__(self, "_low", float(low))
        object.__setattr__(self, "_high", float(high))

    def pack(self, value: Any, frames: list[Frame]) -> object:
        if isinstance(value, (bool, str, bytes, np.bool_)):
            raise refuse(f"{type(value).__name__} is not a number")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise refuse(f"{type(value).__name__} is not a number") from None
        return self._checked(number)

    def unpack(self, item: object, frames: FrameReader) -> float:
        if type(item) is not float:
            raise refuse(f"{type(item).__name__} is not a float")
        return self._checked(item)

    def _checked(self, value: float) -> float:
        low: float = self._low  # type: ignore[attr-defined]
        high: float = self._high  # type: ignore[attr-defined]
        above = value >= low if self.interval[0] == "[" else value > low
        below = value <= high if self.interval[-1] == "]" else value < high
        if not (math.isfinite(value) and above and below):
            raise refuse(f"{value} is outside {self.interval}")
        return value

    def describe(self) -> str:
        return f"float {self.interval}"


@dataclass(frozen=True)
class Text:
    limit: int  # UTF-8 bytes

    def pack(self, value: Any, frames: list[Frame]) -> object:
        if not isinstance(value, str):
            raise refuse(f"{type(value).__name__} is not text")
        return self._checked(str(value))

    def unpack(self, item: object, frames: FrameReader) -> str:
        if type(item) is not str:
            raise refuse(f"{type(item).__name__} is not text")
        return self._checked(item)

    def _checked(self, value: str) -> str:
        if len(value) > self.limit:  # bytes are never fewer than characters: no need to encode a huge text
            raise refuse(f"text of {len(value)} characters, the limit is {self.limit} bytes")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise refuse("text holds a lone surrogate") from None
        if size > self.limit:
            raise refuse(f"text of {size} bytes, the limit is {self.limit}")
        return value

    def describe(self) -> str:
        return f"text ≤ {self.limit}"


@dataclass(frozen=True)
class Choice:
    options: tuple[str, ...]

    def pack(self, value: Any, frames: list[Frame]) -> object:
        return self.unpack(str(value) if isinstance(value, str) else value, None)

    def unpack(self, item: object, frames: FrameReader | None) -> str:
        if type(item) is not str or item not in self.options:
            raise refuse(f"{str(item)[:32]!r} is not one of {', '.join(self.options)}")
        return item

    def describe(self) -> str:
        return "one of " + " ".join(self.options)


@dataclass(frozen=True)
class Many:
    """A tuple of one wire type."""

    item: Int | Text
    limit: int

    def pack(self, value: Any, frames: list[Frame]) -> object:
        if not isinstance(value, (tuple, list)):
            raise refuse(f"{type(value).__name__} is not a list")
        self._check(len(value))
        return [self.item.pack(each, frames) for each in value]

    def unpack(self, item: object, frames: FrameReader) -> tuple[Any, ...]:
        if type(item) is not list:
            raise refuse(f"{type(item).__name__} is not a list")
        self._check(len(item))
        return tuple(self.item.unpack(each, frames) for each in item)

    def _check(self, length: int) -> None:
        if length > self.limit:
            raise refuse(f"a list of {length}, the limit is {self.limit}")

    def describe(self) -> str:
        return f"list ≤ {self.limit} of {self.item.describe()}"


@dataclass(frozen=True)
class Record:
    """A nested dataclass: an array of its fields in order."""

    cls: type
    layout: tuple[tuple[str, Wire], ...]

    def pack(self, value: Any, frames: list[Frame]) -> object:
        if type(value) is not self.cls:
            raise refuse(f"{type(value).__name__} is not {self.cls.__name__}")
        return [wire.pack(getattr(value, name), frames) for name, wire in self.layout]

    def unpack(self, item: object, frames: FrameReader) -> Any:
        if type(item) is not list or len(item) != len(self.layout):
            raise refuse(f"not the {len(self.layout)} fields of {self.cls.__name__}")
        return self.cls(*(wire.unpack(each, frames) for each, (_, wire) in zip(item, self.layout, strict=True)))

    def describe(self) -> str:
        return f"record {self.cls.__name__}"


@dataclass(frozen=True)
class TokenIds:
    """int32 [n], every id ≥ 0; header item ["i4", n]."""

    limit: int
    least: int = 0

    def pack(self, value: Any, frames: list[Frame]) -> object:
        array = np.asarray(value)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise refuse(f"{array.dtype}{list(array.shape)} is not a list of token ids")
        self._check(array)
        return _pack_array(array.astype(DTYPES["i4"]), frames)

    def unpack(self, item: object, frames: FrameReader) -> npt.NDArray[np.int32]:
        array = _unpack_array(item, frames)
        if array.ndim != 1 or array.dtype != DTYPES["i4"]:
            raise refuse(f"{array.dtype}{list(array.shape)} is not int32 [n]")
        self._check(array)
        return array

    def _check(self, array: npt.NDArray[Any]) -> None:
        if not self.least <= array.size <= self.limit:
            raise refuse(f"{array.size} tokens, allowed are {self.least}..{self.limit}")
        if array.size and not 0 <= array.min() <= array.max() < 2**31:
            raise refuse("a token id is outside 0..2147483647")

    def describe(self) -> str:
        return f"int32 [{self.least}..{self.limit}]"


@dataclass(frozen=True)
class Blob:
    """Bytes in a frame of their own; header item: their number."""

    limit: int

    def pack(self, value: Any, frames: list[Frame]) -> object:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise refuse(f"{type(value).__name__} is not bytes")
        data = bytes(value)
        if len(data) > self.limit:
            raise refuse(f"{len(data)} bytes, the limit is {self.limit}")
        if data:
            frames.append(data)
        return len(data)

    def unpack(self, item: object, frames: FrameReader) -> bytes:
        if type(item) is not int or not 0 <= item <= self.limit:
            raise refuse(f"{str(item)[:32]} is not a number of bytes up to {self.limit}")
        return bytes(frames.take(item)) if item else b""

    def describe(self) -> str:
        return f"bytes ≤ {self.limit}"


@dataclass(frozen=True)
class Quantized:
    """An EncodedQ; header item [codec, array descriptor...]. Its form against γ is the message's check."""

    def pack(self, value: Any, frames: list[Frame]) -> object:
        if not isinstance(value, EncodedQ):
            raise refuse(f"{type(value).__name__} is not an EncodedQ")
        return [str(value.codec), *(_pack_array(array, frames) for array in value.arrays)]

    def unpack(self, item: object, frames: FrameReader) -> EncodedQ:
        if type(item) is not list or not item or type(item[0]) is not str or item[0] not in CODECS:
            raise refuse("not a codec and its arrays")
        return EncodedQ(item[0], tuple(_unpack_array(each, frames) for each in item[1:]))

    def describe(self) -> str:
        return "EncodedQ"


def _pack_array(array: npt.NDArray[Any], frames: list[Frame]) -> list[object]:
    code = _CODES.get(array.dtype.newbyteorder("<"))
    if code is None:
        raise refuse(f"dtype {array.dtype} is not one of {', '.join(DTYPES)}")
    if array.nbytes > MAX_ARRAY_BYTES:
        raise refuse(f"an array of {array.nbytes} bytes, the limit is {MAX_ARRAY_BYTES}")
    if array.size:
        frames.append(np.ascontiguousarray(array, dtype=DTYPES[code]).reshape(-1).view(np.uint8).data)
    return [code, *array.shape]


def _unpack_array(item: object, frames: FrameReader) -> npt.NDArray[Any]:
    if type(item) is not list or not 2 <= len(item) <= 3 or type(item[0]) is not str or item[0] not in DTYPES:
        raise refuse("not an array descriptor [dtype, n] or [dtype, n, m]")
    dtype, shape = DTYPES[item[0]], item[1:]
    if not all(type(n) is int and 0 <= n <= MAX_ARRAY_BYTES for n in shape):
        raise refuse("an array's shape is not of integers within the limit")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > MAX_ARRAY_BYTES:
        raise refuse(f"an array of {nbytes} bytes, the limit is {MAX_ARRAY_BYTES}")
    if not nbytes:
        return np.empty(shape, dtype=dtype)
    array = np.frombuffer(frames.take(nbytes), dtype=dtype).reshape(shape)
    array.flags.writeable = False  # a message is immutable, also where its bytes came in a writable buffer
    return array
