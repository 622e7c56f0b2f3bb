"""A run killed at any moment and resumed ends with the same bytes as one that ran through."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, few_digits, rows, same, weights

import fallow
from fallow.engine.round import Federated
from fallow.errors import UserError
from fallow.runs import Run
from fallow.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("ctrl_c_is_heard")
KEYS = {
    "method": "fixmatch", "clients": 4, "active": 2, "label_count": 40, "batch": 8, "steps": 1, "norm": "bn",
    "unlabelled_batch": 8, "threshold": 0.12, "optimizer_state": "keep", "eval_every": 3, "validation": 0.3, "device": "cpu", "slots": 1, "defaults": "paper", "rounds": 60,
}  # fmt: skip


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """Of a run of many short rounds, on data that is quickly there."""
    source, path = few_digits(), tmp_path / "digits.npz"
    arrays = {"images": source.train.images, "labels": source.train.labels, "test_images": source.test.images, "test_labels": source.test.labels}
    np.savez(path, **{k: v.numpy() for k, v in arrays.items()})
    return KEYS | {"data": f"numpy:{path}"}


def worded(keys: dict[str, Any]) -> list[str]:
    return [f"{k}={v}" for k, v in keys.items()]


def started(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """The real command, as a process of its own."""
    command = [sys.executable, "-m", "fallow", *words]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(path: Path) -> int:
    try:
        return path.read_text().count("\n")
    except FileNotFoundError:
        return -1


def wait_for(metrics: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until so many rounds are written down, or the process has ended."""
    while lines(metrics) < count and process.poll() is None:
        time.sleep(0.002)


@pytest.mark.xdist_group("kills")
def test_killed_ten_times(tmp_path: Path, keys: dict[str, Any]) -> None:
    through = fallow.run(out=tmp_path, name="through", **keys)
    rng, run = random.Random(time.time_ns()), tmp_path / "run"
    metrics, kills, in_training = run / "metrics.jsonl", 0, 0
    process = started("run", *worded(keys), "--out", str(tmp_path), "--name", "run", cwd=tmp_path)
    for number in range(10):
        before = max(0, lines(metrics)) if number else -1
        if number in (2, 6):  # while it starts
            time.sleep(rng.uniform(0, 2))
        else:  # some rounds further, then at any moment of a round or its commit
            wait_for(metrics, before + rng.randint(1, 4), process)
            time.sleep(rng.uniform(0, 0.03))
            in_training += process.poll() is None
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        process.communicate()
        if not (run / "config.yaml").exists():
            process = started("run", *worded(keys), "--out", str(tmp_path), "--name", "run", cwd=tmp_path)
        else:
            process = started("resume", str(run), cwd=tmp_path)
    _, err = process.communicate()
    assert process.returncode == 0 and not err, err
    assert kills >= 5 and in_training >= 3  # they did hit
    same(run, through.path)
    assert sorted(p.name for p in (run / "checkpoint").iterdir()) == ["59", "60"]
    assert 4 <= len(list((run / "keep").iterdir())) <= 6  # of each client, and what round 60 took the place of


