"""`fallow check`: every file of a data set looked at once, and what is wrong told in a sentence each, with what to do."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fallow.config import Config, validate
from fallow.data import sources
from fallow.data.readers import images
from fallow.data.readers.albums import Entry, kinds_of, listed
from fallow.data.readers.images import GREY, Tell, in_threads, silent
from fallow.data.readers.opening import Unreadable, opened, orientation, size_of
from fallow.data.sources import Source
from fallow.errors import UserError
from fallow.paths import open_plain, shown
from fallow.trees import parse_pairs

FEW = 5  # labelled images of a class, and test images, below which it is told
COMPANIONS = frozenset({".txt", ".csv", ".tsv", ".json", ".xml", ".md", ".yaml", ".yml", ".ini", ".db", ".pdf"})  # not images of anything
KEYS = ("layout", "skip_bad", "data_dir")  # of a run, that say what the data is
Problem = tuple[str, str]  # cause, remedy


class Look(NamedTuple):
    """What one file is found to be."""

    size: tuple[int, int]  # height, width, as it is seen
    grey: bool
    turned: bool  # by EXIF's orientation
    content: bytes  # digests: of the file, of its pixels
    pixels: bytes


@dataclass(frozen=True)
class Checked:
    """A data set as it was found: of each image what is said of it (`entries`, `testing`) and what it is (`looks`)."""

    name: str
    classes: tuple[str, ...]
    entries: list[Entry]
    testing: list[bool]
    looks: list[Look | str]  # or why the file cannot be read
    said: tuple[str, ...] = ()
    strange: Sequence[Path] = ()
    outside: Sequence[Path] = ()
    where: Path | None = None
    skip_bad: bool = False

    @cached_property
    def bad(self) -> dict[int, str]:
        return {place: look for place, look in enumerate(self.looks) if isinstance(look, str)}

    @cached_property
    def seen(self) -> dict[int, Look]:
        return {place: look for place, look in enumerate(self.looks) if isinstance(look, Look)}

    @cached_property
    def sites(self) -> list[str]:
        return sorted({entry.site for entry in self.entries if entry.site})

    def count(self, label: int | None = None, site: str | None = None, test: bool = False, unlabelled: bool = False) -> int:
        """Readable images: of a class, of a site, for training or for testing; labelled ones unless said otherwise."""
        return sum(
            self.testing[place] == test and (entry.label < 0) == unlabelled and label in (None, entry.label) and site in (None, entry.site or "")
            for place, entry in enumerate(self.entries) if place in self.seen
        )  # fmt: skip

    def name_of(self, place: int) -> str:
        path = self.entries[place].path
        base = self.where if self.where is None or self.where.is_dir() else self.where.parent
        return shown(path if base is None else os.path.relpath(path, base))

    def named(self, places: Sequence[int], most: int = 3) -> str:
        return listed([self.name_of(place) for place in places], most)

    def problems(self) -> list[Problem]:
        return [*_unreadable(self), *_again(self), *_left_out(self), *_by_case(self), *_few(self)]


def asked(words: Sequence[str]) -> tuple[str, Config]:
    """The data set and the keys of `fallow check photos layout=sites`."""
    words = list(words)
    first = [words.pop(0)] if words and (not words[0].startswith("data=") and ("=" not in words[0] or Path(words[0]).exists())) else []
    keys = parse_pairs(words)
    data = first[0] if first else keys.pop("data", None)
    if not isinstance(data, str) or not data:
        raise UserError("no data set is named", "write for example fallow check photos")
    if strange := sorted(keys.keys() - set(KEYS)):
        raise UserError(f"{strange[0]} is no key of fallow check", f"known are {', '.join(KEYS)}")
    return data, validate(Config, keys)


def plain(name: str) -> str:
    """A data set's name as part of a file's."""
    text = Path(name.partition(":")[2] or name).resolve().name if not name.startswith(("emnist:", "medmnist:")) else name
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text).strip("-.")[-60:] or "data"


def check(name: str, data_dir: str | None = None, layout: str = "auto", skip_bad: bool = False, download: bool = False, tell: Tell = silent) -> Checked:
    """Looks at every image of a data set: of one's own files at the files, else at the pixels."""
    album = sources.album(name, layout)
    if album is None:
        return _of_source(sources.load(name, data_dir, download))
    entries, files = album.train + album.test, album.files
    looks = in_threads(_look, files, tell)
    testing = [False] * len(album.train) + [True] * len(album.test)
    return Checked(sources.in_full(name), album.classes, entries, testing, looks, album.said, album.strange, album.outside, album.where, skip_bad)


