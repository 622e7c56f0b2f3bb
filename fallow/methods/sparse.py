"""Messages of which only what changed travels: `Sparse(new, old)`, and the bytes that it is.

Each tensor of n numbers, z of them changed, is the shortest of three forms behind a header of 5 bytes (the form, z): all numbers;
a bit per number and those that changed; the places of those that changed, and they.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fallow.methods.state import Entry, State

HEADER, PLACE = 5, 4  # bytes
ALL, BITS, PLACES = range(3)


class Sparse(State):
    """The State `new`, to be sent to who has `old`: only numbers that differ travel, and it arrives as `new`.

    >>> import torch
    >>> from fallow.methods.sparse import Sparse
    >>> from fallow.methods.state import State
    >>> old = State.of(torch.nn.Linear(100, 2, bias=False))
    >>> new = old.clone()
    >>> new["weight"][0, :3] += 1
    >>> new.nbytes, Sparse(new, old).nbytes  # a header, three places, three numbers
    (800, 29)
    """

    def __init__(self, new: State, old: State):
        super().__init__(new.layout, new.groups)
        self.old: State | None = old
        self.changed = torch.stack([_differs(e, new, old).sum() for e in entries(new)]) if new.groups else torch.zeros(0, dtype=torch.int64)

    @staticmethod
    def known(state: State, changed: Tensor) -> Sparse:
        """What has travelled already, by how many numbers of each tensor changed."""
        out = Sparse.__new__(Sparse)
        State.__init__(out, state.layout, state.groups)
        out.old, out.changed = None, changed
        return out

    @property
    def nbytes(self) -> int:
        sizes = ((e.numel, z, self.groups[e.group].element_size()) for e, z in zip(entries(self), self.changed.tolist()))
        return sum(HEADER + min(_sizes(n, z, width)) for n, z, width in sizes)

    def clone(self) -> Sparse:
        out = Sparse.known(super().clone(), self.changed)
        out.old = self.old
        return out


def entries(state: State) -> list[Entry]:
    """The tensors that a State has, in the order in which they travel."""
    return [e for e in state.layout.entries if e.group in state.groups]


def _differs(e: Entry, new: State, old: State) -> Tensor:
    one = e.view(new.groups[e.group])
    return one != e.view(old.groups[e.group]) if e.group in old.groups else torch.ones_like(one, dtype=torch.bool)


def _sizes(n: int, z: int, width: int) -> tuple[int, int, int]:
    return n * width, z * width + (n + 7) // 8, z * (width + PLACE)


def kept(psi: Tensor, least: float) -> Tensor:
    """Numbers of at most this size as 0."""
    return torch.where(psi.abs() > least, psi, torch.zeros_like(psi))


def cut(new: State, old: State, delta: float, zero: float = 0.0, both: bool = False) -> State:
    """`new` where it has changed by more than `delta`, small numbers of it (`both`: and of the old) counting as 0; else `old`."""

    def one(group: str) -> Tensor:
        n, o = new.groups[group], old.groups[group]
        return torch.where((kept(n, zero) - (kept(o, zero) if both else o)).abs() > delta, n, o)

    return State(new.layout, {g: one(g) for g in new.groups})


def encoded(new: State, old: State) -> bytes:
    """What travels to who has `old`."""
    out = []
    for e in entries(new):
        values = e.view(new.groups[e.group]).detach().cpu().contiguous().numpy().reshape(-1)
        mask = _differs(e, new, old).cpu().contiguous().numpy().reshape(-1)
        places = np.flatnonzero(mask)
        sizes = _sizes(len(values), len(places), values.itemsize)
        form = sizes.index(min(sizes))
        where = (b"", np.packbits(mask).tobytes(), places.astype("<u4").tobytes())[form]
        out.append(bytes([form]) + len(places).to_bytes(4, "little") + where + (values if form == ALL else values[places]).tobytes())
    return b"".join(out)


def decoded(data: bytes, old: State) -> State:
    """What arrives at who has `old`."""
    new, at = old.clone(), 0

    def take(count: int, kind: str | np.dtype) -> np.ndarray:
        nonlocal at
        found = np.frombuffer(data, kind, count, at)
        at += found.nbytes
        return found

    for e in entries(new):
        target = e.view(new.groups[e.group])
        form, z = int(take(1, "u1")[0]), int(take(1, "<u4")[0])
        values = target.detach().cpu().contiguous().numpy().reshape(-1).copy()
        if form == ALL:
            places = np.arange(e.numel)
        elif form == BITS:
            places = np.flatnonzero(np.unpackbits(take((e.numel + 7) // 8, "u1"), count=e.numel))
        else:
            places = take(z, "<u4")
        values[places] = take(len(places), values.dtype)
        target.copy_(torch.from_numpy(values).view(e.shape))
    return new
