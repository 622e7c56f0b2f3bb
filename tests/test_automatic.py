"""Settings that nobody gave: the rule in numbers, what wins over it, what it never touches."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import HERE, TINY

import fallow
from fallow import config, runs
from fallow.config import Config
from fallow.data.readers.common import ImageSet
from fallow.data.sources import Source
from fallow.errors import UserError
from fallow.methods import REGISTERED, find
from fallow.methods.base import Method
from fallow.methods.parts.fitting import Facts, common, model, rounds
from fallow.names import recipes
from fallow.recipes.grid import Grid
from fallow.recipes.reading import recipe
from fallow.runs import automatic
from fallow.runs.settings import config_hash, resolve, stated

FEW = {k: v for k, v in TINY.items() if k != "defaults"}
GOLDEN = json.loads((HERE / "recipes.json").read_text())


def facts(**other: Any) -> Facts:
    usual = {"o": Config(), "classes": 10, "size": 8, "channels": 1, "labelled": 8, "unlabelled": 140, "rounds": 30, "room": 10**6}
    return Facts(**usual | other)


def prepared(**given: Any) -> Any:
    return runs.prepare(None, given)[1]


def images(count: int, size: int, channels: int, classes: int = 10) -> Source:
    """Noise, so large a set as is asked for."""
    labels = torch.from_numpy(np.arange(count) % classes)
    pixels = torch.zeros(1, channels, size, size, dtype=torch.uint8)
    return Source("noise", tuple(map(str, range(classes))), ImageSet(pixels.expand(count, -1, -1, -1), labels), ImageSet(pixels.expand(20, -1, -1, -1), labels[:20]), True)


# -- the rule ----------------------------------------------------------------------------------------------------------
def test_steps_are_a_pass_within_bounds() -> None:
    """32 unlabelled or 16 labelled images a step; never fewer than 10 steps, never more than 40."""
    assert [facts(unlabelled=n).steps for n in (0, 320, 321, 640, 1280, 50_000)] == [10, 10, 11, 20, 40, 40]
    assert facts(unlabelled=0, labelled=401).steps == 26
    assert (facts().batch, facts().unlabelled_batch) == (16, 32)
    assert [facts(unlabelled=n, size=32, on_cpu=True).steps for n in (640, 642, 2560, 50_000)] == [10, 11, 40, 40]  # half of a pass
    assert facts(unlabelled=640, size=32).steps == facts(unlabelled=640, size=28, on_cpu=True).steps == 20
    assert facts(unlabelled=0, labelled=640, size=32, on_cpu=True).steps == 20


def test_rounds_grow_where_few_clients_take_part() -> None:
    """40 times the root of clients per active one, four times as many at most."""
    assert [rounds(Config(clients=n, active=a)) for n, a in ((10, None), (20, 5), (90, 10), (100, 1))] == [40, 80, 120, 160]


def test_a_batch_is_no_larger_than_its_room() -> None:
    """16 labelled and two views of each unlabelled image: 80 images; half of them in half the room; at the least 4 and 8."""
    assert [(facts(room=n).batch, facts(room=n).unlabelled_batch) for n in (80, 79, 40, 2)] == [(16, 32), (15, 31), (8, 16), (4, 8)]


def test_a_threshold_is_as_far_from_a_guess_for_any_number_of_classes() -> None:
    """0.55 of the way from 1/C to 1."""
    assert [facts(classes=c).threshold for c in (2, 10, 100)] == [0.775, 0.595, 0.554]  # 0.5 + 0.55/2, 0.1 + 0.55 * 0.9, 0.01 + 0.55 * 0.99


def test_semifls_clients_with_labels_label_as_they_train() -> None:
    """Nobody has tuned what they receive; and statistics of whatever batch comes are no use to who tests a folder."""
    o = prepared(method="semifl", data="few-digits")
    assert (o.labeller, o.statistics, o.norm, o.threshold) == ("current", "average", "bn", 0.595)
    o = prepared(method="semifl", data="few-digits", labels="server", label_count=40)
    assert (o.labeller, o.statistics, o.norm, o.threshold) == ("received", "static", "bn", 0.595)
    o = prepared(method="semifl", data="few-digits", statistics="batch", labeller="received")
    assert (o.labeller, o.statistics, o.norm) == ("received", "batch", None)
    o = prepared(method="semifl", data="few-digits", defaults="paper")
    assert (o.labeller, o.statistics, o.norm) == ("received", "batch", None)


def test_fedrgds_groups_are_of_ten_clients() -> None:
    given = {"method": "fedrgd", "data": "few-digits"}
    assert prepared(**given, labels="server", label_count=40).threshold == 0.95
    o = prepared(**given)
    assert (o.threshold, o.groups, o.group_models) == (0.595, 1, False)
    fedrgd = find("fedrgd")
    assert [fedrgd.automatic(facts(o=fedrgd.Options(clients=n)))["groups"] for n in (3, 19, 31)] == [1, 1, 3]


def test_momentum_stays_with_clients_that_always_take_part() -> None:
    given = {"method": "fixmatch", "data": "few-digits", "clients": 4}
    found = [prepared(**given, active=n, **more).optimizer_state for n, more in ((4, {}), (3, {}), (4, {"optimizer_state": "reset"}))]
    assert found == ["keep", "reset", "reset"]


def test_clients_without_labels_keep_the_papers_threshold() -> None:
    """And the server, which alone has some, has the last word; FedRGD's trains beside its groups, slowly."""
    given = {"data": "few-digits", "labels": "server", "label_count": 40}
    found = {name: prepared(method=name, **given) for name in ("fixmatch", "uda", "fedrgd")}
    assert {n: (o.threshold, o.server_turn, o.lr) for n, o in found.items()} == {
        "fixmatch": (0.95, "after", 0.1), "uda": (0.8, "after", 0.1), "fedrgd": (0.95, "beside", 0.03)
    }  # fmt: skip
    assert prepared(method="fixmatch", server_turn="beside", **given).server_turn == "beside"


