"""Images from Python, or one file of the command line, labelled as `fallow predict` labels a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fallow.data import given
from fallow.data.readers.folders import image_files
from fallow.data.readers.images import array_of, brought, is_image, upright
from fallow.data.readers.opening import Unreadable, orientation
from fallow.data.sizes import fitted
from fallow.errors import UserError
from fallow.export.inputs import Inputs
from fallow.export.predict import Predictor
from fallow.paths import user_path
from fallow.runs import Result, load_result

WANTED = "give an image or several: uint8 arrays or tensors, Pillow images, or paths"


class Predictions(NamedTuple):
    """Of each image the class's name, and a row of probabilities in the order of `classes`."""

    labels: list[str]
    probabilities: np.ndarray  # [N, classes]
    classes: list[str]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {100 * p.max():.1f} %" for name, p in zip(self.labels[:5], self.probabilities))
        return f"Predictions({len(self.labels)} images: {shown}{', ...' if len(self.labels) > 5 else ''})"


def label(result: Result, images: Any, device: str = "auto", batch: int | None = None, best: bool = False) -> Predictions:
    """Labels images with the run's model: the numbers of `fallow predict` on the same images."""
    predictor = Predictor(result, device, batch, best)
    pixels = _pixels(images, predictor.inputs)
    if not pixels:
        return Predictions([], np.zeros((0, len(predictor.classes)), np.float32), predictor.classes)
    found = predictor.batches(pixels).numpy()
    return Predictions([predictor.classes[best] for best in found.argmax(1)], found, predictor.classes)


def _pixels(images: Any, inputs: Inputs) -> list[Tensor]:
    """What the model takes, uint8 [C, H, W], of each image."""
    if isinstance(images, str | Path):
        return [_read(path, inputs) for path in _files(user_path(images))]
    if isinstance(images, np.ndarray | Tensor):
        return list(_from_arrays(given.batch(images, "the images", inputs.decoded[0]), inputs))
    if _is_picture(images):
        return [_from_picture(images, inputs)]
    if isinstance(images, Sequence):
        return [_one(image, f"image {place}", inputs) for place, image in enumerate(images)]
    raise UserError(f"what is of the type {type(images).__name__} cannot be labelled", WANTED)


def _one(image: Any, where: str, inputs: Inputs) -> Tensor:
    if isinstance(image, str | Path):
        return _read(user_path(image), inputs)
    if _is_picture(image):
        return _from_picture(image, inputs)
    if isinstance(image, np.ndarray | Tensor) and image.ndim in (2, 3):
        pixels = given.batch(image, where)
        if len(pixels) == 1:
            return _from_arrays(pixels, inputs)[0]
    shape = f" of shape {list(image.shape)}" if hasattr(image, "shape") else ""
    raise UserError(f"{where} is a {type(image).__name__}{shape}, which is no image", WANTED)


def _files(path: Path) -> list[Path]:
    """An image file, or those of a folder."""
    if not path.is_dir():
        return [path]
    files = image_files(path)
    if not files:
        raise UserError(f"{path} holds no images", "put PNG, JPEG or other image files there, in folders or not")
    return files


def _read(path: Path, inputs: Inputs) -> Tensor:
    if not path.is_file():
        raise UserError(f"there is no image {path}", "give the path of an image, or of a folder of images")
    try:
        return inputs.read(path)
    except Unreadable as error:
        raise UserError(f"{path} {error.why}", "replace that file, or give another image") from None


def _is_picture(image: Any) -> bool:
    return hasattr(image, "convert") and hasattr(image, "mode")


def _from_picture(image: Any, inputs: Inputs) -> Tensor:
    return _from_arrays(upright(array_of(image, inputs.decoded[0]), orientation(image))[None], inputs)[0]


def _from_arrays(pixels: np.ndarray, inputs: Inputs) -> Tensor:
    """[N, C, H, W] as a reader of files would have given them, then by the keys of `image`."""
    channels, height, width = inputs.decoded
    coloured = fitted(torch.from_numpy(np.require(pixels, requirements=["C", "W"])), None, "pad", channels, "the images")
    if coloured.shape[2:] != (height, width):
        coloured = torch.from_numpy(np.stack([brought(image, (height, width), inputs.fit_of_files) for image in coloured.numpy()]))
    return fitted(coloured, inputs.size, inputs.fit, inputs.channels, "the images")


def told(file: str | Path, run: str | Path, device: str = "auto", trust: bool = False, best: bool = False) -> list[tuple[str, ...]]:
    """A title row, and for each class its probability, the likeliest first; of one file."""
    path, result = user_path(file), load_result(run, trust)
    if path.is_file() and not is_image(path):
        raise UserError(f"{path} is no image by its name", "give a PNG, JPEG or other image file")
    found = label(result, path, device, best=best)
    order = np.argsort(-found.probabilities[0], kind="stable")
    return [("label", "probability"), *[(found.classes[i], f"{100 * found.probabilities[0][i]:.2f} %") for i in order]]
