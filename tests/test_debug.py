"""Whose failure it is: hooks that fail are named, backend=debug looks at each of them, own code is inspected beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, same

import fallow
from fallow import UserError, draws

HEAD = "import torch\nfrom fallow import Method, Net, Plan, Update\n\nclass Mine(Method):\n"
FIRST = int(draws.first(draws.key(1, "active", 0), TINY["clients"], TINY["active"])[0])  # who is drawn first under active_seed=1
KEYS = TINY | {"labels": "clients", "rounds": 2, "quiet": True, "trust": True}


def run(folder: Path, body: str, **keys: Any) -> Any:
    (folder / "mine.py").write_text(HEAD + body)
    return fallow.run(out=folder / "runs", method=f"{folder}/mine.py:Mine", **KEYS | keys)


def told(folder: Path, body: str, **keys: Any) -> str:
    """What a run of the method that fails says: a user's sentence, or the note at a bug."""
    with pytest.raises(Exception) as error:
        run(folder, body, **keys)
    text = str(error.value) if isinstance(error.value, UserError) else error.value.__notes__[0]
    return text.replace(f"{folder}/", "").replace(f"client {FIRST}", "client FIRST")


FAILING = {
    "start": ("    def start(self, server): raise KeyError('x')\n", "in `start` of mine.py:Mine, round 1"),
    "down": ("    def down(self, server, client): return {'model': server.model, 'x': server['x']}\n", "in `down` of mine.py:Mine, client FIRST, round 1"),
    "begin": ("    def begin(self, party): return {'x': party.received['x']}\n", "in `begin` of mine.py:Mine, client FIRST, round 1"),
    "plan": ("    def plan(self, party, found): return Plan(x=party.labelled.batches(8, 'weak', steps=found['x']))\n", "in `plan` of mine.py:Mine, client FIRST, round 1"),
    "step": ("    def supervised(self, s, b): return super().supervised(s, b.x)\n", "in `step` of mine.py:Mine, client FIRST, round 1, step 1"),
    "end": ("    def end(self, party): return Update(x=party.nothing)\n", "in `end` of mine.py:Mine, client FIRST, round 1"),
    "merge": ("    def merge(self, server, updates): server['model'] = updates[0]['x']\n", "in `merge` of mine.py:Mine, round 1"),
}


@pytest.mark.parametrize("hook", FAILING)
def test_what_fails_in_a_hook_names_it_and_its_client(hook: str, tmp_path: Path) -> None:
    body, place = FAILING[hook]
    assert told(tmp_path, body, active_seed=1, slots=1) == place


def test_a_later_step_is_counted(tmp_path: Path) -> None:
    body = "    def plan(self, party, found): return super().plan(party, found) + Plan(self.worse, x=party.labelled.batches(8, 'labelled', steps=3))\n"
    body += "    def worse(self, s, b): s.descend(s.model(b.x.nothing).sum())\n"
    assert told(tmp_path, body, steps=2, active_seed=1).endswith("step 3")


@pytest.mark.parametrize(("body", "sentence"), [
    ("    def end(self, party): return Update(x=[1.0])\n", "in `end` of mine.py:Mine, client FIRST, round 1: end sends a list as 'x'; States and tensors travel"),
    ("    def down(self, server, client): return {'model': server.model, 'x': torch.zeros(3)}\n"
     "    def end(self, party): return Update(model=party.model.state, x=torch.zeros(4))\n",
     "in `end` of mine.py:Mine, client FIRST, round 1: end sends 'x' as a tensor of shape (4,), and received it as a tensor of shape (3,)"),
    ("    def plan(self, party, found): return None\n", "in `plan` of mine.py:Mine, client FIRST, round 1: plan gives nothing, and not a Plan"),
    ("    def merge(self, server, updates): server.model.groups['parameters'].zero_()\n",
     "in `merge` of mine.py:Mine, round 1: merge changes server['model'] in place, which a round that fails could not take back"),
    ("    def supervised(self, s, b): s.descend(s.model(b.x.labelled).sum() * b.pull)\n"
     "    def plan(self, party, found): return super().plan(party, found).having(pull=[1.0, float('nan'), 1.0])\n",
     "in `step` of mine.py:Mine, client FIRST, round 1, step 2: 'model' became NaN or infinite; look at the loss of this step"),
    ("    def supervised(self, s, b): s.log(round=1)\n", "in `step` of mine.py:Mine, client FIRST, round 1, step 1: a method cannot log 'round'"),
])  # fmt: skip
def test_debug_looks_at_every_hook_and_step(body: str, sentence: str, tmp_path: Path) -> None:
    assert told(tmp_path, body, active_seed=1, steps=3, backend="debug").startswith(sentence)


def test_debug_gives_the_same_bits(tmp_path: Path) -> None:
    keys = TINY | {"method": "fedloke", "labels": "some", "entropy": 2.3, "ramp_rounds": 1, "quiet": True}
    same(fallow.run(out=tmp_path / "a", slots=2, **{k: v for k, v in keys.items() if k != "slots"}).path, fallow.run(out=tmp_path / "b", backend="debug", **keys).path)


READS = """    def plan(self, party, found):
        return Plan(x=party.labelled.batches(8, "labelled", steps=2))
    def step(self, s, b):
        loss = s.model(b.x.labelled).logsumexp(1).mean()
        if loss > 0:
            s.descend(loss)
"""


def test_a_step_that_could_not_be_captured_is_refused_before_the_first_round(tmp_path: Path) -> None:
    sentence = "the method mine.py:Mine cannot be captured: line 9 of mine.py: __bool__ reads a value on the host; use masks"
    assert told(tmp_path, READS).startswith(sentence)
    assert not list((tmp_path / "runs").iterdir())  # nothing was run
    assert run(tmp_path, "    captured = False\n" + READS).accuracy is not None


def test_begin_is_inspected_too(tmp_path: Path) -> None:
    body = "    def begin(self, party):\n        return {'x': torch.rand(3)}\n"
    assert told(tmp_path, body).startswith("the method mine.py:Mine cannot be captured: line 6 of mine.py: rand draws random numbers")


def test_begin_may_predict_with_a_state(tmp_path: Path) -> None:
    """Making the net for it is the engine's work."""
    body = "    def begin(self, party):\n        return {'z': party.predict(party.received['model'], party.unlabelled).mean(0)}\n"
    assert run(tmp_path, body).accuracy is not None
