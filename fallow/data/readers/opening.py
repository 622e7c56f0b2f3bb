"""One file to one Pillow image: only formats that are read safely, turned upright, with one reason where it cannot be read."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

from fallow.errors import UserError
from fallow.paths import open_plain

SUFFIXES = frozenset({
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".heic", ".heif", ".hif", ".dcm", ".dicom",
})  # fmt: skip
PLAIN = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # Pillow knows more, some of which call other programs
HEAD = 132  # bytes by which a file is known
ORIENTATION = 0x0112
HEIC, AVIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), (b"avif", b"avis")
EXTRAS = {"heic": "pillow-heif", "dicom": "pydicom"}  # what pip is told -> the library
Result = TypeVar("Result")


warnings.filterwarnings("ignore", message="Corrupt EXIF data", category=UserWarning)  # Pillow's, of pictures that are fine


class Unreadable(UserError):
    """A file that is no image, or is not whole."""

    def __init__(self, path: Path, why: str):
        self.path, self.why = path, why
        extra = next((extra for extra, library in EXTRAS.items() if why.endswith(f"needs {library}")), None)
        remedy = f"install it with `pip install fallow[{extra}]`" if extra else "replace or remove that file"
        super().__init__(f"{path} {why}", f"{remedy}, or go on without it with --skip-bad")


def is_image(path: Path | str) -> bool:
    name = os.path.basename(path)
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def opened(path: Path, look: Callable[[Any], Result]) -> Result:
    """What `look` makes of the file's image; its pixels are decoded when `look` asks for them."""
    with open_plain(path) as file:
        try:
            with _image(file, path) as image:
                return look(image)
        except MemoryError:
            raise UserError(f"{path} is too large for the memory", "give a smaller image") from None
        except Unreadable:
            raise
        except UserError as error:
            raise UserError(f"{path} cannot be used: {error.cause}", error.remedy) from error
        except Exception as error:  # Pillow's decoders raise many kinds on a damaged file
            raise Unreadable(path, _why(error, file)) from error


def _why(error: Exception, file: IO[bytes]) -> str:
    if os.fstat(file.fileno()).st_size == 0:
        return "is empty"
    told = re.sub(r" \(\d+ bytes not processed\)", "", " ".join(str(error).replace(repr(file), "the file").split()))
    return "is truncated or not an image" + ("" if "cannot identify" in told else f" ({told})")


def _image(file: IO[bytes], path: Path) -> Any:
    from PIL import Image

    head = file.read(HEAD)
    file.seek(0)
    if head[128:132] == b"DICM":
        return _dicom(file, path)
    if head[4:8] == b"ftyp" and head[8:12] in HEIC:
        if not _has_heif():
            raise Unreadable(path, "is a HEIC file, which needs pillow-heif")
        return Image.open(file, formats=("HEIF",))
    if head[4:8] == b"ftyp" and head[8:12] in AVIF:
        return Image.open(file, formats=("AVIF",))
    return Image.open(file, formats=PLAIN)


@cache
def _has_heif() -> bool:
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


@cache
def _has_dicom() -> bool:
    try:
        import pydicom  # noqa: F401
    except ImportError:
        return False
    return True


def _dicom(file: IO[bytes], path: Path) -> Any:
    if not _has_dicom():
        raise Unreadable(path, "is a DICOM file, which needs pydicom")
    from fallow.data.readers import dicom

    return dicom.Picture(file, path)


@cache
def libraries() -> str:
    """What decodes, with versions: other ones may give other pixels."""
    import PIL

    found = [f"Pillow {PIL.__version__}"]
    for name in ("pillow_heif", "pydicom"):
        try:
            found.append(f"{name} {__import__(name).__version__}")
        except ImportError:
            continue
    return ", ".join(found)


def orientation(image: Any) -> int:
    """EXIF's word on how the camera was held, 1 to 8; TIFF and HEIC come upright from their readers."""
    if image.format in ("TIFF", "HEIF", "DICOM"):
        return 1
    from PIL import Image

    try:
        exif = Image.Exif()
        exif.load(image.info.get("exif") or b"")
        found = exif.get(ORIENTATION, 1)
    except Exception:  # a damaged note does not spoil the picture
        return 1
    return found if found in range(1, 9) else 1


def size_of(image: Any) -> tuple[int, int]:
    """Height and width as it is seen."""
    return (image.width, image.height) if orientation(image) >= 5 else (image.height, image.width)
