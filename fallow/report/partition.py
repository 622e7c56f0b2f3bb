"""The figure of a federation for a paper: clients x classes, a disc per holding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fallow.data.holdings import ClassCounts, Federation, measured
from fallow.errors import UserError
from fallow.report.reading import Run
from fallow.runs import load_result, load_source, make_federation
from fallow.runs.folder import RunFolder
from fallow.runs.origin import located, started_in

COLOURS = {"labelled": "#D55E00", "unlabelled": "#0072B2"}
LONGEST = 16  # characters of a name
DISCS = 60  # clients; beyond these shades read better


def partition(canvas: Any, run: Run, width: float) -> str:
    """Labelled above unlabelled, or beside each other on a wide figure."""
    held = _held(run)
    both = {"labelled": held.labelled, "unlabelled": held.unlabelled}
    sides = {name: counts.T for name, counts in both.items() if counts.any()}
    wide = width >= 5 and len(sides) > 1
    classes, clients = len(held.classes), len(held.clients)
    panel = (width - 0.6) / (2 if wide else 1)
    high = min(max(panel * classes / clients, min(1.3, 0.13 * classes)), panel, 0.26 * classes)
    rows, columns = (1, len(sides)) if wide else (len(sides), 1)
    sites = held.clients if any(name != str(i) for i, name in enumerate(held.clients)) else ()
    below = 0.05 * max((len(name[:LONGEST]) for name in sites), default=0)  # inches, for names that stand at an angle
    canvas.set_size_inches(width, rows * (high + 0.45) + 0.2 + below)
    axes = np.atleast_1d(canvas.subplots(rows, columns, sharex=True, sharey=True))
    for place, (axis, (side, counts)) in enumerate(zip(axes, sides.items())):
        (_discs if clients <= DISCS else _shades)(canvas, axis, counts, COLOURS[side], side)
        axis.set_xlabel("Client" if not sites and (wide or place == len(sides) - 1) else "")
        axis.set_ylabel("Class" if not wide or place == 0 else "")
        _names(axis, list(held.classes), int(high / 0.13), 0.0 if clients <= DISCS else 0.5)
        if sites:
            _sites(axis, sites, int(panel / 0.16), 0.0 if clients <= DISCS else 0.5)
    return _caption(held, str(run.config.get("partition"))) + (" Areas are counts." if clients <= DISCS else " Darker is more.")


def _held(run: Run) -> ClassCounts:
    """Everyone's classes: in the run's folder, else made again from settings and data."""
    file = run.path / "federation.npz"
    if file.exists():
        RunFolder(run.path).verified(file.name)
    if file.is_file() and (held := ClassCounts.load(file)[0]).classes != ("samples",):
        return held
    options = load_result(run.path).config
    start = started_in(run.path)
    try:
        source = load_source(located(options, start) if start else options)
    except UserError as error:
        raise UserError(f"the classes of {run.path} cannot be drawn without its data: {error.cause}", error.remedy) from None
    federation = Federation.load(file) if file.is_file() else make_federation(options, source)
    return ClassCounts.of(federation, source.train.labels.numpy(), source.classes)


def _caption(held: ClassCounts, how: str) -> str:
    known, texts = len(held.classes) - (held.classes[-1] == "unknown"), []
    for side, counts in (("labelled", held.labelled), ("unlabelled", held.unlabelled)):
        r = measured(counts[:, :known])
        texts += [f"{side} {int(counts.sum()):,}" + ("" if r is None else f" (R = {r:.3f})")] if counts.any() else []
    server = f", {int(held.server.sum()):,} labelled images at the server" if held.server.any() else ""
    return f"Images by class and client, {how}: {', '.join(texts)}{server}."


def _discs(canvas: Any, axis: Any, counts: np.ndarray, colour: str, side: str) -> None:
    """Areas as the counts; the largest fills its cell."""
    from matplotlib.collections import EllipseCollection

    classes, clients = counts.shape
    at = np.argwhere(counts)
    size = 0.94 * np.sqrt(counts[counts > 0] / counts.max())
    axis.set_xlim(-0.6, clients - 0.4)
    axis.set_ylim(-0.6, classes - 0.4)
    unit: Any = "x" if axis.bbox.width / clients <= axis.bbox.height / classes else "y"
    axis.add_collection(EllipseCollection(
        size, size, np.zeros(len(at)), units=unit, offsets=at[:, ::-1], offset_transform=axis.transData, facecolor=colour, linewidth=0,
    ))  # fmt: skip
    axis.set_title(f"{side}, largest {int(counts.max()):,}", loc="left")


def _shades(canvas: Any, axis: Any, counts: np.ndarray, colour: str, side: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    depth = LinearSegmentedColormap.from_list("depth", ["#ffffff", colour, "#000000"])
    axis.pcolormesh(np.sqrt(counts), cmap=depth, vmin=0, vmax=1.35 * np.sqrt(counts.max()), rasterized=True)
    axis.set_title(f"{side}, darkest {int(counts.max()):,}", loc="left")


def _names(axis: Any, names: list[str], most: int, centre: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    shown = range(0, len(names), -(-len(names) // max(1, most)))
    axis.set_yticks([i + centre for i in shown], [names[i][:LONGEST] for i in shown])


def _sites(axis: Any, names: Sequence[str], most: int, centre: float) -> None:
    """Clients that have names of their own."""
    shown = range(0, len(names), -(-len(names) // max(1, most)))
    words = [names[i] if len(names[i]) <= LONGEST else f"{names[i][: LONGEST - 1]}…" for i in shown]
    axis.set_xticks([i + centre for i in shown], words, rotation=45, ha="right", rotation_mode="anchor")
