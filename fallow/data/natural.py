"""Clients that the data came with: from an id per sample, or from lists, to one index list per client."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fallow.data.dealing import EMPTY, Ints, Options, PartitionError

SERVER = "server"  # the reserved id


class Given(NamedTuple):
    """Each client's samples in file order, the server's, and those of nobody."""

    names: tuple[str, ...]
    parts: list[Ints]
    server: Ints | None
    dropped: Ints


def ids_of_lists(lists: Mapping[Hashable, Sequence[int]], samples: int) -> list[Hashable]:
    """One client id per sample from a mapping id -> indices; None for a sample in no list."""
    ids: list[Hashable] = [None] * samples
    for name, indices in lists.items():
        if not len(indices):
            raise PartitionError("empty_client", f"client {name} has no sample", "leave it out")
        for i in indices:
            if not 0 <= i < samples:
                cause = f"client {name} has sample {i} but there are {samples}"
                raise PartitionError("bad_index", cause, f"use indices from 0 to {samples - 1}")
            if ids[i] is not None:
                cause = f"sample {i} is in clients {ids[i]} and {name}"
                raise PartitionError("overlap", cause, "give each sample to one client")
            ids[i] = name
    return ids


def given(ids: Sequence[Any], samples: int, o: Options) -> Given:
    """Ids sorted by type and value, so that they do not depend on the order of the file."""
    if len(ids) != samples:
        raise PartitionError("bad_index", f"{len(ids)} client ids for {samples} samples", "give one id per sample")
    nobody = [i for i, name in enumerate(ids) if name is None or name == "" or name != name]
    if nobody and o["unassigned"] == "error":
        cause = f"sample {nobody[0]} belongs to no client" + (f" (and {len(nobody) - 1} more)" if nobody[1:] else "")
        raise PartitionError("unassigned", cause, "give it one, or use natural,unassigned=drop")
    lists: dict[Any, list[int]] = {}
    for i in sorted(set(range(samples)) - set(nobody)):
        lists.setdefault(ids[i], []).append(i)
    server = lists.pop(SERVER, None)
    if not lists:
        raise PartitionError("empty", "no client has a sample", "give each sample the id of its client")
    order = sorted(lists, key=lambda name: (type(name).__name__, name))
    parts = [np.array(lists[name], np.int64) for name in order]
    held = None if server is None else np.array(server, np.int64)
    return Given(tuple(str(name) for name in order), parts, held, np.array(nobody, np.int64))


def without_small(clients: Given, labels: Ints, o: Options) -> Given:
    """Clients below `min_total` are an error, are dropped, or are merged, the smallest into the next smallest."""
    names, parts, least = list(clients.names), list(clients.parts), o["min_total"]
    dropped = [clients.dropped]
    while parts and min(map(len, parts)) < least:
        small = int(np.argmin([len(part) for part in parts]))
        if o["small_clients"] == "error" or len(parts) == 1:
            cause = f"client {names[small]} has {len(parts[small])} samples, fewer than {least}"
            raise PartitionError("empty_client", cause, "lower min_total, or use natural,small_clients=drop")
        name, part = names.pop(small), parts.pop(small)
        if o["small_clients"] == "drop":
            dropped.append(part)
            continue
        into = int(np.argmin([len(other) for other in parts]))
        names[into], parts[into] = f"{names[into]}+{name}", np.concatenate([parts[into], part])
    return Given(tuple(names), parts, clients.server, np.concatenate([EMPTY, *dropped]))
