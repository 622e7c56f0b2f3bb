"""Label scenario x partitions -> who holds what.

Each purpose has its own generator from SeedSequence([seed, tag]): 1 chooses the labels, 2 shares the labelled pool (or
all data) out, 3 the unlabelled pool, 4 orders the clients. Nothing else is random, and nothing else draws from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator, SeedSequence

from fallow.data.dealing import EMPTY, Deal, Ints, PartitionError, Pool
from fallow.data.dirichlets import draw_mixes
from fallow.data.holdings import Federation, Holding, Table, measured, table
from fallow.data.natural import Given, given, ids_of_lists, without_small
from fallow.data.partitions import PARTITIONS, Partition, parse
from fallow.data.selecting import Labelling, labelling, select_in_all, select_in_client, truncated
from fallow.data.skews import largest_skew, skew

__all__ = [
    "PARTITIONS", "Federation", "Holding", "PartitionError", "Spec", "Table", "federate", "ids_of_lists",
    "largest_skew", "measured", "parse", "skew", "table",
]  # fmt: skip

CHOOSE, LABELLED, UNLABELLED, CLIENTS = 1, 2, 3, 4


def generator(seed: int, *tags: int) -> Generator:
    return Generator(PCG64(SeedSequence([seed, *tags])))


@dataclass(frozen=True)
class Spec:
    """Everything a federation is made from, beside the labels; the keys of a run's config."""

    labels: str = "server"  # server | clients | some | all
    label_count: int | None = None  # in the whole federation, or
    label_ratio: float | None = None  # of each client (of all data for labels=server), or
    label_per_class: int | None = None  # per class and labelled client (in all for labels=server)
    label_balance: str | None = None  # balanced | random; default: balanced, with a label_ratio at clients random
    label_pick: str = "random"  # random | first
    labelled_as_unlabelled: bool | str = False  # or alias: what lies at their places in the unlabelled pool
    unlabelled_ratio: float = 1.0
    labelled_clients: float | None = None  # for labels=some: a count, or a fraction below 1; default 0.5
    labelled_pick: str = "random"  # random | cover
    clients: int | None = None  # default 10; natural clients count themselves
    partition: str = "iid"
    unlabelled_partition: str | None = None
    seed: int = 0


@dataclass
class Draft:
    """A federation in the making: lists by client."""

    labelled: list[Ints]
    unlabelled: list[Ints]
    dropped: list[Ints]
    server: Ints
    tries: int = 1
    names: tuple[str, ...] | None = None
    unused: dict[int, int] = field(default_factory=dict)
    aliases: list[Ints] | None = None  # what stands for each client's labelled samples in its unlabelled list


@dataclass(frozen=True)
class Job:
    """The checked inputs of one call."""

    labels: Ints
    classes: int
    spec: Spec
    partition: Partition
    unlabelled: Partition
    rule: Labelling
    clients: int

    def rng(self, *tags: int) -> Generator:
        return generator(self.spec.seed, *tags)

    def complement(self, *taken: Ints) -> Ints:
        free = np.ones(len(self.labels), bool)
        free[np.concatenate([EMPTY, *taken])] = False
        return np.flatnonzero(free)

    def share(self, partition: Partition, pool: Ints, clients: int, rng: Generator, what: str, **more: Any) -> Deal:
        """The partition of `pool`, in indices into the training set."""
        split = partition(Pool(self.labels[pool], self.classes, clients, what), rng, **more)
        parts = [pool[part] for part in split.parts]
        allowed_empty = partition.options.get("min_size") == 0
        for i, part in enumerate(parts):
            if not len(part) and not allowed_empty:
                cause = f"{partition} leaves client {i} without {what}"
                raise PartitionError("empty_client", cause, "use fewer clients, more samples or another partition")
        return Deal(parts, pool[split.dropped], split.tries)


def federate(labels: Ints, classes: int, spec: Spec, natural: Sequence[str] | None = None) -> Federation:
    """Who holds what: chooses the labelled samples and shares both pools out. -1 is a label nobody knows.

    >>> labels = np.arange(1000) % 10
    >>> f = federate(labels, 10, Spec(labels="server", label_count=100, clients=9))
    >>> len(f.server.labelled), len(f.clients[0].unlabelled), len(f.dropped)
    (100, 100, 0)
    """
    job = prepare(labels, classes, spec, natural)
    if job.partition.name == "natural":
        assert natural is not None
        draft = natural_draft(job, natural)
    elif spec.labels == "server":
        draft = server_draft(job)
    elif job.rule.joint:
        draft = one_split_draft(job)
    else:
        draft = split_pools_separately(job)
    if spec.labels == "all":
        reveal_all_labels(job, draft)
    return assemble(job, draft)


