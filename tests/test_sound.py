"""A NaN never counts, wherever it is made; numbers too large for the arithmetic end in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from test_rounds import set_up

import fallow
from fallow.config import Config, takes
from fallow.engine import finite
from fallow.engine import round as round_module
from fallow.engine.finite import defined, sound
from fallow.engine.party import Party
from fallow.engine.round import Federated
from fallow.engine.strict import strict
from fallow.errors import UserError
from fallow.keys.section import LARGEST, MOST, Section
from fallow.methods import REGISTERED, find
from fallow.methods.base import Method, Net, Update, Value
from fallow.methods.state import State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.metrics import written

NAN, INF = float("nan"), float("inf")


def state(*numbers: float) -> State:
    like = State.of(torch.nn.Linear(len(numbers), 1))
    like.groups["parameters"][: len(numbers)] = torch.tensor(numbers)
    return like


@pytest.mark.parametrize(("tree", "good"), [
    ({}, True), (state(1.0, 2.0), True), (state(1.0, NAN), False), (state(1.0, -INF), False),
    (torch.tensor([1.0, INF]), True), (torch.tensor([NAN, INF]), False), (torch.tensor([]), True), (torch.tensor([1, 2]), True),
    (torch.tensor([1e300, 2.0], dtype=torch.float64), True),
    ({"a": [1.0, ({"b": NAN},)]}, False), ({"a": [INF, "nan", None, True, 10**400]}, True),
    ([torch.zeros(2), {"x": state(0.0)}, torch.full((3, 3), NAN)], False), (torch.tensor([NAN], dtype=torch.float16), False),
    ([state(1.0), torch.tensor([INF])], True), ([state(INF), torch.tensor([1.0])], False), ([state(1.0), torch.tensor([NAN, 1.0])], False),
    (torch.tensor([1 + 2j, complex(0, NAN)]), False), (torch.tensor([1 + 2j, complex(INF, 0)]), True),
])  # fmt: skip
def test_what_is_sound(tree: Any, good: bool) -> None:
    assert bool(sound(tree)) is good


def test_asking_does_not_wait_for_the_device() -> None:
    """To copy a number from the host is to wait for all work before it, and every client's end asks: other clients get no steps meanwhile."""
    trees = [[state(1.0, 2.0), torch.zeros(2), 1.0], [state(1.0)], {"a": NAN}]
    with strict():
        answers = [sound(tree) for tree in trees]
    assert [bool(a) for a in answers] == [True, True, False]


def test_a_tensor_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[torch.Tensor] = []
    monkeypatch.setattr(finite, "_extremes", lambda tensor: looked.append(tensor) or [torch.zeros(())] * 2)
    one = state(1.0, 2.0)
    assert bool(sound([one, {"model": State(one.layout, one.groups)}], one.clone()))
    assert len(looked) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_the_device_is_not_waited_for(bad: int | None) -> None:
    """Parties share a device: one that waits for its own work keeps the others from being fed."""
    numbers = [NAN if bad == k else 0.0 for k in range(3)]
    weights, kept = state(numbers[0], 1.0).to(torch.device("cuda")), torch.full((2,), numbers[1], device="cuda")
    here = torch.tensor([numbers[2]])
    torch.cuda.set_sync_debug_mode("error")
    try:
        verdict = sound([weights], {"kept": kept, "number": 0.5}, here)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(verdict) is (bad is None)


def test_metrics_without_a_value_are_none() -> None:
    assert defined({"a": NAN, "b": [1.5, INF, (2, -INF)], "c": {"d": "x", "e": 0.0}}) == {
        "a": None, "b": [1.5, None, [2, None]], "c": {"d": "x", "e": 0.0},
    }  # fmt: skip


def test_a_row_is_json_whatever_it_holds() -> None:
    assert written({"a": 0.5, "b": [3, True, None], "c": {"d": (1, 2.0)}}) == '{"a": 0.5, "b": [3, true, null], "c": {"d": [1, 2.0]}}\n'
    assert written({"a": NAN, "b": [3, INF], "c": {"d": (1, -INF)}}) == '{"a": null, "b": [3, null], "c": {"d": [1, null]}}\n'


