"""The official sets: the forms they come in, and where their files are looked for."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fallow.data import download as downloads
from fallow.data.readers import cifar, folders, idx, mat, medmnist, stl10, tinyimagenet
from fallow.data.readers.archives import unpack
from fallow.data.readers.common import Parts
from fallow.errors import UserError, suggest


@dataclass(frozen=True)
class Form:
    """One official form of a set: its folder, a file that shows it is there, and the archive it comes in."""

    folder: str
    shown_by: str  # a pattern
    read: Callable[[Path], Parts]
    archive: str | None = None

    def lies_in(self, data_dir: Path) -> bool:
        folder = data_dir / self.folder
        return folder.is_dir() and bool(fnmatch.filter(os.listdir(folder), self.shown_by))

    def archive_in(self, data_dir: Path) -> Path | None:
        homes = {data_dir, (data_dir / self.folder).parent}
        return next((home / self.archive for home in homes if self.archive and (home / self.archive).is_file()), None)


@dataclass(frozen=True)
class Official:
    what: str
    forms: tuple[Form, ...]
    classes: int
    size: int
    channels: int
    flip: bool = True
    remote: str | None = None  # its key among the public addresses

    def read(self, name: str, home: Path, download: bool) -> Parts:
        if download and self.remote and not (any(form.archive for form in self.forms) and self._lies_in(home)):
            downloads.fetch_set(self.remote, home)  # a set that comes in single files looks at each on its own
        for form in self.forms:
            if form.lies_in(home):
                return form.read(home / form.folder)
        for form in self.forms:
            if archive := form.archive_in(home):
                return form.read(unpack(archive, home / form.folder))
        raise self._not_there(name, home)

    def present(self, home: Path) -> bool:
        try:
            return self._lies_in(home)
        except OSError:
            return False

    def _lies_in(self, home: Path) -> bool:
        return any(form.lies_in(home) or form.archive_in(home) for form in self.forms)

    def looked_for(self) -> list[str]:
        found = [f"{form.folder}/{form.shown_by}".rstrip("*").replace("?", "-") for form in self.forms]
        return found + [form.archive for form in self.forms if form.archive]

    def _not_there(self, name: str, home: Path) -> UserError:
        loose = [spelt for spelt in idx.spellings("train-images-idx3-ubyte") if (home / spelt).is_file()]
        if loose and name in ("mnist", "fashion-mnist"):
            return UserError(
                f"{home / loose[0]} may be MNIST's or Fashion-MNIST's, whose files have the same names",
                f"move the four files into {home / name}",
            )
        remedy = "run again with --download, or put it there" if self.remote else "put it there"
        looked_for = ", ".join(self.looked_for())
        return UserError(f"{name} is not in {home} (looked for {looked_for})", f"{remedy}, or set data_dir or FALLOW_DATA")


_IDX = "train-images?idx3-ubyte*"
OFFICIAL = {
    "cifar10": Official(
        "CIFAR-10, small photographs",
        (
            Form("cifar-10-batches-py", "data_batch_1", cifar.read_python10, "cifar-10-python.tar.gz"),
            Form("cifar-10-batches-bin", "data_batch_1.bin", cifar.read_binary10, "cifar-10-binary.tar.gz"),
        ),
        10, 32, 3, remote="cifar10",
    ),
    "cifar100": Official(
        "CIFAR-100, small photographs",
        (
            Form("cifar-100-python", "train", cifar.read_python100, "cifar-100-python.tar.gz"),
            Form("cifar-100-binary", "train.bin", cifar.read_binary100, "cifar-100-binary.tar.gz"),
        ),
        100, 32, 3, remote="cifar100",
    ),
    "svhn": Official(
        "SVHN, house numbers, cropped digits; without the extra images",
        (Form("svhn", "train_32x32.mat", mat.read_svhn),), 10, 32, 3, flip=False, remote="svhn",
    ),
    "mnist": Official(
        "MNIST, handwritten digits", (Form("mnist", _IDX, idx.read_mnist),), 10, 28, 1, flip=False, remote="mnist"
    ),
    "fashion-mnist": Official(
        "Fashion-MNIST, pieces of clothing",
        (Form("fashion-mnist", _IDX, idx.read_fashion_mnist),), 10, 28, 1, remote="fashion-mnist",
    ),
    "stl10": Official(
        "STL-10, photographs, 100,000 of them without a label",
        (Form("stl10_binary", "train_X.bin", stl10.read, "stl10_binary.tar.gz"),), 10, 96, 3, remote="stl10",
    ),
    "cinic10": Official(
        "CINIC-10, CIFAR-10's classes with images from ImageNet",
        (Form("CINIC-10", "train", folders.read_cinic10, "CINIC-10.tar.gz"),), 10, 32, 3, remote="cinic10",
    ),
    "tinyimagenet": Official(
        "Tiny ImageNet, photographs",
        (Form("tiny-imagenet-200", "wnids.txt", tinyimagenet.read, "tiny-imagenet-200.zip"),),
        200, 64, 3, remote="tinyimagenet",
    ),
}  # fmt: skip


def official_names() -> list[str]:
    return [*OFFICIAL, *(f"emnist:{split}" for split in idx.EMNIST), *(f"medmnist:{s}" for s in medmnist.CLASSES)]


def official(name: str) -> Official | None:
    kind, _, rest = name.partition(":")
    if kind == "emnist":
        return _emnist(rest)
    return _medmnist(rest) if kind == "medmnist" else OFFICIAL.get(name)


def _emnist(split: str) -> Official:
    if split not in idx.EMNIST:
        remedy = suggest(split, idx.EMNIST) if split else f"write emnist:SPLIT, SPLIT one of {', '.join(idx.EMNIST)}"
        raise UserError(f"EMNIST has no split {split!r}", remedy)
    read = partial(idx.read_emnist, variant=split)
    shown_by = f"emnist-{split}-train-images?idx3-ubyte*"
    forms = (Form("emnist", shown_by, read), Form("emnist/gzip", shown_by, read, "gzip.zip"))
    what = f"EMNIST, handwritten characters, split {split}"
    return Official(what, forms, len(idx.EMNIST[split]), 28, 1, flip=False, remote="emnist")


def _medmnist(name: str) -> Official:
    if not name:
        raise UserError(
            "medmnist needs the name of a set", f"write medmnist:NAME, NAME one of {', '.join(medmnist.CLASSES)}"
        )
    medmnist.check(name)
    base, size = medmnist.base(name), int(name.partition("_")[2] or 28)
    remote = f"medmnist:{name}" if f"medmnist:{name}" in downloads.REMOTES else None
    return Official(
        f"MedMNIST, {base}",
        (Form("medmnist", f"{name}.npz", partial(medmnist.read, name=name)),),
        len(medmnist.CLASSES[base]), size, 3 if base in medmnist.COLOUR else 1, base not in medmnist.SIDED, remote,
    )  # fmt: skip
