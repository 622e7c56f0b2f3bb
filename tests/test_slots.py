"""Slots without a GPU: CUDA's streams are fakes that do nothing, a captured step is one made again on its own buffers."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import same
from test_methods import METHODS, reference, settings

import fallow
from fallow import machine
from fallow.engine import round as round_module
from fallow.engine import slots as module
from fallow.engine.feed import Step
from fallow.engine.memory import out_of_memory, too_little
from fallow.engine.party import run_step
from fallow.engine.replay import complain
from fallow.engine.round import Federated
from fallow.engine.slot import Slot
from fallow.engine.slots import CapturedSlot, Graph, Slots, steps_before_next_party
from fallow.errors import UserError
from fallow.machine import device_of
from fallow.methods import find
from fallow.runs import at_work

GIB = 2**30
OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    RuntimeError("CUDA error: out of memory"),
)


class Stream:
    """Remembers what it waited for."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)

    def synchronize(self) -> None: ...


class Device:
    """What the slots ask of a device: how much memory is free, of which each slot takes some."""

    def __init__(self) -> None:
        self.total, self.each, self.main = 100 * GIB, 0, Stream()
        self.executors: list[Slots] = []

    def reserved(self) -> int:
        return sum(len(e.slots) for e in self.executors) * self.each + GIB


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    fakes = dict(
        Stream=Stream, stream=lambda s: nullcontext(), current_stream=lambda: device.main, graph_pool_handle=object,
        memory_reserved=device.reserved, mem_get_info=lambda: (device.total - device.reserved(), device.total),
        synchronize=lambda: None, empty_cache=lambda: None,
    )  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def captured(self: CapturedSlot, step: Step) -> Graph:
        own = Step(
            step.function,
            {k: t.clone() for k, t in step.tensors.items()},
            step.absent,
            {k: t.clone() for k, t in step.numbers.items()},
        )

        def replay() -> None:
            run_step(self.slot, own)
            graph.read = own.read()  # as after a capture: what the step does not look at stays as it was

        graph = Graph(SimpleNamespace(replay=replay), own, list(own.tensors))  # type: ignore[arg-type]
        return graph

    def executor(sites: Any) -> Slots:
        device.executors.append(Slots(sites))
        return device.executors[-1]

    monkeypatch.setattr(CapturedSlot, "_captured", captured)
    monkeypatch.setattr(at_work, "Eager", executor)
    return device


# -- the same bits -----------------------------------------------------------------------------------------------------
@pytest.fixture
def plain(name: str) -> Path:
    """Asked for before `device`, so made without it."""
    return reference(name, sorted(find(name).scenarios)[0])


@pytest.mark.parametrize("name", METHODS)
def test_slots_are_the_plain_path(name: str, plain: Path, tmp_path: Path, device: Device) -> None:
    for slots in (1, 10):
        same(fallow.run(out=tmp_path, **settings(name, sorted(find(name).scenarios)[0], slots=slots)).path, plain)
    one, ten = device.executors
    assert len(one.slots) == 1 < len(ten.slots)
    assert any(s.graphs for s in one.slots)


MANY: dict[str, Any] = settings("fixmatch", "clients", clients=9, active=9, slots="auto")


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """The same without slots."""
    return fallow.run(out=tmp_path, **MANY).path


def test_a_slot_that_is_done_takes_the_next_client(many: Path, tmp_path: Path, device: Device) -> None:
    for slots in (1, 2, 4, "auto"):
        same(fallow.run(out=tmp_path, **MANY | {"slots": slots}).path, many)
    assert [len(e.slots) for e in device.executors] == [1, 2, 4, 9]
    assert all(s.uses for e in device.executors for s in e.slots)


def test_streams_wait_for_each_other(tmp_path: Path, device: Device) -> None:
    """A slot's for what was made on the main one before it, twice (made, and the second round); and the other way round."""
    fallow.run(out=tmp_path, **MANY | {"slots": 3})
    streams = [s.stream for s in device.executors[0].slots]
    assert [s.waited for s in streams] == [[device.main] * 2] * 3
    assert device.main.waited == streams * 2


