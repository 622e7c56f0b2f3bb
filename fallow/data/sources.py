"""A name -> images and labels: the official sets under data_dir, the user's own files, and torch Datasets."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fallow.data.official import OFFICIAL, official, official_names
from fallow.data.readers import dataset, digits, kept, layouts, npz, table
from fallow.data.readers.albums import Album, decoded, told_bad
from fallow.data.readers.common import ImageSet
from fallow.data.readers.images import FITS, Decoded, Settings, Tell, silent, survey, unreadable
from fallow.data.sizes import fitted
from fallow.errors import UserError
from fallow.limits import memory_told
from fallow.paths import shown, user_path

__all__ = ["ImageSet", "Listed", "Source", "default_data_dir", "fit", "from_dataset", "load", "names", "register"]


@dataclass(frozen=True, eq=False)
class Source:
    """A data set in memory."""

    name: str
    classes: tuple[str, ...]  # class names in label order
    train: ImageSet  # images without a label have the label -1
    test: ImageSet
    flip: bool  # False where a mirror image may be of another class: digits, letters, left and right organs
    decoded: tuple[int, ...] | None = None  # channels, height and width as read, where `fit` has changed them
    said: tuple[str, ...] = ()  # how one's own files were understood, for people
    skipped: int = 0  # files that cannot be read and were left out
    later: Callable[[Tell], Source] | None = None  # reads the images, which are on the device `meta` until then

    def whole(self, tell: Tell = silent) -> Source:
        """The source with its images; one's own files are only surveyed before, so that settings are checked first."""
        return self if self.later is None else self.later(tell)

    def __repr__(self) -> str:
        return f"Source({self.name!r}, {len(self.classes)} classes, train={self.train}, test={self.test})"

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def size(self) -> int:
        """The height, which is also the width in every official set."""
        return self.train.images.shape[2]


@dataclass(frozen=True)
class Listed:
    """A line of `fallow list datasets`; of the user's own data only the name's form is known."""

    name: str
    what: str
    where: str  # what is looked for under data_dir
    classes: int | None = None
    size: int | None = None
    channels: int | None = None
    present: bool | None = None  # None: the user's own


_OWN = {
    "folder": "your images, one folder per class, or per site with one per class in it",
    "csv": "your images, listed with label, client and split",
    "numpy": "your arrays in an .npz file",
}
_registered: dict[str, Callable[[], Source]] = {}


def load(
    name: str | Source, data_dir: str | Path | None = None, download: bool = False, *, size: int | None = None, fit: str = "resize",
    channels: int | None = None, layout: str = "auto", skip_bad: bool = False, tell: Tell = silent,
) -> Source:  # fmt: skip
    """The data set of that name; a Source is returned as it is.

    For one's own image files: `size` is the size to which all are brought, by default the most common one, `fit` how (resize,
    crop, pad), `layout` whether folders are `classes`, or `sites` with a folder per class in each; `skip_bad` leaves files out
    that cannot be read, and `tell` is called with how many are decoded.
    """
    return opened(name, data_dir, download, size=size, fit=fit, channels=channels, layout=layout, skip_bad=skip_bad).whole(tell)


def opened(
    name: str | Source, data_dir: str | Path | None = None, download: bool = False, *, size: int | None = None, fit: str = "resize",
    channels: int | None = None, layout: str = "auto", skip_bad: bool = False,
) -> Source:  # fmt: skip
    """The same, but that of one's own image files only the headers are read: `whole()` then reads the images."""
    if isinstance(name, Source):
        return name
    name = in_full(name)
    kind, colon, rest = name.partition(":")
    with _read_errors_as_user_errors(), memory_told(f"the data set {name}"):
        if name in _registered:
            return _registered[name]()
        if name == "digits":
            return Source(name, *digits.read(), flip=False)
        if kind in _OWN and colon:
            if not rest:
                raise UserError(f"{name!r} names no path", f"write {kind}:PATH")
            settings = Settings(size, fit if size or fit == "crop" else "resize", channels)
            return _own(name, user_path(rest), settings, layout, skip_bad)
        known = official(name)
        if known is None:
            raise _unknown(name)
        return Source(name, *known.read(name, _home(data_dir), download), flip=known.flip)


def in_full(name: str) -> str:
    """`folder:photos` for `photos`, where that is a folder and no known set; likewise a .csv and an .npz."""
    kind = name.partition(":")[0]
    if kind in (*_OWN, *OFFICIAL, *_registered, "digits", "emnist", "medmnist") or name in _registered or not name or "\0" in name:
        return name
    path = user_path(name)
    if path.is_dir():
        return f"folder:{name}"
    kinds = {".csv": "csv", ".npz": "numpy"}
    return f"{kinds[path.suffix.lower()]}:{name}" if path.suffix.lower() in kinds and path.is_file() else name


def _own(name: str, path: Path, settings: Settings, layout: str, skip_bad: bool) -> Source:
    if name.startswith("numpy:"):
        return Source(name, *npz.read(path), flip=True)
    album = _album(name, path, layout)

    def finished(found: Decoded) -> Source:
        if found.bad and not skip_bad:
            raise unreadable(album.files, found.bad)
        said = (*album.said, told_bad(album, found.bad)) if found.bad else album.said
        return _checked(Source(name, *album.parts(torch.from_numpy(found.images), found.bad), flip=True, said=said, skipped=len(found.bad)))

    def later(tell: Tell) -> Source:
        with _read_errors_as_user_errors(), memory_told(f"the data set {name}"):
            return finished(decoded(album, settings, surveyed, tell))

    found = kept.find(kept.key_of(album.files, settings), len(album.files))
    if found is not None:
        return finished(found)
    surveyed = survey(album.files, settings)
    without = surveyed.bad if skip_bad else {}
    blank = torch.empty(len(album.files) - len(without), surveyed.channels, *surveyed.shape, dtype=torch.uint8, device="meta")
    return _checked(Source(name, *album.parts(blank, without), flip=True, said=album.said, later=later))


