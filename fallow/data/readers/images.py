"""Image files to one array: sizes and modes are surveyed first, then all are decoded on a pool of threads."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fallow.errors import UserError
from fallow.limits import check_room
from fallow.paths import open_plain

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
GREY = frozenset({"1", "L", "LA", "I", "I;16", "I;16L", "I;16B"})
CHUNK = 64
LARGE = 4_000_000  # pixels; of such images one is decoded at a time
COPIES = 16  # bytes a pixel takes on its way: Pillow's four, an array, the same for the resize
one_by_one = threading.Lock()
T = TypeVar("T")
Result = TypeVar("Result")


def is_image(path: Path | str) -> bool:
    name = os.path.basename(path)
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def decode(paths: Sequence[Path], size: int | None = None, channels: int | None = None) -> np.ndarray:
    """uint8 [N, C, H, W]. Unless given, the size is the most common one; one channel only if all files are grey."""
    shape = (size, size) if size else None
    if shape is None or channels is None:
        modes, sizes = zip(*in_threads(_survey, paths))
        shape = shape or _most_common(sizes)
        channels = channels or (1 if GREY.issuperset(modes) else 3)
    wanted, doing = len(paths) * channels * shape[0] * shape[1], f"holding {len(paths):,} images of {shape[0]}x{shape[1]}"
    check_room(wanted, doing, "give a smaller image.size, or fewer images")
    out = np.empty((len(paths), channels, *shape), np.uint8)

    def fill(place: tuple[int, Path]) -> None:
        index, path = place
        out[index] = read(path, channels, shape)

    in_threads(fill, list(enumerate(paths)))
    return out


def resized(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Pillow's bilinear resize of uint8 [N, C, H, W], C being 1 or 3."""
    from PIL import Image

    out = np.empty((*images.shape[:2], height, width), np.uint8)
    for index, pixels in enumerate(images):
        image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
        out[index] = channels_first(np.asarray(image.resize((width, height), Image.Resampling.BILINEAR)))
    return out


def in_threads(work: Callable[[T], Result], items: Sequence[T]) -> list[Result]:
    """`work` of every item, in order; Pillow decodes without Python's lock."""

    def chunk(start: int) -> list[Result]:
        return [work(item) for item in items[start : start + CHUNK]]

    with warnings.catch_warnings(), ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\.")  # what is wrong with a file is one sentence
        waiting = [pool.submit(chunk, start) for start in range(0, len(items), CHUNK)]
        try:
            return [result for done in waiting for result in done.result()]
        finally:
            for future in waiting:
                future.cancel()


def channels_first(pixels: np.ndarray) -> np.ndarray:
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def array_of(image: Any, channels: int) -> np.ndarray:
    """uint8 [C, H, W] of a Pillow image; of 16-bit grey the upper eight bits, where Pillow itself would clip."""
    from PIL import Image

    if image.mode == "F":
        raise UserError("its pixels are real numbers", "save it with 8 bits per channel")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    return channels_first(np.asarray(image.convert("L" if channels == 1 else "RGB")))


def _survey(path: Path) -> tuple[str, tuple[int, int]]:
    return _opened(path, lambda image: (image.mode, (image.height, image.width)))


def read(path: Path, channels: int, shape: tuple[int, int]) -> np.ndarray:
    """uint8 [C, H, W] of a file, resized where it has another shape."""

    def pixels(image: Any) -> np.ndarray:
        count = image.width * image.height
        with one_by_one if count > LARGE else nullcontext():
            if count > LARGE:
                check_room(COPIES * count, f"decoding {image.width}x{image.height} pixels", "give a smaller image")
            array = array_of(image, channels)
            return array if array.shape[1:] == shape else resized(array[None], *shape)[0]

    return _opened(path, pixels)


def _opened(path: Path, look: Callable[[Any], Result]) -> Result:
    from PIL import Image, UnidentifiedImageError

    with open_plain(path) as file:
        try:
            with Image.open(file) as image:
                return look(image)
        except MemoryError:
            raise UserError(f"{path} is too large for the memory", "give a smaller image") from None
        except UserError as error:
            raise UserError(f"{path} cannot be used: {error.cause}", error.remedy) from error
        except Exception as error:  # Pillow's decoders raise many kinds on a damaged file
            why = "of a format that is not known" if isinstance(error, UnidentifiedImageError) else str(error).replace(repr(file), "the file")
            raise UserError(f"{path} is truncated or not an image ({why})", "replace or remove that file") from error


def _most_common(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    counted = Counter(sizes)
    return max(counted, key=lambda shape: (counted[shape], shape[0] * shape[1], shape))
