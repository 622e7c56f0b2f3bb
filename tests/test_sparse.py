"""Messages of which only what changed travels: their bytes are those that are made, and they arrive as they were sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, rows, same
from torch import nn

from fallow.config import Config
from fallow.engine.keep import Keep
from fallow.engine.pack import pack, unpack
from fallow.engine.server import Pool
from fallow.errors import UserError
from fallow.methods import find
from fallow.methods.base import Method, Net, Update
from fallow.methods.sparse import Sparse, decoded, encoded
from fallow.methods.state import State
from fallow.runs import Run, prepare
from fallow.runs.folder import RunFolder


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 7))


def changed(old: State, share: float, seed: int) -> State:
    """Some numbers of each tensor replaced, in every group."""
    new, draw = old.clone(), torch.Generator().manual_seed(seed)
    for t in new.tensors().values():
        mask = torch.rand(t.shape, generator=draw) < share
        t.copy_(torch.where(mask, t + 1, t))
    return new


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.9, 1.0])
def test_bytes_are_those_that_are_made_and_arrive(share: float) -> None:
    old = State.of(model())
    new = changed(old, share, round(100 * share))
    sparse, data = Sparse(new, old), encoded(new, old)
    assert sparse.nbytes == sparse.clone().nbytes == len(data) <= new.nbytes + 5 * len(new.tensors())
    arrived = decoded(data, old)
    assert all(torch.equal(arrived.groups[g], new.groups[g]) for g in new.groups)
    if not share:
        assert len(data) == 5 * len(new.tensors())


def test_the_worked_count() -> None:  # psi 4 of 6, sigma 6 of 6
    old = State.of(nn.Linear(2, 3, bias=False))
    new = old.clone()
    new["weight"].view(-1)[:4] += 1
    assert Sparse(new, old).nbytes == len(encoded(new, old)) == 22
    new["weight"].view(-1)[4:] -= 1
    assert Sparse(new, old).nbytes == len(encoded(new, old)) == 29


def test_what_is_not_there_to_compare_with_travels_whole() -> None:
    whole = State.of(model())
    alone = Sparse(whole.only("statistics"), whole.only("parameters"))
    assert alone.nbytes == sum(5 + 4 * e.numel for e in whole.layout.entries if e.group == "statistics")


def test_among_ranks_it_stays_sparse() -> None:
    layouts = {"model": State.of(model()).layout}
    old = State.of(model(), layouts["model"])
    sparse = Sparse(changed(old, 0.1, 0), old)
    shape, tensors = pack({"psi": sparse}, layouts)
    found = unpack(shape, tensors, layouts, "cpu")["psi"]
    assert isinstance(found, Sparse) and found.nbytes == sparse.nbytes
    assert all(torch.equal(found.groups[g], sparse.groups[g]) for g in sparse.groups)


# -- a method that uses what the server has of each client -----------------------------------------------------------------
class Passing(Method):
    """Each client gets the model that the client before it has sent last, if any, and sends of its own what changed."""

    def down(self, server: Any, client: int) -> dict[str, Any]:
        other = [k for k in server.pool if k != client][:1]
        helped = {"helper": server.pool[other[0]]["model"]} if other else {}
        return super().down(server, client) | helped

    def end(self, party: Any) -> Update:
        party.log(helped=float("helper" in party.received))
        return Update(model=Sparse(party.model.state, party.received["model"]))

    def merge(self, server: Any, updates: Any) -> None:
        super().merge(server, updates)
        shape = server.image_shape
        z = server.predict(server.model, torch.full((2, *shape), 100, dtype=torch.uint8))
        assert z.shape == (2, 10) and torch.equal(z[0], z[1])
        for u in updates:
            server.pool[u.client] = {"model": u["model"]}


KEYS = TINY | {"method": "fedavg", "rounds": 3, "norm": "none"}


def at_work(path: Path, kind: type[Method] = Passing, **keys: Any) -> Run:
    _, options, source, federation = prepare(None, KEYS | keys)
    path.mkdir(parents=True, exist_ok=True)
    return Run(RunFolder(path), kind, options, source, federation)


def test_the_pool_lasts_as_the_run_does(tmp_path: Path) -> None:
    through = at_work(tmp_path / "through").go().path
    at_work(tmp_path / "stopped").go(stop_after=1)
    again = at_work(tmp_path / "stopped")
    again.restore()
    assert len(list(again.federated.server.pool)) == 2
    again.go()
    same(through, tmp_path / "stopped")
    assert any(name.name.startswith("pool-") for name in (through / "keep").iterdir())
    helped = [r["helped"] for r in rows(through)]
    assert helped[0] == 0 < helped[-1]


def test_a_round_that_fails_leaves_the_pool(tmp_path: Path) -> None:
    f = at_work(tmp_path).federated
    f.round(0)
    before = {k: f.server.pool[k]["model"].clone() for k in f.server.pool}

    def fails() -> None:
        raise InterruptedError

    f.finishing = fails
    with pytest.raises(InterruptedError):
        f.round(1)
    f.finishing = lambda: None
    f.server.pool.new = {}
    assert sorted(f.server.pool) == sorted(before)
    assert all(torch.equal(f.server.pool[k]["model"].groups["parameters"], before[k].groups["parameters"]) for k in before)


def test_what_is_in_the_pool_is_told_when_it_is_damaged(tmp_path: Path) -> None:
    layouts = {"model": State.of(model()).layout}
    keep = Keep(tmp_path, 0.0, layouts, torch.device("cpu"))
    pool = Pool(keep, Config(clients=20))
    pool[3] = {"model": State.of(model(), layouts["model"])}
    pool[12] = {"model": State.of(model(), layouts["model"])}
    pool.settle(1)
    index = keep.commit()
    assert list(index) == ["pool-12", "pool-3"] and list(pool) == [3, 12] and 4 not in pool
    keep.restore(index, keep.digests())
    (tmp_path / "pool-3-1.safetensors").write_bytes(b"?")
    with pytest.raises(UserError, match="what the server has of client 3 is damaged"):
        pool[3]
    with pytest.raises(KeyError, match="nothing of client 4"):
        pool[4]


def test_a_net_that_names_its_start_does_not_get_another(tmp_path: Path) -> None:
    class Helped(Method):
        def holds(self) -> dict[str, Any]:
            return {"model": Net(), "helper": Net(start="helper", train=False)}

    with pytest.raises(UserError, match="the net 'helper' starts from 'helper', which this message does not have; it has model"):
        at_work(tmp_path, Helped).federated.round(0)


def test_a_net_has_optimiser_keys_of_its_own(tmp_path: Path) -> None:
    class Two(find("fedavg")):  # type: ignore[misc]
        def holds(self) -> dict[str, Any]:
            return {"model": Net(), "plain": Net(options={"momentum": 0.0, "weight_decay": 0.5, "clip": None})}

        def supervised(self, s: Any, b: Any) -> None:
            for net in (s.model, s.plain):
                s.descend(nn.functional.cross_entropy(net(b.x.labelled), b.x.y), net)

        def end(self, party: Any) -> Update:
            return Update(model=party.plain.state)

    one = at_work(tmp_path / "1", Two, momentum=0.9, clip=1e-3).federated
    other = at_work(tmp_path / "2", find("fedavg"), momentum=0.0, weight_decay=0.5).federated
    one.round(0)
    other.round(0)
    assert torch.equal(one.server.model.groups["parameters"], other.server.model.groups["parameters"])

    class Wrong(find("fedavg")):  # type: ignore[misc]
        def holds(self) -> dict[str, Any]:
            return {"model": Net(options={"lr": 1.0})}

    with pytest.raises(UserError, match="'lr'; its own can be optimizer, momentum"):
        at_work(tmp_path / "3", Wrong).federated.round(0)
