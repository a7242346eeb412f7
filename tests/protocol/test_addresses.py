"""Addresses: what is taken, what is refused and why, where the control socket is, who may listen where."""

from __future__ import annotations

import pytest

from protocol.addresses import MAX_IPC_PATH, parse, parse_listen
from protocol.errors import AddressError


@pytest.mark.parametrize(
    ("text", "control"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5556"),
        ("tcp://gpu-host.example:1", "tcp://gpu-host.example:2"),
        ("tcp://[::1]:65534", "tcp://[::1]:65535"),
        ("tcp://*:7000", "tcp://*:7001"),
        ("ipc:///tmp/a b".replace(" ", "_"), "ipc:///tmp/a_b.control"),
        ("ipc://relative", "ipc://relative.control"),
        ("inproc://name", "inproc://name.control"),
    ],
)
def test_valid_addresses(text: str, control: str) -> None:
    address = parse(text)
    assert address.data == str(address) == text
    assert address.control == control


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not of the form tcp://host:port"),
        ("gpu0", "not of the form"),
        ("127.0.0.1:5555", "not of the form"),
        ("http://127.0.0.1:80", "not of the form"),
        ("udp://127.0.0.1:80", "not of the form"),
        ("tcp://", "needs a host and a port"),
        ("tcp://127.0.0.1", "needs a host and a port"),
        ("tcp://:5555", "needs a host and a port"),
        ("tcp://h:", "needs a host and a port"),
        ("tcp://h:0", "from 1 to 65534"),
        ("tcp://h:*", "from 1 to 65534"),
        ("tcp://h:65535", "control socket takes the next"),
        ("tcp://h:99999999999999", "from 1 to 65534"),
        ("tcp://h:-1", "from 1 to 65534"),
        ("tcp://h:5_5", "from 1 to 65534"),
        ("tcp://h:٣", "from 1 to 65534"),
        ("tcp://h:80/path", "from 1 to 65534"),
        ("tcp://a/b:80", "not a host name"),
        ("tcp://user@h:80", "not a host name"),
        ("tcp://eth0;1.2.3.4:80", "not a host name"),
        ("tcp://::1:80", "in brackets"),
        ("tcp://[::1:80", "in brackets"),
        ("tcp://[zz]:80", "not an IPv6 address"),
        ("tcp://a b:80", "white space"),
        ("ipc://", "needs a path"),
        ("ipc://*", "needs a path"),
        ("ipc://@abstract", "needs a path"),
        ("ipc:///tmp/\0", "white space"),
        ("ipc:///" + "x" * 107, "the system allows 107"),
        ("ipc:///" + "é" * 50, "the system allows 107"),
        ("inproc://", "needs a name"),
        ("inproc://" + "x" * 250, "too long"),
    ],
)
def test_invalid_addresses(text: str, says: str) -> None:
    with pytest.raises(AddressError, match=says) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_the_longest_ipc_path() -> None:
    longest = "/" + "x" * (MAX_IPC_PATH - len(".control") - 1)
    assert parse("ipc://" + longest).path == longest
    with pytest.raises(AddressError):
        parse("ipc://" + longest + "x")


LOOPBACK = ["tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc://p", "inproc://n"]
OPEN = [
    "tcp://0.0.0.0:1",
    "tcp://*:1",
    "tcp://[::]:1",
    "tcp://10.0.0.1:1",
    "tcp://gpu-host:1",
    "tcp://localhost.evil:1",
]


@pytest.mark.parametrize("text", LOOPBACK)
def test_loopback(text: str) -> None:
    assert parse(text).is_loopback
    assert parse_listen(text).data == text


@pytest.mark.parametrize("text", OPEN)
def test_not_loopback(text: str) -> None:
    assert not parse(text).is_loopback
    with pytest.raises(AddressError, match=r"refusing to listen on .* give --insecure on a network you trust"):
        parse_listen(text)
    assert parse_listen(text, insecure=True).data == text
