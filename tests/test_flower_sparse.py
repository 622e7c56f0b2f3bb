"""Sparse messages between server and nodes: only what changed travels, and it arrives as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import TINY, rows, weights

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fallow[flower]')")

from flower_grid import Deployed
from flwr.app import Message

import fallow
from fallow import models
from fallow.flower import traffic
from fallow.flower.exchange import from_records
from fallow.flower.messages import Unreadable
from fallow.flower.thin import thinned, whole
from fallow.methods.sparse import Sparse
from fallow.methods.state import State


@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_what_hardly_changed_does_not_travel(norm: str, tmp_path: Path) -> None:
    """The bytes of a round's messages are those that the metrics count, but for the zeros between the tensors of a whole State."""
    keys = TINY | {"clients": 3, "active": 3, "steps": 1, "rounds": 3, "method": "fedmatch", "keep_between": "sparse", "helper_every": 1, "norm": norm}
    reference = fallow.run(out=tmp_path, name="simulated", quiet=True, **keys).path
    there, ways = Deployed(tmp_path / "federation", keys), list[dict[str, int]]()
    one = State.of(models.build(there.options.model, 10, 1, norm=there.options.norm, size=8))
    zeros = sum(t.nbytes for t in one.groups.values()) - one.nbytes

    def bytes_of(message: Message, way: str, start: str) -> int:
        found = [i for i in traffic.items(way, "train", from_records(message.content)) if i.name.startswith(start)]
        return sum(i.bytes - zeros * i.name.endswith(".parameters") for i in found)

    def altered(order: Message, reply: Message) -> Message:
        if order.metadata.message_type == "train":
            ways.append({"bytes_down": bytes_of(order, "down", "message."), "bytes_up": bytes_of(reply, "up", "reply.update.")})
        return reply

    there.grid.altered = altered
    path = there.go(there.begin(reference)).path
    assert weights(path) == weights(reference)
    assert [[row[k] for k in ways[0]] for row in rows(path)] == [[sum(w[k] for w in ways[r : r + 3]) for k in ways[0]] for r in (0, 3, 6)]
    assert rows(path)[1]["bytes_down"] < rows(path)[0]["bytes_down"] and len(ways) == 9


def test_changes_are_put_upon_nothing_else() -> None:
    old = State.of(torch.nn.Linear(50, 3))
    new = old.clone()
    new["weight"][0, :3] += 1
    thin = thinned({"a": [Sparse(new, old)]})
    assert thin["a"][0]["sparse"].nbytes == Sparse(new, old).nbytes < 100
    found = whole(thin, [new, old, 3])["a"][0]
    assert all(torch.equal(found.groups[g], t) for g, t in new.groups.items()) and found.changed.tolist() == [3, 0]
    with pytest.raises(Unreadable, match="changes of a net that is not there"):
        whole(thin, [new])
    for bad in (thin["a"][0]["sparse"][:-1], torch.full((30,), 2, dtype=torch.uint8), None):
        with pytest.raises(Unreadable, match="its changes do not fit"):
            whole({"sparse": bad, "of": thin["a"][0]["of"]}, [old])
