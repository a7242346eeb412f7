"""PROTOCOL.md and the code say the same: version, limits, tags, fields in order, types, codes, codecs, examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import protocol
from protocol import limits, sockets
from protocol.codecs import CODECS, decode
from protocol.errors import FailureCode
from protocol.framing import decode as decode_frames
from protocol.framing import encode
from protocol.handshake import vocabulary_fingerprint
from protocol.matching import REPLIES
from protocol.messages import Branch, Branches, Failure, Hello, Message, Sampling, Verify, Welcome
from protocol.registry import LAYOUTS, REGISTRY

TEXT = (Path(protocol.__file__).parent / "PROTOCOL.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^#+ (.+?)\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL))
MESSAGES = {cls.__name__: cls for cls in REGISTRY.values()}


def rows(section: str) -> list[list[str]]:
    """The cells of a section's last table, its head left out."""
    table = re.findall(r"^\|(.+)\|$", SECTIONS[section], re.MULTILINE)
    return [[cell.strip() for cell in line.replace(r"\|", "¦").split("|")] for line in table[2:]]


def test_version() -> None:
    found = re.search(r"^Protocol version: \*\*(\d+)\*\*$", TEXT, re.MULTILINE)
    assert found and int(found[1]) == limits.PROTOCOL_VERSION
    assert [row[0] for row in rows("Versions")] == [str(1 + index) for index in range(limits.PROTOCOL_VERSION)]


def test_limits() -> None:
    documented = {name: int(value) for name, value, _ in rows("Limits")}
    names = {name for name in vars(limits) if name.isupper() and name not in ("PROTOCOL_VERSION",)}
    assert documented == {name: getattr(limits, name) for name in names if not name.startswith("MAX_UINT")}


def test_tags() -> None:
    documented = re.findall(r"^#### (\w+) \(tag (\d+)\)$", TEXT, re.MULTILINE)
    assert sorted(documented) == sorted((name, str(cls.TAG)) for name, cls in MESSAGES.items())
    assert len({cls.TAG for cls in MESSAGES.values()}) == len(MESSAGES)


@pytest.mark.parametrize("name", [*sorted(MESSAGES), "Sampling"])
def test_fields(name: str) -> None:
    cls = MESSAGES.get(name, Sampling)
    heading = name if name == "Sampling" else f"{name} (tag {MESSAGES[name].TAG})"
    assert [row[:2] for row in rows(heading)] == [[field, wire.describe()] for field, wire in LAYOUTS[cls]]
    assert cls.__doc__ or rows(heading) == []


@pytest.mark.parametrize("request_class", list(REPLIES), ids=lambda cls: cls.__name__)
def test_replies(request_class: type) -> None:
    heading = f"{request_class.__name__} (tag {MESSAGES[request_class.__name__].TAG})"
    assert f"answered by `{REPLIES[request_class].__name__}`" in SECTIONS[heading].replace("\n", " ")


def test_failure_codes() -> None:
    assert [row[0] for row in rows("Failure codes")] == [str(code) for code in FailureCode]


def test_codecs() -> None:
    assert tuple(row[0] for row in rows("Codecs")) == CODECS


def test_what_holds_in_every_version() -> None:
    assert (Hello.TAG, Welcome.TAG, Failure.TAG) == (1, 2, 12)
    assert LAYOUTS[Hello][0][0] == LAYOUTS[Welcome][0][0] == "protocol_version"
    assert [name for name, _ in LAYOUTS[Failure]] == ["request_id", "epoch", "block_id", "code", "text"]


def test_examples() -> None:
    examples = re.findall(r"^```frames (\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in examples] == ["Verify", "Verify", "Branch", "Branches"]
    for name, lines in examples:
        frames = [bytes.fromhex(line) for line in lines.splitlines()]
        message = decode_frames(frames)
        assert type(message).__name__ == name
        assert [bytes(frame) for frame in encode(message)] == frames
        if isinstance(message, Verify) and message.q.codec == "counts":
            assert message.tail.tolist() == [5] and message.tokens.tolist() == [4, 9]
            ids, q = decode(message.q, message.tokens, 49_152)
            assert ids.tolist() == [[17, 4, 900], [7, 8, 9]]
            assert (q * 65_536).tolist() == [[32_768, 19_661, 13_107], [21_846, 21_845, 21_845]]
        check_ahead(message)
    assert vocabulary_fingerprint([(0, "a"), (1, "é")]) in TEXT


def check_ahead(message: Message) -> None:
    """The example of a block in flight and its branches."""
    if isinstance(message, Branch):
        assert (message.gamma, message.least, message.seconds, message.width) == (2, 1, 0.25, 8)
        assert (message.alpha, message.room, message.ends) == (0.75, 100, (0,))
        assert message.tokens.tolist() == [11, 12, 13, 14] and (message.base_length, message.block_id) == (12, 3)
    if isinstance(message, Branches):
        outcomes = zip(message.accepted.tolist(), message.next.tolist(), message.lengths.tolist(), strict=True)
        assert list(outcomes) == [(4, 21, 2), (0, 22, 1)] and message.tokens.tolist() == [31, 32, 33]


def test_numbers_in_the_prose() -> None:
    prose = " ".join(TEXT.split())
    assert f"A message is 1 to {limits.MAX_FRAMES} frames." in prose
    assert f"PING each {sockets.HEARTBEAT_INTERVAL_MS} ms" in prose
    assert f"dead after {sockets.HEARTBEAT_TIMEOUT_MS} ms" in prose
    assert f"{sockets.HIGH_WATER_MARK} messages behind" in prose
    assert f"1 ≤ length ≤ K ≤ {limits.MAX_SUPPORT}" in prose
