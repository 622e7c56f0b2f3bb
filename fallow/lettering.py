"""Names in pictures, in whatever script they are written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

FURTHER = ("Noto Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "Microsoft YaHei", "PingFang SC", "Hiragino Sans", "Arial Unicode MS", "WenQuanYi Zen Hei")


@contextmanager
def every_script() -> Iterator[None]:
    """Letters that matplotlib's own font lacks are of a font of this machine; what none of them has is a box, and nothing is printed about it."""
    import matplotlib
    from matplotlib.font_manager import fontManager

    there = set(fontManager.get_font_names())
    families = [*matplotlib.rcParams["font.family"], *(font for font in FURTHER if font in there)]
    with matplotlib.rc_context({"font.family": families}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
