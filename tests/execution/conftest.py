"""Tiny random networks, and a reference that knows nothing of our cache. May import execution and transformers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `tests.…` is found from anywhere

from tests.tiny_gguf import needs_llamacpp, tiny_network, write_gguf

VOCAB = 61
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "head_dim": 8,
}
WINDOW = 8
LLAMACPP = pytest.param("llamacpp", marks=needs_llamacpp)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `family` runs for each, one with `engine` on each; of rows, families have llama.cpp's.

    Tests of rows and of their storage run with eager and with static passes.
    """
    module, names = metafunc.module.__name__.rpartition(".")[2], metafunc.fixturenames
    models: list[Any] = [None]
    if "family" in names:
        models = [*FAMILIES, LLAMACPP] if module == "test_rows" else list(FAMILIES)
    if "engine" in names:
        models = ["llama", LLAMACPP]
    asked = next((name for name in ("family", "engine") if name in names), None)
    if "passes" in names and module in ("test_rows", "test_row_cache"):
        cases = [
            (model, kind) for model in models for kind in ("eager", "static") if (model, kind) != (LLAMACPP, "static")
        ]
        if asked is None:
            metafunc.parametrize("passes", [kind for _, kind in cases])
        else:
            metafunc.parametrize((asked, "passes"), [_case(model, kind) for model, kind in cases])
    elif asked is not None:
        metafunc.parametrize(asked, models)


def _case(model: Any, passes: str) -> Any:
    """A parameter of both, with the marks of the first."""
    if model is LLAMACPP:
        return pytest.param(*model.values, passes, marks=model.marks)
    return (model, passes)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny_config(family: str) -> Any:
    """A configuration with the features that matter to a cache: grouped heads, windows, learned positions."""
    import transformers as t

    mixed = ["sliding_attention", "full_attention"]
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**_SMALL),
        "qwen2": lambda: t.Qwen2Config(**_SMALL),
        "qwen3": lambda: t.Qwen3Config(**_SMALL),
        "qwen2_window": lambda: t.Qwen2Config(
            **_SMALL, use_sliding_window=True, sliding_window=WINDOW, layer_types=mixed
        ),
        "mistral": lambda: t.MistralConfig(**_SMALL, sliding_window=WINDOW),
        "gemma2": lambda: t.Gemma2Config(**_SMALL, sliding_window=WINDOW, layer_types=mixed),
        "gemma3": lambda: t.Gemma3TextConfig(**_SMALL, sliding_window=WINDOW, layer_types=mixed),
        "gpt2": lambda: t.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=96),
        "gpt_neox": lambda: t.GPTNeoXConfig(
            **{key: value for key, value in _SMALL.items() if key not in ("head_dim", "num_key_value_heads")}
        ),
    }
    return makers[family]()


FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_window", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox")


@pytest.fixture
def make_config() -> Callable[[str], Any]:
    return tiny_config


@dataclass
class Pair:
    """An executor, and the same network run plainly: all tokens in one pass, without a cache."""

    executor: Any
    network: Any

    def plain(self, tokens: list[int]) -> Tensor:
        """Logits at every position, float32 [len(tokens), vocab]."""
        with torch.no_grad():
            return self.network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


@pytest.fixture
def passes() -> str:
    """How `make_pair` has small passes run: eager, static (shapes out of few); tests of rows have both."""
    return "eager"


@pytest.fixture
def make_pair(passes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pair]:
    """Of a family of transformers, or "llamacpp": that engine over a Llama."""
    monkeypatch.setattr("execution.static_passes.COLUMNS", 16)  # several lengths within the tiny networks' context

    def make(family: str = "llama", seed: int = 0, packed: bool = True, graphs: Any = None) -> Pair:
        if family == "llamacpp":
            from execution.llamacpp_executor import LlamaCppExecutor

            llama = tiny_network(seed)
            path = write_gguf(tmp_path / f"{seed}.gguf", llama)
            return Pair(LlamaCppExecutor(path, "tiny.gguf"), llama)
        from transformers import AutoModelForCausalLM

        from execution.cuda_graphs import RunAgain
        from execution.transformers_executor import TransformersExecutor

        if passes == "static" and graphs is None:
            graphs = RunAgain()
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(3)  # far from uniform, so that a wrong mask shows
        plain = copy.deepcopy(network)
        executor = TransformersExecutor(network, f"tiny {family}", vocab_size=VOCAB, packed=packed, graphs=graphs)
        return Pair(executor, plain)

    return make


@pytest.fixture
def some_tokens() -> Callable[..., list[int]]:
    def some(count: int, seed: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    return some


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder of our own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECDEC_CACHE", str(folder))
    yield folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny Llama with a character tokenizer, in transformers' own form."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from execution.toy_spec import ToySpec
    from execution.toy_vocabulary import toy_vocabulary

    folder = tmp_path / "tiny-llama"
    torch.manual_seed(5)
    config = tiny_config("llama")
    config.eos_token_id = 3
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    text = Tokenizer.from_buffer(toy_vocabulary(ToySpec(vocab=VOCAB - 3)).tokenizer_json)
    PreTrainedTokenizerFast(tokenizer_object=text).save_pretrained(folder)
    return folder
