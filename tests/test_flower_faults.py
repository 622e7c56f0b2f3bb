"""Kills at every moment of a round, in the in-process grid: what the round did, and what the run came to.

A killed node's process is gone and its disk is as it was; it is back in the next round. A killed server goes on from its checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, rows, weights

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fallow[flower]')")

from flower_grid import Deployed, Killed

import fallow
from fallow import disk
from fallow.flower.exchange import FlowerExchange, FlowerSent
from fallow.flower.nodes import Nodes
from fallow.flower.records import Records
from fallow.flower.workplace import Workplace
from fallow.runs import Run
from fallow.runs.folder import RunFolder

KEYS = TINY | {"method": "fedloke", "norm": "gn", "clients": 3, "active": 3, "steps": 1, "rounds": 3}
VICTIM, ROUND = 1, 2  # whose process is killed, and in which round (from 1)
Patch = pytest.MonkeyPatch


class Moment:
    """Kills at a call of a function: before it, or after."""

    def __init__(self, owner: Any, name: str, when: str, counts: Callable[..., bool] = lambda *_: True, call: int = ROUND):
        self.owner, self.name, self.when, self.counts, self.call = owner, name, when, counts, call
        self.calls = 0

    def set(self, patch: Patch) -> None:
        usual = getattr(self.owner, self.name)

        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls += self.counts(*args)
            now = self.counts(*args) and self.calls == self.call
            if now and self.when == "before":
                raise Killed
            found = usual(*args, **kwargs)
            if now and self.when == "after":
                raise Killed
            return found

        patch.setattr(self.owner, self.name, called)


def _mine(thing: Any, *_: Any) -> bool:
    folder = thing.folder if isinstance(thing, Records) else thing
    return f"/node-{VICTIM}/state/" in str(folder)


def _job(place: Any, job: Any) -> bool:
    return job.party == VICTIM


NODE: dict[str, Moment] = {
    "as it begins to train": Moment(Workplace, "train", "before", _job),
    "when it has trained and kept nothing yet": Moment(Workplace, "train", "after", _job),
    "while it writes what it keeps": Moment(os, "replace", "before", lambda a, b: _mine(Path(b))),
    "when that has its name, older ones not yet removed": Moment(disk, "sync", "before", lambda p: _mine(p) and Path(p).is_dir()),
    "when it has kept it and not answered": Moment(Records, "write", "after", _mine),
}
SERVER: dict[str, Moment] = {
    "before it sends": Moment(FlowerExchange, "send", "before", lambda e, orders, kind, patience: kind == "train"),
    "when it has sent": Moment(FlowerExchange, "send", "after", lambda e, orders, kind, patience: kind == "train"),
    "when the second answer has come": Moment(FlowerSent, "next", "after", call=3 + 3 + 2),  # 3 of the roster, 3 of round 1
    "when all have answered": Moment(Nodes, "train", "after"),
    "when it has merged and tested": Moment(Nodes, "settle", "before"),
    "when the round is in effect": Moment(Nodes, "settle", "after"),
    "when its row is written": Moment(RunFolder, "append", "after"),
    "in the middle of its checkpoint": Moment(Path, "rename", "before", lambda a, b: "checkpoint" in str(b)),
    "when the checkpoint stands": Moment(Run, "commit", "after"),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fallow.run(out=tmp_path_factory.mktemp("undisturbed"), name="run", quiet=True, **KEYS).path


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, undisturbed: Path) -> bytes:
    """The weights of a run in which the victim was not there in that round."""
    there = Deployed(tmp_path_factory.mktemp("without"), KEYS)
    seen = {"rounds": 0}

    def fault(message: Any) -> str | None:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 2**63 + 11 + 7 * VICTIM:
            seen["rounds"] += 1
            return "dead" if seen["rounds"] == ROUND else None
        return None

    there.grid.fault = fault
    run = there.begin(undisturbed)
    there.go(run)
    return weights(run)


@pytest.mark.parametrize("least", [1, 3], ids=["goes-on-without", "asks-again"])
@pytest.mark.parametrize("moment", NODE)
def test_a_node_is_killed(moment: str, least: int, tmp_path: Path, undisturbed: Path, without: bytes, monkeypatch: Patch) -> None:
    there, told = Deployed(tmp_path, KEYS), list[str]()
    NODE[moment].calls = 0
    NODE[moment].set(monkeypatch)
    run = there.begin(undisturbed, min_replies=least)
    there.go(run, told.append)
    assert told == ["round 2: client 1 is left out: it has gone offline"] and NODE[moment].calls >= ROUND
    assert [row["clients"] for row in rows(run)] == [3, 2 if least == 1 else 3, 3]
    assert weights(run) == (without if least == 1 else weights(undisturbed))
    assert without != weights(undisturbed)


@pytest.mark.parametrize("moment", SERVER)
def test_the_server_is_killed(moment: str, tmp_path: Path, undisturbed: Path, monkeypatch: Patch) -> None:
    there, told = Deployed(tmp_path, KEYS), list[str]()
    SERVER[moment].calls = 0
    SERVER[moment].set(monkeypatch)
    run = there.begin(undisturbed)
    with pytest.raises(Killed):
        there.go(run, told.append)
    monkeypatch.undo()
    assert RunFolder(run).committed() in (1, 2)
    there.go(run, told.append)
    assert told == [] and weights(run) == weights(undisturbed)
    assert [row["clients"] for row in rows(run)] == [3, 3, 3]
