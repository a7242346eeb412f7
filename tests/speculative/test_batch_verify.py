"""Batched verification: exact small cases, ragged γ, and one request's bad value failing that request alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from speculative import (
    Outcome,
    SamplingOptions,
    Stream,
    batch_verify,
    gumbel,
    log_distribution,
    uniform,
    verify_coupled,
    verify_greedy,
    verify_rejection,
)

NAN = float("nan")


def logs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).log()


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def probs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def point(*tokens: int) -> tuple[Tensor, Tensor]:
    """q̃ of a drafter that chose outright: one id with probability 1."""
    return ids(*tokens).unsqueeze(1), torch.ones((len(tokens), 1), dtype=torch.float64)


def dense(*rows: list[float]) -> tuple[Tensor, Tensor]:
    values = probs(*rows)
    return torch.arange(values.shape[1]).expand(len(values), -1), values


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """u is 0 everywhere; the rows that race are recorded."""
    raced: list[Tensor] = []
    real = batch_verify.race

    def race(log_p: Tensor, *arguments: object) -> Tensor:
        raced.append(log_p.clone())
        return real(log_p, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(batch_verify, "race", race)
    monkeypatch.setattr(
        batch_verify, "uniform", lambda seeds, stream, places: torch.zeros(len(seeds), dtype=torch.float64)
    )
    return raced


P = [0.5, 0.25, 0.125, 0.125]
Q = [0.25, 0.5, 0.25, 0.0]


class TestRejection:
    def test_first_token_has_exactly_the_targets_law(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Enumerated: every drafted id of q̃ at a grid of u on which p/q̃ is exact; the raced row is the law."""
        total = torch.zeros(4, dtype=torch.float64)
        raced: list[Tensor] = []
        monkeypatch.setattr(
            batch_verify, "race", lambda log_p, *_: (raced.append(log_p), torch.zeros(len(log_p)).long())[1]
        )
        for drafted, weight in enumerate(Q[:3]):
            for u in (0.125, 0.375, 0.625, 0.875):
                monkeypatch.setattr(batch_verify, "uniform", lambda *_, u=u: torch.tensor([u], dtype=torch.float64))
                (outcome,) = verify_rejection(logs(P, P), [1], ids(drafted), *dense(Q), [0], [0])
                law = torch.nn.functional.one_hot(ids(drafted)[0], 4) if outcome.accepted else raced[-1][0].exp()
                total += weight / 4 * (law / law.sum())
        torch.testing.assert_close(total, probs(P)[0], atol=1e-7, rtol=0)

    def test_u_of_zero_never_passes_an_impossible_token(self, forced: list[Tensor]) -> None:
        """B5."""
        outcomes = verify_rejection(logs([0.0, 1.0], [0.5, 0.5]), [1], ids(0), *dense([0.9, 0.1]), [1], [0])
        assert outcomes == [Outcome(0, 1, "correction")]

    def test_a_token_that_q_calls_impossible_is_never_kept(self, forced: list[Tensor]) -> None:
        sparse = (ids(1, 2).unsqueeze(0), probs([0.5, 0.5]))
        for q_ids, q_probs in (dense([0.0, 0.5, 0.5]), sparse):
            (outcome,) = verify_rejection(logs([0.8, 0.1, 0.1], [1.0, 0.0, 0.0]), [1], ids(0), q_ids, q_probs, [3], [9])
            assert (outcome.accepted, outcome.origin, outcome.error) == (0, "correction", None)
            torch.testing.assert_close(forced[-1][0].exp(), torch.tensor([0.8, 0.0, 0.0]))

    def test_point_mass_leaves_p_without_the_token(self) -> None:
        """B1: a greedy draft's q̃ is the point mass it drew from, and the residual of it is p elsewhere."""
        log_p = logs([0.3, 0.5, 0.2], [0.3, 0.5, 0.2])
        seed = next(s for s in range(100) if float(uniform([s], Stream.ACCEPT, [4])) > 0.3)
        (outcome,) = verify_rejection(log_p, [1], ids(0), *point(0), [seed], [4])
        expected = log_p[0] + gumbel([seed], Stream.RESIDUAL, [4], 3)[0]
        expected[0] = -math.inf
        assert outcome == Outcome(0, int(expected.argmax()), "correction")

    def test_residual_is_normalised_and_never_soft_maxed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """B3: (.5, .5, 0) against (.9, .1, 0), 0 rejected: only 1 is left."""
        log_p = logs([0.5, 0.5, 0.0], [1.0, 0.0, 0.0])
        q_ids, q_probs = dense([0.9, 0.1, 0.0])
        monkeypatch.setattr(batch_verify, "uniform", lambda *_: torch.ones(1, dtype=torch.float64))
        for seed in range(50):
            assert verify_rejection(log_p, [1], ids(0), q_ids, q_probs, [seed], [0])[0].token == 1

    def test_equal_rows_accept_and_a_forced_rejection_draws_from_p(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """B11: the residual of p = q is empty; no NaN, and the race is over p."""
        log_p = logs([0.5, 0.25, 0.25], [0.5, 0.25, 0.25])
        q_ids, q_probs = dense([0.5, 0.25, 0.25])
        for seed in range(50):
            assert verify_rejection(log_p, [1], ids(2), q_ids, q_probs, [seed], [0])[0].accepted == 1
        monkeypatch.setattr(batch_verify, "uniform", lambda *_: torch.ones(1, dtype=torch.float64))
        for seed in range(50):
            (outcome,) = verify_rejection(log_p, [1], ids(2), q_ids, q_probs, [seed], [6])
            plain = (log_p[0] + gumbel([seed], Stream.RESIDUAL, [6], 3)[0]).argmax()
            assert outcome == Outcome(0, int(plain), "correction")

    def test_greedy_rows_compare_and_keep(self) -> None:
        """B8: temperature 0 turns p into a point mass before the ratio is taken."""
        log_p = log_distribution(torch.tensor([[0.3, 0.5, 0.2]] * 4).log(), [SamplingOptions(temperature=0)] * 4)
        outcomes = verify_rejection(log_p, [1, 1], ids(0, 1), *point(0, 1), [1, 2], [0, 0])
        assert outcomes == [Outcome(0, 1, "correction"), Outcome(1, 1, "bonus")]

    def test_narrow_draft_and_wide_target(self) -> None:
        """A1: draft V = 8, target V = 10: q̃ is sparse, so ids 8 and 9 simply have none of it."""
        log_p = logs([0.0] * 8 + [0.5, 0.5], [0.0] * 8 + [0.5, 0.5])
        q_ids, q_probs = dense([0.125] * 8)
        tokens = {verify_rejection(log_p, [1], ids(3), q_ids, q_probs, [seed], [0])[0].token for seed in range(40)}
        assert tokens == {8, 9}

    def test_padding_of_q_changes_nothing(self) -> None:
        generator = torch.Generator().manual_seed(0)
        log_p = torch.log_softmax(torch.randn((120, 7), generator=generator), dim=-1)
        q_ids = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(80)])
        q_probs = torch.rand((80, 3), generator=generator, dtype=torch.float64)
        q_probs /= q_probs.sum(dim=-1, keepdim=True)
        drafted, seeds = q_ids[:, 1].contiguous(), list(range(40))
        wide = torch.nn.functional.pad(q_ids, (0, 4)), torch.nn.functional.pad(q_probs, (0, 4))
        expected = verify_rejection(log_p, [2] * 40, drafted, q_ids, q_probs, seeds, seeds)
        assert verify_rejection(log_p, [2] * 40, drafted, *wide, seeds, seeds) == expected
        assert {outcome.accepted for outcome in expected} == {0, 1, 2}

    def test_padding_leaves_the_residual_alone_bit_for_bit(self) -> None:
        """Else the width of a neighbour's q̃ could move a token's score by a rounding."""
        log_p = torch.log_softmax(torch.randn((200, 6), generator=torch.Generator().manual_seed(5)), dim=-1)
        log_p[:, 0] = -800.0  # below what float64's exp can hold
        q_ids, q_probs = torch.full((200, 1), 3), torch.full((200, 1), 0.01, dtype=torch.float64)
        wide = torch.nn.functional.pad(q_ids, (0, 5)), torch.nn.functional.pad(q_probs, (0, 5))
        narrow = batch_verify._log_residual(log_p, q_ids, q_probs)
        assert torch.equal(narrow, batch_verify._log_residual(log_p, *wide))
        assert torch.equal(narrow[:, [0, 1, 2, 4, 5]], log_p[:, [0, 1, 2, 4, 5]])

    def test_agrees_with_a_reference_that_walks_token_by_token(self) -> None:
        generator = torch.Generator().manual_seed(6)
        vocab, gammas = 11, [(3 * i) % 5 for i in range(200)]
        log_p = torch.log_softmax(torch.randn((sum(gammas) + 200, vocab), generator=generator), dim=-1)
        q_probs = torch.softmax(torch.randn((sum(gammas), vocab), generator=generator, dtype=torch.float64), dim=-1)
        drafted = torch.multinomial(q_probs, 1, generator=generator).squeeze(1)
        q_ids = torch.arange(vocab).expand(len(drafted), -1)
        positions = [7 * i for i in range(200)]
        expected, row, first = [], 0, 0
        for seed, (gamma, place) in enumerate(zip(gammas, positions, strict=True)):
            for k in range(gamma + 1):
                p = log_p[row + k].double().exp()
                if k == gamma:
                    law, stream, origin = p, Stream.BONUS, "bonus"
                    break
                u, token = float(uniform([seed], Stream.ACCEPT, [place + k])), int(drafted[first + k])
                if u * float(q_probs[first + k, token]) >= float(p[token]):
                    law, stream, origin = (p - q_probs[first + k]).clamp(min=0), Stream.RESIDUAL, "correction"
                    break
            choice = (law.log() + gumbel([seed], stream, [place + k], vocab)[0]).argmax()
            expected.append(Outcome(k, int(choice), origin))  # type: ignore[arg-type]
            row, first = row + gamma + 1, first + gamma
        assert verify_rejection(log_p, gammas, drafted, q_ids, q_probs, range(200), positions) == expected
        assert {outcome.accepted for outcome in expected} == {0, 1, 2, 3, 4}

    def test_arguments_are_left_alone(self) -> None:
        log_p, (q_ids, q_probs) = logs(P, P), dense(Q)
        q_ids = q_ids.clone()
        q_ids[0, 3] = 99
        copies = log_p.clone(), q_ids.clone(), q_probs.clone()
        verify_rejection(log_p, [1], ids(1), q_ids, q_probs, [0], [0])
        assert torch.equal(log_p, copies[0]) and torch.equal(q_ids, copies[1]) and torch.equal(q_probs, copies[2])

    @pytest.mark.parametrize(
        ("q_ids", "q_probs", "message"),
        [
            (ids(1, 7), probs([0.5, 0.5]), "q̃ names id 7; expected 0 <= id < 4"),
            (ids(1, -1), probs([0.5, 0.5]), "q̃ names id -1"),
            (ids(1, 2), probs([0.5, 0.6]), "no distribution"),
            (ids(1, 2), probs([1.5, -0.5]), "no distribution"),
            (ids(1, 2), probs([0.5, NAN]), "no distribution"),
            (ids(1, 1), probs([0.5, 0.5]), "names an id twice"),
        ],
    )
    def test_a_false_q_fails_its_own_request(self, q_ids: Tensor, q_probs: Tensor, message: str) -> None:
        log_p = logs(P, P, P, P)
        fair = (ids(1, 2).unsqueeze(0), probs([0.5, 0.5]))
        both_ids, both_probs = torch.cat([q_ids.unsqueeze(0), fair[0]]), torch.cat([q_probs, fair[1]])
        bad, good = verify_rejection(log_p, [1, 1], ids(1, 1), both_ids, both_probs, [5, 6], [0, 0])
        assert bad.error is not None and message in bad.error and (bad.accepted, bad.token) == (0, -1)
        assert good == verify_rejection(log_p[2:], [1], ids(1), *fair, [6], [0])[0]
        assert good.error is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"q_ids": ids(1)}, "expected both"),
            ({"q_probs": probs([1.0, 0.0])}, "expected both"),
            ({"q_ids": torch.ones(1, 1)}, "expected int64 and float64"),
            ({"q_probs": torch.ones(1, 1)}, "expected int64 and float64"),
            ({"seeds": [1, 2]}, "expected one of each a request"),
            ({"positions": []}, "expected one of each a request"),
            ({"gammas": [2]}, r"expected \[Σ\(γ \+ 1\), V\]"),
            ({"gammas": [-1]}, "expected integers >= 0"),
            ({"drafted": torch.ones(1)}, "expected int64"),
            ({"drafted": ids(1, 1)}, "expected int64"),
            ({"log_p": logs(P)}, r"= \[2, V\]"),
        ],
    )
    def test_shapes_that_fit_no_reading(self, change: dict[str, object], message: str) -> None:
        arguments = {
            "log_p": logs(P, P),
            "gammas": [1],
            "drafted": ids(1),
            "q_ids": ids(1).unsqueeze(1),
            "q_probs": probs([1.0]),
            "seeds": [1],
            "positions": [0],
        }
        with pytest.raises(ValueError, match=message):
            verify_rejection(**(arguments | change))  # type: ignore[arg-type]


