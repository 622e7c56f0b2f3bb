"""Runs that are tracked: the same bits, every round once, and nobody in the way. W&B and MLflow where they are installed."""

from __future__ import annotations

import importlib.util
import json
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TINY, same

import fallow
from fallow.runs import tracking

KEYS = TINY | {"method": "fixmatch", "rounds": 4}
ROWS = [
    {"round": n, "accuracy": n / 10, "test_loss": None if n == 2 else 1 / n, "class_accuracy": [0.0, n / 10], "class_accuracy_clients": {"0": [0.5]}, "note": "x", "seconds": {"round": 0.5}}
    for n in range(1, 6)
]


def needs(name: str) -> Any:
    found = importlib.util.find_spec(name)
    return pytest.mark.skipif(found is None or found.origin is None, reason=f"{name} is not installed")


def tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """Steps and values of every scalar in the event files; a step that came twice fails."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.glob("events*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars" or value.HasField("simple_value"):
                    steps = found.setdefault(value.tag, {})
                    assert event.step not in steps, (value.tag, event.step)
                    steps[event.step] = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
    return found


@needs("tensorboard")
def test_tensorboard(tmp_path: Path, fallow_cli: Any) -> None:
    """Stopped and resumed it has every round once; the run is the same, bit for bit and in its hash."""
    words = [f"{k}={v}" for k, v in KEYS.items()]
    assert fallow_cli("run", *words, "--name", "plain").code == 0
    assert fallow_cli("run", *words, "track=tensorboard", "--name", "tracked", "--stop-after", "2").code == 0
    assert set(tensorboard(Path("runs/tracked/tensorboard"))["accuracy"]) == {1, 2}
    assert fallow_cli("resume", "runs/tracked").code == 0
    same(Path("runs/plain"), Path("runs/tracked"))
    plain, tracked = fallow.load("runs/plain"), fallow.load("runs/tracked")
    assert plain.summary["config_hash"] == tracked.summary["config_hash"]
    found = tensorboard(Path("runs/tracked/tensorboard"))
    for name in ("accuracy", "loss", "bytes_up", "lr"):
        assert found[name] == pytest.approx({r["round"]: r[name] for r in tracked.metrics}, rel=1e-6)
    assert found["seconds/round"].keys() == {1, 2, 3, 4} and "round" not in found
    assert yaml.safe_load(Path("runs/tracked/config.yaml").read_text())["track"] == ["tensorboard"]
    assert not Path("runs/plain/tensorboard").exists()


@needs("tensorboard")
def test_tensorboard_after_a_kill(tmp_path: Path) -> None:
    """Rounds logged but not committed come again, once; those committed but lost by the writer too."""
    first = tracking.TensorBoard(tmp_path, {"method": "x", "image": {"size": 8}})
    first.begin([])
    for row in ROWS[:3]:
        first.log(row)  # and then a kill: round 3 was not committed
    second = tracking.TensorBoard(tmp_path, {})
    second.begin(ROWS[:2])
    for row in ROWS[2:]:
        second.log(row)
    second.end(None)
    found = tensorboard(tmp_path / "tensorboard")
    assert found["accuracy"] == pytest.approx({r["round"]: r["accuracy"] for r in ROWS})
    assert set(found["test_loss"]) == {1, 3, 4, 5} and set(found["class_accuracy/1"]) == {1, 2, 3, 4, 5} and not {"note", "class_accuracy_clients/0", "round"} & set(found)


def records(data: bytes) -> Iterator[bytes]:
    """Of a LevelDB log, which W&B's files are after seven bytes: blocks of 32 KiB with pieces [checksum 4, length 2, kind 1]."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or the last piece
            yield whole
            whole = b""


def wandb_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The history in W&B's offline files."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                yield {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}


@needs("wandb")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = tracking.WandB(tmp_path, {"method": "x", "image": {"size": 8}})
    first.begin([])
    for row in ROWS[:3]:
        first.log(row)
    first.run.finish()  # killed before round 3 was committed
    second = tracking.WandB(tmp_path, {"method": "x", "image": {"size": 8}})
    second.begin(ROWS[:2])
    assert second.id == first.id and second.run.id == first.id
    for row in ROWS[2:]:
        second.log(row)
    second.end({"last": 0.5, "best": 0.5, "best_round": 5, "status": "finished"})
    found = list(wandb_rows(tmp_path / "wandb"))
    assert [r["_step"] for r in found] == [1, 2, 3, 4, 5]
    assert [r["accuracy"] for r in found] == pytest.approx([r["accuracy"] for r in ROWS])
    assert found[0]["class_accuracy/1"] == 0.1 and "test_loss" not in found[1]


