"""From a plan to the tensors of each step: draws the batches and makes their views on the device, many steps ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fallow import draws
from fallow.data.samples import Stream
from fallow.engine.world import World
from fallow.methods.plan import Plan, Segment, StepFunction, column


class Part:
    """One stream's share of a batch: `b.x.weak`, `b.x.y`, `b.x.index`; false and all None if absent."""

    def __init__(self, tensors: dict[str, Tensor] | None):
        self._tensors = tensors
        self._seen: set[str] = set()

    @property
    def _truth(self) -> Tensor | None:
        return self._optional("_truth")

    @property
    def rows(self) -> Tensor | None:
        """Which rows are real, None if nothing was padded."""
        return self._optional("rows")

    def _optional(self, name: str) -> Tensor | None:
        self._seen.add(name)
        return self._tensors.get(name) if self._tensors else None

    def __bool__(self) -> bool:
        return self._tensors is not None

    def __getattr__(self, name: str) -> Tensor | None:
        if self._tensors is None:
            return None
        self._seen.add(name)
        try:
            return self._tensors[name]
        except KeyError:
            raise AttributeError(f"this stream has no {name!r}; it has {', '.join(self._tensors)}") from None


class Batch:
    """What a step gets: parts by stream name, numbers as 0-dim tensors."""

    def __init__(self, parts: dict[str, Part], numbers: dict[str, Tensor]):
        self._parts, self._numbers = parts, numbers

    def __getattr__(self, name: str) -> Any:
        if name in self._parts:
            return self._parts[name]
        if name in self._numbers:
            return self._numbers[name]
        raise AttributeError(f"the plan has no column {name!r}")


@dataclass
class Step:
    """One step to make: the function, its tensors by (stream, column), which streams are absent, its numbers."""

    function: StepFunction
    tensors: dict[tuple[str, str], Tensor]
    absent: tuple[str, ...]
    numbers: dict[str, Tensor] = field(default_factory=dict)
    _batch: Batch | None = None

    def read(self) -> list[tuple[str, str]]:
        """Which tensors the step's function has looked at."""
        parts = self._batch._parts if self._batch else {}
        return [k for k in self.tensors if k[1] in parts[k[0]]._seen]

    def batch(self) -> Batch:
        parts: dict[str, dict[str, Tensor]] = {}
        for (stream, name), tensor in self.tensors.items():
            parts.setdefault(stream, {})[name] = tensor
        made = {name: Part(tensors) for name, tensors in parts.items()} | {name: Part(None) for name in self.absent}
        self._batch = Batch(made, self.numbers)
        return self._batch

    def signature(self) -> tuple[Any, ...]:
        shapes = tuple((k, tuple(t.shape), t.dtype) for k, t in sorted(self.tensors.items()))
        named = tuple((k, tuple(t.shape)) for k, t in sorted(self.numbers.items()))
        return (getattr(self.function, "__qualname__", repr(self.function)), shapes, named, self.absent)


def steps(world: World, plan: Plan, key: int, numbers: Any) -> Iterator[Step]:
    """All steps of a plan. `numbers(step, length, columns)` gives the engine's own columns (learning rates, keys)."""
    made, total = 0, len(plan)
    for number, segment in enumerate(plan.segments):
        length = len(segment)
        if not length:
            continue
        own = {name: column(name, v, length) for name, v in segment.numbers.items() if not isinstance(v, dict) and name != "lr"}
        engine = numbers(made, length, total, segment.numbers.get("lr"))
        device = {n: t.to(world.device, non_blocking=True) for n, t in (own | engine).items()}
        for k, tensors in enumerate(_tensors(world, segment, length, draws.key(key, number))):
            absent = tuple(n for n, s in segment.streams.items() if not s)
            function = segment.step or world.method.step
            yield Step(function, tensors, absent, {n: t[k] for n, t in device.items()})
        made += length


def _tensors(world: World, segment: Segment, length: int, key: int) -> Iterator[dict[tuple[str, str], Tensor]]:
    streams = {n: s for n, s in segment.streams.items() if s}
    positions = {n: s.positions(draws.key(key, n), length) for n, s in streams.items()}
    sizes = {n: [len(p) for p in ps] for n, ps in positions.items()}
    starts = {n: np.concatenate([[0], np.cumsum(s)]) for n, s in sizes.items()}
    chunk = _chunk(world, streams, sizes, length)
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        made = {
            n: _stream(world, s, positions[n][start:stop], draws.key(key, s.alike or n), start, int(starts[n][start]))
            for n, s in streams.items()
        }
        for k in range(stop - start):
            yield {(n, name): t for n, per_step in made.items() for name, t in per_step[k].items()}


def _chunk(world: World, streams: dict[str, Stream], sizes: dict[str, list[int]], length: int) -> int:
    """How many steps' views fit into the memory set aside for them."""
    pixels = world.source.channels * world.source.size**2 * 4
    per_step = sum(max(sizes[n]) * max(1, len(s.views)) * pixels for n, s in streams.items())
    share = world.options.view_memory * 2**30 / world.sharing
    return max(1, min(length, int(share / max(1, per_step))))


def _stream(world: World, stream: Stream, positions: list[Any], key: int, first: int, counted: int) -> list[dict[str, Tensor]]:
    """The tensors of some consecutive batches of one stream."""
    pad = stream.pad
    filled = [np.concatenate([p, np.zeros(-len(p) % pad, np.int64)]) for p in positions] if pad > 1 else positions
    where, sizes = np.concatenate(filled), [len(p) for p in filled]
    samples = stream.samples
    columns: dict[str, Tensor] = {}
    if world.options.augment.draws == "batch":
        counter = torch.from_numpy(np.repeat(np.arange(first, first + len(sizes)), sizes))
    else:  # a sample's number in its stream, whatever was padded
        first_of = counted + np.cumsum([0, *(len(p) for p in positions)])
        counter = torch.from_numpy(np.concatenate([np.arange(a, a + n) for a, n in zip(first_of, sizes)]))
    for name, role in stream.views.items():
        columns[name] = world.view(role, samples.rows[where], draws.bits(draws.key(key, "view", name), counter))
    small = {"index": samples.index, "_rows": samples.rows} | samples.columns
    if samples.y is not None:
        small["y"] = samples.y
    for name, values in small.items():
        columns[name] = torch.from_numpy(np.ascontiguousarray(values[where])).to(world.device, non_blocking=True)
    columns["_truth"] = world.truth[columns.pop("_rows")]
    if pad > 1:
        real = [np.arange(len(f)) < len(p) for p, f in zip(positions, filled)]
        if not all(r.all() for r in real):
            columns["rows"] = torch.from_numpy(np.concatenate(real)).to(world.device, non_blocking=True)
    split = {name: t.split(sizes) for name, t in columns.items()}
    return [{name: ts[k] for name, ts in split.items()} for k in range(len(sizes))]
