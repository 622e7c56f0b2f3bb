"""Dropout whose masks are a hash of (step key, layer, call, element): no generator, the same bits everywhere.

Graphs that are replayed at the same time cannot share torch's generator; here each reads its own key tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fallow import draws

if TYPE_CHECKING:
    from fallow.models.norms import Modes

_LEVELS = 2**30


class Dropout(_DropoutNd):
    """Zeroes elements with probability `p` and scales the others, unless `modes.stats` is `running`."""

    modes: Modes
    number: int
    whole_channels = False

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or self.modes.stats == "running":
            return x
        kept = self._draw(x.shape[:2] + (1,) * (x.dim() - 2) if self.whole_channels else x.shape, x.device)
        scale = 0.0 if self.p == 1 else 1 / (1 - self.p)
        return torch.where(kept, x * scale, 0)

    def _draw(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Which elements stay; every call of a step has a mask of its own."""
        key = draws.bits(self.modes.key.to(device), (self.number << 32) + self.modes.calls)
        self.modes.calls += 1
        elements = torch.arange(torch.Size(shape).numel(), device=device).view(shape)
        return draws.integers(key, elements, _LEVELS) >= round(self.p * _LEVELS)


class DropoutElements(Dropout, nn.Dropout):
    pass


class Dropout1d(Dropout, nn.Dropout1d):
    whole_channels = True


class Dropout2d(Dropout, nn.Dropout2d):
    whole_channels = True


class Dropout3d(Dropout, nn.Dropout3d):
    whole_channels = True


OURS: dict[type, type] = {
    nn.Dropout: DropoutElements,
    nn.Dropout1d: Dropout1d,
    nn.Dropout2d: Dropout2d,
    nn.Dropout3d: Dropout3d,
}
