"""What a RowCache is wrong for is refused when it is loaded, in one line that says why."""

from __future__ import annotations

import pytest
import torch

from execution.attention_kinds import AttentionKind, attention_kinds, context_length
from execution.errors import ModelError
from execution.transformers_executor import TransformersExecutor

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}


def refusal(config) -> str:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError) as caught:
        TransformersExecutor(network, "some/model", vocab_size=61)
    assert "\n" not in str(caught.value) and "'some/model'" in str(caught.value)
    return str(caught.value)


def test_recurrent_state_is_refused():
    import transformers as t

    assert "recurrent state" in refusal(t.MambaConfig(**SMALL))
    hybrid = t.Qwen3NextConfig(
        **SMALL, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    assert "recurrent state" in refusal(hybrid)


def test_positions_from_the_cache_length_are_refused():
    import transformers as t

    assert "takes no positions" in refusal(t.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4))
    alibi = t.FalconConfig(**SMALL, num_attention_heads=4, alibi=True, new_decoder_architecture=False)
    assert "ALiBi" in refusal(alibi)


def test_other_kinds_of_layers_are_refused():
    import transformers as t

    config = t.LlamaConfig(**SMALL, intermediate_size=64, num_attention_heads=4)
    config.layer_types = ["full_attention", "chunked_attention"]
    assert "layers of type chunked_attention" in refusal(config)


def test_positions_from_the_physical_index_are_found_by_the_self_check(make_config):
    """An untested family that counts positions by itself in each pass, whatever it is told."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(make_config("llama"))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3)
    network.config.model_type = "novel"
    weights = network.state_dict()
    TransformersExecutor(network, "some/model", vocab_size=61)
    network = AutoModelForCausalLM.from_config(make_config("llama"))
    network.load_state_dict(weights)
    network.config.model_type = "novel"
    rotary = network.model.rotary_emb.forward
    network.model.rotary_emb.forward = lambda x, position_ids: rotary(x, torch.arange(x.shape[1])[None])
    with pytest.raises(ModelError, match="'novel' gives other logits in ragged batches than alone"):
        TransformersExecutor(network, "some/model", vocab_size=61)


def test_attention_that_looks_ahead_is_refused():
    import transformers as t

    config = t.BertConfig(**SMALL, num_attention_heads=4, intermediate_size=64, is_decoder=False)
    assert "cannot be run" in refusal(config)


def test_a_model_without_a_head_is_refused():
    import transformers as t

    network = t.LlamaForCausalLM(t.LlamaConfig(**SMALL, intermediate_size=64, num_attention_heads=4))
    network.get_output_embeddings = lambda: None
    with pytest.raises(ModelError, match="no language-model head"):
        TransformersExecutor(network, "some/model", vocab_size=61)


def test_kinds_of_layers(make_config):
    assert attention_kinds(make_config("llama")) == [AttentionKind("full_attention")]
    assert attention_kinds(make_config("mistral")) == [AttentionKind("sliding_attention", 8)]
    mixed = [AttentionKind("full_attention"), AttentionKind("sliding_attention", 8)]
    assert attention_kinds(make_config("gemma3")) == mixed
    assert attention_kinds(make_config("qwen2")) == [AttentionKind("full_attention")]


def test_context_stays_below_a_change_of_rotary_base(make_config):
    config = make_config("llama")
    assert context_length(config) == 96
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 40}
    assert context_length(config) == 40
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert context_length(config) == 96
