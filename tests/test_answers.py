"""What a method's hooks answer, hold and log: odd values end in a sentence, in any run; none of them counts in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, rows, same

import fallow
from fallow import Net, Plan, UserError, Value
from fallow.data.samples import Samples
from fallow.engine import logs
from fallow.engine.held import held
from fallow.methods.plan import column

HEAD = "import numpy as np\nimport torch\nfrom fallow import Method, Net, Plan, Update, Value\nfrom fallow.methods.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n"
KEYS = TINY | {"labels": "clients", "rounds": 2, "steps": 1, "quiet": True}


def run(folder: Path, hook: str, body: str, **keys: Any) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(f"{HEAD}    paper = 'Mine'\n\n    def {hook}:\n        {body}\n")
    return fallow.run(out=folder / "runs", method=f"{folder}/mine.py:Mine", **KEYS | keys)


def refused(what: Callable[..., Any], *args: Any, **named: Any) -> str:
    with pytest.raises(UserError) as error:
        what(*args, **named)
    return str(error.value)


def told(folder: Path, hook: str, body: str) -> str:
    return refused(run, folder, hook, body)


MERGE = "merge(self, server, updates)"
AFTER = "super().merge(server, updates); "


@pytest.mark.parametrize(("value", "column"), [
    ("cold", "cold"), ([1, "a", None], [1, "a", None]), (torch.tensor([0.5, 2.0]), [0.5, 2.0]), (None, None), (np.float32(0.5), 0.5), (np.int64(3), 3),
    ({"a": torch.ones(1)}, {"a": [1.0]}), ({3: np.arange(2)}, {3: [0, 1]}), (torch.tensor(2.0, requires_grad=True), 2.0),
])  # fmt: skip
def test_what_the_server_may_log(value: Any, column: Any) -> None:
    assert logs.at_server("x", value) == column and type(logs.at_server("x", value)) is type(column)


def test_what_is_logged_is_json(tmp_path: Path) -> None:
    body = AFTER + "server.log(a=float('nan'), b=(1, float('inf')), c={3: np.arange(2)}, d=torch.ones(2), e=np.float32(0.5))"
    row = rows(run(tmp_path, MERGE, body, rounds=1).path)[0]
    assert [row[name] for name in "abcde"] == [None, [1, None], {"3": [0, 1]}, [1.0, 1.0], 0.5]


@pytest.mark.parametrize(("name", "value", "said"), [
    ("x", {1}, "a method logs a set as 'x'; give a number, a text, or lists and dicts of them."),
    ("x", [object()], "a method logs a object as 'x'; "),
    ("x", 10**400, "a method logs a number that no float can hold as 'x'; "),
    ("x", 1j, "a method logs a complex as 'x'; "),
    ("x", torch.ones(2).to_sparse(), "a method logs a tensor of torch.float32 that is no plain array of real numbers as 'x'; "),
    ("x", {(1, 2): 3}, "a method logs a dict as 'x'; "),
    ("loss", "high", "a method logs a str as 'loss'; give a number, or None."),
    ("label_ratio", [0.5], "a method logs a list as 'label_ratio'; give a number, or None."),
    ("label_classes", [0.5], "a method logs a list as 'label_classes'; give a list of counts."),
])  # fmt: skip
def test_what_the_server_may_not_log(name: str, value: Any, said: str) -> None:
    assert refused(logs.at_server, name, value).startswith(said)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("x", "0.5", "a method logs a str as 'x'; give a number, a tensor of numbers, or such a tensor and a mask of its shape."),
    ("x", None, "a method logs nothing as 'x'; "),
    ("x", [1.0], "a method logs a list as 'x'; "),
    ("x", (1.0, 2.0), "a method logs a tuple as 'x'; "),
    ("x", (torch.ones(2), torch.ones(3) > 0), "a method logs tensors of the shapes (2,) and (3,) as 'x'; "),
    ("x", torch.ones(2, dtype=torch.complex64), "a method logs a tensor of torch.complex64 that is no plain array of real numbers as 'x'; "),
    ("x/counts", 1.0, "a method cannot log 'x/counts' of a party; choose another name, without a slash."),
])  # fmt: skip
def test_what_a_step_may_not_log(name: str, value: Any, said: str) -> None:
    assert refused(logs.of_party, name, value).startswith(said)


@pytest.mark.parametrize(("answer", "said"), [
    (None, "`holds` gives nothing, and no dict of what is held; "),
    ([Net()], "`holds` gives a list, and no dict of what is held; "),
    ({}, "`holds` names no Net, so that there is nothing to train; "),
    ({"tau": Value(1)}, "`holds` names no Net, so that there is nothing to train; "),
    ({"model": Net}, "`holds` names 'model', which is neither a Net nor a Value; "),
    ({"model": Net(), "x": 3}, "`holds` names 'x', which is neither a Net nor a Value; "),
    ({"model": Net(), "a/b": Value(1)}, "`holds` names something 'a/b', which s.NAME could not ask for; "),
    ({"model": Net(make=lambda classes: torch.nn.Flatten())}, "`holds` has a Net 'model' of another make than the run's model"),
    ({"model": Net(), "x": Net(make=3)}, "`holds` has a Net 'x' with make=3; "),  # type: ignore[arg-type]
    ({"model": Net(), "x": Net(start=3)}, "`holds` has a Net 'x' with start=3; "),  # type: ignore[arg-type]
    ({"model": Net(optimizer="kept")}, "`holds` has a Net 'model' with optimizer='kept'; give reset, keep, travel, or leave it out."),  # type: ignore[arg-type]
    ({"model": Net(options={"momentum": "x"})}, "momentum=x is not allowed; give a number"),
    ({"model": Net(), "x": Value(1.5)}, "`holds` has a Value 'x' of the shape (1.5,); "),  # type: ignore[arg-type]
    ({"model": Net(), "x": Value(-1)}, "`holds` has a Value 'x' of the shape (-1,); "),
    ({"model": Net(), "x": Value(2**62)}, "what the method holds as 'x' takes 17,179,869,184.0 GiB of memory"),
])  # fmt: skip
def test_what_cannot_be_held(answer: Any, said: str) -> None:
    assert refused(held, SimpleNamespace(holds=lambda: answer)).startswith(said)


@pytest.mark.parametrize(("answer", "said"), [
    ("{'tau': Value(1)}", "`holds` names no Net, so that there is nothing to train; "),
    ("{'model': Net(), 'lr': Value(1)}", "`holds` names 'lr', which a slot has already; "),
    ("{'model': Net(), 'labelled': Value(1)}", "`holds` names 'labelled', which a party has already; "),
    ("{'model': Net(), 'x': Net(make=lambda classes: None)}", "`holds` has a Net whose `make` gives nothing; return a torch.nn.Module."),
    ("{'model': Net(train=False)}", "`descend` has no net to train"),
])  # fmt: skip
def test_what_cannot_be_held_in_a_run(answer: str, said: str, tmp_path: Path) -> None:
    assert told(tmp_path, "holds(self)", f"return {answer}").startswith(said)


@pytest.mark.parametrize(("how", "said"), [
    ({"size": 0}, "a stream of batches has size=0; give a whole number, 1 or more."), ({"size": "a"}, "a stream of batches has size='a'; "),
    ({"steps": 1.5}, "a stream of batches has steps=1.5; "), ({"steps": -1}, "a stream of batches has steps=-1; "), ({"epochs": -1}, "a stream of batches has epochs=-1; "),
    ({"epochs": float("nan")}, "a stream of batches has epochs=nan; "), ({"tail": "x"}, "a stream of batches has tail='x'; "), ({"pad": 0}, "a stream of batches has pad=0; "),
])  # fmt: skip
def test_batches_that_cannot_be(how: dict[str, Any], said: str) -> None:
    samples = Samples.of(np.arange(4), np.zeros(4))
    assert refused(lambda: samples.batches(**{"size": 2} | how)).startswith(said)


def test_plans_that_cannot_be() -> None:
    samples = Samples.of(np.arange(4), np.zeros(4))
    assert refused(Plan, x=samples).startswith("column 'x' of a plan is a set of samples; make batches of it: ")
    assert refused(Plan, 3).startswith("a plan's steps are to call 3; ")
    assert refused(column, "w", "a", 2).startswith("column 'w' of a plan is not made of numbers; ")
    assert column("w", torch.tensor([0.5, 1.5], dtype=torch.bfloat16, requires_grad=True), 2).tolist() == [0.5, 1.5]


@pytest.mark.parametrize(("hook", "body", "said"), [
    (MERGE, "server['model'] = None", "merge leaves nothing in server['model'], and not a State; "),
    (MERGE, "server['model'] = server.model.groups", "merge leaves a dict in server['model'], and not a State; "),
    (MERGE, "server['model'] = server.model.only('statistics')", "merge leaves a State without parameters in server['model']; "),
    (MERGE, "server['model'] = server.model.map(lambda t: t[:1])", "a net is given a State whose parameters are no plain tensor of real numbers, of the same length; "),
    (MERGE, "server['model'] = server.model.map(lambda t: t.long())", "a net is given a State whose parameters are no plain tensor"),
    (MERGE, "server['x'] = torch.ones(2).to_sparse()", "a method keeps or sends a tensor whose numbers are not all there, which no checkpoint holds; "),
    (MERGE, "server.pool[0] = {'x': torch.ones(2).to_sparse()}", "a method keeps or sends a tensor whose numbers are not all there"),
    (MERGE, "server.pool[99] = {'x': 1}", "server.pool has no place for 99; its places are the clients, 0 to 3."),
    (MERGE, "server.pool[0] = None", "server.pool[0] is given a NoneType; "),
    ("start(self, server)", "server['model'] = None", "start leaves nothing in server['model'], and not a State; "),
    ("down(self, server, client)", "return None", "down gives nothing, and not a dict of States and tensors; "),
    ("down(self, server, client)", "return {'model': torch.ones(3)}", "the net 'model' starts from 'model', which is a Tensor and no State in this message; "),
    ("begin(self, party)", "return None", "begin gives nothing, and not a dict ({} where there is nothing); "),
    ("plan(self, party, found)", "return None", "plan gives nothing, and not a Plan; "),
    ("end(self, party)", "return party.model.state", "end gives a State, and not an Update, or None; "),
    ("end(self, party)", "return Update(model=party.model)", "end sends a NetHandle as 'model'; States and tensors travel; "),
    ("supervised(self, s, b)", "s.model(b.x.labelled, stats='eval')", "a net is called with stats='eval'; give update, batch, running."),
])  # fmt: skip
def test_what_a_hook_may_not_do(hook: str, body: str, said: str, tmp_path: Path) -> None:
    assert told(tmp_path, hook, body).startswith(said)


def test_a_beginning_that_numpy_does_not_know(tmp_path: Path) -> None:
    """A gradient, or bfloat16, is nothing to a plan."""
    body = "return {'a': torch.ones(2, requires_grad=True), 'b': torch.full((2,), 0.5, dtype=torch.bfloat16)}\n\n    def plan(self, party, found):\n        assert found['a'].sum() + found['b'].sum() == 3\n        return super().plan(party, found)"
    assert run(tmp_path, "begin(self, party)", body).summary["status"] == "finished"


def test_what_start_puts_into_the_pool_is_there(tmp_path: Path) -> None:
    """In the first round, and in a run that was stopped before it came to the client."""
    body = "server.pool[3] = {'x': 7.0}\n\n    def merge(self, server, updates):\n        super().merge(server, updates)\n        server.log(x=server.pool[3]['x'])"
    through = run(tmp_path / "through", "start(self, server)", body, name="r")
    run(tmp_path / "cut", "start(self, server)", body, name="r", stop_after=1)
    same(through.path, fallow.resume(tmp_path / "cut/runs/r").path)
    assert [row["x"] for row in rows(through.path)] == [7.0, 7.0]


OUTSIDE = """import torch
from fallow.methods.fedavg import FedAvg
SEEN = {}
ONCE = []
class Base(FedAvg):
    paper = 'Mine'
    cache, count, fixed, weight = {}, 0, [1, 2], torch.zeros(1)
    names = ('a', 'b')
class Mine(Base):
    def merge(self, server, updates):
        super().merge(server, updates)
        Base.cache[server.round] = 1.0
        Base.count += 1
        Base.weight += 1
        SEEN.setdefault('first', []).append(server.round)
        ONCE.append(server.round)
        self.fixed.index(2)
"""


def test_what_is_kept_outside_of_the_run_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OUTSIDE)
    done = fallow.run(out=tmp_path, **KEYS | {"method": f"{tmp_path}/mine.py:Mine"})
    found = [row.get("outside") for row in done.metrics]
    assert found == [["Base.cache", "Base.count", "Base.weight", "ONCE", "SEEN"], None]
    said = str(done.summary["warnings"])
    assert len(done.summary["warnings"]) == 5 and "the method's code changes Base.cache as it runs" in said and "keep it in server[...]" in said


def test_a_method_that_keeps_nothing_outside_is_not_warned_of(tmp_path: Path) -> None:
    done = run(tmp_path, MERGE, AFTER + "server['n'] = 1 + (server['n'] if 'n' in server else 0)")
    assert not any("outside" in row for row in done.metrics) and done.summary["warnings"] == []
