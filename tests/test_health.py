"""Whether a run learns: rules on rows made by hand, counts of pseudo-labels, and what a run says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import HERE, TINY, rows, same

import fallow
from fallow.engine import judging
from fallow.engine.party import Tally
from fallow.engine.slot import Slot
from fallow.runs.health import Facts, findings, percent
from fallow.runs.warned import FILE, Health, stored

TEN = Facts(rounds=20, classes=10, tested=1000, chance=0.1, bound="threshold", value=0.95, lr=0.03, names=tuple("abcdefghij"), share=(0.1,) * 10)
CONFIDENCES = [0, 0, 0, 0, 10, 20, 30, 10, 8, 10, 5, 5, 2, 0, 0, 0, 0, 0, 0, 0]  # 100 between 0.2 and 0.65


def run_of(*accuracies: float | None, **columns: Any) -> list[dict[str, Any]]:
    """A row for each accuracy; columns are the same in all rows, or a list with one value for each."""
    made = []
    for k, accuracy in enumerate(accuracies):
        own = {name: v[k] if isinstance(v, tuple) else v for name, v in columns.items()}
        made.append({"round": k + 1, "accuracy": accuracy, "test_loss": None if accuracy is None else 2.0 - k / 100, "loss": 1.0, "clients": 4} | own)
    return made


def kinds(found: list[dict[str, Any]], facts: Facts = TEN) -> list[str]:
    return [f.kind for f in findings(found, facts)]


def test_at_chance() -> None:
    """Three standard deviations of 1000 hits of probability 0.1 are 0.02846, so guessing ends at 12.85 %."""
    assert TEN.near_chance == pytest.approx(0.1284605, abs=1e-6)
    stuck = run_of(0.10, 0.128, 0.09)
    assert kinds(stuck) == ["chance"]
    (found,) = findings(stuck, TEN)
    assert found.since == 1 and found.sentence == "test accuracy stands at chance, 9.0 % with 10 classes, after 3 of 20 rounds"
    assert kinds(run_of(0.10, 0.129, 0.09)) == []  # 0.129 is above it
    assert kinds(run_of(0.10, 0.10)) == []  # too early
    assert kinds(stuck, replace(TEN, rounds=5)) == ["chance"] and kinds(stuck, replace(TEN, rounds=4)) == []  # a trial
    assert kinds(run_of(0.10, 0.10, 0.10, 0.10), replace(TEN, rounds=100)) == []  # a tenth of them are ten
    assert kinds(run_of(*[0.1] * 10), replace(TEN, rounds=100)) == ["chance"]
    assert kinds(run_of(0.3, 0.3, 0.1, 0.1, 0.1))[0] == "chance"
    assert findings(run_of(0.3, 0.3, 0.1, 0.1, 0.1), TEN)[0].since == 3
    assert kinds(run_of(0.10, None, None, None, 0.1)) == ["chance"]  # tested now and then
    assert kinds(run_of(0.67, 0.68, 0.67), replace(TEN, chance=0.67)) == ["chance"]  # two thirds of the test set are one class


def test_what_to_try_at_chance_depends_on_the_run() -> None:
    def remedy(**columns: Any) -> str:
        return next(f.remedy for f in findings(run_of(0.1, 0.1, 0.1, **columns), TEN) if f.kind == "chance")

    assert remedy(client_steps=1.0) == "let clients make more steps a round, steps=20 for example (they make 1)"
    assert remedy(loss=9.0) == "the loss is high (9.00; guessing has 2.30): lower lr (now 0.03), or set clip=1"
    assert remedy(client_steps=20.0) == "try another lr (now 0.03), more steps a round, or more labels"
    assert remedy(label_ratio=0.5).startswith("see with method=fedavg whether the labels suffice, then try another lr")


def test_nothing_is_accepted() -> None:
    none = run_of(*[0.3] * 6, label_ratio=0.0, label_confidences=CONFIDENCES, label_accuracy_all=0.5)
    assert kinds(none[:3]) == []  # many a run begins so
    (found,) = findings(none, TEN)
    assert (found.kind, found.since) == ("none-accepted", 1)
    # 5 or fewer of 100 reach a level: 2 reach 0.6, 7 reach 0.55; 22 reach 0.45, 12 reach 0.5
    assert found.sentence == "no pseudo-label has been accepted since round 1, so the unlabelled images do nothing (threshold=0.95): 98 % of the confidences are below 0.6"
    assert found.remedy == "threshold=0.45 would accept 22 %, of all labels 50 % are right"
    half = findings([r | {"label_accuracy_all": 0.3} for r in none], TEN)[0].remedy
    assert half.startswith("train longer on the labels first") and half.endswith("(threshold=0.45 would accept 22 %, but of all labels 30 % are right)")
    wrong = findings([r | {"label_accuracy_all": 0.15} for r in none], TEN)[0].remedy
    assert wrong == "train longer on the labels first, with more steps a round or more labels (only 15.0 % of its labels would be right)"
    flat = [0, 0, 100, *[0] * 17]  # nobody is surer than 0.15
    assert findings([r | {"label_confidences": flat} for r in none], TEN)[0].remedy.endswith("(no label is sure yet)")
    assert kinds([*none[:-1], none[-1] | {"label_ratio": 0.001}]) == []
    assert kinds(none, replace(TEN, value=1.1)) == []  # a bound that is never reached is meant so
    assert kinds(none, replace(TEN, value=95.0)) == ["none-accepted"]  # but not one in per cent
    assert kinds(run_of(*[0.3] * 6, label_ratio=None)) == []  # labels alone


def test_nothing_is_accepted_by_entropy() -> None:
    """Confidence is 1 - H / ln 10 there: level 0.6 is an entropy of 0.4 ln 10 = 0.921, level 0.45 of 1.266."""
    by_entropy = replace(TEN, bound="entropy", value=0.1)
    (found,) = findings(run_of(*[0.3] * 6, label_ratio=0.0, label_confidences=CONFIDENCES), by_entropy)
    assert found.sentence.endswith("(entropy=0.1): 98 % of the entropies are above 0.92")
    assert found.remedy == "entropy=1.27 would accept 22 %"


def test_one_class() -> None:
    """The others have less than a tenth of the 90 % they should have: 9 %."""
    share = lambda n: [0, 0, n, *[0] * 6, 1000 - n]
    assert kinds(run_of(0.3, 0.3, 0.3, label_classes=share(905))) == []
    (found,) = findings(run_of(0.3, 0.3, 0.3, label_classes=share(950), label_ratio=0.5), TEN)
    assert found.kind == "one-class"
    assert found.sentence == "95 % of the accepted pseudo-labels are of one class, c, which has 10.0 % of the images"
    assert found.remedy.startswith("accept fewer of them (threshold is 0.95), or train longer")
    assert kinds(run_of(0.3, 0.3, 0.3, label_classes=share(950), label_accuracy=0.9)) == []  # they are right
    assert kinds(run_of(0.3, 0.3, 0.3, label_classes=share(950)), replace(TEN, share=(0, 0, 0.9, *[0.1 / 7] * 7))) == []  # as they should be
    assert kinds(run_of(0.3, 0.3, 0.3, label_classes=[0, 0, 60, *[0] * 7])) == []  # 180 labels, fewer than 200


def test_one_step_a_round() -> None:
    (found,) = findings(run_of(0.2, 0.25, 0.3, client_steps=1.0), TEN)
    assert str(found) == "clients make one step a round, 20 in the whole run; steps=20 would make 400; smaller batches make more of them, too"
    assert kinds(run_of(0.2, 0.25, 0.3, client_steps=2.0)) == []
    assert kinds(run_of(0.2, 0.25, 0.3, client_steps=1.0), replace(TEN, rounds=200)) == []  # 200 steps are some
    assert kinds(run_of(0.2, 0.25, 0.6, client_steps=1.0)) == []  # it learns all the same


def test_falling() -> None:
    facts = replace(TEN, rounds=30)
    down = [0.3, 0.5, 0.6, 0.6, 0.6, *[0.55 - 0.01 * k for k in range(20)]]
    found = findings(run_of(*down), facts)
    assert [(f.kind, f.since) for f in found] == [("falling", 5)]
    assert found[0].sentence == "test accuracy has fallen from 60 % around round 5 to 37 %"
    assert kinds(run_of(*down[:8]), facts) == []  # not for long
    assert kinds(run_of(*[0.6] * 5, *[0.53] * 20), facts) == []  # seven points
    assert kinds(run_of(*[0.6] * 5, *[0.51] * 20), facts) == ["falling"]
    assert kinds(run_of(*down, 0.6, 0.6, 0.6), facts) == []  # it has risen again


def test_still() -> None:
    still = [r | {"test_loss": 2.5} for r in run_of(0.2, 0.2, 0.2)]
    (found,) = findings(still, TEN)
    assert found.kind == "still" and found.sentence == "the model has not changed since round 1 (its weights do not move)"
    assert "no client sent an update" in findings([r | {"clients": 0} for r in still], TEN)[0].sentence
    assert kinds([*still[:2], still[2] | {"test_loss": 2.4999}]) == []


def test_the_loss_is_lost() -> None:
    lost = run_of(*[0.3] * 5, loss=(1.0, 1.0, None, None, None))
    assert [(f.kind, f.since) for f in findings(lost, TEN)] == [("loss", 3)]
    assert kinds(lost[:4]) == []
    assert kinds(run_of(*[0.3] * 5, loss=None)) == []  # a method that logs none


def test_labels_alone() -> None:
    """Of 1000 test images, three standard deviations of a difference at 60 % are 6.57 points."""
    facts = replace(TEN, labels_alone=("runs/fedavg", 0.6))
    assert kinds(run_of(0.3, 0.5, 0.53), facts) == ["labels-alone"]
    assert kinds(run_of(0.3, 0.5, 0.54), facts) == []
    assert kinds(run_of(0.3, 0.5, 0.53, validation_accuracy=0.6), facts) == []  # the validation images decide
    assert 3 * math.sqrt(2 * 0.6 * 0.4 / 1000) == pytest.approx(0.0657, abs=1e-4)


def test_published_runs_that_learnt_are_not_warned_of() -> None:
    """At no round of theirs; of those that did not learn, it is said."""
    folder = HERE.parent / "results"
    found: dict[str, set[str]] = {}
    for file in sorted(folder.glob("**/seed-*/metrics.jsonl")):
        config = yaml.safe_load((file.parent / "config.yaml").read_text())
        bound = "entropy" if config["method"] == "fedloke" else "threshold"
        facts = Facts(config["rounds"], 10, 10_000, 0.1, bound=bound if bound in config else None, value=config.get(bound), lr=config["lr"])
        metrics = [json.loads(line) for line in file.read_text().splitlines()]
        at = [k for k in range(1, len(metrics) + 1) if k % 5 == 0 or k == len(metrics)]
        found[str(file.parent.relative_to(folder))] = {f.kind for k in at for f in findings(metrics[:k], facts)}
    assert len(found) > 50
    dead = [name for name, warned in found.items() if warned]
    assert dead == ["neutral/table1/cifar10-alpha-0.5--semifl/seed-0", "readings/t100/fedrgd/table2/cifar10-labels-at-client-non-iid/seed-0"]
    assert all("chance" in found[name] for name in dead)  # both ended at 10.00 %


def test_shares_for_people() -> None:
    assert [percent(x) for x in (0.094, 0.3149, 0.0004, 0.0, 1.0, 0.1949)] == ["9.4 %", "31 %", "0.04 %", "0 %", "100 %", "19.5 %"]


# -- what is counted ---------------------------------------------------------------------------------------------------
def a_slot(classes: int) -> Slot:
    held: dict[str, Any] = {}
    options = SimpleNamespace(prox=0.0)
    return Slot(SimpleNamespace(options=options, classes=classes, device=torch.device("cpu"), held=held))  # type: ignore[arg-type]


def test_counts_of_pseudo_labels() -> None:
    slot = a_slot(3)
    part = SimpleNamespace(_truth=torch.tensor([0, 1, 2, 2, -1, 1]), rows=torch.tensor([True] * 5 + [False]))
    label, sure = torch.tensor([0, 2, 2, 1, 2, 1]), torch.tensor([True, True, True, False, True, True])
    confidence = torch.tensor([0.95, 0.949, 1.0, 0.31, 0.5, 0.99])
    slot.judge(part, label, sure, confidence=confidence)  # the last row is padding
    slot.judge(SimpleNamespace(_truth=None, rows=None), torch.tensor([1]), name="other")
    tally = Tally()
    tally.add([{k: t.clone() for k, t in slot.logs.items()}] * 2)
    found = tally.columns()
    assert found["label_ratio"] == 4 / 5 and found["label_accuracy"] == 2 / 3 and found["label_accuracy_all"] == 2 / 4
    assert found["label_classes"] == [2, 0, 6] and found["other_classes"] == [0, 2, 0]
    assert {k / 20: n for k, n in enumerate(found["label_confidences"]) if n} == {0.3: 2, 0.5: 2, 0.9: 2, 0.95: 4}
    assert "other_accuracy" not in found and "other_confidences" not in found
    for log in slot.logs.values():
        log.zero_()
    empty = Tally()
    empty.add([slot.logs])
    assert empty.columns() == {}  # what a party before has left in the slot


def test_levels_are_those_that_a_threshold_compares_with() -> None:
    levels = judging.levels(torch.device("cpu"))
    assert all(bool(levels[k] >= k / 20) and bool(levels[k] <= k / 20) for k in range(20))


# -- in a run ----------------------------------------------------------------------------------------------------------
NEVER = TINY | {"method": "fixmatch", "threshold": 0.999999, "rounds": 6, "steps": 1, "unlabelled_batch": 8, "lr": 0.001}


def test_a_run_says_so(tmp_path: Path) -> None:
    seen: list[tuple[str, Any]] = []
    result = fallow.run(out=tmp_path, watch=lambda event, what: seen.append((event, what)), **NEVER)
    warned = [what for event, what in seen if event == "warning"]
    assert {"none-accepted", "few-steps"} <= {f.kind for f in warned}
    assert len({f.kind for f in warned}) == len(warned)  # each is said once
    held = {f["kind"]: f for f in result.summary["warnings"]}
    assert held["none-accepted"]["since"] == 1 and "threshold=0.999999" in held["none-accepted"]["sentence"]
    assert all(sum(r["label_confidences"]) == 16 and r["client_steps"] == 1 for r in rows(result.path))  # two clients, a batch of eight
    assert not (result.path / FILE).exists()
    assert {f["kind"] for f in stored(result.path, result.summary, True)} == set(held)


def test_a_resumed_run_says_the_same(tmp_path: Path) -> None:
    seen: list[str] = []
    cut = fallow.run(out=tmp_path, stop_after=4, **NEVER)
    assert [f["kind"] for f in cut.summary["warnings"]].count("none-accepted") == 0  # six rounds are needed
    fallow.resume(cut.path, watch=lambda event, what: seen.append(what.kind) if event == "warning" else None)
    assert "none-accepted" in seen and "few-steps" not in seen  # that was said before
    through = fallow.run(out=tmp_path, **NEVER)
    same(cut.path, through.path)
    assert fallow.load(cut.path).summary["warnings"] == through.summary["warnings"]


def test_while_it_goes_on_the_folder_says_it(tmp_path: Path) -> None:
    health = Health(tmp_path, TEN, [])
    for row in run_of(0.1, 0.1, 0.1):
        health.take(row)
    (found,) = stored(tmp_path, {}, ended=False)
    assert found["kind"] == "chance" and found["sentence"].startswith("test accuracy stands at chance")
    health.take({"round": 4, "accuracy": 0.5, "test_loss": 1.0})
    assert stored(tmp_path, {}, ended=False) == []
    (tmp_path / FILE).write_text("[1, {}, {\"sentence\": 3")
    assert stored(tmp_path, {}, ended=False) == [] and stored(tmp_path, {"warnings": "x"}, ended=True) == []


def test_the_command_line_says_it(tmp_path: Path, fallow_cli: Any) -> None:
    words = [f"{k}={v}" for k, v in NEVER.items()]
    told = fallow_cli("run", *words, "--name", "dead")
    assert told.code == 0
    assert told.out.count("warning: no pseudo-label has been accepted since round 1") == 2  # when it shows, and in the end
    quiet = fallow_cli("run", *words, "--name", "quiet", "-q")
    assert quiet.out.count("warning: no pseudo-label has been accepted since round 1") == 1
