"""A method of one's own tried out on tiny data: `fallow check-method FILE.py:Class`.

Each scenario that it is defined for is run for two rounds on a few digits, under modes that refuse what cannot be captured;
then again, stopped and resumed, and with its parties side by side, all of which must give the same bits.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fallow import own
from fallow.data import sources
from fallow.data.readers.common import ImageSet
from fallow.data.sources import Source
from fallow.engine import inspecting
from fallow.engine.eager import Eager
from fallow.engine.feed import Step
from fallow.engine.hooks import Wrong, watched
from fallow.engine.kit import Kit
from fallow.engine.local import Local
from fallow.engine.party import run_step
from fallow.engine.site import Sites
from fallow.engine.slot import Slot
from fallow.engine.strict import NotCapturable, guarded, outside
from fallow.errors import UserError
from fallow.methods import find, is_own
from fallow.methods.base import Method, Net
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.health import Row

ORDER = ("server", "clients", "some", "all")
TINY: dict[str, Any] = {
    "clients": 4, "active": 3, "label_count": 40, "batch": 8, "steps": 3, "rounds": 2, "model": "small-cnn", "norm": "bn",
    "device": "cpu", "slots": 1, "checkpoint_every": 1,
}  # fmt: skip
CHECKS = {
    "runs": "two rounds run through",
    "hooks": "each hook gives what it should, of the right shape and on the right device",
    "captured": "begin and step read nothing on the host, have no shape that depends on values, draw no random numbers",
    "trains": "a step trains a net, and the model moves",
    "held": "everything that is held is used",
    "server": "down and merge assign to the server's entries and change none in place",
    "again": "the same run again gives the same bits",
    "resumed": "a run that is stopped and resumed gives the same bits",
    "side by side": "parties side by side give the same bits",
}
OK, NOT_TRIED = "ok", "-"
MEND = {
    "captured": inspecting.MEND,
    "trains": "call s.descend with the loss in `step`",
    "held": "take it out of `holds`, or use it",
    "server": "assign a new tensor or State to server[...]",
    "again": "take random numbers from party.rng, batches or predict, never from torch, numpy or random",
    "resumed": "keep what lasts in server[...] or in held things with keep=True, never in the method or its module",
    "side by side": "nothing may depend on the order of parties, or be shared by them outside of server[...]",
}


@dataclass
class Trial:
    """What came of it: a verdict for each check and scenario, and a sentence for each that failed."""

    method: str
    scenarios: list[str]
    verdicts: dict[tuple[str, str], str] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.sentences

    def rows(self) -> list[tuple[str, ...]]:
        """A title row and a row for each check."""
        body = [(name, *(self.verdicts.get((name, s), NOT_TRIED) for s in self.scenarios), what) for name, what in CHECKS.items()]
        return [("check", *(f"labels={s}" for s in self.scenarios), "what"), *body]


def tried(name: str, given: dict[str, Any] | None = None, told: Callable[[str], None] = lambda _: None) -> Trial:
    """Tries a method out in each scenario; `given` are keys for its options. `told` is called with what is tried next."""
    if is_own(name):
        own.named(name, "method")
    kind = find(name)
    where = (given or {}).get("labels")
    scenarios = [s for s in ORDER if s in kind.scenarios and where in (None, s)]
    trial = Trial(name, scenarios)
    for scenario in scenarios:
        told(f"labels={scenario}")
        with tempfile.TemporaryDirectory(prefix="fallow-trial-") as folder:
            _Scenario(trial, scenario, {**TINY, **(given or {}), "method": name, "labels": scenario}, Path(folder)).judge()
    return trial


def data() -> Source:
    """A few of scikit-learn's digits."""
    whole = sources.load("digits")
    return Source("few-digits", whole.classes, ImageSet(whole.train.images[:240], whole.train.labels[:240]), ImageSet(whole.test.images[:60], whole.test.labels[:60]), False)


