"""Every mistake ends in one sentence that names cause and remedy, exit code 2, no traceback, and nothing is lost."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, rows, same, weights

import fallow
from fallow import disk
from fallow.errors import UserError

WORDS = [f"{k}={v}" for k, v in (TINY | {"method": "fixmatch"}).items()]

# what is typed after tiny, good settings: what is said
WRONG = {
    "method=fixmach": "there is no method 'fixmach'; did you mean 'fixmatch'?",
    "method=mine.py": "method=mine.py names a file and no class in it; write mine.py:CLASS.",
    "method=zzz": "there is no method 'zzz'; known are cbafed, ",
    "method=5": "method=5 is no name; write for example method=fixmatch.",
    "roundz=3": "there is no key 'roundz'; did you mean 'rounds'?",
    "labelled_clients=3": "labelled_clients=3, but labels=clients; use labels=some",
    "qqq=3": "there is no key 'qqq'; `fallow run method=fixmatch --help` lists those there are",
    "augment.stong=weak": "there is no key 'augment.stong'; did you mean 'augment.strong'?",
    "augment=weak": "augment is a section, not 'weak'; write augment.KEY=VALUE.",
    "augment.strong=nope": "augment.strong=nope is no view; known are plain, ",
    "augment.flip=x": "augment.flip=x is not allowed; give auto, always or never (augment.flip means: mirror images",
    "rounds": "'rounds' is not key=value; write for example rounds=10",
    "rounds=many": "rounds=many is not allowed; give a whole number (rounds means: how many rounds the run has, 1 or more).",
    "rounds=0": "rounds=0 is not allowed; give 1 or more (",
    "rounds=-3": "rounds=-3 is not allowed; give 1 or more (",
    "rounds=1.5": "rounds=1.5 is not allowed; give a whole number (",
    "clients=0": "clients=0 is not allowed; give 1 or more (",
    "batch=0": "batch=0 is not a positive count; give 1 or more.",
    "batch=some": "batch=some is not allowed; give a whole number or full (batch means: labelled batch).",
    "steps=-1": "steps=-1 is not a positive count; give 1 or more.",
    "slots=0": "slots=0 is not a positive count; give 1 or more.",
    "unlabelled_batch=0": "unlabelled_batch=0 is not a positive count; give 1 or more.",
    "unlabelled_batch=ratio:x": "unlabelled_batch=ratio:x is not known; use a count, match-steps, match-steps:floor, equal, ratio:N or full.",
    "unlabelled_batch=equal batch=full": "unlabelled_batch=equal is a multiple of a batch that is full; use unlabelled_batch=full, or a count",
    "active=9": "active=9 is more than clients=4; lower active or raise clients.",
    "active=1.5": "active=1.5 is neither a count nor a share; give a whole number, or one below 1.",
    "lr=true": "lr=true is not allowed; give a number (lr means: local learning rate).",
    "slots=on": "slots=true is not allowed; give a whole number or auto (",
    "augment.cutout=yes": "augment.cutout=true is not allowed; give a whole number or auto or none (",
    "model.depth=3": "model={'depth': 3} is not allowed; give text (",
    "track.x=true": "track={'x': True} is not allowed; give a list",
    "augment.strong.x=1": "augment.strong={'x': 1} is not allowed; give text (",
    "lr=fast": "lr=fast is not allowed; give a number (lr means: local learning rate).",
    "lr=0": "lr=0 is not allowed; give a number above 0 (",
    "lr=.inf": "lr=inf is not allowed; give a finite number (",
    "momentum=1": "momentum=1 is not allowed; give a number below 1 (",
    "nesterov=maybe": "nesterov=maybe is not allowed; give true or false (",
    "labels=everyone": "labels=everyone is not allowed; give server, clients, some or all (",
    "threshold=-1": "threshold=-1 is not allowed; give 0 or more (",
    "seed=-1": "seed=-1 is not allowed; give 0 or more (",
    "schedule=cosin": "schedule='cosin' is not known; did you mean 'cosine'?",
    "model=small-cn": "there is no model 'small-cn'; did you mean 'small-cnn'?",
    "device=gpu": "device='gpu' cannot be used; use cpu, cuda, cuda:N or auto.",
    "device=mps": "Apple's GPU has no 64-bit floats, and Fallow takes its averages and its metrics in them; use device=cpu.",
    "device=cuda:256": "device='cuda:256' cannot be used; use cpu, cuda, cuda:N or auto.",
    "device=cpu:3": "device='cpu:3' cannot be used; use cpu, cuda, cuda:N or auto.",
    "image.size=4": "few-digits has 8x8 images, which padding cannot bring to 4; set image.fit=resize.",
    "data=cifa10": "there is no data set 'cifa10'; did you mean 'cifar10'?",
    "data=cifar10": "cifar10 is not in /nonexistent/fallow-data (looked for cifar-10-batches-py/data_batch_1",
    "data=numpy:no.npz": "there is no file no.npz; give the path of an .npz file.",
    "data=folder:no": "there is no folder no; give the path of a folder that has one folder per class.",
    "label_count=1000": "1000 labels are asked for but only 240 samples have one; ask for fewer.",
    "label_count=3": "3 labels are fewer than the 10 classes; ask for more labels, or use label_balance=random.",
    "label_ratio=0.5": "labels are counted in more than one way; give one of label_count, label_ratio and label_per_class.",
    "clients=500 active=2": "500 clients but only 240 samples; use fewer clients.",
    "clients=60 active=2": "60 clients but only 40 labelled samples; use fewer clients or more samples.",
    "labels=some labelled_clients=9": "labelled_clients=9 of 4 clients; use a count from 1 to 4, or a fraction below 1.",
    "partition=dirichlet": "the partition 'dirichlet' is not known; did you mean 'dirichlet-",
    "partition=shards:11": "shards:11 with 10 classes; use a whole number from 1 to 10.",
    "partition=natural": "partition=natural, but the data does not say which client a sample is from; use data with client ids, or",
    "--stop-after=0": "--stop-after 0 is not a round; rounds count from 1.",
    "--stopafter=1": "there is no flag or key --stopafter; did you mean '--stop-after'?",
    "--out=file": "file is a file, not a folder; choose another folder with --out.",
    "--out=file/deeper": "file/deeper cannot be written (Not a directory); choose another folder with --out.",
}


@pytest.mark.parametrize("words", WRONG)
def test_of_settings(words: str, fallow_cli: Any) -> None:
    Path("file").write_text("")
    told = fallow_cli("run", *WORDS, *words.split())
    assert told.sentence.startswith(WRONG[words]), told.err
    assert told.sentence[-1] in ".?"
    assert not Path("runs").exists() or not list(Path("runs").iterdir())  # no half-made run stays behind


def test_of_recipes(fallow_cli: Any) -> None:
    Path("broken.yaml").write_text("rounds: 3\nmethod: [fedavg\n")
    Path("list.yaml").write_text("- rounds\n")
    Path("typo.yaml").write_text("round: 3\n")
    Path("loop.yaml").write_text("inherit: loop.yaml\n")
    Path("bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name, sentence in {
        "nosuch": "there is no recipe 'nosuch'; write method=NAME, data=NAME, or one of `fallow list recipes`.",
        "defalt": "there is no recipe 'defalt'; did you mean 'default'?",
        "no.yaml": "there is no file no.yaml; check the path.",
        "broken.yaml": "broken.yaml is not valid YAML in line ",
        "list.yaml": "list.yaml holds no keys; write one `key: value` per line.",
        "typo.yaml": "there is no key 'round'; did you mean 'rounds'?",
        "loop.yaml": "the recipe loop.yaml inherits from itself; name another one in its `inherit`, or none.",
        "bytes.yaml": "bytes.yaml cannot be read (",
    }.items():
        assert fallow_cli("run", name).sentence.startswith(sentence)


def test_of_data_files(fallow_cli: Any) -> None:
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 4
    np.savez("good.npz", images=images, labels=labels)
    data = Path("good.npz").read_bytes()
    Path("short.npz").write_bytes(data[: len(data) // 2])
    Path("corrupt.npz").write_bytes(data[:200] + bytes(len(data) - 400) + data[-200:])
    np.savez("uneven.npz", images=images, labels=labels[:-1])
    np.savez("real.npz", images=images / 2, labels=labels)
    Path("empty/a").mkdir(parents=True)
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        for part in ("train", "test"):
            Path(f"pictures/{part}/{name}").parent.mkdir(parents=True, exist_ok=True)
            Path(f"pictures/{part}/{name}").write_bytes(b"\x89PNG nonsense")
    for name, sentence in {
        "numpy:short.npz": "short.npz is damaged: it is truncated or not an .npz of plain arrays (",
        "numpy:corrupt.npz": "corrupt.npz is damaged: ",
        "numpy:uneven.npz": "uneven.npz has 40 images but 39 labels; ",
        "numpy:real.npz": "real.npz has float64 images; save them as uint8 from 0 to 255.",
        "folder:empty": "empty/a holds no images; put images there or remove the folder.",
        "folder:pictures": "8 of 8 files cannot be read (pictures/train/a/1.png, pictures/train/a/2.png, ",
    }.items():
        assert fallow_cli("run", *WORDS, f"data={name}").sentence.startswith(sentence)


@contextmanager
def someone_else() -> Iterator[None]:
    """Root may read everything; a thread of another user may not."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(117, -1, 65534, -1):  # setresuid of this thread alone
        pytest.skip("cannot become another user here")
    try:
        yield
    finally:
        libc.syscall(117, -1, 0, -1)


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="changes the user of a thread")
def test_a_folder_that_cannot_be_read(fallow_cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "closed"
    (path / "a").mkdir(parents=True)
    path.chmod(0)
    above = [p for p in tmp_path.parents if p != Path("/") and not p.stat().st_mode & 1]
    modes = {p: p.stat().st_mode for p in [*above, tmp_path]}
    for p in modes:
        p.chmod(0o755)
    try:
        with someone_else():
            told = fallow_cli("run", *WORDS, f"data=folder:{path}")
        assert told.sentence == f"{path} cannot be read: permission denied; change its permissions."
        with someone_else():
            told = fallow_cli("run", *WORDS, f"--out={path}/runs")
        assert told.sentence == f"{path}/runs cannot be written (Permission denied); choose another folder with --out."
    finally:
        path.chmod(0o755)
        for p, mode in modes.items():
            p.chmod(mode)


# -- runs ----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    keys = TINY | {"method": "fixmatch", "optimizer_state": "keep", "rounds": 3, "checkpoint_every": 2}
    return fallow.run(out=tmp_path / "runs", name="run", stop_after=2, **keys).path


def through(tmp_path: Path) -> Path:
    keys = TINY | {"method": "fixmatch", "optimizer_state": "keep", "rounds": 3}
    return fallow.run(out=tmp_path, name="through", **keys).path


def test_no_such_run(fallow_cli: Any) -> None:
    for command in ("resume", "compare"):
        assert fallow_cli(command, "nosuch").sentence == "there is no run at nosuch; give the folder of a run, such as runs/NAME."
        assert f"; write fallow {command} RUN" in fallow_cli(command).sentence


@pytest.mark.parametrize("damage", ["server.safetensors", "index.json", "empty", "federation.npz", "metrics.jsonl", "keep"])
def test_a_damaged_run(damage: str, stopped: Path, fallow_cli: Any, tmp_path: Path) -> None:
    checkpoint = stopped / "checkpoint" / "2"
    files = {
        "server.safetensors": [checkpoint / "server.safetensors"],
        "index.json": [checkpoint / "index.json"],
        "empty": [checkpoint / "index.json"],
        "federation.npz": [stopped / "federation.npz"],
        "metrics.jsonl": [stopped / "metrics.jsonl"],
        "keep": list((stopped / "keep").iterdir()),
    }
    good = {path: path.read_bytes() for path in files[damage]}
    for path, data in good.items():
        middle = len(data) // 2
        path.write_bytes({"empty": b"", "keep": data[:60]}.get(damage, data[:middle] + b"\x00\xff" + data[middle + 2 :]))
    told = fallow_cli("resume", str(stopped))
    assert any(word in told.sentence for word in ("damaged", "cannot be read")) and "restore" in told.sentence
    for path, data in good.items():
        path.write_bytes(data)  # nothing else was touched
    assert fallow_cli("resume", str(stopped)).code == 0
    same(stopped, through(tmp_path))


def test_a_config_of_another_version(stopped: Path, fallow_cli: Any) -> None:
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace("version: 1\n", "version: 99\n"))
    told = fallow_cli("resume", str(stopped))
    assert told.sentence.startswith(f"{config} was written by another version of Fallow (config version 99, this one reads 1); ")


