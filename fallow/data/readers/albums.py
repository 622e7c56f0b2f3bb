"""One's own image files before any is opened: what each shows, who holds it, whether it is for testing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fallow.data.readers.holdout import held_out
from fallow.data.readers.images import decode
from fallow.data.readers.parts import UNKNOWN, Parts, Split, split
from fallow.paths import shown

NOBODY = ""  # holds an image that is of no site


class Entry(NamedTuple):
    path: Path
    label: int = UNKNOWN
    site: str | None = None  # None: the data has no sites


@dataclass(frozen=True)
class Album:
    where: Path
    classes: tuple[str, ...]
    train: list[Entry]
    test: list[Entry]
    said: tuple[str, ...] = ()  # how the files were understood, for people
    strange: list[Path] = field(default_factory=list)  # files that are no images as far as Fallow knows
    outside: list[Path] = field(default_factory=list)  # images where none are looked for

    @property
    def files(self) -> list[Path]:
        return [entry.path for entry in self.train + self.test]

    def sites(self) -> list[str]:
        return sorted({entry.site for entry in self.train + self.test if entry.site})

    def held_out(self, names: Sequence[str]) -> Album:
        """The album with a fifth of each class as test set, chosen by the names of the training images."""
        testing = held_out(np.array([entry.label for entry in self.train]), names, shown(self.where))
        train = [entry for entry, test in zip(self.train, testing) if not test]
        test = [entry for entry, test in zip(self.train, testing) if test]
        return replace(self, train=train, test=test)

    def decoded(self, size: int | None = None, channels: int | None = None) -> Parts:
        """All files, decoded together so that they agree in size and channels."""
        images, n = decode(self.files, size, channels), len(self.train)
        return Parts(tuple(map(shown, self.classes)), _split(images[:n], self.train), _split(images[n:], self.test))


def _split(images: np.ndarray, entries: list[Entry]) -> Split:
    sites = [shown(entry.site or NOBODY) for entry in entries]
    return split(images, np.array([entry.label for entry in entries], np.int64), sites if any(sites) else None)


def told_strange(strange: Sequence[Path], where: Path) -> list[str]:
    """A sentence about files that are left out, if there are any."""
    if not strange:
        return []
    kinds = Counter(path.suffix.lower() or "without ending" for path in strange).most_common()
    listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds[:5]) + (", ..." if kinds[5:] else "")
    first = shown(strange[0].relative_to(where))
    return [f"{shown(where)}: {len(strange):,} files that are no images Fallow reads are left out ({listed}; {first} is the first)"]


def listed(words: Sequence[str], most: int = 8) -> str:
    """Names with commas between, not more than one reads.

    >>> listed(["cat", "dog"]), listed(list("abcdefghijk"))
    ('cat, dog', 'a, b, c, d, e, f, g, h and 3 more')
    """
    few = ", ".join(shown(word) for word in words[:most])
    return few if len(words) <= most else f"{few} and {len(words) - most:,} more"
