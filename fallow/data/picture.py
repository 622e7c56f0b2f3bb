"""The picture of a federation: clients x classes, labelled and unlabelled side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fallow import targets
from fallow.data.dealing import Ints
from fallow.data.holdings import Federation, measured
from fallow.errors import UserError
from fallow.lettering import every_script

SIDES = ("labelled", "unlabelled")
COLOURS = {"labelled": ("#f0a35e", "#d9730d", "#7a3b00"), "unlabelled": ("#7fb2dd", "#1f6fb2", "#0b2f52")}
BUBBLE_CLIENTS, BUBBLE_CLASSES = 24, 20  # beyond these a heat map reads better
INK, PALE, GRID = "#333333", "#777777", "#e6e6e6"


@every_script()
def picture(
    federation: Federation, labels: Ints, classes: int, path: Path | str, class_names: Sequence[str] | None = None
) -> Path:
    """Writes a PNG or SVG, by the path's ending. Where only the server has labels, its bars are above the clients."""
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"a picture cannot be written as {path.name!r}", "end the name in .png or .svg")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = np.asarray(labels)
    sides = federation.counts(labels, classes)
    bubbles = len(federation.clients) <= BUBBLE_CLIENTS and classes <= BUBBLE_CLASSES
    wide, high = _panel_size(len(federation.clients), classes, bubbles)
    at_server = len(federation.server.labelled) > 0
    size = (wide + 1.4, high + 2.9) if at_server else (2 * wide + 1.2, high + 1.5)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if at_server:
        bars, axis = figure.subplots(2, 1, height_ratios=[1.2, high])
        _server(bars, np.bincount(labels[federation.server.labelled], minlength=classes))
        panels = {"unlabelled": axis}
    else:
        shown = [side for side in SIDES if sides[side].any()] or ["labelled"]
        figure.set_size_inches(len(shown) * wide + 1.2, high + 1.5)
        panels = dict(zip(shown, np.atleast_1d(figure.subplots(1, len(shown), sharey=True))))
    for side, axis in panels.items():
        (_bubbles if bubbles else _heat)(figure, axis, sides[side], COLOURS[side])
        _label_classes(axis, classes, class_names, 0.0 if bubbles else 0.5)
        axis.set_title(_title(federation, side, sides[side]), fontsize=9.5, color=INK, loc="left")
    _label_clients(next(iter(panels.values())), federation.names, 0.0 if bubbles else 0.5)
    hidden = [_title(federation, side, sides[side]) for side in SIDES if side not in panels and not at_server]
    figure.suptitle("\n".join([_headline(federation), *hidden]), fontsize=10.5, color=INK)
    figure.savefig(path, metadata=targets.tags("split", path.suffix.lower()[1:]))
    return path


def _panel_size(clients: int, classes: int, bubbles: bool) -> tuple[float, float]:
    """Inches."""
    if bubbles:
        return max(2.4, 0.36 * classes), max(1.2, 0.38 * clients)
    return min(max(3.2, 0.07 * classes), 8.0), min(max(2.5, 0.075 * clients), 40.0)


def _headline(federation: Federation) -> str:
    spec = federation.spec
    head = f"{len(federation.clients)} clients · labels={spec.get('labels', '?')} · {spec.get('partition', '')}"
    both = spec.get("unlabelled_partition") in (None, spec.get("partition"))
    return head if both else f"{head} | {spec['unlabelled_partition']}"


def _title(federation: Federation, side: str, counts: Ints) -> str:
    total, known = sum(len(getattr(client, side)) for client in federation.clients), int(counts.sum())
    r = measured(counts)
    text = f"{side}: {total:,}" + (f" ({known:,} of known class)" if 0 < known < total else " of unknown class" if known < total else "")
    return text + (f", R = {r:.3f}" if r is not None else "")


def _server(axis: Any, counts: Ints) -> None:
    axis.bar(np.arange(len(counts)), counts, width=0.8, color=COLOURS["labelled"][1])
    axis.set_title(f"labelled, at the server: {int(counts.sum()):,}", fontsize=9.5, color=INK, loc="left")
    axis.set_xlim(-0.6, len(counts) - 0.4)
    axis.set_xticks([])
    axis.grid(axis="y", color=GRID, linewidth=0.6)
    _bare(axis)


