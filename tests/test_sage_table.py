"""Every row of SAGE's table, and of the table of other methods in its settings, loads and makes a round on an excerpt written here."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fallow
from fallow.recipes.grid import Grid
from fallow.recipes.reading import recipe
from fallow.runs.settings import resolve

SMALL: dict[str, Any] = {
    "label_count": 40, "clients": 2, "active": 2, "rounds": 1, "steps": 1, "batch": 4, "model": "small-cnn", "norm": "bn", "device": "cpu", "slots": 1,
}  # fmt: skip
GRIDS = {name: Grid.of(recipe(name)) for name in ("sage/table1", "sage/others")}
ROWS = [(name, row) for name, grid in GRIDS.items() for row in grid.rows if not grid.missing(row)]


@pytest.fixture(scope="module")
def excerpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10's files with 20 images in each of the five batches and in the test batch."""
    place = tmp_path_factory.mktemp("data")
    folder = place / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        images = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({b"data": images, b"labels": [i % 10 for i in range(20)]}, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [f"class{i}".encode() for i in range(10)]}, protocol=2))
    return place


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_every_row_makes_a_round(name: str, row: str, excerpt: Path, tmp_path: Path) -> None:
    keys = SMALL | {"method": row, "data": "cifar10", "setting": "cifar10 labels=10% alpha=0.1", "data_dir": str(excerpt)}
    keys |= {"unlabelled_batch": 8} if row != "FedLoKe" else {}
    result = fallow.run(name, out=tmp_path, **keys)
    assert len(result.metrics) == 1 and result.metrics[0]["loss"] is not None


def test_the_papers_net_makes_a_round(excerpt: Path, tmp_path: Path) -> None:
    keys = SMALL | {"model": "resnet8", "unlabelled_batch": 8, "data": "cifar10", "setting": "cifar10 labels=10% alpha=0.1", "data_dir": str(excerpt)}
    metrics = fallow.run("sage/table1", out=tmp_path, **keys).metrics
    assert metrics[0]["bytes_down"] == metrics[0]["bytes_up"] == 2 * (4_910_376 + 10_752 + 8 * 9), "the model, its statistics, a counter per norm"


def test_the_setting() -> None:
    keys = recipe("sage/table1")
    for data, rounds, steps, labels in (("cifar10", 300, 95, 5000), ("cifar100", 500, 95, 5000), ("svhn", 150, 140, 4600), ("cinic10", 400, 175, 9000)):
        o = resolve(keys, {"data": data, "setting": "labels=10% alpha=0.5"})[1]
        assert (o.method, o.rounds, o.steps, o.label_count, o.partition) == ("sage", rounds, steps, labels, "dirichlet-pairs:0.5")
        assert (o.clients, o.active_count, o.batch, o.unlabelled_batch, o.lr, o.nesterov, o.weight_decay) == (20, 8, 128, 256, 0.1, False, 1e-4)
    shared = ("steps", "batch", "lr", "momentum", "weights", "partition", "labelled_as_unlabelled", "model", "augment", "clip", "clip_value")
    cell = {"data": "cifar10", "setting": "labels=10% alpha=0.1"}
    own = resolve(keys, cell)[1].model_dump()
    for name, row in ROWS:
        o = resolve(recipe(name), cell | {"method": row})[1].model_dump()
        assert all(o[k] == own[k] for k in shared if not (row == "FedMatch" and k in ("lr", "momentum"))), row
    assert resolve(keys, cell | {"method": "FixMatch-GPL"})[1].labeller == "received-each"
    assert resolve(keys, cell | {"method": "FedLabel"})[1].trust == "surer"
