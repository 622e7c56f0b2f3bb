"""What there is, as rows for printing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fallow.errors import UserError, suggest
from fallow.measure.told import NAMES, of_summary, valued

Rows = list[tuple[str, ...]]
GROUPS = ("founding", "federated", "supervised", "central")  # of methods
KINDS = ("methods", "datasets", "models", "partitions", "recipes", "views", "figures")


def rows(what: str, data_dir: str | None = None, times: bool = False) -> Rows:
    """A title row and the rows of one kind; of recipes with the time they take here, if `times`."""
    if what not in KINDS:
        raise UserError(f"there is nothing to list under {what!r}", suggest(what, KINDS))
    return {
        "methods": _methods, "models": _models, "partitions": _partitions, "views": _views, "figures": _figures,
        "recipes": _recipes_with_times if times else _recipes, "datasets": lambda: _datasets(data_dir),
    }[what]()  # fmt: skip


def _methods() -> Rows:
    from fallow.methods import REGISTERED, find

    out: Rows = [("method", "group", "what", "paper", "labels at", "a client keeps", "travels")]
    for name in sorted(REGISTERED, key=lambda name: GROUPS.index(find(name).group)):
        m = find(name)
        what = (m.__doc__ or "").splitlines()[0].split(".  ")[0].rstrip(".")
        out.append((name, m.group, what, m.paper, " ".join(sorted(m.scenarios)), m.keeps, m.sends))
    return out


def _datasets(data_dir: str | None) -> Rows:
    from fallow.data.sources import names

    out: Rows = [("data set", "what", "classes", "size", "files under the data folder", "there")]
    for d in names(data_dir):
        there = "" if d.present is None else "yes" if d.present else "no"
        out.append((d.name, d.what, str(d.classes or ""), str(d.size or ""), str(d.where), there))
    return out


def _models() -> Rows:
    from fallow import models

    out: Rows = [("model", "parameters (10 classes, colour)", "norm by default")]
    import torch

    for name in models.names():
        with torch.device("meta"):
            count = sum(p.numel() for p in models.build(name, 10, 3).parameters())
        out.append((name, f"{count:,}", models.default_norm(name) or ""))
    return out


def _partitions() -> Rows:
    from fallow.data.partitions import PARTITIONS

    return [("partition", "what", "used by", "for example"), *[(p.name, p.line, p.paper, p.example) for p in PARTITIONS.values()]]


def _recipes() -> Rows:
    from fallow.names import recipes
    from fallow.trees import read_yaml

    return [("recipe", "what"), *[(n, str(read_yaml(p).get("about", ""))) for n, p in recipes().items()]]


TIMES = (
    "Times are estimates for this machine, good to about a factor of two: images of a round by what one step of the model was "
    "measured to take, every pseudo-label taken as accepted. A run: of the paper's own method, over the table's cells."
)


def _recipes_with_times() -> Rows:
    from fallow.durations import format_duration, span
    from fallow.runs.speed import speed
    from fallow.tables.times import of_recipe

    title, *body = _recipes()
    out: Rows = [(*title, "a run", "runs", "all of them")]
    for row in body:
        e = of_recipe(row[0], speed)
        out.append((*row, *(("", "", "") if e is None else (span(e.shortest, e.longest), str(e.runs), format_duration(e.total)))))
    return out


VIEWS = {
    "plain": ("normalised only", "tests"),
    "weak": ("mirrored or not, cropped after reflect padding by an eighth", "all but FedMatch"),
    "weak-resize": ("made larger by a quarter, mirrored or not, cropped", "RSCFed, CBAFed"),
    "weak-resize-eighth": ("the same, larger by an eighth", "CBAFed on Fashion-MNIST"),
    "weak-zero-cutout": ("mirrored or not, cropped after zero padding, half-sided Cutout", "FedDure's labelled images"),
    "ra-mc": ("weak, 2 of 14 ops each with p = 1/2 at a level of 1 to 9, Cutout", "the default; FedDure, FedRGD"),
    "ra-semifl": ("weak, 2 of 15 ops each with p = 1/2 at full strength", "SemiFL, FedDB"),
    "ra-semifl-scaled": ("ra-semifl with Cutout and translations in proportion to the image", "new studies"),
    "ra-torchvision": ("weak, 2 of 14 ops at magnitude 9 of 30", "FedLoKe"),
    "ra-torchvision-tensor": ("the same with torchvision's tensor arithmetic", "FedLoKe, to the letter"),
    "ra-fedmatch": ("6 of 13 ops at small levels, neither mirrored nor cropped", "FedMatch"),
    "ra-usb": ("weak, 3 of 14 ops at continuous levels, Cutout of up to half the side", "USB, TorchSSL"),
    "ra-fixmatch": ("weak, 2 of 14 ops each with p = 1/2, grey outside, clipped Cutout", "FixMatch's own code"),
}


def _views() -> Rows:
    from fallow.data.views import view_names

    return [("view", "what it does to an image", "used by"), *[(name, *VIEWS.get(name, ("", ""))) for name in view_names()]]


def _figures() -> Rows:
    from fallow.report.figures import described

    return [("figure", "what"), *described()]


LONGEST = 24  # runs that are listed one by one


def run_rows(paths: list[str], scores: Sequence[str] = ()) -> tuple[Rows, list[str]]:
    """Runs side by side: what they are, where they ended, and scores by name; and a sentence for each that cannot be read."""
    from fallow.runs import load_result
    from fallow.runs.finding import found

    body: Rows = []
    told: list[list[str]] = []
    left_out: list[str] = []
    there = found(paths)
    for path in there:
        try:
            result = load_result(path)
            body.append(_run_row(result))
        except UserError as e:
            if len(there) == 1:
                raise
            left_out.append(f"Left out: {e.cause}.")
        else:
            told.append([_score(result.summary, name) for name in scores])
    for name, values in zip(scores, zip(*told)):
        if not any(values):
            raise UserError(f"no run has a score {name!r}", suggest(name, [*NAMES, "validation.best"]))
    title = ("run", "method", "data", "labels", "seed", "rounds", "last %", "best %", "labelled %", "s/round")
    return [(*title, *scores), *((*row, *values) for row, values in zip(body, told))], left_out


def _score(summary: dict[str, Any], name: str) -> str:
    value = of_summary(summary, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return valued(name.rpartition(".")[2], value) if is_number else ""


def _run_row(result: Any) -> tuple[str, ...]:
    s, o, last = result.summary, result.config, (result.metrics or [{}])[-1]
    ratio = last.get("label_ratio")
    return (
        str(result.path), s["method"], s["data"], o.labels, str(s["seed"]), str(s["rounds"]),
        "" if s["last"] is None else f"{100 * s['last']:.2f}", "" if s["best"] is None else f"{100 * s['best']:.2f}",
        "" if ratio is None else f"{100 * ratio:.0f}", f"{s['seconds_per_round']:.2f}",
    )  # fmt: skip


def cached() -> Rows:
    """Decoded images that are kept, the last used first."""
    from datetime import datetime

    from fallow.data.readers import kept
    from fallow.limits import amount

    found = kept.entries()
    title = ("images of", "images", "takes", "last used", f"in {kept.home()}")
    rows = [(e.data, f"{e.images:,}", amount(e.bytes), datetime.fromtimestamp(e.used).strftime("%Y-%m-%d %H:%M"), e.path.name) for e in found]
    return [title, *(rows or [("nothing is kept", "", "", "", "")])]
