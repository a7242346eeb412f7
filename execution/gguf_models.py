"""GGUF files: dequantised and converted once into an ordinary folder of the cache, keyed by the file's content.

Imports torch and transformers, when a file has to be converted and only then.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from execution.cache_folder import content_key, made_once, need_space
from execution.errors import ModelError
from execution.gguf_tokenizer import byte_level_tokenizer
from execution.vocabulary import Vocabulary

_FORMAT = 2  # of the converted folders: raise it when their content changes

_log = logging.getLogger(__name__)


def converted_folder(path: Path, reference: str) -> Path:
    """Folder with config.json, model.safetensors (float32), tokenizer.json and vocabulary.json of a GGUF file."""

    def convert(folder: Path) -> None:
        _log.info("converting %s (once, half a minute for a small model)", path.name)
        need_space(12 * path.stat().st_size, f"dequantising {path.name}")
        _convert_vocabulary(path, folder, _convert_network(path, folder))

    return _made_of(path, reference, "", convert)


def vocabulary_folder(path: Path, reference: str, size: int) -> Path:
    """Folder with tokenizer.json and vocabulary.json of a GGUF file whose model has `size` logits."""
    return _made_of(path, reference, "-vocabulary", lambda folder: _convert_vocabulary(path, folder, size))


def _made_of(path: Path, reference: str, kind: str, convert: Callable[[Path], None]) -> Path:
    """The cache's folder of this file, filled by `convert` where it isn't there. ModelError for what can't be read."""
    check_gguf(path, reference)

    def make(folder: Path) -> None:
        quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
        try:
            with quiet:
                convert(folder)
        except (ModelError, MemoryError):
            raise
        except Exception as error:  # whatever the readers stumble upon
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's, not transformers' own use of OSError
            raise ModelError(
                f"model {reference!r}: transformers cannot read this GGUF file ({type(error).__name__}: {error}):"
                " use another quantisation of it, or the model's own folder"
            ) from error

    return made_once(f"gguf/{content_key(path)[:32]}-v{_FORMAT}{kind}", make)


def check_gguf(path: Path, reference: str) -> None:
    """ModelError unless the file begins as a GGUF file does."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"model {reference!r}: {str(path)!r} is not a GGUF file: give one, or a model folder")


def converted_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary that `converted_folder` left in its folder."""
    about = json.loads((folder / "vocabulary.json").read_text())
    return Vocabulary((folder / "tokenizer.json").read_bytes(), about["chat_template"], tuple(about["eos_ids"]))


def _convert_network(path: Path, folder: Path) -> int:
    """Write the weights and the configuration; the vocabulary's size."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)  # only names the weights
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=network)["tensors"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures, config.dtype = [type(network).__name__], torch.float32
    config.save_pretrained(folder)
    return int(config.vocab_size)


def _convert_vocabulary(path: Path, folder: Path, size: int) -> None:
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    tokenizer = byte_level_tokenizer(fields)
    template, eos = (fields.get(f"tokenizer.{key}") for key in ("chat_template", "ggml.eos_token_id"))
    about = {
        "chat_template": template.contents() if template else "",
        "eos_ids": [int(eos.contents())] if eos else [],
    }
    if tokenizer is None:  # of another kind: as transformers reads it
        from transformers import AutoTokenizer

        whole = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        tokenizer = whole.backend_tokenizer
    if tokenizer.get_vocab_size() > size:
        raise ValueError(f"its tokenizer comes out with {tokenizer.get_vocab_size()} ids of {size}")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "vocabulary.json").write_text(json.dumps(about))