def test_a_server_that_alone_has_labels_trains_after_the_clients() -> None:
    """Unless the method, or a key that is given, says otherwise: beside it clients that know nothing come to one class."""
    server = facts(o=Config(labels="server"))
    assert common(server)["server_turn"] == "after" and "server_turn" not in common(facts())
    given = {"data": "few-digits", "labels": "server", "label_count": 40}
    there = [name for name in REGISTERED if "server" in find(name).scenarios]
    assert {n: o for n in there if (o := prepared(method=n, **given).server_turn) != "after"} == {"fedmatch": "before", "fedrgd": "beside"}
    assert prepared(method="fixmatch", **given, average="grouped", groups=1, server_replicas="per-group").server_turn == "beside"


def test_without_momentum_the_rate_makes_up_for_it() -> None:
    """0.1 is for momentum 0.9, which adds gradients up to ten times themselves; 0.02 at 0.98, 1 without any."""
    found = [facts(o=Config(momentum=m)).lr for m in (0.0, 0.5, 0.9, 0.98)]
    assert found == [1.0, 0.5, 0.1, 0.02]
    assert facts(o=Config(optimizer="adam", momentum=0.5)).lr == 0.002
    given = {"data": "few-digits"}
    assert [prepared(method=m, **given).lr for m in ("fml", "semifed", "fedloke")] == [1.0, 1.0, 0.1]
    assert prepared(method="fixmatch", momentum=0, nesterov=False, **given).lr == 1.0
    assert prepared(method="feddure", momentum=0.8, **given).virtual_lr == 0.2


