"""The picture of `fallow check`: images per class and site, and how large they are."""

from __future__ import annotations

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
MOST = 40  # classes; of more the first ones
MANY = 10  # times as many images as the mean, of a size that stands out


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

    rows = min(len(checked.classes), MOST) + 1
    figure = Figure(figsize=(10, max(3.6, 1.6 + 0.3 * rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    counts, sizes = figure.subplots(1, 2, width_ratios=[3, 2])
    _counts(counts, checked)
    _sizes(sizes, checked)
    problems = len(checked.problems())
    told = f"{problems} problem{'s' if problems > 1 else ''} found" if problems else "no problem found"
    figure.suptitle(f"{shown(checked.name)}: {len(checked.seen):,} images, {told}", fontsize=10.5, color=INK)
    figure.savefig(path, metadata=targets.tags("check", path.suffix.lower()[1:]))
    return path


def _counts(axis: Any, c: Checked) -> None:
    """A bar per class of labelled images, one of those without a label, by site; test images as a line at their number."""
    classes = range(min(len(c.classes), MOST))
    names = [shown(c.classes[k])[:24] for k in classes] + ["unlabelled"]
    places, left = np.arange(len(names)), np.zeros(len(names))
    sites: list[str | None] = [*c.sites[: len(SITES)]] or [None]
    for site, colour in zip(sites, SITES):
        held = np.array([c.count(k, site) for k in classes] + [c.count(site=site, unlabelled=True)])
        axis.barh(places, held, left=left, height=0.7, color=colour, label=shown(site)[:24] if site else "training images")
        left += held
    whole = np.array([c.count(k) for k in classes] + [c.count(unlabelled=True)])
    if (rest := whole - left).any():
        axis.barh(places, rest, left=left, height=0.7, color=OTHERS, label="at other sites")
    for place, count in zip(places, whole):
        axis.annotate(f"{count:,}", (count, place), (4, 0), textcoords="offset points", va="center", fontsize=7.5, color=PALE)
    tested = [c.count(k, test=True) for k in classes]
    axis.set_xlim(0, 1.12 * max(1, *whole, *tested))
    axis.plot(tested, places[:-1], "|", color=INK, markersize=11, markeredgewidth=1.6, label="test images")
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set_xlabel("images", fontsize=8, color=PALE)
    axis.legend(fontsize=7.5, frameon=False, loc="best")
    axis.set_title("per class" + (f" (the first {MOST} of {len(c.classes):,})" if len(c.classes) > MOST else ""), fontsize=9.5, color=INK, loc="left")
    _bare(axis, "x")


def _sizes(axis: Any, c: Checked) -> None:
    """A disc per size, its area as the number of images."""
    found, counts = np.unique(np.array([look.size for look in c.seen.values()], int).reshape(-1, 2), axis=0, return_counts=True)
    if len(found):
        few = counts.max() < MANY * counts.mean()  # no size stands out
        area, alpha = (10.0, max(0.25, min(0.55, 60 / len(found)))) if few else (12 + 240 * counts / counts.max(), 0.55)
        axis.scatter(found[:, 1], found[:, 0], s=area, color=SITES[1], alpha=alpha, linewidth=0)
        top = float(found.max()) * 1.12
        axis.plot([0, top], [0, top], color=GRID, linewidth=1, zorder=0)
        axis.set_xlim(0, top)
        axis.set_ylim(0, top)
        told = f"{len(found):,} sizes" if few and len(found) > 3 else f"sizes: {listed([f'{w}x{h}' for h, w in found[np.argsort(-counts)]], 2)}"
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
