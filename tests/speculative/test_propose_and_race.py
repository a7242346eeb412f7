"""What the draft draws, and the race: its racing changes no winner."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative import (
    SamplingOptions,
    Stream,
    draw_coupled,
    draw_dense,
    draw_greedy,
    gumbel,
    log_distribution,
    race,
    racing,
    uniform,
)
from speculative.noise import WordSource

NAN = float("nan")


@settings(deadline=None, max_examples=120)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(1, 3000),
    st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    st.sampled_from([0, 1, 2, 50]),
    st.sampled_from([0.0, 100.0, -100.0]),
)
def test_pruned_race_has_the_winner_of_the_whole(
    seed: int, vocab: int, spread: float, top_k: int, shift: float
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    logits = torch.randn((4, vocab), generator=generator) * spread
    log_p = log_distribution(logits, [SamplingOptions(top_k=top_k)] * 4) + shift
    source = WordSource([seed] * 4, Stream.BONUS, range(4))
    whole = (log_p + gumbel([seed] * 4, Stream.BONUS, range(4), vocab)).argmax(dim=-1)
    assert torch.equal(racing._pruned_race(log_p, source, None), whole)
    assert torch.equal(race(log_p, [seed] * 4, Stream.BONUS, range(4)), whole)


def test_large_rows_take_the_pruned_path_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    log_p = log_distribution(
        torch.randn((6, 9001), generator=torch.Generator().manual_seed(0)) * 3, [SamplingOptions()] * 6
    )
    ids = torch.randperm(20_000, generator=torch.Generator().manual_seed(1))[:9001]
    pruned = race(log_p, range(6), Stream.RACE, range(6)), race(log_p, range(6), Stream.RACE, range(6), ids)
    monkeypatch.setattr(racing, "_PRUNE_FROM", 1 << 30)
    assert torch.equal(pruned[0], race(log_p, range(6), Stream.RACE, range(6)))
    assert torch.equal(pruned[1], race(log_p, range(6), Stream.RACE, range(6), ids))
    assert torch.equal(pruned[1], draw_coupled(log_p, range(6), range(6), ids))


@pytest.mark.parametrize("law", [[0.9, 0.1], [0.5, 0.3, 0.2], [0.97, 0.02, 0.01]])
def test_a_peaked_rows_first_reach_may_be_too_short(law: list[float]) -> None:
    """Where the likeliest token drew a large x, its E is far above x, and others may win beyond twice the bound."""
    log_p = torch.tensor(law).log().expand(4000, -1)
    source = WordSource(range(4000), Stream.RACE, [0] * 4000)
    whole = (log_p + gumbel(range(4000), Stream.RACE, [0] * 4000, len(law))).argmax(dim=-1)
    assert torch.equal(racing._pruned_race(log_p, source, None), whole)


def test_the_lowest_column_wins_a_tie() -> None:
    """Every id stands in three columns with one law: each row's winner is tied with two others."""
    ids = torch.arange(200).repeat(3)
    log_p = torch.randn((40, 200), generator=torch.Generator().manual_seed(3)).log_softmax(-1).repeat(1, 3)
    winners = racing._pruned_race(log_p, WordSource(range(40), Stream.RACE, range(40)), ids)
    whole = (log_p + gumbel(range(40), Stream.RACE, range(40), 200, ids=ids)).argmax(dim=-1)
    assert torch.equal(winners, whole) and int(winners.max()) < 200


def test_filtered_rows_race_by_id_whichever_rows_they_stand_beside() -> None:
    logits = torch.randn((30, 500), generator=torch.Generator().manual_seed(5)) * 3
    options = [SamplingOptions(top_k=20), SamplingOptions(), SamplingOptions(temperature=0)] * 10
    log_p = log_distribution(logits, options)
    ids = torch.randperm(2000, generator=torch.Generator().manual_seed(6))[:500]
    source = WordSource(range(30), Stream.RACE, range(30))
    whole = (log_p + gumbel(range(30), Stream.RACE, range(30), 2000)[:, ids]).argmax(dim=-1)
    assert torch.equal(racing._pruned_race(log_p, source, ids), whole)


def test_excluded_tokens_never_win_and_ids_name_columns() -> None:
    log_p = torch.tensor([[-math.inf, 0.0, -math.inf]] * 50)
    assert set(race(log_p, range(50), Stream.RACE, [0] * 50).tolist()) == {1}
    assert set(draw_coupled(log_p, range(50), [0] * 50, torch.tensor([9, 8, 7])).tolist()) == {8}
    broken = torch.full((1, 5000), NAN)
    assert race(broken, [1], Stream.RACE, [0]).shape == (1,)  # no winner, but no crash


def test_a_cut_vocabulary_races_with_the_full_ones_noise() -> None:
    """Draft and target meet on the same token wherever the draft has it: columns are looked up by id, not by place."""
    full = torch.log_softmax(torch.randn((200, 60), generator=torch.Generator().manual_seed(2)), dim=-1)
    ids = torch.arange(59, -1, -2)
    target = race(full, range(200), Stream.RACE, range(200))
    draft = draw_coupled(full[:, ids], range(200), range(200), ids)
    has_it = torch.isin(target, ids)
    assert torch.equal(draft[has_it], target[has_it]) and int(has_it.sum()) > 50


def test_greedy_takes_the_lowest_of_a_tie() -> None:
    log_q = torch.tensor([[0.0, 1.0, 1.0], [2.0, 1.0, 2.0]])
    assert draw_greedy(log_q).tolist() == [1, 0]
    assert draw_greedy(log_q, torch.tensor([7, 8, 9])).tolist() == [8, 7]


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.2499, 1), (0.25, 3), (1 - 2.0**-53, 3)])
def test_dense_at_its_edges(monkeypatch: pytest.MonkeyPatch, u: float, token: int) -> None:
    monkeypatch.setattr("speculative.propose.uniform", lambda *_: torch.tensor([u], dtype=torch.float64))
    q = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    assert draw_dense(q, [0], [0]).tolist() == [token]
    assert draw_dense(q, [0], [0], torch.tensor([10, 11, 12, 13, 14])).tolist() == [token + 10]


def test_dense_inverts_the_uniform_of_stream_draft() -> None:
    q = torch.softmax(torch.randn((300, 20), generator=torch.Generator().manual_seed(3), dtype=torch.float64), dim=-1)
    u = uniform(range(300), Stream.DRAFT, [1] * 300)
    expected = (q.cumsum(dim=-1) <= u.unsqueeze(1) * q.sum(dim=-1, keepdim=True)).sum(dim=-1)
    assert torch.equal(draw_dense(q, range(300), [1] * 300), expected)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="expected float64"):
        draw_dense(torch.ones(1, 1), [0], [0])
    for bad in ([0.5, 0.6], [1.5, -0.5], [NAN, 1.0]):
        with pytest.raises(ValueError, match="sum to 1 in each row"):
            draw_dense(torch.tensor([bad], dtype=torch.float64), [0], [0])