def prepare(labels: Ints, classes: int, spec: Spec, natural: Sequence[str] | None) -> Job:
    """Checks what can be checked before anything is drawn."""
    labels = np.asarray(labels, np.int64)
    if not len(labels):
        raise PartitionError("empty", "the data has no samples", "check the data")
    wrong = np.flatnonzero((labels < -1) | (labels >= classes))
    if len(wrong):
        cause = f"sample {wrong[0]} has label {labels[wrong[0]]}, outside 0 to {classes - 1}"
        raise PartitionError("bad_label", cause, "correct the labels (-1 means unknown)")
    partition = parse(spec.partition)
    other = parse(spec.unlabelled_partition) if spec.unlabelled_partition else partition
    is_natural = partition.name == "natural"
    if is_natural != (other.name == "natural"):
        cause = f"{partition.name} for one pool and {other.name} for the other"
        raise PartitionError("natural_alone", cause, "natural clients hold both: leave unlabelled_partition out")
    if is_natural and natural is None:
        cause = "partition=natural, but the data does not say which client a sample is from"
        raise PartitionError("no_clients", cause, "use data with client ids, or another partition")
    if spec.seed < 0:
        raise PartitionError("bad_option", f"seed={spec.seed} is negative", "use 0 or more")
    if spec.clients is not None and spec.clients < 1:
        raise PartitionError("empty", f"clients={spec.clients}", "use at least 1")
    if not 0 <= spec.unlabelled_ratio <= 1:
        raise PartitionError("bad_option", f"unlabelled_ratio={spec.unlabelled_ratio:g}", "use a number from 0 to 1")
    clients = 10 if spec.clients is None else spec.clients
    if not is_natural and clients > len(labels):
        cause = f"{clients} clients but only {len(labels)} samples"
        raise PartitionError("too_many_clients", cause, "use fewer clients")
    rule = labelling(labels, classes, spec, partition, other)
    return Job(labels, classes, spec, partition, other, rule, clients)


def client_order(job: Job, partition: Partition, who: Ints) -> Ints:
    """The client of each part. Where parts come sorted by class, ids are shuffled, for both pools alike."""
    who = np.sort(who)
    if not partition.options.get("shuffle_clients"):
        return who
    block = np.argsort(job.rng(CLIENTS).permutation(job.clients))
    return who[np.argsort(block[who])]


def labelled_clients(job: Job, clients: int, parts: list[Ints] | None = None) -> Ints:
    """Who may hold labels: everyone, or for labels=some as many as wanted, drawn, or chosen by what they hold."""
    if job.spec.labels != "some":
        return np.arange(clients)
    wanted = 0.5 if job.spec.labelled_clients is None else job.spec.labelled_clients
    count = max(1, int(wanted * clients + 0.5)) if 0 < wanted < 1 else int(wanted)
    if (count != wanted and wanted >= 1) or not 1 <= count <= clients:
        cause = f"labelled_clients={wanted:g} of {clients} clients"
        raise PartitionError("bad_labelled_clients", cause, f"use a count from 1 to {clients}, or a fraction below 1")
    if job.spec.labelled_pick == "cover":
        if parts is None:
            cause = "labelled_pick=cover goes by what clients hold, but labelled samples are chosen before they are shared out"
            raise PartitionError("bad_labelled_clients", cause, "use label_ratio, which makes one split")
        return np.sort(covering(job.labels, job.classes, parts)[:count])
    return np.sort(job.rng(CLIENTS, 1).permutation(clients)[:count])


def covering(labels: Ints, classes: int, parts: list[Ints]) -> Ints:
    """Clients in order: those that hold every class first, then by how near their size is to the mean, then by id."""
    lacks = [len(np.unique(labels[part][labels[part] >= 0])) < classes for part in parts]
    sizes = np.array([len(part) for part in parts])
    return np.lexsort((np.abs(sizes - sizes.mean()), lacks))


def server_draft(job: Job) -> Draft:
    """The labelled at the server, the others shared out."""
    chosen = select_in_all(job.rule, job.labels, job.classes, job.rng(CHOOSE))
    nothing = [EMPTY] * job.clients
    draft = Draft(nothing, nothing.copy(), [], chosen)
    share_unlabelled(job, draft, job.complement(chosen))
    return draft


