"""idx files, with or without .gz: MNIST, Fashion-MNIST, EMNIST."""

from __future__ import annotations

import gzip
import math
import string
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from fallow.data.readers.common import ImageSet, Parts, check_labels, check_same_count, damaged, missing, split, truncated
from fallow.limits import check_room

CHUNK = 4 << 20

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


def _split(folder: Path, prefix: str, classes: int, first: int = 0, transposed: bool = False) -> ImageSet:
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
    """The array of an idx file of unsigned bytes; no more is read than its header promises, and one byte."""
    with path.open("rb") as plain:
        file = cast(IO[bytes], gzip.GzipFile(fileobj=plain) if path.suffix == ".gz" else plain)
        try:
            header = file.read(4 + 4 * dimensions)
            if len(header) < 4 + 4 * dimensions:
                raise truncated(path, len(header), 4 + 4 * dimensions)
            if header[:4] != bytes((0, 0, 8, dimensions)):
                raise damaged(path, f"it begins with {header[:4].hex()}, not with idx's 0000080{dimensions}")
            shape = tuple(int(n) for n in np.frombuffer(header, ">u4", dimensions, 4))
            return np.frombuffer(_promised(file, path, math.prod(shape), len(header)), np.uint8).reshape(shape)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise damaged(path, f"it is truncated or not gzip ({error})") from error


def _promised(file: IO[bytes], path: Path, count: int, header: int) -> bytearray:
    """As many bytes as the header promises, taken as they come: a promise alone takes no memory."""
    content = bytearray()
    while len(content) <= count and (chunk := file.read(min(CHUNK, count + 1 - len(content)))):
        check_room(len(content) + len(chunk), f"reading {path}")
        content += chunk
    if len(content) < count:
        raise truncated(path, header + len(content), header + count)
    if len(content) > count:
        raise damaged(path, "it has more bytes than its header promises")
    return content
