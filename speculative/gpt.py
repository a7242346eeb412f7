"""A small GPT for examples and tests, and the adapter that makes a step function of a model.

Imports torch and this package's decode types.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from speculative.decode import Step


class GPTModel(nn.Module):
    """A decoder-only transformer (GPT-2's layout: learned positions, pre-norm, GELU) for small vocabularies.

    Token ids int64 [B, T] -> logits float32 [B, T, vocab_size], T <= max_seq_len.
    """

    def __init__(
        self, vocab_size: int, embed_dim: int = 64, num_heads: int = 4, num_layers: int = 2, max_seq_len: int = 256
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is no multiple of num_heads {num_heads}; expected equal heads")
        self.max_seq_len = max_seq_len
        self.token_embedding = nn.Embedding(vocab_size, embed_dim)
        self.position_embedding = nn.Embedding(max_seq_len, embed_dim)
        self.blocks = nn.ModuleList(_Block(embed_dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        self.apply(_initialise)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length > self.max_seq_len:
            raise ValueError(f"{length} tokens; expected at most max_seq_len = {self.max_seq_len}: crop the sequence")
        hidden = self.token_embedding(ids) + self.position_embedding(torch.arange(length, device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class _Block(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(embed_dim)
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)
        self.norm_mlp = nn.LayerNorm(embed_dim)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, 4 * embed_dim, bias=False), nn.GELU(), nn.Linear(4 * embed_dim, embed_dim, bias=False)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.norm_attention(hidden))
        mixed: Tensor = hidden + self.mlp(self.norm_mlp(hidden))
        return mixed

    def _attend(self, hidden: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1))
        query, key, value = heads  # [B, heads, T, head_dim]
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected


def _initialise(module: nn.Module) -> None:
    """GPT-2's start: weights of standard deviation 0.02, biases 0, so that an untrained model is nearly uniform."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def model_step(model: Callable[[Tensor], Tensor]) -> Step:
    """The step function of a model: token sequence [n] -> softmax of its last logits, float32 [V].

    `model` maps ids [1, n] to logits [1, n, V]. Without gradients, in eval mode, and with the sequence cropped to its
    last `model.max_seq_len` tokens where the model has such a limit.
    """
    limit = getattr(model, "max_seq_len", None)

    def step(tokens: Tensor) -> Tensor:
        if isinstance(model, nn.Module):
            model.eval()
        with torch.no_grad():
            recent = tokens if limit is None else tokens[-limit:]
            logits = model(recent.unsqueeze(0))
        return torch.softmax(logits[0, -1].to(torch.float32), dim=-1)

    return step
