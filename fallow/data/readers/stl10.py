"""STL-10's binary files: column-major 96x96 colour images, labels from 1, and 100,000 images without a label."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fallow.data.readers.common import UNKNOWN, Parts, check_labels, check_same_count, missing, split, truncated
from fallow.limits import check_room

CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
SHAPE = (3, 96, 96)
CHUNK = 1000


def read(folder: Path) -> Parts:
    train_images, train_labels = _images(folder / "train_X.bin"), _labels(folder / "train_y.bin")
    test_images, test_labels = _images(folder / "test_X.bin"), _labels(folder / "test_y.bin")
    unlabelled = _images(folder / "unlabeled_X.bin")
    check_same_count(len(train_images), len(train_labels), folder / "train_X.bin")
    check_same_count(len(test_images), len(test_labels), folder / "test_X.bin")
    labels = np.concatenate([train_labels, np.full(len(unlabelled), UNKNOWN)])
    return Parts(CLASSES, split(_upright(train_images, unlabelled), labels), split(_upright(test_images), test_labels))


def _images(path: Path) -> np.ndarray:
    if not path.is_file():
        raise missing(path)
    size, image = path.stat().st_size, int(np.prod(SHAPE))
    if size % image or not size:
        raise truncated(path, size, (size // image + 1) * image)
    return np.memmap(path, np.uint8, "r").reshape(-1, *SHAPE)


def _labels(path: Path) -> np.ndarray:
    if not path.is_file():
        raise missing(path)
    check_room(9 * path.stat().st_size, f"reading {path}")
    return check_labels(np.fromfile(path, np.uint8).astype(np.int64) - 1, len(CLASSES), path)


def _upright(*stored: np.ndarray) -> np.ndarray:
    """All images, rows first; written in place because the unlabelled ones alone take 2.8 GB."""
    check_room(sum(images.nbytes for images in stored), "holding the images of STL-10")
    upright = np.empty((sum(map(len, stored)), *SHAPE), np.uint8)
    at = 0
    for images in stored:
        for start in range(0, len(images), CHUNK):
            chunk = images[start : start + CHUNK]
            upright[at : at + len(chunk)] = chunk.transpose(0, 1, 3, 2)
            at += len(chunk)
    return upright
