"""`load`: from a model reference of the command line to an executor and its vocabulary.

Imports transformers only for the models that need it, so that a toy model starts at once.
"""

from __future__ import annotations

import logging
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from execution import default_models
from execution.devices import canonical_device, parse_device, parse_dtype, set_threads
from execution.errors import ModelError
from execution.interface import Executor
from execution.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch

__all__ = ["ModelError", "load", "model_source", "read_network"]

_INSTALL = "pip install 'specdec-orchestrator[llamacpp]'"

_log = logging.getLogger(__name__)


def load(
    model: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    packed: bool = True,
    engine: str = "auto",
    graphs: bool = True,
) -> tuple[Executor, Vocabulary]:
    """Load `model` and set this process's torch threads; `packed`: lay out its weights anew where that saves time.

    `model` is `smollm2-135m-instruct`, `smollm2-135m-draft`, `toy:...`, `synthetic:...`, a folder, a .gguf file or a
    Hugging Face id. `engine`: "llamacpp" runs a .gguf file as it is, "torch" all else and those dequantised; "auto"
    takes the former for a .gguf file where it is installed. `graphs`: on CUDA, torch's small passes are captured and
    replayed.
    Raises ModelError, whose text is one line, for everything that can be wrong with it.
    """
    torch_dtype = parse_dtype(dtype)
    set_threads(threads)
    try:
        path = _for_llamacpp(model, engine, canonical_device(device))
        if path is not None:
            return _load_llamacpp(path, model, canonical_device(device), dtype, threads)
        torch_device = parse_device(device)
        if model == "toy" or model.startswith("toy:"):
            return _load_toy(model, device, dtype)
        if model == "synthetic" or model.startswith("synthetic:"):
            return _load_synthetic(model, device, dtype)
        return _load_network(model, torch_device, torch_dtype, packed, graphs)
    except MemoryError as error:
        raise ModelError(f"model {model!r} does not fit into memory: use --dtype bfloat16 or a smaller one") from error


def _for_llamacpp(model: str, engine: str, device: str) -> Path | None:
    """The file that llama.cpp is to run; None: torch runs the model. Where there is a choice, says what was chosen."""
    path = Path(model).expanduser()
    if engine == "llamacpp":
        if find_spec("llama_cpp") is None:
            raise ModelError(f"engine llamacpp is not installed: {_INSTALL}, or use --engine torch")
        if model == default_models.TARGET:
            path = default_models.target_file()
        if not path.is_file():
            raise ModelError(
                f"model {model!r} is no .gguf file, and engine llamacpp runs nothing else: give one, or"
                f" {default_models.TARGET}, or use --engine torch"
            )
        return path
    if engine == "torch" or not (path.suffix == ".gguf" and path.is_file()):
        return None
    if find_spec("llama_cpp") is None:
        _log.info("%s: torch runs it, dequantised; %s runs it as it is", path.name, _INSTALL)
        return None
    from execution.llamacpp_context import can_use_gpu

    if device != "cpu" and not can_use_gpu():
        _log.info("%s: torch runs it, dequantised: this llama.cpp was built for a CPU alone", path.name)
        return None
    return path


def _load_llamacpp(path: Path, model: str, device: str, dtype: str, threads: int) -> tuple[Executor, Vocabulary]:
    from execution.gguf_models import check_gguf, converted_vocabulary, vocabulary_folder
    from execution.llamacpp_context import can_use_gpu, version
    from execution.llamacpp_executor import LlamaCppExecutor

    if device != "cpu" and not can_use_gpu():
        raise ModelError(
            f"device {device!r}: this llama-cpp-python was built for a CPU alone: build it again with"
            " CMAKE_ARGS=-DGGML_CUDA=on (or -DGGML_METAL=on), use --device cpu, or --engine torch"
        )
    check_gguf(path, model)
    layers, gpu = (0, 0) if device == "cpu" else (-1, int(device.removeprefix("gpu") if device != "mps" else 0))
    executor = LlamaCppExecutor(path, model, dtype=dtype, threads=threads, layers=layers, gpu=gpu)
    vocabulary = converted_vocabulary(vocabulary_folder(path, model, executor.vocab_size))
    _log.info("%s: llama.cpp runs it (llama-cpp-python %s, %s)", path.name, version(), executor.description)
    return executor, vocabulary


