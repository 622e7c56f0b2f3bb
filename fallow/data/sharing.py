"""A labelled set that the server holds and shares with every client: split off before the rest is dealt out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fallow.data.dealing import EMPTY, Ints, PartitionError
from fallow.data.federate import Spec, federate, generator, labels_sha256
from fallow.data.holdings import Federation, Holding

SHARED = 5  # tag of the generator, beside those of federate


def federate_with_shared(
    labels: Ints, classes: int, spec: Spec, beta: float, alpha: float, natural: Sequence[str] | None = None
) -> Federation:
    """`federate` on what is left when beta times as much, even over the classes, is the server's; each client gets alpha of it.

    >>> labels = np.arange(1000) % 10
    >>> f = federate_with_shared(labels, 10, Spec(labels="all", clients=8), beta=0.25, alpha=0.5)
    >>> len(f.server.labelled), {len(c.labelled) for c in f.clients}
    (200, {200})
    """
    labels = np.asarray(labels, np.int64)
    rng = generator(spec.seed, SHARED)
    shared = _even(labels, classes, round(beta / (1 + beta) * len(labels)), rng)
    rest = np.setdiff1d(np.arange(len(labels)), shared)
    own = federate(labels[rest], classes, spec, None if natural is None else [natural[i] for i in rest])

    def received(part: Ints, client: int) -> Ints:
        some = generator(spec.seed, SHARED, client + 1).permutation(shared)[: int(alpha * len(shared) + 1e-9)]
        return np.concatenate([rest[part], some])

    clients = tuple(replace(c, labelled=received(c.labelled, k), unlabelled=rest[c.unlabelled]) for k, c in enumerate(own.clients))
    about = own.spec | {"share_beta": beta, "share_alpha": alpha, "samples": len(labels), "labels_sha256": labels_sha256(labels)}
    return replace(own, server=Holding(shared, EMPTY), clients=clients, dropped=rest[own.dropped], spec=about)


def _even(labels: Ints, classes: int, count: int, rng: np.random.Generator) -> Ints:
    """As many samples of each class, drawn."""
    of_class = [np.flatnonzero(labels == c) for c in range(classes)]
    each = count // classes
    short = next((c for c, own in enumerate(of_class) if len(own) < each), None)
    if short is not None:
        cause = f"the shared set needs {each} samples of each class, and class {short} has {len(of_class[short])}"
        raise PartitionError("too_few_shared", cause, "lower share_beta")
    return np.sort(np.concatenate([EMPTY, *(rng.permutation(own)[:each] for own in of_class)]))
