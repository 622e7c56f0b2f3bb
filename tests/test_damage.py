"""A bit that flips in a run's folder is noticed, wherever it is; where an older checkpoint is whole the run ends as if nothing had been."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import TINY, rows, same, weights

import fallow
from fallow import disk
from fallow.data.holdings import ClassCounts
from fallow.errors import UserError
from fallow.runs.folder import RunFolder
from fallow.runs.origin import Origin

KEYS = TINY | {"method": "fedloke", "rounds": 4}
KINDS = ["checkpoint", "record", "index", "metrics", "federation", "manifest", "model", "summary", "origin"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that was stopped after round 3 of 4, and one that ran through."""
    out = tmp_path_factory.mktemp("runs")
    return fallow.run(out=out, name="stopped", stop_after=3, **KEYS).path, fallow.run(out=out, name="through", **KEYS).path


@pytest.fixture
def run(runs: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs[0], tmp_path / "run"))


@pytest.fixture
def finished(runs: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs[1], tmp_path / "finished"))


def files(run: Path, kind: str) -> list[Path]:
    return {
        "checkpoint": [run / "checkpoint/3/server.safetensors"],
        "record": sorted((run / "keep").iterdir()),
        "index": [run / "checkpoint/3/index.json"],
        "metrics": [run / "metrics.jsonl"],
        "federation": [run / "federation.npz"],
        "manifest": [run / "manifest.json"],
        "model": [run / "model.safetensors"],
        "summary": [run / "summary.json"],
        "origin": [run / "origin.json"],
    }[kind]


def flip(path: Path, rng: random.Random) -> bytes:
    """Another bit somewhere; what was there before."""
    data = path.read_bytes()
    place = rng.randrange(len(data))
    path.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])
    return data


