"""No command writes over what it did not make: a run never, somebody's file only if he says --force."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY
from PIL import Image

import fallow
from fallow import disk
from fallow.errors import UserError
from fallow.runs.jobs import Job, state

TABLE = """
inherit: feddure/base
own: Small
seeds: 1
by: [data]
rows:
  Small: {method: fedavg}
cells:
  few-digits:
    plain: {model: small-cnn, clients: 4, active: 2, label_per_class: 1, steps: 1, rounds: 1, batch: 8, device: cpu,
            augment: {labelled: weak}, image: {normalise: none}, partition: iid, norm: gn}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs and a folder of images."""
    place = tmp_path_factory.mktemp("made")
    for name in ("one", "other"):
        fallow.run(out=place, name=name, **TINY | {"method": "fedavg", "rounds": 1})
    (place / "images").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(place / "images" / "a.png")
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt; it is the folder that commands are given in."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


WRITERS = {
    "report": ("report", "one", "-o", "page.html"),
    "predict": ("predict", "one", "images", "-q", "-o", "found.csv"),
    "figure png": ("figure", "accuracy", "one", "-o", "lines.png"),
    "figure svg": ("figure", "accuracy", "one", "-o", "lines.svg"),
    "figure pdf": ("figure", "accuracy", "one", "-o", "lines.pdf"),
    "compare md": ("compare", "one", "-o", "table.md"),
    "compare tex": ("compare", "one", "-o", "table.tex"),
    "compare csv": ("compare", "one", "-o", "table.csv"),
    "check": ("check", "few-digits", "--picture", "seen.png"),
    "split": ("split", "data=few-digits", "clients=4", "label_count=40", "--picture", "who.png"),
    "split --save": ("split", "data=few-digits", "clients=4", "label_count=40", "--picture", "who.svg", "--save", "who.npz"),
}


@pytest.mark.parametrize("words", WRITERS.values(), ids=list(WRITERS))
def test_a_file(words: tuple[str, ...], fallow_cli: Any, place: Path) -> None:
    """Its own is written anew, another's stays unless --force is said, a run's own names are refused even then."""
    *command, name = words
    target, well = place / name, (0, 1) if command[0] == "check" else (0,)  # check ends with 1 where a class has few images
    assert fallow_cli(*words).code in well and fallow_cli(*words).code in well
    ours = target.read_bytes()
    target.write_bytes(b"file,name\nsomebody's,work\n")
    told = fallow_cli(*words).sentence
    assert told.startswith(f"{name} is there and was not made by `fallow {words[0]}") and "--force" in told
    assert target.read_bytes() == b"file,name\nsomebody's,work\n"
    assert fallow_cli(*words, "--force").code in well
    assert target.read_bytes()[:4] == ours[:4] and b"somebody" not in target.read_bytes()
    before = everything(place / "other")
    ending = Path(name).suffix
    for inside in (f"other/checkpoint/1{ending}", f"other/keep/1{ending}", f"other/.lock/x{ending}", "other"):
        assert "other" in fallow_cli(*command, inside, "--force").sentence
    shutil.copy(place / "other" / "summary.json", place / "other" / f"mine{ending}")
    assert "was not made by" in fallow_cli(*command, f"other/mine{ending}", "--force").sentence  # inside a run nobody forces
    (place / "other" / f"mine{ending}").unlink()
    assert everything(place / "other") == before


@pytest.mark.parametrize(("name", "before", "after"), [("thesis.tex", "\\documentclass{book}\n", ""), ("thesis.tex", "", "\nYears of work.\n"), ("notes.md", "# Notes\n\n", "")])
def test_a_file_that_holds_a_table_is_no_table(name: str, before: str, after: str, fallow_cli: Any, place: Path) -> None:
    assert fallow_cli("compare", "one", "-o", name).code == 0
    mine = before + (place / name).read_text() + after
    (place / name).write_text(mine)
    assert "was not made by `fallow compare`" in fallow_cli("compare", "one", "-o", name).sentence
    assert (place / name).read_text() == mine


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "model.safetensors", "federation.npz"])
def test_a_run_is_not_a_page(name: str, fallow_cli: Any, place: Path) -> None:
    before = everything(place / "one")
    for command in (("report", "one"), ("predict", "one", "images", "-q")):
        assert fallow_cli(*command, "-o", f"one/{name}", "--force").sentence.startswith(f"one/{name} belongs to the run")
        link = place / "link"
        link.symlink_to(place / "one")
        assert "belongs to the run" in fallow_cli(*command, "-o", f"link/{name}", "--force").sentence
        link.unlink()
    assert everything(place / "one") == before
    assert fallow_cli("report", "one", "-o", "one/page.html").code == 0  # a name that no run has is nobody's


def test_devices_and_links_to_nothing(fallow_cli: Any, place: Path) -> None:
    (place / "nowhere").symlink_to("gone")
    assert "was not made by" in fallow_cli("report", "one", "-o", "nowhere").sentence
    assert "is no plain file" in fallow_cli("report", "one", "-o", "/dev/null", "--force").sentence
    assert Path("/dev/null").is_char_device()


def test_export(fallow_cli: Any, place: Path) -> None:
    """A folder that an export made is written anew; another run, its results, somebody's folder stay."""
    weights = ("--format", "safetensors")
    assert fallow_cli("export", "one", "-o", "out", *weights).code == fallow_cli("export", "one", "-o", "out", *weights).code == 0
    before = everything(place / "other")
    assert fallow_cli("export", "one", "-o", "other", *weights, "--force").sentence == "other is a run; choose another folder with -o."
    for inside in ("other/keep", "other/checkpoint/1", "other/config.yaml"):
        assert "belongs to the run" in fallow_cli("export", "one", "-o", inside, *weights, "--force").sentence
    assert everything(place / "other") == before
    for name in ("README.md", "model.onnx", "config.yaml"):
        mine = place / f"mine-{name}"
        mine.mkdir()
        (mine / name).write_text("my own")
        assert fallow_cli("export", "one", "-o", mine.name, *weights).sentence.startswith(f"{mine.name} holds {name}, which")
        assert everything(mine) == {name: b"my own"}
        (mine / name).rename(mine / "notes")
        assert fallow_cli("export", "one", "-o", mine.name, *weights).code == 0  # beside what it does not write
        assert (mine / "notes").read_text() == "my own"


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A table of one quick run, `fallow table feddure tiny`."""
    from fallow.names import recipes
    from fallow.recipes import reading
    from fallow.tables import grids

    file = tmp_path / "tiny.yaml"
    file.write_text(TABLE)
    known = recipes() | {"feddure/tiny": file}
    for module in (reading, grids):
        monkeypatch.setattr(module, "recipes", lambda: known)
    return Path("feddure/tiny/few-digits-plain/seed-0")


def test_a_table_removes_only_what_it_made(grid: Path, fallow_cli: Any, tmp_path: Path) -> None:
    place = tmp_path / "runs" / grid
    place.mkdir(parents=True)
    (place / "thesis.tex").write_text("years of work")
    told = fallow_cli("table", "feddure", "tiny")
    assert told.code == 1 and f"runs/{grid} is no run, but thesis.tex lies there" in told.out
    assert (place / "thesis.tex").read_text() == "years of work"
    (place / "thesis.tex").unlink()
    for left in (".lock", ".config.yaml.part", ".config.yaml.2.part"):  # of a run that was cut off before it began
        (place / left).touch()
    (place.parents[1] / "table.md").write_text("a table of mine\n")
    assert "table.md is there and was not made by `fallow table`" in fallow_cli("table", "feddure", "tiny").sentence
    assert (place / ".lock").exists(), "nothing is begun before the targets are looked at"
    assert fallow_cli("table", "feddure", "tiny", "--force").code == 0
    assert fallow_cli("table", "feddure", "tiny").code == 0
    assert sorted(p.name for p in place.parent.iterdir()) == ["seed-0"]


def test_collecting_where_runs_are(grid: Path, fallow_cli: Any, tmp_path: Path) -> None:
    assert fallow_cli("table", "feddure", "tiny", "--out", "c", "--collect", "d").code == 0
    before = everything(tmp_path / "c" / grid)
    (tmp_path / "link").symlink_to("c")
    for again in ("c", "./c", "d/../c", "link"):
        assert fallow_cli("table", "feddure", "tiny", "--out", "c", "--collect", again).sentence.startswith("the runs lie in c themselves")
        assert fallow_cli("table", "feddure", "tiny", "--from", "d", "--collect", again).sentence.startswith(f"{Path(again)}/{grid} is a run")
    assert everything(tmp_path / "c" / grid) == before
    assert fallow_cli("table", "feddure", "tiny", "--out", "c", "--collect", "d").code == 0  # its own it may write anew
    assert sorted(p.name for p in (tmp_path / "d" / grid).iterdir()) == ["config.yaml", "metrics.jsonl", "summary.json"]
    (tmp_path / "d" / grid / "config.yaml").write_text("mine: true\n")
    assert "which is no result of a run" in fallow_cli("table", "feddure", "tiny", "--out", "c", "--collect", "d").sentence
    assert fallow_cli("table", "feddure", "tiny", "--out", f"c/{grid}").sentence.startswith(f"c/{grid} is a run")


def test_two_tables_at_once(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the run that the first is at, says so, and makes none beside it."""
    from fallow.runs import workers
    from fallow.tables.grids import Grids
    from fallow.tables.running import run

    monkeypatch.chdir(tmp_path)
    begun, asked = threading.Event(), threading.Event()
    make, calls, told = workers.make, [], []

    def slow(*given: Any) -> None:
        calls.append(given)
        begun.set()
        assert asked.wait(60)
        make(*given)

    def heard(text: str) -> None:
        told.append(text)
        if "waited for" in text:
            asked.set()

    monkeypatch.setattr(workers, "make", slow)
    table, place = Grids("feddure", "tiny"), tmp_path / "runs"
    first = threading.Thread(target=run, args=(table, place, 1, 1, lambda text: None))
    first.start()
    assert begun.wait(60)
    assert run(table, place, 1, 1, heard) == []
    first.join()
    assert len(calls) == 1 and "waited for" in told[0] and "(was finished)" in told[1]
    assert sorted(p.name for p in (place / grid).parent.iterdir()) == ["seed-0"]