def test_fedmatchs_gradients_are_ten_times_everybodys() -> None:
    """Everybody's rate and bound are divided and multiplied by lambda_s; lambda_l2 = 10 is stable up to a rate of 0.02 (2 * 0.02 * 10 = 0.4)."""
    given = {"method": "fedmatch", "data": "few-digits"}
    values = lambda **more: ((o := prepared(**given, **more)).lr, o.momentum, o.clip)
    assert values() == (0.01, 0.9, 10.0)
    assert values(lambda_s=2, lambda_l2=1) == (0.05, 0.9, 2.0) and values(lambda_s=2) == (0.02, 0.9, 2.0)
    assert values(lambda_s=0, lambda_l2=0) == (0.1, 0.9, 1.0) and values(momentum=0) == (0.02, 0.0, 10.0)
    assert values(optimizer="adam") == (0.002, 0.9, 10.0)
    views = lambda **more: ((o := prepared(**given, **more).augment).labelled, o.weak, o.strong)
    assert views() == ("weak", "weak", "ra-mc")
    assert views(augment={"labelled": "plain", "weak": "plain", "strong": "ra-fedmatch"}) == ("plain", "plain", "ra-fedmatch")


def test_fedloke_trains_as_everybody_does() -> None:
    given = {"method": "fedloke", "data": "few-digits"}
    values = lambda **more: ((o := prepared(**given, **more)).lr, o.momentum, o.clip, o.clip_value)
    assert values() == (0.1, 0.9, 1.0, None) and values(momentum=0, clip_value=0.1) == (1.0, 0.0, 1.0, 0.1)


def test_fmls_bound_makes_up_for_what_labels_weigh() -> None:
    """alpha = beta = 1/2 of each net's loss: twice everybody's bound."""
    clip = lambda **more: prepared(method="fml", data="few-digits", **more).clip
    assert [clip(), clip(beta=0.25), clip(alpha=1, beta=1), clip(alpha=0), clip(clip=3)] == [2.0, 4.0, 1.0, 2.0, 3.0]


def test_elastic_clients_exchange_more_often() -> None:
    """alpha = 0.9 / 3: 40 / 0.3 = 133 rounds of 10 * 0.3 = 3 steps; with ten clients 160 rounds, the most, of 10 / 4 steps."""
    given = {"data": "few-digits", "clients": 3}
    work = lambda name, **more: ((o := prepared(method=name, **given | more)).rounds, o.steps)
    assert work("easgd") == (133, 3) and work("easgd", clients=1) == (44, 9)
    easgd = find("easgd")
    found = [easgd.automatic(facts(o=easgd.Options(clients=n, active=10), rounds=rounds)) for n, rounds in ((10, 40), (90, 120), (160, 160))]
    assert [(f["rounds"], f["steps"]) for f in found] == [(160, 2), (160, 8), (160, 10)]
    assert work("easgd", rounds=7) == (7, 10) and work("easgd", steps=5) == (40, 5) and work("easgd", epochs=1) == (40, None)
    assert work("overlapsgd") == work("fedavg") == (40, 10)


def test_cbafeds_thresholds_are_its_papers_once_labels_have_taught_the_model() -> None:
    given = {"method": "cbafed", "data": "few-digits"}
    found = [prepared(**given, rounds=n) for n in (1, 40)]
    assert [(o.warmup_rounds, o.base, o.top, o.unlabelled_lr) for o in found] == [(0, 0.84, 0.95, 0.02), (26, 0.84, 0.95, 0.02)]


def test_rscfed_has_everybodys_bound_with_everybodys_rate() -> None:
    assert ((o := prepared(method="rscfed", data="few-digits")).lr, o.clip) == (0.1, 1.0)


def test_a_mean_teacher_weighs_by_the_share_of_labels() -> None:
    """50 times 24 of 300 images, labelled ones also among the unlabelled or not; as in the paper where the server has the labels."""
    teacher, labels = find("meanteacher"), {"labelled": 24}
    weight = lambda unlabelled, **given: teacher.automatic(facts(o=teacher.Options(**given), unlabelled=unlabelled, **labels)).get("weight")
    assert weight(300) == weight(276, labelled_as_unlabelled=False) == 4.0
    assert weight(300, labels="server") is None and weight(0, labelled_as_unlabelled=False) == 50.0


