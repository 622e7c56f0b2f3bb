"""Image files to one array: headers are surveyed first, then all are decoded on threads, those that cannot be are named."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fallow.data.readers.opening import EXTRAS, SUFFIXES, Unreadable, is_image, opened, orientation, size_of
from fallow.errors import UserError
from fallow.limits import available, check_room

__all__ = ["SUFFIXES", "Settings", "Surveyed", "decode", "is_image", "read", "resized", "survey"]

GREY = frozenset({"1", "L", "LA", "I", "I;16", "I;16L", "I;16B"})
FITS = ("pad", "resize", "crop")
CHUNK = 16
LARGE = 4_000_000  # pixels; of such images no more are decoded at a time than fit into ROOM
COPIES = 16  # bytes a pixel takes on its way: Pillow's four, an array, the same for the resize
ROOM = 2 << 30
Shape = tuple[int, int]
Tell = Callable[[int, int], None]  # called with (files done, files in all)
T = TypeVar("T")
Result = TypeVar("Result")


def silent(done: int, count: int) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class Settings:
    """How files become images; None: as most of them are."""

    size: int | None = None
    fit: str = "resize"
    channels: int | None = None


@dataclass(frozen=True)
class Surveyed:
    """What the headers of files say, taken together."""

    shape: Shape
    channels: int
    bad: dict[int, Unreadable]  # by the file's place


@dataclass(frozen=True)
class Decoded:
    images: np.ndarray  # uint8 [N, C, H, W], of the files that could be read
    bad: dict[int, str]  # of the others why, by the file's place


def survey(paths: Sequence[Path], settings: Settings = Settings()) -> Surveyed:
    """The shape that all files will have: as given, else the most common one; one channel only if all files are grey."""
    shape = (settings.size, settings.size) if settings.size else None
    if shape and settings.channels:
        return Surveyed(shape, settings.channels, {})
    found = in_threads(_tried(lambda path: opened(path, lambda image: (image.mode, size_of(image)))), paths)
    bad = {place: error for place, error in enumerate(found) if isinstance(error, Unreadable)}
    whole = [item for item in found if not isinstance(item, Unreadable)]
    if not whole:
        raise unreadable(paths, {place: error.why for place, error in bad.items()})
    channels = settings.channels or (1 if GREY.issuperset(mode for mode, _ in whole) else 3)
    return Surveyed(shape or _most_common(size for _, size in whole), channels, bad)


def decode(paths: Sequence[Path], settings: Settings = Settings(), surveyed: Surveyed | None = None, tell: Tell = silent) -> Decoded:
    """All files in one array, without those that cannot be read."""
    surveyed = surveyed or survey(paths, settings)
    shape, channels = surveyed.shape, surveyed.channels
    wanted, doing = len(paths) * channels * shape[0] * shape[1], f"holding {len(paths):,} images of {shape[0]}x{shape[1]}"
    check_room(wanted, doing, "give a smaller image.size, or fewer images")
    out = np.empty((len(paths), channels, *shape), np.uint8)
    bad = {place: error.why for place, error in surveyed.bad.items()}

    def fill(place: int) -> Unreadable | None:
        if place in bad:
            return None
        try:
            out[place] = read(paths[place], channels, shape, settings.fit)
        except Unreadable as error:
            return error
        return None

    for place, error in enumerate(in_threads(fill, range(len(paths)), tell)):
        if error is not None:
            bad[place] = error.why
    if len(bad) == len(paths):
        raise unreadable(paths, bad)
    bad = dict(sorted(bad.items()))
    return Decoded(np.delete(out, list(bad), 0) if bad else out, bad)


def unreadable(paths: Sequence[Path], bad: dict[int, str]) -> UserError:
    """One sentence about all files that cannot be read: ten by name, then a count."""
    if len(bad) == 1:
        return Unreadable(paths[next(iter(bad))], next(iter(bad.values())))
    by_reason: dict[str, list[str]] = {}
    for place, why in list(bad.items())[:10]:
        by_reason.setdefault(why, []).append(str(paths[place]))
    named = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())
    more = f"; and {len(bad) - 10:,} more" if len(bad) > 10 else ""
    extras = [extra for extra, library in EXTRAS.items() if any(why.endswith(f"needs {library}") for why in bad.values())]
    install = f"install them with `pip install fallow[{','.join(extras)}]`, " if extras else ""
    return UserError(
        f"{len(bad):,} of {len(paths):,} files cannot be read ({named}{more})",
        f"{install}replace or remove them, or go on without them with --skip-bad",
    )


def read(path: Path, channels: int, shape: Shape, fit: str = "resize") -> np.ndarray:
    """uint8 [C, H, W] of a file, upright, brought to a shape if it has another one."""

    def pixels(image: Any) -> np.ndarray:
        with room_for(image.width * image.height, f"decoding {image.width}x{image.height} pixels"):
            return brought(upright(array_of(image, channels), orientation(image)), shape, fit)

    return opened(path, pixels)


def array_of(image: Any, channels: int) -> np.ndarray:
    """uint8 [C, H, W] of a Pillow image; of 16-bit grey the upper eight bits, where Pillow itself would clip."""
    from PIL import Image

    if image.mode == "F":
        raise UserError("its pixels are real numbers", "save it with 8 bits per channel")
    image = image.image if image.format == "DICOM" else image
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    return channels_first(np.asarray(image.convert("L" if channels == 1 else "RGB")))


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """uint8 [C, H, W] as it is seen, by EXIF's word on how the camera was held."""
    if orientation >= 5:
        pixels = pixels.transpose(0, 2, 1)
    pixels = pixels[:, :, ::-1] if orientation in (2, 3, 6, 7) else pixels
    return pixels[:, ::-1] if orientation in (3, 4, 7, 8) else pixels


