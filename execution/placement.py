"""Where one forward pass reads and writes in a RowCache. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Slots first..first+B, columns columns[b] of each, of `length` that attention sees.

    `even`: the columns of all rows are starts[0]..starts[0]+width, and lie last. Where it's False, a pass looks at
    `columns` alone, on the device: only then may it be captured and run again with other columns.
    """

    first: int
    starts: tuple[int, ...]  # tokens held before the pass, per row of the batch
    width: int  # tokens of the widest row or more: all are padded to it
    columns: Tensor  # int64 [B, width]
    length: int
    even: bool

    @cached_property
    def batch(self) -> Tensor:
        """int64 [B, 1]: 0..B−1, which with `columns` says where each token of an uneven batch goes."""
        return torch.arange(len(self.starts), device=self.columns.device)[:, None]

    def places(self, block: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Of [parts, slots, heads, capacity, dim]: per part what attention sees, [B, heads, length, dim], and where to
        write: that without the columns before an even batch, or [B, capacity, heads, dim] for an uneven one."""
        mine = block[:, self.first : self.first + len(self.starts)]
        into = mine[:, :, :, self.starts[0] : self.length] if self.even else mine.transpose(2, 3)
        return mine[:, :, :, : self.length].unbind(), into.unbind()

    def write(self, into: Tensor | None, new: Tensor) -> None:
        """Put [B, heads, width, dim] where `places` said."""
        assert into is not None
        if self.even:
            into.copy_(new)
        else:
            into[self.batch, self.columns] = new.transpose(1, 2)
