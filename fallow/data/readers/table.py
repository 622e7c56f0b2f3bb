"""A CSV with the columns file, label, client, split: who holds which image, and which label is missing."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from fallow.data.readers.albums import Album, Entry, listed
from fallow.data.readers.common import UNKNOWN
from fallow.data.readers.holdout import in_order
from fallow.errors import UserError
from fallow.limits import check_room
from fallow.paths import is_special, shown, user_path

LONGEST = 1 << 20  # characters of a line
FACTOR = 4  # bytes of memory that a byte of the file takes
COLUMNS = ("file", "label", "client", "split")


@dataclass(frozen=True)
class Row:
    line: int
    file: str
    label: str  # empty: unknown
    client: str
    test: bool


def read(path: Path) -> Album:
    rows, has_clients = _rows(path)
    classes = _classes(rows, path)
    label_of = {name: label for label, name in enumerate(classes)}
    entries = [Entry(_image(path, row), label_of.get(row.label, UNKNOWN), row.client if has_clients else None) for row in rows]
    train = [entry for entry, row in zip(entries, rows) if not row.test]
    test = [entry for entry, row in zip(entries, rows) if row.test]
    album = Album(path, classes, train, test)
    if not test:
        album = album.held_out([row.file for row in rows])
    sites = f"{len(album.sites())} clients ({listed(album.sites())}) with the classes " if has_clients else f"{len(classes)} classes: "
    return replace(album, said=(f"{shown(path)}: {sites}{listed(classes)}",))


def _rows(path: Path) -> tuple[list[Row], bool]:
    if not path.is_file():
        raise UserError(f"there is no file {path}", "give the path of a CSV with the columns file,label,client,split")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            check_room(FACTOR * path.stat().st_size, f"reading {path}")
            reader = csv.DictReader(_lines(file, path), skipinitialspace=True)
            columns = [(name or "").strip() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            _check_columns(columns, path)
            rows = [_row(raw, reader.line_num, "client" in columns, path) for raw in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV in UTF-8 ({error})", "save it as comma-separated UTF-8 text") from error
    if all(row.test for row in rows):
        raise UserError(f"{path} lists no training image", "add rows whose split is train or empty")
    return rows, "client" in columns


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """Its lines, of which none is longer than a line of such a table is."""
    while line := file.readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise UserError(f"{path} has a line of more than {LONGEST:,} characters", "save it as comma-separated text, a line for each image")
        yield line


def _check_columns(columns: list[str], path: Path) -> None:
    for needed in ("file", "label"):
        if needed not in columns:
            found = ", ".join(columns) or "none"
            raise UserError(
                f"{path} has no column {needed!r} (found: {found})", f"begin it with the line {','.join(COLUMNS)}"
            )


def _row(raw: dict[str, str | None], line: int, has_clients: bool, path: Path) -> Row:
    file, label, client, part = ((raw.get(column) or "").strip() for column in COLUMNS)
    if not file:
        raise UserError(f"line {line} of {path} names no file", "fill in the column file or remove the line")
    if part.lower() not in ("", "train", "test"):
        raise UserError(f"line {line} of {path} has the split {part!r}", "write train, test or nothing")
    test = part.lower() == "test"
    if test and not label:
        raise UserError(f"line {line} of {path} is a test image without a label", "label it or make it train")
    if has_clients and not client and not test:
        raise UserError(
            f"line {line} of {path} names no client",
            "fill it in ('server' is the server's pool) or remove the column from the whole file",
        )
    return Row(line, file, label, client, test)


def _classes(rows: list[Row], path: Path) -> tuple[str, ...]:
    trained = {row.label for row in rows if not row.test and row.label}
    if not trained:
        raise UserError(f"{path} has no labelled training image", "fill in some labels")
    for row in rows:
        if row.test and row.label not in trained:
            raise UserError(
                f"line {row.line} of {path} has the label {row.label!r}, which no training image has",
                "correct it, or label a training image so",
            )
    return in_order(trained)


def _image(path: Path, row: Row) -> Path:
    try:
        image = path.parent / user_path(row.file)
    except UserError as error:
        raise UserError(f"line {row.line} of {path}: {error.cause}", "correct the path, which counts from the CSV's folder") from error
    if is_special(image):
        raise UserError(f"line {row.line} of {path} names {row.file}, which is no plain file", "name an image")
    if not image.is_file():
        raise UserError(
            f"line {row.line} of {path} names {row.file}, and there is no file {image}",
            "correct the path, which counts from the CSV's folder",
        )
    return image
