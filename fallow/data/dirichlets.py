"""The Dirichlet partitions: capped per class, equal-size per client, over classes per client, and between pairs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from fallow.data.dealing import EMPTY, Deal, Floats, Ints, Options, PartitionError, Pool, apportion, deal, draw_order, refill

log = logging.getLogger(__name__)


# -- dirichlet-capped --------------------------------------------------------------------------------------------------


Redraw = Callable[[int], Floats]


def evenly(clients: int) -> Floats:
    return np.full(clients, 1 / clients)


def capped_counts(pool: Pool, shares: Floats, redraw: Redraw = evenly) -> Ints:
    """[clients, classes] of shares [classes, clients]; who holds N / M or more when a class's turn comes gets nothing of it.

    `redraw(m)` gives shares for m clients, for a class whose open clients' shares all underflowed to 0. (A Dirichlet
    renormalised on some entries is a Dirichlet on these: drawing for the open ones only changes no distribution.)
    """
    sizes = np.zeros(pool.clients, np.int64)
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    for k in np.flatnonzero(pool.counts):
        is_open = sizes * pool.clients < len(pool.labels)
        share = np.where(is_open, shares[k], 0.0)
        reached = np.cumsum(share)
        if not reached[-1] > 0:
            share[is_open] = redraw(int(is_open.sum()))
            reached = np.cumsum(share)
        # x / x is exactly 1 from the last open client on: rounding never hands a sample to a capped one after it
        cuts = np.floor(reached / reached[-1] * pool.counts[k]).astype(np.int64)
        counts[:, k] = np.diff(cuts, prepend=0)
        sizes += counts[:, k]
    return counts


def default_min_size(pool: Pool) -> int:
    """10 as SemiFL and FedDure have it; in pools of fewer than 50 per client a fifth of the mean, at least 1."""
    return max(1, min(10, pool.each // 5))


def split_capped(pool: Pool, rng: Generator, o: Options) -> Deal:
    alpha, least, limit = o["alpha"], o["min_size"], o["max_tries"]
    least = default_min_size(pool) if least is None else least
    if least * pool.clients > len(pool.labels):
        cause = f"{pool.clients} clients with at least {least} each need more than the {len(pool.labels)} {pool.what}"
        raise PartitionError("min_size_impossible", cause, "use fewer clients or a smaller min_size")
    order, smallest = draw_order(pool, rng, o["shuffle"]), 0
    for tries in range(1, limit + 1):
        shares = rng.dirichlet(np.full(pool.clients, alpha), pool.classes)
        counts = capped_counts(pool, shares, lambda m: rng.dirichlet(np.full(m, alpha)))
        smallest = max(smallest, int(counts.sum(1).min()))
        if smallest >= least:
            return Deal(*deal(pool.labels, counts, order), tries)
    cause = (
        f"no split of the {pool.what} with every client >= {least} in {limit} tries of dirichlet-capped:{alpha:g}; "
        f"smallest seen {smallest}"
    )
    remedy = f"use a larger alpha, fewer clients, a smaller min_size, or dirichlet-equal:{alpha:g}, which always ends"
    raise PartitionError("dirichlet_min_size", cause, remedy)


# -- dirichlet-equal ---------------------------------------------------------------------------------------------------


class EqualDraw(NamedTuple):
    order: Ints  # within classes
    shares: Floats  # [clients - 1, classes]; one row more for last="dirichlet"
    shuffles: list[Ints]  # of each client's list


def draw_equal(pool: Pool, alpha: float, rng: Generator, last: str = "leftover") -> EqualDraw:
    order = draw_order(pool, rng)
    rows = pool.clients - (last == "leftover")
    shares = rng.dirichlet(np.full(pool.classes, alpha), rows)
    sizes = [pool.each] * pool.clients
    if last == "leftover":
        sizes[-1] += len(pool.labels) % pool.clients
    return EqualDraw(order, shares, [rng.permutation(n) for n in sizes])


def rounded(shares: Floats, size: int) -> Ints:
    """Counts that sum to `size`: rounded half to even, the first of the largest entries absorbs the difference."""
    counts = np.rint(size * shares).astype(np.int64)
    rows = np.arange(len(counts))
    counts[rows, counts.argmax(1)] += size - counts.sum(1)
    for row in np.flatnonzero((counts < 0).any(1)):
        log.info("client %d: rounding went below zero, largest remainders instead", row)
        counts[row] = apportion(shares[row], size)
    return counts


def in_class_order(short: int, left: Ints) -> Ints:
    return np.clip(short - (np.cumsum(left) - left), 0, left)


def apply_equal(pool: Pool, drawn: EqualDraw, fill: str = "class-order") -> Deal:
    """floor(N / M) for each client by its own shares while classes last; without a row the last one gets the rest."""
    left = pool.counts.copy()
    pieces = np.zeros((2 * pool.clients, pool.classes), np.int64)  # a client's rows: taken, then filled up
    for i, wanted in enumerate(rounded(drawn.shares, pool.each)):
        taken = np.minimum(wanted, left)
        short, left = int(pool.each - taken.sum()), left - taken
        filled = in_class_order(short, left) if fill == "class-order" else refill(short, np.zeros(len(left)), left)
        pieces[2 * i : 2 * i + 2] = taken, filled
        left = left - filled
    if len(drawn.shares) < pool.clients:
        pieces[-1] = left
    lists, unused = deal(pool.labels, pieces, drawn.order)
    parts = [np.concatenate(lists[2 * i : 2 * i + 2])[shuffle] for i, shuffle in enumerate(drawn.shuffles)]
    return Deal(parts, unused)


def split_equal(pool: Pool, rng: Generator, o: Options) -> Deal:
    split = apply_equal(pool, draw_equal(pool, o["alpha"], rng, o["last"]), o["fill"])
    surplus = [part[pool.each :] for part in split.parts]  # the last client's, unused
    return Deal([part[: pool.each] for part in split.parts], np.concatenate([split.dropped, *surplus]))


# -- dirichlet-client --------------------------------------------------------------------------------------------------


class ClientDraw(NamedTuple):
    order: Ints
    mixes: Floats  # [clients, classes]


def draw_mixes(counts: Ints, clients: int, alpha: float, concentration: str, rng: Generator) -> Floats:
    """Each client's class mix ~ Dir(alpha · K · prior), or the literal Dir(alpha · prior) with `total`."""
    present = np.flatnonzero(counts)
    prior = counts[present] / counts.sum()
    mixes = np.zeros((clients, len(counts)))
    scale = alpha * (len(present) if concentration == "per-class" else 1)
    mixes[:, present] = rng.dirichlet(scale * prior, clients)
    return mixes


