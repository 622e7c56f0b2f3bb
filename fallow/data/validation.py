"""Labels held out of training, on which a run sees how good its model is without touching the test set.

Each party holds out of its own, by a draw of its own, a share of each class as far as whole images allow; what rounding
takes from a class at one party it gets back at the next. Nothing else of a federation changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from fallow import draws
from fallow.data.dealing import EMPTY, Ints
from fallow.data.holdings import Federation, Holding
from fallow.errors import UserError

SERVER = -1
FEW = 50  # images, on which an accuracy moves in steps that one sees


def hold_out(federation: Federation, labels: Ints, amount: float, seed: int) -> Federation:
    """The federation with some of its labelled samples in `validation`, and in no other list: a share below 1, or a count.

    A party keeps a label at least, and one of each class as long as another has more.
    """
    parties = [(SERVER, federation.server), *enumerate(federation.clients)]
    totals = _totals(np.array([len(h.labelled) for _, h in parties]), amount, draws.key(seed, "validation"))
    owed = np.zeros(int(labels.max(initial=0)) + 1)  # by class: what rounding has taken so far
    held = {p: _chosen(h.labelled, labels, n, owed, draws.key(seed, "validation", p)) for (p, h), n in zip(parties, totals)}
    gone = np.concatenate([EMPTY, *held.values()])

    def without(party: int, h: Holding) -> Holding:
        labelled, unlabelled = (part[~np.isin(part, gone)] for part in (h.labelled, h.unlabelled))
        return Holding(labelled, unlabelled, h.unused, held[party])

    server, *clients = (without(party, h) for party, h in parties)
    spec = federation.spec | {"validation": amount}
    return dataclasses.replace(federation, server=server, clients=tuple(clients), spec=spec)


def _totals(sizes: Ints, amount: float, key: int) -> Ints:
    """How many each party holds out: of a share the nearest whole number, of a count its part by its labels."""
    caps = np.maximum(sizes - 1, 0)
    if amount < 1:
        totals = np.minimum((amount * sizes + 0.5).astype(np.int64), caps)
        if not totals.any():
            cause = f"validation={amount:g} holds no label out: the {_parties(sizes)} have at most {sizes.max(initial=0)} each"
            raise UserError(cause, "give a larger share, a count, or more labels")
        return totals
    if amount > caps.sum():
        cause = f"validation={amount:g} of {sizes.sum()} labels, of which {caps.sum()} can be held out (each party keeps one to train on)"
        raise UserError(cause, "hold out fewer, or label more")
    return apportioned(amount * sizes / sizes.sum(), int(amount), caps, key)


def _parties(sizes: Ints) -> str:
    count = int((sizes > 0).sum())
    return f"{count} parties with labels" if count > 1 else "labels"


def _chosen(mine: Ints, labels: Ints, count: int, owed: np.ndarray, key: int) -> Ints:
    """So many of a party's labelled samples, in its order: of each class its share and what is owed to it."""
    if not count:
        return EMPTY
    order = draws.permutation(key, len(mine)).numpy()
    classes, of = np.unique(labels[mine], return_inverse=True)
    sizes = np.bincount(of, minlength=len(classes))
    quotas, spare = count * sizes / len(mine) + owed[classes], sizes - 1
    wanted = apportioned(quotas, min(count, int(spare.sum())), spare, draws.key(key, "classes"))
    wanted = wanted + apportioned(quotas - wanted, count - int(wanted.sum()), sizes - wanted, draws.key(key, "last"))
    owed[classes] = np.clip(quotas - wanted, -1, 1)
    taken = np.concatenate([order[of[order] == c][:n] for c, n in enumerate(wanted)])
    return mine[np.sort(taken)]


def apportioned(quotas: np.ndarray, total: int, caps: Ints, key: int) -> Ints:
    """Whole numbers near the quotas that add up to `total`: the largest remainders are rounded up, ties by a draw."""
    tie = draws.permutation(key, len(quotas)).numpy()
    out = np.minimum(np.maximum(quotas, 0).astype(np.int64), caps)
    if out.sum() > total:
        out = np.zeros_like(out)
    for _ in range(total - int(out.sum())):
        free = np.flatnonzero(out < caps)
        rest = np.round(quotas[free] - out[free], 9)  # what is equal on paper is equal here
        out[free[np.lexsort((tie[free], -rest))[0]]] += 1
    return out


def sentences(federation: Federation) -> list[str]:
    """What is held out and by whom not, for who starts a run."""
    named = [("the server", federation.server), *zip(federation.names, federation.clients)]
    held = sum(len(h.validation) for _, h in named)
    if not held:
        return []
    trained = sum(len(h.labelled) for _, h in named)
    told = f"validation: {held:,} of {held + trained:,} labels are held out of training"
    if held < FEW:
        told += f"; on so few its accuracy moves in steps of {100 / held:.1f} points"
    few = [str(name) for name, h in named if len(h.labelled) and not len(h.validation)]
    return [told, *([_too_few(few)] if few else [])]


def _too_few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    who = f"{len(names)} clients have" if len(names) > 1 else "one client has"
    return f"validation: {who} too few labels to hold one out, and train on all of them ({shown})"