def _album(name: str, path: Path, layout: str) -> Album:
    return layouts.read(path, layout) if name.startswith("folder:") else table.read(path)


def album(name: str, layout: str = "auto") -> Album | None:
    """One's own image files before any is opened; None for other data."""
    name = in_full(name)
    kind, _, path = name.partition(":")
    if kind not in ("folder", "csv") or not path:
        return None
    with _read_errors_as_user_errors():
        return _album(name, user_path(path), layout)


def _checked(source: Source) -> Source:
    """The source, if something is left of it."""
    if not len(source.test) or not bool((source.train.labels >= 0).any()):
        what = "test image" if not len(source.test) else "labelled training image"
        raise UserError(f"no {what} of {source.name} can be read", "replace the files that `fallow check` names")
    return source


def names(data_dir: str | Path | None = None) -> list[Listed]:
    """Every name that `load` knows, and whether its files are there."""
    home = _home(data_dir)
    rows = [Listed("digits", "handwritten digits, part of scikit-learn", "embedded", 10, 8, 1, True)]
    for name in official_names():
        known = official(name)
        assert known is not None
        shape = known.classes, known.size, known.channels
        rows.append(Listed(name, known.what, " or ".join(known.looked_for()), *shape, known.present(home)))
    rows += [Listed(name, "registered from Python", "memory", present=True) for name in _registered]
    return rows + [Listed(f"{kind}:PATH", what, "PATH") for kind, what in _OWN.items()]


def register(name: str, source: Source | Callable[[], Source]) -> None:
    """Makes a source, or a function that makes it, known to `load` under a name of its own."""
    if name == "digits" or name in official_names() or name.partition(":")[0] in _OWN:
        raise UserError(f"the name {name!r} is taken by a built-in data set", "register it under another one")
    _registered[name] = (lambda: source) if isinstance(source, Source) else source


def from_dataset(
    train: Any,
    test: Any,
    name: str = "dataset",
    *,
    classes: Sequence[str] | None = None,
    clients: Sequence[Any] | None = None,
    flip: bool = True,
) -> Source:
    """A source of two torch Datasets whose items are (image, label); the label None or -1 means unknown.

    An image is a Pillow image, a tensor [C, H, W] or an array [H, W, C]: bytes, or real numbers from 0 to 1.
    `clients` says which client holds each training item.
    """
    return Source(name, *dataset.read(train, test, classes, clients), flip=flip)


def fit(
    source: Source, size: int | None = None, fit: Literal["pad", "resize", "crop"] = "pad", channels: int | None = None
) -> Source:
    """The source with images of another size (zeros around them, or Pillow's bilinear resize, of the centre with `crop`) or channel count."""
    if fit not in FITS:
        raise UserError(f"image.fit is {fit!r}", "choose pad, resize or crop")
    if channels not in (None, 1, 3):
        raise UserError(f"image.channels is {channels}", "choose 1 or 3")
    if size is not None and size < 1:
        raise UserError(f"image.size is {size}", "choose a size of at least 1")

    def part(split: ImageSet) -> ImageSet:
        return replace(split, images=fitted(split.images, size, fit, channels, source.name))

    decoded = source.decoded or tuple(source.train.images.shape[1:])
    return replace(source, train=part(source.train), test=part(source.test), decoded=decoded)


def default_data_dir() -> Path:
    return user_path(os.environ.get("FALLOW_DATA") or "~/.cache/fallow")


def _home(data_dir: str | Path | None) -> Path:
    return default_data_dir() if data_dir is None else user_path(data_dir)


@contextmanager
def _read_errors_as_user_errors() -> Iterator[None]:
    """What the machine refuses to read, as a sentence."""
    try:
        yield
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read: permission denied", "change its permissions") from error
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror or error})", "check the disk") from error


def _unknown(name: str) -> UserError:
    """Neither a set nor a path: the nearest names of either are told."""
    known = ["digits", *official_names(), *(f"{kind}:PATH" for kind in _OWN), *_registered]
    path = user_path(name)
    with suppress(OSError):
        beside = [p for p in path.parent.iterdir() if p.is_dir() or p.suffix.lower() in (".csv", ".npz")]
        if near := difflib.get_close_matches(path.name, [p.name for p in beside], n=1, cutoff=0.6):
            found = path.with_name(near[0])
            sets = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            place = f"the {'folder' if found.is_dir() else 'file'} {shown(found)!r}"
            return UserError(f"there is no data set, folder or file {name!r}", f"did you mean {place}{f', or the set {sets[0]!r}' if sets else ''}?")
    if path.is_file():
        return UserError(f"{name} is a file of no kind that holds a data set", "give a folder of images, a .csv or an .npz")
    if "/" in name or path.suffix:
        return UserError(f"there is no folder or file {name!r}", "check the path; known sets are listed by `fallow list datasets`")
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return UserError(f"there is no data set {name!r}", f"did you mean {near[0]!r}?")
    return UserError(f"there is no data set, folder or file {name!r}", "give the path of your images, or one of the sets that `fallow list datasets` shows")
