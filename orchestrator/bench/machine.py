"""What a benchmark ran on and with: the settings, the machine, the versions, the date."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from orchestrator.config import RuntimeConfig
from orchestrator.peer import Peer
from orchestrator.request import GenerateOptions
from orchestrator.runtime import Runtime
from protocol.limits import PROTOCOL_VERSION

PACKAGES = ("specdec-orchestrator", "torch", "transformers", "pyzmq", "msgpack", "numpy")


def described(
    runtime: Runtime, config: RuntimeConfig, options: GenerateOptions, synthetic: str | None
) -> dict[str, Any]:
    """The part of the JSON object that isn't measured."""
    return {
        "config": {
            **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
            **dataclasses.asdict(options),
            "synthetic": synthetic,
        },
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "cpu": cpu(),
            "cores": os.cpu_count() or 1,
            "load": round(os.getloadavg()[0], 2),  # before: a benchmark beside other work measures that too
            "target": _device(runtime.target),
            "draft": _device(runtime.draft),
        },
        "versions": {
            "python": platform.python_version(),
            "protocol": PROTOCOL_VERSION,
            **{package: _version(package) for package in PACKAGES},
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _device(peer: Peer | None) -> str:
    return "none" if peer is None else f"{peer.welcome.model} on {peer.welcome.device}, {peer.welcome.dtype}"


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