def test_a_damaged_summary(stopped: Path, fallow_cli: Any) -> None:
    (stopped / "summary.json").write_text("{")
    assert fallow_cli("compare", str(stopped)).sentence.startswith(f"the summary of the run {stopped} is damaged; delete it and")
    (stopped / "summary.json").unlink()
    assert fallow_cli("compare", str(stopped)).sentence == f"the run {stopped} has not ended; wait for it, or continue it with `fallow resume {stopped}` if it was cut."


def test_weights_that_become_nan(fallow_cli: Any) -> None:
    words = [w for w in WORDS if not w.startswith(("rounds", "steps"))]
    told = fallow_cli("run", *words, "rounds=20", "steps=4", "lr=1e9", "norm=none", "--name", "nan")
    assert told.sentence.startswith("the weights of client ") and "became NaN or infinite in round " in told.sentence
    assert told.sentence.endswith("lower lr, or set clip=1; the rounds before it are kept.")
    done = len(rows(Path("runs/nan")))
    assert f"in round {done + 1};" in told.sentence


# -- a full disk -----------------------------------------------------------------------------------------------------------
FULL = "free some space, then continue with `fallow resume`; all committed rounds are kept."


@pytest.mark.parametrize("what", ["checkpoint", "record", "row", "model", "summary"])
def test_a_full_disk(what: str, fallow_cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk says no to one write of the third round, after a part of it."""
    name = {"checkpoint": "server.safetensors", "record": "-3.safetensors", "row": "metrics.jsonl", "model": "model.safetensors", "summary": "summary.json"}[what]
    calls: list[str] = []

    class Full:
        def __init__(self, file: Any):
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self.file.close()

        def write(self, data: Any) -> None:
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path: Any, mode: str = "r", *args: Any) -> Any:
        file = open(path, mode, *args)  # noqa: SIM115
        if name in str(path) and mode[0] == ("a" if what == "row" else "w"):
            calls.append(str(path))
            third = ".3.part" in str(path) or what in ("record", "model", "summary") or len(calls) == 3
            return Full(file) if third else file
        return file

    from fallow.runs import metrics

    words = [w for w in WORDS if not w.startswith("rounds")] + ["rounds=4", "optimizer_state=keep", "--name", "run"]
    with monkeypatch.context() as patch:
        patch.setattr(disk, "open", opened, raising=False)
        patch.setattr(metrics, "open", opened, raising=False)
        told = fallow_cli("run", *words)
    assert told.sentence.startswith("the disk is full (writing runs/run/") and told.sentence.endswith(FULL)
    committed = 4 if what in ("model", "summary") else 2
    assert sorted(p.name for p in Path("runs/run/checkpoint").iterdir()) == [str(committed - 1), str(committed)]
    assert fallow_cli("resume", "runs/run").code == 0
    words[-1] = "through"
    assert fallow_cli("run", *words).code == 0
    same(Path("runs/run"), Path("runs/through"))


def test_a_link_in_the_place_of_what_is_written_first(stopped: Path, fallow_cli: Any, tmp_path: Path) -> None:
    """A link takes the place of the file that is written first: it is not followed, and nothing is lost."""
    before = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    with (stopped / "metrics.jsonl").open("a") as f:
        f.write("cut o")  # what a kill has left is removed first
    before[stopped / "metrics.jsonl"] += b"cut o"
    (stopped / ".metrics.jsonl.part").symlink_to("/dev/full")
    told = fallow_cli("resume", str(stopped))
    assert told.sentence.startswith(f"{stopped}/metrics.jsonl cannot be written (Too many levels of symbolic links); ")
    assert before == {p: p.read_bytes() for p in before}
    (stopped / ".metrics.jsonl.part").unlink(missing_ok=True)
    assert fallow_cli("resume", str(stopped)).code == 0
    same(stopped, through(tmp_path))


def test_a_small_disk(tmp_path: Path, fallow_cli: Any) -> None:
    """A file system of two megabytes, which the records of clients fill up."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a file system here")
    try:
        words = [w for w in WORDS if not w.startswith(("rounds", "active"))] + ["active=1", "rounds=6", "optimizer_state=keep"]
        told = fallow_cli("run", *words, "--out", str(small), "--name", "run")
        assert told.sentence.startswith("the disk is full (writing ") and told.sentence.endswith(FULL)
        done = sorted(int(p.name) for p in (small / "run" / "checkpoint").iterdir())
        assert 1 <= done[-1] < 6 and done in ([1], [done[-1] - 1, done[-1]])
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True, capture_output=True)
        assert fallow_cli("resume", str(small / "run")).code == 0
        assert fallow_cli("run", *words, "--name", "through").code == 0
        same(small / "run", Path("runs/through"))
    finally:
        subprocess.run(["umount", "-l", str(small)], capture_output=True)


