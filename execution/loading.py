"""`load`: from a model reference of the command line to an executor and its vocabulary.

Imports transformers only for the models that need it, so that a toy model starts at once.
"""

from __future__ import annotations

import os
import time

from execution.devices import parse_device, parse_dtype, set_threads
from execution.errors import ModelError
from execution.interface import Executor
from execution.vocabulary import Vocabulary

__all__ = ["ModelError", "load"]


def load(model: str, *, device: str = "cpu", dtype: str = "float32", threads: int = 1) -> tuple[Executor, Vocabulary]:
    """Load `model` and set this process's torch threads.

    `model` is `smollm2-135m-instruct`, `smollm2-135m-draft`, `toy:...`, a folder, a .gguf file or a Hugging Face id.
    Raises ModelError, whose text is one line, for everything that can be wrong with it.
    """
    torch_device, torch_dtype = parse_device(device), parse_dtype(dtype)
    set_threads(threads)
    if model == "toy" or model.startswith("toy:"):
        return _load_toy(model, device, dtype)
    raise ModelError(f"model {model!r}: not yet ({torch_device}, {torch_dtype})")


def _load_toy(model: str, device: str, dtype: str) -> tuple[Executor, Vocabulary]:
    from execution.toy import ToyExecutor
    from execution.toy_spec import ToySpec
    from execution.toy_vocabulary import toy_vocabulary

    spec = ToySpec.parse(model)
    if spec.load_ms:
        time.sleep(spec.load_ms / 1000)
    if spec.fail_load == 1:
        raise ModelError(f"model {model!r} was asked to fail while loading: leave out fail_load=1")
    if spec.fail_load == 2:
        os._exit(3)
    return ToyExecutor(model, device, dtype), toy_vocabulary(spec)
