"""The search for the largest of each row: torch.topk's answer, and of equals those that the row alone decides."""

from __future__ import annotations

import pytest
import torch

from draft_worker.quantize import likeliest

SIZES = (1, 5, 64, 65, 1024, 1025, 4096, 5003, 49_152, 151_936)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 64, 200])
def test_the_largest_in_order(size: int, count: int) -> None:
    rows = torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    values, ids = likeliest(rows, min(count, size))
    wanted = torch.topk(rows, min(count, size))
    assert torch.equal(values, wanted.values) and torch.equal(ids, wanted.indices)


@pytest.mark.parametrize("size", SIZES)
def test_excluded_tokens_come_last(size: int) -> None:
    """Rows with three finite values, as top-k leaves them: those first, and ids in range behind them."""
    rows = torch.full((4, size), -torch.inf)
    kept = torch.stack([torch.randperm(size, generator=torch.Generator().manual_seed(i))[:3] for i in range(4)])
    rows.scatter_(1, kept, -torch.arange(kept.shape[1], dtype=torch.float32).expand_as(kept))
    values, ids = likeliest(rows, min(64, size))
    assert torch.equal(ids[:, : kept.shape[1]], kept) and bool((values[:, kept.shape[1] :] == -torch.inf).all())
    assert int(ids.min()) >= 0 and int(ids.max()) < size


@pytest.mark.parametrize("size", SIZES)
def test_of_equals_the_row_alone_decides(size: int) -> None:
    """Logits of low precision tie: a row gives the same ids alone, and in any batch."""
    rows = torch.randint(0, 3, (6, size), generator=torch.Generator().manual_seed(1)).float()
    count = min(64, size)
    values, together = likeliest(rows, count)
    assert torch.equal(values, torch.topk(rows, count).values)
    assert torch.equal(rows.gather(1, together), values)
    assert all(len(set(row)) == count for row in together.tolist())
    for i in range(6):
        assert torch.equal(likeliest(rows[i : i + 1], count)[1][0], together[i])
        assert torch.equal(likeliest(rows[i:], count)[1][0], together[i])
