"""Files that another machine, an older day or a stranger wrote: whoever shows them reads them with care."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TINY

import fallow
from fallow import disk
from fallow.data import sources
from fallow.data.readers import kept
from fallow.errors import UserError
from fallow.runs import nodes, speed

CELL = "runs/mine/few-digits-plain--fedavg/seed-0"
TABLE = {
    "rows": {"fedavg": {"method": "fedavg"}},
    "cells": {"few-digits": {"plain": {k: v for k, v in TINY.items() if k not in ("data", "defaults")}}},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fallow.run(out=tmp_path_factory.mktemp("made"), name="run", **TINY | {"method": "fedavg", "rounds": 1}).path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def edited(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


NO_FIGURES: list[Any] = ["x", True, [1], 10**400, {"a": 1}, float("nan")]


@pytest.mark.parametrize(("value", "thin"), [(0.999, False), ("x", False), *((v, True) for v in NO_FIGURES)], ids=str)
def test_a_table_takes_no_figure_that_nobody_vouches_for(value: Any, thin: bool, made: Path, fallow_cli: Any) -> None:
    Path("mine.yaml").write_text(yaml.safe_dump(TABLE))
    shutil.copytree(made, CELL)
    if thin:
        (Path(CELL) / "manifest.json").unlink()
    edited(Path(CELL) / "summary.json", last=value, best=value)
    told = fallow_cli("table", "mine.yaml", "--from", "runs", "--collect", "kept")
    assert told.code == 0 and "few-digits plain, fedavg: seed 0 is damaged." in told.out, told.err
    assert "99.9" not in told.out and not list(Path("kept").rglob("*.json"))


def test_runs_are_shown_with_their_own_settings(run: Path, fallow_cli: Any) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("label_count: 40", "label_count: 50"))
    for command in (["compare", str(run)], ["report", str(run)], ["figure", "accuracy", str(run), "-o", "f.png"]):
        assert "config.yaml is damaged, or was changed" in fallow_cli(*command).sentence
    (run / "config.yaml").write_text(text.replace("checkpoint_every: 1", "checkpoint_every: 2"))  # which may be edited
    assert fallow_cli("compare", str(run)).code == 0


GOOD = {"round": 1, "at": "now", "asked": [0], "online": [0], "absent": {}, "seconds": {"0": 1.5}, "bytes_up": {"0": 3}, "bytes_down": {"0": 4}}
BAD: dict[str, Any] = {
    "round": "1", "at": None, "asked": [None], "online": {}, "absent": {"x": "y"}, "seconds": {"0": float("nan")}, "bytes_up": {"0": "3"}, "bytes_down": {"0": 1e300},
}  # fmt: skip


def test_a_journal_that_is_none(run: Path, fallow_cli: Any) -> None:
    """It is neither waited for nor taken for a row."""
    journal = run / nodes.JOURNAL
    journal.write_text("".join(f"{line}\n" for line in (json.dumps(GOOD), '{"round": 2}', "[1]", "[" * 100_000, *(json.dumps(GOOD | {k: v}) for k, v in BAD.items()))))
    assert nodes.nodes(run) == [{"client": 0, "online": True, "seen": "now", "rounds": 1, "absent": 0, "why": None, "seconds": 1.5, "bytes_up": 3, "bytes_down": 4}]
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
        journal.unlink()
        make(journal)
        assert nodes.nodes(run) == [] and fallow_cli("report", str(run)).code == 0


def test_a_file_larger_than_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    try:
        os.truncate(path, 2**43)
    except OSError:
        pytest.skip("this disk takes no file of 8 TiB")
    with pytest.raises(UserError, match=r"reading .*large takes 8,192.0 GiB of memory"):
        disk.read(path)


@pytest.mark.parametrize("text", ["[]", '"a"', '{"KEY": null}', '{"KEY": [1.0]}', '{"KEY": ["a", "b"]}', '{"KEY": [NaN, -1.0]}', "[" * 100_000])
def test_a_measured_speed_that_is_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(speed, "_measured", lambda *_: speed.Speed(2.0, 1.0))
    speed.speed("small-cnn", 1, 8, "cpu")
    file = tmp_path / "fallow" / "speed.json"
    file.write_text(text.replace("KEY", next(iter(json.loads(file.read_text())))))
    assert speed.speed("small-cnn", 1, 8, "cpu") == speed.Speed(2.0, 1.0)


def test_nobody_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no name: what is only kept there is done without."""
    for name in ("FALLOW_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "~nobody-of-that-name/x")
    monkeypatch.setattr(speed, "_measured", lambda *_: speed.Speed(2.0, 1.0))
    assert speed.speed("small-cnn", 1, 8, "cpu") == speed.Speed(2.0, 1.0)
    assert kept.find("0" * 40, 1) is None


HUGE = {  # a data set, and the first file of it that is read
    "csv:d.csv": "d.csv", "cifar10": "cifar-10-batches-bin/data_batch_1.bin", "cifar100": "cifar-100-binary/fine_label_names.txt",
    "stl10": "stl10_binary/train_y.bin", "tinyimagenet": "tiny-imagenet-200/wnids.txt",
}  # fmt: skip


@pytest.mark.parametrize(("name", "file"), HUGE.items())
def test_data_larger_than_the_memory(name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is read; on a disk that takes so large a file it takes no room."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    for other in ("train_X.bin", "test_X.bin", "test_y.bin", "unlabeled_X.bin"):
        (path.parent / other).write_bytes(bytes(3 * 96 * 96))
    (path.parent / "train.bin").touch()
    path.touch()
    try:
        os.truncate(path, 2**43)
    except OSError:
        pytest.skip("this disk takes no file of 8 TiB")
    with pytest.raises(UserError, match=r"reading .* takes .* GiB of memory"):
        sources.load(name, tmp_path)


def test_a_line_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("file,label\n" + "x" * 2_000_000)
    with pytest.raises(UserError, match=r"d.csv has a line of more than 1,048,576 characters"):
        sources.load(f"csv:{tmp_path / 'd.csv'}")
