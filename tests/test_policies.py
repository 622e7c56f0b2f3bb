"""What becomes of batch norm's running statistics, policy by policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fallow.engine.policies import POLICIES, STATIC, policy_of
from fallow.methods.base import Update, Updates
from fallow.methods.state import State


def model(mean: float, norm: bool = True) -> State:
    net = nn.Sequential(nn.Linear(2, 3), *([nn.BatchNorm1d(3)] if norm else []))
    if norm:
        nn.init.constant_(net[1].running_mean, mean)  # type: ignore[arg-type]
    return State.of(net)


def up(client: int | None, mean: float) -> Update:
    update = Update(model=model(mean))
    update.client = client
    return update


@pytest.mark.parametrize(("norm", "statistics", "name"), [
    ("bn", "average", "average"), ("bn", "server", "server"), (None, "static", "static"), ("gn", "batch", "batch"),
    ("sbn", "average", "static"), ("bn-batch", "server", "batch"),
])  # fmt: skip
def test_two_norms_are_short_for_a_policy(norm: str | None, statistics: str, name: str) -> None:
    assert policy_of(norm, statistics).name == name


def test_what_moves_travels() -> None:
    assert {n: (p.updates_running, p.has_running, "statistics" in p.travels(model(1.0))) for n, p in POLICIES.items()} == {
        "average": (True, True, True), "server": (True, True, True), "static": (False, True, False), "batch": (False, False, False),
    }  # fmt: skip


@pytest.mark.parametrize(("updates", "wanted"), [([up(None, 5.0), up(0, 1.0), up(1, 2.0)], 5.0), ([up(0, 1.0), up(1, 2.0)], 7.0)])
def test_the_servers_own_take_the_place_of_everyones(updates: list[Update], wanted: float) -> None:
    """Those that it has trained beside the clients, or that it had sent."""
    for name in ("average", "server"):
        some = Updates(u for u in updates)
        before = [float(u["model"]["1.running_mean"][0]) for u in some]
        POLICIES[name].merge(some, model(7.0))
        assert [float(u["model"]["1.running_mean"][0]) for u in some] == (before if name == "average" else [wanted] * len(some))


def test_static_ones_are_made_for_a_model_that_has_none() -> None:
    whole, plain = model(1.0), model(0.0, norm=False)
    bare = whole.only("parameters")
    assert STATIC.lacks(bare, whole.layout) and not STATIC.lacks(whole, whole.layout)
    assert not STATIC.lacks(plain, whole.layout) and not STATIC.lacks(plain.only("parameters"), plain.layout)  # another net; no norms
    assert not STATIC.lacks(torch.zeros(3), whole.layout)
    assert not any(p.lacks(bare, whole.layout) for p in POLICIES.values() if p is not STATIC)


def test_those_of_the_active_clients_are_made_anew_each_round() -> None:
    whole = model(1.0)
    for name, policy in POLICIES.items():
        for whose in ("all", "active", "server"):
            assert ("statistics" in policy.begin(whole, whose)) is not (name == "static" and whose == "active")
