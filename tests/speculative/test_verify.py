"""speculative_verify: exactness by enumeration, the strict test, padding, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from speculative import pad_distribution, speculative_verify, verify

P = torch.tensor([0.5, 0.25, 0.125, 0.125])
Q = torch.tensor([0.25, 0.5, 0.25, 0.0])  # p/q = 2, 1/2, 1/2: exact on a grid of four uniforms


class Script:
    """Replaces both draws: uniforms come from a list, and the law of the multinomial draw is kept, not sampled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uniforms: Iterator[float] = iter(())
        self.law = torch.empty(0)
        monkeypatch.setattr(verify.torch, "rand", lambda *_, **__: torch.tensor([next(self.uniforms)]))
        monkeypatch.setattr(verify.torch, "multinomial", self._multinomial)

    def _multinomial(self, law: Tensor, count: int, generator: object = None) -> Tensor:
        self.law = law
        return law.argmax().unsqueeze(0)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def test_first_token_has_exactly_the_targets_law(script: Script) -> None:
    total = torch.zeros(4)
    grid = [0.125, 0.375, 0.625, 0.875]
    for drafted, weight in enumerate(Q.tolist()):
        for u in grid if weight else []:
            script.uniforms = iter([u])
            emitted, n_accepted = speculative_verify(torch.stack([P, P]), Q.unsqueeze(0), torch.tensor([drafted]))
            law = torch.nn.functional.one_hot(torch.tensor(drafted), 4) if n_accepted else script.law
            total += weight / len(grid) * law
            assert len(emitted) == n_accepted + 1
    assert total.tolist() == P.tolist()


def test_bonus_has_the_last_rows_law(script: Script) -> None:
    script.uniforms = iter([0.9])
    last = torch.tensor([0.1, 0.2, 0.3, 0.4])
    _, n_accepted = speculative_verify(torch.stack([P, last]), Q.unsqueeze(0), torch.tensor([0]))
    assert n_accepted == 1 and torch.equal(script.law, last)


def test_u_of_zero_never_passes_an_impossible_token(script: Script) -> None:
    """B5: u exactly 0 and p(d) = 0."""
    script.uniforms = iter([0.0])
    p = torch.tensor([0.0, 1.0, 0.0, 0.0])
    emitted, n_accepted = speculative_verify(torch.stack([p, p]), Q.unsqueeze(0), torch.tensor([0]))
    assert (emitted.tolist(), n_accepted) == ([1], 0)


@pytest.mark.parametrize("u", [0.0, 0.5, 0.999])
def test_a_token_that_q_calls_impossible_is_refused(script: Script, u: float) -> None:
    script.uniforms = iter([u])
    _, n_accepted = speculative_verify(torch.stack([P, P]), Q.unsqueeze(0), torch.tensor([3]))
    assert n_accepted == 0
    torch.testing.assert_close(script.law, torch.tensor([2 / 3, 0.0, 0.0, 1 / 3]))


def test_equal_rows_accept_at_any_u_and_survive_a_forced_rejection(script: Script) -> None:
    """B11: p = q accepts; should rounding ever reject, the draw is from p."""
    script.uniforms = iter([1 - 2**-24, 1.0])
    assert speculative_verify(torch.stack([P, P]), P.unsqueeze(0), torch.tensor([2]))[1] == 1
    assert speculative_verify(torch.stack([P, P]), P.unsqueeze(0), torch.tensor([2]))[1] == 0
    assert torch.equal(script.law, P)


def test_one_hot_rows_at_temperature_zero_accept_the_argmax_alone() -> None:
    """B8: greedy is p and q after temperature 0, so the ratio rule turns to compare-and-keep."""
    p, q = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    emitted, n_accepted = speculative_verify(torch.stack([p, p]), q.unsqueeze(0), torch.tensor([0]))
    assert (emitted.tolist(), n_accepted) == ([1], 0)


def test_gamma_zero_draws_from_the_target() -> None:
    p = torch.tensor([[0.0, 0.0, 1.0]])
    emitted, n_accepted = speculative_verify(p, torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    assert (emitted.tolist(), n_accepted) == ([2], 0)


def test_vocabularies_of_8_and_10() -> None:
    """A1: q is padded with zeros, and ids 8 and 9 come from the residual or the bonus alone."""
    p = torch.tensor([0.0] * 8 + [0.75, 0.25])
    q = torch.full((1, 8), 0.125)
    generator = torch.Generator().manual_seed(0)
    seen = {
        int(speculative_verify(torch.stack([p, p]), q, torch.tensor([3]), generator=generator)[0]) for _ in range(60)
    }
    assert seen == {8, 9}


def test_padding_and_cutting() -> None:
    assert pad_distribution(torch.tensor([0.5, 0.5]), 4).tolist() == [0.5, 0.5, 0.0, 0.0]
    assert pad_distribution(torch.tensor([[0.5, 0.5, 0.0]]), 2).tolist() == [[0.5, 0.5]]
    with pytest.raises(ValueError, match="probability to id 2; expected none at or above 2"):
        pad_distribution(torch.tensor([0.5, 0.25, 0.25]), 2)


@pytest.mark.parametrize(
    ("p", "q", "tokens", "message"),
    [
        (torch.stack([P]), Q.unsqueeze(0), [0], "do not fit"),
        (torch.stack([P, P]), Q.unsqueeze(0), [0, 1], "do not fit"),
        (torch.stack([P, P]), Q, [0], "do not fit"),
        (torch.stack([P, P]), Q.unsqueeze(0), [4], "id 4; expected 0 <= id < 4"),
        (torch.stack([P, P]), Q.unsqueeze(0), [-1], "id -1; expected 0 <= id < 4"),
        (torch.stack([P, P]), Q.unsqueeze(0), [0.0], "1-D tensor of token ids"),
        (torch.stack([P, P * torch.nan]), Q.unsqueeze(0), [0], "target_probs has NaN"),
        (torch.stack([P, P]), Q.unsqueeze(0) * 3, [0], "draft_probs sums to 3; expected 1"),
        (P, Q.unsqueeze(0), [0], r"expected float probabilities \[rows, V\]"),
    ],
)
def test_refusals(p: Tensor, q: Tensor, tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speculative_verify(p, q, torch.tensor(tokens))
