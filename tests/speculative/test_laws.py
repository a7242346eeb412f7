"""Empirical laws: many seeded runs against the target's distribution, by G-tests at significance 1e-6.

The target is a Markov chain over five tokens, so that a wrong first token spoils what follows it. Each run emits three
tokens in as many rounds as that takes. Beside each claim stand planted faults that the same test must find: a 1 % bias
on as many runs; the rules E1 (streams) and E4 (the q that was sampled from) and the residual broken, on a third.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from scipy import stats
from torch import Tensor

from speculative import (
    SamplingOptions,
    Stream,
    acceptance_rate,
    batch_verify,
    draw_coupled,
    draw_dense,
    integers16,
    log_distribution,
    race,
    uniform,
    verify_coupled,
    verify_rejection,
)

RUNS = 120_000
FAULTY_RUNS = 40_000
LENGTH = 3
VOCAB = 5
START = 0
SIGNIFICANCE = 1e-6
PValue = Callable[[Tensor, Tensor], float]


def chain(seed: int, spread: float) -> Tensor:
    """Row c is the next token's log-law after token c, float32 [V, V]."""
    return torch.log_softmax(
        torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(seed)) * spread, dim=-1
    )


TARGET = chain(1, 0.6)
LAW = TARGET.double().exp()
JOINT = torch.einsum("a,ab,bc->abc", LAW[START], LAW, LAW)


