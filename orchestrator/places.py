"""Where a worker runs: a device here (we start the process) or the address of a running one (we attach)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.errors import UsageError

_DEVICE = re.compile(r"cpu|mps|gpu\d+|cuda:\d+")
_ADDRESS = re.compile(r"(tcp|ipc)://.+")


@dataclass(frozen=True)
class Place:
    """One of `device` (started and supervised here) and `address` (attached to) is set."""

    device: str = ""
    address: str = ""


def parse_place(text: str, flag: str) -> Place:
    """Parse `--target` or `--draft`; UsageError names the flag and the forms that it takes."""
    if _DEVICE.fullmatch(text):
        return Place(device=text)
    if _ADDRESS.fullmatch(text):
        from protocol import addresses
        from protocol.errors import AddressError

        try:
            addresses.parse(text)
        except AddressError as error:
            raise UsageError(f"{flag} {text}: {error}") from error
        return Place(address=text)
    extra = ", ngram (prompt lookup, no model) or none (plain decoding)" if flag == "--draft" else ""
    raise UsageError(
        f"{flag} {text!r} is neither a device nor an address: expected cpu, gpu0 (or cuda:0), mps, "
        f"or tcp://HOST:PORT of a running worker{extra}"
    )