def test_a_run_removes_only_what_it_made(tmp_path: Path) -> None:
    """What others put into its folders stays, as where such a folder is a link to one of theirs."""
    keys = TINY | {"method": "fixmatch", "rounds": 3, "optimizer_state": "keep", "validation": 0.2}
    run = fallow.run(out=tmp_path, name="run", stop_after=2, **keys).path
    theirs = tmp_path / "theirs"
    (run / "keep").rename(theirs)
    (run / "keep").symlink_to(theirs)
    mine = [run / "best" / "notes.txt", theirs / "thesis.tex", theirs / "photos" / "a.png"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("years of work")
    fallow.resume(run)
    assert all(path.read_text() == "years of work" for path in mine)


@pytest.mark.parametrize("out", ["one", "one/checkpoint", "./other/../one/keep", "one/mine"])
def test_a_run_is_no_folder_for_runs(out: str, fallow_cli: Any, place: Path) -> None:
    before = everything(place / "one")
    words = [f"{k}={v}" for k, v in (TINY | {"method": "fedavg", "rounds": 1}).items()]
    assert fallow_cli("run", *words, "--out", out, "--name", "9").sentence.startswith(f"{Path(out)} {'is a run' if out == 'one' else 'lies in the run '}")
    assert fallow_cli("run", *words, "--out", "runs", "--name", f"../{out}/9").sentence
    assert everything(place / "one") == before


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_that_is_none(kind: str, tmp_path: Path, fallow_cli: Any) -> None:
    """A received folder's link would have somebody's file emptied, its pipe would be waited for."""
    run = fallow.run(out=tmp_path, name="run", stop_after=1, **TINY | {"method": "fedavg"}).path
    (tmp_path / "thesis.tex").write_text("years of work")
    (run / ".lock").unlink()
    {"link": lambda p: p.symlink_to("../thesis.tex"), "pipe": os.mkfifo, "folder": Path.mkdir}[kind](run / ".lock")
    assert fallow_cli("resume", str(run)).sentence.startswith(f"{run}/.lock cannot be written (")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(UserError, match="cannot be written"):
        state(Job("run", run, None, {}, {"rounds": 2}))  # not one that another process is at, which would be waited for


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """Each has a part of its own, the last one's file stays, whole, and nothing lies beside it; a dead one's part is taken over."""
    path = tmp_path / "found.csv"
    (tmp_path / ".found.csv.part").write_text("of one who was killed")
    with disk.replacing(path) as one:
        one.write(b"one")
        with disk.replacing(path) as two:
            two.write(b"two")
            assert len(list(tmp_path.iterdir())) == 2
        assert path.read_bytes() == b"two"
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]


def test_predicts_into_one_file(place: Path) -> None:
    command = [sys.executable, "-m", "fallow", "predict", "one", "images", "-q", "-o", "found.csv"]
    both = [subprocess.Popen(command, cwd=place, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(p.wait(), p.communicate()[1]) for p in both] == [(0, ""), (0, "")]
    assert (place / "found.csv").read_text().count("\n") == 2 and not list(place.glob(".found*"))
