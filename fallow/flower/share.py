"""A party's own data on its own machine: a small YAML says where the images are.

    client: 0            # which of the federation's clients this node is; the server has none
    data: photos         # a folder of images, a .csv or an .npz, as for `data=` of a run, beside this file

Images with a label are the party's labelled samples, those without one its unlabelled ones. A share that a simulated
run has written (`data: share.npz`) holds them in the order in which the simulation has them, so that both have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import yaml

from fallow import disk
from fallow.data import sources
from fallow.data.dealing import EMPTY, Ints
from fallow.data.holdings import Federation, Holding
from fallow.data.readers import npz
from fallow.data.readers.albums import Album, Entry, decoded
from fallow.data.readers.common import UNKNOWN, ImageSet, check_labels, check_same_count
from fallow.data.readers.folders import UNLABELLED, plain_files, subfolders
from fallow.data.readers.holdout import in_order
from fallow.data.readers.images import Settings, is_image, unreadable
from fallow.data.sizes import fitted
from fallow.data.sources import Source
from fallow.errors import UserError
from fallow.flower.folder import Keys, settings
from fallow.paths import user_path
from fallow.trees import read_yaml

ORDER = ("labelled", "unlabelled", "validation", "unused")  # of a share that a simulation wrote


@dataclass(frozen=True)
class Share:
    """What a party holds, and how its samples are used."""

    images: torch.Tensor  # uint8 [N, C, H, W]
    labels: Ints  # -1 where unknown
    holding: Holding
    classes: tuple[str, ...] = ()  # as its files name them; none where they only have numbers
    test: ImageSet | None = None
    about: Keys = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        return {"labelled": len(self.holding.labelled), "unlabelled": len(self.holding.unlabelled)}


def read(path: Path, size: int | None = None, fit: str = "pad", channels: int | None = None) -> Share:
    """What a YAML names, brought to the size and the channels that the run wants."""
    keys = settings(path)
    if not keys.get("data"):
        return Share(torch.zeros(0, 1, 1, 1, dtype=torch.uint8), EMPTY, Holding(EMPTY, EMPTY), about=keys)
    where = path.parent / user_path(keys["data"])
    share = _arrays(where, keys) if where.suffix.lower() == ".npz" else _album(where, keys, size, fit, channels)
    bring = lambda images: fitted(images, size, fit, channels, str(where))  # type: ignore[arg-type]
    test = share.test and replace(share.test, images=bring(share.test.images))
    return replace(share, images=bring(share.images), test=test)


def _arrays(where: Path, keys: Keys) -> Share:
    """Arrays `images` and `labels` (-1: unknown, none: all unknown), with the samples' order where it is given."""
    if not where.is_file():
        raise UserError(f"there is no file {where}", "give the path of an .npz file, beside the YAML or in full")
    found = npz.load(where, {"images", "labels", "classes", "test_images", "test_labels", *ORDER})
    tests = {"test_images", "test_labels"} <= set(found)
    if "images" not in found and not tests:
        raise UserError(f"{where} has no array 'images'", "save it under that name")
    images = npz.channels_first(found["images"] if "images" in found else found["test_images"][:0], where)
    labels = npz.whole_numbers(found["labels"], where) if "labels" in found else np.full(len(images), UNKNOWN, np.int64)
    check_same_count(len(images), len(labels), where)
    classes = tuple(map(str, found.get("classes", ())))
    check_labels(labels, len(classes) or 10**6, where, lowest=UNKNOWN)
    test = None
    if tests:
        test = ImageSet(_tensor(npz.channels_first(found["test_images"], where)), torch.from_numpy(npz.whole_numbers(found["test_labels"], where)))
    return Share(_tensor(images), labels, _holding(found, labels, where), classes, test, keys)


def _holding(found: Keys, labels: Ints, where: Path) -> Holding:
    if not {"labelled", "unlabelled"} <= set(found):
        return _by_label(labels)
    rows = {name: found.get(name, EMPTY).astype(np.int64).reshape(-1) for name in ORDER[:3]}
    if any(len(r) and not 0 <= r.min() <= r.max() < len(labels) for r in rows.values()) or (labels[rows["labelled"]] < 0).any():
        raise UserError(f"{where} names samples that are not there, or have no label", "write it anew")
    return Holding(rows["labelled"], rows["unlabelled"], int(found.get("unused", 0)), rows["validation"])


def _tensor(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.require(images, np.uint8, ["C_CONTIGUOUS", "WRITEABLE"]))


