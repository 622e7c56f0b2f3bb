"""ResNet-9 (FedLoKe, FedRGD, FedDure, FedMatch), ResNet-18 and ResNet-8 (SAGE) for small images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fallow.models.cnn import Classifier, Pool2, Pool3, global_max, he_convolutions
from fallow.models.norms import Chain, activated, norm_layer


class ResNet9(Classifier):
    """DAWNBench's skeleton with max pooling at the end; convolutions keep their bias, also before a norm."""

    def __init__(
        self,
        classes: int,
        channels: int,
        norm: str = "bn",
        groups: int = 32,
        conv_bias: bool = True,
        linear_bias: bool = True,
    ):
        super().__init__()

        def block(inputs: int, outputs: int, *pool: nn.Module) -> Chain:
            conv = nn.Conv2d(inputs, outputs, 3, 1, 1, bias=conv_bias)
            return Chain(conv, norm_layer(norm, outputs, groups), nn.ReLU(), *pool)

        self.prep = block(channels, 64)
        self.layer1_head = block(64, 128, Pool2())
        self.layer1_residual = nn.Sequential(block(128, 128), block(128, 128))
        self.layer2 = block(128, 256, Pool2())
        self.layer3_head = block(256, 512, Pool2())
        self.layer3_residual = nn.Sequential(block(512, 512), block(512, 512))
        self.linear = nn.Linear(512, classes, bias=linear_bias)

    @property
    def head(self) -> nn.Module:  # type: ignore[override]
        return self.linear

    def features(self, x: Tensor) -> Tensor:
        x = self.layer1_head(self.prep(x))
        x = self.layer1_residual(x) + x
        x = self.layer3_head(self.layer2(x))
        x = self.layer3_residual(x) + x
        return global_max(x)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: str, groups: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm_layer(norm, outputs, groups)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm_layer(norm, outputs, groups)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(norm_layer(norm, outputs, groups))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(activated(self.norm1, self.conv1(x))))
        return F.relu(y + self.shortcut(x))


class ResNet18(Classifier):
    """The CIFAR variant: a 3x3 stem without pooling, post-activation blocks."""

    def __init__(self, classes: int, channels: int, norm: str = "bn", groups: int = 32):
        super().__init__()
        self.conv = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        self.norm = norm_layer(norm, 64, groups)

        def stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            first = BasicBlock(inputs, outputs, stride, norm, groups)
            return nn.Sequential(first, BasicBlock(outputs, outputs, 1, norm, groups))

        self.stage1 = stage(64, 64, 1)
        self.stage2 = stage(64, 128, 2)
        self.stage3 = stage(128, 256, 2)
        self.stage4 = stage(256, 512, 2)
        self.head = nn.Linear(512, classes)

    def features(self, x: Tensor) -> Tensor:
        x = activated(self.norm, self.conv(x))
        return self.stage4(self.stage3(self.stage2(self.stage1(x)))).mean((2, 3))


class ResNet8(Classifier):
    """SAGE's net: one post-activation block in each of three stages; convolutions normal by fan-out."""

    def __init__(self, classes: int, channels: int, norm: str = "bn", groups: int = 32):
        super().__init__()
        self.conv = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        self.norm = norm_layer(norm, 64, groups)
        self.stage1 = BasicBlock(64, 64, 1, norm, groups)
        self.stage2 = BasicBlock(64, 128, 2, norm, groups)
        self.stage3 = BasicBlock(128, 256, 2, norm, groups)
        self.head = nn.Linear(256, classes)
        he_convolutions(self)

    def features(self, x: Tensor) -> Tensor:
        x = activated(self.norm, self.conv(x))
        return self.stage3(self.stage2(self.stage1(x))).mean((2, 3))


class ResNet18ofImageNet(ResNet18):
    """With ImageNet's stem, 7x7 with stride 2 and max pooling; convolutions normal by fan-out (CBAFed)."""

    def __init__(self, classes: int, channels: int, norm: str = "bn", groups: int = 32):
        super().__init__(classes, channels, norm, groups)
        self.conv = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.pool = Pool3()
        he_convolutions(self)

    def features(self, x: Tensor) -> Tensor:
        x = self.pool(activated(self.norm, self.conv(x)))
        return self.stage4(self.stage3(self.stage2(self.stage1(x)))).mean((2, 3))