def split_pools_separately(job: Job) -> Draft:
    """The labelled are chosen first, then each pool is shared out on its own (`tie: none`)."""
    who = labelled_clients(job, job.clients)
    rule = replace(job.rule, holders=len(who))
    chosen = select_in_all(rule, job.labels, job.classes, job.rng(CHOOSE))
    draft = Draft([EMPTY] * job.clients, [EMPTY] * job.clients, [], EMPTY)
    rng = job.rng(LABELLED)
    places = client_order(job, job.partition, who)
    mixes = shared_mixes(job, rng)
    more = {} if mixes is None else {"mixes": mixes[places]}
    split = job.share(job.partition, chosen, len(who), rng, "labelled samples", **more)
    for client, part in zip(places, split.parts):
        draft.labelled[client] = part
    draft.dropped.append(split.dropped)
    draft.tries = split.tries
    pool = job.complement(chosen)
    share_unlabelled(job, draft, pool, mixes)
    if job.spec.labelled_as_unlabelled == "alias":
        draft.aliases = aliases(draft.labelled, chosen, pool)
    return draft


def aliases(parts: list[Ints], chosen: Ints, pool: Ints) -> list[Ints]:
    """The unlabelled samples whose positions in their pool are those of the labelled ones in theirs: an indexing bug of FedDB's release, reproduced."""
    if len(chosen) > len(pool):
        cause = f"labelled_as_unlabelled=alias, but there are {len(chosen)} labelled and only {len(pool)} unlabelled samples"
        raise PartitionError("no_alias", cause, "use true, or fewer labels")
    order = np.argsort(chosen)
    return [pool[order[np.searchsorted(chosen, part, sorter=order)]] for part in parts]


def shared_mixes(job: Job, rng: Generator) -> Any:
    """For tie=same-q: one class mix per client for both pools, around the prior of all known labels."""
    if job.partition.tie != "same-q":
        return None
    o = job.partition.options
    counts = np.bincount(job.labels[job.labels >= 0], minlength=job.classes)
    return draw_mixes(counts, job.clients, o["alpha"], o["concentration"], rng)


def share_unlabelled(job: Job, draft: Draft, pool: Ints, mixes: Any = None) -> None:
    """The unlabelled pool to all clients; of each only `unlabelled_ratio` is used."""
    if not len(pool):
        return
    rng = job.rng(UNLABELLED)
    places = client_order(job, job.unlabelled, np.arange(job.clients))
    more = {} if mixes is None else {"mixes": mixes[places]}
    split = job.share(job.unlabelled, pool, job.clients, rng, "unlabelled samples", **more)
    for client, part in zip(places, split.parts):
        used = np.sort(rng.permutation(len(part))[: truncated(job.spec.unlabelled_ratio, len(part))])
        draft.unlabelled[client] = part[used]
        draft.unused[int(client)] = len(part) - len(used)
        draft.dropped.append(np.delete(part, used))
    draft.dropped.append(split.dropped)
    draft.tries = max(draft.tries, split.tries)


def one_split_draft(job: Job) -> Draft:
    """One split of all data, then the labelled are chosen at each client."""
    split = job.share(job.partition, np.arange(len(job.labels)), job.clients, job.rng(LABELLED), "samples")
    parts = [EMPTY] * job.clients
    for client, part in zip(client_order(job, job.partition, np.arange(job.clients)), split.parts):
        parts[client] = part
    draft = joint_draft(job, parts, keep_order=False)
    draft.dropped.append(split.dropped)
    draft.tries = split.tries
    return draft


def joint_draft(job: Job, parts: list[Ints], keep_order: bool) -> Draft:
    """Each client's samples are given; which of them are labelled is chosen at the client (`tie: joint`, natural)."""
    draft = Draft([], [], [], EMPTY)
    who = set(labelled_clients(job, len(parts), parts).tolist())
    if job.rule.given and job.spec.labelled_clients is None:
        who = set(range(len(parts)))
    pool = np.sort(np.concatenate([part for i, part in enumerate(parts) if i in who]))
    chosen = EMPTY
    if job.rule.count is not None:
        chosen = pool[select_in_all(job.rule, job.labels[pool], job.classes, job.rng(CHOOSE))]
    for i, part in enumerate(parts):
        # A generator per position: a client added at the end changes nobody else. From 1, because SeedSequence
        # pads with zeros: [seed, 1, 0] is [seed, 1].
        shuffled = job.rng(CHOOSE, i + 1).permutation(len(part))
        order = np.arange(len(part)) if job.spec.label_pick == "first" else shuffled
        mine = part[order]
        mask = np.zeros(len(part), bool)
        if i in who:
            mask = np.isin(mine, chosen) if job.rule.count is not None else select_in_client(job.rule, job.labels[mine])
            if job.rule.strict and job.rule.ratio != 0 and not mask.any():
                cause = f"client {i} would have no labelled sample"
                raise PartitionError("no_labelled", cause, "ask for more labels, or use fewer clients")
        rest = order[~mask]
        used = truncated(job.spec.unlabelled_ratio, len(rest))
        lists = [order[mask], rest[:used], rest[used:]]
        labelled, unlabelled, surplus = (part[np.sort(x) if keep_order else x] for x in lists)
        draft.labelled.append(labelled)
        draft.unlabelled.append(unlabelled)
        draft.unused[i] = len(surplus)
        draft.dropped.append(surplus)
    return draft