def read(run: Path, kind: str) -> None:
    """What the first command does that reads a file of this kind."""
    if kind == "model":
        fallow.load(run).model()
    elif kind == "summary":
        assert fallow.load(run).summary
    elif kind == "origin":
        Origin.read(run)
    else:
        folder = RunFolder(run)
        folder.check_begun()
        folder.tell()


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_noticed(kind: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, refused, told = random.Random(kind), 0, 0
    needed = {n.rsplit("/", 1)[1] for n in json.loads((run / "checkpoint/3/index.json").read_text())["files"] if n.startswith("keep/")}
    read(run, kind)
    for _ in range(100):
        path = rng.choice([p for p in files(run, kind) if kind != "record" or p.name in needed])
        before = flip(path, rng)
        try:
            read(run, kind)
        except UserError as error:
            refused += str(path) in str(error) or kind == "summary"
        told += f"warning: {path} is damaged" in capsys.readouterr().err
        path.write_bytes(before)
    assert refused + told == 100
    assert refused == {"checkpoint": 0, "index": 0, "manifest": 0, "federation": 100, "model": 100, "summary": 100, "origin": 100}.get(kind, refused)


def resumed(run: Path, kind: str, through: Path, rng: random.Random, capsys: pytest.CaptureFixture[str]) -> bool:
    """Flips a bit and resumes: to the bytes of an undisturbed run, or to one sentence; True for the first."""
    path = rng.choice(files(run, kind))
    flip(path, rng)
    capsys.readouterr()
    try:
        fallow.resume(run)
    except UserError as error:
        assert str(path) in str(error)
        return False
    assert str(path) in capsys.readouterr().err or kind in ("model", "summary") or path.parent.name == "keep"
    same(run, through)
    assert fallow.load(run).model() and fallow.load(run).summary["status"] == "finished"
    return True


@pytest.mark.parametrize("kind", ["checkpoint", "index", "manifest", "model", "summary"])
def test_the_checkpoint_before_is_taken(kind: str, run: Path, runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert resumed(run, kind, runs[1], random.Random(0), capsys)
    assert sorted(p.name for p in (run / "checkpoint").iterdir()) == ["3", "4"]
    indexes = [json.loads((run / f"checkpoint/{n}/index.json").read_text()) for n in (3, 4)]
    needed = {name for index in indexes for name in index["files"] if name.startswith("keep/")}
    assert {f"keep/{p.name}" for p in (run / "keep").iterdir()} == needed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_resumes(kind: str, runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, same_end = random.Random(f"{kind} resumed"), 0
    for number in range(100):
        run = Path(shutil.copytree(runs[0], tmp_path / str(number)))
        same_end += resumed(run, kind, runs[1], rng, capsys)
        shutil.rmtree(run)
    print(f"{kind}: of 100 resumes {same_end} ended with the bytes of an undisturbed run, {100 - same_end} with a sentence")
    assert same_end == {"federation": 0, "origin": 0}.get(kind, 100) or (kind in ("metrics", "record") and same_end > 0)


def last_record(run: Path) -> Path:
    return next(p for p in sorted((run / "keep").iterdir()) if p.name.endswith("-3.safetensors"))


def swapped(run: Path) -> None:
    one, two = [p for p in sorted((run / "keep").iterdir()) if p.name.endswith("-3.safetensors")]
    a, b = one.read_bytes(), two.read_bytes()
    assert a != b
    one.write_bytes(b)
    two.write_bytes(a)


def nothing_kept(run: Path) -> None:
    path = run / "checkpoint/3/index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"keep": {}}))


def shorter(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))


def another_round(run: Path) -> None:
    shutil.rmtree(run / "checkpoint/3")
    shutil.copytree(run / "checkpoint/2", run / "checkpoint/3")


@pytest.mark.parametrize("damage", [swapped, nothing_kept, shorter, another_round, lambda run: last_record(run).unlink()])
def test_other_damage(damage: Callable[[Path], None], run: Path, runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    damage(run)
    fallow.resume(run)
    assert capsys.readouterr().err.endswith("; going on from the checkpoint before it, of round 2\n")
    same(run, runs[1])


def test_no_way_back(run: Path, fallow_cli: Any) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[1:]))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    told = fallow_cli("resume", str(run))
    assert told.sentence == f"{run}/metrics.jsonl is damaged; restore it from a copy, or start the run again with `fallow run`."
    assert before == {p: p.read_bytes() for p in before}


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json", "manifest.json"])
def test_a_lost_result_is_written_again(name: str, finished: Path, runs: tuple[Path, Path]) -> None:
    (finished / name).unlink()
    fallow.resume(finished)
    same(finished, runs[1])
    assert weights(finished) == weights(runs[1]) and fallow.load(finished).model()


def test_a_lost_federation_is_made_again(run: Path, runs: tuple[Path, Path]) -> None:
    (run / "federation.npz").unlink()
    same(fallow.resume(run).path, runs[1])


def test_settings_that_were_changed(run: Path, fallow_cli: Any, tmp_path: Path) -> None:
    config = run / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("\nmodel: ", "\nmodel: resnet9 #"))
    assert "model=resnet9 where the run was begun with model=" in fallow_cli("resume", str(run)).sentence
    assert fallow_cli("export", str(run)).sentence.startswith(f"{config} is damaged, or was changed after the run was begun; ")
    config.write_text(text.replace("checkpoint_every: 1", "checkpoint_every: 2"))  # what changes no result may be changed
    assert "checkpoint_every: 2" in config.read_text() and fallow_cli("resume", str(run)).code == 0


def test_exports_are_checked(finished: Path, fallow_cli: Any) -> None:
    assert fallow_cli("export", str(finished), "-o", "out", "--format", "safetensors").code == 0
    assert fallow.load("out").model()
    assert fallow_cli("resume", "./out").sentence.startswith("out is an export, which has no rounds to go on with; ")
    flip(Path("out/model.safetensors"), random.Random(0))
    assert fallow_cli("predict", "./out", ".").code == 2
    with pytest.raises(UserError, match=r"out/model.safetensors is damaged; restore it from a copy, or export the run again"):
        fallow.load("out").model()


def test_an_older_run(run: Path, fallow_cli: Any) -> None:
    """It has no manifest, and an index without checksums."""
    (run / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"has no manifest.json, so nobody can tell whether model.safetensors is whole"):
        fallow.load(run).model()
    assert fallow.load(run).summary["rounds"] == 3  # as of thinned results
    for path in (run / "checkpoint").glob("*/index.json"):
        index = json.loads(path.read_text())
        path.write_text(json.dumps({k: index[k] for k in ("round", "shape", "keep")} | {"sha256": ""}))
    assert "index.json was written by an older version of Fallow, which kept no checksums" in fallow_cli("resume", str(run)).sentence


