"""Pieces every partition is made of, and the plain deals: IID, shards, FedMatch's client types.

A partition works on a `Pool` and speaks in positions of that pool; `draw_*` makes the random numbers and `apply_*`
is a pure function of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fallow.errors import UserError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Options = dict[str, Any]
EMPTY: Ints = np.zeros(0, np.int64)


class PartitionError(UserError):
    """A split that cannot be made; `code` names the reason, for tests and callers."""

    def __init__(self, code: str, cause: str, remedy: str):
        super().__init__(cause, remedy)
        self.code = code


@dataclass(frozen=True)
class Pool:
    """The samples to be shared out, by their labels, and among how many clients."""

    labels: Ints
    classes: int
    clients: int
    what: str = "samples"  # what messages call them

    @cached_property
    def counts(self) -> Ints:
        return np.bincount(self.labels, minlength=self.classes)

    @property
    def each(self) -> int:
        return len(self.labels) // self.clients


class Deal(NamedTuple):
    """Positions in the pool: one array per client, what nobody got, and how many draws it took."""

    parts: list[Ints]
    dropped: Ints
    tries: int = 1


def apportion(weights: NDArray[Any], total: int) -> Ints:
    """`total` shared in proportion to each row of weights: floors, then largest remainders, ties to the lowest index.

    Exact for integer weights.

    >>> apportion(np.array([10, 6, 4]), 19)
    array([9, 6, 4])
    """
    whole = weights.sum(-1, keepdims=True)
    if np.issubdtype(weights.dtype, np.integer):
        base, rest = np.divmod(weights * total, whole)
    else:
        rest, base = np.modf(weights / whole * total)
    base = base.astype(np.int64)
    missing = total - base.sum(-1, keepdims=True)
    rank = np.argsort(np.argsort(-rest, axis=-1, kind="stable"), axis=-1)
    return base + (rank < missing)


def refill(short: int, mix: Floats, left: Ints) -> Ints:
    """`short` more samples from what is left, in the proportions of `mix`, else of what is left."""
    taken = np.zeros_like(left)
    while short > 0:
        room = left - taken
        wanted = np.where(room > 0, mix, 0.0)
        given = np.minimum(apportion(wanted if wanted.sum() >= 1e-12 else room, short), room)
        taken += given
        short -= int(given.sum())
    return taken


def deal(labels: Ints, counts: Ints, order: Ints) -> tuple[list[Ints], Ints]:
    """Each class's samples, in `order`, as consecutive pieces to the rows of `counts`; and the rest."""
    rows, classes = counts.shape
    grouped = order[np.argsort(labels[order], kind="stable")]
    shares = np.vstack([counts, np.bincount(labels, minlength=classes) - counts.sum(0)])
    owner = np.repeat(np.tile(np.arange(rows + 1), classes), shares.T.ravel())
    lists = np.split(grouped[np.argsort(owner, kind="stable")], np.cumsum(shares.sum(1))[:-1])
    return lists[:-1], lists[-1]


def class_lists(labels: Ints, classes: int, order: Ints) -> list[Ints]:
    """The positions of each class, in `order`."""
    grouped = order[np.argsort(labels[order], kind="stable")]
    return np.split(grouped, np.cumsum(np.bincount(labels, minlength=classes))[:-1])


def draw_order(pool: Pool, rng: Generator, shuffle: bool = True) -> Ints:
    """The order in which samples are handed out: random, or the pool's own."""
    return rng.permutation(len(pool.labels)) if shuffle else np.arange(len(pool.labels))


def class_too_small(pool: Pool, k: int, needed: int, remedy: str) -> PartitionError:
    cause = f"class {k} has {pool.counts[k]} {pool.what} but the partition needs at least {needed}"
    return PartitionError("class_too_small", cause, remedy)


# -- iid ---------------------------------------------------------------------------------------------------------------


def apply_iid(pool: Pool, order: Ints) -> Deal:
    """Blocks of floor(N / M); the remainder is dropped."""
    used = pool.each * pool.clients
    return Deal(np.split(order[:used], pool.clients), order[used:])


