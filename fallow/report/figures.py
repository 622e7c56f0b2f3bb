"""`fallow figure`: figures for papers, as PNG, SVG (text stays text) or PDF."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fallow import disk, targets
from fallow.errors import UserError, suggest
from fallow.lettering import every_script
from fallow.report import series
from fallow.report.partition import partition
from fallow.report.series import Curve, Group
from fallow.said import warn

COLUMN = 3.5  # inches, a column of a two-column page
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, told apart by all
DASHES = ("-", "--", "-.", ":")
STYLE: Any = {
    "font.family": "sans-serif", "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 2.5, "ytick.major.size": 2.5,
    "lines.linewidth": 1.2, "legend.frameon": False, "legend.handlelength": 2.2, "legend.borderaxespad": 0.3,
    "svg.fonttype": "none", "svg.hashsalt": "fallow", "pdf.fonttype": 42, "savefig.dpi": 300,
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    groups: list[Group]
    width: float
    parts: list[str]  # of a column that has several, those that were asked for


def figure(
    name: str,
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    width: float = COLUMN,
    names: Sequence[str] | None = None,
    parts: Sequence[str] = (),
    force: bool = False,
) -> str:
    """Draws one of FIGURES of some runs; returns a caption."""
    import matplotlib
    from matplotlib.figure import Figure

    if name not in FIGURES:
        raise UserError(f"there is no figure {name!r}", suggest(name, FIGURES))
    path = Path(out)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"a figure cannot be written as {path.name!r}", "end the name in .png, .svg or .pdf")
    if not 1 <= width <= 20:
        raise UserError(f"--width {width:g} is no width of a figure", "give inches, such as 3.5 for a column or 7 for a page")
    targets.file(path, "figure", force)
    groups = series.groups(paths, names, tell=lambda sentence: warn(sentence.rstrip(".")))
    with matplotlib.rc_context(STYLE), every_script():
        canvas = Figure(layout="constrained")
        caption = FIGURES[name](canvas, Request(groups, width, list(parts)))
        image, kind = io.BytesIO(), path.suffix.lower()[1:]
        canvas.savefig(image, format=kind, metadata=targets.tags("figure", kind))
        disk.write(path, image.getvalue(), "choose another with -o")
    return caption


# -- curves ------------------------------------------------------------------------------------------------------------
def _accuracy(canvas: Any, r: Request) -> str:
    canvas.set_size_inches(r.width, 0.68 * r.width)
    axis = canvas.subplots()
    curves = [series.curve(g, "accuracy") for g in r.groups]
    _lines(axis, [(g.label, c, 0) for g, c in zip(r.groups, curves)], 100)
    _finish(axis, "Round", "Test accuracy (%)")
    _legend(canvas, axis)
    return f"Test accuracy over rounds{_band(curves)}."


def _labels(canvas: Any, r: Request) -> str:
    """Share of unlabelled images that got a label above, their accuracy below, unless no run knows the true ones."""
    rows = {"label_ratio": "Pseudo-labelled (%)", "label_accuracy": "Label accuracy (%)"}
    about = "Unlabelled images that got a pseudo-label (above), and how many of these labels are right (below)"
    if not any(series.has(run, "label_accuracy") for g in r.groups for run in g.runs):
        rows, about = {"label_ratio": rows["label_ratio"]}, "Unlabelled images that got a pseudo-label"
    canvas.set_size_inches(r.width, (0.16 + 0.45 * len(rows)) * r.width)
    axes, drawn = np.atleast_1d(canvas.subplots(len(rows), sharex=True)), list[Curve]()
    for axis, (column, title) in zip(axes, rows.items()):
        curves = [series.curve(g, column) if axis is axes[0] or _knows(g, column) else None for g in r.groups]
        _lines(axis, [(g.label, c, 0) for g, c in zip(r.groups, curves)], 100)
        drawn = drawn or [c for c in curves if c]
        _finish(axis, "Round" if axis is axes[-1] else "", title)
    _legend(canvas, axes[0])
    return f"{about}{_band(drawn)}."


def _knows(group: Group, column: str) -> bool:
    return all(series.has(run, column) for run in group.runs)


def _labellers(canvas: Any, r: Request) -> str:
    canvas.set_size_inches(r.width, 0.68 * r.width)
    axis = canvas.subplots()
    lines = [(_both(g.label, who, r), series.curve(g, f"label_accuracy_{who}"), n) for g in r.groups for n, who in enumerate(("global", "local"))]
    _lines(axis, lines, 100, per_group=2)
    _finish(axis, "Round", "Label accuracy (%)")
    _legend(canvas, axis)
    return f"Accuracy of the pseudo-labels of the global and of the clients' local models{_band([c for _, c, _ in lines])}."


PRIORS = {"labels": "labelled classes", "appu": "APP-U", "bias": "even share"}


def _bias(canvas: Any, r: Request) -> str:
    """FedDB's Fig. 3: how far a model's bias is from what stands for it; of one run with the spread over clients."""
    known = series.parts(r.groups, "prior_js")
    chosen = _chosen("prior_js", r.parts, known) or [n for n in ("labels", "appu") if n in known] or known
    words = {n: PRIORS.get(n.removesuffix("_local"), n) + (", local models" if n.endswith("_local") else "") for n in chosen}
    lines, axis = _many(canvas, r, "prior_js", words, "JS divergence")
    band = _band(lines)
    if not band and all(series.has(run, f"prior_js_{end}") for g in r.groups for run in g.runs for end in ("min", "max")):
        band = "; mean, least and largest over a round's clients"
        ends = [[series.curve(g, f"prior_js_{end}", part).mean for end in ("min", "max")] for g in r.groups for part in chosen]
        for line, c, (low, high) in zip(axis.lines, lines, ends):
            axis.fill_between(c.rounds, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axis.autoscale(axis="y")
        axis.set_ylim(bottom=0)
    return f"Jensen-Shannon divergence, over rounds, of a model's bias from: {'; '.join(words.values())}{band}."


def _diversity(canvas: Any, r: Request) -> str:
    known = series.parts(r.groups, "diversity")
    chosen = _chosen("diversity", r.parts, known) or [n for n in ("update/users/l2-squared",) if n in known] or known[:1]
    lines, _ = _many(canvas, r, "diversity", {n: n for n in chosen}, "Gradient diversity")
    return f"Gradient diversity ({', '.join(chosen)}) over rounds{_band(lines)}."


def _chosen(column: str, asked: list[str], known: list[str]) -> list[str]:
    for name in asked:
        if name not in known:
            raise UserError(f"{column} has no part {name!r} in all of these runs", suggest(name, known))
    return asked


def _many(canvas: Any, r: Request, column: str, words: dict[str, str], title: str) -> tuple[list[Curve], Any]:
    """Some parts of a column, by name with a word for each: a colour per group, a dash per part."""
    canvas.set_size_inches(r.width, 0.68 * r.width)
    axis, several = canvas.subplots(), len(words) > 1
    lines = [
        (_both(g.label, word if several else "", r), series.curve(g, column, part), n)
        for g in r.groups for n, (part, word) in enumerate(words.items())
    ]  # fmt: skip
    _lines(axis, lines, 1, per_group=len(words))
    axis.set_ylim(bottom=0)
    _finish(axis, "Round", title)
    _legend(canvas, axis)
    return [c for _, c, _ in lines], axis


def _both(group: str, part: str, r: Request) -> str:
    return ", ".join(filter(None, [group if len(r.groups) > 1 or not part else "", part]))


def _lines(axis: Any, lines: Sequence[tuple[str, Curve | None, int]], scale: float, per_group: int = 1) -> None:
    """Lines with their bands. One group with several parts takes colours for these; a missing line keeps its colour."""
    for place, (label, c, part) in enumerate(lines):
        if c is None:
            continue
        alone = per_group == len(lines)
        colour = COLOURS[(place if alone else place // per_group) % len(COLOURS)]
        dense = per_group == 1 and len(c.rounds) > 60  # dashes say nothing on a jagged line
        dash = "-" if dense else DASHES[(place if alone or per_group == 1 else part) % len(DASHES)]
        dot = "o" if len(c.rounds) == 1 else None
        axis.plot(c.rounds, scale * c.mean, color=colour, linestyle=dash, label=label, marker=dot, markersize=3)
        if c.count > 1:
            low, high = scale * (c.mean - c.std), scale * (c.mean + c.std)
            if scale == 100:  # shares, of which there are none below 0 % or above 100 %
                low, high = np.clip(low, 0, 100), np.clip(high, 0, 100)
            axis.fill_between(c.rounds, low, high, color=colour, alpha=0.18, linewidth=0)


def _finish(axis: Any, below: str, left: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel(below)
    axis.set_ylabel(left)
    axis.margins(x=0.02)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))


def _legend(canvas: Any, axis: Any, outside: bool = False) -> None:
    """Inside where it is short, else above the axes, on a figure that is higher by as much; none for a single line."""
    handles, labels = axis.get_legend_handles_labels()
    if len(labels) < 2:
        return
    if not outside and len(labels) <= 4 and max(map(len, labels)) <= 24:
        axis.legend(loc="best")
        return
    width, height = canvas.get_size_inches()
    wrapped = [textwrap.fill(label, int(14 * width) - 6, break_on_hyphens=False) for label in labels]
    canvas.set_size_inches(width, height + 0.14 * sum(1 + w.count("\n") for w in wrapped))
    canvas.legend(handles, wrapped, loc="outside upper left", ncols=1)


def _band(curves: Sequence[Curve]) -> str:
    counts = sorted({c.count for c in curves})
    if counts == [1]:
        return ""
    return f"; mean and standard deviation over {' or '.join(map(str, counts))} seeds"


# -- classes -----------------------------------------------------------------------------------------------------------
def _classes(canvas: Any, r: Request) -> str:
    """A dot per class and group after the last round, with the spread over seeds."""
    values = [np.array([series.last_list(run, "class_accuracy") for run in g.runs]) for g in r.groups]
    count = values[0].shape[1]
    if any(v.shape[1] != count for v in values):
        raise UserError("these runs have different numbers of classes", "give runs on one data set")
    canvas.set_size_inches(max(r.width, min(7.0, 0.16 * count)), 0.62 * r.width)
    axis, shift = canvas.subplots(), 0.5 / max(1, len(values))
    for place, (group, v) in enumerate(zip(r.groups, values)):
        x = np.arange(count) + (place - (len(values) - 1) / 2) * shift
        spread = 100 * v.std(0) if len(v) > 1 else None
        axis.errorbar(x, 100 * v.mean(0), spread, fmt="osD^vPX"[place % 7], color=COLOURS[place % 7], markersize=3, elinewidth=0.8, label=group.label)
    axis.set_ylim(-3, 103)
    _finish(axis, "Class", "Test accuracy (%)")
    _class_ticks(axis, _class_names(r.groups[0], count))
    _legend(canvas, axis, outside=True)  # its markers would be taken for classes'
    curves = [Curve(np.zeros(1), v, v, len(v)) for v in values]
    return f"Test accuracy by class, last round{_band(curves)}."


def _class_names(group: Group, count: int) -> list[str]:
    names = group.runs[0].summary.get("class_names", [])
    return list(names) if len(names) == count else [str(i) for i in range(count)]


def _class_ticks(axis: Any, names: list[str]) -> None:
    step = -(-len(names) // 20)
    at = range(0, len(names), step)
    axis.set_xticks(list(at))
    turned = max(len(n) for n in names) > 3
    axis.set_xticklabels([names[i] for i in at], rotation=45 if turned else 0, ha="right" if turned else "center", rotation_mode="anchor")


def _partition(canvas: Any, r: Request) -> str:
    runs = [run for g in r.groups for run in g.runs]
    if len(runs) > 1:
        raise UserError("the figure partition is of one run", f"give one of them, such as {runs[0].path}")
    return partition(canvas, runs[0], r.width)


FIGURES: dict[str, Callable[[Any, Request], str]] = {
    "accuracy": _accuracy,
    "labels": _labels,
    "labellers": _labellers,
    "partition": _partition,
    "bias": _bias,
    "diversity": _diversity,
    "classes": _classes,
}


def described() -> Iterator[tuple[str, str]]:
    """Each figure and what it shows."""
    yield from {
        "accuracy": "test accuracy over rounds, mean and band over seeds",
        "labels": "share of unlabelled images with a pseudo-label, and its accuracy",
        "labellers": "accuracy of the global and of local models' pseudo-labels",
        "partition": "who holds how many images of which class (one run)",
        "bias": "divergence of a model's bias from the labelled classes and from APP-U, over rounds",
        "diversity": "gradient diversity over rounds",
        "classes": "test accuracy of each class after the last round",
    }.items()
