"""`resume RUN rounds=N`: more rounds for a run, as an intended change of its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, same

import fallow
from fallow import disk
from fallow.errors import UserError
from fallow.runs import longer
from fallow.runs.folder import RunFolder

KEYS = TINY | {"method": "fixmatch", "rounds": 2, "schedule": "constant"}


def run(out: Path, **keys: Any) -> fallow.Result:
    return fallow.run(out=out, **KEYS | keys)


def changed(path: Path) -> list[dict[str, Any]]:
    return json.loads((path / "origin.json").read_text())["changed"]


@pytest.mark.parametrize("stop", [None, 1])
@pytest.mark.parametrize("keys", [{}, {"method": "fedloke"}], ids=str)
def test_it_ends_as_if_it_had_had_them_from_the_beginning(keys: dict[str, Any], stop: int | None, tmp_path: Path) -> None:
    """A finished run, and a stopped one."""
    whole, part = run(tmp_path, name="whole", **keys | {"rounds": 4}), run(tmp_path, name="part", stop_after=stop, **keys)
    said: list[str] = []
    done = fallow.resume(part.path, rounds=4, watch=lambda event, what: said.append(what) if event == "note" else None)
    same(done.path, whole.path)
    assert done.config.rounds == 4 and done.summary["status"] == "finished" and done.summary["config_hash"] == whole.summary["config_hash"]
    assert said == [f"2 rounds become 4; {stop or 2} are done, and the end is that of a run with rounds=4 from its beginning"]
    assert [(note["after_round"], note["rounds"]) for note in changed(done.path)] == [(stop or 2, [2, 4])]
    assert "rounds: 4" in (done.path / "config.yaml").read_text()
    assert len(fallow.resume(part.path, rounds=5).metrics) == 5 and len(changed(part.path)) == 2
    assert fallow.load(part.path).predict([]).labels == []  # all its checksums agree


def test_what_a_schedule_over_all_rounds_becomes(tmp_path: Path) -> None:
    part = run(tmp_path, schedule="cosine", lr=0.1, rounds=2)
    said: list[str] = []
    done = fallow.resume(part.path, rounds=4, watch=lambda event, what: said.append(what) if event == "note" else None)
    # (1 + cos(pi t)) / 2 at t = 2/4 is a half; over two rounds it would have been nothing
    assert said == ["2 rounds become 4; 2 are done; schedule=cosine is over all rounds, and from here on it is that of 4 (lr 0.05, where it was 0), "
                    "so the end is not that of a run with rounds=4 from its beginning"]  # fmt: skip
    assert [row["lr"] for row in done.metrics] == pytest.approx([0.1, 0.05, 0.05, 0.1 * (1 - 0.5**0.5) / 2], abs=1e-8)


@pytest.mark.parametrize("keys, words", [
    ({"schedule": "cosine,horizon=9"}, "the end is that of"), ({"schedule": "constant,warmup=3"}, "the end is that of"),
    ({"schedule": "cosine-7-16"}, "schedule=cosine-7-16 is over all rounds"), ({"method": "uda", "tsa": "linear"}, "tsa=linear is over all rounds"),
    ({"server_turn": "after+last", "labels": "server"}, "the last turn of the server (server_turn=after+last) was made already"),
])  # fmt: skip
def test_what_else_is_over_all_rounds(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    part = run(tmp_path, **keys)
    assert words in longer.prolonged(RunFolder(part.path), 3)
    stopped = run(tmp_path, stop_after=1, **keys)
    if "server_turn" in keys:
        assert "the end is that of" in longer.prolonged(RunFolder(stopped.path), 3)


def test_a_kill_between_the_two_files_leaves_the_old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = run(tmp_path, name="whole", rounds=4), run(tmp_path, name="part")
    written = disk.write

    def killed(path: Path, *rest: Any) -> None:
        if path.name == "config.yaml":
            raise KeyboardInterrupt
        written(path, *rest)

    monkeypatch.setattr(disk, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        fallow.resume(part.path, rounds=4)
    monkeypatch.undo()
    assert fallow.load(part.path).config.rounds == 2 and len(fallow.resume(part.path).metrics) == 2
    same(fallow.resume(part.path, rounds=4).path, whole.path)
    assert len(changed(part.path)) == 1


def test_what_is_refused(tmp_path: Path, fallow_cli: Any) -> None:
    part = run(tmp_path, name="x")
    path = str(part.path)
    for word, sentence in (
        ("rounds=1", f"the run {path} has 2 rounds, and can be made longer only; use --stop-after to end it earlier."),
        ("rounds=many", "rounds=many is no count of rounds; give a whole number, such as rounds=40."),
        ("rounds=true", "rounds=True is no count of rounds; give a whole number, such as rounds=40."),
        ("lr=1", "lr cannot be changed on resume; only rounds can, to make the run longer; start a new run for other keys."),
    ):
        assert fallow_cli("resume", path, word).sentence == sentence
    assert changed(part.path) == []
    config = part.path / "config.yaml"
    config.write_text(config.read_text().replace("rounds: 2\n", "rounds: 3\n"))  # by hand, of which nobody was told
    with pytest.raises(UserError, match="is damaged, or was changed after the run was begun"):
        fallow.resume(part.path, rounds=4)


def test_on_the_command_line(tmp_path: Path, fallow_cli: Any) -> None:
    part = run(tmp_path, name="x")
    told = fallow_cli("resume", str(part.path), "--rounds", "3")
    assert told.code == 0 and told.out.startswith("2 rounds become 3; 2 are done, and the end is that of") and "round 3/3" in told.out
    assert "nothing to do" in fallow_cli("resume", str(part.path), "rounds=3").out
