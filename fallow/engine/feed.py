"""From a plan to the tensors of each step: draws the batches and makes their views on the device, many steps ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fallow import draws
from fallow.data.samples import Stream
from fallow.engine.kit import Kit
from fallow.engine.site import Site
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
            raise AttributeError(f"this stream has no {name!r}; it has {', '.join(n for n in self._tensors if n[0] != '_')}") from None


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

    @property
    def images(self) -> int:
        """How many images its views have together."""
        return sum(len(t) for t in self.tensors.values() if t.dim() == 4)

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
        return (self.function, shapes, named, self.absent)


@dataclass
class Strand:
    """One stream's batches over many steps: which samples, with which keys for their views; host arrays."""

    rows: np.ndarray
    columns: dict[str, np.ndarray]
    keys: dict[str, np.ndarray]  # by view, with `counter` the draws of each sample
    counter: np.ndarray
    real: np.ndarray  # false where a batch was filled up
    sizes: list[int]

    @staticmethod
    def draw(site: Site, stream: Stream, length: int, key: int, view_key: int) -> Strand:
        positions = stream.positions(key, length)
        filled = [np.concatenate([p, np.zeros(-len(p) % stream.pad, np.int64)]) for p in positions] if stream.pad > 1 else positions
        where, sizes = np.concatenate(filled), [len(p) for p in filled]
        if site.kit.options.augment.draws == "batch":
            counter = np.repeat(np.arange(length), sizes)
        else:  # a sample's number in its stream, whatever was padded
            first_of = np.cumsum([0, *(len(p) for p in positions)])
            counter = np.concatenate([np.arange(a, a + n) for a, n in zip(first_of, sizes)])
        keys = {name: np.full(len(where), draws.key(view_key, "view", name)) for name in stream.views}
        samples = stream.samples
        columns = {"index": samples.index[where]} | {k: v[where] for k, v in samples.columns.items()}
        if samples.y is not None:
            columns["y"] = samples.y[where]
        real = np.concatenate([np.arange(len(f)) < len(p) for p, f in zip(positions, filled)])
        return Strand(samples.rows[where], columns, keys, counter, real, sizes)

    @staticmethod
    def join(strands: list[Strand]) -> Strand:
        if len(strands) == 1:
            return strands[0]
        first = strands[0]
        return Strand(
            np.concatenate([s.rows for s in strands]),
            {k: np.concatenate([s.columns[k] for s in strands]) for k in first.columns},
            {k: np.concatenate([s.keys[k] for s in strands]) for k in first.keys},
            np.concatenate([s.counter for s in strands]),
            np.concatenate([s.real for s in strands]),
            [n for s in strands for n in s.sizes],
        )

    def tensors(self, site: Site, stream: Stream, start: int, stop: int) -> list[dict[str, Tensor]]:
        """The tensors of steps start .. stop - 1: views made in one call each, then cut."""
        a, sizes = sum(self.sizes[:start]), self.sizes[start:stop]
        b = a + sum(sizes)
        keys = {name: torch.from_numpy(draws.host_bits(k[a:b], self.counter[a:b])) for name, k in self.keys.items()}
        made = {name: site.view(role, self.rows[a:b], keys[name]) for name, role in stream.views.items()}
        made |= {name: site.kit.put(values[a:b]) for name, values in self.columns.items()}
        if (truth := site.truth(self.rows[a:b])) is not None:
            made["_truth"] = truth
        if stream.pad > 1 and not self.real.all():
            made["rows"] = site.kit.put(self.real[a:b])
        cut = {name: t.split(sizes) for name, t in made.items()}
        return [{name: ts[k] for name, ts in cut.items()} for k in range(len(sizes))]


def steps(site: Site, plan: Plan, key: int, numbers: Any) -> Iterator[Step]:
    """All steps of a plan. `numbers(made, length, total, lr)` gives the engine's own columns (learning rates, keys).

    Neighbouring segments of one kind are fed together, so that their views are made in few calls.
    """
    made, total = 0, len(plan)
    present = [(number, segment) for number, segment in enumerate(plan.segments) if len(segment)]
    for _, group in groupby(present, key=lambda pair: _kind(pair[1])):
        segments = list(group)
        first, columns = segments[0][1], []
        for _, segment in segments:
            length = len(segment)
            own = {n: column(n, v, length) for n, v in segment.numbers.items() if n != "lr"}
            columns.append(own | numbers(made, length, total, segment.numbers.get("lr")))
            made += length
        device = {n: site.kit.put(torch.cat([c[n] for c in columns])) for n in columns[0]}
        absent = tuple(n for n, s in first.streams.items() if not s)
        for k, tensors in enumerate(_tensors(site, segments, key)):
            yield Step(first.step or site.kit.method.step, tensors, absent, {n: t[k] for n, t in device.items()})


def _kind(segment: Segment) -> Any:
    streams = [(n, bool(s), tuple(s.views.items()), s.pad, s.samples.y is None, tuple(s.samples.columns)) for n, s in segment.streams.items()]
    return segment.step, streams, tuple(segment.numbers)


def _tensors(site: Site, segments: list[tuple[int, Segment]], key: int) -> Iterator[dict[tuple[str, str], Tensor]]:
    streams = {n: s for n, s in segments[0][1].streams.items() if s}
    strands = {}
    for name in streams:
        drawn = []
        for number, segment in segments:
            own, stream = draws.key(key, number), segment.streams[name]
            drawn.append(Strand.draw(site, stream, len(segment), draws.key(own, name), draws.key(own, stream.alike or name)))
        strands[name] = Strand.join(drawn)
    length = sum(len(segment) for _, segment in segments)
    chunk = _chunk(site.kit, streams, strands, length)
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        made = {n: strands[n].tensors(site, s, start, stop) for n, s in streams.items()}
        for k in range(stop - start):
            yield {(n, name): t for n, per_step in made.items() for name, t in per_step[k].items()}


def _chunk(kit: Kit, streams: dict[str, Stream], strands: dict[str, Strand], length: int) -> int:
    """How many steps' views fit into the memory set aside for them."""
    pixels = kit.declared.channels * kit.declared.size**2 * 4
    per_step = sum(max(strands[n].sizes) * max(1, len(s.views)) * pixels for n, s in streams.items())
    share = kit.options.view_memory * 2**30 / kit.sharing
    return max(1, min(length, int(share / max(1, per_step))))
