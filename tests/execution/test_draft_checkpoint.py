"""Checkpoints of scripts/distill_draft.py: reduced heads and borrowed embeddings."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from execution import load
from execution.errors import ModelError
from execution.interface import Extension

HEAD = [1, 4, 5, 30, 57]


@pytest.fixture
def draft_folder(model_folder, tmp_path):
    """A draft of one layer that borrows from model_folder; and all weights that it stands for."""
    source = load_file(model_folder / "model.safetensors")
    config = json.loads((model_folder / "config.json").read_text())
    config["num_hidden_layers"] = 1
    weights = {name: tensor.half() for name, tensor in source.items() if "layers.1." not in name}
    whole = dict(weights)
    del weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = weights["lm_head.weight"][HEAD].contiguous()
    weights["head_ids"] = torch.tensor(HEAD, dtype=torch.int32)
    config["specdec"] = {
        "head": "reduced", "embedding": "shared", "embedding_source": str(model_folder), "training": {},
    }  # fmt: skip
    folder = tmp_path / "draft"
    folder.mkdir()
    write(folder, config, weights)
    return folder, config, weights, whole


def write(folder, config, weights):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def plain_logits(config, weights, source, tokens):
    from transformers import LlamaConfig, LlamaForCausalLM

    network = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in config.items() if key != "specdec"})).eval()
    full = {name: tensor.float() for name, tensor in weights.items()}
    full["model.embed_tokens.weight"] = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    network.load_state_dict(full)
    with torch.no_grad():
        return network(input_ids=torch.tensor([tokens])).logits[0]


def test_reduced_head_and_shared_embedding(draft_folder, model_folder):
    folder, config, _, whole = draft_folder
    executor, words = load(str(folder))
    assert executor.vocab_size == 61 and words.size == 58
    _, lent = load(str(model_folder))
    assert words == lent
    rows = [executor.open(), executor.open()]
    found = executor.extend([Extension(rows[0], [1, 2, 3], 3), Extension(rows[1], [60], 1)])
    expected = plain_logits(config, whole, model_folder, [1, 2, 3])
    torch.testing.assert_close(found[0][:, HEAD], expected[:, HEAD], rtol=1e-5, atol=1e-5)
    others = [index for index in range(61) if index not in HEAD]
    assert found[0].shape == (3, 61) and (found[0][:, others] == -torch.inf).all()
    assert torch.isfinite(found[1][:, HEAD]).all()


def test_full_head_and_own_embedding(draft_folder, model_folder):
    folder, config, _, whole = draft_folder
    config["specdec"] |= {"head": "full", "embedding": "own"}
    write(folder, config, whole)
    executor, words = load(str(folder), dtype="bfloat16")  # its tokenizer is still the source's
    assert executor.dtype == "bfloat16" and words.size == 58
    [logits] = executor.extend([Extension(executor.open(), [1, 2, 3], 3)])
    assert logits.dtype == torch.float32
    expected = plain_logits(config, whole, model_folder, [1, 2, 3])
    assert (logits - expected).abs().max() < 0.05


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda w: w.pop("head_ids"), "head_ids and lm_head.weight"),
        (lambda w: w.update(head_ids=torch.tensor([4, 1, 5, 30, 57])), "do not ascend"),
        (lambda w: w.update(head_ids=torch.tensor([1, 4, 5, 30, 61])), "do not ascend within 0..60"),
        (lambda w: w.pop("model.norm.weight"), "weights missing"),
        (lambda w: w.update(extra=torch.zeros(1)), "unknown: \\['extra'\\]"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), "size mismatch"),
    ],
)
def test_broken_checkpoints(draft_folder, damage, text):
    folder, config, weights, _ = draft_folder
    damage(weights)
    write(folder, config, weights)
    with pytest.raises(ModelError, match=text) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


def test_lender_without_that_tensor(draft_folder, model_folder):
    folder, *_ = draft_folder
    source = load_file(model_folder / "model.safetensors")
    del source["model.embed_tokens.weight"]
    save_file(source, model_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="borrows the embedding"):
        load(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded from the folder"):
        load(str(folder))
