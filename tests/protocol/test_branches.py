"""Branches as one message: its arrays fit together, or it is refused; the largest one fits the limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from protocol import limits
from protocol.codecs import EncodedQ
from protocol.errors import ProtocolError
from protocol.framing import decode, encode
from protocol.messages import token_array
from tests.protocol.support import branch, branches

MANY = range(limits.MAX_BRANCHES + 1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"accepted": [4]}, "branches of 1, 2 and 2 entries"),
        ({"next": [21, 22, 23]}, "branches of 2, 3 and 2 entries"),
        ({"lengths": [5]}, "branches of 2, 2 and 1 entries"),
        ({"lengths": [limits.MAX_GAMMA + 1, 0]}, "a branch of 65 tokens"),
        ({"accepted": [2, 2], "next": [21, 21]}, "two branches of one outcome"),
        ({"accepted": MANY, "next": MANY, "lengths": [0] * len(MANY)}, "129 tokens, allowed are 0..128"),
    ],
)
def test_branches_that_contradict_themselves(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        encode(branches(branch(), **changes))


@pytest.mark.parametrize("tokens", [(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)])
def test_branches_have_the_tokens_that_their_lengths_say(tokens: tuple[int, ...]) -> None:
    message = branches(branch())
    assert len(message.tokens) == 5
    with pytest.raises(ProtocolError, match=f"branches of 5 tokens in all, {len(tokens)} came"):
        encode(dataclasses.replace(message, tokens=token_array(tokens)))
    frames = [bytes(frame) for frame in encode(message)]
    frames[0] = frames[0].replace(b"\x92\xa2i4\x05", b"\x92\xa2i4\x04")
    frames[4] = frames[4][:16]
    with pytest.raises(ProtocolError, match="branches of 5 tokens in all, 4 came") as caught:
        decode(frames)
    assert (caught.value.request_id, caught.value.epoch, caught.value.block_id) == (1, 0, 0)


def test_the_most_branches_of_the_most_tokens() -> None:
    """All arrays and those of counts have a frame each: no more than a message may have."""
    outcomes = range(limits.MAX_BRANCHES)
    tokens = limits.MAX_BRANCHES * limits.MAX_GAMMA
    arrays = (np.zeros((tokens, 2), np.uint16), np.zeros((tokens, 2), np.uint16), np.ones(tokens, np.uint8))
    full = branches(branch(), accepted=[0] * len(outcomes), next=outcomes, lengths=[limits.MAX_GAMMA] * len(outcomes))
    full = dataclasses.replace(full, q=EncodedQ("counts", arrays))
    assert decode(encode(full)) == full and len(encode(full)) == limits.MAX_FRAMES
    none = branches(branch(), accepted=[], next=[], lengths=[])
    assert decode(encode(none)) == none and len(encode(none)) == 1
