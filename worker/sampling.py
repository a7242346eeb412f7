"""Sampling options from the wire to the mathematics, and the checks of an Open that both workers make."""

from __future__ import annotations

from functools import lru_cache

from execution.interface import Executor
from protocol.errors import FailureCode, ProtocolError
from protocol.messages import Open, Sampling
from speculative import SamplingOptions


@lru_cache(maxsize=1024)
def sampling_options(sampling: Sampling) -> SamplingOptions:
    """The same options as the mathematics takes them. Raises ValueError on one that is out of range."""
    return SamplingOptions(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def check_open(opened: Open, vocab_size: int, executor: Executor) -> None:
    """ProtocolError where a request of this vocabulary can't be served by `executor`, at least not now."""
    tokens, context_length = opened.tokens, executor.context_length
    if not executor.free_rows:
        raise ProtocolError(FailureCode.BAD_VALUE, "this worker has as many requests as its engine takes; try later")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise ProtocolError(FailureCode.BAD_VALUE, f"a prompt token is outside this model's vocabulary of {vocab_size}")
    if len(tokens) > context_length:
        raise ProtocolError(
            FailureCode.CONTEXT_FULL, f"{len(tokens)} tokens don't fit this model's context of {context_length}"
        )
    try:
        sampling_options(opened.sampling)
    except ValueError as error:
        raise ProtocolError(FailureCode.BAD_VALUE, str(error)) from error
