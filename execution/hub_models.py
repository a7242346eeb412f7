"""Models in transformers' own form: a folder here, or an id on the Hugging Face hub. Imports transformers lazily."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from execution.errors import ModelError
from execution.vocabulary import Vocabulary

KNOWN = "smollm2-135m-instruct, smollm2-135m-draft, toy:..., a folder, a .gguf file or a Hugging Face id"


@contextmanager
def readable_errors(reference: str) -> Iterator[None]:
    """What transformers raises while it loads, as one line."""
    try:
        yield
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(f"model {reference!r} needs a package that is missing ({error}): install it") from error
    except Exception as error:  # its own error types and those of the files' readers are many
        local = Path(reference).is_dir()
        where = "the folder" if local else "the Hugging Face hub and its cache"
        why = _first_line(error)
        raise ModelError(
            f"model {reference!r} cannot be loaded from {where} ({why}): give {KNOWN}"
            + ("" if local else "; offline, only what was downloaded before")
        ) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0][:300]


def hush() -> None:
    """No progress bars in log files, and no advice of transformers among our lines."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def go_offline_if_cut_off() -> None:
    """Where the hub's name can't be resolved, use what is in its cache at once, without half a minute of retries."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if constants.HF_HUB_OFFLINE or getproxies() or host is None:
        return
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True


def load_network(reference: str, source: str | Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal language model of a folder or hub id. One that can't be run is refused before it is fetched."""
    from execution.attention_kinds import refuse_unsupported

    with readable_errors(reference):
        from transformers import AutoConfig, AutoModelForCausalLM

        hush()
        local = Path(source).is_dir()
        if not local:
            go_offline_if_cut_off()
        config = AutoConfig.from_pretrained(source)
        if not local:  # refuse before gigabytes are fetched
            with torch.device("meta"):
                refuse_unsupported(AutoModelForCausalLM.from_config(config), reference)
        network = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype)
        return network.to(device)


def load_vocabulary(reference: str, source: str | Path) -> Vocabulary:
    """The vocabulary beside a model. ModelError if it has no tokenizer that travels as tokenizer.json."""
    with readable_errors(reference):
        from transformers import AutoTokenizer

        hush()
        tokenizer = AutoTokenizer.from_pretrained(source)
        eos_ids = _eos_ids(source, tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"model {reference!r}: its tokenizer ({type(tokenizer).__name__}) has no tokenizer.json form, which the"
            " orchestrator needs: choose a model with a fast tokenizer"
        )
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = template.get("default", "")
    return Vocabulary(backend.to_str().encode(), template, eos_ids)


def _eos_ids(source: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Where transformers' own `generate` stops."""
    from transformers import AutoConfig, GenerationConfig

    places = [AutoConfig.from_pretrained(source), tokenizer]
    with suppress(OSError):  # many folders have no generation_config.json
        places.insert(0, GenerationConfig.from_pretrained(source))
    for place in places:
        found = getattr(place, "eos_token_id", None)
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(found)
    return ()


def weights_folder(reference: str, source: str | Path) -> Path:
    """The folder that holds a model's safetensors."""
    if Path(source).is_dir():
        return Path(source)
    with readable_errors(reference):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"]))


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    """One tensor of a folder's safetensors, mapped and not copied. KeyError if it is not there."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    file = json.loads(index.read_text())["weight_map"][name] if index.is_file() else "model.safetensors"
    with safe_open(folder / file, framework="pt") as tensors:
        if name not in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
            raise KeyError(name)
        return tensors.get_tensor(name)  # type: ignore[no-any-return]
