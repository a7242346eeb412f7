"""Networks of random weights in the shapes of real ones, made on the device: nothing is fetched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from execution.cuda_graphs import Graph, Graphs, Pass, RunAgain, graphs_on
from execution.transformers_executor import TransformersExecutor

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_COMMON = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
TARGET: dict[str, Any] = _COMMON | {  # Llama 3.1 8B
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": 128,
    "rope_parameters": _LLAMA3 | {"factor": 8.0},
    "tie_word_embeddings": False,
}
DRAFT: dict[str, Any] = _COMMON | {  # Llama 3.2 1B
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
    "rope_parameters": _LLAMA3 | {"factor": 32.0},
    "tie_word_embeddings": True,
}
_TINY = {"vocab_size": 503, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
SMALL_TARGET = TARGET | _TINY | {"num_key_value_heads": 2, "num_hidden_layers": 3}
SMALL_DRAFT = DRAFT | _TINY | {"num_key_value_heads": 2, "num_hidden_layers": 1}
PAIR: dict[str, Any] = SMALL_TARGET | {  # in float32, for decoding
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 64,
    "vocab_size": 2003,
}


def build(shape: dict[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A network of transformers with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=dtype).eval()


def resembling(network: Any, noise: float, seed: int) -> Any:
    """A copy whose weights differ by `noise` times their own spread: as a draft, it's right now and then."""
    import copy

    other = copy.deepcopy(network)
    generator = torch.Generator(network.device).manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator, device=weight.device)
    return other


def parameters(shape: dict[str, Any]) -> int:
    """Numbers of a network of that shape."""
    return sum(weight.numel() for weight in build(shape, torch.bfloat16, torch.device("meta"), 0).parameters())


def weight_bytes(network: Any) -> int:
    """What a pass reads at least: every weight once, of an embedding that's no head nothing to speak of."""
    embedding, head = network.get_input_embeddings().weight, network.get_output_embeddings().weight
    read: dict[int, Tensor] = {id(weight): weight for weight in network.parameters()}
    if embedding is not head:
        del read[id(embedding)]
    return sum(weight.nbytes for weight in read.values())


class Counted:
    """Graphs of which is known how many passes they ran."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs, self.replays, self.forget = graphs, 0, graphs.forget

    def record(self, run: Pass) -> Graph:
        return _CountedGraph(self._graphs.record(run), self._note)

    def _note(self) -> None:
        self.replays += 1


class _CountedGraph:
    def __init__(self, graph: Graph, note: Callable[[], None]) -> None:
        self._graph, self._note = graph, note

    @property
    def output(self) -> Tensor | None:
        return self._graph.output

    def replay(self) -> None:
        self._note()
        self._graph.replay()


def executor(network: nn.Module, *, graphs: bool, packed: bool) -> tuple[TransformersExecutor, Counted | None]:
    """Over a network that others may use in turn, but for plain ones once it is packed. On a CPU, a graph runs its pass
    again."""
    device = next(network.parameters()).device
    counted = Counted(graphs_on(device) or RunAgain()) if graphs else None
    vocab_size = int(network.config.vocab_size)
    made = TransformersExecutor(network, "random weights", vocab_size=vocab_size, packed=packed, graphs=counted)
    return made, counted
