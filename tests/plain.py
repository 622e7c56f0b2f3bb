"""A round again in plain torch: the batches that a method's steps had, and nets of the same weights.

Learning rates are stored in float32, so tests take powers of two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from torch import nn

from fallow import models
from fallow.engine.round import Federated
from fallow.methods import find
from fallow.methods.state import State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder


def federated(path: Path, name: str, **keys: Any) -> Federated:
    method, options, source, federation = prepare(None, TINY | {"method": name} | keys)
    path.mkdir(parents=True, exist_ok=True)
    return Run(RunFolder(path), method, options, source, federation).federated


def watched(monkeypatch: pytest.MonkeyPatch, name: str, *steps: str) -> dict[int, list[Any]]:
    """The batches of each party's steps (the server: -1), filled while rounds are made in one slot."""
    kind, seen, at_work = find(name), dict[int, list[Any]](), [0]
    plan = kind.plan

    def planned(self: Any, party: Any, found: Any) -> Any:
        at_work[0] = -1 if party.is_server else party.id
        return plan(self, party, found)

    def noted(made: Any) -> Any:
        def step(self: Any, s: Any, b: Any) -> None:
            seen.setdefault(at_work[0], []).append(b)
            made(self, s, b)

        return step

    monkeypatch.setattr(kind, "plan", planned)
    for step in steps:
        monkeypatch.setattr(kind, step, noted(getattr(kind, step)))
    return seen


def net_of(state: State, norm: str = "gn") -> nn.Module:
    """A net with these weights, to be trained by torch alone."""
    net = models.build("small-cnn", 10, 1, norm=norm, size=8)
    net.load_state_dict(dict(state.tensors()), strict=False)
    return net.train()


def sgd(net: nn.Module, lr: float, weight_decay: float = 0.0, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0, weight_decay=weight_decay)


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def weights_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in net.named_parameters()}


def close(found: State, wanted: dict[str, torch.Tensor]) -> None:
    """Two derivations of the same weights, in float64."""
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def mean_of(several: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {n: torch.stack([w[n] for w in several]).mean(0) for n in several[0]}
