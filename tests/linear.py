"""Models of one's own for tests: linear ones, whose gradients one can write down."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    def __init__(self, classes: int, channels: int, size: int):
        super().__init__()
        self.last = nn.Linear(channels * size * size, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1))


class Two(nn.Module):
    """Two numbers to three logits, without images."""

    def __init__(self, classes: int):
        super().__init__()
        self.last = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


class Dropping(Linear):
    """Drops inputs in train mode by torch's function, and remembers in which mode it was called."""

    modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        Dropping.modes.append(self.training)
        return super().forward(F.dropout(x, 0.8, self.training))


class Halving(Linear):
    """Asks for its mode, and draws nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 0.2 if self.training else x)


class Buffered(Linear):
    """Has a floating buffer that is no batch norm's."""

    def __init__(self, classes: int, channels: int, size: int):
        super().__init__(classes, channels, size)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Keyed(Linear):
    """Drops inputs by a module, which Fallow replaces by one that can be repeated."""

    def __init__(self, classes: int, channels: int, size: int):
        super().__init__(classes, channels, size)
        self.drop = nn.Dropout(0.8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))
