"""Own models and methods that Fallow once got wrong in silence, or answered with a traceback."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HERE, TINY, few_digits
from test_rounds import HELD, set_up

import fallow
from fallow.data.samples import Samples
from fallow.engine import feed
from fallow.engine import round as round_module
from fallow.engine.nets import NetHandle
from fallow.engine.party import DROPOUT, Job, Party, numbers
from fallow.engine.slot import Slot
from fallow.errors import UserError
from fallow.methods import find
from fallow.methods.base import Method, Plan
from fallow.methods.state import State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import resolve
from fallow.tables.cells import _tables, places


# -- statistics of models that `down` makes --------------------------------------------------------------------------------
def test_each_client_gets_the_model_made_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that `down` makes are gone once their statistics are there; another one may have the address of an old one."""

    def down(self: Method, server: Any, client: int) -> dict[str, State]:
        return {"model": server.model.only("parameters") * (1.0 + client)}

    monkeypatch.setattr(find("fedavg"), "down", down)
    monkeypatch.setattr(round_module, "id", lambda _: 7, raising=False)  # as the memory of one that is gone may be taken anew
    keys = TINY | {"method": "fedavg", "labels": "clients", "clients": 8, "active": 8, "norm": "sbn", "sbn_data": "server", "label_count": 80}
    method, options, source, federation = prepare(None, keys | {"sbn_data": "all"})
    f = Run(RunFolder(tmp_path), method, options, source, federation).federated
    f.server.draw(0)
    base = f.server.model.groups["parameters"]
    for job in f._requests():
        assert torch.equal(job.message["model"].groups["parameters"], base * (1.0 + job.party)), job.party
        assert "statistics" in job.message["model"]


def test_a_model_that_all_get_has_its_statistics_made_once(tmp_path: Path) -> None:
    method, options, source, federation = prepare(None, TINY | {"method": "fedavg", "labels": "clients", "norm": "sbn", "active": 4})
    f = Run(RunFolder(tmp_path), method, options, source, federation).federated
    f.server.draw(0)
    assert len({id(job.message["model"]) for job in f._requests()}) == 1


# -- train and eval mode of own models --------------------------------------------------------------------------------------
def test_a_model_that_asks_for_its_mode_is_tested_in_eval_mode(tmp_path: Path) -> None:
    keys = TINY | {"method": "fedavg", "labels": "clients", "model": f"{HERE / 'linear.py'}:Halving", "lr": 0.1, "eval_batch": 60}
    result = fallow.run(out=tmp_path, **keys | {"rounds": 1, "steps": 20})
    source = few_digits()
    with torch.no_grad():
        logits = result.model()((source.test.images / 255 - 0.5) / 0.5)
    assert result.accuracy == float((logits.argmax(1) == source.test.labels).double().mean())
    loss = torch.nn.functional.cross_entropy(logits.double(), source.test.labels)
    assert result.metrics[0]["test_loss"] == pytest.approx(float(loss), abs=1e-5)


def test_a_model_whose_draws_nobody_can_repeat_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("Dropping", "Buffered", "Keyed"):
        keys = TINY | {"method": "fedavg", "labels": "clients", "rounds": 1, "model": f"{HERE / 'linear.py'}:{name}", "quiet": True}
        if name != "Dropping":
            fallow.run(out=tmp_path, **keys)
            continue
        with pytest.raises(UserError) as error:
            fallow.run(out=tmp_path, **keys)
        told = f"the model {keys['model']} draws random numbers that are torch's own, so its runs could be neither repeated nor resumed exactly"
        assert str(error.value) == f"{told}; use nn.Dropout, which is keyed, in place of F.dropout and torch.rand."
        assert not list(tmp_path.iterdir())


def test_each_pass_sets_the_mode() -> None:
    from linear import Dropping

    net = NetHandle(torch.nn.Sequential(Dropping(3, 1, 2)), torch.device("cpu"))
    Dropping.modes.clear()
    for stats in ("update", "running", "running", "batch", "running", "update"):
        net(torch.zeros(2, 1, 2, 2), stats=stats)
    net.replayed("running")(torch.zeros(2, 1, 2, 2))
    assert Dropping.modes == [True, False, False, True, False, True, False]


# -- buffers of own models ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keys", [{"statistics": s} for s in ("average", "batch", "static")] + [{"statistics": "static", "sbn": "federated"}])
def test_a_buffer_that_is_no_batch_norms(keys: dict[str, str], tmp_path: Path) -> None:
    result = fallow.run(out=tmp_path, **TINY | {"method": "fedavg", "labels": "clients", "model": f"{HERE / 'linear.py'}:Buffered"} | keys)
    model, source = result.model(), few_digits()
    assert float(model.scale) == 2.0  # type: ignore[arg-type]
    logits = model((source.test.images / 255 - 0.5) / 0.5)
    assert result.accuracy == float((logits.argmax(1) == source.test.labels).double().mean())


# -- plans -------------------------------------------------------------------------------------------------------------------
def planned(path: Path, **columns: Any) -> list[feed.Step]:
    f = set_up(path, method="fedavg", labels="clients", epochs=1)
    party = Party(f.simulation.site(0), Slot(f.kit), Job(0, 0, {"model": f.server.model}))
    plan = Plan(x=party.labelled.batches(2, "labelled", epochs=1), **columns)  # five samples: three steps
    return list(feed.steps(party.site, plan, 1, partial(numbers, party)))


