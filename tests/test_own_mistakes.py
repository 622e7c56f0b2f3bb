"""Mistakes in a method of one's own: told when it is loaded, or while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, rows

import fallow
from fallow import Update, UserError
from fallow.methods import find
from fallow.methods.checking import slipped

HEAD = "import torch\nfrom fallow import Method, Net, Plan, Update, Value\nfrom fallow.methods.fixmatch import FixMatch\n\n"
BASE = HEAD + "class Mine(Method):\n"


def written(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder}/mine.py:Mine"


def told(folder: Path, text: str) -> str:
    with pytest.raises(UserError) as error:
        find(written(folder, text))
    return str(error.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(("body", "sentence"), [
    ("    def stpe(self, s, b): ...\n", "line 6 of mine.py defines 'stpe', which nothing uses; did you mean the hook 'step'?"),
    ("    def hold(self): ...\n", "line 6 of mine.py defines 'hold', which nothing uses; did you mean the hook 'holds'?"),
    ("    paper = ''\n    def Begin(self, party): ...\n", "line 7 of mine.py defines 'Begin', which nothing uses; did you mean the hook 'begin'?"),
    ("    scenario = {'clients'}\n", "line 6 of mine.py defines 'scenario', which nothing uses; did you mean Method's 'scenarios'?"),
    ("    class options(Method.Options): ...\n", "line 6 of mine.py defines 'options', which nothing uses; did you mean Method's 'Options'?"),
    ("    captuerd: bool = False\n", "line 6 of mine.py defines 'captuerd', which nothing uses; did you mean Method's 'captured'?"),
    ("    def step(self, batch): ...\n", "line 6 of mine.py: step(self, batch) cannot be called with s and b; write def step(self, s, b)."),
    ("    def holds(self, party): ...\n", "line 6 of mine.py: holds(self, party) cannot be called with nothing; write def holds(self)."),
    ("    def step(self, s, b): ...\n", "line 6 of mine.py defines a step that no plan has: the default plan makes steps of `supervised`; "
     "write a `plan` that returns Plan(x=...), or name the step supervised."),
    ("    plan = 3\n", "line 6 of mine.py makes the hook 'plan' no function; write def plan(self, party, found)."),
])  # fmt: skip
def test_a_hook_that_nobody_would_call(tmp_path: Path, body: str, sentence: str) -> None:
    assert told(tmp_path, BASE + body) == sentence


def test_of_a_method_that_is_derived_from_another(tmp_path: Path) -> None:
    text = HEAD + "class Mine(FixMatch):\n    def targett(self, z): ...\n"
    assert told(tmp_path, text) == "line 6 of mine.py defines 'targett', which nothing uses; did you mean FixMatch's 'target'?"


@pytest.mark.parametrize("body", [
    "    def steps(self): ...\n    def plan(self, party, found): return self.steps()\n",  # a helper
    "    ends = 3\n\nprint_ends = Mine.ends\n",
    "    def _stpe(self): ...\n    def augment(self): ...\n    def agree(self): ...\n",
    "    @staticmethod\n    def begin(party): ...\n    def end(self, party, more=1): ...\n    def merge(self, *all): ...\n",
    "    class Options(Method.Options):\n        def refuse(self):\n            super().refuse()\n",
])  # fmt: skip
def test_what_is_no_mistake(tmp_path: Path, body: str) -> None:
    assert find(written(tmp_path, BASE + body)).__name__ == "Mine"


def test_slips_are_counted() -> None:
    pairs = [("step", "step"), ("stpe", "step"), ("hold", "holds"), ("stop", "step"), ("mareg", "merge"), ("", "end"), ("xbegin", "begin")]
    assert [slipped(a, b) for a, b in pairs] == [0, 1, 1, 1, 2, 3, 1]


def test_an_entry_can_be_added_to_an_update() -> None:
    update = Update(model=torch.zeros(2))
    update["tau"] = torch.ones(1)
    assert set(update) == {"model", "tau"} and float(update["tau"]) == 1


# -- while it runs -----------------------------------------------------------------------------------------------------
LAZY = BASE + '''
    def holds(self):
        return {"model": Net(), "teacher": Net(train=False), "share": Value(1), "seen": Value(1)}

    def begin(self, party):
        party.share.fill_(0.5)
        return {}

    def step(self, s, b):
        s.log(loss=s.model(b.x.labelled).mean())

    def plan(self, party, found):
        return Plan(x=party.labelled.batches(party.batch, "labelled", steps=party.steps))
'''


def test_a_step_that_trains_nothing_and_a_held_thing_that_is_not_used_are_said(tmp_path: Path, fallow_cli: Any) -> None:
    (tmp_path / "mine.py").write_text(LAZY)
    words = [f"{k}={v}" for k, v in (TINY | {"labels": "clients", "method": "./mine.py:Mine"}).items()]
    out = fallow_cli("run", *words, "--name", "lazy").out
    assert out.count("warning: no step has called s.descend or s.apply, so nothing is trained; call one of them") == 2
    assert out.count("warning: the method holds 'teacher', which no hook used in the first round; take it out of `holds`, or use s.teacher in the step") == 2
    assert "'seen'" in out and "'share'" not in out
    found = rows(Path("runs/lazy"))
    assert [r.get("descended") for r in found] == [False, False] and [r.get("unused") for r in found] == [["seen", "teacher"], None]


@pytest.mark.parametrize("body", ["s.descend(loss)", "s.apply(s.model, s.gradient(loss, s.model))", "s.accumulate([loss], s.model)"])
def test_what_trains_is_not_warned_of(tmp_path: Path, body: str) -> None:
    text = BASE + f"    def supervised(self, s, b):\n        loss = s.model(b.x.labelled).square().mean()\n        {body}\n"
    result = fallow.run(out=tmp_path, **TINY | {"labels": "clients", "method": written(tmp_path, text)})
    assert all("descended" not in r and "unused" not in r for r in result.metrics)
    assert result.summary["warnings"] == []


@pytest.mark.parametrize(
    ("value", "said"),
    [("torch.ones(3).numpy()", "a ndarray"), ("lambda: 1", "a function"), ("{1}", "a set"), ("{(1, 2): 3}", "a dict with a tuple among its keys"), ("[{'a': object()}]", "a object")],
)
def test_what_no_checkpoint_holds(value: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    body = f"    def merge(self, server, updates):\n        super().merge(server, updates)\n        server['x'] = {value}\n"
    file.write_text(f"import torch\nfrom fallow.methods.fedavg import FedAvg\nclass Mine(FedAvg):\n    paper = 'Mine'\n{body}")
    with pytest.raises(UserError, match=f"a method keeps or sends {said}, which no checkpoint holds"):
        fallow.run(out=tmp_path / "runs", **TINY | {"method": f"{file}:Mine"})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def begin(self, party):\n        party.received['model'].groups['parameters'].mul_(0.5)\n        return {}", r"what a party does in .* changes server\['model'\] in place"),
        ("def down(self, server, client):\n        server.model.groups['parameters'].mul_(0.5)\n        return super().down(server, client)", r"`down` in .* changes server\['model'\] in place"),
        ("def end(self, party): raise SystemExit(0)", "`end` of .* ends the process"),
    ],
)
def test_what_would_reach_other_parties_or_end_the_run(body: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from fallow.methods.fedavg import FedAvg\nclass Mine(FedAvg):\n    paper = 'Mine'\n    {body}\n")
    with pytest.raises(UserError, match=said):
        fallow.run(out=tmp_path / "runs", **TINY | {"method": f"{file}:Mine", "labels": "clients"})
