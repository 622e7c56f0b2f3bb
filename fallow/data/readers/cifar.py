"""CIFAR-10 and CIFAR-100, the "python" files (pickles) and the "binary" files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fallow import disk
from fallow.data.readers.common import ImageSet, Parts, check_labels, check_same_count, damaged, missing, split, truncated
from fallow.data.readers.pickled import Array, parsed
from fallow.limits import check_room

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
PIXELS = 3 * 32 * 32


def read_python10(folder: Path) -> Parts:
    return Parts(CLASSES, _pickled(folder, BATCHES, "labels", 10), _pickled(folder, ("test_batch",), "labels", 10))


def read_python100(folder: Path) -> Parts:
    names = _unpickle(folder / "meta").get("fine_label_names")
    if not isinstance(names, list) or len(names) != 100 or not all(isinstance(name, str | bytes) for name in names):
        raise damaged(folder / "meta", "it does not name 100 classes")
    classes = tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names)
    train, test = (_pickled(folder, (part,), "fine_labels", 100) for part in ("train", "test"))
    return Parts(classes, train, test)


def read_binary10(folder: Path) -> Parts:
    train = _records(folder, tuple(f"{batch}.bin" for batch in BATCHES), 1, 10)
    return Parts(CLASSES, train, _records(folder, ("test_batch.bin",), 1, 10))


def read_binary100(folder: Path) -> Parts:
    listed = folder / "fine_label_names.txt"
    if not listed.is_file():
        raise missing(listed)
    classes = tuple(disk.read(listed).decode("utf-8", errors="replace").split())
    if len(classes) != 100:
        raise damaged(listed, f"it names {len(classes)} classes, not 100")
    # a record has the coarse label before the fine one
    return Parts(classes, _records(folder, ("train.bin",), 2, 100), _records(folder, ("test.bin",), 2, 100))


def _records(folder: Path, files: tuple[str, ...], label_bytes: int, classes: int) -> ImageSet:
    images, labels = [], []
    record = label_bytes + PIXELS
    for path in (folder / file for file in files):
        if not path.is_file():
            raise missing(path)
        check_room(2 * path.stat().st_size, f"reading {path}")
        content = np.fromfile(path, dtype=np.uint8)
        if len(content) % record or not len(content):
            raise truncated(path, len(content), (len(content) // record + 1) * record)
        content = content.reshape(-1, record)
        labels.append(check_labels(content[:, label_bytes - 1], classes, path))
        images.append(content[:, label_bytes:].reshape(-1, 3, 32, 32))
    return split(np.concatenate(images), np.concatenate(labels))


def _pickled(folder: Path, files: tuple[str, ...], key: str, classes: int) -> ImageSet:
    images, labels = [], []
    for path in (folder / file for file in files):
        batch = _unpickle(path)
        data, known = batch.get("data"), batch.get(key)
        if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != PIXELS:
            raise damaged(path, "its 'data' is not an array of 32x32 colour images")
        if not isinstance(known, list) or not all(type(label) is int for label in known):
            raise damaged(path, f"its {key!r} are not a list of whole numbers")
        check_same_count(len(data), len(known), path)
        images.append(data.reshape(-1, 3, 32, 32))
        labels.append(check_labels(np.array(known, dtype=np.int64), classes, path))
    return split(np.concatenate(images), np.concatenate(labels))


def _unpickle(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise missing(path)
    check_room(2 * path.stat().st_size, f"reading {path}")
    try:
        content = parsed(path.read_bytes())
    except ValueError as error:
        raise damaged(path, f"it is truncated or not a CIFAR pickle ({error})") from error
    if not isinstance(content, dict):
        raise damaged(path, "it is a pickle, but not CIFAR's")
    plain = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}
    return {key: value.pixels if isinstance(value, Array) else value for key, value in plain.items()}
