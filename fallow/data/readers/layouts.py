"""How a folder of one's own images lies: PATH/CLASS, PATH/SITE/CLASS, with train and test above or below the sites."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fallow.data.readers.albums import NOBODY, Album, Entry, listed, told_strange
from fallow.data.readers.folders import UNLABELLED, files_below, filled, plain_files, subfolders
from fallow.data.readers.holdout import in_order
from fallow.data.readers.images import is_image
from fallow.errors import UserError
from fallow.paths import is_special, shown

TRAIN, TEST = "train", "test"
RESERVED = (*UNLABELLED, TRAIN, TEST)
DATED = re.compile(r"(19|20)\d\d([-_. ]?[01]\d)?([-_. ]?[0-3]\d)?")  # folders of a camera, not classes
Folders = dict[str, Path]


@dataclass(frozen=True)
class Half:
    """Folders of images by class, and those of images without a label."""

    classes: Folders
    unlabelled: tuple[Path, ...] = ()


NOTHING = Half({})


@dataclass(frozen=True)
class Holder:
    """A site, or all of the data where there are none (its name is None)."""

    name: str | None
    train: Half
    test: Half


@dataclass(frozen=True)
class Reading:
    """What the folders below a folder are, and what to say of it."""

    sites: bool
    note: str = ""


def read(folder: Path, layout: str = "auto") -> Album:
    """PATH/CLASS/ or PATH/SITE/CLASS/, with `unlabelled` beside the classes; `train` and `test` above the sites or within."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "give the path of a folder that has one folder per class")
    inside = subfolders(folder)
    if {TRAIN, TEST} <= inside.keys():
        inner = subfolders(inside[TRAIN])
        reading = understood(inside[TRAIN], {name: path for name, path in inner.items() if name not in UNLABELLED}, layout)
        holders = _halved_sites(folder, inside, inner) if reading.sites else [_checked(folder, _halved(None, inside))]
    else:
        _check_lonely_train(folder, inside)
        tops = _named(inside)
        reading = understood(folder, tops, layout)
        holders = _sites(folder, inside, tops) if reading.sites else [_whole(None, inside)]
    album = _album(folder, holders)
    if not album.test:
        album = album.held_out([entry.path.relative_to(folder).as_posix() for entry in album.train])
    album = _with_left_out(album)
    return replace(album, said=tuple(_said(album, reading)))


# -- sites or classes --------------------------------------------------------------------------------------------------
def understood(where: Path, tops: Folders, layout: str) -> Reading:
    """Whether the folders there are sites or classes, by what is in them."""
    if layout != "auto":
        return Reading(layout == "sites")
    below = {name: _with_images(path) for name, path in tops.items()}
    loose = [name for name, path in tops.items() if _loose(path)]
    counted = Counter(sub for subs in below.values() for sub in subs if sub not in RESERVED)
    shared = {name for name, count in counted.items() if count > 1}
    if not any(below.values()):
        return Reading(False)
    if any(sub in RESERVED for subs in below.values() for sub in subs):
        if loose:
            raise _unclear(where, tops, counted)
        return Reading(True)
    if loose or not shared or len(counted) == 1:
        if (loose and len(shared) > 1) or (len(tops) == 1 and len(counted) > 1 and not loose):
            raise _unclear(where, tops, counted)
        return Reading(False, "folders within them count as theirs, layout=sites takes them for classes of sites")
    if len(shared) < 2 or all(DATED.fullmatch(name) for name in shared) or not all(shared & subs.keys() for subs in below.values()):
        raise _unclear(where, tops, counted)
    return Reading(True, "layout=classes takes the sites for classes")


def _with_images(folder: Path) -> Folders:
    """The folders in a folder that hold images, at any depth, or that have a name with a meaning."""
    return {name: path for name, path in subfolders(folder).items() if name in RESERVED or any(map(is_image, files_below(path)))}


def _unclear(where: Path, tops: Folders, below: Counter[str]) -> UserError:
    outer, inner = listed(sorted(tops), 3), listed(sorted(below), 3) if below else "what is in them"
    only = next(iter(tops.values()))
    return UserError(
        f"{shown(where)} can be read in two ways: {outer} as classes, or as sites with the classes {inner}",
        "say layout=classes or layout=sites" + (f", or give the folder {shown(only)} if the sites lie in there" if len(tops) == 1 else ""),
    )


# -- the forms ---------------------------------------------------------------------------------------------------------
def _halved(name: str | None, inside: Folders) -> Holder:
    """FOLDER/train/CLASS, FOLDER/test/CLASS; images without a label in FOLDER/unlabelled or FOLDER/train/unlabelled."""
    train = _half(inside[TRAIN])
    return Holder(name, replace(train, unlabelled=(*_unlabelled(inside), *train.unlabelled)), _test(inside))


def _whole(name: str | None, inside: Folders) -> Holder:
    """FOLDER/CLASS, perhaps with FOLDER/test/CLASS beside; images without a label in FOLDER/unlabelled."""
    return Holder(name, Half(_named(inside), _unlabelled(inside)), _test(inside))


def _sites(folder: Path, inside: Folders, tops: Folders) -> list[Holder]:
    """FOLDER/SITE/..., perhaps with FOLDER/test/CLASS for all of them and FOLDER/unlabelled of nobody."""
    if not tops:
        raise UserError(f"{folder} holds no folders of sites", "make one folder per site, with one folder of images per class in it")
    holders = [_site(name, path) for name, path in sorted(tops.items())]
    return [*holders, Holder(NOBODY, Half({}, _unlabelled(inside)), _test(inside))]


