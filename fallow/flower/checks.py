"""What the server takes from a node: a reply of this run and this round, made of numbers, of the shape and size of the others'."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fallow.engine import judging
from fallow.engine.clients import Reply, Samples
from fallow.engine.finite import sound
from fallow.engine.logs import RESERVED
from fallow.engine.party import sent_by
from fallow.flower.messages import Tree, Unreadable, unpacked
from fallow.flower.parcel import Parcel
from fallow.flower.thin import whole
from fallow.methods.base import Update
from fallow.methods.sparse import Sparse
from fallow.methods.state import Layout, State
from fallow.runs.origin import versions

MOST = 10**8  # samples, steps, seconds: whoever tells of more makes it up
WORDS = 500
MISSING = "missing"


class Refused(Exception):
    """Why an answer is left out, in words that follow `client 2 is left out: `."""


def words(told: Any) -> str:
    """What a node says, fit for a terminal: one line, not endless, and no control characters."""
    text = "; ".join(map(str, told)) if isinstance(told, list) else str(told)
    return "".join(c if c.isprintable() else " " for c in text[:WORDS])


def is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number <= MOST


def opened(parcel: Parcel, layouts: Mapping[str, Layout], run: str, client: int, round: int, device: torch.device | str = "cpu") -> Tree:
    """An answer's content, if it is this client's, of this run and this round."""
    try:
        tree = unpacked(parcel, layouts, device)
        if "refused" in tree:
            raise Refused(words(tree["refused"]))
        for what, wanted in (("run", run), ("client", client), ("round", round)):
            if tree[what] != wanted:
                told = {"run": "its answer is of another run", "client": f"it answers as client {tree[what]}", "round": f"its answer is of round {int(tree['round']) + 1}"}
                raise Refused(told[what])
        for name, version in versions().items():
            if name != "Python" and tree["versions"].get(name) != version:
                raise Refused(f"it has {name} {words(tree['versions'].get(name))}, and the server {version}")
        if not 0 <= float(tree["seconds"]) <= MOST:
            raise ValueError
    except Unreadable as e:
        raise Refused(f"its answer cannot be read: {e}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refused("its answer is no message of this protocol") from None
    return tree


def reply(tree: Tree, client: int, round: int, sent: Mapping[str, Any], held: Samples, classes: int) -> Reply:
    """A reply of which every number is one, to a client that was sent this and held so many samples."""
    try:
        told = dict(tree["reply"])
        entries, samples = whole(told.pop("update"), sent.values()), Samples(**told.pop("samples"))
        made = Reply(update=None if entries is None else Update(entries), samples=samples, **told)
        counted = all(map(is_count, (made.steps, samples.labelled, samples.all))) and (made.party, made.round) == (client, round)
        logged = all(_is_log(name, t, classes) for name, t in made.logs.items())
        plain = (made.lr is None or math.isfinite(made.lr)) and all(type(name) is str for name in made.looked_at)
        things = [*(entries or {}).values(), *(t for of in made.optimizers.values() for t in of.values())]
        if not (counted and logged and plain and made.finite.numel() == 1 and all(isinstance(t, Tensor | State | int | float) for t in things)):
            raise TypeError
    except Unreadable as e:
        raise Refused(f"its answer cannot be read: {e}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise Refused("its answer is no message of this protocol") from None
    if not bool(made.finite) or not bool(sound(entries or {}, made.optimizers)):
        raise Refused("its update has numbers that are NaN or infinite")
    if samples.labelled > held.labelled or samples.all > held.all:
        had = f"and had {held.all} and {held.labelled} when the run was begun"
        raise Refused(f"it tells of {samples.all} samples, {samples.labelled} of them with labels, {had}")
    if made.update is not None:
        sent_by(made.update, client)
    return made


def _is_log(name: str, sums: Tensor, classes: int) -> bool:
    """Whether it becomes columns of its own."""
    if not judging.is_counted(name):
        return name not in RESERVED and sums.shape == (2,)
    length = judging.STEPS if name.endswith(judging.LEVELS) else judging.SHARES + classes
    return sums.shape == (length,) and not sums.is_floating_point() and not RESERVED & judging.columns(name, [1] * length).keys()


def odd(replies: Mapping[int, Reply]) -> dict[int, str]:
    """Those whose entries are of another shape than most others', or who alone send no model, by client; where none is the shape of most, all of them."""
    shapes = {client: _shapes(r) for client, r in sorted(replies.items())}
    found: dict[int, str] = {}
    for name in sorted({n for of in shapes.values() for n in of}):
        has = {c: of.get(name, MISSING) for c, of in shapes.items() if name in of or (name == "model" and replies[c].update is not None)}
        (usual, most), *others = Counter(has.values()).most_common()
        if others and others[0][1] == most:
            told = "; ".join(f"client {c}: {form}" for c, form in has.items())
            found |= {c: f"its {words(name)} is {form}, and no shape is that of most ({words(told)})" for c, form in has.items() if c not in found}
        else:
            found |= {c: f"its {words(name)} is {form}, where the others' is {usual}" for c, form in has.items() if form != usual and c not in found}
    return found


def _shapes(reply: Reply) -> dict[str, str]:
    entries = reply.update.entries if reply.update is not None else {}
    named = {**entries, **{f"log {k}": v for k, v in reply.logs.items()}, **{f"optimizer of {k}": v for k, v in reply.optimizers.items() if v}}
    return {k: _form(v) for k, v in named.items()}


def _form(thing: Any) -> str:
    if isinstance(thing, State):
        more = f" that travels sparse, with {_form(thing.changed)}" if isinstance(thing, Sparse) else ""
        return f"a State of {sorted(thing.groups)}{more}"
    if isinstance(thing, Tensor):
        return f"{list(thing.shape)} {thing.dtype}"
    if isinstance(thing, dict):
        return "{" + ", ".join(f"{k}: {_form(v)}" for k, v in thing.items()) + "}"
    if isinstance(thing, list | tuple):
        return "(" + ", ".join(map(_form, thing)) + ")"
    return type(thing).__name__


def long(replies: Mapping[int, Reply], sent: Mapping[int, Mapping[str, Any]], limit: float | None) -> dict[int, str]:
    """Those whose update is so many times as long as the median one, by client; its length is that of what it changes of all nets that were sent."""
    lengths = {client: _length(r, sent[client]) for client, r in replies.items()}
    moving = [n for n in lengths.values() if n]
    if limit is None or len(moving) < 2:
        return {}
    median = statistics.median_low(moving)
    return {
        c: f"its update is {n / median:.3g} times as long as the median one (update_norm_limit={limit:g})" for c, n in lengths.items() if n > limit * median
    }


def _length(reply: Reply, sent: Mapping[str, Any]) -> float:
    squares = 0.0
    for name, new in (reply.update.entries if reply.update is not None else {}).items():
        old = sent.get(name)
        if isinstance(new, State) and isinstance(old, State) and new.layout == old.layout and "parameters" in new.groups.keys() & old.groups.keys():
            squares += float((new.groups["parameters"].double() - old.groups["parameters"].double()).square().sum())
    return math.sqrt(squares)
