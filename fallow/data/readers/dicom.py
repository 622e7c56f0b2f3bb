"""DICOM files by pydicom, as 8-bit images: slope, window, inversion and palette are followed."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import pydicom
from pydicom.filereader import read_file_meta_info
from pydicom.pixels import apply_color_lut, apply_modality_lut

from fallow.data.readers.opening import Unreadable
from fallow.limits import check_room

DEFLATED = "1.2.840.10008.1.2.1.99"  # unpacks to any size before one can look
COPIES = 24  # bytes a pixel takes on its way: as stored, in float64 twice, as bytes


class Picture:
    """As much of a Pillow image as readers ask for: size and mode by the header, the image itself when it is asked for."""

    format = "DICOM"

    def __init__(self, file: IO[bytes], path: Path):
        self.file, self.path, self.info = file, path, {}  # type: IO[bytes], Path, dict[str, Any]
        if read_file_meta_info(path).get("TransferSyntaxUID") == DEFLATED:
            raise Unreadable(path, "is a deflated DICOM file, which is not read (save it uncompressed)")
        head = pydicom.dcmread(file, stop_before_pixels=True)
        if int(head.get("NumberOfFrames") or 1) != 1:
            raise Unreadable(path, f"is a DICOM file of {head.NumberOfFrames} frames (give a file for each)")
        self.height, self.width = int(head.Rows), int(head.Columns)
        self.mode = "L" if head.PhotometricInterpretation in ("MONOCHROME1", "MONOCHROME2") else "RGB"

    def __enter__(self) -> Picture:
        return self

    def __exit__(self, *end: Any) -> None:
        return None

    @cached_property
    def image(self) -> Any:
        """A Pillow image, L or RGB."""
        from PIL import Image

        wanted = COPIES * self.height * self.width + os.fstat(self.file.fileno()).st_size
        check_room(wanted, f"decoding {self.width}x{self.height} pixels", "give a smaller image")
        self.file.seek(0)
        whole = pydicom.dcmread(self.file)
        try:
            pixels = whole.pixel_array
        except (RuntimeError, NotImplementedError) as error:
            why = " ".join(str(error).split())[:120]
            raise Unreadable(self.path, f"is a DICOM file compressed in a way that pydicom alone cannot decode ({why})") from None
        if self.mode == "L":
            return Image.fromarray(_grey(pixels, whole))
        if whole.PhotometricInterpretation == "PALETTE COLOR":
            pixels = apply_color_lut(pixels, whole)
        return Image.fromarray(_eight(pixels))


def _grey(pixels: np.ndarray, file: Any) -> np.ndarray:
    """Stored values by slope and intercept, then by the first window, linearly; without one the file's own range is black to white."""
    values = np.asarray(apply_modality_lut(pixels, file), np.float64)
    low, high = float(values.min()), float(values.max())
    if "WindowCenter" in file and "WindowWidth" in file:
        centre, width = _first(file.WindowCenter), _first(file.WindowWidth)
        low, high = centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2  # DICOM PS3.3 C.11.2.1.2
    grey = np.rint(255 * ((values - low) / max(high - low, 1e-9)).clip(0, 1)).astype(np.uint8)
    return 255 - grey if file.PhotometricInterpretation == "MONOCHROME1" else grey


def _first(value: Any) -> float:
    return float(value[0] if isinstance(value, pydicom.multival.MultiValue) else value)


def _eight(pixels: np.ndarray) -> np.ndarray:
    """The upper eight bits."""
    return pixels.astype(np.uint8) if pixels.dtype.itemsize == 1 else (pixels >> 8 * (pixels.dtype.itemsize - 1)).astype(np.uint8)
