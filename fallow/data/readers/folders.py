"""Folders of image files, one folder per class: CINIC-10, and the user's own."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np

from fallow.data.readers import cifar
from fallow.data.readers.holdout import held_out, in_order
from fallow.data.readers.images import decode, is_image
from fallow.data.readers.parts import UNKNOWN, Parts, missing, split
from fallow.errors import UserError
from fallow.paths import is_special, shown

log = logging.getLogger(__name__)
UNLABELLED = ("unlabelled", "unlabeled")
Listing = list[tuple[Path, int]]


def read_cinic10(folder: Path) -> Parts:
    train, test = ([], [])  # type: tuple[Listing, Listing]
    for part, listing in (("train", train), ("test", test)):
        if not (folder / part).is_dir():
            raise missing(folder / part)
        for label, name in enumerate(cifar.CLASSES):
            if not (folder / part / name).is_dir():
                raise missing(folder / part / name)
            listing += [(path, label) for path in filled(folder / part / name)]
    return decoded(cifar.CLASSES, train, test, 32, 3)


def read(folder: Path, size: int | None = None) -> Parts:
    """PATH/train/CLASS/ and PATH/test/CLASS/, or PATH/CLASS/ of which a fifth becomes the test set."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "give the path of a folder that has one folder per class")
    inside = subfolders(folder)
    if {"train", "test"} <= inside.keys():
        classes, train, test = _given_halves(folder, inside)
    else:
        classes, train, test = _one_whole(folder, inside)
    return decoded(classes, train, test, size)


def decoded(
    classes: tuple[str, ...], train: Listing, test: Listing, size: int | None = None, channels: int | None = None
) -> Parts:
    """The files of both sets, decoded together so that they agree in size and channels."""
    images = decode([path for path, _ in train + test], size, channels)
    labels = np.array([label for _, label in train + test], np.int64)
    n = len(train)
    return Parts(tuple(map(shown, classes)), split(images[:n], labels[:n]), split(images[n:], labels[n:]))


def filled(folder: Path) -> list[Path]:
    """The images anywhere below the folder, by name; at least one."""
    found = plain_files(folder)
    if not found:
        raise UserError(f"{folder} holds no images", "put images there or remove the folder")
    return found


def image_files(folder: Path) -> list[Path]:
    found = []
    for where, below, names in os.walk(folder, onerror=_refuse):
        below[:] = [name for name in below if not _hidden(name)]
        found += [Path(where, name) for name in names if is_image(name)]
    return sorted(found)


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


def _given_halves(folder: Path, inside: dict[str, Path]) -> tuple[tuple[str, ...], Listing, Listing]:
    train_folders, test_folders = subfolders(inside["train"]), subfolders(inside["test"])
    unlabelled = [path for home in (inside, train_folders) for name in UNLABELLED if (path := home.get(name))]
    classes = in_order(train_folders.keys() - set(UNLABELLED))
    if not classes:
        raise UserError(f"{inside['train']} holds no class folders", "make one folder of images per class")
    if strange := sorted(test_folders.keys() - set(classes)):
        raise UserError(
            f"{test_folders[strange[0]]} has no counterpart in {inside['train']}",
            "give test images of the training classes only",
        )
    train, test = (
        [(path, label) for label, name in enumerate(classes) if name in part for path in filled(part[name])]
        for part in (train_folders, test_folders)
    )
    if not test:
        raise UserError(f"{inside['test']} holds no class folders", "make one folder of test images per class")
    return classes, train + [(path, UNKNOWN) for home in unlabelled for path in filled(home)], test


def _one_whole(folder: Path, inside: dict[str, Path]) -> tuple[tuple[str, ...], Listing, Listing]:
    if "train" in inside and subfolders(inside["train"]) and not any(map(is_image, os.listdir(inside["train"]))):
        raise UserError(
            f"{folder} has a folder train but no folder test beside it",
            f"add {folder / 'test'}, or give folder:{inside['train']}, of which a fifth becomes the test set",
        )
    classes = in_order(inside.keys() - set(UNLABELLED))
    if not classes:
        raise UserError(f"{folder} holds no class folders", "make one folder of images per class")
    listing = [(path, label) for label, name in enumerate(classes) for path in filled(inside[name])]
    labels = np.array([label for _, label in listing])
    testing = held_out(labels, [path.relative_to(folder).as_posix() for path, _ in listing], str(folder))
    train = [item for item, test in zip(listing, testing) if not test]
    test = [item for item, test in zip(listing, testing) if test]
    unlabelled = [(path, UNKNOWN) for name in UNLABELLED if name in inside for path in filled(inside[name])]
    return classes, train + unlabelled, test
