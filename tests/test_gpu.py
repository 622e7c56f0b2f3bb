"""On CUDA: captured slots equal the eager reference, bit for bit, for every method (`make test-gpu`)."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from fallow import runs
from fallow.data.sources import ImageSet, Source
from fallow.engine.replay import Pool
from fallow.engine.slots import CapturedSlot, Slots
from fallow.methods import REGISTERED, find
from fallow.runs.folder import RunFolder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SMALL = dict(
    clients=6, active=4, rounds=3, batch=8, label_count=60, model="small-cnn", norm="bn", threshold=0.0, lr=0.01,
    checkpoint_every=99, epochs=3, defaults="paper",
)  # fmt: skip


def source() -> Source:
    g = torch.Generator().manual_seed(1)

    def split(n: int) -> ImageSet:
        y = torch.arange(n) % 10
        images = torch.randint(0, 120, (n, 3, 16, 16), dtype=torch.uint8, generator=g)
        images[torch.arange(n), 0, y, :] += 120
        return ImageSet(images, y)

    return Source("cifar10", tuple("0123456789"), split(400), split(100), True)


def run(path: Path, method: str, **keys: Any) -> tuple[dict[str, torch.Tensor], Any]:
    keys = SMALL | {"labels": "clients" if "clients" in find(method).scenarios else "server"} | keys
    if "threshold" not in find(method).Options.model_fields:
        keys.pop("threshold")
    kind, options, data, federation = runs.prepare(None, {"method": method, "device": "cuda", **keys}, source())
    folder = RunFolder.new(path, "run")
    at_work = runs.Run(folder, kind, options, data, federation)
    at_work.go()
    state = at_work.federated.server.model
    return {g: t.cpu() for g, t in state.groups.items()}, at_work


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_validation_equals_the_eager_ones(tmp_path: Path) -> None:
    """Held-out labels, the best round by them and all scores, which deterministic algorithms must be able to make."""
    exact = {"deterministic": True, "precision": "fp32", "validation": 0.2, "checkpoint_every": 1}
    found = []
    for capture in (False, True):
        _, at_work = run(tmp_path, "fixmatch", capture=capture, **exact)
        folder = at_work.folder
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in folder.rows()]
        assert all(0 <= row["validation_accuracy"] <= 1 for row in rows)
        found.append((rows, folder.best.read_bytes(), folder.read_summary()["scores"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("method", REGISTERED)
def test_slots_equal_eager(method: str, tmp_path: Path) -> None:
    exact = {"deterministic": True, "precision": "fp32"}
    eager, reference = run(tmp_path, method, capture=False, **exact)
    one, at_work = run(tmp_path, method, slots=1, **exact)
    many, beside = run(tmp_path, method, slots=8, **exact)
    told = [[{k: v for k, v in row.items() if k != "seconds"} for row in r.folder.rows()] for r in (reference, at_work, beside)]
    assert told[0] == told[1] == told[2]  # what is counted of pseudo-labels, too
    executor = at_work.federated.executor
    assert isinstance(executor, Slots) and sum(len(s.graphs) for s in executor.slots) > 0
    assert same(eager, one)
    assert same(eager, many)


@pytest.mark.parametrize(("method", "keys"), [
    ("fedrgd", {"labels": "server", "server_replicas": "per-group"}),
    ("fixmatch", {"debias": True, "app_u_source": "running"}),
    ("feddb", {"full_batch_chunk": 16, "batch": "full"}),
    ("feddb", {"passes": "joint", "batch": "full"}),
    ("fedloke", {"local_model": "self", "kl_form": "eps", "entropy": 2.0}),
    ("feddure", {"labelled_tail": "wrap", "statistics": "static"}),
    ("fedmatch", {"helper_every": 1, "helper_hold": True, "reading": "released", "validation": 0.3}),
    ("fedmatch", {"labels": "server", "helper_every": 1, "keep_between": "sparse"}),
    ("semifed", {"agreement": "majority", "helper_choice": "nearest", "label_memory": "sticky", "threshold": 0.12}),
    ("fml", {"update": "alternating", "views": "fedloke", "filter": "entropy", "entropy": 2.3, "momentum": 0.9}),
])  # fmt: skip
def test_slots_equal_eager_in_other_readings(method: str, keys: dict[str, Any], tmp_path: Path) -> None:
    exact = {"deterministic": True, "precision": "fp32"} | keys
    assert same(run(tmp_path, method, capture=False, **exact)[0], run(tmp_path, method, slots=8, **exact)[0])


def test_what_the_process_did_before_changes_nothing(tmp_path: Path) -> None:
    """Sums of a gradient's gradient follow numbers that each of autograd's threads gives to the nodes it makes."""
    exact = {"deterministic": True, "precision": "fp32", "capture": False}
    before, _ = run(tmp_path, "feddure", **exact)
    x = torch.ones((), device="cuda", requires_grad=True)
    for _ in range(2000):  # makes some hundred thousand of them in the device's thread
        y = x
        for _ in range(100):
            y = y * x
        torch.autograd.grad(y, x, create_graph=True)
    assert same(before, run(tmp_path, "feddure", **exact)[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("method", "keys"), [
    ("semifl", {"labels": "server"}),
    ("feddb", {"batch": "full", "app_u_batch": 16}),
    ("fixmatch", {"labeller": "local-ema", "average": "dma"}),
])  # fmt: skip
def test_captured_predictions_equal_eager_ones(
    method: str, keys: dict[str, Any], precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several batches each, so that a replay follows while the last one's answer is needed; and in many slots."""
    monkeypatch.setattr("fallow.engine.party.LARGE", 16)
    exact = {"deterministic": True, "precision": precision, "clients": 24, "active": 20, "rounds": 5, "label_count": 120} | keys
    eager, _ = run(tmp_path, method, capture=False, **exact)
    for slots in (2, 20):
        captured, at_work = run(tmp_path, method, slots=slots, **exact)
        assert same(eager, captured)
        slots_made = [s.slot for s in at_work.federated.executor.slots]
        nets = [n for s in slots_made for n in [*s.nets.values(), s._scratch] if n is not None]
        assert any(r._graphs for n in nets for r in n._replayed.values())


