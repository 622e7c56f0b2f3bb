"""A folder of photographs as people have them: PNG and JPEG, upright and lying, of many sizes, a folder per class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fallow.data.sources import ImageSet

KINDS = {"airplane": 0, "automobile": 1, "deer": 4, "frog": 6, "ship": 8}  # of CIFAR-10
TRAINED, TESTED = 180, 300  # of each
SIDES = (40, 80)


def photographs(images: ImageSet, folder: Path) -> None:
    """Writes `train/CLASS` and `test/CLASS` from images of CIFAR-10, enlarged to sides that differ."""
    labels, rng = images.labels.numpy(), np.random.default_rng(7)
    for name, label in KINDS.items():
        for number, index in enumerate(np.flatnonzero(labels == label)[: TRAINED + TESTED]):
            place = folder / ("train" if number < TRAINED else "test") / name
            place.mkdir(parents=True, exist_ok=True)
            size = tuple(int(n) for n in rng.integers(*SIDES, size=2))
            picture = Image.fromarray(images.images[index].permute(1, 2, 0).numpy()).resize(size, Image.Resampling.BICUBIC)
            picture.save(place / (f"{number}.png" if number % 2 else f"{number}.jpg"))
