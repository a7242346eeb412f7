"""One llama.cpp model and its context, through llama-cpp-python's low-level API: decode, cut, copy by sequence id.

The only module that imports llama_cpp (the extra `llamacpp`). All sequences share one pool of cells, so that a copy of
a sequence costs no memory; the pool is made anew with twice the cells when it is full, and keeps what it held.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
import numpy.typing as npt

from execution.errors import ModelError

SEQUENCES = 256  # llama.cpp's limit at compile time (LLAMA_MAX_SEQ)
BATCH = 512  # tokens of one llama_decode
FIRST_CELLS = 2048
NO_ROOM = 1  # what llama_decode returns where the cells don't suffice; then nothing has changed
_ERROR = 4  # ggml_log_level
_BF16 = 30  # GGML_TYPE_BF16, which llama_cpp does not name
_CACHE_TYPES = {"float32": llama.GGML_TYPE_F32, "float16": llama.GGML_TYPE_F16, "bfloat16": _BF16}

_log = logging.getLogger(__name__)
_errors: deque[str] = deque(maxlen=3)  # what llama.cpp said last


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _listen(level: int, text: bytes, _: Any) -> None:
    line = text.decode("utf-8", "replace").strip()
    _log.debug("%s", line)
    if level == _ERROR and line:
        _errors.append(line)


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence, from position `start`; logits are wanted at the last `logits` of them."""

    sequence: int
    start: int
    tokens: npt.NDArray[np.int64]
    logits: int


class LlamaModel:
    """A GGUF file's weights. `layers` of them on a GPU (−1: all, 0: none). ModelError where it can't be loaded."""

    def __init__(self, path: Path, reference: str, *, layers: int, gpu: int) -> None:
        llama.llama_log_set(_listen, ctypes.c_void_p(0))
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers, params.main_gpu, params.split_mode = layers, gpu, llama.LLAMA_SPLIT_MODE_NONE
        _errors.clear()
        self.pointer = llama.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise ModelError(
                f"model {reference!r}: llama.cpp cannot load {path.name} ({heard()}): use --engine torch, another"
                " quantisation of it, or a newer llama-cpp-python"
            )
        if llama.llama_model_is_recurrent(self.pointer) or llama.llama_model_is_hybrid(self.pointer):
            raise ModelError(
                f"model {reference!r} keeps a recurrent state, which cannot be rolled back: choose a model that has"
                " attention alone"
            )
        if llama.llama_model_has_encoder(self.pointer) or not llama.llama_model_has_decoder(self.pointer):
            raise ModelError(f"model {reference!r} is no decoder-only language model: choose one that is")
        self.vocab_size: int = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.pointer))
        self.context_length: int = llama.llama_model_n_ctx_train(self.pointer)
        about = ctypes.create_string_buffer(128)
        llama.llama_model_desc(self.pointer, about, len(about))
        self.description = about.value.decode("utf-8", "replace")  # such as "llama 135M Q4_1"


