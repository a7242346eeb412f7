"""All wire types, grouped by link. PROTOCOL.md is their specification; registry.py finds them by tag.

Frozen dataclasses; the annotation of a field carries its wire type and limits, the comment its meaning.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from .codecs import CODECS, EncodedQ, check_structure
from .errors import FailureCode
from .fields import Blob, Choice, Int, Many, Quantized, Real, Text, TokenIds, refuse
from .limits import (
    MAX_BRANCHES,
    MAX_EOS_IDS,
    MAX_GAMMA,
    MAX_LENGTH,
    MAX_NAME_BYTES,
    MAX_NAMES,
    MAX_TEMPLATE_BYTES,
    MAX_TEXT_BYTES,
    MAX_TOKENIZER_BYTES,
    MAX_UINT32,
    MAX_UINT64,
    MAX_VOCAB,
)

ROLES = ("draft", "target")
VERIFY_MODES = ("rejection", "coupled")
ORIGINS = ("correction", "bonus")

RequestId = Annotated[int, Int(0, MAX_UINT32)]
AnyRequest = Annotated[int, Int(-1, MAX_UINT32)]
Epoch = Annotated[int, Int(0, MAX_UINT32)]
BlockId = Annotated[int, Int(0, MAX_UINT32)]
AnyBlock = Annotated[int, Int(-1, MAX_UINT32)]
Length = Annotated[int, Int(0, MAX_LENGTH)]
Gamma = Annotated[int, Int(0, MAX_GAMMA)]
Count = Annotated[int, Int(0, MAX_UINT64)]
Number = Annotated[int, Int(0, MAX_UINT32)]
VocabSize = Annotated[int, Int(1, MAX_VOCAB)]
Seconds = Annotated[float, Real("[0, inf)")]
Name = Annotated[str, Text(MAX_NAME_BYTES)]
Line = Annotated[str, Text(MAX_TEXT_BYTES)]
Role = Annotated[str, Choice(ROLES)]
Names = Annotated[tuple[str, ...], Many(Text(MAX_NAME_BYTES), MAX_NAMES)]
Ids = npt.NDArray[np.int32]
Committed = Annotated[Ids, TokenIds(MAX_LENGTH)]
Prompt = Annotated[Ids, TokenIds(MAX_LENGTH, least=1)]
Drafted = Annotated[Ids, TokenIds(MAX_GAMMA)]
EachBranch = Annotated[Ids, TokenIds(MAX_BRANCHES)]
EosIds = Annotated[tuple[int, ...], Many(Int(0, MAX_VOCAB), MAX_EOS_IDS)]
Q = Annotated[EncodedQ, Quantized()]


class Message:
    """Base of every message: equality that understands arrays, and a check across fields."""

    __slots__ = ()
    TAG: ClassVar[int]

    def check(self) -> None:
        """Raise ProtocolError where fields, each valid alone, contradict one another."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, np.ndarray):
                if not np.array_equal(mine, theirs):
                    return False
            elif mine != theirs:
                return False
        return True

    __hash__ = None  # type: ignore[assignment]


# ---------------------------------------------------------------- data link, to a worker


@dataclass(frozen=True, slots=True, eq=False)
class Hello(Message):
    TAG: ClassVar[int] = 1
    protocol_version: Number
    role: Annotated[str, Choice(("orchestrator",))]
    package_version: Name