def test_a_column_may_be_called_key(tmp_path: Path) -> None:
    steps = planned(tmp_path, key=[0.5, 1.5, 2.5])
    assert [float(s.batch().key) for s in steps] == [0.5, 1.5, 2.5]
    assert len({int(s.numbers[DROPOUT]) for s in steps}) == 3


@pytest.mark.parametrize("lr", [[0.1, 0.2], {"model": np.array([0.1, 0.2])}, np.zeros((3, 2)), torch.zeros(2)])
def test_a_column_of_rates_of_another_length(lr: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="column 'lr' of a plan has"):
        planned(tmp_path, lr=lr)


@pytest.mark.parametrize("lr", [1, 0.25, [0.1, 0.2, 0.3], torch.tensor([1, 2, 3]), [0.1, 0.2, 0.3, 0.4]])
def test_rates_of_a_plan(lr: Any, tmp_path: Path) -> None:
    """A number holds for all steps; a longer column is cut, as every other."""
    wanted = (lr if isinstance(lr, list) else lr.tolist() if isinstance(lr, torch.Tensor) else [lr] * 3)[:3]
    assert [float(s.numbers["lr/model"]) for s in planned(tmp_path, lr=lr)] == pytest.approx(wanted)


# -- settings ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "fixmatch", "feddure", "fedloke"])
def test_no_measure_of_work(method: str) -> None:
    with pytest.raises(UserError, match="neither epochs nor steps"):
        resolve({}, {"method": method, "labels": "clients", "epochs": None})
    assert resolve({}, {"method": method, "labels": "clients", "epochs": None, "steps": 3})[1].steps == 3


@pytest.mark.parametrize(("keys", "steps"), [
    ({"batch": 4}, [7 // 4, 5 // 4]), ({"batch": "full"}, [7 // 5, 5 // 3]), ({"batch": "full", "unlabelled_batch": "full"}, [1, 1]),
])  # fmt: skip
def test_steps_that_match_the_unlabelled_set(keys: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    """Two clients with 5 and 3 labelled, 7 and 5 unlabelled samples; a full batch is the labelled set, or all of it."""
    f = set_up(tmp_path, method="fixmatch", labels="clients", steps="match-unlabelled", **keys)
    slot = Slot(f.kit)
    assert [(len(a), len(b)) for a, b in HELD] == [(5, 7), (3, 5)]
    parties = [Party(f.simulation.site(k), slot, Job(k, 0, {"model": f.server.model})) for k in range(2)]
    assert [p.steps for p in parties] == steps
    parties[0].labelled = Samples.of(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert keys["batch"] != "full" or parties[0].steps == 1


# -- metrics -----------------------------------------------------------------------------------------------------------------
def test_the_learning_rate_of_a_round_is_the_mean_over_its_steps(tmp_path: Path) -> None:
    """Three steps at client 0, two at client 1; warm-up over four steps, then half a cosine to the last step."""
    f = set_up(tmp_path, method="fedavg", labels="clients", epochs=1, batch=2, lr=0.4, schedule="cosine,by=step,warmup=4")
    for r in range(3):
        rates = []
        for steps in (3, 2):
            for now in range(r * steps, (r + 1) * steps):
                rates.append(0.4 * now / 4 if now < 4 else 0.4 * (1 + math.cos(math.pi * (now - 4) / (3 * steps - 4))) / 2)
        assert f.round(r)["lr"] == pytest.approx(sum(rates) / 5, rel=1e-12)


def test_the_learning_rate_of_a_round_by_rounds_is_exact(tmp_path: Path) -> None:
    f = set_up(tmp_path, method="fixmatch", labels="clients", steps=7, lr=0.03)
    assert f.round(0)["lr"] == 0.03


def test_the_learning_rate_of_a_plan_with_a_schedule_of_its_own(tmp_path: Path) -> None:
    """FedDure's released loop: five warm steps and five main ones on one line from 0, a tenth at each."""
    f = set_up(tmp_path, method="feddure", labels="clients", reading="released", batch=2)
    assert f.round(0)["lr"] == pytest.approx(6e-4 * sum(range(10)) / 100, rel=1e-12)


# -- cells of tables ---------------------------------------------------------------------------------------------------------
def test_every_cell_is_found_by_its_settings() -> None:
    """Of each data set of each table one entry, EMNIST's among them: there the printed name is not the key `data`."""
    seen = {}
    for grids in _tables():
        for entry in grids.entries:
            if entry.figure is not None and not entry.missing:
                seen.setdefault((grids.entries[0].paper, entry.table, entry.cell.data), (grids, entry))
    assert any(entry.cell.data != entry.keys["data"] for _, entry in seen.values())
    for grids, entry in seen.values():
        if entry.cell.data != entry.keys["data"] or "emnist" in entry.cell.data:
            found = places(grids.expected(entry, 0), Path("runs/a/b/c/d"))
            assert (entry.paper, entry.table, entry.name) in {(p.entry.paper, p.entry.table, p.entry.name) for p in found}