def test_the_slot_that_was_free_for_longest_is_next(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of two steps end at once; one stream for all of them would leave the others without work."""
    taken: list[int] = []
    load = Slot.load

    def loads(self: Slot, *args: Any) -> None:
        taken.append([s.slot for s in device.executors[0].slots].index(self))
        load(self, *args)

    monkeypatch.setattr(Slot, "load", loads)
    fallow.run(out=tmp_path, **MANY | {"slots": 3})
    assert taken == [0, 1, 2] * 6


def test_a_client_whose_sizes_are_its_own_goes_back_to_a_slot_that_has_their_graphs(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first client of a round finds all slots free. Few graphs are kept, so some are there no more."""
    rounds: set[int] = set()
    begun: list[tuple[int, list[int]]] = []  # per round: the slot of the first step, and those that have a graph of it
    work, make = module.work, CapturedSlot.make

    def works(site: Any, slot: Slot, job: Any) -> Any:
        rounds.add(job.round)
        return work(site, slot, job)

    def makes(self: CapturedSlot, step: Step) -> None:
        if len(begun) < len(rounds):
            slots = device.executors[0].slots
            begun.append((slots.index(self), [k for k, s in enumerate(slots) if step.signature() in s.graphs]))
        make(self, step)

    monkeypatch.setattr(module, "work", works)
    monkeypatch.setattr(CapturedSlot, "make", makes)
    monkeypatch.setattr(module, "MOST_GRAPHS", 9)
    monkeypatch.setattr(module, "LEAST_GRAPHS", 1)
    uneven = {"unlabelled_batch": "match-steps", "unlabelled_partition": "dirichlet-capped:0.5,min_size=2"}
    fallow.run(out=tmp_path, **MANY | uneven | {"active": 3, "rounds": 24})
    known = [(slot, have) for slot, have in begun if have]
    assert len(begun) == 24 and all(slot in have for slot, have in known)
    assert len({slot for slot, _ in known}) > 1 and max(len(s.graphs) for s in device.executors[0].slots) == 3


def test_no_second_slot_before_the_first_has_made_a_step(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for the device nothing is known of what a slot takes."""
    steps, work = [], module.work

    def waits(*args: Any) -> Any:
        waiting = iter([False] * 40)
        yield SimpleNamespace(query=lambda: next(waiting, True))
        steps.append(len(device.executors[0].slots))
        return (yield from work(*args))

    monkeypatch.setattr(module, "work", waits)
    fallow.run(out=tmp_path, **MANY | {"rounds": 1})
    assert steps[0] == 1 and len(device.executors[0].slots) == 9


# -- memory ------------------------------------------------------------------------------------------------------------
def test_as_many_slots_as_there_is_memory_for(many: Path, tmp_path: Path, device: Device) -> None:
    """Of 100 GiB one is in use and 20 go to each slot; with three 39 are left, less than twice that."""
    device.each = 20 * GIB
    same(fallow.run(out=tmp_path, **MANY).path, many)
    device.each, device.total = 0, GIB + GIB // 50  # a fiftieth is left
    same(fallow.run(out=tmp_path, **MANY).path, many)
    assert [len(e.slots) for e in device.executors] == [3, 1]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["allocator", "driver"])
def test_out_of_memory_halves_the_slots_and_goes_on(
    error: RuntimeError, many: Path, tmp_path: Path, device: Device, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a round, whose clients begin again."""
    make, made = CapturedSlot.make, []

    def failing(self: CapturedSlot, step: Step) -> None:
        made.append(step)
        if len(device.executors[-1].slots) > 4 and len(made) > 20:
            raise error
        make(self, step)

    monkeypatch.setattr(CapturedSlot, "make", failing)
    same(fallow.run(out=tmp_path, **MANY).path, many)
    assert 1 < len(device.executors[-1].slots) <= 4 and device.executors[-1].kit.finished == 9
    assert caplog.messages[0].startswith("the device is out of memory with ") and len(caplog.messages) == 1


def test_out_of_memory_with_one_slot_ends_the_run(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: CapturedSlot, step: Step) -> None:
        raise OUT_OF_MEMORY[0]

    monkeypatch.setattr(CapturedSlot, "make", failing)
    with pytest.raises(UserError, match="out of memory with a single slot"):
        fallow.run(out=tmp_path, **MANY | {"slots": 1})


def test_a_slot_that_cannot_be_made_is_done_without(
    many: Path, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    init = CapturedSlot.__init__

    def failing(self: CapturedSlot, *given: Any) -> None:
        if device.executors[-1].slots:
            raise OUT_OF_MEMORY[0]
        init(self, *given)

    monkeypatch.setattr(CapturedSlot, "__init__", failing)
    same(fallow.run(out=tmp_path, **MANY).path, many)
    assert caplog.messages == ["the device is out of memory with 2 slots; going on with 1"]


@pytest.mark.parametrize("where", ["test_logits", "_for_use", "_updates"])
def test_out_of_memory_beside_the_parties_work_begins_the_round_again(
    where: str, many: Path, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    plain = getattr(Federated, where)

    def failing(self: Federated, *given: Any) -> Any:
        if device.executors and len(device.executors[-1].slots) > 4:
            raise OUT_OF_MEMORY[1]
        return plain(self, *given)

    monkeypatch.setattr(Federated, where, failing)
    same(fallow.run(out=tmp_path, **MANY).path, many)
    assert caplog.messages == ["the device is out of memory with 9 slots; going on with 4"]


def test_out_of_memory_in_the_servers_turn_keeps_count_of_the_clients(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, failed = Slots._run, []

    def failing(self: Slots, jobs: Any) -> Any:
        if jobs[0].party < 0 and not failed:
            failed.append(jobs)
            raise OUT_OF_MEMORY[0]
        return plain(self, jobs)

    monkeypatch.setattr(Slots, "_run", failing)
    fallow.run(out=tmp_path, **settings("semifl", "server", clients=4, active=4, rounds=1, slots=4))
    assert failed and device.executors[-1].kit.finished == 4


def test_one_slot_makes_room_for_the_end(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Static statistics do not fit beside it, but the run's model gets them when it is given up."""
    plain = round_module.static

    def failing(*given: Any) -> Any:
        if device.executors[-1].slots:
            raise OUT_OF_MEMORY[0]
        return plain(*given)

    monkeypatch.setattr(round_module, "static", failing)
    keys = settings("semifl", "server", clients=4, active=2, rounds=4, eval_every=4, slots=1)
    with pytest.raises(UserError, match="out of memory with a single slot"):
        fallow.run(out=tmp_path, name="short", **keys)
    assert json.loads((tmp_path / "short" / "summary.json").read_text())["status"] == "failed"
    assert (tmp_path / "short" / "model.safetensors").exists()


def test_out_of_memory_without_slots_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Federated, state: Any) -> Any:
        raise OUT_OF_MEMORY[0]

    monkeypatch.setattr(Federated, "test_logits", failing)
    with pytest.raises(UserError, match="the device is out of memory; take smaller batches"):
        fallow.run(out=tmp_path, **MANY)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["allocator", "driver"])
def test_out_of_memory_with_the_images_is_one_sentence(error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = torch.Tensor.to

    def failing(self: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        if self.dtype == torch.uint8 and given == (torch.device("cpu"),):
            raise error
        return to(self, *given, **more)

    monkeypatch.setattr(torch.Tensor, "to", failing)
    with pytest.raises(UserError, match=r"out of memory already with the images, 0.0 GiB; make them smaller"):
        fallow.run(out=tmp_path, **MANY)


def test_who_else_holds_the_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 GiB, 20 are ours and 1 is CUDA's; a tenth is worth a word."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 * GIB)
    for free, said in ((9, True), (68, True), (70, False), (79, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free * GIB, 100 * GIB))
        assert ("other processes hold" in str(too_little())) is said
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 * GIB, 100 * GIB))
    assert str(too_little(" with a single slot")) == (
        "the device is out of memory with a single slot, and other processes hold 70 GiB of it; wait for them, choose another "
        "device, or take smaller batches or a smaller model; the rounds before are kept."
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (_ for _ in ()).throw(OUT_OF_MEMORY[1]))
    assert "other" not in str(too_little())


def test_other_errors_are_not_taken_for_it(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: CapturedSlot, step: Step) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(CapturedSlot, "make", failing)
    with pytest.raises(RuntimeError, match="shapes do not match") as error:
        fallow.run(out=tmp_path, **MANY)
    assert re.fullmatch(r"in `step` of \w+, client \d, round 1, step 1", error.value.__notes__[0])
    assert not out_of_memory(ValueError("no")) and out_of_memory(
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling")
    )
    with pytest.raises(RuntimeError, match="invalidated") as caught:  # what ends a capture that it has spoilt
        try:
            raise OUT_OF_MEMORY[0]
        finally:
            raise RuntimeError("capture was invalidated")
    assert out_of_memory(caught.value)


# -- captures that fail ------------------------------------------------------------------------------------------------
def test_a_step_that_cannot_be_captured_is_made(
    many: Path, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so once, not once a slot."""
    complain.cache_clear()

    def refuse(self: CapturedSlot, step: Step) -> Graph:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(CapturedSlot, "_captured", refuse)
    same(fallow.run(out=tmp_path, **MANY).path, many)
    assert caplog.messages == [
        "a step cannot be captured (operation not permitted when stream is capturing); going on eagerly, which is slower"
    ]


def test_a_numbered_device_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", made.append, raising=False)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    for name in ("cuda", "cuda:1"):
        machine.set_up(torch.device(name), "fp32", deterministic=False)
    assert made == [1]


def test_there_are_so_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda:1").index == 1 and device_of("cuda").index is None
    with pytest.raises(UserError, match="there is no device cuda:2; torch sees 2"):
        device_of("cuda:2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # under torchrun
    assert device_of("cuda:1").index is device_of("cuda:7").index is None  # each process has its own


def test_how_far_parties_get_before_the_next_is_let_in() -> None:
    """Eight steps of SemiFL's 30 images, or about a thousand images."""
    assert [steps_before_next_party(n) for n in (0, 30, 125, 126, 400, 1064)] == [8, 8, 8, 7, 2, 1]
    view = torch.zeros(5, 3, 8, 8)
    tensors = {("u", "weak"): view, ("u", "strong"): view, ("x", "labelled"): view[:2], ("u", "y"): torch.zeros(5)}
    assert Step(lambda s, b: None, tensors, ()).images == 12
