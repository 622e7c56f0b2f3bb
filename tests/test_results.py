"""What a run gives back, and the newcomer's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, few_digits

import fallow
from fallow import runs
from fallow.data import sources
from fallow.engine import feed


@pytest.mark.parametrize("keys", [{"norm": "gn"}, {"norm": "bn"}, {"norm": "bn-batch"}, {"norm": "sbn", "eval_every": 2}])
def test_the_model_that_comes_back_is_the_one_evaluated(keys: dict[str, Any], tmp_path: Path) -> None:
    result = fallow.run(out=tmp_path, **TINY | {"method": "fedavg", "rounds": 3, "labels": "clients", "lr": 0.1} | keys)
    test = few_digits().test
    x = (test.images.float() / 255 - 0.5) / 0.5
    with torch.no_grad():
        label = torch.cat([result.model()(part) for part in x.split(250)]).argmax(1)
    assert float((label == test.labels).double().mean()) == pytest.approx(result.accuracy, abs=1e-9)


def test_the_servers_last_turn_has_draws_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, original = [], feed.steps
    monkeypatch.setattr(feed, "steps", lambda site, plan, key, numbers: (keys.append(key), original(site, plan, key, numbers))[1])
    fallow.run(out=tmp_path, **TINY | {"method": "fedavg", "labels": "server", "server_turn": "before+last", "rounds": 1})
    assert len(set(keys)) == len(keys)


def test_a_key_does_not_make_the_newcomers_run_another() -> None:
    plain, seeded = (runs.prepare(None, given)[1] for given in ({}, {"seed": 1, "rounds": 3}))
    changed = {k for k, v in plain.model_dump().items() if getattr(seeded, k) != v and k not in ("image", "augment")}
    assert changed == {"seed", "rounds"} and plain.augment == seeded.augment


def test_other_data_than_a_run_was_begun_with(tmp_path: Path) -> None:
    stopped = fallow.run(out=tmp_path, stop_after=1, **TINY | {"method": "fedavg", "labels": "clients", "rounds": 2})
    source = few_digits()
    other = sources.Source(source.name, source.classes, sources.ImageSet(source.train.images, source.train.labels.flip(0)), source.test, source.flip)
    with pytest.raises(fallow.UserError, match="the training labels are not as when the run was begun"):
        fallow.resume(stopped.path, source=other)
