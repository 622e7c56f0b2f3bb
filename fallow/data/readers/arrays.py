"""Members of .npz files, whose headers are compared with what is there before numpy believes them."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np

from fallow.limits import check_room

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
BROKEN = (
    ValueError, EOFError, KeyError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, OverflowError, zipfile.BadZipFile, zlib.error,
    NotImplementedError, RuntimeError,
)  # fmt: skip


def check_members(path: Path) -> None:
    """Raises ValueError where a member is no plain array, or promises more than it holds, before numpy believes it."""
    with zipfile.ZipFile(path) as members:
        check_room(sum(size_of(members, info) for info in members.infolist()), f"reading {path}")


def size_of(members: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Bytes that the array takes, if they are the bytes that the member has."""
    with members.open(info) as file:
        version = np.lib.format.read_magic(file)
        if version not in HEADERS:
            raise ValueError(f"{info.filename} has a header of version {version}")
        shape, _, kind = HEADERS[version](file)
        if kind.hasobject:
            raise ValueError("Python objects inside")
        size = math.prod(shape) * kind.itemsize
        if min(shape, default=0) < 0 or file.tell() + size != info.file_size:
            raise ValueError(f"{info.filename} promises {size:,} bytes and has {info.file_size - file.tell():,}")
    return size


def array_of(members: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with members.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)
