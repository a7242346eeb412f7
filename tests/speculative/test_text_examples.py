"""The text's examples, run as scripts: what they print must be what the text shows, character by character."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import speculative
from speculative import (
    GPTModel,
    acceptance_rate,
    expected_accepted_tokens,
    model_step,
    residual_distribution,
    speculative_decode,
    speculative_speedup,
    speculative_verify,
    total_variation,
)

TEXT_NAMES = """total_variation acceptance_rate residual_distribution speculative_verify expected_accepted_tokens
    speculative_speedup demonstrate_speculative speculative_decode model_step GPTModel"""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def verify_a_draft() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    q = torch.tensor([0.4, 0.4, 0.15, 0.05])
    print(f"acceptance rate α = {acceptance_rate(p, q):.3f}  (= 1 - TV)")
    print(f"residual p'      = {residual_distribution(p, q).tolist()}")
    drafted = torch.tensor([0, 1])
    emitted, n_accepted = speculative_verify(torch.stack([p, p, p]), torch.stack([q, q]), drafted, generator=seeded(0))
    print(f"draft proposed : {drafted.tolist()}")
    print(f"accepted       : {n_accepted} token(s)")
    print(f"emitted        : {emitted.tolist()}  (accepted prefix + 1 correction/bonus)")


def full_loop() -> None:
    target = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    draft = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.06, 0.04])
    out, trace = speculative_decode(
        torch.tensor([0]), lambda seq: target, lambda seq: draft, gamma=4, max_new_tokens=12, generator=seeded(1)
    )
    print(f"generated {out.shape[0]} tokens: {out.tolist()}")
    for i, step in enumerate(trace):
        proposed, accepted, emitted = step["proposed"], step["n_accepted"], step["emitted"]
        print(f"  iter {i}: proposed {proposed} → accepted {accepted}, emitted {emitted}")


def two_models() -> None:
    """The text's GPTModel itself is not in the text: ours has the same call and reproduces these counts, which leaves
    open whether its weights and its 16 tokens (never printed) are the same."""
    torch.manual_seed(0)
    big = GPTModel(vocab_size=32, embed_dim=32, num_heads=4, num_layers=2, max_seq_len=64)
    small = GPTModel(vocab_size=32, embed_dim=16, num_heads=2, num_layers=1, max_seq_len=64)
    out, trace = speculative_decode(
        torch.tensor([1, 5, 9, 2]),
        model_step(big),
        model_step(small),
        gamma=4,
        max_new_tokens=16,
        generator=seeded(7),
    )
    print(f"iterations      : {len(trace)}")
    print(f"accepted/iter   : {[step['n_accepted'] for step in trace]}")
    print(f"tokens produced : {out.shape[0]} from {len(trace)} target passes")


def exercise_1() -> None:
    p = torch.tensor([0.5, 0.3, 0.2])
    for name, q in (("close", torch.tensor([0.45, 0.35, 0.20])), ("far", torch.tensor([0.1, 0.1, 0.8]))):
        print(f"{name:>5}: α={acceptance_rate(p, q):.3f}, 1-TV={1 - total_variation(p, q):.3f}")


def exercise_2() -> None:
    alpha, c = 0.85, 0.15
    for gamma in range(1, 11):
        tokens, speedup = expected_accepted_tokens(alpha, gamma), speculative_speedup(alpha, gamma, c)
        print(f"γ={gamma:2d}: {tokens:.2f} tokens/pass, {speedup:.2f}× speedup")


def exercise_3() -> None:
    p = torch.tensor([0.5, 0.2, 0.2, 0.1])
    q = torch.tensor([0.2, 0.4, 0.3, 0.1])
    alpha = acceptance_rate(p, q)
    recovered = torch.minimum(p, q) + residual_distribution(p, q) * (1 - alpha)
    print(f"recovered = {recovered.tolist()}")
    print(f"target    = {p.tolist()}")
    print(f"exact?    = {torch.allclose(recovered, p, atol=1e-6)}")


EXPECTED = {
    verify_a_draft: """\
acceptance rate α = 0.900  (= 1 - TV)
residual p'      = [1.0, 0.0, 0.0, 0.0]
draft proposed : [0, 1]
accepted       : 1 token(s)
emitted        : [0, 0]  (accepted prefix + 1 correction/bonus)
""",
    full_loop: """\
generated 12 tokens: [0, 0, 2, 0, 0, 3, 2, 1, 0, 0, 0, 4]
  iter 0: proposed [0, 0, 2, 0] → accepted 4, emitted [0, 0, 2, 0, 0]
  iter 1: proposed [3, 2, 1, 1] → accepted 3, emitted [3, 2, 1, 0]
  iter 2: proposed [0, 0, 4, 1] → accepted 3, emitted [0, 0, 4, 0]
""",
    two_models: """\
iterations      : 5
accepted/iter   : [1, 4, 4, 1, 4]
tokens produced : 16 from 5 target passes
""",
    exercise_1: """\
close: α=0.950, 1-TV=0.950
  far: α=0.400, 1-TV=0.400
""",
    exercise_2: """\
γ= 1: 1.85 tokens/pass, 1.61× speedup
γ= 2: 2.57 tokens/pass, 1.98× speedup
γ= 3: 3.19 tokens/pass, 2.20× speedup
γ= 4: 3.71 tokens/pass, 2.32× speedup
γ= 5: 4.15 tokens/pass, 2.37× speedup
γ= 6: 4.53 tokens/pass, 2.38× speedup
γ= 7: 4.85 tokens/pass, 2.37× speedup
γ= 8: 5.12 tokens/pass, 2.33× speedup
γ= 9: 5.35 tokens/pass, 2.28× speedup
γ=10: 5.55 tokens/pass, 2.22× speedup
""",
    exercise_3: """\
recovered = [0.4999999403953552, 0.20000000298023224, 0.20000000298023224, 0.10000000149011612]
target    = [0.5, 0.20000000298023224, 0.20000000298023224, 0.10000000149011612]
exact?    = True
""",
}


@pytest.mark.parametrize("example", EXPECTED, ids=lambda example: example.__name__)
def test_prints_what_the_text_prints(example: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    example()
    assert capsys.readouterr().out == EXPECTED[example]


def test_the_package_offers_every_name_of_the_text() -> None:
    assert set(TEXT_NAMES.split()) <= set(speculative.__all__)
    assert all(hasattr(speculative, name) for name in speculative.__all__)


def test_the_package_stays_on_its_layer() -> None:
    folder = Path(speculative.__file__).parent
    above = ("protocol", "execution", "draft_worker", "target_worker", "orchestrator", "transformers", "numpy", "scipy")
    for source in folder.glob("*.py"):
        lines = source.read_text(encoding="utf-8").splitlines()
        imports = [line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))]
        assert not set(imports) & set(above), source
