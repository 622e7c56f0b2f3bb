"""A torch Dataset given from Python: items (image, label), the image from Pillow, torch or numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fallow.data.readers.common import UNKNOWN, ImageSet, Parts, check_label, check_labels, split
from fallow.data.readers.images import GREY, array_of
from fallow.errors import UserError
from fallow.trees import shown

WANTED = "return (image, label) with a Pillow image, a tensor [C, H, W] or an array [H, W, C]"


def read(train: Any, test: Any, classes: Sequence[str] | None = None, clients: Sequence[Any] | None = None) -> Parts:
    training, testing = items(train, "train", clients), items(test, "test")
    check_alike(training, testing, "train")
    highest = int(torch.cat([training.labels, testing.labels]).max())
    names = tuple(classes or getattr(train, "classes", None) or map(str, range(highest + 1)))
    check_labels(training.labels.numpy(), len(names), "train", lowest=UNKNOWN)
    check_labels(testing.labels.numpy(), len(names), "test")
    return Parts(tuple(map(str, names)), training, testing)


def check_alike(training: ImageSet, testing: ImageSet, name: str) -> None:
    if training.images.shape[1:] != testing.images.shape[1:]:
        raise UserError(f"{name} has images of {_shape(training)} and test of {_shape(testing)}", "bring both to the same size and colours")


def items(data: Any, where: str, clients: Sequence[Any] | None = None) -> ImageSet:
    """All items of a data set, as one part of a source."""
    found = [_item(data[index], f"item {index} of {where}") for index in range(len(data))]
    if not found:
        raise UserError(f"{where} is a data set without items", "give one that has some")
    if clients is not None and len(clients) != len(found):
        raise UserError(f"{where} has {len(found)} items but {len(clients)} clients", "give one client per item")
    first = found[0][0].shape
    for index, (image, _) in enumerate(found):
        if image.shape != first:
            raise UserError(
                f"item {index} of {where} has the shape {image.shape} where item 0 has {first}",
                "bring all to one size in the data set's transform",
            )
    labels = np.array([label for _, label in found])
    return split(np.stack([image for image, _ in found]), labels, None if clients is None else [*map(str, clients)])


def _item(item: Any, where: str) -> tuple[np.ndarray, int]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise UserError(f"{where} is not an (image, label) pair", WANTED)
    image, label = item
    try:
        known = UNKNOWN if label is None else int(label)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        given = f"of shape {list(label.shape)}" if getattr(label, "shape", ()) else shown(label)
        raise UserError(f"{where} has the label {given}", "give a whole number from 0, the place of its class, or -1 where it is unknown") from error
    check_label(known, where)
    return _image(image, where), known


def _image(image: Any, where: str) -> np.ndarray:
    if hasattr(image, "convert") and hasattr(image, "mode"):
        return array_of(image, 1 if image.mode in GREY else 3)
    pixels = as_bytes(image.numpy(force=True) if isinstance(image, torch.Tensor) else np.asarray(image), where)
    if pixels.ndim == 2:
        return pixels[None]
    first_if_tensor = (0, 2) if isinstance(image, torch.Tensor) else (2, 0)
    for axis in first_if_tensor:
        if pixels.ndim == 3 and pixels.shape[axis] in (1, 3):
            return np.moveaxis(pixels, axis, 0)
    raise UserError(f"{where} has an image of shape {pixels.shape}", WANTED)


def as_bytes(pixels: np.ndarray, where: str) -> np.ndarray:
    """uint8 of bytes, or of real numbers from 0 to 1."""
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype.kind == "f" and pixels.size and pixels.min() >= 0 and pixels.max() <= 1:
        return np.rint(pixels * 255).astype(np.uint8)
    raise UserError(
        f"{where} has pixels of type {pixels.dtype} outside 0 to 1", "leave normalisation to Fallow: give uint8, or 0 to 1"
    )


def _shape(part: ImageSet) -> str:
    return "x".join(map(str, part.images.shape[1:]))