def client_counts(pool: Pool, mixes: Floats, sizes: Ints) -> Ints:
    """[clients, classes]: clients in order take their mix; where a class runs out the others fill up."""
    if sizes.sum() > len(pool.labels):
        cause = f"the clients ask for {sizes.sum()} samples but only {len(pool.labels)} {pool.what} are there"
        raise PartitionError("too_many_samples", cause, "ask for smaller clients")
    left = pool.counts.copy()
    counts = np.zeros((pool.clients, pool.classes), np.int64)
    for i, (mix, size) in enumerate(zip(mixes, sizes)):
        taken = np.minimum(apportion(mix, int(size)), left)
        counts[i] = taken + refill(int(size - taken.sum()), mix, left - taken)
        left -= counts[i]
    return counts


def apply_client(pool: Pool, drawn: ClientDraw, sizes: Ints | None = None) -> Deal:
    sizes = np.full(pool.clients, pool.each) if sizes is None else sizes
    return Deal(*deal(pool.labels, client_counts(pool, drawn.mixes, sizes), drawn.order))


def split_client(pool: Pool, rng: Generator, o: Options) -> Deal:
    mixes = o.get("mixes")  # set where both pools share them (tie=same-q)
    if mixes is None:
        mixes = draw_mixes(pool.counts, pool.clients, o["alpha"], o["concentration"], rng)
    return apply_client(pool, ClientDraw(draw_order(pool, rng), mixes))


# SAGE's


class PairsDraw(NamedTuple):
    blocks: list[Ints]  # positions in the pool, each block for two clients (the last of an odd number: for one)
    shares: list[Floats]  # [classes, clients of the block]


def pair_blocks(pool: Pool, order: Ints) -> list[Ints]:
    """Blocks of floor(2N / M), the last takes the rest; an odd client has one alone."""
    size = 2 * len(order) // pool.clients
    return np.split(order, size * np.arange(1, (pool.clients + 1) // 2))


def pair_pool(pool: Pool, block: Ints, shares: Floats) -> Pool:
    return Pool(pool.labels[block], pool.classes, shares.shape[1], pool.what)


def draw_pairs(pool: Pool, alpha: float, rng: Generator, limit: int = 1000) -> PairsDraw:
    """Shares of each block's classes, anew until both clients have a quarter of it."""
    blocks, shares = pair_blocks(pool, rng.permutation(len(pool.labels))), []
    for number, block in enumerate(blocks):
        clients = min(2, pool.clients - 2 * number)
        for _ in range(limit):
            q = rng.dirichlet(np.full(clients, alpha), pool.classes)
            if capped_counts(pair_pool(pool, block, q), q).sum(1).min() >= len(block) // 4:
                break
        else:
            cause = f"no split of {len(block)} {pool.what} between two clients with a quarter for each in {limit} tries of dirichlet-pairs:{alpha:g}"
            raise PartitionError("dirichlet_min_size", cause, "use a larger alpha, fewer clients or more samples")
        shares.append(q)
    return PairsDraw(blocks, shares)


def apply_pairs(pool: Pool, drawn: PairsDraw) -> Deal:
    """Each block dealt to its clients as in `dirichlet-capped`; all lists in one row, cut anew into equal ones."""
    dealt: list[Ints] = []
    for block, q in zip(drawn.blocks, drawn.shares):
        own = pair_pool(pool, block, q)
        dealt += [block[part] for part in deal(own.labels, capped_counts(own, q), np.arange(len(block)))[0]]
    return Deal(np.array_split(np.concatenate(dealt), pool.clients), EMPTY)


def split_pairs(pool: Pool, rng: Generator, o: Options) -> Deal:
    return apply_pairs(pool, draw_pairs(pool, o["alpha"], rng, o["max_tries"]))