def _load_toy(model: str, device: str, dtype: str) -> tuple[Executor, Vocabulary]:
    from execution.toy import ToyExecutor
    from execution.toy_spec import ToySpec
    from execution.toy_vocabulary import toy_vocabulary

    spec = ToySpec.parse(model)
    if spec.load_ms:
        time.sleep(spec.load_ms / 1000)
    if spec.fail_load == 1:
        raise ModelError(f"model {model!r} was asked to fail while loading: leave out fail_load=1", usage=False)
    if spec.fail_load == 2:
        os._exit(3)
    return ToyExecutor(model, device, dtype), toy_vocabulary(spec)


def _load_synthetic(model: str, device: str, dtype: str) -> tuple[Executor, Vocabulary]:
    from execution.synthetic import SyntheticExecutor
    from execution.toy_spec import ToySpec
    from execution.toy_vocabulary import toy_vocabulary

    executor = SyntheticExecutor(model, device, dtype)
    return executor, toy_vocabulary(ToySpec(vocab=executor.spec.vocab, eos=executor.spec.eos))


def _load_network(
    model: str, device: torch.device, dtype: torch.dtype, packed: bool, graphs: bool
) -> tuple[Executor, Vocabulary]:
    from execution.cuda_graphs import graphs_on
    from execution.transformers_executor import TransformersExecutor

    network, head_ids, vocabulary = read_network(model, device, dtype)
    size = int(network.config.get_text_config(decoder=True).vocab_size)
    if vocabulary.size > size:
        raise ModelError(
            f"model {model!r}: its tokenizer has {vocabulary.size} ids, the model only {size}: the two do not belong"
            " together; use the tokenizer that came with the model"
        )
    executor = TransformersExecutor(
        network,
        model,
        vocab_size=size,
        head_ids=head_ids,
        packed=packed,
        graphs=graphs_on(device) if graphs else None,
    )
    return executor, vocabulary


def read_network(model: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, torch.Tensor | None, Vocabulary]:
    """(transformers' network, ids of a reduced head's outputs, int64 [H], or None, vocabulary). Raises ModelError."""
    from execution.draft_checkpoint import draft_settings, load_draft
    from execution.hub_models import load_network

    source = model_source(model)
    settings = draft_settings(source) if isinstance(source, Path) else None
    head_ids = None
    if settings is not None and isinstance(source, Path):
        lender = str(settings.get("embedding_source", ""))
        network, head_ids = load_draft(source, model, dtype, device, lambda: _embedding(lender, model))
        own = settings.get("embedding") != "shared" and (source / "tokenizer.json").is_file()
        vocabulary = _vocabulary(model, source) if own else _lent_vocabulary(lender, model)
    else:
        network = load_network(model, source, dtype, device)
        vocabulary = _vocabulary(model, source)
    return network, head_ids, vocabulary


def model_source(model: str) -> Path | str:
    """The folder that transformers can read, or the hub id."""
    from execution.hub_models import KNOWN

    if model == default_models.DRAFT:
        return default_models.draft_checkpoint()
    path = default_models.target_file() if model == default_models.TARGET else Path(model).expanduser()
    if path.is_file():
        from execution.gguf_models import converted_folder

        return converted_folder(path, model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model {model!r}: the folder has no config.json: give {KNOWN}")
        return path
    if model.endswith(".gguf") or model.startswith(("/", ".", "~")) or model.count("/") > 1 or not model.strip():
        raise ModelError(f"model {model!r}: there is no such file or folder: give {KNOWN}")
    return model


def _vocabulary(model: str, source: Path | str) -> Vocabulary:
    from execution.gguf_models import converted_vocabulary
    from execution.hub_models import load_vocabulary

    if isinstance(source, Path) and (source / "vocabulary.json").is_file():
        return converted_vocabulary(source)
    return load_vocabulary(model, source)


def _embedding(lender: str, borrower: str) -> torch.Tensor:
    """The embedding of another model, without loading the rest of it."""
    from execution.draft_checkpoint import EMBEDDING
    from execution.hub_models import read_tensor, weights_folder

    try:
        return read_tensor(weights_folder(lender, model_source(lender)), EMBEDDING)
    except (KeyError, FileNotFoundError) as error:
        raise ModelError(
            f"model {borrower!r} borrows the embedding of {lender!r}, which has no {EMBEDDING} in safetensors: distil"
            " a draft with an embedding of its own"
        ) from error


def _lent_vocabulary(lender: str, borrower: str) -> Vocabulary:
    from execution.draft_checkpoint import draft_settings

    source = model_source(lender)
    if isinstance(source, Path) and draft_settings(source) is not None:
        raise ModelError(f"model {borrower!r} borrows from {lender!r}, itself a draft: name the target as its source")
    return _vocabulary(lender, source)
