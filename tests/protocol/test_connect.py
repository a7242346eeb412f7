"""Connecting to a worker over every transport: the handshake, and what else may be found at an address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import numpy as np
import pytest
import zmq
import zmq.asyncio

from protocol.endpoint import Endpoint, Peer
from protocol.errors import FailureCode, HandshakeError, LinkLost, LinkTimeout
from protocol.limits import PROTOCOL_VERSION
from protocol.link import Link
from protocol.messages import (
    Close,
    Failure,
    GetTokenizer,
    Hello,
    Message,
    Opened,
)
from tests.protocol.links import Context, StartWorker, linked, verdict
from tests.protocol.support import (
    PATIENCE,
    branch,
    branches,
    free_port,
    open_request,
    propose,
    tcp_server,
    verify,
    welcome,
)


async def test_handshake_and_every_request(address: str, context: Context, worker: StartWorker) -> None:
    started = worker(address, role="draft")
    async with Link(address, name="draft worker", context=context) as link:
        assert await link.connect("draft", PATIENCE) == welcome("draft") == link.welcome
        assert (await link.request(GetTokenizer(), PATIENCE)).message.chat_template == "{{ messages }}"
        assert (await link.request(open_request(), PATIENCE)).message == Opened(1, 0, 3)
        assert (await link.request(propose(), PATIENCE)).message.tokens.tolist() == [0, 1, 2, 3]
        assert (await link.request(branch(), PATIENCE)).message == branches(branch())
        assert (await link.request(verify(), PATIENCE)).message == verdict(verify())
        link.post(Close(1))
        assert await asyncio.to_thread(started.closed_seen.wait, PATIENCE), "Close did not arrive"
        assert not link.lost.is_set() and link.dropped == link.malformed == 0


async def test_what_was_posted_last_arrives_though_the_link_closes(
    address: str, context: Context, worker: StartWorker
) -> None:
    started = worker(address)
    async with linked(address, context) as link:
        link.post(Close(1))
    assert await asyncio.to_thread(started.closed_seen.wait, PATIENCE), "Close did not arrive"


async def test_connect_waits_for_a_worker_that_is_late(address: str, context: Context, worker: StartWorker) -> None:
    async with Link(address, name="target worker", context=context) as link:
        connecting = asyncio.create_task(link.connect("target", PATIENCE))
        done, _ = await asyncio.wait([connecting], timeout=0.15)
        assert not done
        worker(address)
        assert (await connecting).role == "target"


async def test_a_link_and_an_endpoint_each_with_its_own_context(remote_address: str) -> None:
    with Endpoint(remote_address) as endpoint:
        async with Link(remote_address, name="target worker") as link:
            connecting = asyncio.create_task(link.connect("target", PATIENCE))
            ((peer, message),) = await asyncio.to_thread(endpoint.receive, PATIENCE)
            assert isinstance(message, Hello)
            endpoint.send(peer, welcome())
            await connecting


async def test_an_asyncio_context_is_fine(address: str, context: Context, worker: StartWorker) -> None:
    worker(address)
    async with linked(address, zmq.asyncio.Context.shadow(context.underlying)) as link:
        await link.ping(PATIENCE)


async def test_ipv6(context: Context, worker: StartWorker) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    address = f"tcp://[::1]:{free_port()}"
    worker(address)
    async with linked(address, context) as link:
        await link.ping(PATIENCE)


async def refused(link: Link, role: str, timeout: float = PATIENCE) -> Exception:
    """How a connect fails; the link is closed by it."""
    with pytest.raises((HandshakeError, LinkTimeout, LinkLost)) as caught:
        await link.connect(role, timeout)
    assert "\n" not in str(caught.value)
    with pytest.raises(LinkLost):
        await link.request(verify(), 1)
    return caught.value


async def test_the_wrong_role(address: str, context: Context, worker: StartWorker) -> None:
    worker(address, role="draft")
    error = await refused(Link(address, name="target worker", context=context), "target")
    assert isinstance(error, HandshakeError) and "is a draft worker, but a target worker is wanted" in str(error)


async def test_the_wrong_version_of_the_worker(address: str, context: Context, worker: StartWorker) -> None:
    worker(address, me=welcome(protocol_version=1))
    error = await refused(Link(address, name="target worker", context=context), "target")
    assert isinstance(error, HandshakeError) and error.code is FailureCode.VERSION
    assert f"protocol version 1, this side speaks {PROTOCOL_VERSION}" in str(error)


async def test_the_wrong_version_of_the_orchestrator(address: str, context: Context, worker: StartWorker) -> None:
    def old(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        return endpoint.send(peer, Failure(-1, 0, -1, FailureCode.VERSION, "Hello speaks protocol version 1"))

    worker(address, behave=old)
    error = await refused(Link(address, name="target worker", context=context), "target")
    assert isinstance(error, HandshakeError) and error.code is FailureCode.VERSION
    assert "refuses the handshake" in str(error)


async def test_nobody_there(address: str, context: Context) -> None:
    error = await refused(Link(address, name="target worker", context=context), "target", 0.3)
    assert isinstance(error, LinkTimeout) and "nobody listens there" in str(error)


async def test_a_worker_that_says_loading_is_asked_again(address: str, context: Context, worker: StartWorker) -> None:
    asked = []

    def loading(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        asked.append(message)
        return len(asked) < 3 and endpoint.send(peer, Failure(-1, 0, -1, FailureCode.LOADING, "wait"))

    worker(address, behave=loading)
    async with linked(address, context):
        assert len(asked) == 3


async def test_a_worker_that_loads_for_ever(address: str, context: Context, worker: StartWorker) -> None:
    def loading(endpoint: Endpoint, peer: Peer, message: Message) -> bool:
        return endpoint.send(peer, Failure(-1, 0, -1, FailureCode.LOADING, "wait"))

    worker(address, behave=loading)
    error = await refused(Link(address, name="target worker", context=context), "target", 0.3)
    assert isinstance(error, LinkTimeout) and "is still loading its model after 0.3 s" in str(error)


async def test_a_worker_that_loads_and_reads_nothing(address: str, context: Context) -> None:
    """Its control thread tells; its main thread is in the loader."""
    with Endpoint(address, context=context):
        error = await refused(Link(address, name="target worker", context=context), "target", 0.5)
    assert isinstance(error, LinkTimeout) and "is still loading its model" in str(error)


async def test_a_worker_that_is_ready_and_hangs(address: str, context: Context) -> None:
    with Endpoint(address, context=context) as endpoint:
        endpoint.status.update(state="ready")
        error = await refused(Link(address, name="target worker", context=context), "target", 0.5)
    assert isinstance(error, LinkTimeout) and "is there but did not answer within 0.5 s" in str(error)


async def test_a_worker_that_ends_while_loading(address: str, context: Context) -> None:
    link = Link(address, name="target worker", context=context)
    with Endpoint(address, context=context) as endpoint:
        failing = asyncio.create_task(refused(link, "target"))
        assert len(await asyncio.to_thread(endpoint.receive, PATIENCE)) == 1
    assert isinstance(await failing, LinkLost)


def http(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 11\r\n\r\nBad Request")


def mute(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def noise(connection: socket.socket) -> None:
    connection.sendall(bytes(np.random.default_rng(3).integers(0, 256, 4096, dtype=np.uint8)))
    mute(connection)


def greeting_then_noise(connection: socket.socket) -> None:
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 32) + b"\x04\xff" + b"\xff" * 40)
    mute(connection)


def smtp(connection: socket.socket) -> None:
    connection.sendall(b"220 mail.example ESMTP ready\r\n")
    mute(connection)


@pytest.mark.parametrize("handle", [http, mute, noise, greeting_then_noise, smtp], ids=lambda each: each.__name__)
async def test_something_else_listens_there(handle: Callable[[socket.socket], None]) -> None:
    port = free_port()
    with tcp_server(port, handle):
        link = Link(f"tcp://127.0.0.1:{port}", name="target worker")
        error = await asyncio.wait_for(refused(link, "target", 1.0), PATIENCE)
    assert "no worker of ours" in str(error)


async def test_another_zmq_service(context: Context) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with context.socket(zmq.ROUTER) as router:
        router.bind(address)
        link = Link(address, name="target worker", context=context)
        failing = asyncio.create_task(refused(link, "target"))
        identity, *_ = await asyncio.to_thread(router.recv_multipart)
        router.send_multipart([identity, b"{}"])
        error = await failing
    assert isinstance(error, HandshakeError) and "no worker of ours" in str(error)


async def test_a_link_connects_once(address: str, context: Context, worker: StartWorker) -> None:
    worker(address)
    async with linked(address, context) as link:
        with pytest.raises(LinkLost, match="a link connects once"):
            await link.connect("target", PATIENCE)
        await link.ping(PATIENCE)


async def test_before_it_is_connected(address: str) -> None:
    async with Link(address, name="target worker") as link:
        with pytest.raises(LinkLost, match="not connected yet"):
            await link.request(verify(), 1)