def _bubbles(figure: Any, axis: Any, counts: Ints, colours: tuple[str, str, str]) -> None:
    """One disc per client and class, its area as the count."""
    from matplotlib.collections import EllipseCollection

    clients, classes = np.nonzero(counts)
    axis.set_xlim(-0.6, counts.shape[1] - 0.4)
    axis.set_ylim(len(counts) - 0.4, -0.6)
    axis.grid(color=GRID, linewidth=0.6)
    if len(clients):
        held = counts[clients, classes]
        diameter = np.maximum(0.88 * np.sqrt(held / held.max()), 0.1)
        unit: Any = "x" if axis.bbox.width / counts.shape[1] <= axis.bbox.height / counts.shape[0] else "y"
        discs = EllipseCollection(
            diameter, diameter, np.zeros(len(clients)), units=unit, offsets=np.c_[classes, clients],
            offset_transform=axis.transData, facecolor=colours[1], alpha=0.88, linewidth=0,
        )  # fmt: skip
        axis.add_collection(discs)
    axis.set_xlabel(f"class   (largest disc: {counts.max(initial=0):,})", fontsize=8, color=PALE)
    _bare(axis)


def _heat(figure: Any, axis: Any, counts: Ints, colours: tuple[str, str, str]) -> None:
    """One cell per client and class, its depth as the count; nothing is white."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    depth = LinearSegmentedColormap.from_list("depth", ["#ffffff", *colours])
    norm = PowerNorm(0.5, vmin=0, vmax=max(int(counts.max(initial=0)), 1))
    cells = axis.pcolormesh(np.ma.masked_equal(counts, 0), cmap=depth, norm=norm, rasterized=True)
    axis.set_ylim(len(counts), 0)
    axis.set_xlabel("class", fontsize=8, color=PALE)
    bar = figure.colorbar(cells, ax=axis, location="bottom", shrink=0.6, aspect=40, pad=0.02)
    bar.set_ticks(np.unique(np.rint(norm.vmax * np.array([0, 1 / 9, 4 / 9, 1]))))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2, color="#aaaaaa", labelcolor=INK)
    _bare(axis)


def _bare(axis: Any) -> None:
    axis.set_axisbelow(True)
    axis.tick_params(length=0, labelsize=8, labelcolor=INK)
    for spine in axis.spines.values():
        spine.set_color(GRID)


def _ticks(count: int, most: int) -> Ints:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**4, 10**6) if count <= most * s)
    return np.arange(0, count, step)


def _label_classes(axis: Any, classes: int, names: Sequence[str] | None, centre: float) -> None:
    at = _ticks(classes, 20)
    axis.set_xticks(at + centre)
    if names is None:
        axis.set_xticklabels([str(k) for k in at])
    else:
        axis.set_xticklabels([names[k] for k in at], rotation=45, ha="right", rotation_mode="anchor")


def _label_clients(axis: Any, names: Sequence[str], centre: float) -> None:
    at = _ticks(len(names), 26)
    axis.set_yticks(at + centre)
    axis.set_yticklabels([names[i][:24] for i in at])
    axis.set_ylabel("client", fontsize=8, color=PALE)


def lines(summary: dict[str, Any]) -> list[str]:
    """A federation's summary for people: `name: value`, rounded; what is not known is left out.

    >>> lines({"clients": 3, "r_labelled": 0.0196248, "r_unlabelled": None, "labelled_sizes": (28, 33.0, 35)})
    ['clients: 3', 'R labelled: 0.020', 'labelled sizes: 28 to 35, median 33']
    """
    found = []
    for name, value in summary.items():
        words = name.replace("_", " ").replace("r ", "R ", 1) if name.startswith("r_") else name.replace("_", " ")
        if isinstance(value, tuple):
            low, median, high = value
            value = f"{low:g} to {high:g}, median {median:g}"
        elif isinstance(value, float):
            value = f"{value:.3f}" if name.startswith("r_") else f"{value:.4g}"
        if value is not None:
            found.append(f"{words}: {value}")
    return found
