"""Writing that survives a crash: whole or not at all, and one sentence where the disk says no."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fallow.errors import UserError

DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


OTHER_FOLDER = "choose another folder with --out"


@contextmanager
def told(path: Path, remedy: str = OTHER_FOLDER) -> Iterator[None]:
    """Turns the disk's refusals into a sentence."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            resume = "then continue with `fallow resume`; all committed rounds are kept"
            again = resume if remedy == OTHER_FOLDER else "then give the command again"
            raise UserError(f"the disk is full (writing {path})", f"free some space, {again}") from None
        if e.errno in REFUSED:
            missing = remedy.partition("make its folder first, or ")[2]  # no remedy for a folder that is there
            what = missing if missing and e.errno in DENIED else remedy
            raise UserError(f"{path} cannot be written ({e.strerror})", what) from None
        raise


def write(path: Path, data: bytes | str, remedy: str = OTHER_FOLDER) -> None:
    """Writes beside, syncs, renames: a reader sees the old file or the new one."""
    data = data.encode() if isinstance(data, str) else data
    part = beside(path)
    with told(path, remedy):
        try:
            with open(part, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(part, path)
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise


def beside(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    if not path.name:
        raise UserError(f"{str(path)!r} is no name for a file", "give one")
    return path.with_name(f".{path.name}.part")


def sync(folder: Path) -> None:
    """Makes renames inside a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