def test_ramps_go_with_the_rounds() -> None:
    assert [facts(rounds=n).ramp for n in (1, 3, 30, 600)] == [1, 1, 10, 200]


def test_a_model_with_group_norm_gets_batch_norm_unless_images_are_tiny() -> None:
    """Other models keep what they have."""
    assert [facts(size=n).norm for n in (7, 8, 32)] == [None, "bn", "bn"]
    assert facts(o=Config(model="wrn-28-2")).norm is None and facts(o=Config(model="emnist-cnn")).norm is None
    assert prepared(method="fixmatch", data="few-digits").norm == "bn"
    assert prepared(method="fixmatch", data="few-digits", norm="gn").norm == "gn"
    assert prepared(method="feddb", data="few-digits").norm is None, "it is tested by the statistics of whatever batch comes"
    assert prepared(method="feddb", data="few-digits", statistics="average").norm == "bn"


def test_colour_images_get_a_larger_model_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And on a CPU, in grey, of fewer than 32 pixels or where a model is named, the one that there was."""
    sizes = [(32, 3, True), (64, 3, True), (31, 3, True), (32, 1, True), (32, 3, False)]
    assert [model(Config(), *one) for one in sizes] == ["resnet9", "resnet9", "small-cnn", "small-cnn", "small-cnn"]
    assert model(Config(model="resnet18"), 32, 3, True) == "resnet18"
    monkeypatch.setattr(automatic, "device_of", lambda name: torch.device("cuda"))
    given = {"method": "fixmatch", "data": images(60, 32, 3), "clients": 2}
    found = [prepared(**given, **more) for more in ({}, {"model": "small-cnn"}, {"defaults": "paper"})]
    assert [(o.model, o.norm) for o in found] == [("resnet9", None), ("small-cnn", "bn"), ("small-cnn", None)]
    assert found[0].batch == 16 and found[0].unlabelled_batch == 32, "3.7 MiB an image: 80 of them have room"


def test_feddures_nets_learn_like_everybodys_unless_told_how() -> None:
    o = prepared(method="feddure", data="few-digits")
    assert (o.optimizer, o.lr, o.virtual_lr) == ("sgd", 0.1, 0.1)
    o = prepared(method="feddure", data="few-digits", lr=1e-3)
    assert (o.optimizer, o.lr, o.virtual_lr) == ("adam", 1e-3, 5e-4)
    o = prepared(method="feddure", data="few-digits", optimizer="adam")
    assert (o.optimizer, o.lr, o.virtual_lr) == ("adam", 2e-3, 5e-4)


# -- room in memory ----------------------------------------------------------------------------------------------------
def test_what_an_image_keeps_for_the_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer keeps its input, two layers with a ReLU between keep that and the ReLU's output: 4 bytes a number."""
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def One(classes, channels, size):\n    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))\n"
        "def Two(classes, channels, size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, 50), nn.ReLU(), nn.Linear(50, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    source = images(20, 16, 3)
    kept = [automatic.kept_for_gradients(resolve({}, {"model": f"./nets.py:{name}"})[1], source) for name in ("One", "Two")]
    assert kept == [4 * 3 * 16 * 16, 4 * (3 * 16 * 16 + 50)]


def test_forty_labels_of_a_large_set_make_no_giant_step() -> None:
    """10 labels and 12,490 others a client: one pass in one step would hold 25,000 images."""
    given = {"data": images(50_000, 32, 3), "method": "fixmatch", "clients": 4, "label_count": 40}
    _, o, source, _ = runs.prepare(None, given | {"model": "wrn-28-8"})
    at_once = (o.batch + 2 * o.unlabelled_batch) * automatic.kept_for_gradients(o, source)
    assert at_once <= automatic.MEMORY["cpu"] and o.steps == 40
    assert 8 <= o.unlabelled_batch < 32, "a wide net does not have room for everything"
    small = prepared(**given)
    assert (small.batch, small.steps) == (16, 40)


