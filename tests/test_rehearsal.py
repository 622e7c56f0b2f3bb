"""`fallow run ... --dry-run`: nothing is run, and what is said is what a run would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

from fallow.runs import estimate, prepare, rehearsal
from fallow.runs.speed import Speed

WORDS = [f"{k}={v}" for k, v in TINY.items()]


def slow(*_: Any) -> Speed:
    return Speed(2.0, 0.5)  # seconds an image


def test_what_is_said() -> None:
    keys = TINY | {"method": "fedavg", "steps": 5, "rounds": 3, "eval_every": 1}
    said = dict(line.split(": ", 1) for line in rehearsal.lines(None, keys, measure=slow))
    assert said["federation"] == "4 clients with 10 labelled and 50 unlabelled images each"
    assert said["settings"].startswith("method=fedavg data=few-digits ") and " clients=4 " in said["settings"] and "momentum" not in said["settings"]
    # 3 rounds of 2 clients with 5 steps of 8 images (there are 10: 8 and 2, again and again), and of 60 predicted ones
    images = 2 * (8 + 2 + 8 + 2 + 8)
    assert said["time"].startswith(f"about {3 * (2 * images + 30) / 60:.1f} min on cpu")


def test_the_largest_step() -> None:
    """FixMatch: 8 labelled images, and two views of 20 unlabelled ones; labels at the server: its own batch of 30."""
    method, options, _, _ = prepare(None, TINY | {"method": "fixmatch", "unlabelled_batch": 20})
    assert estimate.largest_step(method, options, 240, 10) == 8 + 2 * 20
    method, options, _, _ = prepare(None, TINY | {"method": "fedavg", "labels": "server", "server_batch": 30})
    assert estimate.largest_step(method, options, 240, 10) == 30


def test_memory_grows_with_what_needs_it() -> None:
    def gib(**keys: Any) -> float:
        method, options, source, _ = prepare(None, TINY | {"method": "fixmatch", "device": "cpu"} | keys)
        return rehearsal.memory(method, options, source) - rehearsal.BASE

    small = gib(unlabelled_batch=10)
    assert 0 < small < gib(unlabelled_batch=50) < gib(unlabelled_batch=50, slots=2)
    assert gib(unlabelled_batch=10, model="wrn-28-2") > 5 * small


def test_nothing_is_written(fallow_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal.lines, "__kwdefaults__", None)
    monkeypatch.setattr(rehearsal.lines, "__defaults__", (*rehearsal.lines.__defaults__[:-1], slow))
    told = fallow_cli("run", *WORDS, "method=fixmatch", "--dry-run")
    assert told.code == 0 and [line.split(":")[0] for line in told.out.splitlines()] == ["settings", "work", "federation", "memory", "time"]
    assert not Path("runs").exists()
    assert fallow_cli("run", *WORDS, "method=fixmatch,fedavg", "--dry-run").sentence.startswith("--dry-run is for one run")
