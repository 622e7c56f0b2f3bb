"""What travels, sealed: its parts as text and plain arrays, which can be handed on without being opened. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np


@dataclass(frozen=True)
class Parcel:
    """A tree as it travels (messages.py packs and unpacks it)."""

    head: str  # JSON: the tree's shape, and where in its array each tensor lies
    arrays: dict[str, np.ndarray]  # by torch's name of the type; bfloat16, which numpy has not, as int16
    about: str = ""  # JSON: what run this is of, the same in all of its orders

    @property
    def nbytes(self) -> int:
        return len(self.head.encode()) + len(self.about.encode()) + sum(a.nbytes for a in self.arrays.values())


def hand_over(line: Connection, parcel: Parcel | None) -> None:
    """To another process of this machine: text and bytes, never a pickle."""
    if parcel is None:
        return line.send_bytes(b"")
    forms = {kind: [array.dtype.str, list(array.shape)] for kind, array in parcel.arrays.items()}
    line.send_bytes(json.dumps([parcel.head, parcel.about, forms]).encode())
    for array in parcel.arrays.values():
        line.send_bytes(array.tobytes())


def take(line: Connection) -> Parcel | None:
    if not (told := line.recv_bytes()):
        return None
    head, about, forms = json.loads(told)
    arrays = {kind: np.frombuffer(line.recv_bytes(), dtype).reshape(shape) for kind, (dtype, shape) in forms.items()}
    return Parcel(head, arrays, about)
