"""The student: a few of the target's layers, a frozen embedding, and a head over all or the likeliest ids.

Its checkpoint folder is an ordinary transformers one. `config.json` carries one more key, "specdec", which says
whether the head is reduced (then `head_ids` [H] in the weights names the id of each row) and whether the embedding
is the target's own (then it is not in the file).
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from distill.corpus import Array
from distill.faults import RunFault, UsageFault

_LAYER = re.compile(r"^(?P<stem>.+?\.(?:layers|h|blocks))\.(?P<index>\d+)\.(?P<rest>.+)$")


@dataclass(frozen=True)
class Shape:
    """What the student is made of. `head` 0 means one row for every id of the vocabulary."""

    layers: int
    head: int
    shared_embedding: bool


class Student:
    """`causal` is a transformers model; `head_ids` [H] (ascending) or None; `rows` [V] maps an id to its row or -1."""

    def __init__(self, causal: Any, shape: Shape, head_ids: torch.Tensor | None) -> None:
        self.causal, self.shape, self.head_ids = causal, shape, head_ids
        vocab_size = int(causal.config.vocab_size)
        ids = torch.arange(vocab_size) if head_ids is None else head_ids.long()
        self.rows = torch.full((vocab_size,), -1).index_put((ids,), torch.arange(len(ids)))
        causal.get_input_embeddings().weight.requires_grad_(False)
        self._asked: torch.Tensor | None = None
        causal.get_output_embeddings().register_forward_pre_hook(self._select)

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """The trained weights by name; the frozen embedding is not among them."""
        return {name: weight for name, weight in self.causal.named_parameters() if weight.requires_grad}

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens [batch, n], flat positions [m] into it -> scores [m, H], in the dtype of the head's product.

        Padding stands on the right: attention is causal. Only the asked positions reach the head.
        """
        self._asked = positions
        try:
            scores: torch.Tensor = self.causal(input_ids=tokens, use_cache=False).logits
        finally:
            self._asked = None
        return scores

    def _select(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Head pre-hook: hidden [batch, n, width] -> [m, width]."""
        return None if self._asked is None else (inputs[0].flatten(0, 1)[self._asked],)

    def spread(self, scores: torch.Tensor) -> torch.Tensor:
        """scores [..., H] -> scores [..., V]; ids without a row get -inf."""
        if self.head_ids is None:
            return scores
        wide = scores.new_full((*scores.shape[:-1], len(self.rows)), -torch.inf)
        wide[..., self.head_ids.long()] = scores
        return wide


def build_student(target: Any, shape: Shape, head_ids: torch.Tensor | None) -> Student:
    """Start a student from `target`'s own weights. `head_ids` [H]: the ids of a reduced head, else None.

    Raises: UsageFault where the shape does not fit the target.
    """
    config = target.config.get_text_config()
    check_shape(shape, config)
    kept = _spread(int(config.num_hidden_layers), shape.layers)
    causal = _empty(_shrunk(config, kept))
    weights = _renumbered(target.state_dict(), kept)
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings()
    missing = causal.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:
        raise RunFault(f"cannot copy layers of {type(target).__name__}: weights do not match after renumbering")
    causal.get_input_embeddings().weight.data = embedding.float().clone()
    causal.set_output_embeddings(_head(head, head_ids))
    return Student(causal, shape, head_ids)


def check_shape(shape: Shape, config: Any) -> None:
    """Raises: UsageFault where a target of this text config cannot have such a student."""
    layers, vocab_size = int(config.num_hidden_layers), int(config.vocab_size)
    if not 1 <= shape.layers <= layers:
        raise UsageFault(f"--layers {shape.layers} is impossible: the target has {layers} layers (give 1 to {layers})")
    if shape.head > vocab_size:
        raise UsageFault(
            f"--head {shape.head} is larger than the target's vocabulary of {vocab_size} (give a smaller one, or full)"
        )


def _spread(layers: int, kept: int) -> list[int]:
    """Indices of `kept` layers from the first to the last, evenly spread: 30 -> 0, 14, 29."""
    if kept == 1:
        return [0]
    return [(layers - 1) * index // (kept - 1) for index in range(kept)]


def _shrunk(config: Any, kept: list[int]) -> Any:
    small = copy.deepcopy(config)
    small.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        small.layer_types = [config.layer_types[index] for index in kept]
    small.tie_word_embeddings = False  # the embedding stays frozen while the head learns
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(small, name):
            delattr(small, name)
    return small


def _empty(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _renumbered(weights: dict[str, torch.Tensor], kept: list[int]) -> dict[str, torch.Tensor]:
    """Keep the chosen layers under their new numbers and everything outside the layers as it is."""
    out = {}
    for name, weight in weights.items():
        match = _LAYER.match(name)
        if match is None:
            out[name] = weight
        elif int(match["index"]) in kept:
            out[f"{match['stem']}.{kept.index(int(match['index']))}.{match['rest']}"] = weight
    return out


def likeliest(mass: Array, count: int) -> torch.Tensor:
    """int32 [count], ascending: the ids that have the most of `mass` [V]."""
    return torch.from_numpy(np.sort(np.argsort(-mass, kind="stable")[:count]).astype(np.int32))


def _head(full: Any, head_ids: torch.Tensor | None) -> nn.Linear:
    weight = full.weight.float() if head_ids is None else full.weight.float()[head_ids.long()]
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=getattr(full, "bias", None) is not None)
    head.weight.data = weight.clone()
    if head.bias is not None:
        head.bias.data = full.bias.float().clone() if head_ids is None else full.bias.float()[head_ids.long()]
    return head


def save_student(student: Student, folder: Path, reference: str, tokenizer: Any, training: dict[str, Any]) -> int:
    """Write the checkpoint folder (float16) and return its size in bytes. The folder is replaced as a whole."""
    draft = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file(_weights(student), draft / "model.safetensors", metadata={"format": "pt"})
        (draft / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
        (draft / "config.json").write_text(json.dumps(_config(student, reference, training), indent=2) + "\n")
        if not student.shape.shared_embedding:
            tokenizer.save_pretrained(draft)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except OSError as error:
        raise RunFault(f"cannot write checkpoint {folder}: {error.strerror or error}") from error
    return sum(file.stat().st_size for file in folder.iterdir())


def _weights(student: Student) -> dict[str, torch.Tensor]:
    frozen = student.causal.get_input_embeddings().weight
    weights = {
        name: weight.detach().to(torch.float16).contiguous()
        for name, weight in student.causal.state_dict(keep_vars=True).items()
        if not (student.shape.shared_embedding and weight is frozen)
    }
    if student.head_ids is not None:
        weights["head_ids"] = student.head_ids.to(torch.int32)
    return weights


def _config(student: Student, reference: str, training: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = student.causal.config.to_dict()
    config.pop("_model_name_or_path", None)  # where the target was made, not where this one was
    config |= {"architectures": [type(student.causal).__name__], "dtype": "float16"}
    shared = student.shape.shared_embedding
    config["specdec"] = {
        "head": "full" if student.head_ids is None else "reduced",
        "embedding": "shared" if shared else "own",
        **({"embedding_source": reference} if shared else {}),
        "training": training,
    }
    return config


def load_student(folder: Path, embedding: torch.Tensor | None = None) -> Student:
    """Read a checkpoint folder back, in float32. `embedding` [V, hidden] is needed where it is shared."""
    from transformers import AutoConfig

    said = json.loads((folder / "config.json").read_text())["specdec"]
    config = AutoConfig.from_pretrained(folder)
    weights = {name: weight for name, weight in load_file(folder / "model.safetensors").items()}
    head_ids = weights.pop("head_ids", None)
    causal = _empty(config)
    if head_ids is not None:
        bias = causal.get_output_embeddings().bias is not None
        causal.set_output_embeddings(nn.Linear(config.hidden_size, len(head_ids), bias=bias))
    causal.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    shared = said["embedding"] == "shared"
    if shared:
        if embedding is None:
            raise UsageFault(f"{folder} shares the embedding of {said['embedding_source']}: load that first")
        causal.get_input_embeddings().weight.data = embedding.float().clone()
    shape = Shape(int(config.num_hidden_layers), 0 if head_ids is None else len(head_ids), shared)
    return Student(causal.eval(), shape, head_ids)
