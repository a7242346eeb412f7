"""Framing: every message comes back as it was; whatever else arrives is a message or ProtocolError, nothing else."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import fields, limits
from protocol.codecs import NO_Q, EncodedQ
from protocol.errors import FailureCode, ProtocolError
from protocol.framing import decode, encode
from protocol.messages import (
    Block,
    Failure,
    Hello,
    Message,
    Ping,
    Sampling,
    TokenizerReply,
    Verdict,
    Verify,
    token_array,
)
from protocol.registry import LAYOUTS, REGISTRY
from tests.protocol.strategies import messages, messages_of
from tests.protocol.support import branch, branches, open_request, propose, verify, welcome

ALL = sorted(REGISTRY.values(), key=lambda cls: cls.TAG)


def raw(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_message_comes_back(cls: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages_of(cls))
    frames = raw(message)
    back = decode(frames)
    assert type(back) is cls
    assert back == message
    assert raw(back) == frames
    for name, wire in LAYOUTS[cls]:
        if isinstance(wire, fields.TokenIds):
            array = getattr(back, name)
            assert array.dtype == np.int32 and array.ndim == 1
            assert not array.flags.writeable or array.size == 0


def test_equality_sees_every_field() -> None:
    """The round trip above proves nothing if == does not look."""
    base = verify()
    for field in dataclasses.fields(base):
        old = getattr(base, field.name)
        new = token_array([1, 2]) if isinstance(old, np.ndarray) else EncodedQ("dense") if old is NO_Q else old + 1
        assert dataclasses.replace(base, **{field.name: new}) != base, field.name


@settings(deadline=None, max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=10))
def test_arbitrary_bytes(frames: list[bytes]) -> None:
    check_outcome(frames)


_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(REGISTRY)), st.lists(_VALUES, max_size=18), st.lists(st.binary(max_size=20), max_size=4))
def test_arbitrary_headers(tag: int, items: list[Any], arrays: list[bytes]) -> None:
    check_outcome([msgpack.packb([tag, *items]), *arrays])


@settings(deadline=None, max_examples=250)
@given(messages(), st.data())
def test_mutated_frames(message: Message, data: st.DataObject) -> None:
    frames = raw(message)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(frames, data)
    check_outcome(frames)


@settings(deadline=None, max_examples=200)
@given(messages(), st.data())
def test_one_field_replaced(message: Message, data: st.DataObject) -> None:
    frames = raw(message)
    header = msgpack.unpackb(frames[0])
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(_VALUES)
    check_outcome([msgpack.packb(header), *frames[1:]])


def mutate(frames: list[bytes], data: st.DataObject) -> None:
    if not frames:
        return
    at = data.draw(st.integers(0, len(frames) - 1))
    kind = data.draw(st.sampled_from(("flip", "cut", "grow", "drop", "double", "swap")))
    if kind == "flip" and frames[at]:
        place = data.draw(st.integers(0, len(frames[at]) - 1))
        changed = bytearray(frames[at])
        changed[place] ^= data.draw(st.integers(1, 255))
        frames[at] = bytes(changed)
    elif kind == "cut":
        frames[at] = frames[at][: data.draw(st.integers(0, len(frames[at])))]
    elif kind == "grow":
        frames[at] += data.draw(st.binary(min_size=1, max_size=4))
    elif kind == "drop":
        del frames[at]
    elif kind == "double":
        frames.insert(at, frames[at])
    else:
        other = data.draw(st.integers(0, len(frames) - 1))
        frames[at], frames[other] = frames[other], frames[at]


def check_outcome(frames: list[bytes]) -> None:
    try:
        message = decode(frames)
    except ProtocolError as error:
        assert error.code in (FailureCode.BAD_FRAME, FailureCode.VERSION)
        assert error.text and "\n" not in error.text.splitlines()[0]
        return
    assert decode(encode(message)) == message  # whatever is accepted is a valid message


@settings(deadline=None, max_examples=150)
@given(messages(), st.data())
def test_no_garbage_behind_anything(message: Message, data: st.DataObject) -> None:
    frames = raw(message)
    at = data.draw(st.integers(0, len(frames) - 1))
    longer = [frame + b"\0" if index == at else frame for index, frame in enumerate(frames)]
    for bad in (longer, [*frames, b""], [*frames, b"x"], frames[:-1]):
        with pytest.raises(ProtocolError):
            decode(bad)
    header = msgpack.unpackb(frames[0])
    for bad_header in ([*header, 0], header[:-1]):
        with pytest.raises(ProtocolError):
            decode([msgpack.packb(bad_header), *frames[1:]])


@pytest.mark.parametrize("frames", [[], None, 5, [None], ["text"], [3], [b""], [b"\xc1"], [b"\x91" * 100_000]])
def test_what_is_no_frames_at_all(frames: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


def header_with(message: Message, position: int, value: object) -> list[bytes]:
    frames = raw(message)
    header = msgpack.unpackb(frames[0])
    header[position] = value
    return [msgpack.packb(header), *frames[1:]]


VERDICT = Verdict(1, 0, 3, 2, 4, 7, "bonus", 0.5, 1, 5)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -0.1, 1, True, "1", None])
def test_seconds_are_finite_and_positive(seconds: object) -> None:
    with pytest.raises(ProtocolError, match=r"Verdict.seconds"):
        decode(header_with(VERDICT, 8, seconds))
    if seconds != 1:  # an integer is taken from our own side, and sent as a float
        with pytest.raises(ProtocolError, match=r"Verdict.seconds"):
            encode(dataclasses.replace(VERDICT, seconds=seconds))


@pytest.mark.parametrize("request_id", [-1, 2**32, True, 1.0, "1", None, [1]])
def test_integers_are_integers_in_range(request_id: object) -> None:
    with pytest.raises(ProtocolError, match=r"Verdict.request_id"):
        decode(header_with(VERDICT, 1, request_id))
    with pytest.raises(ProtocolError, match=r"Verdict.request_id"):
        encode(dataclasses.replace(VERDICT, request_id=request_id))


def test_numpy_scalars_are_taken() -> None:
    message = dataclasses.replace(VERDICT, token=np.int64(7), seconds=np.float32(0.5))
    assert decode(encode(message)) == VERDICT


@pytest.mark.parametrize(
    "sampling",
    [Sampling(-0.1), Sampling(math.nan), Sampling(math.inf), Sampling(1.0, -1), Sampling(1.0, 0, 0.0),
     Sampling(1.0, 0, 1.1), Sampling(1.0, 0, 1.0, 1.0), Sampling(1.0, 0, 1.0, -0.1)],
)  # fmt: skip
def test_sampling_is_bounded(sampling: Sampling) -> None:
    with pytest.raises(ProtocolError, match=r"Open.sampling"):
        encode(dataclasses.replace(open_request(), sampling=sampling))


def test_gamma_and_lengths_are_limited() -> None:
    ok = verify(tokens=tuple(range(limits.MAX_GAMMA)))
    assert decode(encode(ok)) == ok
    too_long = np.zeros(limits.MAX_LENGTH + 1, np.int32)
    for message in (
        verify(tokens=tuple(range(limits.MAX_GAMMA + 1))),
        propose(gamma=limits.MAX_GAMMA + 1),
        dataclasses.replace(open_request(), tokens=too_long),
        dataclasses.replace(open_request(), tokens=token_array([])),
        dataclasses.replace(propose(), tail=token_array([1, 2, 3, 4])),  # base length 3
        dataclasses.replace(branch(), tail=token_array([1, 2, 3, 4])),
        branch(tokens=tuple(range(limits.MAX_GAMMA + 1))),
        branch(gamma=limits.MAX_GAMMA + 1),
        dataclasses.replace(branch(), width=0),
        dataclasses.replace(branch(), width=limits.MAX_BRANCHES + 1),
        dataclasses.replace(branch(), alpha=1.001),
        dataclasses.replace(branch(), ends=(0,) * (limits.MAX_EOS_IDS + 1)),
        dataclasses.replace(verify(), tokens=np.array([-1])),
        dataclasses.replace(verify(), tokens=np.array([2**31])),
        dataclasses.replace(verify(), tokens=np.array([1.0])),
    ):
        with pytest.raises(ProtocolError):
            encode(message)
    longest = dataclasses.replace(open_request(), tokens=too_long[1:])
    assert decode(encode(longest)) == longest


def test_gamma_plus_one_tokens_is_refused_and_names_its_request() -> None:
    """Fault C11: the answer must reach the request that waits, so the ids of a refused message are kept."""
    frames = header_with(verify(9, 5), 6, ["i4", limits.MAX_GAMMA + 1])
    frames[1] = bytes(4 * (limits.MAX_GAMMA + 1))
    with pytest.raises(ProtocolError, match=r"Verify.tokens: 65 tokens") as caught:
        decode(frames)
    assert (caught.value.request_id, caught.value.epoch, caught.value.block_id) == (9, 0, 5)


def test_q_of_another_gamma_is_refused() -> None:
    q = EncodedQ("dense", (np.ones((5, 3), np.float32),))
    for message in (
        Verify(1, 0, 3, 0, token_array([]), token_array([1, 2, 3, 4]), q),
        Block(1, 0, 3, 0, 0.0, 1, 4, token_array([1, 2, 3, 4]), q),
        dataclasses.replace(branches(branch(gamma=3)), q=q),
    ):
        with pytest.raises(ProtocolError, match="dense codec of 4 tokens"):
            encode(message)


def test_dtypes_are_a_closed_list() -> None:
    for dtype in ("f8", "i8", "O", "<f4", "U1", "c8", "b1", ""):
        with pytest.raises(ProtocolError):
            decode(header_with(verify(), 6, [dtype, 2]))
    with pytest.raises(ProtocolError, match="float64"):
        encode(dataclasses.replace(verify(), q=EncodedQ("dense", (np.ones((4, 2)),))))


@pytest.mark.parametrize("shape", [[], [-1], [2.0], [True], [2**40], [2**27, 2**27], [1, 1, 4], ["4"], [None]])
def test_shapes_are_checked_before_memory_is_taken(shape: list[object]) -> None:
    with pytest.raises(ProtocolError):
        decode(header_with(verify(), 6, ["i4", *shape]))


def test_texts_and_headers_are_limited() -> None:
    for changes in ({"model": "x" * (limits.MAX_TEXT_BYTES + 1)}, {"device": "é" * 33}, {"model": "\ud800"}):
        with pytest.raises(ProtocolError, match="Welcome"):
            encode(welcome(**changes))
    with pytest.raises(ProtocolError, match="list of 17"):
        encode(welcome(codecs=("x",) * (limits.MAX_NAMES + 1)))
    with pytest.raises(ProtocolError, match="chat_template"):
        encode(TokenizerReply(b"", "x" * (limits.MAX_TEMPLATE_BYTES + 1)))
    largest = TokenizerReply(b"x" * 1000, "x" * limits.MAX_TEMPLATE_BYTES)
    assert decode(encode(largest)) == largest
    with pytest.raises(ProtocolError, match="header of"):
        decode([msgpack.packb([1, limits.PROTOCOL_VERSION, "x" * limits.MAX_HEADER_BYTES, ""])])
    with pytest.raises(ProtocolError, match="9 frames"):
        decode([b"x"] * 9)


def test_a_failure_always_travels() -> None:
    """Its text is clipped or cleaned, since an error about an error helps nobody."""
    for text in ("x" * 10_000, "é" * 3_000, "\ud800", ""):
        back = decode(encode(Failure(-1, 0, -1, FailureCode.INTERNAL, text)))
        assert isinstance(back, Failure)
        assert len(back.text.encode()) <= limits.MAX_TEXT_BYTES
    with pytest.raises(ProtocolError):
        encode(Failure(-1, 0, -1, "novel", "x"))


def test_another_version_is_named_even_if_its_fields_are_others() -> None:
    mine = limits.PROTOCOL_VERSION
    for header in ([1, 1, "orchestrator", "0.9"], [1, 9, {"new": "fields"}], [2, 7]):
        with pytest.raises(ProtocolError, match=rf"protocol version {header[1]}, this side speaks {mine}") as caught:
            decode([msgpack.packb(header)])
        assert caught.value.code is FailureCode.VERSION
    assert decode(encode(Hello(mine, "orchestrator", "x"))) == Hello(mine, "orchestrator", "x")


def test_only_messages_are_encoded() -> None:
    for thing in (Sampling(), object(), None, Ping, {"tag": 1}):
        with pytest.raises(ProtocolError):
            encode(thing)  # type: ignore[arg-type]


def test_arrays_in_writable_or_odd_buffers() -> None:
    frames = raw(verify())
    padded = bytearray(b"x" + frames[1])
    back = decode([memoryview(frames[0]), memoryview(padded)[1:]])
    assert back == verify()
    assert isinstance(back, Verify) and not back.tokens.flags.writeable


def test_arrays_of_other_layouts_are_sent_as_they_look() -> None:
    wide = np.arange(8, dtype=np.int64)[::2]
    turned = np.arange(6, dtype=np.float32).reshape(3, 2).T[:, ::-1]
    message = dataclasses.replace(verify(tokens=(1, 2)), tail=wide[:3], q=EncodedQ("dense", (turned,)))
    back = decode(encode(message))
    assert isinstance(back, Verify)
    assert back.tail.tolist() == [0, 2, 4]
    assert back.q.arrays[0].tolist() == [[4, 2, 0], [5, 3, 1]]


EXAMPLES = [
    TokenizerReply(b"{}", ""),
    open_request(),
    propose(),
    branch(),
    verify(),
    branches(branch()),
    VERDICT,
    Failure(1, 0, 2, "nan", "row 3"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_byte_too_many_or_too_few_anywhere(message: Message) -> None:
    frames = raw(message)
    for at, frame in enumerate(frames):
        for changed in (frame + b"\0", frame[:-1]):
            with pytest.raises(ProtocolError) as caught:
                decode([*frames[:at], changed, *frames[at + 1 :]])
            if at:
                assert "its header says" in caught.value.text
