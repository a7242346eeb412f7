"""Layers that are given the same tensor as one product; on a CPU, with their weights reordered once too.

torch's own float32 linear layer lets the library choose a plan for each width, and repacks the weights in each call
where that pays. oneDNN's product over weights that are laid out once takes hardly longer for nine rows than for one.
On CUDA, weights stay as they are; fewer and larger products keep the memory busier.
Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

WIDENED = 4  # positions of a pass of fewer, on processors where oneDNN's product takes longer with fewer rows
_CLEARLY = 0.95  # of the time with one row: with WIDENED it has to take less than this
_SAMPLE, _TRIES = 16, 5  # products that are tried out, and how often
Layout = Literal["reordered", "joined"]


def layout(device: torch.device, dtype: torch.dtype) -> Layout | None:
    """How linear layers are packed: reordered in float32 on a CPU whose torch has oneDNN, joined on CUDA, or not."""
    built = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if device.type == "cpu" and dtype == torch.float32 and built:
        return "reordered"
    return "joined" if device.type == "cuda" else None


@contextmanager
def calls(network: nn.Module) -> Iterator[list[tuple[nn.Linear, Tensor]]]:
    """While it lasts: which linear layer was called with which tensor, in order."""
    seen: list[tuple[nn.Linear, Tensor]] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        seen.append((layer, inputs[0]))

    layers = [module for module in network.modules() if type(module) is nn.Linear]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def pack(network: nn.Module, seen: Sequence[tuple[nn.Linear, Tensor]], layout: Layout) -> None:
    """Put a PackedLinear in the place of each linear layer that `calls` saw once; the old weights are given up.

    Layers that were given the same tensor one after another (q, k and v; gate and up) become one product. A layer that
    has none to be joined with is left where that is all.
    """
    times = [layer for layer, _ in seen]
    once = [(layer, given) for layer, given in seen if sum(other is layer for other in times) == 1]
    groups: list[list[nn.Linear]] = []
    last: Tensor | None = None
    for layer, given in once:
        joins = given is last and (groups[-1][0].bias is None) == (layer.bias is None)
        groups[-1].append(layer) if joins else groups.append([layer])
        last = given
    homes = {child: (parent, name) for parent in network.modules() for name, child in parent.named_children()}
    while groups:
        group = groups.pop(0)
        if layout == "joined" and len(group) == 1:
            continue
        product = _Reordered(group) if layout == "reordered" else _Joined(group)
        start = 0
        for layer in group:
            parent, name = homes.pop(layer)
            setattr(parent, name, PackedLinear(product, start, layer))
            start += layer.out_features


def least_rows(network: nn.Module) -> int:
    """Positions that a pass of fewer is widened to: WIDENED or 1, whatever this processor's oneDNN is faster with.

    SmolLM2-135M on 2 cores of an Intel Xeon: 38 ms for one position, 44 for four; on an AMD EPYC four were faster.
    """
    layers = (layer for layer in network.modules() if isinstance(layer, PackedLinear))
    products = list(dict.fromkeys(layer._product for layer in layers))[:_SAMPLE]
    times: dict[int, list[float]] = {1: [], WIDENED: []}
    for _ in range(_TRIES):
        for rows, found in times.items():
            given = [torch.zeros(1, rows, product.inputs) for product in products]
            started = time.perf_counter()
            for product, one in zip(products, given, strict=True):
                product._times(one)
            found.append(time.perf_counter() - started)
    return WIDENED if min(times[WIDENED]) < _CLEARLY * min(times[1]) else 1


class _Product:
    """A group's weights, [sum of outputs, inputs], and the last result until it's used up."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weights = [layer.weight for layer in layers]
        weight = weights[0].detach() if len(weights) == 1 else torch.cat(tuple(weights)).detach()
        self._weight = self._laid_out(weight)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = torch.cat(tuple(biases)).detach() if biases else None
        self._members, self.inputs = len(layers), layers[0].in_features
        self._given: Tensor | None = None
        self._version, self._uses = 0, 0
        self._result: Tensor

    def _laid_out(self, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def _times(self, given: Tensor) -> Tensor:
        """[..., inputs] -> [..., sum of outputs]."""
        raise NotImplementedError

    def of(self, given: Tensor) -> Tensor:
        """The product with `given`, [..., inputs] -> [..., sum of outputs], computed once for all members in turn."""
        if self._given is given and self._version == given._version:
            self._uses += 1
            result = self._result
        else:
            result = self._times(given)
            if self._members == 1:
                return result
            self._given, self._version, self._uses, self._result = given, given._version, 1, result
        if self._uses == self._members:
            self._given = None
            del self._result
        return result


class _Joined(_Product):
    """As they are, one below the other."""

    def _laid_out(self, weight: Tensor) -> Tensor:
        return weight

    def _times(self, given: Tensor) -> Tensor:
        return nn.functional.linear(given, self._weight, self._bias)


class _Reordered(_Product):
    """In oneDNN's own layout."""

    def _laid_out(self, weight: Tensor) -> Tensor:
        self._product = torch.ops.mkldnn._linear_pointwise.default  # looked up once: it takes microseconds
        return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # type: ignore[no-any-return]

    def _times(self, given: Tensor) -> Tensor:
        return self._product(given, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]


class PackedLinear(nn.Module):
    """A linear layer whose outputs are `product`'s from `start` on. For inference: no parameters, no gradients."""

    def __init__(self, product: _Product, start: int, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._product = product
        self._slice = None if product._members == 1 else slice(start, start + layer.out_features)

    def forward(self, given: Tensor) -> Tensor:
        result = self._product.of(given)
        return result if self._slice is None else result[..., self._slice]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
