"""Tiny ImageNet: train/WNID/images/*.JPEG; the validation images with their annotations are the test set."""

from __future__ import annotations

from pathlib import Path

from fallow import disk
from fallow.data.readers.albums import Album, Entry
from fallow.data.readers.common import Parts, damaged, missing
from fallow.data.readers.folders import filled


def read(folder: Path) -> Parts:
    wnids = [line.strip() for line in _lines(folder / "wnids.txt") if line.strip()]
    if not wnids:
        raise damaged(folder / "wnids.txt", "it names no class")
    train: list[Entry] = []
    for label, wnid in enumerate(wnids):
        if not (folder / "train" / wnid).is_dir():
            raise missing(folder / "train" / wnid)
        train += [Entry(path, label) for path in filled(folder / "train" / wnid)]
    return Album(folder, _names(folder, wnids), train, _annotated(folder / "val", wnids)).decoded(64, 3)


def _annotated(folder: Path, wnids: list[str]) -> list[Entry]:
    annotations = folder / "val_annotations.txt"
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    listing: list[Entry] = []
    for number, line in enumerate(_lines(annotations), 1):
        file, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0].strip()
        if wnid not in label_of:
            raise damaged(annotations, f"line {number} names the class {wnid!r}, which wnids.txt does not")
        path = folder / "images" / file
        if not path.is_file():
            raise missing(path)
        listing.append(Entry(path, label_of[wnid]))
    if not listing:
        raise damaged(annotations, "it is empty")
    return listing


def _names(folder: Path, wnids: list[str]) -> tuple[str, ...]:
    words = folder / "words.txt"
    known = dict(line.rstrip("\n").split("\t", 1) for line in _lines(words) if "\t" in line) if words.is_file() else {}
    return tuple(known.get(wnid, wnid).split(",")[0].strip() for wnid in wnids)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise missing(path)
    return disk.read(path).decode("utf-8", errors="replace").splitlines()
