"""Addresses: tcp://host:port, ipc://path, inproc://name. The control socket's address follows from the data socket's.

Pure functions; imports nothing of ours but the errors.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

from .errors import AddressError

SUFFIX: Final = ".control"
MAX_IPC_PATH: Final = 107  # bytes of sun_path, its final zero left out
MAX_PORT: Final = 65_534  # the control socket takes the next one
_FORMS: Final = "tcp://host:port, ipc://path or inproc://name"


@dataclass(frozen=True, slots=True)
class Address:
    """A data address that was found valid."""

    scheme: str  # tcp | ipc | inproc
    host: str  # tcp only, without brackets
    port: int  # tcp only, else 0
    path: str  # ipc path or inproc name, else ""

    @property
    def data(self) -> str:
        return f"tcp://{self._bracketed}:{self.port}" if self.scheme == "tcp" else f"{self.scheme}://{self.path}"

    @property
    def control(self) -> str:
        if self.scheme == "tcp":
            return f"tcp://{self._bracketed}:{self.port + 1}"
        return f"{self.scheme}://{self.path}{SUFFIX}"

    @property
    def is_loopback(self) -> bool:
        """True where nobody outside this machine can connect. A host name other than localhost is not trusted to be."""
        if self.scheme != "tcp" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def __str__(self) -> str:
        return self.data


def parse(text: str) -> Address:
    """The address in text. Raises AddressError with one line that says what is wrong and what is expected."""
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme not in ("tcp", "ipc", "inproc"):
        raise AddressError(f"address {text!r} is not of the form {_FORMS}")
    if any(character.isspace() or character == "\0" for character in rest):
        raise AddressError(f"address {text!r} holds white space")
    if scheme == "tcp":
        return _parse_tcp(text, rest)
    if not rest or rest in ("*", "@") or rest.startswith("@"):
        raise AddressError(f"address {text!r} needs a {'path' if scheme == 'ipc' else 'name'}: {_FORMS}")
    longest = len((rest + SUFFIX).encode())
    if scheme == "ipc" and longest > MAX_IPC_PATH:
        raise AddressError(
            f"address {text!r} is too long: its control socket needs {longest} bytes and the system allows "
            f"{MAX_IPC_PATH}; use a shorter path, such as one under /tmp"
        )
    if scheme == "inproc" and longest > 255:
        raise AddressError(f"address {text[:60]!r}... is too long: a name has at most {255 - len(SUFFIX)} bytes")
    return Address(scheme, "", 0, rest)


def parse_listen(text: str, *, insecure: bool = False) -> Address:
    """The address in text, if a worker may listen there: only loopback, unless insecure says otherwise."""
    address = parse(text)
    if not address.is_loopback and not insecure:
        raise AddressError(
            f"refusing to listen on {address}: it can be reached from outside this machine and there is no "
            "authentication yet; listen on tcp://127.0.0.1:PORT, or give --insecure on a network you trust"
        )
    return address


def _parse_tcp(text: str, rest: str) -> Address:
    host, separator, port_text = rest.rpartition(":")
    if not separator or not host or not port_text:
        raise AddressError(f"address {text!r} needs a host and a port: tcp://host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise AddressError(f"address {text!r}: {host!r} is not an IPv6 address") from None
    elif ":" in host or "[" in host or "]" in host:
        raise AddressError(f"address {text!r}: write an IPv6 host in brackets, tcp://[::1]:port")
    elif "/" in host or "@" in host or ";" in host:
        raise AddressError(f"address {text!r}: {host!r} is not a host name")
    if not (port_text.isascii() and port_text.isdigit() and 1 <= int(port_text[:6]) <= MAX_PORT):
        raise AddressError(
            f"address {text!r}: the port must be a number from 1 to {MAX_PORT} (the control socket takes the next "
            f"one), not {port_text!r}"
        )
    return Address("tcp", host, int(port_text), "")