@dataclass(frozen=True, slots=True, eq=False)
class GetTokenizer(Message):
    TAG: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of a request; both workers apply the same ones."""

    temperature: Annotated[float, Real("[0, inf)")] = 1.0  # 0 = greedy
    top_k: Annotated[int, Int(0, 2**31 - 1)] = 0  # 0 = off
    top_p: Annotated[float, Real("(0, 1]")] = 1.0
    min_p: Annotated[float, Real("[0, 1)")] = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Open(Message):
    TAG: ClassVar[int] = 5
    request_id: RequestId
    epoch: Epoch
    seed: Annotated[int, Int(0, MAX_UINT64)]
    verify: Annotated[str, Choice(VERIFY_MODES)]
    codec: Annotated[str, Choice(CODECS)]
    sampling: Annotated[Sampling, Sampling]
    vocab_size: VocabSize  # the target's: ids at or above it are never proposed
    tokens: Prompt  # int32 [n]: all committed tokens


@dataclass(frozen=True, slots=True, eq=False)
class Propose(Message):
    TAG: ClassVar[int] = 7
    request_id: RequestId
    epoch: Epoch
    base_length: Length  # committed tokens
    block_id: BlockId
    gamma: Gamma  # the most tokens wanted
    ready: Gamma  # or so many, where a branch has them already
    tail: Committed  # int32 [t]: committed tokens [base_length − t, base_length)

    def check(self) -> None:
        _check_tail(self.tail, self.base_length)


@dataclass(frozen=True, slots=True, eq=False)
class Verify(Message):
    TAG: ClassVar[int] = 9
    request_id: RequestId
    epoch: Epoch
    base_length: Length  # committed tokens
    block_id: BlockId
    tail: Committed  # int32 [t]: committed tokens [base_length − t, base_length)
    tokens: Drafted  # int32 [γ]: drafted tokens, the first at position base_length
    q: Q  # q̃ of the γ tokens

    def check(self) -> None:
        _check_tail(self.tail, self.base_length)
        check_structure(self.q, len(self.tokens))


@dataclass(frozen=True, slots=True, eq=False)
class Branch(Message):
    TAG: ClassVar[int] = 13
    request_id: RequestId
    epoch: Epoch
    base_length: Length  # committed tokens, those under the block in flight
    block_id: BlockId  # of the block in flight
    gamma: Gamma  # the most tokens of each branch
    least: Gamma  # so many are enough in a branch that would keep others waiting, or the answer beyond `seconds`
    seconds: Seconds  # what the answer may take; 0: as long as all tokens take
    width: Annotated[int, Int(1, MAX_BRANCHES)]  # the most branches
    alpha: Annotated[float, Real("[0, 1]")]  # acceptance rate by which branches are shared out over the forks
    room: Length  # tokens that may still be emitted after base_length
    ends: EosIds  # ids that end the text: never guessed
    tail: Committed  # int32 [t]: committed tokens [base_length − t, base_length)
    tokens: Drafted  # int32 [γ]: the block in flight, the first at position base_length

    def check(self) -> None:
        _check_tail(self.tail, self.base_length)


@dataclass(frozen=True, slots=True, eq=False)
class Close(Message):
    TAG: ClassVar[int] = 11
    request_id: RequestId


# ---------------------------------------------------------------- data link, to the orchestrator


@dataclass(frozen=True, slots=True, eq=False)
class Welcome(Message):
    TAG: ClassVar[int] = 2
    protocol_version: Number
    role: Role
    instance: Name  # random, new for each process
    pid: Number
    package_version: Name
    model: Line  # name for a person
    source: Annotated[str, Choice(("model", "ngram"))]
    vocab_size: VocabSize  # rows of the logits, padding included
    vocabulary: Name  # handshake.vocabulary_fingerprint; "" = takes any vocabulary
    context_length: Length  # the most tokens of a request
    device: Name
    dtype: Name
    threads: Number
    verify_modes: Names  # open list: unknown names are ignored
    codecs: Names  # open list: unknown names are ignored
    eos_ids: EosIds


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerReply(Message):
    TAG: ClassVar[int] = 4
    tokenizer_json: Annotated[bytes, Blob(MAX_TOKENIZER_BYTES)]  # of the tokenizers library; empty = has none
    chat_template: Annotated[str, Text(MAX_TEMPLATE_BYTES)]  # Jinja; "" = none


@dataclass(frozen=True, slots=True, eq=False)
class Opened(Message):
    TAG: ClassVar[int] = 6
    request_id: RequestId
    epoch: Epoch
    length: Length  # tokens held, = those of Open


@dataclass(frozen=True, slots=True, eq=False)
class Block(Message):
    TAG: ClassVar[int] = 8
    request_id: RequestId
    epoch: Epoch
    base_length: Length
    block_id: BlockId
    seconds: Seconds  # compute on the draft
    rows: Number  # rows of the widest step
    steps: Number  # passes of the draft that it took since it was asked for
    tokens: Drafted  # int32 [γ]: drafted tokens, at most the gamma asked for
    q: Q  # q̃ of the γ tokens

    def check(self) -> None:
        check_structure(self.q, len(self.tokens))


@dataclass(frozen=True, slots=True, eq=False)
class Verdict(Message):
    TAG: ClassVar[int] = 10
    request_id: RequestId
    epoch: Epoch
    base_length: Length
    block_id: BlockId
    accepted: Gamma  # drafted tokens kept
    token: Annotated[int, Int(0, 2**31 - 1)]  # the target's own token after them
    origin: Annotated[str, Choice(ORIGINS)]  # bonus where all drafted tokens were kept, γ = 0 included
    seconds: Seconds  # compute of the pass on the target
    rows: Number  # requests in that pass
    positions: Number  # tokens fed in that pass, all rows together


@dataclass(frozen=True, slots=True, eq=False)
class Branches(Message):
    TAG: ClassVar[int] = 14
    request_id: RequestId
    epoch: Epoch
    base_length: Length
    block_id: BlockId
    seconds: Seconds  # compute on the draft
    rows: Number  # rows of the widest step
    steps: Number  # passes of the draft that it took
    accepted: EachBranch  # int32 [n]: tokens kept of the block in flight, in each branch's outcome
    next: EachBranch  # int32 [n]: the guessed token after them
    lengths: EachBranch  # int32 [n]: tokens of each branch
    tokens: Annotated[Ids, TokenIds(MAX_BRANCHES * MAX_GAMMA)]  # int32 [Σ lengths]: branches one after another
    q: Q  # q̃ of those tokens

    def check(self) -> None:
        if not len(self.accepted) == len(self.next) == len(self.lengths):
            raise refuse(f"branches of {len(self.accepted)}, {len(self.next)} and {len(self.lengths)} entries")
        if len(self.lengths) and int(self.lengths.max()) > MAX_GAMMA:
            raise refuse(f"a branch of {int(self.lengths.max())} tokens, the limit is {MAX_GAMMA}")
        if int(self.lengths.sum()) != len(self.tokens):
            raise refuse(f"branches of {int(self.lengths.sum())} tokens in all, {len(self.tokens)} came")
        if len(set(zip(self.accepted.tolist(), self.next.tolist(), strict=True))) != len(self.accepted):
            raise refuse("two branches of one outcome")
        check_structure(self.q, len(self.tokens))


@dataclass(frozen=True, slots=True, eq=False)
class Failure(Message):
    """An error travels whatever its text: a text too long or not encodable is clipped, not refused."""

    TAG: ClassVar[int] = 12
    request_id: AnyRequest  # −1: about no request
    epoch: Epoch
    block_id: AnyBlock  # −1: about no block
    code: Annotated[str, Choice(tuple(str(code) for code in FailureCode))]
    text: Line  # one line for a person

    def __post_init__(self) -> None:
        clipped = self.text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")
        object.__setattr__(self, "text", clipped)
        object.__setattr__(self, "code", str(self.code))


# ---------------------------------------------------------------- control link


@dataclass(frozen=True, slots=True, eq=False)
class Ping(Message):
    TAG: ClassVar[int] = 20
    nonce: Count


@dataclass(frozen=True, slots=True, eq=False)
class Pong(Message):
    TAG: ClassVar[int] = 21
    nonce: Count  # of the Ping
    state: Annotated[str, Choice(("loading", "ready"))]
    requests: Number  # open now
    passes: Count  # batched model passes since the start
    uptime: Seconds
    rss_bytes: Count  # resident memory of the process; 0 = unknown


@dataclass(frozen=True, slots=True, eq=False)
class Abort(Message):
    TAG: ClassVar[int] = 22
    request_id: RequestId


@dataclass(frozen=True, slots=True, eq=False)
class Shutdown(Message):
    TAG: ClassVar[int] = 23


@dataclass(frozen=True, slots=True, eq=False)
class Goodbye(Message):
    """Answer to Shutdown; on the data link: the worker ends now."""

    TAG: ClassVar[int] = 24


# ---------------------------------------------------------------- which way each goes

DATA_TO_WORKER = (Hello, GetTokenizer, Open, Propose, Branch, Verify, Close)
DATA_TO_ORCHESTRATOR = (Welcome, TokenizerReply, Opened, Block, Branches, Verdict, Failure, Goodbye)
CONTROL_TO_WORKER = (Ping, Abort, Shutdown)
CONTROL_TO_ORCHESTRATOR = (Pong, Goodbye, Failure)


def token_array(tokens: npt.ArrayLike) -> Ids:
    """Token ids as int32 [n], the form that messages hold."""
    return np.asarray(tokens, dtype=np.int32).reshape(-1)


def _check_tail(tail: Ids, base_length: int) -> None:
    if len(tail) > base_length:
        raise refuse(f"a tail of {len(tail)} tokens, but only {base_length} are committed")
