"""RMS norms as one kernel: put in the place of those that compute the same, in any precision, and of no others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from execution.fused_norm import FusedNorm, fuse_norms

SIZE = 24


def norms(dtype: torch.dtype) -> nn.ModuleDict:
    torch.manual_seed(0)
    plain: dict[str, nn.Module] = {
        "llama": LlamaRMSNorm(SIZE, eps=1e-5),
        "qwen3": Qwen3RMSNorm(SIZE, eps=1e-6),
        "torch": nn.RMSNorm(SIZE, eps=1e-5),
        "gemma": Gemma2RMSNorm(SIZE, eps=1e-6),
        "layer": nn.LayerNorm(SIZE),
        "biasless": nn.LayerNorm(SIZE, bias=False),
        "unweighted": nn.RMSNorm(SIZE, eps=1e-5, elementwise_affine=False),
        "linear": nn.Linear(SIZE, SIZE, bias=False),
    }
    made = nn.ModuleDict(plain).to(dtype).requires_grad_(False)
    for weight in made.parameters():
        weight += 0.3 * torch.randn_like(weight)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_computes_the_same_is_replaced(dtype):
    network, plain = norms(dtype), norms(dtype)
    assert fuse_norms(network) == 3
    assert {name for name, layer in network.items() if isinstance(layer, FusedNorm)} == {"llama", "qwen3", "torch"}
    given = torch.randn(2, 5, SIZE).to(dtype)
    for name, layer in network.items():
        expected = plain[name](given)
        assert layer(given).dtype == dtype
        assert float((layer(given) - expected).abs().max()) <= 4 * torch.finfo(dtype).eps * float(expected.abs().max())


@pytest.mark.parametrize("factor, eps", [(1.001, 1e-5), (1.0, 1e-3)])
def test_a_layer_that_does_otherwise_than_its_attributes_say_is_left(factor, eps):
    class Other(LlamaRMSNorm):
        def forward(self, hidden_states):
            return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, eps) * factor

    network = nn.ModuleDict({"norm": Other(SIZE, eps=1e-5).requires_grad_(False)})
    assert fuse_norms(network) == 0 and type(network["norm"]) is Other


def test_the_weight_is_the_same_one():
    network = norms(torch.float32)
    weight = network["llama"].weight
    fuse_norms(network)
    assert network["llama"].weight is weight
