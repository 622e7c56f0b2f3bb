"""What is handed over from Python in place of a name: a torch Dataset, a pair of arrays, single images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fallow.data.readers import dataset
from fallow.data.readers.common import UNKNOWN, ImageSet, Parts, check_labels, split
from fallow.data.readers.holdout import held_out
from fallow.data.sources import Source
from fallow.errors import UserError
from fallow.limits import CLASSES, is_whole
from fallow.trees import shown

WANTED = "give a name such as cifar10, a torch Dataset of (image, label), or a pair of arrays (images, labels)"
SHAPES = "give [N, H, W], [N, H, W, C] or [N, C, H, W], C being 1 or 3"
Classes = Sequence[str] | int | None


def source_of(data: Any, test: Any = None, classes: Classes = None) -> Source | None:
    """The source of a Dataset or of arrays; None where `data` is a name, or is not said.

    Without `test` a fifth of each class is held out. Classes are those that the Dataset or `classes` names, or counts,
    else as many as the highest label says.
    """
    if data is None or isinstance(data, str | Source):
        if test is not None or classes is not None:
            what = "test" if test is not None else "classes"
            raise UserError(f"{what} is given, but data is no Dataset and no arrays", f"leave {what} out, or {WANTED}")
        return data if isinstance(data, Source) else None
    reads = _arrays if _is_pair(data) else _dataset
    training = reads(data, "data")
    testing = None if test is None else (_arrays if _is_pair(test) else _dataset)(test, "test")
    if testing is not None:
        dataset.check_alike(training, testing, "data")
    names = _names(classes, data, [training, *([testing] if testing else [])])
    check_labels(training.labels.numpy(), len(names), "data", lowest=UNKNOWN)
    if testing is None:
        training, testing = _parted(training)
    else:
        check_labels(testing.labels.numpy(), len(names), "test")
    return Source("arrays" if _is_pair(data) else "dataset", *Parts(names, training, testing), flip=True)


def _is_pair(data: Any) -> bool:
    """(images, labels), not two items of a data set."""
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(d, np.ndarray | torch.Tensor) for d in data)


def _dataset(data: Any, name: str) -> ImageSet:
    if hasattr(data, "dataset") and hasattr(data, "batch_size"):
        raise UserError(f"{name} is a DataLoader, whose batches are made already", f"give its Dataset, {name}=loader.dataset")
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or hasattr(data, "columns") or isinstance(data, Mapping | str | bytes):
        raise UserError(f"{name} is of the type {type(data).__name__}, which cannot be read as images", WANTED)
    return dataset.items(data, name)


def _arrays(data: Any, name: str) -> ImageSet:
    images, labels = batch(data[0], f"the images of {name}"), np.asarray(_host(data[1]))
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != len(images):
        cause = f"{name} has {len(images):,} images and labels of type {labels.dtype} and shape {list(labels.shape)}"
        raise UserError(cause, "give one whole number per image, -1 where it is unknown")
    return split(images, labels)


def _names(classes: Classes, data: Any, parts: list[ImageSet]) -> tuple[str, ...]:
    if classes is None:
        classes = getattr(getattr(data, "dataset", data), "classes", None)  # a Subset has its Dataset's
    if classes is None:
        found = sorted({label for part in parts for label in part.labels.tolist()} - {UNKNOWN})
        if not found:
            raise UserError("data has no labelled image", "label some: -1 stands for unknown only")
        if found == list(range(1, len(found) + 1)):
            raise UserError(f"the labels of data are 1 to {len(found)}", "count classes from 0, or name them all with classes=[...]")
        classes = 1 + found[-1]
    if is_whole(classes, 1) and int(classes) <= CLASSES:  # type: ignore[arg-type]
        return tuple(map(str, range(int(classes))))  # type: ignore[arg-type]
    if isinstance(classes, str | bytes) or not isinstance(classes, Iterable):
        raise UserError(f"classes={shown(classes)} are no classes", f"give their names as a list, or how many they are, at most {CLASSES:,}")
    return tuple(map(str, classes))


def _parted(whole: ImageSet) -> tuple[ImageSet, ImageSet]:
    """Training and test set."""
    out = torch.from_numpy(held_out(whole.labels.numpy(), [str(i) for i in range(len(whole))], "data"))
    return ImageSet(whole.images[~out], whole.labels[~out]), ImageSet(whole.images[out], whole.labels[out])


# -- images ------------------------------------------------------------------------------------------------------------
def batch(images: Any, where: str, channels: int | None = None) -> np.ndarray:
    """uint8 [N, C, H, W] of an array or tensor of images, or of one image.

    Where an axis of 1 or 3 stands first and last, a tensor has its channels first and an array has them last. Three
    axes are grey images where `channels` is 1 or where none of them can be the channels, else one image.
    """
    pixels = dataset.as_bytes(np.asarray(_host(images)), where)
    last_first = (-3, -1) if isinstance(images, torch.Tensor) else (-1, -3)
    if pixels.ndim == 2:
        return pixels[None, None]
    if pixels.ndim == 3:
        axis = next((a for a in last_first if pixels.shape[a] in (1, 3)), None)
        if axis is None or (axis == -3 and channels == 1):
            return pixels[:, None]
        return np.moveaxis(pixels, axis, 0)[None]
    if pixels.ndim == 4:
        for axis in last_first:
            if pixels.shape[axis] in (1, 3):
                return np.moveaxis(pixels, axis, 1)
    raise UserError(f"{where} have the shape {list(pixels.shape)}", SHAPES)


def _host(values: Any) -> Any:
    return values.numpy(force=True) if isinstance(values, torch.Tensor) else values
