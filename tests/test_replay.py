"""Capturing without a GPU: graphs are fakes; what is captured, and what is done where that fails."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_rounds import CLASSES, set_up

from fallow.engine.party import Job, Party
from fallow.engine.replay import Pool, Replayed, complain
from fallow.engine.slot import Slot


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))


def test_a_spoilt_capture_leaves_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may refuse to capture into it again, and to empty its cache while it holds it to be in use."""
    ended: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda number, handle: ended.append(handle), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def invalid() -> None:
        raise RuntimeError("capture was invalidated")

    pool = Pool()
    first = pool.handle
    begun: list[Any] = []
    graph = SimpleNamespace(capture_begin=lambda **keys: begun.append(keys), capture_end=lambda: None)
    with pool.capturing(graph):  # type: ignore[arg-type]
        assert not gc.isenabled()
    assert begun == [{"pool": first, "capture_error_mode": "thread_local"}]
    assert gc.isenabled() and pool.handle is first and not ended
    with pytest.raises(RuntimeError, match="invalidated"), pool.capturing(graph):  # type: ignore[arg-type]
        graph.capture_end = invalid
    assert gc.isenabled() and pool.handle is not first and ended == [first]


def test_without_capture_nothing_is_captured(tmp_path: Path) -> None:
    for capture in (True, False):
        assert set_up(tmp_path / str(capture), capture=capture).kit.net().replayed("running").enabled is capture


# -- captured inference --------------------------------------------------------------------------------------------------
class OnDevice:
    """Looks like a tensor on CUDA as far as `Replayed` asks."""

    is_cuda, dtype = True, torch.float32

    def __init__(self, rows: int):
        self.shape = (rows, 1)

    def copy_(self, other: Any) -> None: ...


class Recorded:
    def replay(self) -> None: ...


def test_what_cannot_be_captured_is_called(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    complain.cache_clear()
    tries: list[int] = []

    def capture(self: Any, x: Any) -> Any:
        tries.append(x.shape[0])
        if x.shape[0] == 7:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return Recorded(), x, "captured"

    monkeypatch.setattr(Replayed, "_capture", capture)
    call = Replayed(lambda x: x.shape[0])
    assert [call(OnDevice(5)) for _ in range(3)] == [5, 5, "captured"]
    assert [call(OnDevice(7)) for _ in range(5)] == [7] * 5 and call(OnDevice(5)) == 5
    assert tries == [5, 7] and not call._graphs
    assert caplog.messages == [
        "inference cannot be captured (operation not permitted when stream is capturing); going on eagerly, which is slower"
    ]


def test_only_recurring_shapes_are_captured_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayed, "_capture", lambda self, x: (Recorded(), x, f"captured {x.shape[0]}"))
    call = Replayed(lambda x: f"called {x.shape[0]}", most=3)
    assert [call(OnDevice(7)) for _ in range(4)] == ["called 7", "called 7", "captured 7", "captured 7"]
    found = [[call(OnDevice(rows)) for _ in range(4)][-1] for rows in (20, 21, 22, 23)]
    assert found == ["captured 20", "captured 21", "called 22", "called 23"]
    assert call(OnDevice(7)) == "captured 7"


def test_inference_out_of_memory_is_the_slots_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")):

        def capture(self: Any, x: Any, error: RuntimeError = error) -> Any:
            raise error

        monkeypatch.setattr(Replayed, "_capture", capture)
        call = Replayed(lambda x: x.shape[0], Pool())
        assert [call(OnDevice(5)) for _ in range(2)] == [5, 5]
        with pytest.raises(RuntimeError, match="out of memory"):
            call(OnDevice(5))
        call = Replayed(lambda x: x.shape[0])  # the server's evaluation: no slots to halve
        assert [call(OnDevice(5)) for _ in range(4)] == [5] * 4 and not call.enabled


def test_a_prediction_is_read_before_the_next_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured net answers in one buffer; predictions in several batches are those of the net itself."""
    f = set_up(tmp_path)
    f.server.draw(0)
    slot = Slot(f.kit)
    slot.load({"model": f.server.model}, {}, 0.0)
    job = Job(0, 0, {"model": f.server.model})
    want = Party(f.simulation.site(0), slot, job).predict(slot.model, Party(f.simulation.site(0), slot, job).unlabelled, batch=3)
    buffer, asked = torch.zeros(3, CLASSES), []

    def replayed(stats: str, **keys: Any) -> Any:
        asked.append((stats, keys))
        return lambda x: buffer[: len(x)].copy_(slot.model(x, stats=stats).detach())

    monkeypatch.setattr(slot.model, "replayed", replayed)
    slot.pool = "pool"
    party = Party(f.simulation.site(0), slot, job)
    assert torch.equal(party.predict(slot.model, party.unlabelled, batch=3), want) and len(want) == 7
    assert asked == [("running", {"pool": "pool", "most": 8})]
    party.predict(slot.model, party.unlabelled, batch=3, stats="batch")
    assert len(asked) == 1  # dropout draws anew in every call, so such calls are made
