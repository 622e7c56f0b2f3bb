"""scikit-learn's 8x8 digits: the embedded default, no file needed."""

from __future__ import annotations

import numpy as np

from fallow.data.readers.common import Parts, split
from fallow.data.readers.idx import DIGITS

TEST = 297  # the last ones in file order


def read() -> Parts:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * 255 / 16).astype(np.uint8)[:, None]  # stored as 0..16
    return Parts(DIGITS, split(images[:-TEST], digits.target[:-TEST]), split(images[-TEST:], digits.target[-TEST:]))
