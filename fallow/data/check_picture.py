"""The picture of `fallow check`: images per class and site, and how large they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fallow import targets
from fallow.data.checking import Checked
from fallow.data.picture import GRID, INK, PALE
from fallow.data.readers.albums import listed
from fallow.errors import UserError
from fallow.lettering import every_script
from fallow.paths import shown

SITES = ("#d9730d", "#1f6fb2", "#4c9a6a", "#9b5fb0", "#b8a13a", "#c25b6e", "#5f7f8c", "#8a6f52")
OTHERS = "#b5b5b5"
NUMBER = 0.09  # of the width that a number takes
MOST = 40  # classes; of more the first ones
MANY = 10  # sizes; of so many one stands out that has as many times the images of the mean


def writable(path: Path, force: bool) -> Path:
    """The path, if a picture may be written there."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"a picture cannot be written as {path.name!r}", "end the name in .png or .svg")
    return targets.file(path, "check", force, "--picture")


@every_script()
def picture(checked: Checked, path: Path) -> Path:
    """Writes a PNG or SVG, by the path's ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, unlabelled = min(len(checked.classes), MOST), checked.count(unlabelled=True) > 0
    figure = Figure(figsize=(10, max(3.6, 1.6 + 0.3 * (rows + unlabelled))), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    rooms: list[Any] = [["classes", "sizes"], *([["unlabelled", "sizes"]] if unlabelled else [])]
    axes = figure.subplot_mosaic(rooms, width_ratios=[3, 2], height_ratios=[max(rows, 3), 1][: len(rooms)])
    _counts(axes["classes"], checked)
    if unlabelled:
        _unlabelled(axes["unlabelled"], checked)
    sizes = axes["sizes"]
    _sizes(sizes, checked)
    problems = len(checked.problems())
    told = f"{problems} problem{'s' if problems > 1 else ''} found" if problems else "no problem found"
    figure.suptitle(f"{shown(checked.name)}: {len(checked.seen):,} images, {told}", fontsize=10.5, color=INK)
    figure.savefig(path, metadata=targets.tags("check", path.suffix.lower()[1:]))
    return path


def _counts(axis: Any, c: Checked) -> None:
    """A bar per class of labelled images, by site; test images as a line at their number."""
    classes = range(min(len(c.classes), MOST))
    tested = np.array([c.count(k, test=True) for k in classes])
    _bars(axis, c, [shown(c.classes[k])[:24] for k in classes], lambda site: [c.count(k, site) for k in classes], tested)
    axis.plot(tested, range(len(tested)), "|", color=INK, markersize=11, markeredgewidth=1.6, label="test images")
    axis.legend(fontsize=7.5, frameon=False, loc="lower right", bbox_to_anchor=(1, 1.01), ncols=4, borderaxespad=0, columnspacing=1, handlelength=1.2)
    axis.set_title("labelled" + (f" (the first {MOST} of {len(c.classes):,} classes)" if len(c.classes) > MOST else ""), fontsize=9.5, color=INK, loc="left")


def _unlabelled(axis: Any, c: Checked) -> None:
    """Those without a label, which are many, on a scale of their own."""
    _bars(axis, c, ["unlabelled"], lambda site: [c.count(site=site, unlabelled=True)], np.zeros(1))
    axis.set_xlabel("images", fontsize=8, color=PALE)


def _bars(axis: Any, c: Checked, names: list[str], held: Callable[[str | None], list[int]], beside: np.ndarray) -> None:
    """Bars of what the sites hold, one after another, with their sum behind; a mark of what is `beside` them is not written over."""
    places, left, whole = np.arange(len(names)), np.zeros(len(names)), np.array(held(None))
    sites: list[str | None] = [*c.sites[: len(SITES)]] or [None]
    for site, colour in zip(sites, SITES):
        axis.barh(places, held(site), left=left, height=0.7, color=colour, label=shown(site)[:24] if site else "training images")
        left += held(site)
    if (rest := whole - left).any():
        axis.barh(places, rest, left=left, height=0.7, color=OTHERS, label="at other sites")
    wide = 1.12 * max(1, *whole, *beside)
    for place, count, mark in zip(places, whole, beside):
        end = mark if 0 <= mark - count < NUMBER * wide else count
        axis.annotate(f"{count:,}", (end, place), (5, 0), textcoords="offset points", va="center", fontsize=7.5, color=PALE)
    axis.set_xlim(0, wide)
    axis.set_yticks(places, names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    _bare(axis, "x")


def _sizes(axis: Any, c: Checked) -> None:
    """A disc per size, its area as the number of images."""
    found, counts = np.unique(np.array([look.size for look in c.seen.values()], int).reshape(-1, 2), axis=0, return_counts=True)
    if len(found):
        alike = len(found) >= MANY and counts.max() < MANY * counts.mean()  # no size stands out
        area, alpha = (10.0, max(0.25, min(0.55, 60 / len(found)))) if alike else (12 + 240 * counts / counts.max(), 0.55)
        axis.scatter(found[:, 1], found[:, 0], s=area, color=SITES[1], alpha=alpha, linewidth=0)
        top = float(found.max()) * 1.12
        axis.plot([0, top], [0, top], color=GRID, linewidth=1, zorder=0)
        axis.set_xlim(0, top)
        axis.set_ylim(0, top)
        told = f"{len(found):,} sizes" if alike else f"sizes: {listed([f'{w}x{h}' for h, w in found[np.argsort(-counts)]], 2)}"
        axis.set_title(told, fontsize=9.5, color=INK, loc="left")
    axis.set_aspect("equal")
    axis.set_xlabel("width in pixels", fontsize=8, color=PALE)
    axis.set_ylabel("height", fontsize=8, color=PALE)
    _bare(axis, "both")


def _bare(axis: Any, grid: Any) -> None:
    axis.set_axisbelow(True)
    axis.grid(axis=grid, color=GRID, linewidth=0.6)
    axis.tick_params(length=0, labelsize=8, labelcolor=INK)
    for spine in axis.spines.values():
        spine.set_color(GRID)
