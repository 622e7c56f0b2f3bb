"""What this machine can hold, asked before memory or disk is taken, and what is too much of anything."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from numbers import Integral
from pathlib import Path
from typing import Any

from fallow.errors import UserError

CLASSES = 100_000  # no model here has more outputs
CGROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes of memory that this process may still take: of the machine, its container and its own limit."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with suppress(OSError, ValueError):
        found.append(int((CGROUP / "memory.max").read_text()) - _held_in_container())
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        found.append(limit - _held())
    return max(0, min(found))


def _held_in_container() -> int:
    """Without files' pages, which the kernel gives back when asked."""
    stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    return int((CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))


def _held() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def check_room(wanted: int, doing: str, remedy: str = "use less data, smaller images, or a machine with more memory") -> None:
    """Ends with a sentence where so many bytes of memory are not to be had."""
    if wanted > 1 << 20 and wanted > (free := available()):
        raise UserError(f"{doing} takes {amount(wanted)} of memory, and {amount(free)} are free", remedy)


def check_disk(wanted: int, folder: Path, doing: str) -> None:
    """Ends with a sentence where the folder's disk has not so many bytes left."""
    if wanted > (free := shutil.disk_usage(folder).free):
        raise UserError(f"{doing} takes {amount(wanted)} of disk, and {amount(free)} are free", "free some space, or choose another folder")


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether it is a whole number, Python's or numpy's, of at least this.

    >>> [is_whole(v, 1) for v in (2, 0, 2.0, True, "2", None)]
    [True, False, False, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


@contextmanager
def memory_told(doing: str) -> Iterator[None]:
    """Turns memory that is not to be had into a sentence, numpy's and torch's word for it as well."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise UserError(f"the memory does not suffice for {doing}", "use less data, smaller images, or a machine with more memory") from error


def amount(count: int) -> str:
    """Bytes for people.

    >>> amount(58 * 2**40), amount(3 * 2**30 // 2), amount(2**20)
    ('59,392.0 GiB', '1.5 GiB', '1.0 MiB')
    """
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