def test_wandb_is_told_only_what_its_server_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, since there is no server here: it was sent rounds 1 and 2, and step 3 comes next."""
    told: list[int] = []

    class Server:
        step, offline, summary = 3, False, {}

        def log(self, values: Any, step: int) -> None:
            told.append(step)

        def finish(self) -> None:
            told.append(-1)

    package = types.SimpleNamespace(init=lambda **given: Server(), Settings=lambda **given: None)
    monkeypatch.setattr(tracking, "_package", lambda name: package)
    tracker = tracking.WandB(tmp_path, {})
    tracker.begin(ROWS[:3])
    tracker.log(ROWS[3])
    tracker.end(None)
    assert told == [3, 4, -1]


@needs("wandb")
def test_wandb_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    result = fallow.run(out=tmp_path, name="tracked", track="wandb", **KEYS)
    same(result.path, fallow.run(out=tmp_path, name="plain", **KEYS).path)
    assert [r["accuracy"] for r in wandb_rows(result.path / "wandb")] == [r["accuracy"] for r in result.metrics]


@needs("mlflow")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    stopped = fallow.run(out=tmp_path, name="tracked", track=["mlflow"], stop_after=2, **KEYS)
    known = json.loads((stopped.path / "tracking.json").read_text())["mlflow"]["id"]
    client = mlflow.MlflowClient()
    assert client.get_run(known).info.status == "KILLED"
    lost = tracking.MLflow(stopped.path, {})
    lost.begin(stopped.metrics)
    lost.log({"round": 3, "accuracy": math.nan, "seconds": {}})  # logged, then killed before it was committed
    result = fallow.resume(stopped.path)
    same(result.path, fallow.run(out=tmp_path, name="plain", **KEYS).path)
    run = client.get_run(known)
    assert run.info.status == "FINISHED" and run.data.params["method"] == "fixmatch" and run.data.params["image.fit"] == "pad"
    assert [m.step for m in client.get_metric_history(known, "round")] == [1, 2, 3, 4]
    accuracy = {m.step: m.value for m in client.get_metric_history(known, "accuracy")}
    assert accuracy == {r["round"]: r["accuracy"] for r in result.metrics if r["round"] != 3}  # the NaN of our own was left out


class Told(tracking.TensorBoard):
    """A tracker that notes what it is told, and fails when asked to."""

    fails_at = -1

    def begin(self, rows: Any) -> None:
        self.heard = [r["round"] for r in rows]
        Told.last = self
        if self.fails_at == 0:
            raise RuntimeError("no server\nand a long story")

    def log(self, row: Any) -> None:
        if row["round"] == self.fails_at:
            raise RuntimeError("the line is dead")
        self.heard.append(row["round"])

    def end(self, summary: Any) -> None:
        self.heard.append(summary and summary["status"])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> type[Told]:
    monkeypatch.setitem(tracking.KINDS, "tensorboard", Told)
    monkeypatch.setattr(tracking, "_package", lambda name: None)
    monkeypatch.setattr(Told, "fails_at", -1)
    return Told


def test_what_a_tracker_hears(told: Any, tmp_path: Path) -> None:
    path = fallow.run(out=tmp_path, track="tensorboard", stop_after=1, **KEYS).path
    assert told.last.heard == [1, "stopped"]

    def stumble(event: str, what: Any) -> None:
        if event == "round" and what["round"] == 3:
            raise RuntimeError("stumbled")

    with pytest.raises(RuntimeError, match="stumbled"):
        fallow.resume(path, watch=stumble)
    assert told.last.heard == [1, 2, None]
    fallow.resume(path)
    assert told.last.heard == [1, 2, 3, 4, "finished"]


def test_a_tracker_that_fails_does_not_stop_the_run(told: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told.fails_at = 2
    result = fallow.run(out=tmp_path, name="tracked", track="tensorboard", **KEYS)
    same(result.path, fallow.run(out=tmp_path, name="plain", **KEYS).path)
    assert told.last.heard == [1]
    assert capfd.readouterr().err == "tracking by tensorboard has ended (the line is dead); the run goes on\n"


def test_a_tracker_that_cannot_begin(told: Any, fallow_cli: Any) -> None:
    told.fails_at = 0
    words = [f"{k}={v}" for k, v in KEYS.items()]
    sentence = fallow_cli("run", *words, "track=tensorboard", "--name", "x").sentence
    assert sentence == (
        "tensorboard cannot be opened (no server); mend it, or take tensorboard out of `track` in runs/x/config.yaml, "
        "then `fallow resume runs/x`."
    )
    config = Path("runs/x/config.yaml")
    config.write_text(config.read_text().replace("track:\n- tensorboard\n", "track: []\n"))
    assert fallow_cli("resume", "runs/x").code == 0  # as it says


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch, fallow_cli: Any) -> None:
    real = tracking.importlib.import_module  # type: ignore[attr-defined]

    def without(name: str) -> Any:
        if name == "wandb":
            raise ModuleNotFoundError(name)
        return real(name)

    monkeypatch.setattr(tracking.importlib, "import_module", without)  # type: ignore[attr-defined]
    words = [f"{k}={v}" for k, v in KEYS.items()]
    sentence = fallow_cli("run", *words, "track=wandb").sentence
    assert sentence == "track=wandb needs the package wandb, which is not installed; install fallow[tracking], or leave it out of `track`."
    assert not Path("runs").exists()
    assert fallow_cli("run", *words, "track=tensorbord").sentence.startswith("track=tensorbord is not allowed; give tensorboard, wandb or mlflow")


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackless").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError):
        tracking._package("trackless")
