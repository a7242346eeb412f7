"""speculative_decode, GPTModel and model_step: lengths, self-drafting, cropping, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculative import GPTModel, model_step, speculative_decode

UNIFORM = torch.full((5,), 0.2)


def one_hot(token: int, vocab: int = 5) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), vocab).float()


def counting(tokens: Tensor) -> Tensor:
    """A deterministic target: each token is the last plus one, modulo 5."""
    return one_hot((int(tokens[-1]) + 1) % 5)


def tiny(seed: int) -> GPTModel:
    torch.manual_seed(seed)
    return GPTModel(vocab_size=12, embed_dim=16, num_heads=2, num_layers=1, max_seq_len=8)


def test_a_model_that_drafts_for_itself_accepts_all() -> None:
    step = model_step(tiny(0))
    out, trace = speculative_decode(torch.tensor([1]), step, step, gamma=3, max_new_tokens=20)
    assert [one["n_accepted"] for one in trace] == [3] * 5 and out.shape == (20,)


def test_same_greedy_model_on_both_sides_gives_all_tokens_at_full_acceptance() -> None:
    """B12: draft equal to target must not stop after a token; n tokens, all accepted, as plain decoding gives."""
    for gamma in (0, 1, 3, 4):
        out, trace = speculative_decode(torch.tensor([0]), counting, counting, gamma=gamma, max_new_tokens=8)
        assert out.tolist() == [1, 2, 3, 4, 0, 1, 2, 3]
        assert all(one["n_accepted"] == gamma for one in trace)


@pytest.mark.parametrize("gamma", [0, 1, 2, 7])
def test_deterministic_target_decides_whatever_the_draft(gamma: int) -> None:
    out, trace = speculative_decode(torch.tensor([3]), counting, lambda seq: UNIFORM, gamma=gamma, max_new_tokens=9)
    assert out.tolist() == [4, 0, 1, 2, 3, 4, 0, 1, 2]
    for one in trace:
        assert len(one["proposed"]) == gamma and len(one["emitted"]) == one["n_accepted"] + 1


def test_a_single_wrong_draft_token_is_not_committed() -> None:
    """B9: with γ = 1 and a draft token other than the target's, only the target's is emitted."""
    out, trace = speculative_decode(torch.tensor([0]), counting, lambda seq: one_hot(3), gamma=1, max_new_tokens=1)
    assert out.tolist() == [1]
    assert trace == [{"proposed": [3], "n_accepted": 0, "emitted": [1]}]


def test_target_is_asked_for_each_prefix_of_the_block() -> None:
    asked: list[list[int]] = []

    def target(tokens: Tensor) -> Tensor:
        asked.append(tokens.tolist())
        return counting(tokens)

    speculative_decode(torch.tensor([0]), target, counting, gamma=2, max_new_tokens=3)
    assert asked == [[0], [0, 1], [0, 1, 2]]


def test_seeded_runs_repeat_and_zero_tokens_are_none() -> None:
    runs = [
        speculative_decode(
            torch.tensor([0]), lambda seq: UNIFORM, lambda seq: UNIFORM, generator=torch.Generator().manual_seed(3)
        )[0].tolist()
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and len(runs[0]) == 32
    out, trace = speculative_decode(torch.tensor([0]), counting, counting, max_new_tokens=0)
    assert out.shape == (0,) and trace == []


def test_narrower_draft_is_padded() -> None:
    """A1: tokenizers equal, vocabularies padded to 10 and to 8."""
    wide = torch.tensor([0.0] * 8 + [0.5, 0.5])
    out, trace = speculative_decode(
        torch.tensor([0]), lambda seq: wide, lambda seq: torch.full((8,), 0.125), gamma=3, max_new_tokens=6
    )
    assert set(out.tolist()) <= {8, 9} and all(one["n_accepted"] == 0 for one in trace)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": -1}, "gamma is -1; expected an integer >= 0"),
        ({"max_new_tokens": -2}, "max_new_tokens is -2"),
        ({"prompt": torch.tensor([0.5])}, "1-D tensor of token ids"),
        ({"prompt": torch.tensor([[1]])}, "1-D tensor of token ids"),
        ({"draft_step": lambda seq: UNIFORM * 2}, "the draft step's answer sums to 2; expected 1"),
        ({"draft_step": lambda seq: one_hot(6, 7)}, "id 6"),
        ({"target_step": lambda seq: UNIFORM * torch.nan}, "target_probs has NaN"),
        ({"target_step": lambda seq: UNIFORM - 0.5}, "below 0"),
    ],
)
def test_refusals(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "prompt": torch.tensor([0]),
        "target_step": counting,
        "draft_step": counting,
        "gamma": 2,
        "max_new_tokens": 4,
    }
    with pytest.raises(ValueError, match=message):
        speculative_decode(**(arguments | change))  # type: ignore[arg-type]


def test_model_step_crops_and_leaves_no_gradient() -> None:
    model = tiny(1)
    step = model_step(model)
    long = torch.arange(30) % 12
    law = step(long)
    assert torch.equal(law, step(long[-8:])) and not law.requires_grad
    assert law.shape == (12,) and abs(float(law.sum()) - 1) < 1e-6
    with pytest.raises(ValueError, match="at most max_seq_len = 8"):
        model(long.unsqueeze(0))


def test_model_step_takes_any_callable() -> None:
    step = model_step(lambda ids: torch.zeros(1, ids.shape[1], 4))
    assert step(torch.arange(100)).tolist() == [0.25] * 4


def test_gpt_is_causal_and_checks_its_heads() -> None:
    model = tiny(2).eval()
    ids = torch.randint(0, 12, (2, 8), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 12
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    with pytest.raises(ValueError, match="no multiple of num_heads"):
        GPTModel(vocab_size=4, embed_dim=10, num_heads=4)
