"""What a method keeps outside of a run, in its class or its module: it lasts into the next run of this process, and into no resumed one."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import numpy as np
from torch import Tensor

from fallow.methods.base import AnyMethod

KINDS = (dict, list, set, deque, bytearray, np.ndarray, Tensor, int, float, str, tuple, frozenset, type(None))
Kept = dict[str, tuple[Any, ...]]  # by name: a value, and what it is made of; held, so that no other takes its identity


def kept(method: AnyMethod) -> Kept:
    """What is there now, of the user's own classes and the files that they stand in."""
    found: Kept = {}
    for owner in type(method).__mro__:
        if owner.__module__.partition(".")[0] not in ("fallow", "builtins", "typing"):
            found |= _of(f"{owner.__name__}.", vars(owner))
            module = sys.modules.get(owner.__module__)
            found |= _of("", vars(module)) if module is not None and owner.__module__ != "__main__" else {}
    return found


def changed(before: Kept, after: Kept) -> list[str]:
    """The names of what is no longer what it was."""
    return sorted(name for name, parts in after.items() if not _same(before.get(name, ()), parts))


def _of(prefix: str, names: Any) -> Kept:
    return {prefix + name: (value, *_parts(value)) for name, value in names.items() if name[:2] != "__" and type(value) in KINDS}


def _parts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return (*value, *value.values())
    if isinstance(value, list | set | deque):
        return tuple(value)
    return (bytes(value),) if isinstance(value, bytearray) else (value._version,) if isinstance(value, Tensor) else ()


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b or (type(a) is type(b) and isinstance(a, int | str | bytes) and a == b) for a, b in zip(one, other))
