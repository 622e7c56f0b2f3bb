"""Settings: words of the command line, layers, readings, recipes, what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from fallow import config
from fallow.config import Config, described, validate
from fallow.errors import UserError, suggest
from fallow.methods import REGISTERED, find
from fallow.methods.base import Method
from fallow.names import recipes
from fallow.recipes.reading import recipe
from fallow.runs import settings
from fallow.runs.settings import config_hash, resolve, stored
from fallow.trees import merge, parse_pairs, read_yaml


def test_words() -> None:
    words = ["rounds=10", "lr=1e-4", "momentum=.5", "nesterov=false", "data=emnist:digits", "partition=dirichlet-capped:0.3,min_size=1",
             "method=./my.py:Mine", "augment.strong=ra-mc", "augment.cutout=4", "label_count=", "measure=[a, b]", "name='12'", "weight_decay=5E-4"]  # fmt: skip
    assert parse_pairs(words) == {
        "rounds": 10, "lr": 1e-4, "momentum": 0.5, "nesterov": False, "data": "emnist:digits", "weight_decay": 5e-4,
        "partition": "dirichlet-capped:0.3,min_size=1", "method": "./my.py:Mine", "augment": {"strong": "ra-mc", "cutout": 4},
        "label_count": None, "measure": ["a", "b"], "name": "12",
    }  # fmt: skip
    assert parse_pairs(["rounds=1", "rounds=2"]) == {"rounds": 2}  # the later wins
    assert parse_pairs(["schedule=cosine,by=step"]) == {"schedule": "cosine,by=step"}
    for wrong in ("rounds", "=3"):
        with pytest.raises(UserError, match="is not key=value; write for example rounds=10"):
            parse_pairs([wrong])
    with pytest.raises(UserError, match="'augment' is given both whole and in parts; use one of the two forms"):
        parse_pairs(["augment=weak", "augment.strong=ra-mc"])


def test_layers() -> None:
    layers = merge({"a": 1, "s": {"x": 1, "y": 2}}, {"a": 2, "s": {"y": 3}}, {"b": [1]})
    assert layers == {"a": 2, "s": {"x": 1, "y": 3}, "b": [1]}
    one = {"s": {"x": [1]}}
    merge(one, {})["s"]["x"].append(2)
    assert one == {"s": {"x": [1]}}  # nothing is shared


def test_suggestions() -> None:
    assert suggest("roundz", ["rounds", "batch"]) == "did you mean 'rounds'?"
    assert suggest("zzz", ["b", "a"]) == "known are a, b"


def test_validation() -> None:
    c = validate(Config, {"active": 0.35, "clients": 10, "augment": {"strong": "ra-semifl"}})
    assert (c.active_count, c.augment.strong, c.augment.weak, c.rounds) == (4, "ra-semifl", "weak", 30)
    assert [Config(active=a, clients=20).active_count for a in (None, 3, 0.25, 0.01, 0.3)] == [20, 3, 5, 1, 6]
    with pytest.raises(Exception, match="frozen"):
        c.rounds = 5  # type: ignore[misc]
    assert validate(Config, {"unlabelled_batch": "ratio:7"}).unlabelled_batch == "ratio:7"
    assert validate(Config, {"batch": "full"}).batch == "full" and validate(Config, {"sbn_passes": "exact"}).sbn_passes == "exact"


def test_every_default_is_allowed() -> None:
    for name in REGISTERED:
        kind = find(name).Options
        values = kind(method=name).model_dump()
        assert validate(kind, values).model_dump() == values
        assert all(field.description for field in kind.model_fields.values())


class Example(Method):
    """Of these tests."""

    scenarios = {"server", "clients"}
    readings = {"paper": {"momentum": 0.1, "mine": 3}, "released": {}}

    class Options(Method.Options):
        lr: float = config.key(0.5, "another default", gt=0)
        mine: int = config.key(1, "a key of its own", "mu", ge=0)
        steps: int | Literal["match-unlabelled"] | None = config.key(16, "steps", "T")
        epochs: float | None = config.key(None, "epochs", gt=0)

        def refuse(self) -> None:
            if self.mine == 13:
                raise UserError("mine=13 brings bad luck", "choose another number")

    @classmethod
    def scenario_defaults(cls, labels: str) -> dict[str, Any]:
        return {"batch": 7} if labels == "server" else {}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(settings, "find", lambda _: Example)
    return lambda base, **given: resolve(base, given)[1]


def test_the_later_wins(example: Any) -> None:
    """Product default, method, reading, recipe, command line."""
    assert example({}).lr == 0.5 and Config().lr == 0.03
    assert example({"lr": 0.2}).lr == 0.2 and example({"lr": 0.2}, lr=0.1).lr == 0.1
    assert example({}).batch == 32 and example({}, labels="server").batch == 7 and example({"labels": "server"}).batch == 7
    assert example({"labels": "server", "batch": 9}).batch == 9


def test_a_section_has_other_defaults_key_by_key(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Example):
        defaults = {"augment": {"strong": "ra-usb", "cutout": "none"}, "lr": 0.25}

    monkeypatch.setattr(settings, "find", lambda _: Other)
    o = example({"augment": {"weak": "plain"}}, augment={"cutout": 4})
    assert (o.augment.strong, o.augment.weak, o.augment.cutout, o.lr) == ("ra-usb", "plain", 4, 0.25)
    assert Example.Options().augment.strong == "ra-mc"
    with pytest.raises(UserError, match=r"augment.cutout=0 is not a positive count"):
        example({}, augment={"cutout": 0})
    with pytest.raises(UserError, match="there is no key 'stong'"):
        type("Wrong", (Example,), {"defaults": {"augment": {"stong": "plain"}}})


def test_readings(example: Any) -> None:
    assert example({}).momentum == 0.9
    assert example({}, reading="paper").momentum == 0.1 and example({"reading": "paper"}).mine == 3
    assert example({"momentum": 0.7}, reading="paper").momentum == 0.1  # a recipe never sets what a reading sets
    assert example({"momentum": 0.7}, reading="released").momentum == 0.7
    assert example({"momentum": 0.7}, reading="paper", momentum=0.4).momentum == 0.4


def test_one_measure_of_work_puts_the_other_aside(example: Any) -> None:
    assert (example({}).steps, example({}).epochs) == (16, None)
    assert (example({}, epochs=2).steps, example({}, epochs=2).epochs) == (None, 2)
    assert (example({"epochs": 3}).steps, example({"epochs": 3}, steps=4).epochs) == (None, None)
    assert example({"label_count": 40}, label_ratio=0.1).label_count is None
    assert example({"label_count": 40}).label_count == 40


def test_refusals(example: Any) -> None:
    with pytest.raises(UserError, match="mine=13 brings bad luck; choose another number"):
        example({}, mine=13)
    with pytest.raises(UserError, match="is not defined for labels=some; it works with labels=clients, server"):
        example({}, labels="some")


def test_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.yaml").write_text("about: a base\nrounds: 5\naugment: {weak: plain, strong: ra-mc}\n")
    (tmp_path / "heir.yaml").write_text("inherit: base.yaml\nrounds: 6\naugment:\n  strong: ra-usb\n")
    monkeypatch.chdir(tmp_path)
    assert recipe("heir.yaml") == {"rounds": 6, "augment": {"weak": "plain", "strong": "ra-usb"}}
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "grandchild.yaml").write_text("inherit: ../heir.yaml\nrounds: 7\n")
    assert recipe("far/grandchild.yaml") == {"rounds": 7, "augment": {"weak": "plain", "strong": "ra-usb"}}, "paths are from the file that names them"
    (tmp_path / "far" / "demo.yaml").write_text("inherit: demo\n")
    assert recipe("far/demo.yaml") == recipe("demo")
    (tmp_path / "empty.yaml").write_text("")
    assert read_yaml("empty.yaml") == {}
    assert "default" in recipes()


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    method, options = resolve({}, {"method": "uda", "lr": 1e-4, "augment": {"cutout": 4}, "active": 0.5})
    path = tmp_path / "config.yaml"
    path.write_text(config.dump(options))
    keys = yaml.safe_load(path.read_text())
    assert keys["version"] == config.VERSION and set(method.Options.model_fields) < set(keys)  # complete
    assert stored(path) == (method, options)
    assert config_hash(options) == config_hash(stored(path)[1])
    same, other = options.model_copy(update={"slots": 5, "keep_memory": 1.0}), options.model_copy(update={"seed": 1})
    assert config_hash(same) == config_hash(options) != config_hash(other)
    kernels = {config_hash(options.model_copy(update=u)) for u in ({}, {"compile": False}, {"compile": True}, {"fused": False})}
    assert len(kernels) == 3  # they round otherwise


def test_other_defaults() -> None:
    class Other(Example):
        defaults = {"lr": 0.25, "mine": 7, "batch": "full"}

    class Third(Other):
        defaults = {"batch": 5, "measure": ("classes",)}

        class Options(Other.Options):
            own: int = config.key(2, "one more", ge=1)

    assert (Example.Options().lr, Example.Options().mine) == (0.5, 1), "those of the class before stay"
    o = Third.Options()
    assert (o.lr, o.mine, o.batch, o.own, o.measure) == (0.25, 7, 5, 2, ("classes",))
    assert ("lr", "0.25", "", "number (> 0)", "another default") in described(Third.Options)  # limits and meaning stay
    for keys, words in (({"lr": 0}, "lr=0"), ({"own": 0}, "own=0"), ({"batch": "ful"}, "batch=ful")):
        with pytest.raises(UserError, match=words):
            validate(Third.Options, keys)
    assert validate(Third.Options, {"measure": "classes,prior"}).measure == ("classes", "prior")
    for wrong, words in (({"lrr": 1}, "there is no key 'lrr'"), ({"augment": "ra-usb"}, "augment is a section")):
        with pytest.raises(UserError, match=words):
            type("Wrong", (Example,), {"defaults": wrong})


def test_descriptions() -> None:
    rows = described(Example.Options)
    assert rows[0] == ("mine", "1", "mu", "whole number (>= 0)", "a key of its own")  # a method's own first
    assert ("nesterov", "true", "", "true | false", "Nesterov momentum") in rows
    assert ("lr", "0.5", "", "number (> 0)", "another default") in rows
    assert [r[0] for r in described(Example.Options, own_only=True)] == ["mine"]
