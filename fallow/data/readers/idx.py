"""idx files, with or without .gz: MNIST, Fashion-MNIST, EMNIST."""

from __future__ import annotations

import gzip
import math
import string
import zlib
from pathlib import Path

import numpy as np

from fallow.data.readers.parts import (
    Parts,
    Split,
    check_labels,
    check_same_count,
    damaged,
    missing,
    split,
    truncated,
)

DIGITS = tuple(string.digits)
CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_MERGED = tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")
EMNIST = {
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "bymerge": _MERGED,
    "balanced": _MERGED,
    "letters": tuple(string.ascii_uppercase),
    "digits": DIGITS,
    "mnist": DIGITS,
}


def read_mnist(folder: Path) -> Parts:
    return Parts(DIGITS, _split(folder, "train", 10), _split(folder, "t10k", 10))


def read_fashion_mnist(folder: Path) -> Parts:
    return Parts(CLOTHES, _split(folder, "train", 10), _split(folder, "t10k", 10))


def read_emnist(folder: Path, variant: str) -> Parts:
    classes = EMNIST[variant]
    first = 1 if variant == "letters" else 0
    train, test = (
        _split(folder, f"emnist-{variant}-{part}", len(classes), first, transposed=True) for part in ("train", "test")
    )
    return Parts(classes, train, test)


def _split(folder: Path, prefix: str, classes: int, first: int = 0, transposed: bool = False) -> Split:
    image_file, label_file = find(folder, f"{prefix}-images-idx3-ubyte"), find(folder, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    check_same_count(len(images), len(labels), image_file)
    labels = check_labels(labels.astype(np.int64) - first, classes, label_file)
    return split((images.transpose(0, 2, 1) if transposed else images)[:, None], labels)


def spellings(name: str) -> tuple[str, ...]:
    """Official names end in -idx3-ubyte; some unpackers write .idx3-ubyte."""
    return tuple(spelt + end for spelt in (name, name.replace("-idx", ".idx")) for end in ("", ".gz"))


def find(folder: Path, name: str) -> Path:
    for spelt in spellings(name):
        if (folder / spelt).is_file():
            return folder / spelt
    raise missing(folder / name)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array of an idx file of unsigned bytes."""
    content = _content(path)
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise truncated(path, len(content), header)
    if content[:4] != bytes((0, 0, 8, dimensions)):
        raise damaged(path, f"it begins with {content[:4].hex()}, not with idx's 0000080{dimensions}")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dimensions, 4))
    promised = header + math.prod(shape)
    if len(content) < promised:
        raise truncated(path, len(content), promised)
    if len(content) > promised:
        raise damaged(path, f"it has {len(content) - promised:,} bytes more than its header promises")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    with path.open("rb") as file:
        try:
            return gzip.GzipFile(fileobj=file).read()
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise damaged(path, f"it is truncated or not gzip ({error})") from error