class LlamaContext:
    """The cells of many sequences: what llama.cpp keeps between two decodes. Not thread-safe."""

    def __init__(self, model: LlamaModel, *, dtype: str, threads: int) -> None:
        """`dtype` is that of keys and values; the weights stay what the file has them in."""
        self._model, self._dtype, self._threads = model, dtype, threads
        self._batch = _Batch()
        self.cells = FIRST_CELLS
        self._pointer = self._made(self.cells)
        self._memory = llama.llama_get_memory(self._pointer)

    def decode(self, runs: Sequence[Run]) -> npt.NDArray[np.float32]:
        """Append to sequences (one at least, each at most once); logits at the asked positions, [Σ logits, vocab].

        RuntimeError where llama.cpp fails, MemoryError without room for more cells: the caller rolls back what of the
        batch has been appended.
        """
        found = []
        for count, wanted in self._batch.fill(runs):
            status = llama.llama_decode(self._pointer, self._batch.struct)
            while status == NO_ROOM:
                self._grow()
                status = llama.llama_decode(self._pointer, self._batch.struct)
            if status != 0:
                raise RuntimeError(f"llama_decode of {count} tokens failed with status {status} ({heard()})")
            if wanted:
                rows = llama.llama_get_logits(self._pointer)
                found.append(np.ctypeslib.as_array(rows, shape=(wanted, self._model.vocab_size)).copy())
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty((0, self._model.vocab_size), np.float32)

    def cut(self, sequence: int, length: int) -> None:
        """Forget the sequence's tokens from position `length` on."""
        if not llama.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise RuntimeError(f"llama.cpp cannot roll a sequence back to {length} tokens ({heard()})")

    def copy(self, source: int, target: int, length: int) -> None:
        """Let the empty sequence `target` share the first `length` tokens of `source`."""
        if length:
            llama.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def close(self) -> None:
        """Free the context. Twice does no harm."""
        if self._pointer is not None:
            llama.llama_free(self._pointer)
            self._pointer = None

    def _made(self, cells: int) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified, params.swa_full = cells, SEQUENCES, True, True
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = _CACHE_TYPES[self._dtype]
        # Flash attention computes in float16: with float32 keys and values, logits would be 0.1 off instead of 1e-4.
        params.flash_attn_type = 0 if self._dtype == "float32" else 1
        params.no_perf = True
        _errors.clear()
        pointer = llama.llama_init_from_model(self._model.pointer, params)
        if not pointer:
            raise MemoryError(f"llama.cpp cannot hold keys and values of {cells} tokens ({heard()})")
        return pointer

    def _grow(self) -> None:
        """Twice the cells, with what they hold."""
        old, size = self._pointer, llama.llama_state_get_size(self._pointer)
        state = (ctypes.c_uint8 * size)()
        written = llama.llama_state_get_data(old, state, size)
        fresh = self._made(2 * self.cells)
        if not written or llama.llama_state_set_data(fresh, state, written) != written:
            llama.llama_free(fresh)
            raise RuntimeError(f"llama.cpp cannot move its cells to a larger pool ({heard()})")
        llama.llama_free(old)
        self._pointer, self._memory = fresh, llama.llama_get_memory(fresh)
        self.cells *= 2


class _Batch:
    """A llama_batch over arrays of ours, filled once and sent in pieces of at most BATCH tokens."""

    def __init__(self) -> None:
        self._tokens, self._positions = np.zeros(BATCH, np.int32), np.zeros(BATCH, np.int32)
        self._sequences, self._asked = np.zeros(BATCH, np.int32), np.zeros(BATCH, np.int8)
        self._ones = np.ones(BATCH, np.int32)
        pointer = ctypes.POINTER(ctypes.c_int32)
        base, step = self._sequences.ctypes.data, self._sequences.itemsize
        self._each = (pointer * BATCH)(*(ctypes.cast(base + step * i, pointer) for i in range(BATCH)))
        self.struct = llama.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(pointer),
            embd=None,
            pos=self._positions.ctypes.data_as(pointer),
            n_seq_id=self._ones.ctypes.data_as(pointer),
            seq_id=self._each,
            logits=self._asked.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
        """Yield (tokens, asked positions) of each piece, once it lies in `struct`."""
        counts = np.array([run.tokens.size for run in runs])
        of = np.repeat(np.arange(len(runs)), counts)
        within = np.arange(of.size) - (np.cumsum(counts) - counts)[of]
        tokens = np.concatenate([run.tokens for run in runs])
        positions = np.array([run.start for run in runs])[of] + within
        sequences = np.array([run.sequence for run in runs])[of]
        asked = within >= (counts - np.array([run.logits for run in runs]))[of]
        for start in range(0, of.size, BATCH):
            piece = slice(start, start + BATCH)
            size = min(BATCH, of.size - start)
            self._tokens[:size], self._positions[:size] = tokens[piece], positions[piece]
            self._sequences[:size], self._asked[:size] = sequences[piece], asked[piece]
            self.struct.n_tokens = size
            yield size, int(asked[piece].sum())


def heard() -> str:
    """What llama.cpp said of its last error."""
    return "; ".join(_errors) or "it does not say why"


def version() -> str:
    """Of llama-cpp-python."""
    return str(llama.__version__)


def can_use_gpu() -> bool:
    """Whether this build of llama.cpp runs layers on a GPU."""
    return bool(llama.llama_supports_gpu_offload())
