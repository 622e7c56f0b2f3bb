"""SVHN's cropped digits: MATLAB files with X [32, 32, 3, N] and y [N, 1], where the digit 0 is labelled 10."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from fallow.data.readers.common import ImageSet, Parts, check_labels, check_same_count, damaged, missing, split
from fallow.data.readers.idx import DIGITS
from fallow.errors import UserError
from fallow.limits import CLASSES, check_room

BYTES = {"uint8": 1, "logical": 1}  # of a number; of other kinds at most eight


def read_svhn(folder: Path) -> Parts:
    return Parts(DIGITS, _split(folder / "train_32x32.mat"), _split(folder / "test_32x32.mat"))


def _split(path: Path) -> ImageSet:
    from scipy.io import loadmat, whosmat

    if not path.is_file():
        raise missing(path)
    with path.open("rb") as file:
        try:
            wanted = sum(BYTES.get(kind, 8) * math.prod(shape) for name, shape, kind in whosmat(file) if name in ("X", "y"))
            check_room(wanted, f"reading {path}")
            file.seek(0)
            content = loadmat(file, variable_names=("X", "y"))
        except UserError:
            raise
        except Exception as error:  # scipy's reader raises anything on a damaged file
            raise damaged(path, f"it is truncated or not a MATLAB file ({error})") from error
    images, labels = content.get("X"), content.get("y")
    if images is None or images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise damaged(path, "it has no array X of 32x32 colour images")
    if labels is None or labels.dtype.kind not in "uif":
        raise damaged(path, "it has no array y of labels")
    if not np.isfinite(labels).all() or (labels.size and not -CLASSES < labels.min() <= labels.max() < CLASSES):
        raise damaged(path, "it has labels that are no digits")
    labels = labels.reshape(-1).astype(np.int64)
    check_same_count(images.shape[3], len(labels), path)
    return split(images.transpose(3, 2, 0, 1), check_labels(np.where(labels == 10, 0, labels), 10, path))
