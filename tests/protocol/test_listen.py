"""Where a worker can listen: addresses in use, ipc files, and what is left when it closes."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.endpoint import Endpoint
from protocol.errors import AddressError, AddressInUse
from protocol.messages import Close
from tests.protocol.rawpeer import HELLO, Context, RawPeer, receive
from tests.protocol.support import free_port


@contextmanager
def listening(address: str, **options: object) -> Iterator[Endpoint]:
    with Endpoint(address, **options) as endpoint:  # type: ignore[arg-type]
        yield endpoint


def test_its_own_context_and_the_address_free_again(remote_address: str) -> None:
    for _ in range(3):
        with listening(remote_address):
            pass


def test_an_address_in_use(address: str, context: Context) -> None:
    with listening(address, context=context), pytest.raises(AddressInUse, match="address is in use; stop") as caught:
        Endpoint(address, context=context)
    assert address in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("which", [0, 1], ids=["data", "control"])
def test_either_port_in_use(which: int) -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port + which)),
        pytest.raises(AddressInUse, match=f"cannot listen on tcp://127.0.0.1:{port + which}: "),
    ):
        Endpoint(f"tcp://127.0.0.1:{port}")


def test_a_live_ipc_socket_is_not_stolen(tmp_path: Path) -> None:
    """zmq alone would unlink the path and bind anew: the first worker would be deaf without a word."""
    with listening(f"ipc://{tmp_path}/w"):
        with pytest.raises(AddressInUse):
            Endpoint(f"ipc://{tmp_path}/w")
        assert (tmp_path / "w").exists()


def test_a_stale_ipc_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "w"))
    with listening(f"ipc://{tmp_path}/w"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_file_of_the_user_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("thesis")
    with pytest.raises(AddressError, match="a file that is no socket is there"):
        Endpoint(f"ipc://{tmp_path}/w")
    assert (tmp_path / "w").read_text() == "thesis"


def test_ipc_files_are_their_owners_alone_and_removed(tmp_path: Path) -> None:
    with listening(f"ipc://{tmp_path}/w"):
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        assert modes == {"w": 0o600, "w.control": 0o600}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ipc:///no/such/folder/w", "the folder does not exist"),
        ("tcp://0.0.0.0:5555", "give --insecure"),
        ("tcp://127.0.0.1:0", "from 1 to 65534"),
        ("nonsense", "not of the form"),
    ],
)
def test_addresses_where_nobody_can_listen(address: str, says: str) -> None:
    with pytest.raises(AddressError, match=says):
        Endpoint(address)


def test_hosts_that_are_unknown_or_not_ours() -> None:
    with pytest.raises(AddressError, match=r"host 'no-such-host.invalid' is unknown"):
        Endpoint("tcp://no-such-host.invalid:5555", insecure=True)
    with pytest.raises(AddressError, match="choose another --listen"):
        Endpoint(f"tcp://192.0.2.1:{free_port()}", insecure=True)  # TEST-NET-1


def test_localhost_is_an_address(context: Context) -> None:
    port = free_port()
    with listening(f"tcp://localhost:{port}", context=context) as endpoint:
        peer = RawPeer(context, f"tcp://127.0.0.1:{port}")
        peer.say(Close(3))
        assert receive(endpoint) == [Close(3)]
        peer.close()


def test_an_address_is_free_when_close_returns(address: str, context: Context) -> None:
    peers = []
    for turn in range(20):
        with listening(address, context=context) as endpoint:
            peers.append(RawPeer(context, address, b"peer %d" % turn))
            peers[-1].say(HELLO)
            receive(endpoint)
    for peer in peers:
        peer.close()