class TestCoupledAndGreedy:
    def test_greedy_keeps_while_equal(self) -> None:
        scores = torch.tensor([[0.0, 2.0, 2.0], [3.0, 0.0, 1.0], [0.0, 0.0, 5.0], [1.0, 0.0, 0.0]])
        assert verify_greedy(scores, [3], ids(1, 0, 2)) == [Outcome(3, 0, "bonus")]
        assert verify_greedy(scores, [3], ids(1, 1, 2)) == [Outcome(1, 0, "correction")]
        assert verify_greedy(scores, [3], ids(2, 0, 2)) == [Outcome(0, 1, "correction")]  # a tie is the lowest id's

    def test_a_single_wrong_draft_token_is_not_committed(self) -> None:
        """B9."""
        assert verify_greedy(torch.tensor([[0.0, 9.0], [9.0, 0.0]]), [1], ids(0)) == [Outcome(0, 1, "correction")]

    def test_coupled_keeps_while_the_race_agrees(self) -> None:
        generator = torch.Generator().manual_seed(0)
        log_p = torch.log_softmax(torch.randn((5, 50), generator=generator), dim=-1)
        own = (log_p + gumbel([77] * 5, Stream.RACE, range(10, 15), 50)).argmax(dim=-1)
        for wrong in range(5):
            drafted = own[:4].clone()
            drafted[wrong:] = (drafted[wrong:] + 1) % 50
            expected = Outcome(wrong, int(own[wrong]), "correction" if wrong < 4 else "bonus")
            assert verify_coupled(log_p, [4], drafted, [77], [10]) == [expected]

    def test_coupled_equals_greedy_on_greedy_rows(self) -> None:
        logits = torch.randn((9, 30), generator=torch.Generator().manual_seed(1))
        log_p = log_distribution(logits, [SamplingOptions(temperature=0)] * 9)
        drafted = log_p.argmax(dim=-1)[[0, 1, 3, 4, 6, 7]]
        drafted[3] += 1
        expected = verify_greedy(logits, [2, 2, 2], drafted)
        assert verify_coupled(log_p, [2, 2, 2], drafted, [1, 2, 3], [0, 5, 9]) == expected