# -- wherever it is made -------------------------------------------------------------------------------------------------
def in_the_merge(server: Any, updates: Any) -> None:
    server["model"] = server.model * NAN


def in_momentum(server: Any, updates: Any) -> None:
    server["momentum"] = torch.tensor([0.0, NAN])


def in_place(server: Any, updates: Any) -> None:
    server["mine"]["deep"][0].fill_(NAN)


def as_a_number(server: Any, updates: Any) -> None:
    server["mine"] = [NAN]


def ends_with(**entries: float) -> Any:
    def end(self: Method, party: Party) -> Update:
        return Update(model=party.model.state, **{k: torch.tensor(v) for k, v in entries.items()})

    return end


def fails(f: Federated, words: str) -> UserError:
    """Round 2 (from 1) does not take effect."""
    before, kept = dict(f.server.entries), dict(f.keep.version)
    model = f.server.model.groups["parameters"].clone()
    with pytest.raises(UserError, match=words) as told:
        f.round(1)
    assert "in round 2" in told.value.cause and "the rounds before it are kept" in told.value.remedy
    assert list(f.server.entries) == list(before) and all(f.server[k] is v for k, v in before.items())
    assert torch.equal(f.server.model.groups["parameters"], model) and f.keep.version == kept and f.whole
    return told.value


@pytest.mark.parametrize("merge", [in_the_merge, in_momentum, in_place, as_a_number])
def test_of_the_merge(merge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = set_up(tmp_path, method="fedavg", labels="clients", epochs=1)
    f.server["mine"] = {"deep": [torch.zeros(2)]}
    assert f.round(0)["accuracy"] is not None
    monkeypatch.setattr(find("fedavg"), "merge", lambda self, server, updates: merge(server, updates))
    fails(f, "the numbers of the merge became NaN or infinite")


def test_of_a_clients_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = set_up(tmp_path, method="fedavg", labels="clients", epochs=1)
    f.round(0)
    monkeypatch.setattr(find("fedavg"), "end", ends_with(limit=INF))
    f.round(1)  # infinite: a method's own affair
    monkeypatch.setattr(find("fedavg"), "end", ends_with(extra=NAN))
    fails(f, "the weights of client")
    with pytest.raises(UserError, match=f"the weights of client {f.server.active[0]} became NaN"):  # the first drawn
        f.round(1)


def test_of_what_a_client_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find("fedavg"), "holds", lambda self: {"model": Net(), "kept": Value(2, keep=True)})
    f = set_up(tmp_path, method="fedavg", labels="clients", epochs=1)
    f.round(0)
    assert f.keep.version == {0: 1, 1: 1}

    def end(self: Method, party: Any) -> Update:
        party.kept.fill_(NAN if party.id == 1 else 1.0)
        return Update(model=party.model.state)

    monkeypatch.setattr(find("fedavg"), "end", end)
    fails(f, "the weights of client 1 became NaN")


def test_of_a_kept_optimiser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = set_up(tmp_path, method="fedavg", labels="clients", epochs=1, optimizer_state="keep")
    f.round(0)

    def end(self: Method, party: Any) -> Update:
        party.slot.optimizers["model"].tensors["momentum"].fill_(INF)
        return Update(model=party.model.state)

    monkeypatch.setattr(find("fedavg"), "end", end)
    with pytest.raises(UserError, match=f"the weights of client {f.server.active[0]} became NaN or infinite"):
        f.round(0)
    fails(f, "the weights of client")


def whole(path: Path, **keys: Any) -> Federated:
    path.mkdir(exist_ok=True)
    method, options, source, federation = prepare(None, TINY | {"method": "fedavg", "labels": "clients", "rounds": 3} | keys)
    return Run(RunFolder(path), method, options, source, federation).federated