def _look(path: Path) -> Look | str:
    try:
        grey, turned, size, pixels = opened(path, _decoded)
    except Unreadable as error:
        return error.why
    content = hashlib.sha256()
    with open_plain(path) as file:
        while part := file.read(1 << 20):
            content.update(part)
    return Look(size, grey, turned, content.digest(), pixels)


def _decoded(image: Any) -> tuple[bool, bool, tuple[int, int], bytes]:
    grey, turned, size = image.mode in GREY, orientation(image), size_of(image)
    with images.room_for(image.width * image.height, f"decoding {image.width}x{image.height} pixels"):
        pixels = images.upright(images.array_of(image, 1 if grey else 3), turned)
        return grey, turned != 1, size, _digest(pixels)


def _digest(pixels: np.ndarray) -> bytes:
    return hashlib.sha256(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).digest()


def _of_source(source: Source) -> Checked:
    entries, looks, testing = [], [], []
    for part, split in (("train", source.train), ("test", source.test)):
        pixels, labels = split.images.numpy(), split.labels.tolist()
        for i, label in enumerate(labels):
            entries.append(Entry(Path(part, str(i)), label, split.clients[i] if split.clients else None))
            digest = _digest(pixels[i])
            looks.append(Look(pixels.shape[2:], pixels.shape[1] == 1, False, digest, digest))
            testing.append(part == "test")
    return Checked(source.name, source.classes, entries, testing, [*looks], source.said)


# -- problems ----------------------------------------------------------------------------------------------------------
def _unreadable(c: Checked) -> Iterator[Problem]:
    if c.bad and not c.skip_bad:
        reasons = defaultdict(list)
        for place in list(c.bad)[:10]:
            reasons[c.bad[place]].append(c.name_of(place))
        told = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        more = f"; and {len(c.bad) - 10:,} more" if len(c.bad) > 10 else ""
        yield f"{len(c.bad):,} of {len(c.entries):,} files cannot be read ({told}{more})", "replace or remove them, or run with --skip-bad"


def _again(c: Checked) -> Iterator[Problem]:
    """The same image more than once: the worst is said of each group, in this order."""
    found: dict[str, list[list[int]]] = defaultdict(list)
    for group in _groups(c):
        kind = next((name for name, (_, _, is_so) in KINDS.items() if is_so(c, group)), "twice")
        found[kind].append(group)
    for kind, (cause, remedy, _) in KINDS.items():
        if groups := found[kind]:
            first = " = ".join(c.name_of(place) for place in groups[0][:3])
            others = sum(len({c.looks[place].content for place in group}) > 1 for group in groups)  # type: ignore[union-attr]
            as_pixels = f", {others:,} of them as other files with the same pixels" if others else ""
            cause = cause if groups[1:] else cause.replace("are ", "is ", 1).replace("have ", "has ", 1)
            yield f"{_count(groups, 'image')} {cause}{as_pixels} ({first}{' is the first' if groups[1:] else ''})", remedy


def _count(found: Sequence[Any], what: str) -> str:
    return f"{len(found):,} {what}" + ("s" if found[1:] else "")


def _groups(c: Checked) -> list[list[int]]:
    """Places of the images that are there more than once, by their pixels."""
    by_pixels: dict[bytes, list[int]] = defaultdict(list)
    for place, look in c.seen.items():
        by_pixels[look.pixels].append(place)
    return [group for group in by_pixels.values() if len(group) > 1]


def _differ(c: Checked, group: list[int], what: Callable[[int], Any]) -> bool:
    return len({what(place) for place in group}) > 1


KINDS: dict[str, tuple[str, str, Callable[[Checked, list[int]], bool]]] = {
    "leak": (
        "are both in the training and in the test set", "remove them from one of the two, or the accuracy is too high",
        lambda c, group: _differ(c, group, lambda place: c.testing[place]),
    ),
    "labels": (
        "have different labels in different places", "keep the right one",
        lambda c, group: len({c.entries[place].label for place in group} - {-1}) > 1,
    ),
    "sites": (
        "are at more than one site", "keep each at one site, unless the sites really share them",
        lambda c, group: _differ(c, group, lambda place: c.entries[place].site),
    ),
    "twice": ("are there more than once", "keep one of each", lambda c, group: True),
}  # fmt: skip