def test_thinned_results_are_not_resumed(finished: Path, fallow_cli: Any) -> None:
    for name in ("checkpoint", "keep"):
        shutil.rmtree(finished / name)
    for name in ("manifest.json", "federation.npz", "model.safetensors"):
        (finished / name).unlink()
    before = (finished / "metrics.jsonl").read_bytes()
    assert "has a summary but no checkpoint, as thinned results have; " in fallow_cli("resume", str(finished)).sentence
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("text", ["{", "{}", "[]", "null", '{"status": "finished"}', "[" * 100_000])
def test_a_part_of_a_summary(text: str, finished: Path, runs: tuple[Path, Path], fallow_cli: Any) -> None:
    (finished / "summary.json").write_text(text)
    assert "is damaged" in fallow_cli("compare", str(finished)).sentence
    (finished / "manifest.json").unlink()
    assert "is damaged" in fallow_cli("compare", str(finished)).sentence
    assert fallow_cli("resume", str(finished)).code == 0
    same(finished, runs[1])


def test_litter(run: Path, runs: tuple[Path, Path]) -> None:
    (run / "checkpoint/²").mkdir()
    (run / "checkpoint/01").mkdir()
    shutil.copytree(run / "checkpoint/2", run / "checkpoint/1")
    for name in ("checkpoint/.9.part", "checkpoint/.9.part/x"):
        (run / name).mkdir()
    for name in (".x.part", ".x.part/y", "keep/0", "keep/7-7.safetensors"):  # folders where files might be
        (run / name).mkdir()
    for name in ("checkpoint/.8.part", "checkpoint/5", "keep/8-8.safetensors"):  # pipes where folders or files might be
        os.mkfifo(run / name)
    for name in (".metrics.jsonl.part", "federation.npzab12.part", "keep/.3-9.safetensors.part"):
        (run / name).write_text("half")
    same(fallow.resume(run).path, runs[1])
    assert not list(run.rglob("*.part"))
    assert sorted(p.name for p in (run / "checkpoint").iterdir()) == ["01", "3", "4", "²"]  # not ours, and not in the way


def test_metrics_are_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append({"round": 1, "loss": float("nan"), "prior": [0.5, float("inf")], "seconds": {"test": float("-inf")}})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    row = json.loads(folder.metrics.read_text(), parse_constant=refuse)
    assert row == {"round": 1, "loss": None, "prior": [0.5, None], "seconds": {"test": None}}
    folder.metrics.write_text('{"round": 1, "loss": NaN}\n')  # of an older version
    assert np.isnan(folder.rows()[0]["loss"])


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENXIO, errno.EDQUOT, errno.EINVAL])
@pytest.mark.parametrize("call", [1, 3, 6, 9])
def test_a_disk_that_fails(number: int, call: int, run: Path, runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, fallow_cli: Any) -> None:
    calls, fsync = [], os.fsync

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "fsync", failing)
        told = fallow_cli("resume", str(run))
    assert "the disk is full" in told.sentence if number == errno.EDQUOT else f"({os.strerror(number)}); check the disk" in told.sentence
    assert fallow_cli("resume", str(run)).code == 0
    same(run, runs[1])


@pytest.mark.parametrize("name", ["origin.json", "federation.npz", "metrics.jsonl", "summary.json", "model.safetensors", "config.yaml"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_no_command_waits_for_a_pipe(name: str, make: Callable[[Path], None], run: Path, fallow_cli: Any) -> None:
    (run / name).unlink()
    make(run / name)
    assert name in fallow_cli("resume", str(run)).sentence or name == "config.yaml"
    for words in (["report", str(run)], ["export", str(run), "-o", "out"], ["figure", "partition", str(run), "-o", "f.png"]):
        told = fallow_cli(*words)
        assert told.code == 0 or told.sentence, words


@pytest.mark.parametrize("command", ["report", "figure"])
def test_a_damaged_federation_is_not_left_out_without_a_word(command: str, run: Path, finished: Path, fallow_cli: Any) -> None:
    flip(run / "federation.npz", random.Random(0))
    if command == "report":
        told = fallow_cli("report", str(run))
        assert told.code == 0
        assert told.err == f"warning: {run}/federation.npz is damaged; the page says nothing of who held what in that run\n"
    else:
        assert f"{run}/federation.npz is damaged; " in fallow_cli("figure", "partition", str(run), "-o", "f.png").sentence
    shutil.copy(finished / "federation.npz", run)  # it is the same
    assert fallow_cli("report", str(run)).err == ""
    other = fallow.run(out=Path("."), name="other", stop_after=1, **KEYS | {"seed": 1}).path
    shutil.copy(other / "federation.npz", run)
    assert "federation.npz is damaged; " in fallow_cli("report", str(run)).err


@pytest.mark.parametrize(
    ("command", "key", "value", "sentence"),
    [
        ("report", "data", {"a": 1}, "data={'a': 1}, which is no name"),
        ("report", "data", ["x"], "data=['x'], which is no name"),
        ("export", "image", {1: 2}, "has a key that is no word"),
    ],
)
def test_settings_of_another_kind(command: str, key: str, value: Any, sentence: str, finished: Path, fallow_cli: Any) -> None:
    config = finished / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {key: value}))
    assert sentence in fallow_cli(command, str(finished)).sentence


