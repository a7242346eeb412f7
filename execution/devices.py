"""Device and dtype names of the command line, checked against this machine. Imports torch and nothing of ours."""

from __future__ import annotations

import json
import re

import torch

from execution.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def available_devices() -> list[str]:
    """The names that `parse_device` takes on this machine."""
    names = ["cpu", *(f"gpu{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    return names


def canonical_device(name: str) -> str:
    """`cpu`, `gpuN` (also for `cuda:N`) or `mps`. ModelError for what is none of these."""
    match = re.fullmatch(r"(?:gpu|cuda:?)(\d*)", name)
    if match is None and name not in ("cpu", "mps"):
        raise ModelError(f"device {name!r} is unknown: choose one of {', '.join(available_devices())}")
    return f"gpu{int(match[1] or 0)}" if match else name


def parse_device(name: str) -> torch.device:
    """As torch has it. ModelError for a device that is unknown or not there."""
    canonical, devices = canonical_device(name), available_devices()
    if canonical not in devices:
        raise ModelError(f"device {name!r} is not on this machine: choose one of {', '.join(devices)}")
    return torch.device(canonical.replace("gpu", "cuda:"))


def parse_dtype(name: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float16`. ModelError otherwise."""
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is unknown: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def set_threads(threads: int) -> None:
    """Use `threads` cores for the operators of this process, and none beside them."""
    if threads < 1:
        raise ModelError(f"threads {threads} is not a number of threads: give 1 or more")
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:  # fixed once the process has run anything in parallel; only costs idle threads
            return


if __name__ == "__main__":  # for `doctor`, which does without torch
    print(json.dumps(available_devices()))
