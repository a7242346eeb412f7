"""Check torch's engine on a GPU: that captured passes are exact, and how near their time is to the memory's.

    python scripts/gpu_check.py                        # Llama 3.1 8B and 3.2 1B in shape, bfloat16; below 8 minutes
    python scripts/gpu_check.py --small --device cpu   # the same with tiny networks: does the check itself run?

Weights are random and made on the device. Exit status 1 when something isn't exact, when a pass can't be captured, or
when a bar isn't kept; with --small no bar counts.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click
import torch
from gpu import models, timing
from gpu.decoding import check_decoding
from gpu.exactness import Finding, check_logits
from rich.console import Console
from rich.progress import Progress

from execution.devices import parse_device
from execution.errors import ModelError

GIB = 1 << 30
BESIDE_WEIGHTS = 8 * GIB  # keys and values of two executors, logits, graphs, the measured copy
COPY = GIB  # bytes


class Warnings(logging.Handler):
    """What was warned of: passes that could not be captured."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def checked_device(name: str, small: bool) -> torch.device:
    """The device, where it's there and its memory is enough. Raises click.ClickException."""
    try:
        device = parse_device(name)
    except ModelError as error:
        raise click.ClickException(str(error)) from error
    if small:
        return device
    if device.type != "cuda":
        raise click.ClickException(f"device {name!r} has no CUDA: choose a gpu, or add --small for tiny networks")
    needed = 2 * (models.parameters(models.TARGET) + models.parameters(models.DRAFT)) + BESIDE_WEIGHTS
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed:
        raise click.ClickException(
            f"device {name!r} has {free / GIB:.1f} GiB of memory free, and this needs {needed / GIB:.1f}: end what runs"
            " there, or add --small for tiny networks"
        )
    return device


@contextmanager
def reporting(count: int) -> Any:
    """A function to call after each step of so many; the steps are shown on a terminal."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("check", total=count)
        yield lambda: progress.advance(task)


def check(device: torch.device, small: bool, advance: Callable[[], None]) -> tuple[list[Finding], list[timing.Timed]]:
    """Everything: first what has to be exact, then times."""
    shapes = (models.SMALL_TARGET, models.SMALL_DRAFT) if small else (models.TARGET, models.DRAFT)
    findings = check_decoding(device, 24 if small else 96)
    advance()
    findings += check_logits(models.build(models.PAIR, torch.float32, device, 3), "small, float32")
    advance()
    networks, read = {}, {}
    for seed, (name, shape) in enumerate(zip(("target", "draft"), shapes, strict=True)):
        networks[name] = models.build(shape, torch.bfloat16, device, seed)
        read[name] = models.weight_bytes(networks[name])
        findings += check_logits(networks[name], f"{name}, bfloat16")
        advance()
    rate = timing.bandwidth(device, 1 << 24 if small else COPY)
    timed = timing.measure(networks, read, rate, advance)
    if small:
        timed = [replace(one, case=replace(one.case, bar=None)) for one in timed]
    return findings, timed


def report(findings: list[Finding], timed: list[timing.Timed], warnings: list[str], device: torch.device) -> str:
    """Markdown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    lines = ["| exactness | seen | right |", "|---|---|---|"]
    lines += [f"| {one.what} | {one.seen} | {'yes' if one.right else '**no**'} |" for one in findings]
    lines += ["", timing.table(timed), ""]
    lines += [f"Warned: {text}" for text in warnings]
    return "\n".join([*lines, f"Machine: {name}, torch {torch.__version__}, CUDA {torch.version.cuda}."])


@click.command()
@click.option("--device", "name", default="gpu0", show_default=True, help="gpu0 (or cuda:0); with --small also cpu.")
@click.option("--small", is_flag=True, help="Tiny networks: no time means anything, and no bar counts.")
def main(name: str, small: bool) -> None:
    """Print what is exact, and the table of times."""
    began, device, warned = time.monotonic(), checked_device(name, small), Warnings()
    logger = logging.getLogger("execution")
    logger.addHandler(warned)
    try:
        with reporting(4 + len(timing.CASES)) as advance:
            findings, timed = check(device, small, advance)
    except torch.cuda.OutOfMemoryError as error:
        raise click.ClickException(f"device {name!r} ran out of memory: end what runs there, or add --small") from error
    finally:
        logger.removeHandler(warned)
    print(report(findings, timed, warned.texts, device), f"Took {time.monotonic() - began:.0f} s.", sep="\n")
    broken = warned.texts or not all(one.right for one in findings)
    if broken or any(one.kept is False for one in timed):
        sys.exit(1)


if __name__ == "__main__":
    main()