# -- what wins ---------------------------------------------------------------------------------------------------------
def test_a_key_that_is_given_wins() -> None:
    given = {"rounds": 6, "steps": 3, "batch": 5, "unlabelled_batch": 7, "lr": 0.01, "schedule": "constant", "threshold": 0.9}
    o = prepared(method="fixmatch", data="few-digits", augment={"cutout": 3}, **given)
    assert {k: getattr(o, k) for k in given} == given and o.augment.cutout == 3
    assert prepared(method="fedloke", data="few-digits", rounds=9).ramp_rounds == 3
    passes = prepared(method="fixmatch", data="few-digits", epochs=2)
    assert (passes.steps, passes.epochs) == (None, 2)


def test_a_key_of_a_section_that_is_given_leaves_the_others_fitted() -> None:
    alone = prepared(method="fedmatch", data="digits").augment
    given = prepared(method="fedmatch", data="digits", augment={"strong": "ra-fedmatch"}).augment
    assert given == alone.model_copy(update={"strong": "ra-fedmatch"}) and given.labelled != "plain"  # its paper's


def test_a_recipe_of_ones_own_is_fitted_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("method: fixmatch\ndata: few-digits\n")
    assert runs.prepare(str(path), {})[1] == prepared(method="fixmatch", data="few-digits")
    path.write_text("method: fixmatch\ndata: few-digits\nlr: 0.02\n")
    assert runs.prepare(str(path), {})[1] == prepared(method="fixmatch", data="few-digits", lr=0.02)


def test_a_reading_wins() -> None:
    o = prepared(method="feddure", data="few-digits", reading="released")
    assert (o.lr, o.steps, o.schedule) == (6e-4, 5, "constant")


def test_what_a_method_of_ones_own_says_stays() -> None:
    class Mine(Method):
        defaults = {"lr": 0.5, "schedule": "cosine"}

        class Options(Method.Options):
            batch: int = config.key(3, "another default")
            ramp: int = config.key(100, "a key of its own")

    class Refined(Mine):
        @classmethod
        def automatic(cls, facts: Facts) -> dict[str, Any]:
            return super().automatic(facts) | {"ramp": facts.ramp}

    assert set(common(facts())) - set(Mine.automatic(facts())) == {"lr", "schedule", "batch"}
    assert Refined.automatic(facts())["ramp"] == 10


# -- papers ------------------------------------------------------------------------------------------------------------
def hashes(name: str) -> list[str]:
    grid = Grid.of(recipe(name))
    if grid is None:
        return [config_hash(resolve(recipe(name), {})[1])]
    return [config_hash(resolve(grid.keys(row, cell), {})[1]) for row in grid.rows if not grid.missing(row) for cell in grid.cells]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_recipes_of_papers_are_what_they_were(name: str) -> None:
    """recipes.json has what they came to before there was a rule."""
    found = hashes(name)
    assert {"settings": len(found), "sha256": hashlib.sha256(" ".join(found).encode()).hexdigest()[:16]} == GOLDEN[name]


@pytest.mark.parametrize("name", GOLDEN)
def test_nothing_of_a_paper_is_fitted(name: str, tmp_path: Path) -> None:
    """Neither a table's cell nor a recipe that inherits from one."""
    heir = tmp_path / "heir.yaml"
    heir.write_text(f"inherit: {name}\nrounds: 3\n")
    keys = recipe(str(heir))
    grid = Grid.of(keys)
    row = grid.own if grid else ""
    words = {"method": row, "setting": grid.cells[0].name} if grid else {}
    plain = resolve(keys, words)[1]
    small = {"data": images(2400, 8, 3), "clients": 4, "active": None, "image": {"size": None}, "label_count": 40, "labelled_pick": "random", "partition": "iid", "unlabelled_partition": None, "norm": None}
    assert runs.prepare(str(heir), words | small)[1].model_dump(include=FITTED) == plain.model_dump(include=FITTED)


