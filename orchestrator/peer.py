"""A worker as the orchestrator sees it: the process (where we started it), the link, the handshake, its end.

One Peer is one life of one worker. A restarted worker is a new Peer with a new `instance`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

from orchestrator.config import RuntimeConfig
from orchestrator.errors import SpecdecError, UsageError, WorkerFault
from orchestrator.places import Place
from orchestrator.supervisor import WorkerProcess
from protocol.errors import LinkError, LinkTimeout, ProtocolError
from protocol.link import Link
from protocol.messages import Welcome

SHUTDOWN_SECONDS = 2.0
LOAD_SECONDS = 3600.0  # a worker started here is watched: this bounds a load that hangs. A first start downloads


class LinkFactory(Protocol):
    """What makes the link to a worker: `Link` itself, or one that behaves otherwise (orchestrator/emulated_link.py)."""

    def __call__(self, address: str, *, name: str) -> Link: ...


class Peer:
    """A connected worker. `lost` is done when it's gone, with the error that says how."""

    def __init__(self, role: str, link: Link, process: WorkerProcess | None, folder: Path | None) -> None:
        self.role = role
        self.link = link
        self.process = process
        self._folder = folder
        self.welcome: Welcome
        self.lost: asyncio.Task[SpecdecError]

    @classmethod
    async def start(cls, role: str, place: Place, config: RuntimeConfig, link: LinkFactory = Link) -> Peer:
        """Start (or attach to) one worker and shake hands; raises with one clear line, leaving nothing behind."""
        folder: Path | None = None
        process: WorkerProcess | None = None
        address = place.address
        if place.device:
            folder = Path(tempfile.mkdtemp(prefix="specdec-"))
            address = f"ipc://{folder}/{role}"
            arguments, threads = _arguments(role, place.device, address, config)
            try:
                process = await WorkerProcess.spawn(role, arguments, threads)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        peer = cls(role, link(address, name=f"{role} worker"), process, folder)
        try:
            peer.welcome = await peer._connect(LOAD_SECONDS if process is not None else config.connect_timeout)
        except BaseException:
            if process is not None:
                process.kill()
            await peer.close()
            raise
        peer.lost = asyncio.create_task(peer._watch(), name=f"{role}-lost")
        return peer

    async def _connect(self, timeout: float) -> Welcome:
        connecting = asyncio.create_task(self.link.connect(self.role, timeout))
        watched: list[asyncio.Task[Any]] = [connecting]
        if self.process is not None:
            watched.append(self.process.exited)
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done() and self.process is not None:
                raise await self.process.death()
            return await connecting
        except LinkTimeout as error:
            hint = "" if self.process else f" (`specdec-{self.role}-worker --listen {self.link.address}` starts one)"
            raise WorkerFault(f"{error}{hint}") from error
        except LinkError as error:
            if self.process is not None:  # its end says more than the link's
                raise await self.process.death() from error
            raise WorkerFault(str(error)) from error
        except ProtocolError as error:
            raise UsageError(str(error)) from error
        finally:
            if not connecting.done():
                connecting.cancel()
                await asyncio.gather(connecting, return_exceptions=True)

    async def _watch(self) -> SpecdecError:
        """Wait until the worker is gone; the process's end says more than the link's."""
        lost = asyncio.create_task(self.link.lost.wait())
        watched: list[asyncio.Task[Any]] = [lost]
        if self.process is not None:
            watched.append(self.process.exited)
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if self.process is not None:
                try:
                    return await asyncio.wait_for(self.process.death(), SHUTDOWN_SECONDS)
                except TimeoutError:
                    return WorkerFault(f"the {self.role} worker (pid {self.process.pid}) closed its connection")
            return WorkerFault(f"{self.link.lost_reason}; start it again")
        finally:
            lost.cancel()

    @property
    def alive(self) -> bool:
        return not self.lost.done()

    async def close(self) -> None:
        """Take leave: a started worker is shut down and waited for, an attached one is left running."""
        if hasattr(self, "lost"):
            self.lost.cancel()
        if self.process is not None and not self.process.exited.done():
            with contextlib.suppress(LinkError, ProtocolError):  # the ladder below ends it all the same
                await self.link.shutdown(SHUTDOWN_SECONDS)
        await self.link.close()
        if self.process is not None:
            await self.process.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _arguments(role: str, device: str, address: str, config: RuntimeConfig) -> tuple[list[str], int]:
    target = role == "target"
    threads = config.target_threads if target else config.draft_threads
    arguments = [
        "--listen", address,
        "--device", device,
        "--model", config.target_model if target else config.draft_model,
        "--dtype", config.target_dtype if target else config.draft_dtype,
        "--threads", str(threads),
        "--engine", config.target_engine if target else config.draft_engine,
        "--weights", config.weights,
        "--graphs", config.graphs,
        "--kept-tokens", str(config.kept_tokens),
    ]  # fmt: skip
    return arguments + (["--debug"] if config.debug else []), threads
