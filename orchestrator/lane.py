"""One request's state on one worker: opened at which epoch, on which life of the worker, knowing how much.

A lane turns the commit log into what that worker lacks (`tail`), and opens the request again, one epoch higher,
whenever the worker's state may not be what we think.
"""

from __future__ import annotations

from orchestrator.config import RuntimeConfig
from orchestrator.errors import UsageError
from orchestrator.peer import Peer
from orchestrator.request import Request
from protocol.errors import FailureCode, HandshakeError, WorkerFailure
from protocol.handshake import check_supported
from protocol.messages import Close, Ids, Open, Sampling, token_array

REOPEN_CODES = frozenset({FailureCode.UNKNOWN_REQUEST, FailureCode.STALE_EPOCH, FailureCode.OUT_OF_SYNC})


def negotiated_codec(config: RuntimeConfig, temperature: float, draft: Peer | None) -> str:
    """How q̃ travels for a request: not at all where tokens are compared (coupled, greedy) or q is a point mass."""
    if config.verify == "coupled" or temperature == 0:
        return "none"
    return "none" if draft is not None and draft.welcome.source == "ngram" else config.codec


def check_offered(peer: Peer, config: RuntimeConfig) -> None:
    """UsageError at start-up where a worker doesn't offer the verify mode or the codec that is asked for."""
    codec = negotiated_codec(config, 1.0, peer if peer.role == "draft" else None)
    try:
        check_supported(peer.welcome, config.verify, codec)
    except HandshakeError as error:
        raise UsageError(str(error)) from error


class Lane:
    """`epoch` counts the openings; `known` is the committed length that the worker holds."""

    def __init__(self, request: Request, verify: str, codec: str, vocab_size: int) -> None:
        self._request = request
        self._verify = verify
        self._codec = codec
        self._vocab_size = vocab_size
        self._instance = ""
        self._told = ""  # the life of the worker that was asked to open it: it holds a row, reply or not
        self.epoch = 0
        self.known = 0

    async def open(self, peer: Peer) -> None:
        """Open the request on `peer` unless it's open there; raises what Link.request raises."""
        if self._instance == peer.welcome.instance:
            return
        self.epoch += 1
        options = self._request.options
        message = Open(
            request_id=self._request.request_id,
            epoch=self.epoch,
            seed=self._request.seed,
            verify=self._verify,
            codec=self._codec,
            sampling=Sampling(options.temperature, options.top_k, options.top_p, options.min_p),
            vocab_size=self._vocab_size,
            tokens=token_array(self._request.tokens),
        )
        self._told = peer.welcome.instance
        reply = await peer.link.request(message, None)
        self.known = reply.message.length
        self._instance = peer.welcome.instance

    def tail(self) -> Ids:
        """The committed tokens that the worker lacks, int32 [t]."""
        return token_array(self._request.tokens[self.known :])

    def forget(self) -> None:
        """Open again before the next use: what the worker holds isn't certain any more."""
        self._instance = ""

    def reopens(self, failure: WorkerFailure) -> bool:
        """Whether opening again mends `failure`; then the lane is ready for it."""
        if failure.code in REOPEN_CODES:
            self.forget()
            return True
        return False

    def close(self, peer: Peer | None) -> None:
        """Free the worker's state, also where the prompt is still going in. Raises LinkLost."""
        if peer is not None and peer.alive and self._told == peer.welcome.instance:
            peer.link.post(Close(self._request.request_id))
        self._told = ""
        self.forget()
