"""Any decoder-only architecture of transformers as an Executor: ragged batches over a RowCache.

Imports torch and transformers (through row_cache).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from execution.attention_kinds import (
    AttentionKind,
    attention_kinds,
    changing_rotary,
    context_length,
    refuse_unsupported,
)
from execution.cuda_graphs import Graphs
from execution.errors import ModelError
from execution.fused_norm import fuse_norms
from execution.interface import UNBOUNDED, Extension, check_batch
from execution.packed_attention import NAME as PACKED_ATTENTION
from execution.packed_attention import mask_copies
from execution.packed_linear import calls, layout, least_rows, pack
from execution.pass_inputs import Ids, asked_positions, filled, padded
from execution.passes import plan
from execution.placement import Placement
from execution.row_cache import RowCache
from execution.self_check import TESTED, plain_logits, self_check
from execution.static_passes import StaticPasses

_log = logging.getLogger(__name__)


class TransformersExecutor:
    """Executor over a transformers causal language model in evaluation mode.

    `head_ids` (int64 [H], ascending) are the ids of a reduced head's outputs; logits of all others are −inf. `packed`:
    where they can be (float32 on a CPU, CUDA), linear layers are replaced by packed ones, and norms on CUDA by
    single kernels; `network` is not usable as it was afterwards. `graphs`: records small passes, to be replayed.
    """

    free_rows = UNBOUNDED

    def __init__(
        self,
        network: Any,
        reference: str,
        *,
        vocab_size: int,
        head_ids: Tensor | None = None,
        packed: bool = True,
        graphs: Graphs | None = None,
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
        self._packs_heads = network.config._attn_implementation in ("sdpa", PACKED_ATTENTION)
        if self._packs_heads:
            network.set_attn_implementation(PACKED_ATTENTION)
        names = inspect.signature(network.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._cache = RowCache(config.num_hidden_layers)
        self._layout = layout(self._device, self._torch_dtype) if packed else None
        self._least = 1  # positions of a pass
        self._static: StaticPasses | None = None
        self._prepare(graphs, checked=network.config.model_type not in TESTED and head_ids is None)

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
    def _forward(self, rows: list[int], tokens: list[Ids], wanted: list[int]) -> Sequence[Tensor]:
        """One forward pass; per row float32 [wanted, vocab_size]. Rows as `RowCache.arrange` gave them."""
        counts = [array.size for array in tokens]
        if self._static is not None and self._static.takes(len(rows), max(counts)):
            logits = self._static.run(rows, tokens, wanted)
        else:
            width = max(*counts, -(-self._least // len(rows)))
            place = self._cache.place(rows, width)
            ids, positions = (torch.from_numpy(part).to(self._device) for part in padded(place.starts, width, tokens))
            asked = filled(asked_positions(width, counts, wanted), self._least)
            logits = self._through(place, ids, positions, torch.tensor(asked, device=self._device) if asked else None)
        self._cache.advance(rows, counts)
        if logits is None:
            return [torch.empty(0, self.vocab_size, device=self._device)] * len(rows)
        return torch.split(self._full_width(logits[: sum(wanted)]), wanted)

    def _through(self, place: Placement, ids: Tensor, positions: Tensor, asked: Tensor | None) -> Tensor | None:
        """The head's logits [asked, H] of ids [B, width], or None where it isn't asked. The host reads no input."""
        self._cache.show(place)
        network = self._network.base_model if asked is None else self._network
        with self._head_of(asked):
            output = network(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._masks(place),
                use_cache=True,
                **{self._cache_name: self._cache},
            )
        return None if asked is None else output.logits[0]

    @contextmanager
    def _head_of(self, asked: Tensor | None) -> Iterator[None]:
        """While it lasts, the head computes the asked positions: [B, width, hidden] becomes [1, asked, hidden]."""

        def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return inputs if asked is None else (inputs[0].flatten(0, 1)[asked][None], *inputs[1:])

        hook = self._network.get_output_embeddings().register_forward_pre_hook(select)
        try:
            yield
        finally:
            hook.remove()

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

    def _prepare(self, graphs: Graphs | None, *, checked: bool) -> None:
        """Show that the model runs the way we call it, pack it, and where asked compare it with itself, run plainly."""
        try:
            with calls(self._network) as seen:
                self._probe()
            plain = plain_logits(self._network, self.vocab_size) if checked else None
        except Exception as error:
            raise self._refusal("per-row masks and positions", error, "choose another model") from error
        if self._layout is not None:
            try:
                pack(self._network, seen, self._layout)
                if self._layout == "reordered":
                    self._least = least_rows(self._network)
                else:
                    fuse_norms(self._network)
                    torch.cuda.empty_cache()  # the weights as they were; does nothing without CUDA
                self._probe()
            except Exception as error:
                raise self._refusal("packed weights", error, "use --weights plain") from error
        self._cache.allocate()
        if graphs is not None:
            self._static = self._static_passes(graphs)
        if plain is not None:
            self_check(self, plain, self._network.config.model_type, self._torch_dtype)

    def _static_passes(self, graphs: Graphs) -> StaticPasses | None:
        changing = changing_rotary(self._config)
        if changing:
            _log.info(
                "model %r: no CUDA graphs, since rotary embeddings of type %s look at positions on the host",
                self.model,
                changing,
            )
            return None
        return StaticPasses(
            self._cache, self._through, graphs, model=self.model, device=self._device, least=self._least
        )

    @torch.no_grad()
    def _probe(self) -> None:
        """One token through the model: the caches' shapes show, and what can't be run the way we call it."""
        zero = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        output = self._network(
            input_ids=zero,
            position_ids=zero,
            attention_mask=self._masks(Placement(0, (0,), 1, zero, 1, even=True)),
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        heads = self.vocab_size if self._head_ids is None else len(self._head_ids)
        if output.logits.shape != (1, 1, heads):
            raise ValueError(f"logits of shape {tuple(output.logits.shape)}, not (1, 1, {heads})")

    def _refusal(self, means: str, error: Exception, hint: str) -> ModelError:
        kind, why = self._network.config.model_type, f"{type(error).__name__}: {error}"
        return ModelError(f"model {self.model!r}: architecture {kind!r} cannot be run with {means} ({why}); {hint}")
