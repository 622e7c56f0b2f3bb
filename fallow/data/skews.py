"""R, how far apart the clients' class mixes are, and partitions made for a wanted R."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fallow.data.dealing import Deal, Ints, Options, PartitionError, Pool, apportion, deal, dealt_between, draw_order

TOLERANCE = 0.01


def skew(counts: NDArray[np.int64]) -> float:
    """R: the mean over client pairs of half the L1 distance of their class mixes; counts are [clients, classes].

    >>> skew(np.array([[5, 1, 1, 1], [1, 5, 1, 1], [1, 1, 5, 1], [1, 1, 1, 5]]))
    0.5
    """
    counts = np.asarray(counts, np.int64)
    clients, sizes = len(counts), counts.sum(1)
    if not sizes.all():
        empty = int(np.flatnonzero(sizes == 0)[0])
        raise PartitionError("empty_client", f"client {empty} has no sample with a label", "leave it out of R")
    if clients < 2:
        return 0.0
    gaps = np.diff(np.sort(counts / sizes[:, None], axis=0), axis=0)
    below = np.arange(1, clients)
    pairs_across = below * (clients - below)  # a gap between neighbours counts for every pair across it
    return float((pairs_across @ gaps).sum() / (clients * (clients - 1)))


def largest_skew(clients: int, classes: int) -> float:
    """R of one-class clients spread evenly over the classes: nothing is larger.

    >>> round(largest_skew(100, 10), 4)
    0.9091
    """
    if clients < 2:
        return 0.0
    each, more = divmod(clients, classes)
    alike = more * (each + 1) * each / 2 + (classes - more) * each * (each - 1) / 2
    return 1 - alike / (clients * (clients - 1) / 2)


def sort_and_cut(counts: Ints, clients: int) -> Ints:
    """[clients, classes]: the samples laid out class by class and cut into equal blocks; classes trimmed to fit."""
    each = int(counts.sum()) // clients
    trimmed = apportion(counts, each * clients)
    class_ends, block_ends = np.cumsum(trimmed), each * np.arange(1, clients + 1)[:, None]
    upper = np.minimum(class_ends, block_ends)
    lower = np.maximum(class_ends - trimmed, block_ends - each)
    return np.maximum(upper - lower, 0)


def whole_classes(counts: Ints, clients: int) -> Ints:
    """[clients, classes]: clients that share no class, or have one each, trimmed to one size (`drop=true`)."""
    owned = np.zeros((clients, len(counts)), np.int64)
    largest_first = [k for k in np.argsort(-counts, kind="stable") if counts[k]]
    if clients <= len(largest_first):
        for k in largest_first:
            owned[owned.sum(1).argmin(), k] = counts[k]
    else:
        each, more = divmod(clients, len(largest_first))
        owner = 0
        for place, k in enumerate(largest_first):
            here = each + (place < more)
            owned[owner : owner + here, k] = counts[k] // here
            owner += here
    return apportion(owned, int(owned.sum(1).min()))


def keep_and_deal(blocks: Ints, kept: int) -> Ints:
    """Each client keeps `kept` samples of its block; the others are pooled by class and dealt one by one."""
    own = apportion(blocks, kept)
    pooled = blocks.sum(0) - own.sum(0)
    ends = np.cumsum(pooled)
    return own + dealt_between(ends - pooled, ends, len(blocks))


def outwards(start: int, size: int, reach: float) -> Iterator[int]:
    """start, then its neighbours ever farther away, the lower first."""
    yield start
    for distance in range(1, size + 1):
        if distance > reach:
            return
        yield from (m for m in (start - distance, start + distance) if 0 <= m <= size)


def counts_for(blocks: Ints, target: float) -> Ints:
    """The keep-and-deal counts whose R is nearest to the target; of equally near ones the first found."""
    each, classes = int(blocks[0].sum()), blocks.shape[1]
    largest = skew(blocks)
    if largest == 0:
        return blocks
    start = min(each, round(each * target / largest))
    best = keep_and_deal(blocks, start)
    error = abs(skew(best) - target)
    # R(m) is m / n · R1 up to rounding: two clients' counts of a class are off by 1 from the dealing, and each by less
    # than 1 from the keeping if it has that class. An m farther away than this cannot be nearer to the target.
    rounding = classes / 2 + np.count_nonzero(blocks) / len(blocks)
    reach = (each * error + rounding) / largest + 1
    for kept in outwards(start, each, reach):
        counts = keep_and_deal(blocks, kept)
        here = abs(skew(counts) - target)
        if here < error - 1e-12:
            best, error = counts, here
        if error < 1e-12:
            break
    return best


def skew_counts(pool: Pool, target: float, drop: bool = False) -> Ints:
    """[clients, classes] of equal size with R within 0.01 of the target, or an error that says what is possible."""
    blocks = sort_and_cut(pool.counts, pool.clients)
    if target > skew(blocks) + TOLERANCE:
        present = int((pool.counts > 0).sum())
        bound = largest_skew(pool.clients, present) if present > 1 else 0.0
        if target > bound + TOLERANCE:
            cause = (
                f"R={target:g} cannot be reached with {pool.clients} clients and {present} classes; "
                f"the largest value is {bound:.4f}"
            )
            raise PartitionError("r_impossible", cause, f"use a smaller R, or skew:{target:g},r_kind=nominal")
        if not drop:
            cause = f"R={target:g} cannot be reached with clients of equal size that use all {pool.what}, only {skew(blocks):.3f}"
            remedy = f"use skew:{target:g},drop=true, which leaves samples out, or a smaller R"
            raise PartitionError("r_needs_drop", cause, remedy)
        blocks = whole_classes(pool.counts, pool.clients)
    counts = counts_for(blocks, target)
    if abs(skew(counts) - target) > TOLERANCE:
        cause = f"the R nearest to {target:g} is {skew(counts):.4f} with {int(counts[0].sum())} {pool.what} per client"
        remedy = f"use fewer clients, that R, or skew:{target:g},r_kind=nominal"
        raise PartitionError("r_not_reached", cause, remedy)
    return counts


def nominal_counts(pool: Pool, nominal: float) -> Ints:
    """The authors' meaning: a share R of each client is its block's, whatever that measures."""
    return keep_and_deal(sort_and_cut(pool.counts, pool.clients), round(pool.each * nominal))


def a2_counts(pool: Pool, nominal: float) -> Ints:
    """Appendix A.2 of FedRGD: sizes follow the classes, everything is used."""
    main = np.arange(pool.clients) % pool.classes
    users = np.bincount(main, minlength=pool.classes)
    own = np.where(users > 0, np.floor(nominal * pool.counts / np.maximum(users, 1) + 1e-9), 0).astype(np.int64)
    scale = int(np.lcm.reduce(users[users > 0]))
    weights = pool.counts[main] * (scale // users[main])
    if not weights.any():
        raise PartitionError("class_too_small", "the main classes of all clients are empty", "use plain skew")
    shared = pool.counts - users * own
    counts = np.stack([apportion(weights, int(n)) for n in shared], axis=1)
    counts[np.arange(pool.clients), main] += own[main]
    return counts


class SkewDraw(NamedTuple):
    order: Ints  # within classes


def draw_skew(pool: Pool, rng: Generator) -> SkewDraw:
    return SkewDraw(draw_order(pool, rng))


def apply_skew(pool: Pool, counts: Ints, drawn: SkewDraw) -> Deal:
    return Deal(*deal(pool.labels, counts, drawn.order))


def split_skew(pool: Pool, rng: Generator, o: Options) -> Deal:
    if o["rule"] == "a2":
        counts = a2_counts(pool, o["r"])
    elif o["r_kind"] == "nominal":
        counts = nominal_counts(pool, o["r"])
    else:
        counts = skew_counts(pool, o["r"], o["drop"])
    return apply_skew(pool, counts, draw_skew(pool, rng))


def pair_counts(pool: Pool) -> Ints:
    """Client i has classes 2i and 2i + 1 (mod K); a class is dealt round robin over its clients."""
    if 2 * pool.clients < pool.classes:
        cause = f"class-pairs gives two classes to each of {pool.clients} clients, which cannot cover {pool.classes}"
        raise PartitionError("too_few_clients", cause, f"use at least {-(-pool.classes // 2)} clients")
    first = 2 * np.arange(pool.clients) % pool.classes
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    for k, available in enumerate(pool.counts):
        holders = np.flatnonzero((first == k) | ((first + 1) % pool.classes == k))
        counts[holders, k] = available // len(holders) + (np.arange(len(holders)) < available % len(holders))
    return counts


def split_pairs(pool: Pool, rng: Generator, o: Options) -> Deal:
    return apply_skew(pool, pair_counts(pool), draw_skew(pool, rng))
