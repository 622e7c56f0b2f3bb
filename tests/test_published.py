"""Every method that a published table names stands for something that can be run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fallow
from fallow.recipes.grid import Cell, Grid
from fallow.recipes.reading import recipe
from fallow.tables.published import figures

ELSEWHERE = {"FedCon", "FedIRM", "Fed-Consist"}  # other people's systems that (FL)2's, RSCFed's and CBAFed's tables quote
TINY: dict[str, Any] = {
    "data": "few-digits", "model": "small-cnn", "image": {"normalise": None}, "clients": 3, "active": None, "rounds": 1, "steps": 1, "epochs": None,
    "batch": 8, "server_batch": None, "server_epochs": None, "server_steps": 1, "partition": "iid", "unlabelled_partition": None,
    "label_ratio": None, "label_per_class": None, "labelled_clients": None, "labelled_pick": "random", "warmup_rounds": 0, "device": "cpu", "slots": 1, "strong_views": 1, "schedule": "constant",
}  # fmt: skip
FOREIGN = {  # systems of papers with code of their own, and where their own figures are printed
    "FedMatch": "", "FML": "", "semiFed": "", "HeteroFL": "", "EASGD": "", "OverlapSGD": "", "DataSharing": "", "Pi-Model": "", "Pseudo-Labeling": "",
    "Mean Teacher": "", "MixMatch": "", "ReMixMatch": "", "UDA": "", "FixMatch": "", "SemiFL": "semifl", "FedRGD": "fedrgd", "FedLoKe": "fedloke",
    "FedDure": "feddure", "FedDB": "feddb", "RSCFed": "rscfed", "FedLabel": "", "Fixed labels": "",
}  # fmt: skip


def places(name: str) -> list[tuple[str, Grid, Cell]]:
    """Where a method is printed: the recipe of the table, and a cell of it."""
    found = {}
    for f in figures():
        table = f"{f.paper}/{f.table}"
        if f.method == name and table not in found:
            grid = Grid.of(recipe(table))
            assert grid is not None
            found[table] = grid, next(c for c in grid.cells if (c.data, c.setting) == (f.data, f.setting))
    return [(table, *pair) for table, pair in found.items()]


NAMES = sorted({f.method for f in figures()})


def test_only_other_peoples_systems_are_missing_in_a_table() -> None:
    assert {name for name in NAMES if any(grid.missing(name) for _, grid, _ in places(name))} == ELSEWHERE


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ELSEWHERE])
def test_a_round_of_every_published_method(name: str, tmp_path: Path) -> None:
    """The row's settings with small data, a small net and little work."""
    _, grid, cell = next((table, grid, cell) for table, grid, cell in places(name) if not grid.missing(name))
    keys = grid.keys(name, cell)
    small = {k: v for k, v in TINY.items() if k in keys or k not in ("server_steps", "strong_views")}
    small |= {"label_count": 60 if keys.get("labels") != "all" else None, "clients": min(3, int(keys.get("clients", 3)))}
    small |= {"batch": "full"} if keys.get("batch") == "full" else {}
    small |= {"defaults": "paper"}
    small |= {"groups": 1} if keys.get("groups") else {}
    result = fallow.run(dict(keys) | small, out=tmp_path, quiet=True)
    assert len(result.metrics) == 1 and result.metrics[0]["accuracy"] is not None


def test_another_papers_system_is_marked_as_what_it_stands_for() -> None:
    """A row under another paper's name is that table's own version of it, and the recipe says whose."""
    unmarked = []
    for name in NAMES:
        system = name.removesuffix("-FedDPL")
        for table, grid, _ in places(name):
            if system in FOREIGN and not table.startswith(FOREIGN[system] or "-") and not grid.missing(name) and not grid.rows[name].get("stands_for"):
                unmarked.append(f"{table}: {name}")
    assert not unmarked
