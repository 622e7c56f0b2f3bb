"""The user's own arrays in an .npz file, never with pickles inside."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path

import numpy as np

from fallow.data.readers.arrays import BROKEN, array_of, size_of
from fallow.data.readers.common import UNKNOWN, Parts, check_label, check_labels, check_same_count, damaged, split
from fallow.data.readers.holdout import held_out
from fallow.errors import UserError
from fallow.limits import CLASSES, check_room

KEYS = {  # what it is -> names it may have in a user's file
    "images": ("images", "train_images", "x_train"),
    "labels": ("labels", "train_labels", "y_train"),
    "test_images": ("test_images", "x_test"),
    "test_labels": ("test_labels", "y_test"),
    "clients": ("clients",),
    "classes": ("classes",),
}


def read(path: Path) -> Parts:
    """The user's arrays: images and labels, and where given test_images, test_labels, clients, classes."""
    if not path.is_file():
        raise UserError(f"there is no file {path}", "give the path of an .npz file")
    arrays = load(path, {key for keys in KEYS.values() for key in keys})
    found = {what: arrays[key] for what, keys in KEYS.items() for key in keys[::-1] if key in arrays}
    for what in ("images", "labels"):
        if what not in found:
            raise UserError(f"{path} has no array {what!r}", f"save it under one of the names {', '.join(KEYS[what])}")
    if ("test_images" in found) != ("test_labels" in found):
        raise UserError(f"{path} has only one of test_images and test_labels", "save both or neither")
    images, labels = channels_first(found["images"], path), whole_numbers(found["labels"], path)
    classes = _classes(found, labels, path)
    clients = _clients(found, len(images), path)
    check_same_count(len(images), len(labels), path)
    check_labels(labels, len(classes), path, lowest=UNKNOWN)
    if "test_images" in found:
        test_images, test_labels = channels_first(found["test_images"], path), whole_numbers(found["test_labels"], path)
        check_same_count(len(test_images), len(test_labels), path)
        if not len(test_labels) or test_images.shape[1:] != images.shape[1:]:
            raise UserError(f"{path} has test_images that are none or of another shape than images", "make them alike")
        check_labels(test_labels, len(classes), path)
        return Parts(classes, split(images, labels, clients), split(test_images, test_labels))
    testing = held_out(labels, [str(index) for index in range(len(labels))], str(path))
    stay = None if clients is None else [client for client, test in zip(clients, testing) if not test]
    return Parts(classes, split(images[~testing], labels[~testing], stay), split(images[testing], labels[testing]))


def load(path: Path, wanted: Collection[str]) -> dict[str, np.ndarray]:
    """The arrays of these names that the file has."""
    with path.open("rb") as file:
        if file.read(6) == np.lib.format.MAGIC_PREFIX:
            raise UserError(f"{path} is a single array, not an .npz", "save images and labels with numpy.savez")
        file.seek(0)
        try:
            with zipfile.ZipFile(file) as members:
                found = {info.filename.removesuffix(".npy"): info for info in members.infolist()}
                found = {key: info for key, info in found.items() if key in wanted}
                sizes = [size_of(members, info) for info in found.values()]
                check_room(sum(sizes), f"reading {path}")
                return {key: array_of(members, info) for key, info in found.items()}
        except BROKEN as error:
            raise damaged(path, f"it is truncated or not an .npz of plain arrays ({error})") from error


def channels_first(images: np.ndarray, path: Path) -> np.ndarray:
    """uint8 [N, C, H, W] of NHW, NHWC or NCHW; where it could be both of the last two it is NHWC."""
    if images.dtype != np.uint8:
        raise UserError(f"{path} has {images.dtype} images", "save them as uint8 from 0 to 255")
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[3] in (1, 3):
        return images.transpose(0, 3, 1, 2)
    if images.ndim == 4 and images.shape[1] in (1, 3):
        return images
    raise UserError(
        f"{path} has images of shape {images.shape}", "save them as [N, H, W], [N, H, W, C] or [N, C, H, W], C 1 or 3"
    )


def whole_numbers(labels: np.ndarray, path: Path) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(
            f"{path} has labels of type {labels.dtype} and shape {labels.shape}", "save one whole number per image"
        )
    for label in (labels.min(), labels.max()) if len(labels) else ():
        check_label(int(label), path)
    return labels.astype(np.int64)


def _classes(found: dict[str, np.ndarray], labels: np.ndarray, path: Path) -> tuple[str, ...]:
    if "classes" in found:
        if found["classes"].size > CLASSES:
            raise UserError(f"{path} names {found['classes'].size:,} classes", f"give at most {CLASSES:,}")
        return tuple(str(name) for name in found["classes"].reshape(-1))
    if not len(labels) or int(labels.max()) < 0:
        raise UserError(f"{path} has no labelled image", "label some: -1 stands for unknown only")
    return tuple(str(label) for label in range(int(labels.max()) + 1))


def _clients(found: dict[str, np.ndarray], count: int, path: Path) -> list[str] | None:
    if "clients" not in found:
        return None
    clients = [str(client) for client in found["clients"].reshape(-1)]
    if len(clients) != count:
        raise UserError(f"{path} has {count:,} images but {len(clients):,} clients", "save one client per image")
    return clients