def _left_out(c: Checked) -> Iterator[Problem]:
    unknown = [path for path in c.strange if path.suffix.lower() not in COMPANIONS]
    if unknown and c.where:
        first = shown(os.path.relpath(unknown[0], c.where))
        yield f"{_count(unknown, 'file')} {'are' if unknown[1:] else 'is'} in no format that Fallow reads ({kinds_of(unknown)}; {first} is the first)", "save them as PNG or JPEG, or remove them"
    if c.outside and c.where:
        first = shown(os.path.relpath(c.outside[0], c.where))
        yield f"{_count(c.outside, 'image')} {'lie' if c.outside[1:] else 'lies'} outside of the folders that count ({first} is the first)", "move them into the folder of a class, or into unlabelled"


def _by_case(c: Checked) -> Iterator[Problem]:
    if c.where is None:
        return
    names: dict[str, set[str]] = defaultdict(set)
    for place in range(len(c.entries)):
        parts = Path(c.name_of(place)).parts
        for depth in range(1, len(parts) + 1):
            names[os.path.join(*parts[:depth]).lower()].add(os.path.join(*parts[:depth]))
    groups = [sorted(group) for group in names.values() if len({Path(name).name for name in group}) > 1]
    if groups:
        yield f"{len(groups):,} {'names differ' if groups[1:] else 'name differs'} only by case ({' and '.join(groups[0][:2])}{' are the first' if groups[1:] else ''})", "rename them: on some disks they are one"


def _few(c: Checked) -> Iterator[Problem]:
    for test, what, remedy in ((False, "labelled training images", "label more of them, or leave the class out"), (True, "test images", "move some there, or trust no accuracy of the class")):
        counts = Counter({name: c.count(label, test=test) for label, name in enumerate(c.classes)})
        few = [f"{shown(name)} has {count}" for name, count in counts.items() if count < FEW]
        if few:
            yield f"{len(few):,} of {len(c.classes):,} classes {'have' if few[1:] else 'has'} fewer than {FEW} {what} ({listed(few, 3)})", remedy


# -- tables ------------------------------------------------------------------------------------------------------------
Rows = list[tuple[str, ...]]
BAR, WIDEST, SITES = "█", 30, 6


def by_site(c: Checked) -> Rows:
    """Images of each site: labelled, unlabelled, for testing, and how many classes it has."""
    rows: Rows = [("site", "labelled", "unlabelled", "test", "classes")]
    nobodys = [""] if c.sites and any(not entry.site for entry in c.entries) else []
    sites: list[str | None] = [*c.sites, *nobodys]
    for site in sites or [None]:
        mine = {entry.label for place, entry in enumerate(c.entries) if place in c.seen and site in (None, entry.site or "") and entry.label >= 0}
        counts = [c.count(site=site), c.count(site=site, unlabelled=True), c.count(site=site, test=True)]
        rows.append((shown(site) if site else "all" if site is None else "(none)", *(f"{n:,}" for n in counts), str(len(mine))))
    return rows


def by_class(c: Checked) -> Rows:
    """Labelled and test images of each class, the labelled ones by site too, and as a bar."""
    sites = c.sites if len(c.sites) <= SITES else []
    totals = [c.count(label) for label in range(len(c.classes))]
    rows: Rows = [("class", "labelled", "test", *[f"at {shown(site)}" for site in sites], "")]
    for label, name in enumerate(c.classes):
        bar = BAR * round(WIDEST * totals[label] / max(1, *totals))
        rows.append((shown(name), f"{totals[label]:,}", f"{c.count(label, test=True):,}", *[f"{c.count(label, site):,}" for site in sites], bar))
    return rows


def by_size(c: Checked) -> Rows:
    """Smallest, middle and largest of widths, heights and proportions."""
    sizes = np.array([look.size for look in c.seen.values()], float).reshape(-1, 2)
    rows: Rows = [("size", "min", "median", "max")]
    for name, values in (("width", sizes[:, 1]), ("height", sizes[:, 0]), ("width / height", sizes[:, 1] / np.maximum(sizes[:, 0], 1))):
        if len(values):
            rows.append((name, *(f"{v:,.2f}" if "/" in name else f"{v:,.0f}" for v in (values.min(), np.median(values), values.max()))))
    return rows


def facts(c: Checked) -> list[str]:
    """What is worth knowing and is no problem."""
    grey = sum(look.grey for look in c.seen.values())
    colour = len(c.seen) - grey
    said = [f"channels: {grey:,} grey, {colour:,} colour" + (" (all are read as colour)" if grey and colour else "")]
    if turned := sum(look.turned for look in c.seen.values()):
        said.append(f"turned upright by EXIF: {turned:,}")
    if c.bad and c.skip_bad:
        said.append(f"left out, since they cannot be read: {len(c.bad):,} ({c.named(list(c.bad))})")
    if companions := [path for path in c.strange if path.suffix.lower() in COMPANIONS]:
        said.append(f"other files: {kinds_of(companions)}")
    return said


