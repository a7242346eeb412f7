"""What must hold before the first request: versions, roles, vocabularies. Pure functions over Welcome messages."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import FailureCode, HandshakeError
from .limits import PROTOCOL_VERSION
from .messages import Welcome


@dataclass(frozen=True)
class Pair:
    """What holds for a target and a draft together. notes are worth a line each, and no reason to stop."""

    context_length: int  # the most tokens that both can hold
    notes: tuple[str, ...]


def check_welcome(welcome: Welcome, role: str, address: str = "the worker") -> None:
    """Refuse a worker of another protocol version or role. Raises HandshakeError."""
    if welcome.protocol_version != PROTOCOL_VERSION:
        raise HandshakeError(
            FailureCode.VERSION,
            f"{address} speaks protocol version {welcome.protocol_version} (release {welcome.package_version}), this "
            f"side speaks {PROTOCOL_VERSION}: install the same release of specdec-orchestrator on both sides",
        )
    if welcome.role != role:
        raise HandshakeError(
            FailureCode.BAD_VALUE,
            f"{address} is a {welcome.role} worker, but a {role} worker is wanted: check which address is given to "
            "--target and which to --draft",
        )


def check_pair(target: Welcome, draft: Welcome) -> Pair:
    """Refuse a draft whose token ids do not mean what the target's mean. Raises HandshakeError.

    Fingerprints decide, sizes do not: a padded vocabulary (151936 beside 152064) matches. "" matches anything.
    """
    if target.vocabulary and draft.vocabulary and target.vocabulary != draft.vocabulary:
        raise HandshakeError(
            FailureCode.BAD_VALUE,
            f"the draft {draft.model} ({_vocabulary(draft)}) has another vocabulary than the target {target.model} "
            f"({_vocabulary(target)}), so its token ids would mean other text: choose a draft with the target's "
            "tokenizer, or --draft ngram, or --draft none",
        )
    notes = []
    if draft.vocab_size != target.vocab_size and draft.vocabulary:
        notes.append(
            f"one vocabulary, padded to {target.vocab_size} on the target and {draft.vocab_size} on the draft: ids "
            f"from {min(target.vocab_size, draft.vocab_size)} on are never drafted"
        )
    if draft.context_length < target.context_length:
        notes.append(
            f"the draft holds {draft.context_length} tokens and the target {target.context_length}: past the draft's "
            "length a request goes on without drafts"
        )
    return Pair(min(target.context_length, draft.context_length), tuple(notes))


def check_supported(welcome: Welcome, verify: str, codec: str) -> None:
    """Refuse a verify mode or codec that the worker does not offer. Raises HandshakeError."""
    for kind, wanted, offered in (("verify", verify, welcome.verify_modes), ("codec", codec, welcome.codecs)):
        if wanted not in offered:
            raise HandshakeError(
                FailureCode.BAD_VALUE,
                f"the {welcome.role} {welcome.model} does not offer --{kind} {wanted}: it offers "
                f"{', '.join(offered) or 'nothing'}",
            )


def vocabulary_fingerprint(pairs: Iterable[tuple[int, str]]) -> str:
    """sha256 in hex over the (id, token text) pairs of a tokenizer, in the order of ids.

    Each pair is id as uint32, length of the text in bytes as uint32, both little-endian, then the text in UTF-8 (lone
    surrogates kept). Ids without a token, as padding has, are no pairs. Raises ValueError if an id comes twice.
    """
    digest = hashlib.sha256()
    last = -1
    for token_id, text in sorted(pairs):
        if token_id <= last:
            raise ValueError(f"token id {token_id} comes twice or is negative")
        last = token_id
        data = text.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<II", token_id, len(data)))
        digest.update(data)
    return digest.hexdigest()


def _vocabulary(welcome: Welcome) -> str:
    return f"{welcome.vocab_size} ids, fingerprint {welcome.vocabulary[:8]}"