def natural_draft(job: Job, ids: Sequence[str]) -> Draft:
    """The clients as they came; labels as given, or hidden by a rule."""
    o = job.partition.options
    clients = without_small(given(ids, len(job.labels), o), job.labels, o)
    if job.spec.clients is not None and job.spec.clients != len(clients.parts):
        cause = f"clients={job.spec.clients}, but the data has {len(clients.parts)} natural clients"
        raise PartitionError("client_count", cause, "leave clients out")
    draft = natural_server_draft(job, clients) if job.spec.labels == "server" else natural_client_draft(job, clients)
    draft.names = clients.names
    draft.dropped.append(clients.dropped)
    if not len(draft.server) and not any(map(len, draft.labelled)):
        raise PartitionError("no_labels", "no client and no server has a labelled sample", "label some samples, or ask for more labels with label_ratio or label_per_class")
    for name, labelled, unlabelled in zip(clients.names, draft.labelled, draft.unlabelled):
        for held, side in ((labelled, "labelled"), (unlabelled, "unlabelled")):
            if len(held) < o[f"min_{side}"]:
                cause = f"client {name} has {len(held)} {side} samples, fewer than min_{side}={o[f'min_{side}']}"
                raise PartitionError(f"too_few_{side}", cause, "lower it, or leave the client out")
    return draft


def natural_client_draft(job: Job, clients: Given) -> Draft:
    if clients.server is not None:
        cause = f"some samples have the client id 'server' but labels={job.spec.labels}"
        raise PartitionError("server_pool", cause, "use labels=server, or rename that client")
    return joint_draft(job, clients.parts, keep_order=True)


def natural_server_draft(job: Job, clients: Given) -> Draft:
    """The server's labels are those of the id `server`, or are taken from the clients'."""
    pool = np.sort(np.concatenate(clients.parts)) if clients.server is None else clients.server
    server = pool[select_in_all(job.rule, job.labels[pool], job.classes, job.rng(CHOOSE))]
    parts = [part[~np.isin(part, server)] for part in clients.parts]
    for name, part in zip(clients.names, parts):
        if not len(part):
            cause = f"the server's labels leave client {name} without samples"
            raise PartitionError("empty_client", cause, "ask for fewer labels, or leave that client out")
    draft = joint_draft(replace(job, rule=Labelling(ratio=0.0)), parts, keep_order=True)
    draft.server = server
    if clients.server is not None:
        draft.dropped.append(pool[~np.isin(pool, server)])
    return draft


def reveal_all_labels(job: Job, draft: Draft) -> None:
    """labels=all: every known label is used."""
    for i, unlabelled in enumerate(draft.unlabelled):
        known = job.labels[unlabelled] >= 0
        draft.labelled[i] = np.concatenate([draft.labelled[i], unlabelled[known]])
        draft.unlabelled[i] = unlabelled[~known]


def labels_sha256(labels: Ints) -> str:
    """Tells one data set's labels from another's."""
    return hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()


def assemble(job: Job, draft: Draft) -> Federation:
    spec = job.spec
    if spec.labelled_as_unlabelled:
        if spec.labelled_as_unlabelled == "alias" and draft.aliases is None:
            cause = "labelled_as_unlabelled=alias, but labelled and unlabelled samples are not two pools here"
            raise PartitionError("no_alias", cause, "use true, or labels=clients with label_count and a partition of each pool")
        draft.unlabelled = [np.concatenate(both) for both in zip(draft.aliases or draft.labelled, draft.unlabelled)]
    held = zip(draft.labelled, draft.unlabelled)
    clients = tuple(Holding(x, u, draft.unused.get(i, 0)) for i, (x, u) in enumerate(held))
    about = {
        **asdict(spec),
        "clients": len(clients),
        "partition": str(job.partition),
        "unlabelled_partition": str(job.unlabelled),
        **job.rule.about(),
        "classes": job.classes,
        "samples": len(job.labels),
        "labels_sha256": labels_sha256(job.labels),
    }
    names = draft.names or tuple(str(i) for i in range(len(clients)))
    dropped = np.sort(np.concatenate([EMPTY, *draft.dropped]))
    return Federation(Holding(draft.server, EMPTY), clients, dropped, names, about, draft.tries)
