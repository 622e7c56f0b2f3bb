"""Ranks: any number of processes comes to the same bits as one; a rank that dies ends the run, which can be resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import HERE, TINY, rows, same
from test_rounds import set_up

import fallow
from fallow import runs
from fallow.engine import ranks
from fallow.engine.ranks import deal, decoded, encoded
from fallow.methods import find
from fallow.methods.state import State
from fallow.runs import origin
from fallow.runs.folder import RunFolder

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WORDS = [f"{k}={v}" for k, v in (TINY | {"data": "digits", "rounds": 500}).items()]
CASES: dict[str, dict[str, Any]] = {
    "fixmatch": {"method": "fixmatch", "threshold": 0.2, "active": 3},
    "semifl": {"method": "semifl", "labels": "server", "threshold": 0.0, "norm": "bn", "sbn": "pooled"},
    "fedloke": {"method": "fedloke", "rounds": 3, "norm": "bn", "entropy": 2.0, "active": 3, "validation": 0.3},
    "fedmatch": {"method": "fedmatch", "rounds": 3, "helper_every": 2, "threshold": 0.12, "active": 3, "keep_between": "sparse", "validation": 0.3},
    "semifed": {"method": "semifed", "threshold": 0.11, "active": 3, "norm": "bn"},
    "beside": {"method": "fixmatch", "labels": "server", "optimizer_state": "travel", "threshold": 0.0},
    "replicas": {"method": "fedrgd", "labels": "server", "server_replicas": "per-group", "threshold": 0.0, "active": 2},
}
SCRIPT = """
import sys, conftest, fallow, test_ranks
for name, keys in test_ranks.CASES.items():
    result = fallow.run(out=sys.argv[1], name=name, **conftest.TINY | keys)
    assert result.accuracy is not None and result.path.name == name
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": "1"}


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [*TORCHRUN, str(tmp_path / "script.py"), str(tmp_path / "two")]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    for name, keys in CASES.items():
        alone = fallow.run(out=tmp_path / "one", name=name, **TINY | keys)
        same(alone.path, tmp_path / "two" / name)


def rank_of(number: int, parent: int) -> int:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent and f"\0RANK={number}\0".encode() in (path.parent / "environ").read_bytes():
                return int(path.parent.name)
        except OSError:  # it has ended meanwhile
            continue
    raise AssertionError(f"torchrun has no rank {number}")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the process by /proc")
