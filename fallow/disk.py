"""Writing that survives a crash: whole or not at all, and one sentence where the disk says no."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import stat
from collections.abc import Container, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fallow.errors import UserError
from fallow.limits import check_room

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
OTHER_FOLDER = "choose another folder with --out"


class Taken(UserError, FileExistsError):
    """Something is there already."""


@contextmanager
def errors_as_user_errors(path: Path, remedy: str = OTHER_FOLDER) -> Iterator[None]:
    """Turns the disk's refusals into a sentence, which names a folder that is missing; who can say more of what is there already
    catches FileExistsError."""
    try:
        yield
    except FileExistsError:
        raise Taken(f"{path} cannot be written (something else is there)", remedy) from None
    except OSError as e:
        again = "then continue with `fallow resume`; all committed rounds are kept" if remedy == OTHER_FOLDER else "then give the command again"
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk is full (writing {path})", f"free some space, {again}") from None
        cause = f"{path} cannot be written ({_reason(e)})"
        if e.errno not in REFUSED:
            raise UserError(cause, f"check the disk, or the network that it is on, {again}") from None
        first = "make its folder first, or " if remedy != OTHER_FOLDER and not path.parent.exists() else ""
        raise UserError(cause, first + remedy) from None


def read(path: Path, remedy: str = "restore it from a copy") -> bytes:
    """A file's bytes, or a sentence; a pipe or a device that took its place is not waited for, what is larger than the memory not read."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise UserError(f"{path} is not a file", remedy)
        check_room(about.st_size, f"reading {path}", remedy)
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is missing", remedy) from None
    except OSError as e:
        raise UserError(f"{path} cannot be read ({_reason(e)})", remedy) from None


def remove(path: Path) -> None:
    """What lies there is gone: a file, a folder, or a pipe in their place, which to open would wait for ever."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def clean(folder: Path, ours: re.Pattern[str], stay: Container[str] = ()) -> None:
    """Removes what is called as only this program would call it and is not to stay."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        if ours.fullmatch(name) and name not in stay:
            remove(folder / name)


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def write(path: Path, data: bytes | str, remedy: str = OTHER_FOLDER) -> None:
    """Writes beside, syncs, renames: a reader sees the old file or the new one."""
    data = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    with errors_as_user_errors(path, remedy), replacing(path) as f:
        f.write(data)


@contextmanager
def beside() -> Iterator[Executor]:
    """A thread for what can be done while the disk is busy."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


def write_noting(path: Path, data: bytes, thread: Executor) -> str:
    """Writes, and gives the SHA-256, which the thread computes meanwhile."""
    digest = thread.submit(sha256, data)
    write(path, data)
    return digest.result()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when it is whole, and is gone if it does not become so."""
    with _beside(path) as part:
        try:
            with open(part, "wb") as f:
                yield f
                f.flush()
                os.fsync(f.fileno())
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Where a file is written before it takes its name: nobody else writes there meanwhile, a dead one's rest is taken over."""
    if not path.name:
        raise UserError(f"{str(path)!r} is no name for a file", "give one")
    for number in itertools.count(1):
        part = path.with_name(f".{path.name}.part" if number == 1 else f".{path.name}.{number}.part")
        with opened(part) as held:
            if alone(held, part):
                yield part
                return


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a file, which is made if it is not there and left as it is if it is; no link is followed, no pipe waited for."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", os.fspath(path))
        yield descriptor
    finally:
        os.close(descriptor)


def alone(descriptor: int, path: Path, wait: bool = False) -> bool:
    """Whether this process alone now holds the file at a path; the lock of a dead process is no lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:  # the one who had it renamed or removed it in between
        return False


@contextmanager
def only_one(path: Path, wait: bool = False) -> Iterator[bool]:
    """Whether this process is the only one that works on a path, for as long as the block lasts."""
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with opened(lock) as held:
            if alone(held, lock, wait):
                try:
                    yield True
                finally:
                    lock.unlink(missing_ok=True)
                return
            if not wait:
                yield False
                return


def sync(path: Path) -> None:
    """Makes what was written to a file last, or renames inside a folder."""
    with errors_as_user_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