@dataclass(frozen=True)
class Draft:
    """One q̃ a context, sparse: `ids` and `probs` [V, K]; `counts` where the codec is counts."""

    ids: Tensor
    probs: Tensor
    counts: Tensor | None = None

    def draw(self, contexts: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        ids = self.ids[contexts]
        if self.counts is not None:
            drawn = integers16(seeds, Stream.DRAFT, positions).unsqueeze(1)  # below 65536, as the draft worker draws
            column = torch.searchsorted(self.counts[contexts].cumsum(dim=-1), drawn, right=True)
            return ids.gather(1, column).squeeze(1)
        column = draw_dense(self.probs[contexts], seeds, positions)
        return ids.gather(1, column.unsqueeze(1)).squeeze(1)


def counts_draft() -> Draft:
    """Three of five ids a context, so that two are left to the residual."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:3] for _ in range(VOCAB)])
    first = torch.randint(1, 40_000, (VOCAB,), generator=generator)
    second = torch.randint(1, 20_000, (VOCAB,), generator=generator)
    counts = torch.stack([first, second, 65536 - first - second], dim=1)
    return Draft(ids, counts / 65536.0 * torch.ones(1, dtype=torch.float64), counts)


def dense_draft() -> Draft:
    probs = torch.softmax(chain(3, 1.5).double(), dim=-1)
    return Draft(torch.arange(VOCAB).expand(VOCAB, -1), probs / probs.sum(dim=-1, keepdim=True))


def point_draft() -> Draft:
    ids = ((torch.arange(VOCAB) * 2 + 1) % VOCAB).unsqueeze(1)
    return Draft(ids, torch.ones((VOCAB, 1), dtype=torch.float64))


DRAFTS = {"counts": counts_draft(), "dense": dense_draft(), "point": point_draft()}


def run(draft: Draft, runs: int = FAULTY_RUNS, claimed: Draft | None = None, gamma: int = 2) -> Tensor:
    """Seeded decodings of LENGTH tokens by rejection -> int64 [runs, LENGTH]. `claimed` is the q̃ the target is told."""
    told = claimed or draft
    out = torch.full((runs, LENGTH + gamma + 1), START)
    length = torch.zeros(runs, dtype=torch.int64)
    while True:
        going = (length < LENGTH).nonzero().squeeze(1)
        if not len(going):
            return out[:, :LENGTH]
        at = length[going]
        last = torch.where(at > 0, out[going, (at - 1).clamp(min=0)], START)
        contexts, drafted = [last], []
        for k in range(gamma):
            drafted.append(draft.draw(contexts[-1], going, at + k))
            contexts.append(drafted[-1])
        rows = torch.stack(contexts, dim=1)  # [going, γ + 1]
        told_at = rows[:, :gamma].flatten()
        outcomes = verify_rejection(
            TARGET[rows.flatten()],
            [gamma] * len(going),
            torch.stack(drafted, dim=1).flatten(),
            told.ids[told_at],
            told.probs[told_at],
            going.tolist(),
            at.tolist(),
        )
        accepted = torch.tensor([outcome.accepted for outcome in outcomes])
        token = torch.tensor([outcome.token for outcome in outcomes])
        for k in range(gamma):
            out[going, at + k] = drafted[k]
        out[going, at + accepted] = token
        length[going] = at + accepted + 1


@cache
def emitted(codec: str) -> Tensor:
    return run(DRAFTS[codec], RUNS)


def cells(tokens: Tensor) -> Tensor:
    index = (tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2]
    return torch.bincount(index, minlength=VOCAB**3).view(VOCAB, VOCAB, VOCAB)


def worst(tokens: Tensor, p_value: PValue) -> float:
    """The least p-value of the joint test and of the three positions'."""
    counts = cells(tokens)
    others = [(1, 2), (0, 2), (0, 1)]
    marginals = [p_value(counts.sum(dim=axes), JOINT.sum(dim=axes)) for axes in others]
    return min(p_value(counts, JOINT), *marginals)


@pytest.mark.parametrize("codec", DRAFTS)
class TestRejection:
    def test_follows_the_target(self, codec: str, p_value: PValue) -> None:
        assert worst(emitted(codec), p_value) > SIGNIFICANCE

    @pytest.mark.parametrize("position", range(LENGTH))
    def test_a_bias_of_one_percent_is_found(self, codec: str, position: int, p_value: PValue) -> None:
        """One run in a hundred has one token replaced by the position's rarest: power above 0.999 in the marginal."""
        law = JOINT.sum(dim=[axis for axis in range(LENGTH) if axis != position])
        rarest = int(law.argmin())
        shifted = 0.99 * law + 0.01 * torch.nn.functional.one_hot(law.argmin(), VOCAB)
        noncentrality = RUNS * float(((shifted - law) ** 2 / law).sum())
        critical = stats.chi2.isf(SIGNIFICANCE, VOCAB - 1)
        assert stats.ncx2.sf(critical, VOCAB - 1, noncentrality) > 0.999
        tokens = emitted(codec).clone()
        tokens[::100, position] = rarest
        assert worst(tokens, p_value) < SIGNIFICANCE

    def test_acceptance_is_alpha(self, codec: str) -> None:
        draft = DRAFTS[codec]
        q = torch.zeros(VOCAB, dtype=torch.float64).scatter_add(0, draft.ids[START], draft.probs[START])
        alpha = acceptance_rate(LAW[START] / LAW[START].sum(), q)
        seeds = torch.arange(RUNS)
        drafted = draft.draw(torch.full((RUNS,), START), seeds, torch.zeros_like(seeds))
        told = draft.ids[START].expand(RUNS, -1), draft.probs[START].expand(RUNS, -1)
        rows = TARGET[START].expand(2 * RUNS, -1)
        outcomes = verify_rejection(rows, [1] * RUNS, drafted, *told, seeds.tolist(), [0] * RUNS)
        kept = sum(outcome.accepted for outcome in outcomes)
        assert abs(kept / RUNS - alpha) < 5 * (alpha * (1 - alpha) / RUNS) ** 0.5


class TestBrokenRulesAreFound:
    def test_residual_drawn_from_the_drafts_noise(self, monkeypatch: pytest.MonkeyPatch, p_value: PValue) -> None:
        """B4, rule E1: sharing the draft's stream with the correction biases the output."""

        def shared(log_p: Tensor, seeds: list[int], streams: list[Stream], positions: list[int]) -> Tensor:
            renamed = [Stream.DRAFT if stream == Stream.RESIDUAL else stream for stream in streams]
            return race(log_p, seeds, renamed, positions)

        monkeypatch.setattr(batch_verify, "race", shared)
        assert worst(run(DRAFTS["counts"]), p_value) < SIGNIFICANCE

    def test_accept_drawn_from_the_drafts_noise(self, monkeypatch: pytest.MonkeyPatch, p_value: PValue) -> None:
        monkeypatch.setattr(
            batch_verify, "uniform", lambda seeds, _, positions: uniform(seeds, Stream.DRAFT, positions)
        )
        assert worst(run(DRAFTS["dense"]), p_value) < SIGNIFICANCE

    def test_claiming_another_q_than_was_drawn_from(self, p_value: PValue) -> None:
        """B1, B2, rule E4: a greedy draft that sends its softmax, and one that sends it unfiltered."""
        dense = DRAFTS["dense"]
        greedy = Draft(dense.probs.argmax(dim=-1, keepdim=True), torch.ones((VOCAB, 1), dtype=torch.float64))
        assert worst(run(greedy, claimed=dense), p_value) < SIGNIFICANCE
        assert worst(run(greedy), p_value) > SIGNIFICANCE
        top = dense.probs.topk(2, dim=-1)
        filtered = Draft(top.indices, top.values / top.values.sum(dim=-1, keepdim=True))
        assert worst(run(filtered, claimed=dense), p_value) < SIGNIFICANCE
        assert worst(run(filtered), p_value) > SIGNIFICANCE

    def test_correcting_from_p(self, monkeypatch: pytest.MonkeyPatch, p_value: PValue) -> None:
        monkeypatch.setattr(batch_verify, "_log_residual", lambda log_p, *_: log_p)
        assert worst(run(DRAFTS["counts"]), p_value) < SIGNIFICANCE

    def test_soft_maxing_the_residual(self, monkeypatch: pytest.MonkeyPatch, p_value: PValue) -> None:
        """B3."""
        right = batch_verify._log_residual
        monkeypatch.setattr(batch_verify, "_log_residual", lambda *given: right(*given).exp())
        assert worst(run(DRAFTS["counts"]), p_value) < SIGNIFICANCE


class TestCoupled:
    def plain(self, runs: int, length: int) -> Tensor:
        """Decoding by the target alone: one race a position."""
        out = torch.empty((runs, length), dtype=torch.int64)
        last = torch.full((runs,), START)
        for n in range(length):
            last = out[:, n] = race(TARGET[last], range(runs), Stream.RACE, [n] * runs)
        return out

    def test_plain_draws_follow_the_target(self, p_value: PValue) -> None:
        tokens = self.plain(RUNS, LENGTH)
        assert worst(tokens, p_value) > SIGNIFICANCE
        tokens[::100, 1] = int(JOINT.sum(dim=(0, 2)).argmin())
        assert worst(tokens, p_value) < SIGNIFICANCE

    @pytest.mark.parametrize("source", ["target", "other", "constant", "adversary"])
    def test_output_is_the_plain_one_whatever_the_draft(self, source: str) -> None:
        runs, length = 150, 12
        expected = self.plain(runs, length)
        tables = {"target": TARGET, "other": chain(9, 2.0)}
        done: list[list[int]] = [[] for _ in range(runs)]
        turn = accepted = drafted_in_all = 0
        while min(map(len, done)) < length:
            gammas = [(i + turn) % 5 if i % 3 else 0 for i in range(runs)]  # ragged, changing from round to round
            rows, drafted = [], []
            for i, gamma in enumerate(gammas):
                rows.append(done[i][-1] if done[i] else START)
                for k in range(gamma):
                    n = len(done[i]) + k
                    if source in tables:
                        token = int(draw_coupled(tables[source][rows[-1]].unsqueeze(0), [i], [n])[0])
                    else:
                        truth = int(expected[i, n]) if n < length else 0
                        token = 3 if source == "constant" else (truth + 1) % VOCAB
                    drafted.append(token)
                    rows.append(token)
            outcomes = verify_coupled(
                TARGET[rows], gammas, torch.tensor(drafted), list(range(runs)), [len(one) for one in done]
            )
            first = 0
            for tokens, gamma, outcome in zip(done, gammas, outcomes, strict=True):
                tokens += [*drafted[first : first + outcome.accepted], outcome.token]
                first += gamma
                accepted += outcome.accepted
            drafted_in_all += first
            turn += 1
        assert torch.tensor([tokens[:length] for tokens in done]).equal(expected)
        if source == "target":
            assert accepted == drafted_in_all

    def test_acceptance_is_at_least_the_bound(self) -> None:
        """Gumbel coupling: at least α / (2 - α) of the positions agree."""
        other = chain(9, 2.0)
        mine = draw_coupled(other[START].expand(RUNS, -1), range(RUNS), [0] * RUNS)
        its = race(TARGET[START].expand(RUNS, -1), range(RUNS), Stream.RACE, [0] * RUNS)
        alpha = float(LAW[START].minimum(other[START].double().exp()).sum())
        agreement = float((mine == its).double().mean())
        assert alpha / (2 - alpha) - 0.01 < agreement < alpha + 0.01


OPTIONS = [
    SamplingOptions(),
    SamplingOptions(temperature=0.5),
    SamplingOptions(temperature=1e-6),
    SamplingOptions(temperature=0),
    SamplingOptions(top_k=1),
    SamplingOptions(top_k=3),
    SamplingOptions(top_p=0.7),
    SamplingOptions(min_p=0.2),
    SamplingOptions(temperature=1.5, top_k=6, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_races_follow_each_sampling_option(option: SamplingOptions, p_value: PValue) -> None:
    logits = torch.randn((1, 9), generator=torch.Generator().manual_seed(4))
    log_p = log_distribution(logits, [option])
    tokens = race(log_p.expand(RUNS, -1), range(RUNS), Stream.BONUS, [2] * RUNS)
    law = log_p[0].double().exp()
    counts = torch.bincount(tokens, minlength=9)
    assert p_value(counts, law) > SIGNIFICANCE
    kept = law > 0
    if int(kept.sum()) > 1:
        rarest = int(law.where(kept, torch.inf).argmin())
        tokens[::100] = rarest
        assert p_value(torch.bincount(tokens, minlength=9), law) < SIGNIFICANCE


@pytest.mark.parametrize("codec", ["counts", "dense"])
def test_drafts_draw_from_what_they_send(codec: str, p_value: PValue) -> None:
    draft, seeds = DRAFTS[codec], torch.arange(2 * RUNS)
    tokens = draft.draw(torch.full_like(seeds, 2), seeds, torch.full_like(seeds, 7))
    law = torch.zeros(VOCAB, dtype=torch.float64).scatter_add(0, draft.ids[2], draft.probs[2])
    assert p_value(torch.bincount(tokens, minlength=VOCAB), law) > SIGNIFICANCE
    tokens[::100] = int(law.where(law > 0, torch.inf).argmin())
    assert p_value(torch.bincount(tokens, minlength=VOCAB), law) < SIGNIFICANCE
