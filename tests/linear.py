"""Models of one's own for tests: linear ones, whose gradients one can write down."""

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