# -- what goes wrong ---------------------------------------------------------------------------------------------------
def test_a_spoilt_capture_leaves_the_device_as_it_was() -> None:
    pool, x = Pool(), torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            with pytest.raises(RuntimeError), pool.capturing(torch.cuda.CUDAGraph()):
                x.sum().item()
        graph = torch.cuda.CUDAGraph()
        with pool.capturing(graph):
            y = x + 1
        graph.replay()
    torch.cuda.synchronize()
    assert y.tolist() == [2.0] * 4
    torch.cuda.empty_cache()  # refused while a capture is held to be under way
    assert torch.ones(3).pin_memory().cuda().sum() == 3


def test_out_of_memory_halves_the_slots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a device that torch may use only a part of, which `slots=auto` cannot know.

    Without cuDNN: where it finds no room to work in, torch takes another of its algorithms, which rounds otherwise.
    """
    keys: dict[str, Any] = {"model": "wrn-28-2", "clients": 8, "active": 8, "deterministic": True, "precision": "fp32", "batch": 40}

    def used(slots: int, part: float = 1.0) -> tuple[dict[str, torch.Tensor], int]:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # of the streams of the run before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(part)
        try:
            return run(tmp_path, "fixmatch", slots=slots, **keys)[0], torch.cuda.max_memory_reserved()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    with torch.backends.cudnn.flags(enabled=False):
        (one, least), (many, most) = used(1), used(8)
        assert same(one, many) and most > 1.5 * least
        caplog.clear()
        tight, _ = used(8, (3 * least + most) / 4 / torch.cuda.get_device_properties(0).total_memory)
    assert any(m.startswith("the device is out of memory with") for m in caplog.messages)
    assert same(one, tight)


@pytest.mark.parametrize("method", ["semifl", "fedloke", "feddb"])
def test_a_round_begun_again_after_out_of_memory_is_the_same(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exact = {"deterministic": True, "precision": "fp32"}
    smooth, _ = run(tmp_path, method, **exact)
    plain, steps = CapturedSlot.make, iter(range(10_000))

    def failing(slot: CapturedSlot, step: Any) -> None:
        if next(steps) == 60:
            raise torch.OutOfMemoryError("CUDA out of memory")
        plain(slot, step)

    monkeypatch.setattr(CapturedSlot, "make", failing)
    caplog.clear()
    interrupted, _ = run(tmp_path, method, **exact)
    assert any(m.startswith("the device is out of memory with") for m in caplog.messages)
    assert same(smooth, interrupted)


def test_compiled_slots_learn_alike(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    keys = {"precision": "fp32", "rounds": 4}
    plain, _ = run(tmp_path, "fixmatch", **keys)
    counters.clear()
    compiled, at_work = run(tmp_path, "fixmatch", compile=True, **keys)
    assert any(s.graphs for s in at_work.federated.executor.slots) and counters["stats"]["unique_graphs"] > 0
    torch.testing.assert_close(compiled["parameters"], plain["parameters"], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("method", REGISTERED)
def test_bf16_slots_learn_alike(method: str, tmp_path: Path) -> None:
    exact = {"deterministic": True, "precision": "bf16"}
    eager, _ = run(tmp_path, method, capture=False, **exact)
    many, _ = run(tmp_path, method, slots=8, **exact)
    assert same(eager, many)


def test_bf16_weights_cast_in_one_piece_equal_autocast(tmp_path: Path) -> None:
    from fallow import models
    from fallow.engine.nets import NetHandle

    def autocast() -> Any:
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)

    torch.manual_seed(0)
    module = models.build("wrn-28-2", 10, 3).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    net = NetHandle(models.build("wrn-28-2", 10, 3), torch.device("cuda"), autocast=autocast)
    net.module.load_state_dict(module.state_dict())
    net.touched()
    net.modes.fused = False
    with autocast():
        z = module(x).float()
    ours = net(x)
    assert torch.equal(z, ours)
    grads = torch.autograd.grad(z.square().sum(), [dict(module.named_parameters())[n] for n in net.names])
    mine = net.combine(torch.autograd.grad(ours.square().sum(), net.leaves, allow_unused=True))
    for a, b in zip(grads, mine):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_resume_equals_run_through(tmp_path: Path) -> None:
    import fallow

    keys = SMALL | {"method": "semifl", "labels": "server", "device": "cuda", "deterministic": True}
    through = fallow.run(data=source(), out=tmp_path, **keys)
    stopped = fallow.run(data=source(), out=tmp_path, stop_after=1, **keys)
    runs.resume(stopped.path, source=source())
    assert (through.path / "model.safetensors").read_bytes() == (stopped.path / "model.safetensors").read_bytes()
