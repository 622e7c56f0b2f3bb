"""A test set for data that comes without one: a fifth of each class, the same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from fallow.data.readers.common import UNKNOWN
from fallow.errors import UserError

SHARE = 0.2


def held_out(labels: np.ndarray, keys: Sequence[str], where: str) -> np.ndarray:
    """True for a fifth of each class (one of two samples at least), chosen by a hash of the samples' names."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels[labels != UNKNOWN]):
        members = sorted(
            np.flatnonzero(labels == label).tolist(), key=lambda i: hashlib.blake2b(keys[i].encode("utf-8", "backslashreplace")).digest()
        )
        count = max(round(SHARE * len(members)), 1) if len(members) > 1 else 0
        chosen[members[:count]] = True
    if not chosen.any():
        raise UserError(f"{where} has no test set and too few labels to take one from", "add labelled test images")
    return chosen


def in_order(labels: set[str]) -> tuple[str, ...]:
    """Class names in label order: by number if all are numbers, else by name."""
    if all(label.isascii() and label.isdigit() for label in labels):
        return tuple(sorted(labels, key=_by_number))
    return tuple(sorted(labels))


def _by_number(label: str) -> tuple[int, str, str]:
    """The order of the numbers, of however many digits."""
    digits = label.lstrip("0")
    return len(digits), digits, label
