"""`fallow check-method`: what passes, and what each check finds, in the user's file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import HERE

from fallow.runs.trial import CHECKS, tried

HEAD = """import numpy as np
import torch
from fallow import Method, Net, Plan, Update, Value
from fallow.methods.parts.losses import cross_entropy

MEMORY = {}

class Mine(Method):
    scenarios = {"clients"}
"""
STEP = """    def supervised(self, s, b):
        loss = cross_entropy(s.model(b.x.labelled), b.x.y)
"""
PLAN = """    def plan(self, party, found):
        x = party.labelled.batches(party.batch, "labelled", steps=party.steps)
"""
WRONG = {
    "runs": (STEP + "        s.descend(losss)\n", "line 12 of mine.py: NameError: name 'losss' is not defined"),
    "captured": (STEP + "        s.descend(loss * float(loss > 0))\n", "line 12 of mine.py: __float__ reads a value on the host; use masks"),
    "trains": (STEP + "        s.log(loss=loss)\n", "no step calls s.descend or s.apply, so nothing is trained; call s.descend"),
    "held": ("    def holds(self):\n        return {'model': Net(), 'tau': Value(1)}\n", "`holds` names 'tau', which no hook uses; take it out"),
    "hooks": ("    def end(self, party):\n        return {'model': party.model.state}\n", "end gives a dict, and not an Update, or None"),
    "server": (
        "    def merge(self, server, updates):\n        server.model.groups['parameters'].mul_(0.5)\n",
        "merge changes server['model'] in place, which a round that fails could not take back; assign a new tensor",
    ),
    "again": (
        PLAN + "        return Plan(self.supervised, x=x, lr=float(np.random.default_rng().random()))\n",
        "the run comes to another ",
    ),
    "resumed": (
        PLAN + "        MEMORY[party.round] = True\n        return Plan(self.supervised, x=x, lr=0.1 if MEMORY.get(0) else 0.01)\n",
        "the run comes to another test_loss in round 2",
    ),
}  # fmt: skip
PARTLY = {
    "down": ("    def down(self, server, client):\n        return {'model': server.model, 'round': 3}\n", "hooks", "down sends a int as 'round'; States and tensors travel"),
    "plan": ("    def plan(self, party, found):\n        return None\n", "hooks", "plan gives nothing, and not a Plan"),
    "begin": ("    def begin(self, party):\n        pass\n", "hooks", "begin gives nothing, and not a dict"),
    "begin reads": ("    def begin(self, party):\n        return {'n': party.predict(party.model, party.labelled).sum().item()}\n", "captured", "line 11 of mine.py: item reads a value on the host"),
}  # fmt: skip


def trial_of(folder: Path, body: str) -> Any:
    (folder / "mine.py").write_text(HEAD + body)
    return tried(f"{folder}/mine.py:Mine")


def test_the_example_passes_everywhere() -> None:
    trial = tried(f"{HERE.parent}/examples/my_method.py:MyMethod", {"labels": "some"})
    assert trial.scenarios == ["some"] and trial.passed and not trial.sentences
    assert trial.verdicts == {(check, "some"): "ok" for check in CHECKS}
    assert [row[:2] for row in trial.rows()] == [("check", "labels=some"), *((check, "ok") for check in CHECKS)]


@pytest.mark.parametrize("check", WRONG)
def test_each_check_finds_its_mistake(check: str, tmp_path: Path) -> None:
    body, sentence = WRONG[check]
    trial = trial_of(tmp_path, body)
    assert trial.verdicts[check, "clients"] == "FAILS"
    assert any(told.startswith(f"{check}, labels=clients: {sentence}") for told in trial.sentences), trial.sentences
    others = {c for (c, _), verdict in trial.verdicts.items() if verdict == "FAILS"} - {check}
    assert others <= ({"resumed", "side by side"} if check == "again" else {"trains"} if check == "server" else set()), trial.sentences


@pytest.mark.parametrize("what", PARTLY)
def test_what_a_hook_gives_is_looked_at(what: str, tmp_path: Path) -> None:
    body, check, sentence = PARTLY[what]
    (found,) = trial_of(tmp_path, body).sentences
    assert found.startswith(f"{check}, labels=clients: {sentence}"), found


def test_the_command_prints_a_table_and_ends_with_1_where_a_check_fails(tmp_path: Path, fallow_cli: Any) -> None:
    (tmp_path / "mine.py").write_text(HEAD + WRONG["hooks"][0])
    told = fallow_cli("check-method", "./mine.py:Mine")
    assert told.code == 1 and "labels=clients" in told.out.splitlines()[0]
    assert "FAILS hooks, labels=clients: end gives a dict" in told.out
    assert fallow_cli("check-method", "./mine.py:Yours").sentence.startswith("mine.py has no method class 'Yours'; name a class")
    assert fallow_cli("check-method", "fedavg", "labels=clients").code == 0
