"""Any decoder-only architecture of transformers as an Executor: ragged batches over a RowCache.

Imports torch and transformers (through row_cache).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from execution.attention_kinds import AttentionKind, attention_kinds, context_length, refuse_unsupported
from execution.errors import ModelError
from execution.interface import UNBOUNDED, Extension, check_batch
from execution.packed_attention import NAME as PACKED_ATTENTION
from execution.packed_attention import mask_copies
from execution.packed_linear import LEAST_ROWS, calls, pack, packable
from execution.passes import plan
from execution.row_cache import Placement, RowCache
from execution.self_check import TESTED, plain_logits, self_check


class TransformersExecutor:
    """Executor over a transformers causal language model in evaluation mode.

    `head_ids` (int64 [H], ascending) are the ids of a reduced head's outputs; logits of all others are −inf. `packed`:
    where they can be (float32 on a CPU), linear layers are replaced by packed ones; `network` is not usable as it was
    afterwards.
    """

    free_rows = UNBOUNDED

    def __init__(
        self, network: Any, reference: str, *, vocab_size: int, head_ids: Tensor | None = None, packed: bool = True
    ) -> None:
        refuse_unsupported(network, reference)
        self._config = config = network.config.get_text_config(decoder=True)
        self.model = reference
        self.vocab_size = vocab_size
        self.context_length = context_length(config)
        self._network = network.eval().requires_grad_(False)
        parameter = next(network.parameters())
        self._device, self._torch_dtype = parameter.device, parameter.dtype
        self.device, self.dtype = str(parameter.device), str(parameter.dtype).removeprefix("torch.")
        self._head_ids = None if head_ids is None else head_ids.to(self._device)
        self._kinds = attention_kinds(config)
        self._packs_heads = network.config._attn_implementation == "sdpa"
        if self._packs_heads:
            network.set_attn_implementation(PACKED_ATTENTION)
        names = inspect.signature(network.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._asked: Tensor | None = None  # int64 [n]: which of the pass's B · width positions the head computes
        self._cache = RowCache(config.num_hidden_layers)
        self._packed = packed and packable(self._device, self._torch_dtype)
        self._prepare(checked=network.config.model_type not in TESTED and head_ids is None)

    # -- rows

    def open(self) -> int:
        return self._cache.open()

    def length(self, row: int) -> int:
        return self._cache.length(row)

    def truncate(self, row: int, length: int) -> None:
        self._cache.truncate(row, length)

    def fork(self, row: int, length: int) -> int:
        return self._cache.fork(row, length)

    def close(self, row: int) -> None:
        self._cache.close(row)

    def extend(self, batch: Sequence[Extension]) -> list[Tensor]:
        arrays = check_batch(batch, self.length, self.vocab_size, self.context_length)
        found: list[list[Tensor]] = [[] for _ in batch]
        for pieces in plan([array.size for array in arrays], [extension.logits for extension in batch]):
            by_row = {batch[piece.index].row: piece for piece in pieces}
            rows = self._cache.arrange(list(by_row))
            pieces = [by_row[row] for row in rows]
            tokens = [arrays[piece.index][piece.start : piece.stop] for piece in pieces]
            logits = self._forward(rows, tokens, [piece.logits for piece in pieces])
            for piece, part in zip(pieces, logits, strict=True):
                found[piece.index].append(part)
        return [self._joined(parts) for parts in found]

    def _joined(self, parts: list[Tensor]) -> Tensor:
        parts = [part for part in parts if len(part)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, self.vocab_size, device=self._device)

    # -- one pass

    @torch.no_grad()
    def _forward(self, rows: list[int], tokens: list[npt.NDArray[np.int64]], wanted: list[int]) -> Sequence[Tensor]:
        """One forward pass; per row float32 [wanted, vocab_size]. Rows as `RowCache.arrange` gave them."""
        counts = [array.size for array in tokens]
        place = self._cache.place(rows, counts, self._least_width(len(rows)))
        ids, positions = _padded(place, tokens, counts)
        self._asked = self._positions(place.width, counts, wanted) if any(wanted) else None
        output = (self._network if any(wanted) else self._network.base_model)(
            input_ids=ids.to(self._device),
            position_ids=positions.to(self._device),
            attention_mask=self._masks(place),
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        self._cache.advance(rows, counts)
        if not any(wanted):
            return [torch.empty(0, self.vocab_size, device=self._device)] * len(rows)
        return torch.split(self._full_width(output.logits[0, : sum(wanted)]), wanted)

    def _least_width(self, rows: int) -> int:
        """Packed layers take less time for `LEAST_ROWS` positions than for fewer."""
        return -(-LEAST_ROWS // rows) if self._packed else 1

    def _select(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Before the head: keep the asked positions, [B, width, hidden] -> [1, asked, hidden]."""
        if self._asked is None:
            return inputs
        return (inputs[0].flatten(0, 1)[self._asked][None], *inputs[1:])

    def _positions(self, width: int, counts: list[int], wanted: list[int]) -> Tensor:
        """The last `wanted[b]` of the `counts[b]` positions of each row, the last of all repeated up to the least."""
        ends = [row * width + count for row, count in enumerate(counts)]
        asked = [at for end, logits in zip(ends, wanted, strict=True) for at in range(end - logits, end)]
        asked += asked[-1:] * (self._least_width(1) - len(asked))
        return torch.tensor(asked, device=self._device)

    def _full_width(self, logits: Tensor) -> Tensor:
        """float32 [n, vocab_size] of the head's [n, H]."""
        if self._head_ids is None:
            return logits.float()
        full = torch.full((len(logits), self.vocab_size), -torch.inf, device=self._device)
        return full.index_copy_(1, self._head_ids, logits.float())

    def _masks(self, place: Placement) -> Tensor | dict[str, Tensor]:
        """Per kind of layer, who sees whom: 0 or the lowest number, [B, 1, copies · width, length] (`mask_copies`).
        Unused columns lie after every query."""
        masks = {kind.name: self._mask(place, kind) for kind in self._kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, place: Placement, kind: AttentionKind) -> Tensor:
        query = place.columns[:, None, :, None]
        key = torch.arange(place.length, device=self._device)
        seen = key <= query
        if kind.window is not None:
            seen &= key > query - kind.window
        lowest = torch.finfo(self._torch_dtype).min
        mask = torch.zeros(seen.shape, dtype=self._torch_dtype, device=self._device).masked_fill_(~seen, lowest)
        copies = mask_copies(self._config, place.width) if self._packs_heads else 1
        return mask.repeat(1, 1, copies, 1) if copies > 1 else mask

    # -- start

    def _prepare(self, *, checked: bool) -> None:
        """Show that the model runs the way we call it, pack it, and where asked compare it with itself, run plainly."""
        try:
            with calls(self._network) as seen:
                self._probe()
            plain = plain_logits(self._network, self.vocab_size) if checked else None
        except Exception as error:
            raise self._refusal("per-row masks and positions", error, "choose another model") from error
        if self._packed:
            try:
                pack(self._network, seen)
                self._probe()
            except Exception as error:
                raise self._refusal("packed weights", error, "use --weights plain") from error
        self._network.get_output_embeddings().register_forward_pre_hook(self._select)
        self._cache.allocate()
        if plain is not None:
            self_check(self, plain, self._network.config.model_type, self._torch_dtype)

    @torch.no_grad()
    def _probe(self) -> None:
        """One token through the model: the caches' shapes show, and what can't be run the way we call it."""
        zero = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        output = self._network(
            input_ids=zero,
            position_ids=zero,
            attention_mask=self._masks(Placement(0, (0,), 1, zero, 1)),
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        heads = self.vocab_size if self._head_ids is None else len(self._head_ids)
        if output.logits.shape != (1, 1, heads):
            raise ValueError(f"logits of shape {tuple(output.logits.shape)}, not (1, 1, {heads})")

    def _refusal(self, means: str, error: Exception, hint: str) -> ModelError:
        kind, why = self._network.config.model_type, f"{type(error).__name__}: {error}"
        return ModelError(f"model {self.model!r}: architecture {kind!r} cannot be run with {means} ({why}); {hint}")


def _padded(place: Placement, tokens: list[npt.NDArray[np.int64]], counts: list[int]) -> tuple[Tensor, Tensor]:
    """Ids and positions, [B, width] each. Padding repeats the row's last token and position."""
    size = (len(tokens), place.width)
    ids, positions = np.empty(size, np.int64), np.empty(size, np.int64)
    for index, (array, count, start) in enumerate(zip(tokens, counts, place.starts, strict=True)):
        ids[index, :count], ids[index, count:] = array, array[-1]
        positions[index] = np.minimum(np.arange(start, start + place.width), start + count - 1)
    return torch.from_numpy(ids), torch.from_numpy(positions)