# -- the command itself ----------------------------------------------------------------------------------------------------
def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fallow", *words], cwd=cwd, capture_output=True, text=True)


def test_as_a_process(tmp_path: Path) -> None:
    told = command("run", "method=fixmach", cwd=tmp_path)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == "error: there is no method 'fixmach'; did you mean 'fixmatch'?\n"
    shown = command("--debug", "run", "method=fixmach", cwd=tmp_path)
    assert shown.returncode == 1 and "Traceback" in shown.stderr and "UserError" in shown.stderr
    assert not list(tmp_path.iterdir())


def test_a_bug_is_no_mistake(fallow_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("fallow.runs.run", broken)
    with pytest.raises(ZeroDivisionError):
        fallow_cli("run")


def test_sentences_end_well() -> None:
    assert str(UserError("a is b.", "do c. ")) == "a is b; do c."
    assert str(UserError("a", "did you mean 'b'?")) == "a; did you mean 'b'?"


def test_nothing_of_a_finished_run_is_lost(stopped: Path, fallow_cli: Any) -> None:
    """A second run of the same name gets a folder of its own."""
    before = weights(stopped)
    assert fallow_cli("run", *WORDS, "--name", "run").code == 0
    assert weights(stopped) == before and Path("runs/run-2/summary.json").is_file()
    assert json.loads((stopped / "summary.json").read_text())["status"] == "stopped"


def test_a_table_from_nowhere(fallow_cli: Any) -> None:
    told = fallow_cli("table", "feddure", "1", "--from", "nosuch")
    assert told.code == 2 and told.sentence == "there is no folder nosuch; give one with results or runs, such as results."


def test_a_folder_that_is_no_run_among_runs(stopped: Path, tmp_path: Path, fallow_cli: Any) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    beside = [str(tmp_path / "notes"), str(tmp_path / "notes.txt")]
    told = fallow_cli("report", str(stopped), *beside, "-o", str(tmp_path / "r.html"))
    assert told.code == 0 and (tmp_path / "r.html").exists()
    assert fallow_cli("report", *beside).sentence == "none of these folders is a run; give folders of runs, such as runs/NAME."


def test_a_file_without_a_name() -> None:
    with pytest.raises(UserError, match="is no name for a file; give one"):
        disk.write(Path(""), "x")


def test_commands_of_federations_without_flower_say_how_to_get_it(fallow_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that comes with Flower is there, such as the library of its keys."""

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for words in ("federation init", "federation up", "federation run", "federation status", "federation down", "node start"):
        assert fallow_cli(*words.split(), "fed").sentence.startswith("Flower is not installed"), words
