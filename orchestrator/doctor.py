"""The command `doctor`: what is installed, which devices there are, and whether the two workers would work together."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import statistics
import sys

from rich.console import Console
from rich.table import Table

from orchestrator.config import RuntimeConfig
from orchestrator.draft_pool import check_vocabulary
from orchestrator.errors import SpecdecError
from orchestrator.peer import Peer
from orchestrator.places import Place
from protocol.errors import LinkError
from protocol.limits import PROTOCOL_VERSION

PACKAGES = (
    *("specdec-orchestrator", "torch", "transformers", "llama-cpp-python"),
    *("tokenizers", "pyzmq", "msgpack", "numpy"),
)
PINGS = 20
PING_SECONDS = 5.0
DEVICES_SECONDS = 60.0


async def run_doctor(config: RuntimeConfig) -> int:
    """Print the report; the status is 1 where anything is wrong."""
    report = Report()
    report.add(
        "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    )
    for package in PACKAGES:
        report.add(package, _version(package))
    report.add("protocol", f"version {PROTOCOL_VERSION}")
    report.add("devices here", await _devices())
    target, draft = await asyncio.gather(
        _try_start("target", config.target_place, config, report),
        _try_start("draft", config.draft_place, config, report),
    )
    try:
        for peer in (target, draft):
            if peer is not None:
                await _describe(peer, report)
        if target is not None and draft is not None:
            _compare(target, draft, report)
    finally:
        for peer in (target, draft):
            if peer is not None:
                await peer.close()
    report.show()
    return 1 if report.failed else 0


class Report:
    """Rows of the report, and whether one of them is a fault."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str]] = []
        self.failed = False

    def add(self, what: str, found: str) -> None:
        self._rows.append(("", what, found))

    def check(self, what: str, found: str, *, good: bool) -> None:
        self.failed |= not good
        self._rows.append(("ok" if good else "FAILED", what, found))

    def show(self) -> None:
        table = Table(show_header=False, box=None, pad_edge=False)
        for state, what, found in self._rows:
            colour = {"ok": "green", "FAILED": "red"}.get(state, "")
            table.add_row(f"[{colour}]{state}[/]" if colour else "", what, found)
        Console(width=None if sys.stdout.isatty() else 200).print(table)


async def _try_start(role: str, place: Place | None, config: RuntimeConfig, report: Report) -> Peer | None:
    if place is None:
        report.add(role, "none: plain decoding")
        return None
    try:
        return await Peer.start(role, place, config)
    except SpecdecError as error:
        report.check(role, str(error), good=False)
        return None


async def _describe(peer: Peer, report: Report) -> None:
    role, welcome = peer.role, peer.welcome
    where = "started here" if peer.process is not None else f"attached at {peer.link.address}"
    report.check(role, f"{welcome.model} on {welcome.device}, {welcome.dtype}, pid {welcome.pid}, {where}", good=True)
    report.add(f"{role} vocabulary", f"{welcome.vocab_size} ids, fingerprint {welcome.vocabulary[:16] or 'none (any)'}")
    report.add(f"{role} context", f"{welcome.context_length} tokens")
    report.add(f"{role} threads", str(welcome.threads))
    try:
        trips = [(await peer.link.ping(PING_SECONDS))[1] for _ in range(PINGS)]
    except LinkError as error:
        report.check(f"{role} round trip", str(error), good=False)
        return
    report.check(f"{role} round trip", f"{statistics.median(trips) * 1000:.2f} ms (median of {PINGS})", good=True)


def _compare(target: Peer, draft: Peer, report: Report) -> None:
    try:
        notes = check_vocabulary(target.welcome, draft.welcome)
    except SpecdecError as error:
        report.check("tokenizers", str(error), good=False)
        return
    same = "prompt lookup takes any vocabulary" if not draft.welcome.vocabulary else "the two vocabularies match"
    report.check("tokenizers", "; ".join((same, *notes)), good=True)
    cores, threads = os.cpu_count() or 1, target.welcome.threads + draft.welcome.threads
    if target.process and draft.process and target.welcome.device == draft.welcome.device == "cpu" and threads > cores:
        report.add("threads", f"{threads} on {cores} cores: fine while draft and target take turns")


async def _devices() -> str:
    """The devices of this machine, asked of a process of its own: torch stays out of this one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "execution.devices", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), DEVICES_SECONDS)
        return ", ".join(json.loads(output))
    except (TimeoutError, json.JSONDecodeError):
        if process.returncode is None:
            process.kill()
        return "unknown: torch doesn't load here"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
