"""FixMatch and UDA beyond what holds for every method: the order of the label pass, defaults by scenario."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY

from fallow import models
from fallow.data.samples import Samples
from fallow.engine import eager
from fallow.methods import find
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder
from fallow.runs.settings import resolve


def test_labels_in_eval_mode_come_before_the_training_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6.1: a pass over weak views with the running statistics as they are, then the train pass. UDA's soft targets show
    the statistics; lr 0 leaves only them to move."""
    keys = TINY | {"method": "uda", "norm": "bn", "pseudo_label_mode": "eval", "threshold": 0.0, "steps": 3, "active": 1}
    method, options, source, federation = prepare(None, keys | {"lr": 1e-30, "rounds": 1})
    f = Run(RunFolder(tmp_path), method, options, source, federation).federated
    seen: list[Any] = []
    made = eager.run_step

    def step(slot: Any, step: Any) -> None:
        before = {n: t.clone() for n, t in slot.model.flat.tensors().items()}
        logged = slot.logs.get("loss", torch.zeros(2))[0].item()
        made(slot, step)
        b = step.batch()
        seen.append((before, (b.x.labelled, b.x.y, b.u.weak, b.u.strong), slot.logs["loss"][0].item() - logged))

    monkeypatch.setattr(eager, "run_step", step)
    f.round(0)
    moved = []
    for before, (x, y, weak, strong), loss in seen:
        net = models.build("small-cnn", 10, 1, norm="bn", size=8)
        net.load_state_dict(before, strict=False)
        with torch.no_grad():
            target = (net.eval()(weak) / 0.4).softmax(1)
            z = net.train()(torch.cat([x, strong]))
            zx, zs = z[: len(x)], z[len(x) :]
            want = F.cross_entropy(zx, y) + F.kl_div(zs.log_softmax(1), target, reduction="batchmean")
            late = (net.eval()(weak) / 0.4).softmax(1)
        assert loss == pytest.approx(want.item(), abs=2e-5)
        moved.append((late - target).abs().max().item())
    assert len(seen) == 3 and min(moved) > 1e-3, "labels of the moved statistics would be others"


def test_a_server_is_one_more_party_of_the_mean() -> None:
    for name in ("fixmatch", "uda"):
        weights = {labels: resolve({}, {"method": name, "labels": labels})[1].weights for labels in ("server", "clients", "some")}
        assert weights == {"server": "uniform", "clients": "samples", "some": "samples"}
    assert resolve({}, {"method": "fixmatch", "labels": "server", "weights": "samples"})[1].weights == "samples"


@pytest.mark.parametrize(("norm", "count", "steps"), [("bn", 17, 2), ("sbn", 17, 2), ("gn", 17, 3), ("bn", 18, 3), ("bn", 16, 2), ("bn", 1, 1)])
def test_no_batch_of_one_under_batch_norm(norm: str, count: int, steps: int) -> None:
    """6.2: the last short batch is kept, but for one of a single sample under batch norm."""
    o = find("fedavg").Options(norm=norm)
    party = SimpleNamespace(labelled=Samples.of(np.arange(count), np.zeros(count)), batch=8, epochs=1, steps=None)
    plan = find("fedavg")(o, 10).plan(party, {})
    assert len(plan) == steps and plan.segments[0].streams["x"].sizes(steps) == [8] * (count // 8) + [count % 8] * (steps - count // 8)
