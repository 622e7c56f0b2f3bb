"""A federation's folder, edited, damaged or somebody's: nothing of others' is touched, and each fault has its sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TINY

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fallow[flower]')")

from flower_grid import SMALL, Deployed, simulated

from fallow import UserError, own
from fallow.flower import standing
from fallow.flower.federation import Federation

QUIET: dict[str, Any] = {"tell": lambda _: None}


def everything(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {p: (p.stat().st_mode, p.read_bytes() if p.is_file() else b"") for p in [folder, *folder.rglob("*")]}


@pytest.mark.parametrize("name", ["app/pyproject.toml", "home/config.toml", "thesis.tex"])
def test_init_takes_a_folder_of_its_own(name: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    before = everything(tmp_path)
    with pytest.raises(UserError, match=f"is no federation, but {name.partition('/')[0]} lies there"):
        Federation.init(tmp_path / "mine", 2, **QUIET)
    assert everything(tmp_path) == before


BAD: list[tuple[str, Any]] = [
    *(("clients", value) for value in (0, -1, 10**9, 1.5, True, "x", None, float("inf"))),
    *(("port", value) for value in (0, -1, 70_000, "x")),
    *(("host", value) for value in ("", "a b", "x" * 300, "é.de", "a\nb", "*", 5)),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_what_is_no_count_no_port_and_no_host(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{name}: "):
        Federation.init(tmp_path / "new", **{"clients": 2, name: value}, **QUIET)
    assert not (tmp_path / "new").exists()
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump({"clients": 2, "host": "h", "port": 1, "bind": "127.0.0.1", "link": 2} | {name: value}))
    with pytest.raises(UserError, match=f"federation.yaml has {name}: "):
        Federation(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 100_000])
def test_a_damaged_list_of_nodes_and_a_damaged_end(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Federation.init(tmp_path / "fed", 1, **QUIET)
    (fed.folder / "registered.json").write_text(text)
    run = fed.folder / "runs" / "run"
    run.mkdir()
    (run / "ended.json").write_text(text)
    row = {"round": 1, "at": "now", "asked": [0], "online": [0], "absent": {}, "seconds": {}, "bytes_up": {}, "bytes_down": {}}
    (run / "nodes.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(fed.processes, "noted", lambda: {"superlink": (1, "0")})
    monkeypatch.setattr(fed, "online", lambda: [{"node-id": "7", "status": "online"}])
    assert [line for line in standing.lines(fed) if "node ?: online" in line or line == "run run: not ended"]
    (fed.folder / "keys" / "node-0.pub").write_text("")
    with pytest.raises(UserError, match=r"node-0.pub is damaged; "):
        list(standing.lines(fed))


def test_a_deployed_run_goes_on_with_its_own_code_only(tmp_path: Path) -> None:
    method = tmp_path / "mine.py"
    method.write_text("from fallow.methods.fedavg import FedAvg\nclass Mine(FedAvg):\n    paper = 'Mine'\n")
    keys = TINY | SMALL | {"rounds": 3, "method": f"{method}:Mine"}
    reference, there = simulated(tmp_path, **keys), Deployed(tmp_path / "federation", keys)
    run = there.begin(reference)
    there.go(run, stop_after=1)
    method.write_text(method.read_text() + "    def supervised(self, s, b): super().supervised(s, b)\n")
    own.named(f"{method}:Mine", "method")
    with pytest.raises(UserError, match=r"the method's file .*mine.py is not as it was when the run was begun"):
        there.go(run)
