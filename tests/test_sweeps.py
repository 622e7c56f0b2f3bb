"""Several values of a key are a grid: what is one value and what are several, and runs that survive kills and failures."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import same

import fallow
from fallow.errors import UserError
from fallow.recipes.reading import recipe
from fallow.runs import sweep
from fallow.runs.combinations import combinations
from fallow.runs.folder import RunFolder
from fallow.trees import parse_pairs

DIGITS = ["data=digits", "label_count=100", "clients=4", "active=2", "steps=4", "batch=8", "device=cpu", "slots=1", "rounds=2"]


def axes(*words: str, of: str | None = None) -> dict[str, list[Any]] | None:
    found = combinations(parse_pairs(words), recipe(of) if of else {})
    return None if found is None else {axis.key: list(axis.values) for axis in found.axes}


# -- one value or several ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "word, values",
    [
        ("seed=0,1,2", [0, 1, 2]),
        ("seed=[0,1]", [0, 1]),
        ("lr=0.1,1e-2", [0.1, 0.01]),
        ("method=fedavg,fixmatch", ["fedavg", "fixmatch"]),
        ("method=fedavg,fixmtch", ["fedavg", "fixmtch"]),  # its run tells that there is none
        ("data=digits,mnist", ["digits", "mnist"]),
        ("nesterov=true,false", [True, False]),
        ("clip=1,null", [1, None]),
        ("labels=clients,server", ["clients", "server"]),
        ("augment.strong=ra-mc,ra-usb", ["ra-mc", "ra-usb"]),
        ("partition=iid,dirichlet-capped:0.3,min_size=1", ["iid", "dirichlet-capped:0.3,min_size=1"]),
        ("partition=dirichlet-capped:0.3,min_size=1,iid", ["dirichlet-capped:0.3,min_size=1", "iid"]),
        ("schedule=constant,cosine,warmup=2", ["constant", "cosine,warmup=2"]),
        ("unlabelled_batch=equal,match-steps", ["equal", "match-steps"]),
        ("threshold=0.6,0.8", [0.6, 0.8]),  # of the method alone
    ],
)
def test_several_values(word: str, values: list[Any]) -> None:
    assert axes(word) == {word.partition("=")[0]: values}


@pytest.mark.parametrize(
    "word",
    [
        "measure=classes,prior", "track=tensorboard,mlflow", "partition=dirichlet-capped:0.3,min_size=1", "schedule=cosine,warmup=2",
        "partition=dirichlet-capped:0.3,min_sise=1",  # a wrong option is told as such
        "partition=iid,nowhere", "seed=a,b", "seed=1,", "lr=0,1", "nobody=1,2", "seed=3", "data_dir=/a,b",
    ],
)  # fmt: skip
def test_one_value(word: str) -> None:
    assert axes(word) is None or (word == "lr=0,1" and axes(word) == {"lr": [0, 1]})


def test_paths_with_commas_are_one_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert axes("data=folder:a,folder:b") == {"data": ["folder:a", "folder:b"]}
    Path("a,folder:b").mkdir()
    assert axes("data=folder:a,folder:b") is None


def test_settings_and_rows_of_a_table_have_commas() -> None:
    assert axes("setting=iid,dir", "method=FedDure", of="feddure/table1") is None
    assert axes("setting=[iid,iid;x]", of="feddure/table1") == {"setting": ["iid", "iid;x"]}
    assert axes("method=FedDure,FedAvg-SL", "setting=iid,dir", of="feddure/table1") == {"method": ["FedDure", "FedAvg-SL"]}


@pytest.mark.parametrize("word, said", [("device=[cpu,cuda]", None), ("slots=1,2", "slots changes no result"), ("seed=1,1", "seed has the value 1 twice")])
def test_grids_that_make_no_sense(word: str, said: str | None) -> None:
    if said is None:
        with pytest.raises(UserError, match="device changes no result"):
            axes(word)
        return
    with pytest.raises(UserError, match=said):
        axes(word)


def test_the_first_seed_of_everything_comes_first() -> None:
    found = combinations(parse_pairs(["seed=0,1", "method=fedavg,uda", "rounds=3"]), {})
    assert found is not None and len(found) == 4
    assert [tuple(varied.values()) for varied, _ in found] == [(0, "fedavg"), (0, "uda"), (1, "fedavg"), (1, "uda")]
    assert next(iter(found))[1] == {"rounds": 3, "seed": 0, "method": "fedavg"}


# -- what is to be run ---------------------------------------------------------------------------------------------------
def planned(out: Path, *words: str, of: str | None = None, **more: Any) -> sweep.Sweep:
    given = parse_pairs([*DIGITS, *words])
    grid = sweep.grid(of, given)
    assert grid is not None
    return sweep.plan(of, grid, out, **more)


def test_a_key_that_one_method_lacks_is_left_out_of_its_runs(tmp_path: Path) -> None:
    """FedAvg has no threshold: two values of it are one run, of which the folder says no threshold."""
    found = planned(tmp_path, "method=fedavg,fixmatch", "threshold=0.6,0.8")
    assert [str(job.path.relative_to(tmp_path)) for job in found.jobs] == [
        "digits/method=fedavg/seed-0", "digits/method=fixmatch,threshold=0.6/seed-0", "digits/method=fixmatch,threshold=0.8/seed-0",
    ]  # fmt: skip
    assert found.notes == ["fedavg has no threshold, so its runs go without it"]
    assert "3 runs (2 of method × 2 of threshold, 1 of them the same as others): 3 new" in found.about()
    (tmp_path / "mine.yaml").write_text("data: digits\nthreshold: 0.7\nmethod: fixmatch\n")
    of_recipe = planned(tmp_path, "method=fedavg,fixmatch", of=str(tmp_path / "mine.yaml"), name="x")
    assert [job.expected.get("threshold") for job in of_recipe.jobs] == [None, 0.7]


def test_mistakes_are_told_before_anything_runs(tmp_path: Path, fallow_cli: Any) -> None:
    for words, said in (
        (["method=fedavg,fixmtch"], "method=fixmtch: there is no method 'fixmtch'; did you mean 'fixmatch'?"),
        (["method=fedavg,semifl", "labels=server", "rounds=0,2"], "rounds=0 is not allowed"),
        (["method=fedavg,uda", "thresold=1"], "there is no key 'thresold'"),
        (["seed=0,1", "--stop-after", "1"], "--stop-after is for one run"),
        (["seed=0,1", "--name", "a/../b"], None),
    ):
        told = fallow_cli("run", *DIGITS, *words) if said else None
        assert told is None or said in told.sentence
    assert not Path("runs").exists()


def test_what_is_there_is_known_by_its_settings(tmp_path: Path) -> None:
    """A run of another name stands for the grid's; one of other settings keeps its folder, and the new ones get another."""
    there = fallow.run(out=tmp_path, name="by-hand", **parse_pairs([*DIGITS, "method=fedavg", "seed=1", "slots=2"])).path
    found = planned(tmp_path, "method=fedavg", "seed=0,1")
    assert [job.path for job in found.jobs] == [tmp_path / "digits/seed-0", there]
    assert ": 1 finished, 1 new, in" in found.about()
    measured = planned(tmp_path, "method=fedavg", "seed=0,1", "measure=classes")  # which that run was not
    assert [job.path for job in measured.jobs] == [tmp_path / "digits/seed-0", tmp_path / "digits/seed-1"]
    shutil.copytree(there, tmp_path / "digits/seed-1")
    other = planned(tmp_path, "method=fedavg", "seed=0,1", "lr=0.5")
    assert [job.path for job in other.jobs] == [tmp_path / "digits-2/seed-0", tmp_path / "digits-2/seed-1"]


