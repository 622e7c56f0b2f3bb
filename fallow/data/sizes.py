"""Images brought to another size and number of channels, as the keys of `image` want them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fallow.data import ops
from fallow.data.readers.images import resized
from fallow.errors import UserError
from fallow.limits import check_room, memory_told


def fitted(images: torch.Tensor, size: int | None, fit: str, channels: int | None, name: str) -> torch.Tensor:
    """uint8 [N, C, size, size], if a size is given."""
    images = images if channels in (None, images.shape[1]) else _recoloured(images)
    if size is None or tuple(images.shape[2:]) == (size, size):
        return images
    doing = f"bringing {len(images):,} images to {size}x{size}"
    check_room(len(images) * images.shape[1] * size * size, doing, "give a smaller image.size, or less data")
    with memory_told(doing):
        if fit != "pad":
            return torch.from_numpy(resized(images.numpy(), size, size, fit))
        return _padded(images, size, name)


def _recoloured(images: torch.Tensor) -> torch.Tensor:
    if images.shape[1] == 1:
        return images.repeat(1, 3, 1, 1)
    return torch.cat([ops.grey(part).to(torch.uint8) for part in images.split(4096)])  # the sums need four bytes a pixel


def _padded(images: torch.Tensor, size: int, name: str) -> torch.Tensor:
    height, width = images.shape[2:]
    if size < max(height, width):
        raise UserError(
            f"{name} has {height}x{width} images, which padding cannot bring to {size}", "set image.fit=resize"
        )
    top, left = (size - height) // 2, (size - width) // 2
    return F.pad(images, (left, size - width - left, top, size - height - top))
