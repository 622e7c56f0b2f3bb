"""Weak and strong views of uint8 images: batched, on any device, each sample with draws of its own.

docs/augmentation.md has the variants.

>>> views = Views(size=8, channels=1, mean=[0.5], std=[0.5], flip=False)
>>> views("strong", torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.arange(3)).shape
torch.Size([3, 1, 8, 8])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from fallow import draws
from fallow.data import ops
from fallow.data.randaugment import FLIP, LEFT, STRONG, TOP, RandAugment, apply, clipped_box, cutout_side, to_device
from fallow.data.samples import ROLES
from fallow.errors import UserError, suggest

ENLARGED = {"weak-resize": 4, "weak-resize-eighth": 8}  # by so many parts of the size before the crop
VIEWS: tuple[str, ...] = ("plain", "weak", *ENLARGED, "weak-zero-cutout", *STRONG)


def view_names() -> list[str]:
    """The names that `augment.labelled`, `augment.weak` and `augment.strong` take."""
    return list(VIEWS)


class Views:
    """Makes the views of uint8 images: the roles `plain labelled weak strong`, filled by names of `VIEWS`."""

    def __init__(self, *, size: int, channels: int, mean: Sequence[float], std: Sequence[float], flip: bool,
                 labelled: str = "weak", weak: str = "weak", strong: str = "ra-mc",
                 cutout: int | Literal["auto"] | None = "auto"):  # fmt: skip
        self.size, self.channels, self.flip, self.cutout = size, channels, flip, cutout
        self.names = dict(zip(ROLES, ("plain", labelled, weak, strong)))
        for role, name in self.names.items():
            if name not in VIEWS:
                raise UserError(f"augment.{role}={name} is no view", suggest(name, VIEWS))
        self._policies = {n: RandAugment(n, size, channels) for n in self.names.values() if n in STRONG}
        self.mean, self.std = tuple(mean), tuple(std)
        self._constants: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, role: str, images: Tensor, keys: Tensor) -> Tensor:
        """Float32 views, normalised, of uint8 images [B, C, H, W] on any device; keys: int64 [B] on the CPU."""
        out = torch.empty(images.shape, dtype=torch.float32, device=images.device)
        full, mean, std = self._constants_on(images.device)
        for part in self._chunks(images):
            view, hole = self._make(role, images[part], keys[part])
            out[part].copy_(view).div_(full).sub_(mean).div_(std)
            if hole is not None:
                out[part].masked_fill_(hole.bool(), 0.0)
        return out

    def uint8(self, role: str, images: Tensor, keys: Tensor) -> Tensor:
        """The same views before normalisation, for pictures; what is set to 0 after it shows as the mean colour."""
        out = torch.empty_like(images)
        colour = self._constants_on(images.device)[1].mul(255).round().to(torch.uint8)
        for part in self._chunks(images):
            view, hole = self._make(role, images[part], keys[part])
            out[part] = view if hole is None else (view & ~hole) | (colour & hole)
        return out

    def _chunks(self, images: Tensor) -> Iterator[slice]:
        """Bounds memory on CUDA, stays near the cache on a CPU; the result does not depend on it."""
        if images.dtype != torch.uint8 or images.shape[1:] != (self.channels, self.size, self.size):
            raise ValueError(f"images are {images.dtype} {tuple(images.shape)}, not uint8 [B, C, size, size]")
        pixels = 2**25 if images.is_cuda else 2**21
        count = max(1, pixels // (self.size * self.size))
        return (slice(start, start + count) for start in range(0, len(images), count))

    def _constants_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if device not in self._constants:  # 255 as a tensor: CUDA divides by a number through its reciprocal
            full = torch.full((1,), 255.0, device=device)
            mean, std = (torch.tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (self.mean, self.std))
            self._constants[device] = full, mean.to(device), std.to(device)
        return self._constants[device]

    def _make(self, role: str, images: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """The uint8 view, and the mask (255) of what is 0 after normalisation."""
        name, base = self.names[role], 64 * ROLES.index(role)  # lanes of its own: views are independent
        if name == "plain":
            return images, None
        if name in STRONG:
            return self._strong(self._policies[name], images, keys, base), None
        if name in ENLARGED:
            more = self.size // ENLARGED[name]
            flip, top, left = self._placed(images, keys, base, more)
            return ops.resize_crop(images, flip, top, left, more), None
        zero = name == "weak-zero-cutout"
        view = self._flip_crop(images, keys, base, zero)
        if not zero or self.cutout is None:
            return view, None
        box = to_device(clipped_box(keys, base, cutout_side(self.cutout, self.size), self.size), images.device)
        blank = torch.zeros_like(images[:, :1])
        return view, ops.paint(blank, box, torch.full_like(blank[:1, :, 0, 0], 255))

    def _strong(self, policy: RandAugment, images: Tensor, keys: Tensor, base: int) -> Tensor:
        x = self._flip_crop(images, keys, base) if policy.variant.crop else images.clone()
        for step in policy.steps(keys, base):
            x = apply(x, step)
        box = policy.closing_box(keys, base, self.cutout)
        return x if box is None else ops.paint(x, to_device(box, x.device), to_device(policy.colour[None], x.device))

    def _flip_crop(self, images: Tensor, keys: Tensor, base: int, zero: bool = False) -> Tensor:
        pad = int(0.125 * self.size)
        flip, top, left = self._placed(images, keys, base, 2 * pad)
        return ops.flip_crop(images, flip, top, left, pad, zero)

    def _placed(self, images: Tensor, keys: Tensor, base: int, most: int) -> Tensor:
        """Of each image whether it is mirrored, and where a crop begins, from 0 to `most`."""
        mirrored = 2 if self.flip else 1
        drawn = draws.host_integers(keys, [base + n for n in (FLIP, TOP, LEFT)], [mirrored, most + 1, most + 1])
        return to_device(drawn, images.device)