def _album(where: Path, keys: Keys, size: int | None, fit: str, channels: int | None) -> Share:
    """A folder or a list of images. A node needs no test set: what a run would hold out for it is trained on."""
    if "client" not in keys:  # the server's
        source = sources.load(sources.in_full(str(where)), size=size, fit=fit, channels=channels)
        labels = source.train.labels.numpy()
        return Share(source.train.images, labels, _by_label(labels), source.classes, source.test, keys)
    album = of_folder(where) if where.is_dir() else sources.album(str(where))
    if album is None:
        raise UserError(f"there are no images at {where}", "name a folder, a .csv or an .npz, beside node.yaml or in full")
    found = decoded(album, Settings(size, fit, channels))
    if found.bad:
        raise unreadable(album.files, found.bad)
    labels = np.array([entry.label for entry in (*album.train, *album.test)], np.int64)
    return Share(torch.from_numpy(found.images), labels, _by_label(labels), album.classes, None, keys)


def of_folder(folder: Path) -> Album:
    """A node's folder: one per class, one named `unlabelled`, or just images; there may be no class at all."""
    inside = subfolders(folder)
    classes = in_order({name for name, path in inside.items() if name not in UNLABELLED and plain_files(path)})
    known = [Entry(path, label) for label, name in enumerate(classes) for path in plain_files(inside[name])]
    loose = sorted(path for path in folder.iterdir() if is_image(path) and path.is_file())
    without = [Entry(path) for path in (*(f for name in UNLABELLED if name in inside for f in plain_files(inside[name])), *loose)]
    if not known and not without:
        raise UserError(f"{folder} holds no images", "put them there, those with a label into a folder of their class")
    return Album(folder, classes, known + without, [])


def _by_label(labels: Ints) -> Holding:
    return Holding(np.flatnonzero(labels >= 0), np.flatnonzero(labels < 0))


def named(share: Share, classes: tuple[str, ...], labels: str) -> Share:
    """The share with labels as the federation counts its classes; under labels=server a client's own are not used."""
    known = share.labels
    if share.classes:
        foreign = sorted(set(share.classes) - set(classes))
        if foreign:
            raise UserError(f"this party has a class {foreign[0]!r} that the federation has not", f"name its classes {', '.join(classes[:20])}")
        place = np.array([classes.index(name) for name in share.classes] + [UNKNOWN])
        known = place[known]  # -1 stays the last
    elif len(known) and known.max() >= len(classes):
        raise UserError(f"this party has the label {known.max()}, but the federation has {len(classes)} classes", "correct the labels")
    held = share.holding
    if labels == "server" and "client" in share.about and len(held.labelled):
        rows = np.arange(len(known))
        known, held = np.full(len(known), UNKNOWN, np.int64), replace(held, labelled=EMPTY, unlabelled=rows)
    return replace(share, labels=known, holding=held)


# -- from a simulation -------------------------------------------------------------------------------------------------
def write_client(folder: Path, client: int, source: Source, federation: Federation) -> None:
    """What a client of a simulated run holds, as a node's own data."""
    held = federation.clients[client]
    _write(folder, source, held, {"client": client, "data": "share.npz"}, "node.yaml")


def write_server(folder: Path, source: Source, federation: Federation) -> None:
    """What the server of a simulated run holds, with the test set."""
    test = {"test_images": source.test.images.numpy(), "test_labels": source.test.labels.numpy(), "classes": np.array(source.classes)}
    _write(folder, source, federation.server, {"data": "share.npz", "name": source.name, "flip": source.flip}, "server.yaml", test)


def _write(folder: Path, source: Source, held: Holding, keys: Keys, name: str, more: Keys | None = None) -> None:
    rows = np.unique(np.concatenate([held.labelled, held.unlabelled, held.validation]))
    place = lambda wanted: np.searchsorted(rows, wanted).astype(np.int64)
    labels = np.where(np.isin(rows, np.concatenate([held.labelled, held.validation])), source.train.labels.numpy()[rows], UNKNOWN)
    arrays = {
        "images": source.train.images.numpy()[rows], "labels": labels, "labelled": place(held.labelled), "unlabelled": place(held.unlabelled),
        "validation": place(held.validation), "unused": np.int64(held.unused),
    }  # fmt: skip
    with disk.errors_as_user_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with disk.errors_as_user_errors(folder / "share.npz"), disk.replacing(folder / "share.npz") as file:
        np.savez_compressed(file, **arrays, **(more or {}))  # type: ignore[arg-type]
    there = read_yaml(folder / name) if (folder / name).exists() else {}
    disk.write(folder / name, yaml.safe_dump(there | keys, sort_keys=False))