def test_interrupted(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Ctrl-C commits the last finished round, although a checkpoint is not due, and says how to go on."""
    run = tmp_path / "run"
    words = ["run", *worded(keys), "checkpoint_every=1000", "--out", str(tmp_path), "--name", "run"]
    process = started(*words, cwd=tmp_path)
    wait_for(run / "metrics.jsonl", 3, process)
    with pytest.raises(UserError, match=f"the run {run} is being run by another process; wait for it, or stop it"):
        fallow.resume(run)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err, err
    done = lines(run / "metrics.jsonl")
    assert done >= 3 and f"interrupted after round {done}; go on with: fallow resume {run}" in out
    assert RunFolder(run).committed() == done
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    same(fallow.resume(run).path, fallow.run(out=tmp_path, name="through", **keys).path)  # the dead process's lock is no lock


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_told_to_end(number: int, code: int, tmp_path: Path, keys: dict[str, Any]) -> None:
    """A scheduler's SIGTERM and a closed terminal's SIGHUP commit as Ctrl-C does; under nohup SIGHUP is nothing."""
    run, words = tmp_path / "run", [*worded(keys | {"rounds": 5000}), "checkpoint_every=10000", "--out", str(tmp_path), "--name", "run"]
    process = started("run", *words, cwd=tmp_path)
    wait_for(run / "metrics.jsonl", 3, process)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == code and not err, (process.returncode, err)
    done = lines(run / "metrics.jsonl")
    assert 3 <= done < 5000 and f"interrupted after round {done}; go on with: fallow resume {run}" in out
    assert RunFolder(run).committed() == done
    assert fallow.resume(run, stop_after=done + 1).summary["rounds"] == done + 1


def test_a_run_that_fails_leaves_the_signals_as_they_were(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Those of whoever called it from Python."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(n) for n in numbers]

    def fail(event: str, what: Any) -> None:
        if event == "round":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fallow.run(out=tmp_path, watch=fail, **keys)
    assert [signal.getsignal(n) for n in numbers] == before


def test_nohup_stays_nohup(tmp_path: Path, keys: dict[str, Any]) -> None:
    ignoring = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); from fallow.__main__ import main; main()"
    words = [*worded(keys | {"rounds": 8}), "--out", str(tmp_path), "--name", "run"]
    process = subprocess.Popen([sys.executable, "-c", ignoring, "run", *words], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(tmp_path / "run" / "metrics.jsonl", 1, process)  # type: ignore[arg-type]
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 0, process.communicate()
    assert lines(tmp_path / "run" / "metrics.jsonl") == 8


IMPORTING = """
import os, signal, sys
class Pressed:  # a signal while a module is looked for, and what some libraries make of that
    def find_spec(self, name, *_):
        if name == os.environ["PRESSED_AT"]:
            try:
                os.kill(os.getpid(), int(os.environ["SIGNAL"]))
            except BaseException:
                raise ImportError("swallowed")
sys.meta_path.insert(0, Pressed())
from fallow.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("module", ["fallow.cli", "torch", "fallow.runs.tracking"])
def test_interrupted_while_importing(module: str, number: int, tmp_path: Path) -> None:
    """A shell gives a process that died of SIGTERM 143 too: before the command begins nobody needs to hear of it."""
    command, more = [sys.executable, "-c", IMPORTING, "run", "rounds=1"], {"PRESSED_AT": module, "SIGNAL": str(int(number))}
    ended = subprocess.run(command, env=os.environ | more, cwd=tmp_path, capture_output=True, text=True)
    code = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
    assert (code, ended.stdout, ended.stderr) == (128 + number, "", "") and not list(tmp_path.rglob("*"))


def test_interrupted_while_python_ends(tmp_path: Path) -> None:
    pressed = "import atexit, os, signal; from fallow.__main__ import main; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); main()"
    ended = subprocess.run([sys.executable, "-c", pressed, "list", "views"], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "") and "weak" in ended.stdout


@pytest.mark.parametrize("moment", ["round", "keep", "append", "commit"])
def test_interrupted_at_the_worst_moment(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a round trains, takes effect, is written down or is committed."""
    keys = TINY | {"method": "fixmatch", "optimizer_state": "keep", "rounds": 4, "checkpoint_every": 3, "keep_memory": 0.0}
    owner, name = {
        "round": (Federated, "evaluate"),
        "keep": (__import__("fallow.engine.keep", fromlist=["Keep"]).Keep, "write"),
        "append": (RunFolder, "append"),
        "commit": (Run, "commit"),
    }[moment]
    calls, original = [], getattr(owner, name)

    def interrupted(*args: Any) -> Any:
        calls.append(name)
        if len(calls) == (1 if moment == "commit" else 2):
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            fallow.run(out=tmp_path, name="run", **keys)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    expected = {"round": 1, "keep": 2, "append": 2, "commit": 3}[moment]
    assert RunFolder(tmp_path / "run").committed() == expected == lines(tmp_path / "run" / "metrics.jsonl")
    same(fallow.resume(tmp_path / "run").path, fallow.run(out=tmp_path, name="through", **keys).path)


def test_stopped_and_resumed(tmp_path: Path, fallow_cli: Any) -> None:
    words = worded(TINY | {"method": "fixmatch", "rounds": 4, "schedule": "cosine"})
    through = fallow_cli("run", *words, "--name", "through")
    stopped = fallow_cli("run", *words, "--name", "run", "--stop-after", "1")
    assert stopped.code == 0 and "stopped after round 1; go on with: fallow resume runs/run" in stopped.out
    assert fallow_cli("resume", "runs/run", "--stop-after", "3").code == 0
    assert [r["round"] for r in rows(Path("runs/run"))] == [1, 2, 3]
    assert fallow_cli("resume", "run").code == 0  # the name is enough
    same(Path("runs/run"), Path("runs/through"))
    finished = fallow_cli("resume", "runs/run", "--quiet")
    assert finished.code == 0 and "The run runs/run is finished; nothing to do." in finished.out
    assert next(line for line in through.out.splitlines() if line.startswith("accuracy ")) in finished.out
    assert fallow_cli("resume", "runs/run", "--stop-after", "0").sentence == "--stop-after 0 is not a round; rounds count from 1."


def test_without_a_checkpoint_it_starts_at_round_1(tmp_path: Path) -> None:
    keys = TINY | {"method": "fedavg"}
    through = fallow.run(out=tmp_path, name="through", **keys)
    run = fallow.run(out=tmp_path, name="run", stop_after=1, **keys).path
    for left in ("checkpoint", "summary.json", "model.safetensors"):
        shutil.rmtree(run / left) if (run / left).is_dir() else (run / left).unlink()
    same(fallow.resume(run).path, through.path)
    (run / "federation.npz").unlink()  # it follows from the settings
    shutil.rmtree(run / "checkpoint")
    same(fallow.resume(run).path, through.path)


def test_a_line_cut_off_by_a_kill_is_written_again(tmp_path: Path) -> None:
    keys = TINY | {"method": "fedavg", "rounds": 3}
    through = fallow.run(out=tmp_path, name="through", **keys)
    run = fallow.run(out=tmp_path, name="run", stop_after=2, **keys).path
    with (run / "metrics.jsonl").open("a") as f:
        f.write('{"round": 3, "accu')
    assert len(fallow.load(run).metrics) == 2
    same(fallow.resume(run).path, through.path)


def test_killed_between_the_last_commit_and_the_summary(tmp_path: Path) -> None:
    """An older summary, of a stop, does not pass for that of the finished run."""
    keys = TINY | {"method": "fedavg"}
    run = fallow.run(out=tmp_path, name="run", stop_after=1, **keys).path
    old = {name: (run / name).read_bytes() for name in ("summary.json", "model.safetensors")}
    finished = weights(fallow.resume(run).path)
    for name, data in old.items():
        (run / name).write_bytes(data)
    assert fallow.resume(run).summary["status"] == "finished"
    assert weights(run) == finished != old["model.safetensors"]


def test_a_failed_run_leaves_its_lock(tmp_path: Path) -> None:
    """In one process too, as in a notebook: an error held by a variable does not hold the run."""
    keys = TINY | {"method": "fedavg", "rounds": 3}

    def stumble(event: str, what: Any) -> None:
        if event == "round":
            raise RuntimeError("stumbled")

    with pytest.raises(RuntimeError) as held:
        fallow.run(out=tmp_path, name="run", watch=stumble, **keys)
    assert held.value and fallow.resume(tmp_path / "run").summary["rounds"] == 3


def test_a_rare_checkpoint(tmp_path: Path) -> None:
    keys = TINY | {"method": "fixmatch", "optimizer_state": "keep", "rounds": 5, "checkpoint_every": 2, "data": "digits"}
    through = fallow.run(out=tmp_path, name="through", **keys | {"checkpoint_every": 1})

    words = worded(keys)
    process = started("run", *words, "--name", "run", "--out", str(tmp_path), cwd=tmp_path)
    wait_for(tmp_path / "run" / "metrics.jsonl", 3, process)
    process.kill()
    process.communicate()
    assert RunFolder(tmp_path / "run").committed() in (2, 4, 5)
    same(fallow.resume(tmp_path / "run").path, through.path)


def test_a_failure_keeps_the_rounds_before_it(tmp_path: Path) -> None:
    keys = TINY | {"method": "fixmatch", "optimizer_state": "keep", "rounds": 5, "checkpoint_every": 4}
    through = fallow.run(out=tmp_path, name="through", **keys)

    def failing(event: str, what: Any) -> None:
        if event == "round" and what["round"] == 3:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fallow.run(out=tmp_path, name="run", watch=failing, **keys)
    assert RunFolder(tmp_path / "run").committed() == 3
    same(fallow.resume(tmp_path / "run").path, through.path)