def _site(name: str, folder: Path) -> Holder:
    _check_loose(folder)
    inside = subfolders(folder)
    if TRAIN not in inside:
        return _whole(name, inside)
    if beside := sorted(inside.keys() - set(RESERVED)):
        raise UserError(f"{inside[beside[0]]} lies beside {inside[TRAIN]}", "move it into train, or out of the site")
    return _halved(name, inside)


def _halved_sites(folder: Path, inside: Folders, train: Folders) -> list[Holder]:
    """FOLDER/train/SITE/CLASS, and FOLDER/test/SITE/CLASS or FOLDER/test/CLASS."""
    names = sorted(train.keys() - set(UNLABELLED))
    test = subfolders(inside[TEST])
    per_site = bool(test) and test.keys() <= set(names)
    holders = []
    for name in names:
        _check_loose(train[name])
        own = _half(test[name]) if per_site and name in test else NOTHING
        holders.append(Holder(name, _half(train[name]), own))
    rest = (*_unlabelled(inside), *_unlabelled(train))
    return [*holders, Holder(NOBODY, Half({}, rest), NOTHING if per_site else _half(inside[TEST]))]


def _half(folder: Path) -> Half:
    inside = subfolders(folder)
    return Half({name: path for name, path in inside.items() if name not in UNLABELLED}, _unlabelled(inside))


def _test(inside: Folders) -> Half:
    return _half(inside[TEST]) if TEST in inside and TEST not in _named(inside) else NOTHING


def _named(inside: Folders) -> Folders:
    """The folders without those whose names have a meaning; a class may be called train or test, and then holds images itself."""
    return {name: path for name, path in inside.items() if name not in RESERVED or (name in (TRAIN, TEST) and _loose(path))}


def _loose(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if is_image(name))


def _unlabelled(inside: Folders) -> tuple[Path, ...]:
    return tuple(inside[name] for name in UNLABELLED if name in inside)


def _checked(folder: Path, holder: Holder) -> Holder:
    """The halves of data without sites, if both have classes."""
    for name, half, what in ((TRAIN, holder.train, "images"), (TEST, holder.test, "test images")):
        if not half.classes:
            raise UserError(f"{folder / name} holds no class folders", f"make one folder of {what} per class")
    return holder


def _check_loose(site: Path) -> None:
    if loose := _loose(site):
        raise UserError(
            f"the site {shown(site)} has {len(loose):,} images outside of its folders ({shown(loose[0])} is the first)",
            f"move them into the folder of a class, or into {shown(site / UNLABELLED[0])}",
        )


def _check_lonely_train(folder: Path, inside: Folders) -> None:
    if TRAIN in inside and subfolders(inside[TRAIN]) and not _loose(inside[TRAIN]):
        raise UserError(
            f"{folder} has a folder train but no folder test beside it",
            f"add {folder / 'test'}, or give folder:{inside[TRAIN]}, of which a fifth becomes the test set",
        )


# -- the files ---------------------------------------------------------------------------------------------------------
def _album(folder: Path, holders: list[Holder]) -> Album:
    found = [(holder, _files(holder.train, holder.name), _files(holder.test, holder.name)) for holder in holders]
    classes = in_order({name for _, train, _ in found for name in train if name is not None})
    if not classes:
        remedy = "make one folder of images per class" + (" at the sites, beside `unlabelled`" if len(holders) > 1 else "")
        raise UserError(f"{folder} holds no class folders", remedy)
    for holder, _, tested in found:
        if strange := sorted(name for name in tested if name is not None and name not in classes):
            raise UserError(f"{holder.test.classes[strange[0]]} has no counterpart among the training classes", "give test images of the training classes only")
        if holder.test.unlabelled:
            raise UserError(f"{holder.test.unlabelled[0]} holds test images without a label", "move them to the training images")
    train, test = (
        [Entry(path, label, holder.name) for label, name in enumerate(classes) for holder, *parts in found for path in parts[part].get(name, ())]
        for part in (0, 1)
    )
    without = [Entry(path, site=holder.name) for holder, inner, _ in found for path in inner.get(None, ())]
    return Album(folder, classes, train + without, test)


def _files(half: Half, site: str | None) -> dict[str | None, list[Path]]:
    """The images by class, None those without a label; a site may lack those of a class."""
    files = filled if site is None else plain_files
    found: dict[str | None, list[Path]] = {name: files(path) for name, path in sorted(half.classes.items())}
    found[None] = [path for folder in half.unlabelled for path in files(folder)]
    return {name: paths for name, paths in found.items() if paths}


def _with_left_out(album: Album) -> Album:
    """The album with the files that are no images as far as Fallow knows, and the images outside of the folders that count."""
    used, every = set(album.files), sorted(files_below(album.where))
    outside = [path for path in every if is_image(path) and path not in used and not is_special(path)]
    return replace(album, strange=[path for path in every if not is_image(path)], outside=outside)


def _said(album: Album, reading: Reading) -> Iterator[str]:
    kinds = f"{len(album.classes)} classes: {listed(album.classes)}"
    if reading.sites:
        kinds = f"{len(album.sites())} sites ({listed(album.sites())}) with the classes {listed(album.classes)}"
    yield f"{shown(album.where)}: {kinds}" + (f"; {reading.note}" if reading.note else "")
    if album.outside:
        first = shown(album.outside[0].relative_to(album.where))
        yield f"{shown(album.where)}: {len(album.outside):,} images outside of these folders are left out ({first} is the first)"
    yield from told_strange(album.strange, album.where)
