"""Writing that survives a crash: whole or not at all, and one sentence where the disk says no."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fallow.errors import UserError

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


OTHER_FOLDER = "choose another folder with --out"


@contextmanager
def told(path: Path, remedy: str = OTHER_FOLDER) -> Iterator[None]:
    """Turns the disk's refusals into a sentence."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk is full (writing {path})",
                "free some space, then continue with `fallow resume`; all committed rounds are kept",
            ) from None
        if e.errno in REFUSED:
            raise UserError(f"{path} cannot be written ({e.strerror})", remedy) from None
        raise


def write(path: Path, data: bytes | str, remedy: str = OTHER_FOLDER) -> None:
    """Writes beside, syncs, renames: a reader sees the old file or the new one."""
    data = data.encode() if isinstance(data, str) else data
    part = path.with_name(f".{path.name}.part")
    with told(path, remedy):
        with open(part, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)


def sync(folder: Path) -> None:
    """Makes renames inside a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
