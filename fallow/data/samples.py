"""A party's samples, and the streams of batches drawn from them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from itertools import accumulate
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
import torch

from fallow import draws
from fallow.errors import UserError
from fallow.limits import is_whole

ROLES = ("plain", "labelled", "weak", "strong")
Array = np.ndarray
Tail = Literal["keep", "drop", "wrap", "chain"]


def _host(value: Any) -> Array:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


@dataclass(frozen=True)
class Samples:
    """Some of a data set's images as one party holds them. Immutable; every method gives new ones.

    `rows` are rows of the training set, `index` the positions in the party's own set, `y` the labels it may see.
    """

    rows: Array
    index: Array
    y: Array | None = None
    columns: dict[str, Array] = field(default_factory=dict)

    @staticmethod
    def of(rows: Array, y: Array | None = None) -> Samples:
        return Samples(np.asarray(rows, np.int64), np.arange(len(rows)), y)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: Array) -> Samples:
        y = None if self.y is None else self.y[chosen]
        return Samples(self.rows[chosen], self.index[chosen], y, {k: v[chosen] for k, v in self.columns.items()})

    def label(self, y: Any, **columns: Any) -> Samples:
        """These samples with labels (and further columns, one entry per sample)."""
        return dataclasses.replace(
            self, y=_host(y).astype(np.int64), columns=self.columns | {k: _host(v) for k, v in columns.items()}
        )

    def having(self, **columns: Any) -> Samples:
        """These samples with further columns, one entry per sample; a column that is None is left out."""
        return dataclasses.replace(self, columns=self.columns | {k: _host(v) for k, v in columns.items() if v is not None})

    def where(self, mask: Any) -> Samples:
        return self.take(np.flatnonzero(_host(mask)))

    def at_least(self, n: int) -> Samples:
        """Doubled until there are `n`; an empty set stays empty."""
        out = self
        while 0 < len(out) < n:
            out = out + out
        return out

    def __add__(self, other: Samples) -> Samples:
        y = None if self.y is None or other.y is None else np.concatenate([self.y, other.y])
        columns = {k: np.concatenate([v, other.columns[k]]) for k, v in self.columns.items() if k in other.columns}
        return Samples(
            np.concatenate([self.rows, other.rows]), np.concatenate([self.index, other.index]), y, columns
        )

    def batches(
        self,
        size: int | Stream | None,
        *views: str,
        epochs: float | None = None,
        steps: int | None = None,
        tail: Tail = "keep",
        shuffle: bool = True,
        replace: bool = False,
        pad: int = 1,
        alike: str | None = None,
        **named_views: str,
    ) -> Stream:
        """A stream of batches. `size=None` is the whole set; another stream means "sizes as there".

        A pass ends with a smaller batch, which `tail` keeps, drops, fills from the start of the pass's own order (wrap), or
        from the next pass (chain), so that every batch has its size and no sample is left out.
        `alike` names another stream of the plan: views of the same name are then drawn alike, place by place.
        """
        roles = {v: v for v in views} | named_views
        if unknown := [r for r in roles.values() if not isinstance(r, str) or r not in ROLES]:
            raise UserError(f"{unknown[0]!r} is no view", "views are " + ", ".join(ROLES))
        return Stream(self, size, roles, epochs, steps, tail, shuffle, replace, pad, alike)


@dataclass(frozen=True)
class Stream:
    """Batches to come: what they are drawn from and how, drawn only when the plan is carried out."""

    samples: Samples
    size: int | Stream | None
    views: dict[str, str]
    epochs: float | None = None
    steps: int | None = None
    tail: Tail = "keep"
    shuffle: bool = True
    replace: bool = False
    pad: int = 1
    alike: str | None = None

    def __post_init__(self) -> None:
        sizes = {"size": self.size, "steps": self.steps, "pad": self.pad}
        for name, count in sizes.items():
            if count is not None and not isinstance(count, Stream) and not is_whole(count, 0 if name == "steps" else 1):
                raise UserError(f"a stream of batches has {name}={count!r}", "give a whole number" if name == "steps" else "give a whole number, 1 or more")
        if self.epochs is not None and not (isinstance(self.epochs, Real) and 0 <= self.epochs < math.inf):
            raise UserError(f"a stream of batches has epochs={self.epochs!r}", "give a number, 0 or more")
        if self.tail not in get_args(Tail):
            raise UserError(f"a stream of batches has tail={self.tail!r}", f"give {', '.join(get_args(Tail))}")

    def __bool__(self) -> bool:
        """Absent (false) if it is drawn from an empty set."""
        return len(self.samples) > 0

    @property
    def endless(self) -> bool:
        return self.epochs is None and self.steps is None and not isinstance(self.size, Stream)

    def sizes_of_pass(self) -> list[int]:
        """The sizes of the batches of one pass over the set."""
        n = len(self.samples)
        size = n if self.size is None else int(self.size)  # type: ignore[call-overload,arg-type]
        if n == 0:
            return []
        if self.tail != "keep":
            return [size] * max(1, -(-n // size) if self.tail == "wrap" else n // size)
        return [size] * (n // size) + ([n % size] if n % size else [])

    def __len__(self) -> int:
        if not self or self.endless:
            return 0
        if isinstance(self.size, Stream):
            return len(self.size)
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        per_pass = len(self.sizes_of_pass())
        return math.ceil(per_pass * self.epochs - 1e-9) if self.epochs <= 1 else per_pass * math.ceil(self.epochs)

    def sizes(self, length: int) -> list[int]:
        """The sizes of the first `length` batches."""
        if isinstance(self.size, Stream):
            return self.size.sizes(length)
        once = self.sizes_of_pass()
        return (once * (length // len(once) + 1))[:length] if once else []

    def positions(self, key: int, length: int) -> list[Array]:
        """Which samples make up each of the first `length` batches."""
        n, sizes = len(self.samples), self.sizes(length)
        if self.replace or (self.tail == "drop" and sizes and sizes[0] > n):
            return _cut(draws.integers(key, torch.arange(sum(sizes)), n).numpy(), sizes)
        if isinstance(self.size, Stream) or self.tail == "chain":  # one long run of permutations
            passes = math.ceil(sum(sizes) / n)
            return _cut(np.concatenate([self._order(key, p) for p in range(passes)]), sizes) if passes else []
        per_pass = len(self.sizes_of_pass())
        starts = range(0, length, per_pass) if per_pass else ()
        orders = (self._order(key, p) for p in range(len(starts)))
        if self.tail == "wrap":
            orders = (np.resize(order, sum(self.sizes_of_pass())) for order in orders)
        return [part for order, s in zip(orders, starts) for part in _cut(order, sizes[s : s + per_pass])]

    def _order(self, key: int, number: int) -> Array:
        n = len(self.samples)
        return draws.permutation(draws.key(key, number), n).numpy() if self.shuffle else np.arange(n)


def _cut(array: Array, sizes: list[int]) -> list[Array]:
    """Consecutive pieces of these sizes; what is left over stays out."""
    ends = list(accumulate(sizes))
    return [array[end - size : end] for size, end in zip(sizes, ends)]