def test_nothing_is_said_to_be_mended_that_is_not(run: Path, fallow_cli: Any) -> None:
    """One damage that has a way back, and one that has none: only the second is told."""
    flip(run / "manifest.json", random.Random(0))
    flip(run / "federation.npz", random.Random(0))
    assert "federation.npz is damaged" in fallow_cli("resume", str(run)).sentence


def test_something_else_in_a_files_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is not a file"):
        disk.read(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), disk.errors_as_user_errors(tmp_path / "file"):
        (tmp_path / "file").mkdir()
    with pytest.raises(UserError, match=r"cannot be written \(odd\)"), disk.errors_as_user_errors(tmp_path):
        raise OSError("odd")


def test_counts_that_were_flipped(run: Path) -> None:
    """federation.npz has everyone's classes beside the lists that its fingerprint covers."""
    path, rng, good = run / "federation.npz", random.Random(1), ClassCounts.load(run / "federation.npz")
    data = path.read_bytes()
    start = data.index(b"held.npy") + 8
    found = 0
    for _ in range(20):
        place = rng.randrange(start, start + 60)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])
        try:
            assert all(np.array_equal(a, b) for a, b in zip(ClassCounts.load(path)[0], good[0]))
        except UserError as error:
            assert "is damaged" in str(error)
            found += 1
    assert found


def test_two_checkpoints_stay(tmp_path: Path) -> None:
    """Where a stop comes between two that are due."""
    run = fallow.run(out=tmp_path, name="run", stop_after=3, **KEYS | {"checkpoint_every": 2}).path
    assert sorted(p.name for p in (run / "checkpoint").iterdir()) == ["2", "3"]
    assert [r["round"] for r in rows(run)] == [1, 2, 3]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks Linux what a descriptor is of")
def test_what_is_named_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut: whatever takes a name was synced before, and its folder afterwards; so were the rows that a checkpoint covers."""
    told: list[tuple[str, str, str]] = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        told.append(("synced", os.readlink(f"/proc/self/fd/{descriptor}"), ""))
        fsync(descriptor)

    def noting(name: Callable[..., None]) -> Callable[..., None]:
        def noted(source: Any, target: Any) -> None:
            told.append(("named", str(Path(source).absolute()), str(Path(target).absolute())))
            name(source, target)

        return noted

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", noting(os.replace))
    monkeypatch.setattr(os, "rename", noting(os.rename))
    mkdir = os.mkdir

    def made(path: Any, *more: Any, **given: Any) -> None:
        mkdir(path, *more, **given)
        told.append(("made", "", str(Path(path).absolute())))

    monkeypatch.setattr(os, "mkdir", made)
    run = fallow.run(out=tmp_path, name="run", **KEYS | {"rounds": 2, "validation": 0.2}).path.resolve()
    named = [(at, source, Path(target)) for at, (what, source, target) in enumerate(told) if what == "named" and target.startswith(str(run))]
    assert {"manifest.json", "model.safetensors", "summary.json", "index.json", "server.safetensors", "1", "2"} <= {target.name for *_, target in named}
    assert {"keep", "best", "checkpoint"} <= {target.parent.name for *_, target in named}
    for at, source, target in named:
        assert ("synced", source, "") in told[:at], target
        assert ("synced", str(target.parent), "") in told[at:], target
    folders = [(at, Path(target)) for at, (what, _, target) in enumerate(told) if what == "made" and target.startswith(str(run)) and not target.endswith(".part")]
    assert {"run", "keep", "best", "checkpoint"} <= {target.name for _, target in folders}
    second = next(at for at, _, target in named if target == run / "checkpoint" / "2")
    for at, target in folders:  # a checkpoint lies in folders that last, before the next one is made
        assert ("synced", str(target.parent), "") in told[at : max(at, second)], target
    for round in (1, 2):
        before = told[: next(at for at, _, target in named if target == run / "checkpoint" / str(round))]
        assert before.count(("synced", str(run / "metrics.jsonl"), "")) == round
