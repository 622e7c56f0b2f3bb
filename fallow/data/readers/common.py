"""What every reader returns: images and labels of the training and the test set, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fallow.errors import UserError
from fallow.limits import CLASSES

UNKNOWN = -1


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images of one part of a data set, with what is known of each."""

    images: torch.Tensor  # uint8 [N, C, H, W]
    labels: torch.Tensor  # int64 [N], -1 = unknown
    clients: tuple[str, ...] | None = None  # natural client id of each sample, where the source has them

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        known = int((self.labels >= 0).sum())
        unlabelled = f", {len(self) - known:,} without label" if known < len(self) else ""
        return f"ImageSet({len(self):,} images of {'x'.join(map(str, self.images.shape[1:]))}{unlabelled})"


class Parts(NamedTuple):
    classes: tuple[str, ...]
    train: ImageSet
    test: ImageSet


def split(images: np.ndarray, labels: np.ndarray, clients: Sequence[str] | None = None) -> ImageSet:
    """A ImageSet of arrays: uint8 images [N, C, H, W] and whole-number labels."""
    return ImageSet(
        torch.from_numpy(np.require(images, np.uint8, ["C_CONTIGUOUS", "WRITEABLE"])),
        torch.from_numpy(np.array(labels, dtype=np.int64)),
        None if clients is None else tuple(clients),
    )


def damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged: {why}", "delete it and fetch it again")


def truncated(path: Path, found: int, promised: int) -> UserError:
    return UserError(
        f"{path} is truncated: it has {found:,} bytes where {promised:,} were promised", "delete it and fetch it again"
    )


def missing(path: Path) -> UserError:
    return UserError(f"{path.parent} is incomplete: it has no {path.name}", "put all files of the set there")


def check_labels(labels: np.ndarray, classes: int, path: Path | str, lowest: int = 0) -> np.ndarray:
    """The labels, if every one is a class (or -1 where `lowest` allows it)."""
    if len(labels) and not lowest <= (low := int(labels.min())) <= (high := int(labels.max())) < classes:
        wrong = low if low < lowest else high
        raise UserError(
            f"{path} has the label {wrong}, out of range for {classes} classes (0 to {classes - 1})",
            "correct the labels or fetch the file again",
        )
    return labels


def check_label(label: int, where: Path | str) -> None:
    """Ends with a sentence where a label is none; before names are made of all labels up to it."""
    if not UNKNOWN <= label < CLASSES:
        told = str(label) if abs(label) < 10**20 else "of more than 20 digits"
        raise UserError(f"{where} has the label {told}, out of range: labels count from 0 to at most {CLASSES - 1:,}", "number the classes from 0")


def check_same_count(images: int, labels: int, path: Path | str) -> None:
    if images != labels:
        raise UserError(f"{path} has {images:,} images but {labels:,} labels", "fetch or write the files again")
