"""Small convolutional nets, and the max pooling that all our models share.

Pooling is torch's, except on CUDA under `torch.use_deterministic_algorithms(True)`: torch's backward there has no
deterministic form, so it is written out. Values, and the first of equal maxima taking the gradient, are the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fallow.models.norms import Chain, activated, norm_layer


class Pool2(nn.Module):
    """2x2 max pooling, stride 2; an odd last row or column is dropped, or pooled alone with `ceil`."""

    def __init__(self, ceil: bool = False):
        super().__init__()
        self.ceil = ceil

    def forward(self, x: Tensor) -> Tensor:
        return pool2_by_choice(x, self.ceil) if _must_be_exact(x) else F.max_pool2d(x, 2, ceil_mode=self.ceil)


class Pool3(nn.Module):
    """3x3 max pooling, stride 2, padding 1."""

    def forward(self, x: Tensor) -> Tensor:
        return pool3_by_choice(x) if _must_be_exact(x) else F.max_pool2d(x, 3, 2, 1)


def global_max(x: Tensor) -> Tensor:
    """The largest value of each channel: [B, C, H, W] -> [B, C]."""
    if _must_be_exact(x):
        return max_by_choice(x.flatten(2))
    return F.max_pool2d(x, (x.shape[2], x.shape[3])).flatten(1)


def adaptive_max(x: Tensor, side: int) -> Tensor:
    """Max pooling to side x side; a map that has this size stays as it is."""
    if x.shape[2:] == (side, side):
        return x
    return adaptive_by_choice(x, side) if _must_be_exact(x) else F.adaptive_max_pool2d(x, side)


def pool2_by_choice(x: Tensor, ceil: bool = False) -> Tensor:
    """`Pool2` as comparisons of the four corners of each window, in window order."""
    h, w = x.shape[2:]
    x = F.pad(x, (0, w % 2, 0, h % 2), value=-torch.inf) if ceil else x[:, :, : h // 2 * 2, : w // 2 * 2]
    best = x[:, :, ::2, ::2]
    for corner in (x[:, :, ::2, 1::2], x[:, :, 1::2, ::2], x[:, :, 1::2, 1::2]):
        best = torch.where((corner > best) | corner.isnan(), corner, best)
    return best


def pool3_by_choice(x: Tensor) -> Tensor:
    """`Pool3` as comparisons of the nine places of each window, in window order."""
    (h, w), x = x.shape[2:], F.pad(x, (1, 1, 1, 1), value=-torch.inf)
    places = [x[:, :, i : i + h : 2, j : j + w : 2] for i in range(3) for j in range(3)]
    best = places[0]
    for place in places[1:]:
        best = torch.where((place > best) | place.isnan(), place, best)
    return best


def max_by_choice(x: Tensor) -> Tensor:
    """Maximum over the last axis; the gradient goes to the first of equal ones, without a scatter."""
    first = x.detach().argmax(-1, keepdim=True)
    return torch.where(torch.arange(x.shape[-1], device=x.device) == first, x, 0).sum(-1)


def adaptive_by_choice(x: Tensor, side: int) -> Tensor:
    """Adaptive max pooling, columns first, then rows: the first maximum of a window in its order."""
    for axis in (3, 2):
        length = x.shape[axis]
        out = torch.arange(side, device=x.device)
        start, stop = out * length // side, ((out + 1) * length + side - 1) // side
        widest = -(-length // side) + 1
        inside = torch.minimum(start[:, None] + torch.arange(widest, device=x.device), stop[:, None] - 1)
        windows = x.index_select(axis, inside.flatten()).unflatten(axis, (side, widest))
        x = max_by_choice(windows.movedim(axis + 1, -1))
    return x


def _must_be_exact(x: Tensor) -> bool:
    return x.is_cuda and torch.are_deterministic_algorithms_enabled()


class Classifier(nn.Module):
    """A net whose logits are a linear `head` on its `features`."""

    head: nn.Module

    def features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, features: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Logits; with `features` also what they were made of."""
        h = self.features(x)
        return (self.head(h), h) if features else self.head(h)


