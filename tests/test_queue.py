"""The queue of cells: what it reads, what it waits for, and that a kill costs nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import same

import fallow
from bench import queue
from fallow.errors import UserError
from fallow.runs import room
from fallow.runs.jobs import makespan
from fallow.runs.workers import Work

DIGITS = "method=fedavg data=digits label_count=100 clients=4 active=2 steps=4 batch=8 device=cpu slots=1"
PAGE = Path(__file__).parents[1]


def written(folder: Path, *cells: Any, **more: Any) -> Path:
    path = folder / "jobs.yaml"
    path.write_text(yaml.safe_dump({"out": str(folder / "runs"), "collect": str(folder / "results"), "cells": list(cells)} | more))
    return path


def wait_for(what: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_queue_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """kill -9 in the middle of a run: in the end it is the one that nobody disturbed. A run that fails leaves the others."""
    bad = {"run": f"{DIGITS} data=cifar10 data_dir=/nonexistent", "name": "bad"}
    path = written(tmp_path, bad, {"run": f"{DIGITS} rounds=30", "name": "digits"}, jobs=2, set=["checkpoint_every=2"])
    run = queue.RunFolder(tmp_path / "runs/digits/seed-0")
    killed = subprocess.Popen([sys.executable, "-m", "bench.queue", str(path)], cwd=PAGE, stdout=subprocess.DEVNULL)
    wait_for(lambda: run.committed() > 3)
    killed.kill()
    killed.wait()
    told: list[str] = []
    failed = queue.go(queue.load(path, {}), told.append, limit=300)
    assert failed == ["bad/seed-0"], "; ".join(told)
    assert any(text.startswith("bad/seed-0: failed:") and "cifar10" in text for text in told)
    assert any("goes on from round" in text or "was finished" in text for text in told)
    alone = fallow.run(out=tmp_path, name="alone", **queue.parse_pairs([*DIGITS.split(), "rounds=30", "seed=0", "defaults=paper"]))
    same(run.path, alone.path)
    kept = tmp_path / "results/digits/seed-0"
    assert json.loads((kept / "summary.json").read_text())["status"] == "finished" and not (kept / "model.safetensors").exists()
    again = queue.load(path, {})
    again.jobs = again.jobs[1:]
    for _ in range(2):  # the second time the machine with its runs is lost, and the results are there
        told.clear()
        assert queue.go(again, told.append, limit=1) == [] and "was finished" in told[0]
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    other = queue.load(path, {}, ["lr=0.5"])
    assert [queue.state(other, job) for job in other.jobs] == ["new", "new"]


@pytest.mark.parametrize(
    "cell, said",
    [
        ("method=fedavg data=digits", "no cell of a table"),
        ("feddure/table1 'setting=cifar10 iid,iid' partition=iid", "another split than its cell"),
        ("feddure/table1 'setting=cifar10 iid,iid' roundz=3", "roundz"),
        ("feddure/table7 data=cifar10", "no recipe 'feddure/table7'"),
        ({"run": "feddure/table1 'setting=cifar10 iid,iid' seed=3"}, "seeds"),
        ({"words": "x"}, "cannot be read"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(tmp_path: Path, cell: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        queue.load(written(tmp_path, cell), {})


def test_where_cells_lie(tmp_path: Path) -> None:
    cells = ["feddure/table1 'setting=cifar10 dir,dir' 'method=FedAvg*'", "fallow run feddb/table1 'setting=cifar10 iid' eval_every=5",
             {"run": "feddure/table1 'setting=cifar10 dir,dir' statistics=static", "reading": "static", "seeds": [1, 2]}]  # fmt: skip
    assert [j.name for j in queue.load(written(tmp_path, *cells), {}).jobs] == [
        "feddure/table1/cifar10-dir-dir--fedavg/seed-0", "feddb/table1/cifar10-iid/seed-0",
        "readings/static/feddure/table1/cifar10-dir-dir/seed-1", "readings/static/feddure/table1/cifar10-dir-dir/seed-2",
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"two cells .* are feddb/table1/cifar10-iid/seed-0"):
        queue.load(written(tmp_path, cells[1], "feddb/table1 'setting=cifar10 iid'"), {})


def test_it_goes_by_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more starts if the newest has shown what it takes (two rounds, or long enough) and enough is free; one always may."""
    cells = [{"run": f"{DIGITS} rounds=9", "name": "digits", "seeds": [0, 1, 2]}]
    free: list[float | None] = [1.0]
    monkeypatch.setattr(room, "free_of_gpu", lambda: free[0])
    monkeypatch.setattr(room, "free_of_machine", lambda: 1.0)
    job = queue.load(written(tmp_path, *cells, jobs=2, free_gib=24, settle=1000), {}).jobs[0]
    fits = room.Spare(24, 1000).fits
    assert fits([])
    one = Work(job, False, 0)
    free[0] = 30.0
    assert not fits([one])
    job.path.mkdir(parents=True)
    for number in (1, 2):
        job.folder.append({"round": number, "seconds": {"round": 3.0}})
    assert fits([one])
    free[0] = 23.0
    assert not fits([one])
    free[0] = None
    assert not fits([one])
    monkeypatch.setattr(room, "free_of_machine", lambda: 24.0)
    assert fits([one])
    assert queue.per_round(job) == (3.0, "its own rounds") and job.left == 7


def test_what_it_will_take(tmp_path: Path) -> None:
    """10 and 4 one after the other beside 12; seconds of another seed count for the next one."""
    assert makespan([10, 12, 4, 1], 2) == 14 and makespan([], 3) == 0
    q = queue.load(written(tmp_path, {"run": f"{DIGITS} rounds=50", "name": "digits", "seeds": [0, 1]}), {})
    other = tmp_path / "results/digits/seed-0/summary.json"
    other.parent.mkdir(parents=True)
    other.write_text(json.dumps({"seconds_per_round": 2.0}))
    known = queue.estimates(q, q.jobs)
    assert known["digits/seed-1"] == (100.0, "other seeds")
    assert queue.outlook(q.jobs, {"digits/seed-1": known["digits/seed-1"]}, q.at_once) == (
        "about 1.7 min for 1 of them, the others are of unknown length"
    )
    both = {job.name: (120.0, "") for job in q.jobs}
    assert queue.outlook(q.jobs, both, 1) == "about 4.0 min" and queue.outlook(q.jobs, both, 2) == "about 2.0 min with 2 at a time (4.0 min one by one)"


def test_another_queue_or_run_is_left_alone(tmp_path: Path) -> None:
    q = queue.load(written(tmp_path, {"run": f"{DIGITS} rounds=1", "name": "digits"}), {})
    with queue.alone(q.out), pytest.raises(UserError, match="another queue"):
        queue.alone(q.out)
    folder = queue.RunFolder.new(q.out / "digits", "seed-0")
    with folder.locked():
        assert queue.state(q, q.jobs[0]) == "held" and folder.path.exists()
    assert queue.state(q, q.jobs[0]) == "new" and not folder.path.exists()  # cut off before it began


def test_the_gpu_is_the_first_visible_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text('#!/bin/sh\nfor last; do :; done\n[ "$last" = 3 ] && echo 20480, 1024 || exit 6\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert room.free_of_gpu() == 20.0 and room.gpu_memory() == (20.0, 1.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert room.free_of_gpu() is None
