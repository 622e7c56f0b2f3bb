"""`fallow run ... --dry-run`: nothing is run, and what is said is what a run would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TINY

import fallow
from fallow.runs import estimate, forecast, prepare, rehearsal, sweep
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


def test_a_grid(fallow_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that differ only in their seed are one line; what is there is known, and a run that was cut needs its rest only."""
    monkeypatch.setattr(forecast, "speed", slow)
    words = ["run", *WORDS, "method=fedavg,fixmatch", "steps=5", "rounds=3", "unlabelled_batch=8"]
    told = fallow_cli(*words, "seed=0,1", "--dry-run")
    assert told.code == 0 and not Path("runs").exists()
    alone, both = told.out.splitlines()[1:3]
    assert alone.split()[:4] == ["method=fedavg", "0,1", "2", "new"] and both.split()[:4] == ["method=fixmatch", "0,1", "2", "new"]
    shared, *own = [line for line in told.out.splitlines() if line.startswith("settings of")]
    assert " clients=4 " in shared and "method" not in shared and own[0] == "settings of method=fedavg: method=fedavg"
    assert "4 runs: 4 new" in told.out

    keys = TINY | {"method": "fedavg", "steps": 5, "rounds": 3, "unlabelled_batch": 8}
    fallow.run(name="one", seed=0, **keys)
    fallow.run(name="two", seed=1, stop_after=2, **keys)
    planned = sweep.plan(None, sweep.grid(None, keys | {"seed": "0,1,2"}), Path("runs"))  # type: ignore[arg-type]
    (found,) = forecast.foresee(planned.jobs, planned.settled, slow)
    assert (found.seeds, found.states) == ((0, 1, 2), ("finished", "begun", "new"))
    assert forecast.lines([found])[-3:][0] == "3 runs: 1 begun, 1 finished, 1 new"


def test_a_table(fallow_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "speed", slow)
    Path("mine.yaml").write_text(yaml.safe_dump(TINY | {"rounds": 2, "rows": {"Alone": {"method": "fedavg"}, "Both": {"method": "fixmatch"}}, "cells": {"few-digits": {"a": {}}}, "seeds": 2}))
    told = fallow_cli("table", "mine.yaml", "--dry-run")
    assert told.code == 0 and not Path("runs").exists()
    assert [line.split()[0] for line in told.out.splitlines()[1:3]] == ["mine/few-digits-a--alone", "mine/few-digits-a--both"]
    assert "4 runs: 4 new" in told.out