def test_a_grid_without_a_word_on_data_knows_the_runs_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the newcomer's data and federation."""
    monkeypatch.chdir(tmp_path)
    keys = {"rounds": 1, "steps": 1, "batch": 8, "device": "cpu"}
    there = fallow.run(method="fedavg", **keys)
    found = sweep.grid(None, {"method": ["fedavg", "fixmatch"], **keys})
    assert found is not None
    first, second = sweep.plan(None, found, Path("runs")).jobs
    assert first.path == there.path and not second.path.exists()
    assert (second.expected["label_per_class"], second.expected["clients"], second.expected["label_ratio"]) == (1, 5, None)


def test_own_images_that_changed_are_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    monkeypatch.chdir(tmp_path)
    images, labels = np.arange(40 * 64).reshape(40, 8, 8).astype("uint8"), np.arange(40) % 2

    def save() -> None:
        np.savez("mine.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)

    save()
    words = ["data=numpy:mine.npz", "method=fedavg", "clients=2", "rounds=1", "batch=4", "label_count=10", "device=cpu"]
    there = fallow.run(out=tmp_path / "runs", name="a", **parse_pairs(words)).path
    grid = sweep.grid(None, parse_pairs([*words, "seed=0,1"]))
    assert grid is not None
    assert there in [job.path for job in sweep.plan(None, grid, tmp_path / "runs").jobs]
    images[3, 2, 1] += 1
    save()
    assert there not in [job.path for job in sweep.plan(None, grid, tmp_path / "runs").jobs]


# -- running -------------------------------------------------------------------------------------------------------------
def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fallow", "run", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)


def test_a_grid_that_is_stopped_killed_and_run_again(tmp_path: Path, fallow_cli: Any, ctrl_c_is_heard: None) -> None:
    """Ctrl-C has every run write a checkpoint and ends with 130; kill -9 costs what is after the last; then all is as if undisturbed."""
    long = [*DIGITS, "rounds=60", "steps=1", "eval_every=10", "checkpoint_every=3"]
    words = [*long, "method=fedavg", "seed=0,1", "--jobs", "1", "--name", "x"]
    first, second = (RunFolder(Path(f"runs/x/seed-{seed}")) for seed in (0, 1))
    work = started(*words)
    wait_for(lambda: first.metrics.exists() and len(first.metrics.read_bytes().splitlines()) > 2, work)
    work.send_signal(signal.SIGINT)
    said = work.communicate(timeout=180)[0]
    assert work.returncode == 130 and "the same command goes on from the last checkpoints" in said, said
    assert first.committed() > 2 and first.concluded() == "interrupted"
    before = first.committed()

    work = started(*words, "slots=2")  # which is no other run
    wait_for(lambda: first.committed() > before, work)
    os.kill(work.pid, signal.SIGKILL)
    work.wait()
    wait_for_end(first)

    told = fallow_cli("run", *words)
    assert told.code == 0 and "went on" in told.out and "Test accuracy after the last round" in told.out, told.out + told.err
    for folder, seed in ((first, 0), (second, 1)):
        alone = fallow.run(out=tmp_path / "alone", **parse_pairs([*long, "method=fedavg", f"seed={seed}"]))
        same(folder.path, alone.path)
    made = {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*") if p.is_file() and p.name != ".lock"}
    again = fallow_cli("run", *words)
    assert again.code == 0 and "2 runs (2 of seed): 2 finished" in again.out and again.out.count("was finished") == 2
    assert {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*") if p.is_file() and p.name != ".lock"} == made


def wait_for_end(folder: RunFolder) -> None:
    """The workers of a parent that was killed write their checkpoints and end."""
    end = time.monotonic() + 180
    while time.monotonic() < end:
        try:
            with folder.locked():
                return
        except UserError:
            time.sleep(0.05)
    raise AssertionError("a worker outlived its parent")


def test_a_run_that_fails_is_named_and_stops_no_other(tmp_path: Path, fallow_cli: Any) -> None:
    told = fallow_cli("run", *DIGITS, "method=fedavg", "lr=1e37,0.01", "--jobs", "2", "--name", "x")
    assert told.code == 1
    lines = told.out.splitlines()
    assert any(line.startswith("lr=1e+37/seed-0: failed: ") for line in lines), told.out
    assert lines[-1] == "1 of 2 runs failed: lr=1e+37/seed-0"
    assert RunFolder(Path("runs/x/lr=0.01/seed-0")).concluded() == "finished"
    assert "Traceback" not in told.out + told.err
