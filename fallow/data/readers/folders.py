"""Walking folders of image files; CINIC-10, which is one folder per class."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from fallow.data.readers import cifar
from fallow.data.readers.albums import Album, Entry
from fallow.data.readers.common import Parts, missing
from fallow.data.readers.images import is_image
from fallow.errors import UserError
from fallow.paths import is_special, shown

log = logging.getLogger(__name__)
UNLABELLED = ("unlabelled", "unlabeled")


def read_cinic10(folder: Path) -> Parts:
    train, test = ([], [])  # type: tuple[list[Entry], list[Entry]]
    for part, listing in (("train", train), ("test", test)):
        if not (folder / part).is_dir():
            raise missing(folder / part)
        for label, name in enumerate(cifar.CLASSES):
            if not (folder / part / name).is_dir():
                raise missing(folder / part / name)
            listing += [Entry(path, label) for path in filled(folder / part / name)]
    return Album(folder, cifar.CLASSES, train, test).decoded(32, 3)


def filled(folder: Path) -> list[Path]:
    """The images anywhere below the folder, by name; at least one."""
    found = plain_files(folder)
    if not found:
        raise UserError(f"{folder} holds no images", "put images there or remove the folder")
    return found


def image_files(folder: Path) -> list[Path]:
    return sorted(path for path in files_below(folder) if is_image(path))


def files_below(folder: Path) -> Iterator[Path]:
    """All files at any depth, hidden ones aside, in no order."""
    for where, below, names in os.walk(folder, onerror=_refuse):
        below[:] = [name for name in below if not _hidden(name)]
        yield from (Path(where, name) for name in names if not _hidden(name))


def plain_files(folder: Path) -> list[Path]:
    """The same without pipes, sockets and devices, which to open may wait for ever; how many there are is said."""
    found = image_files(folder)
    special = [path for path in found if is_special(path)]
    if special:
        log.warning("%s: %d named as images are no plain files and are left out (%s is the first)", shown(folder), len(special), shown(special[0].name))
    return [path for path in found if path not in special] if special else found


def subfolders(folder: Path) -> dict[str, Path]:
    with os.scandir(folder) as entries:
        return {entry.name: Path(entry.path) for entry in entries if entry.is_dir() and not _hidden(entry.name)}


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _refuse(error: OSError) -> None:
    raise error  # os.walk would silently leave out what it cannot read
