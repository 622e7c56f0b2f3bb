"""A deployed run is followed from the command line in its folder."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fallow[flower]')")

from fallow import UserError
from fallow.flower import running
from fallow.runs.folder import RunFolder


def row(round: int, accuracy: float) -> dict[str, Any]:
    return {"round": round, "accuracy": accuracy}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Its server was killed when it had written the row of round 2, and not yet its checkpoint."""
    monkeypatch.setattr(running, "SILENT", 0.2)
    found = RunFolder(tmp_path / "run")
    found.path.mkdir()
    found.metrics.write_text("".join(json.dumps(row(k, 1.0)) + "\n" for k in (1, 2)))
    return found


def follow(run: RunFolder) -> list[dict[str, Any]]:
    told = list[dict[str, Any]]()
    fed: Any = SimpleNamespace(folder=run.path.parent, runs=lambda number: [{"status": "finished:completed"}])
    running.follow(fed, run.path, "1", told.append, seen=1, there=2)
    return told


def serve(run: RunFolder, last: int, end: bool) -> None:
    """Takes a while to begin, goes back to its checkpoint, and makes the rounds after it anew."""
    time.sleep(0.8)
    with run.locked():
        run.metrics.write_text(json.dumps(row(1, 1.0)) + "\n")
        time.sleep(0.4)
        with run.metrics.open("a") as file:
            file.writelines(json.dumps(row(k, 2.0)) + "\n" for k in range(2, last + 1))
        if end:
            (run.path / running.ENDED).write_text('{"ok": true}')


def test_a_server_that_has_not_begun_to_go_on_is_not_taken_for_dead(run: RunFolder) -> None:
    serving = threading.Thread(target=serve, args=(run, 2, True))
    serving.start()
    assert follow(run) == [row(2, 2.0)]  # and round 2 is not told as it was before
    serving.join()


def test_a_server_that_has_begun_and_died_is_told(run: RunFolder) -> None:
    serving = threading.Thread(target=serve, args=(run, 3, False))
    serving.start()
    with pytest.raises(UserError, match="the server's process has died"):
        follow(run)
    serving.join()
