"""A node's worker: the bits of a run in one process whatever kills it, one run each, and never an orphan."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HERE, rows, weights

import fallow
from fallow import UserError
from fallow.flower import deployed, share
from fallow.flower.here import Here
from fallow.flower.messages import packed
from fallow.flower.parcel import Parcel
from fallow.flower.processes import started
from fallow.flower.worker import Worker
from fallow.runs import prepare

MORTAL = '''
import os
import signal
from pathlib import Path

from my_method import MyMethod


def killed(moment):
    """Once, where the file says so."""
    file = Path(os.environ.get("FALLOW_DEATHS", "/nowhere"))
    words = file.read_text().split() if file.exists() else []
    if moment in words:
        file.write_text(" ".join(w for w in words if w != moment))
        os.kill(os.getpid(), signal.SIGKILL)


def replace(old, new, usual=os.replace):
    of_mine = "/state/" in str(new)
    if of_mine:
        killed("writes")
    usual(old, new)
    if of_mine:
        killed("kept")


class Mortal(MyMethod):
    def end(self, party):
        os.replace = replace
        killed("trained")
        return super().end(party)
'''
KEYS: dict[str, Any] = {
    "data": "digits", "clients": 1, "active": 1, "label_count": 20, "batch": 8, "steps": 1, "rounds": 4, "device": "cpu", "slots": 1, "defaults": "paper",
}  # fmt: skip


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A folder that names two images."""
    np.savez(tmp_path / "share.npz", images=np.zeros((2, 8, 8), np.uint8))
    (tmp_path / "node.yaml").write_text("client: 0\ndata: share.npz\n")
    return tmp_path


@pytest.fixture
def worker(node: Path) -> Iterator[Worker]:
    with Worker(node) as found:
        yield found


def order(run: str) -> Parcel:
    """One that any worker answers at once: it tells the node why it is refused."""
    return packed({"tell": "no"}, {}, json.dumps({"run": run}))


def test_killed_at_any_moment_it_comes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(HERE.parent / "examples" / "my_method.py", tmp_path)
    (tmp_path / "mortal.py").write_text(MORTAL)
    keys = KEYS | {"method": "./mortal.py:Mortal"}
    simulated = fallow.run(out=tmp_path, name="simulated", quiet=True, **keys).path
    _, _, source, federation = prepare(None, keys)
    folder, deaths, told, pids = tmp_path / "node", tmp_path / "deaths", list[str](), list[int]()
    share.write_client(folder, 0, source, federation)
    share.write_server(tmp_path / "server", source, federation)
    for name in ("my_method.py", "mortal.py"):
        shutil.copy(tmp_path / name, folder)
    monkeypatch.setenv("FALLOW_DEATHS", str(deaths))
    run = deployed.begin(tmp_path, "run", str(simulated), {}, {}, tmp_path / "server" / "server.yaml", 1)
    with Worker(folder) as worker:
        moments = iter(["", "trained", "writes", "kept"])

        def heard(way: str, kind: str, _: Parcel) -> None:
            if (way, kind) == ("down", "train"):
                pids.append(worker.pid)
                deaths.write_text(next(moments))

        deployed.carry_out(run, Here({0: worker}, heard), told.append)  # type: ignore[dict-item]
        assert deaths.read_text() == "" and len({*pids, worker.pid}) == 4  # the first two rounds had one worker; three have died
    assert told == [] and weights(run) == weights(simulated)
    assert [row["clients"] for row in rows(run)] == [1, 1, 1, 1]
    assert started(worker.pid) is None


def test_it_is_kept_for_one_run_and_the_same_sources(worker: Worker, node: Path) -> None:
    """And killed between two messages, or while it has one, it is there again."""

    def who_answers(run: str) -> int:
        found = worker.answer(order(run))
        assert found is not None and json.loads(found.head)["tree"] == {"dict": []}
        return worker.pid

    first = who_answers("a")
    assert who_answers("a") == first
    pids = [first, who_answers("b")]
    os.utime(node / "node.yaml", (1, 1))
    pids.append(who_answers("b"))
    os.kill(worker.pid, signal.SIGKILL)
    pids.append(who_answers("b"))
    os.kill(worker.pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, [worker.pid, signal.SIGKILL]).start()
    pids.append(who_answers("b"))
    assert len({*pids}) == 5


def test_one_that_is_too_late_or_ends_twice_is_not_waited_for(worker: Worker, node: Path) -> None:
    worker.check()
    os.kill(worker.pid, signal.SIGSTOP)
    stopped = worker.pid
    assert worker.answer(order("a"), until=time.time() + 0.1) is None and started(stopped) is None
    (node / "node.yaml").write_text("data: share.npz\n")  # no longer says which client it is: it cannot begin
    assert worker.answer(order("a")) is None
    assert "does not say which client this node is" in (node / "node.log").read_text()
    with pytest.raises(UserError, match="does not say which client this node is"):
        worker.check()


def test_it_ends_with_whoever_started_it(node: Path) -> None:
    program = "import sys, time; from pathlib import Path; from fallow.flower.worker import Worker; w = Worker(Path(sys.argv[1])); print(w.pid, flush=True); time.sleep(600)"
    starter = subprocess.Popen([sys.executable, "-c", program, str(node)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    assert started(pid) is not None
    starter.kill()
    starter.wait()
    starter.stdout.close()
    until = time.monotonic() + 60
    while started(pid) is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert started(pid) is None


def test_neither_supervisor_nor_porter_imports_torch() -> None:
    """Each costs a node memory and time to begin."""
    program = "import sys; import fallow.cli, fallow.flower.starting; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
