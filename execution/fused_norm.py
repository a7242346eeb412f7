"""RMS norms as one kernel each, where they are what torch's own is. Imports torch.

transformers writes them out as eight operations; on a device whose small passes wait for kernels to begin, that counts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ULPS = 4  # of the largest result: torch rounds once, transformers also before the weight


class FusedNorm(nn.Module):
    """x / rms(x) · weight over the last dimension."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps

    def forward(self, given: Tensor) -> Tensor:
        return nn.functional.rms_norm(given, self.weight.shape, self.weight, self.variance_epsilon)


def fuse_norms(network: nn.Module) -> int:
    """Put a FusedNorm in the place of each layer that computes the same; how many there are."""
    homes = [
        (parent, name, fused)
        for parent in network.modules()
        for name, child in parent.named_children()
        if (fused := _fused(child)) is not None
    ]
    for parent, name, fused in homes:
        setattr(parent, name, fused)
    return len(homes)


@torch.no_grad()
def _fused(norm: nn.Module) -> FusedNorm | None:
    """What to put in the place of `norm`. It's tried out: a name says little (Gemma's adds 1 to the weight)."""
    own = dict(norm.named_parameters())
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if list(own) != ["weight"] or own["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    weight = own["weight"]
    values = torch.linspace(-3, 2, 3 * len(weight)).roll(5).view(1, 3, -1)
    given = torch.cat([values, 1e-3 * values]).to(weight.device, weight.dtype)  # where eps counts, too
    fused = FusedNorm(norm.weight, eps)  # type: ignore[arg-type]
    expected = norm(given)
    if not torch.is_tensor(expected) or expected.shape != given.shape:
        return None
    difference = (fused(given) - expected).abs().max()
    return fused if difference <= _ULPS * torch.finfo(weight.dtype).eps * expected.abs().max() else None