def channels_first(pixels: np.ndarray) -> np.ndarray:
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


# -- shapes ------------------------------------------------------------------------------------------------------------
def brought(pixels: np.ndarray, shape: Shape, fit: str) -> np.ndarray:
    """uint8 [C, H, W] in another shape.

    `resize` stretches, `crop` brings the short side to it and cuts out the centre, `pad` makes what is larger fit in and puts
    zeros around.
    """
    if pixels.shape[1:] == shape:
        return pixels
    if fit != "pad":
        return resized(pixels[None], *shape, fit)[0]
    inner = _inscribed(pixels.shape[1:], shape)
    if inner != pixels.shape[1:]:
        pixels = resized(pixels[None], *inner)[0]
    out = np.zeros((len(pixels), *shape), np.uint8)
    top, left = (shape[0] - inner[0]) // 2, (shape[1] - inner[1]) // 2
    out[:, top : top + inner[0], left : left + inner[1]] = pixels
    return out


def _inscribed(size: Sequence[int], shape: Shape) -> Shape:
    """The largest shape of the image's own proportions that fits in; the image is not made larger."""
    scale = min(1.0, shape[0] / size[0], shape[1] / size[1])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def resized(images: np.ndarray, height: int, width: int, fit: str = "resize") -> np.ndarray:
    """Pillow's bilinear resize of uint8 [N, C, H, W], C being 1 or 3; with `crop` of the centre that has the new proportions."""
    from PIL import Image

    out = np.empty((*images.shape[:2], height, width), np.uint8)
    box = _centre(images.shape[2:], (height, width)) if fit == "crop" else None
    for index, pixels in enumerate(images):
        image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
        out[index] = channels_first(np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, box=box)))
    return out


def _centre(size: Sequence[int], shape: Shape) -> tuple[float, float, float, float]:
    """Left, top, right, bottom."""
    scale = max(shape[0] / size[0], shape[1] / size[1])
    high, wide = min(shape[0] / scale, size[0]), min(shape[1] / scale, size[1])
    left, top = (size[1] - wide) / 2, (size[0] - high) / 2
    return left, top, left + wide, top + high


def _most_common(sizes: Iterable[Shape]) -> Shape:
    counted = Counter(sizes)
    return max(counted, key=lambda shape: (counted[shape], shape[0] * shape[1], shape))


# -- threads -----------------------------------------------------------------------------------------------------------
def in_threads(work: Callable[[T], Result], items: Sequence[T], tell: Tell = silent) -> list[Result]:
    """`work` of every item, in order; Pillow decodes without Python's lock."""
    results: list[Result] = []

    def chunk(start: int) -> list[Result]:
        return [work(item) for item in items[start : start + CHUNK]]

    with warnings.catch_warnings(), ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\.")  # what is wrong with a file is one sentence
        waiting = [pool.submit(chunk, start) for start in range(0, len(items), CHUNK)]
        try:
            for done in waiting:
                results += done.result()
                tell(len(results), len(items))
            return results
        finally:
            for future in waiting:
                future.cancel()


def _tried(work: Callable[[T], Result]) -> Callable[[T], Result | Unreadable]:
    def tried(item: T) -> Result | Unreadable:
        try:
            return work(item)
        except Unreadable as error:
            return error

    return tried


class _Held:
    """Bytes that large images take at this moment, of all threads."""

    changed = threading.Condition()
    count = 0


@contextmanager
def room_for(pixels: int, doing: str) -> Iterator[None]:
    """Waits until an image fits in beside those that others decode; one alone may take what the memory has."""
    if pixels <= LARGE:
        yield
        return
    wanted = COPIES * pixels
    with _Held.changed:
        _Held.changed.wait_for(lambda: not _Held.count or _Held.count + wanted <= min(ROOM, available() // 2))
        check_room(wanted, doing, "give a smaller image")
        _Held.count += wanted
    try:
        yield
    finally:
        with _Held.changed:
            _Held.count -= wanted
            _Held.changed.notify_all()