class _Scenario:
    def __init__(self, trial: Trial, scenario: str, keys: dict[str, Any], folder: Path):
        self.trial, self.scenario, self.keys, self.folder = trial, scenario, keys, folder
        self.code = own.find(keys["method"], "method") if is_own(keys["method"]) else None
        self.source = data()

    def judge(self) -> None:
        """Runs it in four ways. Where the first fails nothing else is tried."""
        at_work = self._watched()
        if at_work is None:
            return
        self._look(at_work)
        reference = _came_to(at_work)
        for check, how in (("again", self._plainly), ("resumed", self._resumed), ("side by side", self._side_by_side)):
            try:
                found = _came_to(how(check))
            except Exception as error:
                self._fails(check, self._told(error))
                continue
            if found == reference:
                self._passes(check)
            else:
                self._fails(check, f"the run comes to {_difference(reference, found)}")

    # -- ways to run it ------------------------------------------------------------------------------------------------
    def _run(self, name: str, how: Callable[[type[Method]], type[Method]] = lambda kind: kind) -> Run:
        if self.code:
            own.forget(self.keys["method"], "method")  # a new process would run its file anew
        method, options, source, federation = prepare(None, self.keys, self.source)
        path = self.folder / name.replace(" ", "-")
        path.mkdir(exist_ok=True)
        return Run(RunFolder(path), how(method), options, source, federation)

    def _watched(self) -> Run | None:
        """Under strict modes, its hooks' answers looked at; None if it does not run."""
        for strict in (True, False):  # what cannot be captured may be right in all else
            try:
                at_work = self._run(f"watched-{strict}", partial(watched, strict=strict))
                strict = strict and at_work.kit.method.captured
                _held(at_work.kit)
                _take(at_work, Strict(at_work.simulation, strict))
                with outside(at_work.kit):
                    at_work.go()
            except NotCapturable as error:
                self._fails("captured", self._told(error))
            except Exception as error:
                self._fails(error.check if isinstance(error, Wrong) else "runs", self._told(error))
                return None
            else:
                for check in ("runs", "hooks", "server", *(["captured"] if strict else [])):
                    self._passes(check)
                return at_work
        return None

    def _plainly(self, name: str) -> Run:
        at_work = self._run(name)
        at_work.go()
        return at_work

    def _resumed(self, name: str) -> Run:
        self._run(name).go(stop_after=1)
        at_work = self._run(name)
        at_work.restore()
        at_work.go()
        return at_work

    def _side_by_side(self, name: str) -> Run:
        at_work = self._run(name)
        executor = at_work.federated.executor
        assert isinstance(executor, Eager)
        executor.workers = at_work.kit.sharing = 3
        at_work.go()
        return at_work

    # -- what is said --------------------------------------------------------------------------------------------------
    def _look(self, at_work: Run) -> None:
        rows = at_work.folder.rows()
        first, last = at_work.kit.initial().groups["parameters"], at_work.federated.server.model.groups["parameters"]
        if all(r.get("descended") is False for r in rows):
            self._fails("trains", "no step calls s.descend or s.apply, so nothing is trained")
        elif torch.equal(first, last):
            self._fails("trains", "the model is after two rounds what it was before the first")
        else:
            self._passes("trains")
        unused = rows[0].get("unused") or ()
        if unused:
            self._fails("held", f"`holds` names {', '.join(map(repr, unused))}, which no hook uses")
        else:
            self._passes("held")

    def _passes(self, check: str) -> None:
        self.trial.verdicts.setdefault((check, self.scenario), OK)

    def _fails(self, check: str, why: str) -> None:
        self.trial.verdicts[check, self.scenario] = "FAILS"
        remedy = f"; {MEND[check]}" if check in MEND else ""
        self.trial.sentences.append(f"{check}, labels={self.scenario}: {why}{remedy}")

    def _told(self, error: BaseException) -> str:
        """What went wrong, with the line of the user's own file."""
        at = own.line(error, self.code) if self.code else ""
        if isinstance(error, UserError | NotCapturable):
            return f"{at}{error.cause if isinstance(error, Wrong) else str(error).rstrip('.')}"
        return f"{at}{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(": ")


# -- looking at hooks --------------------------------------------------------------------------------------------------
class Strict(Eager):
    """Makes steps one after another; with `strict` they cannot do what cannot be captured."""

    def __init__(self, sites: Sites, strict: bool):
        super().__init__(sites)
        self.strict = strict

    def make(self, slot: Slot, step: Step) -> None:
        run_step(slot, dataclasses.replace(step, function=guarded(step.function)) if self.strict else step)


def _take(at_work: Run, executor: Eager) -> None:
    """Has the run's parties worked by another executor."""
    f = at_work.federated
    assert isinstance(f.clients, Local)
    f.executor = f.clients.executor = executor


def _held(kit: Kit) -> None:
    if not isinstance(kit.held.get("model"), Net):
        raise Wrong("hooks", "holds has no Net of the name 'model'")


# -- comparing ---------------------------------------------------------------------------------------------------------
def _came_to(at_work: Run) -> tuple[list[Row], dict[str, torch.Tensor]]:
    """A run's metrics, times aside, and its model."""
    told = [{k: v for k, v in row.items() if k != "seconds"} for row in at_work.folder.rows()]
    return told, _Exact({g: t.clone() for g, t in at_work.federated.server.model.groups.items()})


class _Exact(dict[str, torch.Tensor]):
    """Tensors that are equal bit for bit."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and self.keys() == other.keys() and all(torch.equal(t, other[k]) for k, t in self.items())

    __hash__ = None  # type: ignore[assignment]


def _difference(one: tuple[list[Row], Any], other: tuple[list[Row], Any]) -> str:
    for a, b in zip(one[0], other[0]):
        keys = [k for k in a if a.get(k) != b.get(k)]
        if keys:
            return f"another {keys[0]} in round {a['round']} ({b.get(keys[0])} and not {a[keys[0]]})"
    return "other weights"