class SmallCNN(Classifier):
    """Three conv-norm-ReLU stages and global average pooling; fast on a CPU from 8x8 to 32x32."""

    def __init__(
        self,
        classes: int,
        channels: int,
        norm: str = "gn",
        widths: tuple[int, int, int] = (32, 64, 128),
        groups: int = 8,
    ):
        super().__init__()
        bias, (a, b, c) = norm == "none", widths
        self.conv1, self.norm1 = nn.Conv2d(channels, a, 3, padding=1, bias=bias), norm_layer(norm, a, groups)
        self.conv2, self.norm2 = nn.Conv2d(a, b, 3, padding=1, bias=bias), norm_layer(norm, b, groups)
        self.conv3, self.norm3 = nn.Conv2d(b, c, 3, padding=1, bias=bias), norm_layer(norm, c, groups)
        self.pool = Pool2()
        self.head = nn.Linear(widths[-1], classes)
        he_normal(self)

    def features(self, x: Tensor) -> Tensor:
        x = self.pool(activated(self.norm1, self.conv1(x)))
        x = self.pool(activated(self.norm2, self.conv2(x)))
        return activated(self.norm3, self.conv3(x)).mean((2, 3))


def he_convolutions(net: Classifier) -> None:
    """Convolutions normal with variance 2 / fan-out, their biases 0."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def he_normal(net: Classifier) -> None:
    """Convolutions normal with variance 2 / fan-out; biases of convolutions and of the head 0."""
    he_convolutions(net)
    assert isinstance(net.head, nn.Linear)
    nn.init.zeros_(net.head.bias)


class EmnistCNN(Classifier):
    """The EMNIST net of Reddi et al., Adaptive Federated Optimization (ICLR 2021)."""

    def __init__(self, classes: int, channels: int, norm: str = "none", groups: int = 8):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, 32, 3), norm_layer(norm, 32, groups)
        self.conv2, self.norm2 = nn.Conv2d(32, 64, 3), norm_layer(norm, 64, groups)
        self.pool = Pool2()
        self.drop1: nn.Module = nn.Dropout(0.25)
        self.linear = nn.Linear(64 * 12 * 12, 128)
        self.drop2: nn.Module = nn.Dropout(0.5)
        self.head = nn.Linear(128, classes)

    def features(self, x: Tensor) -> Tensor:
        x = activated(self.norm1, self.conv1(x))
        x = activated(self.norm2, self.conv2(x))
        x = self.drop1(adaptive_max(self.pool(x), 12))
        return self.drop2(F.relu(self.linear(x.flatten(1))))


class LeNet(Classifier):
    """RSCFed's `simple-cnn`: two convolutions and four linear layers for 32x32; no norm."""

    def __init__(self, classes: int, channels: int, norm: str = "none", groups: int = 1):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, 6, 5), norm_layer(norm, 6, groups)
        self.conv2, self.norm2 = nn.Conv2d(6, 16, 5), norm_layer(norm, 16, groups)
        self.pool = Pool2()
        self.linear1, self.linear2, self.linear3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 84)
        self.linear4, self.head = nn.Linear(84, 256), nn.Linear(256, classes)

    def features(self, x: Tensor) -> Tensor:
        x = self.pool(activated(self.norm1, self.conv1(x)))
        x = adaptive_max(self.pool(activated(self.norm2, self.conv2(x))), 5).flatten(1)
        for layer in (self.linear1, self.linear2, self.linear3):
            x = F.relu(layer(x))
        return self.linear4(x)


class EmnistCNNofRGD(EmnistCNN):
    """What FedRGD's code runs: channels are dropped, before the second ReLU; no second dropout."""

    def __init__(self, classes: int, channels: int, norm: str = "none", groups: int = 32):
        super().__init__(classes, channels, norm, groups)
        self.drop1 = nn.Dropout2d(0.25)
        self.drop2 = nn.Identity()

    def features(self, x: Tensor) -> Tensor:
        x = activated(self.norm1, self.conv1(x))
        x = F.relu(self.drop1(adaptive_max(self.pool(self.norm2(self.conv2(x))), 12)))
        return self.drop2(F.relu(self.linear(x.flatten(1))))


class VGG11(Classifier):
    """VGG-11 as in FedRGD's appendix I, for 96x96 (STL-10); other sides are pooled to the same 3x3 map."""

    def __init__(self, classes: int, channels: int, norm: str = "bn", groups: int = 32):
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
            if width:
                layers += [nn.Conv2d(before, width, 3, padding=1), norm_layer(norm, width, groups), nn.ReLU()]
                before = width
            else:
                layers.append(Pool2(ceil=True))
        self.body = Chain(*layers)
        self.linear1 = nn.Linear(512 * 3 * 3, 512)
        vector_norm = norm_layer(norm, 512, groups)
        self.norm = nn.BatchNorm1d(512) if isinstance(vector_norm, nn.BatchNorm2d) else vector_norm
        self.linear2 = nn.Linear(512, 128)
        self.head = nn.Linear(128, classes)

    def features(self, x: Tensor) -> Tensor:
        x = adaptive_max(self.body(x), 3)
        return self.linear2(F.relu(self.norm(self.linear1(x.flatten(1)))))
