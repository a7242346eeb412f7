"""Which reply answers which request, and whether it can be true. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from .errors import FailureCode, ProtocolError
from .messages import (
    Block,
    Branch,
    Branches,
    GetTokenizer,
    Goodbye,
    Hello,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    Propose,
    Shutdown,
    TokenizerReply,
    Verdict,
    Verify,
    Welcome,
)

M = TypeVar("M", bound=Message)
Key = tuple[Any, ...]  # (reply class, values of the fields below)

REPLIES: Final[dict[type[Message], type[Message]]] = {
    Hello: Welcome,
    GetTokenizer: TokenizerReply,
    Open: Opened,
    Propose: Block,
    Branch: Branches,
    Verify: Verdict,
    Ping: Pong,
    Shutdown: Goodbye,
}

_MATCHED: Final[dict[type[Message], tuple[str, ...]]] = {
    Welcome: (),
    TokenizerReply: (),
    Opened: ("request_id", "epoch"),
    Block: ("request_id", "epoch", "block_id"),
    Branches: ("request_id", "epoch", "block_id"),
    Verdict: ("request_id", "epoch", "block_id"),
    Pong: ("nonce",),
    Goodbye: (),
}


@dataclass(frozen=True, slots=True)
class Reply(Generic[M]):
    """A reply and what it took; bytes are those of all frames of the request and of the reply."""

    message: M
    bytes_sent: int
    bytes_received: int
    round_trip_seconds: float


def request_key(request: Message) -> Key:
    """The key under which a request waits. Raises ValueError for a message that has no reply."""
    reply = REPLIES.get(type(request))
    if reply is None:
        raise ValueError(f"{type(request).__name__} has no reply")
    return (reply, *(getattr(request, name) for name in _MATCHED[reply]))


def reply_key(reply: Message) -> Key:
    return (type(reply), *(getattr(reply, name) for name in _MATCHED.get(type(reply), ())))


def concerns(key: Key, request_id: int, epoch: int, block_id: int) -> bool:
    """Whether a Failure with these ids answers the request that waits under key.

    request_id −1: all that is about no request (Hello, GetTokenizer). block_id −1: all that waits for that request and
    epoch.
    """
    names = _MATCHED[key[0]]
    if request_id < 0:
        return "request_id" not in names and "nonce" not in names
    if names[:2] != ("request_id", "epoch") or key[1:3] != (request_id, epoch):
        return False
    return block_id < 0 or (len(names) == 3 and key[3] == block_id)


def check_reply(request: Message, reply: Message) -> None:
    """Refuse a reply that matches a request and cannot be true. Raises ProtocolError (out_of_sync, bad_value)."""
    if isinstance(request, (Propose, Branch, Verify)) and reply.base_length != request.base_length:  # type: ignore[attr-defined]
        raise ProtocolError(FailureCode.OUT_OF_SYNC, f"{type(reply).__name__} is about another base length than asked")
    if isinstance(request, Propose) and isinstance(reply, Block):
        most = max(request.gamma, request.ready)
        if len(reply.tokens) > most:
            raise _bad(f"a block of {len(reply.tokens)} tokens, asked were at most {most}")
    if isinstance(request, Branch) and isinstance(reply, Branches):
        _check_branches(request, reply)
    if isinstance(request, Verify) and isinstance(reply, Verdict):
        _check_verdict(request, reply)
    if isinstance(request, Open) and isinstance(reply, Opened) and reply.length != len(request.tokens):
        raise ProtocolError(
            FailureCode.OUT_OF_SYNC, f"the worker holds {reply.length} tokens, sent were {len(request.tokens)}"
        )


def _check_branches(request: Branch, reply: Branches) -> None:
    if len(reply.accepted) > request.width:
        raise _bad(f"{len(reply.accepted)} branches, asked were at most {request.width}")
    if (accepted := max(reply.accepted.tolist(), default=0)) > len(request.tokens):
        raise _bad(f"a branch after {accepted} accepted tokens of {len(request.tokens)}")
    if (length := max(reply.lengths.tolist(), default=0)) > request.gamma:
        raise _bad(f"a branch of {length} tokens, asked were at most {request.gamma}")


def _check_verdict(request: Verify, reply: Verdict) -> None:
    gamma = len(request.tokens)
    if reply.accepted > gamma:
        raise _bad(f"a verdict that accepts {reply.accepted} of {gamma} tokens")
    if (reply.origin == "bonus") != (reply.accepted == gamma):
        raise _bad(f"a verdict that accepts {reply.accepted} of {gamma} tokens and calls its own a {reply.origin}")


def _bad(text: str) -> ProtocolError:
    return ProtocolError(FailureCode.BAD_VALUE, text)