def test_of_static_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a model that is only sent to clients, and that no test sees."""
    f = whole(tmp_path, norm="sbn", eval_every=3, sbn_data="active")
    f.round(0)
    right = round_module.static
    monkeypatch.setattr(round_module, "static", lambda *a: State(a[2].layout, {g: t * NAN if g == "statistics" else t for g, t in right(*a).groups.items()}))
    fails(f, "the numbers of the static statistics became NaN")


@pytest.mark.parametrize("turn", ["before", "after", "beside"])
def test_of_the_servers_turn(turn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = whole(tmp_path, method="fixmatch", labels="server", server_turn=turn)
    f.round(0)
    right = find("fixmatch").end

    def end(self: Method, party: Any) -> Update | None:
        return Update(model=party.model.state * INF) if party.is_server else right(self, party)

    monkeypatch.setattr(find("fixmatch"), "end", end)
    fails(f, "the weights of the server became NaN")


@pytest.mark.parametrize("logit", [NAN, INF])
def test_of_the_test(logit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are sound, logits are not: their argmax would be class 0, or whichever overflows."""
    f = set_up(tmp_path, method="fedavg", labels="clients", epochs=1)
    f.round(0)
    logits = torch.zeros(6, 3)
    logits[4, 1] = logit
    monkeypatch.setattr(round_module, "over_ranges", lambda *_: logits)
    fails(f, "the logits of the test set became NaN or infinite")


def test_of_a_local_model_that_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Class accuracies of a client's own model come from its logits alone, without a loss."""
    f = set_up(tmp_path, method="fedavg", labels="clients", epochs=1, measure="prior", eval_every=9)
    f.round(0)
    right, calls = round_module.over_ranges, []

    def infer(*words: Any) -> torch.Tensor:
        calls.append(words)
        return right(*words) * (NAN if len(calls) == 2 else 1.0)  # the server's first

    monkeypatch.setattr(round_module, "over_ranges", infer)
    fails(f, "the logits of the test set became NaN or infinite")


def test_a_class_that_is_ruled_out_is_no_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = set_up(tmp_path, method="fedavg", labels="clients", epochs=1)
    logits = torch.tensor([[0.0, 1.0, -INF]]).repeat(6, 1)  # of the six, two are of class 1 and two of class 2
    monkeypatch.setattr(round_module, "over_ranges", lambda *_: logits)
    row = f.round(0)
    assert row["accuracy"] == pytest.approx(1 / 3) and row["test_loss"] is None


