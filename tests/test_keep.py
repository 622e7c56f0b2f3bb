"""What clients keep: in memory up to a budget, then in files; committed as a whole, whole after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fallow.engine.keep import Keep
from fallow.errors import UserError
from fallow.methods.state import State

CPU = torch.device("cpu")


def model(value: float) -> State:
    net = nn.Linear(4, 4)
    state = State.of(net)
    state.groups["parameters"].fill_(value)
    return state


LAYOUTS = {"model": model(0).layout}


def keep(folder: Path, budget: float = 1e9) -> Keep:
    return Keep(folder, budget, LAYOUTS, CPU)


def record(value: float) -> dict[str, Any]:
    return {"personal": model(value), "prior": torch.full((3,), value), "model/optimizer": {"momentum": torch.full((2,), -value)}}


def value(k: Keep, client: int) -> float:
    found = k.read(client)
    values = {float(found["personal"]["bias"][0]), float(found["prior"][0]), -float(found["model/optimizer"]["momentum"][0])}
    assert len(values) == 1  # never half of one record and half of another
    return values.pop()


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def test_clients_that_never_took_part_cost_nothing(tmp_path: Path) -> None:
    k = keep(tmp_path / "keep")
    assert k.read(99_999) == {} and k.commit() == {} and not files(tmp_path / "keep")
    k.write({3: {}}, 1)  # nor does one that keeps nothing
    assert k.commit() == {} and not files(tmp_path / "keep")


def test_versions(tmp_path: Path) -> None:
    k = keep(tmp_path)
    k.write({1: record(1.0), 2: record(2.0)}, 1)
    assert not files(tmp_path)  # memory is enough until a checkpoint
    assert k.commit() == {"1": 1, "2": 1}
    k.clean()
    assert files(tmp_path) == ["1-1.safetensors", "2-1.safetensors"]
    k.write({2: record(2.5)}, 2)
    assert value(k, 1) == 1.0 and value(k, 2) == 2.5
    assert k.commit() == {"1": 1, "2": 2}
    assert files(tmp_path) == ["1-1.safetensors", "2-1.safetensors", "2-2.safetensors"]  # both until the index is committed
    k.clean()
    assert files(tmp_path) == ["1-1.safetensors", "2-2.safetensors"]


def test_a_crash_leaves_the_old_version(tmp_path: Path) -> None:
    k = keep(tmp_path)
    k.write({1: record(1.0), 2: record(2.0)}, 1)
    index = k.commit()
    k.clean()
    k.write({1: record(1.5), 3: record(3.5)}, 2)
    k.commit()  # and the process dies before the checkpoint takes note of it
    (tmp_path / ".1-3.safetensors.part").write_bytes(b"half a record")
    after = keep(tmp_path)
    after.restore(index)
    assert (value(after, 1), value(after, 2), after.read(3)) == (1.0, 2.0, {})
    assert files(tmp_path) == ["1-1.safetensors", "2-1.safetensors"]
    k.restore(index)  # so in the same process
    assert value(k, 1) == 1.0


def test_the_budget(tmp_path: Path) -> None:
    one = 20 * 4 + 3 * 4 + 2 * 4
    k = keep(tmp_path, budget=2 * one)
    k.write({c: record(float(c)) for c in range(5)}, 1)
    assert len(k._memory) == 2 and k._bytes == 2 * one
    assert files(tmp_path) == [f"{c}-1.safetensors" for c in range(3)]  # the oldest went to disk
    assert [value(k, c) for c in range(5)] == [0, 1, 2, 3, 4]
    k.write({0: record(10.0)}, 2)
    assert value(k, 0) == 10.0 and value(k, 4) == 4.0
    assert k.commit() == {"0": 2, "1": 1, "2": 1, "3": 1, "4": 1}
    k.clean()
    again = keep(tmp_path, budget=0)
    again.restore({"0": 2, "1": 1, "2": 1, "3": 1, "4": 1})
    assert [value(again, c) for c in (0, 1, 0, 3)] == [10, 1, 10, 3] and len(again._memory) == 1


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    k = keep(tmp_path)
    torch.manual_seed(0)
    noise = {"personal": State(LAYOUTS["model"], {"parameters": torch.randn(20)}), "step": torch.tensor(7.0), "count": torch.tensor([2**40])}
    k.write({0: noise}, 1)
    index = k.commit()
    back = keep(tmp_path)
    back.restore(index)
    found = back.read(0)
    assert torch.equal(found["personal"].groups["parameters"], noise["personal"].groups["parameters"])
    assert found["step"].item() == 7 and found["count"].item() == 2**40 and found["step"].shape == ()


@pytest.mark.parametrize("data", [b"", b"garbage", None])
def test_a_damaged_record(data: bytes | None, tmp_path: Path) -> None:
    k = keep(tmp_path)
    k.write({7: record(1.0)}, 1)
    index = k.commit()
    path = tmp_path / "7-1.safetensors"
    path.unlink() if data is None else path.write_bytes(data)
    after = keep(tmp_path)
    after.restore(index)
    with pytest.raises(UserError, match=r"7-1.safetensors.*; restore the file, or start the run again"):
        after.read(7)
