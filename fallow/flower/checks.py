"""What the server takes from a node: a reply of this run and this round, made of numbers, of the shape and size of the others'."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fallow.engine.clients import Reply, Samples
from fallow.engine.finite import sound
from fallow.engine.party import sent_by
from fallow.flower.messages import Parcel, Tree, Unreadable, unpacked
from fallow.methods.base import Update
from fallow.methods.state import Layout, State
from fallow.runs.origin import versions


class Refused(Exception):
    """Why an answer is left out, in words that follow `client 2 is left out: `."""


def opened(parcel: Parcel, layouts: Mapping[str, Layout], run: str, client: int, round: int, device: torch.device | str = "cpu") -> Tree:
    """An answer's content, if it is this client's, of this run and this round."""
    try:
        tree = unpacked(parcel, layouts, device)
        if "refused" in tree:
            raise Refused("; ".join(map(str, tree["refused"])))
        for what, wanted in (("run", run), ("client", client), ("round", round)):
            if tree[what] != wanted:
                told = {"run": "its answer is of another run", "client": f"it answers as client {tree[what]}", "round": f"its answer is of round {int(tree['round']) + 1}"}
                raise Refused(told[what])
        for name, version in versions().items():
            if name != "Python" and tree["versions"].get(name) != version:
                raise Refused(f"it has {name} {tree['versions'].get(name)}, and the server {version}")
    except Unreadable as e:
        raise Refused(f"its answer cannot be read: {e}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refused("its answer is no message of this protocol") from None
    return tree


def reply(tree: Tree, client: int, round: int) -> Reply:
    """A reply of which every number is one."""
    try:
        told = dict(tree["reply"])
        entries, samples = told.pop("update"), Samples(**told.pop("samples"))
        made = Reply(update=None if entries is None else Update(entries), samples=samples, **told)
        whole = all(type(n) is int and n >= 0 for n in (made.steps, samples.labelled, samples.all)) and (made.party, made.round) == (client, round)
        leaves = [*made.logs.values(), made.finite, *(entries or {}).values()]
        if not whole or not all(isinstance(t, Tensor | State) for t in leaves):
            raise TypeError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refused("its answer is no message of this protocol") from None
    if not bool(made.finite) or not bool(sound(entries or {}, made.optimizers)):
        raise Refused("its update has numbers that are NaN or infinite")
    if made.update is not None:
        sent_by(made.update, client)
    return made


def odd(replies: Mapping[int, Reply]) -> dict[int, str]:
    """Those whose entries are of another shape than most others', by client."""
    shapes = {client: _shapes(r) for client, r in sorted(replies.items())}
    found: dict[int, str] = {}
    for name in sorted({n for of in shapes.values() for n in of}):
        usual = Counter(of[name] for of in shapes.values() if name in of).most_common(1)[0][0]
        for client, of in shapes.items():
            if name in of and of[name] != usual:
                found.setdefault(client, f"its {name} is {of[name]}, where the others' is {usual}")
    return found


def _shapes(reply: Reply) -> dict[str, str]:
    entries = reply.update.entries if reply.update is not None else {}
    named = {**entries, **{f"log {k}": v for k, v in reply.logs.items()}}
    return {k: f"a State of {sorted(v.groups)}" if isinstance(v, State) else f"{list(v.shape)} {v.dtype}" for k, v in named.items()}


def long(replies: Mapping[int, Reply], sent: Mapping[int, Any], limit: float | None) -> dict[int, str]:
    """Those whose model moved so many times as far as the median one, by client."""
    lengths: dict[int, float] = {}
    for client, r in replies.items():
        new, old = r.update.get("model") if r.update is not None else None, sent.get(client)
        if isinstance(new, State) and isinstance(old, State):
            moved = new.groups["parameters"].double() - old.groups["parameters"].double()
            lengths[client] = float(torch.linalg.vector_norm(moved))
    moving = [n for n in lengths.values() if n]
    if limit is None or len(moving) < 2:
        return {}
    median = statistics.median_low(moving)
    return {
        c: f"its update is {n / median:.3g} times as long as the median one (update_norm_limit={limit:g})" for c, n in lengths.items() if n > limit * median
    }
