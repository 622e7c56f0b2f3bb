"""Wide ResNet 28-k as SemiFL and FedDB have it: ReLU, no dropout, shortcuts taken after the first activation."""

from __future__ import annotations

from torch import Tensor, nn

from fallow.models.cnn import Classifier, he_normal
from fallow.models.norms import activated, norm_layer


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: str, groups: int):
        super().__init__()
        self.norm1 = norm_layer(norm, inputs, groups)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = norm_layer(norm, outputs, groups)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = activated(self.norm1, x)
        y = self.conv2(activated(self.norm2, self.conv1(active)))
        return y + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(Classifier):
    """Zagoruyko & Komodakis, BMVC 2016, with `widen` = k and three groups of (depth - 4) / 6 blocks."""

    def __init__(self, classes: int, channels: int, norm: str = "bn", widen: int = 2, depth: int = 28, groups: int = 8):
        super().__init__()
        widths = (16, 16 * widen, 32 * widen, 64 * widen)
        self.conv = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)

        def group(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            others = [Block(outputs, outputs, 1, norm, groups) for _ in range((depth - 4) // 6 - 1)]
            return nn.Sequential(Block(inputs, outputs, stride, norm, groups), *others)

        self.group1 = group(widths[0], widths[1], 1)
        self.group2 = group(widths[1], widths[2], 2)
        self.group3 = group(widths[2], widths[3], 2)
        self.norm = norm_layer(norm, widths[3], groups)
        self.head = nn.Linear(widths[3], classes)
        he_normal(self)

    def features(self, x: Tensor) -> Tensor:
        x = self.group3(self.group2(self.group1(self.conv(x))))
        return activated(self.norm, x).mean((2, 3))