def apply_spread(pool: Pool, order: Ints) -> Deal:
    """Everything is kept: the last N mod M clients get one more."""
    larger = len(order) % pool.clients
    sizes = np.full(pool.clients, pool.each)
    sizes[pool.clients - larger :] += 1
    return Deal(np.split(order, np.cumsum(sizes)[:-1]), EMPTY)


def apply_stratified(pool: Pool, order: Ints, leftover: str = "drop") -> Deal:
    """floor(N_k / M) of each class to everyone; the leftovers are dropped, or dealt one by one over the classes."""
    for k in np.flatnonzero((pool.counts > 0) & (pool.counts < pool.clients)):
        if leftover == "drop":
            remedy = "use fewer clients, plain iid, or iid:stratified,leftover=spread"
            raise class_too_small(pool, int(k), pool.clients, remedy)
    counts = np.tile(pool.counts // pool.clients, (pool.clients, 1))
    if leftover == "spread":
        ends = np.cumsum(pool.counts % pool.clients)
        counts += dealt_between(ends - pool.counts % pool.clients, ends, pool.clients)
    return Deal(*deal(pool.labels, counts, order))


def dealt_between(starts: Ints, ends: Ints, clients: int) -> Ints:
    """[clients, classes]: how many t of starts <= t < ends have t mod clients = client (dealing card by card)."""
    client = np.arange(clients)[:, None]
    return (ends - client + clients - 1) // clients - (starts - client + clients - 1) // clients


def split_iid(pool: Pool, rng: Generator, o: Options) -> Deal:
    order = draw_order(pool, rng)
    match o["kind"]:
        case "stratified":
            return apply_stratified(pool, order, o["leftover"])
        case "spread":
            return apply_spread(pool, order)
    return apply_iid(pool, order)


# -- shards ------------------------------------------------------------------------------------------------------------


class ShardDraw(NamedTuple):
    order: Ints  # within classes
    slots: Ints  # [clients, S]: the class of each shard a client gets
    picks: list[Ints]  # per class: its shards in the order they are taken


def shards_per_class(pool: Pool, per_client: int, allow_uneven: bool, rng: Generator) -> Ints:
    """How many shards each class is cut into; an error where that cannot be."""
    if not 1 <= per_client <= pool.classes:
        remedy = f"use a whole number from 1 to {pool.classes}"
        raise PartitionError("shards_too_many", f"shards:{per_client} with {pool.classes} classes", remedy)
    each, more = divmod(per_client * pool.clients, pool.classes)
    if more and not allow_uneven:
        cause = f"{per_client}·{pool.clients} shards cannot be dealt evenly over {pool.classes} classes"
        remedy = f"change the number of clients, or use shards:{per_client},allow_uneven=true"
        raise PartitionError("shards_uneven", cause, remedy)
    pieces = np.full(pool.classes, each)
    if more:
        pieces[rng.permutation(pool.classes)[:more]] += 1
    for k in np.flatnonzero(pool.counts < pieces):
        raise class_too_small(pool, int(k), int(pieces[k]), "use fewer clients or fewer shards")
    return pieces


def draw_shards(pool: Pool, per_client: int, rng: Generator, o: Options) -> ShardDraw:
    pieces = shards_per_class(pool, per_client, o["allow_uneven"], rng)
    slots = rng.permutation(np.repeat(np.arange(pool.classes), pieces)).reshape(pool.clients, per_client)
    if o["distinct"]:
        separate(slots, rng)
    return ShardDraw(draw_order(pool, rng, o["shuffle"]), slots, [rng.permutation(n) for n in pieces])


def separate(slots: Ints, rng: Generator, swaps: int = 10_000) -> None:
    """Swaps repeated classes away, in place, until each row's are distinct."""
    clients, per_client = slots.shape

    def repeats(rows: Ints) -> int:
        return int((np.diff(np.sort(slots[rows], axis=1), axis=1) == 0).sum())

    for _ in range(swaps):
        bad = np.flatnonzero((np.diff(np.sort(slots, axis=1), axis=1) == 0).any(1))
        if not len(bad):
            return
        rows = np.array([rng.choice(bad), rng.integers(clients)])
        columns = rng.integers(per_client, size=2)
        before = repeats(rows)
        slots[rows, columns] = slots[rows[::-1], columns[::-1]]
        if repeats(rows) > before:
            slots[rows, columns] = slots[rows[::-1], columns[::-1]]
    cause = f"no deal of {per_client} different classes to each of {clients} clients was found in {swaps} swaps"
    raise PartitionError("shards_not_distinct", cause, "use fewer shards, or leave distinct=true out")


def apply_shards(pool: Pool, drawn: ShardDraw) -> Deal:
    """Each class cut into shards, its last few samples to the first shards; client by client takes its slots'."""
    shards: list[list[Ints]] = []
    unused = [EMPTY]
    for own, picks in zip(class_lists(pool.labels, pool.classes, drawn.order), drawn.picks):
        if not len(picks):
            unused.append(own)
            shards.append([])
            continue
        whole = len(own) // len(picks) * len(picks)
        cut = [np.append(piece, own[whole:][i : i + 1]) for i, piece in enumerate(np.split(own[:whole], len(picks)))]
        shards.append([cut[i] for i in reversed(picks)])
    parts = [np.concatenate([shards[k].pop() for k in row]) for row in drawn.slots]
    return Deal(parts, np.concatenate(unused))


def split_shards(pool: Pool, rng: Generator, o: Options) -> Deal:
    return apply_shards(pool, draw_shards(pool, o["classes"], rng, o))


# -- FedMatch's client types -------------------------------------------------------------------------------------------

FEDMATCH_TYPE = (0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15)


class TypeDraw(NamedTuple):
    order: Ints
    counts: Ints  # [clients, classes] wanted


def type_mixes(classes: int, types: str = "fedmatch") -> Floats:
    """[types, classes]: the class mix of client type t is the first one rotated right by t places."""
    if types == "fedmatch" and classes != 10:
        cause = f"batch-non-iid is defined for 10 classes and the data has {classes}"
        raise PartitionError("fedmatch_types_need_10_classes", cause, "use batch-non-iid,types=generic")
    if classes < 4:
        raise PartitionError(
            "fedmatch_types_need_10_classes",
            f"batch-non-iid needs at least 4 classes and the data has {classes}",
            "use another partition, such as skew:0.6",
        )
    first = np.full(classes, 0.2 / (classes - 3))
    first[[0, 1, -1]] = 0.5, 0.15, 0.15
    if types == "fedmatch":
        first = np.array(FEDMATCH_TYPE)
    return np.stack([np.roll(first, t) for t in range(classes)])


def mixes_of_clients(pool: Pool, types: str) -> Floats:
    return type_mixes(pool.classes, types)[np.arange(pool.clients) % pool.classes]


def draw_types(pool: Pool, mixes: Floats, rng: Generator) -> TypeDraw:
    return TypeDraw(draw_order(pool, rng), rng.multinomial(pool.each, mixes).astype(np.int64))


def apply_types(pool: Pool, drawn: TypeDraw, mixes: Floats | None = None) -> Deal:
    """Clients in order take what they want of each class while it lasts; with `mixes` the missing is refilled."""
    left = pool.counts.copy()
    counts = np.zeros_like(drawn.counts)
    for i, wanted in enumerate(drawn.counts):
        counts[i] = np.minimum(wanted, left)
        if mixes is not None:
            counts[i] += refill(int(wanted.sum() - counts[i].sum()), mixes[i], left - counts[i])
        left -= counts[i]
    return Deal(*deal(pool.labels, counts, drawn.order))


def split_types(pool: Pool, rng: Generator, o: Options) -> Deal:
    mixes = mixes_of_clients(pool, o["types"])
    return apply_types(pool, draw_types(pool, mixes, rng), mixes if o["short"] == "refill" else None)
