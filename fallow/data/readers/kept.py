"""Decoded images on disk, for the next run to map into memory: by the files' names, sizes and times and by the settings.

An entry is one file that appears whole or not at all, and says its own checksum; whatever is wrong with one, the images are
decoded again. The longest unused go when all together are larger than FALLOW_CACHE_GIB.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fallow import disk
from fallow.data.readers.images import Decoded, Settings
from fallow.data.readers.opening import libraries
from fallow.errors import UserError
from fallow.limits import amount, check_disk
from fallow.paths import shown, user_path

log = logging.getLogger(__name__)
MAGIC, PAGE, LONGEST = b"FALLOW images 1\n", 4096, 64 << 20  # bytes a header may have at most
ENDING = ".images"
GIB = 20.0  # at most, of all entries, unless FALLOW_CACHE_GIB says otherwise
STALE = 86_400  # seconds after which a file that nobody finished is in nobody's hands


class Entry(NamedTuple):
    """A line of `fallow cache`."""

    path: Path
    data: str
    images: int
    bytes: int
    used: float  # seconds since 1970


def home() -> Path:
    return user_path(_place()) / "decoded"


def _place() -> str:
    return os.environ.get("FALLOW_CACHE") or "~/.cache/fallow"


def key_of(paths: Sequence[Path], settings: Settings) -> str:
    """What an entry is called; another one as soon as a file, a setting or what decodes is another."""
    found = hashlib.sha256(json.dumps([MAGIC.decode(), libraries(), *astuple(settings)]).encode())
    for path in paths:
        about = os.stat(path)
        found.update(os.fsencode(os.path.abspath(path)) + f"\0{about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}\0".encode())
    return found.hexdigest()[:40]


def find(key: str, count: int) -> Decoded | None:
    """The images of so many files, mapped from disk; None where there are none, or none to be trusted."""
    try:
        path = home() / f"{key}{ENDING}"
        with open(path, "rb") as file:
            header, start = _header(file)
            n, channels, height, width = shape = tuple(map(int, header["shape"]))
            bad = {int(place): str(why) for place, why in header["bad"]}
            whole = start + n * channels * height * width
            if n + len(bad) != count or min(shape) < 1 or os.fstat(file.fileno()).st_size != whole or not all(0 <= p < count for p in bad):
                raise ValueError("size")
            images = np.memmap(file, np.uint8, "c", start, shape)
        if hashlib.sha256(images.data).hexdigest() != header["sha256"]:
            raise ValueError("checksum")
    except (FileNotFoundError, UserError):  # nothing there, or nobody's home
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("the decoded images in %s are not as they were written (%s); they are decoded again", shown(path), error)
        return None
    with suppress(OSError):
        os.utime(path)
    return Decoded(images, bad)


def keep(key: str, decoded: Decoded, data: str) -> None:
    """Writes an entry, if there is room; without one the next run decodes again."""
    images = np.ascontiguousarray(decoded.images)
    header = {"data": shown(data), "shape": images.shape, "bad": list(decoded.bad.items()), "sha256": hashlib.sha256(images.data).hexdigest()}
    head = json.dumps(header).encode("utf-8", "backslashreplace")
    wanted = -(-(len(MAGIC) + 8 + len(head)) // PAGE) * PAGE
    most = _most()
    if wanted + images.nbytes > most:
        return
    try:
        path = home() / f"{key}{ENDING}"
        path.parent.mkdir(parents=True, exist_ok=True)
        check_disk(wanted + images.nbytes, path.parent, "keeping the decoded images")
        with disk.replacing(path) as file:
            file.write((MAGIC + len(head).to_bytes(8, "little") + head).ljust(wanted, b"\0"))
            file.write(images.data)
        _prune(path, most)
    except (OSError, UserError) as error:
        why = error.cause if isinstance(error, UserError) else error.strerror or error
        log.warning("the decoded images cannot be kept in %s (%s); the next run decodes them again", shown(_place()), why)


def _most() -> float:
    """Bytes that all entries may take."""
    said = os.environ.get("FALLOW_CACHE_GIB") or str(GIB)
    try:
        return float(said) * 2**30
    except ValueError:
        raise UserError(f"FALLOW_CACHE_GIB={said} is no number", "give how many GiB of decoded images are kept, 0 for none") from None


def entries() -> list[Entry]:
    """What is kept, the last used first."""
    found = []
    for path in home().glob(f"*{ENDING}"):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError), open(path, "rb") as file:
            header, about = _header(file)[0], os.fstat(file.fileno())
            found.append(Entry(path, str(header["data"]), int(header["shape"][0]), about.st_size, about.st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def clear() -> str:
    """Removes every entry; what a run has mapped stays with it until it ends. Says how much that was."""
    freed = 0
    for path in [*home().glob(f"*{ENDING}"), *home().glob(f".*{ENDING}*.part")]:
        with suppress(OSError):
            if re.fullmatch(rf"\.?[0-9a-f]{{40}}{ENDING}.*", path.name):
                freed += path.stat().st_size
                path.unlink()
    return amount(freed)


def _header(file: Any) -> tuple[dict[str, Any], int]:
    """What an entry says of itself, and where its images begin."""
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("it begins otherwise")
    length = int.from_bytes(file.read(8), "little")
    if length > LONGEST:
        raise ValueError("header")
    return json.loads(file.read(length)), -(-(len(MAGIC) + 8 + length) // PAGE) * PAGE


def _prune(newest: Path, most: float) -> None:
    """Leaves the last used entries that fit in, the newest one in any case."""
    total = newest.stat().st_size
    for entry in entries():
        if entry.path != newest:
            total += entry.bytes
            if total > most:
                with suppress(OSError):
                    entry.path.unlink()
    for part in newest.parent.glob(f".*{ENDING}*.part"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE:
                part.unlink()
