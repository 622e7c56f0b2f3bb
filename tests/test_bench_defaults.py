"""What bench/defaults.py counts and writes, on runs that are made up, and the photographs it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from bench import defaults
from bench.photographs import KINDS, photographs
from fallow.data.sources import ImageSet
from fallow.errors import UserError


def run(method: str, accuracy: float, partition: str = "IID", amount: str = "few", seed: int = 0, tried: str = "") -> dict[str, Any]:
    place = {"set": "digits", "partition": partition, "amount": amount, "labels": "clients"}
    return place | {"method": method, "seed": seed, "tried": tried, "accuracy": accuracy, "settings": "40 rounds"}


RUNS = [
    run("fedavg", 0.70), run("fixmatch", 0.75), run("fedavg", 0.80, seed=1), run("fixmatch", 0.83, seed=1), run("uda", 0.5, seed=2),
    run("fedavg", 0.60, partition="Dirichlet"), run("fixmatch", 0.58, partition="Dirichlet"),
    run("fedavg", 0.65, tried="steps=5"), run("fixmatch", 0.71, tried="steps=5"), run("fixmatch", 0.73, tried="threshold=0.9"),
]  # fmt: skip


def test_a_gain_is_over_labels_alone_of_the_same_federation_and_seed() -> None:
    """What was tried for labels alone too is compared with that; without labels alone there is no gain."""
    found = {(key[1], *key[4:]): {s: round(v, 6) for s, v in values.items()} for key, values in defaults.gains(RUNS).items()}
    assert found == {
        ("IID", "fixmatch", ""): {0: 5.0, 1: 3.0}, ("Dirichlet", "fixmatch", ""): {0: -2.0}, ("IID", "fixmatch", "steps=5"): {0: 6.0},
        ("IID", "fixmatch", "threshold=0.9"): {0: 3.0}, ("IID", "fedavg", "steps=5"): {0: -5.0},
    }  # fmt: skip


def test_the_table() -> None:
    """A mean only where all four federations have a run; seeds that not all of them have are in brackets."""
    facts = {"commit": "abc", "torch": "2", "seconds": 60, "jobs": 2, "cpu_seconds": 120}
    text = defaults.markdown(RUNS, facts)
    assert "| labels alone | 75.0 (70.0 80.0) |  | 60.0 |  |  | (0) (1) | 40 rounds |" in text
    assert "| fixmatch | +4.0 (+5.0 +3.0) |  | -2.0 |  |  | (0) (1) | 40 rounds |" in text
    assert "- digits: seed 0: 4 of 36 runs, seed 1: 2 of 36 runs, seed 2: 1 of 36 runs." in text
    assert "- fashion-mnist: not run." in text
    assert "lowest accuracy of any run is 50.0 % (uda, IID, few, seed 2); guessing one of 10 classes has 10 %." in text
    more = [run(m, a, p, amount, seed) for p, amount in defaults.FEDERATIONS for m, a in (("fedavg", 0.5), ("uda", 0.6)) for seed in (0, 1)]
    more[-1]["accuracy"] = 0.64  # one of the eight gains is 14 points: its seed's mean is 11
    text = defaults.markdown(more, facts)
    assert "| uda | +10.0 (+10.0 +10.0) | +10.0 (+10.0 +10.0) | +10.0 (+10.0 +10.0) | +12.0 (+10.0 +14.0) | +10.5 (+10.0 +11.0) | 0 1 |" in text
    assert "- digits: seed 0: 8 of 36 runs, seed 1: 8 of 36 runs; no other seed." in text


def test_what_is_tried() -> None:
    found = list(defaults.tries(["fixmatch, uda: threshold=0.6|0.8 lr=0.1|0.2", "all: steps=5"]))
    assert found[:4] == [(["fixmatch", "uda"], f"threshold={t} lr={r}") for t in (0.6, 0.8) for r in (0.1, 0.2)]
    assert found[4] == (["fedavg", *defaults.METHODS], "steps=5")
    with pytest.raises(UserError, match="is not METHODS: KEY=VALUE"):
        list(defaults.tries(["threshold=0.6"]))


def test_photographs_are_files_of_many_sizes(tmp_path: Path) -> None:
    labels = torch.arange(60) % 10
    photographs(ImageSet(torch.zeros(60, 3, 32, 32, dtype=torch.uint8), labels), tmp_path)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) == 6 * len(KINDS) and {p.suffix for p in files} == {".png", ".jpg"}
    assert {p.parent.name for p in files} == set(KINDS)
    assert len({Image.open(p).size for p in files}) > 20


def test_the_pages_have_the_figures_of_the_committed_runs() -> None:
    root = Path(__file__).parents[1]
    facts = json.loads((root / "results/bench/defaults.json").read_text())
    runs = facts.pop("runs")
    assert (root / "results/bench/defaults.md").read_text() == defaults.markdown(runs, facts), "write it with bench.defaults"
    assert defaults.brief(runs) in (root / "docs/defaults.md").read_text()
