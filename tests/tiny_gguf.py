"""A tiny random Llama written as a GGUF file, with the network it came from. Imports torch, transformers and gguf."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

VOCAB, CONTEXT, EOS = 61, 96, 60
TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
needs_llamacpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is not installed (pip install 'specdec-orchestrator[llamacpp]')",
)


def tiny_network(seed: int, *, context: int = CONTEXT, scale: float = 3.0) -> Any:
    """transformers' own, in evaluation mode. `scale` away from uniform, so that a wrong mask shows."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(scale)
    return network


def write_gguf(path: Path, network: Any) -> Path:
    """The network in float32, with a byte-level tokenizer of one character a token, but for one merge."""
    from gguf import GGUFWriter

    config = network.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([chr(33 + index) for index in range(EOS - 1)] + ["!!", "<e>"])
    writer.add_token_types([1] * EOS + [3])
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(EOS)
    for name, tensor in network.state_dict().items():
        writer.add_tensor(*_renamed(name, tensor.float().numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _renamed(name: str, values: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight", values
    _, _, layer, part = stem.split(".", 3)
    if part in ("self_attn.q_proj", "self_attn.k_proj"):  # llama.cpp rotates neighbours, transformers halves
        heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
        values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return f"blk.{layer}.{TENSORS[part]}.weight", np.ascontiguousarray(values)
