"""A model's named tensors as arithmetic: three groups, each one flat tensor.

`parameters` are averaged, `statistics` (BN running means) follow a policy, `counters` are only counted. Flat storage
makes loading a client one copy, an optimiser a handful of kernels, and a mean one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

HEAVY = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)  # what autocast computes in bf16
ALIGNED = 16  # elements
GROUPS = ("parameters", "statistics", "counters")


@dataclass(frozen=True)
class Entry:
    name: str
    group: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, self.offset + flat.storage_offset())


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in its group's flat tensor. Convolutions lie channels-last."""

    entries: tuple[Entry, ...]
    sizes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(module: nn.Module) -> Layout:
        entries: list[Entry] = []
        sizes = dict.fromkeys(GROUPS, 0)
        for name, tensor in _named(module):
            group = _group(tensor)
            entries.append(Entry(name, group, tuple(tensor.shape), _stride(tensor), sizes[group]))
            sizes[group] += tensor.numel() + padding(tensor)
        return Layout(tuple(entries), tuple(sizes.items()))

    def names(self, group: str | None = None) -> list[str]:
        return [e.name for e in self.entries if group in (None, e.group)]


def is_plain(tensor: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor whose numbers are there, each of them."""
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta


def padding(tensor: Tensor) -> int:
    """Zeros that follow a tensor in its flat one, so that the next begins where vectorised kernels may read."""
    return -tensor.numel() % ALIGNED if tensor.is_floating_point() else 0


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, those of convolutions and linear layers first (so that they are one piece to cast); then buffers."""
    heavy = {id(p) for m in module.modules() if isinstance(m, HEAVY) for p in m.parameters(recurse=False)}
    named = list(module.named_parameters())
    yield from (pair for pair in named if id(pair[1]) in heavy)
    yield from (pair for pair in named if id(pair[1]) not in heavy)
    persistent = module.state_dict(keep_vars=True)
    yield from ((name, b) for name, b in module.named_buffers() if name in persistent)


def _group(tensor: Tensor) -> str:
    if isinstance(tensor, nn.Parameter):
        return "parameters"
    return "statistics" if tensor.is_floating_point() else "counters"


def _stride(tensor: Tensor) -> tuple[int, ...]:
    if tensor.dim() == 4:
        _, i, h, w = tensor.shape
        return (i * h * w, 1, w * i, i)
    return tuple(torch.empty(tensor.shape, device="meta").stride())


class State:
    """Named tensors in three groups, with arithmetic. Operations give new States; counters stay the left operand's."""

    def __init__(self, layout: Layout, groups: dict[str, Tensor]):
        self.layout, self.groups = layout, groups

    @staticmethod
    def of(module: nn.Module, layout: Layout | None = None) -> State:
        """A copy of a module's tensors."""
        layout = layout or Layout.of(module)
        tensors = dict(_named(module))
        device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        groups = {
            g: torch.zeros(n, dtype=torch.int64 if g == "counters" else torch.float32, device=device)
            for g, n in layout.sizes
            if n
        }
        state = State(layout, groups)
        for entry in layout.entries:
            entry.view(groups[entry.group]).copy_(tensors[entry.name].detach())
        return state

    # -- looking ---------------------------------------------------------------------------------------------------
    def __getitem__(self, name: str) -> Tensor:
        for entry in self.layout.entries:
            if entry.name == name and entry.group in self.groups:
                return entry.view(self.groups[entry.group])
        raise KeyError(name)

    def tensors(self) -> dict[str, Tensor]:
        """Every named tensor, as views."""
        return {e.name: e.view(self.groups[e.group]) for e in self.layout.entries if e.group in self.groups}

    def __contains__(self, group: str) -> bool:
        return group in self.groups

    @property
    def nbytes(self) -> int:
        return sum(e.numel * self.groups[e.group].element_size() for e in self.layout.entries if e.group in self.groups)

    def __repr__(self) -> str:
        return f"State({', '.join(f'{g}: {t.numel():,}' for g, t in self.groups.items())})"

    # -- making others ---------------------------------------------------------------------------------------------
    def map(self, f: Callable[[Tensor], Tensor]) -> State:
        return State(self.layout, {g: f(t) for g, t in self.groups.items()})

    def clone(self) -> State:
        return self.map(Tensor.clone)

    def to(self, device: torch.device | str) -> State:
        return self.map(lambda t: t.to(device))

    def only(self, *groups: str) -> State:
        return State(self.layout, {g: t for g, t in self.groups.items() if g in groups})

    def having(self, other: State | None, group: str) -> State:
        """This state with `group` taken from `other`, or without it if `other` has none."""
        groups = {g: t for g, t in self.groups.items() if g != group}
        if other is not None and group in other.groups:
            groups[group] = other.groups[group]
        return State(self.layout, groups)

    def _combine(self, other: State, f: Callable[[Tensor, Tensor], Tensor]) -> State:
        def one(g: str, t: Tensor) -> Tensor:
            return t if g == "counters" or g not in other.groups else f(t, other.groups[g])

        return State(self.layout, {g: one(g, t) for g, t in self.groups.items()})

    def __add__(self, other: State) -> State:
        return self._combine(other, torch.add)

    def __sub__(self, other: State) -> State:
        return self._combine(other, torch.sub)

    def __mul__(self, number: float | Tensor) -> State:
        return State(self.layout, {g: t if g == "counters" else t * number for g, t in self.groups.items()})

    def lerp(self, other: State, weight: float | Tensor) -> State:
        """(1 - weight) * self + weight * other."""
        return self._combine(other, lambda a, b: torch.lerp(a, b, weight))
