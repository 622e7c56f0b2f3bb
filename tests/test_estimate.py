"""The time a recipe takes: images counted against those of real rounds, arithmetic by hand, measured once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY

import fallow
from fallow.durations import format_duration
from fallow.engine.nets import NetHandle
from fallow.methods import REGISTERED, find
from fallow.names import recipes
from fallow.recipes.reading import recipe
from fallow.runs import estimate, prepare, speed
from fallow.runs.estimate import Work, seconds, work
from fallow.runs.settings import resolve
from fallow.runs.speed import Speed
from fallow.tables.times import of_recipe


@pytest.mark.parametrize("name", REGISTERED)
def test_images_are_about_those_of_a_real_round(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes counted in a round where every pseudo-label is accepted; training costs three times a prediction.

    DataSharing's server trains before the first round only, which is no round's work.
    """
    passed = {True: 0, False: 0}
    original = NetHandle.__call__

    def counted(self: NetHandle, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dim() == 4:  # not FedDure's regulator of predictions
            passed[torch.is_grad_enabled()] += len(x)
        return original(self, x, *args, **kwargs)

    with_features = NetHandle.with_features

    def counted_features(self: NetHandle, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        passed[torch.is_grad_enabled()] += len(x)
        return with_features(self, x, *args, **kwargs)

    monkeypatch.setattr(NetHandle, "__call__", counted)
    monkeypatch.setattr(NetHandle, "with_features", counted_features)
    method = find(name)
    keys = TINY | {"method": name, "rounds": 1, "labels": "clients" if "clients" in method.scenarios else "server"}
    keys |= {"threshold": 0.0} if "threshold" in method.Options.model_fields else {}
    keys |= {"share_warmup": False} if name == "datasharing" else {}
    fallow.run(out=tmp_path, **keys)
    _, options, _, _ = prepare(None, keys)
    found = work(method, options, 240, 60, 10)
    cost, told = 3 * passed[True] + passed[False], 3 * found.trained + found.predicted
    assert 0.5 <= told / cost <= 2, (passed, found)


def test_work_by_hand() -> None:
    """SemiFL on CIFAR-10 with 4000 labels: 10 of 100 clients, 460 images each, five epochs; the server's five."""
    method, options = resolve(recipe("semifl/table1"), {"data": "cifar10", "label_count": 4000, "partition": "iid"})
    found = work(method, options, 50_000, 10_000, 10)
    # an image of D_fix has a weak and a strong view, one of D_mix a weak view
    assert found.trained == 10 * 5 * 460 * 3 + 5 * 4000
    assert found.predicted == 10_000 + 10 * 460 + 50_000  # test, labelling, static batch norm
    method, options = resolve({}, {"method": "fedavg", "labels": "all", "data": "cifar10", "clients": 10, "epochs": 2, "eval_every": 4})
    assert work(method, options, 50_000, 10_000, 10) == Work(2 * 50_000, 2500)


def test_each_replica_of_the_server_is_work() -> None:
    keys = {"method": "fedrgd", "labels": "server", "label_count": 100, "clients": 30, "groups": 3}
    shared, per_group = (work(find("fedrgd"), resolve({}, keys | {"server_replicas": how})[1], 240, 60, 10) for how in ("shared", "per-group"))
    one = 16 * 64  # T batches of B
    assert per_group.trained - shared.trained == 2 * one and per_group.predicted == shared.predicted


def test_seconds_are_images_by_speed() -> None:
    method, options = resolve({}, {"method": "fedavg", "labels": "all", "data": "cifar10", "clients": 10, "rounds": 7, "model": "wrn-28-2"})
    asked = []

    def measure(*what: Any) -> Speed:
        asked.append(what)
        return Speed(0.01, 0.001)

    assert seconds(method, options, measure) == pytest.approx(7 * (50_000 * 0.01 + 10_000 * 0.001))
    assert asked == [("wrn-28-2", 3, 32, "auto")]
    assert seconds(method, options.model_copy(update={"data": "folder:x"}), measure) is None


def test_every_recipe_has_a_time_or_is_a_protocol() -> None:
    found = {name: of_recipe(name, lambda *_: Speed(0.001, 0.0003)) for name in recipes()}
    assert {name for name, e in found.items() if e is None} == {n for n in recipes() if n.endswith("/base")}
    table = found["feddure/table1"]
    assert table and 0 < table.shortest <= table.longest < table.total and table.runs % 3 == 0  # three seeds


@pytest.mark.parametrize("rule", ["validation", "training"])
def test_a_rate_that_waits_for_a_plateau_is_counted(rule: str) -> None:
    keys = {"method": "fedmatch", "lr_rule": rule, "schedule": "constant", "clients": 3, "label_count": 30, "batch": 10, "epochs": 1}
    assert work(*resolve({}, keys | {"validation": 0.1} if rule == "validation" else keys), 240, 60, 10).trained > 0


def test_a_federation_without_unlabelled_images_is_counted() -> None:
    """FedDB's client has nothing to label: ten steps on its 80 images, in batches of 64 (the released code's) and of the 16 left."""
    keys = {"method": "feddb", "clients": 3, "label_ratio": 1.0, "batch": 10, "steps": 10, "labelled_as_unlabelled": False}
    assert work(*resolve({}, keys), 240, 60, 10).trained == 3 * 5 * (64 + 16)


def test_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    first = speed.speed("small-cnn", 1, 8, "cpu")
    assert first.train > 0 < first.infer and torch.get_num_threads() == threads
    monkeypatch.setattr(speed, "_measured", lambda *_: pytest.fail("measured again"))
    assert speed.speed("small-cnn", 1, 8, "cpu") == first
    (tmp_path / "fallow" / "speed.json").write_text("damaged")
    monkeypatch.setattr(speed, "_measured", lambda *_: Speed(2.0, 1.0))
    assert speed.speed("small-cnn", 1, 8, "cpu") == Speed(2.0, 1.0)
    assert list(json.loads((tmp_path / "fallow" / "speed.json").read_text()).values()) == [[2.0, 1.0]]
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # nowhere to keep it
    assert speed.speed("small-cnn", 1, 8, "cpu") == Speed(2.0, 1.0)


def test_the_list(fallow_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "speed", lambda *_: Speed(0.001, 0.0003))
    told = fallow_cli("list", "recipes").out
    line = next(line for line in told.splitlines() if line.startswith("demo "))
    method, options = resolve(recipe("demo"), {})
    images = work(method, options, *estimate.IMAGES["digits"], 10)
    expected = options.rounds * (images.trained * 0.001 + images.predicted * 0.0003)
    assert line.rstrip().endswith(format_duration(expected)) and "Times are estimates for this machine" in told
    plain = fallow_cli("list", "recipes", "--no-time").out
    assert "Times are" not in plain and plain.splitlines()[0].split() == ["recipe", "what"]
