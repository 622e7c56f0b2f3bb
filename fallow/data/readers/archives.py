"""Unpacks an official archive beside itself: all of it or nothing, and never outside its folder."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from fallow.data.readers.common import damaged
from fallow.errors import UserError
from fallow.limits import amount, check_disk
from fallow.paths import LONGEST

BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)
EXPANDED, SPARE, ENTRIES = 100, 100 << 20, 2_000_000  # bytes out of one packed, bytes in any case, files: official sets stay far below


def unpack(archive: Path, folder: Path) -> Path:
    """The archive's content as `folder`, whether or not the archive itself begins with a folder of that name."""
    with _scratch(archive, folder) as scratch:
        try:
            most, total = EXPANDED * archive.stat().st_size + SPARE, 0
            for count, (name, content, size) in enumerate(_files(archive)):
                total += size
                if total > most or count >= ENTRIES:
                    raise damaged(archive, f"it would unpack to {amount(total)} and more, or to millions of files")
                check_disk(size, scratch, f"unpacking {name} of {archive}")
                _write(_inside(scratch, name, archive), content)
        except BROKEN as error:
            raise damaged(archive, f"it cannot be unpacked ({error})") from error
        root = scratch / folder.name
        try:
            os.rename(root if root.is_dir() else scratch, folder)
        except OSError:
            # another process that unpacked the same archive came first; what it left is as good
            if not folder.is_dir():
                raise
    return folder


@contextmanager
def _scratch(archive: Path, folder: Path) -> Iterator[Path]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UserError(
            f"{archive} cannot be unpacked into {folder.parent} ({error.strerror})",
            "make that folder writable, or unpack the archive yourself",
        ) from error
    try:
        scratch.chmod(0o755)  # mkdtemp makes a private folder, a data set may be shared
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _files(archive: Path) -> Iterator[tuple[str, IO[bytes], int]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                if not info.is_dir():
                    with opened.open(info) as content:
                        yield info.filename, content, info.file_size
    else:
        with tarfile.open(archive) as packed:
            for member in packed:
                content_of_file = packed.extractfile(member) if member.isreg() else None  # links are not followed
                if content_of_file is not None:
                    yield member.name, content_of_file, member.size


def _inside(root: Path, name: str, archive: Path) -> Path:
    if "\0" in name or len(name.encode("utf-8", "surrogateescape")) > LONGEST:
        raise damaged(archive, "it has an entry whose name is no path")
    parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part != "."]
    if not parts or ".." in parts or parts[0].startswith("/") or ":" in parts[0]:
        raise damaged(archive, f"its entry {name!r} points outside it")
    return root.joinpath(*parts)


def _write(target: Path, content: IO[bytes]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out:
        shutil.copyfileobj(content, out, 1 << 20)