FITTED = {"rounds", "steps", "epochs", "batch", "unlabelled_batch", "server_batch", "lr", "schedule", "threshold", "ramp_rounds", "entropy", "augment", "model"}


def test_every_recipe_of_a_paper_is_on_the_list() -> None:
    assert set(GOLDEN) == {name for name in recipes() if "/" in name}


@pytest.mark.parametrize("method", REGISTERED)
def test_the_papers_defaults_can_be_had(method: str) -> None:
    plain = resolve({}, {"method": method})[1].model_dump(include=FITTED)
    given = {"method": method, "data": "few-digits", "label_count": 40}
    assert prepared(**given, defaults="paper").model_dump(include=FITTED) == plain != prepared(**given).model_dump(include=FITTED)


def test_a_wrong_word_is_told() -> None:
    with pytest.raises(UserError, match="defaults=papers is not known; give one of fitted, paper"):
        prepared(method="fixmatch", data="few-digits", defaults="papers")


# -- what is stored ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", REGISTERED)
def test_plain_values_are_stored(method: str, tmp_path: Path) -> None:
    given = {k: v for k, v in FEW.items() if k != "batch"} | {"method": method, "rounds": 1}
    result = fallow.run(out=tmp_path, **given)
    stored = yaml.safe_load((result.path / "config.yaml").read_text())
    options, said, source, federation = _all(given)
    expected = automatic.without(find(method).automatic(automatic.look(find(method), options, said, source, federation)), said)
    assert {k: stored[k] for k in expected if k != "augment"} == {k: v for k, v in expected.items() if k != "augment"}
    assert stated(result.path / "config.yaml") == prepared(**given) and "defaults" not in stored


def _all(given: dict[str, Any]) -> Any:
    _, _, source, federation = runs.prepare(None, given)
    options = resolve({}, given)[1]
    return options, automatic.given(options), source, federation


def test_the_line(fallow_cli: Any) -> None:
    words = [f"{k}={v}" for k, v in (FEW | {"method": "fixmatch"}).items()]
    told = fallow_cli("run", *words)
    assert told.out.splitlines()[1] == "2 rounds of 2 steps of 8 + 32 images, lr 0.1 (cosine), threshold 0.595, small-cnn with bn"
    o, federation = runs.prepare(None, FEW | {"method": "fedavg", "labels": "all", "epochs": 1, "steps": None})[1::2]
    assert automatic.amounts(o, federation).startswith("2 rounds of 1 pass in steps of 8 images")


def test_the_newcomers_run_is_what_the_rule_gives() -> None:
    """Without a word on data and federation; with one it is that word's."""
    assert prepared(method="fixmatch") == runs.prepare("default", {})[1] == prepared()
    assert prepared(method="fixmatch", seed=3, rounds=4) == runs.prepare("default", {"seed": 3, "rounds": 4})[1]
    assert prepared(method="fixmatch", data="digits").label_ratio == prepared(clients=4).label_ratio == 0.05


def test_fedloke_takes_an_equal_count() -> None:
    given = {"method": "fedloke", "data": "few-digits", "label_count": 40}
    assert prepared(**given, batch=8, unlabelled_batch=8).unlabelled_batch == 8
    with pytest.raises(UserError, match="one size"):
        prepared(**given, batch=8, unlabelled_batch=9)


def test_help_says_what_is_fitted(fallow_cli: Any) -> None:
    lines = fallow_cli("run", "method=fedloke", "--help").out.splitlines()
    fitted = {line.split()[0] for line in lines if line[25:31] == "fitted"}
    assert fitted == {"rounds", "steps", "batch", "unlabelled_batch", "lr", "schedule", "clip", "norm", "optimizer_state", "entropy", "ramp_rounds", "momentum", "clip_value"}
    assert "(paper: 200)" in "\n".join(lines)
