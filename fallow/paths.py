"""Paths that a user gives, and files that are what they seem: text to a path, a path to words, a path to an open file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

from fallow.errors import UserError

LONGEST, LONGEST_NAME = 4095, 255  # bytes, on every common file system


def user_path(text: str | os.PathLike[str]) -> Path:
    """The path that a user means, `~` his home; or one sentence why it is none."""
    text = os.fspath(text)
    if not text:
        raise UserError("an empty text is no path", "give the path of a file or a folder")
    if "\0" in text:
        raise UserError(f"{shown(text)!r} is no path: it holds a NUL byte", "give the path of a file or a folder")
    try:
        path = Path(text).expanduser() if text.startswith("~") else Path(text)  # Path("./~x") forgets its ./
        raw = os.fsencode(path)
    except RuntimeError:
        raise UserError(f"{shown(text)} begins with the home of a user who is not known", "write the path in full, or ./~ for that name") from None
    except UnicodeEncodeError:
        raise UserError(f"{shown(text)} is no path: it holds characters that no file name has", "give the path of a file or a folder") from None
    if len(raw) > LONGEST or any(len(part) > LONGEST_NAME for part in raw.split(b"/")):
        raise UserError(f"{shown(text)[:60]}… is too long for a path", "give the path of a file or a folder")
    return path


def shown(path: str | os.PathLike[str]) -> str:
    """A name for people and for files in UTF-8: bytes that are no UTF-8 as \\udcXX.

    >>> shown("caf\\udce9.png")
    'caf\\\\udce9.png'
    """
    return os.fspath(path).encode("utf-8", "backslashreplace").decode("utf-8")


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether it is a pipe, a socket or a device, which to open may wait for ever."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def open_plain(path: str | os.PathLike[str]) -> IO[bytes]:
    """The file, open for reading; what is no plain file is refused and never waited for."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, os.strerror(code) if stat.S_ISDIR(mode) else "not a plain file", os.fspath(path))
    return open(path, "rb")
