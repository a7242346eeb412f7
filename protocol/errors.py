"""The errors of the wire, and the closed set of codes that travel in a Failure. Imports nothing of ours."""

from __future__ import annotations

from enum import StrEnum


class FailureCode(StrEnum):
    """Why something was refused. The set is closed: PROTOCOL.md says when each is sent."""

    BAD_FRAME = "bad_frame"
    VERSION = "version"
    UNKNOWN_REQUEST = "unknown_request"
    STALE_EPOCH = "stale_epoch"
    OUT_OF_SYNC = "out_of_sync"
    BAD_VALUE = "bad_value"
    CONTEXT_FULL = "context_full"
    NAN = "nan"
    INTERNAL = "internal"
    LOADING = "loading"


class ProtocolError(Exception):
    """Something that this protocol does not allow.

    `code` is a FailureCode, `text` one line for a person. Where the header could still be read, `request_id`, `epoch`
    and `block_id` say what the message was about, so that the answer reaches the one who waits for it.
    """

    def __init__(
        self, code: FailureCode | str, text: str, *, request_id: int = -1, epoch: int = 0, block_id: int = -1
    ) -> None:
        super().__init__(text)
        self.code = FailureCode(code)
        self.text = text
        self.request_id = request_id
        self.epoch = epoch
        self.block_id = block_id

    def __str__(self) -> str:
        return self.text


class AddressError(ProtocolError):
    """An address that cannot be used; the text says why and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(FailureCode.BAD_VALUE, text)


class AddressInUse(AddressError):
    """Somebody else listens there."""


class HandshakeError(ProtocolError):
    """The peer is not a worker that this side can use; the text says what, why and what to do."""


class LinkError(Exception):
    """Base of what a request over a link can meet."""


class LinkLost(LinkError):
    """The worker went away, or the link was closed."""


class LinkTimeout(LinkError):
    """No answer in time; a late one will be dropped."""


class WorkerFailure(LinkError):
    """The worker answered with a Failure."""

    def __init__(self, code: FailureCode | str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = FailureCode(code)
        self.text = text
