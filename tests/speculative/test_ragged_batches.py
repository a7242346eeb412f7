"""Ragged batches: a request's outcome is what it is alone, and one request's bad value fails that request alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from speculative import (
    Outcome,
    SamplingOptions,
    batch_verify,
    log_distribution,
    verify_coupled,
    verify_greedy,
    verify_rejection,
)

NAN = float("nan")


def random_batch(vocab: int) -> dict[str, object]:
    """Eight requests of mixed γ with drafts that are often right, and options of all kinds."""
    generator = torch.Generator().manual_seed(vocab)
    gammas = [0, 3, 1, 8, 0, 2, 5, 4]
    options = [SamplingOptions(), SamplingOptions(0), SamplingOptions(1e-6), SamplingOptions(top_k=1)] * 2
    rows = [option for option, gamma in zip(options, gammas, strict=True) for _ in range(gamma + 1)]
    logits = torch.randn((len(rows), vocab), generator=generator) * 4
    log_p = log_distribution(logits, rows)
    first = [sum(gammas[:i]) + i for i in range(8)]
    drafted = torch.cat([log_p[r : r + g].argmax(dim=-1) for r, g in zip(first, gammas, strict=True)])
    drafted[::3] = torch.randint(0, vocab, drafted[::3].shape, generator=generator)
    other = (drafted + 1) % vocab
    q_probs = torch.tensor([[0.6, 0.4]], dtype=torch.float64).expand(len(drafted), -1)
    return {
        "log_p": log_p,
        "gammas": gammas,
        "drafted": drafted,
        "q_ids": torch.stack([drafted, other], dim=1),
        "q_probs": q_probs.contiguous(),
        "seeds": [2**64 - 1 - i for i in range(8)],
        "positions": [5 * i for i in range(8)],
    }


def pick(batch: dict[str, object], chosen: list[int]) -> dict[str, object]:
    """The sub-batch of some requests, in the order asked for."""
    gammas = batch["gammas"]
    assert isinstance(gammas, list)
    rows, drafts = [], []
    for i in chosen:
        start = sum(gammas[:i])
        rows += range(start + i, start + i + gammas[i] + 1)
        drafts += range(start, start + gammas[i])
    where = torch.tensor(drafts, dtype=torch.int64)
    by_draft = {name: batch[name][where] for name in ("drafted", "q_ids", "q_probs")}  # type: ignore[index]
    by_request = {name: [batch[name][i] for i in chosen] for name in ("gammas", "seeds", "positions")}  # type: ignore[index]
    return {"log_p": batch["log_p"][torch.tensor(rows, dtype=torch.int64)]} | by_draft | by_request  # type: ignore[index]


def verify(rule: str, batch: dict[str, object]) -> list[Outcome]:
    taken = {
        "rejection": list(batch),
        "coupled": ["log_p", "gammas", "drafted", "seeds", "positions"],
        "greedy": ["log_p", "gammas", "drafted"],
    }[rule]
    function = {"rejection": verify_rejection, "coupled": verify_coupled, "greedy": verify_greedy}[rule]
    return function(**{name: batch[name] for name in taken})  # type: ignore[operator, no-any-return]


def test_drawing_rows_one_by_one_or_all_at_once_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(5003)
    found = verify("coupled", batch)
    for together in (1, 16, 24, 1000):  # of 8 requests: a row of each at a time, two, three, all
        monkeypatch.setattr(batch_verify, "rows_together", lambda rows, answer=together: answer)
        assert verify("coupled", batch) == found


@pytest.mark.parametrize("vocab", [6, 5003])
@pytest.mark.parametrize("rule", ["rejection", "coupled", "greedy"])
class TestBatches:
    def test_composition_changes_no_outcome(self, rule: str, vocab: int) -> None:
        batch = random_batch(vocab)
        together = verify(rule, batch)
        assert all(outcome.error is None for outcome in together) and any(outcome.accepted for outcome in together)
        assert [verify(rule, pick(batch, [i]))[0] for i in range(8)] == together
        order = [3, 0, 7, 4, 1, 6, 2, 5]
        assert verify(rule, pick(batch, order)) == [together[i] for i in order]

    def test_no_draft_is_a_bonus(self, rule: str, vocab: int) -> None:
        together = verify(rule, random_batch(vocab))
        for i in (0, 4):
            assert together[i].accepted == 0 and together[i].origin == "bonus"

    @pytest.mark.parametrize("poison", [NAN, -math.inf, math.inf])
    @pytest.mark.parametrize("row", [0, 1, 4, 6])
    def test_a_broken_row_fails_its_own_request(self, rule: str, vocab: int, poison: float, row: int) -> None:
        batch = random_batch(vocab)
        healthy = verify(rule, batch)
        log_p = batch["log_p"]
        assert isinstance(log_p, Tensor)
        log_p[row, :] = poison if poison < 0 else log_p[row]
        log_p[row, 2] = poison
        owner = {0: 0, 1: 1, 4: 1, 6: 2}[row]
        got = verify(rule, batch)
        error = got[owner].error
        assert error is not None and "NaN or has no finite maximum" in error and got[owner].token == -1
        assert [o for i, o in enumerate(got) if i != owner] == [o for i, o in enumerate(healthy) if i != owner]

    @pytest.mark.parametrize("wild", [-1, 99_999])
    def test_a_wild_id_fails_its_own_request(self, rule: str, vocab: int, wild: int) -> None:
        batch = random_batch(vocab)
        healthy = verify(rule, batch)
        drafted = batch["drafted"]
        assert isinstance(drafted, Tensor)
        drafted[1] = wild
        got = verify(rule, batch)
        assert got[1].error is not None and f"drafted id {wild} is out of range" in got[1].error
        assert got[2:] == healthy[2:] and got[0] == healthy[0]

    def test_empty_batch(self, rule: str, vocab: int) -> None:
        batch = pick(random_batch(vocab), [])
        assert verify(rule, batch) == []

    def test_all_requests_may_fail(self, rule: str, vocab: int) -> None:
        batch = random_batch(vocab)
        batch["log_p"] = torch.full_like(batch["log_p"], NAN)  # type: ignore[arg-type]
        assert all(outcome.error for outcome in verify(rule, batch))
