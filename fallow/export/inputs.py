"""How a run wants its images: from a file to the tensor its model was evaluated on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fallow.data.normalisation import normalisation
from fallow.data.readers import images
from fallow.data.sizes import fitted
from fallow.errors import UserError
from fallow.runs import Result

FILES = {
    "resize": "is resized to that, bilinear as in Pillow",
    "crop": "is cropped to the largest centre of these proportions, which is resized to that, bilinear as in Pillow",
    "pad": "is made smaller until it fits in, bilinear as in Pillow, or left as it is, and padded with zeros on all sides",
}
FITS = {"resize": "resized, bilinear as in Pillow,", "crop": "the centre resized, bilinear as in Pillow,", "pad": "padded with zeros on all sides"}


@dataclass(frozen=True)
class Inputs:
    """A run's preprocessing: what its data set's reader, the keys of `image` and the plain view do to an image."""

    decoded: tuple[int, int, int]  # channels, height, width to which a file is read
    size: int | None  # the keys of `image`
    fit: str
    channels: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shape: tuple[int, int, int]  # what the model takes

    @staticmethod
    def of(result: Result) -> Inputs:
        s, o = result.summary, result.config
        if "decoded" not in s:
            raise UserError(f"the run {result.path} is of an older version, which did not note how images are read", "run it again")
        mean, std = normalisation(o.image.normalise, o.data, s["channels"])
        shape = (s["channels"], s["size"], s["size"])
        return Inputs(tuple(s["decoded"]), o.image.size, o.image.fit, o.image.channels, mean, std, shape)

    @property
    def fit_of_files(self) -> str:
        """How files of another shape are brought to `decoded`: of one's own files `pad` does it at once."""
        return "resize" if self.fit == "pad" and self.decoded[1:] != (self.size, self.size) else self.fit

    def read(self, path: Path) -> Tensor:
        """A file as uint8 [C, H, W]: brought to the data set's own shape as `folder:` does, then by the keys of `image`."""
        channels, *shape = self.decoded
        pixels = torch.from_numpy(images.read(path, channels, (shape[0], shape[1]), self.fit_of_files).copy())
        return fitted(pixels[None], self.size, self.fit, self.channels, str(path))[0]

    def words(self) -> list[str]:
        """The steps from a file to the model's pixels, for people."""
        c, h, w = self.decoded
        steps = [f"{'grey' if c == 1 else 'colour (RGB)'}, 8 bits; transparency is dropped, of 16-bit grey the upper 8 bits count"]
        steps.append("turned upright, by EXIF's orientation")
        steps.append(f"an image that is not {h}x{w} (height x width) {FILES[self.fit_of_files]}")
        if self.channels not in (None, c):
            steps.append("made grey, 0.299 R + 0.587 G + 0.114 B" if self.channels == 1 else "the grey channel is repeated three times")
        if self.shape[1:] != (h, w):
            steps.append(f"{FITS[self.fit]} to {self.shape[1]}x{self.shape[2]}")
        return steps


def by_batch(net: nn.Module) -> bool:
    """Whether batch norm normalises by each batch's own statistics: a run with `statistics=batch` has no others."""
    return any(isinstance(m, _BatchNorm) and not m.track_running_stats for m in net.modules())


class FromPixels(nn.Module):
    """A net with its normalisation in front: uint8 images [N, C, H, W] to logits [N, classes]."""

    full: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, inputs: Inputs):
        super().__init__()
        self.net = net
        for name, values in (("full", (255.0,)), ("mean", inputs.mean), ("std", inputs.std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1))

    def normalised(self, images: Tensor) -> Tensor:
        return (images.float() / self.full - self.mean) / self.std

    def forward(self, images: Tensor) -> Tensor:
        return self.net(self.normalised(images))
