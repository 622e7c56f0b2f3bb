"""One's own image files before any is opened: what each shows, who holds it, whether it is for testing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fallow.data.readers import kept
from fallow.data.readers.common import UNKNOWN, ImageSet, Parts
from fallow.data.readers.holdout import held_out
from fallow.data.readers.images import Decoded, Settings, Surveyed, Tell, decode, silent, unreadable
from fallow.errors import UserError
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

    def decoded(self, size: int, channels: int) -> Parts:
        """All files of an official set, which has none that cannot be read."""
        found = decoded(self, Settings(size, "resize", channels))
        if found.bad:
            told = unreadable(self.files, found.bad)
            raise UserError(told.cause, "delete the set and fetch it again")
        return self.parts(torch.from_numpy(found.images))

    def parts(self, images: torch.Tensor, without: Collection[int] = ()) -> Parts:
        """Images in the order of the files, those at some places left out, with all that is known of each."""
        train = [entry for place, entry in enumerate(self.train) if place not in without]
        test = [entry for place, entry in enumerate(self.test, len(self.train)) if place not in without]
        n = len(train)
        return Parts(tuple(map(shown, self.classes)), _split(images[:n], train), _split(images[n:], test))


def decoded(album: Album, settings: Settings, surveyed: Surveyed | None = None, tell: Tell = silent) -> Decoded:
    """The album's images as a run before has kept them, else from its files."""
    files = album.files
    key = kept.key_of(files, settings)
    found = kept.find(key, len(files))
    if found is None:
        found = decode(files, settings, surveyed, tell)
        kept.keep(key, found, str(album.where))
    return found


def _split(images: torch.Tensor, entries: list[Entry]) -> ImageSet:
    sites = tuple(shown(entry.site or NOBODY) for entry in entries)
    labels = torch.tensor([entry.label for entry in entries], dtype=torch.int64)
    return ImageSet(images, labels, sites if any(sites) else None)


def told_bad(album: Album, bad: Mapping[int, str]) -> str:
    """A sentence about the files that a run goes on without."""
    files = album.files
    names = [shown(os.path.relpath(files[place], album.where if album.where.is_dir() else album.where.parent)) for place in bad]
    return f"{shown(album.where)}: {len(bad):,} of {len(files):,} files cannot be read and are left out ({listed(names, 3)})"


def told_strange(strange: Sequence[Path], where: Path) -> list[str]:
    """A sentence about files that are left out, if there are any."""
    if not strange:
        return []
    first = shown(strange[0].relative_to(where))
    return [f"{shown(where)}: {len(strange):,} files that are no images Fallow reads are left out ({kinds_of(strange)}; {first} is the first)"]


def kinds_of(files: Sequence[Path]) -> str:
    """How many files have which ending."""
    kinds = Counter(path.suffix.lower() or "without ending" for path in files).most_common()
    return ", ".join(f"{count:,} {shown(kind)}" for kind, count in kinds[:5]) + (", ..." if kinds[5:] else "")


def listed(words: Sequence[str], most: int = 8) -> str:
    """Names with commas between, not more than one reads.

    >>> listed(["cat", "dog"]), listed(list("abcdefghijk"))
    ('cat, dog', 'a, b, c, d, e, f, g, h and 3 more')
    """
    few = ", ".join(shown(word) for word in words[:most])
    return few if len(words) <= most else f"{few} and {len(words) - most:,} more"