def test_a_rank_that_dies_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    command = [*TORCHRUN, "-m", "fallow", "run", *WORDS, "checkpoint_every=1000", "--out", str(tmp_path), "--name", "killed"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    path, deadline = tmp_path / "killed", time.monotonic() + 300
    try:
        while not ((path / "metrics.jsonl").exists() and len(rows(path)) >= 2):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        os.kill(rank_of(1, process.pid), signal.SIGKILL)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode != 0
    said = [line for line in (out + err).splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "ended" in said[0] and f"fallow resume {path}" in said[0], err
    done = RunFolder.existing(path).committed()
    assert 2 <= done < 500 and done == len(rows(path))
    resumed = fallow.resume(path, stop_after=done + 1)
    keys = TINY | {"data": "digits", "rounds": 500}
    same(fallow.run(out=tmp_path, name="through", stop_after=done + 1, **keys).path, resumed.path)


def test_a_mistake_on_another_rank_is_told_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not taken for rank 0's own lack of memory, which begins the round again."""
    begun: Future[dict[int, torch.Tensor]] = Future()
    begun.set_result({1: encoded({"bug": "Traceback\nRuntimeError: CUDA out of memory"}, {})})
    post, f = SimpleNamespace(others=range(1, 2), ask=lambda orders, layouts: begun), set_up(tmp_path)
    monkeypatch.setattr(ranks, "post", lambda: post)
    f.executor = f.clients.executor = ranks.Ranks(f.simulation, f.executor, {})
    monkeypatch.setattr(f.executor, "shrink", lambda: pytest.fail("this rank has memory"))
    with pytest.raises(ranks.RankFailed, match="on rank 1:\nTraceback\nRuntimeError: CUDA out of memory"):
        f.round(0)


ODD = """
import os, sys, conftest, fallow
from fallow.data import sources
from fallow.runs import origin
rank = os.environ["RANK"]
for what in ("images", "fewer", "version"):
    source = conftest.few_digits()
    if rank == "1" and what == "images": source.train.images.copy_(255 - source.train.images)
    if rank == "1" and what == "fewer": source = sources.replace(source, train=sources.ImageSet(source.train.images[:99], source.train.labels[:99]))
    if rank == "1" and what == "version": origin.versions = lambda: {"torch": "1.0"}
    try:
        fallow.run(out=sys.argv[1], name=what, **conftest.TINY | {"data": source})
    except fallow.UserError as e:
        if rank == "0": print("said:", e, flush=True)
"""


def test_ranks_with_other_data_or_versions_are_named(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ODD)
    ended = subprocess.run([*TORCHRUN, str(tmp_path / "script.py"), str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=600)
    assert [line.removeprefix("said: on rank 1, ") for line in ended.stdout.splitlines() if line.startswith("said: ")] == [
        "of the data set few-digits the training images differ from rank 0's; give every rank the same files.",
        "of the data set few-digits the training images and training labels differ from rank 0's; give every rank the same files.",
        f"torch is 1.0, where rank 0 has {torch.__version__}; install the same versions for every rank.",
    ], ended.stdout + ended.stderr


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the process by /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_given_up(rank: int, tmp_path: Path) -> None:
    command = [*TORCHRUN, "-m", "fallow", "run", *WORDS, "checkpoint_every=1000", "rank_timeout=10", "--out", str(tmp_path), "--name", "run"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    path, deadline, stopped = tmp_path / "run", time.monotonic() + 300, 0
    try:
        while not ((path / "metrics.jsonl").exists() and len(rows(path)) >= 2):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        stopped, other = rank_of(rank, process.pid), rank_of(1 - rank, process.pid)
        os.kill(stopped, signal.SIGSTOP)
        while Path(f"/proc/{other}").exists():  # until the other has given it up
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(stopped, signal.SIGKILL)  # torchrun would wait half a minute for it
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    said = [line for line in (out + err).splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and f"rank {rank} has been silent for 10 s and was given up" in said[0], err
    if rank:  # rank 0 commits, and says how to go on
        assert f"fallow resume {path}" in said[0] and RunFolder.existing(path).committed() == len(rows(path)) >= 2
    else:  # it was stopped in the middle of a run, as by a kill
        assert fallow.resume(path, stop_after=1).summary["rounds"] == 1


def test_a_silent_rank_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    watched = ranks.Watched(timeout=100)
    for look in range(99):  # a second each; rank 2 goes on to give signs of life
        watched.look({1: 7, 2: look})
    assert capsys.readouterr().err == "waiting for rank 1, silent for 60 s; after 100 s (rank_timeout) it is given up\n"
    watched.look({2: 100})  # rank 1 has answered
    with pytest.raises(ranks.RankLost, match="rank 1 has been silent for 100 s and was given up"):
        watched.look({1: 7})


def test_work_is_dealt_evenly() -> None:
    assert deal([5, 1, 4, 2, 3], 2) == [[0, 1, 3], [2, 4]]  # 8 and 7
    assert deal([7], 3) == [[0], [], []]  # the server's turn stays at rank 0
    assert deal([0, 0, 0, 0], 2) == [[0, 2], [1, 3]]


def test_a_model_that_all_clients_get_travels_once() -> None:
    state = State.of(torch.nn.Linear(300, 300))
    layouts = {"model": state.layout}
    jobs = {"jobs": [{"party": k, "message": {"model": State(state.layout, dict(state.groups))}} for k in range(20)]}
    data = encoded(jobs, layouts)
    assert state.nbytes < len(data) < 1.2 * state.nbytes
    back = decoded(data, layouts, torch.device("cpu"))["jobs"]
    assert [j["party"] for j in back] == list(range(20))
    assert all(torch.equal(j["message"]["model"].groups["parameters"], state.groups["parameters"]) for j in back)


def test_every_rank_runs_the_same_algorithm(tmp_path: Path) -> None:
    """Of a method that has two."""
    keys = TINY | {"method": "feddure", "reading": "released", "labels": "clients"}
    kind, options, source, federation = runs.prepare(None, keys)
    told = {name: torch.tensor(array) for name, array in federation.arrays().items()}
    begin = {"options": options.model_dump(mode="json"), "federation": told, "origin": origin.for_ranks(options, source)}
    assert type(runs._built(begin, source)[0].method) is kind is not find("feddure")