@pytest.mark.parametrize(("moved", "tested", "where"), [
    (1e3, False, "the numbers of the merge"),  # 1e38 times 1000 is infinite, and no test would have seen it
    (1e3, True, "the numbers of the merge"),
    (2.0, True, "the logits of the test set"),  # 2e38 is a number, the sum of many of them is none
    (2.0, False, None),
])  # fmt: skip
def test_the_servers_step(moved: float, tested: bool, where: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = set_up(tmp_path, method="fedavg", labels="clients", epochs=1, server_lr=1e38, eval_every=1 if tested else 9)
    by = [0.0]

    def end(self: Method, party: Any) -> Update:
        return Update(model=party.received["model"].map(lambda t: t + by[0]))

    monkeypatch.setattr(find("fedavg"), "end", end)
    f.round(0)
    by[0] = moved
    if where is None:
        assert f.round(1)["accuracy"] is None
    else:
        assert fails(f, f"{where} became NaN or infinite").remedy.startswith("lower server_lr; ")


def test_a_run_whose_first_round_diverges(fallow_cli: Any) -> None:
    told = fallow_cli("run", "method=fixmatch", "label_count=50", "clients=3", "steps=3", "rounds=1", "server_lr=1e38", "--name", "far")
    assert told.sentence.endswith("became NaN or infinite in round 1; lower server_lr; the rounds before it are kept.")
    assert Path("runs/far/metrics.jsonl").read_text() == "" and not Path("runs/far/checkpoint").exists()


@pytest.mark.parametrize(("keys", "remedy"), [
    ({}, "lower lr, or set clip=1; "), ({"server_momentum": 0.5}, "lower lr or server_momentum, or set clip=1; "),
    ({"server_lr": 2.0}, "lower server_lr; "), ({"server_lr": 2.0, "server_momentum": 0.5}, "lower server_lr or server_momentum; "),
])  # fmt: skip
def test_what_to_try(keys: dict[str, float], remedy: str, tmp_path: Path) -> None:
    f = set_up(tmp_path, method="fedavg", labels="clients", epochs=1, **keys)
    assert f._diverged("x").remedy.startswith(remedy)
    assert f._diverged("x", at_server=False).remedy.startswith("lower lr, or set clip=1; ")


def test_a_log_without_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(self: Method, server: Any, updates: Any) -> None:
        server.log(ratio=NAN, ratios=[1.0, INF])

    def end(self: Method, party: Any) -> Update:
        party.log(own=NAN, other=2.0)
        return Update(model=party.model.state)

    monkeypatch.setattr(find("fedavg"), "merge", merge)
    monkeypatch.setattr(find("fedavg"), "end", end)
    row = set_up(tmp_path, method="fedavg", labels="clients", epochs=1).round(0)
    assert (row["ratio"], row["ratios"], row["own"], row["other"]) == (None, [1.0, None], None, 2.0)
    json.dumps(row, allow_nan=False)


# -- numbers that are too large ------------------------------------------------------------------------------------------
SHORT = TINY | {"rounds": 1, "steps": 1, "clients": 3, "active": 3}
EXTREME: list[tuple[str, Any]] = [
    ("weight_decay", 1e300), ("clip_value", 3.5e38), ("prox", 1e300), ("clip", 1e300), ("view_memory", 1e300),
    ("augment", {"cutout": 10**30}), ("augment", {"cutout": -5}), ("steps", 10**30), ("steps", 10**9), ("epochs", 1e300),
    ("epochs", None), ("batch", 10**30), ("rounds", 2**63), ("eval_batch", 10**30), ("lr", 1e300), ("lr", LARGEST), ("threshold", -1e300),
    ("server_lr", 1e300), ("schedule", "cosine,floor=nan"), ("schedule", "cosine-7-16,turns=1e308"), ("schedule", "cosine,warmup=-inf"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), EXTREME)
def test_too_large(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        fallow.run(out=tmp_path, **SHORT | {"method": "fixmatch", "labels": "clients"} | ({"steps": None} if key == "epochs" else {}) | {key: value})


@pytest.mark.parametrize("value", [1e-300, 1e-45])
@pytest.mark.parametrize("key", ["lr", "clip", "clip_value", "weight_decay", "server_lr", "active", "epochs", "label_ratio", "view_memory"])
def test_tiny_numbers_are_numbers(key: str, value: float, tmp_path: Path) -> None:
    keys = SHORT | {"method": "fedavg", "labels": "clients"} | ({"steps": None} if key == "epochs" else {"label_count": None} if key == "label_ratio" else {})
    try:
        row = fallow.run(out=tmp_path, **keys | {key: value}).metrics[0]
    except UserError:
        return
    json.dumps(row, allow_nan=False)


def test_no_count_is_boundless() -> None:
    """Of every method, every key that takes a whole number."""
    for name in REGISTERED:
        kind = find(name).Options
        for key, field in kind.model_fields.items():
            if "whole number" in takes(field.annotation) and not key.endswith("seed"):
                with pytest.raises((ValueError, UserError), match=r"."):
                    kind(**{key: MOST + 1})
    for section in (f.default for f in Config.model_fields.values() if isinstance(f.default, Section)):
        for key, field in type(section).model_fields.items():
            if "whole number" in takes(field.annotation):
                with pytest.raises((ValueError, UserError), match=r"."):
                    type(section)(**{key: MOST + 1})


def test_an_overflow_in_a_step_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = set_up(tmp_path, method="fedavg", labels="clients", epochs=1)
    f.round(0)
    monkeypatch.setattr(find("fedavg"), "merge", lambda self, server, updates: torch.zeros(2).add_(torch.ones(2), alpha=1e300))
    fails(f, "a number is too large to compute with")


def test_a_log_of_the_engines_own_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Method, s: Any, b: Any) -> None:
        s.log(accuracy=1.0)

    monkeypatch.setattr(find("fedavg"), "supervised", step)
    with pytest.raises(UserError, match="cannot log 'accuracy', a column of every run's metrics; choose another name"):
        set_up(tmp_path, method="fedavg", labels="clients", epochs=1).round(0)
